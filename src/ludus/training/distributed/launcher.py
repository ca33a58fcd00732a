"""Ranks of one learner, on one or several machines.

Operations on the trained model are collective: rank 0, which runs the loop, broadcasts a command (`call_on_ranks`) and
runs it as well; the other ranks execute it, and exit with rank 0. The ranks connect to a torch store, run by rank 0 on
this machine or by torchrun. Each sends a heartbeat every second from a separate thread, so waiting ranks count as alive
and stopped ones do not. A rank that fails stores its error message.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from ludus.config.environment import child_environment, launched_rank
from ludus.config.schema import Config
from ludus.engines.temporary import TemporaryFolder
from ludus.errors import LearnerError, UserError
from ludus.ipc import python_command
from ludus.training.distributed.collectives import ONE_PROCESS, Collectives, RankMethod, SharedBatch

_COMMAND_TIMEOUT = timedelta(days=30)
"""Timeout for the next command; rollouts can take long."""
_MAX_OUTPUT_CHARS = 2000
_EXIT_TIMEOUT_S = 20.0
_POLL_S = 0.05
_HERE = "127.0.0.1"
_HEARTBEAT_S = 1.0
HEARTBEAT_TIMEOUT_S = 5.0
"""Seconds without a heartbeat after which a rank is considered lost."""

RankCommand = tuple[RankMethod, tuple[Any, ...]]
"""Method with its arguments."""


@dataclass(frozen=True)
class Rendezvous:
    """Rank `rank` of `world_size` and the store that the ranks share. Waits time out after `timeout_s`."""

    store: Store
    rank: int
    world_size: int
    timeout_s: float

    @classmethod
    def create(cls, count: int, timeout_s: float) -> Rendezvous:
        """Create a rendezvous as rank 0; its store only accepts local connections."""
        listener = socket.create_server((_HERE, 0))
        port, limit = listener.getsockname()[1], timedelta(seconds=timeout_s)
        store = TCPStore(_HERE, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())
        return cls(store, 0, count, timeout_s)

    @classmethod
    def join(cls, timeout_s: float) -> Rendezvous:
        """Join the rendezvous that torchrun, or rank 0 with `variables`, passed in environment variables."""
        try:
            joined = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
            store, rank, count = cast("tuple[Store, int, int]", joined)
        except RuntimeError as error:
            raise rendezvous_error(str(error)) from error
        return cls(store, rank, count, timeout_s)

    def variables(self, rank: int) -> dict[str, str]:
        assert isinstance(self.store, TCPStore)
        place = {"MASTER_ADDR": _HERE, "MASTER_PORT": str(self.store.port)}
        return place | {"RANK": str(rank), "WORLD_SIZE": str(self.world_size)}

    def form_group(self, device: torch.device) -> None:
        """Create torch's default group and set this rank's GPU. Raises LearnerError if a rank is missing in time."""
        self._send_heartbeat(0)
        threading.Thread(target=self._send_heartbeats, name="ludus-heartbeat", daemon=True).start()
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            store, limit = PrefixStore("group", self.store), timedelta(seconds=self.timeout_s)
            distributed.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.world_size, timeout=limit
            )
        except RuntimeError as error:
            absent = ", ".join(str(rank) for rank, (_, process) in self._heartbeats().items() if not process)
            reason = f"rank {absent} did not join within {self.timeout_s:g} s." if absent else str(error)
            raise rendezvous_error(reason) from error
        if device.type == "cuda":
            torch.cuda.set_device(self.rank % torch.cuda.device_count())

    def not_started(self) -> list[int]:
        """Return the other ranks that have not sent a heartbeat yet."""
        return [rank for rank, text in self._texts("heartbeat").items() if not text]

    def store_error(self, text: str) -> None:
        """Store an error message of this rank, replacing the previous one."""
        with suppress(RuntimeError):
            self.store.set(f"error/{self.rank}", text)

    def lost_ranks(self) -> dict[int, str]:
        """Wait a heartbeat timeout; return the lost ranks without error messages, with process and machine."""
        before = self._heartbeats()
        time.sleep(HEARTBEAT_TIMEOUT_S)
        after, errors = self._heartbeats(), self._texts("error")
        lost = (rank for rank, (beat, _) in before.items() if after[rank][0] == beat and not errors[rank])
        return {rank: before[rank][1] for rank in lost}

    def errors(self) -> str:
        return "; ".join(f"rank {rank}: {text}" for rank, text in self._texts("error").items() if text)

    def _send_heartbeats(self) -> None:
        with suppress(RuntimeError):  # the store's host is gone
            for beat in itertools.count(1):
                time.sleep(_HEARTBEAT_S)
                self._send_heartbeat(beat)

    def _send_heartbeat(self, beat: int) -> None:
        self.store.set(f"heartbeat/{self.rank}", f"{beat} {os.getpid()} on {socket.gethostname()}")

    def _heartbeats(self) -> dict[int, tuple[str, str]]:
        """Return the last heartbeat number of each other rank, with its process and machine."""
        parts = {rank: text.partition(" ") for rank, text in self._texts("heartbeat").items()}
        return {rank: (beat, process) for rank, (beat, _, process) in parts.items()}

    def _texts(self, kind: str) -> dict[int, str]:
        """Return the value that each other rank stored; empty text if it stored nothing or the store's host is gone."""
        texts = {rank: "" for rank in range(self.world_size) if rank != self.rank}
        for rank in texts:
            with suppress(RuntimeError):
                if self.store.check([f"{kind}/{rank}"]):
                    texts[rank] = self.store.get(f"{kind}/{rank}").decode()
        return texts


