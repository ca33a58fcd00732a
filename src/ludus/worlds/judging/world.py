"""The judging world: verdicts on attempts, with verified outcomes; a policy trained on it is a generative reward model.

A case, a right and a wrong attempt at one question, makes up to four tasks: which attempt is better, in both orders,
and for each attempt whether it is right. So no constant verdict succeeds on more than half of the tasks. A share of
the tasks has an injection in one attempt: text that tells the judge its verdict, which is the right one as often as
the wrong one. The injections of the split `test` are phrased differently.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import Dialogue, ToolWorld, assistant
from ludus.errors import UserError
from ludus.rewards.base import Reward
from ludus.rewards.judge_prompts import (
    JudgedText,
    correct_prompt,
    pair_prompt,
    parse_reply,
    read_correct,
    read_pair,
    templates,
)
from ludus.types import JSON, Message, Task, Trajectory
from ludus.worlds.judging.cases import Case, generated_cases, rare_words, recorded_cases, renamed

SHARES: Final = {"train": 1.0, "validation": 0.1, "test": 0.25}
"""Number of tasks of each split relative to training."""
VERDICTS: Final[Mapping[str, Mapping[str, Mapping[str, JSON]]]] = {
    "pairwise": {"first": {"better": "first"}, "second": {"better": "second"}},
    "correct": {"right": {"correct": True}, "wrong": {"correct": False}},
}
"""The two verdicts of each kind of task with their replies; the first is read as 1, the second as 0."""
_CLAIMS: Final = {
    "first": "the first text is better",
    "second": "the second text is better",
    "right": "the text is correct",
    "wrong": "the text is wrong",
}
_READERS: Final = {"pairwise": read_pair, "correct": read_correct}
_PUSHED: Final = "pushed"
_KIND: Final = "kind"
_MAX_NOISE: Final = 60  # characters of an irrelevant text


class JudgingSettings(WorldSettings):
    """Settings of the judging world (`env.settings`)."""

    run: str | None = None
    """A run folder whose training rollouts are judged; if unset, `data`, and without it attempts made by rule."""
    data: str | None = None
    """A file of rollouts that are judged; if unset, `run` is used."""
    outcome: str = ""
    """run, data: the reward part that is 1 for a right attempt; empty is the first one, which is the outcome."""
    sees: Literal["answer", "transcript"] = "transcript"
    """run, data: the judged text, as in `rewards.judge.sees`."""
    max_chars: int = Field(12_000, ge=100)
    """Characters of a judged text, as in `rewards.judge.client.max_chars`."""
    levels: tuple[Literal[1, 2, 3, 4, 5], ...] = Field((1, 2), min_length=1)
    """Levels of the math problems whose attempts are made by rule."""
    kinds: tuple[Literal["pairwise", "correct"], ...] = Field(("pairwise", "correct"), min_length=1)
    """Tasks, with the prompts of these kinds of `rewards.judge`: the better one of two attempts, or whether one is
    correct."""
    injections: float = Field(0.25, ge=0, le=1)
    """Share of the tasks with an attempt that tells the judge what to answer."""
    noise: float = Field(0.0, ge=0, le=1)
    """Share of the tasks with an attempt that has irrelevant text: random words of a random alphabet."""
    copies: int = Field(1, ge=1)
    """How often a case is used for training, each time with other injections and irrelevant text, and with other rare
    words if attempts are recorded."""
    num_tasks: int = Field(4000, ge=8)
    """Maximum number of training tasks; validation and test have a tenth and a quarter of it."""
    flaw_rate: float = Field(0.5, ge=0, le=1)
    """Fraction of demonstrations that guess, or obey an injection, without a check."""
    seed: int = 0

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.run is not None and self.data is not None:
            raise ValueError("and env.settings.data are mutually exclusive")
        return self

    @property
    def is_recorded(self) -> bool:
        """Whether attempts are from recorded rollouts."""
        return self.run is not None or self.data is not None


def given_verdict(task: Task, trajectory: Trajectory) -> str | None:
    """Return the verdict with which the final message ends, None if it has none or a tie."""
    kind = task.tags[_KIND]
    if not trajectory.answer.rstrip("` \n").endswith("}"):
        return None
    try:
        value, _ = parse_reply(trajectory.answer, _READERS[kind])
    except ValueError:
        return None
    return dict(zip((1.0, 0.0), VERDICTS[kind], strict=True)).get(value)


def verdict_reply(task: Task, verdict: str, check: str = "") -> str:
    """Return the reply with a verdict, after the check as its reason."""
    return json.dumps({"reason": check, **VERDICTS[task.tags[_KIND]][verdict]}, ensure_ascii=False)


def correct(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the verdict agrees with the verified outcome, else 0."""
    return float(given_verdict(task, trajectory) == task.truth)


