"""Train every algorithm with equal budgets over several seeds and print one table.

    python benchmarks/algorithms.py table --game guess     # ten algorithms, one per mechanism
    python benchmarks/algorithms.py stages --against mixed_policy       # the same runs, another baseline
    python benchmarks/algorithms.py critic --rates 2e-4 --seeds 0 1 2 3 4        # GRPO against PPO

The experiments and their games are in experiments.toml, with the prediction that was written before the runs.
Every arm has the same cold start, tasks, steps, group size and learning rates. The first seed tries each rate
of --rates; the other seeds use the rate with the best success on `validation`, which no table shows. A run
is stored under the hash of its settings and not repeated; an interrupted run is resumed. Intervals over seeds
use the t-distribution; those of differences are paired over tasks (bootstrap), averaged over the seeds of a
task. Each run has one compute thread.

In `stages`, `more SFT` trains on as many of the world's demonstrations as `grpo` samples episodes.
`mixed_policy` and `SFT, then grpo` sample as many episodes as `grpo`, and train on one expert dialogue per
group: inside the group, or before RL.

An arm with `reward_model` trains a reward model with these settings on attempts of the start at training tasks, and
uses it as `rewards.model`. An arm of the stage `rft` samples the episodes of four RL steps in each of its rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import learning
from cold_start import cold_start
from ludus.config.load import load_config
from ludus.envs.registry import build_world
from ludus.evaluation.evaluate import Evaluation, load_evaluation
from ludus.evaluation.stats import paired_difference, t_interval
from ludus.recipes import recipe_folder
from ludus.rollouts.rollout_files import read_rollouts

T = TypeVar("T")
Column = Callable[[Path], Evaluation]
"""Returns the evaluation of a run that a table column shows."""

SEEDS = (0, 1, 2)
RATES = ("1e-4", "2e-4", "4e-4")
FILE = Path(__file__).parent / "experiments.toml"
FINE_TUNING = ("--sft.learning_rate", "1e-3", "--sft.warmup_steps", "0")
"""Settings of SFT before RL."""


@dataclass(frozen=True)
class Arm:
    """A training method: name, settings and command."""

    name: str
    settings: tuple[str, ...] = ()
    stage: str = "train"
    fine_tunes: bool = False
    """Whether SFT on expert dialogues of training tasks precedes RL."""
    reward_model: tuple[str, ...] = ()
    """Settings of the reward model that is trained before RL; empty if there is none."""


@dataclass(frozen=True)
class Game:
    """The recipe, changed settings, training steps and evaluation tasks of all arms of a table.

    An RL step has `episodes` episodes in `groups` groups, an SFT step `demonstrations` dialogues. The table has
    a column for each value of `tag` on the tasks of `test`. Without `sft_steps` the recipe's cold start is used if it
    ships one; 0 are the recipe's own steps of SFT.
    """

    recipe: str
    steps: int
    tasks: int
    settings: tuple[str, ...] = ()
    sft_steps: int | None = None
    episodes: int = 192
    demonstrations: int = 32
    groups: int = 24
    tag: str = ""
    temperature: float = 0.0
    also_greedy: bool = False
    """Whether the table has more columns for greedy evaluations."""
    reward: str = ""
    """A reward whose mean has columns, before those of success, and selects the rate; if empty, success does."""
    splits: tuple[str, ...] = ("validation", "test", "composition")
    start: tuple[str, ...] = ()
    """Settings of the SFT that makes the start, in place of the recipe's cold start."""


@dataclass(frozen=True)
class Experiment:
    """Arms of equal budget on a game; the first one is the baseline."""

    about: str
    game: str
    arms: tuple[Arm, ...]
    prediction: str = ""
    metrics: tuple[str, ...] = ()
    target: float = 0.0
    """Success on `test`; if above 0, the table shows what an arm samples until an evaluation reaches it."""


def words_of(settings: Mapping[str, object]) -> tuple[str, ...]:
    """Return settings as words of a command line."""
    pairs = [(f"--{name}", value if isinstance(value, str) else json.dumps(value)) for name, value in settings.items()]
    return tuple(word for pair in pairs for word in pair)


def read_experiment(one: Mapping[str, Any]) -> Experiment:
    """Return an experiment of the file; with `cumulative` an arm has the settings of all arms before it."""
    arms, before = list[Arm](), tuple[str, ...]()
    for fields in one["arms"]:
        own = words_of(fields.get("settings", {}))
        model = words_of(fields.get("reward_model", {}))
        arms.append(Arm(**{**fields, "settings": (*before, *own), "reward_model": model}))
        before = (*before, *own) if one.get("cumulative") else ()
    rest = {name: value for name, value in one.items() if name not in ("arms", "cumulative", "metrics")}
    return Experiment(**rest, arms=tuple(arms), metrics=tuple(one.get("metrics", ())))


