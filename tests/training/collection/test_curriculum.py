"""Curricula: SEC, weights by success, stages with gates, new tasks, perplexity, and resuming."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import pytest

from ludus.algorithms.curricula import CurriculumState, learnability, sec_probabilities, sec_update, target_weight
from ludus.algorithms.spec.resolve import PRESETS
from ludus.cli.main import main
from ludus.config.load import config_from_toml
from ludus.config.sections.curriculum import CurriculumConfig, EvolveConfig, StageConfig
from ludus.diagnostics.history import GATE, STAGE, passed_gates
from ludus.envs.base import TaskOrder, World
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError
from ludus.recipes import recipe_folder
from ludus.rewards.base import Reward
from ludus.training.collection.curriculum import Curriculum
from ludus.training.collection.filters import AlgorithmState
from ludus.training.collection.rewards.reward_mixing import build_reward_mixer
from ludus.training.collection.task_categories import PERPLEXITY_FILE, categories, check_curriculum, stages_of
from ludus.training.credit.advantages import assign_credit
from ludus.training.rl.build import train
from ludus.training.run.checkpoint import checkpoint_path
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from ludus.types import Message, Task
from ludus.worlds.math.world import make_math_world
from ludus.worlds.puzzles.world import make_puzzles_world
from small_runs import SMALLEST, InterruptingReporter, RecordingReporter, RunInterrupted, config, lasting_files
from tests.training.credit.test_credit import group
from tiny_run import WORLD

LEVELS = {f"t{i}": str(1 + i % 3) for i in range(18)}


@dataclass(frozen=True)
class Levels(World):
    """Eighteen tasks of three levels; a variant has the parent's level and a number in its prompt."""

    name: str = "levels"
    rewards = (Reward("right", lambda task, trajectory: 0.0, outcome=True),)
    splits = ("train", "test")

    def tasks(self, split):
        names = LEVELS if split == "train" else {"held": "1"}
        return [Task(n, (Message(role="user", content=n * 9),), None, {"level": lv}) for n, lv in names.items()]

    def environment(self, task):
        raise NotImplementedError

    def variant(self, task, rng):
        return replace(task, prompt=(Message(role="user", content=f"{task.id} {rng.random()}"),))


def curriculum(**settings) -> Curriculum:
    section = CurriculumConfig(**settings)
    own = categories(section, Levels()) if section.has_categories else {}
    return Curriculum(section, Levels(), 0, "right", stages_of(section, Levels().tasks("train"), own), own)


def samples_of(rewards: dict[str, tuple[float, ...]]):
    groups = []
    for name, own in rewards.items():
        members = group(own, name)
        of = [replace(e, trajectory=replace(e.trajectory, rewards={"right": e.trajectory.reward})) for e in members]
        groups.append(of)
    return assign_credit(groups, PRESETS["grpo"])


ORDER = TaskOrder(Levels().tasks("train"), 0, 3)


def test_sec_by_hand_over_five_steps():
    """Q after each step for level 1 always half solved, level 2 once, level 3 never different."""
    one = curriculum(order="bandit", tau=0.4)
    half, q = (1.0, 1.0, 0.0, 0.0), {"1": 0.0, "2": 0.0, "3": 0.0}
    state = CurriculumState()
    for step in range(1, 6):
        rewards = {"t0": half, "t2": (0.0,) * 4} | ({"t1": (1.0, 0.0, 0.0, 0.0)} if step == 1 else {})
        state, metrics = one.record(state, samples_of(rewards), step)
        size = {"1": 0.5 / math.sqrt(1 / 3)} | ({"2": (0.75 + 3 * 0.25) / 4 / 0.5} if step == 1 else {})
        q = {name: 0.5 * value + 0.5 * size.get(name, 0.0) for name, value in q.items()}
        assert state.q == pytest.approx(q, abs=1e-5)
        total = sum(math.exp(value / 0.4) for value in q.values())
        for name, value in q.items():
            assert metrics[f"curriculum/p/{name}"] == pytest.approx(math.exp(value / 0.4) / total, abs=1e-5)
    assert q["2"] == pytest.approx(0.75 / 2**5)
    assert sec_update({"a": 1.0, "b": 2.0}, {"a": 3.0}, 0.25) == {"a": 1.5, "b": 1.5}
    assert sec_probabilities({"a": 1e4, "b": 0.0}, 0.2) == {"a": 1.0, "b": 0.0}


