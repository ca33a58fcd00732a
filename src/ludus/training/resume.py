"""Whether a run can go on with what is asked: decided before anything in its folder changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ludus.config.schema import Config
from ludus.config.toml import value_text
from ludus.diagnostics.trackers import read_metrics
from ludus.errors import StorageError, UserError
from ludus.evaluation.evaluate import plans
from ludus.training.preference.train import steps_of_run
from ludus.training.reward_model.train import planned_steps
from ludus.training.run.checkpoint import list_checkpoints
from ludus.training.run.manifest import check_manifest
from ludus.training.run.run_dir import Kind, RunFolder, kind_of, resume_command

_KEPT = ("model.", "env.", "run.seed", "run.folder")
_KEPT_BY_KIND: Mapping[Kind, tuple[str, ...]] = {
    "preference": (
        "preference.loss",
        "preference.run",
        "preference.pairs",
        "preference.data",
        "preference.min_reward_gap",
        "preference.tasks",
        "preference.samples",
        "rollout.",
    ),
    "reward-model": (
        "reward_model.kind",
        "reward_model.run",
        "reward_model.data",
        "reward_model.min_reward_gap",
        "reward_model.discount",
        "reward_model.rollouts",
        "reward_model.held_out",
        "rollout.",
    ),
}
"""What only runs of one kind keep: pairs, what the reference thinks of them, and examples are made once."""
_FREE = ("model.device",)
_NAMES: Mapping[Kind, str] = {
    "rl": "a run of reinforcement learning",
    "sft": "a fine-tuning run",
    "preference": "a run of preference training",
    "reward-model": "the training of a reward model",
    "rft": "a run of rejection-sampling fine-tuning",
}


@dataclass(frozen=True, slots=True)
class ChangedSetting:
    """A setting by its dotted name, with its value in one configuration and in another."""

    key: str
    old: object
    new: object


def changes(old: Config, new: Config) -> list[ChangedSetting]:
    """The settings that differ, in the order of the schema; a section that is none on one side is one."""
    return list(_changes(old.model_dump(), new.model_dump(), ""))


def steps_done(folder: RunFolder) -> int:
    """The step of the newest checkpoint, 0 without one."""
    found = list_checkpoints(folder.checkpoints)
    return found[-1][0] if found else 0


def place_of(folder: RunFolder, config: Config, kind: Kind) -> str:
    """Where a run that is not complete goes on, in a sentence or two."""
    unit = "round" if kind == "rft" else "step"
    found = list_checkpoints(folder.checkpoints)
    done, path = found[-1] if found else (0, None)
    if done and done == _planned(folder, config, kind)[1]:
        return f"Resumes after the last {unit}, {done}, from {path}: what is left is to evaluate."
    place = f"Begins at {unit} 1: no checkpoint yet."
    if path is not None:
        place = f"Resumes at {unit} {done + 1}, from {path}."
    rows = read_metrics(folder.metrics) if folder.metrics.is_file() else []
    last = rows[-1].step if rows else done
    if last == done + 1:
        return f"{place} This {unit} was done already, and is done again."
    return place if last <= done else f"{place} Those to {last} were done already, and are done again."


def check_kind(folder: RunFolder, kind: Kind) -> None:
    """Raise UserError for a folder of another kind of run."""
    found = kind_of(folder)
    if found == kind:
        return
    if found == "eval":
        raise UserError(f"{folder.path} holds evaluations, and no run to go on with.", "Start a run instead.")
    raise UserError(f"{folder.path} is {_NAMES[found]}.", f"Go on with it: {resume_command(folder)}")


def check_resume(folder: RunFolder, config: Config, kind: Kind) -> None:
    """Raise UserError where the run in `folder` cannot go on with `config`.

    It keeps its model, world, seed and folder, and its cold start once there is one; and it has no fewer
    steps than are done. Raises StorageError where its newest checkpoint or its metrics are damaged.
    """
    for shelf in (folder.checkpoints, folder.path / "cold_start" / "checkpoints"):
        for _, path in list_checkpoints(shelf)[-1:]:
            check_manifest(path)
    check_metrics(folder, steps_done(folder))
    kept = (*_KEPT, *_KEPT_BY_KIND.get(kind, ()))
    if kind == "rl" and list_checkpoints(folder.path / "cold_start" / "checkpoints"):
        kept = (*kept, "sft.")
    found = [
        c for c in changes(folder.load_config(), config) if c.key.startswith(kept) and c.key not in _FREE
    ]
    if found:
        has = ", ".join(f"{c.key} = {value_text(c.old)} (not {value_text(c.new)})" for c in found)
        raise UserError(
            f"A resumed run keeps model, data, cold start, world, seed and folder: {folder.path} has {has}.",
            "Leave the setting out, or start a new run with it.",
        )
    key, steps = _planned(folder, config, kind)
    done = steps_done(folder)
    if steps < done:
        unit = key.partition(".")[2]
        raise UserError(
            f"{key} is {steps}, and {done} {unit} of the run {folder.path} are done.",
            f"Give more than {done} to train on.",
        )


def check_metrics(folder: RunFolder, done: int) -> None:
    """Raise StorageError unless `metrics.jsonl` has a line for each step that is done."""
    if not done:
        return
    rows = {row.step for row in read_metrics(folder.metrics)} if folder.metrics.is_file() else set()
    missing = [step for step in range(1, done + 1) if step not in rows]
    if missing:
        raise StorageError(
            f"{folder.metrics} has no line for step {missing[0]}, and {done} steps are done.",
            f"Put the line back, or remove what {folder.checkpoints} has after step {missing[0] - 1}.",
        )


def is_complete(folder: RunFolder, config: Config, kind: Kind) -> bool:
    """Whether all steps are done and, where a run evaluates itself, evaluated."""
    _, steps = _planned(folder, config, kind)
    if steps_done(folder) != steps:
        return False
    if kind not in ("rl", "rft"):
        return True
    return all((folder.evaluations / f"{plan.name}.json").is_file() for plan in plans(config, steps))


def _planned(folder: RunFolder, config: Config, kind: Kind) -> tuple[str, int]:
    """The setting that says how many steps a run has, and their number."""
    match kind:
        case "sft":
            return "sft.steps", config.sft.steps
        case "rft":
            return "rft.rounds", config.rft.rounds
        case "preference":
            return "preference.steps", steps_of_run(folder, config.preference) or steps_done(folder) + 1
        case "reward-model":
            return "reward_model.steps", planned_steps(folder, config) or steps_done(folder) + 1
    return "training.steps", config.training.steps


def _changes(old: Mapping[str, object], new: Mapping[str, object], prefix: str) -> Iterator[ChangedSetting]:
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _changes(before, after, f"{prefix}{name}.")
        elif before != after:
            yield ChangedSetting(f"{prefix}{name}", before, after)
