"""Compare the speed of multi-turn rollouts of several systems on the same workload.

    python benchmarks/rollout.py                         # the small model, 5 repetitions
    python benchmarks/rollout.py --model smollm2         # SmolLM2-135M
    python benchmarks/rollout.py --only naive,ours --repeats 1

Every run of a system is a new process, so that peak memory is measured per system. In each repetition all
systems run one after the other, in an order that rotates; ratios are taken within a repetition, so that other
load on the machine affects both systems. On a busy machine, --clock processor counts processor time instead
of wall-clock time; with one thread on an idle machine they are equal.

TRL and vLLM run in separate virtual environments (`make bench-trl`, `make bench-vllm`) and are skipped with a
note if these are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from statistics import median

import rollout_models
import rollout_work
from pages import fill
from rollout_work import Work
from rollout_worker import Job, Result

HERE = Path(__file__).parent
LABELS = {
    "naive": "naive: `generate` on the padded batch, turn by turn",
    "trl": "TRL's trainer and tool loop",
    "continuous": "transformers' continuous batching",
    "vllm": "vLLM on the CPU",
    "ours": "Ludus",
    "ours no-turn-cache": "Ludus, no cache across turns",
    "ours no-shared-prefix": "Ludus, no shared prefix",
    "ours no-continuous-batching": "Ludus, turns in lock-step",
    "ours not-batch-invariant": "Ludus, not batch-invariant",
    "ours one-shape": "Ludus, every pass of one shape",
    "ours no-kernel": "Ludus, torch's attention",
    "ours no-onednn": "Ludus, products by MKL",
    "floor": "floor: the linear layers alone",
}
NAIVE = "naive"


@dataclass(frozen=True)
class Pythons:
    """Interpreters of the virtual environments; None if missing."""

    trl: Path | None
    vllm: Path | None

    def of(self, system: str) -> Path | None:
        """Return the interpreter for a system."""
        return {"trl": self.trl, "vllm": self.vllm}.get(system, Path(sys.executable))


def run(job: Job, python: Path, limit_s: float | None = None) -> Result | str:
    """Run a system in a new process; return its result, or the reason if it has none."""
    settings = [f"{name}_NUM_THREADS={job.threads}" for name in ("OMP", "MKL")]
    if job.system == "ours no-kernel":
        settings.append(f"PATH={os.devnull}")  # without a compiler the kernel is not built
    if job.system == "vllm":
        settings += ["VLLM_CPU_KVCACHE_SPACE=2", "VLLM_CPU_OMP_THREADS_BIND=nobind", "PYTHONPATH="]
    worker = [str(python), str(HERE / "rollout_worker.py"), json.dumps(asdict(job))]
    command = ["env", "TOKENIZERS_PARALLELISM=false", *settings, *worker]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"over {limit_s:g} s"
    if done.returncode:
        return last_words(done.stderr)
    line = json.loads(done.stdout.strip().splitlines()[-1])
    return str(line["skipped"]) if "skipped" in line else Result(**line)


def last_words(stderr: str) -> str:
    """Return the last line that names an error, or else the last line.

    Errors at interpreter shutdown ("Exception ignored in") are left out.
    """
    told = stderr.partition("Exception ignored in")[0]
    lines = told.strip().splitlines() or ["the process ended without an error message"]
    return next((line for line in reversed(lines) if re.search(r"(Error|Exception): ", line)), lines[-1])


def run_all(
    jobs: Sequence[Job],
    pythons: Pythons,
    repeats: int,
    once: Sequence[str],
    known: Mapping[tuple[int, str], Result],
    keep: Callable[[int, Result], None],
) -> tuple[list[dict[str, Result]], dict[str, str]]:
    """Return the results of each repetition by system, and the reasons of systems without a result.

    Systems of `once` run only in the first repetition. Results in `known` (by repetition and system) are reused.
    """
    skipped = {job.system: "no environment for it" for job in jobs if pythons.of(job.system) is None}
    rounds: list[dict[str, Result]] = []
    for repeat in range(repeats):
        found: dict[str, Result] = {}
        turn = repeat % len(jobs)
        for job in [*jobs[turn:], *jobs[:turn]]:
            python = pythons.of(job.system)
            if job.system in skipped or python is None or (repeat and job.system in once):
                continue
            if (repeat, job.system) in known:
                found[job.system] = known[repeat, job.system]
                continue
            result = run(job, python)
            if isinstance(result, str):
                skipped[job.system] = result
                continue
            found[job.system] = result
            keep(repeat, result)
            print(f"{repeat + 1}/{repeats} {job.system}: {result.wall_s:.2f} s {result.note}", file=sys.stderr)
        rounds.append(found)
    return rounds, skipped


def check(rounds: Sequence[dict[str, Result]], expected: int) -> None:
    """Exit unless every system generated the expected number of tokens."""
    for found in rounds:
        for result in found.values():
            if result.tokens != expected:
                raise SystemExit(f"{result.system} generated {result.tokens} tokens instead of {expected}.")


def seconds(result: Result, clock: str) -> float:
    """Return the wall-clock or processor seconds of a result."""
    return result.wall_s if clock == "wall" else result.cpu_s


def ratios(rounds: Sequence[dict[str, Result]], system: str, clock: str) -> list[float]:
    """Return the speed relative to the naive way in each repetition."""
    both = [(r[NAIVE], r[system]) for r in rounds if NAIVE in r and system in r]
    return [seconds(naive, clock) / seconds(other, clock) for naive, other in both]


def row(rounds: Sequence[dict[str, Result]], system: str, reusable: int, clock: str) -> str:
    """Return a table row: medians, and the median of the ratio with minimum and maximum."""
    found = [r[system] for r in rounds if system in r]
    typical_s = median(seconds(r, clock) for r in found)
    cells = [LABELS[system], f"{found[0].tokens / typical_s:,.0f}", f"{typical_s:.2f}"]
    memory = "" if system == "floor" else f"{median(r.peak_mb for r in found):,.0f}"
    grown = "" if system == "floor" else f"{median(r.peak_mb - r.loaded_mb for r in found):,.0f}"
    faster = sorted(ratios(rounds, system, clock))
    ratio = f"{median(faster):.2f} ({faster[0]:.2f} to {faster[-1]:.2f})" if faster else ""
    cached, share = found[0].cached_tokens, found[0].scheduling
    hits = "" if cached is None else f"{100 * cached / reusable:.0f} %"
    shares = [r.scheduling for r in found if r.scheduling is not None]
    scheduling = "" if share is None else f"{100 * median(shares):.1f} %"
    return "| " + " | ".join([*cells, memory, grown, ratio, hits, scheduling]) + " |"


def table(rounds: Sequence[dict[str, Result]], systems: Sequence[str], reusable: int, clock: str) -> str:
    """Return the results as a table in Markdown."""
    head = (
        f"| system | generated tokens/s | seconds ({clock}) | peak MB | MB above the loaded model | "
        "times the naive way (least to most) | cache hits, of reusable tokens | scheduling, of a step |"
    )
    rows = [row(rounds, name, reusable, clock) for name in systems if any(name in found for found in rounds)]
    return "\n".join([head, "|---|" + "---:|" * 7, *rows])


def describe(work: Work, repeats: int, once: Sequence[str], threads: int) -> str:
    """Return a sentence that describes the workload."""
    plan = rollout_work.episodes(work)
    slow = ", ".join(LABELS[name] for name in once)
    return (
        f"{work.prompts} prompts x {work.members} members, {work.turns} turns: "
        f"{rollout_work.num_generated(plan):,} generated tokens, the longest episode {work.longest:,}; "
        f"median of {repeats}, threads: {threads}." + (f" Run once: {slow}." if slow and repeats > 1 else "")
    )


def report(rounds: Sequence[dict[str, Result]], skipped: dict[str, str], jobs: Sequence[Job], clock: str) -> str:
    """Return the table and the notes below it."""
    work = jobs[0].work
    plan = rollout_work.episodes(work)
    systems = [job.system for job in jobs]
    lines = [table(rounds, systems, rollout_work.num_reusable(plan, work), clock), ""]
    lines += [f"- {LABELS[name]}: not run, {reason}" for name, reason in skipped.items()]
    last = {name: result for found in rounds for name, result in found.items()}
    lines += [f"- {LABELS[name]}: {last[name].note}" for name in systems if name in last]
    own = [r for found in rounds for r in found.values() if r.system != "vllm"]
    share = min((r.cpu_s / r.wall_s for r in own), default=1.0)
    lines.append(f"- least share of a processor that a run had: {100 * share:.0f} %")
    return "\n".join(line for line in lines if not line.endswith(": "))


def save(path: Path | None, job: Job, repeat: int, result: Result) -> None:
    """Append a result as a line of JSON."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(conditions(job) | {"repeat": repeat} | asdict(result)) + "\n")


