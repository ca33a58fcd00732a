"""Sub-agents: `delegate` runs the policy on a subtask, and its dialogue is a row of the rollout."""

import asyncio

import pytest

from ludus.algorithms.spec.resolve import PRESETS
from ludus.config.schema import Config
from ludus.config.sections.rollout import ContextConfig, RolloutConfig, SubagentsConfig
from ludus.envs.registry import build_world
from ludus.errors import ConfigError, ToolFault
from ludus.rollouts.dialogues.context import ManagedChatSession
from ludus.rollouts.dialogues.subagents import SubAgents
from ludus.rollouts.episode import scored
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.scheduler import Episode
from ludus.tools.base import tool
from ludus.training.batches.rows import row_of_trajectory
from ludus.training.credit.advantages import assign_credit
from ludus.training.rl.validate import check_agents
from ludus.types import Message, StopReason, Task, ToolStatus
from scripted_engine import Faults
from small_worlds import RecordingWorld, call, echo, make_chat, make_requests, make_scheduler, make_task, scripted
from small_worlds import tokenizer as small_tokenizer

ASK = call("delegate", task="Which city is the capital?")
ECHO = call("echo", text="Paris")
TASK = Task("t", (Message(role="system", content="Answer the question."), *make_task().prompt), "Paris")


def by_agent(**lines):
    """An engine with the replies of each agent: `main`, `sub0`, `sub0_1`, ..."""

    def script(request, turn):
        name = request.episode.partition("~")[2].replace(".", "_")
        return lines[f"sub{name}" if name else "main"][turn]

    return scripted(script)


def limits_of(max_depth=1, **settings):
    return RolloutConfig(subagents=SubagentsConfig(max_depth=max_depth, **settings))


def play(engine, limits=None, world=None, serial=False, make=make_chat):
    world = world or RecordingWorld()
    environment = world.environment(TASK)
    runs = SubAgents(TASK, 0, lambda: make(engine), limits or limits_of(), serial=serial).run(environment)
    return scored(environment.rewards, TASK, asyncio.run(runs))


def texts(trajectory):
    rows = [[t for i in row for t in trajectory.segments[i].tokens] for row in trajectory.rows]
    return [small_tokenizer().decode(row) for row in rows]


def test_subtask_is_a_row_with_the_tools_of_the_environment_and_its_answer_is_the_output():
    engine = by_agent(main=[ASK, "Paris"], sub0=[ECHO, "It is Paris."])
    found = play(engine)
    assert (found.stop_reason, found.reward, found.shared_reward) == (StopReason.ANSWERED, 1.0, True)
    assert [m["content"] for m in found.messages if m["role"] == "tool"] == ["It is Paris."]
    main, sub = texts(found)
    assert "It is Paris." in main
    assert "Which city is the capital?" in sub
    assert "Answer the question." in sub
    assert "capital of France" not in sub
    agents = [found.segments[row[-1]].agent for row in found.rows]
    assert agents == ["policy", "sub/0"]
    # what the engine was sent is what is recorded, token by token
    rows = [[t for i in row for t in found.segments[i].tokens] for row in found.rows]
    for request in engine.requests:
        assert any(tuple(row[: len(request.token_ids)]) == request.token_ids for row in rows)
    assert sorted(engine.released) == ["e", "e~0"]


def test_outcomes_of_sub_agents_are_those_of_the_episode_with_turns_after_its_own():
    found = play(by_agent(main=[ECHO, ASK, "Paris"], sub0=[ECHO, "Paris"]))
    assert [(one.tool, one.call_id) for one in found.outcomes] == [
        ("echo", "call_0_0"),
        ("delegate", "call_1_0"),
        ("echo", "call_3_0"),
    ]
    actions = [segment.turn for segment in found.segments if segment.kind == "action"]
    assert actions == [0, 1, 2, 3, 4]


