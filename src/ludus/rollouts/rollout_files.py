"""Rollout files: `rollouts/step-000012.jsonl.gz`, gzip-compressed JSON lines, one trajectory per line.

A line is one object (`zcat step-000012.jsonl.gz | head -1 | jq .`), keys sorted, ASCII:

    schema      1; readers reject any other number
    step        the training step that requested the rollout
    group       the id of its task, shared by all lines of a group
    attempt     0, or more after retries
    outcome     outcome in the ledger: trained, masked, dropped, failed;   reason   its reason
    advantage   the trajectory's advantage, or null
    trajectory  task_id, sample, stop_reason, reward, rewards (by part), turn_rewards, leaf_rewards, shared_reward,
                agent_rewards, leaves (of a tree: messages, stop_reason, outcomes, rewards of each), anchors, tags,
                notes, failure
                messages   the chat in the OpenAI format, including the prompt; images are data URLs
                outcomes   tool calls: call_id, tool, status, output, truncated, cost, retried
                segments   kind, tokens, turn, parent, agent, logprobs, versions, finish_reason; policy if not ""

The task's truth and wall-clock times are not stored: `ToolOutcome.seconds` reads back as 0 and `Trajectory.timings` as
empty. Equal rollouts produce identical files. Numbers round-trip exactly; NaN and infinities are rejected.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast, get_args, get_origin, get_type_hints

from ludus.errors import StorageError, UserError
from ludus.images import ImageToken, restore_tokens
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.types import Message, Segment, Trajectory

SCHEMA = 1
_COMPRESSION = 6
_NUM_TOKENS = 2**31  # upper bound on vocabulary sizes
_ROUNDING = 0.01  # largest log-probability accepted as rounding (nats)
_TIME_FIELDS = {"seconds", "timings"}  # wall-clock times, which are not stored
_LATER_LISTS = ("anchors", "leaf_rewards", "leaves", "turn_progress")
_DEFAULTS_OF_OLD_FILES: Mapping[str, object] = {
    **{name: [] for name in _LATER_LISTS},
    "cost": 0.0,
    "retried": False,
    "shared_reward": False,
    "agent_rewards": {},
    "notes": {},
    "policy": "",
}
"""Fields missing in older files, with their defaults."""
_OMITTED = ("policy", "")
"""A field, and the value that is not written."""


NO_REWARD = "no reward"
"""Reason of a recorded session without feedback: its reward of 0 has no meaning."""
SESSION_PREFIX = "session-"
"""Beginning of the name of a recorded session, which is the task of a session that names none."""


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """Stored rollout: the trajectory, its outcome in the ledger, and its advantage if it has one."""

    step: int
    group: str
    outcome: RolloutOutcome
    reason: str
    trajectory: Trajectory
    advantage: float | None = None
    attempt: int = 0

    @property
    def key(self) -> RolloutKey:
        """The rollout's key in the ledger."""
        return RolloutKey(self.step, self.group, self.trajectory.sample, self.attempt)

    @property
    def is_scored(self) -> bool:
        """Whether the infrastructure did not fail and there is a reward."""
        return self.trajectory.failure is None and self.reason != NO_REWARD


def rollouts_path(run_folder: Path, step: int) -> Path:
    """Return the rollout file of a step."""
    return run_folder / "rollouts" / f"step-{step:06d}.jsonl.gz"


def times_path(run_folder: Path, step: int) -> Path:
    """Return the file with the wall-clock times of a step's episodes."""
    return run_folder / "rollouts" / f"step-{step:06d}.times.jsonl"


def token_values_path(run_folder: Path, step: int) -> Path:
    """Return the file with the values of a step's trained tokens (`run.token_values`)."""
    return run_folder / "token_values" / f"step-{step:06d}.jsonl.gz"


def write_rollouts(path: Path, records: Iterable[RolloutRecord]) -> None:
    """Write all records to one file, atomically; creates the folder.

    Raises StorageError if writing fails, and UserError for a non-finite number; `path` is then unchanged.
    """
    write_lines(path, map(rollout_line, records))


