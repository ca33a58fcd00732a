"""Measure how much rewards, exploration and curricula add to the seconds of a step of the recipe `search`.

    python benchmarks/option_prices.py --repeats 3

Every option of option_prices.toml trains the same cold start on the same tasks, with a learning rate of almost 0, in a
new process with one thread; the options take turns in each repetition. Figures are medians over the steps without
their evaluations; the first step of each run is left out. Ratios to `plain` are taken within a repetition.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from ludus.recipes import recipe_folder

FILE = Path(__file__).with_suffix(".toml")


def seconds(settings: Mapping[str, object], steps: int, folder: Path) -> float:
    """Return the median seconds of a step of a new run."""
    pairs = [(f"--{name}", one if isinstance(one, str) else json.dumps(one)) for name, one in settings.items()]
    words = [word.replace("COLD_START", str(recipe_folder("search") / "cold_start")) for pair in pairs for word in pair]
    command = [sys.executable, "-m", "ludus", "train", "search", "--run.dir", str(folder), *words]
    subprocess.run([*command, "--training.steps", str(steps)], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "timings.jsonl").read_text("utf-8").splitlines()]
    found = [row["time/step_s"] - row.get("time/evaluate_s", 0.0) for row in rows if "time/step_s" in row]
    return median(found[1:])


def main() -> None:
    """Measure all options and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="measure only these options, and plain")
    args = parser.parse_args()
    given = tomllib.loads(FILE.read_text("utf-8"))
    options = {name: own for name, own in given["options"].items() if not args.only or name in ("plain", *args.only)}
    found: dict[str, list[float]] = {name: [] for name in options}
    for repeat in range(args.repeats):
        for name, own in options.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(seconds({**given["common"], **own}, args.steps, Path(folder) / "run"))
            print(f"{repeat + 1}/{args.repeats} {name}: {found[name][-1]:.3f} s", file=sys.stderr, flush=True)
    print("| option | seconds a step | added seconds | times plain (least to most) |\n|---|---:|---:|---:|")
    for name, values in found.items():
        pairs = list(zip(values, found["plain"], strict=True))
        ratios, added = sorted(one / plain for one, plain in pairs), median(one - plain for one, plain in pairs)
        rest = "" if name == "plain" else f"{added:+.2f} | {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {name} | {median(values):.2f} | {rest or '|'} |")


if __name__ == "__main__":
    main()
