"""Queries on an SQLite database with limits on work, time, memory and output, and without disk access.

Every query runs on a separate connection to a copy in memory. A progress handler stops a query after `SqlLimits.steps`
VM instructions, which is deterministic, or `SqlLimits.seconds`. A single instruction or an expression without a jump
cannot be interrupted; the limits on value length, function calls and `printf` widths keep them short (at most 15 ms on
a slow core). The memory limit counts all connections of the process. Not covered: `date('now')` returns the current
time.
"""

from __future__ import annotations

import difflib
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from threading import Lock

from ludus.tools.base import Tool, tool

Value = None | int | float | str | bytes
Row = tuple[Value, ...]

READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
WRITES = frozenset(
    {
        *(sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE),
        *(sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_CREATE_INDEX, sqlite3.SQLITE_CREATE_VIEW),
        *(sqlite3.SQLITE_DROP_TABLE, sqlite3.SQLITE_DROP_INDEX, sqlite3.SQLITE_DROP_VIEW),
        *(sqlite3.SQLITE_ALTER_TABLE, sqlite3.SQLITE_REINDEX),
    }
)
ACTIONS = {
    sqlite3.SQLITE_ATTACH: "ATTACH and VACUUM are",
    sqlite3.SQLITE_DETACH: "DETACH is",
    sqlite3.SQLITE_TRANSACTION: "BEGIN, COMMIT and ROLLBACK are",
    sqlite3.SQLITE_SAVEPOINT: "SAVEPOINT is",
    sqlite3.SQLITE_INSERT: "INSERT is",
    sqlite3.SQLITE_UPDATE: "UPDATE is",
    sqlite3.SQLITE_DELETE: "DELETE is",
    sqlite3.SQLITE_ALTER_TABLE: "ALTER TABLE is",
    sqlite3.SQLITE_CREATE_TABLE: "CREATE TABLE is",
}
PRAGMAS = frozenset({"table_info", "table_xinfo", "foreign_key_list", "index_list", "index_info"})  # read-only pragmas
# Rejected functions: they load code, are nondeterministic, or access files.
FUNCTIONS = frozenset({"load_extension", "random", "randomblob", "fts3_tokenizer", "readfile", "writefile"})
NO_SUCH = re.compile(r"no such (table|column): ((?:\w+\.)?(\w+))")
LIKE_CHARACTERS = 100
COLUMNS = 100
PAGES_GROWTH = 2_000
SQL_BYTES = 4  # maximum bytes per character of a query
WIDE = re.compile(r"%[-+ #!,.\dl]*(?:\*|\d{4})")
"""Pattern of a format width or precision that is an argument or has more than three digits."""
CALLS = 50  # maximum number of function calls in a query
CHECK_EVERY = 200  # instructions between two checks of the limits


class SqlError(ValueError):
    """Raised if a query fails or is rejected; the message is shown to the model."""


