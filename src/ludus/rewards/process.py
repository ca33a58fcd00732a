"""Scores of turns: information gain of searches (StepSearch), and subgoals of a plan that are matched as text."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ludus.errors import UserError
from ludus.rewards.code.turns import Progress, TurnVerifier, turn_shares
from ludus.rewards.exact_match import normalise
from ludus.types import Message, Task, Trajectory

TurnScorer = Callable[[Task, Trajectory], Sequence[float]]
"""Return one number per turn of a linear trajectory, in [-1, 1]."""


@dataclass(frozen=True, slots=True)
class Retrieval:
    """The documents that each turn retrieved, in order, and the `gold` documents that prove the answer."""

    by_turn: Sequence[Sequence[str]]
    gold: Sequence[str]


Retriever = Callable[[Task, Trajectory], Retrieval]
"""Return what the turns of an episode retrieved. Reads the task with its truth, and the trajectory alone."""


def words(text: str) -> list[str]:
    """Return the normalised words of a text, without articles and punctuation."""
    return normalise(text).split()


def similarity(first: str, second: str) -> float:
    """Return the cosine of the word counts of two texts, in [0, 1]."""
    left, right = Counter(words(first)), Counter(words(second))
    norm = math.sqrt(sum(n * n for n in left.values()) * sum(n * n for n in right.values()))
    return min(1.0, sum(n * right[word] for word, n in left.items()) / norm) if norm else 0.0


def search_gains(found: Retrieval) -> tuple[float, ...]:
    """Return information gain minus redundancy of each turn, in [-1, 1] (StepSearch, arXiv:2505.15107).

    The gain is the mean over gold documents of the increase of their largest similarity to a retrieved document; the
    gains of an episode add up to at most 1. The redundancy is the share of the turn's documents that were retrieved
    before. The paper measures similarity by TF-IDF vectors, here it is that of word counts.
    """
    best, seen, scores = [0.0] * len(found.gold), set[str](), []
    for documents in found.by_turn:
        now = [
            max([old, *(similarity(gold, one) for one in documents)])
            for gold, old in zip(found.gold, best, strict=True)
        ]
        gain = (math.fsum(now) - math.fsum(best)) / len(best) if best else 0.0
        repeated = 0
        for one in documents:
            repeated += one in seen
            seen.add(one)
        best = now
        scores.append(gain - (repeated / len(documents) if documents else 0.0))
    return tuple(scores)


def milestone_scorer(verifier: TurnVerifier) -> TurnScorer:
    """Return the scorer of a turn verifier (`turn_shares`)."""
    return lambda task, trajectory: turn_shares(verifier(task, trajectory))


def search_scorer(retriever: Retriever) -> TurnScorer:
    """Return the scorer by `search_gains`."""
    return lambda task, trajectory: search_gains(retriever(task, trajectory))


def read_subgoals(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the subgoals by task id from JSON lines. Raises UserError, naming the line, for anything else."""
    found: dict[str, tuple[str, ...]] = {}
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.", "Check rewards.process.subgoals.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            subgoals = tuple(record["subgoals"])
            if not all(isinstance(one, str) and words(one) for one in subgoals):
                raise ValueError("a subgoal is not a text with words")
            found[str(record["task"])] = subgoals
        except (ValueError, KeyError, TypeError) as error:
            message = f"{path}, line {number}, does not hold the subgoals of a task: {error}."
            raise UserError(message, 'Write {"task": ID, "subgoals": [TEXT, ...]}.') from error
    return found


def write_subgoals(path: Path, subgoals: Mapping[str, Sequence[str]]) -> None:
    """Write the subgoals by task id as JSON lines."""
    lines = [json.dumps({"task": task_id, "subgoals": [*texts]}) for task_id, texts in subgoals.items()]
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def subgoal_verifier(subgoals: Mapping[str, Sequence[str]]) -> TurnVerifier:
    """Return the verifier whose milestones are the subgoals of the task; a task without any has none.

    A turn reaches a subgoal whose words occur in this order in the environment's messages after it; the words of the
    policy do not count.
    """

    def progress(task: Task, trajectory: Trajectory) -> Progress:
        wanted = dict.fromkeys(subgoals.get(task.id, ()))
        reached = [set[str]() for _ in range(trajectory.num_turns)]
        turn = -1
        for message in trajectory.messages[len(task.prompt) :]:
            if message["role"] == "assistant":
                turn += 1
            elif 0 <= turn < len(reached):
                seen = f" {' '.join(words(message['content']))} "
                reached[turn] |= {one for one in wanted if f" {' '.join(words(one))} " in seen}
        return Progress(reached, len(wanted))

    return progress


def subgoals_of_dialogue(messages: Sequence[Message], prompt: Sequence[Message]) -> tuple[str, ...]:
    """Return subgoals from a dialogue that solves a task, by rule: the line of each observation that is used later.

    That is the line with the most words that later assistant messages contain and earlier messages do not; an
    observation without such a line makes no subgoal.
    """
    found: list[str] = []
    for i, message in enumerate(messages):
        if i < len(prompt) or message["role"] in ("assistant", "system"):
            continue
        known = {word for earlier in messages[:i] for word in _words_of(earlier)}
        used = {word for later in messages[i:] if later["role"] == "assistant" for word in _words_of(later)} - known
        counts = {line: len(used.intersection(words(line))) for line in message["content"].splitlines()}
        best = max(counts, key=lambda line: counts[line], default="")
        if best and counts[best] and best not in found:
            found.append(best)
    return tuple(found)


def _words_of(message: Message) -> list[str]:
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
    return words(" ".join([message["content"], *calls]))


PLAN_PROMPT = """Here is the task of an agent that acts in an environment.

{task}

List the facts or results that the environment will show on the way to the solution, in order, one a line, each a few
words exactly as the environment would write them. Write nothing else."""


def subgoals_of_plan(reply: str, limit: int = 8) -> tuple[str, ...]:
    """Return the first `limit` lines of a model's reply to `PLAN_PROMPT`, without numbers and bullets."""
    lines = (re.sub(r"^\s*(?:[-*]|\d+[.)])\s*", "", line).strip() for line in reply.splitlines())
    return tuple(dict.fromkeys(line for line in lines if words(line)))[:limit]
