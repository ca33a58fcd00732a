"""Pickled messages between the trainer and its workers."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass, field

from ludus.cluster.log_forwarding import ForwardedRecords
from ludus.config.schema import Config
from ludus.engines.base import EngineStats
from ludus.engines.remote.api_adapters import RemoteAdapter
from ludus.engines.remote.rolling_update import EpisodePin
from ludus.errors import LudusError
from ludus.rollout.scheduler import RolloutRequest, SamplingPlan
from ludus.types import Task, Trajectory


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Engine of the model at `source`, a folder or name relative to `folder`; `token` authorizes control."""

    config: Config
    source: str
    folder: str
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Rollout worker with the tokenizer at `source`, a folder or name relative to `folder`.

    `token` is that of the engines.
    """

    config: Config
    source: str
    folder: str
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """Reward worker: computes the rewards of the configured world; paths are relative to `folder`."""

    config: Config
    folder: str


Spec = EngineSpec | WorkerSpec | RewardSpec


@dataclass(frozen=True, slots=True)
class Started:
    """Location of a started worker; `url` is set for engines only."""

    host: str
    pid: int
    url: str = ""


@dataclass(frozen=True, slots=True)
class EngineSet:
    """Connected replicas and their weight versions.

    `version` is None before the first weights. Later sets have a higher `serial`.
    """

    serial: int
    urls: tuple[str, ...]
    version: int | None
    adapter: RemoteAdapter | None


@dataclass(frozen=True, slots=True)
class StartRole:
    """Initialize the worker; returns `Started`."""


@dataclass(frozen=True, slots=True)
class UpdateEngines:
    """Replace the set of engines to sample from."""

    view: EngineSet


@dataclass(frozen=True, slots=True)
class PlayJob:
    """Run one attempt and return its `Trajectory`. It stays on the engine `pin`, if set."""

    job: RolloutRequest
    play: SamplingPlan
    pin: EpisodePin | None = None


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Score a trajectory and return its `RewardScores`."""

    task: Task
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class RewardScores:
    """Rewards of a trajectory: parts, weighted sum, and duration in seconds."""

    parts: dict[str, float]
    total: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ping:
    """Request a `Heartbeat`."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Heartbeat: engine statistics since its start, and the number of requests in flight."""

    stats: EngineStats = field(default_factory=EngineStats)
    under_way: int = 0


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Stop the worker."""


Message = StartRole | UpdateEngines | PlayJob | ScoreJob | Ping | Shutdown


@dataclass(frozen=True, slots=True)
class WorkerResponse:
    """Response of a worker: a value or an error; `late` if the error was a timeout.

    `said` holds recent log records of the process.
    """

    value: object = None
    error: LudusError | None = None
    late: bool = False
    said: tuple[ForwardedRecords, ...] = ()

    def take(self) -> object:
        """Return the value, or raise the error."""
        if self.error is None:
            return self.value
        raise self.error from TimeoutError() if self.late else None


def failed(error: Exception) -> WorkerResponse:
    """Return the response for an error, readable in any process."""
    if not isinstance(error, LudusError):
        trace = "".join(traceback.format_exception(error)).strip()
        return WorkerResponse(
            error=LudusError(f"Internal error in another process: {type(error).__name__}: {error}", trace)
        )
    late = isinstance(error.__cause__, TimeoutError)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # boundary: an unpicklable class is sent as its nearest base class
        return WorkerResponse(error=_plain(error), late=late)
    return WorkerResponse(error=error, late=late)


def _plain(error: LudusError) -> LudusError:
    """Return the same message in the nearest Ludus error class, which every process can unpickle."""
    family = (kind for kind in type(error).__mro__ if kind.__module__ == LudusError.__module__)
    nearest: type[LudusError] = next(family)
    return nearest(error.message, error.hint)
