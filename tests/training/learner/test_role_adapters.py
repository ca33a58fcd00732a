"""An adapter for each role: one model and one engine sample and train them as separate models would."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch

from ludus.algorithms.spec.resolve import PRESETS
from ludus.algorithms.token_statistics import SUM_PI_SQUARED
from ludus.config.sections.model import LoraConfig
from ludus.engines.base import Request, adapter_of_agent
from ludus.engines.models.fingerprint import fingerprint_module
from ludus.engines.models.loading import load_model, load_tokenizer, save_model
from ludus.engines.models.lora import use_adapter
from ludus.errors import LearnerError, UserError
from ludus.rollouts.scheduler import LockstepEngine
from ludus.training.batches.rows import row_of_trajectory, transitions_of
from ludus.training.learner.learner import FULL_KL, LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.rl.build import AdapterOff
from ludus.training.run.checkpoint import load_weights
from ludus.training.run.session import add_lora
from ludus.types import SamplingParams, Segment, StopReason, Trajectory
from served import COLD_START
from tests.engines.test_engine_features import build, with_engine
from tests.training.learner.test_learner import VOCAB, learner, tiny_model

pytest.importorskip("peft")
SEEDS = {"default": 1, "role_x": 2, "role_o": 3}
SYSTEM = tuple(range(12))


def fill(model, seeds):
    """Give each adapter random factors of its seed."""
    for adapter, seed in seeds.items():
        source = torch.Generator().manual_seed(seed)
        for name, factor in model.named_parameters():
            if f".{adapter}." in name:
                factor.data = torch.randn(factor.shape, generator=source, dtype=torch.float64).to(factor) * 0.2
    return model.eval()


def bank(model, seeds=SEEDS):
    return fill(add_lora(copy.deepcopy(model), LoraConfig(rank=4, roles=["x", "o"])), seeds)


def alone(model, adapter):
    return fill(add_lora(copy.deepcopy(model), LoraConfig(rank=4)), {"default": SEEDS[adapter]})


def episode(seed, agents=("x", "o", "judge")):
    """An episode whose agents have the same system message."""
    rng, segments = random.Random(seed), []
    for agent in agents:
        policy, parent = adapter_of_agent(agent, ("x", "o")), -1 if segments else None
        segments.append(Segment("prompt", SYSTEM, 0, parent, agent, policy=policy))
        for turn in range(2):
            action = tuple(rng.randrange(VOCAB) for _ in range(4))
            logprobs = tuple(-4 * rng.random() for _ in action)
            segments.append(Segment("action", action, turn, None, agent, logprobs, (0,) * 4, "stop", policy))
            segments.append(
                Segment("observation", tuple(rng.sample(range(VOCAB), 3)), turn, None, agent, policy=policy)
            )
    rewards = {agent: rng.random() for agent in agents}
    return Trajectory("t", seed, tuple(segments), (), StopReason.ANSWERED, agent_rewards=rewards, shared_reward=True)


def rows_of(num=4, agents=("x", "o", "judge")):
    rng = random.Random(0)
    games = [episode(seed, agents) for seed in range(num)]
    return [row_of_trajectory(one, [rng.uniform(-2, 2) for _ in range(one.num_action_tokens)]) for one in games]


def of_policy(row, policy):
    """The row with only the tokens of one policy in the loss, as one without policies."""
    trains = tuple(t and p == policy for t, p in zip(row.trains, row.policies, strict=True))
    return replace(row, trains=trains, policies=())


def factor_gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if ".lora_" in name}


def adapter_part(tensors, adapter):
    return {n.replace(f".{adapter}.", "."): t for n, t in tensors.items() if f".{adapter}." in n and t is not None}


def test_scores_are_those_of_each_adapter_alone():
    model, rows = tiny_model(), rows_of()
    found = learner(bank(model)).score(rows)
    assert {name for row in rows for name in row.policies} == {"", "role_x", "role_o"}
    for adapter, policy in zip(SEEDS, ("", "role_x", "role_o"), strict=True):
        expected = learner(alone(model, adapter)).score([of_policy(row, policy) for row in rows])
        for row, one, other in zip(rows, found, expected, strict=True):
            own = torch.tensor([p == policy and t for p, t in zip(row.policies, row.trains, strict=True)])
            assert own.sum() == 8
            torch.testing.assert_close(one[own], other[own], atol=1e-12, rtol=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradient_of_an_adapter_comes_from_its_tokens_alone(recompute):
    model, rows = tiny_model(), rows_of()
    one = learner(bank(model), settings=LearnerSettings(microbatch_tokens=120))
    one.scorer = LogprobScorer(one.scorer.model, recompute=recompute)
    one.gradient(rows)
    found = factor_gradients(one.scorer.model)
    for adapter, policy in zip(SEEDS, ("", "role_x", "role_o"), strict=True):
        other = learner(alone(model, adapter))
        other.gradient([of_policy(row, policy) for row in rows])
        expected, share = adapter_part(factor_gradients(other.scorer.model), "default"), 1 / 3  # of the tokens
        own = adapter_part(found, adapter)
        assert expected.keys() == own.keys()
        assert max(float(g.abs().max()) for g in own.values()) > 1e-3
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, expected[name] * share, atol=1e-12, rtol=1e-9)


def test_equal_adapters_are_one_adapter():
    model, rows = tiny_model(), rows_of()
    many, single = learner(bank(model, dict.fromkeys(SEEDS, 1))), learner(alone(model, "default"))
    for one, other in zip(many.score(rows), single.score(rows), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
    (statistics, _), (expected, _) = many.gradient(rows), single.gradient(rows)
    assert statistics.loss == pytest.approx(expected.loss, abs=1e-12)
    found, whole = factor_gradients(many.scorer.model), factor_gradients(single.scorer.model)
    parts = [adapter_part(found, adapter) for adapter in SEEDS]
    for name, gradient in adapter_part(whole, "default").items():
        torch.testing.assert_close(sum(part[name] for part in parts), gradient, atol=1e-12, rtol=1e-9)


def test_training_one_role_equals_a_run_with_one_adapter_to_the_digit():
    """New adapters begin equal, and one that has no tokens in a step does not move."""
    model, rows = tiny_model(), rows_of(agents=("o", "o/1"))
    made = []
    for lora in (LoraConfig(rank=4, roles=["x", "o"]), LoraConfig(rank=4)):
        torch.manual_seed(0)
        one = learner(add_lora(copy.deepcopy(model), lora), settings=LearnerSettings(epochs=2, minibatches=2))
        before = {name: p.detach().clone() for name, p in one.scorer.model.named_parameters()}
        for seed in range(2):
            one.train(rows, seed)
        made.append((before, {name: p.detach() for name, p in one.scorer.model.named_parameters()}))
    (before, many), (begin, single) = made
    for name, factor in adapter_part(many, "role_o").items():
        assert torch.equal(factor, adapter_part(single, "default")[name]), name
    for adapter in ("default", "role_x"):
        for name, factor in adapter_part(many, adapter).items():
            assert torch.equal(factor, adapter_part(before, adapter)[name])
            assert torch.equal(factor, adapter_part(begin, "default")[name])
    assert any(not torch.equal(f, adapter_part(before, "role_o")[n]) for n, f in adapter_part(many, "role_o").items())


def test_optimizer_is_restored_with_the_number_of_steps_of_each_adapter():
    made, first, rows = bank(tiny_model()), rows_of(agents=("o",)), rows_of(agents=("o", "x"))
    one = learner(made)
    one.train(first, 0)
    one.train(rows, 1)
    state, again = one.optimizer.state_dict(), learner(copy.deepcopy(made))
    counts = {name.rpartition("lora_")[2]: int(steps) for name, steps in state.items() if name.startswith("step/")}
    assert counts == {f"{f}.{a}.weight": n for f in "AB" for a, n in (("default", 0), ("role_x", 1))}
    again.optimizer.load_state_dict(state, 2)
    for each in (one, again):
        each.train(rows, 2)
    for (name, left), (_, right) in zip(made.named_parameters(), again.scorer.model.named_parameters(), strict=True):
        assert torch.equal(left, right), name
    del state[next(name for name in state if name.startswith("exp_avg/"))]
    with pytest.raises(LearnerError, match="does not match the model"):
        again.optimizer.load_state_dict(state, 2)


def test_reference_is_the_base_and_leaves_the_adapters_trainable():
    model, rows = tiny_model(), rows_of()
    one = learner(bank(model), replace(PRESETS["grpo"], kl_coef=0.1))
    one.scorers["reference"] = AdapterOff(one.scorer.model, 1.0)
    for found, expected in zip(one.reference(rows), learner(model).score(rows), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert all(p.requires_grad for n, p in one.scorer.model.named_parameters() if ".lora_" in n)
    assert one.train(rows, 0)["policy/kl_reference"] > 0.01


@pytest.mark.parametrize("name", [FULL_KL, SUM_PI_SQUARED])
def test_estimates_over_the_vocabulary_use_the_adapter_of_each_token(name):
    model, rows = tiny_model(), rows_of()
    full = replace(PRESETS["grpo"], kl="full_reverse", kl_coef=0.1)

    def estimates(made, rows):
        one = learner(made, full)
        one.scorers["reference"] = AdapterOff(made, 1.0)
        return [scores.logprobs for scores in one.score_with(name, rows)]

    found = estimates(bank(model), rows)
    for adapter, policy in zip(SEEDS, ("", "role_x", "role_o"), strict=True):
        for row, one, other in zip(
            rows, found, estimates(alone(model, adapter), [of_policy(row, policy) for row in rows]), strict=True
        ):
            own = torch.tensor([p == policy and t for p, t in zip(row.policies, row.trains, strict=True)])
            torch.testing.assert_close(one[own], other[own], atol=1e-12, rtol=0)


def test_rows_of_single_turns_keep_their_policies():
    (row,) = rows_of(1)
    turns = transitions_of(row, episode(0))
    trained = [{p for p, t in zip(one.policies, one.trains, strict=True) if t} for one in turns]
    assert trained == [{"role_x"}, {"role_x"}, {"role_o"}, {"role_o"}, {""}, {""}]


def completions(model, adapters):
    """Turns of episodes with one prompt, in one batch, each continued by another one."""
    prompt, params = (*SYSTEM, 5, 6, 7), SamplingParams(max_new_tokens=8, seed=3)

    async def work(engine):
        first = await engine.generate_batch(
            [Request(f"{i}", prompt, params, adapter=a) for i, a in enumerate(adapters)]
        )
        more = [(*prompt, *one.tokens, 9) for one in first]
        second = await engine.generate_batch(
            [Request(f"{i}", ids, params, adapter=a) for i, (a, ids) in enumerate(zip(adapters, more, strict=True))]
        )
        scores = [
            await engine.score((*ids, *one.tokens), adapter=a)
            for a, ids, one in zip(adapters, more, second, strict=True)
        ]
        return [*first, *second], scores, engine.stats(), await engine.fingerprint()

    return with_engine(model, work)


def test_engine_samples_each_role_as_a_separate_engine_would_to_the_digit():
    model = build()
    made = bank(model)
    found, scores, stats, digest = completions(made, [None, "role_x", "role_o", "role_x"])
    assert digest == fingerprint_module(made)
    assert len({one.tokens for one in found[:3]}) == 3
    assert found[1] == found[3]
    assert stats.cached_tokens > 0
    for place, adapter in enumerate(SEEDS):
        expected, own_scores, _, own_digest = completions(alone(model, adapter), [None])
        assert [found[place], found[place + 4]] == expected
        assert scores[place] == own_scores[0]
        assert own_digest != digest


def test_engine_and_learner_agree_in_float64():
    """Both with the float32 angles of transformers, which the learner widens in training."""
    adapters = ["role_x", "role_o"]
    made = bank(build().double())
    found, scores, *_ = completions(made, adapters)
    turns = [(*SYSTEM, 5, 6, 7, *found[place].tokens, 9, *found[place + 2].tokens) for place in range(2)]
    tokens, marked = torch.tensor(turns), torch.ones(2, len(turns[0]), dtype=torch.bool)
    scorer = LogprobScorer(made)
    of_row = {name: marked & (torch.arange(2) == place)[:, None] for place, name in enumerate(adapters)}
    with torch.no_grad(), scorer.using(of_row):
        own = scorer.score(tokens, marked).logprobs
    sampled = [[*found[place].logprobs, *found[place + 2].logprobs] for place in range(2)]
    at = [*range(15, 23), *range(24, 32)]
    torch.testing.assert_close(own[:, at], torch.tensor(sampled, dtype=torch.float64), atol=1e-10, rtol=0)
    torch.testing.assert_close(own, torch.tensor(scores, dtype=torch.float64), atol=1e-10, rtol=0)


def test_adapters_of_a_16_bit_model_are_computed_in_32_bits():
    made = bank(build().bfloat16())
    assert {p.dtype for n, p in made.named_parameters() if ".lora_" in n} == {torch.float32}
    found, *_ = completions(made, ["role_x", "role_o"])
    for adapter, one in zip(("role_x", "role_o"), found, strict=False):
        tokens = torch.tensor([[*SYSTEM, 5, 6, 7, *one.tokens]])
        with torch.no_grad(), use_adapter(made, adapter):
            own = LogprobScorer(made).score(tokens, torch.ones_like(tokens, dtype=torch.bool)).logprobs[0, 15:]
        assert float((own - torch.tensor(one.logprobs)).abs().mean()) < 0.1


def test_new_weights_of_one_role_reach_the_engine():
    model = build()
    old, new = bank(model), bank(model, SEEDS | {"role_o": 9})
    state = {name: p.detach() for name, p in new.named_parameters() if ".lora_" in name}

    async def work(engine):
        ask = [Request("a", SYSTEM, SamplingParams(max_new_tokens=8, seed=3), adapter=n) for n in ("role_x", "role_o")]
        before = await engine.generate_batch(ask)
        await engine.load_weights(1, state)
        return before, await engine.generate_batch(ask), await engine.fingerprint(), LockstepEngine(engine).roles

    (x, o), (same, other), digest, roles = with_engine(old, work)
    assert (x.tokens, x.logprobs) == (same.tokens, same.logprobs)
    assert o.tokens != other.tokens
    assert other.versions == (1,) * 8
    assert digest == fingerprint_module(new) != fingerprint_module(old)
    assert roles == {"x", "o"}


def test_saved_adapters_are_restored_and_each_is_a_peft_folder(tmp_path):
    tokenizer, base = load_tokenizer(str(COLD_START)), load_model(str(COLD_START))
    made = bank(base)
    save_model(made, tokenizer, tmp_path / "saved")
    fresh = add_lora(copy.deepcopy(base), LoraConfig(rank=4, roles=["x", "o"]))
    load_weights(tmp_path / "saved", fresh)
    for (name, one), (_, other) in zip(made.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    tokens = torch.tensor([list(range(20))])
    for adapter in ("role_x", "role_o"):
        merged = load_model(str(tmp_path / "saved" / adapter))
        assert len(load_tokenizer(str(tmp_path / "saved" / adapter))) == len(tokenizer)
        with torch.no_grad(), use_adapter(made, adapter):
            expected = made(tokens).logits
        torch.testing.assert_close(merged(tokens).logits.detach(), expected, atol=2e-4, rtol=1e-4)
    with pytest.raises(UserError, match="an adapter for each of several roles") as error:
        load_model(str(tmp_path / "saved"))
    assert str(tmp_path / "saved" / "role_o") in error.value.hint
    with pytest.raises(UserError, match="has the adapters default, role_o, role_x"):
        load_weights(tmp_path / "saved", add_lora(copy.deepcopy(base), LoraConfig(rank=4, roles=["x"])))


def test_adapter_of_an_agent_is_that_of_its_role():
    agents = ("solver:code/0/1", "solver", "proposer:code/0", "judge", "policy")
    found = [adapter_of_agent(agent, ("solver", "policy")) for agent in agents]
    assert found == ["role_solver", "role_solver", "", "", "role_policy"]
