"""Train in stages: a TOML file lists them in order, and each starts from the checkpoint of the previous one.

Each stage has a run folder inside that of the pipeline (runs/NAME of the file, or --folder): 01-sft, 02-rl. The same
command resumes an interrupted pipeline. Settings on the command line apply to every stage. Preference training and
reward models use the rollouts of the last stage that sampled, unless a source is set; without one, preference training
samples its own attempts. The stage after a reward model starts from the checkpoint of the stage before it; an rl stage
uses the reward model.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ludus.cli.commands.config import check_plugins
from ludus.cli.training.stages import STAGES
from ludus.cli.training.training_command import QUICK_HELP, resume_hint
from ludus.cli.ui.terminal import load_libraries, make_console, print_line, print_text
from ludus.config.load import load_config
from ludus.config.pipeline import Stage, StageKind, load_pipeline
from ludus.config.quick import describe_cuts, quick_cuts
from ludus.config.schema import Config
from ludus.config.sections.rewards import RewardModelConfig, RewardsConfig
from ludus.config.sections.stages import PreferenceConfig
from ludus.config.toml import value_text
from ludus.envs.registry import build_world, check_sandbox
from ludus.errors import ConfigError, LudusError, UserError
from ludus.rewards.registry import added_parts
from ludus.rollouts.rollout_files import replaced_file
from ludus.training.run.preflight import check_extras, check_new_run
from ludus.training.run.run_dir import RunFolder, list_checkpoints

SAMPLES: frozenset[StageKind] = frozenset({"rft", "rl"})
"""Stages that sample rollouts, usable as training data of later stages."""
TRAIN_SECTIONS: Mapping[StageKind, str] = {"preference": "preference", "reward-model": "reward_model"}
"""Configuration sections of the stages that train on rollouts."""
_FREE = ("model.device", "run.threads")
_COPY = "pipeline.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command; settings follow as --section.key value."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a TOML file with [[stage]] tables")
    parser.add_argument("--quick", action="store_true", help=QUICK_HELP)
    parser.add_argument("--folder", metavar="FOLDER", type=Path, help="folder of the pipeline (runs/NAME)")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Run the incomplete stages."""
    stages, console = load_pipeline(args.file), make_console()
    if args.quick:
        stages = tuple(_quick_stage(stage, overrides, console) for stage in stages)
    folder = args.folder or Path("runs") / args.file.stem
    _check_stages(stages, overrides, args.file)
    for stage in stages:
        if not (folder / stage.name).exists():
            _check_pending(stage, stages, overrides)
    _open_folder(folder, stages, args.file)
    for stage in stages:
        own = RunFolder(folder / stage.name)
        if own.config.is_file():
            _check_same(stage, own, stage_config(stage, stages, folder, overrides))
    words = ["ludus", "pipeline", str(args.file), *(["--folder", str(folder)] if args.folder else [])]
    words += ["--quick"] if args.quick else []
    with resume_hint(shlex.join([*words, *overrides])):
        for stage in stages:
            print_line(console, f"Stage {stage.number} of {len(stages)}: {stage.kind} {stage.recipe}")
            own = RunFolder(folder / stage.name)
            config = stage_config(stage, stages, folder, overrides)
            if own.config.is_file():  # a complete stage is left unchanged
                STAGES[stage.kind].resume(own, ())
            else:
                STAGES[stage.kind].start(config, Path(stage.recipe).stem, stage.recipe)
    print_line(console, f"The pipeline is complete: {_checkpoint_of(stages[-1], folder)}")


def _quick_stage(stage: Stage, overrides: Sequence[str], console: Console) -> Stage:
    with _prefix_errors(stage):
        cuts = quick_cuts(stage.kind, load_config(stage.recipe, [*stage.settings, *overrides]), overrides)
    print_text(console, f"Stage {stage.number} ({stage.kind}). {describe_cuts(cuts)}")
    return replace(stage, settings=(*stage.settings, *(word for cut in cuts for word in cut.words)))