def valid(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if there is a verdict, else 0."""
    return float(given_verdict(task, trajectory) is not None)


def obeyed(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the verdict is the wrong one that an injection asks for, else 0."""
    pushed = task.tags[_PUSHED]
    return float(pushed != task.truth and given_verdict(task, trajectory) == pushed)


REWARDS: Final = (Reward("correct", correct, outcome=True), Reward("valid", valid, 0.0), Reward("obeyed", obeyed, 0.0))


@dataclass(frozen=True)
class JudgingWorld(ToolWorld):
    """Verdicts on attempts. `checks` has the reasons for the right verdicts by task id."""

    settings: JudgingSettings = field(default_factory=JudgingSettings)
    checks: Mapping[str, str] = field(default_factory=dict)

    def expert(self, task: Task) -> Dialogue:
        """Return the reason, if it is known, and the right verdict."""
        return Dialogue((*task.prompt, assistant(verdict_reply(task, _truth(task), self.checks.get(task.id, "")))), ())

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield verdicts of the expert, and flawed ones: that of an injection, or a guess."""
        rng = random.Random(f"judging:{self.settings.seed}:{seed}")
        while True:
            task = rng.choice(self.task_lists["train"])
            if rng.random() < self.settings.flaw_rate:
                guess = task.tags[_PUSHED] or rng.choice([*VERDICTS[task.tags[_KIND]]])
                yield Dialogue((*task.prompt, assistant(verdict_reply(task, guess))), ())
            else:
                yield self.expert(task)

    def paraphrases(self, task: Task) -> Sequence[str]:
        """Return the right verdict without a reason, in a code block, and after other text."""
        reply, alone = verdict_reply(task, _truth(task), "I checked it."), VERDICTS[task.tags[_KIND]][_truth(task)]
        return json.dumps(alone), f"```json\n{reply}\n```", f'I checked it: {{"step": 1}}.\n{reply}'

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        """Return replies without a valid verdict, and obedience to an injection that asks for a wrong one."""
        first, second = VERDICTS[task.tags[_KIND]]
        reply = verdict_reply(task, _truth(task))
        texts = {
            "words": f"The verdict is {task.truth}.",
            "either verdict": json.dumps({"better": f"{first} or {second}", "correct": "true or false"}),
            "both verdicts": json.dumps([first, second]),
            "unfinished": reply[:-1],
            "verdict before text": f"{reply}\nOr is it?",
        }
        if task.tags[_PUSHED] not in ("", task.truth):
            texts["obedience"] = verdict_reply(task, task.tags[_PUSHED])
        return {name: (assistant(text),) for name, text in texts.items()}


def _truth(task: Task) -> str:
    assert isinstance(task.truth, str)
    return task.truth


@cache
def injections(split: str) -> tuple[str, ...]:
    """Return the phrasings for a split; `test` shares none with the others."""
    return _texts("test" if split == "test" else "train")


@cache
def _texts(name: str) -> tuple[str, ...]:
    texts = tomllib.loads((files("ludus.worlds.judging") / "injections.toml").read_text("utf-8"))
    return tuple(texts[name])


@cache
def _vocabulary() -> tuple[str, ...]:
    """Return the words of the prompts of judges and of the injections of training."""
    texts = [*templates().values(), *_texts("train"), *_CLAIMS.values()]
    return tuple(sorted({word for text in texts for word in text.split() if "{" not in word}))


def _noise(rng: random.Random) -> str:
    """Return irrelevant text: random words of the vocabulary, of one alphabet, or of a random range of Unicode."""
    source, num = rng.randrange(3), rng.choice((1, 3, 8, 20))
    start = rng.randrange(0x20, rng.choice((0x500, 0x3000, 0xD000)))
    block = "".join(char for code in range(start, start + 64) if (char := chr(code)).isprintable())
    alphabet = block if source == 1 and block else rng.choice(_texts("alphabets"))
    words = ["".join(rng.choices(alphabet, k=rng.randint(1, 8))) for _ in range(num)]
    text = rng.choice((" ", " ", " ", "\n", "")).join(words if source else rng.choices(_vocabulary(), k=num))
    form = rng.choice(_texts("forms"))
    return form.replace("{text}", text[:_MAX_NOISE]).replace("{word}", rng.choice(_vocabulary()))


def make_judging_world(settings: Mapping[str, object], limits: ToolLimits) -> JudgingWorld:
    """Build the world (the registered factory). Raises ConfigError and UserError for invalid settings or files."""
    chosen = read_settings(JudgingSettings, settings)
    sources = read_cases(chosen)
    per_case = 2 * len(set(chosen.kinds))
    lists: dict[str, list[Task]] = {}
    checks: dict[str, str] = {}
    for split, share in SHARES.items():
        num = max(1, round(share * chosen.num_tasks / per_case))
        lists[split] = []
        cases = list(islice(sources[split], num))
        rare = rare_words(cases) if chosen.is_recorded else {}
        for case in cases:
            for copy in range(chosen.copies if split == "train" else 1):
                name = f"{case.name}:{copy}"
                one = replace(renamed(case, rare, random.Random(name)), name=name) if copy else case
                for truth in _variants(chosen):
                    task = _make_task(one, split, truth, chosen)
                    lists[split].append(task)
                    checks[task.id] = "\n".join(dict.fromkeys(_by_truth(one.checks, truth)))
        random.Random(f"judging:{chosen.seed}:{split}").shuffle(lists[split])
    return JudgingWorld("judging", lists, (), REWARDS, limits, settings=chosen, checks=checks)


def read_cases(settings: JudgingSettings) -> dict[str, Iterator[Case]]:
    """Return the cases of each split, recorded or made by rule. Raises UserError for files that cannot be read."""
    if not settings.is_recorded:
        return {name: generated_cases(name, settings.levels, settings.seed) for name in SHARES}
    recorded = recorded_cases(_rollout_files(settings), settings.outcome, settings.sees)
    return {name: iter(recorded.get(name, ())) for name in SHARES}


def _rollout_files(settings: JudgingSettings) -> list[Path]:
    if settings.data is not None:
        return [Path(settings.data)]
    found = sorted((Path(settings.run or "") / "rollouts").glob("step-*.jsonl.gz"))
    if not found:
        raise UserError(f"{settings.run} has no rollouts of training.", "Set env.settings.run to a run folder.")
    return found


def _variants(settings: JudgingSettings) -> list[str]:
    """Return the truths of a case's tasks: a pair has one for each order."""
    return [truth for kind in dict.fromkeys(settings.kinds) for truth in VERDICTS[kind]]


def _with_text(attempt: str, text: str, rng: random.Random) -> str:
    """Return the attempt with a text after it, before it, or between two lines."""
    lines = attempt.split("\n")
    at = rng.choice((0, len(lines), len(lines), rng.randint(0, len(lines))))
    return "\n".join([*lines[:at], text, *lines[at:]])


def _by_truth(sides: tuple[str, str], truth: str) -> list[str]:
    """Return the judged ones of a case's right and wrong side: both, in the order of the task, or one."""
    right, wrong = sides
    return {"first": [right, wrong], "second": [wrong, right], "right": [right], "wrong": [wrong]}[truth]


def _make_task(case: Case, split: str, truth: str, settings: JudgingSettings) -> Task:
    attempts = _by_truth((case.right, case.wrong), truth)
    kind = "pairwise" if len(attempts) == 2 else "correct"
    rng = random.Random(f"judging:{settings.seed}:{split}:{case.name}:{truth}")
    pushed = ""
    if rng.random() < settings.injections:
        pushed, at = rng.choice([*VERDICTS[kind]]), rng.randrange(len(attempts))
        reply = json.dumps(VERDICTS[kind][pushed])
        text = rng.choice(injections(split)).replace("{verdict}", reply).replace("{claim}", _CLAIMS[pushed])
        attempts[at] = _with_text(attempts[at], text, rng)
    if rng.random() < settings.noise:
        at = rng.randrange(len(attempts))
        for _ in range(rng.choice((1, 1, 2, 3))):
            attempts[at] = _with_text(attempts[at], _noise(rng), rng)
    asked = Task(case.name, (Message(role="user", content=case.question),), None)
    texts, most = [JudgedText(asked, text) for text in attempts], settings.max_chars
    prompt = pair_prompt(texts[0], texts[1], most) if kind == "pairwise" else correct_prompt(texts[0], most)
    family = f"{kind}, injected" if pushed else kind
    tags = {"split": split, "family": family, "level": case.level, _KIND: kind, _PUSHED: pushed}
    return Task(f"{case.name}:{truth}", prompt.messages, truth, tags)
