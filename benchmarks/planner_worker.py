"""Compare a planner with workers and a single agent on the recipe search, trained by RL.

    python benchmarks/planner_worker.py

`single`: the policy has the tool `search`. `planner`: it only has `delegate` (`rollout.subagents`), and its sub-agents
search. Both arms are fine-tuned from the packaged cold start for the same number of steps, on the same demonstrations:
`single` on them as they are, `planner` on the dialogues of a planner and of its workers derived from them, mistakes
included. Both then have the same tasks, numbers of RL steps and rollouts, and limits per rollout: the sampled turns and
the tokens of all dialogues together. Runs are kept in --folder and not repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from learning import by_task, cells, over_seeds
from long_episodes import evaluate, gap, last, ludus
from ludus.api import configuration
from ludus.diagnostics.trackers import read_metrics
from ludus.envs.tool_world import Dialogue, assistant, tool_turn
from ludus.evaluation.evaluate import Evaluation
from ludus.evaluation.stats import paired_difference
from ludus.recipes import recipe_folder
from ludus.rollouts.dialogues.subagents import DELEGATE, SubAgents
from ludus.tools.base import Tool
from ludus.types import Message
from ludus.worlds.search.questions import SearchQuestion, all_questions
from ludus.worlds.search.world import SearchWorld

WORKERS, TOKENS = 3, 320
"""Subtasks of a rollout, and the tokens of each of its dialogues."""
TURNS = {"planner": WORKERS + 1, "worker": 3}
SUBAGENTS = {"max_depth": 1, "max_per_agent": WORKERS, "max_turns": TURNS["worker"], "exclusive": True}
ARMS: Mapping[str, Mapping[str, object]] = {
    "single": {"max_turns": TURNS["planner"] + WORKERS * TURNS["worker"], "max_seq_len": (1 + WORKERS) * TOKENS},
    "planner": {
        "max_turns": TURNS["planner"],
        "max_seq_len": TOKENS,
        **{f"subagents.{name}": value for name, value in SUBAGENTS.items()},
    },
}
ASKED = {
    "city": "Which city does {} serve?",
    "country": "In which country is {}?",
    "population": "What is the population of {}?",
    "nearest": "Which city is closest to {}?",
    "capital": "What is the capital of {}?",
    "currency": "What is the currency of {}?",
}
"""The subtask that finds a relation of an entity."""
SAMPLINGS = {"greedy": "greedy", "t1": "sampled at 1"}


def limits(arm: str) -> list[str]:
    """Return the settings of an arm as words of a command line."""
    words = [(f"--rollout.{name}", json.dumps(value)) for name, value in ARMS[arm].items()]
    return [word for pair in words for word in pair]


def delegating_tool(world: SearchWorld) -> Tool:
    """Return the tool `delegate` that rollouts of the planner offer."""
    task = world.tasks("train")[0]
    config = configuration("search", rollout={"subagents": SUBAGENTS})
    agents = SubAgents(task, 0, lambda: None, config.rollout)  # type: ignore[arg-type, return-value]
    tools = agents.with_delegate_tool(world.environment(task), [world.tool], ()).tools
    return next(one for one in tools if one.name == DELEGATE)


def split(dialogue: Dialogue, question: SearchQuestion, delegate: Tool) -> Iterator[Dialogue]:
    """Yield the dialogues of the workers and the planner that contain the searches of a single agent's dialogue.

    A question of one hop is delegated as it is, one of several hops as a subtask for each hop that was searched.
    """
    system, user, *rest, answer = dialogue.messages
    hops = {f"Find the {hop.relation}.": hop for hop in question.hops}
    searches: dict[str, list[Message]] = {}
    waiting: list[Message] = []
    for call, found in zip(rest[::2], rest[1::2], strict=True):
        waiting += call, found
        thought = call.get("reasoning_content", "")
        if thought in hops:  # an irrelevant search belongs to the subtask after it
            searches.setdefault(thought, []).extend(waiting)
            waiting = []
    planned: list[Message] = []
    for place, (thought, pairs) in enumerate(searches.items()):
        hop, is_last = hops[thought], place == len(searches) - 1
        subtask = question.text if len(hops) == 1 else ASKED[hop.relation].format(hop.subject)
        value = str(answer["content"]) if is_last else hop.value
        planned += tool_turn(place, DELEGATE, {"task": subtask}, value, reasoning=thought)
        asked = Message(role="user", content=subtask)
        yield Dialogue((system, asked, *pairs, assistant(value)), dialogue.tools)
    yield Dialogue((system, user, *planned, answer), (delegate,))


def write_dialogues(path: Path, arm: str, num: int) -> None:
    """Write the demonstrations of an arm; both arms have the same `num` ones of the world."""
    world, rows = SearchWorld(), []
    delegate = delegating_tool(world)
    questions = {one.text: one for pool in all_questions("train").values() for one in pool}
    for dialogue in islice(world.demonstrations(seed=1), num):
        question = questions.get(str(dialogue.messages[1]["content"]))
        parts = [dialogue]
        if arm == "planner" and dialogue.tools and question is not None:
            parts = list(split(dialogue, question, delegate))
        rows += [{"messages": one.messages, "tools": [tool.schema for tool in one.tools]} for one in parts]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def packaged(folder: Path) -> Path:
    """Return a copy of the packaged cold start whose context is the limit of `single`; its positions are rotary."""
    path = folder / "packaged"
    shutil.copytree(recipe_folder("search") / "cold_start", path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": (1 + WORKERS) * TOKENS}
    (path / "config.json").write_text(json.dumps(config))
    return path


def fine_tuned(args: argparse.Namespace, arm: str) -> list[str]:
    """Return the settings that start from an arm's fine-tuned model; train it if missing."""
    path, data = args.folder / f"sft-{arm}", args.folder / f"{arm}.jsonl"
    if not (path / "done").is_file():
        write_dialogues(data, arm, args.demonstrations)
        words = ["search", "--run.dir", str(path), "--run.threads", "1", "--model.path", str(packaged(args.folder))]
        words += ["--sft.data", str(data), "--sft.steps", str(args.sft_steps), "--sft.warmup_steps", "10"]
        words += ["--sft.learning_rate", "1e-3"]
        subprocess.run([sys.executable, "-m", "ludus", "sft", *words], check=True, stdout=subprocess.DEVNULL)
        (path / "done").touch()
    return ["--model.path", str(sorted((path / "checkpoints").glob("step-*"))[-1])]


