"""Render a plan as SQL and as a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from generators.sql.databases import Naming
from generators.sql.domains import ColumnKind, Domain
from generators.sql.query import (
    Aggregate,
    Attribute,
    AverageCondition,
    Best,
    Both,
    Children,
    Condition,
    Groups,
    Listing,
    PerRow,
    QueryPlan,
    RowShare,
    Scalar,
    SortOrder,
    Test,
    Total,
    column_of,
)

FUNCTIONS = {
    "sum": "SUM({})",
    "average": "AVG({})",
    "smallest": "MIN({})",
    "largest": "MAX({})",
    "distinct": "COUNT(DISTINCT {})",
}
COMPARISONS = {
    "is": "{} = {}",
    "is not": "{} <> {}",
    "one of": "{} IN ({}, {})",
    "above": "{} > {}",
    "below": "{} < {}",
    "at least": "{} >= {}",
    "between": "{} BETWEEN {} AND {}",
    "from": "{} >= {}",
    "before": "{} < {}",
    "in year": "strftime('%Y', {}) = {}",
    "unknown": "{} IS NULL",
    "known": "{} IS NOT NULL",
    "begins": "{} LIKE {}",
}
WORDS = {
    "is": "is {}",
    "is not": "is not {}",
    "one of": "is {} or {}",
    "above": "is above {}",
    "below": "is below {}",
    "at least": "is at least {}",
    "between": "is from {} to {}",
    "from": "is {} or later",
    "before": "is before {}",
    "in year": "is in {}",
    "unknown": "is unknown",
    "known": "is known",
    "begins": "begins with {}",
}
ORDERS = {
    ColumnKind.LABEL: ("A to Z", "Z to A"),
    ColumnKind.CATEGORY: ("A to Z", "Z to A"),
    ColumnKind.DATE: ("earliest first", "latest first"),
}
SETS = {"and": "INTERSECT", "not": "EXCEPT", "or": "UNION"}


@dataclass
class _Scope:
    """The FROM clause of one SELECT: a table and the tables joined to it so far."""

    domain: Domain
    naming: Naming
    table: str
    first: str = "a"
    plain: bool = False
    _joins: dict[tuple[str, ...], str] = field(default_factory=dict)

    def name(self, attribute: Attribute) -> str:
        """Return an attribute in SQL, and join its tables if necessary."""
        table = self.domain.table(self.table)
        for depth in range(1, len(attribute.path) + 1):
            path = attribute.path[:depth]
            self._joins.setdefault(path, chr(ord(self.first) + 1 + len(self._joins)))
            table = self.domain.table(table.column(attribute.path[depth - 1]).target)
        column = self.naming.column(table.id, attribute.column)
        if self.plain:
            return column
        return f"{self._joins[attribute.path] if attribute.path else self.first}.{column}"

    @property
    def key(self) -> str:
        """The key of the table."""
        return self.name(Attribute((), "id"))

    @property
    def source(self) -> str:
        """The text after FROM, complete after all attributes are named."""
        text = self.naming.tables[self.table] + ("" if self.plain else f" AS {self.first}")
        for path, alias in self._joins.items():
            table = self.domain.table(self.table)
            for step in path[:-1]:
                table = self.domain.table(table.column(step).target)
            holder = self._joins[path[:-1]] if path[:-1] else self.first
            target = self.domain.table(table.column(path[-1]).target)
            key = self.naming.column(target.id, "id")
            link = f"{holder}.{self.naming.column(table.id, path[-1])}"
            text += f" JOIN {self.naming.tables[target.id]} AS {alias} ON {alias}.{key} = {link}"
        return text


def quote(value: Scalar) -> str:
    """Return a value in SQL."""
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def to_sql(plan: QueryPlan, naming: Naming) -> str:
    """Return the gold query."""
    nested = any(not isinstance(c, Test) for c in plan.conditions) or isinstance(plan.head, PerRow)
    plain = not nested and not any(a.path for a in plan.attributes)
    scope = _Scope(plan.domain, naming, plan.table, plain=plain)
    if isinstance(plan.head, Both):
        return _both(plan, plan.head, naming, plain)
    if isinstance(plan.head, Best):
        return _best(plan, plan.head, scope)
    columns, tail = _head(plan, scope)
    where = [_condition(condition, scope) for condition in plan.conditions]
    distinct = "DISTINCT " if isinstance(plan.head, Listing) and plan.head.distinct else ""
    source = scope.source + (_left_join(plan.head, scope) if isinstance(plan.head, PerRow) else "")
    return f"SELECT {distinct}{', '.join(columns)} FROM {source}{_where(where)}{tail}{_order(plan.order, columns)}"


def _where(conditions: Sequence[str]) -> str:
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def _order(order: SortOrder | None, columns: Sequence[str]) -> str:
    if order is None:
        return ""
    limit = f" LIMIT {order.limit}" if order.limit else ""
    return f" ORDER BY {columns[order.column]}{' DESC' if order.descending else ''}{limit}"


def _head(plan: QueryPlan, scope: _Scope) -> tuple[list[str], str]:
    """Return the output columns and the text after WHERE."""
    match plan.head:
        case Listing(attributes):
            return [scope.name(a) for a in attributes], ""
        case Total(aggregates):
            return [_aggregate(a, scope) for a in aggregates], ""
        case Groups(by, aggregates, more):
            group = scope.name(by)
            having = f" HAVING COUNT(*) > {more}" if more is not None else ""
            return [group, *(_aggregate(a, scope) for a in aggregates)], f" GROUP BY {group}{having}"
        case PerRow() as head:
            return [scope.name(head.label), _child_number(head, scope)], f" GROUP BY {scope.key}"
        case RowShare(test):
            passed = f"CASE WHEN {_test(test, scope)} THEN 1 ELSE 0 END"
            return [f"100.0 * SUM({passed}) / COUNT(*)"], ""
    raise TypeError(f"{type(plan.head).__name__} is rendered separately")


def _aggregate(aggregate: Aggregate, scope: _Scope) -> str:
    if aggregate.attribute is None:
        return "COUNT(*)"
    return FUNCTIONS[aggregate.function].format(scope.name(aggregate.attribute))


def _child_scope(table: str, scope: _Scope) -> _Scope:
    return _Scope(scope.domain, scope.naming, table, first="p")


def _child_number(head: PerRow, scope: _Scope) -> str:
    child = _child_scope(head.table, scope)
    if head.aggregate.attribute is None:
        return f"COUNT({child.key})"
    return f"COALESCE(SUM({child.name(head.aggregate.attribute)}), 0)"


def _left_join(head: PerRow, scope: _Scope) -> str:
    """Return the LEFT JOIN of a head; with a test on another table the joined table is a nested query."""
    child = _child_scope(head.table, scope)
    link = f"{child.name(Attribute((), head.reference))} = {scope.key}"
    name = scope.naming.tables[head.table]
    if head.test is None:
        return f" LEFT JOIN {name} AS p ON {link}"
    if not head.test.attribute.path:
        return f" LEFT JOIN {name} AS p ON {link} AND {_test(head.test, child)}"
    inner = _test(head.test, child)
    return f" LEFT JOIN (SELECT p.* FROM {child.source} WHERE {inner}) AS p ON {link}"


def _test(test: Test, scope: _Scope) -> str:
    return COMPARISONS[test.operator].format(scope.name(test.attribute), *map(quote, _sql_values(test)))


def _sql_values(test: Test) -> tuple[Scalar, ...]:
    return (f"{test.values[0]}%",) if test.operator == "begins" else test.values


def _condition(condition: Condition, scope: _Scope) -> str:
    match condition:
        case Test():
            return _test(condition, scope)
        case AverageCondition(attribute, operator, same):
            inner = _Scope(scope.domain, scope.naming, scope.table, first="p")
            average = f"AVG({inner.name(attribute)})"
            link = f" WHERE {inner.name(same)} = {scope.name(same)}" if same else ""
            sign = {"above": ">", "below": "<"}[operator]
            return f"{scope.name(attribute)} {sign} (SELECT {average} FROM {inner.source}{link})"
        case Children(table, reference, operator, number, test):
            inner = _child_scope(table, scope)
            parts = [f"{inner.name(Attribute((), reference))} = {scope.key}"]
            parts += [_test(test, inner)] if test else []
            where = f"FROM {inner.source}{_where(parts)}"
            if operator == "more":
                return f"(SELECT COUNT(*) {where}) > {number}"
            return f"{'NOT ' if operator == 'none' else ''}EXISTS (SELECT 1 {where})"


def _both(plan: QueryPlan, head: Both, naming: Naming, plain: bool) -> str:
    parts = []
    for test in (head.first, head.second):
        scope = _Scope(plan.domain, naming, plan.table, plain=plain)
        column = scope.name(head.attribute)
        where = [_condition(c, scope) for c in (*plan.conditions, test)]
        parts.append(f"SELECT {column} FROM {scope.source}{_where(where)}")
    return f" {SETS[head.operator]} ".join(parts)


def _best(plan: QueryPlan, head: Best, scope: _Scope) -> str:
    by, label, number = (scope.name(a) for a in (head.by, head.label, head.number))
    where = [_condition(c, scope) for c in plan.conditions]
    place = f"RANK() OVER (PARTITION BY {by} ORDER BY {number}{' DESC' if head.largest else ''})"
    inner = f"SELECT {by} AS x, {label} AS y, {place} AS place FROM {scope.source}{_where(where)}"
    return f"SELECT x, y FROM ({inner}) WHERE place = 1"


# Words


def to_words(plan: QueryPlan) -> str:
    """Return the question."""
    rows = plan.domain.table(plan.table).plural + _those(plan.conditions, plan)
    text = f"For each of the {rows}, " if isinstance(plan.head, PerRow) else f"Of the {rows}, "
    return text + _asked(plan) + _ordered(plan) + "."


def _asked(plan: QueryPlan) -> str:
    """Return the request in a question."""
    match plan.head:
        case Listing():
            return _listed(plan, plan.head)
        case Total(aggregates):
            return f"give {_and([_number(plan, a) for a in aggregates])}"
        case Groups(by, aggregates, more):
            asked = _and([_number(plan, a) for a in aggregates])
            only = f", only where there are more than {more} such rows" if more is not None else ""
            return f"give for each {_phrase(plan, by)} that {_phrase(plan, by)} and {asked}{only}"
        case PerRow():
            return _counted(plan, plan.head)
        case RowShare(test):
            return f"what percentage are those whose {_tested(plan.domain, plan.table, test)}"
        case Both(attribute, operator, first, second):
            joint = {"and": "and also among", "not": "but not among", "or": "or among"}[operator]
            one, other = (_tested(plan.domain, plan.table, test) for test in (first, second))
            text = f"list each {_phrase(plan, attribute)} that occurs among those whose {one}, "
            return text + f"{joint} those whose {other}; each once"
        case Best(by, label, number, largest):
            most, row = ("largest" if largest else "smallest"), plan.domain.table(plan.table).phrase
            group, best = _phrase(plan, by), f"{most} {_phrase(plan, number)}"
            text = f"give for each {group} that {group} and the {_phrase(plan, label)} of the "
            return text + f"{row} with the {best}, all if tied"


def _listed(plan: QueryPlan, head: Listing) -> str:
    asked = _and([_phrase(plan, a) for a in head.attributes])
    if not head.distinct:
        return f"list the {asked}"
    return f"list each different {asked}" if len(head.attributes) == 1 else f"list each {asked}, no row twice"


def _counted(plan: QueryPlan, head: PerRow) -> str:
    child = plan.domain.table(head.table)
    whose = f" whose {_tested(plan.domain, head.table, head.test)}" if head.test else ""
    what = "the number of its"
    if head.aggregate.attribute:
        column = column_of(plan.domain, head.table, head.aggregate.attribute)
        what = f"the sum of the {column.phrase} over its"
    return f"give the {_phrase(plan, head.label)} and {what} {child.plural}{whose}, 0 where there are none"


def _ordered(plan: QueryPlan) -> str:
    if plan.order is None:
        return ""
    name, kind = _sorted_by(plan, plan.order.column)
    words = ORDERS.get(kind, ("smallest first", "largest first"))
    text = f", ordered by {name}, {words[plan.order.descending]}"
    return text + (f", only the first {plan.order.limit} rows" if plan.order.limit else "")


def _sorted_by(plan: QueryPlan, column: int) -> tuple[str, ColumnKind]:
    """Return the name and kind of an output column."""
    match plan.head:
        case Listing(attributes):
            attribute: Attribute | None = attributes[column]
        case Groups(by, aggregates):
            attribute = by if column == 0 else None
            if column:
                made = aggregates[column - 1]
                kind = plan.column(made.attribute).kind if made.attribute else ColumnKind.INTEGER
                counted = made.function in ("count", "distinct")
                return _number(plan, made).removeprefix("the "), ColumnKind.INTEGER if counted else kind
        case PerRow(label):
            attribute = label if column == 0 else None
        case _:
            raise TypeError(f"the rows of {type(plan.head).__name__} have no order")
    return (_phrase(plan, attribute), plan.column(attribute).kind) if attribute else ("number", ColumnKind.INTEGER)


def _those(conditions: Sequence[Condition], plan: QueryPlan) -> str:
    """Return the conditions after the name of the rows."""
    whose, other = [], []
    for condition in conditions:
        match condition:
            case Test():
                whose.append(_tested(plan.domain, plan.table, condition))
            case AverageCondition(attribute, operator, same):
                group = f"all {plan.domain.table(plan.table).plural}"
                group += f" with the same {_phrase(plan, same)}" if same else ""
                name = _phrase(plan, attribute)
                whose.append(f"{name} is {operator} the average {name} of {group}")
            case Children(table, _, operator, number, test):
                child = plan.domain.table(table)
                count = {"none": "no", "some": "at least one", "more": f"more than {number}"}[operator]
                name = child.phrase if operator == "some" else child.plural
                inner = f" whose {_tested(plan.domain, table, test)}" if test else ""
                other.append(f"{count} {name}{inner}")
    text = f" whose {' and whose '.join(whose)}" if whose else ""
    return text + (f"{' and' if whose else ''} that have {' and '.join(other)}" if other else "")


def _and(parts: Sequence[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _phrase(plan: QueryPlan, attribute: Attribute) -> str:
    return _attribute(plan.domain, plan.table, attribute)


def _attribute(domain: Domain, table: str, attribute: Attribute) -> str:
    """Return the words of an attribute: `price`, or `product's supplier's country`."""
    here = domain.table(table)
    owners = []
    for step in attribute.path:
        owners.append(f"{here.column(step).phrase}'s ")
        here = domain.table(here.column(step).target)
    return "".join(owners) + here.column(attribute.column).phrase


def _tested(domain: Domain, table: str, test: Test) -> str:
    values = [f"'{v}'" if isinstance(v, str) and not v[0].isdigit() else str(v) for v in test.values]
    return f"{_attribute(domain, table, test.attribute)} {WORDS[test.operator].format(*values)}"


def _number(plan: QueryPlan, aggregate: Aggregate) -> str:
    if aggregate.attribute is None:
        return f"the number of {plan.domain.table(plan.table).plural}"
    name = _phrase(plan, aggregate.attribute)
    if aggregate.function == "distinct":
        return f"the number of different values of {name}"
    if plan.column(aggregate.attribute).kind is ColumnKind.DATE:
        word = {"smallest": "earliest", "largest": "latest"}[aggregate.function]
        return f"the {word} {name}"
    return (
        f"the {aggregate.function} of {name}" if aggregate.function == "sum" else (f"the {aggregate.function} {name}")
    )
