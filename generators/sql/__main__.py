"""Write the databases and questions of the world `sql`: python -m generators.sql [--out FOLDER]."""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path

from generators.sql.compose import DrawnQuestion, compose
from generators.sql.databases import DrawnPair, make_pair
from generators.sql.domains import domain
from ludus.worlds.sql.questions import DOMAINS, FILES, NUM_DATABASES

OUT = Path(__file__).parents[2] / "src/ludus/worlds/sql/data"
NUM: Mapping[str, int] = {"default": 3_000, "recipe": 12_000, "more": 24_000}
"""Questions in each file."""


def draw_pairs(domains: Sequence[str], databases: int) -> list[DrawnPair]:
    """Return the databases of some domains."""
    return [make_pair(domain(name), number) for name in domains for number in range(databases)]


def draw(name: str, num: int) -> list[tuple[int, DrawnQuestion]]:
    """Return the first questions of a file with their levels."""
    wanted = FILES[name]
    return compose(draw_pairs(wanted.domains, wanted.databases), wanted.levels, num, wanted.per_shape)


def as_text(groups: Mapping[str, Sequence[object]]) -> str:
    """Return the lines of a file: the header with the number of lines of each key, then the lines."""
    lines = [[(key, len(found)) for key, found in groups.items()], *(one for own in groups.values() for one in own)]
    return "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)


def questions_text(name: str, num: int) -> str:
    """Return the lines of a file of questions, by level."""
    found = draw(name, num)
    return as_text({str(level): [one.data for own, one in found if own == level] for level in FILES[name].levels})


def databases_text(databases: int = NUM_DATABASES) -> str:
    """Return the lines of the file of databases."""
    return as_text({pair.key: [pair.tables] for pair in draw_pairs(DOMAINS, databases)})


def main() -> None:
    """Write the data files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the data")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in {"databases": databases_text(), **{one: questions_text(one, NUM[one]) for one in FILES}}.items():
        (out / f"{name}.jsonl.xz").write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
