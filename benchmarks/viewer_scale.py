"""Measure the viewer with 100,000 rollouts: seconds to index, memory of the server, and latency of its pages.

python benchmarks/viewer_scale.py RUN                    repeats the training rollouts of RUN as further steps
python benchmarks/viewer_scale.py RUN --rollouts 10000
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from itertools import cycle
from pathlib import Path
from statistics import median

PER_STEP = 500
PAGES = {
    "run": "/api/run",
    "first page": "/api/rollouts?limit=50",
    "sorted by reward": "/api/rollouts?limit=50&sort=-reward",
    "failed, sorted by tokens": "/api/rollouts?limit=50&solved=0&sort=-tokens",
    "last page": "/api/rollouts?limit=50&offset={last}",
    "search of a word": "/api/rollouts?limit=50&text={word}",
    "rollout": "/api/rollout/{middle}",
    "group": "/api/group/{middle}",
    "curves": "/api/curves",
}


def repeat_rollouts(run: Path, to: Path, num: int) -> None:
    """Copy a run without evaluations, with `num` training rollouts in steps of `PER_STEP`."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("evaluations", "rollouts", "viewer.sqlite"))
    (to / "rollouts").mkdir()
    texts = [gzip.decompress(file.read_bytes()) for file in sorted((run / "rollouts").glob("*.gz"))]
    source = cycle([json.loads(line) for text in texts for line in text.splitlines()])
    for step in range(1, num // PER_STEP + 1):
        with gzip.open(to / "rollouts" / f"step-{step:06d}.jsonl.gz", "wt", compresslevel=1) as file:
            for _ in range(PER_STEP):
                file.write(json.dumps({**next(source), "step": step}) + "\n")


def memory_mb(pid: int) -> float:
    """Return the largest resident memory of a process so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def seconds(url: str) -> float:
    """Return the median latency of five requests."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        with urllib.request.urlopen(url) as answer:
            answer.read()
        times.append(time.perf_counter() - begin)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--word", default="population", help="a word that occurs in many rollouts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        repeat_rollouts(args.run, run, args.rollouts)
        for start in ("first start", "second start"):
            begin = time.perf_counter()
            command = [sys.executable, "-m", "ludus", "view", str(run), "--port", "0"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                url = next(line.split()[-1] for line in server.stdout if " at http" in line)
                print(f"{start}: ready in {time.perf_counter() - begin:.1f} s, {memory_mb(server.pid):.0f} MB")
                numbers = {"last": args.rollouts - 50, "word": args.word, "middle": args.rollouts // 2}
                if start == "second start":
                    for name, page in PAGES.items():
                        print(f"{name:26} {1000 * seconds(url + page.format(**numbers)):7.0f} ms")
                    print(f"memory after all pages: {memory_mb(server.pid):.0f} MB")
                    print(f"index: {(run / 'viewer.sqlite').stat().st_size / 1e6:.0f} MB")
                server.terminate()


if __name__ == "__main__":
    main()
