"""HTTP messages between the remote backend and `ludus sandbox serve`: JSON, with bytes as base64."""

from __future__ import annotations

import base64
import binascii
from dataclasses import asdict
from typing import Annotated

from pydantic import BaseModel, ConfigDict, EncodedBytes, EncoderProtocol, Field
from pydantic_core import PydanticCustomError

from ludus.sandbox.base import FileChange, Limits, Outcome, Process, SessionKind, Snapshot


class _Base64(EncoderProtocol):
    """Strict base64: invalid input is rejected, not skipped."""

    @classmethod
    def decode(cls, data: bytes) -> bytes:
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise PydanticCustomError("base64", "it must be base64") from error

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return base64.b64encode(value)

    @classmethod
    def get_json_format(cls) -> str:
        return "base64"


Base64Bytes = Annotated[bytes, EncodedBytes(encoder=_Base64)]
Files = dict[str, Base64Bytes]
_Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
_Number = Annotated[int, Field(ge=0, lt=2**63)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LimitsMessage(_Message):
    """The fields of `Limits`."""

    wall_s: _Seconds
    cpu_s: _Seconds
    memory_bytes: _Number
    processes: _Number
    open_files: _Number
    file_bytes: _Number
    disk_bytes: _Number
    disk_files: _Number
    output_bytes: _Number
    files_out: _Number
    files_out_bytes: _Number

    @classmethod
    def of(cls, limits: Limits) -> LimitsMessage:
        """Convert limits to a message."""
        return cls(**asdict(limits))

    def limits(self) -> Limits:
        """Convert the message to limits. Raises UserError."""
        return Limits(**self.model_dump())


class RunMessage(_Message):
    """One run: `source` (Python, base64 of UTF-8) or `argv`."""

    source: Base64Bytes | None = None
    argv: list[str] = []
    files: Files = {}
    stdin: Base64Bytes = b""
    limits: LimitsMessage


class SessionMessage(_Message):
    """A new session."""

    kind: SessionKind
    files: Files = {}
    limits: LimitsMessage


class CallMessage(_Message):
    """One call of a session."""

    code: Base64Bytes


class SnapshotMessage(_Message):
    """Files of a session."""

    files: Files
    executable: list[str] = []
    left_out: int = 0

    def snapshot(self) -> Snapshot:
        """Convert the message to a snapshot."""
        return Snapshot(self.files, frozenset(self.executable), self.left_out)


class ProcessMessage(_Message):
    """The fields of `Process`."""

    pid: int
    parent: int
    started: int
    state: str
    title: str
    program: str
    folder: str
    argv: tuple[str, ...]
    environment: dict[str, str]


class ProcessesMessage(_Message):
    """Processes of a session."""

    processes: list[ProcessMessage]

    @classmethod
    def of(cls, processes: tuple[Process, ...]) -> ProcessesMessage:
        """Convert processes to a message."""
        return cls(processes=[ProcessMessage(**asdict(one)) for one in processes])

    def told(self) -> tuple[Process, ...]:
        """Convert the message to processes."""
        return tuple(Process(**dict(one)) for one in self.processes)


class ChangeMessage(_Message):
    """The fields of `FileChange`."""

    write: Files
    executable: dict[str, bool]
    remove: list[str]

    def change(self) -> FileChange:
        """Convert the message to a change."""
        return FileChange(self.write, self.executable, frozenset(self.remove))


class OutcomeMessage(_Message):
    """The fields of `Outcome`."""

    stdout: Base64Bytes
    stderr: Base64Bytes
    exit: int | None
    signal: int | None
    timed_out: bool
    memory_exceeded: bool
    truncated: bool
    left_out_bytes: int
    files: Files
    cpu_s: float
    wall_s: float
    peak_memory_bytes: int

    @classmethod
    def of(cls, outcome: Outcome) -> OutcomeMessage:
        """Convert an outcome to a message."""
        return cls.model_construct(**asdict(outcome))

    def outcome(self) -> Outcome:
        """Convert the message to an outcome."""
        return Outcome(**dict(self))


class NamedSession(_Message):
    """Name of an opened session."""

    session: str


class Nothing(_Message):
    """An empty response."""


class Refusal(_Message):
    """Error response; `kind` is input, environment or token."""

    kind: str
    message: str
    hint: str = ""
