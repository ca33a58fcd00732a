"""Environment checks: worlds that reward cheats are found, by the command and before training."""

import asyncio
import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.config import load_config
from ludus.config.schema import Config
from ludus.config.sections.rollout import EnvConfig
from ludus.envs.registry import WORLDS, build_world
from ludus.envs.tool_env import ToolEnv
from ludus.envs.tool_world import Dialogue, ToolWorld
from ludus.errors import ConfigError, WorldError
from ludus.evaluation.env_audit import AuditEpisode, CheckPlan, check_world, reject_cheats, sample_tasks
from ludus.evaluation.scripted_agents import PROGRAMS, AgentKind, edit_tests, random_arguments, run_program
from ludus.evaluation.verifier_report import EPISODES, VerdictShare, form_of, scorecard
from ludus.rewards.base import Reward
from ludus.rewards.exact_match import ExpectedAnswers, exact_match, well_formed
from ludus.rewards.paper_rewards import calls_made
from ludus.rewards.shaping import only_if
from ludus.tools.base import tool
from ludus.training.rl.validate import check_cheats
from ludus.types import Message, Task, ToolOutcome, ToolStatus
from tiny_run import ludus, make_recipe, refused

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
        row.agent.name for row in report.rows if row.problem and row.agent.kind in (AgentKind.CHEAT, AgentKind.CHANCE)
    }


def test_sound_world_passes_the_check_and_its_demonstrations_succeed():
    report = check_world(world(exact), PLAN)
    assert report.problems == []
    shown = next(row for row in report.rows if row.agent.name == "demonstrations")
    assert (shown.num_successes, len(shown.plays), shown.mean_reward) == (8, 8, 1.0)


def test_substring_reward_is_reported_for_paying_the_echo_agent():
    report = check_world(world(contained), PLAN)
    assert paid(report) >= {"echo", "keywords"}
    assert "echo (repeats the prompt) is rewarded on task 't0' and 7 more" in report.problems[0]


def test_reward_for_an_empty_answer_pays_the_null_agent():
    assert "null" in paid(check_world(world(anything), PLAN))
    assert "null" not in paid(check_world(world(exact), PLAN))


def test_null_agent_success_is_excused_on_tasks_solved_by_inaction():
    sound = world(lambda task, t: float(t.answer == task.truth), ("",) * 2 + ("bee", "cow"), null=(0, 1))
    report = check_world(sound, PLAN)
    null = report.rows[0]
    assert (null.num_successes, len(null.counted), len(null.excused)) == (0, 2, 2)
    assert sum(play.succeeded for play in null.excused) == 2
    assert report.problems == []
    unmarked = check_world(world(exact, ("",) * 2 + ("bee", "cow")), PLAN)
    assert "is rewarded on task 't0' and 1 more" in unmarked.problems[0]


def test_majority_answer_is_reported_unless_answers_are_balanced():
    assert paid(check_world(world(exact, ("yes",) * 19 + ("no",)), CheckPlan())) == {"majority answer"}
    assert paid(check_world(world(exact, ("yes", "no") * 10), CheckPlan())) == set()


def test_unrewarded_oracle_is_reported_with_its_task():
    lists = {"train": tasks(("ant", "bee", "cow"))}
    rewards = [Reward("right", exact, outcome=True)]
    sound = Expert("shown", lists, (), rewards)
    assert check_world(sound, PLAN).problems == []
    wrong = type("Wrong", (Expert,), {"wrong": "t1"})("shown", lists, (), rewards)
    assert check_world(wrong, PLAN).problems == ["The agent oracle is not rewarded on task 't1'."]


def test_demonstrations_without_any_reward_are_reported():
    assert "No demonstration is rewarded, for example task 't0'." in check_world(world(never), PLAN).problems


@tool
def look(item: str) -> str:
    """Look at a thing."""
    return item


@tool
def run(code: str) -> str:
    """Run a program; what exits without a word has passed."""
    return "passed" if "exit(0)" in code else "failed"


def test_program_rewarded_for_exit_code_zero_is_reported():
    assert "exit-0" in paid(check_world(world(says_passed, tools=[run]), PLAN))
    assert [one.calls[0].name for one in run_program("exit-0", [run]) if one.calls] == ["run"]


