"""Compare the result rows of SQL queries.

The rows and their multiplicities must match; their order only if the question asks for one. NULL, 0, '' and
false are four different values. The environment runs the SQL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ludus.rewards.base import RewardFunction, truth_of
from ludus.rewards.extract import Evidence, NotJson, read_json
from ludus.rewards.json_match import is_number, same_number
from ludus.types import JSON, Task, Trajectory

Cell = None | bool | int | float | str
Row = tuple[Cell, ...]

MAX_ROWS = 100_000
"""Maximum rows of a result; a longer one never matches."""
MAX_UNMATCHED = 200
"""Maximum rows without an exact counterpart that are matched one to one; with more, the results differ."""
MAX_ORDERS = 500
"""Maximum column permutations to try."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The expected result.

    `ordered`: the order of rows matters. `columns_free`: columns may be permuted, in all rows alike. Numbers may
    differ by `tolerance` (absolute, or relative above 1) if one of them has a decimal point; integers, such as
    identifiers and cents, must be equal.
    """

    rows: tuple[Row, ...]
    ordered: bool = False
    columns_free: bool = False
    tolerance: float = 1e-9


def same_rows(given: Sequence[Row], due: Rows) -> bool:
    """Return whether the rows equal the expected ones."""
    rows = [tuple(row) for row in given]
    if len(rows) != len(due.rows) or len(rows) > MAX_ROWS:
        return False
    if not due.columns_free or not rows:
        return _match(rows, due)
    width = len(rows[0])
    if any(len(row) != width for row in (*rows, *due.rows)):
        return _match(rows, due)
    orders = (order for order, _ in zip(_orders(rows, due, width), range(MAX_ORDERS), strict=False))
    return any(_match([tuple(row[place] for place in order) for row in rows], due) for order in orders)


def read_rows(text: str) -> tuple[Row, ...] | None:
    """Return rows from a JSON list of lists of scalars; None for any other text."""
    try:
        value = read_json(text)
    except NotJson:
        return None
    if not isinstance(value, list):
        return None
    rows = tuple(row for item in value if (row := _row(item)) is not None)
    return rows if len(rows) == len(value) else None


def rows_match(read: Evidence) -> RewardFunction:
    """Create a verifier: 1 if `read` returns the JSON of the expected rows, else 0."""

    def result_set(task: Task, trajectory: Trajectory) -> float:
        given = read_rows(read(trajectory))
        return float(given is not None and same_rows(given, truth_of(task, Rows)))

    return result_set


def _row(item: JSON) -> Row | None:
    if not isinstance(item, list):
        return None
    cells = tuple(cell for cell in item if not isinstance(cell, list | dict))
    return cells if len(cells) == len(item) else None


def _match(rows: Sequence[Row], expected: Rows) -> bool:
    if expected.ordered:
        return all(_same(a, b, expected.tolerance) for a, b in zip(rows, expected.rows, strict=True))
    keys, expected_keys = ([_key(row) for row in side] for side in (rows, expected.rows))
    given, wanted = Counter(keys), Counter(expected_keys)
    extra, missing = list((given - wanted).elements()), list((wanted - given).elements())
    if not extra or len(extra) > MAX_UNMATCHED:
        return not extra
    row_of = dict(zip((*keys, *expected_keys), (*rows, *expected.rows), strict=True))
    if _have_matching([row_of[key] for key in extra], [row_of[key] for key in missing], expected.tolerance):
        return True
    return len(rows) <= MAX_UNMATCHED and _have_matching(rows, expected.rows, expected.tolerance)


def _have_matching(extra: Sequence[Row], missing: Sequence[Row], tolerance: float) -> bool:
    """Return whether the rows can be matched one to one."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    fits = csr_array([[_same(row, other, tolerance) for other in missing] for row in extra])
    return bool((maximum_bipartite_matching(fits) >= 0).all())


def _orders(rows: Sequence[Row], expected: Rows, width: int) -> Iterator[tuple[int, ...]]:
    """Yield the column permutations in which each column could match the expected one."""
    given = [[(row[i],) for row in rows] for i in range(width)]
    wanted = [replace(expected, rows=tuple((row[j],) for row in expected.rows)) for j in range(width)]
    fits = [[i for i in range(width) if _match(given[i], column)] for column in wanted]

    def extend(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == width:
            yield chosen
            return
        for i in fits[len(chosen)]:
            if i not in chosen:
                yield from extend((*chosen, i))

    return extend(())


def _key(row: Row) -> str:
    """Return a key equal for equal rows: 1 and 1.0 are equal, 1 and true are not."""
    return tuple_key([_cell_key(cell) for cell in row])


def _cell_key(cell: Cell) -> str:
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return f"number {number_key(cell)}"
    return f"{type(cell).__name__} {cell}"


def _same(one: Row, other: Row, tolerance: float) -> bool:
    """Compare two rows; the tolerance applies to two numbers of which one is a float."""
    return len(one) == len(other) and all(
        same_number(a, b, tolerance)
        if is_number(a) and is_number(b) and float in (type(a), type(b))
        else type(a) is type(b) and a == b
        for a, b in zip(one, other, strict=True)
    )


def number_key(number: float) -> str:
    """Return the key of an integer or float, equal for 1 and 1.0; hexadecimal, which takes linear time.

    Untrusted values are compared by string keys: Python hashes an integer modulo 2**61 - 1, so chosen values can
    make sets and dictionaries take quadratic time. String hashes are randomized.
    """
    if isinstance(number, int) or number.is_integer():
        return hex(int(number))
    return float(number).hex()


def tuple_key(keys: list[str]) -> str:
    """Return the key of a sequence of values with these keys."""
    return f"{','.join(map(str, map(len, keys)))}:{''.join(keys)}"
