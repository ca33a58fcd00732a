"""Read a run: curves in the terminal, its account of rollouts, alarms, evaluations and transcripts.

    ludus show runs/search-1                              the whole run, and two transcripts
    ludus show runs/search-1 --step 10 --failed           rollouts of a step that did not solve their task
    ludus show runs/search-1 --evaluation step-000040-test-greedy --solved --episodes 5
    ludus show runs/search-1 --step 10 --tokens           the tokens as the model saw them
    ludus show runs/search-1 --rescore                    the rewards, run again on the saved rollouts

In transcripts prompt, action and observation are marked; below stand why it stopped, the reward by parts,
the advantage and what became of the rollout. --rescore takes settings, for example the rewards of another
world file: --env.name other_world.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cli.arguments import no_settings, run_config
from ludus.config.schema import Config
from ludus.diagnostics.trackers import METRICS_FILE
from ludus.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from ludus.chat.render import Tokenizer
    from ludus.cli.rescore import Replay
    from ludus.diagnostics.trackers import MetricsRow
    from ludus.rollout.rollout_files import RolloutRecord
    from ludus.training.run.run_dir import RunFolder

DEFAULT_EPISODES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument("--step", type=int, help="rollouts of this training step (default: the last)")
    parser.add_argument("--evaluation", metavar="NAME", help="rollouts of this evaluation instead")
    parser.add_argument("--task", metavar="ID", help="only episodes of this task")
    parser.add_argument("--episodes", type=int, default=DEFAULT_EPISODES, help="transcripts to print")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--failed", action="store_true", help="only episodes that did not solve their task")
    only.add_argument("--solved", action="store_true", help="only episodes that did")
    parser.add_argument("--tokens", action="store_true", help="tokens instead of messages")
    parser.add_argument("--rescore", action="store_true", help="run the rewards again on saved rollouts")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print what is asked for."""
    from ludus.cli.ui.terminal import make_console
    from ludus.training.run.run_dir import RunFolder

    if args.step is not None and args.evaluation is not None:
        raise UserError("--step and --evaluation exclude each other.", "Leave one of them out.")
    if args.episodes < 0:
        raise UserError(f"--episodes is {args.episodes}.", "Give 0 or more.")
    if not args.rescore:
        no_settings(overrides, "show")
    folder = RunFolder(args.run)
    config = run_config(folder, overrides)
    console = make_console()
    if args.rescore:
        print_rescored(args, folder, config)
        return 0
    wants_part = args.step is not None or args.evaluation is not None or args.task is not None
    if not wants_part:
        print_overview(folder, config, console)
    if args.episodes > 0:
        print_episodes(args, folder, config, console, required=wants_part or args.failed or args.solved)
    return 0


def print_overview(folder: RunFolder, config: Config, console: Console) -> None:
    """Curves, account, alarms and evaluations."""
    from ludus.cli.ui.curves import curve_table, find_curves
    from ludus.cli.ui.explanations import alarm_words, ledger_words, loss_words, mean_timings, time_words
    from ludus.cli.ui.terminal import say
    from ludus.diagnostics.timings import scoring_hint

    rows, timings = metrics_rows(folder.metrics), metrics_rows(folder.timings)
    how = how_trained({name for row in rows for name in row.metrics}, config)
    say(console, f"{folder.path}: world {config.env.name}, {how}")
    print_cold_start(folder, console)
    curves = find_curves([*rows, *timings])
    if curves:
        console.print(curve_table(curves))
    else:
        say(console, "No step is done yet.")
    for text in filter(None, [ledger_words(rows), loss_words(rows), time_words(mean_timings(timings))]):
        say(console, text)
    for text in filter(None, [*alarm_words(rows), scoring_hint(mean_timings(timings), config)]):
        say(console, f"! {text}", "yellow")
    print_evaluations(folder, console)


def how_trained(metrics: set[str], config: Config) -> str:
    """What the run did to its model, as its metrics tell."""
    if "rft/kept" in metrics:
        return "rejection sampling"
    if "preference/margin" in metrics:
        return f"preferences, loss {config.preference.loss}"
    if "batch/scores" in metrics:
        return f"reward model, {config.reward_model.kind}"
    learns = "reward/mean" in metrics
    return f"algorithm {config.algorithm.preset}" if learns else "no step of reinforcement learning"


def print_cold_start(folder: RunFolder, console: Console) -> None:
    """The loss of the fine-tuning that a run from scratch begins with, on one line."""
    from ludus.cli.ui.curves import sparkline
    from ludus.cli.ui.terminal import say

    rows = metrics_rows(folder.path / "cold_start" / METRICS_FILE)
    losses = [row.metrics["loss/total"] for row in rows]
    if losses:
        line = f"{losses[0]:.3g} {sparkline(losses)} {losses[-1]:.3g}"
        say(console, f"Cold start: {len(losses)} steps of fine-tuning, loss {line}")


def metrics_rows(path: Path) -> list[MetricsRow]:
    """The rows of a metrics file, none where there is no file yet."""
    from ludus.diagnostics.trackers import read_metrics

    return read_metrics(path) if path.is_file() else []


