"""Behavior of the policy: measures of rollouts, their means over tasks with intervals, and paired differences.

The measures are lexical: they compare words and need no model. A measure is absent where it does not apply, for
example self-correction in an episode without a tool error. A task's value is the mean over its episodes.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from ludus.chat.hints import full_text
from ludus.diagnostics.behavior_metrics import used_results
from ludus.evaluation.stats import Interval, bootstrap_mean, clustered_interval, difference_interval, wilson
from ludus.rewards.exact_match import normalise
from ludus.types import Message, MessageToolCall, ToolStatus, Trajectory


def _read() -> tuple[Mapping[str, str], Sequence[str], Sequence[str], frozenset[str], re.Pattern[str]]:
    """Return the tables of the data file, the words of reflection as a pattern."""
    data = tomllib.loads(resources.files(__package__).joinpath("behavior.toml").read_text("utf-8"))
    phrases = re.compile(rf"\b(?:{'|'.join(map(re.escape, data['reflection']))})\b", re.IGNORECASE)
    return data["measures"], data["amounts"], data["retrieval_tools"], frozenset(data["function_words"]), phrases


MEASURES, AMOUNTS, RETRIEVAL_TOOLS, _FUNCTION_WORDS, _REFLECTION = _read()
"""Measures and what they count, those that are not shares in [0, 1], and word lists."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class AttemptedTask:
    """An episode with its success; accepted answers that are texts, and whether a tool retrieves text."""

    trajectory: Trajectory
    solved: bool
    answers: tuple[str, ...] = ()
    retrieves: bool = False


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """A tool call: its turn among those of the policy, tool, arguments and result."""

    turn: int
    tool: str
    arguments: str
    output: str
    status: ToolStatus
    used: bool | None


ByTask = Mapping[str, float]
"""Values of a measure by task id."""


def measure_behavior(attempts: Iterable[AttemptedTask]) -> dict[str, ByTask]:
    """Return the values of each measure by task; tasks to which a measure does not apply are left out."""
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in MEASURES}
    sequences: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for one in attempts:
        calls = observed_calls(one.trajectory)
        sequences[one.trajectory.task_id].append(tuple(call.tool for call in calls))
        for name, value in _measured(one, calls):
            found[name][one.trajectory.task_id].append(value)
    for task, own in sequences.items():
        if len(own) > 1:
            found["diversity"][task].append((len(set(own)) - 1) / (len(own) - 1))
    return {name: {task: sum(v) / len(v) for task, v in tasks.items()} for name, tasks in found.items()}


def _measured(one: AttemptedTask, calls: Sequence[ObservedCall]) -> Iterator[tuple[str, float]]:
    """Yield the measures that apply to an episode."""
    own = own_messages(one.trajectory)
    turns = [message for message in own if message["role"] == "assistant"]
    texts = [f"{message.get('reasoning_content', '')} {message.get('content') or ''}" for message in turns]
    words = sum(len(_WORD.findall(text)) for text in texts)
    yield "success", float(one.solved)
    yield "calls", float(len(calls))
    yield "response_words", float(words)
    if one.trajectory.segments:
        yield "response_tokens", float(one.trajectory.num_action_tokens)
    if words:
        yield "reflection_words", 1000 * sum(len(_REFLECTION.findall(text)) for text in texts) / words
    answers = [answer for answer in one.answers or (one.trajectory.answer,) if answer]
    if one.solved and one.retrieves and answers:
        # an answer occurs in the prompt or a result, both normalised as for exact match
        shown = (message["content"] or "" for message in one.trajectory.messages if message["role"] != "assistant")
        evidence = f" {normalise(' '.join(shown))} "
        yield "lucky_guesses", float(not any(f" {normalise(answer)} " in evidence for answer in answers))
    if not calls:
        return
    repeats = repeated_calls(calls)
    unused = [call.used is False and call.turn < len(turns) - 1 for call in calls]
    yield "repeated_calls", sum(repeats) / len(calls)
    yield "unused_results", sum(unused) / len(calls)
    yield "wasted_calls", sum(a or b for a, b in zip(repeats, unused, strict=True)) / len(calls)
    if len(turns) > 1:
        yield "call_position", sum(call.turn for call in calls) / len(calls) / (len(turns) - 1)
    if corrections := corrected_errors(calls):
        yield "self_correction", sum(corrections) / len(corrections)
    if composed := composed_calls(one.trajectory.messages, sum(len(turn.get("tool_calls") or []) for turn in turns)):
        yield "composed_calls", sum(any(sources) for sources, _ in composed) / len(composed)
        yield "composed_tools", sum(bool(sources - {tool}) for sources, tool in composed) / len(composed)


