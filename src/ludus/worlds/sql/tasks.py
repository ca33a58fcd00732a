"""Questions with their gold queries: drawn, checked on both databases, told apart by shape, and split.

The *shape* of a query is what is left of it when identifiers, texts and numbers are blotted out. A question
is kept only if its gold result is neither empty nor long, differs between the two databases (so that rows
written down fail), has no ties where an order is asked, and if every part of it counts: leaving one out gives
another result on one of the two.
"""

from __future__ import annotations

import hashlib
import random
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

from ludus.rewards.code.sql_rows import Cell, Rows, same_rows
from ludus.worlds.sql.data import DataPair
from ludus.worlds.sql.domains import ColumnKind
from ludus.worlds.sql.draw import Drawer
from ludus.worlds.sql.query import (
    Aggregate,
    Best,
    Both,
    Children,
    Groups,
    Head,
    Listing,
    PerRow,
    QueryPlan,
    RowShare,
    Scalar,
    Test,
    Total,
    Versus,
    level_of,
)
from ludus.worlds.sql.render import to_sql, to_words

SPLITS = ("train", "validation", "test", "composition")
SHARES = (("train", 0.6), ("validation", 0.1), ("test", 0.3))
LEVELS = (1, 2, 3, 4, 5)
MOST_ROWS = 60
TOLERANCE = 1e-6
"""Of numbers: absolute, and relative above 1."""
ATTEMPTS = 400
LEAST_VALUE = 10
"""A number below this is too easily guessed to be asked for by itself."""
HELD_OUT: tuple[frozenset[str], ...] = tuple(
    frozenset(pair.split("+"))
    for pair in (
        *("sum+one of", "smallest+between", "distinct+begins", "list+before", "count+at least"),
        *("top+one of", "groups+between", "share+is not", "none+joined"),
        *("versus+top", "per row+one of", "having+top", "set+joined", "best+above"),
    )
)
"""Pairs of features that no question of training, validation or test has together."""
TOKEN = re.compile(r"'(?:[^']|'')*'|\d+(?:\.\d+)?|\w+|<>|<=|>=|\S")
WORDS = frozenset(
    re.findall(
        r"\w+",
        "SELECT FROM WHERE AND OR NOT IN BETWEEN LIKE IS NULL AS JOIN LEFT ON GROUP BY HAVING ORDER DESC "
        "LIMIT DISTINCT COUNT SUM AVG MIN MAX COALESCE CASE WHEN THEN ELSE END EXISTS INTERSECT EXCEPT UNION "
        "RANK OVER PARTITION strftime",
    )
)
AnswerKind = Literal["query", "value"]
Table = tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class SqlQuestion:
    """A plan on a database with its gold query and what it gives on both databases."""

    plan: QueryPlan
    pair: DataPair
    text: str
    sql: str
    level: int
    kind: AnswerKind
    rows: Table
    hidden_rows: Table

    @property
    def id(self) -> str:
        """Unique for database and query."""
        return f"{self.pair.key}:{digest(self.sql):016x}"

    @property
    def shape(self) -> str:
        """The gold query without identifiers, texts and numbers."""
        return shape_of(self.sql)

    @property
    def ordered(self) -> bool:
        """Whether the order of the rows counts."""
        return self.plan.order is not None


