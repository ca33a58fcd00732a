"""Turn verifiers: what each world rewards, only once, and the path to turn rewards."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace

import pytest

from ludus.config.load import load_config
from ludus.config.sections.rewards import RewardsConfig
from ludus.config.sections.rollout import EnvConfig, MemberConfig, RolloutConfig
from ludus.envs.base import Environment
from ludus.envs.registry import build_world
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError
from ludus.rewards.code.turns import Progress, suite_progress, turn_report, turn_shares
from ludus.rewards.code.unit_tests import Suite
from ludus.rollouts.episode import run_episode
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.rollouts.reward_executor import ProcessRewardExecutor
from ludus.rollouts.rollout_files import RolloutRecord, parse_rollout, rollout_line
from ludus.rollouts.scheduler import Episode
from ludus.sandbox import open_sandbox
from ludus.training.collection.rewards.reward_mixing import build_reward_mixer
from ludus.training.collection.rewards.reward_plan import check_reward_settings
from ludus.training.credit.turn_rewards import events_of, with_turn_rewards
from ludus.training.rl.validate import inactive_parts
from ludus.types import (
    Action,
    Message,
    Segment,
    StepResult,
    StopReason,
    Task,
    ToolCall,
    ToolOutcome,
    ToolStatus,
    Trajectory,
)
from ludus.worlds.code.world import CodeSettings, CodeWorld
from ludus.worlds.functions.world import FunctionsSettings, FunctionsWorld
from ludus.worlds.guess.world import make_guess_world
from ludus.worlds.sql.grader import contains_gold
from ludus.worlds.sql.world import SqlSettings, SqlWorld
from ludus.worlds.terminal.splits import TerminalSettings
from ludus.worlds.terminal.world import TerminalWorld


@dataclass
class Player:
    """Makes the calls of each turn, then answers."""

    turns: list[list[tuple[str, dict]]]
    segments: tuple = ()
    made: list[Segment] = field(default_factory=list)

    def open(self, messages, tools):
        pass

    def observe(self, messages):
        pass

    def close(self):
        self.segments = tuple(self.made)

    async def act(self):
        turn = len(self.made)
        self.made.append(Segment("action", (turn + 1,), turn, logprobs=(-1.0,), versions=(0,)))
        made = self.turns[turn] if turn < len(self.turns) else []
        calls = tuple(ToolCall(f"call_{turn}_{i}", name, args) for i, (name, args) in enumerate(made))
        message = Message(role="assistant", content="" if calls else "done")
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for c in calls
        ]
        return Action(message, calls)


async def play(world, task, *turns):
    limits = RolloutConfig(max_turns=9)
    return await run_episode(task, 0, world.environment(task), Player(list(turns)), limits)


def shares(world, task, *turns):
    """What each turn of an episode earns, by playing it in the world."""
    played = asyncio.run(play(world, task, *turns))
    return turn_shares(world.turn_verifier(task, played))


def calls_of(dialogue):
    """The calls of each turn of a demonstration."""
    return [
        [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]
        for message in dialogue.messages
        if message.get("tool_calls")
    ]


@pytest.mark.parametrize(
    ("reached", "total", "expected"),
    [
        (["a", "a", "ab", ""], 2, (0.5, 0.0, 0.5, 0.0)),
        (["ab", "ab", "ab"], 2, (1.0, 0.0, 0.0)),
        (["", ""], 0, (0.0, 0.0)),
        ([], 3, ()),
    ],
)
def test_milestone_is_credited_to_the_first_turn_that_reaches_it(reached, total, expected):
    assert turn_shares(Progress([set(one) for one in reached], total)) == expected


def test_more_reached_milestones_than_the_task_has_raises_error():
    with pytest.raises(ValueError, match="3 milestones are reached, but the task has 2"):
        turn_shares(Progress([{"a", "b", "c"}], 2))


def test_functions_world_credits_each_gold_call_once():
    world = FunctionsWorld(FunctionsSettings(num_tasks=20, levels=(4,)))
    task = next(t for t in world.tasks("train") if len(t.truth.gold) == 2 and t.truth.gold[1].after)
    first, second = calls_of(world.expert(task))
    wrong = [(first[0][0], {**first[0][1], "no_such_argument": 1})]
    assert shares(world, task, first, second) == (0.5, 0.5, 0.0)
    assert shares(world, task, first, first, [*first, *first], second) == (0.5, 0.0, 0.0, 0.5, 0.0)
    assert shares(world, task, wrong, second) == (0.0, 0.0, 0.0)
    assert shares(world, task) == (0.0,)
    assert FunctionsWorld(FunctionsSettings(access="none")).turn_verifier is None


def test_calls_in_the_prompt_are_not_credited_to_the_policy():
    world = FunctionsWorld(FunctionsSettings(num_tasks=20, levels=(4,)))
    task = next(t for t in world.tasks("train") if len(t.truth.gold) == 2)
    first, _ = calls_of(world.expert(task))
    name, arguments = first[0]
    shown = {"name": name, "arguments": json.dumps(arguments)}
    example = Message(role="assistant", content="")
    example["tool_calls"] = [{"id": "call_0_0", "type": "function", "function": shown}]
    longer = replace(task, prompt=(*task.prompt, example))
    assert shares(world, longer, [(name, {})]) == (0.0, 0.0)


def test_sql_world_credits_a_query_with_the_gold_rows_once():
    world = SqlWorld(SqlSettings(tasks=20, databases=1, domains=("shop",)))
    task = world.tasks("train")[0]
    truth = task.truth
    gold, copied = truth.query.rstrip().rstrip(";"), "SELECT " + ", ".join("'x'" for _ in truth.rows.rows[0])
    right, wrong = [("sql", {"query": gold})], [("sql", {"query": copied})]
    assert shares(world, task, wrong, right, right, [*right, *right]) == (0.0, 1.0, 0.0, 0.0, 0.0)
    assert shares(world, task, [("sql", {"query": "SELECT FROM"})], [("schema", {})]) == (0.0, 0.0, 0.0)
    assert contains_gold(f"SELECT 1, g.* FROM ({gold}) g", truth)
    seen = " UNION ALL ".join(
        "SELECT " + ", ".join("NULL" if v is None else repr(v) for v in row) for row in truth.rows.rows
    )
    assert not contains_gold(seen, truth)  # a copy of the shown rows
    assert not contains_gold(f"SELECT g.*, 1, 2, 3 FROM ({gold}) g", truth)
    assert not contains_gold("SELECT 1 WHERE 0", truth)


REPORT = {"a": True, "b": True, "kept": True, "c": False}
SUITE = Suite(("a", "b", "c"), ("kept",))


def graded(*reports, final=None):
    """An episode with a report of tests after each turn but the last."""
    outcomes = [turn_report(turn, json.dumps({"passed": r})) for turn, r in enumerate(reports) if r]
    if final is not None:
        outcomes.append(ToolOutcome("", "report", ToolStatus.OK, json.dumps({"passed": final})))
    segments = tuple(Segment("action", (1,), turn) for turn in range(len(reports) + 1))
    one = Trajectory("t", 0, segments, (), StopReason.ANSWERED, outcomes=tuple(outcomes))
    return turn_shares(suite_progress("report")(Task("t", (), SUITE), one))


@pytest.mark.parametrize(
    ("reports", "final", "expected"),
    [
        ([REPORT, REPORT], REPORT, (2, 0, 0)),
        ([REPORT | {"b": False}, None, REPORT], REPORT | {"c": True}, (1, 0, 1, 1)),
        ([{"a": True, "kept": True}, {"b": True, "kept": True}], None, (1, 0, 0)),  # each at the other's cost
        ([REPORT | {"kept": False}], REPORT, (0, 2)),
        ([REPORT | {"unknown": True}], None, (2, 0)),
    ],
)
def test_turns_are_credited_for_new_maxima_of_simultaneously_passing_tests(reports, final, expected):
    assert graded(*reports, final=final) == pytest.approx([count / 3 for count in expected])


def test_forged_report_from_a_tool_call_is_ignored():
    said = json.dumps({"passed": dict.fromkeys(REPORT, True), "turn": 0})
    forged = (
        ToolOutcome("call_0_0", "turn_report", ToolStatus.OK, said),
        ToolOutcome("", "turn_report", ToolStatus.UNKNOWN_TOOL, said),
    )
    one = Trajectory("t", 0, (Segment("action", (1,)),), (), StopReason.ANSWERED, outcomes=forged)
    assert turn_shares(suite_progress("report")(Task("t", (), SUITE), one)) == (0.0,)


def test_code_world_credits_programs_by_hidden_tests_without_revealing_them():
    async def act():
        sandbox = open_sandbox()
        try:
            settings = CodeSettings(tasks=20, levels=(1,), styles=("function",), check_turns=True)
            world = CodeWorld(settings).with_sandbox(sandbox)
            task = world.tasks("train")[0]
            known = [(case.given, case.due) for case in task.truth.cases[:3]]
            by_heart = f"def solve(*args):\n    return dict((repr(g), d) for g, d in {known!r}).get(repr(args))\n"
            tries = [[("run_tests", {"code": code})] for code in (by_heart, by_heart, task.truth.reference)]
            return world, task, await play(world, task, *tries, [("run_tests", {"code": by_heart})])
        finally:
            await sandbox.close()

    world, task, played = asyncio.run(act())
    first, again, right, late, answer = turn_shares(world.turn_verifier(task, played))
    assert first == pytest.approx(3 / 15, abs=1 / 15)
    assert (again, late, answer) == (0, 0, 0)
    assert first + right == pytest.approx(1.0)
    assert not any("turn_report" in str(message) for message in played.messages)
    assert len(played.call_outcomes) == 4
    assert CodeWorld(CodeSettings(tasks=20)).turn_verifier is None


def test_terminal_world_credits_newly_satisfied_checks():
    async def act():
        world = TerminalWorld(TerminalSettings(tools="shell", check_turns=True)).with_sandbox(open_sandbox())
        try:
            task = next(t for t in world.tasks("train") if not world.shell_tasks[t.id].services)
            steps = [[("shell", {"command": command})] for command in world.shell_tasks[task.id].steps]
            look = [("shell", {"command": "ls"})]
            return world, task, await play(world, task, look, *steps, look)
        finally:
            await world.close()

    world, task, played = asyncio.run(act())
    found = turn_shares(world.turn_verifier(task, played))
    assert found[0] == found[-1] == found[-2] == 0
    assert sum(found) == pytest.approx(1.0)
    assert TerminalWorld().turn_verifier is None


def test_environment_report_does_not_reset_the_tool_error_streak():
    """Otherwise a report after each turn keeps an episode of failed calls going."""

    class FailingEnvironment(Environment):
        async def start(self, task):
            return []

        async def step(self, action):
            bad = ToolOutcome(action.calls[0].id, "x", ToolStatus.RAISED, "no")
            return StepResult(outcomes=(bad, turn_report(0, "{}")))

    player = Player([[("x", {})]] * 9)
    limits = RolloutConfig(max_turns=9, max_tool_errors=3)
    played = asyncio.run(run_episode(Task("t", (), None), 0, FailingEnvironment(), player, limits))
    assert played.stop_reason is StopReason.TOOL_ERRORS
    assert played.num_turns == 3


def test_turn_progress_from_the_reward_process_is_added_to_turn_rewards():
    own = ["--env.settings.tasks", "20", "--env.settings.databases", "1", "--env.settings.domains", '["shop"]']
    words = ["--algorithm.preset", "turn_grpo", "--rewards.turn_verifier_weight", "0.4"]
    config = load_config("sql", [*own, *words])
    world = build_world(config.env, config.rollout)
    check_reward_settings(config, world)
    task = world.tasks("train")[0]
    right, look = [("sql", {"query": task.truth.query})], [("schema", {})]

    async def judged():
        played = await play(world, task, look, right, right)
        return await ProcessRewardExecutor.of(config).with_added(world, task, played)

    found = asyncio.run(judged())
    assert found.turn_progress == (0.0, 1.0, 0.0, 0.0)
    assert events_of(found) == ["schema", "progress", "sql", "answer"]
    (group,) = build_reward_mixer(config, world, True).combine(1, [[Episode(RolloutKey(1, "t", 0), task, found)]])
    assert group[0].trajectory.turn_rewards == pytest.approx((0.0, 0.4, 0.0, 0.0))
    paid = with_turn_rewards(found, {"progress": 0.1, "sql": -0.01}, 0.4).turn_rewards
    assert paid == pytest.approx((0.0, 0.5, -0.01, 0.0))
    record = RolloutRecord(1, "t", RolloutOutcome.TRAINED, "trained", found)
    assert parse_rollout(json.loads(rollout_line(record))).trajectory.turn_progress == found.turn_progress


def test_mixture_verifies_turns_of_member_worlds_with_a_turn_verifier():
    members = {
        "guess": MemberConfig(settings={"num_tasks": 20}),
        "functions": MemberConfig(settings={"num_tasks": 20, "levels": [4]}),
    }
    world = build_world(EnvConfig(name="mixture", mixture=members), RolloutConfig())
    verifier = world.turn_verifier
    tasks = {task.tags["world"]: task for task in world.tasks("train")}
    silent = Trajectory("t", 0, (Segment("action", (1,)),), (), StopReason.ANSWERED)
    assert turn_shares(verifier(tasks["functions"], silent)) == (0.0,)
    assert turn_shares(verifier(tasks["guess"], silent)) == ()
    alone = build_world(EnvConfig(name="mixture", mixture={"guess": members["guess"]}), RolloutConfig())
    assert alone.turn_verifier is None


GUESS = make_guess_world({"num_tasks": 20}, ToolLimits())


def test_turn_verifier_weight_silences_the_warning_or_is_rejected_if_ineffective():
    def config(*more):
        return load_config("sql", ["--training.minibatches", "2", *more])

    on = ("--rewards.turn_verifier_weight", "0.2")
    sql = SqlWorld()
    (said,) = inactive_parts(config("--algorithm.preset", "turn_grpo"), sql)
    assert "Set rewards.turn_verifier_weight, rewards.turns, or" in said
    assert inactive_parts(config("--algorithm.preset", "turn_grpo", *on), sql) == []
    with pytest.raises(ConfigError, match="turn_verifier_weight would have no effect: the advantage grpo"):
        check_reward_settings(config("--algorithm.preset", "grpo", *on), sql)
    with pytest.raises(ConfigError, match="The world guess has no turn verifier"):
        check_reward_settings(config("--algorithm.preset", "turn_grpo", *on), GUESS)
    heavy = config("--algorithm.preset", "turn_grpo", "--rewards.turn_verifier_weight", "0.9")
    with pytest.raises(ConfigError, match="Shaping"):
        check_reward_settings(heavy, sql)
    assert RewardsConfig(turns={"progress": 0.1}).verifies_turns
