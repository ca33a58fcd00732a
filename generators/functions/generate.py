"""Generation of tasks: a plan (the calls, with arguments from the request or from the results of earlier calls), its
request, the offered functions and the truth."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, pairwise
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from generators.functions.plans import Links, Plan, PlanStep, change_signature, draw_value, in_words, invent
from ludus.types import JSON
from ludus.worlds.functions.catalogue import DomainState, Form, Function, Param, Row, catalogue, vocabulary
from ludus.worlds.functions.grader import Right
from ludus.worlds.functions.tasks import AskRow, CallRow, TaskRow


@dataclass(frozen=True, slots=True)
class LevelSpec:
    """The tasks of a level; `requests.toml` describes the fields."""

    calls: int
    tools: int
    changed: float
    families: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RequestSpecs:
    """The tables of `requests.toml`."""

    held_out_domain: str
    held_out_links: Sequence[Sequence[str]]
    styles: Sequence[str]
    joints: Mapping[str, Sequence[Sequence[str]]]
    lookalikes: Sequence[Sequence[str]]
    questions: Sequence[Sequence[str]]
    levels: Mapping[str, LevelSpec]


@cache
def request_specs() -> RequestSpecs:
    """Return the tables of `requests.toml`."""
    text = Path(__file__).with_name("requests.toml").read_text("utf-8")
    return TypeAdapter(RequestSpecs).validate_python(tomllib.loads(text))


@cache
def targets_for(split: str) -> tuple[Function, ...]:
    """Return the functions of single calls: the held-out domain for `composition`, else the other domains."""
    held_out = request_specs().held_out_domain
    return tuple(one for one in catalogue().values() if (one.domain == held_out) == (split == "composition"))


def functions_for(split: str) -> Sequence[Function]:
    """Return the functions that tasks of a split may offer: for `composition` all, else without the held-out domain."""
    return tuple(catalogue().values()) if split == "composition" else targets_for(split)


@cache
def _pairs() -> tuple[tuple[Function, Function], ...]:
    """Return all pairs of functions of which the second takes a result of the first."""
    every = catalogue().values()
    return tuple((a, b) for a in every for b in every if a != b and _links(a, b, 0))


@cache
def pairs_for(split: str) -> tuple[tuple[Function, Function], ...]:
    """Return the held-out pairs for `composition`, all others for every other split."""
    return tuple(pair for pair in _pairs() if _is_held_out(*pair) == (split == "composition"))


@cache
def fans_for(split: str) -> tuple[tuple[Function, Function, Function], ...]:
    """Return the triples of which the third takes a result of the first and another kind of the second.

    For `composition` one of these two pairs is held out, for other splits neither.
    """
    ordered = sorted(_pairs(), key=lambda pair: (pair[0].name, pair[1].name))
    return tuple(
        (first, second, last)
        for first, last in ordered
        for second, other in ordered
        if other == last and second.domain != first.domain and _fan_links(first, second, last)
        if (_is_held_out(first, last) or _is_held_out(second, last)) == (split == "composition")
    )


def looks_like(function: Function) -> frozenset[str]:
    """Return the names of the function and its lookalikes."""
    return frozenset({function.name}).union(*(own for own in request_specs().lookalikes if function.name in own))


def _links(first: Function, second: Function, place: int) -> Links:
    """Return links for the required parameters of `second` from the result of `first`, which has index `place`."""
    found: dict[str, tuple[int, str]] = {}
    left = dict(first.returns)
    for param in second.required:
        name = next((name for name, kind in left.items() if kind == param.kind), None)
        if name is not None:
            found[param.name] = (place, name)
            del left[name]
    return found


def _fan_links(first: Function, second: Function, last: Function) -> Links:
    """Return one link to each of two first steps, of kinds that only one of them returns."""
    one, other = _links(first, last, 0), _links(second, last, 1)
    return {**one, **other} if len(one) == len(other) == 1 and not set(one) & set(other) else {}


def _is_held_out(first: Function, second: Function) -> bool:
    domains, specs = [first.domain, second.domain], request_specs()
    return domains in specs.held_out_links or specs.held_out_domain in domains


class _Draft(NamedTuple):
    """A task before its tools are chosen."""

    plan: Plan
    request: str
    right: Right
    ask: AskRow | None = None
    answer: str = ""


@dataclass(frozen=True, slots=True)
class DrawnTask:
    """A task as it is stored, and the plan behind it."""

    level: int
    right: Right
    plan: Plan
    row: TaskRow


@dataclass(frozen=True, slots=True)
class TaskSampler:
    """Draws the plans and tasks of a split at one level."""

    rng: random.Random
    split: str
    level: int

    def task(self) -> DrawnTask | None:
        """Return a task, or None if a function of the plan fails."""
        rng, level = self.rng, request_specs().levels[str(self.level)]
        family = rng.choices(list(level.families), list(level.families.values()))[0]
        if family == "answer" and self.split == "composition":
            family = "single"  # questions have no held-out functions
        draft = self._draft(family, level.calls)
        is_changed = rng.random() < level.changed
        row = TaskRow(family=family, request=draft.request, seed=rng.randrange(2**32))
        known = [
            (param.kind, str(step.values[param.name]))
            for step in draft.plan
            for param in step.function.params
            if param.of.letter and param.name in step.values
        ]
        if known:
            row["known"] = known
        offered = self._offered(draft, is_changed, level.tools)
        row["functions"] = [_signature(function) for function in offered]
        if draft.right == "call":
            try:
                row["calls"] = _calls(draft.plan, DomainState(row["seed"], tuple(known)))
            except (LookupError, ValueError):
                return None
        if draft.right == "answer":
            row["answer"] = draft.answer
        if draft.ask is not None:
            row["ask"] = draft.ask
        if draft.right in ("ask", "decline"):
            called = offered[0] if draft.ask is None else catalogue()[draft.ask["function"]]
            row["invented"] = invent(called, random.Random(draft.request))
        return DrawnTask(self.level, draft.right, draft.plan, row)

    def _draft(self, family: str, num: int) -> _Draft:
        if family == "answer":
            return self._question()
        if family == "missing":
            return self._missing("chain" if self.level >= 4 else "single")
        num_calls = (3 if self.level == 5 else 2) if family == "chain" else num
        plan = self.plan(family, num_calls)
        request = self._request(plan, family, request_specs().styles)
        return _Draft(plan, request, "decline" if family == "decline" else "call")

    def _request(self, plan: Plan, family: str, styles: Sequence[str]) -> str:
        parts = [step.request(self.rng.choice(step.function.verbs)) for step in plan]
        joints = self.rng.choice(request_specs().joints.get(family, request_specs().joints["parallel"]))
        text = self.rng.choice(styles).format(parts[0] + "".join(map(str.__add__, joints, parts[1:])))
        return text[0].upper() + text[1:]

    def _missing(self, family: str) -> _Draft:
        """Return a request without one value, neither an identifier nor the only required one."""
        free: list[tuple[int, Param]] = []
        while not free:
            plan = self.plan(family, 2)
            free = [
                (i, param)
                for i, step in enumerate(plan)
                for param in step.function.required
                if param.name in step.values and not param.of.letter and len(step.function.required) > 1
            ]
        place, missing = self.rng.choice(free)
        values = {name: value for name, value in plan[place].values.items() if name != missing.name}
        plan = (*plan[:place], replace(plan[place], values=values), *plan[place + 1 :])
        request = self._request(plan, family, request_specs().styles[:3])
        named = [(one, step) for step in plan for one in step.function.required if one.name in step.values]
        stated = [(step.function.name, one.name, step.values[one.name]) for one, step in named]
        ask = AskRow(function=plan[place].function.name, param=missing.name, stated=stated)
        return _Draft(plan, request, "ask", ask)

    def _question(self) -> _Draft:
        kinds = vocabulary().kinds
        text, wanted = self.rng.choice(request_specs().questions)
        values = {name: draw_value(kind, self.rng, self.split) for name, kind in kinds.items() if f"{{{name}}}" in text}
        request = text.format(**{name: in_words(name, value) for name, value in values.items()})
        return _Draft((), request, "answer", answer=str(values[wanted]))

    def _offered(self, draft: _Draft, is_changed: bool, num: int) -> tuple[Function, ...]:
        """Return the functions of the plan (none if no call is right) and others, shuffled."""
        rng = self.rng
        needed = {step.function.name: step.function for step in draft.plan}
        declines = draft.right == "decline"
        chosen = [] if declines else list(needed.values())
        excluded = set(needed).union(*map(looks_like, needed.values() if declines else ()))
        kind = catalogue()[draft.ask["function"]].param(draft.ask["param"]).kind if draft.ask else None
        domains = {function.domain for function in needed.values()}
        near, far = list[Function](), list[Function]()
        for function in functions_for(self.split):
            if function.name not in excluded and kind not in function.returns.values():
                (near if function.domain in domains else far).append(function)
        num_others = max(num - len(chosen), 1)
        num_near = min(len(near), num_others // 2 + rng.randrange(2), num_others) if self.level > 1 else 0
        chosen += [*rng.sample(near, num_near), *rng.sample(far, num_others - num_near)]
        rng.shuffle(chosen)
        return tuple(
            change_signature(function, rng, self.split)
            if is_changed and (function.name in needed or rng.random() < 0.5)
            else function
            for function in chosen
        )

    def plan(self, family: str, num: int) -> Plan:
        """Return a plan of a family; `num` counts the calls of `several`, `parallel` and `chain`."""
        rng, split = self.rng, self.split
        match family:
            case "several":
                return tuple(self._step(function) for function in rng.sample(targets_for(split), num))
            case "parallel":
                return self._parallel(num)
            case "chain":
                return self._chain(num)
            case "fan":
                first, second, last = rng.choice(fans_for(split))
                return self._step(first), self._step(second), self._step(last, _fan_links(first, second, last))
            case "mixed":  # a chain of two, and an unrelated call of another domain
                linked = self._chain(2)
                domains = {step.function.domain for step in linked}
                others = [function for function in functions_for(split) if function.domain not in domains]
                return (*linked, self._step(rng.choice(others)))
        return (self._step(rng.choice(targets_for(split))),)

    def _parallel(self, num: int) -> Plan:
        function, steps = self.rng.choice(targets_for(self.split)), list[PlanStep]()
        for _ in range(20 * num):
            step = self._step(function)
            if len(steps) < num and all(step.values != other.values for other in steps):
                steps.append(step)
        return tuple(steps)

    def _chain(self, num: int) -> Plan:
        """Return calls that each take results of the one before. `composition` has a held-out link."""
        rng, pairs, usual = self.rng, pairs_for(self.split), pairs_for("train")
        functions = list(rng.choice(pairs))
        while len(functions) < num:
            after = [b for a, b in usual if a == functions[-1] and b not in functions]
            before = [a for a, b in usual if b == functions[0] and a not in functions]
            if after and (not before or rng.random() < 0.7):
                functions.append(rng.choice(after))
            elif before:
                functions.insert(0, rng.choice(before))
            else:
                functions = list(rng.choice(pairs))
        links = [_links(first, second, place) for place, (first, second) in enumerate(pairwise(functions))]
        return self._step(functions[0]), *map(self._step, functions[1:], links)

    def _step(self, function: Function, links: Links | None = None) -> PlanStep:
        """Return the function with values of the split, all different, none the default of its parameter.

        A parameter with a default has a value with probability 0.4.
        """
        values: dict[str, JSON] = {}
        for param in function.params:
            if param.name not in (links or {}) and (param.default is None or self.rng.random() < 0.4):
                value = draw_value(param.of, self.rng, self.split)
                while value in values.values() or value == param.default:
                    value = draw_value(param.of, self.rng, self.split)
                values[param.name] = value
        return PlanStep(function, values, links or {})


def _signature(function: Function) -> tuple[str, list[tuple[str, str, Form]]]:
    """Return the name of a function, and its parameters if they differ from those of the catalogue."""
    is_plain = function == catalogue()[function.name]
    return function.name, [] if is_plain else [(one.name, one.alias, one.form) for one in function.params]


def _calls(plan: Plan, state: DomainState) -> list[CallRow]:
    """Run the plan, and return its calls. Raises LookupError or ValueError if a call fails."""
    results, found = list[Row](), list[CallRow]()
    for step in plan:
        given = {**step.values, **{name: results[place][key] for name, (place, key) in step.links.items()}}
        left = {param.name: param.default for param in step.function.params if param.name not in given}
        results.append(step.function.run(state, **given, **left))
        after = sorted({place for place, _ in step.links.values()})
        found.append(CallRow(name=step.function.name, arguments=given, after=after))
    return found


def draw_tasks(split: str, levels: Sequence[int], seen: set[str], seed: str) -> Iterator[DrawnTask]:
    """Yield tasks without end, levels in turn; no request occurs twice or is in `seen`, to which it is added."""
    samplers = [TaskSampler(random.Random(f"{split}/{level}/{seed}"), split, level) for level in levels]
    for sampler in cycle(samplers):
        task = sampler.task()
        while task is None or task.row["request"] in seen:
            task = sampler.task()
        seen.add(task.row["request"])
        yield task
