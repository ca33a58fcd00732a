"""Conformance checks of servers with LoRA adapters. Each check takes a `Case` and leaves no adapter loaded."""

from __future__ import annotations

import asyncio
import copy
import re
from dataclasses import dataclass

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from ludus.engines.base import BASE, Request
from ludus.engines.control_tokens import find_token
from ludus.engines.remote.engine import ServerEngine
from ludus.errors import EngineError, SyncError
from ludus.training.rl.weight_sync import WeightSync
from ludus.types import SamplingParams

TOLERANCE = 1e-4
RANK, SCALING = 8, 2.0
PROMPT = tuple(range(5, 45))
LONG = 300
UNDER_WAY = "ludus_choices_in_flight|vllm:num_requests_running"


@dataclass
class Case:
    """An engine connected to one server, and the base model of the server."""

    engine: ServerEngine
    url: str
    base: PreTrainedModel

    async def ask(self, adapter, num=12, prompt=PROMPT, **params):
        asked = SamplingParams(max_new_tokens=num, **params)
        return await self.engine.generate(Request("e", prompt, asked, adapter=adapter))

    def names(self):
        cards = httpx.get(f"{self.url}/v1/models", timeout=60).raise_for_status().json()["data"]
        return [card["id"] for card in cards[1:]]

    def num_unfinished(self):
        text = httpx.get(f"{self.url}/metrics", timeout=60).raise_for_status().text
        return sum(map(float, re.findall(rf"^(?:{UNDER_WAY})(?:{{.*}})? (\S+)$", text, re.M)))


def adapted(base, seed, rank=RANK, size=0.05):
    """Return a PEFT model around a copy of the base, with random factors."""
    lora = LoraConfig(r=rank, lora_alpha=SCALING * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    made = get_peft_model(copy.deepcopy(base), lora).eval()
    source = torch.Generator().manual_seed(seed)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=source) * size
    return made


def factors(made):
    return {name: p.detach() for name, p in made.named_parameters() if p.requires_grad}


@torch.no_grad()
def reference(model, tokens):
    logits = model(torch.tensor([list(tokens)])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(list(tokens[1:]))[:, None])[:, 0].tolist()


def is_right(model, done, prompt=PROMPT):
    own = reference(model, prompt + done.tokens)[len(prompt) - 1 :]
    return list(done.logprobs) == pytest.approx(own, abs=TOLERANCE)


async def adapters_side_by_side_are_those_of_peft(case):
    one, two = adapted(case.base, 1), adapted(case.base, 2)
    for name, made, version in (("one", one, 3), ("two", two, 4)):
        await case.engine.load_adapter(name, version, factors(made), SCALING)
    answers = await asyncio.gather(case.ask("one", seed=1), case.ask("two", seed=2))
    for name, made, version, done in zip(("one", "two"), (one, two), (3, 4), answers, strict=True):
        assert (len(done.tokens), set(done.versions), is_right(made, done)) == (12, {version}, True)
        scores = await case.engine.score(PROMPT, adapter=name)
        assert scores[1:] == pytest.approx(reference(made, PROMPT), abs=TOLERANCE)
    apart = zip(reference(one, PROMPT), reference(two, PROMPT), strict=True)
    assert max(abs(a - b) for a, b in apart) > 0.05


async def requests_without_an_adapter_may_share_a_batch(case):
    made = adapted(case.base, 1)
    await case.engine.load_adapter("one", 3, factors(made), SCALING)
    models = {"one": made, BASE: case.base, None: case.base}
    answers = await asyncio.gather(*(case.ask(name, seed=n) for n, name in enumerate(models)))
    assert [is_right(model, done) for model, done in zip(models.values(), answers, strict=True)] == [True] * 3
    scores = await case.engine.score(PROMPT, adapter=BASE)
    assert scores[1:] == pytest.approx(reference(case.base, PROMPT), abs=TOLERANCE)