def test_bandit_draws_categories_by_their_probabilities_and_no_task_twice():
    one, state = (
        curriculum(order="bandit"),
        AlgorithmState(curriculum=CurriculumState(q={"1": 2.0, "2": 1.0, "3": 0.0})),
    )
    drawn: Counter[str] = Counter()
    for step in range(1, 501):
        chosen = one.choose(ORDER, 2, state, set(), step)
        assert len({task.id for task in chosen.tasks}) == 2
        drawn.update(task.tags["level"] for task in chosen.tasks)
        state = chosen.state
    total = sum(math.exp(q) for q in (2, 1, 0))
    for level, q in {"1": 2, "2": 1, "3": 0}.items():
        assert drawn[level] / 1000 == pytest.approx(math.exp(q) / total, abs=0.05)
    again = one.choose(ORDER, 18, state, {"t0"}, 1)
    assert {task.id for task in again.tasks} == LEVELS.keys() - {"t0"}
    assert again == one.choose(ORDER, 18, state, {"t0"}, 1)


@pytest.mark.parametrize(("order", "weight"), [("target", target_weight), ("learnability", learnability)])
def test_tasks_are_drawn_by_weight_of_their_success(order, weight):
    one = curriculum(order=order)
    means = {"t0": (1.0,) * 4, "t3": (1.0, 1.0, 0.0, 0.0), "t1": (0.0,) * 4}
    state, _ = one.record(CurriculumState(), samples_of(means), 1)
    assert state.success == {"t0": 1.0, "t3": 0.5, "t1": 0.0}
    assert state.by_category == pytest.approx({"1": 0.75, "2": 0.0})
    tasks = {task.id: task for task in Levels().tasks("train")}
    known = {"t0": 1.0, "t3": 0.5, "t1": 0.0, "t6": 0.75, "t4": 0.0}
    assert {n: one.weight(tasks[n], state) for n in known} == {n: weight(p) for n, p in known.items()}
    assert one.weight(tasks["t2"], state) == 1.0
    weights = {name: one.weight(task, state) for name, task in tasks.items()}
    drawn: Counter[str] = Counter()
    after = AlgorithmState(curriculum=state)
    for step in range(1500):
        chosen = one.choose(ORDER, 1, after, set(), step)
        after = chosen.state
        drawn[chosen.tasks[0].id] += 1
    for name in ("t0", "t3", "t6", "t2"):
        assert drawn[name] / 1500 == pytest.approx(weights[name] / sum(weights.values()), abs=0.03)


def test_weights_have_their_maximum_at_the_target_and_a_floor():
    assert [target_weight(p, 0.25) for p in (0.25, 0.0, 1.0)] == pytest.approx([1.0, 2 / 3, 0.05])
    assert [learnability(p) for p in (0.5, 0.1, 0.0)] == pytest.approx([1.0, 0.36, 0.05])


def test_gate_opens_above_the_success_of_the_last_groups_only():
    one = curriculum(order="staged", success=0.5, groups=4)
    assert [stage.name for stage in one.stages] == ["1", "2", "3"]
    state, stages = CurriculumState(), []
    for step, solved in enumerate((1.0, 1.0, 0.0, 0.0, 1.0, 1.0), start=1):
        chosen = one.choose(ORDER, 2, AlgorithmState(curriculum=state), set(), step)
        assert {task.tags["level"] for task in chosen.tasks} == {str(state.stage + 1)}
        state, metrics = one.record(state, samples_of({t.id: (solved, solved) for t in chosen.tasks}), step)
        stages.append(metrics["curriculum/stage"])
    assert stages == [1, 1, 2, 2, 2, 2]  # 4 groups solved after step 2; then 0, 0, 0.5 is not above 0.5
    assert (state.stage, state.since, state.recent) == (2, 7, ())


def test_stage_ends_after_its_steps_and_keeps_earlier_tasks_if_cumulative():
    stages = {"easy": StageConfig(values=["1"], steps=2, max_turns=1), "rest": StageConfig(values=["2", "3"])}
    one = curriculum(order="staged", stages=stages, cumulative=True)
    assert [len(stage.tasks) for stage in one.stages] == [6, 18]
    state = CurriculumState()
    assert one.limits(state) == {"max_turns": 1}
    for step in (1, 2, 3):
        assert state.stage == (step > 2)
        state, _ = one.record(state, samples_of({"t0": (0.0, 0.0)}), step)
    assert one.limits(state) == {}


def test_new_tasks_come_from_failed_ones_and_stay_within_the_band():
    one = curriculum(evolve=EvolveConfig(every=2, tasks=2, share=0.5))
    state, _ = one.record(CurriculumState(), samples_of({"t0": (0.0, 0.0), "t1": (1.0, 0.0), "t2": (0.0, 0.0)}), 1)
    assert (state.failed, state.made) == (("t0", "t2"), ())
    state, metrics = one.record(state, samples_of({"t5": (1.0, 1.0)}), 2)
    assert (set(state.made), state.failed, metrics["curriculum/made"]) == ({"t0~2", "t2~2"}, (), 2.0)
    chosen = one.choose(ORDER, 4, AlgorithmState(curriculum=state), set(), 3).tasks
    assert [task.id for task in chosen[:2]] == [*state.made]
    assert chosen[0].tags == {"level": LEVELS[chosen[0].id.split("~")[0]]}
    assert one.task("t0~2") == curriculum(evolve=EvolveConfig(every=2)).task("t0~2")
    state, _ = one.record(state, samples_of({"t0~2": (1.0, 0.0), "t2~2": (1.0, 1.0)}), 3)
    assert state.made == ("t0~2",)


