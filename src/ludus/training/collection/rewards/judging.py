"""The reward part of LLM judges, added to the episodes of a step before its rewards are combined.

Judges receive the texts of all groups of a step at once and have `rewards.judge.client.deadline_s` seconds. No episode
fails because of a judge: an episode that is not judged takes the default and is counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ludus.chat.render import Renderer, TemplateRenderer
from ludus.config.schema import Config
from ludus.config.sections.parts.judges import POLICY_JUDGE, JudgeConfig
from ludus.engines.base import Engine, seed_for
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.embedded.kv_cache import PAGE
from ludus.engines.models.loading import load_model, load_tokenizer, num_positions
from ludus.envs.base import World
from ludus.envs.task_files import read_text
from ludus.errors import ConfigError
from ludus.judges.calibration import judge_digest, read_calibration
from ludus.judges.client import EndpointJudge, EngineJudge, JudgeBackend, JudgeClient
from ludus.judges.grading import Grader, GradingStats, reference_of
from ludus.judges.kinds import fill_missing
from ludus.judges.rubrics import TASK_RUBRIC, WRITTEN_RUBRIC, load_rubric
from ludus.rewards.base import Reward
from ludus.rewards.judge_prompts import TRAINED_KINDS, JudgedText
from ludus.rewards.registry import JUDGE_DEFAULT, JUDGE_PART
from ludus.rollouts.openai_client import OpenAIClient, OpenAIClientSettings
from ludus.rollouts.scheduler import Episode
from ludus.rollouts.trees import merge_paths
from ludus.training.run.run_dir import RunFolder, policy_path
from ludus.types import WORLD_TAG, Task, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Member:
    """A path of an episode: its text, None if no judge is needed, and its value if that is known."""

    trajectory: Trajectory
    text: JudgedText | None = None
    value: float | None = None
    is_decided: bool = False
    """Whether the rule decided, so that the value is only compared with it."""


@dataclass
class GroupJudge:
    """Adds the reward part of the judges. Its only state is the cache of `client`, which `judge.jsonl` restores."""

    grader: Grader
    seed: int = 0
    _stats: dict[int, GradingStats] = field(default_factory=dict, init=False)

    @property
    def settings(self) -> JudgeConfig:
        return self.grader.settings

    async def close(self) -> None:
        """Close the judges, except for the policy."""
        await self.grader.client.close()

    async def add_parts(self, step: int, groups: Sequence[Sequence[Episode]]) -> list[list[Episode]]:
        """Return the groups with the part of the judges; failed episodes are unchanged. Never raises an error of a
        judge."""
        stats = self._stats.setdefault(step, GradingStats())
        planned = [[[self._member(e.task, path, stats) for path in _paths(e)] for e in group] for group in groups]
        texts = [[one.text for own in group for one in own if one.text is not None] for group in planned]
        graded = await self.grader.grade(texts, step, stats)
        result = []
        for group, members, found in zip(groups, planned, graded, strict=True):
            pairs = iter(zip(found.values, fill_missing(self.settings, found.values), strict=True))
            new = [[self._with_part(one, pairs, stats) for one in own] for own in members]
            both = zip(group, new, strict=True)
            result.append([replace(e, trajectory=merge_paths(e.trajectory, own)) for e, own in both])
        return result

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a step: counts of requests and failures, judged episodes and the share of defaults."""
        stats = self._stats.setdefault(step, GradingStats())
        judged, missing = stats.counts["judged"], stats.counts["defaulted"]
        shares = {"judge/judged": float(judged), "judge/defaulted": missing / (judged + missing or 1)}
        return shares | stats.metrics()

    def timings(self, step: int) -> dict[str, float]:
        """Return the seconds of a step, and forget its counts."""
        return self._stats.pop(step, GradingStats()).timings()

    def was_slow(self, step: int) -> bool:
        """Return whether a time limit of a judge fired in the step."""
        counts: Counter[str] = self._stats.get(step, GradingStats()).counts
        return counts["late"] + counts["timeouts"] > 0

    def _member(self, task: Task, trajectory: Trajectory, stats: GradingStats) -> _Member:
        """Return what is known of a path before judging; an empty text has the value 0."""
        settings, rewards = self.settings, trajectory.rewards
        is_decided = settings.rule is not None and settings.rule in rewards
        if is_decided and not self._is_audited(trajectory):
            return _Member(trajectory, is_decided=True)
        if settings.gate is not None and rewards.get(settings.gate, 0.0) < 1:
            return _Member(trajectory, None, 0.0, is_decided)
        try:
            text = self.grader.text_of(task, trajectory)
        except (
            Exception
        ) as error:  # boundary: rubric and reference are the world's; the episode takes the neutral value
            stats.counts["errors"] += 1
            log.warning("task %s has no rubric or reference: %r", task.id, error)
            return _Member(trajectory, None, settings.client.neutral, is_decided)
        if not text.text.strip():
            return _Member(trajectory, None, 0.0, is_decided)
        return _Member(trajectory, text, None, is_decided)

    def _is_audited(self, trajectory: Trajectory) -> bool:
        draw = seed_for(self.seed, "audit", trajectory.task_id, trajectory.sample, trajectory.token_ids) / 2**63
        return draw < self.settings.audit

    def _with_part(self, one: _Member, pairs: Iterator[tuple[float | None, float]], stats: GradingStats) -> Trajectory:
        """Return the path with its part, and whether that is the default; `pairs` are the values of judged texts."""
        value, filled = (one.value, one.value) if one.text is None else next(pairs)
        if one.text is not None:
            stats.counts["defaulted" if value is None else "judged"] += 1
        if one.is_decided:
            parts = {} if value is None else {JUDGE_PART: value}
        else:
            name = self.settings.rule or JUDGE_PART
            parts = {name: 0.0 if filled is None else filled, JUDGE_DEFAULT: float(value is None)}
        return replace(one.trajectory, rewards={**one.trajectory.rewards, **parts})


