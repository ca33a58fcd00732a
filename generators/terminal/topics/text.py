"""Tasks about text: edit lines and words, convert formats, merge files."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Final

from generators.terminal.draw import TOWNS, prose, table, text_of, words
from generators.terminal.makers import TaskMaker

from ludus.worlds.terminal.checks import Check, has_text, only_files
from ludus.worlds.terminal.task import TerminalTask


def _names(rng: random.Random) -> tuple[str, str]:
    one, two = words(rng, 2)
    return f"{one}.txt", f"{two}-out.txt"


def _with(text: str, name: str) -> str:
    """Return the text with IN replaced by the name of the file."""
    return re.sub(r"\bIN\b", name, text)


def _made(
    rng: random.Random, lines: list[str], asked: str, due: list[str], command: str, ending: str = "\n"
) -> TerminalTask:
    """Return a task to make a new file from another; `command` reads IN and prints the result."""
    name, out = _names(rng)
    steps = (f"{_with(command, name)} > {out}",)
    text = "".join(line + ending for line in lines)
    return TerminalTask(
        f"{_with(asked, name)} Write the result to {out}.",
        {name: text},
        steps,
        (has_text(out, text_of(due)),),
        preview=(name,),
    )


def _in_place(rng: random.Random, lines: list[str], asked: str, due: list[str], command: str) -> TerminalTask:
    """Return a task to change a file in place."""
    name, _ = _names(rng)
    checks = (has_text(name, text_of(due), "bytes"),)
    return TerminalTask(
        _with(asked, name), {name: text_of(lines)}, (_with(command, name),), checks, changes=(name,), preview=(name,)
    )


def _replaced(rng: random.Random) -> TerminalTask:
    lines = prose(rng, 12)
    old, new = rng.choice(lines[0].split()), f"{words(rng, 1)[0]}s"
    due = [" ".join(new if word == old else word for word in line.split()) for line in lines]
    asked = f'In IN replace every word "{old}" by "{new}"; parts of longer words stay.'
    return _in_place(rng, lines, asked, due, f"sed -i 's/\\b{old}\\b/{new}/g' IN")


def _blanked(rng: random.Random) -> TerminalTask:
    lines = [line for one in prose(rng, 8) for line in (one, *([""] * rng.randint(0, 2)))]
    lines.insert(2, "# " + rng.choice(lines))
    lines.insert(5, "   ")
    due = [line for line in lines if line.strip() and not line.startswith("#")]
    asked = 'Take out of IN all lines that are empty or have only blanks, and all that begin with "#".'
    return _in_place(rng, lines, asked, due, "sed -i -e '/^[[:space:]]*$/d' -e '/^#/d' IN")


def _first_lines(rng: random.Random) -> TerminalTask:
    first = rng.randint(3, 6)
    last = first + rng.randint(2, 5)
    lines = prose(rng, 16)
    return _made(
        rng, lines, f"Take the lines {first} to {last} of IN.", lines[first - 1 : last], f"sed -n '{first},{last}p' IN"
    )


def _numbered(rng: random.Random) -> TerminalTask:
    lines = prose(rng, 11)
    due = [f"{n}: {line}" for n, line in enumerate(lines, 1)]
    asked = "Number the lines of IN from 1: the number, a colon and a blank before each line."
    return _made(rng, lines, asked, due, "awk '{print NR \": \" $0}' IN")


def _reversed(rng: random.Random) -> TerminalTask:
    lines = prose(rng, 9)
    return _made(rng, lines, "Turn the order of the lines of IN round: the last one first.", lines[::-1], "tac IN")


def _tabs(rng: random.Random) -> TerminalTask:
    lines = [";".join(rng.choices(words(rng, 8), k=4)) for _ in range(10)]
    due = [line.replace(";", "\t") for line in lines]
    return _made(rng, lines, "In IN, put a tab in the place of every semicolon.", due, "tr ';' '\\t' < IN")


def _line_ends(rng: random.Random) -> TerminalTask:
    lines = prose(rng, 10)
    name, _ = _names(rng)
    text = f"The lines of {name} end in CR LF, as Windows has it. Change the file so that they end in LF alone."
    files = {name: "".join(f"{line}\r\n" for line in lines)}
    return TerminalTask(
        text, files, (f"sed -i 's/\\r$//' {name}",), (has_text(name, text_of(lines), "bytes"),), changes=(name,)
    )


def _once(rng: random.Random) -> TerminalTask:
    lines = rng.choices(prose(rng, 8), k=20)
    asked = "Of equal lines of IN keep the first one alone, all others in their order."
    return _made(rng, lines, asked, list(dict.fromkeys(lines)), "awk '!seen[$0]++' IN")


def _frequent(rng: random.Random) -> TerminalTask:
    lines = prose(rng, 14)
    counts = Counter(word for line in lines for word in line.split())
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:5]
    asked = (
        "Which five words are the most frequent in IN? Each line has the "
        "word, a blank and how often it occurs, the most frequent first, "
        "equally frequent ones from A to Z."
    )
    command = "tr ' ' '\\n' < IN | sort | uniq -c | awk '{print $2, $1}' | sort -k2,2nr -k1,1 | head -n 5"
    return _made(rng, lines, asked, [f"{word} {count}" for word, count in ranked], command)


def _longest(rng: random.Random) -> TerminalTask:
    lines = prose(rng, 12)
    longest = max(lines, key=len)
    if sum(len(line) == len(longest) for line in lines) > 1:
        return _longest(rng)
    asked = "Find the longest line of IN: its number (from 1), a colon and the line."
    command = "awk 'length($0)>m {m=length($0); r=NR \":\" $0} END {print r}' IN"
    return _made(rng, lines, asked, [f"{lines.index(longest) + 1}:{longest}"], command)


def _transposed(rng: random.Random) -> TerminalTask:
    rows = [[str(rng.randint(1, 99)) for _ in range(4)] for _ in range(6)]
    due = [",".join(column) for column in zip(*rows, strict=True)]
    command = 'awk -F, \'{for (i=1;i<=NF;i++) c[i]=c[i] (NR>1?",":"") $i} END {for (i=1;i<=NF;i++) print c[i]}\' IN'
    asked = "IN is a table with commas. Exchange its rows and its columns."
    return _made(rng, [",".join(row) for row in rows], asked, due, command)


def _paragraphs(rng: random.Random) -> TerminalTask:
    word = words(rng, 1)[0]
    blocks = [prose(rng, rng.randint(2, 4)) for _ in range(6)]
    for block in rng.sample(blocks, 2):
        block[1] = f"{word} {block[1]}"
    lines = [line for block in blocks for line in (*block, "")][:-1]
    found = [block for block in blocks if any(word in line.split() for line in block)]
    due = [line for block in found for line in (*block, "")][:-1]
    asked = (
        "Empty lines part IN into paragraphs. Keep those that have "
        f'the word "{word}" in them, with one empty line between two.'
    )
    command = f"awk -v RS= -v ORS='\\n\\n' '/(^|[ \\n]){word}([ \\n]|$)/' IN"
    return _made(rng, lines, asked, due, command)


def _blocks(rng: random.Random) -> TerminalTask:
    """Convert records of several lines to a table."""
    people = [{"name": word, "town": rng.choice(TOWNS), "age": str(rng.randint(20, 70))} for word in words(rng, 6)]
    for person in rng.sample(people, 2):
        del person[rng.choice(("town", "age"))]
    lines = [
        line
        for person in people
        for line in (*(f"{k}: {person[k]}" for k in rng.sample(sorted(person), len(person))), "")
    ]
    due = ["name,town,age", *(",".join(p.get(key, "") for key in ("name", "town", "age")) for p in people)]
    command = (
        "awk -F': ' 'function out() {if (NR>1 && (\"name\" in "
        'r)) print r["name"] "," r["town"] "," r["age"]; delete r} '
        'BEGIN {print "name,town,age"} NF==0 {out(); next} {r[$1]=$2} END {out()}\' IN'
    )
    asked = (
        'IN has records of several lines, "key: value", with empty lines between them. Make a table '
        "with commas of them: a heading name,town,age and a line for "
        "each record in their order, nothing where a value is missing."
    )
    return _made(rng, lines, asked, due, command)


def _joined(rng: random.Random) -> TerminalTask:
    data = table(rng)
    towns = data.values(1)
    lands = dict(zip(towns, rng.sample(("Chile", "Ghana", "Japan", "Kenya", "Norway", "Peru"), 4), strict=True))
    missing = rng.choice(towns)
    out, lookup = f"{words(rng, 1)[0]}.csv", f"{data.columns[1]}-lands.csv"
    due = [f"{row[0]},{row[1]},{lands[row[1]] if row[1] != missing else 'unknown'}" for row in data.rows]
    lands_text = text_of([f"{town};{land}" for town, land in lands.items() if town != missing])
    text = (
        f"{lookup} says to which land each {data.columns[1]} belongs (name;land). "
        f"For each row of {data.path}, a table with commas and a heading, write "
        f"to {out} its {data.columns[0]}, its {data.columns[1]} and the land, with "
        'commas, in their order and without a heading; the land is "unknown" where '
        "it is not given."
    )
    steps = (
        (
            f"awk -F'[;,]' 'NR==FNR {{l[$1]=$2; next}} FNR>1 {{print $1 \",\" "
            f'$2 "," (($2 in l)?l[$2]:"unknown")}}\' {lookup} {data.path} > {out}'
        ),
    )
    files = {data.path: data.text, lookup: lands_text}
    return TerminalTask(text, files, steps, (has_text(out, text_of(due)),), preview=(data.path, lookup))


def _to_json(rng: random.Random) -> TerminalTask:
    data = table(rng, 12)
    out = f"{words(rng, 1)[0]}.json"
    kinds = data.columns
    value = [
        {kinds[0]: r[0], kinds[1]: r[1], kinds[2]: r[2], kinds[3]: int(r[3]), kinds[4]: int(r[4])} for r in data.rows
    ]
    text = (
        f"Write {data.path}, a table with commas and a heading, as JSON to {out}: a list of "
        "objects in the order of the rows, with the names of the heading, numbers as numbers."
    )
    program = (
        "import csv, json; "
        f"r=[{{k: int(v) if v.isdigit() else v for k,v in "
        f'x.items()}} for x in csv.DictReader(open("{data.path}"))]; '
        f'json.dump(r, open("{out}","w"))'
    )
    return TerminalTask(
        text,
        {data.path: data.text},
        (f"python3 -c '{program}'",),
        (has_text(out, json.dumps(value), "json"),),
        preview=(data.path,),
    )


def _from_json(rng: random.Random) -> TerminalTask:
    name, out = f"{words(rng, 1)[0]}.jsonl", f"{words(rng, 1)[0]}.csv"
    drawn = [(word, rng.choice(TOWNS), rng.random() < 0.6) for word in words(rng, 12)]
    people = [
        {"id": n, "name": word, "place": {"town": town}, "active": active}
        for n, (word, town, active) in enumerate(drawn, 100)
    ]
    due = [f"{word},{town}" for word, town, active in sorted(drawn) if active]
    text = (
        f"Each line of {name} is a JSON object. Write to {out}, for those that "
        "are active, the name, a comma and the town of its place, from A to Z."
    )
    program = (
        f'import json; r=[json.loads(l) for l in open("{name}")]; '
        'print("\\n".join(sorted(x["name"]+","+x["place"]["town"] for x in r if x["active"])))'
    )
    return TerminalTask(
        text,
        {name: text_of([json.dumps(p) for p in people])},
        (f"python3 -c '{program}' > {out}",),
        (has_text(out, text_of(due)),),
        preview=(name,),
    )


def _reconciled(rng: random.Random) -> TerminalTask:
    """Reconcile two account books."""
    ids = sorted(rng.sample(range(1000, 9999), 14))
    amounts = {n: rng.randint(10, 900) for n in ids}
    ours = {n: amounts[n] for n in ids[1:]}
    theirs = {n: amounts[n] + (n in ids[3:5]) * rng.randint(1, 9) for n in ids[:-1]}
    one, two, out = (f"{word}-book.csv" for word in words(rng, 3))
    due = []
    for n in ids:
        if n not in ours:
            due.append(f"{n} only {two}")
        elif n not in theirs:
            due.append(f"{n} only {one}")
        elif ours[n] != theirs[n]:
            due.append(f"{n} differs by {theirs[n] - ours[n]}")

    def shown(book: dict[int, int]) -> str:
        lines = [f"{n},{amount}" for n, amount in book.items()]
        rng.shuffle(lines)
        return text_of(["number,amount", *lines])

    text = (
        f"{one} and {two} are books of the same payments (number,amount, "
        f"with a heading, in any order). Write to {out} a line for each "
        'number that they do not agree on: "NUMBER only FILE" where it '
        'is in one of them alone, "NUMBER differs by D" where the amounts '
        f"are not the same, D being that of {two} minus that of {one}; in the order of the numbers."
    )
    steps = (
        (
            f"awk -F, 'FNR==1 {{next}} NR==FNR {{a[$1]=$2; next}} {{if (!($1 in a)) print $1 "
            f'" only {two}"; else if (a[$1]!=$2) print $1 " differs by " $2-a[$1]; s[$1]=1}} '
            f'END {{for (k in a) if (!(k in s)) print k " only {one}"}}\' {one} {two} | sort -n > {out}'
        ),
    )
    return TerminalTask(
        text, {one: shown(ours), two: shown(theirs)}, steps, (has_text(out, text_of(due)),), preview=(one, two)
    )


def _letters(rng: random.Random) -> TerminalTask:
    """Write a file for each row from a template."""
    template, people = f"{words(rng, 1)[0]}.tpl", f"{words(rng, 1)[0]}-people.csv"
    rows = [(word, rng.choice(TOWNS), rng.randint(0, 400)) for word in words(rng, 6)]
    body = "Dear @name@ of @town@,\n\nyou owe us @debt@.\n"
    to = f"{words(rng, 1)[0]}-letters"
    due = {
        f"{to}/{n}.txt": body.replace("@name@", n).replace("@town@", t).replace("@debt@", str(d))
        for n, t, d in rows
        if d >= 100
    }
    if not 1 <= len(due) < 6:
        return _letters(rng)
    text = (
        f"For each person in {people} (name,town,debt, with a heading) "
        f"whose debt is 100 or more write a letter {to}/NAME.txt: the text of "
        f"{template} with name, town and debt in the places of "
        f"@name@, @town@ and @debt@. There are no other files in {to}."
    )
    steps = (
        f"mkdir {to}",
        (
            f"tail -n +2 {people} | while IFS=, read -r n t d; do [ $d -ge 100 ] && sed -e "
            f"s/@name@/$n/ -e s/@town@/$t/ -e s/@debt@/$d/ {template} > {to}/$n.txt; done; true"
        ),
    )
    files = {template: body, people: text_of(["name,town,debt", *(f"{n},{t},{d}" for n, t, d in rows)])}
    checks: tuple[Check, ...] = (
        only_files(f"{to}/*", frozenset(due)),
        *(has_text(path, letter) for path, letter in due.items()),
    )
    return TerminalTask(text, files, steps, checks, preview=(people, template))


def _contents(rng: random.Random) -> TerminalTask:
    """Write a table of contents for a text with headings."""
    name, out = f"{words(rng, 1)[0]}.md", f"{words(rng, 1)[0]}-contents.md"
    lines, due, numbers = list[str](), list[str](), [0, 0]
    for n in range(9):
        depth = 1 if n == 0 or rng.random() < 0.4 else 2
        numbers = [numbers[0] + 1, 0] if depth == 1 else [numbers[0], numbers[1] + 1]
        heading = " ".join(words(rng, 2))
        lines += [f"{'#' * depth} {heading}", "", *prose(rng, 2), ""]
        due.append(f"{'  ' * (depth - 1)}{'.'.join(map(str, numbers[:depth]))} {heading}")
        if n == 4:
            lines += ["```", "# not a heading", "```", ""]
    text = (
        f'Lines of {name} that begin with "# " or "## " are headings of '
        f"two depths, but not those between two lines of ```. Write to {out} "
        "its contents: a line for each heading with its number (1, 1.1, 1.2, "
        "2, ...), a blank and the heading, lines of the second depth with two "
        "blanks in front."
    )
    steps = (
        (
            f'awk \'/^```/ {{c=!c}} !c && /^# / {{a++; b=0; print a " " substr($0,3)}} '
            f'!c && /^## / {{b++; print "  " a "." b " " substr($0,4)}}\' {name} > {out}'
        ),
    )
    return TerminalTask(text, {name: text_of(lines)}, steps, (has_text(out, text_of(due)),), preview=(name,))


MAKERS: Final = (
    TaskMaker("text/replace", 1, _replaced),
    TaskMaker("text/blank", 1, _blanked),
    TaskMaker("text/lines", 1, _first_lines),
    TaskMaker("text/number", 1, _numbered),
    TaskMaker("text/reverse", 1, _reversed),
    TaskMaker("text/tabs", 1, _tabs),
    TaskMaker("text/line_ends", 1, _line_ends),
    TaskMaker("text/once", 2, _once),
    TaskMaker("text/frequent", 2, _frequent),
    TaskMaker("text/longest", 2, _longest, held_out=True),
    TaskMaker("text/transpose", 3, _transposed),
    TaskMaker("text/paragraphs", 3, _paragraphs),
    TaskMaker("text/join", 3, _joined),
    TaskMaker("text/to_json", 3, _to_json),
    TaskMaker("text/from_json", 3, _from_json, held_out=True),
    TaskMaker("text/blocks", 4, _blocks),
    TaskMaker("text/reconcile", 4, _reconciled),
    TaskMaker("text/letters", 4, _letters),
    TaskMaker("text/contents", 4, _contents),
)