def test_calls_of_one_turn_run_at_the_same_time():
    arrived = set()

    async def both():
        arrived.add(len(arrived))
        async with asyncio.timeout(5):
            while len(arrived) < 2:
                await asyncio.sleep(0.001)
        return "met"

    world = RecordingWorld(tools=(echo, tool(name="meet")(both)))
    lines = {f"sub{i}": [call("meet"), f"answer {i}"] for i in range(2)}
    found = play(by_agent(main=[f"{ASK}\n{ECHO}\n{ASK}", "Paris"], **lines), world=world)
    results = [m["content"] for m in found.messages if m["role"] == "tool"]
    assert results == ["answer 0", "Paris", "answer 1"]  # in the order of the calls
    assert [one.tool for one in found.outcomes[:3]] == ["delegate", "echo", "delegate"]
    assert len(found.rows) == 3


@pytest.mark.parametrize(
    ("sub", "settings", "text"),
    [
        ([ECHO, ECHO], {"max_turns": 2}, "ended without an answer (max_turns)"),
        ([call("no_tool")] * 3, {}, "ended without an answer (tool_errors)"),
        ([""], {}, "ended without an answer (empty_answer)"),
        (["Paris " * 200], {}, "ended without an answer (truncated)"),
        (["unused"], {"prompt": "Paris " * 2000}, "ended without an answer (prompt_too_long)"),
    ],
)
def test_limits_of_a_sub_agent_are_tool_errors(sub, settings, text):
    found = play(by_agent(main=[ASK, "Paris"], sub0=sub), limits_of(**settings))
    (outcome,) = [one for one in found.outcomes if one.tool == "delegate"]
    assert (outcome.status, found.reward) == (ToolStatus.RAISED, 1.0)
    assert len(found.rows) == (1 if "prompt" in text else 2)
    assert text in outcome.output


def test_subtasks_are_bounded_per_agent_and_by_depth():
    engine = by_agent(main=[ASK, ASK, "Paris"], sub0=["no idea"])
    found = play(engine, limits_of(max_per_agent=1))
    assert [one.status for one in found.outcomes] == [ToolStatus.OK, ToolStatus.RAISED]
    assert "at most 1 subtasks" in found.outcomes[1].output
    found = play(by_agent(main=[ASK, "Paris"], sub0=[ASK, "no idea"]), limits_of(max_depth=1))
    assert ToolStatus.UNKNOWN_TOOL in [one.status for one in found.outcomes]
    nested = by_agent(main=[f"{ASK}\n{ASK}", "Paris"], sub0=[ASK, "a"], sub1=["b"], sub0_0=[ECHO, "c"])
    found = play(nested, limits_of(max_depth=2))
    assert [found.segments[row[-1]].agent for row in found.rows] == ["policy", "sub/0", "sub/0/0", "sub/1"]


def test_planner_lacks_the_tools_of_its_workers():
    world = RecordingWorld(tools=(echo, tool(name="other")(lambda: "x")))
    limits = limits_of(exclusive=True, tools=["echo"])
    found = play(by_agent(main=[ECHO, call("other"), ASK, "Paris"], sub0=[call("other"), ECHO, "Paris"]), limits, world)
    assert [(one.tool, one.status) for one in found.outcomes] == [
        ("echo", ToolStatus.UNKNOWN_TOOL),
        ("other", ToolStatus.OK),
        ("delegate", ToolStatus.OK),
        ("other", ToolStatus.UNKNOWN_TOOL),
        ("echo", ToolStatus.OK),
    ]
    main, sub = texts(found)
    assert '"delegate"' in main
    assert '"delegate"' not in sub


def test_failure_of_the_engine_in_a_sub_agent_is_one_of_the_episode():
    def script(request, turn):
        return ASK if "~" not in request.episode else "Paris"

    with pytest.raises(ToolFault, match="delegate failed: Scripted failure"):
        play(scripted(script, faults=Faults(fail_at=[1])))