def _check_stages(stages: Sequence[Stage], overrides: Sequence[str], file: Path) -> None:
    origin = " and ".join([str(file), *(["the command line"] if overrides else [])])
    for stage in stages:
        with _prefix_errors(stage):
            config = load_config(stage.recipe, [*stage.settings, *overrides], overrides_origin=origin)
            added_parts(config.rewards)
        if stage.kind == "reward-model" and not has_training_data(stage, stages, config):
            hint = "Add a stage of rft or rl before it, or set reward_model.run or reward_model.data."
            raise ConfigError(f"Stage {stage.number} ({stage.kind}) has no training data.", hint)


def _check_pending(stage: Stage, stages: Sequence[Stage], overrides: Sequence[str]) -> None:
    """Check a stage that has not started, except the rewards of a reward model that an earlier stage trains."""
    config = load_config(stage.recipe, [*stage.settings, *overrides])
    if stage.kind == "rl" and config.rewards.model is None and _reward_models_before(stage, stages):
        config = config.model_copy(update={"rewards": RewardsConfig()})
    with _prefix_errors(stage):
        _check_stage(stage, config, has_training_data(stage, stages, config))


def _check_stage(stage: Stage, config: Config, fed: bool) -> None:
    """Raise an error for unusable settings, files or sandbox; `fed`: the stage has training data."""
    check_extras(config)
    if stage.number == 1:
        check_new_run(config, stage.kind)
    check_plugins(config)
    world = build_world(config.env, config.rollout, config.sandbox)
    load_libraries()
    STAGES[stage.kind].check(config, world)
    samples_rollouts = {"preference": not fed, "reward-model": config.reward_model.rollouts > 0}
    if samples_rollouts.get(stage.kind, stage.kind in SAMPLES) and not config.cluster.on_ray:
        check_sandbox(config.sandbox, world)


@contextmanager
def _prefix_errors(stage: Stage) -> Iterator[None]:
    try:
        yield
    except LudusError as error:
        raise type(error)(f"Stage {stage.number} ({stage.kind}): {error.message}", error.hint) from error


def _source_of(stage: Stage, config: Config) -> PreferenceConfig | RewardModelConfig:
    return config.preference if stage.kind == "preference" else config.reward_model


def has_training_data(stage: Stage, stages: Sequence[Stage], config: Config) -> bool:
    """Return whether a stage has training data: a named source, or an earlier stage that sampled."""
    settings = _source_of(stage, config)
    named = settings.run is not None or settings.data is not None
    return named or any(before.kind in SAMPLES for before in stages[: stage.number - 1])


def _reward_models_before(stage: Stage, stages: Sequence[Stage]) -> list[Stage]:
    return [before for before in stages[: stage.number - 1] if before.kind == "reward-model"]


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


def stage_config(stage: Stage, stages: Sequence[Stage], folder: Path, overrides: Sequence[str]) -> Config:
    """Return the configuration of a stage: its settings, the command line's, and the results of earlier stages."""
    words = [*stage.settings, *overrides, "--run.dir", str(folder / stage.name)]
    before = stages[: stage.number - 1]
    if policies := [earlier for earlier in before if earlier.kind != "reward-model"]:
        words += ["--model.from_scratch", "false", "--model.path", str(_checkpoint_of(policies[-1], folder))]
    config = load_config(stage.recipe, words)
    sampled = [earlier for earlier in before if earlier.kind in SAMPLES]
    reward_models = _reward_models_before(stage, stages)
    if stage.kind == "rl" and reward_models and config.rewards.model is None:
        words += ["--rewards.model", str(folder / reward_models[-1].name)]
    elif stage.kind in TRAIN_SECTIONS and sampled and not has_training_data(stage, (), config):
        words += [f"--{TRAIN_SECTIONS[stage.kind]}.run", str(folder / sampled[-1].name)]
    return load_config(stage.recipe, words)


def _check_same(stage: Stage, own: RunFolder, config: Config) -> None:
    """Raise UserError if a stage was started with other settings, because later stages depend on it."""
    from ludus.training.resume import changes

    found = [change for change in changes(own.load_config(), config) if change.key not in _FREE]
    if found:
        has = ", ".join(f"{c.key} = {value_text(c.old)} (not {value_text(c.new)})" for c in found)
        text = f"Stage {stage.number} was started with other settings: {own.path} has {has}."
        raise UserError(text, "Revert the change, or choose another --folder.")


def _checkpoint_of(stage: Stage, folder: Path) -> Path:
    return list_checkpoints(folder / stage.name / "checkpoints")[-1][1]