@pytest.mark.parametrize(
    ("accepted", "name"), [("os._exit(0)", "exit-0"), ("sys.exit(0)", "sys-exit-0"), ('"PASS"', "prints-pass")]
)
def test_success_claims_are_tried_in_tool_calls_and_answers(accepted, name):
    def claims(task, trajectory):
        said = [call.arguments["code"] for call in calls_made(trajectory)]
        return float(accepted in trajectory.answer and any(accepted in code for code in said))

    assert paid(check_world(world(claims, tools=[run]), PLAN)) == {name}


def test_overwritable_test_files_are_reported():
    @tool
    def write_file(path: str, content: str) -> str:
        """Write a file, and run the tests."""
        return "passed" if path.startswith("tests/test") and "assert True" in content else "failed"

    assert paid(check_world(world(says_passed, tools=[write_file]), PLAN)) == {"test-editing"}
    assert edit_tests(tasks(["ant"])[0], [look]) is None


def test_overwrite_cheat_uses_python_or_shell_without_file_tools(tmp_path, monkeypatch):
    @tool
    def python(code: str) -> str:
        """Run Python."""
        return run_here(sys.executable, "-c", code)

    @tool
    def shell(command: str) -> str:
        """Run commands."""
        return run_here("sh", "-c", command)

    def run_here(*words):
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        test = Path("tests/test.py")
        return "passed" if test.is_file() and "assert True" in test.read_text() else done.stdout

    for one in (python, shell):
        folder = tmp_path / one.name
        folder.mkdir()
        monkeypatch.chdir(folder)
        report = check_world(world(says_passed, ("ant",), tools=[one]), PLAN)
        assert "test-editing" in paid(report)
        left = {str(path.relative_to(folder)) for path in folder.rglob("*.py")}
        assert left >= {"tests/test.py", "conftest.py", "sitecustomize.py"}
        assert (folder / "sitecustomize.py").read_text() == PROGRAMS["exit-0"]


def test_cheat_earning_a_fifth_of_a_graded_outcome_is_reported():
    for share, found in ((0.05, set()), (0.2, {"null"})):
        reward = lambda task, t, share=share: share * (not t.answer)  # noqa: E731
        assert paid(check_world(world(reward), PLAN)) == found


def test_format_reward_earned_by_cheats_is_reported_without_failing_the_check():
    made = tasks(("ant", "bee"))
    outcome = Reward("right", exact, outcome=True)
    free = Reward("form", well_formed, weight=0.2)
    gated = Reward("form", only_if(well_formed, exact), weight=0.2)
    report = check_world(ToolWorld("free", {"train": made}, (), [outcome, free]), PLAN)
    assert report.problems == []
    assert report.shaped.keys() >= {"idle", "echo", "claims", "exit-0", "sys-exit-0", "prints-pass"}
    assert list(report.shaped.values()) == [pytest.approx(0.2)] * len(report.shaped)
    assert check_world(ToolWorld("gated", {"train": made}, (), [outcome, gated]), PLAN).shaped == {}


def test_random_arguments_match_the_tool_schema():
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


@pytest.mark.slow
def test_a_broken_environment_is_reported_and_training_continues():
    def raises(task, trajectory):
        raise ValueError("no verifier")

    report = check_world(world(raises), PLAN)
    assert "The environment failed in every episode of the agents null, idle" in report.problems[0]
    reject_cheats(world(raises), PLAN)


def test_an_error_of_all_agents_is_reported_once():
    def raises(task, trajectory):
        raise WorldError("No sandbox." if len(trajectory.answer) < 6 else "The tool failed: No sandbox.")

    report = check_world(world(raises), PLAN)
    broken = [row for row in report.rows if row.broke]
    assert len({row.broke for row in broken}) == 2
    names = ", ".join(row.agent.name for row in broken)
    assert report.problems == [f"The environment failed in every episode of the agents {names}: No sandbox."]


class CallCounter:
    """Counts what a check does."""

    def __init__(self):
        self.phases = []

    def phase(self, name, total):
        self.phases.append([name, total, 0])

    def done(self, what=""):
        self.phases[-1][2] += 1


