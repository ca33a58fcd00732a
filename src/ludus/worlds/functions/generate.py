"""Generation of tasks: a plan, its request, the offered functions and the truth."""

from __future__ import annotations

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

from ludus.errors import ConfigError
from ludus.rewards.exact_match import ExpectedAnswers
from ludus.types import JSON, Message, Task
from ludus.worlds.functions.catalogue import Function, Param, other_words
from ludus.worlds.functions.gold_calls import GoldCall, Right, Truth
from ludus.worlds.functions.plans import Plan, PlanMaker, arguments_of, functions_for, request_specs
from ludus.worlds.functions.replies import Ask, make_ask
from ludus.worlds.functions.state import KnownValues, vocabulary
from ludus.worlds.functions.tool_distractors import Offer, Scene, changed_offer, plain_offer

SYSTEM: Final = "Do what is asked with the tools. Ask back where something is missing; call nothing where no tool fits."
SPLITS: Final = ("train", "validation", "test", "composition")
LEVELS: Final = (1, 2, 3, 4, 5)
_JOINTS: Final = {
    "chain": ((", then ", ", then "),),
    "fan": ((" and ", ", then "),),
    "mixed": ((", then ", "; besides, "),),
}
"""Choices of the words between the parts of a request; those of other families are parallel."""
_PARALLEL: Final = ((" and ", " and "), ("; also ", "; also "))


def looks_like(function: Function) -> frozenset[str]:
    """Return the names of the function and its lookalikes."""
    return frozenset({function.name}).union(*(own for own in request_specs().lookalikes if function.name in own))


@dataclass(frozen=True, slots=True)
class _Draft:
    """A task before its tools are chosen: requests with and without values, and the right response."""

    plan: Plan
    request: str
    form: str
    right: Right
    missing: tuple[int, Param] | None = None
    answer: ExpectedAnswers | None = None


