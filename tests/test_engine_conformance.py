"""The conformance suite on every engine: embedded, `ludus serve`, and real servers whose address is given.

LUDUS_VLLM_URL and LUDUS_SGLANG_URL name servers of the packaged cold start with a context of 768 tokens, in
development mode; `make vllm` starts such a vLLM.
"""

from __future__ import annotations

import asyncio
import os

import httpx
import pytest

import engine_conformance as suite
from engine_conformance import Case
from ludus.engines.loading import load_model, load_tokenizer
from ludus.engines.local import EngineSettings, LocalEngine
from ludus.engines.server import ServerEngine
from served import COLD_START, CONTEXT

REAL = {"vllm": "LUDUS_VLLM_URL", "sglang": "LUDUS_SGLANG_URL"}


@pytest.fixture(scope="module")
def reference():
    return load_model(str(COLD_START)), load_tokenizer(str(COLD_START))


@pytest.fixture(scope="module", params=["embedded", "ludus serve", *REAL])
def case(request, reference):
    """The server is the one that other tests have used: its weights are the reference's."""
    kind = request.param
    if kind == "embedded":
        settings = EngineSettings(context_tokens=CONTEXT, threads=1)
        yield Case(LocalEngine(*reference, settings), *reference)
    elif kind == "ludus serve":
        served = request.getfixturevalue("served")
        httpx.post(f"{served.url}/update_weight_version", json={"new_version": "0"}).raise_for_status()
        yield Case(ServerEngine([served.url]), *reference)
    elif REAL[kind] not in os.environ:
        pytest.skip(f"{REAL[kind]} is not set")
    else:
        engine = ServerEngine([os.environ[REAL[kind]]], kind)
        yield Case(engine, *reference, tells_versions=False)


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_engine_conforms(case, check):
    async def run():
        await check(case)
        if isinstance(case.engine, ServerEngine):
            await case.engine.close()

    asyncio.run(run())
