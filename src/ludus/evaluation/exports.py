"""Write rollouts in the formats of other tools: Inspect logs, a Hugging Face dataset folder, and ShareGPT.

Records are streamed: memory holds one trajectory, and the summaries of one Inspect log. Unpaired surrogates are
replaced by U+FFFD, because the readers reject them.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from itertools import chain, islice
from pathlib import Path
from typing import IO, NamedTuple

from ludus.images import describe_content
from ludus.rollouts.rollout_files import RolloutRecord, replaced_file
from ludus.types import Message, MessageToolCall

MAX_SAMPLES = 2000
"""Maximum number of rollouts of an Inspect log."""
_SUMMARY_CHARACTERS = 1000
Fields = dict[str, object]


class ScoredRecord(NamedTuple):
    """A stored rollout and whether it solved its task."""

    record: RolloutRecord
    solved: bool


class LogHeader(NamedTuple):
    """Name of the task of an Inspect log, name of the model, and creation time (ISO 8601 with time zone)."""

    task: str
    model: str
    created: str


def json_text(data: object) -> str:
    """Return JSON text that can be encoded. Raises ValueError for numbers that are not finite."""
    return encodable(json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def encodable(text: str) -> str:
    """Return the text with U+FFFD in place of each unpaired surrogate."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def write_inspect(folder: Path, records: Iterable[ScoredRecord], header: LogHeader) -> int:
    """Write Inspect logs of at most `MAX_SAMPLES` rollouts; return the number of rollouts. Raises StorageError."""
    stream, number, written = iter(records), 0, 0
    while part := next(stream, None):
        number += 1
        path = folder / f"part-{number:04d}.eval"
        with replaced_file(path) as raw:
            count, first, last = _write_log(raw, chain([part], islice(stream, MAX_SAMPLES - 1)), header, number)
        path.replace(folder / f"part-{number:04d}-steps-{first:06d}-{last:06d}.eval")
        written += count
    return written


def _write_log(raw: IO[bytes], records: Iterable[ScoredRecord], header: LogHeader, number: int) -> tuple[int, int, int]:
    name = hashlib.sha256(f"{header}/{number}".encode()).hexdigest()[:22]
    spec: Fields = {"eval_id": name, "run_id": name, "task_id": name, "created": header.created}
    spec |= {"task": header.task, "model": header.model, "dataset": {}, "config": {}}
    keys, summaries, steps = set[tuple[str, int]](), list[Fields](), list[int]()
    values: dict[str, dict[str, list[float]]] = {}
    start: Fields = {"version": 2, "eval": spec, "plan": {"name": "plan", "steps": []}}
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as log:
        log.writestr("_journal/start.json", json_text(start))
        for scored in records:
            name, epoch = json.loads(json_text(scored.record.group)), scored.record.trajectory.sample + 1
            while (name, epoch) in keys:  # the task occurs in several steps, or the rollout was retried
                epoch += 1
            keys.add((name, epoch))
            steps.append(scored.record.step)
            sample, summary = inspect_sample(scored, epoch)
            log.writestr(f"samples/{name}_epoch_{epoch}.json", json_text(sample))
            summaries.append(summary)
            for score, value in _scores(scored).items():
                values.setdefault(score, {}).setdefault(scored.record.group, []).append(value)
        ids = sorted({name for name, _ in keys})
        spec["dataset"] = {"name": header.task, "samples": len(ids), "sample_ids": ids}
        spec["config"] = {"epochs": max(epoch for _, epoch in keys)}
        log.writestr("summaries.json", json_text(summaries))
        log.writestr("reductions.json", json_text([_reduction(*item) for item in values.items()]))
        num = len(summaries)
        results = {
            "total_samples": num,
            "completed_samples": num,
            "scores": [_result(*item) for item in values.items()],
        }
        log.writestr("header.json", json_text({**start, "status": "success", "results": results}))
    return len(summaries), min(steps), max(steps)


def _scores(scored: ScoredRecord) -> dict[str, float]:
    values = {"success": float(scored.solved), "reward": scored.record.trajectory.reward}
    return values | {f"reward/{name}": value for name, value in scored.record.trajectory.rewards.items()}


def inspect_sample(scored: ScoredRecord, epoch: int) -> tuple[Fields, Fields]:
    """Return a rollout as a sample of an Inspect log, with a score per reward part, and its shortened summary."""
    record, trajectory, values = scored.record, scored.record.trajectory, _scores(scored)
    messages = [inspect_message(message) for message in trajectory.messages]
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    last = [{"message": m, "stop_reason": "stop"} for m in messages[first:] if m["role"] == "assistant"][-1:]
    metadata: Fields = {"step": record.step, "sample": trajectory.sample, "attempt": record.attempt}
    metadata |= {"stop_reason": trajectory.stop_reason.value, "outcome": record.outcome.value}
    metadata |= {"reason": record.reason, "advantage": record.advantage}
    metadata |= {"failed_part": trajectory.failure.part} if trajectory.failure else {}
    metadata["tags"] = dict(trajectory.tags)
    answer = trajectory.answer or None
    sample = {
        "id": record.group,
        "epoch": epoch,
        "input": messages[:first],
        "target": "",
        "messages": messages,
        "output": {"model": "", "choices": last},
        "scores": {name: {"value": value, "answer": answer} for name, value in values.items()},
        "metadata": metadata,
    }
    summary = {
        "id": record.group,
        "epoch": epoch,
        "input": str(messages[first - 1]["content"])[:_SUMMARY_CHARACTERS] if first else "",
        "target": "",
        "metadata": {key: metadata[key] for key in ("step", "stop_reason", "outcome", "advantage")},
        "scores": {name: {"value": value} for name, value in values.items()},
        "completed": True,
    }
    return sample, summary


