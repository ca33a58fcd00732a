"""One system does the workload once, in this process; its figures go to standard output as a line of JSON.

    python benchmarks/rollout_worker.py '{"system": "ours", "model": "FOLDER", "threads": 1, "work": {...}}'

`rollout.py` starts it. Every system is warmed up before the clock starts; loading and compiling do not count.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import rollout_work
from rollout_work import Clock, Work


@dataclass(frozen=True)
class Job:
    """What one process does."""

    system: str
    model: str
    threads: int
    work: Work
    device: str = "cpu"
    dtype: str = "float32"


@dataclass(frozen=True)
class Result:
    """What came of it. `scheduling` is a share of 1; None where a figure is not known.

    Memory is the process's, on a GPU that which torch has taken there.
    """

    system: str
    tokens: int
    wall_s: float
    cpu_s: float
    peak_mb: float
    loaded_mb: float
    digest: str
    cached_tokens: int | None = None
    scheduling: float | None = None
    note: str = ""


class Skipped(Exception):
    """This system cannot run here; the text says why."""


def finish(job: Job, clock: Clock, loaded_mb: float, generated: list[list[int]]) -> Result:
    """The figures of a run that ends now."""
    wall_s, cpu_s = clock.wall_s, clock.cpu_s
    return Result(
        system=job.system,
        tokens=sum(map(len, generated)),
        wall_s=wall_s,
        cpu_s=cpu_s,
        peak_mb=rollout_work.peak_mb(job.device),
        loaded_mb=loaded_mb,
        digest=rollout_work.digest(generated),
    )


def find(system: str) -> Callable[[Job], Result]:
    """The function that runs a system; its packages are imported only now."""
    name = system.split(" ")[0]
    if name in ("naive", "continuous"):
        import rollout_hf

        return {"naive": rollout_hf.naive, "continuous": rollout_hf.continuous}[name]
    if name in ("trl", "vllm"):
        import rollout_others

        return {"trl": rollout_others.trl, "vllm": rollout_others.vllm}[name]
    import rollout_ours

    return {"ours": rollout_ours.ours, "floor": rollout_ours.floor}[name]


def read_job(text: str) -> Job:
    """The job as `rollout.py` wrote it."""
    fields = json.loads(text)
    work = fields.pop("work")
    for name in ("question", "observation"):
        work[name] = tuple(work[name])
    return Job(work=Work(**work), **fields)


def main() -> None:
    """Do the job that is the first argument."""
    job = read_job(sys.argv[1])
    try:
        line = asdict(find(job.system)(job))
    except Skipped as reason:
        line = {"system": job.system, "skipped": str(reason)}
    print("\n" + json.dumps(line), flush=True)
    os._exit(0)  # what a system does when its process ends is not part of its work


if __name__ == "__main__":
    main()
