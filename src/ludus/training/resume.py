"""Check whether a run can be resumed with a configuration, before its folder changes.

Runs of RL, SFT and rejection sampling are checked without torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from ludus.config.schema import Config
from ludus.config.toml import changes
from ludus.diagnostics.trackers import read_metrics
from ludus.errors import StorageError, UserError
from ludus.evaluation.evaluate import plans
from ludus.training.run.run_dir import Kind, RunFolder, check_manifest, kind_of, list_checkpoints, resume_command

_FIXED: tuple[str, ...] = ("model.", "env.", "run.seed", "run.dir")
_FIXED_BY_KIND: Mapping[Kind, str] = {
    "preference": "loss forks run pairs threshold data min_reward_gap tasks samples",
    "reward-model": "kind run data min_reward_gap discount rollouts held_out",
}
"""Settings of a section on which artifacts of the run depend: pairs, reference log-probabilities, examples."""
_FREE = ("model.device",)
_NAMES: Mapping[Kind, str] = {
    "rl": "a run of reinforcement learning",
    "sft": "a fine-tuning run",
    "preference": "a run of preference training",
    "reward-model": "the training of a reward model",
    "rft": "a run of rejection-sampling fine-tuning",
}


def steps_done(folder: RunFolder) -> int:
    """Return the step of the newest checkpoint, 0 without one."""
    checkpoints = list_checkpoints(folder.checkpoints)
    return checkpoints[-1][0] if checkpoints else 0


def describe_resume(folder: RunFolder, config: Config, kind: Kind) -> str:
    """Describe where an incomplete run resumes."""
    unit = "round" if kind == "rft" else "step"
    checkpoints = list_checkpoints(folder.checkpoints)
    done, path = checkpoints[-1] if checkpoints else (0, None)
    if done and done == _planned(folder, config, kind)[1]:
        return f"Resumes after the last {unit}, {done}, from {path}: only evaluation is left."
    start = f"Starts at {unit} 1: no checkpoint yet."
    if path is not None:
        start = f"Resumes at {unit} {done + 1}, from {path}."
    rows = read_metrics(folder.metrics) if folder.metrics.is_file() else []
    last = rows[-1].step if rows else done
    if last == done + 1:
        return f"{start} This {unit} is repeated."
    return start if last <= done else f"{start} {unit.capitalize()}s {done + 1} to {last} are repeated."


def check_kind(folder: RunFolder, kind: Kind) -> None:
    """Raise UserError if the folder belongs to another kind of run."""
    actual = kind_of(folder)
    if actual == kind:
        return
    if actual in ("eval", "sessions"):
        what = "evaluations" if actual == "eval" else "sessions"
        raise UserError(f"{folder.path} has {what} only, and no run to resume.", "Start a run instead.")
    raise UserError(f"{folder.path} is {_NAMES[actual]}.", f"Resume it: {resume_command(folder)}")


def check_resume(folder: RunFolder, config: Config, kind: Kind) -> None:
    """Raise UserError if the run in `folder` cannot be resumed with `config`.

    Model, world, seed, folder and an existing cold start must not change, and the number of steps must not be
    below those done. Raises StorageError if the newest checkpoint or the metrics are damaged.
    """
    for checkpoints in (folder.checkpoints, folder.path / "cold_start" / "checkpoints"):
        for _, path in list_checkpoints(checkpoints)[-1:]:
            check_manifest(path)
    check_metrics(folder, steps_done(folder))
    fixed = _FIXED
    if names := _FIXED_BY_KIND.get(kind):
        fixed = (*fixed, "rollout.", *(f"{kind.replace('-', '_')}.{name}" for name in names.split()))
    if kind == "rl" and list_checkpoints(folder.path / "cold_start" / "checkpoints"):
        fixed = (*fixed, "sft.")
    changed = [c for c in changes(folder.load_config(), config) if c.key.startswith(fixed) and c.key not in _FREE]
    if changed:
        differences = ", ".join(change.conflict for change in changed)
        raise UserError(
            f"A resumed run keeps model, data, cold start, world, seed and folder: {folder.path} has {differences}.",
            "Unset it, or start a new run with it.",
        )
    key, steps = _planned(folder, config, kind)
    done = steps_done(folder)
    if steps < done:
        unit = key.partition(".")[2]
        raise UserError(
            f"{key} is {steps}, but {done} {unit} of the run {folder.path} are done.",
            f"Set more than {done} to continue training.",
        )


def check_metrics(folder: RunFolder, done: int) -> None:
    """Raise StorageError unless `metrics.jsonl` has a line for each completed step."""
    if not done:
        return
    rows = {row.step for row in read_metrics(folder.metrics)} if folder.metrics.is_file() else set()
    missing = [step for step in range(1, done + 1) if step not in rows]
    if missing:
        raise StorageError(
            f"{folder.metrics} has no line for step {missing[0]}, but {done} steps are done.",
            f"Restore the line, or remove checkpoints after step {missing[0] - 1} from {folder.checkpoints}.",
        )


def is_complete(folder: RunFolder, config: Config, kind: Kind) -> bool:
    """Return whether all steps and the final evaluations of a run are done."""
    _, steps = _planned(folder, config, kind)
    if steps_done(folder) != steps:
        return False
    if kind not in ("rl", "rft"):
        return True
    return all((folder.evaluations / f"{plan.name}.json").is_file() for plan in plans(config, steps))


def _planned(folder: RunFolder, config: Config, kind: Kind) -> tuple[str, int]:
    """Return the setting for the number of steps of a run, and its value."""
    match kind:
        case "sft":
            return "sft.steps", config.sft.steps
        case "rft":
            return "rft.rounds", config.rft.rounds
        case "preference":
            from ludus.training.preference.train import planned_steps as planned_preference_steps

            return "preference.steps", planned_preference_steps(folder, config.preference) or steps_done(folder) + 1
        case "reward-model":
            from ludus.training.reward_model.train import planned_steps

            return "reward_model.steps", planned_steps(folder, config) or steps_done(folder) + 1
    return "training.steps", config.training.steps
