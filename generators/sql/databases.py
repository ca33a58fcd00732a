"""Databases of a domain: names of the tables and columns, and two sets of rows, one of them hidden."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from generators.sql.domains import POOLS, Column, ColumnKind, Domain, SqlTable
from ludus.rewards.code.sql_rows import Cell
from ludus.worlds.sql.questions import TableData, make_image

TYPES = {ColumnKind.INTEGER: "INTEGER", ColumnKind.REAL: "REAL", ColumnKind.REF: "INTEGER"}


@dataclass(frozen=True, slots=True)
class Naming:
    """Names of the tables and columns of a database by their ids."""

    tables: Mapping[str, str]
    columns: Mapping[tuple[str, str], str]

    def column(self, table: str, column: str) -> str:
        """Return the name of a column."""
        return self.columns[table, column]


@dataclass(frozen=True)
class DrawnPair:
    """Two databases with the same schema: `image` is the one of the task, `hidden` has other rows."""

    key: str
    domain: Domain
    naming: Naming
    tables: Sequence[TableData] = field(repr=False)

    @cached_property
    def image(self) -> bytes:
        """The database of the task."""
        return make_image(self.tables, plain=False, hidden=False)

    @cached_property
    def hidden(self) -> bytes:
        """The hidden database."""
        return make_image(self.tables, plain=False, hidden=True)


def make_pair(domain: Domain, number: int, seed: int = 0) -> DrawnPair:
    """Return the pair of a domain and a number; equal arguments return equal rows."""
    key = f"{domain.name}-{number}"
    naming = make_naming(domain, random.Random(f"{seed}/{key}/names"))
    rows = [make_rows(domain, random.Random(f"{seed}/{key}/{part}")) for part in ("shown", "hidden")]
    return DrawnPair(key, domain, naming, make_tables(domain, naming, rows))


def make_naming(domain: Domain, rng: random.Random | None = None) -> Naming:
    """Return names drawn at random, or the first ones."""
    tables = {t.id: rng.choice(t.names) if rng else t.id for t in domain.tables}
    columns = {(t.id, c.id): rng.choice(c.names) if rng else c.id for t in domain.tables for c in t.columns}
    return Naming(tables, columns)


def make_rows(domain: Domain, rng: random.Random) -> dict[str, list[tuple[Cell, ...]]]:
    """Return random rows of each table."""
    counts: dict[str, int] = {}
    found = {}
    for table in domain.tables:
        counts[table.id] = max(5, round(table.rows * rng.uniform(0.7, 1.3)))
        found[table.id] = _rows(table, counts, rng)
    return found


def make_tables(
    domain: Domain, naming: Naming, rows: Sequence[Mapping[str, Sequence[Sequence[Cell]]]]
) -> list[TableData]:
    """Return the tables as data, with the rows of the shown and of the hidden database."""
    both = (naming, make_naming(domain))
    return [
        TableData(
            names=[one.tables[table.id] for one in both],
            create=[_create(table, one) for one in both],
            columns=[[one.column(table.id, column.id) for column in table.columns] for one in both],
            rows=[part[table.id] for part in rows],
        )
        for table in domain.tables
    ]


def _create(table: SqlTable, naming: Naming) -> str:
    columns = []
    for column in table.columns:
        text = f"{naming.column(table.id, column.id)} "
        if column.kind is ColumnKind.KEY:
            text += "INTEGER PRIMARY KEY"
        else:
            text += TYPES.get(column.kind, "TEXT")
        if column.kind is ColumnKind.REF:
            key = naming.column(column.target, "id")
            text += f" REFERENCES {naming.tables[column.target]} ({key})"
        columns.append(text)
    return f"CREATE TABLE {naming.tables[table.id]} ({', '.join(columns)})"


def _rows(table: SqlTable, counts: Mapping[str, int], rng: random.Random) -> list[tuple[Cell, ...]]:
    """Return the rows of a table. Some rows of other tables stay without references."""
    count = counts[table.id]
    columns = [_values(column, count, counts, rng) for column in table.columns]
    return list(zip(*columns, strict=True))


def _values(column: Column, count: int, counts: Mapping[str, int], rng: random.Random) -> list[Cell]:
    if column.kind is ColumnKind.KEY:
        return list(range(1, count + 1))
    if column.kind is ColumnKind.LABEL:
        first, second = (words.split() for words in POOLS[column.values[0]])
        names = rng.sample(range(len(first) * len(second)), count)
        return [f"{first[n // len(second)]} {second[n % len(second)]}" for n in names]
    if column.kind is ColumnKind.REF:
        used = rng.sample(range(1, counts[column.target] + 1), max(3, round(counts[column.target] * 0.8)))
        return [rng.choice(used) for _ in range(count)]
    weights = [rng.uniform(0.5, 2.0) for _ in column.values]
    return [None if rng.random() < column.nulls else _value(column, weights, rng) for _ in range(count)]


def _value(column: Column, weights: list[float], rng: random.Random) -> Cell:
    if column.kind is ColumnKind.CATEGORY:
        return rng.choices(column.values, weights)[0]
    if column.kind is ColumnKind.INTEGER:
        return rng.randint(column.low, column.high)
    if column.kind is ColumnKind.REAL:
        return round(rng.uniform(column.low, column.high), 2)
    return f"{rng.randint(column.low, column.high)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