def destroy_group() -> None:
    """Destroy torch's default process group, if any, and clear DTensor's sharding cache, which refers to its groups."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        vars(debug)["_clear_sharding_prop_cache"]()


def rendezvous_error(reason: str) -> LearnerError:
    """Return the error for a failed rendezvous."""
    hint = "If ranks need longer, raise training.learner.rank_timeout_s."
    return LearnerError(f"The learner's rendezvous failed: {reason}", hint)


class CommandedRank(SharedBatch):
    """Rank with an additional gloo group for commands, whose collectives time out after `timeout`."""

    def __init__(self, timeout: timedelta = _COMMAND_TIMEOUT, shard_device: torch.device | None = None) -> None:
        super().__init__(shard_device)
        self._control = distributed.new_group(backend="gloo", timeout=timeout)

    def broadcast(self, command: RankCommand | None = None) -> RankCommand:
        """Broadcast the command of rank 0, which passes it, and return it; other ranks pass None."""
        holder = [command]
        distributed.broadcast_object_list(holder, src=0, group=self._control, device=torch.device("cpu"))
        return cast(RankCommand, holder[0])


class LeaderRank(CommandedRank):
    """Rank 0, which broadcasts commands; `others` are the other ranks if this process started them."""

    def __init__(self, rendezvous: Rendezvous, others: RankGroup, shard_device: torch.device | None) -> None:
        super().__init__(timedelta(seconds=rendezvous.timeout_s), shard_device)
        self._rendezvous = rendezvous
        self._others = others
        self._lock = threading.RLock()

    @contextmanager
    def call_on_ranks(self, method: RankMethod, *arguments: object) -> Iterator[None]:
        """Call a method on the other ranks during the block. Raises LearnerError on a timeout or a rank's exit."""
        try:
            with self._lock:
                self.broadcast((method, arguments))
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
            text = f"A learner rank is suspended or lost: {names} has sent no heartbeat for {HEARTBEAT_TIMEOUT_S:g} s."
            return LearnerError(text, "Resume the run.")
        if ended:
            return LearnerError(f"A learner rank has exited: {ended}", "Resume the run.")
        hint = "Resume the run. If a rank needs longer, raise training.learner.rank_timeout_s."
        return LearnerError(f"The learner ranks lost their connection: {self._rendezvous.errors() or error}", hint)


@dataclass
class RankGroup:
    """The other ranks, if this process started them."""

    folder: TemporaryFolder | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """Start the other ranks on devices of this type; they join `rendezvous`."""
        self.folder = TemporaryFolder("ludus-ranks-")
        arguments = (str(rendezvous.timeout_s), device.type, str(os.getpid()))
        command = python_command("ludus.training.rl.rank_worker:main", *arguments)
        for rank in range(1, rendezvous.world_size):
            environment = child_environment(rendezvous.variables(rank))
            with (self.folder.path / f"output-{rank}").open("wb") as output:
                self.processes.append(subprocess.Popen(command, stderr=output, stdout=output, env=environment))

    def gather(self, rendezvous: Rendezvous) -> None:
        """Wait until all ranks have connected. Raises LearnerError if one has exited or is later than the limit."""
        deadline = time.monotonic() + rendezvous.timeout_s
        while late := rendezvous.not_started():
            text, hint = f"Learner rank {late[0]} did not start within {rendezvous.timeout_s:g} s.", "Try again."
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
    """Start or join the run's ranks as rank 0. Raises UserError for too few GPUs or wrong settings."""
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
                hint = "Set it to their number, or model.device to cpu."
                raise UserError(f"training.learner.ranks is {learner.ranks}, but there are {found} GPUs.", hint)
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
