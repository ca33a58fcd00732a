"""Databases and questions, selected from the data files that `python -m generators.sql` writes.

Each table and column has two names: the one in the database file, and the plain one that questions use.
The *shape* of a query is the query without identifiers, texts and numbers.
"""

from __future__ import annotations

import hashlib
import json
import random
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Final, Literal, TypedDict

from ludus.envs.task_archive import SPLITS, packed_lines
from ludus.rewards.code.sql_rows import Cell

if TYPE_CHECKING:
    from ludus.worlds.sql.world import SqlSettings

LEVELS = (1, 2, 3, 4, 5)
Domain = Literal["shop", "library", "clinic", "flights", "school", "cinema"]
DOMAINS: Final[tuple[Domain, ...]] = ("shop", "library", "clinic", "flights", "school", "cinema")
NUM_DATABASES: Final = 8
"""Number of databases of each domain in the data."""
AnswerKind = Literal["query", "value"]
Table = tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class QuestionFile:
    """Settings with which a file of questions was generated."""

    levels: tuple[int, ...] = LEVELS
    domains: tuple[str, ...] = DOMAINS
    databases: int = NUM_DATABASES
    per_shape: int = 40


FILES: Final[Mapping[str, QuestionFile]] = {
    "default": QuestionFile(databases=2, per_shape=1),
    "recipe": QuestionFile((1,), ("shop",), 4, 150),
    "more": QuestionFile(),
}
"""The questions of the default settings and of the recipe; all other settings select from `more`."""


class TableData(TypedDict):
    """A table: its own and its plain name, the statements that create it under these names, the names of its columns,
    and its rows in the shown and in the hidden database."""

    names: Sequence[str]
    create: Sequence[str]
    columns: Sequence[Sequence[str]]
    rows: Sequence[Sequence[Sequence[Cell]]]


class QuestionData(TypedDict):
    """A question on a database.

    `text` is the question without the form of its answer. `queries` is a pair: the gold query with the database's own
    names and with plain names. `forgetful` are such pairs without one of the conditions, or without the order. `shape`
    is the gold query without identifiers, texts and numbers. `value` is whether the answer may be a value.
    """

    database: str
    text: str
    queries: list[str]
    forgetful: list[list[str]]
    shape: str
    held_out: bool
    ordered: bool
    value: bool


@dataclass(frozen=True)
class DatabasePair:
    """Two databases with the same schema: `image` is the one of the task, `hidden` has other rows."""

    key: str
    columns: frozenset[str]
    image: bytes = field(repr=False)
    hidden: bytes = field(repr=False)


@dataclass(frozen=True)
class SqlQuestion:
    """A question on a database, with its gold query and the query's rows on both databases."""

    pair: DatabasePair
    data: QuestionData
    level: int
    kind: AnswerKind
    rows: Table
    hidden_rows: Table

    @property
    def id(self) -> str:
        """Identifier, unique for database and query."""
        return f"{self.pair.key}:{digest(self.sql):016x}"

    @property
    def sql(self) -> str:
        """The gold query."""
        return self.data["queries"][0]


def digest(text: str) -> int:
    """Return a 64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def split_by_hash(text: str) -> str:
    """Return the split of a shape or a question, by its hash: 6 : 1 : 3."""
    share = digest(text) / 2**64
    return "train" if share < 0.6 else "validation" if share < 0.7 else "test"


def make_image(tables: Sequence[TableData], plain: bool, hidden: bool) -> bytes:
    """Return the bytes of a SQLite database."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for table in tables:
            connection.execute(table["create"][plain])
            marks = ", ".join("?" * len(table["columns"][plain]))
            connection.executemany(f"INSERT INTO {table['names'][plain]} VALUES ({marks})", table["rows"][hidden])
        connection.commit()
        return connection.serialize()


@cache
def pairs(domains: Sequence[str], databases: int, plain: bool) -> Mapping[str, DatabasePair]:
    """Return the databases of some domains by key, with their own or with plain names."""
    lines = _read("databases")
    found = {}
    for key in (f"{domain}-{number}" for domain in domains for number in range(databases)):
        tables: list[TableData] = json.loads(lines[key][0])
        columns = frozenset(column for table in tables for column in table["columns"][plain])
        images = [make_image(tables, plain, hidden) for hidden in (False, True)]
        found[key] = DatabasePair(key, columns, *images)
    return found


@cache
def questions(settings: SqlSettings) -> Mapping[str, Sequence[SqlQuestion]]:
    """Return the questions of each split, fewer than `settings.tasks` if the file has no more.

    Levels alternate. A split is sorted by hash, so that difficulty does not depend on the position.
    """
    own = pairs(tuple(dict.fromkeys(settings.domains)), settings.databases, not settings.vary_names)
    splits: dict[str, list[SqlQuestion]] = {split: [] for split in SPLITS}
    with ExitStack() as stack:
        opened = {
            key: [stack.enter_context(closing(_connect(image))) for image in (pair.image, pair.hidden)]
            for key, pair in own.items()
        }
        for level, data in _select(settings, own):
            pair = own[data["database"]]
            shown, hidden = (tuple(connection.execute(data["queries"][0])) for connection in opened[pair.key])
            # with `both`, half of the shapes with a single value ask for the value
            half = settings.answers == "both" and data["value"] and digest(data["shape"]) % 2 == 0
            kind: AnswerKind = "value" if settings.answers == "value" or half else "query"
            question = SqlQuestion(pair, data, level, kind, shown, hidden)
            text = data["shape"] if settings.unseen == "shapes" else f"{pair.key} {data['text']}"
            splits["composition" if data["held_out"] else split_by_hash(text)].append(question)
    for found in splits.values():
        found.sort(key=lambda question: digest(f"{question.pair.key} {question.data['text']}"))
    return splits


def _connect(image: bytes) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.deserialize(image)
    return connection


def _select(settings: SqlSettings, databases: Mapping[str, object]) -> Iterator[tuple[int, QuestionData]]:
    """Yield the questions that fit the settings with their levels; seeds other than 0 shuffle them first."""
    wanted = QuestionFile(settings.levels, settings.domains, settings.databases, settings.per_shape)
    fitting = (name for name, own in FILES.items() if own == wanted and settings.answers != "value")
    lines = _read(next(fitting, "more"))
    shapes: Counter[str] = Counter()

    def one_level(level: int) -> Iterator[tuple[int, QuestionData]]:
        own = lines.get(str(level), ())
        if settings.seed:
            own = random.Random(f"{settings.seed}/{level}").sample(own, len(own))
        for line in own:
            data: QuestionData = json.loads(line)
            fits = data["database"] in databases and (data["value"] or settings.answers != "value")
            if fits and shapes[data["shape"]] < settings.per_shape:
                shapes[data["shape"]] += 1
                if not settings.vary_names:
                    for queries in (data["queries"], *data["forgetful"]):
                        queries[0] = queries[1]
                yield level, data

    rows = zip_longest(*map(one_level, dict.fromkeys(settings.levels)))
    return islice((one for row in rows for one in row if one is not None), settings.tasks)


@cache
def _read(name: str) -> Mapping[str, Sequence[str]]:
    """Return the lines of a data file by the keys in its header (levels, or databases)."""
    head, *lines = packed_lines("sql", name)
    remaining = iter(lines)
    return {key: list(islice(remaining, count)) for key, count in json.loads(head)}
