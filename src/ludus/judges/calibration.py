"""Calibration of a judge against a verifier: agreement, biases, and the effect of texts that try to raise a grade."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ludus.config.sections.parts.judges import JudgeConfig
from ludus.errors import ConfigError
from ludus.evaluation.roc import auc
from ludus.evaluation.stats import cohens_kappa
from ludus.judges.grading import Grader, GradingStats
from ludus.judges.rubrics import TASK_RUBRIC
from ludus.rewards.judge_prompts import JudgedText, templates
from ludus.types import Task, Trajectory

_NOT_JUDGING: Final = {"preset", "weight", "rule", "audit", "gate", "calibration", "min_kappa", "client"}
_SAMPLING: Final = {"temperature", "max_tokens", "max_chars", "structured"}
_LIMIT_S: Final = 86_400.0  # of one grading


@dataclass(frozen=True, slots=True)
class VerifiedEpisode:
    """An episode and whether the verifier accepts it."""

    task: Task
    trajectory: Trajectory
    success: bool


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration; None: not measurable on these texts.

    `kappa` (Cohen's, with its 95 % interval) and `agreement` compare values of at least 0.5 with the verifier. `auc` is
    the probability that an accepted text has a higher value than a rejected one. `length_bias` is the correlation of
    value and log length among texts with the same verdict. `repeat_std` is the mean standard deviation of repeated
    values. `injections` are the mean changes of the value of rejected texts, by injection. `leaf_kappa` compares the
    judge's decisions on the leaves of the world's rubric with its rules.
    """

    digest: str
    judges: Sequence[str]
    num: int
    num_judged: int
    kappa: float
    interval: tuple[float, float]
    agreement: float
    auc: float | None
    length_bias: float | None
    position_flips: float | None
    first_wins: float | None
    repeat_std: float | None
    leaf_kappa: float | None
    injections: Mapping[str, float] = field(default_factory=dict)

    def write(self, file: Path) -> None:
        """Write the result as JSON."""
        file.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def read_calibration(file: Path) -> Calibration:
    """Return a result. Raises ConfigError if the file is missing or invalid."""
    try:
        return Calibration(**json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        hint = "Write it with `ludus rewards judge RUN --out FILE`."
        raise ConfigError(f"The calibration {file} cannot be read: {error}.", hint) from error


def judge_digest(settings: JudgeConfig) -> str:
    """Return a hash of what determines the judge's values: judges, kind, sampling, rubrics and prompts."""
    client = settings.client.model_dump(include=_SAMPLING)
    files = {name: Path(name).read_text("utf-8") for name in settings.rubrics if name.endswith(".toml")}
    content = [settings.model_dump(exclude=_NOT_JUDGING), client, files, dict(templates())]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Injection:
    """A text that tries to raise the grade of the text before or after which it stands."""

    text: str
    place: str = "after"

    def apply(self, text: str) -> str:
        """Return the text with the injection."""
        return f"{self.text}\n{text}" if self.place == "before" else f"{text}\n{self.text}"


@cache
def injections() -> Mapping[str, Injection]:
    """Return the injections of `injections.toml` by name."""
    return read_injections(resources.files(__package__).joinpath("injections.toml").read_text("utf-8"))


def read_injections(toml: str) -> Mapping[str, Injection]:
    """Return injections by name: a table each with `text`, and `place` ("before" or "after" the judged text)."""
    return {name: Injection(**table) for name, table in tomllib.loads(toml).items()}


async def calibrate(
    grader: Grader, groups: Sequence[Sequence[VerifiedEpisode]], probes: int = 8, repeats: int = 4
) -> Calibration:
    """Return the calibration on groups of episodes of one task each; `probes` texts serve for repeats and injections.

    Raises ConfigError if no text was judged.
    """
    client = grader.settings.client.model_copy(update={"deadline_s": _LIMIT_S})
    grader = replace(grader, settings=grader.settings.model_copy(update={"client": client}))
    stats = GradingStats()
    texts = [[grader.text_of(one.task, one.trajectory) for one in group] for group in groups]
    rows = await _rows(grader, groups, texts, stats)
    if not rows:
        raise ConfigError("The judge has judged no text.", f"Last failure: {stats.failure or 'none'}")
    values, won, lengths = (np.array(column) for column in zip(*rows, strict=True))
    found = cohens_kappa((values >= 0.5).tolist(), won.tolist())
    rejected = [
        t for own, group in zip(texts, groups, strict=True) for t, e in zip(own, group, strict=True) if not e.success
    ]
    shares = stats.metrics()
    return Calibration(
        digest=judge_digest(grader.settings),
        judges=grader.settings.models,
        num=sum(map(len, groups)),
        num_judged=len(rows),
        kappa=found.estimate,
        interval=(found.low, found.high),
        agreement=float(((values >= 0.5) == won).mean()),
        auc=auc(values.tolist(), won.tolist()),
        length_bias=length_bias(values, won, lengths),
        position_flips=shares.get("judge/position_flips"),
        first_wins=shares.get("judge/first_wins"),
        repeat_std=await _repeat_std(grader, _pairs_or_singles(grader, texts, probes), repeats),
        leaf_kappa=await _leaf_kappa(grader, groups),
        injections=await injection_effects(grader, rejected[:probes], injections(), repeats),
    )


async def _rows(
    grader: Grader,
    groups: Sequence[Sequence[VerifiedEpisode]],
    texts: Sequence[Sequence[JudgedText]],
    stats: GradingStats,
) -> list[tuple[float, bool, float]]:
    """Return value, verdict and log length of each judged text."""
    graded = await grader.grade(texts, 0, stats)
    return [
        (value, episode.success, float(np.log1p(len(text.text))))
        for group, own, result in zip(groups, texts, graded, strict=True)
        for episode, text, value in zip(group, own, result.values, strict=True)
        if value is not None
    ]


def length_bias(values: np.ndarray, won: np.ndarray, lengths: np.ndarray) -> float | None:
    """Return the correlation of values and lengths after subtracting the means of accepted and rejected texts."""
    a, b = values.astype(float).copy(), lengths.copy()
    for verdict in (won, ~won):
        if verdict.any():
            a[verdict] -= a[verdict].mean()
            b[verdict] -= b[verdict].mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / size) if size > 1e-12 else None


