"""Databases of a domain: names of its tables and columns, and two sets of rows, one of them hidden."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field

from ludus.worlds.sql.domains import POOLS, Column, ColumnKind, Domain, SqlTable

TYPES = {ColumnKind.INTEGER: "INTEGER", ColumnKind.REAL: "REAL", ColumnKind.REF: "INTEGER"}


@dataclass(frozen=True, slots=True)
class Naming:
    """What a database calls its tables and columns, by their ids."""

    tables: Mapping[str, str]
    columns: Mapping[tuple[str, str], str]

    def column(self, table: str, column: str) -> str:
        """The name of a column."""
        return self.columns[table, column]


@dataclass(frozen=True)
class DataPair:
    """Two databases of equal schema: `image` is the one of the task, `hidden` has other rows."""

    key: str
    domain: Domain
    naming: Naming
    image: bytes = field(repr=False)
    hidden: bytes = field(repr=False)


def make_pair(domain: Domain, number: int, seed: int, vary_names: bool = True) -> DataPair:
    """The pair of a domain and a number; equal arguments give equal bytes."""
    key = f"{domain.name}-{number}"
    naming = make_naming(domain, random.Random(f"{seed}/{key}/names") if vary_names else None)
    images = [make_image(domain, naming, random.Random(f"{seed}/{key}/{part}")) for part in ("shown", "hidden")]
    return DataPair(key, domain, naming, images[0], images[1])


def make_naming(domain: Domain, rng: random.Random | None = None) -> Naming:
    """Names drawn at random, or the first ones."""
    tables = {t.id: rng.choice(t.names) if rng else t.id for t in domain.tables}
    columns = {(t.id, c.id): rng.choice(c.names) if rng else c.id for t in domain.tables for c in t.columns}
    return Naming(tables, columns)


def make_image(domain: Domain, naming: Naming, rng: random.Random) -> bytes:
    """The bytes of a database with random rows."""
    with closing(sqlite3.connect(":memory:")) as connection:
        counts: dict[str, int] = {}
        for table in domain.tables:
            connection.execute(_create(table, naming))
            counts[table.id] = max(5, round(table.rows * rng.uniform(0.7, 1.3)))
            rows = _rows(table, counts, rng)
            marks = ", ".join("?" * len(table.columns))
            connection.executemany(f"INSERT INTO {naming.tables[table.id]} VALUES ({marks})", rows)
        connection.commit()
        return connection.serialize()


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


def _rows(table: SqlTable, counts: Mapping[str, int], rng: random.Random) -> list[tuple[object, ...]]:
    """The rows of a table. Some rows that could be referred to are not."""
    count = counts[table.id]
    columns = [_values(column, count, counts, rng) for column in table.columns]
    return list(zip(*columns, strict=True))


def _values(column: Column, count: int, counts: Mapping[str, int], rng: random.Random) -> list[object]:
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


def _value(column: Column, weights: list[float], rng: random.Random) -> object:
    if column.kind is ColumnKind.CATEGORY:
        return rng.choices(column.values, weights)[0]
    if column.kind is ColumnKind.INTEGER:
        return rng.randint(column.low, column.high)
    if column.kind is ColumnKind.REAL:
        return round(rng.uniform(column.low, column.high), 2)
    return f"{rng.randint(column.low, column.high)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
