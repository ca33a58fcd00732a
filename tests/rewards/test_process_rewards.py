"""Scores of turns: StepSearch's gain, subgoals of a plan, and thresholds of a process model."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest

from ludus.config.load import config_from_toml, load_config
from ludus.config.sections.parts.terms import ProcessConfig
from ludus.config.sections.rewards import RewardsConfig
from ludus.config.toml import to_toml
from ludus.envs.registry import build_world
from ludus.errors import ConfigError, UserError
from ludus.rewards.code.turns import turn_shares
from ludus.rewards.exact_match import normalise
from ludus.rewards.process import (
    Retrieval,
    read_subgoals,
    search_gains,
    subgoal_verifier,
    subgoals_of_dialogue,
    subgoals_of_plan,
    write_subgoals,
)
from ludus.rollouts.reward_process import turn_scorer
from ludus.training.collection.rewards.reward_mixing import crossed_shares
from ludus.training.collection.rewards.reward_plan import check_reward_settings
from ludus.training.credit.turn_rewards import shaping_ranges
from ludus.types import Message, Segment, StopReason, Task, ToolOutcome, ToolStatus, Trajectory
from ludus.worlds.search.world import SearchSettings, SearchWorld


def cosine(first: str, second: str) -> float:
    left, right = (Counter(normalise(text).split()) for text in (first, second))
    dot = sum(left[word] * right[word] for word in left | right)
    return dot / math.sqrt(sum(n * n for n in left.values())) / math.sqrt(sum(n * n for n in right.values()))


def test_search_gain_is_new_similarity_minus_repeated_documents():
    gold = ("Oslo lies in Norway", "Norway uses the krone")
    turns = [
        ["Oslo lies in Spain", "Bread is good"],
        ["Oslo lies in Spain", "Norway uses the krone"],
        [],
        [gold[0], gold[0]],
    ]
    best, seen, oracle = [0.0, 0.0], [], []
    for documents in turns:
        now = [max([old, *(cosine(one, text) for text in documents)]) for one, old in zip(gold, best, strict=True)]
        gain = sum(new - old for new, old in zip(now, best, strict=True)) / 2
        again = 0
        for text in documents:
            again += text in seen
            seen.append(text)
        oracle.append(gain - (again / len(documents) if documents else 0))
        best = now
    found = search_gains(Retrieval(turns, gold))
    assert found == pytest.approx(oracle, abs=1e-12)
    assert found[1] == pytest.approx((1 - cosine(gold[1], turns[0][0])) / 2 - 0.5)
    assert found[2] == 0
    assert found[3] == pytest.approx((1 - 0.75) / 2 - 0.5)
    assert search_gains(Retrieval([["a"], ["a"]], ())) == (0.0, -1.0)


def searches(task: Task, *outputs: str) -> Trajectory:
    actions = [Segment("action", (3,), turn, logprobs=(-1.0,), versions=(0,)) for turn in range(len(outputs))]
    outcomes = [ToolOutcome(f"call_{i}_0", "search", ToolStatus.OK, text) for i, text in enumerate(outputs)]
    segments = (Segment("prompt", (1,)), *actions)
    return Trajectory(task.id, 0, segments, task.prompt, StopReason.ANSWERED, tuple(outcomes))


def test_search_world_rewards_each_search_by_its_gain():
    config = load_config(
        "search", ["--rewards.process.source", "search_gain", "--rewards.turn_verifier_weight", "0.05"]
    )
    world = SearchWorld(SearchSettings())
    task = next(one for one in world.tasks("train") if one.tags["hops"] == "2")
    first, second = (hop.passage for hop in world._question(task).hops)
    played = searches(task, first, first, second)
    found = turn_scorer(config.rewards, world)(task, played)
    assert found == pytest.approx(search_gains(Retrieval([[first], [first], [second]], (first, second))))
    assert found[0] > 0.5 > 0 > found[1] == -1.0
    (only,) = shaping_ranges(config.rewards, 4, 1.0)
    assert (only.low, only.high) == (-0.2, 0.05)
    assert SearchWorld(SearchSettings(access="none")).retrieval is None


PROMPT = (Message(role="user", content="Which currency does Oslo use?"),)


def play(*texts: str) -> Trajectory:
    """Alternating messages of the policy and the environment."""
    messages = [Message(role="user" if i % 2 else "assistant", content=text) for i, text in enumerate(texts)]
    actions = [Segment("action", (3,), turn, logprobs=(-1.0,), versions=(0,)) for turn in range((len(texts) + 1) // 2)]
    return Trajectory("t", 0, (Segment("prompt", (1,)), *actions), (*PROMPT, *messages), StopReason.ANSWERED)


def test_subgoals_are_reached_by_observations_only_and_once(tmp_path):
    path = tmp_path / "subgoals.jsonl"
    write_subgoals(path, {"t": ["Oslo lies in Norway", "the Krone", "never"], "other": ["Oslo"]})
    verifier = subgoal_verifier(read_subgoals(path))
    played = play(
        "find krone", "OSLO lies in Norway.", "krone?", "Oslo lies in Norway uses krones", "x", "a Krone!", "krone"
    )
    task = Task("t", PROMPT, None)
    assert turn_shares(verifier(task, played)) == pytest.approx((1 / 3, 0.0, 1 / 3, 0.0))
    assert turn_shares(verifier(Task("unknown", PROMPT, None), played)) == (0.0,) * 4
    for line, why in (
        ("{", "line 2"),
        ('{"task": "x", "subgoals": ["..."]}', "text with words"),
        ('{"task": 1}', "subgoals"),
    ):
        path.write_text(f'{{"task": "a", "subgoals": []}}\n{line}\n')
        with pytest.raises(UserError, match=why):
            read_subgoals(path)


def test_plans_by_rule_and_by_a_model():
    shown = play(
        "search Oslo", "Bread is good\nOslo lies in Norway", "search Norway currency", "Norway uses the krone", "krone"
    )
    assert subgoals_of_dialogue(shown.messages, PROMPT) == ("Oslo lies in Norway", "Norway uses the krone")
    assert subgoals_of_plan("1. Oslo lies in Norway\n- krone\n\n* krone\n...", 8) == ("Oslo lies in Norway", "krone")
    assert subgoals_of_plan("a b\nc d\ne f", 2) == ("a b", "c d")
    world = SearchWorld(SearchSettings())
    task = next(one for one in world.tasks("train") if one.tags["hops"] == "2")
    passages = {hop.passage for hop in world._question(task).hops}
    assert passages & set(subgoals_of_dialogue(world.expert(task).messages, task.prompt))


def test_thresholds_are_crossed_once_in_the_first_turn_above_them():
    assert crossed_shares([0.3, 0.2, 0.6, 0.9, 0.4], [0.25, 0.5, 0.75]) == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3, 0])
    assert crossed_shares([0.8, 0.9], [0.5]) == [1.0, 0.0]
    assert crossed_shares([0.5], [0.5]) == [0.0]


def test_settings_without_effect_are_refused(tmp_path):
    for words, why in (
        ({"process": {"source": "search_gain"}}, "turn_verifier_weight is 0"),
        ({"process": {"thresholds": [0.5]}}, "needs rewards.model"),
    ):
        with pytest.raises(ValueError, match=why):
            RewardsConfig(**words)
    with pytest.raises(ValueError, match="both or neither"):
        ProcessConfig(source="subgoals")
    with pytest.raises(ValueError, match="must increase"):
        ProcessConfig(thresholds=[0.5, 0.5])
    with pytest.raises(ValueError, match="between 0 and 1"):
        ProcessConfig(thresholds=[0.5, 1.0])
    crossed = load_config("search", ["--rewards.process.thresholds", "[0.25, 0.5]", "--rewards.model", "x"])
    assert config_from_toml(to_toml(crossed), "a file", []) == crossed
    config = load_config("guess", ["--algorithm.preset", "turn_grpo", "--rewards.turn_verifier_weight", "0.1"])
    world = build_world(config.env, config.rollout, config.sandbox)
    gain = config.rewards.model_copy(update={"process": ProcessConfig(source="search_gain")})
    with pytest.raises(ConfigError, match="which documents were retrieved"):
        turn_scorer(gain, world)
    with pytest.raises(ConfigError, match="no turn verifier"):
        check_reward_settings(config, world)
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps({"task": "t", "subgoals": ["higher"]}))
    plan = config.rewards.model_copy(update={"process": ProcessConfig(source="subgoals", subgoals=str(path))})
    check_reward_settings(config.model_copy(update={"rewards": plan}), world)
