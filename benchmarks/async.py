"""Measure asynchronous against synchronous training with slow tools, in episodes per second.

    python benchmarks/async.py --page docs/use/async_training.md

The same tasks run in the modes sync, one_step and async, interleaved over the repetitions. `apart` is async
with the engine in another process, behind `ludus serve` (engine.url); `cluster` is async with engine and
episodes in other processes (`--cluster local`). The median latency of the tool is the generation time of one
turn; 5 % of the calls take 20 times as long.

The ideal time of a step is the larger of two times, each on one thread with nothing else running: engine time
(episodes whose tools take no time, measured in each repetition, scaled to the action tokens that the arm
trains) and learner time (the batches of the arm, trained once more after its run). Speeds are means over the
middle of a run, without the steps in which the stream fills and empties; speeds of the whole run are in
another column.

The last column divides the processor time of a step by that of a synchronous step without tools. It shows
the overhead of concurrent threads, independent of the load of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch

import async_work
from ludus.cluster.cluster import open_cluster
from ludus.config.schema import Config
from ludus.rollouts.ledger import Ledger, RolloutKey
from ludus.rollouts.scheduler import Episode, RolloutRequest, SamplingPlan
from ludus.simulator.costs import RunLayout
from ludus.training.batches.rows import Row
from ludus.training.learner.learner import Learner
from ludus.training.rl.build import train
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import make_engine, open_session, session_scheduler
from pages import fill
from slow_tools import Latency, Sizes
from watching import Watch

MODES = ("sync", "one_step", "async", "apart", "cluster")
STREAMS = ("async", "apart", "cluster")


@dataclass(frozen=True)
class Arm:
    """One run: episodes per second in the middle and overall, idle shares, ages, seconds by phase.

    `cpu_s` is the processor time of one step over all threads. For a step in the middle of the run, `tokens` is the
    number of trained action tokens, and `alone_s` the learner's seconds for them with nothing else running.
    """

    mode: str
    speed: float
    step_s: float
    tokens: float
    alone_s: float
    whole: float
    learner_idle: float
    engine_idle: float
    age: float
    oldest: float
    phases: dict[str, float]
    cpu_s: float


@dataclass(frozen=True)
class Pure:
    """Seconds of one step in the engine alone and in the learner alone, and of one turn.

    `token_s` is the engine's seconds per action token, `cpu_s` the processor time of a synchronous step whose
    tools take no time.
    """

    engine_s: float
    learner_s: float
    token_s: float
    turn_s: float
    cpu_s: float

    def ideal(self, arm: Arm) -> float:
        """Return the fraction of the ideal speed that an arm of the same repetition reached."""
        return max(self.token_s * arm.tokens, arm.alone_s) / arm.step_s


@dataclass
class Batches:
    """Record the batches of a run, to train them once more with nothing else running."""

    seen: list[Callable[[], object]] = field(default_factory=list)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Record the batches that are trained in this block."""
        plain = Learner.train

        def train(learner: Learner, rows: Sequence[Row], seed: int) -> dict[str, float]:
            self.seen.append(partial(plain, learner, rows, seed))
            return plain(learner, rows, seed)

        Learner.train = train
        try:
            yield
        finally:
            Learner.train = plain

    def again(self, steps: slice) -> float:
        """Train the batches of these steps again; return the mean seconds per step."""
        batches = self.seen[steps]
        begin = time.perf_counter()
        for batch in batches:
            batch()
        return (time.perf_counter() - begin) / len(batches)


@dataclass(frozen=True)
class Work:
    """Sizes of the episodes and latency of the tools."""

    sizes: Sizes
    latency: Latency


def settings(args: argparse.Namespace, mode: str, folder: Path, work: Work, **more: object) -> Config:
    """Return the configuration of an arm."""
    setup = RunLayout(
        mode="async" if mode in STREAMS else mode,
        groups=args.groups,
        members=args.members,
        steps=args.steps,
        max_staleness=args.bound,
        in_flight=args.in_flight,
    )
    if mode == "cluster":
        more |= {"cluster__kind": "local", "cluster__episodes_per_worker": setup.max_in_flight}
    return async_work.settings(setup, work.sizes, work.latency, args.model, folder, **more)


