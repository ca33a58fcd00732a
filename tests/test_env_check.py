"""Environments check themselves: worlds that pay a cheat are found, by the command and before training."""

import pytest

from ludus.config.schema import Config, EnvConfig
from ludus.envs.tool_world import Dialogue, ToolWorld
from ludus.errors import ConfigError
from ludus.evaluation.agents import Kind, edit_tests, exit_zero
from ludus.evaluation.arguments import random_arguments
from ludus.evaluation.check import CheckPlan, Play, check_world, refuse_cheats, some_tasks
from ludus.rewards.base import Reward
from ludus.rollout.episode import EpisodeLimits
from ludus.tools.base import tool
from ludus.training.start import check_cheats
from ludus.types import Message, Task

PLAN = CheckPlan(num_tasks=8)


def exact(task, trajectory):
    return float(trajectory.answer == task.truth)


def never(task, trajectory):
    return 0.0


def contained(task, trajectory):
    """Wants the words of the truth somewhere, and the prompt has them."""
    return float(str(task.truth) in trajectory.answer)


def anything(task, trajectory):
    return float(not trajectory.answer.startswith("no"))


def says_passed(task, trajectory):
    return float(any(outcome.output == "passed" for outcome in trajectory.outcomes))


def tasks(truths, null=()):
    return [
        Task(
            f"t{i}",
            (Message(role="user", content=f"Say {2 * i} and then spell it {truth}"),),
            truth,
            {"null": "true" if i in null else "false"},
        )
        for i, truth in enumerate(truths)
    ]


def world(reward, truths=("ant", "bee", "cow", "dog", "eel", "fox", "gnu", "hen"), tools=(), **more):
    def show(seed):
        for task in made:
            yield (*task.prompt, Message(role="assistant", content=str(task.truth)))

    made = tasks(truths, **more)
    return ToolWorld("broken", {"train": made}, tools, [Reward("right", reward, outcome=True)], show=show)


class Expert(ToolWorld):
    """A world with an oracle, which is wrong about the task named by `wrong`."""

    wrong = ""

    def expert(self, task):
        said = "no idea" if task.id == self.wrong else str(task.truth)
        return Dialogue((*task.prompt, Message(role="assistant", content=said)), ())


def paid(report):
    return {
        row.agent.name for row in report.rows if row.problem and row.agent.kind in (Kind.CHEAT, Kind.CHANCE)
    }


def test_a_sound_world_has_no_problems_and_its_demonstrations_succeed():
    report = check_world(world(exact), PLAN)
    assert report.problems == []
    shown = next(row for row in report.rows if row.agent.name == "demonstrations")
    assert (shown.num_successes, len(shown.plays), shown.mean_reward) == (8, 8, 1.0)


def test_a_reward_that_looks_for_the_answer_anywhere_pays_the_echo_and_no_other():
    report = check_world(world(contained), PLAN)
    assert paid(report) == {"echo"}
    assert "echo (repeats the prompt) is paid on task 't0' and 7 more" in report.problems[0]


def test_a_reward_for_an_empty_answer_pays_null():
    assert "null" in paid(check_world(world(anything), PLAN))
    assert "null" not in paid(check_world(world(exact), PLAN))


def test_where_doing_nothing_is_right_a_cheat_may_be_paid_and_is_counted_apart():
    sound = world(lambda task, t: float(t.answer == task.truth), ("",) * 2 + ("bee", "cow"), null=(0, 1))
    report = check_world(sound, PLAN)
    null = report.rows[0]
    assert (null.num_successes, len(null.counted), len(null.excused)) == (0, 2, 2)
    assert sum(play.succeeded for play in null.excused) == 2
    assert report.problems == []
    unmarked = check_world(world(exact, ("",) * 2 + ("bee", "cow")), PLAN)
    assert "is paid on task 't0' and 1 more" in unmarked.problems[0]


def test_one_frequent_answer_is_found_and_a_fair_coin_is_not():
    assert paid(check_world(world(exact, ("yes",) * 19 + ("no",)), CheckPlan())) == {"majority answer"}
    assert paid(check_world(world(exact, ("yes", "no") * 10), CheckPlan())) == set()


def test_an_oracle_that_is_not_paid_is_found_with_its_task():
    lists = {"train": tasks(("ant", "bee", "cow"))}
    rewards = [Reward("right", exact, outcome=True)]
    sound = Expert("shown", lists, (), rewards)
    assert check_world(sound, PLAN).problems == []
    wrong = type("Wrong", (Expert,), {"wrong": "t1"})("shown", lists, (), rewards)
    assert check_world(wrong, PLAN).problems == ["The agent oracle is not paid on task 't1'."]


def test_demonstrations_of_which_none_is_paid_are_found():
    assert "No demonstration is paid, not that of task 't0'." in check_world(world(never), PLAN).problems


@tool
def run(code: str) -> str:
    """Run a program; what exits without a word has passed."""
    return "passed" if "exit(0)" in code else "failed"


def test_an_exit_that_counts_as_a_pass_is_found():
    assert "exit-0" in paid(check_world(world(says_passed, tools=[run]), PLAN))
    assert [one.calls[0].name for one in exit_zero([run]) if one.calls] == ["run"]


def test_tests_that_can_be_overwritten_are_found():
    @tool
    def write_file(path: str, content: str) -> str:
        """Write a file, and run the tests."""
        return "passed" if path.startswith("tests/test") and "assert True" in content else "failed"

    assert paid(check_world(world(says_passed, tools=[write_file]), PLAN)) == {"test-editing"}
    assert edit_tests(tasks(["ant"])[0], [run]) is None


def test_random_arguments_fit_what_the_tool_takes():
    import random
    from typing import Literal

    @tool
    def odd(mode: Literal["a", "b"], sizes: list[int], share: float, name: str | None = None) -> str:
        """Odd."""
        return ""

    drawn = [random_arguments(odd, random.Random(seed), ("x", "y")) for seed in range(40)]
    assert all(odd.check(arguments) for arguments in drawn)
    assert {arguments["mode"] for arguments in drawn} == {"a", "b"}
    assert {"name" in arguments for arguments in drawn} == {True, False}


def test_an_environment_that_breaks_is_said_and_does_not_stop_training():
    def raises(task, trajectory):
        raise ValueError("no verifier")

    report = check_world(world(raises), PLAN)
    assert "The environment broke in every episode of the agent null" in report.problems[0]
    refuse_cheats(world(raises), EpisodeLimits())


def test_training_is_refused_with_agent_and_task_unless_the_check_is_off():
    with pytest.raises(ConfigError, match=r"pays for cheating.*null.*is paid on task 't\d'") as caught:
        check_cheats(Config(), world(anything))
    assert "env.check" in caught.value.hint
    check_cheats(Config(env=EnvConfig(check=False)), world(anything))
    check_cheats(Config(), world(exact))


def test_equal_seeds_draw_equal_tasks():
    many = world(exact, [str(i) for i in range(100)])
    first = [task.id for task in some_tasks(many, PLAN)]
    assert first == [task.id for task in some_tasks(many, PLAN)]
    assert first != [task.id for task in some_tasks(many, CheckPlan(num_tasks=8, seed=1))]
    assert len(set(first)) == 8
    assert Play(many.tasks("train")[0], None).excused is False