def digest(text: str) -> int:
    """A fixed number of 64 bits for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def shape_of(sql: str) -> str:
    """A query with every identifier as `x`, every text as `s` and every number as `n`."""
    return " ".join(_blot(token) for token in TOKEN.findall(sql)).replace("x . x", "x")


def _blot(token: str) -> str:
    if token[0] == "'":
        return "'%Y'" if token == "'%Y'" else "s"
    if token[0].isdigit():
        return "n"
    return token if token in WORDS or not (token[0].isalnum() or token[0] == "_") else "x"


def features(plan: QueryPlan) -> frozenset[str]:
    """What a question is made of, as names that `HELD_OUT` pairs."""
    found = {"joined"} if any(a.path for a in plan.attributes) else set()
    found.update(_head_features(plan.head))
    for condition in plan.conditions:
        found.add("versus" if isinstance(condition, Versus) else condition.operator)
        if isinstance(condition, Children) and condition.test:
            found.add(condition.test.operator)
    if plan.order:
        found |= {"order", "top"} if plan.order.limit else {"order"}
    return frozenset(found)


def _head_features(head: Head) -> Iterator[str]:
    match head:
        case Listing(_, distinct):
            yield from ("list", "distinct") if distinct else ("list",)
        case Total(aggregates):
            yield from (a.function for a in aggregates)
        case Groups(_, aggregates, more):
            yield from ("groups", *(a.function for a in aggregates))
            yield from ("having",) if more is not None else ()
        case PerRow(test=test):
            yield from ("per row", test.operator) if test else ("per row",)
        case RowShare(test):
            yield from ("share", test.operator)
        case Both(_, _, first, second):
            yield from ("set", first.operator, second.operator)
        case Best():
            yield "best"


def is_held_out(plan: QueryPlan) -> bool:
    """Whether a plan belongs to the split `composition`."""
    found = features(plan)
    return any(pair <= found for pair in HELD_OUT)


def split_by_hash(text: str) -> str:
    """The split of a text that stands for a shape or a question."""
    share, upto = digest(text) / 2**64, 0.0
    for name, width in SHARES:
        upto += width
        if share < upto:
            return name
    return SHARES[-1][0]


class Bench:
    """Open connections to both databases of a pair, for composing questions. Not for a policy's queries."""

    def __init__(self, pair: DataPair) -> None:
        self.pair = pair
        self._shown, self._hidden = (sqlite3.connect(":memory:") for _ in range(2))
        self._shown.deserialize(pair.image)
        self._hidden.deserialize(pair.hidden)
        self.stock = {
            (table.id, column.id): self._values(pair.naming.tables[table.id], pair.naming.column(table.id, column.id))
            for table in pair.domain.tables
            for column in table.columns
            if column.kind not in (ColumnKind.KEY, ColumnKind.REF)
        }

    def _values(self, table: str, column: str) -> list[Scalar]:
        found = self._shown.execute(f"SELECT {column} FROM {table} WHERE {column} IS NOT NULL ORDER BY rowid")
        return [value for (value,) in found]

    def run(self, plan: QueryPlan) -> tuple[Table, Table]:
        """The rows of a plan on the shown and the hidden database."""
        sql = to_sql(plan, self.pair.naming)
        return tuple(self._shown.execute(sql)), tuple(self._hidden.execute(sql))

    def close(self) -> None:
        """Give the connections back."""
        self._shown.close()
        self._hidden.close()


def check(plan: QueryPlan, bench: Bench) -> tuple[Table, Table] | None:
    """The rows of a sound question on both databases, or None where it is not sound."""
    shown, hidden = bench.run(plan)
    ordered = plan.order is not None
    if not all(_presentable(rows) for rows in (shown, hidden)) or _same(shown, hidden, ordered=False):
        return None
    if plan.order and not _untied(plan, bench):
        return None
    for other in weakened(plan):
        told = bench.run(other)
        if all(_same(a, b, ordered) for a, b in zip(told, (shown, hidden), strict=True)):
            return None
    return shown, hidden


def _same(rows: Table, others: Table, ordered: bool) -> bool:
    return same_rows(rows, Rows(others, ordered, tolerance=TOLERANCE))


def _presentable(rows: Table) -> bool:
    """Neither empty nor long, and no column empty."""
    return 0 < len(rows) <= MOST_ROWS and all(set(column) != {None} for column in zip(*rows, strict=True))


def _untied(plan: QueryPlan, bench: Bench) -> bool:
    """Whether the rows have one order, up to the first that is left out, and are several."""
    assert plan.order is not None
    limit = plan.order.limit
    for rows in bench.run(replace(plan, order=replace(plan.order, limit=None))):
        keys = [row[plan.order.column] for row in rows][: limit + 1 if limit else None]
        if None in keys or len(set(keys)) < len(keys) or len(keys) < 2:
            return False
    return True


def weakened(plan: QueryPlan) -> Iterator[QueryPlan]:
    """The plan with one part left out or turned round, for each part that a careless reader may miss."""
    for place in range(len(plan.conditions)):
        yield replace(plan, conditions=plan.conditions[:place] + plan.conditions[place + 1 :])
    if plan.order:
        yield replace(plan, order=replace(plan.order, descending=not plan.order.descending))
        if plan.order.limit:
            yield replace(plan, order=replace(plan.order, limit=None))
    for index, condition in enumerate(plan.conditions):
        simpler = _simpler(condition)
        if simpler:
            yield replace(plan, conditions=(*plan.conditions[:index], simpler, *plan.conditions[index + 1 :]))
    yield from _weakened_head(plan)


