"""One member: forced tokens are context, and log-probabilities are those of the distribution that was sampled."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from ludus.algorithms.algorithm import Algorithm
from ludus.algorithms.objective import Normalizer, objective
from ludus.algorithms.spec.resolve import PRESETS
from ludus.algorithms.tensors import TokenBatch
from ludus.config.sections.rollout import RolloutConfig
from ludus.engines.base import Request
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.envs.tool_world import assistant
from ludus.rollouts.dialogues.exploring import (
    ExploringChatSession,
    FirstTurns,
    MemberSampling,
    is_off_policy,
    num_forced_calls,
    rejection_logprobs,
    with_prompt,
)
from ludus.rollouts.episode import run_unscored
from ludus.rollouts.ledger import Ledger, RolloutKey
from ludus.rollouts.scheduler import RolloutRequest, SamplingPlan, engine_scheduler
from ludus.training.batches.rows import row_of_trajectory
from ludus.types import Message, SamplingParams, StepResult
from small_worlds import RecordingWorld, call, make_chat, make_task, renderer, scripted, tokenizer
from tests.training.learner.test_learner import tiny_model

LIMITS = RolloutConfig(max_turns=6)


def play(engine, sampling, world=None, limits=LIMITS):
    world, task = world or RecordingWorld(), make_task()
    key = RolloutKey(1, task.id, 0)
    session = ExploringChatSession.of(make_chat(engine), sampling, key, None)
    given = len(sampling.prefix)
    return asyncio.run(run_unscored(task, 0, world.environment(task), session, limits, given))


def text(segment):
    return tokenizer().decode(segment.tokens)


def test_prompts_are_appended_to_the_system_message():
    user, system = Message(role="user", content="q"), Message(role="system", content="a")
    assert with_prompt([system, user], "b") == (Message(role="system", content="a\nb"), user)
    assert with_prompt([user], "b") == (Message(role="system", content="b"), user)
    assert with_prompt([user], "") == (user,)
    assert system["content"] == "a"


def test_a_forced_call_is_context_and_its_arguments_are_sampled():
    engine = scripted(['{"text": "hello"}}\n</tool_call>', "Paris"])
    seeds = [seed for seed in range(40) if not _is_forced(seed, 0.5, 1)]
    found = play(engine, MemberSampling(epsilon=1.0), limits=RolloutConfig(max_turns=2))
    kinds = [(one.kind, one.turn) for one in found.segments]
    assert kinds[:4] == [("prompt", 0), ("observation", 0), ("action", 0), ("observation", 0)]
    assert kinds[4:] == [("observation", 1), ("action", 1)]
    forced = found.segments[1]
    assert text(forced).startswith("<tool_call>")
    assert "echo" in text(forced)
    assert "hello" not in text(forced)
    assert [one.output for one in found.outcomes][:1] == ["hello"]
    assert num_forced_calls(found) == 2
    row = row_of_trajectory(found, 1.0)
    trained = [t for t, own in zip(row.tokens, row.trains, strict=True) if own]
    assert trained == [t for one in found.segments if one.kind == "action" for t in one.tokens]
    assert engine.requests[0].token_ids == (*found.segments[0].tokens, *forced.tokens)
    assert 5 < len(seeds) < 35


def _is_forced(seed, epsilon, turn):
    session = ExploringChatSession.of(
        make_chat(scripted([]), seed=seed), MemberSampling(epsilon=epsilon), RolloutKey(0, "t", 0), None
    )
    session.open(make_task().prompt, RecordingWorld().tools)
    session._turn = turn
    return bool(session._forced_call())


def test_a_prefix_is_context_and_turns_stay_aligned():
    class Paid(RecordingWorld):
        def environment(self, task):
            env, inner = super().environment(task), super().environment(task)
            numbers = iter(range(1, 9))

            async def step(action):
                result = await inner.step(action)
                return StepResult(result.messages, result.done, float(next(numbers)), result.outcomes)

            env.step = step
            return env

    shown = (assistant(""), assistant(""))
    for number, message in enumerate(shown):
        function = {"name": "echo", "arguments": f'{{"text": "shown {number}"}}'}
        message["tool_calls"] = [{"id": f"c{number}", "type": "function", "function": function}]
    engine = scripted([call("echo", text="own"), "Paris"])
    whole = play(
        scripted([call("echo", text=f"shown {i}") for i in (0, 1)] + [call("echo", text="own"), "Paris"]),
        MemberSampling(),
        Paid(),
    )
    found = play(engine, MemberSampling(prefix=shown), Paid())
    actions = [one for one in found.segments if one.kind == "action"]
    assert [one.turn for one in actions] == [2, 3]
    assert [text(one)[:11] for one in actions] == ["<tool_call>", "Paris<|im_e"]
    assert found.turn_rewards == (3.0, 4.0)
    assert (whole.turn_rewards, whole.num_turns) == ((1.0, 2.0, 3.0, 4.0), 4)
    assert found.anchors == whole.anchors[2:]
    assert [one.output for one in found.outcomes] == ["shown 0", "shown 1", "own"]
    assert found.token_ids == whole.token_ids
    row = row_of_trajectory(found, 1.0)
    assert sum(row.trains) == sum(len(one.tokens) for one in actions)
    cut = play(engine, MemberSampling(prefix=shown * 3))
    assert (cut.num_turns, cut.turn_rewards, cut.anchors) == (0, (), ())


def chain_policy(seed):
    """Return the conditional distributions of three tokens over sequences of two, by context."""
    torch.manual_seed(seed)
    return {context: torch.rand(3, dtype=torch.float64).softmax(0) for context in [(), (0,), (1,), (2,)]}


@pytest.mark.parametrize("tries", [1, 2, 5])
@pytest.mark.parametrize("siblings", [[(0, 1)], [(0, 1), (0, 2), (2, 0)], [(1, 0), (1, 1), (1, 2)]])
def test_rejected_beginnings_have_exact_log_probabilities(tries, siblings):
    policy = chain_policy(tries)
    pairs = list(product(range(3), repeat=2))
    pi = {x: float(policy[()][x[0]] * policy[x[:1]][x[1]]) for x in pairs}
    mu = dict.fromkeys(pairs, 0.0)
    reached = 1.0  # probability that a further sample is drawn
    for number in range(tries + 1):
        for x in pairs:
            if x not in siblings or number == tries:
                mu[x] += reached * pi[x]
        reached *= sum(pi[x] for x in siblings)
    assert sum(mu.values()) == pytest.approx(1)

    def sampled(x):
        return x, (math.log(policy[()][x[0]]), math.log(policy[x[:1]][x[1]]))

    known = [sampled(x) for x in siblings]
    found = {x: rejection_logprobs(sampled(x), known, tries) for x in pairs}
    for x in pairs:
        first = sum(value for y, value in mu.items() if y[0] == x[0])
        assert found[x] == pytest.approx((math.log(first), math.log(mu[x] / first)), rel=1e-9)


def weighted_gradient(mu, logits, advantages):
    """Return the expected gradient of the corrected loss under samples of `mu`, from one row per token."""
    algorithm: Algorithm = replace(PRESETS["reinforce"], correction="tis", tis_cap=1e9)
    total = torch.zeros_like(logits)
    for token, probability in enumerate(mu.tolist()):
        if not probability:
            continue
        own = logits.clone().requires_grad_()
        logprobs = own.log_softmax(0)[None, token : token + 1]
        batch = TokenBatch(
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            behavior_logprobs=mu[None, token : token + 1].log(),
            advantages=advantages[None, token : token + 1],
            mask=torch.ones(1, 1, dtype=torch.bool),
        )
        objective(batch, algorithm, Normalizer(1, 1, 1))[0].backward()
        total += probability * own.grad
    return total


@pytest.mark.parametrize("kind", ["temperature", "rejection"])
def test_importance_weights_restore_the_policy_gradient(kind):
    torch.manual_seed(3)
    logits, advantages = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    pi = logits.softmax(0)
    mu = (logits / 2.5).softmax(0)
    if kind == "rejection":
        siblings = [((t,), (float(pi[t].log()),)) for t in (1, 4)]
        found = [rejection_logprobs(((t,), (float(pi[t].log()),)), siblings, 2) for t in range(6)]
        mu = torch.tensor([value for (value,) in found], dtype=torch.float64).exp()
        assert float(mu.sum()) == pytest.approx(1)
    own = logits.clone().requires_grad_()
    (-(own.log_softmax(0).exp() * advantages).sum()).backward()
    torch.testing.assert_close(weighted_gradient(mu, logits, advantages), own.grad)
    plain = weighted_gradient(pi, logits, advantages)
    torch.testing.assert_close(plain, own.grad)


def sample_group(sampling, size=6, *, lockstep=False):
    """Run one group of first turns on an embedded engine with a tiny model; return its trajectories and the model."""
    model = tiny_model(torch.float32)
    model.resize_token_embeddings(len(tokenizer()))
    engine = LocalEngine(model, tokenizer(), EngineSettings(context_tokens=600, max_batch=16, threads=1))
    rollout = RolloutConfig(max_turns=1, max_tokens_per_turn=3, max_seq_len=590)
    world = RecordingWorld()
    plan = SamplingPlan("train", 1.0, 0)
    scheduler = engine_scheduler(world, engine, renderer(), rollout, plan, Ledger())
    assert (scheduler.lockstep is None) is not lockstep
    task = make_task()
    requests = [RolloutRequest(RolloutKey(1, task.id, i), task, sampling=sampling(i)) for i in range(size)]

    async def run():
        async with asyncio.timeout(60):
            found = await scheduler.run(requests)
        await engine.close()
        return [one.trajectory for one in found]

    return asyncio.run(run()), model


def distribution(model, tokens, temperature=1.0):
    with torch.no_grad():
        return torch.softmax(model(torch.tensor([tokens])).logits[0, -1].double() / temperature, -1)


def contexts(trajectory):
    """Yield each action token with its context and recorded log-probability."""
    tokens, action = trajectory.token_ids, trajectory.segments[1]
    start = len(trajectory.segments[0].tokens)
    for i, (token, logprob) in enumerate(zip(action.tokens, action.logprobs, strict=True)):
        yield tokens[: start + i], token, logprob


def test_members_record_the_distribution_that_they_were_sampled_from():
    settings = [MemberSampling(), MemberSampling(temperature=3.0), MemberSampling(top_p=0.3)]
    found, model = sample_group(lambda i: settings[i % 3])
    for number, trajectory in enumerate(found):
        for context, token, logprob in contexts(trajectory):
            p = distribution(model, context, 3.0 if number % 3 == 1 else 1.0)
            if number % 3 == 2:
                order = p.argsort(descending=True)
                kept = order[: int((p[order].cumsum(0) < 0.3).sum()) + 1]
                assert token in kept
                p = p / p[kept].sum()
            assert logprob == pytest.approx(float(p[token].log()), abs=2e-4)


def test_first_turns_of_a_group_differ_and_record_the_rejection():
    found, model = sample_group(lambda i: MemberSampling(temperature=0.05, diverse_tokens=1, tries=50))
    again, _ = sample_group(lambda i: MemberSampling(temperature=0.05, diverse_tokens=1, tries=50))
    plain, _ = sample_group(lambda i: MemberSampling(temperature=0.05))
    firsts = [one.segments[1].tokens[0] for one in found]
    assert len(set(firsts)) == len(firsts)
    assert len({one.segments[1].tokens[0] for one in plain}) < len(firsts)
    assert [one.segments for one in again] == [one.segments for one in found]
    for number, trajectory in enumerate(found):
        first, *rest = contexts(trajectory)
        p = distribution(model, first[0], 0.05)
        q = sum(float(p[token]) for token in firsts[:number])
        others = sum(q**i for i in range(51)) if number else 1.0
        assert first[2] == pytest.approx(math.log(float(p[first[1]]) * others), abs=2e-3)
        for context, token, logprob in rest:
            assert logprob == pytest.approx(float(distribution(model, context, 0.05)[token].log()), abs=2e-3)


def test_a_member_without_a_first_turn_does_not_block_its_siblings():
    async def run():
        turns = FirstTurns(waits=True)
        for sample in range(3):
            turns.begin(RolloutKey(1, "t", sample))
        waiting = asyncio.create_task(turns.before(RolloutKey(1, "t", 2)))
        turns.add(RolloutKey(1, "t", 0), ((5,), (-1.0,)))
        await asyncio.sleep(0)
        assert not waiting.done()
        turns.add(RolloutKey(1, "t", 1), None)
        assert await waiting == [((5,), (-1.0,))]
        turns.add(RolloutKey(1, "t", 0), None)  # the first result counts
        assert await turns.before(RolloutKey(1, "t", 1)) == [((5,), (-1.0,))]
        turns.begin(RolloutKey(2, "t", 0))
        assert list(turns._found) == [(2, "t")]

    asyncio.run(run())


def test_tags_mark_other_distributions():
    found = play(scripted(["Paris"]), MemberSampling())
    assert not is_off_policy(replace(found, tags={"prompt": "1", "prefix": "2"}))
    assert all(is_off_policy(replace(found, tags={name: "1"})) for name in ("temperature", "top_p", "diverse"))


def test_requests_apply_temperature_and_nucleus():
    params = SamplingParams(temperature=1.0, top_p=0.9)
    assert MemberSampling().apply(params) == params
    assert MemberSampling(temperature=0.5, top_p=0.4).apply(params) == SamplingParams(temperature=0.5, top_p=0.4)
    assert Request("e", (1,), params).params.top_p == 0.9
