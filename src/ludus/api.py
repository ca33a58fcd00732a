"""Ludus as a library: `train`, `sft`, `evaluate`, `rollout` and `load`, with the settings of the command line.

Each function also works inside a running event loop, such as a notebook's, and has an asynchronous form
(`train_async`, `sft_async`, `evaluate_async`, `rollout_async`).
"""

from __future__ import annotations

import asyncio
import ctypes
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from io import BytesIO
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ludus.cli.arguments import model_settings, policy_config
from ludus.config.load import config_from_toml, load_config, setting_words
from ludus.config.schema import Config
from ludus.config.settings import is_section, suggestion
from ludus.config.toml import to_toml
from ludus.diagnostics.trackers import read_metrics
from ludus.envs.agent_world import AgentFunction, AgentWorld, RewardFunction
from ludus.envs.base import World
from ludus.errors import LudusError, UserError
from ludus.evaluation.evaluate import Evaluation, load_evaluation, plans
from ludus.rollouts.ledger import Ledger, RolloutKey
from ludus.rollouts.rollout_files import read_rollouts
from ludus.rollouts.scheduler import RolloutRequest, SamplingPlan
from ludus.training.run.run_dir import RunFolder, latest_checkpoint, lock_run, new_run
from ludus.types import Trajectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ludus.cli.ui.load_run import LoadedRun

P = ParamSpec("P")
T = TypeVar("T")
Source = str | Path | Config
Tasks = Sequence[object] | Mapping[str, Sequence[object]]

_SETTING = re.compile(r"`[^`]*`|--([a-z_]+)((?:\.[A-Za-z_]+)+)(?:[ =](\d[\d.e-]*|none|true|false)\b)?")
"""A command in backticks, which stays as it is, or a setting in the form of the command line."""
_PYTHON = {"none": "None", "true": "True", "false": "False"}


@dataclass(frozen=True)
class Run:
    """The folder of a training run, of which all properties are read when they are used."""

    path: Path

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return RunFolder(self.path).load_config()

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics of each step, with the number of the step as `step`."""
        rows = read_metrics(RunFolder(self.path).metrics)
        return [{"step": row.step, **row.metrics} for row in rows]

    @property
    def rollouts(self) -> list[Trajectory]:
        """The training rollouts of all steps, in order."""
        files = sorted(RunFolder(self.path).rollouts.glob("step-*.jsonl.gz"))
        return [record.trajectory for file in files for record in read_rollouts(file)]

    @property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations, by step, split and temperature."""
        return [load_evaluation(file) for file in sorted(RunFolder(self.path).evaluations.glob("*.json"))]

    @property
    def checkpoint(self) -> Path:
        """The folder of the newest checkpoint. Raises UserError if the run has no checkpoint."""
        return latest_checkpoint(RunFolder(self.path))[1]

    def plot(self, *names: str) -> Figure:
        """Return a figure of metrics by step: by default the mean reward and the held-out success with its interval."""
        figure, axes = _figure()
        for name in names or ("reward/mean",):
            points = [(row["step"], row[name]) for row in self.metrics if name in row]
            axes.plot(*zip(*points, strict=True), label=name)
        held_out = [] if names else [one for one in self.evaluations if one.plan.temperature == 0]
        for split in dict.fromkeys(one.plan.split for one in held_out):
            found = [one for one in held_out if one.plan.split == split]
            _plot_success(axes, [one.plan.step for one in found], found, f"held-out success ({split}, greedy)")
        axes.set_xlabel("step")
        axes.legend()
        return figure

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {len(self.metrics)} steps)"


@dataclass(frozen=True)
class Evaluated:
    """Evaluations of one model, and their rollouts."""

    evaluations: Sequence[Evaluation]
    rollouts: Sequence[Trajectory]

    @property
    def metrics(self) -> dict[str, float]:
        """Success with its 95 % interval, and mean reward parts, by split and sampling."""
        return {name: value for one in self.evaluations for name, value in one.metrics().items()}

    def plot(self) -> Figure:
        """Return a figure of the success rates with their 95 % intervals."""
        figure, axes = _figure()
        names = [f"{one.plan.split}, T={one.plan.temperature:g}" for one in self.evaluations]
        _plot_success(axes, range(len(names)), self.evaluations, "success", line="")
        axes.set_xticks(range(len(names)), names)
        axes.set_ylim(0, 1)
        return figure


