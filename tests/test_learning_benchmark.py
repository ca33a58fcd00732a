"""The learning benchmarks: verdicts on training modes, and arms and tables of algorithms."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ludus.envs.tool_world import Dialogue, assistant, tool_turn
from ludus.evaluation.evaluate import Evaluation, EvaluationPlan, save_evaluation
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.scheduler import Episode
from ludus.training.datasets.files import read_dialogues
from ludus.types import StopReason, Task, Trajectory
from ludus.worlds.search.questions import Hop, SearchQuestion

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TASKS = tuple(f"test:{i}" for i in range(200))


def evaluated(*rights: int) -> list[Evaluation]:
    """Return one evaluation per seed with this number of solved tasks."""
    plan = EvaluationPlan(split="test", num_tasks=len(TASKS), samples=1, temperature=0.0, seed=0)
    return [
        Evaluation(plan, TASKS, tuple(int(i < right) for i in range(len(TASKS))), ("",) * len(TASKS), {}, 0)
        for right in rights
    ]


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ((160, 160, 160), "yes"),
        ((161, 158, 160), "yes"),
        ((80, 82, 78), "no"),
        ((150, 170, 130), "not shown"),  # over seeds
        ((151, 151, 151), "not shown"),  # over tasks: nine of them were lost
    ],
)
def test_mode_is_no_worse_if_both_intervals_exceed_minus_five_points(found, verdict, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    learning = importlib.import_module("learning")
    gap = learning.less_sync(evaluated(*found), evaluated(160, 160, 160))
    assert gap.verdict == verdict
    assert gap.seeds.mean == pytest.approx(sum(found) / 6 - 80)
    assert gap.tasks.difference == pytest.approx((sum(found) / 6 - 80) / 100)


@pytest.fixture
def algorithms(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("algorithms")


def test_stages_have_equal_episode_and_dialogue_budgets(algorithms, monkeypatch, tmp_path):
    made = []

    def train(folder, recipe, words, stage="train"):
        made.append((stage, dict(zip(words[::2], words[1::2], strict=True))))
        (tmp_path / "run" / "checkpoints" / "step-000015").mkdir(parents=True, exist_ok=True)
        return tmp_path / "run"

    monkeypatch.setattr(algorithms, "train", train)
    monkeypatch.setattr(algorithms, "start_of", lambda name, folder: ("--model.path", "cold"))
    monkeypatch.setattr(algorithms, "last", lambda path, split: evaluated(100)[0])
    asked = SimpleNamespace(game="guess-small", folder=tmp_path, steps=20, seeds=(0,), rates=("4e-4",), parallel=1)
    algorithms.run(asked, algorithms.experiments()["stages"].arms)
    plain, more, mixed, fine, after = made
    assert [stage for stage, _ in made] == ["train", "sft", "train", "sft", "train"]
    assert plain[1]["--training.steps"] == mixed[1]["--training.steps"] == after[1]["--training.steps"] == "20"
    assert int(more[1]["--sft.steps"]) * 32 == 20 * 24 * 8
    assert int(fine[1]["--sft.steps"]) * 32 == 20 * 24
    assert after[1]["--model.path"].endswith("run/checkpoints/step-000015")
    shown = read_dialogues(Path(fine[1]["--sft.data"]))
    assert len({one.task for one in shown}) == len(shown) == 170


def test_table_shows_tagged_tasks_in_separate_columns(algorithms, monkeypatch):
    found = {"grpo": ("1e-4", [Path("a"), Path("b")]), "more SFT": ("1e-4", [Path("c"), Path("d")])}
    rights = dict(zip("abcd", evaluated(100, 110, 50, 60), strict=True))
    shown = {
        "test": lambda path: rights[str(path)],
        "changed": lambda path: algorithms.part(rights[str(path)], TASKS[50:100]),
        "composition": lambda path: rights[str(path)],
    }
    head, line, plain, more = algorithms.table(
        found, "grpo", shown, algorithms.Experiment("", "guess", ())
    ).splitlines()
    assert head.count("|") == line.count("|") == plain.count("|") == more.count("|") == 10
    cells = [cell.strip() for cell in more.split("|")]
    assert cells[3].startswith("27.5 [")
    assert cells[4].startswith("10.0 [")
    assert cells[6].startswith("-25.0 [")
    assert cells[8].startswith("-90.0 [")


def test_a_game_with_a_reward_shows_it_beside_success_sampled_and_greedy(algorithms, tmp_path):
    shown = algorithms.columns(algorithms.games()["reports"])
    assert list(shown) == ["test, rubric", "test", "test, rubric, greedy", "test, greedy"]
    (whole,) = evaluated(1)
    for heat, values in {1.0: (0.25, 0.75), 0.0: (0.5, 1.0)}.items():
        plan = replace(whole.plan, temperature=heat, num_tasks=2)
        trajectories = [
            Trajectory(task, 0, (), (), StopReason.ANSWERED, rewards={"rubric": value})
            for task, value in zip(TASKS, values, strict=False)
        ]
        result = replace(whole, plan=plan, task_ids=TASKS[:2], successes=(0, 1), families=("", ""))
        episodes = [Episode(RolloutKey(0, one.task_id, 0), Task(one.task_id, (), None), one) for one in trajectories]
        save_evaluation(tmp_path / "evaluations", result, episodes)
    rates = [take(tmp_path).rate for take in shown.values()]
    assert rates == [0.5, 0.5, 0.75, 0.5]


def test_table_of_long_episodes_compares_arms_with_the_cold_start_and_with_trained_summaries(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    long_episodes = importlib.import_module("long_episodes")
    rights = {"trained": (160, 170, 180), "masked": (100, 100, 100), "truncated": (20, 40, 60)}
    after = {arm: evaluated(*rights[arm]) for arm in long_episodes.ARMS}
    before = {arm: evaluated(80, 80, 80) for arm in rights}
    table = long_episodes.report(before, after, dict.fromkeys(rights, 1000.0))
    _, _, trained, masked, _ = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert trained[:3] == ["trained", "40.0", "80.0, 85.0, 90.0"]
    assert trained[4].startswith("+45.0 [")
    assert trained[6:8] == ["", ""]
    assert masked[5].startswith("+10.0 [")
    assert masked[6].startswith("-35.0 [")
    assert masked[-1] == "1,000"


def test_dialogues_of_planner_and_workers_keep_the_searches_and_mistakes_of_the_single_agent(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    planner_worker = importlib.import_module("planner_worker")
    hops = (
        Hop("city", "Teuge Airport", "Teuge Airport", "Deventer", (), "Teuge Airport serves Deventer."),
        Hop("country", "Deventer", "Deventer city country", "Netherlands", (), "Deventer is in the Netherlands."),
        Hop("capital", "Netherlands", "Netherlands capital", "Amsterdam", (), "The capital is Amsterdam."),
    )
    question = SearchQuestion("q", "airport/city/country/capital", "The capital of Teuge Airport's country?", hops)
    opening = {"role": "system", "content": "Search."}, {"role": "user", "content": question.text}
    searches = [
        ("Find the answer.", "capital"),
        ("Find the city.", "Teuge Airport"),
        ("Find the country.", "Deventer city country"),
    ]
    turns = [
        tool_turn(i, "search", {"query": query}, "found", reasoning=why) for i, (why, query) in enumerate(searches)
    ]
    messages = (*opening, *(message for turn in turns for message in turn), assistant("Netherlands"))
    *workers, planner = planner_worker.split(Dialogue(messages, ()), question, "delegate")
    assert [len(one.messages) for one in workers] == [7, 5]
    assert workers[0].messages[2:6] == (*turns[0], *turns[1])
    assert [one.messages[1]["content"] for one in workers] == [
        "Which city does Teuge Airport serve?",
        "In which country is Deventer?",
    ]
    assert planner.tools == ("delegate",)
    assert planner.messages[:2] == opening
    assert [message["content"] for message in planner.messages[3::2]] == ["Deventer", "Netherlands"]
    assert planner.messages[-1] == workers[-1].messages[-1] == assistant("Netherlands")  # stops early


def test_table_of_planner_and_workers_has_the_differences_before_and_after_by_seed(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    planner_worker = importlib.import_module("planner_worker")
    (single,), (planner,) = evaluated(80), evaluated(60)
    after = {"single": evaluated(160, 170, 180), "planner": evaluated(100, 130, 130)}
    table = planner_worker.success({"single": single, "planner": planner}, after)
    *_, first, second, less = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert first[1].startswith("40.0 [")
    assert second[4].startswith("+30.0 [")
    assert less[1].startswith("-10.0 [")
    assert [cell.split(" ")[0] for cell in less[2].split("], ")] == ["-30.0", "-20.0", "-25.0"]
    assert less[4].startswith("-25.0 [")
