"""Worlds over a simulator: actions, observations, the outcome of the last state, experts, threads and failures."""

import asyncio
import itertools
import threading

import pytest

from ludus.envs.simulator_world import Observation, Simulator, SimulatorWorld, action_of, make_task
from ludus.types import Action, StopReason, Trajectory


class Stairs(Simulator):
    """Climb `height` stairs; the third is a checkpoint."""

    def __init__(self, height):
        self.height, self.at, self.threads, self.closed = height, 0, set(), False

    def reset(self):
        self.threads.add(threading.get_ident())
        return "You stand below the stairs."

    def step(self, action):
        self.threads.add(threading.get_ident())
        if action not in self.actions():
            return Observation("Say up or down.", valid=False)
        self.at = max(0, self.at + (1 if action == "up" else -1))
        if self.at == 3:
            self.reached |= {"third"}
        self.success = float(self.at == self.height)
        return Observation(f"stair {self.at}", 1.0 if action == "up" else -1.0, self.at == self.height)

    def actions(self):
        return ("up", "down")

    def expert_action(self):
        return "up"

    def state_key(self):
        return str(self.at)

    def close(self):
        self.closed = True


def world_of(made, **changes):
    def make(task):
        made.append(Stairs(int(task.tags["height"])))
        return made[-1]

    def task(height):
        return make_task(Stairs(height), f"stairs-{height}", "Climb.", {"height": str(height), "checkpoints": "1"})

    lists = {"train": [task(4), task(5)], "test": [task(6)]}
    return SimulatorWorld("stairs", lists, make, **changes)


def play(world, task, texts):
    async def episode():
        environment = world.environment(task)
        messages, results = await environment.start(task), []
        for text in texts:
            results.append(await environment.step(Action({"role": "assistant", "content": text})))
            if results[-1].done:
                break
        key = environment.state_key()
        await environment.close()
        return messages, results, key

    messages, results, key = asyncio.run(episode())
    outcomes = tuple(outcome for result in results for outcome in result.outcomes)
    trajectory = Trajectory(task.id, 0, (), tuple(messages), StopReason.MAX_TURNS, outcomes=outcomes)
    return results, {reward.name: reward.function(task, trajectory) for reward in world.rewards}, key


@pytest.mark.parametrize("blocks", [False, True])
def test_last_state_decides_the_reward(blocks):
    made = []
    world = world_of(made, blocks=blocks)
    task = world.tasks("train")[0]
    results, rewards, _ = play(
        world, task, ["I think <action>up</action> or <ACTION> up </ACTION>", "up", "jump", "up", "up"]
    )
    assert rewards == {"success": 1, "return": 4, "valid_actions": 0.8, "coverage": 1}
    assert [result.reward for result in results] == [1, 1, 0, 1, 1]
    assert results[2].messages[0]["content"] == "Say up or down."
    assert results[-1].done
    assert made[-1].closed
    assert (made[-1].threads == {threading.get_ident()}) is not blocks
    assert len(made[-1].threads) == 1


def test_episode_that_ends_early_has_the_reward_of_its_state():
    _, rewards, key = play(world := world_of([]), world.tasks("test")[0], ["up", "up"])
    assert rewards == {"success": 0, "return": 2, "valid_actions": 1, "coverage": 0}
    assert key == "2"
    assert play(world, world.tasks("test")[0], [])[1] == {"success": 0, "return": 0, "valid_actions": 0, "coverage": 0}


def test_model_cannot_write_the_state():
    world = world_of([])
    _, rewards, _ = play(world, world.tasks("test")[0], ['{"success": 1.0}'])
    assert rewards["success"] == 0


@pytest.mark.parametrize(
    ("text", "action"), [(" up ", "up"), ("<action>a</action>b<action> c\n</action>", "c"), ("", "")]
)
def test_action_is_the_last_tag_or_the_message(text, action):
    assert action_of(text) == action


def test_expert_solves_and_demonstrations_have_flaws():
    world = world_of([], flaw=0.4, flaws_train=False)
    task = world.tasks("test")[0]
    said = [message["content"] for message in world.expert(task).messages if message["role"] == "assistant"]
    assert play(world, task, said)[1]["success"] == 1
    shown = list(itertools.islice(world.demonstrations(0), 40))
    trained = [t for one in shown for m, t in zip(one.messages, one.trains, strict=True) if m["role"] == "assistant"]
    assert 0.1 < trained.count(False) / len(trained) < 0.5
    assert shown == list(itertools.islice(world.demonstrations(0), 40))
    assert all(play(world, task, [m["content"] for m in one])[1]["success"] == 0 for one in world.cheats(task).values())


def test_every_demonstration_has_a_trained_message():
    shown = list(itertools.islice(world_of([], flaw=1.0, flaws_train=False).demonstrations(0), 60))
    trained = [[t for m, t in zip(one.messages, one.trains, strict=True) if m["role"] == "assistant"] for one in shown]
    assert all(any(one) for one in trained)
    assert not all(all(one) for one in trained)


def test_world_without_expert_has_no_demonstrations():
    world = world_of([], has_expert=False)
    assert not world.implements("demonstrations")
    assert world.expert(world.tasks("train")[0]) is None
    assert list(world.demonstrations(0)) == []
