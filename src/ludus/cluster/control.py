"""Changes to the cluster of a run that goes on, asked for by another process through the run's folder.

Takes requests: files `RUN/cluster/ask-ID.json`, written whole by whoever may write to the folder. Gives each
its answer, `answer-ID.json`, once it is done. Waits in threads of its own, never in the run's. A request that
cannot be met has its sentence as its answer. Nothing of it is left when the run ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, TypedDict, cast

from ludus.cluster.cluster import Cluster
from ludus.errors import LudusError, StorageError, UserError

FOLDER: Final = "cluster"
"""The folder of requests in that of a run."""
_LOOK_S = 0.3

Act = Literal["list", "add-engine", "remove-engine"]


class EngineRow(TypedDict):
    """An engine of a run: its number, its address, its process, and the calls that are under way there."""

    number: int
    url: str
    pid: int
    under_way: int


class ControlReply(TypedDict, total=False):
    """What became of a request: the engines afterwards, or why it was refused."""

    engines: list[EngineRow]
    workers: int
    error: str


@contextmanager
def controlled(run: Path, cluster: Cluster) -> Iterator[None]:
    """In the block, do what is asked for in a run's folder."""
    ends = threading.Event()
    shutil.rmtree(run / FOLDER, ignore_errors=True)
    looking = threading.Thread(target=_look, args=(run / FOLDER, cluster, ends), daemon=True)
    looking.start()
    try:
        yield
    finally:
        ends.set()
        looking.join()
        shutil.rmtree(run / FOLDER, ignore_errors=True)


def ask(run: Path, act: Act, number: int | None = None, *, timeout_s: float = 600.0) -> ControlReply:
    """Ask the process of a run for a change, and wait for its answer.

    Raises UserError where nothing runs there, or the request is refused, StorageError where the folder cannot
    be written to.
    """
    _check_runs(run)
    name, begin = secrets.token_hex(6), time.monotonic()
    answer = run / FOLDER / f"answer-{name}.json"
    question = run / FOLDER / f"ask-{name}.json"
    try:
        question.parent.mkdir(exist_ok=True)
        _write(question, {"act": act, "number": number})
        while not answer.is_file():
            _check_runs(run)
            if time.monotonic() - begin > timeout_s:
                question.unlink(missing_ok=True)
                raise UserError(
                    f"The run in {run} has not answered for {timeout_s:g} s.",
                    f"Its log says what it does: {run / 'log.txt'}",
                )
            time.sleep(_LOOK_S / 3)
        reply = cast(ControlReply, json.loads(answer.read_text("utf-8")))
        answer.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{run / FOLDER} cannot be used: {error.strerror or error}.") from error
    if "error" in reply:
        raise UserError(reply["error"])
    return reply


def _check_runs(run: Path) -> None:
    """Raise UserError unless a process holds the run's lock."""
    try:
        with (run / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    except OSError:
        pass
    raise UserError(f"The run in {run} is not running.", f"Go on with it: ludus train --resume {run}")


def _look(folder: Path, cluster: Cluster, ends: threading.Event) -> None:
    """Begin what is asked for, each request on a thread: one that starts an engine takes its time."""
    while not ends.wait(_LOOK_S):
        for path in sorted(folder.glob("ask-*.json")):
            with suppress(OSError, ValueError):
                asked = json.loads(path.read_text("utf-8"))
                path.unlink()
                answer = folder / path.name.replace("ask-", "answer-", 1)
                threading.Thread(target=_answer, args=(cluster, asked, answer), daemon=True).start()


def _answer(cluster: Cluster, asked: object, path: Path) -> None:
    try:
        reply = _done(cluster, asked)
    except LudusError as error:
        reply = ControlReply(error=str(error))
    with suppress(OSError):  # the run has ended, and its folder of requests with it
        _write(path, reply)


def _done(cluster: Cluster, asked: object) -> ControlReply:
    match asked:
        case {"act": "list"}:
            pass
        case {"act": "add-engine"}:
            cluster.add_engine()
        case {"act": "remove-engine", "number": int() | None as number}:
            cluster.remove_engine(number)
        case _:
            return ControlReply(error="The request is not one that this version of Ludus knows.")
    rows = [
        EngineRow(number=one.number, url=one.started.url, pid=one.started.pid, under_way=one.pulse.under_way)
        for one in cluster.engines()
    ]
    return ControlReply(engines=rows, workers=len(cluster.crowd.workers.members))


def _write(path: Path, data: Mapping[str, object]) -> None:
    """Write a file whole, or not at all."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(json.dumps(data), "utf-8")
    os.replace(unfinished, path)
