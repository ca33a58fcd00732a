"""The sources of the packages: fetched by pip on demand, checked by their digest, read from one folder."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

from ludus.errors import UserError
from ludus.worlds.swe.catalogue import Package

_KEPT: Final = (".py", ".pyi", ".toml", ".cfg", ".ini", ".md", ".rst", ".txt", ".json", ".typed", ".html")
_ASIDE: Final = frozenset({"docs", "doc", "benchmarks", "benchmark", ".github", "requirements", "examples"})
_MOST_BYTES: Final = 600_000
"""Of one file: longer ones are tables, not code."""
_PIP_S: Final = 300.0


def default_folder() -> Path:
    """Where sources are kept unless a setting says otherwise."""
    return Path.home() / ".cache" / "ludus" / "swe"


def missing(packages: Iterable[Package], folder: Path) -> list[Package]:
    """The packages whose archives are not in the folder."""
    return [one for one in packages if not (folder / one.archive).is_file()]


def require(packages: Iterable[Package], folder: Path) -> None:
    """Raise UserError where sources are missing, with the command that fetches them."""
    absent = missing(packages, folder)
    if absent:
        names = sorted(one.name for one in absent)
        named = ", ".join(names if len(names) < 5 else [*names[:4], "..."])
        raise UserError(
            f"The sources of {len(absent)} packages ({named}) are not in {folder}.",
            "Fetch them with `ludus env prepare swe` (by pip, from the package index that it is set to).",
        )


def fetch(packages: Iterable[Package], folder: Path, tell: Callable[[str], None]) -> None:
    """Download what is missing. Raises UserError where pip fails or an archive is not the pinned one."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in missing(packages, folder):
        tell(f"{package.name} {package.version}")
        with tempfile.TemporaryDirectory() as room:
            archive = download(f"{package.name}=={package.version}", Path(room))
            if archive.name != package.archive or _digest(archive) != package.sha256:
                raise UserError(
                    f"{archive.name} is not the source of {package.name} {package.version} that is pinned.",
                    f"Expected: {package.archive}, SHA-256 {package.sha256}.",
                )
            (folder / archive.name).write_bytes(archive.read_bytes())


def download(requirement: str, folder: Path) -> Path:
    """One source distribution by pip. Raises UserError."""
    name = requirement.partition("==")[0]
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words += ["--no-binary", name, "--dest", str(folder), requirement]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PIP_S, check=False)
        said = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except (OSError, subprocess.TimeoutExpired) as error:
        said = [str(error)]
    found = sorted(folder.glob("*.tar.gz"))
    if said or not found:
        raise UserError(
            f"pip cannot fetch the source of {requirement}: {' '.join(said) or 'there is none'}.",
            "Is there a network, and a pip for this interpreter?",
        )
    return found[0]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def read_archive(path: Path, sha256: str = "") -> Mapping[str, bytes]:
    """The files of a source distribution that a repository of it has, without its outer folder.

    Raises UserError for an archive whose digest is another one.
    """
    if sha256 and _digest(path) != sha256:
        raise UserError(f"{path} is not the archive that is pinned.", "Remove it and fetch it again.")
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.isfile() and member.size <= _MOST_BYTES and is_kept(name):
                content = archive.extractfile(member)
                found[name] = content.read() if content is not None else b""
    return found


def is_kept(name: str) -> bool:
    """Whether a file of a distribution belongs into the repository of a task."""
    path = PurePosixPath(name)
    aside = bool(_ASIDE.intersection(path.parts[:-1])) or any(".egg-info" in part for part in path.parts)
    return bool(name) and not aside and (path.suffix in _KEPT or "/tests/" in f"/{name}")
