"""Domains of the databases: tables, columns and their words in questions.

Every table and column has several names, of which a database uses one. Questions use the first one, so that a
query written without looking at the database mostly contains names that do not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class ColumnKind(StrEnum):
    """Kinds of columns."""

    KEY = "key"
    REF = "ref"
    LABEL = "label"
    CATEGORY = "category"
    INTEGER = "integer"
    REAL = "real"
    DATE = "date"


@dataclass(frozen=True, eq=False)
class Column:
    """A column. `nulls` is the fraction of rows without a value."""

    names: tuple[str, ...]
    kind: ColumnKind
    values: tuple[str, ...] = ()
    low: int = 0
    high: int = 0
    nulls: float = 0.0
    target: str = ""

    @cached_property
    def id(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def phrase(self) -> str:
        """The name in questions."""
        return (self.target or self.id).replace("_", " ")

    @property
    def is_number(self) -> bool:
        """Whether the values are numbers."""
        return self.kind in (ColumnKind.INTEGER, ColumnKind.REAL)


@dataclass(frozen=True, eq=False)
class SqlTable:
    """A table; `rows` is the approximate number of rows."""

    names: tuple[str, ...]
    plural: str
    rows: int
    columns: tuple[Column, ...]

    @cached_property
    def id(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def phrase(self) -> str:
        """The name of a row in questions."""
        return self.id.replace("_", " ")

    def column(self, name: str) -> Column:
        """Return the column of an id."""
        return self._columns[name]

    @cached_property
    def _columns(self) -> Mapping[str, Column]:
        return {column.id: column for column in self.columns}

    @property
    def label(self) -> Column | None:
        """The column that names a row, or None."""
        return next((column for column in self.columns if column.kind is ColumnKind.LABEL), None)


@dataclass(frozen=True, eq=False)
class Domain:
    """Tables with references; a table comes after the tables that it refers to."""

    name: str
    tables: tuple[SqlTable, ...]

    def table(self, name: str) -> SqlTable:
        """Return the table of an id."""
        return self._tables[name]

    @cached_property
    def _tables(self) -> Mapping[str, SqlTable]:
        return {table.id: table for table in self.tables}

    def children(self, name: str) -> list[tuple[SqlTable, Column]]:
        """Return the tables that refer to a table, each with the referring column."""
        return [(t, c) for t in self.tables for c in t.columns if c.kind is ColumnKind.REF and c.target == name]


def _table(names: str, plural: str, rows: int, *columns: Column) -> SqlTable:
    first = names.split()[0]
    key = Column(("id", f"{first}_no", f"{first}_key"), ColumnKind.KEY)
    return SqlTable(tuple(names.split()), plural, rows, (key, *columns))


def _label(names: str, pool: str) -> Column:
    return Column(tuple(names.split()), ColumnKind.LABEL, values=(pool,))


def _category(names: str, values: str, nulls: float = 0.0) -> Column:
    return Column(tuple(names.split()), ColumnKind.CATEGORY, values=tuple(values.split()), nulls=nulls)


def _integer(names: str, low: int, high: int, nulls: float = 0.0) -> Column:
    return Column(tuple(names.split()), ColumnKind.INTEGER, low=low, high=high, nulls=nulls)


def _real(names: str, low: int, high: int, nulls: float = 0.0) -> Column:
    return Column(tuple(names.split()), ColumnKind.REAL, low=low, high=high, nulls=nulls)


def _date(names: str, nulls: float = 0.0, low: int = 2019, high: int = 2024) -> Column:
    return Column(tuple(names.split()), ColumnKind.DATE, low=low, high=high, nulls=nulls)


def _ref(target: str, nulls: float = 0.0) -> Column:
    return Column((f"{target}_id", f"{target}_ref", f"of_{target}"), ColumnKind.REF, target=target, nulls=nulls)


POOLS: Mapping[str, tuple[str, str]] = {
    "people": (
        "Ada Boris Chen Dina Emil Farah Goran Hana Ivo Jana Kofi Lena Milo Nadia Omar Petra Rosa Sven Uma",
        "Abel Brandt Castro Dahl Ekwe Fuchs Grant Hirsch Ito Jensen Kovac Lind Moreau Novak Okafor Park",
    ),
    "firms": (
        "Alpha Baltic Cedar Delta Ember Falcon Granite Harbor Indigo Juniper Kestrel Lumen Meridian Nordic",
        "Group Works House Partners Union Trading Brothers Company",
    ),
    "goods": (
        "Amber Black Bright Copper Deep Early Fine Green Heavy Iron Light Marble Old Quiet Red Silver Soft",
        "Lamp Chair Kettle Clock Basket Mirror Ladder Blanket Drill Vase Table Brush",
    ),
    "titles": (
        "Autumn Broken Crimson Distant Empty Frozen Golden Hidden Last Lonely Lost Midnight Silent Winter",
        "Bridge Garden Harvest Island Letter Orchard Promise River Shadow Station Summer Tower Voyage Window",
    ),
    "places": (
        "North South East West Upper Lower Great New Old Saint Royal",
        "Haven Bridge Field Ford Gate Hill Lake Mouth Port Wood",
    ),
    "subjects": (
        "Applied Basic Classical Digital Early Formal General Modern Practical Social",
        "Algebra Biology Chemistry Drawing Ethics Geometry History Logic Music Physics",
    ),
}
"""First and second words of names."""

TOWNS = "Lyon Oslo Porto Quito Riga Turin"
LANDS = "Chile Ghana Japan Kenya Norway Peru"

DOMAINS: tuple[Domain, ...] = (
    Domain(
        "shop",
        (
            _table(
                "supplier maker vendor",
                "suppliers",
                14,
                _label("name title called", "firms"),
                _category("country land nation", LANDS),
                _real("rating score stars", 1, 5, nulls=0.25),
            ),
            _table(
                "product article item",
                "products",
                45,
                _label("name title label", "goods"),
                _category("kind type category", "garden kitchen office toys tools"),
                _real("price cost amount", 3, 90),
                _integer("stock on_hand units", 0, 60, nulls=0.2),
                _ref("supplier"),
            ),
            _table(
                "customer client buyer",
                "customers",
                40,
                _label("name full_name person", "people"),
                _category("town city place", TOWNS),
                _date("joined member_since start_date"),
                _integer("points bonus credits", 10, 900, nulls=0.2),
            ),
            _table(
                "sale purchase deal",
                "sales",
                110,
                _ref("customer"),
                _ref("product"),
                _integer("quantity pieces num", 1, 12),
                _date("day sold_on happened"),
                _integer("discount rebate off", 2, 30, nulls=0.4),
            ),
        ),
    ),
    Domain(
        "library",
        (
            _table(
                "author writer creator",
                "authors",
                18,
                _label("name full_name known_as", "people"),
                _category("country land origin", LANDS),
                _integer("born birth_year year_of_birth", 1920, 1990, nulls=0.2),
            ),
            _table(
                "book volume work",
                "books",
                50,
                _label("title name heading", "titles"),
                _category("genre kind shelf", "crime fantasy poetry travel essay"),
                _integer("pages length num_pages", 80, 800),
                _integer("year published issued", 1950, 2023, nulls=0.15),
                _ref("author"),
            ),
            _table(
                "member reader patron",
                "members",
                36,
                _label("name full_name person", "people"),
                _category("town city lives_in", TOWNS),
                _date("joined member_since registered"),
                _category("card card_type plan", "adult child senior", nulls=0.15),
            ),
            _table(
                "loan borrowing lending",
                "loans",
                120,
                _ref("member"),
                _ref("book"),
                _date("day lent_on taken"),
                _integer("days duration kept", 1, 60, nulls=0.25),
                _real("fine fee penalty", 1, 20, nulls=0.5),
            ),
        ),
    ),
    Domain(
        "clinic",
        (
            _table(
                "ward department unit",
                "wards",
                10,
                _label("name title called", "places"),
                _integer("beds capacity num_beds", 4, 40),
                _integer("floor level storey", 0, 6),
            ),
            _table(
                "doctor physician medic",
                "doctors",
                24,
                _label("name full_name person", "people"),
                _category("field specialty branch", "heart skin bones eyes lungs"),
                _date("hired since start_date", low=2005, high=2022),
                _integer("salary pay wage", 3000, 9000, nulls=0.2),
                _ref("ward"),
            ),
            _table(
                "patient sick_person person",
                "patients",
                45,
                _label("name full_name called", "people"),
                _category("town city home", TOWNS),
                _integer("age years age_years", 1, 95),
                _category("blood blood_group blood_type", "A B AB O", nulls=0.25),
            ),
            _table(
                "visit appointment consultation",
                "visits",
                120,
                _ref("doctor"),
                _ref("patient"),
                _date("day visit_date held_on"),
                _real("fee price charge", 20, 300),
                _integer("minutes duration length", 5, 90, nulls=0.3),
            ),
        ),
    ),
    Domain(
        "flights",
        (
            _table(
                "airline carrier operator",
                "airlines",
                12,
                _label("name title brand", "firms"),
                _category("country land home", LANDS),
                _integer("founded since start_year", 1930, 2015, nulls=0.2),
            ),
            _table(
                "airport field aerodrome",
                "airports",
                20,
                _label("name title called", "places"),
                _category("country land nation", LANDS),
                _integer("elevation altitude height", 0, 2500),
                _integer("runways strips num_runways", 1, 6, nulls=0.2),
            ),
            _table(
                "flight connection leg",
                "flights",
                60,
                _ref("airline"),
                _ref("airport"),
                _date("day departs flight_date"),
                _integer("distance km length", 150, 9000),
                _integer("delay late_by minutes_late", 3, 240, nulls=0.4),
            ),
            _table(
                "passenger traveller flyer",
                "passengers",
                36,
                _label("name full_name person", "people"),
                _category("status tier level", "basic silver gold", nulls=0.2),
                _integer("age years age_years", 2, 90),
            ),
            _table(
                "booking ticket reservation",
                "bookings",
                120,
                _ref("flight"),
                _ref("passenger"),
                _category("cabin class seat_class", "economy business first"),
                _real("price fare cost", 30, 900),
                _integer("bags luggage num_bags", 1, 4, nulls=0.3),
            ),
        ),
    ),
    Domain(
        "school",
        (
            _table(
                "teacher tutor instructor",
                "teachers",
                20,
                _label("name full_name person", "people"),
                _category("room office place", "R1 R2 R3 R4 R5"),
                _integer("experience years service", 1, 35, nulls=0.2),
            ),
            _table(
                "course class subject",
                "courses",
                30,
                _label("title name topic", "subjects"),
                _category("area field branch", "arts science language sport"),
                _integer("hours length num_hours", 10, 120),
                _date("begins start_date opens", nulls=0.15),
                _ref("teacher"),
            ),
            _table(
                "student pupil learner",
                "students",
                45,
                _label("name full_name person", "people"),
                _integer("grade level school_year", 5, 12),
                _category("town city home", TOWNS),
                _date("birthday born birth_date", low=2005, high=2013, nulls=0.15),
            ),
            _table(
                "enrolment registration signup",
                "enrolments",
                130,
                _ref("student"),
                _ref("course"),
                _integer("mark score result", 20, 100, nulls=0.25),
                _integer("absences missed days_missed", 0, 20),
                _date("day enrolled_on entered"),
            ),
        ),
    ),
    Domain(
        "cinema",
        (
            _table(
                "studio company producer",
                "studios",
                12,
                _label("name title called", "firms"),
                _category("country land base", LANDS),
                _integer("staff employees people", 20, 900, nulls=0.2),
            ),
            _table(
                "film movie picture",
                "films",
                45,
                _label("title name heading", "titles"),
                _category("genre kind style", "comedy drama horror animation western"),
                _integer("minutes length runtime", 60, 200),
                _real("rating score stars", 1, 10, nulls=0.25),
                _ref("studio"),
            ),
            _table(
                "hall screen room",
                "halls",
                12,
                _label("name title called", "places"),
                _integer("seats capacity num_seats", 40, 400),
                _category("town city place", TOWNS),
                _category("sound audio sound_system", "mono stereo surround", nulls=0.25),
            ),
            _table(
                "screening showing session",
                "screenings",
                120,
                _ref("film"),
                _ref("hall"),
                _date("day shown_on play_date"),
                _integer("tickets sold visitors", 5, 350),
                _real("price fee cost", 4, 18, nulls=0.2),
            ),
        ),
    ),
)


def domain(name: str) -> Domain:
    """Return the domain of a name."""
    return next(one for one in DOMAINS if one.name == name)
