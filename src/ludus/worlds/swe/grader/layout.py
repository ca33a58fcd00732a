"""Which files of a repository are code and which are tests, and what of a policy's tree is believed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

HOOKS: Final = frozenset({"conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.py", "unittest.py"})
"""Modules that change how tests run: a repository's own stay as they were, others are left out."""
_LONGEST_PATH: Final = 256
_TEST_FOLDERS: Final = frozenset({"test", "tests", "testing"})
_ASIDE: Final = frozenset({"doc", "docs", "example", "examples", "benchmark", "benchmarks", "build", "tools"})
_SCRIPTS: Final = frozenset({"setup.py", "noxfile.py", "tasks.py", "conftest.py", "fabfile.py"})


def is_test(path: str) -> bool:
    """Whether a path is one of tests, by the habits of pytest."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    named = name.endswith(".py") and (name.startswith("test_") or name.endswith(("_test.py", "_tests.py")))
    return named or name == "conftest.py" or bool(_TEST_FOLDERS.intersection(parts[:-1]))


@dataclass(frozen=True, slots=True)
class RepositoryLayout:
    """Where a repository keeps its code: folders of packages, and modules that are one file."""

    packages: tuple[str, ...]
    modules: tuple[str, ...] = ()

    @property
    def roots(self) -> tuple[str, ...]:
        """The folders that go on `sys.path`; empty is the repository's own."""
        places = [str(PurePosixPath(place).parent) for place in (*self.packages, *self.modules)]
        return tuple(dict.fromkeys("" if place == "." else place for place in places))

    def is_code(self, path: str) -> bool:
        """Whether a policy may change this file, or make it."""
        inside = path in self.modules or path.startswith(tuple(f"{folder}/" for folder in self.packages))
        return inside and not is_test(path) and PurePosixPath(path).name not in HOOKS


def layout_of(files: Iterable[str]) -> RepositoryLayout:
    """The layout of a repository: its outermost packages, and modules beside them."""
    paths = sorted(files)
    folders = {str(PurePosixPath(path).parent) for path in paths if path.endswith("/__init__.py")}
    outermost = [one for one in sorted(folders) if str(PurePosixPath(one).parent) not in folders]
    packages = tuple(one for one in outermost if not _aside(f"{one}/__init__.py"))
    loose = [path for path in paths if path.endswith(".py") and path.count("/") == path.startswith("src/")]
    modules = [path for path in loose if PurePosixPath(path).name not in _SCRIPTS and not _aside(path)]
    return RepositoryLayout(packages, tuple(modules))


def _aside(path: str) -> bool:
    return is_test(path) or bool(_ASIDE.intersection(PurePosixPath(path).parts[:-1]))


def merged(pristine: Mapping[str, bytes], theirs: Mapping[str, bytes], layout: RepositoryLayout) -> dict[str, bytes]:
    """The repository with a policy's code: of its tree nothing but code is taken.

    A file of code is one that the repository has already, or a new Python module in its packages. What
    stands in the way of the repository's own files, or has a path too long to import, is left out.
    """
    kept = {path: content for path, content in pristine.items() if not layout.is_code(path)}
    folders = {str(folder) for path in kept for folder in PurePosixPath(path).parents}
    taken = {
        path: content
        for path, content in theirs.items()
        if layout.is_code(path)
        and (path in pristine or (path.endswith(".py") and len(path) <= _LONGEST_PATH))
        and path not in folders
        and kept.keys().isdisjoint(map(str, PurePosixPath(path).parents))
    }
    return kept | taken


def same_code(one: Mapping[str, bytes], other: Mapping[str, bytes], layout: RepositoryLayout) -> bool:
    """Whether two trees have the same code."""
    first, second = ({p: c for p, c in tree.items() if layout.is_code(p)} for tree in (one, other))
    return first == second
