"""Hindsight relabelling: what attempts achieved in mazes, lakes and the guess world, and its part in a round."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from ludus.config import load_config
from ludus.config.sections.rollout import EnvConfig
from ludus.envs.registry import build_world
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError
from ludus.rewards.base import success
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.training.collection.demonstrations import relabelled, replay_actions
from ludus.training.credit.advantages import TrainingSample
from ludus.training.rft import HINDSIGHT, RftTrainer, check_rft
from ludus.training.run.session import open_session
from ludus.types import POLICY, Message, StopReason, Trajectory
from ludus.worlds.guess.world import make_guess_world
from ludus.worlds.puzzles.world import make_puzzles_world


@pytest.fixture(scope="module")
def session():
    words = ["--rollout.max_seq_len", "512", "--rollout.max_turns", "5", "--rft.hindsight", "0.5", "--run.threads", "1"]
    words += ["--rft.microbatch_tokens", "600"]
    return open_session(load_config("guess", words))


def with_world(session, world):
    return replace(session, world=world)


def play(session, rows):
    """Return the episodes of the messages at tasks, as attempts of the policy."""
    said = [[Message(role="assistant", content=text) for text in texts] for _, texts in rows]
    actions = {RolloutKey(1, task.id, i): (task, said[i]) for i, (task, _) in enumerate(rows)}
    return asyncio.run(replay_actions(session, actions, POLICY))


def hindsight(session, episodes):
    return asyncio.run(relabelled(session, episodes))


def actions_of(one):
    return [segment.tokens for segment in one.trajectory.segments if segment.kind == "action"]


def test_a_guess_is_relabelled_as_the_number(session):
    own = with_world(session, make_guess_world({"sizes": [7], "num_tasks": 40}, ToolLimits()))
    task = next(one for one in own.world.tasks("train") if own.world.achieved(one, played(one, "2", "5")))
    low, high, number = (int(part) for part in task.id.split("-"))
    free = [n for n in range(low, high + 1) if n != number and f"{low}-{high}-{n}" not in own.world._held_out]
    wrong = [str(free[0]), str(free[-1]), "x", str(high + 9)]
    failed, solved = play(own, [(task, wrong), (task, [str(number)])])
    assert not success(own.world.rewards, failed.trajectory)
    (one,) = hindsight(own, [failed, failed, solved])
    assert one.task.truth == str(free[-1])
    assert success(own.world.rewards, one.trajectory)
    assert actions_of(one) == actions_of(failed)[:2]  # the episode ends at the new goal
    assert one.trajectory.segments[0].tokens == own.renderer.prompt(one.task.prompt, ())
    assert one.trajectory.messages[2]["content"] == "higher"
    assert {segment.agent for segment in one.trajectory.segments} == {POLICY}
    assert hindsight(own, [one, solved]) == []


def played(task, *texts):
    said = tuple(Message(role="assistant", content=text) for text in texts)
    return Trajectory(task.id, 0, (), (*task.prompt, *said), StopReason.MAX_TURNS)


def test_held_out_tasks_are_never_relabelled_to(session):
    world = make_guess_world({"sizes": [7]}, ToolLimits())
    held_out = next(one for one in world.tasks("test"))
    low, high, number = held_out.id.split("-")
    other = next(one for one in world.tasks("train") if one.id.startswith(f"{low}-{high}-"))
    assert world.achieved(other, played(other, number)) is None
    inside = [world.achieved(one, played(one, "9")) for one in world.tasks("train")]
    assert not {one.id for one in inside if one} & {one.id for one in world.tasks("test")}


@pytest.mark.parametrize("game", ["frozenlake", "maze"])
def test_a_reached_cell_is_the_goal_of_the_relabelled_puzzle(session, game):
    own = with_world(session, make_puzzles_world({"game": game, "levels": [2], "num_tasks": 20}, ToolLimits()))
    rows = []
    for task in own.world.tasks("train")[:12]:
        simulator = own.world.make(task)
        start = simulator.at
        move = next(a for a in simulator.actions() if _after(own, task, a) not in (start, None))
        rows.append((task, [move, "nonsense"]))
    episodes = [one for one in play(own, rows) if not success(own.world.rewards, one.trajectory)]
    found = hindsight(own, episodes)
    assert found
    for one in found:
        name, goal = one.task.id.split("@")
        task = next(t for t in own.world.tasks("train") if t.id == name)
        (action,) = actions_of(one)
        words = own.renderer.tokenizer.decode(action)
        move = next(a for a in ("left", "down", "right", "up") if a in words)
        assert ",".join(map(str, _after(own, task, move))) == goal
        assert one.trajectory.rewards["success"] == 1.0
        if game == "frozenlake":
            assert one.task.prompt[1]["content"].count("G") == 1
            assert one.task.prompt != task.prompt
        assert own.world.environment(one.task) is not None
    held_out = own.world.relabel._instances
    assert not {own.world.make(one.task).instance() for one in found} & held_out


def _after(session, task, action):
    """Return the cell after one move; None for a hole or the goal."""
    simulator = session.world.make(task)
    simulator.step(action)
    return None if simulator.over else simulator.at


def test_relabelled_attempts_train_with_their_weight(session, tmp_path):
    own = with_world(session, make_guess_world({"sizes": [7], "num_tasks": 40}, ToolLimits()))
    rows = [(task, ["2", "6", "4"]) for task in own.world.tasks("train")[:6]]
    again = hindsight(own, [one for one in play(own, rows) if not success(own.world.rewards, one.trajectory)])
    samples = [TrainingSample(one, RolloutOutcome.TRAINED, HINDSIGHT) for one in again]
    start = {name: value.clone() for name, value in own.model.state_dict().items()}
    moved = {}
    for weight in (0.0, 0.5, 1.0):
        rft = own.config.rft.model_copy(update={"hindsight": weight, "max_grad_norm": 1e9})
        changed = replace(own, config=own.config.model_copy(update={"rft": rft}))
        trainer = RftTrainer(changed, None, None, (), None)
        own.model.load_state_dict(start)
        _, metrics = trainer.learn(1, samples)
        moved[weight] = metrics["optim/grad_norm"]
        assert metrics["rft/kept"] == 0
    own.model.load_state_dict(start)
    assert metrics["rft/hindsight"] == len(again) > 0
    assert moved[0.0] == 0
    assert moved[0.5] == pytest.approx(moved[1.0] / 2, rel=1e-3)
    assert all(torch.equal(value, start[name]) for name, value in own.model.state_dict().items())


def test_steps_of_a_round_are_those_of_the_setting_in_as_many_passes_as_they_take(session):
    rows = [(task, ["3"]) for task in session.world.tasks("train")[:5]]
    samples = [TrainingSample(one, RolloutOutcome.TRAINED, "trained") for one in play(session, rows)]
    start = {name: value.clone() for name, value in session.model.state_dict().items()}

    def learned(rows, **settings):
        rft = session.config.rft.model_copy(update={"hindsight": 0.0, "batch_size": 2, **settings})
        changed = replace(session, config=session.config.model_copy(update={"rft": rft}))
        session.model.load_state_dict(start)
        _, metrics = RftTrainer(changed, None, None, (), None).learn(1, rows)
        return metrics["rft/updates"], [value.clone() for value in session.model.state_dict().values()]

    passes = {num: learned(samples, epochs=num) for num in (1, 2)}
    steps = {num: learned(samples, steps=num) for num in (2, 3, 6)}
    session.model.load_state_dict(start)
    assert [passes[1][0], passes[2][0]] == [3, 6]
    assert [steps[num][0] for num in (2, 3, 6)] == [2, 3, 6]
    for one, other in ((passes[1], steps[3]), (passes[2], steps[6])):
        assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(steps[2][1], steps[3][1], strict=True))
    assert learned([], steps=4)[0] == 0


def test_steps_and_epochs_of_a_round_exclude_each_other():
    with pytest.raises(ConfigError, match=r"rft.steps and rft.epochs are mutually exclusive"):
        load_config("guess", ["--rft.steps", "4", "--rft.epochs", "2"])


def test_hindsight_needs_a_world_that_defines_it(session):
    with pytest.raises(ConfigError, match=r"rft.hindsight would have no effect"):
        check_rft(session.config, build_world(EnvConfig(name="functions"), session.config.rollout))
