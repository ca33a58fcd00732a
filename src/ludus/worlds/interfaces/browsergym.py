"""MiniWoB++ tasks in a browser (packages browsergym-miniwob and miniwob).

An observation is the goal and the accessibility tree, whose elements have ids in brackets; an action is a call of
BrowserGym's action set, such as `click('12')`, of which those that could open local files are left out. The package's
browser belongs to one thread, so the episodes of a process take turns: for several at once serve the world in several
processes (the world `remote`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.simulator_world import Observation, Simulator, SimulatorWorld
from ludus.envs.task_files import SPLITS
from ludus.envs.tool_env import ToolLimits
from ludus.errors import UserError
from ludus.types import Message, Task
from ludus.worlds.adapters.base import load_package

T = TypeVar("T")
ACTIONS = ("noop", "click", "dblclick", "hover", "fill", "clear", "focus", "press", "select_option", "drag_and_drop")
SYSTEM = """Solve the goal in the browser. Each message is one action, such as:
click('12')
fill('12', 'text')
select_option('12', 'option')
press('12', 'Enter')
hover('12')
drag_and_drop('12', '13')
noop()
The ids are the numbers in brackets."""


class BrowserGymSettings(WorldSettings):
    """Settings of the world browsergym (`env.settings`)."""

    tasks: tuple[str, ...] = ()
    """Names of tasks such as `click-test`; empty: all."""
    seeds: int = Field(4, ge=1)
    """Number of seeds of each task in each split."""
    browser: str = ""
    """Path of Chromium; empty: that on the PATH."""
    delay_s: float = Field(0.1, ge=0)
    """Time between an action and its observation (s)."""
    max_characters: int = Field(4_000, ge=100)
    """Maximum length of an observation."""


@dataclass
class _Chat:
    """The conversation of an episode, without the package's window, which is a second browser."""

    headless: bool = True
    chat_size: tuple[int, int] = (0, 0)
    record_video_dir: str | None = None
    messages: list[dict[str, object]] = field(default_factory=list)

    def add_message(self, role: str, msg: str) -> None:
        self.messages.append({"role": role, "timestamp": 0.0, "message": msg})

    def close(self) -> None:
        return


class BrowserEpisode(Simulator):
    """One page of a task."""

    def __init__(self, settings: BrowserGymSettings, name: str, seed: int) -> None:
        self._settings, self._name, self._seed = settings, name, seed

    def reset(self) -> str:
        return _in_browser_thread(self._reset)

    def step(self, action: str) -> Observation:
        return _in_browser_thread(lambda: self._step(action))

    def close(self) -> None:
        if "_env" in vars(self):
            _in_browser_thread(self._env.close)

    def _reset(self) -> str:
        package = load_package("browsergym.core.env", "browsergym-miniwob", "browsergym")
        vars(package)["Chat"] = _Chat
        functions = vars(load_package("browsergym.core.action.functions", "browsergym-miniwob", "browsergym"))
        sets = load_package("browsergym.core.action.highlevel", "browsergym-miniwob", "browsergym")
        actions = sets.HighLevelActionSet(["custom"], [functions[name] for name in ACTIONS])
        folder = Path(load_package("miniwob", "miniwob", "browsergym").__file__ or "").parent / "html" / "miniwob"
        self._env = package.BrowserEnv(
            task_entrypoint=_task_types()[self._name],
            task_kwargs={"base_url": f"{folder.as_uri()}/"},
            pw_chromium_kwargs={"executable_path": self._settings.browser or shutil.which("chromium")},
            pre_observation_delay=self._settings.delay_s,
            action_mapping=actions.to_python_code,
        )
        return self._text(self._env.reset(seed=self._seed)[0])

    def _step(self, action: str) -> Observation:
        seen, reward, ended, cut, _ = self._env.step(action)
        self.success = float(reward > 0)
        error = str(seen["last_action_error"])
        text = f"Error: {error.splitlines()[0]}\n{self._text(seen)}" if error else self._text(seen)
        return Observation(text, float(reward), bool(ended or cut), valid=not error)

    def _text(self, seen: Mapping[str, object]) -> str:
        flatten = load_package("browsergym.utils.obs", "browsergym-miniwob", "browsergym").flatten_axtree_to_str
        return f"Goal: {seen['goal']}\n{flatten(seen['axtree_object'])}"[: self._settings.max_characters]


@cache
def _browser_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "browser")


def _in_browser_thread(work: Callable[[], T]) -> T:
    return _browser_thread().submit(work).result()


@cache
def _task_types() -> Mapping[str, type]:
    """Return the classes of tasks by name."""
    base = load_package("browsergym.miniwob.base", "browsergym-miniwob", "browsergym").AbstractMiniwobTask
    package = load_package("browsergym.miniwob.all", "browsergym-miniwob", "browsergym")
    found = [one for one in vars(package).values() if isinstance(one, type) and issubclass(one, base)]
    return {str(vars(one)["subdomain"]): one for one in found if "subdomain" in vars(one)}


def make_browsergym_world(settings: Mapping[str, object], limits: ToolLimits) -> SimulatorWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    chosen = read_settings(BrowserGymSettings, settings)
    known = _task_types()
    if unknown := [name for name in chosen.tasks if name not in known]:
        raise UserError(f"MiniWoB++ has no task {unknown[0]!r}.", f"Tasks: {', '.join(known)}.")
    if not (chosen.browser or shutil.which("chromium")):
        raise UserError("The program chromium is not installed.", "Install it, or set env.settings.browser.")
    system = Message(role="system", content=SYSTEM)
    lists = {
        split: [
            Task(f"{name}-{seed}", (system,), None, {"split": split, "family": name}, seed=seed)
            for name in chosen.tasks or known
            for seed in range(first * chosen.seeds, (first + 1) * chosen.seeds)
        ]
        for first, split in enumerate(SPLITS)
    }

    def make(task: Task) -> BrowserEpisode:
        return BrowserEpisode(chosen, task.tags["family"], task.seed)

    return SimulatorWorld("browsergym", lists, make, blocks=True, has_expert=False)