def append_rollout(path: Path, record: RolloutRecord) -> None:
    """Add a record to a file, which is replaced atomically; creates file and folder. Raises as `write_rollouts`."""
    line = gzip.compress(f"{rollout_line(record)}\n".encode("ascii"), _COMPRESSION, mtime=0)
    with replaced_file(path) as file:
        file.write((path.read_bytes() if path.is_file() else b"") + line)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write ASCII lines, gzip-compressed and atomically; creates the folder. Equal lines produce equal bytes.

    Raises StorageError if writing fails.
    """
    with (
        replaced_file(path) as raw,
        gzip.GzipFile(filename="", mode="wb", compresslevel=_COMPRESSION, fileobj=raw, mtime=0) as packed,
    ):
        for line in lines:
            packed.write(f"{line}\n".encode("ascii"))


def read_rollouts(path: Path, lines: Container[int] | None = None) -> Iterator[RolloutRecord]:
    """Yield the records of a file in order; with `lines`, only those of these lines, counted from 0.

    Raises UserError, with file and line, for a missing or truncated file, an invalid record, and another schema.
    """
    number = 0
    try:
        with gzip.open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise EOFError("the file is empty")
            for line in file:
                number += 1
                if lines is None or number - 1 in lines:
                    yield parse_rollout(json.loads(line, parse_constant=_reject_constant))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.", "Check the path and the step.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        text = f"{path} is damaged after line {number}: {error}."
        raise UserError(text, "The lines before it can be read.") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        text = f"{path}, line {number}, is not a rollout: {error}."
        raise UserError(text, "Was it written by this version of Ludus?") from error


def fsync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` on success (fsync, rename).

    If the block raises, `path` is unchanged and the temporary file is removed. An OSError becomes a StorageError.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync(path.parent)
    except OSError as error:
        raise StorageError(
            f"{path} could not be written: {error.strerror or error}.",
            "Free some space or choose another run folder; the previous file is unchanged.",
        ) from error


def truncate_lines(file: Path, step: int) -> None:
    """Remove from JSON lines an incomplete last line and those after `step`, which a resumed run writes again."""
    if not file.is_file():
        return
    lines = file.read_text("utf-8").splitlines(keepends=True)
    remaining = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    if remaining != lines:
        with replaced_file(file) as new:
            new.write("".join(remaining).encode())


def rollout_line(record: RolloutRecord) -> str:
    """Serialize a record to a line without newline. Raises UserError for a non-finite number."""
    data = {"schema": SCHEMA, **_codec(RolloutRecord).write(record)}
    try:
        return json.dumps(data, sort_keys=True, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise UserError(
            f"The rollout of {record.key} contains {_first_non_finite(data)}, which is not a finite number.",
            "Check the reward or the engine that returned it; the file was not written.",
        ) from error


def _first_non_finite(data: object, where: str = "") -> str:
    """Return the path of the first non-finite float, or ""."""
    if isinstance(data, float) and not math.isfinite(data):
        return f"{where.lstrip('.')}={data}"
    parts: Iterable[tuple[str, object]] = ()
    if isinstance(data, dict):
        parts = ((f"{where}.{name}", value) for name, value in data.items())
    elif isinstance(data, list):
        parts = ((f"{where}[{i}]", value) for i, value in enumerate(data))
    return next((found for name, value in parts if (found := _first_non_finite(value, name))), "")


def parse_rollout(value: object) -> RolloutRecord:
    """Parse the JSON value of a line and validate its trajectory.

    Raises ValueError, TypeError or KeyError with the reason.
    """
    data = dict(_object(value))
    schema = data.pop("schema", None)
    if schema != SCHEMA:
        raise ValueError(f"its schema is {schema!r}, this version reads {SCHEMA}")
    record: RolloutRecord = _codec(RolloutRecord).read(data)
    trajectory = _with_images(record.trajectory)
    _check_trajectory(trajectory)
    return record if trajectory is record.trajectory else replace(record, trajectory=trajectory)


def _with_images(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with the image tokens that belong to the images of its messages."""
    messages = [*trajectory.messages, *(message for leaf in trajectory.leaves for message in leaf.messages)]
    if not any(message.get("images") for message in messages):
        return trajectory
    try:
        segments = (replace(one, tokens=restore_tokens(one.tokens, messages)) for one in trajectory.segments)
        return replace(trajectory, segments=tuple(segments))
    except UserError as error:
        raise ValueError(error.message) from error


