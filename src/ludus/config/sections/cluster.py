"""The section about the processes and machines that sample for a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ludus.config.sections.section import Section


class ClusterConfig(Section):
    """Engines and rollout workers in processes of their own, on this machine or on those of a Ray cluster."""

    kind: Literal["none", "local", "ray"] = "none"
    """`none`: this process samples. `local`: processes of this machine do. `ray`: Ray actors do (needs the
    `cluster` extra)."""
    address: str | None = None
    """Of the Ray cluster: host:port, or `auto` for the one that this machine belongs to. None starts one on
    this machine for the time of the run."""
    engines: int = Field(1, ge=1)
    """Embedded engines that sample, each behind HTTP on its machine. With engine.url none are started."""
    workers: int = Field(1, ge=1)
    """Rollout workers: they hold the environments and play the episodes; without reward workers they also
    score them."""
    episodes_per_worker: int = Field(16, ge=1)
    """Episodes that one worker plays at once; more wait, rollout.concurrency of them at most."""
    reward_workers: int = Field(0, ge=0)
    """Processes that do nothing but score episodes: verifiers and judges run in them. 0: rollout workers
    score what they play."""
    scorings_per_worker: int = Field(1, ge=1)
    """Episodes that one reward worker scores at once, each on a thread: more than 1 where rewards wait for a
    judge's server, and may be called from several threads."""
    scoring_timeout_s: float = Field(300.0, gt=0)
    """How long a reward worker may score an episode, in the place of rollout.reward_timeout_s. Where it takes
    longer the attempt has failed, and the worker is replaced once what else it scores has ended."""
    engine_cpus: float = Field(1.0, ge=0)
    """Cores that Ray keeps for an engine."""
    engine_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray keeps for an engine; it sees no others."""
    engine_resources: dict[str, Annotated[float, Field(ge=0)]] = Field({})
    """Resources of your own naming (`ray start --resources`) that a machine must have for an engine."""
    worker_cpus: float = Field(1.0, ge=0)
    """Cores that Ray keeps for a worker."""
    worker_resources: dict[str, Annotated[float, Field(ge=0)]] = Field({})
    """Resources of your own naming that a machine must have for a worker."""
    reward_cpus: float = Field(1.0, ge=0)
    """Cores that Ray keeps for a reward worker."""
    reward_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray keeps for a reward worker: for a judge that is a model."""
    reward_resources: dict[str, Annotated[float, Field(ge=0)]] = Field({})
    """Resources of your own naming that a machine must have for a reward worker."""
    startup_timeout_s: float = Field(300.0, gt=0)
    """How long an engine or any worker may take until it is ready, waiting for room in the
    cluster included."""
    heartbeat_timeout_s: float = Field(60.0, gt=0)
    """One that does not answer for so long counts as dead: it is ended and replaced."""
    restarts: int = Field(20, ge=0)
    """Engines, workers and reward workers, each, that a run may lose one after another, starts that fail
    included: it stops where more were lost and none is left. Losses are forgotten where one has lived for ten
    minutes."""

    @property
    def enabled(self) -> bool:
        """Whether other processes run the episodes."""
        return self.kind != "none"

    @property
    def on_ray(self) -> bool:
        """Whether they may run on other machines."""
        return self.kind == "ray"
