"""The processes of one learner on this machine, or on several: the first leads, the others follow.

The leader runs the loop: it samples, gives credit, saves. Whatever the model that trains is asked or taught
is done by all: the leader tells the others (`together`) and does the same itself. A follower waits for what
it is told, and ends with its leader.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, distributed

from ludus.algorithms.spec.algorithm import Algorithm
from ludus.config.environment import launched_rank
from ludus.config.schema import Config
from ludus.engines.temporary import TemporaryFolder
from ludus.errors import LearnerError, UserError
from ludus.training.batches.chunked_lm_head import Entropy
from ludus.training.batches.rows import Row
from ludus.training.distributed.collectives import Collectives, SharedBatch, SingleProcess
from ludus.training.distributed.rendezvous import LISTEN_S, Rendezvous, not_met

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup

_PATIENCE = timedelta(days=30)
"""How long a follower waits to be told something: rollouts may take long."""
_LAST_WORDS = 2000
_END_S = 20.0
_GLANCE_S = 0.05


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Build the parts of the run in `folder`; `resumed` is its newest checkpoint."""

    config: Config
    folder: Path
    resumed: Path | None


@dataclass(frozen=True, slots=True)
class ScoreRows:
    """`Learner.score` and its like; `name` is that of another scorer, empty for the policy."""

    name: str
    rows: Sequence[Row]
    entropy: Entropy
    keep: bool = False


@dataclass(frozen=True, slots=True)
class TrainRows:
    """`Learner.train`."""

    rows: Sequence[Row]
    seed: int
    algorithm: Algorithm


@dataclass(frozen=True, slots=True)
class EvaluateValues:
    """What a critic or process reward model is asked; `solved` where it is told the outcomes, `after` where a
    critic is asked of the states after tokens."""

    rows: Sequence[Row]
    solved: Sequence[bool]
    after: bool = False


@dataclass(frozen=True, slots=True)
class TrainValues:
    """What it is taught; `tables` are numbers `[T]` a row, as its `train` takes them."""

    rows: Sequence[Row]
    tables: tuple[Sequence[Tensor], ...]
    solved: Sequence[bool]


@dataclass(frozen=True, slots=True)
class GatherWeights:
    """Put the policy's weights together."""


@dataclass(frozen=True, slots=True)
class ProbeTokens:
    """Score tokens at temperature 1."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveShards:
    """Write this process's part of a checkpoint into `folder`."""

    folder: Path


@dataclass(frozen=True, slots=True)
class DryRun:
    """`dry_run`, over rows of so many tokens."""

    longest: int


@dataclass(frozen=True, slots=True)
class StopRanks:
    """The run is over."""


Command = (
    StartRanks
    | ScoreRows
    | TrainRows
    | EvaluateValues
    | TrainValues
    | GatherWeights
    | ProbeTokens
    | SaveShards
    | DryRun
    | StopRanks
)


