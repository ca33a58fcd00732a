"""What the trainer and the processes that sample say to each other. All of it is pickled on its way."""

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
from ludus.rollout.build import SamplingPlan
from ludus.rollout.scheduler import RolloutRequest
from ludus.types import Task, Trajectory


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine of the model at `source`, a folder or a name as seen from `folder`; `token` controls it."""

    config: Config
    source: str
    folder: str
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A rollout worker whose tokenizer is at `source`, a folder or a name as seen from `folder`.

    `token` is that of the engines.
    """

    config: Config
    source: str
    folder: str
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A reward worker: the world of the settings, as seen from `folder`, whose rewards it computes."""

    config: Config
    folder: str


Spec = EngineSpec | WorkerSpec | RewardSpec


@dataclass(frozen=True, slots=True)
class Started:
    """Where a role runs; `url` is that of an engine, empty for a worker."""

    host: str
    pid: int
    url: str = ""


@dataclass(frozen=True, slots=True)
class EngineSet:
    """What a worker has to know of the engines: where they are, and what weights they were sent.

    `version` is None before any were. A later view has a higher `serial`.
    """

    serial: int
    urls: tuple[str, ...]
    version: int | None
    adapter: RemoteAdapter | None


@dataclass(frozen=True, slots=True)
class StartRole:
    """Load everything, and say where you are (`Started`)."""


@dataclass(frozen=True, slots=True)
class UpdateEngines:
    """Sample from these engines from now on."""

    view: EngineSet


@dataclass(frozen=True, slots=True)
class PlayJob:
    """Play one attempt; the answer is its `Trajectory`. It stays where `pin` says, if that says anything."""

    job: RolloutRequest
    play: SamplingPlan
    pin: EpisodePin | None = None


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Score what was played; the answer is its `RewardScores`."""

    task: Task
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class RewardScores:
    """The rewards of a trajectory: its parts, their weighted sum, and the seconds that they took."""

    parts: dict[str, float]
    total: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ping:
    """Say that you are there (`Heartbeat`)."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life: what an engine has done since its start, and how many requests are under way."""

    stats: EngineStats = field(default_factory=EngineStats)
    under_way: int = 0


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Close everything."""


Message = StartRole | UpdateEngines | PlayJob | ScoreJob | Ping | Shutdown


@dataclass(frozen=True, slots=True)
class WorkerResponse:
    """What a role answers: a value, or the error that it met; `late` where a time limit was its cause.

    `said` is what its process has logged lately.
    """

    value: object = None
    error: LudusError | None = None
    late: bool = False
    said: tuple[ForwardedRecords, ...] = ()

    def take(self) -> object:
        """The value. Raises the error, as it was over there."""
        if self.error is None:
            return self.value
        raise self.error from TimeoutError() if self.late else None


def failed(error: Exception) -> WorkerResponse:
    """The answer that carries an error with its own words, in whatever process it is read."""
    if not isinstance(error, LudusError):
        trace = "".join(traceback.format_exception(error)).strip()
        return WorkerResponse(
            error=LudusError(f"A fault in another process: {type(error).__name__}: {error}", trace)
        )
    late = isinstance(error.__cause__, TimeoutError)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # boundary: a class that does not pickle travels as the one that it is a kind of
        return WorkerResponse(error=_plain(error), late=late)
    return WorkerResponse(error=error, late=late)


def _plain(error: LudusError) -> LudusError:
    """The same words in the nearest class of the error family: whoever reads them knows that one."""
    family = (kind for kind in type(error).__mro__ if kind.__module__ == LudusError.__module__)
    nearest: type[LudusError] = next(family)
    return nearest(error.message, error.hint)
