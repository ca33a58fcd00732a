"""Cases of the judging world: a right and a wrong attempt at one question, made by rule or from recorded rollouts."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel

from ludus.envs.task_archive import read_lines
from ludus.envs.task_files import read_rows, split_by_hash
from ludus.errors import UserError
from ludus.rewards.judge_prompts import question_of, transcript
from ludus.tools.base import ToolError
from ludus.tools.calculator import calculate, show
from ludus.types import FunctionCall, Message, MessageToolCall
from ludus.worlds.math.problems import DEFAULT_TOPICS, MathProblem, fill_in, read_problems

_HINT: Final = "Use a run with saved rollouts (env.settings.run), or a file of rollouts (env.settings.data)."
_SLIPS: Final = (-10, -2, -1, 1, 2, 10)
_QUOTE: Final = 110  # maximum characters of a quote; four are in a reason for a pair
_WORD: Final = re.compile(r"[^\W_]{2,}")
_RARE: Final = 0.02  # share of the questions above which a word is not rare


@dataclass(frozen=True, slots=True)
class Case:
    """A question with a right and a wrong attempt, and the reason for each verdict, empty if unknown."""

    name: str
    question: str
    right: str
    wrong: str
    checks: tuple[str, str] = ("", "")
    level: str = "1"


class RecordedFunction(BaseModel):
    """Name and arguments (JSON text) of a recorded call."""

    name: str
    arguments: str


class RecordedToolCall(BaseModel):
    """A tool call of a recorded message."""

    function: RecordedFunction


class RecordedMessage(BaseModel):
    """A message of a recorded rollout."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: list[RecordedToolCall] = []

    def message(self) -> Message:
        """Return the message in OpenAI's format."""
        functions = [FunctionCall(name=one.function.name, arguments=one.function.arguments) for one in self.tool_calls]
        calls = [MessageToolCall(id="", type="function", function=function) for function in functions]
        return Message(role=self.role, content=self.content, tool_calls=calls)


class RecordedTrajectory(BaseModel):
    """Fields of a rollout file's trajectory that a case needs."""

    task_id: str
    messages: list[RecordedMessage]
    rewards: dict[str, float]
    failure: object = None
    leaves: list[object] = []


class RecordedRollout(BaseModel):
    """A line of a rollout file."""

    trajectory: RecordedTrajectory


def generated_cases(split: str, levels: Sequence[int], seed: int) -> Iterator[Case]:
    """Yield a case for each problem of the math world: its worked solution, and one with a slip."""
    lines = partial(read_lines, "math", seed=seed)
    for number, problem in enumerate(read_problems(split, levels, DEFAULT_TOPICS, lines)):
        rng = random.Random(f"judging:{seed}:{split}:{number}")
        right = _worked(problem)
        wrong = next(filter(None, (_flawed(problem, rng) for _ in range(20))), None)
        if wrong is not None:
            yield Case(f"{split}:{number}", problem.question, right, wrong, (right, right), str(problem.level))


def _worked(problem: MathProblem, slip_at: int = -1, slip: int = 0) -> str:
    """Return the steps with their results and the answer; the result of the step `slip_at` is off by `slip`."""
    results: list[Fraction] = []
    lines = []
    for i, step in enumerate(problem.steps):
        expression = fill_in(step, results)
        results.append(calculate(expression) + (slip if i == slip_at else 0))
        lines.append(f"{expression} = {show(results[-1])}")
    return "\n".join([*lines, f"Answer: {show(results[-1])}"])


def _flawed(problem: MathProblem, rng: random.Random) -> str | None:
    """Return an attempt with a wrong step, a wrong answer, or the result of an earlier step as the answer.

    None if the answer happens to be right or a later step cannot be computed.
    """
    kinds = ("step", "step", "answer", "early")[: 3 + (len(problem.steps) > 1)]
    kind, slip = rng.choice(kinds), rng.choice(_SLIPS)
    body, _, right = _worked(problem).rpartition("\nAnswer: ")
    if kind == "answer":
        return f"{body}\nAnswer: {show(Fraction(right) + slip)}"
    if kind == "early":
        lines = body.split("\n")[: rng.randrange(1, len(problem.steps))]
        text = "\n".join([*lines, f"Answer: {lines[-1].rpartition(' = ')[2]}"])
    else:
        try:
            text = _worked(problem, rng.randrange(len(problem.steps)), slip)
        except (ArithmeticError, ValueError, ToolError):
            return None
    return None if text.rpartition("Answer: ")[2] == right else text


