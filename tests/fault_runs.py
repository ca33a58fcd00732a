"""Small runs for fault injection, and checks of their files afterwards.

A run is `ludus train` in a new process group, with the exit code that users see. Runs are forked from this
process, which has imported everything, so that one takes seconds; this process must have a single thread.
"""

from __future__ import annotations

import atexit
import ctypes
import gzip
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ludus.cli.main import main
from ludus.diagnostics.trackers import read_metrics
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts, rollouts_path
from ludus.types import StopReason
from small_runs import lasting_files
from tiny_run import make_recipe

STEPS, GROUPS, SIZE = 5, 3, 3
LIMIT_S = 600.0
"""A longer run counts as hanging."""
_PRCTL = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1
BUDGET = {
    "training.steps": str(STEPS),
    "training.prompts_per_step": str(GROUPS),
    "training.checkpoint_every": "1",
    "algorithm.group_size": str(SIZE),
    "evaluation.tasks": "2",
    "evaluation.every": "99",
    "env.check": "false",
    "run.threads": "1",
}


@dataclass
class Process:
    """A forked command. `seen` has all its descendants so far."""

    pid: int
    said: Path
    begin: float = field(default_factory=time.monotonic)
    seen: set[int] = field(default_factory=set)
    status: int | None = None

    @property
    def code(self) -> int | None:
        """The exit code, or minus the signal number; None while it runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
            else:
                self.seen |= set(below(self.pid))
        return self.status

    def wait(self, seconds: float = LIMIT_S) -> int | None:
        """Return the exit code, or None if the process still runs after `seconds`."""
        deadline = time.monotonic() + seconds
        while self.code is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.code

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def left(self, seconds: float = 30.0) -> list[int]:
        """Return the descendants that still run after `seconds`, and kill them."""
        deadline = time.monotonic() + seconds
        while (found := [pid for pid in self.seen if alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def reason(self) -> str:
        """Return the error message at the end of the output."""
        lines = [line for line in self.said.read_text("utf-8", "replace").splitlines() if line.strip()]
        sentence = [i for i, line in enumerate(lines) if line.startswith("ludus: ")]
        return " ".join(lines[sentence[-1] :]) if sentence else " ".join(lines[-3:])


def fork(words: Sequence[str], said: Path, environment: dict[str, str] | None = None) -> Process:
    """Fork a process that runs `ludus WORDS`."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Process(pid, said)
    code = 70
    try:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)  # dies with the test process
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.update(environment or {})
        tempfile.tempdir = None
        words_to = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(words_to, descriptor)
        try:
            code = main(list(words))
        except SystemExit as end:
            code = int(end.code or 0)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def below(pid: int) -> Iterator[int]:
    """Yield the descendants of a process."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                yield int(child)
                yield from below(int(child))


def alive(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def named(pid: int, part: str) -> list[int]:
    """Return the descendants of a process whose command line contains `part`."""
    found = []
    for child in below(pid):
        with suppress(OSError):
            if part.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def train_words(work: Path, folder: Path, settings: dict[str, str]) -> list[str]:
    """Return the command that starts a run, or resumes it if it has begun."""
    if (folder / "run.json").is_file() and (folder / "config.toml").is_file():
        return ["train", "--resume", str(folder)]
    given = BUDGET | {"run.dir": str(folder)} | settings
    flat = [word for key, value in given.items() for word in (f"--{key}", value)]
    return ["train", str(work / "tiny.toml"), "--model", str(work / "cold"), *flat]


def cold_start(work: Path) -> None:
    """Train the initial model of all runs, once."""
    if (work / "cold").exists():
        return
    recipe = str(make_recipe(work))
    words = ["sft", recipe, "--from-scratch", "--run.dir", str(work / "sft")]
    words += ["--sft.steps", "150"]  # enough for tool calls
    process = fork(words, work / "sft.txt")
    assert process.wait() == 0, process.reason()
    newest = max((work / "sft" / "checkpoints").glob("step-*"))
    (work / "cold").symlink_to(newest)


def records(folder: Path) -> list[tuple[int, RolloutRecord]]:
    """Return all rollouts, each with its training step."""
    found = []
    for step in range(1, STEPS + 1):
        if rollouts_path(folder, step).is_file():
            found += [(step, record) for record in read_rollouts(rollouts_path(folder, step))]
    return found


def waiting(folder: Path) -> dict[tuple[int, str, int], list[list[int]]]:
    """Return the tokens of the finished, untrained episodes in the newest stream checkpoint."""
    found: dict[tuple[int, str, int], list[list[int]]] = {}
    shelf = sorted((folder / "checkpoints").glob("step-*/trainer/stream.jsonl"))
    for line in shelf[-1].read_text().splitlines()[1:] if shelf else ():
        entry = json.loads(line)
        if "trajectory" in entry:
            key = (entry["step"], entry["group"], entry["trajectory"]["sample"])
            found[key] = [segment["tokens"] for segment in entry["trajectory"]["segments"]]
    return found


def ledger_faults(folder: Path) -> list[str]:
    """Return the errors in the ledger of a finished run: lost or repeated episodes, and wrong sums."""
    rows, every, wrong = read_metrics(folder / "metrics.jsonl"), records(folder), []
    if [row.step for row in rows] != list(range(1, STEPS + 1)):
        wrong.append(f"steps {[row.step for row in rows]}")
    jobs = Counter((r.step, r.group, r.trajectory.sample) for _, r in every)
    if twice := [job for job, count in jobs.items() if count > 1]:
        wrong.append(f"{len(twice)} episodes twice, {twice[0]} first")
    for row in rows:
        own = [record for step, record in every if step == row.step]
        counts = Counter(str(record.outcome) for record in own)
        ended = {name: row.metrics[f"ledger/{name}"] for name in ("trained", "masked", "dropped", "failed")}
        if row.metrics["ledger/started"] != sum(ended.values()):
            wrong.append(f"step {row.step}: {row.metrics['ledger/started']:g} started, {ended} ended")
        if any(counts[name] != ended[name] for name in ("trained", "masked", "dropped")):
            wrong.append(f"step {row.step}: the ledger has {ended}, the rollouts {dict(counts)}")
        groups = Counter((record.step, record.group) for record in own)
        if partial := [group for group, count in groups.items() if count != SIZE]:
            wrong.append(f"step {row.step}: a group is incomplete, {partial[0]}")
        if sum(record.outcome != "failed" for record in own) < GROUPS * SIZE:
            wrong.append(f"step {row.step}: {len(own)} episodes, {dict(counts)}")
    newest = max((folder / "checkpoints").glob("step-*")) / "trainer" / "state.json"
    total = json.loads(newest.read_text())["ledger"]["total"]
    if total["started"] != sum(row.metrics["ledger/started"] for row in rows):
        wrong.append(f"{total['started']} started in total, which is not the sum over the steps")
    return wrong


def sync_faults(folder: Path, whole: Path) -> list[str]:
    """Return the differences from the run without faults; none if a wall-clock limit fired.

    If failed attempts were repeated, only the numbers of attempts and the ledger may differ; if an agent failed, all
    files but the rollouts of the steps before it.
    """
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")]
    if any(row["ledger/clock_limited"] for row in rows):
        return []
    ours, theirs = lasting_files(folder), lasting_files(whole)
    if ended := [step for step, one in records(folder) if one.trajectory.stop_reason is StopReason.AGENT_FAILED]:
        before = {rollouts_path(Path(), step).as_posix() for step in range(1, min(ended))}
        ours, theirs = ({name: files[name] for name in before & files.keys()} for files in (ours, theirs))
        return [f"{name} differs" for name in theirs if first_time(name, ours[name]) != first_time(name, theirs[name])]
    if ours.keys() != theirs.keys():
        return [f"other files: {sorted(ours.keys() ^ theirs.keys())[:3]}"]
    if not any(row["ledger/failed"] for row in rows) and ours["metrics.jsonl"] != theirs["metrics.jsonl"]:
        return ["the metrics differ from the uninterrupted run"]
    played = [gzip.decompress(ours[name]) for name in ours if re.match(r"evaluations/.*gz$", name)]
    ends = (b"timed_out", b'"timeout"', b'"agent_failed"')
    late = any(end in text for text in played for end in ends)
    differ = [
        name
        for name in theirs
        if not (late and name.startswith("evaluations"))
        and ours[name] != theirs[name]
        and first_time(name, ours[name]) != first_time(name, theirs[name])
    ]
    return [f"files differ from the uninterrupted run: {differ[:3]}"] if differ else []


def first_time(name: str, content: bytes) -> object:
    """Return the content of a file without fields that depend on repeated attempts."""
    if not name.endswith((".jsonl.gz", ".jsonl", ".json")):
        return content
    text = gzip.decompress(content) if name.endswith(".gz") else content
    if name.endswith(".json"):
        return without_attempts(json.loads(text))
    return [without_attempts(json.loads(line)) for line in text.splitlines()]


def without_attempts(value: object) -> object:
    """Return `value` without `attempt`, the ledger, and the digest of the state, which contains the ledger."""
    if isinstance(value, dict):
        told = ("attempt", "ledger", "trainer/state.json")
        kept = {key: inner for key, inner in value.items() if not key.startswith(told)}
        return {key: without_attempts(inner) for key, inner in kept.items()}
    return value


def async_faults(folder: Path, kept: dict[tuple[int, str, int], list[list[int]]]) -> list[str]:
    """Return the errors of an async run: finished episodes of the checkpoint that were lost, and stale tokens."""
    wrong, found = [], {}
    for step, record in records(folder):
        key = (record.step, record.group, record.trajectory.sample)
        found[key] = [list(segment.tokens) for segment in record.trajectory.segments]
        ages = {step - 1 - v for segment in record.trajectory.segments for v in segment.versions}
        if ages and not (min(ages) >= 0 and max(ages) <= 2):
            wrong.append(f"step {step}: versions {sorted(ages)} behind")
    if lost := [key for key, tokens in kept.items() if found.get(key) != tokens]:
        wrong.append(f"{len(lost)} of {len(kept)} ended episodes of the checkpoint are lost, {lost[0]} first")
    return wrong
