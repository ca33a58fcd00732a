"""What the agents of this folder share: questions, a search tool, the reward, and a training run.

The model is the cold start of the recipe `search`, which answers about four of ten questions; it often stops after the
first of several searches.
"""

import argparse
import json
from importlib import resources

import ludus
from ludus.rewards.exact_match import is_answer
from ludus.worlds.search.world import SearchWorld

world = SearchWorld()
SYSTEM = world.tasks("train")[0].prompt[0]["content"]
SCHEMA = world.tool.schema["function"]
TASKS = {
    split: [{"question": task.prompt[1]["content"], "truth": task.truth} for task in world.tasks(source)[:num]]
    for split, source, num in (("train", "train", 4000), ("validation", "validation", 96), ("test", "test", 300))
}


def search(arguments: str | dict) -> str:
    """Call the tool with arguments as the model writes them; an error is an observation."""
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        return str(world.tool.function(**given))
    except (TypeError, ValueError) as error:
        return f"Error: {error}"


def reward(task: dict, answer: object) -> float:
    return float(is_answer(str(answer or ""), task["truth"]))


def train(agent):
    """Train an agent with the settings of the command line, and print its held-out success before and after."""
    parser = argparse.ArgumentParser(description=agent.__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", default=None)
    args = parser.parse_args()
    run = ludus.train(
        agent,
        TASKS,
        reward,
        model=str(resources.files("ludus.recipes") / "search" / "cold_start"),
        training={"steps": args.steps, "prompts_per_step": 12, "learning_rate": 3e-4},
        rollout={"max_seq_len": 640},
        evaluation={"tasks": 300, "tasks_during": 96, "every": 10, "splits": ["test"], "temperatures": [0.0]},
        run={"dir": args.dir, "seed": args.seed, "threads": 1},
    )
    before, after = (one for one in run.evaluations if one.plan.split == "test")
    for name, one in (("before", before), ("after", after)):
        print(f"{name}: {one.rate:.1%} [{one.interval.low:.1%}, {one.interval.high:.1%}] of {one.plan.num_tasks} tasks")
    return run
