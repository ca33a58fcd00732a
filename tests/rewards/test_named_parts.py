"""Shaping rewards enabled by name in the settings, in worlds that do not define them."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.algorithms.spec.resolve import PRESETS
from ludus.config import load_config
from ludus.config.sections.rewards import PartConfig
from ludus.config.toml import to_toml
from ludus.envs.registry import build_world
from ludus.errors import ConfigError, WorldError
from ludus.rewards.base import Reward, score
from ludus.rewards.exact_match import ExpectedAnswers
from ludus.rewards.registry import NAMED, RegisteredReward, named_part
from ludus.rollouts.ledger import Ledger, RolloutKey
from ludus.rollouts.reward_executor import ProcessRewardExecutor
from ludus.rollouts.scheduler import Episode, FailureBudget
from ludus.training.collection.rewards.reward_mixing import add_extra_parts, build_reward_mixer
from ludus.training.collection.rewards.reward_plan import check_reward_settings
from ludus.training.collection.rollout_collector import RolloutCollector
from ludus.training.credit.advantages import record_outcomes
from ludus.training.run.session import TrainingSession
from ludus.types import Message, StopReason, Task, ToolOutcome, ToolStatus, Trajectory
from tiny_run import ludus, refused

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "extra_calls": {"free": 1, "limit": 3},
    "extra_turns": {"free": 1, "limit": 3},
    "long_answer": {"free": 2, "limit": 4},
    "repeated_calls": {"cap": 2},
    "language_consistency": {"script": "LATIN"},
}


def settings(*words, recipe="search"):
    config = load_config(recipe, list(words))
    return config, build_world(config.env, config.rollout, config.sandbox)


def part(name, **options):
    given = {"weight": 0.1} | options
    return [word for key, value in given.items() for word in (f"--rewards.extra.{name}.{key}", str(value))]


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


def test_named_parts_are_weighted_and_recorded():
    config, world = settings(
        *part("extra_calls", free=1, limit=3), *part("citation_support", weight=0.05), *part("invalid_calls", cap=2)
    )
    check_reward_settings(config, world)
    scored = asyncio.run(add_extra_parts(ProcessRewardExecutor.of(config), world, attempt(), refuse))
    ((found,),) = build_reward_mixer(config, world, takes_turns=False).combine(1, [[scored]])
    assert found.trajectory.rewards == {
        "exact_match": 1.0,
        "extra_calls": -1.0,
        "citation_support": 1.0,
        "invalid_calls": -0.5,
    }
    assert found.trajectory.reward == pytest.approx(1 - 0.1 + 0.05 - 0.05)


def refuse(error):
    raise error


def test_no_named_parts_are_added_by_default():
    config, world = settings()
    one = build_reward_mixer(config, world, takes_turns=False)
    assert not one.adds
    assert not {part.name for part in one.parts} & {"extra_calls", "citation_support"}


@pytest.mark.parametrize("name", NAMED)
def test_each_part_has_its_name_and_returns_a_number(name):
    if NAMED[name].truth is not None:
        pytest.skip("it reads a truth")
    made = named_part(name, PartConfig(weight=0.1, **OPTIONS.get(name, {})))
    assert (made.name, made.weight, made.outcome) == (name, 0.1, False)
    assert -1 <= made.function(attempt().task, attempt().trajectory) <= 1


def test_parts_are_scored_in_another_process(monkeypatch):
    def nowhere(task, trajectory):
        raise AssertionError("it is scored here")

    config, world = settings(*part("citation_support"))
    monkeypatch.setitem(NAMED, "citation_support", RegisteredReward(lambda: nowhere))
    found = asyncio.run(add_extra_parts(ProcessRewardExecutor.of(config), world, attempt(), refuse))
    assert found.trajectory.rewards == {"exact_match": 1.0, "citation_support": 1.0}
    assert found.trajectory.timings.grading_s > 0


def test_episode_with_a_failed_part_counts_as_failed_in_the_ledger():
    config, world = settings(*part("token_f1"), "--rollout.max_failure_rate", "0.5")
    good = attempt()
    good = replace(good, task=replace(good.task, truth=ExpectedAnswers(("Paris",))))
    odd = replace(attempt(), key=RolloutKey(1, "t", 1))
    session = TrainingSession(config, world, None, None, None)
    ledger = Ledger()
    for episode in (good, odd):
        ledger.start(episode.key)
    one = build_reward_mixer(config, world, takes_turns=False)
    sampler = RolloutCollector(session, None, PRESETS["grpo"], None, ledger, reward_mixer=one)
    credits = asyncio.run(sampler.make_samples(1, [[good, odd]]))
    record_outcomes(ledger, credits)
    counts = ledger.close(1, trained=0)
    assert (counts.failed, counts.dropped) == (1, 1)
    assert "expected ExpectedAnswers" in credits[1].episode.trajectory.failure.error
    strict, _ = settings(*part("token_f1"), "--rollout.max_failure_rate", "0.4")
    sampler.session, sampler.ledger = replace(session, config=strict), Ledger()
    sampler.ledger.start(odd.key)
    with pytest.raises(WorldError, match="expected ExpectedAnswers"):
        asyncio.run(sampler.make_samples(1, [[good, odd]]))


def test_late_scoring_failure_rate_is_relative_to_the_whole_batch():
    """As after a resume: the others have ended since."""
    config, world = settings(*part("token_f1"), "--rollout.max_failure_rate", "0.5")
    odd, task = attempt(), replace(attempt().task, truth=ExpectedAnswers(("Paris",)))
    good = [replace(odd, key=RolloutKey(1, "t", sample), task=task) for sample in (1, 2)]
    one = build_reward_mixer(config, world, takes_turns=False)
    session = TrainingSession(config, world, None, None, None)
    sampler = RolloutCollector(session, None, PRESETS["grpo"], None, Ledger(), reward_mixer=one)
    sampler.ledger.start(odd.key)

    async def credit():
        ended = [await sampler.add_extra_parts(episode, FailureBudget(3)) for episode in good]
        return await sampler.make_samples(1, [[odd, *ended]])

    failed = [credit.episode.trajectory.failure is not None for credit in asyncio.run(credit())]
    assert failed == [True, False, False]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (part("citation_support", cap=2), "citation_support has no option 'cap'. It takes none"),
        (part("extra_calls", free=1), "extra_calls needs limit"),
        (part("extra_calls", free=3, limit=2), "free must be from 0 to below limit"),
        (part("well_formed"), "a part of that name. Set rewards.weights.well_formed"),
        (part("citation_support", weight=0.9), "a failure could earn as much"),
        (part("patch_similarity"), "reads a truth of the type Patch"),
        ([*part("extra_calls", free=1, limit=2), "--env.settings.access", '"none"'], "has no tools"),
    ],
)
def test_invalid_named_parts_raise_config_error(words, said):
    config, world = settings(*words)
    with pytest.raises(ConfigError) as refused:
        check_reward_settings(config, world)
    assert said in str(refused.value)


def test_env_show_lists_named_parts():
    said = ludus("env", "show", "search", *part("citation_support"))
    assert said.code == 0
    assert "reward citation_support: weight 0.1, shaping" in said.out
    plain = shown_reward(ludus("env", "show", "search").out)
    total, parts = shown_reward(said.out)
    assert "citation_support 1" in parts
    assert total == pytest.approx(plain[0] + 0.1)


def test_env_show_scores_with_a_preset_instead_of_the_worlds_parts():
    said = ludus("env", "show", "search", "--rewards.preset", "search_r1").out
    assert "reward exact_match: weight 1, outcome, only in evaluations" in said
    assert "reward exact_match: weight 0.8, outcome\n" in said
    assert shown_reward(said)[0] == 1.0


def shown_reward(out):
    found = re.search(r"reward ([0-9.]+) +\((.*)\)", out)
    return float(found[1]), found[2]


def test_unknown_part_names_in_settings_are_rejected_with_a_suggestion():
    words = ("--rewards.extra.citation_suport.weight", "0.1")
    for command in (("config", "search"), ("train", "search"), ("env", "show", "search")):
        said = refused(*command, *words)
        assert "rewards.extra.citation_suport.source = 'citation_suport' is not known." in said
        assert "Did you mean 'citation_support'?" in said
    odd = refused("config", "search", "--rewards.extra.unlike.weight", "0.1")
    assert f"Choose from: {', '.join(NAMED)}" in odd
    assert "extra_calls needs limit" in refused("config", "search", *part("extra_calls", free=1))
    for key in ("weights.exact_mach", "weights_end.exact_mach", "caps.exact_mach"):
        odd = refused("config", "search", f"--rewards.{key}", "0.5")
        assert "names 'exact_mach', which is not a part of the reward. Did you mean 'exact_match'? Parts:" in odd
    assert "a part of that name" in refused("config", "search", *part("well_formed"))
    added = part("citation_support")
    assert ludus("config", "search", "--rewards.weights.citation_support", "0.1", *added).code == 0
    words = ("--model", "nowhere", "--rewards.weights.exact_mach", "0.5")
    assert "Did you mean 'exact_match'?" in refused("train", "search", *words)
    elsewhere = ludus("config", "--env.name", "not_here.py", "--rewards.gate", "right").out
    assert re.search(r"so the rewards are not checked: \S*/not_here\.py does not exist\.", elsewhere)
    with pytest.raises(ConfigError, match="Did you mean 'citation_support'"):
        named_part("citation_suport", PartConfig(weight=0.1))


def test_custom_part_options_are_the_parameters_of_its_function(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text((ROOT / "examples/plugins/reward.py").read_text("utf-8"), "utf-8")
    words = ("--rewards.extra.mine.source", f"{file}:brief")
    config, _ = settings(*words, "--rewards.extra.mine.options.words", "2")
    text = tmp_path / "saved.toml"
    text.write_text(to_toml(config), "utf-8")
    for saved in (config, load_config(text)):
        function = named_part("mine", saved.rewards.extra["mine"]).function
        said = [
            replace(attempt().trajectory, messages=(Message(role="assistant", content=s),)) for s in ("A b", "A b c")
        ]
        assert [function(attempt().task, one) for one in said] == [1.0, 0.0]
    odd = refused("config", "search", *words, "--rewards.extra.mine.options.letters", "2")
    assert "rewards.extra.mine has no option 'letters'. It takes words." in odd
    assert "words must be at least 1, not 0" in refused(
        "config", "search", *words, *part("mine", **{"options.words": 0})
    )


def test_custom_part_with_a_wrong_signature_is_rejected_with_its_file(tmp_path):
    file = tmp_path / "odd.py"
    file.write_text(
        "from ludus.rewards.registry import RegisteredReward\n"
        "def factory(words=8):\n    return lambda task, trajectory: 1.0\n"
        "forgets = RegisteredReward(lambda: None)\nNUMBER = 3\n",
        "utf-8",
    )
    for name, found in (("factory", "has the parameters (words=8)"), ("forgets", "is None"), ("NUMBER", "is 3")):
        said = refused("config", "search", "--rewards.extra.mine.source", f"{file}:{name}")
        where = f"rewards.extra.mine.source = {file}:{name}"
        assert f"{where} {found}; expected a function of (task, trajectory)." in said


def test_nonnumeric_part_value_is_reported_with_the_part_name():
    with pytest.raises(TypeError, match="reward 'mine' of task t is 'good', not a number"):
        score([Reward("mine", lambda task, trajectory: "good")], attempt().task, attempt().trajectory)