def evidence(question: str, messages: Sequence[Message]) -> str:
    """Return a quote of the final answer, and of the line in a tool's results that supports it best.

    That is the line with the answer that shares the most words with the question, "nothing" if no line has the answer.
    """
    answer, words = messages[-1]["content"].strip(), set(question.split())
    lines = [line for message in messages if message["role"] == "tool" for line in message["content"].split("\n")]
    found = [line for line in lines if answer.casefold() in line.casefold()]
    line = max(found, key=lambda line: len(words & set(line.split())), default="nothing")
    return f"Answer: {answer[:_QUOTE]}\nFound: {line[:_QUOTE]}"


def rare_words(cases: Sequence[Case]) -> Mapping[str, Sequence[str]]:
    """Return the words that occur in the cases of at most 2 % of the questions, each with all of its kind: numbers or
    others."""
    texts: dict[str, set[str]] = {}
    for case in cases:
        texts.setdefault(case.question, set()).update(_WORD.findall(f"{case.question} {case.right} {case.wrong}"))
    counts = Counter(word for words in texts.values() for word in sorted(words))
    rare = [word for word, num in counts.items() if num <= _RARE * len(texts)]
    kinds = {digits: [word for word in rare if word.isdigit() == digits] for digits in (False, True)}
    return {word: kinds[word.isdigit()] for word in rare}


def renamed(case: Case, rare: Mapping[str, Sequence[str]], rng: random.Random) -> Case:
    """Return the case with another word in place of each rare one, everywhere: its start and the end of another one.

    Verdicts then depend on what an attempt says, not on known names (entity substitution, arXiv:2109.05052).
    """
    names: dict[str, str] = {}

    def other(match: re.Match[str]) -> str:
        word = match[0]
        if word in rare and word not in names:
            end = rng.choice(rare[word])
            names[word] = word[: len(word) // 2] + end[len(end) // 2 :]
        return names.get(word, word)

    texts = (case.question, case.right, case.wrong, *case.checks)
    question, right, wrong, why, why_not = (_WORD.sub(other, text) for text in texts)
    return replace(case, question=question, right=right, wrong=wrong, checks=(why, why_not))


def recorded_cases(files: Sequence[Path], outcome: str, sees: str) -> Mapping[str, list[Case]]:
    """Return the cases of rollout files by split; the n-th right attempt at a task is paired with the n-th wrong one.

    All attempts at a task are in one split. `outcome` names the reward part that is 1 for a right attempt; empty: the
    first. `sees`: the answer or the transcript, as in `rewards.judge`. Raises
    UserError for a file that cannot be read, or if no task has attempts of both kinds.
    """
    attempts: dict[str, tuple[dict[str, str], dict[str, str]]] = {}
    questions: dict[str, str] = {}
    for file in files:
        for record in read_rows(file, RecordedRollout, _HINT):
            one = record.trajectory
            messages = [message.message() for message in one.messages]
            start = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
            if start is None or one.failure is not None or one.leaves or not one.rewards:
                continue
            if outcome and outcome not in one.rewards:
                raise UserError(f"{file}: the rollouts have no reward {outcome!r}.", f"They have {[*one.rewards]}.")
            value = one.rewards[outcome] if outcome else next(iter(one.rewards.values()))
            questions[one.task_id] = question_of(messages[:start])
            sides = attempts.setdefault(one.task_id, ({}, {}))
            text = messages[-1]["content"] if sees == "answer" else transcript(messages[start:])
            reason = "" if sees == "answer" else evidence(questions[one.task_id], messages[start:])
            sides[value < 1][text] = reason  # equal attempts once
    found: dict[str, list[Case]] = {}
    for task, (right, wrong) in attempts.items():
        for number, (good, bad) in enumerate(zip(right, (text for text in wrong if text not in right), strict=False)):
            case = Case(f"{task}:{number}", questions[task], good, bad, (right[good], wrong[bad]))
            found.setdefault(split_by_hash(task), []).append(case)
    if not found:
        raise UserError("No task of the rollouts has both a right and a wrong attempt.", _HINT)
    return found
