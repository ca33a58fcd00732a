"""The worlds gui (OSWorld's and WebGUM's kind of task) and web (WebArena's kind) over small web applications.

An episode operates the pages of the applications, and succeeds if its tables end as the instruction says, without any
other change. A policy sees pages as an accessibility tree, as HTML, as read from a browser, or as screenshots.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Annotated, Literal

from pydantic import Field

from ludus.envs.settings import read_settings
from ludus.envs.simulator_world import Observation, Simulator, play_expert
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import Dialogue, assistant
from ludus.rewards.base import truth_of
from ludus.types import Message, Task
from ludus.worlds.apps.pages import as_html, as_tree
from ludus.worlds.apps.site import SiteStep, pending, perform, step_action
from ludus.worlds.apps.tasks import SPLITS, SiteGoal, SiteSpec, goals, site_spec, templates
from ludus.worlds.apps.visits import SiteVisit, TabVisit, TreeVisit, parse_action
from ludus.worlds.browser import BrowserSettings, BrowserWorld, SiteBrowser

Rendering = Literal["tree", "html", "browser", "screenshot", "both"]
ACTIONS = "click N, type N text, select N option, back, done"
PIXEL_ACTIONS = f"{ACTIONS}, click at X Y, press KEY, write text"
SYSTEM = "Do the task with the applications. Reply with one action: {}."
IN_BROWSER: Sequence[Rendering] = ("browser", "screenshot", "both")
PICTURES: Sequence[Rendering] = ("screenshot", "both")


class AppsSettings(BrowserSettings):
    """Settings of the worlds gui and web (`env.settings`)."""

    observation: Rendering = "tree"
    """Pages as an accessibility tree, as HTML, as the tree of a document in Chromium, as screenshots of Chromium, or as
    both of these."""
    viewport: tuple[Annotated[int, Field(ge=64, le=4096)], Annotated[int, Field(ge=64, le=4096)]] = (640, 480)
    """Width and height of pages in Chromium, in pixels."""
    levels: tuple[Literal[1, 2, 3, 4], ...] = Field((1, 2, 3), min_length=1)
    """1: a named record, 2: a condition or a value to look up, 3: several applications, 4 (only gui): a record named by
    its color or highlighted, which pictures and HTML show. The split `composition` has other combinations of 1 to 3."""
    families: tuple[str, ...] = ()
    """Families of the tasks outside `composition`; empty means all of the levels."""
    hostile: float = Field(0.0, ge=0, le=1)
    """Fraction of the tasks in which records contain orders, HTML and scripts."""
    wrong_record: float = Field(0.2, ge=0, le=1)
    """Fraction of the demonstrations that use a similar record, or the first hour although it is taken."""
    forgets_field: float = Field(0.2, ge=0, le=1)
    """Fraction of the demonstrations that leave the last field of a form as it is."""
    stops_early: float = Field(0.15, ge=0, le=1)
    """Fraction of the demonstrations that omit the last of several steps."""


class AppsSimulator(Simulator):
    """An episode, which ends with `done`; success is the state of the tables then. `steps` are those of the expert."""

    def __init__(self, goal: SiteGoal, spec: SiteSpec, settings: AppsSettings, browser: SiteBrowser) -> None:
        self.site, self.steps = spec.site(goal.tables), goal.steps
        self._goal, self._settings, self._browser = goal, settings, browser
        self._visit: SiteVisit | None = None

    @property
    def visit(self) -> SiteVisit:
        """The visit, which starts at its first use."""
        if self._visit is None:
            kind = self._settings.observation
            if kind in IN_BROWSER:
                self._visit = TabVisit(self.site, self._browser, self._settings.viewport, kind != "screenshot")
            else:
                self._visit = TreeVisit(self.site, as_tree if kind == "tree" else as_html)
        return self._visit

    def reset(self) -> str:
        """Return the instruction and the first page."""
        return f"{self._goal.instruction}\n{self.visit.read()}"

    def step(self, action: str) -> Observation:
        """Apply an action; `done` ends the episode."""
        visit = self.visit
        parsed = parse_action(action, visit.size)
        if parsed is not None and parsed.verb == "done":
            self.success = float(self.site.state == self._goal.final)
            return Observation("", self.success, done=True)
        text = visit.act(parsed) if parsed is not None else None
        if text is None:
            return Observation(f"Not possible here. Actions: {ACTIONS}.", valid=False)
        left = pending(self.site, self._goal.steps)
        self.reached = frozenset(step.path for step in self._goal.steps if step not in left)
        return Observation(text)

    def actions(self) -> Sequence[str]:
        """Return the clicks and selections on the current page, and `done`."""
        found = ["done"]
        for number, one in enumerate(self.visit.items, 1):
            found += [f"select {number} {option}" for option in one.options]
            found += [f"click {number}"] if one.role in ("link", "button", "checkbox") else []
        return found

    def expert_action(self) -> str | None:
        left = pending(self.site, self.steps)
        if not left:
            return "done"
        return step_action(self.site, self.visit.path, self.visit.items, left[0])

    def image(self) -> bytes | None:
        return self.visit.screenshot() if self._settings.observation in PICTURES else None

    def state_key(self) -> str:
        return f"{self.visit.path} {[one.value for one in self.visit.items]} {self.site.state}"

    def close(self) -> None:
        if self._visit is not None:
            self._visit.close()


@dataclass(frozen=True)
class AppsWorld(BrowserWorld):
    """Tasks in web applications. `browser` is used if pages are read from one."""

    settings: AppsSettings = field(default_factory=AppsSettings)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield episodes on training tasks, with systematic mistakes."""
        rng = random.Random(f"demonstrations:{self.name}:{self.settings.seed}:{seed}")
        while True:
            task = rng.choice(self.task_lists["train"])
            if (shown := self._played(task, self._flawed(truth_of(task, SiteGoal), rng))) is not None:
                yield shown

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        """Return claims, the solution with a similar record, with empty forms, without its end, or with an excess."""
        goal, found = truth_of(task, SiteGoal), dict(super().cheats(task))
        excess = SiteStep(
            next(f"/{name}/new" for name, spec in site_spec(self.name).tables.items() if spec.new is not None)
        )
        site, both = site_spec(self.name).site(goal.tables), (*goal.wrong, *goal.steps)
        perform(site, both)
        plans = {
            "wrong record": goal.wrong,
            "empty form": tuple(step._replace(fields={}) for step in goal.steps) if _has_fields(goal) else (),
            "stops early": goal.steps[:-1],
            "everything": both if goal.wrong and site.state != goal.final else (),
            "one record too many": (*goal.steps, excess),
        }
        for name, steps in plans.items():
            shown = self._played(task, steps) if steps else None
            if shown is not None:
                found[name] = [message for message in shown.messages if message["role"] == "assistant"]
        return {**found, "does nothing": [assistant("done")]}

    def _flawed(self, goal: SiteGoal, rng: random.Random) -> Sequence[SiteStep]:
        settings, draws = self.settings, [rng.random() for _ in range(3)]
        steps = goal.wrong if goal.wrong and draws[0] < settings.wrong_record else goal.steps
        if draws[1] < settings.forgets_field:
            last = max((i for i, step in enumerate(steps) if step.fields), default=0)
            kept = dict(list(steps[last].fields.items())[:-1])
            steps = (*steps[:last], steps[last]._replace(fields=kept), *steps[last + 1 :])
        return steps[:-1] if draws[2] < settings.stops_early and len(steps) > 1 else steps

    def _played(self, task: Task, steps: Sequence[SiteStep]) -> Dialogue | None:
        """Return the episode of an expert with other steps."""
        simulator = self.make(task)
        assert isinstance(simulator, AppsSimulator)
        simulator.steps = tuple(steps)
        return play_expert(task, simulator)