class WorkerRank(SharedBatch):
    """A process that does what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self._control = _control_group(_PATIENCE)

    def split_on(self, device: torch.device) -> None:
        """From here on weights are split, on this device."""
        self._device = device

    def hear(self) -> Command:
        """Wait for the next command."""
        return _broadcast(None, self._control)


class LeaderRank(SharedBatch):
    """The process that tells the others, those of `crew` where they were started here."""

    def __init__(self, meeting: Rendezvous, crew: RankGroup, split: torch.device | None) -> None:
        super().__init__(split)
        self._control = _control_group(timedelta(seconds=meeting.limit_s))
        self._meeting = meeting
        self._crew = crew
        self._lock = threading.RLock()

    def together(self, command: object) -> AbstractContextManager[None]:
        """Have the others do what is done within the block.

        Raises LearnerError where one has ended, or makes this process wait for longer than the limit.
        """
        return self._lead(command)

    @contextmanager
    def _lead(self, command: object) -> Iterator[None]:
        try:
            with self._lock:
                _broadcast(command, self._control)
                yield
        except RuntimeError as error:
            ended = self._crew.last_words()
            if not ended and not _broken(error):
                raise
            failure = self._failure(ended, error)
            self._crew.kill()
            raise failure from error

    def _failure(self, ended: str, error: RuntimeError) -> LearnerError:
        """Who is to blame: one that is stopped comes before those that ended because they waited for it."""
        running = self._crew.running
        silent = {
            rank: who for rank, who in self._meeting.silent().items() if running is None or rank in running
        }
        if silent:
            names = ", ".join(f"process {rank} ({who})" for rank, who in silent.items())
            return LearnerError(
                f"A process of the learner is stopped or gone: {names} has given no sign of life for "
                f"{LISTEN_S:g} s.",
                "Resume the run.",
            )
        if ended:
            return LearnerError(f"A process of the learner has ended: {ended}", "Resume the run.")
        return LearnerError(
            f"The processes of the learner have lost each other: {self._meeting.words() or error}",
            "Resume the run; where one waits long for another, raise training.learner.rank_timeout_s.",
        )


@dataclass
class RankGroup:
    """The other processes, where they were started here."""

    folder: TemporaryFolder | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, meeting: Rendezvous, device: torch.device) -> None:
        """Start the followers on such a device; they come to a meeting that this process called."""
        self.folder = TemporaryFolder("ludus-ranks-")
        place = self.folder.path
        what = [str(meeting.port), str(meeting.count), str(meeting.limit_s), device.type, str(os.getpid())]
        for rank in range(1, meeting.count):
            command = [sys.executable, "-m", "ludus.training.rl.rank_worker", str(place), str(rank), *what]
            with (place / f"said-{rank}").open("wb") as said:
                self.processes.append(subprocess.Popen(command, stderr=said, stdout=said))

    def gather(self, limit_s: float) -> None:
        """Wait until all are about to meet: whoever ends before that would be waited for.

        Raises LearnerError where one has ended, or has not begun within the limit.
        """
        place = Path() if self.folder is None else self.folder.path
        ranks, deadline = range(1, len(self.processes) + 1), time.monotonic() + limit_s
        while late := [rank for rank in ranks if not (place / here(rank)).exists()]:
            if any(process.poll() is not None for process in self.processes):
                ended = self.last_words()
                self.kill()
                raise LearnerError(f"A process of the learner has ended: {ended}", "Try again.")
            if time.monotonic() > deadline:
                self.kill()
                raise LearnerError(
                    f"Process {late[0]} of the learner has not begun within {limit_s:g} s.",
                    "Try again, or raise training.learner.rank_timeout_s.",
                )
            time.sleep(_GLANCE_S)

    def last_words(self) -> str:
        """The end of what an ended process said; empty where none has ended."""
        for rank, process in enumerate(self.processes, start=1):
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            if process.poll() is not None and self.folder is not None:
                said = (self.folder.path / f"said-{rank}").read_text("utf-8", "replace").strip()
                words = f": {said[-_LAST_WORDS:]}" if said else "."
                return f"process {rank} ({process.returncode}){words}"
        return ""

    @property
    def running(self) -> set[int] | None:
        """The numbers of those that have not ended; None where they were not started here."""
        if self.folder is None:
            return None
        return {rank for rank, process in enumerate(self.processes, start=1) if process.poll() is None}

    def kill(self) -> None:
        """End them at once, also those that are stopped."""
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """Wait for them to end, and see to it that they do."""
        for process in self.processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.folder is not None:
            self.folder.close()


def here(rank: int) -> str:
    """The name of the file by which a follower says that it has begun."""
    return f"here-{rank}"


@contextmanager
def leading(config: Config, device: torch.device) -> Iterator[Collectives]:
    """The processes of the run, led by this one: those that torchrun started, or `training.learner.ranks`.

    Raises UserError for more of them than there are GPUs, and for what is for one process alone.
    """
    learner, launched = config.training.learner, launched_rank() is not None
    if learner.ranks == 1 and not launched:
        yield SingleProcess()
        return
    if learner.replay_routing:
        raise UserError("Experts are replayed in one process.", "Leave training.learner.replay_routing out.")
    crew = RankGroup()
    try:
        if launched:
            meeting = Rendezvous.launched(learner.rank_timeout_s)
        else:
            check_devices(device, learner.ranks)
            meeting = Rendezvous.called(learner.ranks, learner.rank_timeout_s)
            crew.start(meeting, device)
            crew.gather(meeting.limit_s)
        leader = meet(meeting, crew, device, device if learner.shard else None)
        try:
            yield leader
        finally:
            with suppress(LearnerError), leader.together(StopRanks()):
                pass
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        crew.close()


def meet(
    meeting: Rendezvous, crew: RankGroup, device: torch.device, split: torch.device | None
) -> LeaderRank:
    """Meet the others, to lead them. Raises LearnerError, with its words where one has ended."""
    try:
        meeting.form_group(device)
        return LeaderRank(meeting, crew, split)
    except (LearnerError, RuntimeError) as error:
        ended = crew.last_words()
        crew.kill()
        if ended:
            raise LearnerError(f"A process of the learner has ended: {ended}", "Try again.") from error
        raise error if isinstance(error, LearnerError) else not_met(str(error)) from error


def check_devices(device: torch.device, count: int) -> None:
    """Raise UserError where there are fewer GPUs than processes."""
    if device.type == "cuda" and torch.cuda.device_count() < count:
        raise UserError(
            f"training.learner.ranks is {count}, and there are {torch.cuda.device_count()} GPUs.",
            "Set it to their number, or model.device to cpu.",
        )


def _control_group(patience: timedelta) -> ProcessGroup:
    """A line for commands, on which this process waits for so long."""
    return cast("ProcessGroup", distributed.new_group(backend="gloo", timeout=patience))


def _broadcast(command: object, group: ProcessGroup) -> Command:
    holder = [command]
    distributed.broadcast_object_list(holder, src=0, group=group, device=torch.device("cpu"))
    return cast(Command, holder[0])


def _broken(error: RuntimeError) -> bool:
    """Whether a connection between processes is gone, or was waited for in vain."""
    text = str(error)
    return any(word in text for word in ("gloo", "NCCL", "Connection", "ncclRemoteError", "timeout"))