def inspect_message(message: Message) -> Fields:
    """Return a chat message of Inspect; reasoning becomes a part of the content."""
    content: object = describe_content(message)
    if thought := message.get("reasoning_content"):
        content = [{"type": "reasoning", "reasoning": thought}, {"type": "text", "text": content}]
    found: Fields = {"role": message["role"], "content": content}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_inspect_call(call) for call in calls]
    if message["role"] == "tool":
        found |= {"tool_call_id": message.get("tool_call_id"), "function": message.get("name")}
    return found


def _inspect_call(call: MessageToolCall) -> Fields:
    function = call["function"]
    found: Fields = {"id": call["id"], "function": function["name"], "type": "function"}
    try:
        return {**found, "arguments": call_arguments(call)}
    except ValueError as error:
        return {**found, "arguments": {"text": function["arguments"]}, "parse_error": str(error)}


def call_arguments(call: MessageToolCall) -> Fields:
    """Return the arguments of a call. Raises ValueError if they are not a JSON object of finite numbers."""
    try:
        value = json.loads(call["function"]["arguments"])
        json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError("the arguments are nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("the arguments are not an object")
    return value


def _reduction(score: str, by_task: Mapping[str, Sequence[float]]) -> Fields:
    samples = [{"sample_id": task, "value": sum(v) / len(v)} for task, v in by_task.items()]
    return {"scorer": score, "reducer": "mean", "samples": samples}


def _result(score: str, by_task: Mapping[str, Sequence[float]]) -> Fields:
    values = list(chain.from_iterable(by_task.values()))
    mean = {"name": "mean", "value": sum(values) / len(values)}
    return {"name": score, "scorer": score, "scored_samples": len(values), "metrics": {"mean": mean}}


_MESSAGE_KEYS = ("role", "content", "reasoning_content", "name", "tool_call_id", "tool_calls")


def write_hf_dataset(folder: Path, records: Iterable[ScoredRecord]) -> int:
    """Write a folder for `datasets.load_dataset`; return the number of rollouts. Raises StorageError."""
    written = _write_lines(folder / "data" / "train.jsonl", map(dataset_row, records))
    with replaced_file(folder / "README.md") as file:
        file.write(resources.files(__package__).joinpath("dataset_card.md").read_bytes())
    return written


def dataset_row(scored: ScoredRecord) -> Fields:
    """Return the row of a rollout; all rows have the same keys."""
    record, trajectory = scored.record, scored.record.trajectory
    return {
        "task_id": trajectory.task_id,
        "step": record.step,
        "group": record.group,
        "sample": trajectory.sample,
        "messages": [{key: message.get(key) for key in _MESSAGE_KEYS} for message in trajectory.messages],
        "reward": trajectory.reward,
        "rewards": [{"name": name, "value": value} for name, value in trajectory.rewards.items()],
        "success": scored.solved,
        "stop_reason": trajectory.stop_reason.value,
        "advantage": record.advantage,
        "outcome": record.outcome.value,
    }


def write_sharegpt(path: Path, records: Iterable[ScoredRecord], accepts: Callable[[object], object]) -> int:
    """Write ShareGPT JSON lines, without rollouts that `accepts` or conversion rejects; return their number."""

    def rows() -> Iterator[Fields]:
        for scored in records:
            with suppress(ValueError):
                turns = [sharegpt_turn(message) for message in scored.record.trajectory.messages]
                accepts(json.loads(json_text({"conversations": turns})))
                yield {"conversations": turns}

    return _write_lines(path, rows())


def sharegpt_turn(message: Message) -> Fields:
    """Return a turn of ShareGPT: calls without text, or text. ValueError for arguments that are not a JSON object."""
    if calls := message.get("tool_calls"):
        found = [{"name": call["function"]["name"], "arguments": call_arguments(call)} for call in calls]
        return {"from": "function_call", "value": json_text(found)}
    roles = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}
    thought = message.get("reasoning_content")
    text = f"<think>\n{thought}\n</think>\n\n{message['content']}" if thought else message["content"]
    return {"from": roles[message["role"]], "value": text}


def _write_lines(path: Path, rows: Iterable[Fields]) -> int:
    written = 0
    with replaced_file(path) as file:
        for row in rows:
            file.write(f"{json_text(row)}\n".encode())
            written += 1
    return written