def test_variants_that_defeat_the_expert_are_rejected():
    class Unsolvable(Levels):
        def expert(self, task):
            return "solution" if "~" not in task.id else None

    section, world = CurriculumConfig(evolve=EvolveConfig(every=1)), Unsolvable()
    one = Curriculum(section, world, 0, "right", stages_of(section, world.tasks("train"), {}))
    assert one.task("t0~1") is None
    assert one.task("t99~1") is None


def test_numbers_are_split_into_bins_of_equal_size():
    found = categories(CurriculumConfig(order="bandit", by="length"), Levels())
    assert Counter(found.values()) == {"1": 10, "2": 8}  # ten names of two characters, eight of three
    assert set(categories(CurriculumConfig(order="bandit", bins=3), Levels()).values()) == {"1", "2", "3"}
    with pytest.raises(ConfigError, match="no tag 'size'"):
        categories(CurriculumConfig(order="bandit", by="size"), Levels())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training.curriculum]\ntau = 0.4", "training.curriculum.tau is for the order bandit"),
        (
            '[training.curriculum]\norder = "bandit"\nsuccess = 0.9',
            "training.curriculum.success is for the order staged",
        ),
        ('[training.curriculum]\norder = "perplexity"\nby = "family"', "no stage has values"),
        ("[training.curriculum.greso]\neasy = 0.9", "algorithm.greso is off"),
        ("[training.curriculum.evolve]\ntasks = 3", "evolve.every is 0"),
        ('[training.curriculum]\norder = "target"\n[algorithm]\ngreso = true', "algorithm.greso cannot be combined"),
        ('[training.curriculum]\norder = "bandit"\n[algorithm]\npreset = "ppo"', "are known after it"),
        ('[training.curriculum.evolve]\nevery = 2\n[training]\nmode = "async"', "training.mode = async"),
        ('[training.curriculum]\norder = "staged"\nstages = {a = {values = ["9"]}}', "not a value of 'level'"),
        (
            '[training.curriculum]\norder = "staged"\n[training]\nprompts_per_step = 7',
            "the stage 1 of the curriculum has 6",
        ),
        (
            '[training.curriculum]\norder = "staged"\nstages = {a = {max_turns = 99}}',
            "max_turns .99. is above rollout.max_turns",
        ),
        ('[training.curriculum]\norder = "perplexity"', "perplexity_of is demonstration"),
    ],
)
def test_settings_without_effect_are_rejected(text, message):
    def check():
        settings = config_from_toml(text if "[training]" in text else f"{text}\n[training]\nprompts_per_step = 3")
        preset = PRESETS[settings.algorithm.preset]
        check_curriculum(settings, Levels(), replace(preset, greso=settings.algorithm.greso or False))

    with pytest.raises(ConfigError, match=message):
        check()


def test_passed_gates_are_read_from_the_metrics():
    rows = [(1, {}), (2, {STAGE: 1.0, GATE: 0.4}), (3, {STAGE: 1.0, GATE: 0.75}), (5, {STAGE: 2.0, GATE: 0.1})]
    stages = {"easy": StageConfig(success=0.7, steps=9), "hard": StageConfig()}
    (gate,) = passed_gates(rows, CurriculumConfig(order="staged", stages=stages))
    assert (gate.stage, gate.following, gate.step, gate.success) == ("easy", "hard", 3, 0.75)
    assert str(gate) == "stage easy ended after step 3 at success 0.75 (success > 0.7 over 32 groups, or 9 steps)"
    assert str(passed_gates(rows, CurriculumConfig(order="staged"))[0]).startswith("stage 1 ended")
    assert passed_gates(rows[:3], CurriculumConfig(order="staged")) == []


@pytest.mark.parametrize(
    ("make", "settings", "same"),
    [
        (make_puzzles_world, {"game": "maze", "num_tasks": 20}, ("game", "level")),
        (make_math_world, {"tool": "none", "num_tasks": 40}, ("family", "level")),
    ],
)
def test_worlds_vary_a_task_at_its_parameters(make, settings, same):
    world = make(settings, ToolLimits())
    task = world.tasks("train")[3]
    made = [world.variant(task, Random(seed)) for seed in (0, 0, 1)]
    assert made[0] == made[1] != made[2]
    assert [made[0].tags[name] for name in same] == [task.tags[name] for name in same]
    assert world.expert(made[0]) is not None


