"""Ranks of one learner, on one or several machines.

Rank 0 runs the loop: sampling, credit, checkpoints. Operations on the trained model are collective: rank 0
broadcasts a command (`call_on_ranks`) and runs it as well. Ranks other than 0 execute commands broadcast by rank 0
and exit with it.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed

from ludus.config.environment import child_environment, launched_rank
from ludus.config.schema import Config
from ludus.engines.temporary import TemporaryFolder
from ludus.errors import LearnerError, UserError
from ludus.ipc import python_command
from ludus.training.distributed.collectives import ONE_PROCESS, Collectives, RankMethod, SharedBatch
from ludus.training.distributed.rendezvous import HEARTBEAT_TIMEOUT_S, Rendezvous, destroy_group, rendezvous_error

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup

_COMMAND_TIMEOUT = timedelta(days=30)
"""Timeout for the next command; rollouts can take long."""
_MAX_OUTPUT_CHARS = 2000
_EXIT_TIMEOUT_S = 20.0
_POLL_S = 0.05


RankCommand = tuple[RankMethod, tuple[Any, ...]]
"""Method with its arguments."""


class WorkerRank(SharedBatch):
    """Rank other than 0, which executes commands."""

    def __init__(self) -> None:
        super().__init__()
        self._control = _control_group(_COMMAND_TIMEOUT)

    def receive(self) -> RankCommand:
        """Wait for the next command."""
        return _broadcast(None, self._control)


class LeaderRank(SharedBatch):
    """Rank 0, which broadcasts commands; `others` are the other ranks if this process started them."""

    def __init__(self, rendezvous: Rendezvous, others: RankGroup, shard_device: torch.device | None) -> None:
        super().__init__(shard_device)
        self._control = _control_group(timedelta(seconds=rendezvous.limit_s))
        self._rendezvous = rendezvous
        self._others = others
        self._lock = threading.RLock()

    @contextmanager
    def call_on_ranks(self, method: RankMethod, *arguments: object) -> Iterator[None]:
        """Call a method on the other ranks during the block.

        Raises LearnerError if a rank has exited, or the timeout expires.
        """
        try:
            with self._lock:
                _broadcast((method, arguments), self._control)
                yield
        except RuntimeError as error:
            ended = self._others.exit_message()
            if not ended and not _broken(error):
                raise
            failure = self._failure(ended, error)
            self._others.kill()
            raise failure from error

    def _failure(self, ended: str, error: RuntimeError) -> LearnerError:
        """Return the error of the rank at fault: stopped ranks first, then exited ones."""
        running = self._others.running
        silent_ranks = self._rendezvous.lost_ranks().items()
        if lost := {rank: process for rank, process in silent_ranks if running is None or rank in running}:
            names = ", ".join(f"rank {rank} ({process})" for rank, process in lost.items())
            return LearnerError(
                f"A learner rank is stopped or gone: {names} has sent no heartbeat for {HEARTBEAT_TIMEOUT_S:g} s.",
                "Resume the run.",
            )
        if ended:
            return LearnerError(f"A learner rank has exited: {ended}", "Resume the run.")
        return LearnerError(
            f"The learner ranks lost their connection: {self._rendezvous.errors() or error}",
            "Resume the run. If a rank needs longer, raise training.learner.rank_timeout_s.",
        )


@dataclass
class RankGroup:
    """The other ranks, if this process started them."""

    folder: TemporaryFolder | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """Start the other ranks on devices of this type; they join `rendezvous`."""
        self.folder = TemporaryFolder("ludus-ranks-")
        command = python_command(
            "ludus.training.rl.rank_worker:main", str(rendezvous.limit_s), device.type, str(os.getpid())
        )
        for rank in range(1, rendezvous.world_size):
            environment = child_environment(rendezvous.variables(rank))
            with (self.folder.path / f"output-{rank}").open("wb") as output:
                self.processes.append(subprocess.Popen(command, stderr=output, stdout=output, env=environment))

    def gather(self, rendezvous: Rendezvous) -> None:
        """Wait until all ranks have connected to the store.

        Raises LearnerError if one has exited, or has not started within the limit of the rendezvous.
        """
        deadline = time.monotonic() + rendezvous.limit_s
        while late := rendezvous.not_started():
            if any(process.poll() is not None for process in self.processes):
                ended = self.exit_message()
                self.kill()
                raise LearnerError(f"A learner rank has exited: {ended}", "Try again.")
            if time.monotonic() > deadline:
                self.kill()
                raise LearnerError(
                    f"Learner rank {late[0]} did not start within {rendezvous.limit_s:g} s.",
                    "Try again, or raise training.learner.rank_timeout_s.",
                )
            time.sleep(_POLL_S)

    def exit_message(self) -> str:
        """Return the end of the output of exited ranks; empty if all are running."""
        for rank, process in enumerate(self.processes, start=1):
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            if process.poll() is not None and self.folder is not None:
                output = (self.folder.path / f"output-{rank}").read_text("utf-8", "replace").strip()
                suffix = f": {output[-_MAX_OUTPUT_CHARS:]}" if output else "."
                return f"rank {rank} ({process.returncode}){suffix}"
        return ""

    @property
    def running(self) -> set[int] | None:
        """Return the running ranks; None if they were not started here."""
        if self.folder is None:
            return None
        return {rank for rank, process in enumerate(self.processes, start=1) if process.poll() is None}

    def kill(self) -> None:
        """Kill the ranks, also stopped ones."""
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """Wait for the ranks to exit; kill them on timeout."""
        for process in self.processes:
            try:
                process.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.folder is not None:
            self.folder.close()


@contextmanager
def launch_ranks(config: Config, device: torch.device) -> Iterator[Collectives]:
    """Start or join the run's ranks as rank 0: torchrun's, or `training.learner.ranks`.

    Raises UserError if there are fewer GPUs than ranks, and for settings that need a single process.
    """
    learner, launched = config.training.learner, launched_rank() is not None
    if learner.ranks == 1 and not launched:
        yield ONE_PROCESS
        return
    if learner.replay_routing:
        raise UserError("Routing replay needs a single process.", "Unset training.learner.replay_routing.")
    others = RankGroup()
    try:
        if launched:
            rendezvous = Rendezvous.join(learner.rank_timeout_s)
        else:
            check_devices(device, learner.ranks)
            rendezvous = Rendezvous.create(learner.ranks, learner.rank_timeout_s)
            others.start(rendezvous, device)
            others.gather(rendezvous)
        leader = connect(rendezvous, others, device, device if learner.shard else None)
        try:
            yield leader
        finally:
            with suppress(LearnerError), leader.call_on_ranks("stop"):
                pass
    finally:
        destroy_group()
        others.close()


def connect(rendezvous: Rendezvous, others: RankGroup, device: torch.device, shard: torch.device | None) -> LeaderRank:
    """Join the other ranks as rank 0. Raises LearnerError with the error of a rank that has exited."""
    try:
        rendezvous.form_group(device)
        return LeaderRank(rendezvous, others, shard)
    except (LearnerError, RuntimeError) as error:
        ended = others.exit_message()
        others.kill()
        if ended:
            raise LearnerError(f"A learner rank has exited: {ended}", "Try again.") from error
        raise error if isinstance(error, LearnerError) else rendezvous_error(str(error)) from error


def check_devices(device: torch.device, num_ranks: int) -> None:
    """Raise UserError if there are fewer GPUs than ranks."""
    if device.type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise UserError(
            f"training.learner.ranks is {num_ranks}, but there are {torch.cuda.device_count()} GPUs.",
            "Set it to their number, or model.device to cpu.",
        )


def _control_group(timeout: timedelta) -> ProcessGroup:
    return cast("ProcessGroup", distributed.new_group(backend="gloo", timeout=timeout))


def _broadcast(command: RankCommand | None, group: ProcessGroup) -> RankCommand:
    holder = [command]
    distributed.broadcast_object_list(holder, src=0, group=group, device=torch.device("cpu"))
    return cast(RankCommand, holder[0])


def _broken(error: RuntimeError) -> bool:
    text = str(error)
    return any(word in text for word in ("gloo", "NCCL", "Connection", "ncclRemoteError", "timeout"))
