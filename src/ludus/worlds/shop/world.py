"""The shop world: the task of WebShop (arXiv:2207.01206) over a generated catalogue.

An episode searches, opens products, chooses options and buys. A policy sees pages as text, as simplified HTML, or as
read from a browser; the state machine is the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from typing import Literal

from pydantic import Field

from ludus.envs.settings import read_settings
from ludus.envs.simulator_world import SIMULATOR_REWARDS, Observation, Simulator, play_expert
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import Dialogue, assistant
from ludus.errors import ConfigError
from ludus.rewards.base import truth_of
from ludus.types import Message, Task
from ludus.worlds.browser import BrowserSettings, BrowserWorld, SiteBrowser
from ludus.worlds.shop.catalogue import catalogue, catalogue_data
from ludus.worlds.shop.pages import BUY, Page, as_html, as_text, search_page
from ludus.worlds.shop.session import (
    SPLITS,
    Flaws,
    PageVisit,
    ShopAction,
    ShopGoal,
    ShopSession,
    expert_turns,
    goals,
    num_checkpoints,
    open_visit,
    parse_action,
    shopper_action,
)

SYSTEM = "Buy what the user wants in a shop. Reply with search[words], or click[...] with an item, option or button."
Rendering = Literal["text", "html", "browser"]
MAX_EXPERT_TURNS = 12
"""Maximum number of turns in which the expert solves a task."""
RENDERINGS: Mapping[Rendering, Callable[[Page], str]] = {"text": as_text, "html": as_html, "browser": as_text}


_PARTS = {part.name: part for part in SIMULATOR_REWARDS}
WEBSHOP_REWARDS = (
    replace(_PARTS["return"], name="score", weight=1.0, outcome=True),
    replace(_PARTS["success"], weight=0.0, outcome=False),
    _PARTS["valid_actions"],
    _PARTS["coverage"],
)
"""The outcome is the score of the purchase."""


class ShopSettings(BrowserSettings):
    """Settings of the shop world (`env.settings`)."""

    observation: Rendering = "text"
    """Pages as text, as simplified HTML, or as the visible text of a document in Chromium, with real clicks."""
    reward: Literal["all_or_nothing", "webshop"] = "all_or_nothing"
    """Outcome: 1 if all constraints are satisfied, or WebShop's score of the purchase between 0 and 1."""
    levels: tuple[Literal[1, 2, 3], ...] = Field((1, 2, 3), min_length=1)
    """Numbers of constraints besides type and price: 2 (level 1), 3 and 4. The split `composition` has 5."""
    categories: tuple[str, ...] = ()
    """Categories of the wanted products; empty means all."""
    page_size: int = Field(10, ge=3, le=10)
    """Number of results on a page."""
    labels: Literal["ids", "numbers"] = "ids"
    """What an item of a page of results is called: an id that differs between instructions, or its number on the page,
    which small models learn to copy sooner."""
    forgets_option: float = Field(0.3, ge=0, le=1)
    """Fraction of the demonstrations that do not choose the last option."""
    takes_first: float = Field(0.3, ge=0, le=1)
    """Fraction of the demonstrations that buy the first result without a look at price, attributes and options."""


class ShopSimulator(Simulator):
    """An episode. The reward of a purchase is its score."""

    def __init__(self, session: ShopSession, open_visit: Callable[[ShopSession], PageVisit], flaws: Flaws) -> None:
        self.session, self._open_visit, self._flaws = session, open_visit, flaws
        self._visit: PageVisit | None = None

    def reset(self) -> str:
        """Return the search page."""
        return self._visiting.read()

    def step(self, action: str) -> Observation:
        """Apply `search[words]` or `click[label]`."""
        parsed, visit = parse_action(action), self._visiting
        if parsed is None or not visit.act(parsed):
            labels = ", ".join(visit.clickable())
            hint = f"Click one of: {labels}." if labels else "Use search[words]."
            return Observation(f"Not possible on this page. {hint}", valid=False)
        self.success, self.reached = self.session.success, self.session.reached
        is_done = self.session.place == "done"
        return Observation("" if is_done else visit.read(), self.session.score, is_done)

    def actions(self) -> Sequence[str]:
        """Return the clicks on the current page; empty on the search page."""
        return [f"click[{label}]" for label in self.session.page.clickable]

    def expert_action(self) -> str | None:
        return shopper_action(self.session, self._flaws)

    def state_key(self) -> str:
        return self.session.key

    def close(self) -> None:
        if self._visit is not None:
            self._visit.close()

    @property
    def _visiting(self) -> PageVisit:
        if self._visit is None:
            self._visit = self._open_visit(self.session)
        return self._visit


