"""The conformance suite on every engine: embedded (paged and generic), `ludus serve`, and real servers at given URLs.

LUDUS_VLLM_URL and LUDUS_SGLANG_URL name servers of the packaged cold start with a context of 768 tokens, in
development mode, SGLang with --enable-metrics; `make vllm` starts such a vLLM.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial

import httpx
import pytest

import engine_conformance as suite
from engine_conformance import Case, count_sampled
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.embedded.generic_scheduler import GenericScheduler
from ludus.engines.models.loading import load_model, load_tokenizer
from ludus.engines.remote.engine import ServerEngine
from ludus.errors import UserError
from served import COLD_START, CONTEXT

REAL = {"vllm": "LUDUS_VLLM_URL", "sglang": "LUDUS_SGLANG_URL"}


def refuse(model, *_):
    raise UserError("The model is refused.")


@pytest.fixture(scope="module")
def reference():
    return load_model(str(COLD_START)), load_tokenizer(str(COLD_START))


@pytest.fixture(scope="module", params=["embedded", "generic", "ludus serve", *REAL])
def case(request, reference):
    """The server is the one that other tests have used: its weights are the reference's."""
    kind = request.param
    if kind in ("embedded", "generic"):
        settings = EngineSettings(context_tokens=CONTEXT, threads=1)
        with pytest.MonkeyPatch.context() as patch:
            if kind == "generic":
                patch.setattr("ludus.engines.embedded.engine.RaggedForward", refuse)
            engine = LocalEngine(*reference, settings)
        assert isinstance(engine._scheduler, GenericScheduler) == (kind == "generic")
        yield Case(engine, *reference, lambda: engine.stats().decode_tokens)
    elif kind == "ludus serve":
        served = request.getfixturevalue("served")
        httpx.post(
            f"{served.url}/update_weight_version", json={"new_version": "0"}, headers=served.headers, timeout=60
        ).raise_for_status()
        yield Case(ServerEngine([served.url]), *reference, partial(count_sampled, served.url))
    elif REAL[kind] not in os.environ:
        pytest.skip(f"{REAL[kind]} is not set")
    else:
        url = os.environ[REAL[kind]]
        yield Case(ServerEngine([url], kind), *reference, partial(count_sampled, url), tells_versions=False)


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_engine_passes_the_conformance_checks(case, check):
    async def run():
        await check(case)
        if isinstance(case.engine, ServerEngine):
            await case.engine.close()

    asyncio.run(run())
