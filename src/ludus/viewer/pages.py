"""Data of the viewer's pages as JSON values."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.diagnostics.trackers import read_metrics
from ludus.engines.base import common_prefix
from ludus.errors import UserError
from ludus.evaluation.probes.common import stored_reports
from ludus.evaluation.stats import cohens_kappa, paired_difference
from ludus.images import describe_content
from ludus.rollouts.rollout_files import RolloutRecord, times_path, token_values_path
from ludus.rollouts.trees import RowStart, has_rows, row_starts
from ludus.training.run.run_dir import is_running, kind_of, policy_path
from ludus.types import Message, Segment, Trajectory
from ludus.viewer.index import RolloutIndex, Row

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LABELS = ("right", "wrong")
MAX_NOTE = 2000
_KEY = ("source", "step", "task", "sample", "attempt")
_COMPARED = ("solved", "reward", "first")


class RunPages:
    """The pages of one run."""

    def __init__(self, index: RolloutIndex) -> None:
        self.index, self.folder = index, index.folder

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the policy; None if it is unknown."""
        from tokenizers import Tokenizer

        folder = policy_path(self.folder)
        path = None if folder is None else folder / "tokenizer.json"
        return Tokenizer.from_file(str(path)) if path is not None and path.is_file() else None

    def run(self) -> Row:
        """Return name and state of the run, and the values that filters can take."""
        values = {name: self._distinct(name) for name in ("source", "stop", "outcome")}
        steps = self.index.query("SELECT step, count(*) AS n FROM rollouts WHERE source = '' GROUP BY step")
        tools = {name for text in self._distinct("tools") for name in str(text).split("|") if name}
        total = self.index.query("SELECT count(*) AS n FROM rollouts")[0]["n"]
        state = {"name": self.folder.path.resolve().name, "kind": kind_of(self.folder), "total": total}
        more = {"running": is_running(self.folder), "steps": [row["step"] for row in steps], "tools": sorted(tools)}
        return {**state, **more, **values}

    def _distinct(self, column: str) -> list[object]:
        rows = self.index.query(f"SELECT DISTINCT {column} AS value FROM rollouts ORDER BY value")
        return [row["value"] for row in rows]

    def rollout(self, number: int) -> Row:
        """Return a rollout: messages, tokens of each segment, rows, rewards, and the numbers of its group."""
        row, record = self.index.record(number)
        one = record.trajectory
        trained = {} if row["source"] else self._token_values(row)
        paths = [
            {
                "messages": list(map(_shown_message, path.messages)),
                "reward": path.reward,
                "stop": path.stop_reason.value,
            }
            for path in one.attempts()
        ]
        failure = None if one.failure is None else {"part": one.failure.part, "error": one.failure.error}
        return {
            "row": row,
            "label": self.labels().get(_key(row)),
            "reason": record.reason,
            "rewards": dict(one.rewards),
            "turn_rewards": list(one.turn_rewards),
            "tags": dict(one.tags),
            "failure": failure,
            "paths": paths,
            "outcomes": [{"tool": o.tool, "status": o.status.value, "output": o.output} for o in one.outcomes],
            "segments": [self._segment(s) | {"trained": trained.get(str(i))} for i, s in enumerate(one.segments)],
            "rows": [self._row_start(start) for start in row_starts(one)] if has_rows(one) else [],
            "group": [member["id"] for member in self._group_rows(row)],
        }

    def _row_start(self, start: RowStart) -> Row:
        sides = {"before": "".join(self.token_texts(start.before)), "after": "".join(self.token_texts(start.after))}
        return {"of": start.of, "shared": start.shared, "recorded": start.recorded, **sides}

    def _token_values(self, row: Row) -> Row:
        """Return the stored values of the trained tokens by segment number; empty without `run.token_values`."""
        path = token_values_path(self.folder.path, int(str(row["step"])))
        key = {name: row[name] for name in _KEY[2:]}
        with gzip.open(path, "rt", encoding="utf-8") if path.is_file() else nullcontext(()) as lines:
            found = (line for line in map(json.loads, lines) if key.items() <= line.items())
            return next((line["segments"] for line in found), {})

    def _segment(self, segment: Segment) -> Row:
        names = {"kind": segment.kind, "turn": segment.turn, "agent": segment.agent, "policy": segment.policy}
        tokens = {"parent": segment.parent, "ids": list(segment.tokens), "texts": self.token_texts(segment.tokens)}
        return {**names, **tokens, "logprobs": list(segment.logprobs), "versions": list(segment.versions)}

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token, or its number without a tokenizer."""
        if self._tokenizer is None:
            return [f"[{token}]" for token in tokens]
        return self._tokenizer.decode_batch([[token] for token in tokens], skip_special_tokens=False)

    def group(self, number: int) -> Row:
        """Return the rollouts of a group, best first, with the first token and turn that differ from the best one's."""
        row, _ = self.index.record(number)
        rows = self._group_rows(row)
        members = sorted(zip(rows, self.index.read(rows), strict=True), key=lambda pair: -pair[1].trajectory.reward)
        best = members[0][1].trajectory
        return {"task": row["task"], "step": row["step"], "members": [_member(*pair, best) for pair in members]}

    def _group_rows(self, row: Row) -> list[Row]:
        sql = "SELECT * FROM rollouts WHERE file = ? AND task = ? AND step = ? ORDER BY id"
        return self.index.query(sql, (row["file"], row["task"], row["step"]))

    def task(self, task: str) -> list[Row]:
        """Return reward, success and length of a task by step and source."""
        columns = "avg(reward) AS reward, avg(solved) AS solved, avg(tokens) AS tokens, avg(calls) AS calls"
        sql = f"SELECT source, step, count(*) AS attempts, {columns}, min(id) AS first FROM rollouts WHERE task = ?"
        return self.index.query(f"{sql} GROUP BY source, step ORDER BY step, source", (task,))

    def compare(self, a: str, b: str) -> Row:
        """Return the tasks that two evaluations share, and the paired difference `b - a` of their success rates.

        Each task has success rate and mean reward in both, and the number of its first rollout. The difference is None
        for fewer than 2 tasks, or if the success is unknown.
        """
        side = "SELECT task, avg(solved) AS solved, avg(reward) AS reward, min(id) AS first FROM rollouts"
        side = f"({side} WHERE source = ? GROUP BY task)"
        names = ", ".join(f"{name}.{column} AS {column}_{name}" for name in "ab" for column in _COMPARED)
        tasks = self.index.query(f"SELECT task, {names} FROM {side} AS a JOIN {side} AS b USING (task)", (a, b))
        solved = [row[f"solved_{name}"] for row in tasks for name in "ab"]
        if len(tasks) < 2 or None in solved:
            return {"tasks": tasks, "difference": None}
        first, second = ({str(row["task"]): float(str(row[f"solved_{name}"])) for row in tasks} for name in "ab")
        found = paired_difference(second, first)
        interval = {"low": found.interval.low, "high": found.interval.high}
        return {"tasks": tasks, "difference": {"mean": found.difference, "p_value": found.p_value, **interval}}

    def pair(self, a: int, b: int) -> Row:
        """Return two rollouts, with the first token and turn at which the second differs from the first."""
        found = [self.index.record(number) for number in (a, b)]
        first = found[0][1].trajectory
        return {"task": found[0][0]["task"], "members": [_member(*one, first) for one in found]}

    def timeline(self, step: int) -> list[Row]:
        """Return the wall-clock times of a step's episodes with their rows, in the order of their start."""
        rows = self.index.query("SELECT * FROM rollouts WHERE source = '' AND step = ?", (step,))
        by_key = {tuple(row[name] for name in _KEY[2:]): row for row in rows}
        lines = _json_lines(times_path(self.folder.path, step))
        found = [line | {"row": by_key[key]} for line in lines if (key := tuple(line[n] for n in _KEY[2:])) in by_key]
        return sorted(found, key=lambda line: float(str(line["begin"])))

    def curves(self) -> Row:
        """Return the metrics and timings by step, with null for missing values, and the alarms."""
        series: dict[int, dict[str, float]] = {}
        for path in (self.folder.metrics, self.folder.timings):
            for row in read_metrics(path) if path.is_file() else []:
                series.setdefault(row.step, {}).update(row.metrics)
        steps = sorted(series)
        names = sorted({name for row in series.values() for name in row})
        values = {name: [_finite(series[step].get(name)) for step in steps] for name in names}
        return {"steps": steps, "values": values, "alarms": _json_lines(self.folder.alarms)}

    def probes(self) -> list[Row]:
        """Return the stored reports of `ludus probe`, with rows of texts, and the sampled texts with marked spans."""
        found = []
        for name, one in stored_reports(self.folder.probes).items():
            texts = json.loads((self.folder.probes / f"{name}.json").read_text("utf-8")).get("texts", [])
            found.append({"name": name, "title": one.title, "rows": one.records, "note": one.note, "texts": texts})
        return found

    def labels(self) -> dict[tuple[object, ...], Row]:
        """Return the last label of each labelled rollout."""
        return {_key(line): line for line in _json_lines(self.folder.path / "labels.jsonl")}

    def add_label(self, number: int, label: object, note: object) -> Row:
        """Append a label to labels.jsonl and return it. Raises UserError for other values than `LABELS` and text."""
        if label not in LABELS or not isinstance(note, str) or len(note) > MAX_NOTE:
            raise UserError(f"A label is one of {', '.join(LABELS)}, with a note of at most {MAX_NOTE} characters.")
        row, _ = self.index.record(number)
        line = {name: row[name] for name in _KEY} | {"label": label, "note": note, "solved": row["solved"]}
        with (self.folder.path / "labels.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return line

    def unlabelled(self) -> Row:
        """Return the number of a random rollout without a label; None if all have one. Each is equally likely."""
        labels = self.labels()
        sql = f"SELECT id, {', '.join(_KEY)} FROM rollouts ORDER BY random() LIMIT ?"
        rows = self.index.query(sql, (len(labels) + 1,))
        return {"id": next((row["id"] for row in rows if _key(row) not in labels), None)}

    def labelled(self) -> Row:
        """Return all labels, and their agreement with the verifier."""
        lines = list(self.labels().values())
        rated = [line for line in lines if line["solved"] is not None]
        if not rated:
            return {"labels": lines, "agreement": None}
        found = cohens_kappa([line["label"] == "right" for line in rated], [bool(line["solved"]) for line in rated])
        numbers = {"kappa": _finite(found.estimate), "low": found.low, "high": found.high, "counts": found.counts}
        return {"labels": lines, "agreement": numbers}


def _shown_message(message: Message) -> Row:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    thought, name = message.get("reasoning_content", ""), message.get("name", "")
    content = describe_content(message)
    return {"role": message["role"], "content": content, "thought": thought, "calls": calls, "name": name}


def _member(row: Row, record: RolloutRecord, best: Trajectory) -> Row:
    one = record.trajectory
    messages = [_shown_message(message) for message in one.messages if message["role"] != "system"]
    return {"row": row, "rewards": dict(one.rewards), "messages": messages, "differs": first_difference(best, one)}


def first_difference(best: Trajectory, other: Trajectory) -> Row | None:
    """Return token position and turn at which the first paths differ; None if they are equal."""
    paths = []
    for one in (best, other):
        segments = [one.segments[i] for i in one.rows[0]] if one.segments else []
        paths.append([(token, segment.turn) for segment in segments for token in segment.tokens])
    mine, theirs = paths
    shared = common_prefix([token for token, _ in mine], [token for token, _ in theirs])
    if shared == len(mine) == len(theirs):
        return None
    turn = theirs[shared][1] if shared < len(theirs) else theirs[-1][1] if theirs else 0
    return {"token": shared, "turn": turn}


def _key(row: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(row[name] for name in _KEY)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _json_lines(path: Path) -> list[Row]:
    """Return the objects of a file of JSON lines; an incomplete last line is ignored."""
    if not path.is_file():
        return []
    lines = path.read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]
