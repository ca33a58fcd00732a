"""The products of the shop, and full-text search over them.

The catalogue is generated from `data/catalogue.toml`, always the same: families of six products of one type. Five of
them are like the first with one attribute replaced, one option value replaced, and (three of them) a higher price.
"""

from __future__ import annotations

import random
import re
import sqlite3
import threading
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from itertools import product as pairs

from pydantic import BaseModel, ConfigDict

NUM_FAMILIES = 14
"""Families of products of a type."""
NUM_EXPENSIVE = 3
"""Products of a family that differ from the first in the price."""
NUM_ATTRIBUTES = 4
"""Attributes of a product; the first two are in its title."""
MAX_RESULTS = 50
"""Maximum number of results of a search."""
MAX_QUERY = 200
"""Number of characters of a query that are read."""
COMMON = 1 / 4
"""Fraction of the products from which a word is ignored in queries of several words."""
_LETTERS = "23456789ABCDEFGHJKLMNPQRSTUVWXYZ"


class Category(BaseModel):
    """A category of the data file: its product types, and what they may have. `price` is the range of prices."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    types: tuple[str, ...]
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    uses: tuple[str, ...]
    price: tuple[int, int]


class CatalogueData(BaseModel):
    """The data file. `options` maps the name of an option to its values."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    brand_starts: tuple[str, ...]
    brand_ends: tuple[str, ...]
    phrasings: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    categories: Mapping[str, Category]


@dataclass(frozen=True, slots=True)
class Product:
    """A product. `options` maps the name of an option to the values on offer; `price` is in dollars."""

    id: str
    brand: str
    type: str
    category: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: int
    use: str
    is_cheapest: bool = False
    """Whether it is the first of its family."""

    @property
    def title(self) -> str:
        return " ".join((self.brand, *self.attributes[:2], self.type))

    @property
    def description(self) -> str:
        return f"{self.brand} made this {self.type} for {self.use}."


class ProductCatalogue:
    """All products in an SQLite database in memory, read-only after its construction; safe to share between threads."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = {product.id: product for product in products}
        self._ids = [product.id for product in products]
        self._lock = threading.Lock()
        texts = [_indexed(product) for product in products]
        counts = Counter(word for text in texts for word in set(_words(text)))
        self._common = {word for word, count in counts.items() if count >= COMMON * len(products)}
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute(
            "CREATE VIRTUAL TABLE products USING fts5(text, content='', tokenize='porter unicode61')"
        )
        self._database.executemany("INSERT INTO products(rowid, text) VALUES (?, ?)", enumerate(texts))
        self._database.execute("PRAGMA query_only = 1")
        self._search = lru_cache(maxsize=4096)(self._run)

    def search(self, query: str) -> Sequence[Product]:
        """Return at most `MAX_RESULTS` products with any word of a query, ranked by BM25; none for an empty query."""
        words = set(_words(query[:MAX_QUERY]))
        terms = sorted(words - self._common or words)
        return [self.products[id_] for id_ in self._search(" OR ".join(f'"{term}"' for term in terms))] if terms else []

    def _run(self, expression: str) -> tuple[str, ...]:
        statement = "SELECT rowid FROM products WHERE products MATCH ? ORDER BY rank, rowid LIMIT ?"
        with self._lock:
            found = self._database.execute(statement, (expression, MAX_RESULTS)).fetchall()
        return tuple(self._ids[number] for (number,) in found)


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.casefold())


def _indexed(product: Product) -> str:
    values = (value for offered in product.options.values() for value in offered)
    return " ".join((product.title, *product.attributes[2:], product.use, *values))


@cache
def catalogue_data() -> CatalogueData:
    """Return the content of the data file."""
    text = (files(__package__) / "data/catalogue.toml").read_text("utf-8")
    return CatalogueData.model_validate(tomllib.loads(text))


@cache
def catalogue() -> ProductCatalogue:
    """Return the catalogue, which is built once per process."""
    data, rng = catalogue_data(), random.Random("shop catalogue")
    drawn = [one for name, category in data.categories.items() for one in _products(name, category, data, rng)]
    rng.shuffle(drawn)
    numbers = rng.sample(range(len(_LETTERS) ** 3), len(drawn))
    return ProductCatalogue([replace(one, id=_id(number)) for one, number in zip(drawn, numbers, strict=True)])


def _products(name: str, category: Category, data: CatalogueData, rng: random.Random) -> Iterator[Product]:
    """Yield the families of the products of a category, without ids."""
    brands = [start + end for start, end in pairs(data.brand_starts, data.brand_ends)]
    for type_, _ in pairs(category.types, range(NUM_FAMILIES)):
        attributes = tuple(rng.sample(category.attributes, NUM_ATTRIBUTES))
        options = {option: _some(data.options[option], rng) for option in category.options}
        price = _price(rng.randint(*category.price))
        first = Product("", rng.choice(brands), type_, name, attributes, options, price, rng.choice(category.uses))
        position = rng.randrange(NUM_ATTRIBUTES)
        other = rng.choice([one for one in category.attributes if one not in attributes])
        option = rng.choice(category.options)
        yield replace(first, is_cheapest=True)
        changed = (*attributes[:position], other, *attributes[position + 1 :])
        yield replace(first, brand=rng.choice(brands), attributes=changed)
        new = rng.choice([value for value in data.options[option] if value not in options[option]])
        replaced = tuple(value for value in data.options[option] if value in (new, *options[option][1:]))
        yield replace(first, brand=rng.choice(brands), options={**options, option: replaced})
        for _ in range(NUM_EXPENSIVE):
            yield replace(first, brand=rng.choice(brands), price=_price(round(price * rng.uniform(1.3, 2) + 10)))


def _some(values: Sequence[str], rng: random.Random) -> tuple[str, ...]:
    """Return two to four values in their order, but not all."""
    chosen = set(rng.sample(values, min(len(values) - 1, rng.randint(2, 4))))
    return tuple(value for value in values if value in chosen)


def _price(dollars: int) -> int:
    """Return a price that is not a multiple of ten, as upper bounds are."""
    return dollars - 1 if dollars % 10 == 0 else dollars


def item_id(rng: random.Random) -> str:
    """Return a random id."""
    return _id(rng.randrange(len(_LETTERS) ** 3))


def _id(number: int) -> str:
    base = len(_LETTERS)
    return "B" + "".join(_LETTERS[number // base**power % base] for power in (2, 1, 0))
