"""Read and check files of dialogues (labelled or not), texts, preference pairs and rollouts.

JSON lines (`.gz` if compressed), or a table (`ludus.envs.task_files`); see docs/use/data.md. A file has records of one
kind, in one of the formats of `formats`. Also the artifacts of a run folder: gzip-compressed JSON lines, one record per
line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from pydantic import TypeAdapter

from ludus.envs.task_files import is_table, read_table
from ludus.errors import StorageError, UserError
from ludus.rollouts.rollout_files import RolloutRecord, parse_rollout, rollout_line, write_lines
from ludus.tools.base import Tool
from ludus.training.datasets.formats import (
    as_object,
    as_text,
    as_words,
    check_turns,
    parse_json,
    read_messages,
    read_tools,
    read_train_flags,
    to_own_format,
)
from ludus.types import DataClass, Message

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def write_rows(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Write rows with equal keys as a dataset to a new folder. Raises UserError or StorageError."""
    if path.exists():
        raise UserError(f"{path} exists.", "Choose another folder.")
    try:
        from datasets import Dataset
    except ImportError as error:
        raise UserError(
            "Writing a dataset needs the package datasets.", "Install it: pip install 'ludus[datasets]'."
        ) from error
    try:
        Dataset.from_list(list(rows)).save_to_disk(str(path))
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error}.", "Remove the incomplete folder.") from error


T = TypeVar("T")


def write_records(path: Path, records: Iterable[DataclassInstance]) -> None:
    """Write records atomically; equal records produce equal files. Raises StorageError."""
    write_lines(path, (json.dumps(asdict(r), allow_nan=False, separators=(",", ":")) for r in records))


def load_records(path: Path, kind: type[T]) -> list[T]:
    """Read records of the dataclass `kind` as written by `write_records`. Raises StorageError."""
    parser = TypeAdapter(kind)
    try:
        with gzip.open(path, "rb") as lines:
            return [parser.validate_json(line) for line in lines]
    except (OSError, EOFError, zlib.error, ValueError) as error:
        cause = " ".join(str(error).split("\n")[:2])
        raise StorageError(f"{path} cannot be read: {cause}.", "Start a new run.") from error


DataKind = Literal["text", "dialogue", "labelled dialogue", "pair", "rollout"]

DATA_CLASSES: tuple[DataClass, ...] = get_args(DataClass)
_HOW = "docs/use/data.md has the formats; `ludus data check {path}` lists all problems."


@dataclass(frozen=True, slots=True)
class FileDialogue:
    """Dialogue with the tools of its prompt; `trains` marks the messages in the loss.

    `task` is the id of the task that it solves (empty: none), `data_class` its category if the file has one. A
    labelled dialogue has a `label`: whether its marked messages are desirable.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    trains: tuple[bool, ...] = ()
    task: str = ""
    data_class: DataClass | None = None
    label: bool | None = None


@dataclass(frozen=True, slots=True)
class FileText:
    """Plain text, trained on as a whole without a chat template; as a demonstration, one assistant message."""

    text: str
    data_class: DataClass | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        return (Message(role="assistant", content=self.text),)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return ()

    @property
    def trains(self) -> tuple[bool, ...]:
        return (True,)


@dataclass(frozen=True, slots=True)
class FilePair:
    """Prompt with two continuations: `chosen` is better than `rejected`."""

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


Record = FileDialogue | FileText | FilePair | RolloutRecord


@dataclass(frozen=True, slots=True)
class FileProblem:
    """Invalid record: its number in the file, from 1, and the fault as the end of a sentence."""

    line: int
    text: str


@dataclass(frozen=True)
class FileReport:
    """Contents of a file: records of one kind (None if none is valid), and all problems."""

    path: Path
    kind: DataKind | None
    num_records: int
    problems: tuple[FileProblem, ...]


def check_file(path: Path) -> FileReport:
    """Read all records of a file. Raises UserError if the file is missing or empty."""
    kind: DataKind | None = None
    num_records = 0
    problems = []
    for line, found in _records(path):
        if isinstance(found, FileProblem):
            problems.append(found)
            continue
        own = _kind(found)
        kind = kind or own
        if own == kind:
            num_records += 1
        else:
            problems.append(FileProblem(line, f"it is a {own}, and the file began with a {kind}"))
    if not num_records and not problems:
        raise UserError(f"{path} is empty.", "It needs one JSON object per line; docs/use/data.md has the formats.")
    return FileReport(path, kind, num_records, tuple(problems))


def read_dialogues(path: Path) -> list[FileDialogue]:
    """Return the dialogues of a file. Raises UserError, with the line, for another record."""
    return [found for found in _read_kind(path, "dialogue") if isinstance(found, FileDialogue)]


def read_sft_data(path: Path) -> list[FileDialogue | FileText]:
    """Return the texts of a file if the first record is one, else its dialogues. Raises UserError, with the line."""
    kind: DataKind = "text" if _first_kind(path) == "text" else "dialogue"
    return [found for found in _read_kind(path, kind) if isinstance(found, FileDialogue | FileText)]


def read_pairs(path: Path) -> list[FilePair]:
    """Return the pairs of a file. Raises UserError, with the line, for another record."""
    return [found for found in _read_kind(path, "pair") if isinstance(found, FilePair)]


def read_preferences(path: Path) -> list[FilePair | FileDialogue]:
    """Return the pairs of a file, or the labelled dialogues if it starts with one. Raises UserError, with the line."""
    kind: DataKind = "labelled dialogue" if _first_kind(path) == "labelled dialogue" else "pair"
    return [found for found in _read_kind(path, kind) if isinstance(found, FilePair | FileDialogue)]


def read_rollout_file(path: Path) -> list[RolloutRecord]:
    """Return the rollouts of a file. Raises UserError, with the line, for another record."""
    return [found for found in _read_kind(path, "rollout") if isinstance(found, RolloutRecord)]


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, all of the first record's kind. Raises UserError, with the line."""
    return list(_read_kind(path, _first_kind(path)))