@cache
def games() -> Mapping[str, Game]:
    """Return the games of the file by name."""
    found = tomllib.loads(FILE.read_text("utf-8"))["games"]
    lists = {name: {"splits": tuple(one["splits"])} if "splits" in one else {} for name, one in found.items()}
    return {
        name: Game(**{**one, **lists[name], **{key: words_of(one.get(key, {})) for key in ("settings", "start")}})
        for name, one in found.items()
    }


@cache
def experiments() -> Mapping[str, Experiment]:
    """Return the experiments of the file by name."""
    found = tomllib.loads(FILE.read_text("utf-8"))["experiments"]
    return {name: read_experiment(one) for name, one in found.items()}


def start_of(name: str, folder: Path) -> tuple[str, ...]:
    """Return the settings that start from the game's cold start; train it once if the recipe ships none."""
    game = games()[name]
    if game.sft_steps is None and not game.start and (recipe_folder(game.recipe) / "cold_start").is_dir():
        return ()
    steps = ("--sft.steps", str(game.sft_steps)) if game.sft_steps else ()
    return cold_start(game.recipe, folder / f"{name}-cold-start", (*game.settings, *game.start, *steps))


def experts_of(name: str, folder: Path, count: int) -> Path:
    """Return a file with expert dialogues of a game's first `count` training tasks; write it once."""
    path, game = folder / f"{name}-{count}-experts.jsonl", games()[name]
    if path.is_file():
        return path
    config = load_config(game.recipe, list(game.settings))
    world = build_world(config.env, config.rollout, config.sandbox)
    assert world.implements("expert")
    tasks = islice(world.tasks("train"), count)
    shown = [(task.id, one) for task in tasks if (one := world.expert(task)) is not None]
    lines = [
        json.dumps({"task": task, "messages": one.messages, "tools": [tool.schema for tool in one.tools]})
        for task, one in shown
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def reward_model_of(name: str, folder: Path, start: tuple[str, ...], words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the settings that use a reward model of attempts of the start; train it once."""
    attempts = folder / f"{name}-attempts"
    model = folder / f"{name}-{hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]}"
    common = (games()[name].recipe, "--run.threads", "1", *start)
    plan = {"splits": ["train"], "tasks": 128, "samples": 8, "temperatures": [1.0]}
    sampling = words_of({f"evaluation.{key}": value for key, value in plan.items()})
    data = attempts / "evaluations" / "step-000000-train-t1-x8.jsonl.gz"
    if not data.is_file():
        command = [sys.executable, "-m", "ludus", "eval", *common, *sampling, "--out", str(attempts)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if not (model / "done").is_file():
        own = ("--run.dir", str(model), "--reward_model.data", str(data), *words)
        subprocess.run([sys.executable, "-m", "ludus", "reward-model", *common, *own], check=True, stdout=sys.stderr)
        (model / "done").touch()
    return ("--rewards.model", str(model))


def newest(path: Path) -> tuple[str, ...]:
    """Return the settings that start from the last checkpoint of a run."""
    checkpoint = sorted((path / "checkpoints").glob("step-*"))[-1]
    return ("--model.path", str(checkpoint), "--model.from_scratch", "false")


def train(folder: Path, recipe: str, words: tuple[str, ...], stage: str = "train") -> Path:
    """Train, unless a run with the hash of these settings is complete; return its folder."""
    kind = () if stage == "train" else (stage,)
    key = hashlib.sha256(json.dumps([*kind, recipe, *words]).encode()).hexdigest()[:16]
    path = folder / key
    command = [sys.executable, "-m", "ludus", stage]
    if (path / "config.toml").is_file():
        command += ["--resume", str(path)]
    else:
        command += [recipe, "--run.dir", str(path), "--run.threads", "1", *words]
    if not (path / "done").is_file():
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        if stage == "sft":
            evaluate = [sys.executable, "-m", "ludus", "eval", "--run", str(path)]
            subprocess.run(evaluate, check=True, stdout=subprocess.DEVNULL)
        (path / "settings.json").write_text(json.dumps([recipe, *words]))
        (path / "done").touch()
    return path


def last(path: Path, split: str, how: str = "", reward: str = "") -> Evaluation:
    """Return the evaluation after training; with `reward`, the sums of its values in place of successes.

    `how` is the sampling in the file's name, such as `greedy`; it is needed for runs with several temperatures.
    """
    files = (path / "evaluations").glob(f"step-*{split}*{how}*.json")
    found = {file: one for file in files if (one := load_evaluation(file)).plan.split == split}
    file = max(found, key=lambda file: (found[file].plan.step, found[file].plan.num_tasks))
    if not reward:
        return found[file]
    sums = dict.fromkeys(found[file].task_ids, 0.0)
    for record in read_rollouts(file.with_suffix(".jsonl.gz")):
        sums[record.trajectory.task_id] += record.trajectory.rewards.get(reward, 0.0)
    return replace(found[file], successes=tuple(sums.values()))


def metric_of(path: Path, name: str) -> float:
    """Return the mean of a metric over the last five steps of a run that have it; nan if none does."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text("utf-8").splitlines()]
    values = [row[name] for row in rows if name in row]
    return fmean(values[-5:]) if values else math.nan


def until(path: Path, target: float) -> str:
    """Return the episodes sampled, and the seconds of steps, until success on `test` is at least `target`."""
    found = [load_evaluation(file) for file in (path / "evaluations").glob("step-*test*.json")]
    last_step = min((one.plan.step for one in found if one.rate >= target), default=math.inf)
    rows = {name: (path / f"{name}.jsonl").read_text("utf-8").splitlines() for name in ("metrics", "timings")}
    before = {name: [row for line in rows[name] if (row := json.loads(line))["step"] <= last_step] for name in rows}
    episodes = sum(row["ledger/started"] for row in before["metrics"])
    seconds = sum(row["time/step_s"] for row in before["timings"])
    return f"{'' if last_step < math.inf else 'never: '}{episodes:.0f} in {seconds:.0f} s"


def run(args: argparse.Namespace, arms: Sequence[Arm]) -> dict[str, tuple[str, list[Path]]]:
    """Run all arms; return for each the best rate on `validation` with the first seed, and the runs at that rate."""
    game = games()[args.game]
    start = (*start_of(args.game, args.folder), *game.settings)
    temperatures = [game.temperature, *([0.0] if game.also_greedy else [])]
    common = (
        *("--evaluation.splits", json.dumps(game.splits), "--evaluation.temperatures", json.dumps(temperatures)),
        *("--evaluation.tasks", str(game.tasks), "--evaluation.every", "1000"),
        *("--evaluation.tasks_before", str(game.tasks)),
    )

    steps = args.steps or game.steps
    budgets = {
        "train": ("--training.steps", str(steps), "--run.save_rollouts", "false"),
        "sft": ("--sft.steps", str(steps * game.episodes // game.demonstrations)),
        "rft": (
            *("--rft.rounds", str(steps // 4), "--rft.tasks_per_round", str(4 * game.groups)),
            *("--rft.samples", str(game.episodes // game.groups)),
        ),
    }
    sections = {"train": "training", "sft": "sft", "rft": "rft"}
    num_fine = max(1, steps * game.groups // game.demonstrations)

    def one(job: tuple[Arm, str, int]) -> Path:
        arm, rate, seed = job
        own = ("--run.seed", str(seed), f"--{sections[arm.stage]}.learning_rate", rate)
        begin = start
        if arm.fine_tunes:
            dialogues = experts_of(args.game, args.folder, num_fine * game.demonstrations)
            shown = ("--sft.data", str(dialogues), "--sft.steps", str(num_fine))
            words = (*start, *FINE_TUNING, *shown, *common, "--run.seed", str(seed))
            begin = (*game.settings, *newest(train(args.folder, game.recipe, words, "sft")))
        model = reward_model_of(args.game, args.folder, start, arm.reward_model) if arm.reward_model else ()
        words = (*begin, *budgets[arm.stage], *common, *arm.settings, *model, *own)
        return train(args.folder, game.recipe, words, arm.stage)

    first, *others = args.seeds
    with ThreadPoolExecutor(args.parallel) as pool:
        sweep = [(arm, rate, first) for arm in arms for rate in args.rates]
        tried = dict(zip([(a.name, r) for a, r, _ in sweep], pool.map(one, sweep), strict=True))
        score = partial(last, split="validation", **selection(game))
        best = {arm.name: max(args.rates, key=lambda rate: score(tried[arm.name, rate]).rate) for arm in arms}
        rest = [(arm, best[arm.name], seed) for seed in others for arm in arms]
        more = list(zip([a.name for a, _, _ in rest], pool.map(one, rest), strict=True))
    return {
        arm.name: (
            best[arm.name],
            [tried[arm.name, best[arm.name]], *(path for name, path in more if name == arm.name)],
        )
        for arm in arms
    }


def part(whole: Evaluation, ids: Collection[str]) -> Evaluation:
    """Return the evaluation restricted to some tasks."""
    at = [i for i, task in enumerate(whole.task_ids) if task in ids]

    def chosen(values: Sequence[T]) -> tuple[T, ...]:
        return tuple(values[i] for i in at)

    families, successes = chosen(whole.families), chosen(whole.successes)
    return replace(whole, task_ids=chosen(whole.task_ids), successes=successes, families=families)


def selection(game: Game) -> dict[str, str]:
    """Return the options of `last` for what selects the rate; without options for a game with plain columns."""
    how = f"t{game.temperature:g}" if game.also_greedy else ""
    return {name: value for name, value in {"how": how, "reward": game.reward}.items() if value}


def columns(game: Game) -> dict[str, Column]:
    """Return the table columns of a game by title."""
    given = selection(game)
    kinds = [("", given)] + ([(", greedy", {**given, "how": "greedy"})] if game.also_greedy else [])
    found: dict[str, Column] = {}
    for suffix, own in kinds:
        if game.reward:
            found[f"test, {game.reward}{suffix}"] = partial(last, split="test", **own)
        found[f"test{suffix}"] = partial(last, split="test", **{**own, "reward": ""})
    if game.tag:
        config = load_config(game.recipe, list(game.settings))
        ids: dict[str, set[str]] = {}
        for task in build_world(config.env, config.rollout, config.sandbox).tasks("test"):
            ids.setdefault(task.tags[game.tag], set()).add(task.id)
        found |= {f"{value} {game.tag}": partial(last_of, ids=own) for value, own in sorted(ids.items())}
    rest = {split: partial(last, split=split) for split in game.splits if split not in ("validation", "test")}
    return found | rest


def last_of(path: Path, ids: Collection[str]) -> Evaluation:
    """Return the evaluation after training, restricted to some tasks of `test`."""
    return part(last(path, "test"), ids)


def table(
    found: dict[str, tuple[str, list[Path]]], baseline: str, shown: Mapping[str, Column], experiment: Experiment
) -> str:
    """Return a table of success in per cent with intervals over seeds, differences from the baseline, and metrics."""
    goal = [f"episodes until {experiment.target:.0%}"] if experiment.target else []
    compared = [name for name in shown if name != "composition"]
    gaps = [(f"{name}, against {baseline}, paired over tasks", "over seeds") for name in compared]
    titles = ("arm", "rate", *shown, *(title for gap in gaps for title in gap), *experiment.metrics, *goal)
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, (rate, paths) in found.items():
        cells = [learning.over_seeds([take(p) for p in paths]) for take in shown.values()]
        for take in (shown[one] for one in compared):
            plain = [take(p) for p in found[baseline][1]]
            cells += ["", ""] if name == baseline else differences([take(p) for p in paths], plain)
        cells += [" ".join(f"{metric_of(path, metric):.3g}" for path in paths) for metric in experiment.metrics]
        cells += [", ".join(until(path, experiment.target) for path in paths) for _ in goal]
        lines.append(f"| {name} | {rate} | {' | '.join(cells)} |")
    return "\n".join(lines)


def differences(found: Sequence[Evaluation], plain: Sequence[Evaluation]) -> tuple[str, str]:
    """Return the difference of two arms in points, with 95 % intervals over tasks and over seeds."""
    over_tasks = paired_difference(learning.by_task(list(found)), learning.by_task(list(plain)))
    over_seeds = t_interval([100 * (a.rate - b.rate) for a, b in zip(found, plain, strict=True)])
    rows = (
        (100 * over_tasks.difference, 100 * over_tasks.interval.low, 100 * over_tasks.interval.high),
        (over_seeds.mean, over_seeds.interval.low, over_seeds.interval.high),
    )
    first, second = (f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" for mean, low, high in rows)
    return first, second


def main() -> None:
    """Run the chosen arms and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    lines = [f"{name}: {one.about}" for name, one in experiments().items()]
    parser.add_argument("what", choices=tuple(experiments()), metavar="experiment", help="\n".join(lines))
    parser.add_argument("--game", choices=tuple(games()), help="default: the experiment's")
    parser.add_argument("--folder", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--steps", type=int, help="training steps (default: the game's)")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--only", nargs="+", help="run only these arms")
    parser.add_argument("--against", help="baseline of the differences (default: the first arm)")
    args = parser.parse_args()
    experiment = experiments()[args.what]
    args.game = args.game or experiment.game
    chosen = [arm for arm in experiment.arms if not args.only or arm.name in args.only]
    baseline = args.against or experiment.arms[0].name
    if baseline not in [arm.name for arm in chosen]:
        parser.error(f"the baseline {baseline!r} is not among the arms {[arm.name for arm in chosen]}")
    if experiment.prediction:
        print(f"Prediction: {experiment.prediction}\n", flush=True)
    print(table(run(args, chosen), baseline, columns(games()[args.game]), experiment))


if __name__ == "__main__":
    main()