def test_puzzle_variants_are_no_held_out_tasks():
    world = make_puzzles_world({"game": "maze", "num_tasks": 20}, ToolLimits())
    held_out = next(task for task in world.tasks("test") if task.tags["level"] == "1")
    task = next(task for task in world.tasks("train") if task.tags["level"] == "1")

    class Seeded(Random):
        def randrange(self, *_):
            return held_out.seed

    assert world.variant(task, Seeded()) is None


def test_reward_weights_follow_the_stage():
    text = """
    [training.curriculum]
    order = "staged"
    stages = {form = {weights = {well_formed = 0.4}}, outcome = {weights = {well_formed = 0.0}}}
    """
    world = make_math_world({"tool": "none", "num_tasks": 20}, ToolLimits())
    settings = config_from_toml(text)
    mixer = build_reward_mixer(settings, world, False)
    episodes = group((1.0, 0.0), "t")
    parts = {"solved": 1.0, "well_formed": 1.0}
    scored = [[replace(e, trajectory=replace(e.trajectory, rewards=parts)) for e in episodes]]
    earned = [mixer.combine(1, scored, stage)[0][0].trajectory.reward for stage in (0, 1)]
    assert earned == pytest.approx([1.4, 1.0])


CHANGES = {
    "training__steps": "4",
    "training__prompts_per_step": "3",
    "rollout__max_turns": "2",
    "rollout__max_tokens_per_turn": "6",
    "rollout__temperature": "1.0",
    "env__name": str(WORLD),
    "model__path": str(recipe_folder("search") / "cold_start"),
}
CURRICULA = {
    "bandit": {"training__curriculum__order": "bandit", "training__curriculum__by": "family"},
    "staged": {
        "training__curriculum__order": "staged",
        "training__curriculum__by": "family",
        "training__curriculum__stages": '{short = {values = ["fruit"], max_turns = 1, steps = 2}, all = {}}',
    },
    "learnability": {"training__curriculum__order": "learnability", "training__curriculum__by": "family"},
    "perplexity": {"training__curriculum__order": "perplexity", "training__curriculum__perplexity_of": "prompt"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CURRICULA)
def test_curriculum_resumes_bit_for_bit(name, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        reporter = InterruptingReporter(3) if folder == cut else RecordingReporter()
        settings = config(folder, **(SMALLEST | CHANGES | CURRICULA[name]))
        with lock_run(new_run(settings, "search", "rl")):
            if folder == cut:
                with pytest.raises(RunInterrupted):
                    train(open_session(settings), RunFolder(folder), reporter)
            else:
                train(open_session(settings), RunFolder(folder), reporter)
    assert main(["train", "--resume", str(cut)]) == 0
    first, second = lasting_files(whole), lasting_files(cut)
    assert [file for file in first if first[file] != second.get(file)] == []
    state = json.loads((checkpoint_path(whole / "checkpoints", 4) / "trainer" / "state.json").read_text())
    steps = dict(reporter_rows(whole))
    if name == "perplexity":
        measured = json.loads((whole / PERPLEXITY_FILE).read_text())
        assert len(set(measured.values())) > 1
        assert all(0 < value < 20 for value in measured.values())
    else:
        assert json.loads(state["algorithm_state"])["curriculum"]["draws"] == 4
    if name == "staged":
        assert [steps[n]["curriculum/stage"] for n in (1, 2, 3, 4)] == [1, 1, 2, 2]
        assert [steps[n]["turns/mean"] <= 1 for n in (1, 2)] == [True, True]


def reporter_rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row) for row in map(json.loads, lines)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one_step", "async"])
def test_curriculum_continues_from_its_state_in_other_modes(mode, tmp_path):
    changes = SMALLEST | CHANGES | CURRICULA["bandit"] | {"training__mode": mode, "training__steps": "3"}
    settings = config(tmp_path / "run", **changes)
    with lock_run(new_run(settings, "search", "rl")):
        train(open_session(settings), RunFolder(tmp_path / "run"), RecordingReporter())
    assert main(["train", "--resume", str(tmp_path / "run"), "--training.steps", "5"]) == 0
    draws = []
    for step in (3, 5):
        state = checkpoint_path(tmp_path / "run" / "checkpoints", step) / "trainer" / "state.json"
        if state.is_file():
            draws.append(json.loads(json.loads(state.read_text())["algorithm_state"])["curriculum"]["draws"])
    assert draws == sorted(draws)
    assert draws[-1] >= 5
    for _, row in reporter_rows(tmp_path / "run"):
        assert row["curriculum/p/fruit"] + row["curriculum/p/tool"] == pytest.approx(1)
