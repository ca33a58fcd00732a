"""Learn from demonstrations without actions, as VPT does: label them with an inverse-dynamics model, clone, then RL.

    python examples/unlabelled_demonstrations.py --folder runs/unlabelled

The demonstrations are walks through a maze, of which most are observations only. The stages, each a run folder:

1. `inverse`: fine-tune a model on the few walks with actions. It reads two successive observations and writes the
   action in between.
2. It labels the walks without actions; the accuracy is measured on the actions that were removed.
3. `labelled`, `pseudo`, `true`: clone the walks with actions only, those and the labelled ones, and all walks with
   their true actions as the upper bound.
4. `rl`: RL from `pseudo`.

Greedy success on held-out pairs, means of three seeds: 20 % `labelled`, 37 % `pseudo`, 44 % `rl`, 52 % `true`.

`gains.json` has the accuracy and the success on held-out pairs of start and goal, with 95 % intervals. The file is also
the world of `unlabelled_demonstrations.toml`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import ludus
from ludus.api import Evaluated, Run
from ludus.envs.simulator_world import Observation, Simulator, SimulatorWorld, make_task
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import ToolWorld, assistant
from ludus.rewards.base import Reward
from ludus.types import Message, Task, Trajectory

CONFIG = Path(__file__).with_suffix(".toml")
SIZE = 5  # cells in a row of the maze
DETOURS = 0.2  # fraction of the steps of a demonstration that are random
MOVES = {"north": (0, -1), "east": (1, 0), "south": (0, 1), "west": (-1, 0)}
SPLITS = {"train": 0.7, "validation": 0.1, "test": 0.2}
SYSTEM = "Walk to the goal. Reply north, east, south or west."
Cell = tuple[int, int]


def beside(cell: Cell, move: str) -> Cell:
    return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]


@cache
def passages() -> frozenset[tuple[Cell, str]]:
    """Return the cells and moves without a wall: a random tree with loops."""
    rng, found, reached = random.Random("maze"), set(), {(0, 0)}
    back = dict(zip(MOVES, ("south", "west", "north", "east"), strict=True))
    inside = {(x, y) for x in range(SIZE) for y in range(SIZE)}
    while True:
        edges = [(cell, move) for cell in sorted(reached) for move in MOVES if beside(cell, move) in inside]
        new = [(cell, move) for cell, move in edges if beside(cell, move) not in reached]
        chosen = [rng.choice(new)] if new else rng.sample(edges, 2 * SIZE)
        found |= {*chosen, *((beside(cell, move), back[move]) for cell, move in chosen)}
        reached |= {beside(cell, move) for cell, move in chosen}
        if not new:
            return frozenset(found)


@cache
def distances(goal: Cell) -> dict[Cell, int]:
    """Return the number of steps from each cell to the goal."""
    found, edge = {goal: 0}, [goal]
    while edge:
        cell = edge.pop(0)
        for move in MOVES:
            if (cell, move) in passages() and (new := beside(cell, move)) not in found:
                found[new] = found[cell] + 1
                edge.append(new)
    return found


class Maze(Simulator):
    """A walk from a start to a goal. An observation is the cell, the first one also the goal; a wall stops a step."""

    def __init__(self, start: Cell, goal: Cell) -> None:
        self.cell, self.goal = start, goal

    def reset(self) -> str:
        return "{}, goal {} {}".format(self.look(), *self.goal)

    def look(self) -> str:
        return "at {} {}".format(*self.cell)

    def step(self, action: str) -> Observation:
        if valid := action in self.actions():
            self.cell = beside(self.cell, action)
        self.success = float(self.cell == self.goal)
        return Observation(self.look(), done=bool(self.success), valid=valid)

    def actions(self) -> Sequence[str]:
        return [move for move in MOVES if (self.cell, move) in passages()]

    def expert_action(self) -> str:
        return min(self.actions(), key=lambda move: distances(self.goal)[beside(self.cell, move)])

    def state_key(self) -> str:
        return self.reset()


def maze_of(task: Task) -> Maze:
    x, y, *goal = map(int, task.id.split())
    return Maze((x, y), (goal[0], goal[1]))


def make_world(settings: Mapping[str, Any], limits: ToolLimits) -> SimulatorWorld:
    """Return the world: all pairs of a start and a goal, by split."""
    cells = sorted(distances((0, 0)))
    pairs = [(start, goal) for start in cells for goal in cells if start != goal]
    random.Random("split").shuffle(pairs)
    tasks: dict[str, list[Task]] = {}
    for split, share in SPLITS.items():
        taken, pairs = pairs[: round(share * SIZE**4)], pairs[round(share * SIZE**4) :]
        names = ("{} {} {} {}".format(*start, *goal) for start, goal in taken)
        tasks[split] = [
            make_task(Maze(*pair), n, SYSTEM, {"split": split}) for n, pair in zip(names, taken, strict=True)
        ]
    return SimulatorWorld("maze", tasks, maze_of, flaw=DETOURS, emits_turn_rewards=False)


class Walk(NamedTuple):
    """A demonstration: `observations` has one more entry than `actions`."""

    task: Task
    observations: list[str]
    actions: list[str]

    def pairs(self) -> list[Message]:
        """Return the prompts of the inverse-dynamics model, one for each action."""
        seen = zip(self.observations, self.observations[1:], strict=False)
        return [Message(role="user", content=f"{before}\n{after}") for before, after in seen]

    def dialogue(self, actions: Sequence[str]) -> list[Message]:
        """Return the walk as a dialogue with these actions."""
        messages = list(self.task.prompt)
        for action, seen in zip(actions, self.observations[1:], strict=True):
            messages += [assistant(action), Message(role="user", content=seen)]
        return messages[:-1]


def record_walks(world: SimulatorWorld, num: int, seed: int) -> list[Walk]:
    """Return walks of an expert that takes random steps in between."""
    rng = random.Random(seed)
    walks: list[Walk] = []
    while len(walks) < num:
        task = rng.choice(world.tasks("train"))
        maze = maze_of(task)
        walk, done = Walk(task, [maze.look()], []), False
        while not done:
            action = rng.choice(maze.actions()) if rng.random() < DETOURS else maze.expert_action()
            text, _, done, _ = maze.step(action)
            walk.actions.append(action)
            walk.observations.append(text)
        walks.append(walk)
    return walks


def write_dialogues(path: Path, dialogues: Sequence[Sequence[Message]]) -> str:
    path.write_text("".join(json.dumps({"messages": list(one)}) + "\n" for one in dialogues), "utf-8")
    return str(path)


def is_right(task: Task, trajectory: Trajectory) -> float:
    return float(trajectory.answer.strip() == task.truth)


def label_walks(inverse: Run, walks: Sequence[Walk]) -> tuple[list[list[str]], dict[str, float]]:
    """Return the greedy actions of the inverse-dynamics model for each walk, and its accuracy."""
    tasks = [
        Task(f"{number} {turn}", (prompt,), action)
        for number, walk in enumerate(walks)
        for turn, (prompt, action) in enumerate(zip(walk.pairs(), walk.actions, strict=True))
    ]
    world = ToolWorld("inverse", {"unlabelled": tasks}, [], [Reward("right", is_right, outcome=True)])
    chosen = {"splits": ["unlabelled"], "temperatures": [0.0], "tasks": len(tasks)}
    here = {"reward_processes": 0}  # of a world that no configuration names
    found = ludus.evaluate(inverse, world=world, evaluation=chosen, rollout=here, progress=False)
    written = {one.task_id: one.answer.strip() for one in found.rollouts}
    return [[written[f"{n} {turn}"] for turn in range(len(walk.actions))] for n, walk in enumerate(walks)], success(
        found
    )


def success(found: Evaluated) -> dict[str, float]:
    """Return success rates with their 95 % intervals, by temperature."""
    rows: dict[str, float] = {}
    for one in found.evaluations:
        name = "greedy" if one.plan.temperature == 0 else "sampled"
        rows |= {name: one.rate, f"{name}_low": one.interval.low, f"{name}_high": one.interval.high}
    return rows


def run_pipeline(
    folder: Path, labelled: int, unlabelled: int, steps: int, rl_steps: int, seed: int = 0
) -> dict[str, Any]:
    """Run all stages; return the accuracy of the labels and the success after each stage."""
    walks = record_walks(make_world({}, ToolLimits()), labelled + unlabelled, seed)
    known, unknown = walks[:labelled], walks[labelled:]
    folder.mkdir(parents=True, exist_ok=True)
    settings = partial(ludus.configuration, CONFIG)
    gains: dict[str, Any] = {}

    def note(name: str, values: dict[str, float]) -> None:
        gains[name] = values
        print(f"{name:10}", "  ".join(f"{key} {value:.1%}" for key, value in values.items()), flush=True)
        (folder / "gains.json").write_text(json.dumps(gains, indent=1), "utf-8")

    def clone(name: str, dialogues: Sequence[Sequence[Message]]) -> Run:
        data = write_dialogues(folder / f"{name}.jsonl", dialogues)
        options: dict[str, Any] = {"sft": {"data": data, "steps": steps}, "model": {"from_scratch": True}}
        return ludus.sft(settings(**options, run={"dir": str(folder / name), "threads": 1, "seed": seed}))

    pairs = [
        [prompt, assistant(action)] for walk in known for prompt, action in zip(walk.pairs(), walk.actions, strict=True)
    ]
    labels, accuracy = label_walks(clone("inverse", pairs), unknown)
    note("labels", accuracy)
    shown = [walk.dialogue(walk.actions) for walk in known]
    guessed = [
        walk.dialogue(actions) for walk, actions in zip(unknown, labels, strict=True) if set(actions) <= MOVES.keys()
    ]
    arms = {"labelled": shown, "pseudo": shown + guessed, "true": [walk.dialogue(walk.actions) for walk in walks]}
    runs = {name: clone(name, dialogues) for name, dialogues in arms.items()}
    runs["rl"] = ludus.train(
        settings(model=str(runs["pseudo"].checkpoint)),
        training={"steps": rl_steps},
        run={"dir": str(folder / "rl"), "threads": 1, "seed": seed},
        progress=False,
    )
    for name, run in runs.items():
        tests = {"splits": ["test"], "temperatures": [0.0, 1.0], "tasks": 200}
        note(name, success(ludus.evaluate(run, evaluation=tests, progress=False)))
    return gains


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/unlabelled"))
    numbers = {"labelled": 20, "unlabelled": 600, "steps": 200, "rl-steps": 20, "seed": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    run_pipeline(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
