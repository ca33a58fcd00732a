"""A long asynchronous run with a local cluster, under load and faults; it must not leak.

    python tests/soak.py --minutes 30 --page docs/use/failures.md

Engines and workers are killed and suspended at random times, and tools are slow and fail. Every few seconds,
memory, threads and open files of all processes, temporary files and shared memory are sampled. The exit code is
1 if one of them grows, or remains after the run is interrupted. No other run of Ludus should begin or end
meanwhile, because files in shared memory are identified only by their name.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fault_matrix import fill
from fault_runs import BUDGET, LIMIT_S, Process, alive, below, cold_start, fork
from ludus.diagnostics.trackers import read_metrics

EVERY_S = 5.0
WARM_S = 60.0
"""Warm-up of a process, in which allocators and caches fill."""
BOUND_MB = 10.0
"""Maximum growth of the memory of a process in ten minutes, by a linear fit of its samples."""
KINDS = ("learner", "engine", "worker")
_PLACE = re.compile(r"(engine|worker) (\d+) runs at \S+ \((\d+)\)")
SETTINGS = {
    "training.mode": "async",
    "training.steps": "1000000",
    "training.checkpoint_every": "5",
    "staleness.max_staleness": "4",
    "cluster.kind": "local",
    "cluster.engines": "2",
    "cluster.workers": "2",
    "cluster.heartbeat_timeout_s": "20",
    "cluster.restarts": "100000",
    "engine.connect_timeout_s": "20",
    "rollout.tool_timeout_s": "3",
    "rollout.max_failure_rate": "0.5",
    "env.name": str(Path(__file__).with_name("soak_world.py")),
}


@dataclass
class Sample:
    """A sample of a process, `age` seconds after the first one."""

    kind: str
    pid: int
    age: float
    rss_mb: float
    threads: int
    files: int


@dataclass
class ResourceCounts:
    """Number of child processes, temporary files and files in shared memory at a time."""

    at: float
    processes: int
    temporary: int
    shared: int


@dataclass
class ResourceSampler:
    """Samples the resources of a run."""

    run: Process
    folder: Path
    temporary: Path
    samples: list[Sample] = field(default_factory=list)
    around: list[ResourceCounts] = field(default_factory=list)
    first: dict[int, float] = field(default_factory=dict)

    def places(self) -> dict[int, str]:
        """Return the kinds of the running processes in the log, by pid."""
        log = self.folder / "log.txt"
        found = _PLACE.findall(log.read_text()) if log.exists() else []
        return {int(pid): kind for kind, _, pid in found if alive(int(pid))}

    def look(self) -> None:
        """Take one sample of everything."""
        now = time.monotonic()
        children = set(below(self.run.pid))
        for pid, kind in {self.run.pid: "learner", **self.places()}.items():
            with suppress(OSError, KeyError):  # the process has just ended
                age = now - self.first.setdefault(pid, now)
                self.samples.append(Sample(kind, pid, age, *figures(pid)))
        self.around.append(ResourceCounts(now - self.run.begin, len(children), count(self.temporary), len(shared())))


def figures(pid: int) -> tuple[float, int, int]:
    """Return memory (MB), threads and open files of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return int(values["VmRSS"].split()[0]) / 1024, int(values["Threads"]), files


def count(folder: Path) -> int:
    """Return the number of files and folders in a folder."""
    return sum(1 for _ in folder.rglob("*"))


def shared() -> set[str]:
    """Return the names of our files in shared memory."""
    return {name for name in os.listdir("/dev/shm") if "ludus" in name}


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of a linear fit."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def grown(samples: Iterable[Sample]) -> dict[str, dict[str, float]]:
    """Return for each kind the growth of memory, threads and files in 10 minutes, the median over its processes.

    Processes that lived for less than three minutes after the warm-up do not count.
    """
    series: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.age >= WARM_S:
            series[sample.kind, sample.pid].append(sample)
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        long = [s for (k, _), s in series.items() if k == kind and s[-1].age - s[0].age >= 180]
        if long:
            found[kind] = {
                name: statistics.median(600 * slope([(x.age, asdict(x)[name]) for x in one]) for one in long)
                for name in ("rss_mb", "threads", "files")
            } | {"processes": len(long)}
    return found


def inject_fault(watch: ResourceSampler, rng: random.Random) -> str:
    """Kill or suspend an engine or a worker; return what was done."""
    places = sorted(watch.places().items())
    if not places:
        return ""
    pid, kind = rng.choice(places)
    how = rng.choice((signal.SIGKILL, signal.SIGSTOP))
    with suppress(ProcessLookupError):
        os.kill(pid, how)
        return f"{kind} {'killed' if how == signal.SIGKILL else 'stopped'}"
    return ""


def wait_for_checkpoint(watch: ResourceSampler) -> None:
    """Wait for the first checkpoint."""
    while watch.run.wait(1.0) is None and not any(watch.folder.glob("checkpoints/step-*")):
        assert time.monotonic() < watch.run.begin + LIMIT_S, watch.run.reason()
    watch.run.begin = time.monotonic()


def soak(watch: ResourceSampler, seconds: float, pause_s: float, rng: random.Random) -> list[str]:
    """Sample the run and inject faults for `seconds`; return the faults."""
    injected: list[str] = []
    end, next_fault = watch.run.begin + seconds, watch.run.begin + pause_s
    while watch.run.wait(EVERY_S) is None and time.monotonic() < end:
        watch.look()
        if time.monotonic() > next_fault and time.monotonic() < end - 60:
            injected.append(inject_fault(watch, rng))
            next_fault = time.monotonic() + rng.uniform(0.5, 1.5) * pause_s
    return [what for what in injected if what]


