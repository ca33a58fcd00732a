"""HTTP messages between the remote backend and `ludus sandbox serve`: JSON, with bytes as base64.

Dataclasses of the sandbox interface are encoded by their fields.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from ludus.sandbox.base import FileChange, Limits, Outcome, Process, SessionKind, Snapshot


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class RunMessage(_Message):
    """One run: `source` (Python, UTF-8) or `argv`."""

    source: bytes | None = None
    argv: list[str] = []
    files: dict[str, bytes] = {}
    stdin: bytes = b""
    limits: Limits


class SessionMessage(_Message):
    """A new session."""

    kind: SessionKind
    files: dict[str, bytes] = {}
    limits: Limits


class SessionCreated(_Message):
    """Id of a new session."""

    session: str


class CallMessage(_Message):
    """One call of a session."""

    code: bytes


class OutcomeMessage(_Message):
    """The outcome of a run or call."""

    outcome: Outcome


class SnapshotMessage(_Message):
    """Files of a session."""

    snapshot: Snapshot


class ProcessesMessage(_Message):
    """Processes of a session."""

    processes: tuple[Process, ...]


class ChangeMessage(_Message):
    """Changes to files of a session."""

    change: FileChange


class EmptyMessage(_Message):
    """A request or response without content."""


class ErrorMessage(_Message):
    """Error response; `kind` is input, environment or token."""

    kind: str
    message: str
    hint: str = ""
