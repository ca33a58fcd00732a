"""What training looks like in a terminal: progress bars, the closing table, examples."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from ludus.cli.ui.tables import how_sampled, rate
from ludus.cli.ui.terminal import bars, make_console, say
from ludus.cli.ui.transcripts import print_transcript
from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.config.toml import value_text
from ludus.engines.base import Engine, EngineStats
from ludus.errors import ConfigError
from ludus.evaluation.evaluate import Evaluation
from ludus.rollout.rollout_files import RolloutRecord, read_rollouts
from ludus.rollout.scheduler import Episode
from ludus.training.datasets.token_limits import sft_warnings
from ludus.training.resume import changes, steps_done
from ludus.training.rl.build import Comparison, make_trackers
from ludus.training.rl.build import train as train_run
from ludus.training.run.checkpoint import list_checkpoints
from ludus.training.run.run_dir import RunFolder, kind_of, recipe_of, resume_command, save_config
from ludus.training.run.session import TrainingSession, busy_warning, open_session
from ludus.training.sft import SftTraining, make_session, open_fine_tuning, run_sft
from ludus.types import Timings

if TYPE_CHECKING:
    from ludus.cluster.cluster import Cluster


log = logging.getLogger("ludus.sft")


class EpisodeBar:
    """A bar of the episodes of the phase at hand."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._phase: TaskID | None = None
        self._engine: Engine | None = None
        self._before = EngineStats()
        self._spent = Timings()

    def phase(self, name: str, total: int | None, engine: Engine | None = None) -> None:
        """Start the bar of a phase anew; without a total it moves until the next phase."""
        if self._phase is not None:
            self._progress.remove_task(self._phase)
        self._phase = self._progress.add_task(name, total=total, numbers="")
        self._engine = engine
        self._before = engine.stats() if engine else EngineStats()
        self._spent = Timings()

    def episode(self, episode: Episode) -> None:
        """One episode further, with what the engine did, and how the episodes' seconds went by."""
        if self._phase is None:
            return
        one, all_of_them = episode.trajectory.timings, self._spent
        spent = self._spent = Timings(
            model_s=all_of_them.model_s + one.model_s,
            tools_s=all_of_them.tools_s + one.tools_s,
            scoring_s=all_of_them.scoring_s + one.scoring_s,
        )
        numbers = (self._engine.stats() - self._before).line() if self._engine else ""
        if total_s := spent.model_s + spent.tools_s + spent.scoring_s:
            tools, scoring = spent.tools_s / total_s, spent.scoring_s / total_s
            waits = f", for rewards {scoring:.0%}" if scoring >= 0.01 else ""
            numbers += f"  time in tools {tools:.0%}{waits}, with the model {1 - tools - scoring:.0%}"
        self._progress.update(self._phase, advance=1, numbers=numbers.strip())


