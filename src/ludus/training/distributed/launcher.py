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
from typing import Any, cast

import torch
from torch import distributed

from ludus.config.environment import child_environment, launched_rank
from ludus.config.schema import Config
from ludus.engines.temporary import TemporaryFolder
from ludus.errors import LearnerError, UserError
from ludus.ipc import python_command
from ludus.training.distributed.collectives import ONE_PROCESS, Collectives, RankMethod, SharedBatch
from ludus.training.distributed.rendezvous import HEARTBEAT_TIMEOUT_S, Rendezvous, destroy_group, rendezvous_error

_COMMAND_TIMEOUT = timedelta(days=30)
"""Timeout for the next command; rollouts can take long."""
_MAX_OUTPUT_CHARS = 2000
_EXIT_TIMEOUT_S = 20.0
_POLL_S = 0.05


RankCommand = tuple[RankMethod, tuple[Any, ...]]
"""Method with its arguments."""


class _CommandedRank(SharedBatch):
    """Rank in a group of CPU tensors for commands, whose collectives time out after `timeout`."""

    def __init__(self, timeout: timedelta, shard_device: torch.device | None = None) -> None:
        super().__init__(shard_device)
        self._control = distributed.new_group(backend="gloo", timeout=timeout)

    def _broadcast(self, command: RankCommand | None) -> RankCommand:
        holder = [command]
        distributed.broadcast_object_list(holder, src=0, group=self._control, device=torch.device("cpu"))
        return cast(RankCommand, holder[0])


class WorkerRank(_CommandedRank):
    """Rank other than 0, which executes commands."""

    def __init__(self) -> None:
        super().__init__(_COMMAND_TIMEOUT)

    def receive(self) -> RankCommand:
        return self._broadcast(None)


class LeaderRank(_CommandedRank):
    """Rank 0, which broadcasts commands; `others` are the other ranks if this process started them."""

    def __init__(self, rendezvous: Rendezvous, others: RankGroup, shard_device: torch.device | None) -> None:
        super().__init__(timedelta(seconds=rendezvous.limit_s), shard_device)
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
                self._broadcast((method, arguments))
                yield
        except RuntimeError as error:
            ended = self._others.exit_message()
            lost = ("gloo", "NCCL", "Connection", "ncclRemoteError", "timeout")
            if not ended and not any(word in str(error) for word in lost):
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
            text, hint = f"Learner rank {late[0]} did not start within {rendezvous.limit_s:g} s.", "Try again."
            if any(process.poll() is not None for process in self.processes):
                text = f"A learner rank has exited: {self.exit_message()}"
            elif time.monotonic() > deadline:
                hint = "Try again, or raise training.learner.rank_timeout_s."
            else:
                time.sleep(_POLL_S)
                continue
            self.kill()
            raise LearnerError(text, hint)

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
            if device.type == "cuda" and (found := torch.cuda.device_count()) < learner.ranks:
                raise UserError(
                    f"training.learner.ranks is {learner.ranks}, but there are {found} GPUs.",
                    "Set it to their number, or model.device to cpu.",
                )
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
