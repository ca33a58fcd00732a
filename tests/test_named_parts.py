"""Shaping parts that settings switch on by name, in worlds that do not have them."""

import pytest

from ludus.config import load_config
from ludus.envs.registry import build_world
from ludus.errors import ConfigError
from ludus.rewards.named import NAMED, named_part
from ludus.rollout.ledger import RolloutKey
from ludus.rollout.scheduler import Episode
from ludus.training.combine import check_reward_settings, combiner_of
from ludus.types import Message, StopReason, Task, ToolOutcome, ToolStatus, Trajectory
from tiny_run import ludus

OPTIONS = {
    "extra_calls": {"free": 1, "limit": 3},
    "long_answer": {"free": 2, "limit": 4},
    "repeated_calls": {"cap": 2},
    "language_consistency": {"script": "LATIN"},
}


def settings(*words, recipe="search"):
    config = load_config(recipe, list(words))
    return config, build_world(config.env, config.rollout, config.sandbox)


def part(name, **options):
    given = {"weight": 0.1} | options
    return [word for key, value in given.items() for word in (f"--rewards.parts.{name}.{key}", str(value))]


def attempt() -> Episode:
    """Three searches, the last one malformed, and a Latin answer that the second one gave."""
    outcomes = (
        ToolOutcome("a", "search", ToolStatus.OK, "Nothing."),
        ToolOutcome("b", "search", ToolStatus.OK, "The capital is Paris."),
        ToolOutcome("c", "", ToolStatus.MALFORMED, "Error"),
    )
    said = (Message(role="assistant", content="Paris"),)
    trajectory = Trajectory(
        "t", 0, (), said, StopReason.ANSWERED, outcomes=outcomes, rewards={"exact_match": 1.0}, reward=1.0
    )
    return Episode(RolloutKey(1, "t", 0), Task("t", (), None), trajectory)


def test_parts_by_name_count_with_their_weights_and_are_on_record():
    config, world = settings(
        *part("extra_calls", free=1, limit=3),
        *part("citation_support", weight=0.05),
        *part("invalid_calls", cap=2),
    )
    check_reward_settings(config, world)
    ((found,),) = combiner_of(config, world, takes_turns=False).combine(1, [[attempt()]])
    assert found.trajectory.rewards == {
        "exact_match": 1.0,
        "extra_calls": -1.0,
        "citation_support": 1.0,
        "invalid_calls": -0.5,
    }
    assert found.trajectory.reward == pytest.approx(1 - 0.1 + 0.05 - 0.05)


def test_without_settings_nothing_is_added():
    config, world = settings()
    one = combiner_of(config, world, takes_turns=False)
    assert one.preset == ()
    assert not {part.name for part in one.parts} & {"extra_calls", "citation_support"}


@pytest.mark.parametrize("name", NAMED)
def test_each_part_has_its_name_and_gives_a_number(name):
    if NAMED[name].truth is not None:
        pytest.skip("it reads a truth")
    made = named_part(name, 0.1, OPTIONS.get(name, {}))
    assert (made.name, made.weight, made.outcome) == (name, 0.1, False)
    assert -1 <= made.function(attempt().task, attempt().trajectory) <= 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (part("citation_suport"), "no part 'citation_suport'. Did you mean 'citation_support'"),
        (part("citation_support", cap=2), "citation_support has no option 'cap'. It takes none"),
        (part("extra_calls", free=1), "extra_calls needs limit"),
        (part("extra_calls", free=3, limit=2), "free must be from 0 to below limit"),
        (part("well_formed"), "a part of that name. Set rewards.weights.well_formed"),
        (part("citation_support", weight=0.9), "a failure could earn as much"),
        (part("patch_similarity"), "reads a truth of the type Patch"),
        ([*part("extra_calls", free=1, limit=2), "--env.settings.access", "once"], "has no tools"),
    ],
)
def test_parts_that_cannot_be_are_refused(words, said):
    config, world = settings(*words)
    with pytest.raises(ConfigError) as refused:
        check_reward_settings(config, world)
    assert said in str(refused.value)


def test_env_show_tells_of_them():
    said = ludus("env", "show", "search", *part("citation_support"))
    assert said.code == 0
    assert "reward citation_support: weight 0.1, shaping" in said.out
