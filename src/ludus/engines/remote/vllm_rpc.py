"""The trainer's words to the workers of a vLLM server that is on its line of weights."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import BaseModel

from ludus.engines.remote.api_adapters import VllmApi
from ludus.engines.remote.http_client import HttpRefusal, Replica

EXTENSION = "ludus.engines.remote.vllm_worker_extension.LudusWorkerExtension"


class _Results(BaseModel):
    """What each worker answered."""

    results: list[dict[str, str | int] | str | None]


async def tell_workers(replica: Replica, path: str, body: Mapping[str, object]) -> None:
    """Have the workers do what `path` of `ludus serve` does. Raises Refused with a worker's own words."""
    method = "ludus_" + path.removeprefix("/")
    asked = {"method": method, "kwargs": {"text": json.dumps(body)}}
    try:
        answers = (await replica.post("/collective_rpc", asked, _Results)).results
    except HttpRefusal as error:
        error.hint = (
            f"Start vLLM with --worker-extension-cls {EXTENSION} and VLLM_SERVER_DEV_MODE=1, where its "
            "Python finds Ludus; or leave engine.broadcast_host out."
        )
        raise
    for answer in answers:
        if isinstance(answer, dict):
            raise HttpRefusal(f"{replica.url}: {answer['error']}", status=int(answer["status"]))


async def receive(replica: Replica, dialect: VllmApi, version: int) -> None:
    """Have a server take the weights that come, paused meanwhile, and label them."""
    await dialect.exchange(replica, version, lambda: tell_workers(replica, "/receive_weights", {}))
