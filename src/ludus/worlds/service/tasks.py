"""Tasks drawn from the data of the domains. Each is checked with the reference dialogue.

Customers and notes with instructions of `test` and `composition` occur in no training task. Pairs of requests are in
`train`, `validation` and `test` or in `composition`, never in both.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from pydantic import Field, model_validator

from ludus.envs.settings import WorldSettings
from ludus.types import Message, Task
from ludus.worlds.service.domain import (
    CUSTOMERS,
    OWNER,
    Call,
    Cell,
    DomainName,
    OtherSpec,
    Place,
    RequestSpec,
    Row,
    ServiceDomain,
    draw,
    fill,
    fill_all,
    filled,
    holds,
    key_of,
    load_domain,
    read_data,
    user_texts,
)
from ludus.worlds.service.grader import Goal, Script, ServiceTruth, report
from ludus.worlds.service.solver import Solver
from ludus.worlds.service.users import ScriptedUser, UserKind

TENTHS: Mapping[str, Sequence[int]] = {
    "train": range(6),
    "validation": (6,),
    "test": range(7, 10),
    "composition": range(7, 10),
}
"""Tenths of the customers of each split."""
LEVEL_TURNS = (5, 8)
"""Maximum number of the agent's turns of level 1 and 2; level 3 has more."""
SEVERAL = "several"
"""Family of tasks with several requests."""
_MAX_DRAWS = 60
"""Number of draws per task after which too few tasks exist."""


class ServiceSettings(WorldSettings):
    """Settings of the service world (`env.settings`)."""

    domains: tuple[DomainName, ...] = Field(("retail", "airline", "telecom"), min_length=1)
    """Domains of the tasks."""
    levels: tuple[Literal[1, 2, 3], ...] = Field((1, 2, 3), min_length=1)
    """Levels of the tasks, by the number of the agent's turns: up to 5, up to 8, more. `composition` has any."""
    num_tasks: int = Field(1200, ge=20)
    """Number of training tasks; validation, test and composition have a tenth, a quarter and a fifth of it."""
    num_held_out: int | None = Field(None, ge=1)
    """Number of tasks of test and of composition, instead of those shares."""
    user: UserKind = "scripted"
    """Who plays the user: a script, a model at an endpoint, or the policy itself, which is trained in both roles."""
    user_url: str = ""
    """Address of the OpenAI-compatible endpoint, before `/chat/completions`."""
    user_model: str = ""
    """Name of the model at the endpoint."""
    user_key_file: str = ""
    """File with the API key of the endpoint; empty for none."""
    patience: int = Field(4, ge=1)
    """Number of replies that do not help after which the scripted user gives up a request."""
    policy_text: Literal["short", "full"] = "short"
    """Form of the policy in the prompt."""
    strict_policy: bool = True
    """Whether an episode with a violation of the policy fails."""
    injection_rate: float = Field(0.2, ge=0, le=1)
    """Share of the drawn tasks with a note that instructs the agent; fewer have one, since not all requests read it."""
    pair_rate: float = Field(0.2, ge=0, le=1)
    """Share of the drawn tasks with two requests."""
    flaw_rate: float = Field(0.3, ge=0, le=1)
    """Share of the demonstrations with a flaw, where one is possible."""
    digits: Literal[2, 3, 4] = 4
    """Number of digits of keys; with 2 there are at most 45 customers. A small model learns to copy short keys."""
    seed: int = 0
    """Seed of databases, tasks and demonstrations."""

    @model_validator(mode="after")
    def _endpoint_is_named(self) -> ServiceSettings:
        if self.user == "endpoint" and not (self.user_url and self.user_model):
            raise ValueError("the user 'endpoint' needs user_url and user_model")
        return self


class _Unusable(Exception):
    """Raised if a drawn situation is contradictory."""


@dataclass
class _Situation:
    """A customer, and the rows that differ from the shared database."""

    domain: ServiceDomain
    customer_id: str
    rng: random.Random
    forgets: bool
    declines: bool
    note: str
    initial: dict[Place, Row] = field(default_factory=dict)
    phone: str = ""

    def read(self, table: str, key: Cell) -> Row | None:
        return self.initial.get((table, str(key))) or self.domain.read(table, key)

    def row(self, table: str, key: Cell) -> Row:
        found = self.read(table, key)
        if found is None:
            raise _Unusable
        return found

    def set(self, table: str, key: Cell, values: Mapping[str, Cell]) -> None:
        """Change a row. Raises _Unusable if an earlier request needs another value."""
        place, before = (table, str(key)), self.row(table, key)
        drawn = {name: draw(value, self.rng, before) for name, value in values.items()}
        set_before = self.initial.get(place, {})
        shared = self.domain.read(table, key) or {}
        if any(set_before.get(name, v) not in (v, shared.get(name)) for name, v in drawn.items()):
            raise _Unusable
        self.initial[place] = {**before, **drawn}


