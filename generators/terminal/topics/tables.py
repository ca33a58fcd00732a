"""Questions about tables of comma-separated values: a filter of rows and a summary."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from generators.terminal.draw import TableData, table, text_of, words
from generators.terminal.makers import TaskMaker

from ludus.worlds.terminal.checks import has_text
from ludus.worlds.terminal.task import TerminalTask

Row = tuple[str, ...]
Rows = Sequence[Row]


@dataclass(frozen=True)
class Filter:
    """A filter of rows: in words, as an awk condition, and as a function."""

    words: str
    awk: str
    keeps: Callable[[Row], bool]


@dataclass(frozen=True)
class Summary:
    """A summary of rows: in words, the rest of the command after the awk condition, and the expected lines."""

    words: str
    command: str
    due: list[str]


def _everything(rng: random.Random, data: TableData) -> Filter:
    del rng, data
    return Filter("all rows", "NR>1", lambda row: True)


def _equal(rng: random.Random, data: TableData) -> Filter:
    value = rng.choice(data.values(1))
    said = f'the rows whose {data.columns[1]} is "{value}"'
    return Filter(said, f'NR>1 && $2=="{value}"', lambda row: row[1] == value)


def _more(rng: random.Random, data: TableData) -> Filter:
    least = rng.randint(3, 5)
    return Filter(
        f"the rows with more than {least} in the column {data.columns[4]}",
        f"NR>1 && $5>{least}",
        lambda row: int(row[4]) > least,
    )


def _begins(rng: random.Random, data: TableData) -> Filter:
    letter = rng.choice(data.values(0))[0]
    return Filter(
        f'the rows whose {data.columns[0]} begins with the letter "{letter}"',
        f"NR>1 && $1~/^{letter}/",
        lambda row: row[0].startswith(letter),
    )


def _both(rng: random.Random, data: TableData) -> Filter:
    value, most = rng.choice(data.values(2)), rng.randint(6, 8)
    said = f'the rows whose {data.columns[2]} is not "{value}" and whose {data.columns[4]} is at most {most}'
    return Filter(said, f'NR>1 && $3!="{value}" && $5<={most}', lambda row: row[2] != value and int(row[4]) <= most)


def _either(rng: random.Random, data: TableData) -> Filter:
    one, two = rng.sample(data.values(1), 2)
    said = f'the rows whose {data.columns[1]} is "{one}" or "{two}"'
    return Filter(said, f'NR>1 && ($2=="{one}" || $2=="{two}")', lambda row: row[1] in (one, two))


FILTERS: Final = {
    "all": _everything,
    "equal": _equal,
    "more": _more,
    "begins": _begins,
    "both": _both,
    "either": _either,
}


def _rows(data: TableData, rows: Rows) -> Summary:
    return Summary(
        "these rows with the heading above them, in their order",
        "{print}",
        [",".join(row) for row in (data.columns, *rows)],
    )


def _count(data: TableData, rows: Rows) -> Summary:
    del data
    return Summary("their number", "{n++} END {print n+0}", [str(len(rows))])


def _column(data: TableData, rows: Rows) -> Summary:
    return Summary(
        f"the column {data.columns[0]} without its heading, in their order", "{print $1}", [row[0] for row in rows]
    )


def _swapped(data: TableData, rows: Rows) -> Summary:
    return Summary(
        f"the columns {data.columns[3]} and {data.columns[0]}, "
        "in this order, separated by a semicolon, without "
        "a heading",
        '{print $4 ";" $1}',
        [f"{row[3]};{row[0]}" for row in rows],
    )


def _sum(data: TableData, rows: Rows) -> Summary:
    return Summary(
        f"the sum of the column {data.columns[3]}", "{n+=$4} END {print n+0}", [str(sum(int(row[3]) for row in rows))]
    )


def _product(data: TableData, rows: Rows) -> Summary:
    return Summary(
        f"the sum of {data.columns[3]} times {data.columns[4]}",
        "{n+=$4*$5} END {print n+0}",
        [str(sum(int(row[3]) * int(row[4]) for row in rows))],
    )


def _distinct(data: TableData, rows: Rows) -> Summary:
    return Summary(
        f"the different values of {data.columns[2]}, each once, from A to Z",
        "{print $3}' | sort -u",
        sorted({row[2] for row in rows}),
    )


def _top(data: TableData, rows: Rows) -> Summary:
    best = sorted(rows, key=lambda row: -int(row[3]))[:3]
    return Summary(
        f"the three with the largest {data.columns[3]} (or as many as there are), the largest first, without a heading",
        "{print}' | sort -t, -k4,4nr | head -n 3",
        [",".join(row) for row in best],
    )


def _per(data: TableData, rows: Rows) -> Summary:
    counts = Counter(row[2] for row in rows)
    return Summary(
        f"for each {data.columns[2]} that occurs a line with it, a comma and the number of its rows, from A to Z",
        '{n[$3]++} END {for (k in n) print k "," n[k]}\' | sort',
        [f"{key},{counts[key]}" for key in sorted(counts)],
    )


def _per_sum(data: TableData, rows: Rows) -> Summary:
    sums: Counter[str] = Counter()
    for row in rows:
        sums[row[2]] += int(row[3])
    ranked = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    return Summary(
        f"for each {data.columns[2]} that occurs a line with "
        f"it, a comma and its sum of {data.columns[3]}, the "
        "largest sum first",
        '{n[$3]+=$4} END {for (k in n) print k "," n[k]}\' | sort -t, -k2,2nr -k1,1',
        [f"{key},{value}" for key, value in ranked],
    )


def _per_best(data: TableData, rows: Rows) -> Summary:
    best: dict[str, Row] = {}
    for row in rows:
        if row[2] not in best or int(row[3]) > int(best[row[2]][3]):
            best[row[2]] = row
    return Summary(
        f"for each {data.columns[2]} that occurs a line with "
        f"it, a comma and the {data.columns[0]} of its row with "
        f"the largest {data.columns[3]}, from A to Z",
        '{if ($4+0>m[$3]+0) {m[$3]=$4; w[$3]=$1}} END {for (k in w) print k "," w[k]}\' | sort',
        [f"{key},{best[key][0]}" for key in sorted(best)],
    )


def _per_distinct(data: TableData, rows: Rows) -> Summary:
    found: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        found[row[2]].add(row[0])
    return Summary(
        f"for each {data.columns[2]} that occurs a line with it, a colon and how many different values of "
        f"{data.columns[0]} it has, from A to Z",
        '{if (!(($3,$1) in s)) {s[$3,$1]=1; n[$3]++}} END {for (k in n) print k ":" n[k]}\' | sort',
        [f"{key}:{len(found[key])}" for key in sorted(found)],
    )


def _running(data: TableData, rows: Rows) -> Summary:
    total, lines = 0, []
    for row in rows:
        total += int(row[3])
        lines.append(f"{row[0]},{total}")
    return Summary(
        f"for each row the {data.columns[0]}, a comma and the "
        f"sum of {data.columns[3]} up to and with this row, in "
        "their order",
        '{n+=$4; print $1 "," n}',
        lines,
    )


def _pivot(data: TableData, rows: Rows) -> Summary:
    places, kinds = sorted({row[1] for row in rows}), sorted({row[2] for row in rows})
    sums: Counter[tuple[str, str]] = Counter()
    for row in rows:
        sums[row[1], row[2]] += int(row[3])
    lines = [",".join([place, *(str(sums[place, kind]) for kind in kinds)]) for place in places]
    said = (
        f"a table of the sums of {data.columns[3]} with commas: "
        f"a heading of {data.columns[1]} and the values of "
        f"{data.columns[2]} from A to Z, then a line for each "
        f"{data.columns[1]} from A to Z, 0 where there is none"
    )
    program = (
        '{print $2 " " $3 " " $4}\' | python3 -c \'import sys; r=[l.split() for l in sys.stdin]; '
        "k=sorted({b for _,b,_ in r}); s={}\n"
        "for a,b,n in r: s[a,b]=s.get((a,b),0)+int(n)\n"
        f'print(",".join(["{data.columns[1]}",*k]))\n'
        'for a in sorted({a for a,_,_ in r}): print(",".join([a,*(str(s.get((a,b),0)) for b in k)]))'
    )
    return Summary(said, program, [",".join([data.columns[1], *kinds]), *lines])


def _share(data: TableData, rows: Rows) -> Summary:
    counts = Counter(row[2] for row in rows)
    return Summary(
        f"for each {data.columns[2]} that occurs a line with "
        "it, a blank and the percentage of these rows that it "
        "has, rounded down, from A to Z",
        '{n[$3]++; t++} END {for (k in n) print k " " int(100*n[k]/t)}\' | sort',
        [f"{key} {100 * counts[key] // len(rows)}" for key in sorted(counts)],
    )


SUMMARIES: Final = {
    "rows": _rows,
    "count": _count,
    "column": _column,
    "swapped": _swapped,
    "sum": _sum,
    "product": _product,
    "distinct": _distinct,
    "top": _top,
    "per": _per,
    "per_sum": _per_sum,
    "per_best": _per_best,
    "per_distinct": _per_distinct,
    "running": _running,
    "pivot": _pivot,
    "share": _share,
}
COMBINED: Final = {
    "rows": "equal more both",
    "count": "equal begins either",
    "column": "all more",
    "swapped": "equal begins",
    "sum": "all equal both",
    "product": "equal more",
    "distinct": "all more",
    "top": "all both",
    "per": "all more",
    "per_sum": "all either",
    "per_best": "all both",
    "per_distinct": "more both",
    "running": "equal both",
    "pivot": "all both",
    "share": "all more",
}
"""The filters that are combined with each summary."""
_LEVELS: Final = {
    **dict.fromkeys(("rows", "count", "column", "swapped", "sum"), 1),
    **dict.fromkeys(("product", "distinct", "top", "per", "running"), 2),
    **dict.fromkeys(("per_sum", "per_best", "per_distinct", "share"), 3),
    "pivot": 4,
}
HELD_OUT: Final = frozenset({"begins", "per_best"})


def _query(which: str, what: str, rng: random.Random) -> TerminalTask:
    """Return a question whose filter keeps at least two rows."""
    while True:
        data = table(rng)
        chosen = FILTERS[which](rng, data)
        rows = [row for row in data.rows if chosen.keeps(row)]
        if len(rows) > 1:
            break
    summary = SUMMARIES[what](data, rows)
    out = f"{words(rng, 1)[0]}.txt"
    condition = "NR==1 || " + chosen.awk if what == "rows" else chosen.awk
    program, bar, rest = summary.command.partition("' | ")
    command = f"awk -F, '{condition} {program}' {data.path}"
    if bar:
        end = "'" if rest.startswith("python3") else ""
        command += f" | {rest}{end}"
    text = f"Look at {data.path}, a table with a heading. Of {chosen.words}, write to {out} {summary.words}."
    return TerminalTask(
        text,
        {data.path: data.text},
        (f"{command} > {out}",),
        (has_text(out, text_of(summary.due)),),
        preview=(data.path,),
    )


MAKERS: Final = tuple(
    TaskMaker(
        f"tables/{what}_{which}",
        min(4, _LEVELS[what] + (which == "both")),
        partial(_query, which, what),
        held_out=which in HELD_OUT or what in HELD_OUT,
    )
    for what, filters in COMBINED.items()
    for which in filters.split()
)
