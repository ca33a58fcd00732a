"""Inject faults into small runs at random times, each kind many times, and tabulate how the runs ended.

    python tests/fault_matrix.py --moments 20 --out .bench/faults.jsonl --page docs/use/failures.md

Each trial is one run with one fault. If the run stops, the fault is repaired and the run is resumed. A trial
fails if the run hangs, stops without an error message or with an exit code that the fault does not allow,
leaves a process behind, cannot be resumed, loses an episode, trains one twice, or, in `sync`, differs from the
run without faults. The exit code is 1 if a trial failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fault_kinds import KINDS, Fault
from fault_runs import (
    STEPS,
    Process,
    async_faults,
    cold_start,
    fork,
    ledger_faults,
    records,
    sync_faults,
    train_words,
    waiting,
)
from ludus.diagnostics.trackers import read_metrics

TRIES = 20
"""Maximum number of runs per trial: some end before the fault."""


@dataclass
class Trial:
    """A run with a fault after `moment` seconds, in step `step`, and how it ended."""

    kind: str
    mode: str
    way: str
    moment: float
    step: int = 0
    code: int | None = None
    reason: str = ""
    failed: float = 0.0
    resumed: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass
class CleanRun:
    """A run without faults."""

    folder: Path
    seconds: float


def clean_run(fault: Fault, mode: str, settings: dict[str, str]) -> CleanRun:
    """Run without faults and check the result."""
    folder = fault.folder() / f"whole-{mode}"
    process = fork(train_words(fault.work, folder, settings), fault.work / f"{fault.name}-{mode}.txt")
    code = process.wait()
    if code != 0:
        process.kill()
        raise SystemExit(f"A run without any fault ended with {code}: {process.reason()}")
    seconds = time.monotonic() - process.begin
    wrong = ledger_faults(folder) + [f"left: {pid}" for pid in process.left()]
    if wrong or all(record.trajectory.num_turns < 2 for _, record in records(folder)):
        raise SystemExit(f"A run without any fault: {wrong or 'it never called its tool'}")
    return CleanRun(folder, seconds)


def run_trial(fault: Fault, whole: CleanRun, settings: dict[str, str], way: str, rng: random.Random) -> Trial | None:
    """Run a trial; return None, and expect a shorter run, if the run ended before the fault."""
    folder = fault.folder() / "struck"
    shutil.rmtree(folder, ignore_errors=True)
    said = fault.work / f"struck-{os.getpid()}.txt"
    said.unlink(missing_ok=True)
    trial = Trial(fault.name, settings["training.mode"], way, rng.uniform(0.02, 1.0) * whole.seconds)
    process = fork(train_words(fault.work, folder, settings), said)
    if process.wait(trial.moment) is not None or not fault.inject(process, folder, way, rng):
        if process.code is not None:
            whole.seconds *= 0.9  # the clean run was slower, because of other work on the machine
        process.kill()
        process.left()
        return None
    trial.step = 1 + steps_done(folder)
    trial.moment = round(time.monotonic() - process.begin, 2)
    trial.code = process.wait()
    judge_end(trial, process, fault)
    kept = waiting(folder) if trial.code != 0 else {}
    fault.mend()
    if trial.code != 0:
        resume(trial, fault, folder, settings)
    if not trial.wrong:
        trial.wrong += judge_run(trial, folder, whole, kept) + fault.untold(folder)
    if trial.wrong:
        keep(fault, folder, said, trial)
    return trial


def steps_done(folder: Path) -> int:
    """Return the number of steps in the metrics."""
    path = folder / "metrics.jsonl"
    return len(read_metrics(path)) if path.is_file() else 0


def judge_end(trial: Trial, process: Process, fault: Fault) -> None:
    """Check that the run ended by itself, with an error message and an allowed code, and left no process."""
    if trial.code is None:
        trial.wrong.append("the run hangs")
        process.kill()
    elif trial.code not in fault.codes and trial.code != 0:
        trial.wrong.append(f"exit code {trial.code}: {process.reason()}")
    if trial.code is not None and trial.code > 0:
        trial.reason = process.reason()
        if not trial.reason.startswith("ludus: ") or "Traceback" in process.said.read_text():
            trial.wrong.append(f"no clear reason: {trial.reason}")
    if left := process.left():
        trial.wrong.append(f"{len(left)} processes are left")


def resume(trial: Trial, fault: Fault, folder: Path, settings: dict[str, str]) -> None:
    """Resume a stopped run, as its user would."""
    trial.resumed = 1
    process = fork(train_words(fault.work, folder, settings), fault.work / f"resumed-{os.getpid()}.txt")
    code = process.wait()
    if code != 0:
        trial.wrong.append(f"resuming ends with {code}: {process.reason()}")
        process.kill()
    if left := process.left():
        trial.wrong.append(f"{len(left)} processes are left of the resumed run")


def judge_run(trial: Trial, folder: Path, whole: CleanRun, kept: dict) -> list[str]:
    """Return the errors in the files of a finished run."""
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")]
    trial.failed = sum(row["ledger/failed"] for row in rows)
    wrong = ledger_faults(folder)
    if trial.mode == "sync":
        return wrong + sync_faults(folder, whole.folder)
    return wrong + async_faults(folder, kept)


def keep(fault: Fault, folder: Path, said: Path, trial: Trial) -> None:
    """Copy the files of a failed trial to a folder for inspection."""
    aside = Path(tempfile.mkdtemp(prefix="ludus-fault-"))
    shutil.copytree(folder, aside / "run", dirs_exist_ok=True)
    shutil.copy(said, aside / "said.txt")
    (aside / "trial.json").write_text(json.dumps(asdict(trial), indent=1))
    print(f"{trial.kind}, {trial.mode}: {trial.wrong}; see {aside}", flush=True)


def trials(fault: Fault, moments: int, seed: int, modes: Sequence[str]) -> Iterator[Trial]:
    """Yield `moments` trials, alternating between the modes and the ways of the fault."""
    settings = {mode: fault.settings() | {"training.mode": mode} for mode in modes}
    wholes = {mode: clean_run(fault, mode, settings[mode]) for mode in modes}
    for number in range(moments):
        mode = modes[number % len(modes)]
        way = fault.ways[number // len(modes) % len(fault.ways)]
        for again in range(TRIES):
            rng = random.Random(f"{seed} {fault.name} {number} {again}")
            trial = run_trial(fault, wholes[mode], settings[mode], way, rng)
            if trial is not None:
                break
        else:
            raise SystemExit(f"{fault.name}: {TRIES} runs had not started or had ended at the time of the fault")
        print(f"{fault.name} {number + 1}/{moments}: {json.dumps(asdict(trial))}", flush=True)
        yield trial


def note(trial: Trial, out: Path | None) -> Trial:
    """Append a trial to the file at once, because all of them take hours."""
    if out is not None:
        out.parent.mkdir(exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(asdict(trial)) + "\n")
    return trial


def table(found: Sequence[Trial]) -> list[str]:
    """Return the table, with a row for each kind and mode."""
    lines = [
        "| fault | mode | runs | continued | stopped and resumed (exit code) | failed attempts | failed trials |",
        "|---|---|---:|---:|---|---:|---:|",
    ]
    for kind, mode in sorted({(t.kind, t.mode) for t in found}, key=lambda k: (list(KINDS).index(k[0]), k[1])):
        own = [t for t in found if (t.kind, t.mode) == (kind, mode)]
        codes = Counter(ended_as(t.code) for t in own if t.code != 0)
        stopped = ", ".join(f"{n} ({code})" for code, n in sorted(codes.items())) or "0"
        ways = "; ".join(sorted({t.way for t in own}))
        lines.append(
            f"| {kind}: {ways} | {mode} | {len(own)} | {sum(t.code == 0 for t in own)} | {stopped} "
            f"| {sum(t.failed for t in own):g} | {sum(bool(t.wrong) for t in own)} |"
        )
    return lines


def ended_as(code: int | None) -> str:
    """Return an exit code as a word."""
    if code is None:
        return "hangs"
    return "killed" if code < 0 else str(code)


def fill(page: Path, name: str, text: str) -> None:
    """Write `text` between the page's markers of this name."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, mark, rest = page.read_text().partition(begin)
    assert mark, f"{page} has no {begin}"
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of faults, separated by commas")
    parser.add_argument("--modes", default="sync,async")
    parser.add_argument("--moments", type=int, default=20, help="trials of each kind and mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append every trial to this file")
    parser.add_argument("--page", type=Path, help="page for the table of all trials in --out")
    return parser.parse_args()