@dataclass(frozen=True, slots=True)
class SqlLimits:
    """Limits of one query.

    `rows` and `cell` (characters) bound the shown result, `counted` the counted rows, `value` the bytes of a
    value, `text` the characters of the query, `memory` the bytes of SQLite's heap.
    """

    rows: int = 20
    cell: int = 60
    counted: int = 10_000
    steps: int = 5_000_000
    seconds: float = 2.0
    value: int = 5_000
    text: int = 4_000
    memory: int = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Result:
    """Column names and rows. `total` is the number of rows, or None above `counted`."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    total: int | None


@dataclass(eq=False)
class Database:
    """Database of an episode, in which changes of successful queries persist if it is `writable`.

    `image` contains the bytes of a database file.
    """

    image: bytes = field(repr=False)
    writable: bool = False
    limits: SqlLimits = field(default_factory=SqlLimits)
    _lock: Lock = field(init=False, repr=False, default_factory=Lock)

    def query(self, text: str, keep: int | None = None) -> Result:
        """Return the first `keep` rows of a statement (None: `limits.rows`). After an SqlError nothing has changed."""
        if len(text) > self.limits.text:
            raise SqlError(f"the query has {len(text)} characters; {self.limits.text} are allowed")
        if not self.writable:
            return self._run(text, keep)[0]
        with self._lock:
            result, self.image = self._run(text, keep)
        return result

    def describe(self, table: str = "", samples: int = 3) -> str:
        """Describe tables, one line each, or one with sample rows. SqlError names one similar to an unknown one."""
        with closing(self._open()) as connection:
            known = _tables(connection)
            names = {name.casefold(): name for name in known}
            if table and table.casefold() not in names:
                raise SqlError(f"no such table: {table}.{_suggestion(table, known)} Tables: {', '.join(known)}")
            with _Guard(False, self.limits).over(connection):
                if not table:
                    return "\n".join(_outline(connection, name) for name in known)
                name = names[table.casefold()]
                first = _fetch(connection, f"SELECT * FROM {_quote(name)}", self.limits, samples)
                return f"{_outline(connection, name)}\n{as_table(first, self.limits)}"

    def _run(self, text: str, keep: int | None) -> tuple[Result, bytes]:
        with closing(self._open()) as connection:
            try:
                with _Guard(self.writable, self.limits).over(connection):
                    result = _fetch(connection, text, self.limits, keep)
            except SqlError as error:
                raise SqlError(f"{error}{self._hint(str(error))}") from error
            return result, connection.serialize() if self.writable else self.image

    def _hint(self, message: str) -> str:
        found = NO_SUCH.search(message)
        if found is None:
            return ""
        with closing(self._open()) as connection:
            known = _tables(connection)
            if found[1] == "table":
                return f".{_suggestion(found[2], known)} Tables: {', '.join(known)}"
            infos = [(table, connection.execute(f"PRAGMA table_info({_quote(table)})")) for table in known]
            places = [(str(row[1]), table) for table, info in infos for row in info]
        near = difflib.get_close_matches(found[3].casefold(), {c.casefold() for c, _ in places}, n=3)
        suggestions = [f"{table}.{column}" for name in near for column, table in places if column.casefold() == name]
        return f". Nearest: {', '.join(suggestions[:4])}" if suggestions else ""

    def _open(self) -> sqlite3.Connection:
        """Open a limited connection to a copy of the image, without a guard."""
        connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
        connection.deserialize(self.image)
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(f"PRAGMA max_page_count = {len(self.image) // 4096 + PAGES_GROWTH}")
        connection.execute(f"PRAGMA hard_heap_limit = {self.limits.memory}")
        connection.execute(f"PRAGMA query_only = {'OFF' if self.writable else 'ON'}")
        bounds = {
            sqlite3.SQLITE_LIMIT_LENGTH: self.limits.value,
            sqlite3.SQLITE_LIMIT_SQL_LENGTH: SQL_BYTES * self.limits.text,
            sqlite3.SQLITE_LIMIT_ATTACHED: 0,
            sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: LIKE_CHARACTERS,
            sqlite3.SQLITE_LIMIT_COLUMN: COLUMNS,
        }
        for limit, bound in bounds.items():
            connection.setlimit(limit, bound)
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        return connection


class _Guard:
    """Authorizer and progress handler of one query; `reason` is the message if it was rejected."""

    def __init__(self, writable: bool, limits: SqlLimits) -> None:
        self._allowed = READS | WRITES if writable else READS
        self._limits = limits
        self._checks = self._calls = 0
        self._deadline = time.monotonic() + limits.seconds
        self.reason = ""

    @contextmanager
    def over(self, connection: sqlite3.Connection) -> Iterator[None]:
        """Guard statements inside the block. Raises SqlError with the reason of a failure."""
        connection.set_authorizer(self._authorize)
        connection.set_progress_handler(self._progress, CHECK_EVERY)
        for name in ("printf", "format"):
            connection.create_function(name, -1, self._format, deterministic=True)
        try:
            yield
        except (sqlite3.Error, MemoryError, OverflowError, ValueError) as error:
            raise SqlError(self.reason or _describe_error(error)) from error
        finally:
            connection.set_progress_handler(None, 0)
            connection.set_authorizer(None)

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        declares = action == sqlite3.SQLITE_UPDATE and first == "sqlite_master"  # as pragma_...() tables do
        if action in self._allowed or declares:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION and (second or "").casefold() not in FUNCTIONS:
            self._calls += 1
            if self._calls <= CALLS:
                return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_PRAGMA and (first or "").casefold() in PRAGMAS:
            return sqlite3.SQLITE_OK
        self.reason = self.reason or self._refusal(action, first, second)
        return sqlite3.SQLITE_DENY

    def _refusal(self, action: int, first: str | None, second: str | None) -> str:
        if action == sqlite3.SQLITE_FUNCTION and self._calls > CALLS:
            return f"the query has more than {CALLS} calls of functions"
        if action == sqlite3.SQLITE_FUNCTION:
            return f"the function {second} is not allowed here"
        if action == sqlite3.SQLITE_PRAGMA:
            return f"PRAGMA {first} is not allowed here; the tool schema shows the tables"
        why = ": the database is read-only" if action in WRITES else ""
        return f"{ACTIONS.get(action, 'this kind of statement is')} not allowed here{why}"

    def _format(self, *given: Value) -> Value:
        """Evaluate SQLite's `printf` with widths and precisions of at most three digits."""
        pattern = given[0].decode("latin-1") if given and isinstance(given[0], bytes) else given[:1]
        if WIDE.search(str(pattern)):
            self.reason = "printf and format take no * and at most three digits as a width or precision here"
            raise ValueError(self.reason)
        with closing(sqlite3.connect(":memory:")) as plain:
            plain.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, self._limits.value)
            try:
                row: Row = plain.execute(f"SELECT printf({', '.join('?' * len(given))})", given).fetchone()
            except sqlite3.Error as error:
                self.reason = _describe_error(error)
                raise
        return row[0]

    def _progress(self) -> bool:
        self._checks += 1
        if self._checks * CHECK_EVERY > self._limits.steps:
            self.reason = "the query was stopped: it takes too many steps"
        elif time.monotonic() > self._deadline:
            self.reason = f"the query was stopped: it takes longer than {self._limits.seconds:g} s"
        return bool(self.reason)