class ProgressReporter:
    """Two bars: the steps of the run with the numbers that matter, and the episodes of the phase."""

    def __init__(self, progress: Progress, steps: int, done: int = 0) -> None:
        self._progress = progress
        self._steps = progress.add_task("training", total=steps, completed=done, numbers="")
        self._episodes = EpisodeBar(progress)
        self._held_out = ""

    def phase(self, name: str, total: int | None, engine: Engine | None = None) -> None:
        """Start the bar of a phase anew; without a total it moves until the next phase."""
        self._episodes.phase(name, total, engine)

    def episode(self, episode: Episode) -> None:
        """One episode further."""
        self._episodes.episode(episode)

    def step(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """One step further, with its reward, success and speed."""
        for name, value in metrics.items():
            if name.startswith("eval/") and name.endswith("/success"):
                self._held_out = f"  held-out {value:.0%}"
        numbers = f"reward {metrics['reward/mean']:.3f}"
        if "success/mean" in metrics:
            numbers += f"  success {metrics['success/mean']:.0%}"
        numbers += self._held_out
        numbers += f"  {timings.get('speed/sampled_tokens_per_s', 0.0):,.0f} tokens/s"
        numbers += waiting_line(metrics, timings)
        self._progress.update(self._steps, completed=step, numbers=numbers)

    def alarm(self, text: str) -> None:
        """Print a warning above the bars."""
        say(self._progress.console, f"! {text}", "yellow")


SLOW_S = 0.1
"""Calls that are all shorter are slow beside others alone, and nothing to tell."""


def waiting_line(metrics: Mapping[str, float], timings: Mapping[str, float]) -> str:
    """Who waited in a step: idle shares, what is queued where episodes stream, tools with stragglers."""
    line = ""
    if "idle/learner" in timings:
        line += f"  idle: learner {timings['idle/learner']:.0%}"
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


def train(config: Config, folder: RunFolder, session: TrainingSession | None) -> None:
    """Train with progress bars, then print what came of it. Without a session the cold start comes first."""
    console = make_console()
    say(console, f"Run folder: {folder.path}")
    session = session or open_session(config, cold_start(config, folder, console))
    with bars(console) as progress:
        reporter = ProgressReporter(progress, config.training.steps, steps_done(folder))
        with cluster_of(session) as cluster, controlled(folder.path, cluster):
            comparisons = train_run(session, folder, reporter, cluster)
    console.print(comparison_table(comparisons))
    if any(pair.after.worlds for pair in comparisons):
        console.print(worlds_table(comparisons))
    if any(other_conditions(pair) for pair in comparisons):
        say(console, "! Before and after were played with different settings of rollout.", "yellow")
    print_examples(console, folder, comparisons)
    print_commands(console, folder, config)


def cluster_of(session: TrainingSession) -> AbstractContextManager[Cluster | None]:
    """The processes that sample, where the settings want any."""
    if not session.config.cluster.enabled:
        return nullcontext()
    from ludus.cluster.cluster import open_cluster

    return open_cluster(session)


def controlled(run: Path, cluster: Cluster | None) -> AbstractContextManager[None]:
    """In the block, `ludus cluster` can change the cluster of a run."""
    if cluster is None:
        return nullcontext()
    from ludus.cluster.control import controlled as control

    return control(run, cluster)


def sft(session: TrainingSession, folder: RunFolder) -> None:
    """Fine-tune with a progress bar, then say where the checkpoint is."""
    config = session.config
    console = make_console()
    say(console, f"Run folder: {folder.path}")
    tuning = open_fine_tuning(session, folder)
    save_config(folder, config)
    checkpoint = fine_tune(tuning, console)
    say(console, f"Checkpoint: {checkpoint}\nUse it: {use_command(folder, config, checkpoint)}")


def use_command(folder: RunFolder, config: Config, checkpoint: Path) -> str:
    """What trains a fine-tuned checkpoint: the recipe of its run, and where its environment and its limits of
    rollouts differ from that."""
    recipe = recipe_of(folder) or config.env.name
    try:
        base = load_config(recipe)
    except ConfigError:  # not a recipe, or no longer there
        recipe, base = str(folder.config), config
    words = ["ludus", "train", recipe, "--model", str(checkpoint)]
    if base.run.dir is not None and recipe == str(folder.config):
        words += ["--run.dir", "none"]
    for change in changes(base, config):
        if change.key.startswith(("env.", "rollout.")):
            words += [f"--{change.key}", change.new if isinstance(change.new, str) else value_text(change.new)]
    return shlex.join(words)


def cold_start(config: Config, folder: RunFolder, console: Console) -> Path:
    """The cold start of a run from scratch, in a folder of its own inside the run's."""
    nested = RunFolder(folder.path / "cold_start")
    nested.path.mkdir(exist_ok=True)
    found = list_checkpoints(nested.checkpoints)
    if found and found[-1][0] >= config.sft.steps:
        return found[-1][1]
    return fine_tune(open_fine_tuning(make_session(plain_trackers(config)), nested), console)


def fine_tune(tuning: SftTraining, console: Console) -> Path:
    """Run the SFT loop under a progress bar."""
    config, left_out = tuning.session.config, 0
    for text in filter(None, [*sft_warnings(tuning.session), busy_warning(config)]):
        log.warning(text)
        say(console, f"! {text}", "yellow")
    with bars(console) as progress:
        task = progress.add_task("fine-tuning", total=config.sft.steps, completed=tuning.done, numbers="")

        def on_step(step: int, metrics: Mapping[str, float]) -> None:
            nonlocal left_out
            left_out += int(metrics["batch/left_out"])
            speed = metrics["batch/total_tokens"] / max(1e-9, metrics["time/step_s"])
            numbers = f"loss {metrics['loss/total']:.3f}  {speed:,.0f} tokens/s"
            progress.update(task, completed=step, numbers=numbers)

        trackers = make_trackers(config, tuning.folder, tuning.done)
        try:
            checkpoint = run_sft(tuning, trackers, on_step)
        finally:
            for tracker in trackers:
                tracker.close()
    if left_out:
        taken = (config.sft.steps - tuning.done) * config.sft.batch_size
        say(console, f"{left_out} of {left_out + taken} dialogues were left out: too long.", "yellow")
    return checkpoint


def plain_trackers(config: Config) -> Config:
    """The configuration with the trackers that a nested run writes: metrics as JSON lines."""
    return config.model_copy(update={"run": config.run.model_copy(update={"trackers": ["jsonl"]})})


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Held-out success before and after training, with 95 % intervals."""
    table = Table(title="Held-out success, with 95 % intervals")
    for column in ("split", "sampling", "tasks", "before training", "after training"):
        table.add_column(column)
    for pair in comparisons:
        plan = pair.after.plan
        before = rate(pair.before) if pair.before else "not evaluated"
        table.add_row(plan.split, how_sampled(plan), number(pair), before, rate(pair.after))
    return table


def worlds_table(comparisons: Sequence[Comparison]) -> Table:
    """Held-out success in each world of a mixture, before and after training."""
    table = Table(title="By world")
    for column in ("split", "sampling", "world", "tasks", "before training", "after training"):
        table.add_column(column)
    for pair in comparisons:
        plan, was = pair.after.plan, pair.before.by_world() if pair.before else {}
        for name, one in pair.after.by_world().items():
            before = f"{was[name].rate:.1%}" if name in was else "not evaluated"
            row = (plan.split, how_sampled(plan), name, str(one.num_tasks), before)
            table.add_row(*row, f"{one.rate:.1%} [{one.interval.low:.1%}, {one.interval.high:.1%}]")
        average = f"{pair.before.macro:.1%}" if pair.before else ""
        table.add_row(plan.split, how_sampled(plan), "average of the worlds", "", average, f"{pair.after.macro:.1%}")
    return table


def number(pair: Comparison) -> str:
    """How many tasks were played, before and after where those differ."""
    after = len(pair.after.task_ids)
    before = len(pair.before.task_ids) if pair.before else after
    return str(after) if before == after else f"{before} before, {after} after"


def other_conditions(pair: Comparison) -> bool:
    """Whether the two evaluations are known to have been played under different conditions."""
    before = pair.before.plan.conditions if pair.before else None
    return before is not None and before != pair.after.plan.conditions


def print_examples(console: Console, folder: RunFolder, comparisons: Sequence[Comparison]) -> None:
    """Three whole transcripts, the first of a task that was wrong before and is right now."""
    if not comparisons:
        return
    before, after = comparisons[0].before, comparisons[0].after
    chosen = choose_examples(before or after, after)
    old = records_of(folder, before, chosen[:1]) if before else {}
    new = records_of(folder, after, chosen)
    for task_id in chosen:
        if task_id in old:
            console.rule("before training")
            print_transcript(console, old[task_id].trajectory)
            console.rule("after training: the same task")
        else:
            console.rule("after training")
        print_transcript(console, new[task_id].trajectory)


def choose_examples(before: Evaluation, after: Evaluation, num: int = 3) -> list[str]:
    """Task ids: first one that was mended, then others, of different families where there are any.

    Only of tasks that both evaluations played.
    """
    now = dict(zip(after.task_ids, after.successes, strict=True))
    was = {t: s for t, s in zip(before.task_ids, before.successes, strict=True) if t in now}
    family = dict(zip(before.task_ids, before.families, strict=True))
    mended = [t for t, s in was.items() if now[t] > s]
    chosen = mended[:1] or list(was)[:1]
    seen = {family[t] for t in chosen}
    for task_id in [*mended, *was]:
        if len(chosen) < num and family[task_id] not in seen:
            chosen.append(task_id)
            seen.add(family[task_id])
    spare = [t for t in was if t not in chosen]
    return chosen + spare[: num - len(chosen)]


def records_of(folder: RunFolder, result: Evaluation, task_ids: Sequence[str]) -> dict[str, RolloutRecord]:
    """The saved rollouts of some tasks of an evaluation, the first attempt of each."""
    found: dict[str, RolloutRecord] = {}
    for record in read_rollouts(folder.evaluations / f"{result.plan.name}.jsonl.gz"):
        if record.group in task_ids:
            found.setdefault(record.group, record)
    return found


def print_commands(console: Console, folder: RunFolder, config: Config) -> None:
    """What to type next."""
    more = f"--training.steps {config.training.steps * 2}"
    if kind_of(folder) == "rft":
        more = f"--rft.rounds {config.rft.rounds * 2}"
    say(console, f"The run is in {folder.path}")
    say(console, f"  read it:      ludus show {folder.path}")
    say(console, f"  continue it:  {resume_command(folder)} {more}")
    say(console, f"  evaluate it:  ludus eval --run {folder.path}")
    say(console, f"  talk to it:   ludus chat {folder.path}")
