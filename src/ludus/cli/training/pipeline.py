"""Train in stages: a TOML file lists them in order, and each starts from the checkpoint of the previous one."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ludus.cli.training.stages import STAGES, resume_hint
from ludus.cli.ui.terminal import load_libraries, make_console, print_line, print_text
from ludus.config.load import load_config
from ludus.config.pipeline import Stage, StageKind, describe_cuts, load_pipeline, quick_cuts
from ludus.config.schema import Config
from ludus.config.sections.rewards import RewardsConfig
from ludus.config.toml import changes
from ludus.envs.registry import build_world, check_sandbox
from ludus.errors import ConfigError, LudusError, UserError
from ludus.rewards.registry import added_parts
from ludus.rollouts.rollout_files import replaced_file
from ludus.training.run.preflight import check_extras, check_new_run, check_plugins
from ludus.training.run.run_dir import RunFolder, latest_checkpoint

SAMPLES: frozenset[StageKind] = frozenset({"rft", "rl"})
"""Stages that sample rollouts, usable as training data of later stages."""
_FREE = ("model.device", "run.threads")
_COPY = "pipeline.toml"


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Run the incomplete stages."""
    console, folder = make_console(), args.folder or Path("runs") / args.file.stem
    stages = [replace(stage, settings=(*stage.settings, *overrides)) for stage in load_pipeline(args.file)]
    if args.quick:
        stages = [_quick_stage(stage, overrides, console) for stage in stages]
    origin = " and ".join([str(args.file), *(["the command line"] if overrides else [])])
    configs = [_load_stage(stage, origin) for stage in stages]
    for stage, config in zip(stages, configs, strict=True):
        if not (folder / stage.name).exists():
            with _prefix_errors(stage):
                _check_pending(stage, config)
    _open_folder(folder, stages, args.file)
    for stage in stages:
        own = RunFolder(folder / stage.name)
        if own.config.is_file():
            _check_same(stage, own, stage_config(stage, folder))
    words = ["ludus", "pipeline", str(args.file), *(["--folder", str(folder)] if args.folder else [])]
    words += ["--quick"] if args.quick else []
    with resume_hint(shlex.join([*words, *overrides])):
        for stage in stages:
            print_line(console, f"Stage {stage.number} of {len(stages)}: {stage.kind} {stage.recipe}")
            own = RunFolder(folder / stage.name)
            config = stage_config(stage, folder)
            if own.config.is_file():  # a complete stage is left unchanged
                STAGES[stage.kind].resume(own, ())
            else:
                STAGES[stage.kind].start(config, Path(stage.recipe).stem, stage.recipe)
    print_line(console, f"The pipeline is complete: {latest_checkpoint(RunFolder(folder / stages[-1].name))[1]}")


def _quick_stage(stage: Stage, overrides: Sequence[str], console: Console) -> Stage:
    with _prefix_errors(stage):
        cuts = quick_cuts(stage.kind, load_config(stage.recipe, stage.settings), overrides)
    print_text(console, f"Stage {stage.number} ({stage.kind}). {describe_cuts(cuts)}")
    return replace(stage, settings=(*stage.settings, *(word for cut in cuts for word in cut.words)))


def _load_stage(stage: Stage, origin: str) -> Config:
    with _prefix_errors(stage):
        config = load_config(stage.recipe, stage.settings, overrides_origin=origin)
        added_parts(config.rewards)
    if stage.kind == "reward-model" and not (_has_source(stage, config) or _earlier(stage, *SAMPLES)):
        hint = "Add a stage of rft or rl before it, or set reward_model.run or reward_model.data."
        raise ConfigError(f"Stage {stage.number} ({stage.kind}) has no training data.", hint)
    return config


def _check_pending(stage: Stage, config: Config) -> None:
    """Check a stage that has not started, except the rewards of a reward model that an earlier stage trains."""
    if stage.kind == "rl" and config.rewards.model is None and _earlier(stage, "reward-model"):
        config = config.model_copy(update={"rewards": RewardsConfig()})
    check_extras(config)
    if stage.number == 1:
        check_new_run(config, stage.kind)
    check_plugins(config)
    world = build_world(config.env, config.rollout, config.sandbox)
    load_libraries()
    STAGES[stage.kind].check(config, world)
    searches = config.preference.search.simulations > 0
    samples_attempts = searches or not (_has_source(stage, config) or _earlier(stage, *SAMPLES))
    samples_rollouts = {"preference": samples_attempts, "reward-model": config.reward_model.rollouts > 0}
    if samples_rollouts.get(stage.kind, stage.kind in SAMPLES) and config.cluster.kind != "ray":
        check_sandbox(config.sandbox, world)


@contextmanager
def _prefix_errors(stage: Stage) -> Iterator[None]:
    try:
        yield
    except LudusError as error:
        raise type(error)(f"Stage {stage.number} ({stage.kind}): {error.message}", error.hint) from error


def _has_source(stage: Stage, config: Config) -> bool:
    """Return whether a stage that trains on rollouts names a run or a file of them, or searches for its pairs."""
    if stage.kind == "preference" and config.preference.search.simulations:
        return True
    settings = config.preference if stage.kind == "preference" else config.reward_model
    return settings.run is not None or settings.data is not None


def _earlier(stage: Stage, *kinds: StageKind) -> list[Stage]:
    return [before for before in stage.before if before.kind in kinds]


def _open_folder(folder: Path, stages: Sequence[Stage], file: Path) -> None:
    """Create the pipeline's folder, or check that the existing one belongs to these stages."""
    existing = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if folder.exists() and existing and _COPY not in existing:
        raise UserError(f"{folder} exists and is not the folder of a pipeline.", "Choose another --folder.")
    names = {stage.name for stage in stages}
    for name in existing:
        if name[:2].isdigit() and name not in names:
            raise UserError(f"{folder} holds {name}, which is not a stage of {file}.", "Choose another --folder.")
    with replaced_file(folder / _COPY) as copy:
        copy.write(file.read_bytes())


def stage_config(stage: Stage, folder: Path) -> Config:
    """Return the configuration of a stage of the pipeline in `folder`: its settings, and results of earlier stages."""
    words = [*stage.settings, "--run.dir", str(folder / stage.name)]
    if policies := _earlier(stage, *(STAGES.keys() - {"reward-model"})):
        _, checkpoint = latest_checkpoint(RunFolder(folder / policies[-1].name))
        words += ["--model.from_scratch", "false", "--model.path", str(checkpoint)]
    config = load_config(stage.recipe, words)
    sampled, reward_models = _earlier(stage, *SAMPLES), _earlier(stage, "reward-model")
    if stage.kind == "rl" and reward_models and config.rewards.model is None:
        words += ["--rewards.model", str(folder / reward_models[-1].name)]
    elif stage.kind in ("preference", "reward-model") and sampled and not _has_source(stage, config):
        words += [f"--{stage.kind.replace('-', '_')}.run", str(folder / sampled[-1].name)]
    return load_config(stage.recipe, words)


def _check_same(stage: Stage, own: RunFolder, config: Config) -> None:
    """Raise UserError if a stage was started with other settings, because later stages depend on it."""
    found = [change for change in changes(own.load_config(), config) if change.key not in _FREE]
    if found:
        has = ", ".join(change.conflict for change in found)
        text = f"Stage {stage.number} was started with other settings: {own.path} has {has}."
        raise UserError(text, "Revert the change, or choose another --folder.")
