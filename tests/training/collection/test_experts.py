"""Demonstrations in groups: their sources, their effects, and where they are excluded."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config

from ludus.algorithms import advantages
from ludus.algorithms.spec.resolve import PRESETS
from ludus.chat.render import render_dialogue
from ludus.cli.main import main
from ludus.config.schema import Config
from ludus.config.sections.algorithm import DemonstrationsConfig
from ludus.envs.registry import WORLDS, build_world, closing
from ludus.errors import ConfigError, UserError
from ludus.evaluation.env_audit import CheckPlan, run_agent
from ludus.evaluation.scripted_agents import Agent, AgentKind, actions_of
from ludus.rewards.base import truth_of
from ludus.rollouts.ledger import Ledger, RolloutKey
from ludus.rollouts.rollout_files import read_rollouts
from ludus.rollouts.scheduler import Episode
from ludus.training.collection.demonstrations import Demonstrations, make_demonstrations
from ludus.training.credit.advantages import assign_credit, record_outcomes, training_rows
from ludus.training.credit.roles import EXPERT
from ludus.training.rl.build import train
from ludus.training.rl.train_step import check_samples, filter_and_estimate
from ludus.training.rl.validate import check_experts
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from ludus.worlds.functions.grader import Truth
from small_runs import SMALLEST, InterruptingReporter, RecordingReporter, RunInterrupted, config, lasting_files
from small_worlds import RecordingWorld
from tests.algorithms.test_terms import plain_logprobs
from tests.training.credit.test_credit import real_group, trajectory
from tests.training.learner.test_learner import gradients, largest_difference, learner, tiny_model

MIXED = SMALLEST | {"algorithm__preset": "mixed_policy", "evaluation__tasks": "1"}


def with_expert(episodes):
    one = trajectory(len(episodes), 1.0)
    foreign = tuple(replace(s, agent=EXPERT, logprobs=(), versions=()) for s in one.segments)
    key = RolloutKey(1, "t", len(episodes))
    return [*episodes, Episode(key, episodes[0].task, replace(one, segments=foreign))]


def test_expert_counts_in_its_group_and_uses_policy_shaping():
    model, algorithm = tiny_model(), replace(PRESETS["mixed_policy"], entropy_coef=0.0)
    group = with_expert(real_group((0.0, 0.0, 0.4, 0.0))[0])
    one = learner(model, algorithm)
    check_samples(assign_credit([group], algorithm), one)
    credits = filter_and_estimate(assign_credit([group], algorithm), one, 0)
    rewards = torch.tensor([0.0, 0.0, 0.4, 0.0, 1.0], dtype=torch.float64)
    index, mask = torch.zeros(5, dtype=torch.int64), torch.ones(5, 1, dtype=torch.bool)
    expected = advantages.dr_grpo(rewards=rewards, group=index, mask=mask)[:, 0].tolist()
    assert [credit.advantage for credit in credits] == pytest.approx(expected, abs=1e-12)
    rows = training_rows(credits, mask_observations=True)
    assert [row.expert for row in rows] == [False] * 4 + [True]
    loss = torch.zeros((), dtype=torch.float64)
    for row, gain in zip(rows, expected, strict=True):
        lp = plain_logprobs(model, row)[torch.tensor(row.trains)]
        loss = loss - gain * (lp.exp() / (lp.exp() + 0.1) if row.expert else lp).sum()
    (loss / (5 * one.settings.trajectory_tokens)).backward()
    wanted = gradients(model)
    statistics, _ = one.gradient(rows)
    assert largest_difference(wanted, gradients(model)) < 1e-10
    assert statistics.mismatch.gap_mean < 1e-9
    one.gradient([replace(row, expert=False) for row in rows])
    assert largest_difference(wanted, gradients(model)) > 1e-6


def test_the_ledger_contains_no_demonstrations():
    group = with_expert(real_group()[0])
    ledger = Ledger()
    for episode in group[:-1]:
        ledger.start(episode.key)
    record_outcomes(ledger, assign_credit([group], PRESETS["mixed_policy"]))
    assert ledger.close(1, trained=4).started == 4


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return open_session(config(tmp_path_factory.mktemp("experts"), **MIXED))


@pytest.mark.pages
def test_search_world_provides_demonstrations_with_full_reward(session):
    experts = make_demonstrations(session, PRESETS["mixed_policy"])
    solved = 0
    tasks = session.world.tasks("train")[:20]
    own = [Episode(RolloutKey(3, task.id, 0), task, trajectory(0, 0.0)) for task in tasks]
    groups = asyncio.run(experts.join(3, [[one, one] for one in own]))
    for task, joined in zip(tasks, groups, strict=True):
        for episode in joined[2:]:
            solved += 1
            one = episode.trajectory
            tools = session.world.environment(task).tools
            assert one.rewards["exact_match"] == 1.0
            assert one.segments[0].tokens == tuple(session.renderer.prompt(task.prompt, tools))
            assert episode.key == RolloutKey(3, task.id, 2)
    assert solved >= 15


def test_demonstrations_from_a_file_join_the_named_tasks(session, tmp_path):
    first, second = session.world.tasks("train")[:2]
    asked = [{"role": "user", "content": "What?"}]
    said = [{"role": "assistant", "content": first.truth.accepted[0]}]
    lines = [{"task": first.id, "messages": [*asked, *said]}] * 2
    path = tmp_path / "experts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = session.config.model_copy(
        update={"experts": session.config.experts.model_copy(update={"path": str(path)})}
    )
    experts = make_demonstrations(replace(session, config=settings), PRESETS["mixed_policy"])
    groups = [[Episode(RolloutKey(1, t.id, 0), t, trajectory(0, 0.0))] for t in (first, second)]
    joined = asyncio.run(experts.join(1, groups))
    assert [len(group) for group in joined] == [2, 1]
    assert joined[0][1].trajectory.rewards["exact_match"] == 1.0
    assert joined[0][1].trajectory.messages[0] == first.prompt[0]
    path.write_text(json.dumps({"messages": [*asked, *said]}) + "\n")
    with pytest.raises(UserError, match="has the id of a task"):
        make_demonstrations(replace(session, config=settings), PRESETS["mixed_policy"])


WORLDS_WITH_EXPERTS = {
    "archive": {"num_documents": 12},
    "code": {},
    "functions": {"num_tasks": 40},
    "guess": {},
    "household": {"num_layouts": 20},
    "gui": {"num_tasks": 40},
    "judging": {"num_tasks": 40},
    "math": {"tool": "calculator", "num_tasks": 60},
    "proofs": {"num_tasks": 40},
    "puzzles": {"levels": [1], "num_tasks": 40},
    "research": {"num_tasks": 40},
    "search": {},
    "service": {"num_tasks": 40, "num_held_out": 10},
    "shop": {"num_tasks": 40},
    "sql": {"tasks": 60},
    "terminal": {},
    "web": {"num_tasks": 40},
}
OTHERS = {
    "games": "both players act",
    "proposals": "several agents act",
    "swe": "test_swe_world.py, on a package of its own",
}
NUM_TASKS = 2


def test_every_world_is_listed_with_or_without_experts():
    assert WORLDS_WITH_EXPERTS.keys() | OTHERS.keys() == set(WORLDS)


def of_world(session, name, settings, **rollout):
    """A session of another world with the same renderer, and room for every dialogue."""
    budget = {"max_turns": 16, "max_seq_len": 20_000, "reward_processes": 0} | rollout
    own = Config.model_validate({"env": {"name": name, "settings": settings}, "rollout": budget})
    model = SimpleNamespace(config=GPT2Config(n_positions=30_000))
    return replace(session, config=own, model=model, world=build_world(own.env, own.rollout, own.sandbox))


async def joined_by(session, experts, tasks, step=1):
    own = [[Episode(RolloutKey(step, task.id, 0), task, trajectory(0, 0.0))] for task in tasks]
    async with closing(session.world):
        return [[one.trajectory for one in group[1:]] for group in await experts.join(step, own)]


def spread(tasks):
    """Tasks of every kind: their levels come in turn."""
    return tasks[: NUM_TASKS // 2] + tasks[-(NUM_TASKS // 2) :]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "terminal" else []) for name in WORLDS_WITH_EXPERTS]
)
def test_expert_trajectory_equals_the_oracle_episode(session, name):
    own = of_world(session, name, WORLDS_WITH_EXPERTS[name])
    tasks = spread(own.world.tasks("train"))
    shown = {task.id: one for task in tasks if (one := own.world.expert(task)) is not None}
    oracle = Agent(
        "oracle", AgentKind.ORACLE, "", lambda task, _: actions_of(shown[task.id].messages[len(task.prompt) :])
    )
    plan = CheckPlan(limits=own.config.rollout)

    async def both():
        found = await joined_by(own, make_demonstrations(own, PRESETS["mixed_policy"]), tasks)
        return found, [await run_agent(own.world, task, oracle, plan) for task in tasks if task.id in shown]

    found, plays = asyncio.run(both())
    assert len(plays) > NUM_TASKS / 2
    experts = [one for group in found for one in group]
    assert [one.task_id for one in experts] == [played.task.id for played in plays]
    for expert, played in zip(experts, plays, strict=True):
        real = played.trajectory
        assert expert.rewards == real.rewards
        assert expert.reward == real.reward > 0
        assert [o.status for o in expert.outcomes] == [o.status for o in real.outcomes]
        assert (expert.turn_rewards, expert.stop_reason) == (real.turn_rewards, real.stop_reason)
        assert [m["role"] for m in expert.messages] == [m["role"] for m in real.messages]
        assert {segment.agent for segment in expert.segments} == {EXPERT}
        tools = own.world.environment(played.task).tools
        said = render_dialogue(own.renderer, shown[played.task.id].messages, tools)
        actions = [s.tokens for s in expert.segments if s.kind == "action"]
        assert actions == [s.tokens for s in said if s.kind == "action"]


def test_expert_observations_are_replayed_and_failing_experts_rejected(session, caplog):
    own = of_world(session, "functions", {"num_tasks": 40, "levels": [1]}, max_tool_errors=1)
    task = next(task for task in own.world.tasks("train") if truth_of(task, Truth).right == "call")
    right = list(own.world.expert(task).messages)
    lied = [m | {"content": "made up"} if m["role"] == "tool" else m for m in right]
    mute = [*task.prompt, {"role": "assistant", "content": "Done."}]
    odd = [renamed(m, "nothing") for m in right]
    dialogues = (lied, mute, odd, right[:-1], right * 9)
    given = [[m for m in one if m["role"] == "assistant"] for one in dialogues]
    config = own.config.model_copy(update={"experts": DemonstrationsConfig(per_group=9)})
    experts = Demonstrations(replace(own, config=config), {task.id: given})
    (found,) = asyncio.run(joined_by(own, experts, [task], 4))
    assert [one.rewards["solved"] for one in found] == [1.0, 1.0]
    assert "made up" not in str(found[0].messages)
    assert found[0].segments[2].tokens == own.renderer.observation(found[0].messages[3:4])
    assert [one.sample for one in found] == [1, 2]
    said = [record.getMessage() for record in caplog.records]
    assert "has no positive outcome and ended with answered after 1 turn." in said[0]
    assert "the call of 'nothing' failed (unknown_tool)" in said[1]
    assert "ended with max_turns after 1 turn." in said[2]
    assert (len(said), experts.num_refused(4), experts.num_refused(4)) == (3, 3, 0)
    asyncio.run(joined_by(own, experts, [task], 5))
    assert (len(caplog.records), experts.num_refused(5)) == (3, 3)


def renamed(message, name):
    """The message with every call made to the tool of that name."""
    if "tool_calls" not in message:
        return message
    calls = [one | {"function": one["function"] | {"name": name}} for one in message["tool_calls"]]
    return message | {"tool_calls": calls}


def test_expert_too_long_or_with_broken_environment_is_rejected(session, caplog):
    own = of_world(session, "functions", {"num_tasks": 40}, max_seq_len=300, retries=0)
    tasks = own.world.tasks("train")[:2]
    short = replace(own, model=SimpleNamespace(config=GPT2Config(n_positions=20)))
    assert asyncio.run(joined_by(short, make_demonstrations(short, PRESETS["mixed_policy"]), tasks)) == [[], []]
    assert all("exceeds rollout.max_seq_len" in record.getMessage() for record in caplog.records)
    caplog.clear()
    broken, opened = RecordingWorld(hooks={"start": breaks_first}), []
    experts = Demonstrations(replace(own, world=broken), {"t": [[{"role": "assistant", "content": "Paris"}]]})
    for step in (1, 2, 3):
        (found,) = asyncio.run(joined_by(experts.session, experts, broken.tasks("train"), step))
        opened.append((len(found), experts.num_refused(step), len(broken.made)))
    assert opened == [(0, 1, 1), (1, 0, 2), (1, 0, 2)]
    assert "out of order" in caplog.records[0].getMessage()


async def breaks_first(number):
    if number == 0:
        raise OSError("out of order")


def test_unused_or_missing_demonstrations_are_rejected():
    class World:
        def implements(self, method):
            return False

        name = "mute"

    for settings in ({"path": "some.jsonl"}, {"per_group": 2}):
        given = Config.model_validate({"experts": settings})
        with pytest.raises(ConfigError, match="would have no effect"):
            check_experts(given, PRESETS["grpo"], World())
    with pytest.raises(ConfigError, match="has none"):
        check_experts(Config(), PRESETS["mixed_policy"], World())


def run(folder, reporter):
    settings = config(folder, **MIXED)
    with lock_run(new_run(settings, "search", "rl")):
        train(open_session(settings), RunFolder(folder), reporter)
    return [metrics for _, metrics in reporter.steps]


@pytest.mark.fault
def test_resumed_run_with_experts_equals_the_uninterrupted_one(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    steps = run(whole, RecordingReporter())
    for metrics in steps:
        assert metrics["experts/trained"] > 0
        assert metrics["ledger/started"] == metrics["episodes/count"] == 4
        assert metrics["batch/trained_rows"] == metrics["ledger/trained"] + metrics["experts/trained"]
    records = list(read_rollouts(whole / "rollouts" / "step-000001.jsonl.gz"))
    assert len(records) == 4

    with pytest.raises(RunInterrupted):
        run(cut, InterruptingReporter(2))
    assert main(["train", "--resume", str(cut)]) == 0
    one, other = lasting_files(whole), lasting_files(cut)
    assert [name for name in one if one[name] != other.get(name)] == []
