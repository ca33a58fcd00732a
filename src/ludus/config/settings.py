"""A flat view of the schema by dotted name, and suggestions for unknown names."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from itertools import chain
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from ludus.config.schema import Config
from ludus.config.sections.section import Section
from ludus.errors import nearest_names

_NEAR = 0.75
"""Similarity below which a name is not suggested. An equal section counts 0.3, an equal last part 1."""
_NEAR_LEAF = 0.55
"""Similarity of the last parts below which a name is not suggested, regardless of its section."""
_SEVERAL = 4
"""Maximum number of equally similar suggestions."""
NAME = "NAME"
"""Placeholder in the key of a setting for a user-defined name: `env.mixture.NAME.weight`."""

BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
"""The words of a bound by its name in pydantic."""
_WORDS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "none",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    `key` is its dotted name (`algorithm.group_size`, with `NAME` for a user-defined part), `doc` the docstring of the
    field, `bounds` its limits in words (may be empty), `choices` the names that it accepts, if known, and `accepts` the
    Python types of its values.
    """

    key: str
    default: object
    doc: str
    type_text: str
    bounds: str
    choices: tuple[str, ...]
    accepts: frozenset[object]

    @property
    def is_open(self) -> bool:
        """Whether it is a table of arbitrary keys, which others validate."""
        return dict in self.accepts


@cache
def list_settings() -> tuple[Setting, ...]:
    """Return every setting, in the order of the schema."""
    return tuple(_walk(Config, ""))


def find(key: str) -> Setting | None:
    """Return the setting of a dotted name, or the open table that contains it; None for other names."""
    known, parts = _by_key(), _pattern(key).split(".")
    tables = (known.get(".".join(parts[:depth])) for depth in range(1, len(parts)))
    return known.get(".".join(parts)) or next((table for table in tables if table and table.is_open), None)


def is_section(key: str) -> bool:
    """Return whether there are settings under this dotted name."""
    return first_under(key) is not None


def first_under(key: str) -> Setting | None:
    """Return the first setting under this dotted name."""
    return next((setting for setting in list_settings() if setting.key.startswith(f"{_pattern(key)}.")), None)


def suggestion(key: str) -> str:
    """Return what to write instead of an unknown key, as the second half of a sentence."""
    if present := present_name(key):
        return f"it is now {present}"
    if near := nearest(key):
        return f"the nearest {'is' if len(near) == 1 else 'are'} {' and '.join(near)}"
    section = key.split(".")[0]
    if section in Config.model_fields:
        return _contents(section)
    for other in nearest_names(section, Config.model_fields):
        return f"the nearest section is {other}, and {_contents(other)}"
    return f"the sections are {', '.join(Config.model_fields)}"


def nearest(key: str) -> list[str]:
    """Return the settings whose names are most similar to `key`, in any section; several if equally similar."""
    parent, _, leaf = key.rpartition(".")
    if "." in parent and not is_section(parent):
        for table in (table for table in map(find, nearest(parent)) if table and table.is_open):
            return [f"{table.key}.{leaf}"]
    parts, names = key.split("."), [s.key.split(".") for s in list_settings()]
    scores = [(_similarity(key, ".".join(name)), name) for name in names if NAME not in name or len(name) == len(parts)]
    best = max(score for score, _ in scores)
    near = [name for score, name in scores if score == best >= _NEAR][:_SEVERAL]
    return [".".join(parts[i] if part == NAME else part for i, part in enumerate(name)) for name in near]


def present_name(key: str) -> str | None:
    """Return the present name of a former key, or of a key inside a former table; None for other keys."""
    section, _, rest = key.partition(".")
    former, dot, inside = rest.partition(".")
    renamed = tomllib.loads((resources.files(__package__) / "renamed_settings.toml").read_text("utf-8"))
    present: str | None = renamed.get(section, {}).get(former)
    return present and present + dot + inside


def _contents(section: str) -> str:
    own = [s.key for s in list_settings() if s.key.startswith(f"{section}.")]
    free = " (keys of the world itself go under env.settings)" if section == "env" else ""
    return f"{section} has {', '.join(own)}{free}"


@cache
def _by_key() -> dict[str, Setting]:
    return {setting.key: setting for setting in list_settings()}


@cache
def _named_tables() -> frozenset[str]:
    """Return the dotted names of the tables whose keys are user-defined names of sections."""
    return frozenset(s.key.partition(f".{NAME}.")[0] for s in list_settings() if f".{NAME}." in s.key)


def _pattern(key: str) -> str:
    """Return a dotted name with `NAME` in place of the user-defined part, if it has one."""
    parts = key.split(".")
    for depth in range(1, len(parts)):
        if ".".join(parts[:depth]) in _named_tables() and parts[depth]:
            parts[depth] = NAME
    return ".".join(parts)


def _similarity(wrong: str, name: str) -> float:
    wrong_section, _, wrong_leaf = wrong.rpartition(".")
    section, _, leaf = name.rpartition(".")
    initials = "".join(word[:1] for word in leaf.split("_"))
    is_short = len(initials) > 1 and wrong_leaf == initials
    same = 0.95 if is_short else _ratio(wrong_leaf.replace("-", "_"), leaf)
    levels = abs(wrong.count(".") - name.count("."))
    return same + 0.3 * _ratio(wrong_section, section) - 0.1 * levels if same >= _NEAR_LEAF else 0.0


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio() if one and other else 0.0


def _walk(section: type[Section], prefix: str) -> Iterator[Setting]:
    for name, info in section.model_fields.items():
        kinds = _alternatives(info.annotation)
        named = next((get_args(kind)[1] for kind in kinds if get_origin(kind) is dict), None)
        if isinstance(named, type) and issubclass(named, Section):
            yield from _walk(named, f"{prefix}{name}.{NAME}.")
            continue
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)
        if inner is None or NoneType in kinds:
            yield _setting(f"{prefix}{name}", info)
        if inner is not None:
            yield from _walk(inner, f"{prefix}{name}.")


def _setting(key: str, info: FieldInfo) -> Setting:
    kinds = _alternatives(info.annotation)
    literals = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    plain = [get_origin(kind) or kind for kind in kinds if get_origin(kind) is not Literal]
    bounds = chain.from_iterable(asdict(item).items() for item in info.metadata if isinstance(item, Ge | Gt | Le | Lt))
    return Setting(
        key=key,
        default=info.get_default(call_default_factory=True),
        doc=info.description or "",
        type_text=" or ".join(_words(kind) for kind in kinds),
        bounds=" and ".join(f"{BOUNDS[name]} {value}" for name, value in bounds),
        choices=tuple(str(value) for value in [*literals, *(info.examples or [])]),
        accepts=frozenset([*plain, *(type(value) for value in literals)]),
    )


def _alternatives(annotation: object) -> tuple[object, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _words(kind: object) -> str:
    if kind in _WORDS:
        return _WORDS[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        names = [f'"{value}"' if isinstance(value, str) else str(value) for value in arguments]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if origin is not list:
        return "a table"
    return 'a list of text such as ["a", "b"]' if arguments == (str,) else "a list of numbers such as [0.0, 1.0]"
