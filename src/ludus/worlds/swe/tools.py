"""The tools of an episode: a shell and files, on the repository of the task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from ludus.sandbox.base import MIB, Limits, Sandbox, Snapshot
from ludus.tools.base import Tool, tool
from ludus.tools.files import HOME, files_tools
from ludus.tools.patch import apply_patch_tool
from ludus.tools.submit import submit_tool
from ludus.tools.workspace import Workspace, report
from ludus.worlds.swe.grader.bundle import ARCHIVE, pytest_archive
from ludus.worlds.swe.grader.layout import RepositoryLayout
from ludus.worlds.swe.repository import git_files

_ASIDE: Final = (".git/", ".tools/")
"""What lies in the folder beside the repository's own files; only the shell shows it."""
_SETUP: Final = """
if [ -z "$__ready" ]; then
  export PYTHONPATH={paths} PYTHONDONTWRITEBYTECODE=1 PAGER=cat GIT_PAGER=cat
  command -v python >/dev/null || python() {{ python3 "$@"; }}
  pytest() {{ python3 -m pytest -p no:cacheprovider -o addopts= -W ignore "$@"; }}
  __ready=1
fi
"""


@dataclass(eq=False)
class Checkout(Workspace):
    """The session of an episode, with a repository in its folder; snapshots have nothing but its files."""

    paths: str = HOME

    async def snapshot(self) -> Snapshot:
        """The files without those of git and of pytest. Raises ToolError."""
        held = await Workspace.snapshot(self)
        files = {path: content for path, content in held.files.items() if not path.startswith(_ASIDE)}
        return replace(held, files=files, executable=held.executable & files.keys())


def checkout(sandbox: Sandbox, tree: Mapping[str, bytes], layout: RepositoryLayout, seconds: float) -> Checkout:
    """A session with a repository of these files; each command may take so many seconds."""
    tools = {f".tools/{ARCHIVE}": pytest_archive()}
    files = {**tree, **git_files(tree, "Import", ignored=".tools/\n"), **tools}
    limits = Limits(
        wall_s=seconds,
        cpu_s=seconds,
        memory_bytes=1024 * MIB,
        processes=64,
        disk_bytes=64 * MIB + 2 * sum(map(len, files.values())),
        disk_files=4096 + 2 * len(files),
        files_out=2000 + 2 * len(files),
        files_out_bytes=16 * MIB + 2 * sum(map(len, files.values())),
    )
    places = [f"{HOME}/{root}".rstrip("/") for root in layout.roots]
    return Checkout(sandbox, "shell", files, limits, ":".join([*places, f"{HOME}/.tools/{ARCHIVE}"]))


def repair_tools(workspace: Checkout) -> tuple[Tool, ...]:
    """All tools of an episode."""
    return (_shell_tool(workspace), *files_tools(workspace), apply_patch_tool(workspace), submit_tool())


def _shell_tool(workspace: Checkout) -> Tool:
    setup = _SETUP.format(paths=workspace.paths)

    async def shell(command: str) -> str:
        """Run commands in a shell in the repository: git, python, pytest. Working folder and files are kept.

        Args:
            command: one or more lines for the shell.
        """
        outcome = await workspace.run(f"{setup}{command}")
        return report(outcome, workspace.limits, in_session=True)

    return tool(timeout_s=workspace.timeout_s)(shell)