def conditions(job: Job) -> dict[str, object]:
    """Return the conditions of a measurement, as written by `save`."""
    said = asdict(job) | {"model": Path(job.model).name}
    del said["system"]
    return json.loads(json.dumps(said))


def saved(path: Path, job: Job) -> dict[tuple[int, str], Result]:
    """Return the results in a file that were measured under the job's conditions, by repetition and system."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    alike = [line for line in lines if line.items() >= conditions(job).items()]
    names = {field.name for field in fields(Result)}
    return {(x["repeat"], x["system"]): Result(**{k: v for k, v in x.items() if k in names}) for x in alike}


def model_folder(name: str, folder: Path) -> Path:
    """Write the model in another process, so that this one, which is forked, stays small."""
    command = [sys.executable, str(HERE / "rollout_models.py"), name, str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.strip().splitlines()[-1])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=(*rollout_models.SHAPES, rollout_models.SMOLLM2), default="small")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cuda: for example with --model 0.5b --dtype bfloat16")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", help="systems, separated by commas: " + ", ".join(LABELS))
    parser.add_argument("--once", default="", help="systems that run only in the first repetition")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--new-limit", type=int, default=160, help="maximum tokens per turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--greedy", action="store_true", help="instead of sampling at temperature 1")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="models and environments")
    parser.add_argument("--trl-python", type=Path, help="default: .bench/trl/bin/python")
    parser.add_argument("--vllm-python", type=Path, help="default: .venv-vllm/bin/python")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--out", type=Path, help="append every result as a line of JSON")
    parser.add_argument("--resume", action="store_true", help="reuse the results in --out")
    parser.add_argument("--page", type=Path, help="insert the table into this page")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the systems and print the table."""
    args = parse(arguments)
    systems = args.only.split(",") if args.only else list(LABELS)
    once = [name for name in args.once.split(",") if name]
    if unknown := [name for name in [*systems, *once] if name not in LABELS]:
        raise SystemExit(f"No such system: {', '.join(unknown)}. There are: {', '.join(LABELS)}.")
    work = Work(
        vocab=rollout_models.vocabulary(args.model),
        prompts=args.prompts,
        members=args.members,
        turns=args.turns,
        new_limit=args.new_limit,
        seed=args.seed,
        greedy=args.greedy,
    )
    model = str(model_folder(args.model, args.folder / "models").resolve())
    jobs = [Job(name, model, args.threads, work, args.device, args.dtype) for name in systems]
    found = [
        args.trl_python or args.folder / "trl" / "bin" / "python",
        args.vllm_python or HERE.parent / ".venv-vllm" / "bin" / "python",
    ]
    pythons = Pythons(*(path.absolute() if path.is_file() else None for path in found))
    known = saved(args.out, jobs[0]) if args.resume and args.out and args.out.exists() else {}
    rounds, skipped = run_all(jobs, pythons, args.repeats, once, known, partial(save, args.out, jobs[0]))
    check(rounds, rollout_work.num_generated(rollout_work.episodes(work)))
    head = describe(work, args.repeats, once, args.threads)
    text = f"{head}\n\n{report(rounds, skipped, jobs, args.clock)}"
    print(f"{args.model}: {text}")
    if args.page:
        threads = "" if args.threads == 1 else f", {args.threads} threads"
        device = "" if args.device == "cpu" else f", {args.device}"
        fill(args.page, args.model + threads + device, text)


if __name__ == "__main__":
    main()
