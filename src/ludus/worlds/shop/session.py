"""One visit to the shop: the state machine behind all observations, its score, an expert, and visits in Chromium.

Instructions are drawn from products, with constraints that the product satisfies. A pair of a product type and an
attribute may be held out: it occurs in no instruction of `train`, `validation` and `composition`, and each instruction
of `test` has at least one. `composition` has more constraints than training.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal, NamedTuple

from ludus.worlds.browser import BrowserTab, SiteBrowser
from ludus.worlds.shop.catalogue import Product, ProductCatalogue, catalogue, catalogue_data, item_id
from ludus.worlds.shop.pages import (
    BACK,
    BUY,
    DESCRIPTION,
    FEATURES,
    NEXT,
    PREVIOUS,
    Page,
    as_document,
    detail_page,
    done_page,
    item_page,
    results_page,
    search_page,
)

_ACTION = re.compile(r"(search|click)\[(.*)\]", re.S | re.I)
MATCH, WEAK_MATCH = 0.2, 0.1
"""Fractions of the words of the goal's title: above the first, a product may be of another type; below the second, it
is hardly related."""


@dataclass(frozen=True, slots=True)
class ShopGoal:
    """The constraints of an instruction: type, attributes, options by name, and the highest price.

    `title` is the title of a product that satisfies them.
    """

    instruction: str
    title: str
    type: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    price: int

    @property
    def query(self) -> str:
        """The words of the constraints, for a search."""
        return " ".join((self.type, *self.attributes, *(value for _, value in self.options)))

    def accepts(self, product: Product) -> bool:
        """Return whether a product can be bought so that it satisfies all constraints."""
        has_options = all(value in product.options.get(name, ()) for name, value in self.options)
        has_attributes = set(self.attributes) <= set(product.attributes)
        return product.type == self.type and has_options and has_attributes and product.price <= self.price


def type_factor(goal: ShopGoal, product: Product) -> float:
    """Return the factor for the type of a product.

    With `m`, the fraction of the words of the goal's title that are in the product's title: 0 if m = 0, 0.1 if m < 0.1,
    0.5 if m <= 0.2 and the type differs, otherwise 1.
    """
    wanted, found = (set(title.casefold().split()) for title in (goal.title, product.title))
    match = len(wanted & found) / len(wanted)
    if match < WEAK_MATCH:
        return 0.1 if match else 0.0
    return 1.0 if product.type == goal.type or match > MATCH else 0.5


def purchase_score(goal: ShopGoal, product: Product, chosen: dict[str, str]) -> float:
    """Return the score of WebShop (arXiv:2207.01206), between 0 and 1.

    type_factor * (matched attributes + matched options + [price <= bound]) / (attributes + options + 1)
    """
    attributes = sum(attribute in product.attributes for attribute in goal.attributes)
    options = sum(chosen.get(name) == value for name, value in goal.options)
    matched = attributes + options + (product.price <= goal.price)
    return type_factor(goal, product) * matched / (len(goal.attributes) + len(goal.options) + 1)


Place = Literal["search", "results", "item", "description", "features", "done"]


class ShopSession:
    """State of a visit.

    `opened` and `inspected` are the ids of the products whose page and whose features were shown, `reached` the
    exploration checkpoints; `score` and `success` are 0 until the purchase.
    """

    def __init__(
        self, goal: ShopGoal, catalogue: ProductCatalogue, page_size: int, *, is_numbered: bool = False
    ) -> None:
        self.goal, self._catalogue, self._page_size, self._is_numbered = goal, catalogue, page_size, is_numbered
        self.place: Place = "search"
        self.query, self.page_number = "", 0
        self.product: Product | None = None
        self.chosen: dict[str, str] = {}
        self.opened: set[str] = set()
        self.inspected: set[str] = set()
        self.reached: frozenset[str] = frozenset()
        self.score = self.success = 0.0
        self._results: Sequence[Product] = ()
        self._by_label: dict[str, Product] = {}

    def label(self, product: Product) -> str:
        """Return the number of a product on the page, or its id in this visit. Ids differ between instructions, so that
        none can be learnt."""
        if self._is_numbered:
            return str(self.shown.index(product) + 1)
        rng = random.Random(f"{self.goal.instruction}:{product.id}")
        label = item_id(rng)
        while self._by_label.setdefault(label, product) is not product:
            label = item_id(rng)
        return label

    @property
    def shown(self) -> Sequence[Product]:
        """The products on the current page of results."""
        first = self.page_number * self._page_size
        return self._results[first : first + self._page_size]

    @property
    def page(self) -> Page:
        """The current page."""
        product = self.product
        if self.place == "results":
            labeled = [(self.label(one), one) for one in self.shown]
            return results_page(labeled, self.page_number, -(-len(self._results) // self._page_size))
        if product is None:
            return search_page(self.goal.instruction)
        if self.place == "description":
            return detail_page(product.description)
        if self.place == "features":
            return detail_page(", ".join((*product.attributes, f"for {product.use}")))
        return done_page(product) if self.place == "done" else item_page(product, self.chosen)

    @property
    def key(self) -> str:
        """A text that identifies the current page."""
        id_ = self.product.id if self.product else ""
        return f"{self.place}/{self.query}/{self.page_number}/{id_}/{sorted(self.chosen.items())}"

    def act(self, action: ShopAction) -> bool:
        """Apply an action; return false, without a change, if it is not possible on the current page."""
        page = self.page
        if action.is_search:
            if page.has_search:
                self.query, self.page_number, self.place = action.argument, 0, "results"
                self._results = self._catalogue.search(action.argument)
                self._record_results()
            return page.has_search
        label = action.find(page.clickable)
        if label is not None:
            self._click(label)
        return label is not None

    def _click(self, label: str) -> None:
        product = self.product
        if label in (NEXT, PREVIOUS) and self.place == "results":
            self.page_number += 1 if label == NEXT else -1
            self._record_results()
        elif label == BACK:
            self.place, self.product, self.query, self.page_number = "search", None, "", 0
        elif self.place == "results":
            self._open(label)
        elif label == PREVIOUS and self.place == "item":
            self.place, self.product = "results", None
        elif label == PREVIOUS:
            self.place = "item"
        elif product is not None:
            self._use(product, label)

    def _open(self, label: str) -> None:
        self.product = self.shown[int(label) - 1] if self._is_numbered else self._by_label[label]
        self.place, self.chosen = "item", {}
        self.opened.add(self.product.id)
        if self.goal.accepts(self.product):
            self.reached |= {"opened"}

    def _use(self, product: Product, label: str) -> None:
        """Click a button of the page of a product."""
        if label == BUY:
            self.place, self.score = "done", purchase_score(self.goal, product, self.chosen)
            has_options = all(self.chosen.get(name) == value for name, value in self.goal.options)
            self.success = float(self.goal.accepts(product) and has_options)
            self.reached |= {"bought"} if self.success else set()
        elif label == DESCRIPTION:
            self.place = "description"
        elif label == FEATURES:
            self.place = "features"
            self.inspected.add(product.id)
        else:
            name = next(name for name, values in product.options.items() if label in values)
            self.chosen[name] = label
            if self.goal.accepts(product) and (name, label) in self.goal.options:
                self.reached |= {f"chose {name}"}

    def _record_results(self) -> None:
        if any(map(self.goal.accepts, self.shown)):
            self.reached |= {"saw"}


class ShopAction(NamedTuple):
    """A parsed action: a search for words, or a click on a label."""

    is_search: bool
    argument: str

    def find(self, labels: Sequence[str]) -> str | None:
        """Return the label to click, without regard to case; None if it is not among `labels`."""
        return next((label for label in labels if label.casefold() == self.argument.casefold()), None)


def parse_action(text: str) -> ShopAction | None:
    """Return the action in a text; None if it is neither `search[...]` nor `click[...]`."""
    found = _ACTION.fullmatch(text.strip())
    return ShopAction(found[1].casefold() == "search", found[2].strip()) if found else None


class PageVisit:
    """What a policy sees of a session, and how it acts on it; here without a browser."""

    def __init__(self, render: Callable[[Page], str], session: ShopSession) -> None:
        self._render, self._session = render, session

    def read(self) -> str:
        """Return the current page."""
        return self._render(self._session.page)

    def clickable(self) -> list[str]:
        """Return the labels that can be clicked."""
        return self._session.page.clickable

    def act(self, action: ShopAction) -> bool:
        """Apply an action; return false if it is not possible on the current page."""
        return self._session.act(action)

    def close(self) -> None:
        """Release resources."""


def num_checkpoints(goal: ShopGoal) -> int:
    """Return the number of checkpoints of a goal: saw, opened and bought a right product, chose each option."""
    return 3 + len(goal.options)


class Flaws(NamedTuple):
    """Mistakes of a shopper: omit the last option of the instruction, or buy the first result as it is."""

    forgets_option: bool = False
    takes_first: bool = False


def shopper_action(session: ShopSession, flaws: Flaws) -> str | None:
    """Return the next action of an expert, or with `flaws` of a shopper who makes mistakes.

    The expert decides by what it saw: it opens results of the right type and price in their order, and goes back from
    products that lack an option or attribute. None if all results are exhausted.
    """
    goal, product = session.goal, session.product
    if session.place == "search":
        return f"search[{goal.query}]"
    if session.place == "results":
        for one in session.shown:
            is_new = one.id not in session.opened and one.type == goal.type and one.price <= goal.price
            if flaws.takes_first or is_new:
                return f"click[{session.label(one)}]"
        return f"click[{NEXT}]" if NEXT in session.page.clickable else None
    if session.place != "item" or product is None:
        return f"click[{PREVIOUS}]"
    return f"click[{_item_label(session, product, flaws)}]"


def _item_label(session: ShopSession, product: Product, flaws: Flaws) -> str:
    """Return what the shopper clicks on the page of a product."""
    goal = session.goal
    wanted = goal.options[: len(goal.options) - flaws.forgets_option]
    offered = [(name, value) for name, value in wanted if value in product.options.get(name, ())]
    if not flaws.takes_first:
        known = product.attributes if product.id in session.inspected else product.attributes[:2]
        unseen = set(goal.attributes) - set(known)
        if product.price > goal.price or len(offered) < len(wanted) or (unseen and product.id in session.inspected):
            return PREVIOUS
        if unseen:
            return FEATURES
    return next((value for name, value in offered if session.chosen.get(name) != value), BUY)


def expert_turns(goal: ShopGoal, catalogue: ProductCatalogue, page_size: int, limit: int) -> int | None:
    """Return the number of turns in which the expert satisfies a goal; None if more than `limit`."""
    session = ShopSession(goal, catalogue, page_size)
    for turn in range(limit):
        action = parse_action(shopper_action(session, Flaws()) or "")
        if action is None or not session.act(action):
            return None
        if session.place == "done":
            return turn + 1 if session.success else None
    return None


if TYPE_CHECKING:
    from playwright.async_api import Page as BrowserPage

_BUTTONS = "button[name=click]"


class _ShopSite:
    """The site of a visit: its current page, at any path."""

    def __init__(self, session: ShopSession) -> None:
        self._session = session

    def document(self, path: str) -> str | None:
        return as_document(self._session.page)

    def submit(self, path: str, form: Mapping[str, str]) -> str | None:
        is_search = "query" in form
        self._session.act(ShopAction(is_search, form.get("query" if is_search else "click", "")))
        return "/"


class BrowserVisit(PageVisit):
    """A visit in a browser tab. Observations are read from the document, and clicks are clicks of a mouse."""

    def __init__(self, tab: BrowserTab) -> None:
        self._tab = tab

    def read(self) -> str:
        """Return the visible text of the document, without empty lines."""
        text = self._tab.run(self._tab.page.inner_text("body"))
        return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())

    def clickable(self) -> list[str]:
        return self._tab.run(self._tab.page.locator(_BUTTONS).all_inner_texts())

    def act(self, action: ShopAction) -> bool:
        return self._tab.run(_act(self._tab.page, action))

    def close(self) -> None:
        self._tab.close()


def open_visit(browser: SiteBrowser, session: ShopSession) -> BrowserVisit:
    """Return a visit at its first page. Raises UserError without Playwright or Chromium."""
    return BrowserVisit(browser.open(_ShopSite(session)))


async def _act(page: BrowserPage, action: ShopAction) -> bool:
    """Fill in the search field, or click a button; return false if the document does not have it."""
    if action.is_search:
        field = page.locator("input[name=query]")
        if not await field.count():
            return False
        await field.fill(action.argument)
        target = page.get_by_role("button", name="Search", exact=True)
    else:
        labels = await page.locator(_BUTTONS).all_inner_texts()
        label = action.find(labels)
        if label is None:
            return False
        target = page.locator(_BUTTONS).nth(labels.index(label))
    async with page.expect_navigation(wait_until="domcontentloaded"):
        await target.click()
    return True


SPLITS: Mapping[str, float] = {"train": 0.6, "validation": 0.1, "test": 0.2, "composition": 0.1}
"""Splits, with their fractions of the tasks."""


SHAPES: Mapping[int, tuple[int, int]] = {1: (1, 1), 2: (2, 1), 3: (2, 2), 4: (3, 2)}
"""Numbers of attributes and options by level; `composition` has level 4."""


MAX_REPEATED = 1000
"""Number of successive draws without a new instruction after which there are no more."""


HELD_OUT = 0.25
"""Fraction of the pairs of type and attribute that are held out."""


def is_held_out(type_: str, attribute: str) -> bool:
    """Return whether a pair occurs only in `test`."""
    return random.Random(f"held out:{type_}:{attribute}").random() < HELD_OUT


def goals(
    split: str, levels: Sequence[int], categories: Sequence[str], seed: int | str
) -> Iterator[tuple[int, ShopGoal]]:
    """Yield level and goal of distinct instructions in a fixed order, until most draws would be repetitions."""
    rng = random.Random(f"shop:{split}:{seed}")
    products = [one for one in catalogue().products.values() if one.is_cheapest and one.category in categories]
    seen: set[object] = set()
    last = 0
    for draw in count():
        if draw - last > MAX_REPEATED:
            return
        product = rng.choice(products)
        level = 4 if split == "composition" else rng.choice(levels)
        num_attributes, num_options = SHAPES[level]
        attributes = tuple(rng.sample(product.attributes, num_attributes))
        has_held_out = any(is_held_out(product.type, attribute) for attribute in attributes)
        names = sorted(rng.sample(list(product.options), num_options))
        options = tuple((name, rng.choice(product.options[name])) for name in names)
        goal = _goal(product, attributes, options, rng)
        key = (product.id, frozenset(attributes), options)
        if has_held_out == (split == "test") and key not in seen:
            seen.add(key)
            last = draw
            yield level, goal


def _goal(
    product: Product, attributes: tuple[str, ...], options: tuple[tuple[str, str], ...], rng: random.Random
) -> ShopGoal:
    price = product.price + 10 - product.price % 10 + rng.choice((0, 0, 10))
    text = rng.choice(catalogue_data().phrasings).format(
        a="an" if attributes[0][0] in "aeiou" else "a",
        attributes=", ".join(attributes),
        type=product.type,
        options=" and ".join(f"{name} {value}" for name, value in options),
        price=price,
    )
    return ShopGoal(text, product.title, product.type, attributes, options, price)