def _paths(episode: Episode) -> Sequence[Trajectory]:
    return () if episode.trajectory.failure is not None else episode.trajectory.attempts()


def make_judge(
    config: Config, world: World, folder: Path | None, policy: tuple[Engine, Renderer] | None
) -> GroupJudge | None:
    """Build the configured judges, with `policy` for the current one; None without a judge. Raises UserError.

    `folder` is the run folder with the replies so far.
    """
    settings = config.rewards.judge
    if not settings.is_on:
        return None
    backends = [_backend(name, config, policy) for name in settings.models]
    client = JudgeClient(backends, settings.client, config.run.seed, folder)
    return GroupJudge(Grader(settings, client, world), config.run.seed)


def _backend(name: str, config: Config, policy: tuple[Engine, Renderer] | None) -> JudgeBackend:
    settings = config.rewards.judge
    limits = settings.client
    if name == POLICY_JUDGE and policy is not None:
        return EngineJudge(name, *policy)
    if settings.url is not None:
        key = (
            read_text(Path(limits.key_file), "Check rewards.judge.client.key_file.").strip() if limits.key_file else ""
        )
        endpoint = OpenAIClientSettings(
            settings.url, name, key, limits.timeout_s, limits.concurrency, retries=limits.retries
        )
        return EndpointJudge(OpenAIClient(endpoint))
    return EngineJudge(name, *load_judge(name, config))


def load_judge(name: str, config: Config) -> tuple[Engine, Renderer]:
    """Return an engine and renderer of a model folder, or of the newest checkpoint of a run folder."""
    folder, limits = RunFolder(Path(name)), config.rewards.judge.client
    path = str((policy_path(folder) if folder.config.is_file() else None) or name)
    tokenizer, model = load_tokenizer(path), load_model(path, config.model.dtype, config.model.device)
    context = min(num_positions(model) or limits.context_tokens, limits.context_tokens)
    size = EngineSettings(context, limits.concurrency, limits.concurrency * (context + PAGE), threads=1)
    return LocalEngine(model, tokenizer, size, copy=False), TemplateRenderer(tokenizer)


def check_judge(config: Config, world: World, parts: Sequence[Reward]) -> None:
    """Raise ConfigError if the judge cannot grade the tasks of the world, or lacks the required calibration."""
    settings = config.rewards.judge
    if not settings.is_on:
        return
    named = {part.name: part for part in parts}
    for setting, name in (("rule", settings.rule), ("gate", settings.gate)):
        if name is not None and name not in named:
            raise ConfigError(
                f"rewards.judge.{setting} names {name!r}, which is not a part.", f"Parts: {', '.join(named)}."
            )
    if settings.rule is not None and not named[settings.rule].may_abstain:
        message = f"rewards.judge.rule names {settings.rule!r}, which decides every episode."
        raise ConfigError(message, "Name a part with may_abstain, or set rewards.judge.gate.")
    if JUDGE_PART in named:
        raise ConfigError(f"The world already has a reward called {JUDGE_PART}.", "Give it another name.")
    if POLICY_JUDGE in settings.models and config.cluster.enabled:
        raise ConfigError(
            "The policy cannot judge on a cluster.", "Name a model, or serve one and set rewards.judge.url."
        )
    _check_material(settings, world)
    for name in settings.models if settings.kind not in TRAINED_KINDS else ():
        runs = [one for one in map(RunFolder, (Path(name), Path(name) / "../..")) if one.config.is_file()]
        if any(one.load_config().env.name == "judging" for one in runs):
            message = f"The judge {name} was trained on other prompts than those of rewards.judge.kind={settings.kind}."
            raise ConfigError(message, f"Set rewards.judge.kind to {' or '.join(TRAINED_KINDS)}.")
    if settings.calibration is not None:
        _check_calibration(settings)


def _check_material(settings: JudgeConfig, world: World) -> None:
    """Raise ConfigError for an unknown rubric, and for a task without the rubric or reference answer of its world."""
    for name in settings.rubrics:
        if name not in (TASK_RUBRIC, WRITTEN_RUBRIC):
            load_rubric(name)
    for task in {one.tags.get(WORLD_TAG): one for one in reversed(world.tasks("train"))}.values():
        if TASK_RUBRIC in settings.rubrics and world.rubric(task) is None:
            raise ConfigError(f"Task {task.id} has no rubric of its world.", "Use other rewards.judge.rubrics.")
        if settings.kind == "reference" and not reference_of(world, task):
            raise ConfigError(f"Task {task.id} has no reference answer.", "Use another rewards.judge.kind.")


def _check_calibration(settings: JudgeConfig) -> None:
    found = read_calibration(Path(settings.calibration or ""))
    if found.digest != judge_digest(settings):
        message = f"{settings.calibration} is the calibration of another judge or of other settings."
        raise ConfigError(message, "Calibrate this one: ludus rewards judge RUN.")
    if not found.kappa >= settings.min_kappa:
        message = f"Cohen's kappa of the judge is {found.kappa:.2f}, below rewards.judge.min_kappa."
        raise ConfigError(message, "Use another judge or rubric, or lower min_kappa.")
