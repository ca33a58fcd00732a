"""Compare whole RL steps (rollouts, training, weight transfer) of Ludus and of TRL's GRPO trainer.

    python benchmarks/step.py                       # both workloads, 5 repetitions of 3 steps
    python benchmarks/step.py --only one-turn --repeats 1

Both train the same model with random weights by GRPO, AdamW and one optimizer step per batch, on the same
workload: equal prompts, turns, observations and numbers of tokens in each turn. Rewards are fixed numbers that
differ within a group. Neither side handles text: prompts and observations are token ids.

TRL: `GRPOTrainer.train()` with generation by transformers, its tool loop and tool mask, without KL, in the
environment of `make bench-trl`. Ludus: the embedded engine with its defaults, the learner with the metrics of a
run, and the verified transfer of the new weights. The first step of each is not counted. Every run is a new
process with one thread; ratios are taken within a repetition.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median

import rollout
import rollout_models
from pages import fill
from rollout_work import Work
from rollout_worker import Job

HERE = Path(__file__).parent
SYSTEMS = ("trl", "ludus")
LABELS = {"trl": "TRL's GRPO trainer", "ludus": "Ludus"}


def works(vocab: int) -> dict[str, Work]:
    """Return the workloads: 64 episodes of one turn of 64 tokens, and the workload of the rollout benchmark."""
    base = Work(vocab=vocab)
    one = Work(vocab=vocab, turns=1, system=0, question=(20, 20), new=64, spread=0.0, new_limit=64)
    return {"one-turn": one, "multi-turn": base}


def run(job: Job, steps: int, python: Path) -> dict[str, float] | str:
    """Run one system; return its measurements per step, or the error."""
    command = [str(python), str(HERE / "step_worker.py"), json.dumps(asdict(job)), str(steps)]
    settings = [f"{name}_NUM_THREADS={job.threads}" for name in ("OMP", "MKL")]
    done = subprocess.run(["env", "TOKENIZERS_PARALLELISM=false", *settings, *command], capture_output=True, text=True)
    if done.returncode:
        return rollout.last_words(done.stderr)
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def report(name: str, found: dict[str, list[dict[str, float]]], clock: str) -> str:
    """Return the table of one workload."""
    lines = [
        f"| {name} | seconds a step ({clock}) | generated tokens/s | peak MB | times TRL (least to most) |",
        "|---|---:|---:|---:|---:|",
    ]
    for system in SYSTEMS:
        runs = found[system]
        if not runs:
            continue
        typical = median(r[clock] for r in runs)
        pairs = sorted(t[clock] / r[clock] for t, r in zip(found["trl"], runs, strict=False))
        ratio = f"{median(pairs):.2f} ({pairs[0]:.2f} to {pairs[-1]:.2f})" if pairs else ""
        peak = median(r["peak_mb"] for r in runs)
        speed = runs[0]["tokens"] / typical
        lines.append(f"| {LABELS[system]} | {typical:.2f} | {speed:,.0f} | {peak:,.0f} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    """Run both systems and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=("one-turn", "multi-turn"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="counted steps per run")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="models and environments")
    parser.add_argument("--page", type=Path, help="insert the tables into this page")
    args = parser.parse_args()
    model = str(rollout.model_folder("small", args.folder / "models").resolve())
    pythons = {"trl": (args.folder / "trl/bin/python").absolute(), "ludus": Path(sys.executable)}
    tables = []
    for name, work in works(rollout_models.vocabulary("small")).items():
        if args.only not in (None, name):
            continue
        found: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
        for repeat in range(args.repeats):
            for system in SYSTEMS if repeat % 2 else reversed(SYSTEMS):
                result = run(Job(system, model, 1, work), args.steps, pythons[system])
                print(f"{name} {repeat + 1}/{args.repeats} {system}: {result}", file=sys.stderr, flush=True)
                if isinstance(result, str):
                    raise SystemExit(f"{system} did not run: {result}")
                found[system].append(result)
        tables.append(report(name, found, args.clock))
    text = "\n\n".join(tables)
    print(text)
    if args.page:
        fill(args.page, "step", text)


if __name__ == "__main__":
    main()
