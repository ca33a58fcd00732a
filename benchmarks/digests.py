"""Digests of tiny seeded runs, to check that a refactoring does not change results.

    python benchmarks/digests.py --write benchmarks/digests.json    # before the change
    python benchmarks/digests.py --check benchmarks/digests.json    # after it: the digests must be equal
    python benchmarks/digests.py --check benchmarks/digests.json --only sft dapo

Each case is a command line of `ludus` in a temporary folder; if settings are renamed, only `CASES` has to
change. A digest covers the values, without field names, of the rollout files (tokens, log-probabilities,
rewards), the metrics, and the tensors of the checkpoints. The first moment of the optimizer after one step is
the gradient times a constant. Digests depend on the processor and the version of torch: compare on one machine.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

COLD_START = "src/ludus/recipes/search/cold_start"
EVALUATION = "--evaluation.tasks 8 --evaluation.tasks_during 4 --evaluation.every 1"
RL = f"--training.steps 2 --training.checkpoint_every 1 --algorithm.group_size 6 {EVALUATION}"
SEARCH = f"train search {RL} --training.prompts_per_step 6"
PRESETS = ("dapo", "dr_grpo", "rloo", "ppo", "gspo", "cispo", "turn_grpo", "reinforce_pp")
SCRATCH = f"--from-scratch --sft.batch_size 16 --training.prompts_per_step 6 {RL}"
ADAPTER = "--model.lora.rank 4 --model.lora.alpha 8"

CASES = {
    "search": SEARCH,
    "guess": f"train guess --sft.steps 250 {SCRATCH}",
    **{preset: f"{SEARCH} --algorithm.preset {preset}" for preset in PRESETS},
    "one_step": f"{SEARCH} --training.mode one_step",
    "ranks": f"{SEARCH} --training.learner.ranks 2",
    "lora": f"{SEARCH} {ADAPTER}",
    "mixture": f"train mixed --sft.steps 150 {SCRATCH}",
    "sft": f"sft search --model {COLD_START} --sft.steps 5 --sft.batch_size 8",
    "dpo": f"preference search --run {{folder}}/search --preference.steps 4 {EVALUATION}",
    "rft": f"rft search --rft.rounds 1 --sft.steps 5 --training.prompts_per_step 4 {EVALUATION}",
    "reward_model": "reward-model search --run {folder}/search --reward_model.kind pointwise --reward_model.steps 5",
}
"""The arguments of `ludus` by case; `{folder}` holds the run folders of the cases before it."""

KILLED = "kill_and_resume"
"""The case `search`, killed after its first checkpoint and resumed; its digests are those of `search`."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", type=Path, help="write the digests to this file")
    parser.add_argument("--check", type=Path, help="compare the digests with those of this file")
    parser.add_argument("--only", nargs="+", choices=[*CASES, KILLED], help="run these cases")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {name: run(name, Path(folder)) for name in args.only or [*CASES, KILLED]}
    if args.write:
        args.write.write_text(json.dumps(found, indent=1) + "\n")
    if not args.check:
        return 0
    stored = json.loads(args.check.read_text())
    differences = [
        f"{name}: {kind} differ"
        for name, digests in found.items()
        for kind in sorted(digests.keys() | stored[name].keys())
        if digests.get(kind) != stored[name].get(kind)
    ]
    print("\n".join(differences) or f"The digests of {len(found)} runs are equal.")
    return 1 if differences else 0


def run(name: str, folder: Path) -> dict[str, str]:
    """Run a case and return its digests by kind. Raise RuntimeError if its command fails."""
    started = time.perf_counter()
    target = folder / name
    arguments = CASES["search" if name == KILLED else name].format(folder=folder).split()
    if "--run" in arguments and not (folder / "search").exists():
        run("search", folder)
    first = start([*arguments, "--run.dir", str(target)])
    if name == KILLED:
        kill_after_first_checkpoint(first, target)
        first = start(["train", "--resume", str(target)])
    output, _ = first.communicate()
    if first.returncode:
        raise RuntimeError(f"{name}: exit status {first.returncode}\n{output[-2000:]}")
    found = digests(target)
    print(f"{name:18} {time.perf_counter() - started:6.1f} s  {found}", flush=True)
    return found


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """Start `ludus` with one thread in a process group that can be killed as a whole."""
    return subprocess.Popen(
        ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "ludus", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill_after_first_checkpoint(process: subprocess.Popen[str], target: Path) -> None:
    """Kill the process once its first checkpoint is complete."""
    while process.poll() is None and not any(target.glob("checkpoints/step-000001/trainer/manifest.json")):
        time.sleep(0.01)
    if process.poll() is not None:
        raise RuntimeError("The run ended before it was killed.")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def digests(folder: Path) -> dict[str, str]:
    """Return the digests of the files of a run by kind: rollouts, metrics, tensors."""
    files = {
        "rollouts": sorted(folder.rglob("*.jsonl.gz")),
        "metrics": sorted(folder.rglob("metrics*.jsonl")),
        "tensors": sorted(folder.rglob("*.safetensors")),
    }
    readers = {"rollouts": lines, "metrics": lines, "tensors": tensors}
    return {kind: combined(combined(readers[kind](path)) for path in paths) for kind, paths in files.items() if paths}


def lines(path: Path) -> Iterator[str]:
    """Yield a digest for each line of JSON, over its values in sorted order."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for line in content.splitlines():
        yield combined(sorted(values(json.loads(line))))


def values(node: object) -> Iterator[str]:
    """Yield the values of a JSON document without field names; a list of values is one value."""
    if isinstance(node, dict):
        for value in node.values():
            yield from values(value)
    elif isinstance(node, list) and any(isinstance(item, (dict, list)) for item in node):
        for item in node:
            yield from values(item)
    else:
        yield json.dumps(node)


def tensors(path: Path) -> Iterator[str]:
    """Yield the digests of the tensors of a safetensors file in sorted order, without their names."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    data = memoryview(content)[8 + size :]
    pieces = [(entry["dtype"], entry["shape"], *entry["data_offsets"]) for entry in header.values()]
    yield from sorted(
        f"{dtype} {shape} {hashlib.sha256(data[begin:end]).hexdigest()}" for dtype, shape, begin, end in pieces
    )


def combined(parts: Iterator[str] | list[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\n")
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
