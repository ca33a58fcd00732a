"""Run the workload once with one system in this process; print the measurements as a line of JSON.

    python benchmarks/rollout_worker.py '{"system": "ours", "model": "FOLDER", "threads": 1, "work": {...}}'

`rollout.py` starts it. Every system is warmed up before the measurement, which excludes loading and compiling.
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
    """The system, model and workload of one process."""

    system: str
    model: str
    threads: int
    work: Work
    device: str = "cpu"
    dtype: str = "float32"


@dataclass(frozen=True)
class Result:
    """Measurements; None if unknown. `scheduling` is a fraction of the time.

    Memory is that of the process, on a GPU the memory allocated by torch.
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
    """The system cannot run here; the message has the reason."""


def finish(job: Job, clock: Clock, loaded_mb: float, generated: list[list[int]]) -> Result:
    """Return the measurements of a run that ends now."""
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
    """Return the function that runs a system; import its packages."""
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
    """Parse the job that `rollout.py` wrote."""
    fields = json.loads(text)
    work = fields.pop("work")
    for name in ("question", "observation"):
        work[name] = tuple(work[name])
    return Job(work=Work(**work), **fields)


def main() -> None:
    """Run the job in the first argument."""
    job = read_job(sys.argv[1])
    try:
        line = asdict(find(job.system)(job))
    except Skipped as reason:
        line = {"system": job.system, "skipped": str(reason)}
    print("\n" + json.dumps(line), flush=True)
    os._exit(0)  # skips the shutdown code of the system


if __name__ == "__main__":
    main()
