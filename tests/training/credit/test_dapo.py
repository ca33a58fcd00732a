"""DAPO against the GRPO of its paper: removing any of its four parts changes the step.

The step goes the real way from sampled groups to the gradient by each log-probability. What is expected is in
plain loops, from arXiv:2503.14476, and reads nothing of the library.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

from ludus.algorithms.algorithm import Algorithm
from ludus.algorithms.objective import Normalizer, objective
from ludus.algorithms.spec.resolve import PRESETS
from ludus.algorithms.tensors import TokenBatch
from ludus.config.load import load_config
from ludus.envs.base import TaskOrder
from ludus.rollouts.ledger import Ledger
from ludus.training.collection.rollout_collector import RolloutCollector
from ludus.training.credit.advantages import training_rows
from ludus.types import Task
from tests.training.credit.test_credit import group

DAPO, PAPER = replace(PRESETS["dapo"], overlong_measure="action_tokens"), PRESETS["grpo_paper"]
REWARDS = {0: (1.0,) * 4, 1: (0.0,) * 4, 2: (1.0, 1.0, 0.0, 0.2), 3: (0.0,) * 4}
"""By the task's place in the order; the others have these:"""
MIXED = (1.0, 0.0, 0.0, 0.5)
LENGTHS = (7, 12, 7, 12)
BUDGET, CACHE = 14, 3
PARTS = {
    "clip-higher": {"clip_high": PAPER.clip_high},
    "dynamic sampling": {
        "filter_zero_variance": PAPER.filter_zero_variance,
        "max_resample_rounds": PAPER.max_resample_rounds,
    },
    "sampling until the batch is full": {"max_resample_rounds": PAPER.max_resample_rounds},
    "token-level loss": {"aggregation": PAPER.aggregation},
    "soft overlong punishment": {"overlong_buffer": PAPER.overlong_buffer},
}
Gradient = dict[tuple[str, int], float]


def gaps(name):
    """How far the policy has moved at each action token of an attempt, nats."""
    draw = random.Random(name)
    return [draw.uniform(-0.4, 0.4) for _ in range(12)]


def rewards_at(place):
    return REWARDS.get(place, MIXED)


def names_in_order():
    order = TaskOrder([Task(name, (), None) for name in "abcdefgh"], 0)
    return order, [task.id for task in order.take(0, 8)]


def attempts(name, rewards):
    members = group(rewards, name)
    return [replace(e, trajectory=replace(e.trajectory, task_id=name)) for e in members]


