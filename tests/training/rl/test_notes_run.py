"""Notes that persist over the steps of a run, and over a kill of it."""

import json
from importlib import resources

import pytest

from ludus.cli.main import main
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.training.rl.build import train
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from small_runs import SMALLEST, InterruptingReporter, RecordingReporter, RunInterrupted, config, lasting_files

WORLD = """
from ludus.envs.agent_world import AgentWorld


async def agent(task, policy):
    reply = await policy.chat([{"role": "user", "content": task}])
    earlier = len(policy.notes.texts)
    policy.notes.write(f"by {policy.seed}", reply["content"][:50] or "empty")
    return earlier


def reward(task, earlier):
    return earlier / 10


def make_world(settings, limits):
    return AgentWorld.of(agent, {"train": ["What is 1?", "What is 2?"], "test": ["What is 3?"]}, reward)
"""


def play(folder, reporter=None, scope="task"):
    path = folder.parent / "noting.py"
    path.write_text(WORLD)
    changes = {
        "env__name": str(path),
        "model__path": str(resources.files("ludus.recipes") / "search" / "cold_start"),
        "rollout__reward_processes": "0",  # rewards are computed when the agent ends
        "rollout__notes__scope": scope,
        "rollout__notes__max_notes": "5",
        "training__steps": "3",
        "evaluation__tasks": "1",
        "evaluation__tasks_during": "1",
    }
    settings = config(folder, **(SMALLEST | changes))
    with lock_run(new_run(settings, "noting", "rl")):
        train(open_session(settings), RunFolder(folder), reporter or RecordingReporter())


@pytest.mark.slow
def test_episodes_start_with_the_notes_of_earlier_steps_of_their_task(tmp_path):
    folder = tmp_path / "run"
    play(folder)
    for step in (1, 2, 3):
        trajectories = [one.trajectory for one in read_rollouts(rollouts_path(folder, step))]
        assert [one.reward for one in trajectories] == [2 * (step - 1) / 10] * 4
        assert [len(one.notes) for one in trajectories] == [1] * 4
        assert len({title for one in trajectories for title in one.notes}) == 4
    lines = [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 1, 2, 2, 3, 3]
    assert [len(line["notes"]) for line in lines] == [2, 2, 4, 4, 5, 5]
    evaluations = list((folder / "evaluations").glob("*.jsonl.gz"))
    assert len(evaluations) == 2
    assert [one.trajectory.reward for path in evaluations for one in read_rollouts(path)] == [0.0] * 2


@pytest.mark.fault
@pytest.mark.parametrize("scope", ["task", "run"])
def test_resumed_run_has_the_same_notes(tmp_path, scope):
    play(tmp_path / "whole", scope=scope)
    with pytest.raises(RunInterrupted):
        play(tmp_path / "cut", InterruptingReporter(2), scope)
    with (tmp_path / "cut" / "notes.jsonl").open("a") as file:
        file.write('{"step": 3, "task": "torn')
    assert main(["train", "--resume", str(tmp_path / "cut")]) == 0
    first, second = lasting_files(tmp_path / "whole"), lasting_files(tmp_path / "cut")
    assert "notes.jsonl" in first
    rewards = [one.trajectory.reward for one in read_rollouts(rollouts_path(tmp_path / "whole", 2))]
    assert {*rewards} == {0.2 if scope == "task" else 0.4}
    assert [name for name in first if first[name] != second.get(name)] == []
