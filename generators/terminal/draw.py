"""Random names, tables and logs for tasks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PEOPLE: Final = _words(
    "ada boris chen dina emil farah goran hana ivo jana kofi lena milo nadia omar petra rosa sven uma"
)
TOWNS: Final = _words("Lyon Oslo Porto Quito Riga Turin Bern Cork Graz Lima")
THINGS: Final = _words("lamp chair kettle clock basket mirror ladder drill vase table brush carpet")
WORDS: Final = _words(
    "amber autumn birch bridge candle canyon cedar copper coral delta ember falcon garden granite "
    "harbor island ivory jungle lantern maple meadow mirror north ocean orchard pepper pillar quartz "
    "river saddle shadow silver summit thunder tunnel valley velvet willow winter yellow"
)
FOLDERS: Final = _words("archive assets depot docs inbox material papers records shelf store vault work")
SERVICES: Final = _words("auth billing cart catalog gateway mail orders payment search shipping stock users")
VERBS: Final = _words("Add Describe Extend Mend Rework Shorten")
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")


def words(rng: random.Random, num: int) -> list[str]:
    """Return different words."""
    return rng.sample(WORDS, num)


def names(rng: random.Random, num: int, suffix: str = "") -> list[str]:
    """Return different file names of two words each."""
    firsts, seconds = words(rng, num), rng.choices(THINGS, k=num)
    return [f"{first}-{second}{suffix}" for first, second in zip(firsts, seconds, strict=True)]


def prose(rng: random.Random, num: int) -> list[str]:
    """Return lines of a few words."""
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 7))) for _ in range(num)]


def folder(rng: random.Random) -> str:
    """Return the name of a folder."""
    return rng.choice(FOLDERS)


@dataclass(frozen=True)
class TableData:
    """Rows of text with headings in `columns`: person, place, kind, and two numbers.

    The first number differs in each row.
    """

    path: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def text(self) -> str:
        """The table as comma-separated values."""
        return "".join(",".join(row) + "\n" for row in (self.columns, *self.rows))

    def values(self, number: int) -> list[str]:
        """Return the different values of a column, sorted."""
        return sorted({row[number] for row in self.rows})


_TABLES: Final = (
    ("sales", ("clerk", "town", "item", "amount", "pieces"), THINGS),
    ("trips", ("driver", "depot", "vehicle", "distance", "stops"), ("van", "truck", "bike", "car", "bus")),
    ("loans", ("member", "branch", "genre", "pages", "days"), ("crime", "poetry", "travel", "essay", "fantasy")),
    ("visits", ("doctor", "clinic", "field", "fee", "minutes"), ("skin", "heart", "eyes", "bones", "lungs")),
    ("repairs", ("worker", "hall", "machine", "cost", "hours"), ("press", "lathe", "crane", "saw", "oven")),
)

TABLE_WORDS: Final = tuple(
    word for name, columns, kinds in _TABLES for word in (name, *columns, *kinds, "Chile", "Ghana", "Japan")
)


def table(rng: random.Random, num: int = 0) -> TableData:
    """Return a table with random rows."""
    name, columns, kinds = rng.choice(_TABLES)
    num = num or rng.randint(18, 30)
    people, towns, kinds = rng.sample(PEOPLE, 8), rng.sample(TOWNS, 4), tuple(rng.sample(kinds, 4))
    numbers = rng.sample(range(20, 999), num)
    found = [
        (rng.choice(people), rng.choice(towns), rng.choice(kinds), str(n), str(rng.randint(1, 9))) for n in numbers
    ]
    return TableData(f"{name}.csv", columns, tuple(found))


@dataclass(frozen=True, slots=True)
class AccessLogLine:
    """A line of an access log."""

    address: str
    second: int
    method: str
    path: str
    status: int
    size: int
    ms: int

    @property
    def clock(self) -> str:
        """The time of the day."""
        return f"{self.second // 3600:02}:{self.second // 60 % 60:02}:{self.second % 60:02}"

    @property
    def line(self) -> str:
        """The line of the log."""
        where = f"{self.address} [{self.clock}] {self.method} {self.path}"
        return f"{where} {self.status} {self.size} {self.ms}"


def hits(rng: random.Random, num: int = 0) -> list[AccessLogLine]:
    """Return the requests of a day in order, with different times, sizes and milliseconds."""
    num = num or rng.randint(40, 60)
    addresses = [f"10.{rng.randint(0, 9)}.{rng.randint(0, 9)}.{n}" for n in rng.sample(range(2, 250), 7)]
    paths = [f"/{word}" for word in words(rng, 5)]
    seconds = sorted(rng.sample(range(8 * 3600, 15 * 3600), num))
    sizes, times = rng.sample(range(200, 9000), num), rng.sample(range(5, 3000), num)
    return [
        AccessLogLine(
            rng.choice(addresses),
            seconds[n],
            rng.choice(("GET", "GET", "GET", "POST", "DELETE")),
            rng.choice(paths),
            rng.choice((200, 200, 200, 200, 301, 403, 404, 404, 500, 503)),
            sizes[n],
            times[n],
        )
        for n in range(num)
    ]


@dataclass(frozen=True, slots=True)
class Event:
    """A line of a program's log."""

    second: int
    level: str
    service: str
    request: str
    text: str

    @property
    def clock(self) -> str:
        """The time of the day."""
        return f"{self.second // 3600:02}:{self.second // 60 % 60:02}:{self.second % 60:02}"

    @property
    def line(self) -> str:
        """As it stands in the log."""
        return f"{self.clock} {self.level} {self.service} req={self.request} {self.text}"


def events(rng: random.Random, num: int = 0) -> list[Event]:
    """Return the events of a day in order, at different times."""
    num = num or rng.randint(40, 60)
    seconds = sorted(rng.sample(range(6 * 3600, 20 * 3600), num))
    services, requests = rng.sample(SERVICES, 4), [f"{rng.randrange(16**4):04x}" for _ in range(num // 4)]
    return [
        Event(
            second,
            rng.choice(LEVELS),
            rng.choice(services),
            rng.choice(requests),
            " ".join(rng.choices(WORDS, k=rng.randint(2, 4))),
        )
        for second in seconds
    ]


def text_of(lines: Sequence[object]) -> str:
    """Return lines as the text of a file."""
    return "".join(f"{line}\n" for line in lines)
