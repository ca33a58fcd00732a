"""Generators of the package reasoning-gym; without it these tests fail (`make foreign`)."""

import pytest

from ludus.config.schema import Config
from ludus.config.sections.rollout import EnvConfig
from ludus.envs.registry import build_world
from ludus.errors import ConfigError
from ludus.evaluation.env_audit import CheckPlan, check_world
from ludus.types import Message, StopReason, Trajectory
from ludus.worlds.math.grader import solved

pytestmark = pytest.mark.foreign
SOUND = ("basic_arithmetic", "chain_sum", "gcd", "lcm", "prime_factorization", "simple_equations")


def gym_world(*names):
    env = EnvConfig(name="math", settings={"gym": list(names), "num_tasks": 60, "tool": "none"})
    return build_world(env, Config().rollout)


def answered(text):
    return Trajectory("t", 0, (), (Message(role="assistant", content=text),), StopReason.ANSWERED)


@pytest.mark.parametrize("name", SOUND)
def test_generator_accepts_its_answers_and_no_other(name):
    world = gym_world(name)
    tasks = {split: world.tasks(split) for split in world.splits}
    assert len(tasks["train"]) == 60
    asked = {split: {task.prompt[-1]["content"] for task in found} for split, found in tasks.items()}
    assert not asked["train"] & (asked["validation"] | asked["test"])
    for task in tasks["train"]:
        assert solved(task, answered(task.truth.answer)) == 1
        assert solved(task, answered("no idea")) == 0
        assert solved(task, answered(task.prompt[-1]["content"])) == 0


def test_generators_together_pay_no_cheat():
    report = check_world(gym_world(*SOUND), CheckPlan(num_tasks=60))
    assert report.problems == []
    assert report.shaped == {}


def test_a_generator_that_is_unknown_is_refused():
    with pytest.raises(ConfigError, match="no generator 'chain_sums'"):
        gym_world("chain_sums").tasks("train")
