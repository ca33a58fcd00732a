"""Where the processes of a learner meet, and how one of them learns which other is lost.

They meet at a store of torch: the leader's, on this machine, or the one that torchrun keeps. Each gives a
sign of life there every second, from a thread of its own: a process that only waits for others gives it, one
that is stopped or gone does not. One that ends by an error leaves its words.
"""

from __future__ import annotations

import os
import socket
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
_BEAT_S = 1.0
LISTEN_S = 5.0
"""Who gives no sign of life for so long is silent."""


@dataclass(frozen=True)
class Rendezvous:
    """A process, number `rank` of `count`, at the store where all of them meet.

    It waits for another for `limit_s` at most.
    """

    store: Store
    rank: int
    count: int
    limit_s: float

    @classmethod
    def called(cls, count: int, limit_s: float) -> Rendezvous:
        """A meeting that this process calls and leads. Its store hears this machine alone."""
        listener = socket.create_server((_HERE, 0))
        port, limit = listener.getsockname()[1], timedelta(seconds=limit_s)
        store = TCPStore(
            _HERE, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return cls(store, 0, count, limit_s)

    @classmethod
    def joined(cls, port: int, rank: int, count: int, limit_s: float) -> Rendezvous:
        """One that another process of this machine has called."""
        store = TCPStore(_HERE, port, None, False, timedelta(seconds=limit_s))
        return cls(store, rank, count, limit_s)

    @classmethod
    def launched(cls, limit_s: float) -> Rendezvous:
        """The one of the processes that torchrun started."""
        try:
            found = next(iter(rendezvous("env://", timeout=timedelta(seconds=limit_s))))
            store, rank, count = cast("tuple[Store, int, int]", found)
        except RuntimeError as error:
            raise not_met(str(error)) from error
        return cls(store, rank, count, limit_s)

    @property
    def port(self) -> int:
        """Where a meeting that was called is."""
        assert isinstance(self.store, TCPStore)
        return self.store.port

    def form_group(self, device: torch.device) -> None:
        """Make torch's default group of all; on GPUs this process takes the one of its number on the machine.

        Raises LearnerError where they are not all here in time.
        """
        self._beat(0)
        threading.Thread(target=self._live, name="ludus-pulse", daemon=True).start()
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            distributed.init_process_group(
                backend,
                store=PrefixStore("group", self.store),
                rank=self.rank,
                world_size=self.count,
                timeout=timedelta(seconds=self.limit_s),
            )
        except RuntimeError as error:
            absent = ", ".join(str(rank) for rank, (_, who) in self._pulses().items() if not who)
            reason = f"process {absent} did not come within {self.limit_s:g} s." if absent else str(error)
            raise not_met(reason) from error
        if device.type == "cuda":
            torch.cuda.set_device(self.rank % torch.cuda.device_count())

    def say(self, words: str) -> None:
        """Leave words for the others, in the place of earlier ones."""
        with suppress(RuntimeError):
            self.store.set(f"said/{self.rank}", words)

    def silent(self) -> dict[int, str]:
        """The others that are stopped or gone, and left no words: their numbers, processes and machines.

        It listens for `LISTEN_S` seconds.
        """
        before = self._pulses()
        time.sleep(LISTEN_S)
        after = self._pulses()
        return {
            rank: who
            for rank, (num, who) in before.items()
            if after.get(rank, (num, who))[0] == num and not self._text(f"said/{rank}")
        }

    def words(self) -> str:
        """What the others left, each with its number; empty where nobody left any."""
        said = {rank: self._text(f"said/{rank}") for rank in range(self.count) if rank != self.rank}
        return "; ".join(f"process {rank}: {words}" for rank, words in said.items() if words)

    def _live(self) -> None:
        num = 0
        with suppress(RuntimeError):  # whoever keeps the store is gone
            while True:
                num += 1
                time.sleep(_BEAT_S)
                self._beat(num)

    def _beat(self, num: int) -> None:
        self.store.set(f"pulse/{self.rank}", f"{num} {os.getpid()} on {socket.gethostname()}")

    def _pulses(self) -> dict[int, tuple[str, str]]:
        """The number of the last sign of life of each of the others, and who it is."""
        texts = {rank: self._text(f"pulse/{rank}") for rank in range(self.count) if rank != self.rank}
        parts = {rank: text.partition(" ") for rank, text in texts.items()}
        return {rank: (num, who) for rank, (num, _, who) in parts.items()}

    def _text(self, key: str) -> str:
        try:
            return self.store.get(key).decode() if self.store.check([key]) else ""
        except RuntimeError:  # whoever keeps the store is gone
            return ""


def not_met(reason: str) -> LearnerError:
    """What to say where the processes did not meet."""
    return LearnerError(
        f"The processes of the learner did not meet: {reason}",
        "Where they need longer, raise training.learner.rank_timeout_s.",
    )