async def a_request_keeps_the_version_that_it_began_with(case):
    old, new = adapted(case.base, 1), adapted(case.base, 2)
    await case.engine.load_adapter("a", 1, factors(old), SCALING)
    (before,) = case.names()
    running = [asyncio.create_task(case.ask("a", LONG, seed=n)) for n in range(2)]
    async with asyncio.timeout(60):
        while await asyncio.to_thread(case.num_unfinished) < 2:
            await asyncio.sleep(0.005)
    await case.engine.load_adapter("a", 2, factors(new), SCALING)
    assert len(case.names()) == 2
    later = await case.ask("a", seed=7)
    assert not all(task.done() for task in running)
    assert (set(later.versions), is_right(new, later)) == ({2}, True)
    for done in await asyncio.gather(*running):
        assert len(done.tokens) == LONG
        assert (set(done.versions), is_right(old, done)) == ({1}, True)
    async with asyncio.timeout(60):
        while len(case.names()) > 1:
            await asyncio.sleep(0.05)
    assert before not in case.names()


async def what_was_unloaded_is_refused(case):
    await case.engine.load_adapter("a", 1, factors(adapted(case.base, 1)), SCALING)
    await case.ask("a", 2)
    await case.engine.unload_adapter("a")
    with pytest.raises(EngineError, match="Adapter 'a' is not loaded; loaded: none"):
        await case.ask("a", 2)
    with pytest.raises(EngineError, match="Adapter 'a' is not loaded"):
        await case.engine.score(PROMPT, adapter="a")


async def an_update_is_proved_and_used_and_the_base_stays(case):
    for version, seed in ((1, 1), (2, 2)):
        made = adapted(case.base, seed)
        gap = await WeightSync(made, case.engine, PROMPT).publish(version)
        assert case.engine.version == version
        assert gap < TOLERANCE
        done = await case.ask(None)
        assert (set(done.versions), is_right(made, done)) == ({version}, True)
    assert is_right(case.base, await case.ask(BASE))


async def another_base_is_found(case):
    odd = copy.deepcopy(case.base)
    with torch.no_grad():
        odd.model.layers[1].mlp.up_proj.weight.mul_(1.2)
    with pytest.raises(SyncError):
        await WeightSync(adapted(odd, 1), case.engine, PROMPT).publish(1)


async def a_server_that_lost_an_adapter_gets_it_again(case):
    made, token = adapted(case.base, 1), find_token(case.url)
    await case.engine.load_adapter("a", 1, factors(made), SCALING)
    for asked in (case.ask("a"), case.engine.score(PROMPT, adapter="a")):
        (name,) = case.names()
        gone = httpx.post(
            f"{case.url}/v1/unload_lora_adapter",
            json={"lora_name": name},
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=60,
        )
        gone.raise_for_status()
        await asked
        assert case.names() == [name]
    assert is_right(made, await case.ask("a"))


async def what_does_not_fit_is_refused_and_the_old_version_stays(case):
    made = adapted(case.base, 1)
    await case.engine.load_adapter("a", 1, factors(made), SCALING)
    wide = {name: torch.cat([p, p], 1) if "lora_A" in name else p for name, p in factors(made).items()}
    with pytest.raises(EngineError):
        await case.engine.load_adapter("a", 2, wide, SCALING)
    uneven = {**factors(made), **{n: p[:4] for n, p in list(factors(made).items())[:1]}}
    with pytest.raises(SyncError, match="single rank"):
        await case.engine.load_adapter("a", 2, uneven, SCALING)
    with pytest.raises(SyncError, match="not a factor"):
        await case.engine.load_adapter("a", 2, {"model.norm.weight": torch.ones(128)}, SCALING)
    done = await case.ask("a")
    assert (set(done.versions), is_right(made, done)) == ({1}, True)


CHECKS = (
    adapters_side_by_side_are_those_of_peft,
    requests_without_an_adapter_may_share_a_batch,
    a_request_keeps_the_version_that_it_began_with,
    what_was_unloaded_is_refused,
    an_update_is_proved_and_used_and_the_base_stays,
    another_base_is_found,
    a_server_that_lost_an_adapter_gets_it_again,
    what_does_not_fit_is_refused_and_the_old_version_stays,
)


def run_check(check, url, base):
    """Run a check with a new engine; assert that it leaves no adapter on the server."""

    async def run():
        case = Case(ServerEngine([url], lora_scaling=SCALING), url, base)
        try:
            await check(case)
        finally:
            await case.engine.close()
        assert case.names() == []

    asyncio.run(run())
