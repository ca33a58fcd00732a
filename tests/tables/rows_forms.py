"""Result sets, derived: six results, each in right and in wrong forms as JSON: (JSON of the rows, truth)."""

import json

from ludus.rewards.code.sql_rows import Rows

PEOPLE = [["Eve", 30, 1.5], ["Bo", 25, 2.5], ["Bo", 25, 2.5], ["Zoë", None, 0.0]]
PRICES = [["fig", 1, 0.1], ["pear", 20, 12.25], ["", 0, -3.0]]
PLACES = [[1, "São Paulo", "BR", 12_300_000], [2, "Oslo", "NO", 709_000]]
TEXTS = [["1", "true", "null"], ["0", "false", ""]]
WIDE = [[n, n * 10 + 0.5, f"row {n}"] for n in range(6)]
MONTHS = [["2026-01", 3, None], ["2026-02", 0, "x"], ["2026-02", 0, "y"], ["", -1, "z"]]
RESULTS = (PEOPLE, PRICES, PLACES, TEXTS, WIDE, MONTHS)


def _rows(table, **settings):
    return Rows(tuple(map(tuple, table)), **settings)


def _floats(table):
    return [[float(c) if isinstance(c, int) and not isinstance(c, bool) else c for c in row] for row in table]


def _cell(table, row, column, value):
    return [[value if (i, j) == (row, column) else c for j, c in enumerate(r)] for i, r in enumerate(table)]


def _nudged(table, by):
    return [[c + by if isinstance(c, float) else c for c in row] for row in table]


def _right(table):
    """Texts that are the table: in any order of rows, also of columns where these are free."""
    plain, turned = _rows(table), [row[::-1] for row in table]
    ordered, free = _rows(table, ordered=True), _rows(table, columns_free=True)
    loose = _rows(table, tolerance=1e-3)
    dumped = json.dumps
    yield from ((dumped(t), plain) for t in (table, table[::-1], table[1:] + table[:1], sorted(table, key=str)))
    yield from ((dumped(_floats(t)), plain) for t in (table, table[::-1], table[1:] + table[:1]))
    yield from ((f" {dumped(table, indent=i)}\n", plain) for i in (0, 1, 4, "\t"))
    yield dumped(table, ensure_ascii=False), plain
    yield dumped(table, separators=(",", ":")), plain
    yield from ((dumped(t), ordered) for t in (table, _floats(table)))
    yield dumped(table, separators=(" , ", " : ")), ordered
    yield from ((dumped(t), free) for t in (turned, turned[::-1], _floats(turned), table, table[::-1]))
    yield from ((dumped([row[1:] + row[:1] for row in t]), free) for t in (table, table[::-1]))
    yield from ((dumped(_nudged(t, by)), loose) for t in (table, table[::-1]) for by in (1e-4, -1e-4, 1e-12))
    yield dumped(turned), _rows(table, ordered=True, columns_free=True)
    yield dumped([*table, *table[::-1]]), _rows([*table, *table])


def _wrong(table):
    """Texts that are another table, or no table at all."""
    plain, ordered, free = _rows(table), _rows(table, ordered=True), _rows(table, columns_free=True)
    dumped, width = json.dumps, len(table[0])
    yield from ((dumped(t), plain) for t in (table[1:], table[:-1], [*table, table[0]], table + table, [[]], []))
    yield from ((dumped([row[:-1] for row in table]), truth) for truth in (plain, free))
    yield from ((dumped([[*row, 0] for row in table]), truth) for truth in (plain, free))
    yield dumped([*table[1:], [None] * width]), plain
    yield dumped([*table[1:], [None] * width]), free
    yield dumped([*table[1:], table[1]]), plain
    yield dumped([row[::-1] for row in table]), plain
    yield dumped(table[::-1]), ordered
    yield dumped(table[1:] + table[:1]), ordered
    yield dumped([[str(c) if not isinstance(c, str) else c for c in row] + [""] for row in table]), plain
    yield from ((dumped(_cell(table, 0, j, [])), plain) for j in range(width))
    yield from ((dumped(_cell(table, 0, j, {"a": 1})), plain) for j in range(width))
    yield from ((dumped(_cell(table, 0, j, True)), free) for j in range(width))
    yield from ((dumped(_cell(table, 1, j, "other")), free) for j in range(width))
    yield dumped(_cell(table, 0, 0, f"{table[0][0]} ")), plain
    yield dumped(_nudged([*table, [0.5] * width], 0.01)), plain
    yield dumped({"rows": table}), plain
    yield dumped(table) + dumped(table), plain
    yield dumped(table)[:-1], plain
    yield dumped(table) + " or []", plain
    yield f"-- rows\n{dumped(table)}", plain
    yield f"'{dumped(table)}'", plain
    yield dumped(table).replace('"', "'") + "#", plain
    yield dumped(dumped(table)), plain


def _different(pairs):
    return [*{repr(pair): pair for pair in pairs}.values()]


ACCEPTED = _different(pair for table in RESULTS for pair in _right(table))
REJECTED = _different(pair for table in RESULTS for pair in _wrong(table))