def judge(watch: ResourceSampler, before: set[str]) -> list[str]:
    """Interrupt the run; return the errors: its exit, growth, and remaining resources."""
    wrong = []
    if watch.run.code is None:
        os.kill(watch.run.pid, signal.SIGINT)
    if (code := watch.run.wait()) != 130:
        wrong.append(f"the run exited with {code}: {watch.run.reason()}")
    if left := watch.run.left():
        wrong.append(f"{len(left)} processes are left")
    with suppress(OSError):  # torch creates this folder when transformers is imported, and keeps it for later processes
        next(watch.temporary.glob("torchinductor_*"), watch.temporary / "none").rmdir()
    if lying := sorted(str(path) for path in watch.temporary.rglob("*")):
        wrong.append(f"{len(lying)} temporary files are left, {lying[0]} first")
    if lying := sorted(shared() - before):
        wrong.append(f"files in shared memory are left: {lying}")
    for kind, figures_ in grown(watch.samples).items():
        if figures_["rss_mb"] > BOUND_MB:
            wrong.append(f"the memory of the {kind} grows by {figures_['rss_mb']:.1f} MB in 10 minutes")
        if max(figures_["threads"], figures_["files"] / 5) > 2:  # connections come and go
            wrong.append(f"threads or open files of the {kind} grow: {figures_}")
    third = len(watch.around) // 3
    for name in ("processes", "temporary", "shared") if third > 1 else ():
        early, late = (
            max(asdict(a)[name] for a in part) for part in (watch.around[: 2 * third], watch.around[-third:])
        )
        if late > early + 4:
            wrong.append(f"{name} grow: {early} at first, {late} in the last third")
    return wrong + accounts(watch.folder)


def accounts(folder: Path) -> list[str]:
    """Return the steps whose ledger does not add up."""
    if not (folder / "metrics.jsonl").exists():
        return ["no step was completed"]
    wrong = []
    for row in read_metrics(folder / "metrics.jsonl"):
        ended = [row.metrics[f"ledger/{name}"] for name in ("trained", "masked", "dropped", "failed")]
        if row.metrics["ledger/started"] != sum(ended):
            wrong.append(f"the ledger of step {row.step} does not add up")
    return wrong


def report(watch: ResourceSampler, injected: Sequence[str], wrong: Sequence[str]) -> list[str]:
    """Return the table and the sentences below it."""
    path = watch.folder / "metrics.jsonl"
    rows = [row.metrics for row in read_metrics(path)] if path.exists() else []
    failed = sum(row["ledger/failed"] for row in rows)
    minutes = watch.around[-1].at / 60 if watch.around else 0.0
    slopes = grown(watch.samples)
    attempts = sum(row["ledger/started"] for row in rows)
    struck_as = ", ".join(f"{injected.count(what)} {what}" for what in sorted(set(injected))) or "nothing"
    lines = [
        "| process | memory, first and last (MB) | growth in 10 minutes (MB) | threads | open files |",
        "|---|---|---:|---|---|",
    ]
    for kind in KINDS:
        own = [s for s in watch.samples if s.kind == kind and s.age >= WARM_S]
        if not own:
            continue
        growth = f"{slopes[kind]['rss_mb']:+.1f} (of {slopes[kind]['processes']:g})" if kind in slopes else "-"
        memory = f"{own[0].rss_mb:.0f}, {own[-1].rss_mb:.0f}"
        threads, files = span(s.threads for s in own), span(s.files for s in own)
        lines.append(f"| {kind} | {memory} | {growth} | {threads} | {files} |")
    around = [asdict(moment) for moment in watch.around]
    processes, temporary, shared_ = (span(a[n] for a in around) for n in ("processes", "temporary", "shared"))
    done = f"{minutes:.0f} minutes, {len(rows)} steps, {attempts:g} attempts at episodes"
    about = f"Child processes of the learner {processes}, temporary files {temporary}, files in shared memory {shared_}"
    ended = "Nothing was left." if not wrong else f"Errors: {'; '.join(wrong)}."
    lines += ["", f"{done}, of which {failed:g} failed and were repeated. Faults: {struck_as}.", ""]
    return [*lines, f"{about}. {ended}"]


def span(values: Iterable[float]) -> str:
    """Return minimum and maximum as text."""
    found = list(values)
    return f"{min(found)} to {max(found)}" if found else "-"


def main() -> int:
    """Run the soak test; return 1 if it found an error, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--pause", type=float, default=90.0, help="mean seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write all samples to this file, as JSON lines")
    parser.add_argument("--page", type=Path, help="insert the table into this page")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work = Path(tempfile.mkdtemp(prefix="ludus-soak-"))
    try:
        cold_start(work)
        temporary, folder, before = work / "tmp", work / "run", shared()
        temporary.mkdir()
        given = BUDGET | SETTINGS | {"run.dir": str(folder)}
        words = [word for key, value in given.items() for word in (f"--{key}", value)]
        words = ["train", str(work / "tiny.toml"), "--model", str(work / "cold"), *words]
        here = os.pathsep.join([str(Path(__file__).parent), *sys.path])  # engines and workers import the world
        run = fork(words, work / "said.txt", {"TMPDIR": str(temporary), "PYTHONPATH": here})
        watch = ResourceSampler(run, folder, temporary)
        wait_for_checkpoint(watch)
        injected = soak(watch, 60 * args.minutes, args.pause, random.Random(args.seed))
        wrong = judge(watch, before)
        lines = report(watch, injected, wrong)
        if args.out is not None:
            args.out.parent.mkdir(exist_ok=True)
            args.out.write_text("".join(json.dumps(asdict(s)) + "\n" for s in watch.samples))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print("\n".join(lines))
    if args.page is not None and not wrong:
        fill(args.page, "soak", "\n".join(lines))
    for what in wrong:
        print(f"soak: {what}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
