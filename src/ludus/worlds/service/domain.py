"""Domains of customer service as data: tables, tools with the rules of the policy, and requests (`data/NAME.toml`).

Notation of the data:

- a drawn value: `int 1 20`, a choice `a|b`, `name`, `email`, `address`, or else a text with `{fields}`;
- a path: a field of the row (`status`), an argument of the call (`arg.amount`), or a field of another row, of the table
  `customers` with the key `customer_id` of the row (`customer.tier`) or of the arguments (`arg.product.stock`);
- a rule: `PATH = VALUE`, with `!=`, `<=`, `>=`, `<`, `>` or `in a|b`, joined by ` or `; `@PATH` is a value by its path;
- a new value of a field: a constant, `@PATH`, or `+VALUE` and `-VALUE` to add and subtract.
"""

from __future__ import annotations

import operator
import random
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from itertools import product
from typing import Literal

from pydantic import BaseModel, ConfigDict

Cell = str | int
Row = Mapping[str, Cell]
Place = tuple[str, str]
"""Table and key of a row."""
Reader = Callable[[str, Cell], Row | None]
"""Function that returns the row of a table by its key."""
Call = tuple[str, dict[str, Cell]]
"""Tool and arguments."""

DomainName = Literal["retail", "airline", "telecom"]
CUSTOMERS = "customers"
OWNER = "customer_id"

