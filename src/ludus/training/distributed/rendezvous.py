"""Rendezvous and heartbeats of the learner's ranks.

The ranks connect to a torch store, run by rank 0 on this machine or by torchrun. Each rank sends a heartbeat
every second from a separate thread, so waiting ranks count as alive and stopped ones do not. A rank that fails
stores its error message.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from ludus.errors import LearnerError

_HERE = "127.0.0.1"
_HEARTBEAT_S = 1.0
HEARTBEAT_TIMEOUT_S = 5.0
"""Seconds without a heartbeat after which a rank is considered lost."""


@dataclass(frozen=True)
class Rendezvous:
    """Rank `rank` of `count` and their shared store. Waits time out after `limit_s`."""

    store: Store
    rank: int
    world_size: int
    limit_s: float

    @classmethod
    def create(cls, count: int, limit_s: float) -> Rendezvous:
        """Create a rendezvous as rank 0; its store only accepts local connections."""
        listener = socket.create_server((_HERE, 0))
        port, limit = listener.getsockname()[1], timedelta(seconds=limit_s)
        store = TCPStore(_HERE, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())
        return cls(store, 0, count, limit_s)

    @classmethod
    def join(cls, limit_s: float) -> Rendezvous:
        """Join the rendezvous that torchrun, or rank 0 with `variables`, passed in environment variables."""
        try:
            joined = next(iter(rendezvous("env://", timeout=timedelta(seconds=limit_s))))
            store, rank, count = cast("tuple[Store, int, int]", joined)
        except RuntimeError as error:
            raise rendezvous_error(str(error)) from error
        return cls(store, rank, count, limit_s)

    def variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables with which `rank` joins this rendezvous."""
        assert isinstance(self.store, TCPStore)
        place = {"MASTER_ADDR": _HERE, "MASTER_PORT": str(self.store.port)}
        return place | {"RANK": str(rank), "WORLD_SIZE": str(self.world_size)}

    def form_group(self, device: torch.device) -> None:
        """Create torch's default group; on GPUs this rank uses the device of its local rank.

        Raises LearnerError if a rank is missing after the timeout.
        """
        self._send_heartbeat(0)
        threading.Thread(target=self._send_heartbeats, name="ludus-heartbeat", daemon=True).start()
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            distributed.init_process_group(
                backend,
                store=PrefixStore("group", self.store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=self.limit_s),
            )
        except RuntimeError as error:
            absent = ", ".join(str(rank) for rank, (_, process) in self._heartbeats().items() if not process)
            reason = f"rank {absent} did not join within {self.limit_s:g} s." if absent else str(error)
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
        """Return the lost ranks that left no error message, with their processes and machines.

        Takes `HEARTBEAT_TIMEOUT_S` seconds.
        """
        before = self._heartbeats()
        time.sleep(HEARTBEAT_TIMEOUT_S)
        after, errors = self._heartbeats(), self._texts("error")
        return {
            rank: process for rank, (beat, process) in before.items() if after[rank][0] == beat and not errors[rank]
        }

    def errors(self) -> str:
        """Return the stored error messages with their ranks; empty if there are none."""
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
        """Return what each other rank stored; empty text if it stored nothing or the store's host is gone."""
        texts = {rank: "" for rank in range(self.world_size) if rank != self.rank}
        for rank in texts:
            with suppress(RuntimeError):
                if self.store.check([f"{kind}/{rank}"]):
                    texts[rank] = self.store.get(f"{kind}/{rank}").decode()
        return texts


def destroy_group() -> None:
    """Destroy torch's default group, if there is one.

    Also clears the sharding cache of DTensor: it contains device meshes, which look up their groups by name.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        vars(debug)["_clear_sharding_prop_cache"]()


def rendezvous_error(reason: str) -> LearnerError:
    """Return the error for a failed rendezvous."""
    return LearnerError(
        f"The learner's rendezvous failed: {reason}", "If ranks need longer, raise training.learner.rank_timeout_s."
    )
