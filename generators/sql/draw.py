"""Draw random plans of a level, with values that occur in a database."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from generators.sql.domains import Column, ColumnKind, Domain
from generators.sql.query import (
    Aggregate,
    Attribute,
    AverageCondition,
    Best,
    Both,
    Children,
    Condition,
    Counting,
    Function,
    Groups,
    Head,
    Joint,
    Listing,
    Operator,
    PerRow,
    QueryPlan,
    RowShare,
    Scalar,
    Side,
    SortOrder,
    Test,
    Total,
    column_of,
    head_attributes,
    level_of,
    reachable,
)

Stock = Mapping[tuple[str, str], Sequence[Scalar]]
"""The values of the columns of a database, by the ids of table and column, without NULL."""

DEPTH = {1: 0, 2: 1, 3: 2, 4: 2, 5: 2}
"""Maximum number of references to an attribute."""
HEADS: Mapping[int, Mapping[type[Head], float]] = {
    1: {Listing: 2, Total: 3},
    2: {Listing: 4, Total: 3, Groups: 3},
    3: {Listing: 3, Total: 3, Groups: 3, RowShare: 2},
    4: {Listing: 4, Total: 2, Groups: 3, PerRow: 3, RowShare: 1, Both: 2, Best: 2},
    5: {Listing: 4, Total: 2, Groups: 3, PerRow: 3, RowShare: 1, Both: 2, Best: 2},
}
NESTED = {1: 0.0, 2: 0.0, 3: 0.4, 4: 0.4, 5: 0.4}
"""Probability that a condition is a nested query."""
MOST_CONDITIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3}
CONDITION_KINDS = (Children, Test, AverageCondition)
ORDERED = {1: 0.0, 2: 0.5, 3: 0.5, 4: 0.5, 5: 0.5}
OPERATORS: Mapping[ColumnKind, tuple[Operator, ...]] = {
    ColumnKind.CATEGORY: ("is", "is", "is not", "one of"),
    ColumnKind.INTEGER: ("above", "below", "at least", "between", "is not"),
    ColumnKind.REAL: ("above", "below", "between"),
    ColumnKind.DATE: ("from", "before", "in year"),
    ColumnKind.LABEL: ("begins",),
}


@dataclass(frozen=True)
class Drawer:
    """Draws plans for one database."""

    domain: Domain
    stock: Stock
    level: int
    rng: random.Random

    def plan(self) -> QueryPlan | None:
        """Return a plan of the level, or None if the drawn plan has another level."""
        table = self.rng.choice(self.domain.tables).id
        kinds = HEADS[self.level]
        (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
        head = self._head(kind, table)
        if head is None:
            return None
        plan = QueryPlan(self.domain, table, head, self._conditions(table), self._order(kind, head))
        return plan if level_of(plan) == self.level and not _idle(plan) else None

    def _attributes(self, table: str, depth: int | None = None) -> list[Attribute]:
        """Return the reachable attributes, nearer ones repeated so that they are drawn more often."""
        found = reachable(self.domain, table, DEPTH[self.level] if depth is None else depth)
        return [a for a in found for _ in range(3 - len(a.path))]

    def _pick(self, table: str, *kinds: ColumnKind, full: bool = False) -> Attribute | None:
        """Return an attribute of these kinds; `full`: without missing values."""
        fitting = [a for a in self._attributes(table) if self._fits(table, a, kinds, full)]
        return self.rng.choice(fitting) if fitting else None

    def _fits(self, table: str, attribute: Attribute, kinds: Sequence[ColumnKind], full: bool) -> bool:
        column = column_of(self.domain, table, attribute)
        return (not kinds or column.kind in kinds) and not (full and column.nulls)

    def _head(self, kind: type[Head], table: str) -> Head | None:
        if kind is Listing:
            return self._listing(table)
        if kind is Total:
            count = self.rng.choice((1, 1, 1, 2, 3))
            return Total(tuple(dict.fromkeys(self._aggregate(table) for _ in range(count))))
        if kind is Groups:
            return self._groups(table)
        if kind is PerRow:
            return self._per_row(table)
        if kind is RowShare:
            test = self._test(table)
            return RowShare(test) if test and test.operator != "known" else None
        if kind is Both:
            column = self._pick(table, ColumnKind.CATEGORY, full=True)
            first, second = self._test(table), self._test(table)
            operator: Joint = self.rng.choice(("and", "not", "or"))
            return Both(column, operator, first, second) if column and first and second else None
        return self._best(table)

    def _groups(self, table: str) -> Groups | None:
        by = self._pick(table, ColumnKind.CATEGORY, full=True)
        made = tuple(dict.fromkeys(self._aggregate(table) for _ in range(self.rng.choice((1, 1, 2)))))
        more = self.rng.randint(2, 8) if self.rng.random() < 0.3 else None
        return Groups(by, made, more) if by and not any(a.attribute == by for a in made) else None

    def _best(self, table: str) -> Best | None:
        by = self._pick(table, ColumnKind.CATEGORY, full=True)
        label = self.domain.table(table).label
        number = self._pick(table, ColumnKind.INTEGER, ColumnKind.REAL, full=True)
        if not by or not label or not number:
            return None
        return Best(by, Attribute((), label.id), number, self.rng.random() < 0.5)

    def _listing(self, table: str) -> Listing:
        attributes = self._attributes(table)
        num = self.rng.choice((1, 1, 2, 2, 3))
        chosen = tuple(dict.fromkeys(self.rng.choice(attributes) for _ in range(num)))
        full = not any(column_of(self.domain, table, a).nulls for a in chosen)
        return Listing(chosen, distinct=full and len(chosen) < 3 and self.rng.random() < 0.3)

    def _aggregate(self, table: str) -> Aggregate:
        function: Function = self.rng.choice(("count", "distinct", "sum", "average", "smallest", "largest"))
        if function == "count":
            return Aggregate(function)
        kinds = {"distinct": (ColumnKind.CATEGORY,), "sum": (ColumnKind.INTEGER, ColumnKind.REAL)}.get(function)
        kinds = kinds or (ColumnKind.INTEGER, ColumnKind.REAL, *((ColumnKind.DATE,) if function != "average" else ()))
        attribute = self._pick(table, *kinds)
        return Aggregate(function, attribute) if attribute else Aggregate("count")

    def _per_row(self, table: str) -> PerRow | None:
        label, children = self.domain.table(table).label, self.domain.children(table)
        if label is None or not children:
            return None
        child, reference = self.rng.choice(children)
        numbers = [c for c in child.columns if c.is_number]
        aggregate = Aggregate("count")
        if numbers and self.rng.random() < 0.5:
            aggregate = Aggregate("sum", Attribute((), self.rng.choice(numbers).id))
        test = self._test(child.id, depth=self.level - 4) if self.rng.random() < 0.5 else None
        if test and (test.attribute.path[:1] == (reference.id,) or test.attribute == aggregate.attribute):
            return None
        return PerRow(Attribute((), label.id), child.id, reference.id, aggregate, test)

    def _conditions(self, table: str) -> tuple[Condition, ...]:
        num = self.rng.randint(0, MOST_CONDITIONS[self.level])
        drawn = [self._condition(table) for _ in range(num)]
        tested: dict[object, Condition] = {}
        for condition in drawn:
            if condition:
                key = Children if isinstance(condition, Children) else condition.attribute
                tested.setdefault(key, condition)
        return tuple(sorted(tested.values(), key=lambda c: (CONDITION_KINDS.index(type(c)), c.operator)))

    def _condition(self, table: str) -> Condition | None:
        if self.rng.random() >= NESTED[self.level]:
            return self._test(table)
        children = self.domain.children(table)
        if children and self.rng.random() < 0.6:
            child, reference = self.rng.choice(children)
            counting: Counting = self.rng.choice(("none", "some", "more"))
            test = self._test(child.id, depth=1 if self.level == 5 else 0)
            test = None if self.rng.random() < 0.4 else test
            if test and test.attribute.path[:1] == (reference.id,):
                return None
            return Children(child.id, reference.id, counting, self.rng.randint(2, 4) * (counting == "more"), test)
        number = self._pick(table, ColumnKind.INTEGER, ColumnKind.REAL)
        if number is None or number.path:
            return None
        same = self._pick(table, ColumnKind.CATEGORY, full=True) if self.rng.random() < 0.4 else None
        operator: Side = self.rng.choice(("above", "below"))
        return AverageCondition(number, operator, same if same and not same.path else None)

    def _test(self, table: str, depth: int | None = None) -> Test | None:
        attribute = self.rng.choice(self._attributes(table, depth))
        column = column_of(self.domain, table, attribute)
        if column.nulls and self.rng.random() < 0.4:
            return Test(attribute, self.rng.choice(("unknown", "known")))
        values = self.stock[self._home(table, attribute), column.id]
        if len(set(values)) < 2:
            return None
        operator = self.rng.choice(OPERATORS[column.kind])
        if column.nulls and operator == "is not":
            return None
        return Test(attribute, operator, self._values(column, operator, values))

    def _home(self, table: str, attribute: Attribute) -> str:
        """Return the table of an attribute."""
        for step in attribute.path:
            table = self.domain.table(table).column(step).target
        return table

    def _values(self, column: Column, operator: Operator, values: Sequence[Scalar]) -> tuple[Scalar, ...]:
        one, other = self.rng.choice(values), self.rng.choice(values)
        if operator in ("one of", "between"):
            while one == other:
                other = self.rng.choice(values)
            ends = sorted((one, other), key=lambda value: str(value) if column.values else float(value))
            return tuple(ends)
        if operator == "in year":
            return (str(one)[:4],)
        if operator == "begins":
            return (str(one)[0],)
        return (one,)

    def _order(self, kind: type[Head], head: Head) -> SortOrder | None:
        if kind not in (Listing, Groups, PerRow) or self.rng.random() >= ORDERED[self.level]:
            return None
        columns = {Listing: 1, Groups: 2, PerRow: 2}[kind]
        if isinstance(head, Listing):
            columns = len(head.attributes)
        limit = self.rng.randint(2, 8) if self.rng.random() < 0.5 else None
        return SortOrder(self.rng.randrange(columns), self.rng.random() < 0.5, limit)


def _idle(plan: QueryPlan) -> bool:
    """Return whether a condition determines an attribute of the head: its values are all equal or all missing."""
    asked = set(head_attributes(plan.head))
    fixed = [c.attribute for c in plan.conditions if isinstance(c, Test) and c.operator in ("is", "unknown")]
    return any(attribute in asked for attribute in fixed)
