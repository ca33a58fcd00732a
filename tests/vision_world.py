"""A world of pictures for tests: the answer is the color of a square, which only its image tells.

Each episode shows two pictures, the second one in an observation, and expects a letter for each.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ludus.envs.base import Environment, World
from ludus.envs.tool_world import Dialogue
from ludus.images import image_url
from ludus.rewards.base import Reward
from ludus.types import Message, StepResult, Task
from tests.vision_models import picture

LETTERS = "rgb"


def right(task, trajectory):
    """Return the fraction of right answers."""
    said = [message["content"].strip() for message in trajectory.messages if message["role"] == "assistant"]
    return sum(a == b for a, b in zip(said, task.truth, strict=False)) / 2


REWARDS = (Reward("right", right, outcome=True),)


def shown(letter, rng, text="?"):
    """Return a message with a square in a random shade of the color."""
    shade = [rng.randrange(0, 70) for _ in LETTERS]
    shade[LETTERS.index(letter)] = rng.randrange(180, 256)
    return Message(role="user", content=f"<image>{text}", images=[image_url(picture(tuple(shade), (20, 18)))])


def make_task(split, number):
    rng = random.Random(f"{split}/{number}")
    truth = rng.choice(LETTERS) + rng.choice(LETTERS)
    return Task(f"{split}:{number}", (shown(truth[0], rng),), truth, {"split": split}, number)


def second(task):
    return shown(task.truth[1], random.Random(task.id), "??")


class PictureEnv(Environment):
    tools = ()
    rewards = REWARDS

    async def start(self, task):
        self.task, self.turns = task, 0
        return list(task.prompt)

    async def step(self, action):
        self.turns += 1
        return StepResult(done=True) if self.turns == 2 else StepResult((second(self.task),))


@dataclass(frozen=True)
class PictureWorld(World):
    lists: Mapping[str, Sequence[Task]]
    name: str = "pictures"
    splits: Sequence[str] = ("train", "validation", "test")
    rewards: Sequence[Reward] = REWARDS

    def tasks(self, split):
        return self.lists[split]

    def environment(self, task):
        return PictureEnv()

    def demonstrations(self, seed):
        rng = random.Random(seed)
        while True:
            yield self.expert(rng.choice(self.lists["train"]))

    def expert(self, task):
        first, other = (Message(role="assistant", content=letter) for letter in task.truth)
        return Dialogue((*task.prompt, first, second(task), other), ())


def make_world(settings, limits):
    return PictureWorld({split: [make_task(split, i) for i in range(64)] for split in ("train", "validation", "test")})