def _first_kind(path: Path) -> DataKind:
    return next((_kind(record) for _, record in _records(path) if not isinstance(record, FileProblem)), "dialogue")


def _read_kind(path: Path, kind: DataKind) -> Iterator[Record]:
    empty = True
    for line, found in _records(path):
        if isinstance(found, FileProblem):
            fault = found.text
        elif (own := _kind(found)) != kind:
            unpaired = ", which preference.loss = kto or bco takes" if own == "labelled dialogue" else ""
            fault = f"it is a {own}{unpaired if kind == 'pair' else ''}"
        else:
            empty = False
            yield found
            continue
        raise UserError(f"{path}, line {line}, is not a {kind}: {fault}.", _HOW.format(path=path))
    if empty:
        raise UserError(f"{path} has no {kind}s.", _HOW.format(path=path))


def _kind(record: Record) -> DataKind:
    if isinstance(record, FileDialogue):
        return "dialogue" if record.label is None else "labelled dialogue"
    return "text" if isinstance(record, FileText) else "pair" if isinstance(record, FilePair) else "rollout"


def _records(path: Path) -> Iterator[tuple[int, Record | FileProblem]]:
    """Yield the numbered records of a file, FileProblem for invalid ones."""
    for line, data in _lines(path):
        if data == b"[":  # otherwise each further line would be reported
            text = "a list spans several lines: name the file .json, or write one record per line"
            yield line, FileProblem(line, text)
            return
        try:
            yield line, parse_record(parse_json(data, "it") if isinstance(data, bytes) else data)
        except (ValueError, TypeError, KeyError) as error:
            yield line, FileProblem(line, str(error))


def parse_record(data: object) -> Record:
    """Parse a record of any format. Raises ValueError, TypeError or KeyError with the fault."""
    seen, found = to_own_format(as_object(data, "it"))
    try:
        if "messages" in found:
            return _parse_dialogue(found)
        if "completion" in found:
            return _parse_completion(found)
        if "text" in found:
            return _parse_text(found)
        if "chosen" in found:
            return _parse_pair(found)
    except ValueError as error:
        raise ValueError(f"read as {seen}: {error}" if seen else str(error)) from None
    trajectory = found["trajectory"]
    if isinstance(trajectory, str):  # a table row, without an advantage that is None
        found = {"advantage": None, **found, "trajectory": parse_json(trajectory, "trajectory")}
    return parse_rollout(found if isinstance(trajectory, str) else data)


def row_of(record: Record) -> dict[str, object]:
    """Return a record as a table row for `parse_record`; rows of one kind have the same keys."""
    match record:
        case FileDialogue():
            marked = zip(record.messages, record.trains, strict=True)
            messages = [{**m, "train": trains} if m["role"] == "assistant" else m for m, trains in marked]
            row: dict[str, object] = {"messages": messages, "tools": _tools_text(record.tools)}
            if record.label is not None:
                return {**row, "label": record.label}
            return {**row, "task": record.task or None, "data_class": record.data_class}
        case FileText():
            return {"text": record.text, "data_class": record.data_class}
        case FilePair():
            sides = {"chosen": list(record.chosen), "rejected": list(record.rejected)}
            return {"prompt": list(record.prompt), **sides, "tools": _tools_text(record.tools)}
    line = json.loads(rollout_line(record))
    return {**line, "trajectory": json.dumps(line["trajectory"])}


