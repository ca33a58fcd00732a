"""Scripted episodes in the worlds gui and web."""

from collections.abc import Sequence

from ludus.worlds.apps.site import pending


def expert_texts(world, task) -> list[str]:
    """The actions of the solution."""
    return [message["content"] for message in world.expert(task).messages if message["role"] == "assistant"]


def played(world, task, texts: Sequence[str]):
    """The last observation and the simulator after actions."""
    simulator = world.make(task)
    simulator.reset()
    seen = [simulator.step(text) for text in texts]
    return seen[-1], simulator


def success_of(world, task, texts: Sequence[str]) -> float:
    return played(world, task, texts)[1].success


def follow(world, task, steps) -> float:
    """The success of an expert that carries out these steps."""
    simulator = world.make(task)
    simulator.reset()
    simulator.steps = tuple(steps)
    while (action := simulator.expert_action()) != "done":
        assert action is not None, pending(simulator.site, steps)
        assert simulator.step(action).valid
    return simulator.step("done").reward


def number_of(simulator, name: str, role: str = "") -> int:
    """The number of an element on the current page."""
    items = simulator.visit.items
    return next(i for i, one in enumerate(items, 1) if one.name == name and role in ("", one.role))