def make_tasks(plan: ServiceSettings, split: str, num: int) -> Iterator[Task]:
    """Yield up to `num` different tasks of a split, the domains in turn; levels do not apply to `composition`."""
    rng = random.Random(f"service/{plan.seed}/{split}")
    seen: set[tuple[str, str]] = set()
    for number in range(num * _MAX_DRAWS):
        if len(seen) == num:
            return
        domain = load_domain(plan.domains[(number + len(seen)) % len(plan.domains)], plan.seed, plan.digits)
        task = _draw_task(plan, domain, split, rng, f"{split}-{len(seen)}")
        if task is None or (split != "composition" and int(task.tags["level"]) not in plan.levels):
            continue
        key = (task.tags["request"], task.prompt[-1]["content"])
        if key not in seen:
            seen.add(key)
            yield task


def _draw_task(plan: ServiceSettings, domain: ServiceDomain, split: str, rng: random.Random, name: str) -> Task | None:
    truth = _draw_truth(plan, domain, split, rng)
    if truth is None:
        return None
    solver = Solver(truth)
    solver.run()
    truth = replace(truth, final=dict(solver.desk.changes))
    if not (solver.user.is_over and report(truth, solver.desk, strict=True)["solved"]):
        return None
    return task_of(plan, truth, name, split, solver.num_turns)


def task_of(plan: ServiceSettings, truth: ServiceTruth, name: str, split: str, num_turns: int) -> Task:
    """Return the task of a truth."""
    goals, script = truth.script.goals, truth.script
    family = "injection" if any(goal.injection for goal in goals) else goals[0].family
    tags = {
        "split": split,
        "family": SEVERAL if len(goals) > 1 else family,
        "domain": truth.domain,
        "level": str(1 + sum(num_turns > most for most in LEVEL_TURNS)),
        "request": " + ".join(goal.name for goal in goals),
        "persona": script.persona,
        "injection": str(family == "injection").lower(),
        "refuse": str(any(goal.why for goal in goals)).lower(),
    }
    first = ScriptedUser(script, Solver(truth).desk).first()
    system = read_data(f"{truth.domain}_{plan.policy_text}.md").strip()
    prompt = (Message(role="system", content=system), Message(role="user", content=first))
    return Task(f"{truth.domain}-{name}", prompt, truth, tags)


def _draw_truth(plan: ServiceSettings, domain: ServiceDomain, split: str, rng: random.Random) -> ServiceTruth | None:
    customers = list(domain.tables[CUSTOMERS])
    tenths = TENTHS[split]
    customer_id = rng.choice([key for place, key in enumerate(customers) if place % 10 in tenths])
    specs = _draw_requests(domain, split, rng, plan.pair_rate)
    notes = [one.note for one in domain.spec.injections if (one.split == "train") == (split in ("train", "validation"))]
    note = rng.choice(notes) if rng.random() < plan.injection_rate else ""
    forgets, declines = rng.random() < 0.25, rng.random() < 0.3
    situation = _Situation(domain, customer_id, rng, forgets, declines, note)
    try:
        goals = tuple(_draw_goal(situation, spec, place) for place, spec in enumerate(specs))
    except _Unusable:
        return None
    row = situation.row(CUSTOMERS, customer_id)
    introduces = rng.random() < 0.6
    script = Script(
        customer_id,
        str(row["name"]),
        int(row["zip"]),
        str(row["email"]),
        goals,
        persona=rng.choice(list(user_texts().personas)),
        introduces=introduces,
        forgets=forgets,
        mistakes=not introduces and rng.random() < 0.4,
        insists=rng.random() < 0.5,
        patience=plan.patience,
    )
    return ServiceTruth(domain.name, plan.seed, script, situation.initial, situation.phone, digits=plan.digits)


def _draw_requests(domain: ServiceDomain, split: str, rng: random.Random, pair_rate: float) -> list[RequestSpec]:
    """Return one request or two; in `composition` a pair that is held out, and sometimes a third request."""
    specs = domain.spec.requests
    first = rng.randrange(len(specs))
    if split != "composition" and rng.random() >= pair_rate:
        return [specs[first]]
    held_out = split == "composition"
    others = [place for place in range(len(specs)) if place != first and is_held_out(place, first) == held_out]
    chosen = [first, rng.choice(others)]
    about_customer = [place for place, one in enumerate(specs) if one.table == CUSTOMERS and place not in chosen]
    if held_out and about_customer and rng.random() < 0.3:
        chosen.append(rng.choice(about_customer))
    return [specs[place] for place in chosen]


