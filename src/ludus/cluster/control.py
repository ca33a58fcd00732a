"""Control the cluster of a running run from another process, through files in the run folder.

A request is a file `RUN/cluster/request-ID.json`, written atomically by any process with write access; the
response is `response-ID.json`. Requests run on their own threads, never on the run's. The response to an
invalid request is an error message. The folder is removed when the run ends.
"""

from __future__ import annotations

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
from ludus.training.run.run_dir import RunFolder, is_running

FOLDER: Final = "cluster"
"""Name of the request folder in a run folder."""
_POLL_S = 0.3

Act = Literal["list", "add-engine", "remove-engine"]


class EngineRow(TypedDict):
    """Engine of a run: number, address, process id and requests in flight."""

    number: int
    url: str
    pid: int
    in_flight: int


class ControlReply(TypedDict, total=False):
    """Response to a request: the engines afterwards, or the error."""

    engines: list[EngineRow]
    workers: int
    error: str


@contextmanager
def controlled(run: Path, cluster: Cluster) -> Iterator[None]:
    """Serve the requests in a run folder during the block."""
    stop = threading.Event()
    shutil.rmtree(run / FOLDER, ignore_errors=True)
    poller = threading.Thread(target=_poll_requests, args=(run / FOLDER, cluster, stop), daemon=True)
    poller.start()
    try:
        yield
    finally:
        stop.set()
        poller.join()
        shutil.rmtree(run / FOLDER, ignore_errors=True)


def send_request(run: Path, act: Act, number: int | None = None, *, timeout_s: float = 600.0) -> ControlReply:
    """Send a request to a running run and wait for the response.

    Raises UserError if the run is not running or rejects the request, StorageError if the folder cannot be written.
    """
    _check_running(run)
    name, begin = secrets.token_hex(6), time.monotonic()
    response_path = run / FOLDER / f"response-{name}.json"
    request_path = run / FOLDER / f"request-{name}.json"
    try:
        request_path.parent.mkdir(exist_ok=True)
        _write(request_path, {"act": act, "number": number})
        while not response_path.is_file():
            _check_running(run)
            if time.monotonic() - begin > timeout_s:
                request_path.unlink(missing_ok=True)
                hint = f"See its log: {run / 'log.txt'}"
                raise UserError(f"The run in {run} did not respond within {timeout_s:g} s.", hint)
            time.sleep(_POLL_S / 3)
        reply = cast(ControlReply, json.loads(response_path.read_text("utf-8")))
        response_path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{run / FOLDER} cannot be read or written: {error.strerror or error}.") from error
    if "error" in reply:
        raise UserError(reply["error"])
    return reply


def _check_running(run: Path) -> None:
    """Raise UserError unless a process holds the run's lock."""
    if not is_running(RunFolder(run)):
        raise UserError(f"The run in {run} is not running.", f"Resume it: ludus train --resume {run}")


def _poll_requests(folder: Path, cluster: Cluster, stop: threading.Event) -> None:
    """Start the pending requests, each on its own thread, since starting an engine takes time."""
    while not stop.wait(_POLL_S):
        for path in sorted(folder.glob("request-*.json")):
            with suppress(OSError, ValueError):
                request = json.loads(path.read_text("utf-8"))
                path.unlink()
                response_path = folder / path.name.replace("request-", "response-", 1)
                threading.Thread(target=_respond, args=(cluster, request, response_path), daemon=True).start()


def _respond(cluster: Cluster, request: object, path: Path) -> None:
    try:
        reply = _execute(cluster, request)
    except LudusError as error:
        reply = ControlReply(error=str(error))
    with suppress(OSError):  # the run has ended and removed its request folder
        _write(path, reply)


def _execute(cluster: Cluster, request: object) -> ControlReply:
    match request:
        case {"act": "list"}:
            pass
        case {"act": "add-engine"}:
            cluster.change_engines(1)
        case {"act": "remove-engine", "number": int() | None as number}:
            cluster.change_engines(-1, number)
        case _:
            return ControlReply(error="This version of Ludus does not support the request.")
    rows = [
        EngineRow(number=one.number, url=one.started.url, pid=one.started.pid, in_flight=one.heartbeat.in_flight)
        for one in cluster.engines()
    ]
    return ControlReply(engines=rows, workers=len(cluster.group.workers.members))


def _write(path: Path, data: Mapping[str, object]) -> None:
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(json.dumps(data), "utf-8")
    os.replace(unfinished, path)
