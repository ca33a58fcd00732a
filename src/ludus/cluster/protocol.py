"""Messages between the trainer and its workers, and the interfaces of workers and launchers."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from logging.handlers import QueueHandler
from queue import Full, Queue
from typing import Literal, Protocol, cast

from ludus.config.schema import Config
from ludus.engines.base import EngineStats
from ludus.engines.remote.api_adapters import RemoteAdapter
from ludus.engines.remote.rolling_update import EpisodePin
from ludus.errors import LudusError, UserError
from ludus.rollouts.reward_process import ScoreRequest
from ludus.rollouts.scheduler import RolloutRequest, SamplingPlan

_RESPONSE_HINT = "All data of episodes and rewards must survive pickling and unpickling."
_REQUEST_HINT = "Tasks and their truth must survive pickling and unpickling."
MAX_RECORDS = 1000
"""Maximum number of buffered log records."""

log = logging.getLogger("ludus")

Role = Literal["engine", "worker", "reward worker"]


class LogForwarder(QueueHandler):
    """Buffer the records of a logger and its children until the next heartbeat, which takes them to the run log.

    At most `MAX_RECORDS` records are buffered; further ones are only counted. The last records of a dying process
    reach only its standard error.
    """

    queue: Queue[logging.LogRecord]

    def __init__(self) -> None:
        super().__init__(Queue(MAX_RECORDS))
        self._dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except Full:
            self._dropped += 1

    def take(self) -> tuple[logging.LogRecord, ...]:
        records = [self.queue.get_nowait() for _ in range(self.queue.qsize())]
        dropped, self._dropped = self._dropped, 0
        if dropped:
            text = f"{dropped} more were dropped"
            records.append(logging.LogRecord(log.name, logging.WARNING, __file__, 0, text, None, None))
        return tuple(records)


def start_forwarding() -> LogForwarder:
    """Start buffering this process's log records; they also go to its standard error."""
    forwarder, shown = LogForwarder(), logging.StreamHandler()
    shown.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    log.setLevel(logging.INFO)
    log.addHandler(forwarder)
    log.addHandler(shown)
    return forwarder


def log_records(who: str, records: Iterable[logging.LogRecord]) -> None:
    """Log another process's records here, with their original time and the name `who`."""
    for record in records:
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            record.msg = f"{who}: {record.msg}"
            logger.handle(record)


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Resources of a machine that a worker needs."""

    cpus: float = 1.0
    gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Settings of a worker; `source` is the model, paths are relative to `folder`, `token` controls the engines."""

    role: Role
    config: Config
    source: str
    folder: str
    token: str = field(default="", repr=False)

    @property
    def needs(self) -> ResourceRequest:
        own = self.config.cluster
        needs = {
            "engine": ResourceRequest(own.engine_cpus, own.engine_gpus, dict(own.engine_resources)),
            "worker": ResourceRequest(own.worker_cpus, 0.0, dict(own.worker_resources)),
            "reward worker": ResourceRequest(own.reward_cpus, own.reward_gpus, dict(own.reward_resources)),
        }
        return needs[self.role]


@dataclass(frozen=True, slots=True)
class Started:
    """Location of a started worker; `url` is set for engines only."""

    host: str
    pid: int
    url: str = ""


class WorkerCommand(Enum):
    """Messages without data: initialize the worker (returns `Started`), send a `Heartbeat`, stop."""

    START = "start"
    PING = "ping"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class EngineSet:
    """Engines to sample from; replaces any set with a lower `serial`. `version` is None before the first weights."""

    serial: int
    urls: tuple[str, ...]
    version: int | None
    adapter: RemoteAdapter | None


@dataclass(frozen=True, slots=True)
class RolloutJob:
    """Run one attempt on the engine `pin` (any engine if None) and return its `Trajectory`."""

    request: RolloutRequest
    plan: SamplingPlan
    pin: EpisodePin | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Statistics of an engine since its start, and the number of requests in flight."""

    stats: EngineStats = field(default_factory=EngineStats)
    in_flight: int = 0


Message = WorkerCommand | EngineSet | RolloutJob | ScoreRequest


@dataclass(frozen=True, slots=True)
class WorkerResponse:
    """Value or error of a worker (`late` if it was a timeout), and the recent log records of its process."""

    value: object = None
    error: LudusError | None = None
    late: bool = False
    records: tuple[logging.LogRecord, ...] = ()

    def take(self) -> object:
        if self.error is None:
            return self.value
        raise self.error from TimeoutError() if self.late else None


def failure_response(error: Exception) -> WorkerResponse:
    """Return the response for an error, readable in any process."""
    if not isinstance(error, LudusError):
        text = f"Internal error in another process: {type(error).__name__}: {error}"
        return WorkerResponse(error=LudusError(text, "".join(traceback.format_exception(error)).strip()))
    late = isinstance(error.__cause__, TimeoutError)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # boundary: an unpicklable error is replaced by its nearest base class in Ludus
        bases: Iterable[type[LudusError]] = type(error).__mro__
        nearest = next(kind for kind in bases if kind.__module__ == LudusError.__module__)
        error = nearest(error.message, error.hint)
    return WorkerResponse(error=error, late=late)


def encode_request(message: Message) -> bytes:
    """Return the pickled message. Raises UserError if it cannot be pickled."""
    try:
        return pickle.dumps(message)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UserError(f"A request cannot be sent to another process: {error}.", _REQUEST_HINT) from error


def decode_request(body: bytes) -> Message:
    """Return the message. Raises UserError if it cannot be unpickled here."""
    try:
        return cast(Message, pickle.loads(body))
    except Exception as error:  # boundary: user types may raise anything
        raise unreadable_request(f"{type(error).__name__}: {error}") from error


def unreadable_request(why: str) -> UserError:
    """Return the error for a request that the receiver cannot unpickle."""
    return UserError(f"A request cannot be unpickled by the receiving process: {why}.", _REQUEST_HINT)


def encode_response(response: WorkerResponse) -> bytes:
    """Return the pickled response. A value that cannot be pickled is replaced by an error."""
    try:
        return pickle.dumps(response)
    except Exception as error:  # boundary: user types may raise anything
        text = f"A {type(response.value).__name__} cannot be sent from another process: {error}."
        return pickle.dumps(replace(failure_response(UserError(text, _RESPONSE_HINT)), records=response.records))


def decode_response(body: bytes) -> WorkerResponse:
    """Return the response. If it cannot be unpickled here, return an error response."""
    try:
        return cast(WorkerResponse, pickle.loads(body))
    except Exception as error:  # boundary: user types may raise anything
        text = f"A response of another process cannot be unpickled: {type(error).__name__}: {error}."
        return failure_response(UserError(text, _RESPONSE_HINT))


class WorkerDied(LudusError):
    """Raised if a worker process has exited or does not respond."""

    exit_code = 7
    part = "cluster"


class WorkerHandle(Protocol):
    """Handle of a worker in another process."""

    async def call(self, message: Message, deadline_s: float) -> object:
        """Send a message and return the response.

        Raises the worker's error, or WorkerDied if the process exits or the deadline passes. On cancellation
        or timeout the remote work is cancelled.
        """

    async def kill(self) -> None:
        """Kill the process immediately."""


class Launcher(Protocol):
    """Start worker processes."""

    @property
    def host(self) -> str:
        """Address at which workers reach this process; empty if all workers are on this machine."""

    async def start(self, name: str, spec: WorkerSpec) -> WorkerHandle:
        """Start a worker process without initializing it. Raises LudusError if it cannot be started."""

    async def close(self) -> None:
        """Stop all workers."""
