"""GRESO in training: skipped prompts, their updates by groups, and resuming with its streaks."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ludus.algorithms.filters import GresoState
from ludus.algorithms.spec.resolve import PRESETS
from ludus.cli.main import main
from ludus.config.schema import Config
from ludus.envs.base import TaskOrder
from ludus.recipes import recipe_folder
from ludus.rollouts.group_queue import StreamedGroup
from ludus.rollouts.ledger import Ledger
from ludus.training.collection.filters import AlgorithmState, choose_tasks, record_greso_visits
from ludus.training.collection.prompt_stream import PromptStream
from ludus.training.collection.rollout_collector import RolloutCollector
from ludus.training.credit.advantages import assign_credit
from ludus.training.rl.build import train
from ludus.training.run.checkpoint import checkpoint_path
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from ludus.types import Failure, Task
from small_runs import SMALLEST, InterruptingReporter, RecordingReporter, RunInterrupted, config, lasting_files
from tests.training.credit.test_credit import group
from tiny_run import WORLD

TASKS = [Task(f"t{i}", (), None) for i in range(12)]
ORDER = TaskOrder(TASKS, 0, 4)
DRAW = {"seed": 5, "step": 3}


def test_tasks_with_a_streak_are_skipped_for_the_next_ones():
    state = AlgorithmState(greso=GresoState(streaks={f"t{i}": -2 for i in range(6)}), position=2)
    chosen = choose_tasks(ORDER, 4, state, {ORDER.take(4, 1)[0].id}, **DRAW)
    looked = ORDER.take(2, chosen.state.position - 2)
    free = [task for task in looked if task.id != ORDER.take(4, 1)[0].id]
    skips = [state.greso.skips(task.id, seed=5, step=3) for task in free]
    assert list(chosen.tasks) == [task for task, skip in zip(free, skips, strict=True) if not skip]
    assert (len(chosen.tasks), chosen.skipped) == (4, sum(skips))
    assert chosen.skipped > 0
    assert chosen.state == replace(state, position=chosen.state.position)


def test_task_order_is_kept_without_streaks():
    assert list(choose_tasks(ORDER, 4, AlgorithmState(), (), **DRAW).tasks) == ORDER.take(0, 4)


def test_first_tasks_are_played_if_all_are_skipped():
    state = GresoState(p_hard=0.0, p_easy=0.0, streaks={task.id: -1 for task in TASKS})
    chosen = choose_tasks(ORDER, 3, AlgorithmState(greso=state), (), seed=0, step=0)
    all_skipped = [t for t in ORDER.take(0, 12) if state.skips(t.id, seed=0, step=0)]
    played = [t for t in ORDER.take(0, 12) if t not in all_skipped]
    assert list(chosen.tasks) == (played[:3] or all_skipped[:3])
    assert len({task.id for task in chosen.tasks}) == len(chosen.tasks)


def test_streaks_record_too_easy_and_too_hard_groups():
    def scored(name, rewards):
        return [
            replace(e, trajectory=replace(e.trajectory, rewards={"right": e.trajectory.reward}))
            for e in group(rewards, name)
        ]

    broken = scored("broken", (0.0,) * 4)
    lost = replace(broken[0].trajectory, failure=Failure("engine", "gone", 3))
    groups = [
        scored("easy", (1.0,) * 4),
        scored("hard", (0.1,) * 4),
        scored("between", (0.5,) * 4),
        scored("good", (1.0, 0.0, 0.0, 0.0)),
        [replace(broken[0], trajectory=lost), *broken[1:]],
    ]
    start = AlgorithmState(greso=GresoState(streaks={"hard": -1, "good": 3}))
    after = record_greso_visits(start, assign_credit(groups, PRESETS["grpo"]), "right", PRESETS["grpo"]).greso
    assert after.streaks == {"easy": 1, "hard": -2, "between": -1}
    assert (after.p_easy, after.p_hard) == (0.49, 0.49)
    early = record_greso_visits(start, assign_credit(groups, PRESETS["grpo"]), "right", PRESETS["grpo"], epoch=1)
    assert (early.greso.streaks, early.greso.p_easy) == (after.streaks, 0.5)


@pytest.mark.parametrize(("size", "per_step"), [(3, 3), (4, 3), (7, 3), (12, 4)])
def test_stream_request_keys_are_unique_across_a_resume(size, per_step):
    order = TaskOrder(TASKS[:size], 0, per_step)
    state = GresoState(streaks={task.id: -3 for task in order.tasks})
    session = SimpleNamespace(config=Config())
    sampler = RolloutCollector(session, None, PRESETS["dapo"], None, Ledger(), AlgorithmState(greso=state))
    sampler.algorithm = replace(sampler.algorithm, greso=True)
    stream = PromptStream(sampler, order, per_step)
    groups = [StreamedGroup(number, stream.requests(number), 0) for number in range(199)]
    resumed = PromptStream(sampler, order, per_step, before=[g.requests[0].task.id for g in groups[-per_step:]])
    groups += [StreamedGroup(number, resumed.requests(number), 0) for number in range(199, 300)]
    keys = [request.key for group in groups for request in group.requests]
    assert len(set(keys)) == len(keys)


CHANGES = {
    "algorithm__greso": "true",
    "training__steps": "3",
    "training__prompts_per_step": "5",
    "rollout__max_turns": "1",
    "rollout__max_tokens_per_turn": "4",
    "env__name": str(WORLD),
    "model__path": str(recipe_folder("search") / "cold_start"),
}


@pytest.mark.fault
def test_greso_run_skips_tasks_and_resumes_with_its_streaks(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        reporter = InterruptingReporter(3) if folder == cut else RecordingReporter()
        settings = config(folder, **(SMALLEST | CHANGES))
        with lock_run(new_run(settings, "search", "rl")):
            if folder == cut:
                with pytest.raises(RunInterrupted):
                    train(open_session(settings), RunFolder(folder), reporter)
            else:
                train(open_session(settings), RunFolder(folder), reporter)
                assert [m["greso/skipped"] > 0 for _, m in reporter.steps] == [False, False, True]
                assert reporter.steps[-1][1]["greso/p_hard"] == pytest.approx(0.49)
    assert main(["train", "--resume", str(cut)]) == 0
    first, second = lasting_files(whole), lasting_files(cut)
    assert [name for name in first if first[name] != second.get(name)] == []
    state = json.loads((checkpoint_path(whole / "checkpoints", 3) / "trainer" / "state.json").read_text())
    assert json.loads(state["algorithm_state"])["position"] > 15