def is_held_out(first: int, second: int) -> bool:
    """Return whether a pair of requests, by their numbers in the domain, is in `composition` only."""
    return (first + second) % 3 == 0


def _draw_goal(situation: _Situation, spec: RequestSpec, place: int) -> Goal:
    domain, rng = situation.domain, situation.rng
    key = _subject(situation, spec.table, place)
    for name, value in spec.setup.items():
        if isinstance(value, dict):
            row = situation.row(spec.table, key)
            situation.set(f"{name}s", row[f"{name}_id"], value)
        else:
            situation.set(spec.table, key, {name: value})
    call = _injected(situation, spec, key)
    fields = _fields(situation, spec, key)
    facts = {name: draw(value, rng, fields) for name, value in spec.facts.items()}
    drawn = {name: draw(domain.spec.facts[name].first, rng, fields) for name in facts}
    first = {name: value for name, value in drawn.items() if situation.declines and value != facts[name]}
    fields |= facts
    table = domain.spec.tables[spec.table]
    fields["subject"] = fill(table.forgot if situation.forgets else table.call, fields)
    added = {"facts": facts, "first": first if spec.writes else {}, "seen": key if _is_read(domain, spec) else ""}
    goal = Goal.model_validate(fill_all({**spec.model_dump(), **added, "injection": call}, fields))
    return goal.model_copy(update={"say": goal.say[0].upper() + goal.say[1:]})


def _is_read(domain: ServiceDomain, spec: RequestSpec) -> bool:
    """Return whether the agent must read the row that a request is about."""
    tools = [domain.spec.tools[tool] for tool, _ in spec.reads]
    return any(tool.kind == "get" and tool.table == spec.table for tool in tools)


def _subject(situation: _Situation, table: str, place: int) -> str:
    """Return the key of the row of a request. Raises _Unusable if a description does not name one row."""
    domain, customer_id = situation.domain, situation.customer_id
    if table == CUSTOMERS:
        return customer_id
    parent = domain.spec.tables[table].per
    owning = table if parent == CUSTOMERS else parent
    owned = domain.where(owning, OWNER, customer_id)
    key = owned[place % len(owned)]
    described = {fill(domain.spec.tables[owning].forgot, situation.row(owning, one)) for one in owned}
    if situation.forgets and len(described) < len(owned):
        raise _Unusable
    if table != owning:
        key = domain.where(table, key_of(owning), key)[0]
    if table == "phones":
        if situation.phone:
            raise _Unusable
        situation.phone = key
    return key


def _fields(situation: _Situation, spec: RequestSpec, key: str) -> dict[str, Cell]:
    """Return the fields of the texts of a request."""
    row = situation.row(spec.table, key)
    fields = dict(situation.row(CUSTOMERS, situation.customer_id))
    if "line_id" in row:
        fields |= situation.row("lines", row["line_id"])
    fields |= row
    if spec.other is not None:
        other = _other(situation, spec.other, row)
        fields |= {f"new_{name}": value for name, value in other.items()}
    if spec.of is not None:
        of = situation.row(spec.of[0], row[spec.of[1]])
        fields |= {f"of_{name}": value for name, value in of.items()}
    return fields


def _other(situation: _Situation, spec: OtherSpec, row: Row) -> Row:
    """Return another row that fits a request, after its changes."""
    fits = partial(holds, args={}, read=situation.read, other=row)
    rows = {key: situation.row(spec.table, key) for key in situation.domain.tables[spec.table]}
    keys = [key for key, one in rows.items() if all(fits(rule, one) for rule in spec.where)]
    if not keys:
        raise _Unusable
    key = situation.rng.choice(keys)
    situation.set(spec.table, key, spec.setup)
    return situation.row(spec.table, key)


def _injected(situation: _Situation, spec: RequestSpec, key: str) -> Call | None:
    """Write the note into the row, if the agent will read it there; return the call that it asks for."""
    domain, row = situation.domain, situation.row(spec.table, key)
    chosen = next((one for one in domain.spec.injections if one.note == situation.note), None)
    right = [tool for tool, _ in (*spec.writes, *spec.wanted)]
    if chosen is None or "note" not in row or not _is_read(domain, spec) or chosen.call[0] in right:
        return None
    fields = {**situation.row(CUSTOMERS, situation.customer_id), **row}
    situation.set(spec.table, key, {"note": str(fill(chosen.note, fields))})
    return filled(chosen.call, fields)
