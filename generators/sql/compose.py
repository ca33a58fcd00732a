"""Questions with their gold queries: drawn, checked on both databases, and limited by shape.

The *shape* of a query is the query without identifiers, texts and numbers. A question is accepted only if its
gold result is neither empty nor long, differs between the two databases (so that hardcoded rows fail), has no
ties if an order is requested, and depends on every part: without it, the result on one of the databases differs.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from generators.sql.databases import DrawnPair, make_naming
from generators.sql.domains import ColumnKind
from generators.sql.draw import Drawer
from generators.sql.query import (
    Aggregate,
    AverageCondition,
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
)
from generators.sql.render import to_sql, to_words
from ludus.rewards.code.sql_rows import Rows, same_rows
from ludus.worlds.sql.grader import TOLERANCE
from ludus.worlds.sql.questions import QuestionData, Table

MOST_ROWS = 60
ATTEMPTS = 400
LEAST_VALUE = 10
"""Minimum of a number whose value may be the answer; smaller ones are guessed too easily."""
HELD_OUT: tuple[frozenset[str], ...] = tuple(
    frozenset(pair.split("+"))
    for pair in (
        *("sum+one of", "smallest+between", "distinct+begins", "list+before", "count+at least"),
        *("top+one of", "groups+between", "share+is not", "none+joined"),
        *("versus+top", "per row+one of", "having+top", "set+joined", "best+above"),
    )
)
"""Pairs of features that occur together only in the split `composition`."""
TOKEN = re.compile(r"'(?:[^']|'')*'|\d+(?:\.\d+)?|\w+|<>|<=|>=|\S")
WORDS = frozenset(
    re.findall(
        r"\w+",
        "SELECT FROM WHERE AND OR NOT IN BETWEEN LIKE IS NULL AS JOIN LEFT ON GROUP BY HAVING ORDER DESC "
        "LIMIT DISTINCT COUNT SUM AVG MIN MAX COALESCE CASE WHEN THEN ELSE END EXISTS INTERSECT EXCEPT UNION "
        "RANK OVER PARTITION strftime",
    )
)


@dataclass(frozen=True)
class DrawnQuestion:
    """A plan on a database, with its gold query and whether its value may be the answer."""

    plan: QueryPlan
    pair: DrawnPair
    sql: str
    value: bool

    @property
    def data(self) -> QuestionData:
        """The question as the data file has it."""
        return QuestionData(
            database=self.pair.key,
            text=to_words(self.plan),
            queries=self._queries(self.plan),
            forgetful=[self._queries(plan) for plan in forgetful(self.plan)],
            shape=shape_of(self.sql),
            held_out=is_held_out(self.plan),
            ordered=self.plan.order is not None,
            value=self.value,
        )

    def _queries(self, plan: QueryPlan) -> list[str]:
        """Return the query with the names of the database and with plain names."""
        return [to_sql(plan, self.pair.naming), to_sql(plan, make_naming(plan.domain))]


def forgetful(plan: QueryPlan) -> Iterator[QueryPlan]:
    """Yield the plan without one of its conditions, then without its order."""
    for place in range(len(plan.conditions)):
        yield replace(plan, conditions=plan.conditions[:place] + plan.conditions[place + 1 :])
    if plan.order:
        yield replace(plan, order=None)


def shape_of(sql: str) -> str:
    """Return a query with identifiers replaced by `x`, texts by `s` and numbers by `n`."""
    return " ".join(_blot(token) for token in TOKEN.findall(sql)).replace("x . x", "x")


def _blot(token: str) -> str:
    if token[0] == "'":
        return "'%Y'" if token == "'%Y'" else "s"
    if token[0].isdigit():
        return "n"
    return token if token in WORDS or not (token[0].isalnum() or token[0] == "_") else "x"


def features(plan: QueryPlan) -> frozenset[str]:
    """Return the features of a question, as named in `HELD_OUT`."""
    found = {"joined"} if any(a.path for a in plan.attributes) else set()
    found.update(_head_features(plan.head))
    for condition in plan.conditions:
        found.add("versus" if isinstance(condition, AverageCondition) else condition.operator)
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
    """Return whether a plan belongs to the split `composition`."""
    found = features(plan)
    return any(pair <= found for pair in HELD_OUT)


class Bench:
    """Open connections to both databases of a pair, only for trusted queries."""

    def __init__(self, pair: DrawnPair) -> None:
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
        """Return the rows of a plan on the shown and the hidden database."""
        sql = to_sql(plan, self.pair.naming)
        return tuple(self._shown.execute(sql)), tuple(self._hidden.execute(sql))

    def close(self) -> None:
        """Close the connections."""
        self._shown.close()
        self._hidden.close()


def check(plan: QueryPlan, bench: Bench) -> tuple[Table, Table] | None:
    """Return the rows of a valid question on both databases, or None if it is invalid."""
    shown, hidden = bench.run(plan)
    ordered = plan.order is not None
    if not all(_presentable(rows) for rows in (shown, hidden)) or _same(shown, hidden, ordered=False):
        return None
    if plan.order and not _untied(plan, bench):
        return None
    for other in weakened(plan):
        found = bench.run(other)
        if all(_same(a, b, ordered) for a, b in zip(found, (shown, hidden), strict=True)):
            return None
    return shown, hidden


def _same(rows: Table, others: Table, ordered: bool) -> bool:
    return same_rows(rows, Rows(others, ordered, tolerance=TOLERANCE))


def _presentable(rows: Table) -> bool:
    """Return whether there are some rows, not too many, and no empty column."""
    return 0 < len(rows) <= MOST_ROWS and all(set(column) != {None} for column in zip(*rows, strict=True))


def _untied(plan: QueryPlan, bench: Bench) -> bool:
    """Return whether there are several rows in a unique order, up to the first row beyond the limit."""
    assert plan.order is not None
    limit = plan.order.limit
    for rows in bench.run(replace(plan, order=replace(plan.order, limit=None))):
        keys = [row[plan.order.column] for row in rows][: limit + 1 if limit else None]
        if None in keys or len(set(keys)) < len(keys) or len(keys) < 2:
            return False
    return True


def weakened(plan: QueryPlan) -> Iterator[QueryPlan]:
    """Yield the plan with one part removed or reversed, for each part that a careless reader may miss."""
    yield from (less for less in forgetful(plan) if less.order == plan.order)
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


def _simpler(condition: Test | AverageCondition | Children) -> AverageCondition | Children | None:
    """Return a condition without the condition nested in it, or None."""
    if isinstance(condition, AverageCondition) and condition.same:
        return replace(condition, same=None)
    if isinstance(condition, Children) and condition.test:
        return replace(condition, test=None)
    return None


class _Composer:
    """Draws new questions on some databases, at most `per_shape` of each shape."""

    def __init__(self, pairs: Sequence[DrawnPair], per_shape: int, seed: int) -> None:
        self._per_shape = per_shape
        self._rng = random.Random(f"questions/{seed}")
        self._benches = [Bench(pair) for pair in pairs]
        self._shapes: Counter[str] = Counter()
        self._homes: dict[str, bool] = {}
        self._seen: set[tuple[str, str]] = set()

    def question(self, level: int) -> DrawnQuestion | None:
        """Return a new question of a level, or None after `ATTEMPTS` attempts."""
        for _ in range(ATTEMPTS):
            bench = self._rng.choice(self._benches)
            plan = Drawer(bench.pair.domain, bench.stock, level, self._rng).plan()
            found = self._accept(plan, bench) if plan else None
            if found:
                return found
        return None

    def _accept(self, plan: QueryPlan, bench: Bench) -> DrawnQuestion | None:
        sql = to_sql(plan, bench.pair.naming)
        shape, place, apart = shape_of(sql), (bench.pair.key, sql), is_held_out(plan)
        if place in self._seen or self._shapes[shape] >= self._per_shape:
            return None
        if self._homes.get(shape, apart) != apart:
            return None
        rows = check(plan, bench)
        if rows is None:
            return None
        self._seen.add(place)
        self._shapes[shape] += 1
        self._homes[shape] = apart
        return DrawnQuestion(plan, bench.pair, sql, has_value(plan, rows[0]))

    def close(self) -> None:
        """Close the connections."""
        for bench in self._benches:
            bench.close()


def compose(
    pairs: Sequence[DrawnPair], levels: Sequence[int], num: int, per_shape: int, seed: int = 0
) -> list[tuple[int, DrawnQuestion]]:
    """Return questions with their levels; fewer than `num` if the shapes are exhausted. Levels take turns."""
    found: list[tuple[int, DrawnQuestion]] = []
    remaining = list(levels)
    with closing(_Composer(pairs, per_shape, seed)) as composer:
        for place in range(num):
            if not remaining:
                break
            level = remaining[place % len(remaining)]
            question = composer.question(level)
            if question is None:
                remaining.remove(level)
            else:
                found.append((level, question))
    return found


def has_value(plan: QueryPlan, rows: Table) -> bool:
    """Return whether the result is a single value and not a small number, which is guessed too easily."""
    single = isinstance(plan.head, Total | RowShare) and len(rows[0]) == 1
    cell = rows[0][0]
    return single and (isinstance(cell, str) or (cell is not None and float(cell) >= LEAST_VALUE))