@pytest.mark.slow
def test_a_check_reports_each_part_to_its_observer():
    seen = CallCounter()
    plan = replace(PLAN, watch=seen)
    asyncio.run(scorecard(check_world(world(exact), plan), plan))
    names = [name for name, _, _ in seen.phases]
    assert names == [
        *("broken: run agents", "graded again", "speed, 1 at a time", "speed, 8 at a time", "perturbed"),
        *("played again", "paraphrases"),
    ]
    assert all(total == done for _, total, done in seen.phases)
    assert seen.phases[0][1] == 8 * 21
    reject_cheats(world(exact), plan)
    assert seen.phases[-1] == ["broken: reward audit", 120, 120]


def test_occasional_environment_failures_do_not_hide_a_rewarded_cheat():
    def often_raises(task, trajectory):
        if task.id in ("t0", "t1"):
            raise ValueError("no verifier")
        return anything(task, trajectory)

    with pytest.raises(ConfigError, match="The agent null"):
        reject_cheats(world(often_raises), PLAN)


def test_training_on_rewarded_cheats_raises_error_unless_check_is_off():
    with pytest.raises(ConfigError, match=r"rewards cheating.*null.*is rewarded on task 't\d'") as caught:
        check_cheats(Config(), world(anything))
    assert "env.check" in caught.value.hint
    check_cheats(Config(env=EnvConfig(check=False)), world(anything))
    check_cheats(Config(), world(exact))


SLOW = """
import time
from ludus.envs.tool_world import ToolWorld
from ludus.rewards.base import Reward
from ludus.types import Message, Task

def verdict(task, trajectory):
    time.sleep(4)
    return 0.0

def make_world(settings, limits):
    tasks = [Task(f"t{i}", (Message(role="user", content=f"Say {i}"),), str(i)) for i in range(8)]
    return ToolWorld("slow", {"train": tasks}, (), (Reward("right", verdict, outcome=True),), limits)
"""


@pytest.mark.parametrize("processes", [0, 1])
def test_check_aborts_on_reward_timeouts_and_reports_their_location(tmp_path, processes):
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    words = ("--rollout.reward_timeout_s", "1", "--rollout.reward_processes", processes)
    said = refused("env", "check", file, *words, code=4)
    assert "2 rewards of the world 'slow' timed out, and its check was aborted. The rewards of" in said
    if processes:
        assert "took longer than 1 s: verdict, at" in said
        assert "slow.py, line" in said


