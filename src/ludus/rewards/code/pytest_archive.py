"""pytest as an archive that graders send to a sandbox, which has no packages of the host.

It has source and bytecode, which any interpreter can read, without entry points and hence without plugins.
"""

from __future__ import annotations

import importlib.util
import io
import py_compile
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from ludus.errors import UserError

_PACKAGES: Final = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
_SUBMODULES: Final = {
    "lexers": ("__init__", "_mapping", "python", "diff"),
    "formatters": ("__init__", "_mapping", "terminal"),
    "styles": ("__init__", "_mapping", "default"),
}
"""Modules that pytest imports from pygments' folders; others are omitted."""


@cache
def pytest_archive() -> bytes:
    """Return the archive, built once per process. Raises UserError if pytest is not installed."""
    found = io.BytesIO()
    date = (2020, 1, 1, 0, 0, 0)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as archive, tempfile.TemporaryDirectory() as temp_dir:
        compiled = Path(temp_dir, "module.pyc")
        for name, file in (module for package in _PACKAGES for module in _modules(package)):
            archive.writestr(zipfile.ZipInfo(name, date), file.read_bytes(), zipfile.ZIP_DEFLATED)
            py_compile.compile(str(file), str(compiled), name, doraise=True, invalidation_mode=mode)
            archive.writestr(zipfile.ZipInfo(f"{name}c", date), compiled.read_bytes())
    return found.getvalue()


def _modules(package: str) -> Iterator[tuple[str, Path]]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(f"Tests run with pytest, but {package} is not installed.", "Install it: pip install pytest.")
    root = Path(spec.origin).parent
    if spec.submodule_search_locations is None:
        yield f"{package}.py", Path(spec.origin)
        return
    for file in sorted(root.rglob("*.py")):
        if file.stem in _SUBMODULES.get(file.parent.name, (file.stem,)):
            yield f"{package}/{file.relative_to(root).as_posix()}", file
