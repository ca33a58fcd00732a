"""Train in stages: a TOML file names them in order, and each starts from the checkpoint of the one before.

A stage is a run folder of its own below the pipeline's (runs/NAME of the file, or --folder): 01-sft, 02-rl.
The same command goes on where the pipeline stopped. Settings on the command line hold for every stage.
Preference training and reward models learn from the last stage before them that sampled, unless they are told
otherwise; preference training without one samples attempts of its own. The stage after a reward model starts
from the checkpoint of the stage before that; one of rl uses the model.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cli.arguments import recipe_stem
from ludus.cli.training import preference, reward_model, rft, sft, train
from ludus.cli.training.training_command import HowToResume, TrainingStage
from ludus.config.load import load_config
from ludus.config.pipeline import Stage, StageKind, load_pipeline
from ludus.config.schema import Config
from ludus.config.sections.rewards import RewardModelConfig, RewardsConfig
from ludus.config.sections.stages import PreferenceConfig
from ludus.envs.registry import build_world, check_sandbox
from ludus.errors import ConfigError, LudusError, UserError
from ludus.rewards.registry import added_parts

if TYPE_CHECKING:
    from ludus.training.run.run_dir import RunFolder

STAGES: Mapping[StageKind, TrainingStage] = {
    stage.kind: stage for stage in (sft.STAGE, rft.STAGE, preference.STAGE, reward_model.STAGE, train.STAGE)
}
SAMPLES: frozenset[StageKind] = frozenset({"rft", "rl"})
"""Stages that leave rollouts, of which pairs can be made."""
LEARNS: Mapping[StageKind, str] = {"preference": "preference", "reward-model": "reward_model"}
"""Stages that learn from rollouts, and their section."""
_FREE = ("model.device", "run.threads")
_COPY = "pipeline.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments; settings follow as --section.key value."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a TOML file with [[stage]] tables")
    parser.add_argument("--folder", metavar="FOLDER", type=Path, help="the pipeline's folder")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run the stages that are not complete."""
    from ludus.cli.ui.terminal import make_console, say
    from ludus.training.run.run_dir import RunFolder

    stages = load_pipeline(args.file)
    folder = args.folder or Path("runs") / args.file.stem
    check_stages(stages, overrides, args.file)
    check_ahead(stages, folder, overrides)
    open_folder(folder, stages, args.file)
    for stage in stages:
        own = RunFolder(folder / stage.name)
        if own.config.is_file():
            check_same(stage, own, stage_config(stage, stages, folder, overrides))
    console = make_console()
    words = ["ludus", "pipeline", str(args.file), *(["--folder", str(folder)] if args.folder else [])]
    with HowToResume(shlex.join([*words, *overrides])):
        for stage in stages:
            say(console, f"Stage {stage.number} of {len(stages)}: {stage.kind} {stage.recipe}")
            run_stage(stage, stages, folder, overrides)
    say(console, f"The pipeline is complete: {checkpoint_of(stages[-1], folder)}")
    return 0


def check_stages(stages: Sequence[Stage], overrides: Sequence[str], file: Path) -> None:
    """Raise ConfigError for the settings of any stage that contradict each other, whatever has run."""
    said_in = " and ".join([str(file), *(["the command line"] if overrides else [])])
    for stage in stages:
        with naming(stage):
            config = load_config(stage.recipe, [*stage.settings, *overrides], said_in=said_in)
            added_parts(config.rewards)
        if stage.kind == "reward-model" and not is_fed(stage, stages, config):
            raise ConfigError(
                f"Stage {stage.number} ({stage.kind}) has nothing to learn rewards from.",
                "Put a stage of rft or rl before it, or set reward_model.run or reward_model.data.",
            )


def check_ahead(stages: Sequence[Stage], folder: Path, overrides: Sequence[str]) -> None:
    """Raise what a stage that has yet to begin would refuse when its turn comes.

    The rewards of one that a reward model from before it judges are looked at then.
    """
    for stage in stages:
        if (folder / stage.name).exists():
            continue
        config = load_config(stage.recipe, [*stage.settings, *overrides])
        if stage.kind == "rl" and config.rewards.model is None and judges_before(stage, stages):
            config = config.model_copy(update={"rewards": RewardsConfig()})
        with naming(stage):
            check_stage(stage, config, is_fed(stage, stages, config))


def check_stage(stage: Stage, config: Config, fed: bool) -> None:
    """Raise for settings, files and a sandbox that cannot be used; `fed`: it has something to learn from."""
    from ludus.training import rft, sft
    from ludus.training.datasets.files import read_dialogues
    from ludus.training.rl import validate

    world = build_world(config.env, config.rollout, config.sandbox)
    validate.check_trackers(config)
    match stage.kind:
        case "sft":
            sft.check_sft(config, world)
        case "rft":
            rft.check_rft(config, world)
        case "rl":
            validate.check_settings(config, world)
            if config.experts.path is not None:
                read_dialogues(Path(config.experts.path))
        case _:
            check_source(stage, config)
    plays = {"preference": not fed, "reward-model": config.reward_model.rollouts > 0}
    if plays.get(stage.kind, stage.kind in SAMPLES) and config.cluster.kind != "ray":
        check_sandbox(config.sandbox, world)