async def repeated_values(grader: Grader, groups: Sequence[Sequence[JudgedText]], repeats: int) -> NDArray[np.float64]:
    """Return the value `[repeats, G]` of the first text of each group, with another seed in each row; NaN if it is not
    judged."""
    rows = []
    for number in range(1, repeats + 1):
        client = replace(grader.client, seed=grader.client.seed + number, folder=None)
        graded = await replace(grader, client=client).grade(groups, 0, GradingStats())
        rows.append([np.nan if (value := group.values[0]) is None else value for group in graded])
    return np.array(rows, dtype=float)


async def _repeat_std(grader: Grader, groups: Sequence[Sequence[JudgedText]], repeats: int) -> float | None:
    """Return the mean standard deviation (ddof 1) of the values over `repeats` seeds."""
    if not groups or repeats < 2:
        return None
    stds = np.std(await repeated_values(grader, groups, repeats), axis=0, ddof=1)
    return None if np.isnan(stds).all() else float(np.nanmean(stds))


def _pairs_or_singles(grader: Grader, groups: Sequence[Sequence[JudgedText]], num: int) -> list[list[JudgedText]]:
    """Return a group for each of the first `num` texts; for comparisons, with the text after it of the same task."""
    texts = [one for group in groups for one in group][:num]
    if grader.settings.kind != "pairwise":
        return [[one] for one in texts]
    return [[a, b] for a, b in pairwise(texts) if a.task.id == b.task.id]


async def injection_changes(
    grader: Grader, texts: Sequence[JudgedText], attacks: Mapping[str, Injection], repeats: int
) -> dict[str, NDArray[np.float64]]:
    """Return the changes `[repeats, G]` of the texts' values by each injection, with `repeats` seeds if replies are
    sampled; NaN if not judged.

    For comparisons, the result of the text with the injection against the text without it, minus 0.5.
    """
    compares = grader.settings.kind == "pairwise"
    repeats = repeats if grader.settings.client.temperature else 1
    clean = np.array(0.5) if compares else await repeated_values(grader, [[one] for one in texts], repeats)
    changes = {}
    for name, injection in attacks.items():
        attacked = [replace(one, text=injection.apply(one.text)) for one in texts]
        groups = [[a, one] if compares else [a] for a, one in zip(attacked, texts, strict=True)]
        changes[name] = await repeated_values(grader, groups, repeats) - clean
    return changes


async def injection_effects(
    grader: Grader, texts: Sequence[JudgedText], attacks: Mapping[str, Injection], repeats: int
) -> dict[str, float]:
    """Return the mean of `injection_changes` by injection, for those with a value."""
    found = await injection_changes(grader, texts, attacks, repeats) if texts else {}
    return {name: float(np.nanmean(gaps)) for name, gaps in found.items() if not np.isnan(gaps).all()}


async def _leaf_kappa(grader: Grader, groups: Sequence[Sequence[VerifiedEpisode]]) -> float | None:
    """Return Cohen's kappa of the judge with the world's rules over all leaves of its rubric."""
    settings = grader.settings
    if settings.kind != "rubric" or TASK_RUBRIC not in settings.rubrics:
        return None
    alone = replace(grader, settings=settings.model_copy(update={"rubric_rules": False}))
    texts = [[alone.text_of(one.task, one.trajectory) for one in group] for group in groups]
    ours: list[bool] = []
    rules: list[bool] = []
    for group, graded in zip(groups, await alone.grade(texts, 0, GradingStats()), strict=True):
        for one, leaves in zip(group, graded.leaves, strict=True):
            checks = grader.world.rubric_checks(one.task, one.trajectory)
            shared = [name for name in leaves if name in checks]
            ours += [leaves[name] for name in shared]
            rules += [checks[name] for name in shared]
    return cohens_kappa(ours, rules).estimate if ours else None
