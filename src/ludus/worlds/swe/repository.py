"""The repository of an episode: code files, a git folder built without git, pytest as an archive, and the tools.

The git folder has one commit on `main`, with the same bytes for the same tree: one pack with its index, references, and
a git index without stat data, so that the first git command compares contents (gitformat-pack). The archive has
pytest as source and bytecode, which any interpreter can read, without entry points and hence without plugins.
"""

from __future__ import annotations

import importlib.util
import io
import py_compile
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

from ludus.envs.git_objects import GitObjects, Kind, git_index, sha1
from ludus.errors import UserError
from ludus.sandbox.base import MIB, Limits, Sandbox, Snapshot
from ludus.tools.base import Tool, submit_tool, tool
from ludus.tools.files import HOME, files_tools
from ludus.tools.patch import apply_patch_tool
from ludus.tools.workspace import Workspace, report
from ludus.worlds.swe.guest_runner import ARCHIVE

HOOKS: Final = frozenset({"conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.py", "unittest.py"})
"""Modules that change how tests run: those of the repository stay unchanged, others are omitted."""
_MAX_PATH: Final = 256
_TEST_FOLDERS: Final = frozenset({"test", "tests", "testing"})
_EXCLUDED: Final = frozenset({"doc", "docs", "example", "examples", "benchmark", "benchmarks", "build", "tools"})
_SCRIPTS: Final = frozenset({"setup.py", "noxfile.py", "tasks.py", "conftest.py", "fabfile.py"})
_KINDS: Final[Mapping[Kind, int]] = {"commit": 1, "tree": 2, "blob": 3}
"""Object types of a pack."""
_WHO: Final = "Ludus <ludus@localhost> 1700000000 +0000"
_CONFIG: Final = (
    "[core]\n\trepositoryformatversion = 0\n\tfilemode = false\n\tbare = false\n"
    "[user]\n\tname = Developer\n\temail = developer@localhost\n"
)
_PACKAGES: Final = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
_SUBMODULES: Final = {
    "lexers": ("__init__", "_mapping", "python", "diff"),
    "formatters": ("__init__", "_mapping", "terminal"),
    "styles": ("__init__", "_mapping", "default"),
}
"""Modules that pytest imports from pygments' folders; others are omitted."""
_SETUP: Final = """
if [ -z "$__ready" ]; then
  export PYTHONPATH={paths} PYTHONDONTWRITEBYTECODE=1 PAGER=cat GIT_PAGER=cat
  command -v python >/dev/null || python() {{ python3 "$@"; }}
  pytest() {{ python3 -m pytest -p no:cacheprovider -o addopts= -W ignore "$@"; }}
  __ready=1
fi
"""


def is_test(path: str) -> bool:
    """Return whether a path is a test file by pytest's conventions."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    named = name.endswith(".py") and (name.startswith("test_") or name.endswith(("_test.py", "_tests.py")))
    return named or name == "conftest.py" or bool(_TEST_FOLDERS.intersection(parts[:-1]))


@dataclass(frozen=True, slots=True)
class RepositoryLayout:
    """Layout of a repository's code: folders of packages, and modules of one file."""

    packages: tuple[str, ...]
    modules: tuple[str, ...] = ()

    @property
    def roots(self) -> tuple[str, ...]:
        """Folders for `sys.path`; the empty string is the repository's root."""
        places = [str(PurePosixPath(place).parent) for place in (*self.packages, *self.modules)]
        return tuple(dict.fromkeys("" if place == "." else place for place in places))

    def is_code(self, path: str) -> bool:
        """Return whether a policy may change or create this file."""
        inside = path in self.modules or path.startswith(tuple(f"{folder}/" for folder in self.packages))
        return inside and not is_test(path) and PurePosixPath(path).name not in HOOKS


def layout_of(files: Iterable[str]) -> RepositoryLayout:
    """Return the layout of a repository: its outermost packages, and the modules next to them."""
    paths = sorted(files)
    folders = {str(PurePosixPath(path).parent) for path in paths if path.endswith("/__init__.py")}
    outermost = [one for one in sorted(folders) if str(PurePosixPath(one).parent) not in folders]
    packages = tuple(one for one in outermost if not _is_excluded(f"{one}/__init__.py"))
    loose = [path for path in paths if path.endswith(".py") and path.count("/") == path.startswith("src/")]
    modules = [path for path in loose if PurePosixPath(path).name not in _SCRIPTS and not _is_excluded(path)]
    return RepositoryLayout(packages, tuple(modules))


def _is_excluded(path: str) -> bool:
    return is_test(path) or bool(_EXCLUDED.intersection(PurePosixPath(path).parts[:-1]))


def merged(pristine: Mapping[str, bytes], theirs: Mapping[str, bytes], layout: RepositoryLayout) -> dict[str, bytes]:
    """Merge the code of a policy's tree into the repository; the tree's other files are ignored.

    Code is a file that the repository already has, or a new Python module in its packages. Files whose path conflicts
    with the repository's own files or is too long to import are omitted.
    """
    kept = {path: content for path, content in pristine.items() if not layout.is_code(path)}
    folders = {str(folder) for path in kept for folder in PurePosixPath(path).parents}
    taken = {
        path: content
        for path, content in theirs.items()
        if layout.is_code(path)
        and (path in pristine or (path.endswith(".py") and len(path) <= _MAX_PATH))
        and path not in folders
        and kept.keys().isdisjoint(map(str, PurePosixPath(path).parents))
    }
    return kept | taken