def test_deadlines_of_tools_and_steps_do_not_run_while_a_sub_agent_works():
    async def slow():
        await asyncio.sleep(0.05)
        return "x"

    world = RecordingWorld(tools=(tool(name="slow", timeout_s=5)(slow),))
    limits = limits_of().model_copy(update={"environment_timeout_s": 0.09, "tool_timeout_s": 0.02})
    found = play(by_agent(main=[ASK, "Paris"], sub0=[call("slow")] * 3 + ["Paris"]), limits, world)
    assert [one.status for one in found.outcomes] == [ToolStatus.OK] * 4


def test_rollout_with_sub_agents_is_one_member_of_its_group():
    long = play(by_agent(main=[ASK, "Paris"], sub0=[ECHO, "Paris"]))
    short = play(by_agent(main=["Lyon"]))
    group = [Episode(RolloutKey(1, "t", i), TASK, one) for i, one in enumerate((long, short))]
    first, second = assign_credit([group], PRESETS["grpo"])
    assert len(first.advantages) == long.num_action_tokens
    assert set(first.advantages) == {-value for value in second.advantages}
    row = row_of_trajectory(long, first.advantages)
    assert sum(row.trains) == sum(len(s.tokens) for s in long.segments if s.kind == "action")
    assert sum(s.agent == "sub/0" and s.kind == "action" for s in long.segments) == 2


def test_sub_agents_of_a_managed_dialogue_are_managed():
    def make(engine):
        return ManagedChatSession(make_chat(engine), ContextConfig(max_tokens=500, keep_turns=0))

    long = call("echo", text="The capital of a large country in the middle of Europe is Paris. " * 2)
    engine = by_agent(main=[ASK, "Paris"], **{"sub0": [long, long, "summary"], "sub0~1": ["Paris"]})
    found = play(engine, make=make)
    assert [found.segments[row[-1]].agent for row in found.rows] == ["policy", "sub/0", "sub/0"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rollout": {"partial": {"tokens": 10}}}, r"rollout\.partial does not apply to episodes with sub-agents"),
        ({"rollout": {"agent": {"command": ["a"]}}}, r"rollout\.subagents does not apply to episodes of agents"),
        ({"env": {"rendering": "tags"}}, "env.rendering = 'tags' does not apply"),
        (
            {"env": {"name": "guess"}, "rollout": {"subagents": {"max_depth": 1, "tools": ["serch"]}}},
            "names 'serch', which is not a tool of 'guess'",
        ),
    ],
)
def test_settings_that_do_not_apply_are_refused(changes, text):
    rollout = {"subagents": {"max_depth": 1}, **changes.get("rollout", {})}
    config = Config.model_validate({**changes, "rollout": rollout})
    with pytest.raises(ConfigError, match=text):
        check_agents(config, build_world(config.env, config.rollout))


def test_lockstep_runs_sub_agents_one_after_another_with_the_same_tokens():
    def script(request, turn):
        return ([ECHO, "Paris"] if "~" in request.episode else [f"{ASK}\n{ASK}", "Paris"])[turn]

    limits = limits_of(max_depth=1)
    found = []
    for lockstep in (True, False):
        scheduler = make_scheduler(scripted(script), RecordingWorld(), limits, lockstep=lockstep)
        episodes = asyncio.run(scheduler.run(make_requests(3, samples=2)))
        assert all(one.trajectory.failure is None for one in episodes)
        found.append([one.trajectory.segments for one in episodes])
    assert found[0] == found[1]
    assert {len([s for s in one if s.kind == "prompt"]) for one in found[0]} == {3}


def test_sub_agents_use_the_adapter_of_their_role():
    adapters = []

    def script(request, turn):
        adapters.append((request.episode.partition("~")[2], request.adapter))
        return "Paris" if "~" in request.episode else [ASK, "Paris"][turn]

    engine = scripted(script)
    engine.roles = ("sub",)
    trajectory = play(engine)
    assert adapters == [("", None), ("0", "role_sub"), ("", None)]
    assert {(s.agent, s.policy) for s in trajectory.segments} == {("policy", ""), ("sub/0", "role_sub")}
    row = row_of_trajectory(trajectory, 1.0)
    assert len(row.policies) == len(row.tokens)