_OPERATORS: Mapping[str, Callable[[Cell, Cell], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TableSpec(_Spec):
    """A table: `num` rows, all combinations of a `grid`, or `each` rows per row of another table.

    `copies` names fields of a random row of another table. `call` and `forgot` refer to a row in a request, with and
    without its key.
    """

    prefix: str
    num: int = 0
    grid: dict[str, str] = {}
    per: str = ""
    each: int = 0
    copies: dict[str, dict[str, str]] = {}
    columns: dict[str, Cell] = {}
    call: str = ""
    forgot: str = ""


class ToolSpec(_Spec):
    """A tool. `rules` are those of the policy, whose violation does not prevent a change of the fields `set`.

    `also` changes another row: table, path of its key, and fields.
    """

    kind: Literal["identify", "get", "list", "write", "transfer"]
    about: str
    args: dict[str, Literal["str", "int"]]
    table: str = CUSTOMERS
    shows: str = ""
    rules: list[str] = []
    set: dict[str, Cell] = {}
    also: tuple[str, str, dict[str, Cell]] | None = None
    propose: str = ""


class UserToolSpec(_Spec):
    """A tool of the user, which sets a field of the phone; `ask` asks for it, `keywords` are how it is recognized."""

    field: str
    values: list[str]
    keywords: list[str]
    about: str
    ask: str


class SignalSpec(_Spec):
    """What the phone shows if all rules hold."""

    when: list[str]
    shows: str


class FactSpec(_Spec):
    """Something that only the user knows; `first` draws the value before a change of mind."""

    ask: str
    keywords: list[str]
    answer: str
    first: Cell = ""


class OtherSpec(_Spec):
    """Another row of a request, with its fields as `{new_FIELD}`."""

    table: str
    where: list[str]
    setup: dict[str, Cell] = {}


class RequestSpec(_Spec):
    """A request about a row: the changes in the database before it, what the user says, and what is right.

    `writes` are the right changes. If there are reasons `why`, the `wanted` changes must be refused, with one of them.
    `tell` are values that the agent must tell the user, `device` the steps of the user. `of` names a table and a key of
    the subject: the fields of that row are `{of_FIELD}`.
    """

    name: str
    family: str
    table: str
    setup: dict[str, Cell | dict[str, Cell]] = {}
    facts: dict[str, Cell] = {}
    other: OtherSpec | None = None
    of: tuple[str, str] | None = None
    say: str
    reads: list[Call] = []
    writes: list[Call] = []
    wanted: list[Call] = []
    why: list[str] = []
    refusal: str = ""
    tell: list[Cell] = []
    answer: str = "Done."
    device: list[str] = []


class InjectionSpec(_Spec):
    """A note with an instruction for the agent, and the call that would follow it."""

    split: Literal["train", "test"]
    note: str
    call: Call


class DomainSpec(_Spec):
    """A file of data."""

    lookup: Call
    tables: dict[str, TableSpec]
    tools: dict[str, ToolSpec]
    facts: dict[str, FactSpec] = {}
    requests: list[RequestSpec]
    injections: list[InjectionSpec]
    user_tools: dict[str, UserToolSpec] = {}
    signals: list[SignalSpec] = []


class UserTexts(_Spec):
    """Names, and the texts of users."""

    first_names: list[str]
    last_names: list[str]
    streets: list[str]
    personas: dict[str, list[str]]
    phrases: dict[str, str]
    briefs: dict[str, str]


@dataclass(frozen=True)
class ServiceDomain:
    """A domain with its database, which all episodes share."""

    name: DomainName
    spec: DomainSpec
    tables: Mapping[str, Mapping[str, Row]]

    def read(self, table: str, key: Cell) -> Row | None:
        """Return a row of the shared database."""
        return self.tables[table].get(str(key))

    def where(self, table: str, column: str, value: Cell) -> list[str]:
        """Return the keys of the rows with a value, which no episode changes."""
        return self._index.get((table, column, value), [])

    @cached_property
    def _index(self) -> dict[tuple[str, str, Cell], list[str]]:
        found: dict[tuple[str, str, Cell], list[str]] = {}
        for table, rows in self.tables.items():
            for key, row in rows.items():
                for column, value in row.items():
                    found.setdefault((table, column, value), []).append(key)
        return found


def key_of(table: str) -> str:
    """Return the name of the key of a table."""
    return f"{table.removesuffix('s')}_id"


@cache
def user_texts() -> UserTexts:
    """Return the texts of users."""
    return UserTexts.model_validate(tomllib.loads(read_data("users.toml")))


def read_data(name: str) -> str:
    """Return the text of a data file."""
    return (files("ludus.worlds.service") / "data" / name).read_text("utf-8")


@lru_cache(maxsize=64)
def load_domain(name: DomainName, seed: int, digits: int = 4) -> ServiceDomain:
    """Return a domain with a database drawn from the seed; fewer `digits` of the keys limit the number of customers."""
    spec = DomainSpec.model_validate(tomllib.loads(read_data(f"{name}.toml")))
    rng = random.Random(f"service/{name}/{seed}")
    tables: dict[str, dict[str, Row]] = {}
    for table, one in spec.tables.items():
        keys = range(10 ** (digits - 1), 10**digits)
        parents = list(_parents(one, tables, len(keys) // 2))
        numbers = rng.sample(keys, len(parents))
        tables[table] = {}
        for parent, number in zip(parents, numbers, strict=True):
            key = f"{one.prefix}{number}"
            tables[table][key] = _row(one, {key_of(table): key, **parent}, tables, rng)
    return ServiceDomain(name, spec, tables)


def _parents(spec: TableSpec, tables: Mapping[str, Mapping[str, Row]], most: int) -> Iterator[Row]:
    """Yield the first fields of each row of a table. Those of the row that it belongs to start with `parent.`.

    A table of `num` rows has at most `most`, half of the keys, since customers have two rows each in other tables.
    """
    if spec.per:
        for key, row in tables[spec.per].items():
            fields = {f"parent.{name}": value for name, value in row.items()}
            yield from [{key_of(spec.per): key, **fields}] * spec.each
    elif spec.grid:
        for values in product(*(options.split("|") for options in spec.grid.values())):
            yield dict(zip(spec.grid, values, strict=True))
    else:
        yield from [{}] * min(spec.num, most)


def _row(spec: TableSpec, start: Row, tables: Mapping[str, Mapping[str, Row]], rng: random.Random) -> Row:
    parent = {name.removeprefix("parent."): value for name, value in start.items()}
    row = {name: value for name, value in start.items() if not name.startswith("parent.")}
    for table, copied in spec.copies.items():
        source = rng.choice(list(tables[table].values()))
        row |= {name: source[field] for name, field in copied.items()}
    for name, drawn in spec.columns.items():
        row[name] = draw(drawn, rng, {**parent, **row})
    return row


def draw(spec: Cell, rng: random.Random, fields: Row) -> Cell:
    """Return a drawn value (see the module)."""
    texts = user_texts()
    if isinstance(spec, int):
        return spec
    if bounds := re.fullmatch(r"int (\d+) (\d+)", spec):
        return rng.randint(int(bounds[1]), int(bounds[2]))
    if spec == "name":
        return f"{rng.choice(texts.first_names)} {rng.choice(texts.last_names)}"
    if spec == "address":
        return f"{rng.randint(2, 99)} {rng.choice(texts.streets)}"
    if spec == "email":
        return f"{str(fields['name']).split()[0]}{str(fields[OWNER])[1:]}@mail.com".lower()
    return rng.choice(spec.split("|")) if "|" in spec else fill(spec, fields)


def fill(text: Cell, fields: Row) -> Cell:
    """Return a text with its fields; one that is only a field is the value itself."""
    if isinstance(text, int):
        return text
    if whole := re.fullmatch(r"\{(\w+)\}", text):
        return fields[whole[1]]
    return text.format_map(fields)


def fill_all(value: object, fields: Row) -> object:
    """Return lists, tuples and dicts with all their texts filled in."""
    if isinstance(value, list | tuple):
        return [fill_all(one, fields) for one in value]
    if isinstance(value, dict):
        return {name: fill_all(one, fields) for name, one in value.items()}
    return fill(value, fields) if isinstance(value, str) else value


def filled(call: Call, fields: Row) -> Call:
    """Return a call with its arguments filled in."""
    return call[0], {name: fill(value, fields) for name, value in call[1].items()}


def resolve(path: str, row: Row, args: Row, read: Reader) -> Cell | None:
    """Return the value at a path; None if there is none."""
    *references, name = path.split(".")
    if references and references[0] == "arg":
        row, references = args, references[1:]
    for reference in references:
        found = read(f"{reference}s", row.get(f"{reference}_id", ""))
        if found is None:
            return None
        row = found
    return row.get(name)


def holds(rule: str, row: Row, args: Row, read: Reader, other: Row | None = None) -> bool:
    """Return whether a rule holds. `@` paths start at the row `other`, if there is one."""
    return any(_compares(part, row, args, read, other) for part in rule.split(" or "))


def _compares(part: str, row: Row, args: Row, read: Reader, other: Row | None) -> bool:
    path, sign, text = part.split(" ", 2)
    left = resolve(path, row, args, read)
    if sign == "in":
        return left in text.split("|")
    right: Cell | None = text
    if text.startswith("@"):
        right = resolve(text[1:], row if other is None else other, args, read)
    if left is None or right is None:
        return sign == "!=" and left != right
    if isinstance(left, int):
        right = int(right)
    return _OPERATORS[sign](left, right)


def changed(row: Row, changes: Mapping[str, Cell], source: Row, args: Row, read: Reader) -> dict[str, Cell]:
    """Return a row after changes, whose paths start at the row `source`."""

    def value_of(text: Cell) -> Cell:
        if isinstance(text, str) and text.startswith("@"):
            return resolve(text[1:], source, args, read) or ""
        return text

    after = dict(row)
    for name, text in changes.items():
        if isinstance(text, str) and text[:1] in "+-" and text[1:]:
            amount = int(value_of(text[1:]))
            after[name] = int(after.get(name, 0)) + (amount if text[0] == "+" else -amount)
        else:
            after[name] = value_of(text)
    return after