def git_files(files: Mapping[str, bytes], message: str, ignored: str = "") -> dict[str, bytes]:
    """Return the folder `.git` of a repository with these files in one commit; `ignored` are its exclude patterns."""
    objects = GitObjects()
    tree = objects.tree(files)
    commit = objects.add("commit", f"tree {tree.hex()}\nauthor {_WHO}\ncommitter {_WHO}\n\n{message}\n".encode()).hex()
    pack, index = _packed(objects)
    name = f".git/objects/pack/pack-{pack[-20:].hex()}"
    log = f"{'0' * 40} {commit} {_WHO}\tcommit (initial): {message}\n".encode()
    return {
        ".git/HEAD": b"ref: refs/heads/main\n",
        ".git/config": _CONFIG.encode(),
        ".git/refs/heads/main": f"{commit}\n".encode(),
        ".git/logs/HEAD": log,
        ".git/logs/refs/heads/main": log,
        ".git/info/exclude": ignored.encode(),
        ".git/index": git_index(files),
        f"{name}.pack": pack,
        f"{name}.idx": index,
    }


def _packed(objects: GitObjects) -> tuple[bytes, bytes]:
    """Return the pack of all objects, and its index (version 2)."""
    body = bytearray(b"PACK" + struct.pack(">II", 2, len(objects.held)))
    places: dict[bytes, tuple[int, int]] = {}
    for digest, (kind, content) in objects.held.items():
        head, rest = [_KINDS[kind] << 4 | len(content) & 15], len(content) >> 4  # type, then size, low bits first
        while rest:
            head[-1] |= 0x80
            head.append(rest & 0x7F)
            rest >>= 7
        entry = bytes(head) + zlib.compress(content)
        places[digest] = (zlib.crc32(entry), len(body))
        body += entry
    pack = bytes(body) + sha1(bytes(body))
    names = sorted(places)
    fanout = [sum(name[0] <= first for name in names) for first in range(256)]
    checksums, offsets = (b"".join(struct.pack(">I", places[name][i]) for name in names) for i in (0, 1))
    index = b"\xfftOc" + struct.pack(">257I", 2, *fanout) + b"".join(names) + checksums + offsets + pack[-20:]
    return pack, index + sha1(index)


@cache
def pytest_archive() -> bytes:
    """Return the archive, built once per process. Raises UserError if pytest is not installed."""
    found = io.BytesIO()
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as archive, tempfile.TemporaryDirectory() as temp_dir:
        compiled = Path(temp_dir, "module.pyc")
        for name, file in (module for package in _PACKAGES for module in _modules(package)):
            archive.writestr(_entry(name), file.read_bytes(), zipfile.ZIP_DEFLATED)
            py_compile.compile(str(file), str(compiled), name, doraise=True, invalidation_mode=mode)
            archive.writestr(_entry(f"{name}c"), compiled.read_bytes())
    return found.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))


def _modules(package: str) -> Iterator[tuple[str, Path]]:
    """Yield the modules of an installed package by their path in the archive."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(
            f"The world swe runs tests with pytest, and {package} is not installed.",
            "Install it: pip install 'ludus[swe]'.",
        )
    root = Path(spec.origin).parent
    if spec.submodule_search_locations is None:
        yield f"{package}.py", Path(spec.origin)
        return
    for file in sorted(root.rglob("*.py")):
        if file.stem in _SUBMODULES.get(file.parent.name, (file.stem,)):
            yield f"{package}/{file.relative_to(root).as_posix()}", file


@dataclass(eq=False)
class Checkout(Workspace):
    """The session of an episode, with a repository in its folder; snapshots contain the repository's files only."""

    paths: str = HOME

    async def snapshot(self) -> Snapshot:
        """Return the files except those of git and pytest. Raises ToolError."""
        held = await Workspace.snapshot(self)
        files = {path: content for path, content in held.files.items() if not path.startswith((".git/", ".tools/"))}
        return replace(held, files=files, executable=held.executable & files.keys())


def checkout(sandbox: Sandbox, tree: Mapping[str, bytes], layout: RepositoryLayout, seconds: float) -> Checkout:
    """Return a session with a repository of these files; `seconds` is the time limit of a command."""
    archive = {f".tools/{ARCHIVE}": pytest_archive()}
    files = {**tree, **git_files(tree, "Import", ignored=".tools/\n"), **archive}
    size = sum(map(len, files.values()))
    limits = Limits(
        wall_s=seconds,
        cpu_s=seconds,
        memory_bytes=1024 * MIB,
        processes=64,
        disk_bytes=64 * MIB + 2 * size,
        disk_files=4096 + 2 * len(files),
        files_out=2000 + 2 * len(files),
        files_out_bytes=16 * MIB + 2 * size,
    )
    places = [f"{HOME}/{root}".rstrip("/") for root in layout.roots]
    return Checkout(sandbox, "shell", files, limits, ":".join([*places, f"{HOME}/.tools/{ARCHIVE}"]))


def repair_tools(workspace: Checkout) -> tuple[Tool, ...]:
    """Return all tools of an episode."""
    setup = _SETUP.format(paths=workspace.paths)

    async def shell(command: str) -> str:
        """Run commands in a shell in the repository: git, python, pytest. Working folder and files are kept.

        Args:
            command: one or more lines for the shell.
        """
        outcome = await workspace.run(f"{setup}{command}")
        return report(outcome, workspace.limits, in_session=True)

    run_shell = tool(timeout_s=workspace.timeout_s)(shell)
    return (run_shell, *files_tools(workspace), apply_patch_tool(workspace), submit_tool())