def _check_trajectory(trajectory: Trajectory) -> None:
    for number, segment in enumerate(trajectory.segments):
        if problem := _segment_error(segment, number):
            raise ValueError(f"segments[{number}] {problem}")
    for name, own in (("leaf_rewards", trajectory.leaf_rewards), ("leaves", trajectory.leaves)):
        if own and len(own) != len(trajectory.rows):
            raise ValueError(f"{name} has length {len(own)}, expected the number of leaves {len(trajectory.rows)}")
    if trajectory.leaves and not trajectory.leaf_rewards:
        raise ValueError("leaves are present without leaf_rewards")


def _segment_error(segment: Segment, number: int) -> str:
    """Return the error of segment `number`, or an empty string. A parent of -1 is the root."""
    if invalid := [t for t in segment.tokens if not (0 <= t < _NUM_TOKENS or isinstance(t, ImageToken))]:
        return f"contains {invalid[0]}, which is not a token id"
    if segment.parent is not None and not -1 <= segment.parent < number:
        return f"continues segments[{segment.parent}], which does not come before it"
    if segment.turn < 0:
        return f"has the turn {segment.turn}"
    for name, values in (("logprobs", segment.logprobs), ("versions", segment.versions)):
        if values and segment.kind != "action":
            return f"is {'an' if segment.kind == 'observation' else 'a'} {segment.kind} and has {name}"
        if values and len(values) != len(segment.tokens):
            return f"has {len(segment.tokens)} tokens and {len(values)} of {name}"
    if (highest := max(segment.logprobs, default=0.0)) > _ROUNDING:
        return f"has the log-probability {highest}, which is above 0"
    return ""


_Conversion = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Codec:
    """Conversion between values of a type and JSON data. `read` validates."""

    read: _Conversion
    write: _Conversion


@cache
def _codec(kind: object) -> _Codec:
    """Return the codec of a type annotation: a record, an enumeration, a container, or a plain value."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if isinstance(kind, type):
        return _record_codec(kind) if is_dataclass(kind) else _Codec(kind, attrgetter("value"))
    if origin is Literal:
        return _Codec(partial(_choice, args), _unchanged)
    if origin is Mapping:
        value = _codec(args[1])
        return _Codec(
            lambda data: {name: value.read(one) for name, one in _object(data).items()},
            lambda mapping: {name: value.write(one) for name, one in mapping.items()},
        )
    item = _codec(args[0])
    if origin is tuple:
        return _Codec(lambda data: tuple(map(item.read, data)), lambda items: list(map(item.write, items)))
    return _Codec(
        lambda data: None if data is None else item.read(data),
        lambda value: None if value is None else item.write(value),
    )


def _record_codec(record: type) -> _Codec:
    hints = get_type_hints(record)
    codecs = {f.name: _codec(hints[f.name]) for f in fields(record) if f.name not in _TIME_FIELDS}
    values_of = attrgetter(*codecs)
    later = {name: value for name, value in _DEFAULTS_OF_OLD_FILES.items() if name in codecs}

    def read(data: object) -> object:
        values: dict[str, object] = later | _object(data)
        if invalid := sorted(codecs.keys() ^ values.keys()):
            raise ValueError(f"fields missing or unknown in {record.__name__}: {', '.join(invalid)}")
        return record(**{name: codec.read(values[name]) for name, codec in codecs.items()})

    def write(value: object) -> dict[str, object]:
        pairs = zip(codecs.items(), values_of(value), strict=True)
        return {name: codec.write(one) for (name, codec), one in pairs if (name, one) != _OMITTED}

    return _Codec(read, write)


def _unchanged(value: object) -> object:
    return value


def _choice(choices: Sequence[object], value: object) -> object:
    if value not in choices:
        raise ValueError(f"{value!r} is not one of {', '.join(map(repr, choices))}")
    return value


def _message(data: object) -> Message:
    if not isinstance(data, dict) or not {"role", "content"} <= data.keys():
        raise ValueError("a message without role and content")
    return cast(Message, data)


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a finite number")


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"expected a JSON object, got {type(value).__name__}")
    return value


def _int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _float(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


_PLAIN: Mapping[object, _Codec] = {
    int: _Codec(_int, int),
    float: _Codec(_float, float),
    str: _Codec(_str, _unchanged),
    bool: _Codec(bool, _unchanged),
    Message: _Codec(_message, _unchanged),
}