def _fetch(connection: sqlite3.Connection, text: str, limits: SqlLimits, keep: int | None) -> Result:
    cursor = connection.execute(text)
    columns = tuple(column[0] for column in cursor.description or ())
    rows: list[Row] = []
    total = 0
    for row in cursor:
        total += 1
        if total > limits.counted:
            return Result(columns, tuple(rows), None)
        if len(rows) < (limits.rows if keep is None else keep):
            rows.append(row)
    return Result(columns, tuple(rows), total)


def _describe_error(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "the query needs too much memory"
    if isinstance(error, UnicodeError):
        return "the query is not valid text"
    return str(error) or type(error).__name__


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _suggestion(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.casefold(), [k.casefold() for k in known], n=1)
    return next((f" Nearest: {k}." for k in known if near and k.casefold() == near[0]), "")


def _tables(connection: sqlite3.Connection) -> list[str]:
    where = "type IN ('table', 'view') AND name NOT LIKE 'sqlite~_%' ESCAPE '~'"
    found = connection.execute(f"SELECT name FROM sqlite_master WHERE {where} ORDER BY rowid")
    return [str(name) for (name,) in found]


def _outline(connection: sqlite3.Connection, table: str) -> str:
    """Return `sale(id INTEGER PRIMARY KEY, customer_id INTEGER -> customer.id, ...)`."""
    links = connection.execute(f"PRAGMA foreign_key_list({_quote(table)})").fetchall()
    target = {link[3]: f" -> {link[2]}.{link[4] or 'rowid'}" for link in links}
    columns = [
        f"{name} {kind}{' PRIMARY KEY' if key else ''}{target.get(name, '')}"
        for _, name, kind, _, _, key in connection.execute(f"PRAGMA table_info({_quote(table)})")
    ]
    return f"{table}({', '.join(columns)})"


def as_table(result: Result, limits: SqlLimits) -> str:
    """Format rows for the model: column names, one line per row, and the count."""
    if not result.columns:
        return "Done."
    shown = result.rows[: limits.rows]
    lines = [" | ".join(result.columns)]
    lines += [" | ".join(_cell(value, limits.cell) for value in row) for row in shown]
    total = f"more than {limits.counted}" if result.total is None else str(result.total)
    rows = "row" if result.total == 1 else "rows"
    left = result.total is None or result.total > len(shown)
    return "\n".join([*lines, f"({total} {rows}{f', {len(shown)} shown' if left else ''})"])


def _cell(value: Value, bound: int) -> str:
    """Format a value in one line of at most `bound` characters, plus three dots if cut."""
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, bytes):
        value = f"x'{value[:bound].hex()}'"
    text = " ".join(str(value).split("\n"))
    return text if len(text) <= bound else text[:bound] + "..."


def sql_tool(database: Database) -> Tool:
    """Create the tool `sql(query)`. Failures raise SqlError."""

    def sql(query: str) -> str:
        """Run one SQLite query.

        Args:
            query: the statement.
        """
        return as_table(database.query(query), database.limits)

    return tool(sql)


def schema_tool(database: Database, samples: int = 3) -> Tool:
    """Create the tool `schema(table)`. An unknown table raises SqlError."""

    def schema(table: str = "") -> str:
        """Show the tables of the database.

        Args:
            table: one table, with sample rows; all tables if left out.
        """
        return database.describe(table, samples)

    return tool(schema)
