"""Calls to the worker extension of a vLLM server through `/collective_rpc`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import BaseModel

from ludus.engines.remote.api_adapters import VllmApi
from ludus.engines.remote.http_client import HttpRefusal, Replica

EXTENSION = "ludus.engines.remote.vllm_worker_extension.LudusWorkerExtension"


class _Results(BaseModel):
    """Result of each worker."""

    results: list[dict[str, str | int] | str | None]


async def tell_workers(replica: Replica, path: str, body: Mapping[str, object]) -> None:
    """Call the worker method of `path` (as in `ludus serve`). Raises HttpRefusal with its error."""
    method = "ludus_" + path.removeprefix("/")
    asked = {"method": method, "kwargs": {"text": json.dumps(body)}}
    try:
        answers = (await replica.post("/collective_rpc", asked, _Results)).results
    except HttpRefusal as error:
        error.hint = (
            f"Start vLLM with --worker-extension-cls {EXTENSION} and VLLM_SERVER_DEV_MODE=1 in an "
            "environment with Ludus installed; or unset engine.broadcast_host."
        )
        raise
    for answer in answers:
        if isinstance(answer, dict):
            raise HttpRefusal(f"{replica.url}: {answer['error']}", status=int(answer["status"]))


async def receive(replica: Replica, dialect: VllmApi, version: int) -> None:
    """Pause a server, have it receive broadcast weights, and set their version."""
    await dialect.exchange(replica, version, lambda: tell_workers(replica, "/receive_weights", {}))