def main() -> int:
    """Run the trials; return 1 if one failed, else 0."""
    args = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the cleanup below
    found: list[Trial] = []
    work = Path(tempfile.mkdtemp(prefix="ludus-faults-"))
    try:
        cold_start(work)
        for name in args.kinds.split(",") if args.moments else ():
            fault = KINDS[name](work)
            if words := fault.why_not():
                print(f"{name}: left out, {words}")
                continue
            fault.folder().mkdir(exist_ok=True)
            modes = [mode for mode in args.modes.split(",") if mode in fault.modes]
            with fault.ready():
                every = trials(fault, args.moments * len(modes), args.seed, modes)
                found += [note(trial, args.out) for trial in every]
            shutil.rmtree(fault.folder(), ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if args.out is not None and args.out.exists():
        found = [Trial(**json.loads(line)) for line in args.out.read_text().splitlines()]
    lines = table(found)
    print("\n".join(lines))
    if args.page is not None:
        fill(args.page, "faults", "\n".join([*lines, "", summary(found)]))
    return int(any(trial.wrong for trial in found))


def summary(every: Sequence[Trial]) -> str:
    """Return a sentence that describes the runs."""
    return f"{len(every)} runs of {STEPS} steps, each with a fault at a time drawn uniformly over its length."


if __name__ == "__main__":
    sys.exit(main())
