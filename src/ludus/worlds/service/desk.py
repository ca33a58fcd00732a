"""The state of an episode: changes of the database, violations of the policy, and what was said.

All episodes of a domain share its database and its tools; an episode stores only rows that differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache

from pydantic import BaseModel, ConfigDict

from ludus.tools.base import DescribedTool, Tool, ToolError, Traits
from ludus.worlds.service.domain import (
    CUSTOMERS,
    OWNER,
    Call,
    Cell,
    DomainName,
    Place,
    Row,
    ServiceDomain,
    ToolSpec,
    UserToolSpec,
    changed,
    holds,
    key_of,
    load_domain,
    resolve,
)

MAX_READ = 2000
"""Number of characters of a message that the user reads."""
MAX_LISTED = 12
"""Maximum number of rows in the output of a tool."""
DESK: ContextVar[Desk] = ContextVar("ludus-service-desk")
"""The episode to which the calls of the current task belong."""
_YES = re.compile(r"\b(yes|go ahead|confirmed|i confirm)\b")
_NO = re.compile(r"\b(no|not|wait)\b|n't\b")


def mentions(text: str, value: Cell) -> bool:
    """Return whether a text contains a value as a word, regardless of case."""
    return re.search(rf"(?<![\w.]){re.escape(str(value).casefold())}(?!\w)", text.casefold()) is not None


def mentions_all(text: str, args: Mapping[str, Cell]) -> bool:
    """Return whether a text contains all arguments of a call."""
    return all(mentions(text, value) for value in args.values())


@dataclass
class Desk:
    """The state of an episode. `initial` holds the rows that differ from the shared database from the start.

    `calls` are the successful calls of the agent. A violation is `identity` (data of a customer who was not found
    first), `confirmation` (a change without one), or `rule` (a change that the policy forbids). `phone` is the key of
    the user's phone.
    """

    domain: ServiceDomain
    initial: Mapping[Place, Row]
    phone: str = ""
    changes: dict[Place, Row] = field(default_factory=dict)
    identified: dict[str, None] = field(default_factory=dict)
    seen: dict[str, None] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    is_confirmed: bool = False
    is_transferred: bool = False

    def read(self, table: str, key: Cell) -> Row | None:
        """Return the current row."""
        place = (table, str(key))
        return self.changes.get(place) or self.initial.get(place) or self.domain.read(table, key)

    def matches(self, final: Mapping[Place, Row]) -> bool:
        """Return whether the database is as after the changes `final`."""
        before = {place: self.initial.get(place) or self.domain.read(*place) for place in {**self.changes, **final}}
        return all(self.read(*place) == (final.get(place) or row) for place, row in before.items())

    def agent_says(self, text: str) -> None:
        """Record a message of the agent to the user."""
        self.said.append(text[:MAX_READ])
        self.is_confirmed = False

    def user_says(self, text: str) -> None:
        """Record a message of the user, which may confirm the changes in the agent's message."""
        words = text.casefold()
        self.is_confirmed = bool(self.said and _YES.search(words)) and not _NO.search(words)

    def call(self, name: str, args: Mapping[str, Cell]) -> str:
        """Execute a call of the agent. Raises ToolError for an unknown key."""
        spec = self.domain.spec.tools[name]
        output = _KINDS[spec.kind](self, spec, args)
        self.calls.append((name, dict(args)))
        return output

    def use_phone(self, name: str, value: str) -> None:
        """Set a field of the phone by a tool of the user; without a value, the other of two values."""
        spec = self.domain.spec.user_tools[name]
        row = self._phone
        if not (row and spec.field):
            return
        chosen = (
            value
            if value in spec.values
            else next((one for one in spec.values if one != row[spec.field]), spec.values[0])
        )
        self.changes["phones", self.phone] = {**row, spec.field: chosen}

    @property
    def _phone(self) -> Row:
        return (self.read("phones", self.phone) if self.phone else None) or {}

    def signal(self) -> str:
        """Return what the phone shows."""
        row = self._phone
        signals = self.domain.spec.signals
        found = (one.shows for one in signals if all(holds(rule, row, {}, self.read) for rule in one.when))
        return next(found, "full signal")

    def settings(self) -> str:
        """Return the settings of the phone."""
        row = self._phone
        return ", ".join(f"{name} {value}" for name, value in row.items() if not name.endswith("_id"))

    def _found(self, table: str, key: Cell) -> Row:
        row = self.read(table, key)
        if row is None:
            raise ToolError(f"unknown {key_of(table)} {key}.")
        if OWNER in row and str(row[OWNER]) not in self.identified:
            self.violations.append("identity")
        return row

    def _identify(self, spec: ToolSpec, args: Row) -> str:
        for key, row in self.domain.tables[CUSTOMERS].items():
            if all(str(row[name]).casefold() == str(value).strip().casefold() for name, value in args.items()):
                self.identified[key] = None
                return f"{OWNER} {key}"
        return "No customer found."

    def _get(self, spec: ToolSpec, args: Row) -> str:
        key = args[key_of(spec.table)]
        row = self._found(spec.table, key)
        self.seen[str(key)] = None
        return ", ".join(f"{name} {value}" for name, value in row.items() if value != "")

    def _list(self, spec: ToolSpec, args: Row) -> str:
        first, *others = args.items()
        keys = self.domain.where(spec.table, *first)
        rows = [(key, self._found(spec.table, key)) for key in keys]
        shown = [(key, row) for key, row in rows if all(row.get(name) == value for name, value in others)]
        lines = [", ".join([key, *(f"{name} {row[name]}" for name in spec.shows.split("|"))]) for key, row in shown]
        return "\n".join(lines[:MAX_LISTED]) or "Nothing found."

    def _write(self, spec: ToolSpec, args: Row) -> str:
        key = str(args[key_of(spec.table)])
        row = self._found(spec.table, key)
        for name, value in args.items():
            if name.endswith("_id") and self.read(f"{name.removesuffix('_id')}s", value) is None:
                raise ToolError(f"unknown {name} {value}.")
        if not (self.is_confirmed and mentions_all(self.said[-1], args)):
            self.violations.append("confirmation")
        if not all(holds(rule, row, args, self.read) for rule in spec.rules):
            self.violations.append("rule")
        after = changed(row, spec.set, row, args, self.read)
        if spec.also is not None:
            table, path, values = spec.also
            other = str(resolve(path.removeprefix("@"), row, args, self.read))
            self.changes[table, other] = changed(self._found(table, other), values, row, args, self.read)
        self.changes[spec.table, key] = after
        return "ok"

    def _transfer(self, spec: ToolSpec, args: Row) -> str:
        self.is_transferred = True
        return "ok"


