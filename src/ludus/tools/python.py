"""`python` and `shell`: run the model's programs in a sandbox.

If a program fails, the call still succeeds: traceback and exit code are the output.
"""

from __future__ import annotations

from typing import Final

from ludus.errors import UserError
from ludus.sandbox.base import Limits, Sandbox, SessionKind
from ludus.tools.base import Tool, ToolError, Traits, tool
from ludus.tools.workspace import WAIT_S, Workspace, report

_STATELESS_LIMITS: Final = Limits(files_out=0)


def python_tool(sandbox: Sandbox, limits: Limits = _STATELESS_LIMITS) -> Tool:
    """Create the stateless tool `python(code)`: each call runs in an empty folder."""

    async def python(code: str) -> str:
        """Run a Python program and see what it prints. Nothing is kept from one call to the next.

        Args:
            code: the program; print what you want to see.
        """
        try:
            outcome = await sandbox.run(code, limits=limits)
        except UserError as error:
            raise ToolError(error.message) from error
        text = report(outcome, limits, in_session=False)
        return text if text != "[no output]" else "[no output: print what you want to see]"

    return tool(timeout_s=limits.wall_s + WAIT_S, traits=Traits(idempotent=True))(python)


def python_session_tool(workspace: Workspace) -> Tool:
    """Create the tool `python(code)`, whose variables and files persist for the episode.

    Raises UserError if the workspace is not a Python session.
    """
    _check_kind(workspace, "python")

    async def python(code: str) -> str:
        """Run Python code; see what it prints and the value of its last line. Variables and files are kept.

        Args:
            code: the code to run.
        """
        outcome = await workspace.run(code)
        return report(outcome, workspace.limits, in_session=True)

    return tool(timeout_s=workspace.timeout_s)(python)


def shell_tool(workspace: Workspace) -> Tool:
    """Create the tool `shell(command)`, whose folder, variables and files persist for the episode.

    Raises UserError if the workspace is not a shell session.
    """
    _check_kind(workspace, "shell")

    async def shell(command: str) -> str:
        """Run commands in a shell and see what they print. The working folder and files are kept.

        Args:
            command: one or more lines for the shell.
        """
        outcome = await workspace.run(command)
        return report(outcome, workspace.limits, in_session=True)

    return tool(timeout_s=workspace.timeout_s)(shell)


def _check_kind(workspace: Workspace, kind: SessionKind) -> None:
    if workspace.kind != kind:
        raise UserError(
            f"This tool needs a workspace of kind {kind!r}, but got {workspace.kind!r}.",
            f'Create it with Workspace(sandbox, kind="{kind}").',
        )
