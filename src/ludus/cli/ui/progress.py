"""Training in a terminal: progress bars, the final table, examples, and the next commands."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.cli.ui.terminal import PhaseBar, announce, bars, make_console, print_line, print_text
from ludus.cli.ui.transcripts import print_transcript
from ludus.cluster.control import controlled
from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.config.toml import changes
from ludus.engines.base import Engine, EngineStats
from ludus.errors import ConfigError
from ludus.evaluation.evaluate import Evaluation
from ludus.evaluation.tables import format_sampling, format_success
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts
from ludus.rollouts.scheduler import Episode
from ludus.training.datasets.token_limits import sft_warnings
from ludus.training.resume import steps_done
from ludus.training.rl.build import make_trackers
from ludus.training.rl.build import train as train_run
from ludus.training.rl.sync_trainer import Comparison
from ludus.training.run.run_dir import RunFolder, kind_of, list_checkpoints, recipe_of, resume_command
from ludus.training.run.session import TrainingSession, busy_warning, open_session
from ludus.training.run.supervised import SupervisedTraining
from ludus.training.sft import SftTraining, make_session
from ludus.types import Timings

if TYPE_CHECKING:
    from ludus.cluster.cluster import Cluster

log = logging.getLogger(__name__)


class EpisodeBar(PhaseBar):
    """A progress bar for the episodes of the current phase."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress)
        self._engine: Engine | None = None
        self._before = EngineStats()
        self._spent = Timings()

    def phase(self, name: str, total: int | None, engine: Engine | None = None) -> None:
        """Start the bar of a phase; without a total its progress is indeterminate."""
        super().phase(name, total)
        self._engine = engine
        self._before = engine.stats() if engine else EngineStats()
        self._spent = Timings()

    def episode(self, episode: Episode) -> None:
        """Advance by one episode, with engine statistics and the shares of the episodes' time."""
        one, total = episode.trajectory.timings, self._spent
        spent = self._spent = Timings(
            model_s=total.model_s + one.model_s,
            tools_s=total.tools_s + one.tools_s,
            scoring_s=total.scoring_s + one.scoring_s,
        )
        numbers = (self._engine.stats() - self._before).line() if self._engine else ""
        if total_s := spent.model_s + spent.tools_s + spent.scoring_s:
            tools, scoring = spent.tools_s / total_s, spent.scoring_s / total_s
            rewards = f", rewards {scoring:.0%}" if scoring >= 0.01 else ""
            numbers += f"  time: tools {tools:.0%}{rewards}, model {1 - tools - scoring:.0%}"
        self.done(numbers.strip())