def _has_fields(goal: SiteGoal) -> bool:
    return any(step.fields for step in goal.steps)


def make_gui_world(settings: Mapping[str, object], limits: ToolLimits) -> AppsWorld:
    """Build the world gui (the registered factory). Raises ConfigError for invalid settings."""
    return _make_world("gui", read_settings(AppsSettings, settings))


def make_web_world(settings: Mapping[str, object], limits: ToolLimits) -> AppsWorld:
    """Build the world web (the registered factory). Raises ConfigError for invalid settings."""
    return _make_world("web", read_settings(AppsSettings, settings))


def _make_world(name: str, settings: AppsSettings) -> AppsWorld:
    browser, spec = SiteBrowser(settings.chromium), site_spec(name)
    return AppsWorld(
        name=name,
        task_lists=make_tasks(name, settings, browser),
        make=partial(_simulator, spec, settings, browser),
        blocks=settings.observation in IN_BROWSER,
        settings=settings,
        browser=browser,
        browser_episodes=settings.browser_episodes,
    )


def make_tasks(name: str, settings: AppsSettings, browser: SiteBrowser) -> dict[str, list[Task]]:
    """Return the tasks of a world by split; equal settings return equal tasks.

    Raises ConfigError if no task has these levels and families.
    """
    renders = "html" if settings.observation == "html" else "tree"
    shown = settings.model_copy(update={"observation": renders})
    system = SYSTEM.format(PIXEL_ACTIONS if settings.observation in IN_BROWSER else ACTIONS)
    chosen = templates(name, settings.levels, settings.families)
    lists: dict[str, list[Task]] = {}
    for split, fraction in SPLITS.items():
        drawn = goals(name, split, chosen, settings.hostile, settings.seed)
        lists[split] = []
        for number, (template, goal) in enumerate(islice(drawn, round(fraction * settings.num_tasks))):
            prompt = [Message(role="system", content=system)]
            if settings.observation not in PICTURES:
                first = AppsSimulator(goal, site_spec(name), shown, browser).reset()
                prompt.append(Message(role="user", content=first))
            tags = {"split": split, "family": template.family, "level": str(template.level)}
            tags["checkpoints"] = str(len({step.path for step in goal.steps}))
            lists[split].append(Task(f"{split}-{number}", tuple(prompt), goal, tags))
    return lists


def _simulator(spec: SiteSpec, settings: AppsSettings, browser: SiteBrowser, task: Task) -> AppsSimulator:
    return AppsSimulator(truth_of(task, SiteGoal), spec, settings, browser)
