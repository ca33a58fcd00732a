"""Time sampling from logits of a large vocabulary on a CPU: in parts that fit its cache, and all rows at once.

    python benchmarks/sampling.py

Both ways alternate on the same logits in one thread and return the same tokens; figures are medians.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from unittest import mock

import numpy as np
import torch

from ludus.engines.embedded import sampler
from ludus.types import SamplingParams


def main() -> None:
    """Print milliseconds for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 96, 256])
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for rows in args.rows:
        logits = torch.randn(rows, args.vocabulary, generator=torch.Generator().manual_seed(0)).mul_(3).bfloat16()
        params = [SamplingParams(seed=row) for row in range(rows)]
        rules, steps = sampler.SamplingRules.of(params, args.vocabulary, logits.device), np.zeros(rows, np.uint64)
        seconds: dict[str, list[float]] = {"parts": [], "at once": []}
        tokens = {}
        for _ in range(args.repeats):
            for way, size in (("parts", sampler._CPU_LOGITS), ("at once", logits.numel())):
                with mock.patch.object(sampler, "_CPU_LOGITS", size):
                    begin = time.perf_counter()
                    tokens[way] = sampler.sample(logits, rules, steps).tokens
                    seconds[way].append(time.perf_counter() - begin)
        assert torch.equal(tokens["parts"], tokens["at once"])
        each = ", ".join(f"{way} {1e3 * median(found):.1f} ms" for way, found in seconds.items())
        print(f"{rows} rows: {each}")


if __name__ == "__main__":
    main()