def check_source(stage: Stage, config: Config) -> None:
    """Raise UserError where the file or run that a stage names is none that it can learn from."""
    from ludus.training.datasets.files import read_pairs, read_rollout_file
    from ludus.training.preference.pairs import rollout_files

    settings = source_of(stage, config)
    if settings.data is not None:
        takes_pairs = stage.kind == "preference" or config.reward_model.kind == "pairwise"
        (read_pairs if takes_pairs else read_rollout_file)(Path(settings.data))
    elif settings.run is not None:
        rollout_files(Path(settings.run))


@contextmanager
def naming(stage: Stage) -> Iterator[None]:
    """An error inside says which stage it is of."""
    try:
        yield
    except LudusError as error:
        raise type(error)(f"Stage {stage.number} ({stage.kind}): {error.message}", error.hint) from error


def source_of(stage: Stage, config: Config) -> PreferenceConfig | RewardModelConfig:
    """The section in which a stage names the run or file that it learns from."""
    return config.preference if stage.kind == "preference" else config.reward_model


def has_source(stage: Stage, config: Config) -> bool:
    """Whether the settings of a stage name the run or file that it learns from."""
    settings = source_of(stage, config)
    return settings.run is not None or settings.data is not None


def is_fed(stage: Stage, stages: Sequence[Stage], config: Config) -> bool:
    """Whether a stage learns from a run or file that is named, or from a stage before it that sampled."""
    sampled = any(before.kind in SAMPLES for before in stages[: stage.number - 1])
    return sampled or has_source(stage, config)


def judges_before(stage: Stage, stages: Sequence[Stage]) -> list[Stage]:
    """The stages before one that make a reward model."""
    return [before for before in stages[: stage.number - 1] if before.kind == "reward-model"]


def open_folder(folder: Path, stages: Sequence[Stage], file: Path) -> None:
    """Make the pipeline's folder, or see that the one that is there is of these stages."""
    from ludus.rollout.rollout_files import replaced_file

    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if folder.exists() and there and _COPY not in there:
        raise UserError(f"{folder} is there already and is not of a pipeline.", "Choose another --folder.")
    names = {stage.name for stage in stages}
    for name in there:
        if name[:2].isdigit() and name not in names:
            raise UserError(f"{folder} holds {name}, which is no stage of {file}.", "Choose another --folder.")
    with replaced_file(folder / _COPY) as copy:
        copy.write(file.read_bytes())


def run_stage(stage: Stage, stages: Sequence[Stage], folder: Path, overrides: Sequence[str]) -> None:
    """Start a stage, or go on with it; a complete one says so and changes nothing."""
    from ludus.training.run.run_dir import RunFolder

    config = stage_config(stage, stages, folder, overrides)
    own = RunFolder(folder / stage.name)
    if not own.config.is_file():
        STAGES[stage.kind].start(config, recipe_stem(stage.recipe), stage.recipe)
        return
    STAGES[stage.kind].resume(own, ())


def stage_config(stage: Stage, stages: Sequence[Stage], folder: Path, overrides: Sequence[str]) -> Config:
    """What a stage runs with: its settings, the command line's, and what the stages before it left."""
    words = [*stage.settings, *overrides, "--run.dir", str(folder / stage.name)]
    before = stages[: stage.number - 1]
    if policies := [earlier for earlier in before if earlier.kind != "reward-model"]:
        words += ["--model.from_scratch", "false", "--model.path", str(checkpoint_of(policies[-1], folder))]
    config = load_config(stage.recipe, words)
    sampled = [earlier for earlier in before if earlier.kind in SAMPLES]
    judges = judges_before(stage, stages)
    if stage.kind == "rl" and judges and config.rewards.model is None:
        config = load_config(stage.recipe, [*words, "--rewards.model", str(folder / judges[-1].name)])
    if stage.kind in LEARNS and sampled and not has_source(stage, config):
        name = f"--{LEARNS[stage.kind]}.run"
        config = load_config(stage.recipe, [*words, name, str(folder / sampled[-1].name)])
    return config


def check_same(stage: Stage, own: RunFolder, config: Config) -> None:
    """Raise UserError where a stage was started with other settings: those after it were trained on them."""
    from ludus.config.toml import value_text
    from ludus.training.resume import changes

    found = [change for change in changes(own.load_config(), config) if change.key not in _FREE]
    if found:
        has = ", ".join(f"{c.key} = {value_text(c.old)} (not {value_text(c.new)})" for c in found)
        raise UserError(
            f"Stage {stage.number} was started with other settings: {own.path} has {has}.",
            "Take the change back, or choose another --folder.",
        )


def checkpoint_of(stage: Stage, folder: Path) -> Path:
    """The newest checkpoint of a stage that has run."""
    from ludus.training.run.checkpoint import list_checkpoints

    return list_checkpoints(folder / stage.name / "checkpoints")[-1][1]