@dataclass(frozen=True)
class Rollouts:
    """Rollouts of one model."""

    rollouts: Sequence[Trajectory]

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the rollouts: reward, reward parts, turns and sampled tokens."""
        names = dict.fromkeys(name for one in self.rollouts for name in one.rewards)
        parts = {f"reward/{name}": [one.rewards.get(name, 0.0) for one in self.rollouts] for name in names}
        columns = parts | {
            "reward/mean": [one.reward for one in self.rollouts],
            "turns": [sum(s.kind == "action" for s in one.segments) for one in self.rollouts],
            "response_length": [one.num_action_tokens for one in self.rollouts],
        }
        return {name: sum(values) / len(values) for name, values in columns.items()}

    def plot(self) -> Figure:
        """Return a histogram of the rewards."""
        figure, axes = _figure()
        axes.hist([one.reward for one in self.rollouts], bins=20)
        axes.set_xlabel("reward")
        axes.set_ylabel("rollouts")
        return figure


@contextmanager
def keyword_hints() -> Iterator[None]:
    """Write the settings in the hint of an error as keyword arguments: `--a.b 1` becomes `a={"b": 1}`."""
    try:
        yield
    except LudusError as error:
        error.hint = _SETTING.sub(_keyword, error.hint)
        raise


def _keyword(found: re.Match[str]) -> str:
    section, names, value = found.groups()
    if section is None:
        return found.group()
    text = _PYTHON.get(value, value or "...")
    for name in reversed(names[1:].split(".")):
        text = f'{{"{name}": {text}}}'
    return f"{section}={text}"


def outside_loop(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function with an event loop, in a thread if one runs already, under `keyword_hints`; interrupts end it."""

    @wraps(function)
    @keyword_hints()
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        loop = None
        with suppress(RuntimeError):
            loop = asyncio.get_running_loop()
        if loop is None:
            return function(*args, **kwargs)
        thread: list[int] = []
        with ThreadPoolExecutor(1, initializer=lambda: thread.append(get_ident())) as pool:
            try:
                return pool.submit(function, *args, **kwargs).result()
            except KeyboardInterrupt:
                interrupt = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread[0]), interrupt)
                raise

    return run


@keyword_hints()
def configuration(source: Source | None = None, **settings: object) -> Config:
    """Return the configuration of a recipe, file or `Config`, with settings by section.

    `configuration("search", training={"steps": 20}, model="path")`: `model` also accepts a path or name. Raises
    ConfigError with one sentence per mistake.
    """
    words: list[str] = []
    if isinstance(settings.get("model"), str | Path):
        words = model_settings(str(settings.pop("model")), source if isinstance(source, str) else None)
    for section, values in settings.items():
        if not isinstance(values, Mapping):
            hint = f"Write {section}={{...}}." if is_section(section) else f"{suggestion(section)}.".capitalize()
            raise UserError(f"{section} = {values!r} is not a table of settings.", hint)
        words += setting_words(values, f"{section}.")
    if isinstance(source, Config):
        return config_from_toml(to_toml(source), "the configuration and the arguments", words)
    return load_config(source, words, overrides_origin="the arguments")


@outside_loop
def train(
    source: Source | World | AgentFunction | None = None,
    tasks: Tasks = (),
    reward: RewardFunction | None = None,
    *,
    resume: str | Path | Run | None = None,
    progress: bool = True,
    **settings: object,
) -> Run:
    """Train by RL in a new run folder, or in that of a run to `resume`, and return the run.

    `source` is a recipe name, a path of a .toml or world file, a `Config`, a `World`, or an agent function
    `agent(task, policy)` with `tasks` (a list, every fifth of which is held out, or lists by split) and
    `reward(task, answer)` in [0, 1].
    `settings` are tables by section: `training={"steps": 20}`. A resumed run has those of its folder, from which
    `settings` differ; its `source` is its agent function or `World`, if it was trained on one. Raises UserError and its
    subclasses for settings that a user can fix.
    """
    from ludus.cli.ui.progress import train_policy
    from ludus.cli.ui.terminal import make_console, silence_libraries
    from ludus.training.resume import check_kind, check_resume, is_complete
    from ludus.training.rl.validate import open_validated_session
    from ludus.training.run.preflight import check_new_run, check_plugins

    old = None if resume is None else RunFolder(load(resume.path if isinstance(resume, Run) else resume).path)
    recipe = source if isinstance(source, str) else None
    silence_libraries()
    with ExitStack() as locks:
        if old is not None:
            locks.enter_context(lock_run(old))
        config, world = _resolve(source, tasks, reward, settings, old)
        check_plugins(config)
        if old is None:
            check_new_run(config, "rl")
        else:
            check_kind(old, "rl")
            check_resume(old, config, "rl")
            if is_complete(old, config, "rl"):
                return Run(old.path)
        session = open_validated_session(config, world=world)
        folder = old or new_run(config, Path(recipe or config.env.name).stem, "rl", recipe)
        if old is None:
            locks.enter_context(lock_run(folder))
        train_policy(config, folder, session, make_console(quiet=not progress))
    return Run(folder.path)


@outside_loop
def sft(source: Source, **settings: object) -> Run:
    """Fine-tune on the demonstrations of an environment, or the file `sft={"data": path}`, in a new run folder."""
    from ludus.cli.training.stages import SFT

    config = configuration(source, **settings)
    tune = SFT.prepare(config, True)
    folder = new_run(config, f"{Path(config.env.name).stem}-sft", "sft")
    with lock_run(folder):
        tune(folder)
    return Run(folder.path)


@outside_loop
def evaluate(
    source: Source | Run, *, world: World | None = None, progress: bool = True, **settings: object
) -> Evaluated:
    """Evaluate a run's newest checkpoint (a `Run` or its folder) or a recipe's model, without writing files.

    A run that was trained on a `World` object needs it as `world`. The section `evaluation` of `settings` chooses
    splits, temperatures and the number of tasks.
    """
    return _with_model(source, world, settings, partial(_evaluate, progress=progress))