@dataclass(frozen=True, slots=True)
class CallMaker:
    """Generates the tasks of one split at one level from `rng`; no signature is changed unless `changes`."""

    rng: random.Random
    split: str
    level: int
    changes: bool = True

    def task(self, number: int) -> Task | None:
        """Return a task, or None if a function of the plan fails."""
        rng, level = self.rng, request_specs().levels[str(self.level)]
        family = rng.choices(list(level.families), list(level.families.values()))[0]
        if family == "answer" and self.split == "composition":
            family = "single"  # questions have no held-out part
        draft = self._draft(family, level.calls)
        is_changed = rng.random() < level.changed and self.changes
        scene = Scene(rng.randrange(2**32), _known_in(draft.plan), self._offers(draft, is_changed, level.tools))
        try:
            gold = _gold(draft.plan, scene) if draft.right == "call" else ()
        except (LookupError, ValueError):
            return None
        prompt = (Message(role="system", content=SYSTEM), Message(role="user", content=draft.request))
        tags = {
            "split": self.split,
            "family": family,
            "level": str(self.level),
            "signature": "changed" if any(offer.is_changed for offer in scene.offers) else "plain",
            "null": "true" if draft.right == "decline" else "false",
        }
        id_ = f"{self.split}-{self.level}-{number:04d}"
        return Task(id_, prompt, _truth(draft, scene, gold), tags, seed=scene.seed)

    def _draft(self, family: str, num: int) -> _Draft:
        if family == "answer":
            return self._question()
        maker = PlanMaker(self.rng, self.split)
        if family == "missing":
            return self._missing(maker)
        plan = maker.plan(family, (3 if self.level == 5 else 2) if family == "chain" else num)
        request, form = self._say(plan, family)
        return _Draft(plan, request, form, "decline" if family == "decline" else "call")

    def _say(self, plan: Plan, family: str, missing: tuple[int, Param] | None = None) -> tuple[str, str]:
        """Return the request, and the same without values."""
        rng = self.rng
        verbs = [rng.choice(step.function.verbs) for step in plan]
        joints = rng.choice(_JOINTS.get(family, _PARALLEL))
        styles = request_specs().styles
        style = rng.choice(styles[:3] if missing else styles)
        said = []
        for masked in (False, True):
            parts = [
                step.say(verb, without=missing[1].name if missing and missing[0] == i else "", masked=masked)
                for i, (step, verb) in enumerate(zip(plan, verbs, strict=True))
            ]
            text = style.format(parts[0] + "".join(map(str.__add__, joints, parts[1:])))
            said.append(text[0].upper() + text[1:])
        return said[0], said[1]

    def _missing(self, maker: PlanMaker) -> _Draft:
        """Return a request without one value, neither an identifier nor the only required one."""
        while True:
            plan = maker.plan("chain" if self.level >= 4 else "single", 2)
            free = [
                (i, param)
                for i, step in enumerate(plan)
                for param in step.function.required
                if param.name in step.values and not param.of.letter and len(step.function.required) > 1
            ]
            if free:
                missing = self.rng.choice(free)
                request, form = self._say(plan, "chain" if len(plan) > 1 else "single", missing)
                return _Draft(plan, request, form, "ask", missing)

    def _question(self) -> _Draft:
        kinds = vocabulary().kinds
        text, wanted = self.rng.choice(request_specs().questions)
        values = {name: kind.draw(self.rng, self.split) for name, kind in kinds.items() if f"{{{name}}}" in text}
        said = text.format(**{name: kinds[name].say(value) for name, value in values.items()})
        return _Draft((), said, text, "answer", answer=ExpectedAnswers((str(values[wanted]),)))

    def _offers(self, draft: _Draft, is_changed: bool, num: int) -> tuple[Offer, ...]:
        """Return the functions of the plan (none if no call is right) and others, shuffled."""
        rng = self.rng
        needed = {step.function.name: step.function for step in draft.plan}
        chosen = [] if draft.right == "decline" else list(needed.values())
        kind = draft.missing[1].kind if draft.missing else None
        barred = set(needed)
        if draft.right == "decline":
            barred.update(*map(looks_like, needed.values()))
        domains = {function.domain for function in needed.values()}
        near, far = list[Function](), list[Function]()
        for function in functions_for(self.split):
            if function.name not in barred and kind not in function.gives.values():
                (near if function.domain in domains else far).append(function)
        num_others = max(num - len(chosen), 1)
        num_near = min(len(near), num_others // 2 + rng.randrange(2), num_others) if self.level > 1 else 0
        chosen += rng.sample(near, num_near)
        chosen += rng.sample(far, num_others - num_near)
        rng.shuffle(chosen)
        return tuple(self._offer(function, function.name in needed, is_changed) for function in chosen)

    def _offer(self, function: Function, is_gold: bool, is_changed: bool) -> Offer:
        if is_changed and (is_gold or self.rng.random() < 0.5):
            return changed_offer(function, self.rng, self.split)
        return plain_offer(function)


def make_tasks(
    split: str, num: int, levels: Sequence[int], seed: int, taken: Set[str] = frozenset(), changes: bool = True
) -> tuple[Task, ...]:
    """Return `num` tasks of a split that alternate between levels; no request occurs twice or is in `taken`.

    Without `changes` no signature is changed. Raises ConfigError if there are too few different tasks.
    """
    makers = [CallMaker(random.Random(f"{split}/{level}/{seed}"), split, level, changes) for level in levels]
    tasks: list[Task] = []
    seen = set(taken)
    for _ in range(20 * num + 200):
        task = makers[len(tasks) % len(makers)].task(len(tasks))
        if task is not None and request_of(task) not in seen:
            seen.add(request_of(task))
            tasks.append(task)
        if len(tasks) == num:
            return tuple(tasks)
    raise ConfigError(
        f"There are no {num} different tasks of the split {split!r}.", "Decrease env.settings.num_tasks, or add levels."
    )


def request_of(task: Task) -> str:
    """Return the request of the user."""
    return task.prompt[-1]["content"]


def _known_in(plan: Plan) -> tuple[KnownValues, ...]:
    """Return the identifiers that the request names."""
    return tuple(
        KnownValues(param.kind, str(step.values[param.name]))
        for step in plan
        for param in step.function.params
        if param.of.letter and param.name in step.values
    )


def _gold(plan: Plan, scene: Scene) -> tuple[GoldCall, ...]:
    """Return the gold calls in the terms of the offers, from a run of the plan on the initial state."""
    found = []
    for step, arguments in zip(plan, arguments_of(plan, scene.state()), strict=True):
        offer = scene.offer(step.function.name)
        left = {p.name: p.default for p in step.function.params if p.name not in arguments}
        accepted: dict[str, tuple[JSON, ...]] = {
            name: (value,) for name, value in offer.encode({**arguments, **left}).items()
        }
        optional = frozenset(one.name for one in offer.params if one.param.name in left)
        after = tuple(sorted({link.place for link in step.links.values()}))
        found.append(GoldCall(step.function.name, accepted, optional, after))
    return tuple(found)


def _truth(draft: _Draft, scene: Scene, gold: tuple[GoldCall, ...]) -> Truth:
    shape = f"{draft.right}: " + "; ".join(sorted(step.shape for step in draft.plan))
    ask = None
    if draft.missing is not None:
        shape += f" without {draft.missing[0]}.{draft.missing[1].name}"
        ask = _ask(draft, scene, *draft.missing)
    elif draft.answer is not None:
        shape += draft.form
    calls = tuple(call.expected for call in gold)
    return Truth(calls, draft.right, gold, scene, ask, draft.answer, shape, draft.form)


def _ask(draft: _Draft, scene: Scene, place: int, param: Param) -> Ask:
    """Return the required content of a question, and the values that the request has stated."""
    function = draft.plan[place].function
    offered = next(one.name for one in scene.offer(function.name).params if one.param == param)
    given: list[tuple[frozenset[str], str]] = []
    for step in draft.plan:
        for name, words in other_words(step.function, param).items():
            if name in step.values and words:
                value = step.values[name]
                given.append((words, " and ".join(map(str, value if isinstance(value, list) else [value]))))
    return make_ask(function, param, offered, given, draft.request)