class ProgressReporter(EpisodeBar):
    """Two progress bars: the steps of the run with their main metrics, and the episodes of the phase."""

    def __init__(self, progress: Progress, steps: int, done: int = 0) -> None:
        super().__init__(progress)
        self._steps = progress.add_task("training", total=steps, completed=done, resumed_at=done, numbers="")
        self._held_out = ""

    def step(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """Advance by one step, with its reward, success and speed."""
        for name, value in metrics.items():
            if name.startswith("eval/") and name.endswith("/success"):
                self._held_out = f"  held-out {value:.0%}"
        numbers = f"reward {metrics['reward/mean']:.3f}"
        if "success/mean" in metrics:
            numbers += f"  success {metrics['success/mean']:.0%}"
        numbers += f"{self._held_out}  {timings.get('speed/sampled_tokens_per_s', 0.0):,.0f} tokens/s"
        numbers += format_idle(metrics, timings)
        self._progress.update(self._steps, completed=step, numbers=numbers)

    def alarm(self, text: str) -> None:
        """Print a warning above the bars."""
        print_text(self._progress.console, f"! {text}", "yellow")


SLOW_S = 0.1
"""Minimum seconds of a tool call that is reported as slow."""


def format_idle(metrics: Mapping[str, float], timings: Mapping[str, float]) -> str:
    """Describe the waiting in a step: idle shares, the group queue of asynchronous training, slow tools."""
    line = f"  idle: learner {timings['idle/learner']:.0%}" if "idle/learner" in timings else ""
    if "idle/engine" in timings:
        line += f", engine {timings['idle/engine']:.0%}"
    if "queue/in_flight" in timings:
        line += f"  {timings['queue/in_flight']:.0f} in flight, {timings['queue/groups_ready']:.0f} groups ready"
        line += f"  age {metrics.get('staleness/mean', 0.0):.1f}"
    for name, count in timings.items():
        if name.startswith("tools/") and name.endswith("/stragglers") and count:
            tool = name.split("/")[1]
            if (slowest := timings[f"tools/{tool}/slowest_s"]) >= SLOW_S:
                line += f"  slow: {tool} {count:.0f} times, to {slowest:.1f} s"
    return line


def train_policy(
    config: Config, folder: RunFolder, session: TrainingSession | None, console: Console
) -> list[Comparison]:
    """Train with progress bars; return the evaluations. Without a session, run the cold start first."""
    session = session or open_session(config, cold_start(config, folder, console))
    with bars(console) as progress:
        reporter = ProgressReporter(progress, config.training.steps, steps_done(folder))
        with running_cluster(session, folder) as cluster:
            return train_run(session, folder, reporter, cluster)


def print_results(console: Console, folder: RunFolder, config: Config, comparisons: Sequence[Comparison]) -> None:
    """Print held-out success before and after training, examples, and the next commands."""
    console.print(_comparison_table(comparisons))
    sizes = {(len(pair.before.task_ids), len(pair.after.task_ids)) for pair in comparisons if pair.before}
    for before, after in sorted(pair for pair in sizes if pair[0] != pair[1]):
        text = f"{before} tasks were evaluated before training (evaluation.tasks_before), {after} after it."
        print_text(console, text)
    if any(pair.after.worlds for pair in comparisons):
        console.print(_worlds_table(comparisons))
    conditions = [(pair.before.plan.conditions, pair.after.plan.conditions) for pair in comparisons if pair.before]
    if any(before not in (None, after) for before, after in conditions):
        print_text(console, "! The rollout settings of the evaluations before and after training differ.", "yellow")
    if comparisons:
        _print_examples(console, folder, comparisons[0].before, comparisons[0].after)
    print_commands(console, folder, config)


@contextmanager
def running_cluster(session: TrainingSession, folder: RunFolder) -> Iterator[Cluster | None]:
    """Open the cluster of the settings, if any, and accept the requests of `ludus cluster` in the block."""
    if not session.config.cluster.enabled:
        yield None
        return
    from ludus.cluster.cluster import open_cluster

    with open_cluster(session) as cluster, controlled(folder.path, cluster):
        yield cluster


def print_checkpoint(folder: RunFolder, config: Config, checkpoint: Path) -> None:
    """Print a fine-tuned checkpoint and the command that trains it further."""
    print_line(make_console(), f"Checkpoint: {checkpoint}\nUse it: {use_command(folder, config, checkpoint)}")


def use_command(folder: RunFolder, config: Config, checkpoint: Path) -> str:
    """Return the command that trains a checkpoint: the recipe of its run, with its `env` and `rollout` overrides."""
    recipe = recipe_of(folder) or config.env.name
    try:
        base = load_config(recipe)
    except ConfigError:  # not a recipe, or removed
        recipe, base = str(folder.config), config
    words = ["ludus", "train", recipe, "--model", str(checkpoint)]
    if base.run.dir is not None and recipe == str(folder.config):
        words += ["--run.dir", "none"]
    for change in changes(base, config):
        if change.key.startswith(("env.", "rollout.")):
            words += change.words
    return shlex.join(words)


def cold_start(config: Config, folder: RunFolder, console: Console) -> Path:
    """Run or resume the cold start of a run from scratch, in a subfolder; return its checkpoint."""
    nested = RunFolder(folder.path / "cold_start")
    nested.path.mkdir(exist_ok=True)
    found = list_checkpoints(nested.checkpoints)
    if found and found[-1][0] >= config.sft.steps:
        return found[-1][1]
    settings = config.run.model_copy(update={"trackers": ["jsonl"]})
    announce("Creating the tokenizer, the model and the demonstrations of the cold start ...")
    tuning = SftTraining(make_session(config.model_copy(update={"run": settings})), nested)
    return fine_tune(tuning, console, "cold start")


def fine_tune(tuning: SftTraining, console: Console, title: str = "fine-tuning") -> Path:
    """Fine-tune with a progress bar and warnings; return the checkpoint."""
    config, skipped = tuning.session.config, 0
    for text in filter(None, [*sft_warnings(tuning.session), busy_warning(config)]):
        log.warning(text)
        print_text(console, f"! {text}", "yellow")

    def numbers(metrics: Mapping[str, float]) -> str:
        nonlocal skipped
        skipped += int(metrics["batch/left_out"])
        speed = metrics["batch/total_tokens"] / max(1e-9, metrics["time/step_s"])
        return f"loss {metrics['loss/total']:.3f}  {speed:,.0f} tokens/s"

    checkpoint = train_steps(tuning, console, title, numbers)
    if skipped:
        used = (config.sft.steps - tuning.done) * config.sft.batch_size
        print_text(console, f"{skipped} of {skipped + used} dialogues were too long and were skipped.", "yellow")
    return checkpoint


def train_steps(
    training: SupervisedTraining, console: Console, title: str, numbers: Callable[[Mapping[str, float]], str]
) -> Path:
    """Train with a progress bar that shows the `numbers` of a step's metrics; return the checkpoint."""
    with bars(console) as progress, ExitStack() as stack:
        done = training.done
        task = progress.add_task(title, total=training.num_steps, completed=done, resumed_at=done, numbers="")
        trackers = make_trackers(training.session.config, training.folder, done)
        for tracker in trackers:
            stack.callback(tracker.close)
        return training.run(trackers, lambda step, row: progress.update(task, completed=step, numbers=numbers(row)))


def _comparison_table(comparisons: Sequence[Comparison]) -> FittedTable:
    columns = ("split", TableColumn("sampling", 1), TableColumn("tasks", 2), "before training", "after training")
    rows = []
    for before, after in ((pair.before, pair.after) for pair in comparisons):
        found = (format_success(before) if before else "not evaluated", format_success(after))
        rows.append((after.plan.split, format_sampling(after.plan), len(after.task_ids), *found))
    return make_table(columns, rows, "Held-out success, with 95 % intervals")


def _worlds_table(comparisons: Sequence[Comparison]) -> FittedTable:
    rows: list[tuple[object, ...]] = []
    for pair in comparisons:
        plan = (pair.after.plan.split, format_sampling(pair.after.plan))
        was = pair.before.by_world() if pair.before else {}
        for name, one in pair.after.by_world().items():
            before = f"{was[name].rate:.1%}" if name in was else "not evaluated"
            rows.append((*plan, name, one.num_tasks, before, format_success(one)))
        average = f"{pair.before.macro:.1%}" if pair.before else ""
        rows.append((*plan, "average of the worlds", "", average, f"{pair.after.macro:.1%}"))
    details = (TableColumn("sampling", 2), TableColumn("world", wrap=True), TableColumn("tasks", 3))
    return make_table(("split", *details, TableColumn("before training", 1), "after training"), rows, "By world")


def _print_examples(console: Console, folder: RunFolder, before: Evaluation | None, after: Evaluation) -> None:
    """Print three transcripts, the first of a task that failed before training and succeeds now."""
    chosen = choose_examples(before or after, after)
    old = first_rollouts(folder, before, chosen[:1]) if before else {}
    new = first_rollouts(folder, after, chosen)
    for task_id in chosen:
        if task_id in old:
            console.rule("before training")
            print_transcript(console, old[task_id].trajectory)
        console.rule("after training: the same task" if task_id in old else "after training")
        print_transcript(console, new[task_id].trajectory)


def choose_examples(before: Evaluation, after: Evaluation, num: int = 3) -> list[str]:
    """Return ids of tasks of both evaluations: a newly solved one first, then others of different families."""
    now = dict(zip(after.task_ids, after.successes, strict=True))
    was = {t: s for t, s in zip(before.task_ids, before.successes, strict=True) if t in now}
    family = dict(zip(before.task_ids, before.families, strict=True))
    solved = [t for t, s in was.items() if now[t] > s]
    chosen = solved[:1] or list(was)[:1]
    seen = {family[t] for t in chosen}
    for task_id in [*solved, *was]:
        if len(chosen) < num and family[task_id] not in seen:
            chosen.append(task_id)
            seen.add(family[task_id])
    spare = [t for t in was if t not in chosen]
    return chosen + spare[: num - len(chosen)]


def first_rollouts(folder: RunFolder, result: Evaluation, task_ids: Sequence[str]) -> dict[str, RolloutRecord]:
    """Return the first saved rollout of each task in `task_ids`."""
    found: dict[str, RolloutRecord] = {}
    for record in read_rollouts(folder.evaluations / f"{result.plan.name}.jsonl.gz"):
        if record.group in task_ids:
            found.setdefault(record.group, record)
    return found


def print_commands(console: Console, folder: RunFolder, config: Config) -> None:
    """Print the next commands."""
    is_rft = kind_of(folder) == "rft"
    more = f"--rft.rounds {config.rft.rounds * 2}" if is_rft else f"--training.steps {config.training.steps * 2}"
    print_line(console, f"The run is in {folder.path}\n  read it:      ludus show {folder.path}")
    print_line(console, f"  continue it:  {resume_command(folder)} {more}")
    print_line(console, f"  evaluate it:  ludus eval --run {folder.path}\n  talk to it:   ludus chat {folder.path}")