def _weakened_head(plan: QueryPlan) -> Iterator[QueryPlan]:
    match plan.head:
        case Listing(_, True):
            yield replace(plan, head=replace(plan.head, distinct=False))
        case Groups(more=int()):
            yield replace(plan, head=replace(plan.head, more=None))
        case PerRow(test=Test()):
            yield replace(plan, head=replace(plan.head, test=None))
        case Both(first=first, second=second):
            values = Listing((plan.head.attribute,), distinct=True)
            for test in (first, second):
                yield replace(plan, head=values, conditions=(*plan.conditions, test))
        case Best(largest=largest):
            yield replace(plan, head=replace(plan.head, largest=not largest))
        case RowShare():
            yield replace(plan, head=Total((Aggregate("count"),)))
        case _:
            return


def _simpler(condition: Test | Versus | Children) -> Versus | Children | None:
    """A condition that holds a condition, without it."""
    if isinstance(condition, Versus) and condition.same:
        return replace(condition, same=None)
    if isinstance(condition, Children) and condition.test:
        return replace(condition, test=None)
    return None


@dataclass(frozen=True)
class SqlQuota:
    """How many questions of which levels, at most how many of a shape, and what answers them.

    `by_shape`: the splits share no shape. Otherwise only `composition` has shapes of its own, and the other
    three share no question.
    """

    levels: Sequence[int] = LEVELS
    num: int = 600
    per_shape: int = 1
    answers: Literal["query", "value", "both"] = "both"
    seed: int = 0
    by_shape: bool = True


class _Composer:
    """Collects questions until there are enough."""

    def __init__(self, pairs: Sequence[DataPair], wanted: SqlQuota) -> None:
        self._wanted = wanted
        self._rng = random.Random(f"questions/{wanted.seed}")
        self._benches = [Bench(pair) for pair in pairs]
        self._shapes: Counter[str] = Counter()
        self._homes: dict[str, bool] = {}
        self._seen: set[tuple[str, str]] = set()

    def question(self, level: int) -> SqlQuestion | None:
        """A new question of a level, or None where many attempts find none."""
        for _ in range(ATTEMPTS):
            bench = self._rng.choice(self._benches)
            plan = Drawer(bench.pair.domain, bench.stock, level, self._rng).plan()
            found = self._accept(plan, bench) if plan else None
            if found:
                return found
        return None

    def _accept(self, plan: QueryPlan, bench: Bench) -> SqlQuestion | None:
        sql = to_sql(plan, bench.pair.naming)
        shape, place, apart = shape_of(sql), (bench.pair.key, sql), is_held_out(plan)
        if place in self._seen or self._shapes[shape] >= self._wanted.per_shape:
            return None
        if self._homes.get(shape, apart) != apart:
            return None
        rows = check(plan, bench)
        kind = answer_kind(plan, shape, rows[0], self._wanted.answers) if rows else None
        if rows is None or kind is None:
            return None
        self._seen.add(place)
        self._shapes[shape] += 1
        self._homes[shape] = apart
        return SqlQuestion(plan, bench.pair, to_words(plan), sql, level_of(plan), kind, *rows)

    def close(self) -> None:
        """Give the databases back."""
        for bench in self._benches:
            bench.close()


def compose(pairs: Sequence[DataPair], wanted: SqlQuota) -> dict[str, list[SqlQuestion]]:
    """The questions of each split; fewer than wanted where the shapes run out.

    Short ones are composed first, until they run out. The order of a split is that of digests, so that its
    first questions are as hard as its last.
    """
    splits: dict[str, list[SqlQuestion]] = {split: [] for split in SPLITS}
    levels = list(wanted.levels)
    with closing(_Composer(pairs, wanted)) as composer:
        for place in range(wanted.num):
            if not levels:
                break
            level = levels[place % len(levels)]
            question = composer.question(level)
            if question is None:
                levels.remove(level)
                continue
            key = question.shape if wanted.by_shape else f"{question.pair.key} {question.text}"
            splits["composition" if is_held_out(question.plan) else split_by_hash(key)].append(question)
    for found in splits.values():
        found.sort(key=lambda question: digest(f"{question.pair.key} {question.text}"))
    return splits


def answer_kind(plan: QueryPlan, shape: str, rows: Table, answers: str) -> AnswerKind | None:
    """Whether a question is answered by a query or by its value; None where it fits neither that is wanted.

    Half of the shapes that give a single value ask for the value, where it is not a small number.
    """
    single = isinstance(plan.head, Total | RowShare) and len(rows[0]) == 1
    cell = rows[0][0]
    telling = single and (isinstance(cell, str) or (cell is not None and float(cell) >= LEAST_VALUE))
    if answers == "value":
        return "value" if telling else None
    return "value" if answers == "both" and telling and digest(shape) % 2 == 0 else "query"