def own_messages(trajectory: Trajectory) -> Sequence[Message]:
    """Return the messages from the policy's first turn on; without segments, from the first assistant message on."""
    messages = trajectory.messages
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    examples = max(0, len(turns) - trajectory.num_turns) if trajectory.segments else 0
    return messages[turns[examples] :] if examples < len(turns) else ()


def observed_calls(trajectory: Trajectory) -> list[ObservedCall]:
    """Return the calls of an episode in the order of their outcomes."""
    own = own_messages(trajectory)
    asked: dict[str, list[MessageToolCall]] = defaultdict(list)
    places: list[tuple[int, bool | None]] = []
    all_results, own_results = (sum(m["role"] == "tool" for m in part) for part in (trajectory.messages, own))
    uses = iter(used_results(trajectory.messages)[all_results - own_results :])
    turn = -1
    for message in own:
        turn += message["role"] == "assistant"
        for call in message.get("tool_calls") or []:
            asked[call["id"]].append(call)
        if message["role"] == "tool":
            places.append((turn, next(uses)))
    calls = []
    for number, outcome in enumerate(trajectory.call_outcomes):
        waiting = asked[outcome.call_id]
        arguments = _canonical(waiting.pop(0)["function"]["arguments"]) if waiting else outcome.output
        place, used = places[number] if number < len(places) else (turn, None)  # a call that ended the episode
        calls.append(ObservedCall(place, outcome.tool, arguments, outcome.output, outcome.status, used))
    return calls


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def repeated_calls(calls: Sequence[ObservedCall]) -> list[bool]:
    """Return for each call whether an earlier one has the same tool, arguments and result."""
    keys = [(call.tool, call.arguments, call.output) for call in calls]
    return [key in keys[:place] for place, key in enumerate(keys)]


def corrected_errors(calls: Sequence[ObservedCall]) -> list[bool]:
    """Return for each tool error whether the next call differs and succeeds; an error at the end is not corrected."""
    pairs = [(before, after) for before, after in zip_longest(calls, calls[1:]) if before.status is not ToolStatus.OK]
    return [
        bool(after) and after.status is ToolStatus.OK and (after.tool, after.arguments) != (one.tool, one.arguments)
        for one, after in pairs
    ]


def composed_calls(messages: Sequence[Message], num_calls: int) -> list[tuple[set[str], str]]:
    """Return for each of the last `num_calls` calls but the first the tools whose results introduced its words.

    The second item is the tool of the call. Introduced words are new in the dialogue and in no list of function words.
    """
    known: set[str] = set()
    sources: dict[str, str] = {}
    composed: list[tuple[set[str], str]] = []
    for message in messages:
        words = _content_words(full_text(message))
        for call in message.get("tool_calls") or []:
            used = _content_words(call["function"]["arguments"]) & sources.keys()
            composed.append(({sources[word] for word in used}, call["function"]["name"]))
        if message["role"] == "tool":
            sources |= dict.fromkeys(words - known, message.get("name", ""))
        known |= words
    return composed[-num_calls:][1:]


def _content_words(text: str) -> set[str]:
    return {word for word in _WORD.findall(text.lower()) if len(word) > 1} - _FUNCTION_WORDS


class Amount(NamedTuple):
    """A mean over tasks, or a mean difference, with its 95 % interval, and the number of tasks."""

    value: float
    interval: Interval | None
    num_tasks: int


def mean_amount(name: str, values: ByTask) -> Amount:
    """Return the mean over tasks; without interval below 2 tasks and for equal, hence unbounded, amounts."""
    numbers = list(values.values())
    interval = None
    if name in AMOUNTS:
        interval = bootstrap_mean(numbers, seed=0).interval if len(set(numbers)) > 1 else None
    elif len(numbers) > 1:
        is_binary = set(numbers) <= {0.0, 1.0}
        interval = wilson(round(sum(numbers)), len(numbers)) if is_binary else clustered_interval(numbers)
    return Amount(sum(numbers) / len(numbers), interval, len(numbers))


def paired_change(name: str, a: ByTask, b: ByTask) -> Amount | None:
    """Return the mean of B minus A over the tasks of both; None below 2 tasks.

    Amounts are scaled to [-1, 1] for `difference_interval`; the interval is None if all their differences are equal.
    """
    tasks = sorted(a.keys() & b.keys())
    if len(tasks) < 2:
        return None
    gaps = np.array([b[task] - a[task] for task in tasks])
    scale = float(np.abs(gaps).max()) if name in AMOUNTS else 1.0
    if name in AMOUNTS and (gaps == gaps[0]).all():
        return Amount(float(gaps.mean()), None, len(tasks))
    interval = difference_interval(gaps / scale)
    return Amount(float(gaps.mean()), Interval(interval.low * scale, interval.high * scale), len(tasks))
