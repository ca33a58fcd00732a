"""State keys: from the environment, before each turn, to the advantage that compares equal states."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest
import torch

from ludus.algorithms import advantages
from ludus.algorithms.algorithm import PartOptions
from ludus.algorithms.spec.resolve import PRESETS
from ludus.config.sections.rollout import RolloutConfig
from ludus.envs.base import Environment
from ludus.errors import WorldError
from ludus.rollouts.episode import run_episode
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.training.credit.advantages import assign_credit
from ludus.types import Action, Message, Segment, StepResult, Task
from tests.training.credit.test_credit import group, inputs, same, table
from tests.training.rl.test_baselines import run

TASK = Task("t", (), None)


@dataclass
class Corridor(Environment):
    """Each turn walks on by one and says `said`; three turns and it is done."""

    said: str = "on"
    place: int = 0
    tools = ()
    rewards = ()

    async def start(self, task):
        return [Message(role="user", content="go")]

    async def step(self, action):
        self.place += 1
        return StepResult((Message(role="tool", content=self.said),), done=self.place == 3)

    async def close(self):
        pass


class StatefulCorridor(Corridor):
    """A corridor that names its state."""

    def state_key(self):
        return f"place {self.place % 2}"


class StatelessCorridor(Corridor):
    """One that cannot."""

    def state_key(self):
        raise RuntimeError("no idea")


class ConstantPolicy:
    """A policy that says the same each turn."""

    def __init__(self):
        self.segments = ()

    def open(self, messages, tools):
        self.segments = (Segment("prompt", (1,)),)

    async def act(self):
        turn = sum(s.kind == "action" for s in self.segments)
        self.segments += (Segment("action", (2, 3), turn, logprobs=(-1.0, -1.0), versions=(0, 0)),)
        return Action(Message(role="assistant", content="step"))

    def observe(self, messages):
        self.segments += (Segment("observation", (4,)),)

    def close(self):
        pass


def anchors_of(environment):
    return asyncio.run(run_episode(TASK, 0, environment, ConstantPolicy(), RolloutConfig())).anchors


def test_anchors_use_the_state_key_of_the_environment():
    first, second, third = anchors_of(StatefulCorridor())
    assert first == third != second


def test_default_anchor_is_the_last_observation():
    first, second, third = anchors_of(Corridor())
    assert first != second == third
    assert anchors_of(Corridor("on"))[1] != anchors_of(Corridor("off"))[1]
    assert anchors_of(Corridor("off"))[0] == first


def test_failing_state_key_raises_world_error():
    with pytest.raises(WorldError, match="state_key raised"):
        anchors_of(StatelessCorridor())


STATES = (("a", "b"), ("a", "c", "b"), ("a", "b"), ("d", "b", "b"))
IDS = torch.tensor([[0, 1, 90], [0, 2, 1], [0, 1, 91], [3, 1, 1]])


def anchored(states=STATES, given=True):
    return [
        replace(e, trajectory=replace(e.trajectory, anchors=s, **({} if given else {"turn_rewards": ()})))
        for e, s in zip(group(), states, strict=True)
    ]


@pytest.mark.parametrize("given", [True, False])
def test_gigpo_compares_turns_of_equal_states(given):
    options = {"gamma": 0.8, "weight": 0.5, "scale": "none"}
    algorithm = replace(PRESETS["gigpo"], options=PartOptions(advantage=options))
    credits = assign_credit([anchored(given=given)], algorithm)
    mask, turn, turn_rewards = inputs(credits)
    turn_rewards = turn_rewards if given else torch.zeros_like(turn_rewards)
    rewards = torch.tensor([c.episode.trajectory.reward for c in credits], dtype=torch.float64)
    with_end = turn_rewards.clone()
    for i, last in enumerate((1, 2, 1, 2)):
        with_end[i, last] += rewards[i]
    expected = advantages.gigpo(
        rewards=rewards,
        anchors=IDS,
        turn=turn,
        group=torch.zeros(4, dtype=torch.int64),
        mask=mask,
        turn_rewards=with_end,
        **options,
    )
    found, _ = table(credits)
    same(found, expected)
    grpo, _ = table(assign_credit([group()], PRESETS["grpo"]))
    assert not torch.allclose(found, grpo)


def test_gigpo_compares_turns_without_a_state_with_no_other():
    algorithm = replace(PRESETS["gigpo"], options=PartOptions(advantage={"gamma": 0.8, "weight": 0.5, "scale": "none"}))
    unknown = (STATES[0], (), *STATES[2:])
    found, _ = table(assign_credit([anchored(unknown)], algorithm))
    apart, _ = table(assign_credit([anchored((STATES[0], ("x", "y", "z"), *STATES[2:]))], algorithm))
    same(found, apart)


def test_gigpo_without_anchors_equals_grpo():
    algorithm = replace(PRESETS["gigpo"], options=PartOptions(advantage={"weight": 7.0}))
    found, _ = table(assign_credit([anchored(((),) * 4)], algorithm))
    grpo, _ = table(assign_credit([group()], PRESETS["grpo"]))
    same(found, grpo)


@pytest.mark.fault
def test_a_run_of_gigpo_writes_the_anchor_of_each_turn(tmp_path):
    reporter = run(tmp_path / "run", algorithm__preset="gigpo", training__steps="1", rollout__temperature="2")
    assert reporter.steps[0][1]["ledger/trained"] == 4
    records = list(read_rollouts(rollouts_path(tmp_path / "run", 1)))
    assert [len(r.trajectory.anchors) for r in records] == [r.trajectory.num_turns for r in records]
    first = {r.group: set() for r in records}
    for record in records:
        first[record.group].add(record.trajectory.anchors[0])
    assert [len(states) for states in first.values()] == [1, 1]
    assert len(set.union(*first.values())) == 2
