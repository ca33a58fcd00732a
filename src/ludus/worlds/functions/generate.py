"""Tasks by generators: a plan, its request in words, the functions on offer, and the truth."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from ludus.errors import ConfigError
from ludus.rewards.exact_match import ExpectedAnswers
from ludus.types import JSON, Message, Task
from ludus.worlds.functions.domains.catalogue import Function, Param
from ludus.worlds.functions.domains.kinds import KINDS
from ludus.worlds.functions.domains.names import other_words
from ludus.worlds.functions.domains.state import DomainState
from ludus.worlds.functions.gold_calls import GoldCall, Right, Truth
from ludus.worlds.functions.plans import (
    Plan,
    arguments_of,
    chain,
    fan,
    functions_for,
    known_in,
    looks_like,
    mixed,
    parallel,
    several,
    single,
)
from ludus.worlds.functions.replies import Ask, make_ask
from ludus.worlds.functions.tool_distractors import Offer, Scene, changed_offer, plain_offer

SYSTEM = "Do what is asked with the tools. Ask back where something is missing; call nothing where no tool fits."
SPLITS = ("train", "validation", "test", "composition")

FAMILIES: Mapping[int, Mapping[str, float]] = {
    1: {"single": 0.76, "decline": 0.12, "answer": 0.12},
    2: {"single": 0.60, "missing": 0.30, "decline": 0.10},
    3: {"several": 0.45, "parallel": 0.40, "missing": 0.15},
    4: {"chain": 0.60, "several": 0.15, "parallel": 0.10, "missing": 0.15},
    5: {"chain": 0.40, "fan": 0.25, "mixed": 0.35},
}
"""Shares of the families at each level."""
NUM_CALLS = {1: 1, 2: 1, 3: 2, 4: 3, 5: 3}
"""Calls of `several` and `parallel`."""
NUM_TOOLS = {1: 2, 2: 3, 3: 4, 4: 4, 5: 5}
"""Functions on offer, at least."""
CHANGED = {1: 0.0, 2: 0.5, 3: 0.35, 4: 0.35, 5: 0.6}
"""Share of the tasks that offer changed signatures."""

_STYLES = ("{}.", "Please {}.", "I need you to {}.", "Could you {}?")
_JOINTS = {"chain": (", then ",), "fan": (", and ",), "mixed": (", then ",)}
_QUESTIONS = (
    ("My {title} is on {date} at {time}. On which day is it? Answer with the day only.", "date"),
    ("My {title} is on {date} at {time}. At what time is it? Answer with the time only.", "time"),
    ("{person} lives in {city} and I live elsewhere. Where does {person} live? Answer with the city only.", "city"),
    ("I owe {person} {amount}. To whom do I owe money? Answer with the name only.", "person"),
    ("I have {booking} for {city}. Which city is it for? Answer with the city only.", "city"),
    ("The note in the {room} says {text}. Where is the note? Answer with the room only.", "room"),
    ("I saved {file} on {date}. What is the file called? Answer with its name only.", "file"),
)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A task before its tools are chosen: requests with and without values, and what is right."""

    plan: Plan
    request: str
    form: str
    right: Right
    asked: tuple[int, Param] | None = None
    answer: ExpectedAnswers | None = None


