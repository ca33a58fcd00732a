"""SQLite index of the rollouts of a run: one row per rollout, with full-text search of its messages.

The index is `viewer.sqlite` in the run folder, or in memory if the folder is read-only. It is extended when rollout
files are added, and built again if an indexed file changed. A row stores the position of its rollout, not its content.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from threading import Lock

from ludus.errors import StorageError, UserError
from ludus.evaluation.exports import encodable
from ludus.evaluation.tables import message_lines
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts
from ludus.training.run.run_dir import RunFolder

Row = dict[str, object]
Solved = Callable[[RolloutRecord], bool | None]
"""Whether a rollout solved its task; None if the world is not available."""

_COLUMNS = (
    *("id INTEGER PRIMARY KEY", "file TEXT", "line INTEGER", "source TEXT", "step INTEGER", "task TEXT"),
    *("sample INTEGER", "attempt INTEGER", "reward REAL", "solved INTEGER", "stop TEXT", "outcome TEXT"),
    *("turns INTEGER", "tokens INTEGER", "calls INTEGER", "errors INTEGER", "tools TEXT", "advantage REAL"),
    "answer TEXT",
)
"""Columns of a rollout. `source` is empty for training, otherwise the name of an evaluation; `tokens` are sampled."""
FILTERS: Mapping[str, str] = {
    **{name: f"{name} = ?" for name in ("source", "step", "task", "stop", "outcome", "solved")},
    "tool": "instr(tools, '|' || ? || '|')",
    "min_reward": "reward >= ?",
    "max_reward": "reward <= ?",
    "min_tokens": "tokens >= ?",
    "max_tokens": "tokens <= ?",
    "text": "id IN (SELECT rowid FROM words WHERE words MATCH ?)",
}
"""Filters by name, each with one parameter."""
MAX_ROWS = 500
_SCHEMA = 1
_ANSWER_CHARACTERS = 120


class RolloutIndex:
    """The index of one run. Its methods may be called from several threads."""

    def __init__(self, folder: RunFolder, solved: Solved) -> None:
        self.folder, self._solved, self._lock = folder, solved, Lock()
        self._db = _open(folder.path / "viewer.sqlite")

    def refresh(self, advance: Callable[[Path], None] = lambda _: None) -> int:
        """Index new files; return their number. `advance` is called before each file."""
        with self._lock:
            known = dict(self._db.execute("SELECT name, stamp FROM files"))
            found = {str(path.relative_to(self.folder.path)): path for path in rollout_files(self.folder)}
            stamps = {name: f"{s.st_size} {s.st_mtime_ns}" for name, s in ((n, p.stat()) for n, p in found.items())}
            if not known.items() <= stamps.items():
                _clear(self._db)
                known = {}
            added = {name: path for name, path in found.items() if name not in known}
            for name, path in added.items():
                advance(path)
                self._add(name, path, stamps[name])
            return len(added)

    def _add(self, name: str, path: Path, stamp: str) -> None:
        source = path.name.removesuffix(".jsonl.gz") if path.parent == self.folder.evaluations else ""
        with self._db:
            for line, record in enumerate(read_rollouts(path)):
                row = {"file": name, "line": line, "source": source, **summary(record, self._solved(record))}
                marks = ", ".join("?" * len(row))
                added = self._db.execute(f"INSERT INTO rollouts ({', '.join(row)}) VALUES ({marks})", [*row.values()])
                self._db.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (added.lastrowid, words(record)))
            self._db.execute("INSERT INTO files VALUES (?, ?)", (name, stamp))

    def query(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        """Return the rows of a SELECT statement."""
        with self._lock:
            cursor = self._db.execute(sql, parameters)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def select(self, filters: Mapping[str, str], sort: str, limit: int, offset: int) -> tuple[int, list[Row]]:
        """Return the number of matching rollouts and a page of them.

        `sort` is a column, descending with a leading "-". Raises UserError for unknown filters and columns.
        """
        column = sort.removeprefix("-")
        if column not in {name.split()[0] for name in _COLUMNS} or not filters.keys() <= FILTERS.keys():
            raise UserError(f"Unknown sort column or filter: {column}, {', '.join(filters)}.")
        where = " AND ".join(FILTERS[name] for name in filters) or "1"
        values: list[object] = [match_text(v) if name == "text" else v for name, v in filters.items()]
        order = f"{column} {'DESC' if sort.startswith('-') else 'ASC'}, id"
        total = self.query(f"SELECT count(*) AS n FROM rollouts WHERE {where}", values)[0]["n"]
        page = [*values, min(limit, MAX_ROWS), offset]
        rows = self.query(f"SELECT * FROM rollouts WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?", page)
        assert isinstance(total, int)
        return total, rows

    def record(self, number: int) -> tuple[Row, RolloutRecord]:
        """Return a row and its rollout. Raises UserError for an unknown number."""
        found = self.query("SELECT * FROM rollouts WHERE id = ?", (number,))
        if not found:
            raise UserError(f"Unknown rollout: {number}.")
        return found[0], self.read(found)[0]

    def read(self, rows: Sequence[Row]) -> list[RolloutRecord]:
        """Return the rollouts of rows of one file, in the order of the rows."""
        lines = sorted({line for row in rows if isinstance(line := row["line"], int)})
        found = islice(read_rollouts(self.folder.path / str(rows[0]["file"]), set(lines)), len(lines))
        read = dict(zip(lines, found, strict=True))
        return [read[line] for row in rows if isinstance(line := row["line"], int)]

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()


def rollout_files(folder: RunFolder) -> list[Path]:
    """Return the rollout files of training and evaluations."""
    return [*sorted(folder.rollouts.glob("step-*.jsonl.gz")), *sorted(folder.evaluations.glob("*.jsonl.gz"))]


def summary(record: RolloutRecord, solved: bool | None) -> Row:
    """Return the row of a rollout, without its position."""
    one = record.trajectory
    calls = one.call_outcomes
    names = "".join(f"|{name}" for name in dict.fromkeys(outcome.tool or "no tool" for outcome in calls))
    row: Row = {
        "step": record.step,
        "task": record.group,
        "sample": one.sample,
        "attempt": record.attempt,
        "reward": one.reward,
        "solved": None if solved is None else int(solved),
        "stop": one.stop_reason.value if one.failure is None else "failed",
        "outcome": record.outcome.value,
        "turns": one.num_turns,
        "tokens": one.num_action_tokens,
        "calls": len(calls),
        "errors": sum(outcome.status != "ok" for outcome in calls),
        "tools": names and f"{names}|",
        "advantage": record.advantage,
        "answer": one.answer[:_ANSWER_CHARACTERS],
    }
    return {name: encodable(value) if isinstance(value, str) else value for name, value in row.items()}


def words(record: RolloutRecord) -> str:
    """Return the text to search: contents, reasoning and calls of all messages."""
    lines = (line for message in record.trajectory.messages for line in message_lines(message))
    return encodable("\n".join(lines))


def match_text(text: str) -> str:
    """Return an FTS5 expression that matches all words of a text; operators have no meaning."""
    quoted = " ".join('"' + word.replace('"', '""') + '"' for word in text.replace("\0", " ").split())
    return quoted or '""'


def _open(path: Path) -> sqlite3.Connection:
    """Open or create an index. Raises StorageError if another program has it locked."""
    try:
        db = sqlite3.connect(path, check_same_thread=False)
        with suppress(sqlite3.DatabaseError):
            if db.execute("PRAGMA user_version").fetchone() == (_SCHEMA,):
                return db
        db.close()
        path.unlink(missing_ok=True)
        db = sqlite3.connect(path, check_same_thread=False)
        _clear(db)
    except (sqlite3.OperationalError, OSError) as error:
        if "locked" in str(error):
            raise StorageError(f"{path} is in use: {error}.", "Close the other viewer of this run.") from error
        db = sqlite3.connect(":memory:", check_same_thread=False)
        _clear(db)
    return db


def _clear(db: sqlite3.Connection) -> None:
    db.executescript(
        "DROP TABLE IF EXISTS files; DROP TABLE IF EXISTS rollouts; DROP TABLE IF EXISTS words;"
        f"CREATE TABLE files (name TEXT, stamp TEXT); CREATE TABLE rollouts ({', '.join(_COLUMNS)});"
        "CREATE INDEX by_task ON rollouts (task, step); CREATE INDEX by_step ON rollouts (source, step);"
        "CREATE VIRTUAL TABLE words USING fts5(text, content='');"
        f"PRAGMA user_version = {_SCHEMA};"
    )