@outside_loop
def rollout(
    source: Source | Run,
    num_tasks: int = 8,
    *,
    samples: int = 1,
    split: str = "test",
    world: World | None = None,
    **settings: object,
) -> Rollouts:
    """Sample `samples` rollouts for each of the first `num_tasks` tasks of a split, at `rollout.temperature`."""
    return _with_model(source, world, settings, partial(_rollout, num_tasks=num_tasks, samples=samples, split=split))


def load(path: str | Path) -> Run:
    """Return the run in a folder. Raises UserError if it is not a run folder."""
    RunFolder(Path(path)).check()
    return Run(Path(path))


def asynchronous(function: Callable[P, T]) -> Callable[P, Coroutine[None, None, T]]:
    """Return a coroutine function that runs `function` in a thread."""

    @wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(function, *args, **kwargs)

    return run


train_async = asynchronous(train)
sft_async = asynchronous(sft)
evaluate_async = asynchronous(evaluate)
rollout_async = asynchronous(rollout)


def _resolve(
    source: Source | World | AgentFunction | None,
    tasks: Tasks,
    reward: RewardFunction | None,
    settings: dict[str, object],
    resumed: RunFolder | None,
) -> tuple[Config, World | None]:
    """Return the configuration, with that of a resumed run as the default, and the world of a `World` or function."""
    if resumed is not None and isinstance(source, str | Path | Config):
        raise UserError("A resumed run reads its settings from its folder.", "Pass no recipe.")
    default = None if resumed is None else resumed.config
    if source is None or isinstance(source, str | Path | Config):
        return configuration(source or default, **settings), None
    changes: dict[str, object]
    if isinstance(source, World):
        world, changes = source, {"name": source.name}
    elif reward is None:
        raise UserError("An agent function needs tasks and a reward.", "Call train(agent, tasks, reward, ...).")
    else:
        world, changes = AgentWorld.of(source, tasks, reward), {"name": "agent", "check": False}
    config = configuration(default, **settings)
    update: dict[str, object] = {"env": config.env.model_copy(update=changes)}
    if world.runs_agents:  # their rewards are computed when they end
        update["rollout"] = config.rollout.model_copy(update={"reward_processes": 0})
    return config.model_copy(update=update), world


def _with_model(
    source: Source | Run,
    world: World | None,
    settings: dict[str, object],
    use: Callable[[LoadedRun], Coroutine[None, None, T]],
) -> T:
    """Load the model of a run or recipe and use it in a new event loop."""
    from ludus.cli.ui.load_run import open_weights

    path = source.path if isinstance(source, Run) else source
    folder = RunFolder(Path(path)) if not isinstance(path, Config) and (Path(path) / "config.toml").is_file() else None
    if folder is not None:
        policy_config(folder, ())  # refuses reward models
        config = configuration(folder.config, **settings)
    else:
        config = configuration(path, **settings)

    async def run() -> T:
        async with aclosing(await open_weights(config, folder, world)) as opened:
            return await use(opened)

    return asyncio.run(run())


async def _evaluate(opened: LoadedRun, progress: bool) -> Evaluated:
    from ludus.cli.evaluate.eval import engine_backend, run_plan
    from ludus.cli.ui.terminal import make_console

    session, console = opened.session, make_console(quiet=not progress)
    results, rollouts = [], []
    for plan in plans(session.config, opened.step):
        result, episodes = await run_plan(engine_backend(session.world, opened), plan, console)
        results.append(result)
        rollouts += [episode.trajectory for episode in episodes]
    return Evaluated(results, rollouts)


async def _rollout(opened: LoadedRun, num_tasks: int, samples: int, split: str) -> Rollouts:
    from ludus.training.run.session import session_scheduler

    session = opened.session
    plan = SamplingPlan("rollout", session.config.rollout.temperature, session.config.run.seed)
    scheduler = session_scheduler(session, opened.engine, plan, Ledger())
    requests = [
        RolloutRequest(RolloutKey(opened.step, task.id, sample), task)
        for task in session.world.tasks(split)[:num_tasks]
        for sample in range(samples)
    ]
    return Rollouts([episode.trajectory for episode in await scheduler.run(requests)])


def _figure() -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("Plots need matplotlib.", "Install it: pip install 'ludus[plot]'.") from error

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:  # notebooks show only figures of pyplot otherwise
            self.savefig(file := BytesIO(), format="png", dpi=100)
            return file.getvalue()

    figure = NotebookFigure(figsize=(7, 4), layout="constrained")
    return figure, figure.subplots()


def _plot_success(axes: Axes, x: Sequence[int], found: Sequence[Evaluation], label: str, line: str = "-") -> None:
    rates = [one.rate for one in found]
    errors = [[one.rate - one.interval.low for one in found], [one.interval.high - one.rate for one in found]]
    axes.errorbar(x, rates, yerr=errors, marker="o", capsize=3, linestyle=line, label=label)