def sampler_of(algorithm: Algorithm, roll_out) -> RolloutCollector:
    """Two tasks a step, played by `roll_out`."""
    settings = {"training.prompts_per_step": 2, "rollout.max_turns": 2, "rollout.max_tokens_per_turn": BUDGET // 2}
    config = load_config("search", [word for k, v in settings.items() for word in (f"--{k}", str(v))])
    sampler = RolloutCollector(SimpleNamespace(config=config), None, algorithm, None, Ledger())
    sampler.roll_out = roll_out
    return sampler


def step(algorithm: Algorithm) -> Gradient:
    """The gradient of one step by the log-probability of each action token."""
    order, names = names_in_order()

    async def roll_out(number, tasks):
        return [attempts(task.id, rewards_at(names.index(task.id))) for task in tasks]

    sampler = sampler_of(algorithm, roll_out)
    rows = training_rows(asyncio.run(sampler.sample(1, order)), mask_observations=True)
    if not rows:
        return {}
    width = max(len(row.tokens) for row in rows)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    moved, advantages = torch.zeros(2, len(rows), width, dtype=torch.float64)
    for i, row in enumerate(rows):
        actions = [t for t, trains in enumerate(row.trains) if trains]
        mask[i, actions] = True
        moved[i, actions] = torch.tensor(gaps(row.name)[: len(actions)], dtype=torch.float64)
        advantages[i, : len(row.tokens)] = torch.tensor(row.advantages, dtype=torch.float64)
    old = torch.full_like(moved, -1.0)
    leaf = (old + moved).requires_grad_()
    batch = TokenBatch(leaf, old, old, advantages, mask, ref_logprobs=old)
    loss, _ = objective(batch, algorithm, Normalizer.of(mask))
    (gradient,) = torch.autograd.grad(loss, leaf)
    return {(row.name, t): value for i, row in enumerate(rows) for t, value in enumerate(gradient[i][mask[i]].tolist())}


WHOLE = frozenset(("clip-higher", "dynamic sampling", "token-level loss", "soft overlong punishment"))


def of_the_paper(parts: frozenset[str] = WHOLE) -> Gradient:
    """GRPO with these parts of DAPO.

    Dynamic sampling takes the first two tasks of which some attempts succeed and some do not, in the place of
    the first two; the mean of a token-level loss is over all tokens, in the place of one over attempts of
    those over their tokens.
    """
    names, high = names_in_order()[1], 1.28 if "clip-higher" in parts else 1.2
    varied = [place for place in range(8) if len(set(rewards_at(place))) > 1]
    places = varied[:2] if "dynamic sampling" in parts else [0, 1]
    found = {}
    for place in places:
        late = [min(0.0, max(-1.0, (BUDGET - CACHE - length) / CACHE)) for length in LENGTHS]
        punished = "soft overlong punishment" in parts
        rewards = [reward + punished * x for reward, x in zip(rewards_at(place), late, strict=True)]
        mean = sum(rewards) / 4
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 3)
        for i, reward in enumerate(rewards):
            a, name = (reward - mean) / (deviation + 1e-6), f"sample {i} of task {names[place]}"
            tokens = sum(LENGTHS) if "token-level loss" in parts else 4 * LENGTHS[i]
            for t, gap in enumerate(gaps(name)[: LENGTHS[i]]):
                ratio = math.exp(gap)
                cut = (a > 0 and ratio > high) or (a < 0 and ratio < 0.8)
                found[name, t] = 0.0 if cut else -ratio * a / (len(places) * tokens)
    return found


@pytest.mark.parametrize("number", range(len(WHOLE) + 1))
def test_each_subset_of_dapo_parts_matches_the_paper(number):
    """From GRPO, without a part, to DAPO, with all four."""
    for parts in combinations(sorted(WHOLE), number):
        missing = {key: value for part in WHOLE.difference(parts) for key, value in PARTS[part].items()}
        found, expected = step(replace(DAPO, **missing)), of_the_paper(frozenset(parts))
        assert found.keys() == expected.keys(), parts
        assert list(found.values()) == pytest.approx([expected[key] for key in found], abs=1e-12), parts


@pytest.mark.parametrize("part", PARTS)
def test_removing_a_dapo_part_changes_the_step(part):
    found, expected = step(replace(DAPO, **PARTS[part])), of_the_paper()
    same = found.keys() == expected.keys()
    assert not same or max(abs(found[key] - expected[key]) for key in found) > 1e-4


def test_dapo_without_its_parts_equals_the_grpo_paper_preset():
    """No KL; the deviation of verl, where it was published; its 16 updates a batch."""
    assert DAPO.minibatches == 16
    rest = {"kl_coef": PAPER.kl_coef, "std_ddof": PAPER.std_ddof, "minibatches": PAPER.minibatches}
    rest["overlong_measure"] = PAPER.overlong_measure
    changes = {key: value for part in PARTS.values() for key, value in part.items()}
    text = {"name": PAPER.name, "summary": PAPER.summary, "source": PAPER.source}
    assert replace(DAPO, **changes, **rest, **text) == PAPER


def test_a_short_batch_is_reported_once_per_run(caplog):
    """One task alone of the eight has attempts of different rewards."""
    order, names = names_in_order()

    async def roll_out(number, tasks):
        return [attempts(task.id, MIXED if task.id == names[1] else (0.0,) * 4) for task in tasks]

    algorithm = replace(DAPO, max_resample_rounds=1, overlong_buffer=0)
    sampler = sampler_of(algorithm, roll_out)
    for number in (1, 2, 3):
        asyncio.run(sampler.sample(number, order))
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert said.startswith("Step 1 trains on 1 of 2 groups")
    caplog.clear()
    asyncio.run(sampler_of(replace(algorithm, max_resample_rounds=0), roll_out).sample(1, order))
    assert not caplog.records