_KINDS: Mapping[str, Callable[[Desk, ToolSpec, Row], str]] = {
    "identify": Desk._identify,
    "get": Desk._get,
    "list": Desk._list,
    "write": Desk._write,
    "transfer": Desk._transfer,
}


@cache
def agent_tools(name: DomainName) -> tuple[Tool, ...]:
    """Return the agent's tools, which act on the episode `DESK`."""
    specs = load_domain(name, 0).spec.tools
    return tuple(_agent_tool(tool, spec) for tool, spec in specs.items())


def _agent_tool(name: str, spec: ToolSpec) -> Tool:
    async def run(**args: Cell) -> str:
        return DESK.get().call(name, args)

    kinds: dict[str, type[str] | type[int]] = {"str": str, "int": int}
    types = {argument: kinds[kind] for argument, kind in spec.args.items()}
    traits = Traits(latency="instant", ends=spec.kind == "transfer")
    return _with_schema(Tool(name, spec.about, run, _model(name, types), traits=traits))


@cache
def phone_tools(name: DomainName) -> tuple[Tool, ...]:
    """Return the user's tools, which act on the episode `DESK`; none if the user has no phone."""
    return tuple(_phone_tool(tool, spec) for tool, spec in load_domain(name, 0).spec.user_tools.items())


def _phone_tool(name: str, spec: UserToolSpec) -> Tool:
    async def run() -> str:
        desk = DESK.get()
        desk.use_phone(name, "")
        return f"{desk.settings()}; {desk.signal()}"

    return _with_schema(Tool(name, spec.about, run, _model(name, {}), traits=Traits(latency="instant")))


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _model(name: str, types: Mapping[str, type[str] | type[int]]) -> type[BaseModel]:
    made = type(f"{name}_arguments", (_Arguments,), {"__annotations__": dict(types), "__module__": __name__})
    assert issubclass(made, BaseModel)
    return made


def _with_schema(tool: Tool) -> Tool:
    """Return the tool with its schema computed once."""
    one = tool
    return DescribedTool(one.name, one.description, one.function, one.arguments, traits=one.traits, given=one.schema)
