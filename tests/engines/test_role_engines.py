"""An engine for each of several models: each request is sampled as by the engine of its policy alone."""

import asyncio

import pytest

from ludus.engines.base import Request, drain_stats
from ludus.engines.embedded.engine import LocalEngine
from ludus.engines.role_engines import RoleEngines
from ludus.rollouts.scheduler import LockstepEngine
from ludus.types import SamplingParams
from tests.engines.test_engine_features import SMALL, build

PARAMS = SamplingParams(max_new_tokens=6, seed=3)
PROMPTS = [tuple(range(i, i + 9)) for i in range(4)]
ADAPTERS = ["role_x", None, "role_x", None]


def engine(model):
    return LocalEngine(model, settings=SMALL)


def test_requests_are_sampled_by_the_engine_of_their_policy():
    models = [build(seed) for seed in (0, 1)]

    async def run():
        engines = RoleEngines(engine(models[0]), {"role_x": engine(models[1])})
        plain = [engine(model) for model in models]
        requests = [
            Request(f"{i}", p, PARAMS, adapter=a) for i, (p, a) in enumerate(zip(PROMPTS, ADAPTERS, strict=True))
        ]
        found = await engines.generate_batch(requests)
        for own, one in ((found[::2], plain[1]), (found[1::2], plain[0])):
            places = (0, 2) if one is plain[1] else (1, 3)
            expected = await one.generate_batch([Request(f"{i}", PROMPTS[i], PARAMS) for i in places])
            assert [(c.tokens, c.logprobs) for c in own] == [(c.tokens, c.logprobs) for c in expected]
        assert (await engines.generate(requests[2])).tokens == found[2].tokens
        assert await engines.score(PROMPTS[0], adapter="role_x") == await plain[1].score(PROMPTS[0])
        assert await engines.score(PROMPTS[0]) == await plain[0].score(PROMPTS[0])
        assert await engines.fingerprint() == await plain[0].fingerprint()
        state = {name: p.detach() + 0.1 for name, p in models[0].named_parameters()}
        await engines.load_weights(4, state)
        assert await engines.fingerprint() != await plain[0].fingerprint()
        assert await engines.by_policy["role_x"].fingerprint() == await plain[1].fingerprint()
        after = await engines.generate_batch(requests)
        assert {v for one in after for v in one.versions} == {engines.version} == {4}
        assert (after[0].tokens, after[0].logprobs) == (found[0].tokens, found[0].logprobs)
        assert (await drain_stats(engines)).decode_tokens > sum(len(one.tokens) for one in (*found, *after))
        assert (engines.roles, LockstepEngine(engines).roles) == ({"x"}, {"x"})
        assert engines.context_tokens == plain[0].context_tokens
        for one in (engines, *plain):
            await one.close()

    asyncio.run(run())


@pytest.mark.parametrize("adapter", ["role_x", None])
def test_errors_of_an_engine_reach_the_caller(adapter):
    async def run():
        engines = RoleEngines(engine(build()), {"role_x": engine(build())})
        with pytest.raises(Exception, match="outside the model's vocabulary"):
            await engines.generate_batch([Request("a", (10**6,), PARAMS, adapter=adapter)])
        await engines.close()

    asyncio.run(run())
