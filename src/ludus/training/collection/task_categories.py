"""Categories, stages and perplexities of the training tasks of a curriculum."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.config.schema import Config
from ludus.config.sections.curriculum import CurriculumConfig, GresoConfig, StageConfig
from ludus.config.sections.section import changed
from ludus.envs.base import World
from ludus.errors import ConfigError
from ludus.training.batches.rows import Row, microbatches, row_of_segments
from ludus.training.collection.curriculum import Curriculum, TaskStage, ordered
from ludus.training.datasets.sources import dialogue_segments, text_segments
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.run.session import TrainingSession
from ludus.types import Task

PERPLEXITY_FILE = "perplexity.json"
"""File of the run folder: mean negative log-probability of each task under the initial model, nats per token."""
_DEFAULT_BINS = 3
_LATE = (Need.CRITIC, Need.OUTCOME_CRITIC, Need.PROCESS_REWARD_MODEL, Need.ROLE_BASELINES)


def make_curriculum(
    config: Config, world: World, perplexity: Mapping[str, float] = MappingProxyType({})
) -> Curriculum | None:
    """Return the curriculum of a run, None if the order is by position alone. Raises ConfigError as `stages_of`."""
    settings = config.training.curriculum
    if not settings.is_active:
        return None
    category = categories(settings, world) if settings.has_categories else {}
    tasks = list(world.tasks("train"))
    if settings.order == "perplexity" and perplexity:
        sign = -1 if settings.descending else 1
        tasks.sort(key=lambda task: sign * perplexity[task.id])
    return Curriculum(
        settings, world, config.run.seed, world.rewards[0].name, stages_of(settings, tasks, category), category
    )


def categories(settings: CurriculumConfig, world: World) -> dict[str, str]:
    """Return the category of each training task. Raises ConfigError if a task has none."""
    tasks, by = world.tasks("train"), settings.by
    bins = settings.bins or (_DEFAULT_BINS if by in ("horizon", "length") else None)
    if by == "horizon":
        values = {task.id: _horizon(world, task) for task in tasks}
        if all(map(math.isinf, values.values())):
            raise ConfigError(
                f"training.curriculum.by is horizon, but the world {world.name!r} has no expert.", "Use another."
            )
    elif by == "length":
        values = {task.id: float(sum(len(message["content"]) for message in task.prompt)) for task in tasks}
    else:
        tags = {task.id: _tag(task, by) for task in tasks}
        if bins is None:
            return tags
        values = {name: _number(tag, by) for name, tag in tags.items()}
    ranked = sorted(values.values())
    first = {value: place for place, value in reversed(list(enumerate(ranked)))}
    return {name: str(first[value] * (bins or 1) // len(ranked) + 1) for name, value in values.items()}


def _horizon(world: World, task: Task) -> float:
    """Return the number of turns of the world's expert; infinity without one."""
    shown = world.expert(task)
    return math.inf if shown is None else float(sum(m["role"] == "assistant" for m in shown.messages))


def _tag(task: Task, by: str) -> str:
    if by not in task.tags:
        tags = ", ".join(sorted(task.tags)) or "none"
        text = f"The task {task.id!r} has no tag {by!r} (training.curriculum.by)."
        raise ConfigError(text, f"It has {tags}; horizon and length need no tag.")
    return task.tags[by]


def _number(tag: str, by: str) -> float:
    try:
        return float(tag)
    except ValueError:
        text = f"training.curriculum.bins needs numbers, and a tag {by!r} is {tag!r}."
        raise ConfigError(text, "Unset training.curriculum.bins.") from None


def stages_of(settings: CurriculumConfig, tasks: list[Task], category: Mapping[str, str]) -> tuple[TaskStage, ...]:
    """Return the stages; one with all tasks if none are configured. Raises ConfigError for a value without tasks."""
    configured: dict[str, StageConfig] = dict(settings.stages)
    if not configured and settings.order == "staged":
        configured = {name: StageConfig(values=[name]) for name in ordered(set(category.values()))}
    if not configured:
        configured = {"all": StageConfig()}
    stages, before = [], set[str]()
    for name, stage in configured.items():
        for value in stage.values:
            if value not in category.values():
                known = ", ".join(ordered(set(category.values())))
                text = (
                    f"training.curriculum.stages.{name}.values has {value!r}, which is not a value of {settings.by!r}."
                )
                raise ConfigError(text, f"Values: {known}.")
        values = {*stage.values} | (before if settings.cumulative and stage.values else set())
        before |= values
        own = tuple(task for task in tasks if not values or category[task.id] in values)
        stages.append(TaskStage(name, stage, own))
    return tuple(stages)