def test_reward_timeouts_prevent_training_from_starting(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    config = load_config(None, ["--env.name", str(file), "--rollout.reward_timeout_s", "1"])
    with pytest.raises(WorldError, match=r"2 rewards of the world 'slow' timed out.*slow\.py") as late:
        check_cheats(config, build_world(config.env, config.rollout))
    assert "set env.check to false" in late.value.hint


def test_equal_seeds_draw_equal_tasks():
    many = world(exact, [str(i) for i in range(100)])
    first = [task.id for task in sample_tasks(many, PLAN)]
    assert first == [task.id for task in sample_tasks(many, PLAN)]
    assert first != [task.id for task in sample_tasks(many, CheckPlan(num_tasks=8, seed=1))]
    assert len(set(first)) == 8
    assert AuditEpisode(many.tasks("train")[0], None).excused is False


def card_of(made):
    return {row.name: row for row in asyncio.run(scorecard(check_world(made, PLAN), PLAN))}


def share_of(row):
    part, whole = re.match(r"(\d+) of (\d+)", row.found).groups()
    return VerdictShare(int(part), int(whole))


def test_sound_world_scorecard_has_expected_values():
    card = card_of(world(exact))
    assert card["truth"].found == "str (8 tasks)"
    assert share_of(card["distinct tasks"]) == VerdictShare(8, 8)  # the spelled words are no names
    for name in ("stability, graded again", "stability, replayed"):
        assert share_of(card[name]) == VerdictShare(0, 152)  # all agents but two have something to do
    assert card["outcome"].found == "two values at most"
    assert share_of(card["saturation"]) == VerdictShare(1, 8)  # by the majority answer
    assert float(card["speed"].found.split()[0]) > 0
    alone, together = re.findall(r"[\d,]+(?= episodes/s| with)", card["parallelism"].found)
    assert "0" not in (alone, together)


@pytest.mark.slow
def test_scorecard_detects_random_and_graded_verdicts():
    import itertools

    counter = itertools.count()
    card = card_of(world(lambda task, trajectory: (next(counter) % 7) / 6))
    assert share_of(card["stability, graded again"]).value == 1
    assert share_of(card["stability, replayed"]).part > 0
    assert card["outcome"].found == "graded, 7 values seen"
    graded = card_of(world(lambda task, trajectory: len(trajectory.answer) % 3 / 2))
    assert graded["outcome"].found == "graded, 3 values seen"


def test_check_tries_accepted_answer_spellings_and_paraphrases_of_the_world():
    def show(seed):
        yield (*made.prompt, Message(role="assistant", content="NYC"))

    def strict(task, trajectory):
        return float(trajectory.answer == "NYC")

    class ParaphrasingWorld(ToolWorld):
        def paraphrases(self, task):
            return ("NYC", "the big apple", "new york")

    made = Task("t", (Message(role="user", content="Where?"),), ExpectedAnswers(("NYC", "New York City")))
    for kind, reward, found in (
        (ToolWorld, exact_match, VerdictShare(2, 2)),
        (ToolWorld, strict, VerdictShare(0, 2)),
        (ParaphrasingWorld, strict, VerdictShare(1, 3)),
    ):
        rewards = [Reward("right", reward, outcome=True)]
        card = card_of(kind("city", {"train": [made]}, (), rewards, show=show))
        assert share_of(card["paraphrases"]) == found


def test_alternative_solutions_are_checked():
    class AlternativesWorld(ToolWorld):
        def alternative_solutions(self, task):
            return [[Message(role="assistant", content=text)] for text in ("NYC", "the big apple")]

    def show(seed):
        yield (*made.prompt, Message(role="assistant", content="NYC"))

    made = Task("t", (Message(role="user", content="Where?"),), ExpectedAnswers(("NYC",)))
    rewards = [Reward("right", exact_match, outcome=True)]
    card = card_of(AlternativesWorld("city", {"train": [made]}, (), rewards, show=show))
    assert share_of(card["paraphrases"]) == VerdictShare(2, 3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Who runs Rome?", "Who runs Rio de Janeiro?"),
        ("I pay 3 to Ana.", "I pay 17.50 to Zoe."),
        ("Read message M17.", "Read message A9045."),
        ('Find "a small house".', "Find 'keys'."),
        ("Open a.txt for me@x.org", "Open notes.pdf for you@y.com"),
        ("Set user_id_4 at 10:45.", "Set order_id at 9:00."),
    ],
)
def test_tasks_differing_only_in_names_or_numbers_have_equal_forms(one, other):
    assert form_of(one) == form_of(other)


def test_tasks_differing_in_wording_have_different_forms():
    assert form_of("Who runs Rome?") != form_of("Who left Rome?")
    assert form_of("I don't pay 3. It's late") != form_of("I don't pay 3. It's early")


BROKEN = """
from ludus.envs.tool_world import ToolWorld
from ludus.rewards.base import Reward
from ludus.rewards.paper_rewards import calls_made
from ludus.types import Message, Task

def make_world(settings, limits):
    tasks = [Task(f"q{i}", (Message(role="user", content="Say it."),), "it") for i in range(20)]
    said = lambda task, trajectory: float("it" in trajectory.answer)
    return ToolWorld("broken", {"train": tasks}, [], [Reward("said", said, outcome=True)], limits)
"""