def train(args: argparse.Namespace, arm: str, seed: int, start: Sequence[str]) -> Path:
    """Train one seed of an arm, or resume its run; return the run folder."""
    path = args.folder / f"{arm}-seed{seed}"
    if (path / "config.toml").is_file():
        ludus(path, "train", "--resume", str(path))
        return path
    words = ["--run.dir", str(path), "--run.seed", str(seed), "--run.save_rollouts", "false", *start]
    words += ["--training.steps", str(args.steps), "--training.prompts_per_step", str(args.prompts)]
    words += ["--evaluation.tasks_before", "0", "--evaluation.every", "1000"]
    ludus(path, "train", "search", *words, *limits(arm), *held_out(args))
    return path


def held_out(args: argparse.Namespace) -> list[str]:
    return ["--evaluation.splits", '["test"]', "--evaluation.tasks", str(args.tasks)]


def success(before: Mapping[str, Evaluation], after: Mapping[str, Sequence[Evaluation]]) -> str:
    """Return a table of success before and after RL by arm, in per cent, and of the differences in points."""
    names = "arm", "before RL", "after, by seed", "after, over seeds", "gain, over tasks", "over seeds"
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for arm, found in after.items():
        gain = gap(found, [before[arm]] * len(found))
        lines.append(f"| {arm} | {cells([before[arm]])} | {cells(list(found))} | {over_seeds(list(found))} | {gain} |")
    planner, single = after["planner"], after["single"]
    pairs = [([before["planner"]], [before["single"]]), *(([a], [b]) for a, b in zip(planner, single, strict=True))]
    first, *by_seed = (points(a, b) for a, b in pairs)
    lines.append(f"| planner less single | {first} | {', '.join(by_seed)} | | {gap(planner, single)} |")
    return "\n".join(lines)


def points(found: list[Evaluation], other: list[Evaluation]) -> str:
    """Return a difference in points with its interval, paired over tasks."""
    pair = paired_difference(by_task(found), by_task(other))
    return f"{100 * pair.difference:+.1f} [{100 * pair.interval.low:+.1f}, {100 * pair.interval.high:+.1f}]"


def costs(paths: Mapping[str, Sequence[Path]]) -> str:
    """Return a table of the tokens and seconds of the RL steps, means over steps and seeds."""
    columns = {
        "calls per rollout": ("metrics.jsonl", "tools/calls_per_episode"),
        "failed calls": ("metrics.jsonl", "tools/error_rate"),
        "turns": ("metrics.jsonl", "turns/mean"),
        "sampled tokens": ("metrics.jsonl", "response_length/mean"),
        "all tokens": ("metrics.jsonl", "length/total_tokens/mean"),
        "seconds per step": ("timings.jsonl", "time/step_s"),
    }
    lines = [f"| arm | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for arm, found in paths.items():
        values = []
        for file, name in columns.values():
            # the last step also evaluates
            each = [row.metrics[name] for path in found for row in read_metrics(path / file)[:-1]]
            values.append(f"{sum(each) / len(each):,.2f}")
        lines.append(f"| {arm} | {' | '.join(values)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and evaluate what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".bench/planner_worker"))
    parser.add_argument("--demonstrations", type=int, default=5000)
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=8, help="tasks of an RL step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=300, help="tasks of the split `test`")
    args = parser.parse_args(arguments)
    starts = {arm: fine_tuned(args, arm) for arm in ARMS}
    cold = {
        arm: evaluate(args.folder / f"before-{arm}", "search", *starts[arm], *limits(arm), *held_out(args))
        for arm in ARMS
    }
    found = {(arm, seed): train(args, arm, seed, starts[arm]) for seed in range(args.seeds) for arm in ARMS}
    paths = {arm: [found[arm, seed] for seed in range(args.seeds)] for arm in ARMS}
    for sampling, words in SAMPLINGS.items():
        before = {arm: last(cold[arm], sampling) for arm in ARMS}
        after = {arm: [last(path, sampling) for path in paths[arm]] for arm in ARMS}
        print(f"\n{args.tasks} tasks of `test`, {words}:\n\n{success(before, after)}")
    print(f"\n{costs(paths)}")


if __name__ == "__main__":
    main()
