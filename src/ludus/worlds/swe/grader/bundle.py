"""pytest as one file: what runs tests in a sandbox that sees no package of the host.

The archive holds sources and bytecode, so that any interpreter reads it and the host's own reads it fast.
It holds pytest with what it needs and nothing else: no entry points, so that no further plugin loads.
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

ARCHIVE: Final = "pytest.zip"
_PACKAGES: Final = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
_CHOSEN: Final = {
    "lexers": ("__init__", "_mapping", "python", "diff"),
    "formatters": ("__init__", "_mapping", "terminal"),
    "styles": ("__init__", "_mapping", "default"),
}
"""Of pygments' folders only what pytest imports."""
_DATE: Final = (2020, 1, 1, 0, 0, 0)


@cache
def pytest_archive() -> bytes:
    """The archive, made once in a process. Raises UserError where pytest is not installed."""
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as archive, tempfile.TemporaryDirectory() as room:
        compiled = Path(room, "module.pyc")
        for package in _PACKAGES:
            for name, file in _modules(package):
                archive.writestr(zipfile.ZipInfo(name, _DATE), file.read_bytes(), zipfile.ZIP_DEFLATED)
                mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
                py_compile.compile(str(file), str(compiled), name, doraise=True, invalidation_mode=mode)
                archive.writestr(zipfile.ZipInfo(f"{name}c", _DATE), compiled.read_bytes())
    return found.getvalue()


def _modules(package: str) -> Iterator[tuple[str, Path]]:
    """The modules of a package that is installed here, by their place in the archive."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(f"The world swe runs tests with pytest, and {package} is not installed.", HINT)
    if spec.submodule_search_locations is None:
        yield f"{package}.py", Path(spec.origin)
        return
    root = Path(spec.origin).parent
    for file in sorted(root.rglob("*.py")):
        inside = file.relative_to(root).as_posix()
        if file.stem in _CHOSEN.get(file.parent.name, (file.stem,)):
            yield f"{package}/{inside}", file


HINT: Final = "Install it: pip install 'ludus[swe]'."
