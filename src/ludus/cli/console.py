"""What training looks like in a terminal: progress bars, the closing table, examples."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from ludus.cli.tables import how_sampled, rate
from ludus.cli.terminal import bars, make_console, say
from ludus.cli.transcripts import print_transcript
from ludus.config.schema import Config
from ludus.evaluation.evaluate import Evaluation
from ludus.rollout.scheduler import Episode
from ludus.rollout.store import RolloutRecord, read_rollouts
from ludus.training.checkpoint import list_checkpoints
from ludus.training.run import RunFolder
from ludus.training.session import Session, open_session
from ludus.training.sft import make_session, run_sft
from ludus.training.start import Comparison, make_trackers
from ludus.training.start import train as train_run


class ProgressReporter:
    """Two bars: the steps of the run with the numbers that matter, and the episodes of the phase."""

    def __init__(self, progress: Progress, steps: int, done: int = 0) -> None:
        self._progress = progress
        self._steps = progress.add_task("training", total=steps, completed=done, numbers="")
        self._phase: TaskID | None = None
        self._begin = 0.0
        self._tokens = 0
        self._held_out = ""

    def phase(self, name: str, total: int) -> None:
        """Start the bar of a phase anew."""
        if self._phase is not None:
            self._progress.remove_task(self._phase)
        self._phase = self._progress.add_task(name, total=total, numbers="")
        self._begin, self._tokens = time.perf_counter(), 0

    def episode(self, episode: Episode) -> None:
        """One episode further."""
        if self._phase is None:
            return
        self._tokens += episode.trajectory.num_action_tokens
        seconds = max(1e-9, time.perf_counter() - self._begin)
        self._progress.update(self._phase, advance=1, numbers=f"{self._tokens / seconds:,.0f} tokens/s")

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
        self._progress.update(self._steps, completed=step, numbers=numbers)

    def alarm(self, text: str) -> None:
        """Print a warning above the bars."""
        self._progress.console.print(Text(f"! {text}", style="yellow"))


def train(config: Config, folder: RunFolder, session: Session | None) -> None:
    """Train with progress bars, then print what came of it. Without a session the cold start comes first."""
    console = make_console()
    say(console, f"Run folder: {folder.path}")
    session = session or open_session(config, cold_start(config, folder, console))
    with bars(console) as progress:
        reporter = ProgressReporter(progress, config.training.steps, steps_done(folder))
        comparisons = train_run(session, folder, reporter)
    console.print(comparison_table(comparisons))
    print_examples(console, folder, comparisons)
    print_commands(console, folder, config)


def sft(session: Session, folder: RunFolder) -> Path:
    """Fine-tune with a progress bar; gives the last checkpoint."""
    config = session.config
    console = make_console()
    say(console, f"Run folder: {folder.path}")
    checkpoint = fine_tune(session, folder, console)
    recipe = config.env.name if config.env.name.isidentifier() else "RECIPE.toml"
    say(console, f"Checkpoint: {checkpoint}\nUse it: ludus train {recipe} --model {checkpoint}")
    return checkpoint


def cold_start(config: Config, folder: RunFolder, console: Console) -> Path:
    """The cold start of a run from scratch, in a folder of its own inside the run's."""
    nested = RunFolder(folder.path / "cold_start")
    nested.path.mkdir(exist_ok=True)
    found = list_checkpoints(nested.checkpoints)
    if found and found[-1][0] >= config.sft.steps:
        return found[-1][1]
    return fine_tune(make_session(plain_trackers(config)), nested, console)


def fine_tune(session: Session, folder: RunFolder, console: Console) -> Path:
    """Run the SFT loop under a progress bar."""
    config = session.config
    with bars(console) as progress:
        task = progress.add_task("fine-tuning", total=config.sft.steps, numbers="")

        def on_step(step: int, metrics: Mapping[str, float]) -> None:
            speed = metrics["batch/total_tokens"] / max(1e-9, metrics["time/step_s"])
            numbers = f"loss {metrics['loss/total']:.3f}  {speed:,.0f} tokens/s"
            progress.update(task, completed=step, numbers=numbers)

        trackers = make_trackers(config, folder, steps_done(folder))
        try:
            return run_sft(session, folder, trackers, on_step)
        finally:
            for tracker in trackers:
                tracker.close()


def plain_trackers(config: Config) -> Config:
    """The configuration with the trackers that a nested run writes: metrics as JSON lines."""
    return config.model_copy(update={"run": config.run.model_copy(update={"trackers": ["jsonl"]})})


def steps_done(folder: RunFolder) -> int:
    """The step of the newest checkpoint, 0 without one."""
    found = list_checkpoints(folder.checkpoints)
    return found[-1][0] if found else 0


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Held-out success before and after training, with 95 % intervals."""
    table = Table(title="Held-out success, with 95 % intervals")
    for column in ("tasks", "sampling", "number", "before training", "after training"):
        table.add_column(column)
    for pair in comparisons:
        plan = pair.before.plan
        table.add_row(plan.split, how_sampled(plan), str(plan.num_tasks), rate(pair.before), rate(pair.after))
    return table


def print_examples(console: Console, folder: RunFolder, comparisons: Sequence[Comparison]) -> None:
    """Three whole transcripts, the first of a task that was wrong before and is right now."""
    if not comparisons:
        return
    before, after = comparisons[0].before, comparisons[0].after
    chosen = choose_examples(before, after)
    old = records_of(folder, before, chosen[:1])
    new = records_of(folder, after, chosen)
    for number, task_id in enumerate(chosen):
        if number == 0:
            console.rule("before training")
            print_transcript(console, old[task_id].trajectory)
            console.rule("after training: the same task")
        else:
            console.rule("after training")
        print_transcript(console, new[task_id].trajectory)


def choose_examples(before: Evaluation, after: Evaluation, num: int = 3) -> list[str]:
    """Task ids: first one that was mended, then others, of different families where there are any."""
    now = dict(zip(after.task_ids, after.successes, strict=True))
    family = dict(zip(before.task_ids, before.families, strict=True))
    mended = [t for t, s in zip(before.task_ids, before.successes, strict=True) if now[t] > s]
    chosen = mended[:1] or list(before.task_ids[:1])
    seen = {family[t] for t in chosen}
    for task_id in [*mended, *before.task_ids]:
        if len(chosen) < num and family[task_id] not in seen:
            chosen.append(task_id)
            seen.add(family[task_id])
    spare = [t for t in before.task_ids if t not in chosen]
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
    steps = config.training.steps * 2
    say(console, f"The run is in {folder.path}")
    say(console, f"  read it:      ludus show {folder.path}")
    say(console, f"  continue it:  ludus train --resume {folder.path} --training.steps {steps}")
    say(console, f"  evaluate it:  ludus eval --run {folder.path}")
    say(console, f"  talk to it:   ludus chat {folder.path}")
