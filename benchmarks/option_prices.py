"""Measure how many processor seconds rewards, exploration and curricula add to a step of the recipe `search`.

    python benchmarks/option_prices.py --repeats 3

Every option of option_prices.toml trains the same cold start on the same tasks, with a learning rate of almost 0, in a
new process with one thread; the options take turns in each repetition. A figure is the difference of the processor
time of the whole process to `plain` in the same repetition, divided by the steps: start and evaluation cancel out, and
other work on the machine disturbs it less than it disturbs the time on the clock.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from ludus.recipes import recipe_folder

FILE = Path(__file__).with_suffix(".toml")


def processor_seconds(settings: Mapping[str, object], steps: int, folder: Path) -> float:
    """Return the processor seconds of a new run."""
    pairs = [(f"--{name}", one if isinstance(one, str) else json.dumps(one)) for name, one in settings.items()]
    words = [word.replace("COLD_START", str(recipe_folder("search") / "cold_start")) for pair in pairs for word in pair]
    command = [sys.executable, "-m", "ludus", "train", "search", "--run.dir", str(folder), *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, "--training.steps", str(steps)], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Measure all options and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="+", help="measure only these options, and plain")
    args = parser.parse_args()
    given = tomllib.loads(FILE.read_text("utf-8"))
    options = {name: own for name, own in given["options"].items() if not args.only or name in ("plain", *args.only)}
    found: dict[str, list[float]] = {name: [] for name in options}
    for repeat in range(args.repeats):
        for name, own in options.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(processor_seconds({**given["common"], **own}, args.steps, Path(folder) / "run"))
            print(f"{repeat + 1}/{args.repeats} {name}: {found[name][-1]:.3f} s", file=sys.stderr, flush=True)
    print("| option | added processor seconds a step, median | least to most |\n|---|---:|---:|")
    for name, values in found.items():
        if name != "plain":
            added = sorted((one - plain) / args.steps for one, plain in zip(values, found["plain"], strict=True))
            print(f"| {name} | {median(added):+.2f} | {added[0]:+.2f} to {added[-1]:+.2f} |")
    print(f"\nA run of {args.steps} steps without options: {median(found['plain']):.1f} processor seconds.")


if __name__ == "__main__":
    main()
