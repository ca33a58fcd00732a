"""Plans of questions about the rows of one table. Words and SQL are both rendered from the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from generators.sql.domains import Column, ColumnKind, Domain

Scalar = int | float | str
Function = Literal["count", "distinct", "sum", "average", "smallest", "largest"]
Operator = Literal[
    "is",
    "is not",
    "one of",
    "above",
    "below",
    "at least",
    "between",
    "from",
    "before",
    "in year",
    "unknown",
    "known",
    "begins",
]
Counting = Literal["none", "some", "more"]
Side = Literal["above", "below"]
Joint = Literal["and", "not", "or"]


@dataclass(frozen=True, slots=True)
class Attribute:
    """A column of the table, or of a table at the end of `path`, a sequence of reference columns."""

    path: tuple[str, ...]
    column: str


@dataclass(frozen=True, slots=True)
class Test:
    """A condition on an attribute."""

    attribute: Attribute
    operator: Operator
    values: tuple[Scalar, ...] = ()


@dataclass(frozen=True, slots=True)
class Children:
    """A condition on the number of rows in another table that refer to a row: none, some, or more than a number."""

    table: str
    reference: str
    operator: Counting
    number: int = 0
    test: Test | None = None


@dataclass(frozen=True, slots=True)
class AverageCondition:
    """A condition on a number: above or below the average of all rows, or of those that share `same`."""

    attribute: Attribute
    operator: Side
    same: Attribute | None = None


Condition = Test | Children | AverageCondition


@dataclass(frozen=True, slots=True)
class Aggregate:
    """An aggregate of many rows; `attribute` is None if the rows are counted."""

    function: Function
    attribute: Attribute | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """The attributes of each row."""

    attributes: tuple[Attribute, ...]
    distinct: bool = False


@dataclass(frozen=True, slots=True)
class Total:
    """Numbers over all rows."""

    aggregates: tuple[Aggregate, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """Numbers for each value of an attribute; `more` limits the groups to those with more rows."""

    by: Attribute
    aggregates: tuple[Aggregate, ...]
    more: int | None = None


@dataclass(frozen=True, slots=True)
class PerRow:
    """For each row its name and an aggregate of the rows of another table that refer to it, possibly none."""

    label: Attribute
    table: str
    reference: str
    aggregate: Aggregate
    test: Test | None = None


@dataclass(frozen=True, slots=True)
class RowShare:
    """The percentage of rows that satisfy a test."""

    test: Test


@dataclass(frozen=True, slots=True)
class Both:
    """Values of an attribute among the rows of one test and those of another (`and`, but `not`, `or`)."""

    attribute: Attribute
    operator: Joint
    first: Test
    second: Test


@dataclass(frozen=True, slots=True)
class Best:
    """For each value of an attribute the rows with the largest or smallest number."""

    by: Attribute
    label: Attribute
    number: Attribute
    largest: bool


Head = Listing | Total | Groups | PerRow | RowShare | Both | Best


@dataclass(frozen=True, slots=True)
class SortOrder:
    """The output column (from 0) that orders the rows, and the maximum number of rows."""

    column: int
    descending: bool
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """A question about the rows of `table`."""

    domain: Domain
    table: str
    head: Head
    conditions: tuple[Condition, ...] = ()
    order: SortOrder | None = None

    @property
    def attributes(self) -> Iterator[Attribute]:
        """Attributes of the table in head and conditions, without those of tables that refer to it."""
        yield from head_attributes(self.head)
        for condition in self.conditions:
            if isinstance(condition, Test | AverageCondition):
                yield condition.attribute

    def column(self, attribute: Attribute) -> Column:
        """Return the column of an attribute of the table."""
        return column_of(self.domain, self.table, attribute)


def head_attributes(head: Head) -> tuple[Attribute, ...]:
    """Return the attributes of the table in a head, those of output columns first."""
    match head:
        case Listing(attributes):
            return attributes
        case Total(aggregates):
            return tuple(a.attribute for a in aggregates if a.attribute)
        case Groups(by, aggregates):
            return (by, *(a.attribute for a in aggregates if a.attribute))
        case PerRow(label):
            return (label,)
        case RowShare(test):
            return (test.attribute,)
        case Both(attribute, _, first, second):
            return (attribute, first.attribute, second.attribute)
        case Best(by, label, number):
            return (by, label, number)


@cache
def column_of(domain: Domain, table: str, attribute: Attribute) -> Column:
    """Return the column of an attribute of a table."""
    here = domain.table(table)
    for step in attribute.path:
        here = domain.table(here.column(step).target)
    return here.column(attribute.column)


@cache
def reachable(domain: Domain, table: str, depth: int) -> tuple[Attribute, ...]:
    """Return the attributes of a table and of the tables within `depth` references."""
    found: list[Attribute] = []
    frontier: list[tuple[tuple[str, ...], str]] = [((), table)]
    while frontier:
        path, name = frontier.pop(0)
        for column in domain.table(name).columns:
            if column.kind is ColumnKind.REF:
                if len(path) < depth:
                    frontier.append(((*path, column.id), column.target))
            elif column.kind is not ColumnKind.KEY:
                found.append(Attribute(path, column.id))
    return tuple(found)


def points(plan: QueryPlan) -> int:
    """Return the difficulty of a plan: joins, conditions beyond the first, grouping, nested queries."""
    total = len({a.path[:n] for a in plan.attributes for n in range(1, len(a.path) + 1)})
    total += max(0, len(plan.conditions) - 1) + (plan.order is not None)
    for condition in plan.conditions:
        if isinstance(condition, AverageCondition):
            total += 2 + (condition.same is not None)
        elif isinstance(condition, Children):
            total += 2 + (len(condition.test.attribute.path) if condition.test else 0)
    match plan.head:
        case Groups(_, aggregates, more):
            total += len(aggregates) + (more is not None)
        case PerRow(test=test):
            total += 3 if test is None else 4 + len(test.attribute.path)
        case Total(aggregates):
            total += len(aggregates) - 1
        case RowShare():
            total += 2
        case Both() | Best():
            total += 3
    return total


def level_of(plan: QueryPlan) -> int:
    """Return the level: 0 points are level 1, 1 level 2, 2 level 3, 3 and 4 level 4, more level 5."""
    return (1, 2, 3, 4, 4)[points(plan)] if points(plan) < 5 else 5