def run_arm(args: argparse.Namespace, mode: str, work: Work) -> Arm:
    """Train one arm and return its measurements."""
    folder, watch, batches = Path(tempfile.mkdtemp()), Watch(), Batches()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        more = {}
        if mode == "apart":
            model = async_work.made(async_work.SHAPES[args.model], work.sizes, folder / "model")
            more["engine__url"] = stack.enter_context(async_work.serving(model))
        config = settings(args, mode, folder, work, **more)
        stack.enter_context(lock_run(new_run(config, "async", "rl")))
        session = open_session(config)
        cluster = stack.enter_context(open_cluster(session)) if mode == "cluster" else None
        with batches.kept():
            train(session, RunFolder(folder / "run"), watch, cluster)
    shutil.rmtree(folder)
    per_step = args.groups * args.members
    times = [watch.began, *watch.ends]
    edge = min(args.bound + 1, (len(watch.ends) - 1) // 3) if mode in STREAMS else 1
    middle = slice(edge, len(watch.ends) - (edge if mode in STREAMS else 0))
    inner = watch.timings[middle]
    seconds = times[middle.stop] - times[middle.start]
    trained = sum(m["batch/trained_tokens"] for m in watch.metrics[middle])

    def share(name: str) -> float:
        weights = [t["time/step_s"] for t in inner]
        return sum(t[name] * w for t, w in zip(inner, weights, strict=True)) / sum(weights)

    return Arm(
        mode=mode,
        speed=len(inner) * per_step / seconds,
        step_s=seconds / len(inner),
        tokens=trained / len(inner),
        alone_s=batches.again(middle),
        whole=len(watch.ends) * per_step / (times[-1] - times[0]),
        learner_idle=share("idle/learner"),
        engine_idle=share("idle/engine"),
        age=sum(m.get("staleness/mean", 0.0) for m in watch.metrics[middle]) / len(inner),
        oldest=max(m.get("staleness/max", float(mode == "one_step")) for m in watch.metrics),
        phases={name: median(t[f"time/{name}_s"] for t in inner) for name in ("rollout", "learn", "sync")},
        cpu_s=(watch.cpu[middle.stop - 1] - watch.cpu[middle.start - 1]) / len(inner),
    )


def pure(args: argparse.Namespace, sizes: Sizes) -> Pure:
    """Measure the engine alone on the episodes of a few steps (one step's at a time), and the learner alone."""
    folder, work = Path(tempfile.mkdtemp()), Work(sizes, Latency(0.0))
    torch.set_num_threads(1)
    session = open_session(settings(args, "sync", folder, work))
    tasks = session.world.tasks("train")[: args.groups * args.pure_steps]

    async def play() -> tuple[float, list[Episode]]:
        engine = make_engine(session)
        scheduler = session_scheduler(session, engine, SamplingPlan("pure", 1.0, 0), Ledger())
        warm = [RolloutRequest(RolloutKey(0, task.id, 99), task) for task in tasks[:2]]
        await scheduler.run(warm)
        requests = [RolloutRequest(RolloutKey(1, task.id, i), task) for task in tasks for i in range(args.members)]
        begin = time.perf_counter()
        episodes = await scheduler.run(requests)
        seconds = time.perf_counter() - begin
        await engine.close()
        return seconds, episodes

    seconds, episodes = asyncio.run(play())
    turns = sum(episode.trajectory.num_turns for episode in episodes)
    turn_s = sum(episode.trajectory.timings.model_s for episode in episodes) / turns
    tokens = sum(episode.trajectory.num_action_tokens for episode in episodes) / turns
    print(f"{len(episodes)} episodes, {tokens:.1f} tokens an action", file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    few = argparse.Namespace(**vars(args) | {"steps": args.pure_steps + 1})
    arm = run_arm(few, "sync", work)  # in this mode the learner runs alone
    sampled = sum(episode.trajectory.num_action_tokens for episode in episodes)
    return Pure(seconds / args.pure_steps, arm.phases["learn"], seconds / sampled, turn_s, arm.cpu_s)


def middle_of(measured: Sequence[Pure]) -> Pure:
    """Return the median of each field over the repetitions."""
    return Pure(*(median(values) for values in zip(*map(astuple, measured), strict=True)))


def report(arms: Sequence[list[Arm]], measured: Sequence[Pure], args: argparse.Namespace) -> str:
    """Return the table in Markdown; each run is compared with the `measured` times of its repetition."""
    alone = middle_of(measured)
    names = ("mode", "episodes/s", "of sync", "of ideal", "whole run", "learner idle", "engine idle")
    more = ("mean age", "oldest", "CPU, of alone")
    rows = [f"| {' | '.join((*names, *more))} |", "|---|" + "---:|" * (len(names) + len(more) - 1)]
    speeds = {found[0].mode: median(arm.speed for arm in found) for found in arms}
    for found in arms:
        arm = min(found, key=lambda a: abs(a.speed - speeds[a.mode]))
        own = speeds[arm.mode]
        cells = [
            arm.mode,
            f"{own:.2f}",
            f"{own / speeds['sync']:.2f}" if "sync" in speeds else "",
            f"{median(map(Pure.ideal, measured, found)):.0%}",
            f"{arm.whole:.2f}",
        ]
        cells += [f"{arm.learner_idle:.0%}", f"{arm.engine_idle:.0%}", f"{arm.age:.1f}", f"{arm.oldest:.0f}"]
        cells.append(f"{arm.cpu_s / alone.cpu_s:.0%}")
        rows.append(f"| {' | '.join(cells)} |")
    slow_steps = 20 * alone.turn_s / max(alone.engine_s, alone.learner_s)
    return "\n".join(rows) + (
        f"\n\n{args.groups} groups of {args.members} a step, {args.steps} steps, median of {args.repeats}; "
        f"model {args.model}, actions of {args.new} tokens. Alone, a step's episodes "
        f"take the engine {alone.engine_s:.2f} s and the learner {alone.learner_s:.2f} s; one turn takes "
        f"{alone.turn_s:.2f} s. A straggler lasts "
        f"{slow_steps:.1f} steps of the ideal; max_staleness is {args.bound}."
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=tuple(async_work.SHAPES), default="medium")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="steps of an asynchronous run")
    parser.add_argument("--sync-steps", type=int, default=4, help="steps in the other modes")
    parser.add_argument("--pure-steps", type=int, default=3)
    parser.add_argument("--groups", type=int, default=8, help="groups per step")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--new", type=int, default=24, help="mean tokens per action")
    parser.add_argument("--bound", type=int, default=0, help="max_staleness; 0: three times the latency of a straggler")
    parser.add_argument("--in-flight", type=int, default=0)
    parser.add_argument("--page", type=Path, help="insert the table into this page")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and insert it into the page."""
    args = parse(arguments)
    sizes = Sizes(turns=args.turns, new=args.new, most=max(160, 4 * args.new))
    measured = [pure(args, sizes)]
    alone = measured[0]
    print(alone, file=sys.stderr, flush=True)
    if not args.bound:
        args.bound = math.ceil(3 * 20 * alone.turn_s / max(alone.engine_s, alone.learner_s))
    work = Work(sizes, Latency(alone.turn_s))
    arms: list[list[Arm]] = [[] for _ in args.modes]
    for repeat in range(args.repeats):
        if repeat:
            measured.append(pure(args, sizes))
            print(measured[-1], file=sys.stderr, flush=True)
        for found, mode in list(zip(arms, args.modes, strict=True))[:: -1 if repeat % 2 else 1]:
            steps = args.sync_steps if mode not in STREAMS else args.steps
            few = argparse.Namespace(**vars(args) | {"steps": steps})
            found.append(run_arm(few, mode, work))
            print(found[-1], file=sys.stderr, flush=True)
    text = report(arms, measured, args)
    print(text)
    if args.page:
        fill(args.page, "async", text)


if __name__ == "__main__":
    main()
