"""The section `cluster`: processes and machines that sample for a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ludus.config.sections.section import Section


class ClusterConfig(Section):
    """Engines and rollout workers in separate processes, on this machine or on a Ray cluster."""

    kind: Literal["none", "local", "ray"] = "none"
    """`none`: sample in this process. `local`: in processes here. `ray`: in Ray actors (needs the `cluster` extra)."""
    address: str | None = None
    """Address of the Ray cluster: host:port, or `auto` for this machine's; if unset, the run starts one here."""
    engines: int = Field(1, ge=1)
    """Embedded engines, each behind an HTTP server on its machine. With engine.url none is started."""
    workers: int = Field(1, ge=1)
    """Rollout workers: they run the environments and episodes, and score them unless there are reward workers."""
    episodes_per_worker: int = Field(16, ge=1)
    """Concurrent episodes per worker; more wait, up to rollout.concurrency in total."""
    reward_workers: int = Field(0, ge=0)
    """Processes that only score episodes with verifiers and judges; 0: rollout workers score their own episodes."""
    scorings_per_worker: int = Field(1, ge=1)
    """Concurrent scorings per reward worker, in threads: above 1 if thread-safe rewards wait for a judge's server."""
    scoring_timeout_s: float = Field(300.0, gt=0)
    """Timeout for scoring an episode in a reward worker, in place of rollout.reward_timeout_s. The attempt fails, and
    the worker is replaced once its other scorings have ended."""
    engine_cpus: float = Field(1.0, ge=0)
    """CPUs that Ray reserves per engine."""
    engine_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves per engine; it sees only these."""
    engine_resources: dict[str, Annotated[float, Field(ge=0)]] = Field({})
    """Custom Ray resources (`ray start --resources`) that a machine must have for an engine."""
    worker_cpus: float = Field(1.0, ge=0)
    """CPUs that Ray reserves per rollout worker."""
    worker_resources: dict[str, Annotated[float, Field(ge=0)]] = Field({})
    """Custom Ray resources that a machine must have for a rollout worker."""
    reward_cpus: float = Field(1.0, ge=0)
    """CPUs that Ray reserves per reward worker."""
    reward_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves per reward worker, for a judge model."""
    reward_resources: dict[str, Annotated[float, Field(ge=0)]] = Field({})
    """Custom Ray resources that a machine must have for a reward worker."""
    startup_timeout_s: float = Field(300.0, gt=0)
    """Timeout for the start of an engine or worker, including the wait for cluster resources."""
    heartbeat_timeout_s: float = Field(60.0, gt=0)
    """An engine or worker without a heartbeat for this long is considered dead, terminated and replaced."""
    restarts: int = Field(20, ge=0)
    """Consecutive losses of engines, of rollout workers or of reward workers, failed starts included, after which the
    run stops if none of them is left. The count resets once one has run for ten minutes."""

    @property
    def enabled(self) -> bool:
        """Whether separate processes run the episodes."""
        return self.kind != "none"
