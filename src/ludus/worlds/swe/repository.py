"""The repository of an episode: its layout, the merge of a policy's code into it, the session, and the tools."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Final

from ludus.envs.git_objects import git_folder
from ludus.rewards.code.pytest_archive import pytest_archive
from ludus.sandbox.base import MIB, Limits, Outcome, Sandbox, Snapshot
from ludus.tools.base import Tool, submit_tool
from ludus.tools.files import HOME, apply_patch_tool, files_tools
from ludus.tools.workspace import Workspace, shell_tool
from ludus.worlds.swe.guest_runner import ARCHIVE

DATA: Final = Path(str(files("ludus.worlds.swe") / "data"))
"""The folder of the files that ship with this world, among them the catalogue."""
_MAX_PATH: Final = 256


@cache
def package_text(path: str) -> str:
    """Return a text file of this package."""
    return (DATA.parent / path).read_text("utf-8")


@cache
def names_of(key: str) -> tuple[str, ...]:
    """Return a list of `data/names.toml`: names of files and folders by what they decide, and the kinds of bugs."""
    lists: dict[str, list[str]] = tomllib.loads(package_text("data/names.toml"))
    return tuple(lists[key])


def is_inside(path: str, folders: str) -> bool:
    """Return whether a path is inside a folder whose name is listed under this key (`names_of`)."""
    return not set(PurePosixPath(path).parts[:-1]).isdisjoint(names_of(folders))


def is_test(path: str) -> bool:
    """Return whether a path is a test file by pytest's conventions."""
    name = PurePosixPath(path).name
    named = name.endswith(".py") and (name.startswith("test_") or name.endswith(("_test.py", "_tests.py")))
    return named or name == "conftest.py" or is_inside(path, "test_folders")


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
        return inside and not is_test(path) and PurePosixPath(path).name not in names_of("hooks")


def layout_of(files: Iterable[str]) -> RepositoryLayout:
    """Return the layout of a repository: its outermost packages, and the modules next to them."""
    paths = sorted(files)
    folders = {str(PurePosixPath(path).parent) for path in paths if path.endswith("/__init__.py")}
    outermost = [one for one in sorted(folders) if str(PurePosixPath(one).parent) not in folders]
    packages = tuple(one for one in outermost if not _is_excluded(f"{one}/__init__.py"))
    loose = [path for path in paths if path.endswith(".py") and path.count("/") == path.startswith("src/")]
    modules = [path for path in loose if PurePosixPath(path).name not in names_of("scripts") and not _is_excluded(path)]
    return RepositoryLayout(packages, tuple(modules))


def _is_excluded(path: str) -> bool:
    return is_test(path) or is_inside(path, "other_folders")


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


@dataclass(eq=False)
class Checkout(Workspace):
    """The session of an episode, with a repository in its folder; snapshots contain the repository's files only."""

    paths: str = HOME

    async def run(self, code: str) -> Outcome:
        """Run commands in the shell, with the repository's code and pytest importable. Raises ToolError."""
        setup = package_text("data/setup.sh").replace("PATHS", self.paths)
        return await Workspace.run(self, f"{setup}{code}")

    async def snapshot(self) -> Snapshot:
        """Return the files except those of git and pytest. Raises ToolError."""
        held = await Workspace.snapshot(self)
        files = {path: content for path, content in held.files.items() if not path.startswith((".git/", ".tools/"))}
        return replace(held, files=files, executable=held.executable & files.keys())


def checkout(sandbox: Sandbox, tree: Mapping[str, bytes], layout: RepositoryLayout, seconds: float) -> Checkout:
    """Return a session with a repository of these files; `seconds` is the time limit of a command."""
    archive = {f".tools/{ARCHIVE}": pytest_archive()}
    files = {**tree, **git_folder(tree, "Import", ignored=".tools/\n"), **archive}
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
    places = [*(f"{HOME}/{root}".rstrip("/") for root in layout.roots), f"{HOME}/.tools/{ARCHIVE}"]
    return Checkout(sandbox, "shell", files, limits, ":".join(places))


def repair_tools(workspace: Checkout) -> tuple[Tool, ...]:
    """Return all tools of an episode."""
    about = "Run commands in a shell in the repository: git, python, pytest. Working folder and files are kept."
    shell = replace(shell_tool(workspace), description=about)
    return (shell, *files_tools(workspace), apply_patch_tool(workspace), submit_tool())