def print_evaluations(folder: RunFolder, console: Console) -> None:
    """One row for each evaluation of the run."""
    from rich.table import Table

    from ludus.cli.ui.tables import how_sampled, rate
    from ludus.evaluation.evaluate import load_evaluation

    files = sorted(folder.evaluations.glob("*.json"))
    if not files:
        return
    table = Table(title="Evaluations, with 95 % intervals")
    for column in ("name", "step", "split", "sampling", "tasks", "success"):
        table.add_column(column)
    for file in files:
        result = load_evaluation(file)
        plan = result.plan
        number = str(len(result.task_ids))
        table.add_row(file.stem, str(plan.step), plan.split, how_sampled(plan), number, rate(result))
    console.print(table)


def print_episodes(
    args: argparse.Namespace, folder: RunFolder, config: Config, console: Console, *, required: bool
) -> None:
    """The first transcripts that fit the choice. With `required`, none at all is worth a sentence."""
    from ludus.cli.ui.terminal import say
    from ludus.cli.ui.transcripts import print_record

    files = files_of(folder, args.step, args.evaluation)[-1:]
    found = list(islice(chosen_records(args, files, config), args.episodes)) if files else []
    if not found:
        if required:
            say(console, "No episode fits.")
        return
    tokenizer = find_tokenizer(folder, console) if args.tokens else None
    say(console, f"\nFrom {files[0].relative_to(folder.path)}:")
    for record in found:
        print_record(console, record, tokenizer)


def files_of(folder: RunFolder, step: int | None, evaluation: str | None) -> list[Path]:
    """The files of rollouts that are meant, oldest first. Raises UserError for one that is not there."""
    from ludus.rollout.rollout_files import rollouts_path

    if evaluation is not None:
        name = evaluation.removesuffix(".jsonl.gz").removesuffix(".json")
        path = folder.evaluations / f"{name}.jsonl.gz"
        if path.is_file():
            return [path]
        known = sorted(file.name.removesuffix(".jsonl.gz") for file in folder.evaluations.glob("*.jsonl.gz"))
        raise UserError(f"The run has no evaluation {name!r}.", f"There are: {', '.join(known) or 'none'}.")
    files = sorted(folder.rollouts.glob("step-*.jsonl.gz"))
    if step is None:
        return files
    if rollouts_path(folder.path, step) not in files:
        steps = [int(file.name[5:-9]) for file in files]
        there = f"from {steps[0]} to {steps[-1]}" if steps else "of no step (run.save_rollouts may be off)"
        raise UserError(f"The run has no rollouts of step {step}.", f"There are some {there}.")
    return [rollouts_path(folder.path, step)]


def chosen_records(args: argparse.Namespace, files: Sequence[Path], config: Config) -> Iterator[RolloutRecord]:
    """The records of the files, those of one task, failed or solved ones only where that is asked for."""
    from ludus.rollout.rollout_files import read_rollouts

    fits = fitting(args, config)
    for file in files:
        yield from filter(fits, read_rollouts(file))


def fitting(args: argparse.Namespace, config: Config) -> Callable[[RolloutRecord], bool]:
    """Whether a record is of the task that is asked for, and solved or failed where that is."""
    from ludus.envs.registry import build_world
    from ludus.rewards.base import success

    rewards = build_world(config.env, config.rollout).rewards if args.failed or args.solved else ()

    def fits(record: RolloutRecord) -> bool:
        if args.task is not None and record.group != args.task:
            return False
        return not rewards or success(rewards, record.trajectory) == args.solved

    return fits


def find_tokenizer(folder: RunFolder, console: Console) -> Tokenizer | None:
    """The tokenizer of the newest checkpoint; None, with a sentence, where there is none."""
    from ludus.cli.ui.terminal import say, silence_libraries
    from ludus.engines.models.loading import load_tokenizer
    from ludus.training.run.checkpoint import list_checkpoints

    found = list_checkpoints(folder.checkpoints)
    if not found:
        say(console, "The run has no checkpoint, and so no tokenizer: messages instead of tokens.", "yellow")
        return None
    silence_libraries()
    tokenizer: Tokenizer = load_tokenizer(str(found[-1][1]))
    return tokenizer


def print_rescored(args: argparse.Namespace, folder: RunFolder, config: Config) -> None:
    """Replay the rewards of a step, an evaluation or all training steps, and print what changed."""
    from ludus.cli.rescore import rescore

    files = files_of(folder, args.step, args.evaluation)
    print_replay(rescore(run_config(folder, []), config, files, fitting(args, config)), args.episodes)


def print_replay(replay: Replay, num: int, *, by_place: bool = False) -> None:
    """What a replay found; `num` rollouts that changed, and the numbers of each step with `by_place`."""
    from ludus.cli.rescore import changed_table, places_table, replay_table, replay_words
    from ludus.cli.ui.terminal import make_console, say

    console = make_console()
    for text in replay_words(replay):
        say(console, text)
    if replay.rescored:
        console.print(replay_table(replay))
    if replay.rescored and by_place:
        console.print(places_table(replay))
    if any(one.changed for one in replay.rescored) and num > 0:
        console.print(changed_table(replay, num))