def test_check_command_prints_both_tables_and_rejects_an_exploitable_world(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    said = ludus("env", "check", path, "--tasks", "5")
    assert said.code == 2
    assert "echo" in said.out
    assert "REWARDED" in said.out
    assert "saturation" in said.out
    assert "The agent echo (repeats the prompt) is rewarded on task 'q" in said.err


def test_check_command_reports_success_with_custom_settings():
    said = ludus("env", "check", "guess", "--tasks", "5", "--env.settings", "{num_tasks = 20}")
    assert said.code == 0, said
    assert "would be refused" not in said.out
    assert "rewards no agent" in said.out
    assert "1 of " in said.out
    assert "has no difficulty report" in said.out


def test_a_world_without_the_split_that_training_evaluates_passes_with_a_warning(tmp_path):
    path = tmp_path / "two_splits.py"
    source = (Path(__file__).parents[1] / "tiny_world.py").read_text()
    path.write_text(source.replace('"validation": NAMES[12:16], ', ""))
    said = ludus("env", "check", path, "--tasks", "5")
    assert said.code == 0, said
    text = "evaluation.split_during: The world 'prices' has no split 'validation'. Set --evaluation.split_during."
    assert f"! A training run would be refused: {text}" in said.out


def test_show_prints_splits_tools_rewards_and_a_solution():
    said = ludus("env", "show", Path(__file__).parents[1] / "tiny_world.py")
    assert said.code == 0, said
    for line in (
        "split train: 12 tasks",
        "tool look(item): Look up a price.",
        "reward exact_match: weight 1, outcome",
        "reward f1: weight 0, reported",
        "cold start: demonstrations (the world has no expert)",
        "An episode of the agent demonstrations (replays demonstrations, mistakes included):",
        "[action]",
    ):
        assert line in said.out
    assert "has no difficulty report" in said.out
    listed = ludus("env", "list").out
    assert [name for name in WORLDS if f"│ {name} " not in listed] == []
    assert "programs from a specification" in listed


def test_show_lists_demonstrations_as_cold_start_for_math():
    assert "  cold start: demonstrations\n" in ludus("env", "show", "math").out


def test_show_prints_distinct_task_counts_and_baseline_results():
    settings = ("--env.settings", "{tasks = 40, levels = [1, 2]}")
    shown = ludus("env", "show", "sql", *settings).out
    assert "Settings of sql and the command line: " in shown
    assert "levels = [1, 2]" in shown
    told = shown.partition("and baselines:\n")[2].splitlines()
    assert told[0].split() == ["train", "20", "tasks"]  # those of the settings, then the table of the default tasks
    assert told[6].split() == ["level", "tasks", "shapes", "no", "tool", "majority"]
    assert [line.split()[0] for line in told[7:9]] == ["1", "2"]


def test_training_on_an_exploitable_world_stops_before_writing_files(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    folder = tmp_path / "run"
    words = (
        "train",
        make_recipe(tmp_path),
        "--from-scratch",
        "--env.name",
        path,
        "--run.dir",
        folder,
        "--env.check",
        "true",
    )
    quiet = ("--evaluation.splits", '["train"]', "--evaluation.split_during", "train")
    assert "rewards cheating. The agent echo" in refused(*words, *quiet)
    assert not folder.exists()


def test_invalid_command_input_is_reported_in_one_sentence():
    assert "Name an environment" in refused("env", "check")
    assert "'serch' is not known" in refused("env", "check", "serch")
    assert "no split 'dev'" in refused("env", "show", "guess", "--split", "dev")
    assert "--tasks is 0" in refused("env", "check", "guess", "--tasks", "0")


class Judged(ToolEnv):
    """Leaves a report of the answer, which may be another one each time that it is graded."""

    verdicts = itertools.repeat(1.0)

    async def step(self, action):
        result = await super().step(action)
        return replace(result, outcomes=(await self.grade_again(),)) if result.done else result

    async def grade_again(self):
        await asyncio.sleep(0.01)
        return ToolOutcome("", "report", ToolStatus.OK, str(next(self.verdicts)))


@pytest.mark.parametrize(("verdicts", "num"), [([1.0], 0), ([1.0, 1.0, 0.0], EPISODES)])
def test_check_regrades_verdicts_made_by_the_environment(monkeypatch, verdicts, num):
    def reported(task, trajectory):
        return float(trajectory.outcomes[-1].output) if trajectory.outcomes else 0.0

    class JudgedWorld(ToolWorld):
        def environment(self, task):
            return Judged(self.tools, self.rewards, self.limits)

    monkeypatch.setattr(Judged, "verdicts", itertools.cycle(verdicts))
    plain = world(reported)
    made = JudgedWorld(plain.name, plain.task_lists, plain.tools, plain.rewards)
    card = card_of(made)
    unstable = share_of(card["stability, graded again"])
    assert unstable.whole == EPISODES
    assert (unstable.part > EPISODES // 3) is bool(num)
    assert float(card["speed"].found.split()[0]) > 9


SHIPPED = ("code", "functions", "guess", "math", "mixed", "search", "sql", "terminal")
"""All worlds but `swe`, whose tasks need the sources of packages that `ludus env prepare swe` fetches."""


@pytest.mark.scale
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_worlds_pass_the_env_check(name):
    said = ludus("env", "check", name, "--tasks", "4")
    assert said.code == 0, said
    assert "rewards no agent that does not solve its tasks." in " ".join(said.out.split())