@dataclass(frozen=True, slots=True)
class CallMaker:
    """Makes the tasks of one split at one level. Everything follows from `rng`.

    Without `changes` every signature is the catalogue's.
    """

    rng: random.Random
    split: str
    level: int
    changes: bool = True

    def task(self, number: int) -> Task | None:
        """A task, or None where this draw gave none (a function refused)."""
        rng, shares = self.rng, FAMILIES[self.level]
        family = rng.choices(list(shares), list(shares.values()))[0]
        if family == "answer" and self.split == "composition":
            family = "single"  # there is nothing new to hold out
        draft = self._draft(family)
        is_changed = rng.random() < CHANGED[self.level] and self.changes
        scene = Scene(rng.randrange(2**32), known_in(draft.plan), self._offers(draft, is_changed))
        try:
            gold = _gold(draft.plan, scene) if draft.right == "call" else ()
        except (LookupError, ValueError):
            return None
        truth = self._truth(draft, scene, gold)
        prompt = (Message(role="system", content=SYSTEM), Message(role="user", content=draft.request))
        tags = {
            "split": self.split,
            "family": family,
            "level": str(self.level),
            "signature": "changed" if any(offer.is_changed for offer in scene.offers) else "plain",
            "null": "true" if draft.right == "decline" else "false",
        }
        return Task(f"{self.split}-{self.level}-{number:04d}", prompt, truth, tags, seed=scene.seed)

    def _draft(self, family: str) -> _Draft:
        rng, split = self.rng, self.split
        if family == "answer":
            return self._question()
        if family == "missing":
            return self._missing()
        num = NUM_CALLS[self.level]
        plans: Mapping[str, Callable[[], Plan]] = {
            "single": lambda: single(rng, split),
            "decline": lambda: single(rng, split),
            "several": lambda: several(rng, split, num),
            "parallel": lambda: parallel(rng, split, num),
            "chain": lambda: chain(rng, split, 3 if self.level == 5 else 2),
            "fan": lambda: fan(rng, split),
            "mixed": lambda: mixed(rng, split),
        }
        plan = plans[family]()
        request, form = self._say(plan, family)
        return _Draft(plan, request, form, "decline" if family == "decline" else "call")

    def _say(self, plan: Plan, family: str, asked: tuple[int, Param] | None = None) -> tuple[str, str]:
        """The request, and the same without values."""
        rng = self.rng
        verbs = [rng.choice(step.function.verbs) for step in plan]
        joint = rng.choice(_JOINTS.get(family, (" and ", "; also ")))
        style = rng.choice(_STYLES[:3] if asked else _STYLES)
        said = []
        for masked in (False, True):
            parts = [
                step.say(verb, without=asked[1].name if asked and asked[0] == i else "", masked=masked)
                for i, (step, verb) in enumerate(zip(plan, verbs, strict=True))
            ]
            text = style.format(_joined(parts, joint, family))
            said.append(text[0].upper() + text[1:])
        return said[0], said[1]

    def _missing(self) -> _Draft:
        """A request that leaves out something that is no identifier, and not all that there is to say."""
        rng = self.rng
        while True:
            plan = chain(rng, self.split, 2) if self.level >= 4 else single(rng, self.split)
            free = [
                (i, param)
                for i, step in enumerate(plan)
                for param in step.function.required
                if param.name in step.values and not param.of.letter and len(step.function.required) > 1
            ]
            if free:
                asked = rng.choice(free)
                request, form = self._say(plan, "chain" if len(plan) > 1 else "single", asked)
                return _Draft(plan, request, form, "ask", asked)

    def _question(self) -> _Draft:
        text, wanted = self.rng.choice(_QUESTIONS)
        values = {name: kind.draw(self.rng, self.split) for name, kind in KINDS.items() if f"{{{name}}}" in text}
        said = text.format(**{name: KINDS[name].say(value) for name, value in values.items()})
        return _Draft((), said, text, "answer", answer=ExpectedAnswers((str(values[wanted]),)))

    def _offers(self, draft: _Draft, is_changed: bool) -> tuple[Offer, ...]:
        """The functions of the plan (none of them where nothing is to be done) and others, shuffled."""
        rng = self.rng
        asked = {step.function.name: step.function for step in draft.plan}
        chosen = [] if draft.right == "decline" else list(asked.values())
        kinds = {draft.asked[1].kind} if draft.asked else set[str]()
        barred = set(asked)
        if draft.right == "decline":
            barred.update(*map(looks_like, asked.values()))
        others = [
            function
            for function in functions_for(self.split)
            if function.name not in barred and not any(gift.kind in kinds for gift in function.gives)
        ]
        domains = {function.domain for function in asked.values()}
        near = [function for function in others if function.domain in domains]
        num_others = max(NUM_TOOLS[self.level] - len(chosen), 1)
        num_near = min(len(near), num_others // 2 + rng.randrange(2), num_others) if self.level > 1 else 0
        extra = rng.sample(near, num_near)
        far = [function for function in others if function.domain not in domains]
        chosen += extra + rng.sample(far, num_others - num_near)
        rng.shuffle(chosen)
        return tuple(self._offer(function, function.name in asked, is_changed) for function in chosen)

    def _offer(self, function: Function, is_gold: bool, is_changed: bool) -> Offer:
        if is_changed and (is_gold or self.rng.random() < 0.5):
            return changed_offer(function, self.rng, self.split)
        return plain_offer(function)

    def _truth(self, draft: _Draft, scene: Scene, gold: tuple[GoldCall, ...]) -> Truth:
        shape = f"{draft.right}: " + "; ".join(sorted(step.shape for step in draft.plan))
        ask = None
        if draft.asked is not None:
            place, param = draft.asked
            shape += f" without {place}.{param.name}"
            ask = _ask(draft, scene)
        elif draft.answer is not None:
            shape += draft.form
        return Truth(
            calls=tuple(call.expected for call in gold),
            right=draft.right,
            gold=gold,
            scene=scene,
            ask=ask,
            answer=draft.answer,
            shape=shape,
            form=draft.form,
        )


def make_tasks(
    split: str, num: int, levels: Sequence[int], seed: int, taken: Set[str] = frozenset(), changes: bool = True
) -> tuple[Task, ...]:
    """`num` tasks of a split, its levels in turn; no request occurs twice or is taken.

    Without `changes` none offers a changed signature.

    Raises ConfigError where there are not that many.
    """
    makers = [CallMaker(random.Random(f"{split}/{level}/{seed}"), split, level, changes) for level in levels]
    tasks: list[Task] = []
    seen = set(taken)
    attempts = 0
    while len(tasks) < num:
        attempts += 1
        if attempts > 20 * num + 200:
            raise ConfigError(
                f"There are no {num} different tasks of the split {split!r}.",
                "Ask for fewer (env.settings.num_tasks), or for more levels.",
            )
        task = makers[len(tasks) % len(makers)].task(len(tasks))
        if task is not None and request_of(task) not in seen:
            seen.add(request_of(task))
            tasks.append(task)
    return tuple(tasks)


def request_of(task: Task) -> str:
    """What the user asks."""
    return task.prompt[-1]["content"]


def _joined(parts: Sequence[str], joint: str, family: str) -> str:
    if family == "fan":
        return f"{parts[0]} and {parts[1]}, then {parts[2]}"
    if family == "mixed":
        return f"{parts[0]}, then {parts[1]}; besides, {parts[2]}"
    return joint.join(parts)


def _gold(plan: Plan, scene: Scene) -> tuple[GoldCall, ...]:
    """The gold calls in the terms of the offers, from running the plan on a fresh state."""
    found = []
    for step, arguments in zip(plan, arguments_of(plan, DomainState(scene.seed, scene.known)), strict=True):
        offer = scene.offer(step.function.name)
        left = {p.name: p.default for p in step.function.params if p.name not in arguments}
        accepted: dict[str, tuple[JSON, ...]] = {
            name: (value,) for name, value in offer.encode({**arguments, **left}).items()
        }
        optional = frozenset(one.name for one in offer.params if one.param.name in left)
        after = tuple(sorted({link.place for link in step.links.values()}))
        found.append(GoldCall(step.function.name, accepted, optional, after))
    return tuple(found)


def _ask(draft: _Draft, scene: Scene) -> Ask:
    """What a question must name, and what the request said already."""
    assert draft.asked is not None
    place, param = draft.asked
    offer = scene.offer(draft.plan[place].function.name)
    offered = next(one.name for one in offer.params if one.param == param)
    given = []
    for step in draft.plan:
        for name, words in other_words(step.function, param).items():
            if name in step.values and words:
                value = step.values[name]
                said = map(str, value) if isinstance(value, list) else [str(value)]
                given.append((words, " and ".join(said)))
    return make_ask(draft.plan[place].function, param, offered, given, draft.request)