def check_curriculum(config: Config, world: World, algorithm: Algorithm) -> None:
    """Raise ConfigError for settings of `training.curriculum` that have no effect or cannot be combined."""
    settings = config.training.curriculum
    for text, hint in _conflicts(config, world, algorithm):
        raise ConfigError(text, hint)
    curriculum = make_curriculum(config, world)
    if curriculum is None:
        return
    chunk = config.training.prompts_per_step * (algorithm.max_resample_rounds + 1)
    for stage in curriculum.stages:
        if len(stage.tasks) < chunk:
            text = (
                f"One step may need {chunk} tasks, but the stage {stage.name} of the curriculum has {len(stage.tasks)}."
            )
            raise ConfigError(text, "Lower training.prompts_per_step, or set training.curriculum.bins or cumulative.")
        limits, rollout = stage.settings.limits, config.rollout
        for name, value in limits.items():
            most = {"max_turns": rollout.max_turns, "max_seq_len": rollout.max_seq_len}[name]
            if value > most:
                text = f"training.curriculum.stages.{stage.name}.{name} ({value}) is above rollout.{name} ({most})."
                raise ConfigError(text, f"Raise rollout.{name}, which the last stage uses.")
        if limits.get("max_seq_len", rollout.max_seq_len) <= rollout.max_tokens_per_turn:
            text = f"training.curriculum.stages.{stage.name}.max_seq_len is not above rollout.max_tokens_per_turn."
            raise ConfigError(text, "Raise it, or lower rollout.max_tokens_per_turn.")
    if settings.order == "perplexity" and settings.perplexity_of == "demonstration":
        first = next((task for task in world.tasks("train") if world.expert(task) is None), None)
        if first is not None:
            text = f"training.curriculum.perplexity_of is demonstration, but {world.name!r} has none of {first.id!r}."
            raise ConfigError(text, "Set training.curriculum.perplexity_of = prompt.")


def _conflicts(config: Config, world: World, algorithm: Algorithm) -> Iterator[tuple[str, str]]:
    """Yield the reasons, with remedies, why the section cannot be used."""
    settings, order = config.training.curriculum, f"training.curriculum.order = {config.training.curriculum.order}"
    by_state = settings.order in ("bandit", "target", "learnability")
    weights = {(member.weight, member.weight_end) for member in config.env.mixture.values()}
    evolves, mode = settings.evolve.every > 0, config.training.mode
    if settings.greso != GresoConfig() and not algorithm.greso:
        yield "training.curriculum.greso has no effect: algorithm.greso is off.", "Set algorithm.greso = true."
    if changed(settings.evolve) and not evolves:
        yield (
            "training.curriculum.evolve has no effect: training.curriculum.evolve.every is 0.",
            "Set it, for example to 10.",
        )
    if by_state and algorithm.greso:
        yield f"algorithm.greso cannot be combined with {order}, which chooses by success itself.", "Unset one of them."
    if settings.order == "bandit" and any(map(algorithm.advantage_spec.has, _LATE)):
        text = f"{order} reads advantages before the update; those of {algorithm.advantage} are known after it."
        yield text, "Use an advantage that compares groups (grpo), or training.curriculum.order = learnability."
    if settings.order != "shuffled" and len(weights) > 1:
        yield (
            f"The weights of env.mixture have no effect with {order}.",
            "Unset them, or set training.curriculum.by = world.",
        )
    if evolves and (mode == "async" or config.rollout.partial.is_set):
        what = "rollout.partial" if config.rollout.partial.is_set else f"training.mode = {mode}"
        yield f"training.curriculum.evolve cannot be combined with {what}.", "Set training.mode = sync or one_step."
    if evolves and not world.implements("variant"):
        text = f"training.curriculum.evolve makes variants of tasks, and the world {world.name!r} has none."
        yield text, "Use puzzles or math, or define `variant` in the world (docs/use/curricula.md)."


def perplexities(session: TrainingSession, path: Path) -> dict[str, float]:
    """Return the mean negative log-probability of each training task in nats per token, from `path` if it exists.

    The model is the session's, at temperature 1, which must still be the initial one. Empty if the order needs none.
    """
    if session.config.training.curriculum.order != "perplexity":
        return {}
    if path.is_file():
        stored: dict[str, float] = json.loads(path.read_text("utf-8"))
        return stored
    tasks, scorer = session.world.tasks("train"), LogprobScorer(session.model)
    rows = [_row(session, task) for task in tasks]
    found: dict[str, float] = {}
    parameter = next(session.model.parameters())
    budget = session.config.training.microbatch_tokens
    with torch.no_grad():
        for part in microbatches(rows, budget, parameter.device, torch.float32, shared=scorer.shares_prefixes):
            sums = scorer.score(part.tokens, part.trains).logprobs.double().sum(1).tolist()
            for i, total in zip(part.index, sums, strict=True):
                found[tasks[i].id] = -total / max(sum(rows[i].trains[1:]), 1)
    ordered_by_task = {task.id: found[task.id] for task in tasks}
    path.write_text(json.dumps(ordered_by_task) + "\n", "utf-8")
    return ordered_by_task


def _row(session: TrainingSession, task: Task) -> Row:
    shown = session.world.expert(task) if session.config.training.curriculum.perplexity_of == "demonstration" else None
    if shown is not None:
        return row_of_segments(dialogue_segments(session.renderer, shown))
    tools = session.world.environment(task).tools
    return row_of_segments(text_segments(session.renderer.prompt(task.prompt, tools)))