def _tools_text(tools: Sequence[Tool]) -> str | None:
    return json.dumps([tool.schema for tool in tools]) if tools else None


def _parse_dialogue(data: dict[str, object]) -> FileDialogue:
    messages, trains = read_messages(data["messages"], "messages"), read_train_flags(data["messages"], "messages")
    tools = read_tools(data.get("tools"))
    check_turns(messages, tools, "messages")
    if not any(trains):
        has_action = any(message["role"] == "assistant" for message in messages)
        raise ValueError("no assistant message trains" if has_action else "it has no assistant message")
    task, label = as_text(data.get("task", ""), "task"), data.get("label")
    return FileDialogue(messages, tools, trains, task, _data_class(data), label if isinstance(label, bool) else None)


def _parse_text(data: dict[str, object]) -> FileText:
    text = as_text(data["text"], "text")
    if not text.strip():
        raise ValueError("text is empty")
    return FileText(text, _data_class(data))


def _parse_completion(data: dict[str, object]) -> FileDialogue:
    """Parse TRL's formats of prompt and completion, with a label or without."""
    if extra := sorted(data.keys() & {"chosen", "rejected"}):
        raise ValueError(f"it has {extra[0]} and completion, and is a pair or a labelled dialogue")
    label = data.get("label")
    if label is not None and not isinstance(label, bool):
        raise ValueError(f"label is {as_words(label)}, and must be true or false")
    tools, prompt = read_tools(data.get("tools")), _prompt(data.get("prompt"))
    completion = _parse_side(data["completion"], "completion", prompt, tools)
    trains = [False] * len(prompt) + [message["role"] == "assistant" for message in completion]
    task = as_text(data.get("task", ""), "task")
    return FileDialogue((*prompt, *completion), tools, tuple(trains), task, _data_class(data), label)


def _prompt(data: object) -> tuple[Message, ...]:
    """Parse a prompt: messages, or a text, which becomes a user message."""
    prompt = read_messages([{"role": "user", "content": data}] if isinstance(data, str) else data, "prompt")
    if not prompt:
        raise ValueError("prompt is empty")
    return prompt


def _data_class(data: dict[str, object]) -> DataClass | None:
    if (name := data.get("data_class")) is None:
        return None
    for known in DATA_CLASSES:
        if name == known:
            return known
    raise ValueError(f"data_class is {name!r}, and must be one of {', '.join(DATA_CLASSES)}")


def _parse_pair(data: dict[str, object]) -> FilePair:
    prompt = _prompt(data.get("prompt"))
    tools = read_tools(data.get("tools"))
    if prompt[-1]["role"] == "assistant":
        raise ValueError("prompt ends with an assistant message, which belongs in chosen and rejected")
    chosen, rejected = (_parse_side(data.get(name), name, prompt, tools) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same")
    return FilePair(prompt, chosen, rejected, tools)


def _parse_side(data: object, name: str, prompt: tuple[Message, ...], tools: tuple[Tool, ...]) -> tuple[Message, ...]:
    """Parse one continuation: a message, a list of messages, or a text, which becomes an assistant message."""
    if isinstance(data, str):
        data = {"role": "assistant", "content": data}
    items = [data] if isinstance(data, dict) else data
    messages = read_messages(items, name)
    for i, (message, trained) in enumerate(zip(messages, read_train_flags(items, name), strict=True)):
        if message["role"] == "assistant" and not trained:
            raise ValueError(f"{name}[{i}].train is false, and untrained messages belong in the prompt")
    if not messages or messages[0]["role"] != "assistant":
        raise ValueError(f"{name} does not begin with an assistant message")
    check_turns((*prompt, *messages), tools, f"prompt + {name}")
    return messages


def _lines(path: Path) -> Iterator[tuple[int, object]]:
    """Yield the numbered lines of a file, without blank ones, or the rows of a table."""
    if is_table(path):
        yield from read_table(path, "train")
        return
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line.strip()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.", "Check the path.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged after line {number}: {error}.", "Earlier lines are readable.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.", "Check the path.") from error