@dataclass(frozen=True)
class ShopWorld(BrowserWorld):
    """Instructions to buy a product. `browser` is used if `settings.observation` is `browser`."""

    settings: ShopSettings = field(default_factory=ShopSettings)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield episodes of a shopper with systematic mistakes, on instructions like those of training tasks."""
        rng, settings = random.Random(f"demonstrations:{self.settings.seed}:{seed}"), self.settings
        held_out = {_asked(truth_of(task, ShopGoal)) for split in self.splits[1:] for task in self.task_lists[split]}
        for level, goal in _endless_goals(settings, f"{settings.seed}/{seed}"):
            if _asked(goal) in held_out:
                continue
            task = _task("train-shown", level, goal, settings)
            flaws = Flaws(rng.random() < settings.forgets_option, rng.random() < settings.takes_first)
            if (shown := play_expert(task, _simulator(settings, self.browser, flaws, task))) is not None:
                yield shown

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        """Return claims; unless partial scores are rewarded, also purchases without options."""
        claims, goal, solution = super().cheats(task), truth_of(task, ShopGoal), self.expert(task)
        if self.settings.reward == "webshop" or solution is None:
            return claims
        session = new_session(goal, self.settings)
        session.act(ShopAction(True, goal.instruction))
        first = session.label(session.shown[0])
        hasty = [f"search[{goal.instruction}]", f"click[{first}]", f"click[{BUY}]"]
        values = {f"click[{value}]" for _, value in goal.options}
        bare = [message for message in solution.messages if message["content"] not in values]
        return {
            **claims,
            "first result": [assistant(text) for text in hasty],
            "no options": [message for message in bare if message["role"] == "assistant"],
        }


def new_session(goal: ShopGoal, settings: ShopSettings) -> ShopSession:
    """Return a visit that begins on the search page."""
    return ShopSession(goal, catalogue(), settings.page_size, is_numbered=settings.labels == "numbers")


def make_shop_world(settings: Mapping[str, object], limits: ToolLimits) -> ShopWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    chosen = read_settings(ShopSettings, settings)
    known = list(catalogue_data().categories)
    if unknown := [name for name in chosen.categories if name not in known]:
        raise ConfigError(
            f"env.settings.categories: unknown category {unknown[0]!r}.", f"Categories: {', '.join(known)}."
        )
    browser = SiteBrowser(chosen.chromium)
    return ShopWorld(
        name="shop",
        task_lists=make_tasks(chosen),
        make=partial(_simulator, chosen, browser, Flaws()),
        blocks=chosen.observation == "browser",
        rewards=SIMULATOR_REWARDS if chosen.reward == "all_or_nothing" else WEBSHOP_REWARDS,
        settings=chosen,
        browser=browser,
        browser_episodes=chosen.browser_episodes,
    )


def make_tasks(settings: ShopSettings) -> dict[str, list[Task]]:
    """Return the tasks by split; equal settings return equal tasks. Raises ConfigError if there are too few."""
    categories = settings.categories or tuple(catalogue_data().categories)
    lists = {}
    for split, fraction in SPLITS.items():
        drawn = goals(split, settings.levels, categories, settings.seed)
        solvable = (one for one in drawn if _is_solvable(one[1], settings.page_size))
        num = round(fraction * settings.num_tasks)
        chosen = enumerate(islice(solvable, num))
        lists[split] = [_task(f"{split}-{number}", *one, settings) for number, one in chosen]
        if len(lists[split]) < num:
            text = f"env.settings: the split {split!r} has only {len(lists[split])} of {num} tasks."
            raise ConfigError(text, "Reduce num_tasks, or add levels or categories.")
    return lists


def _endless_goals(settings: ShopSettings, seed: str) -> Iterator[tuple[int, ShopGoal]]:
    categories = settings.categories or tuple(catalogue_data().categories)
    for turn in count():
        yield from goals("train", settings.levels, categories, f"{seed}/{turn}")


def _asked(goal: ShopGoal) -> tuple[object, ...]:
    """Return what identifies an instruction, without its phrasing and price."""
    return goal.title, frozenset(goal.attributes), frozenset(goal.options)


def _is_solvable(goal: ShopGoal, page_size: int) -> bool:
    return expert_turns(goal, catalogue(), page_size, MAX_EXPERT_TURNS) is not None


def _task(name: str, level: int, goal: ShopGoal, settings: ShopSettings) -> Task:
    page = RENDERINGS[settings.observation](search_page(goal.instruction))
    prompt = (Message(role="system", content=SYSTEM), Message(role="user", content=page))
    tags = {"split": name.partition("-")[0], "family": f"level {level}", "checkpoints": str(num_checkpoints(goal))}
    return Task(name, prompt, goal, tags)


def _simulator(settings: ShopSettings, browser: SiteBrowser, flaws: Flaws, task: Task) -> ShopSimulator:
    session = new_session(truth_of(task, ShopGoal), settings)
    if settings.observation == "browser":
        return ShopSimulator(session, partial(open_visit, browser), flaws)
    return ShopSimulator(session, partial(PageVisit, RENDERINGS[settings.observation]), flaws)
