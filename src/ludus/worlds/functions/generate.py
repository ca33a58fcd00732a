"""Generation of tasks: a plan, its request, the offered functions and the truth."""

from __future__ import annotations

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from ludus.errors import ConfigError
from ludus.rewards.exact_match import ExpectedAnswers
from ludus.types import Message, Task
from ludus.worlds.functions.catalogue import Function, Param, Scene, catalogue, change_signature
from ludus.worlds.functions.gold_calls import GoldCall, Right, Truth
from ludus.worlds.functions.plans import Plan, PlanSampler, functions_for, request_specs
from ludus.worlds.functions.replies import Ask
from ludus.worlds.functions.state import DomainState, Row, vocabulary

SYSTEM: Final = "Do what is asked with the tools. Ask back where something is missing; call nothing where no tool fits."
SPLITS: Final = ("train", "validation", "test", "composition")


def looks_like(function: Function) -> frozenset[str]:
    """Return the names of the function and its lookalikes."""
    return frozenset({function.name}).union(*(own for own in request_specs().lookalikes if function.name in own))


class _Draft(NamedTuple):
    """A task before its tools are chosen."""

    plan: Plan
    request: str
    right: Right
    ask: Ask | None = None
    answer: ExpectedAnswers | None = None


@dataclass(frozen=True, slots=True)
class TaskSampler:
    """Generates the tasks of one split at one level from `rng`; signatures are changed only with `changes`."""

    rng: random.Random
    split: str
    level: int
    changes: bool = True

    def task(self, number: int) -> Task | None:
        """Return a task, or None if a function of the plan fails."""
        rng, level = self.rng, request_specs().levels[str(self.level)]
        family = rng.choices(list(level.families), list(level.families.values()))[0]
        if family == "answer" and self.split == "composition":
            family = "single"  # questions have no held-out functions
        draft = self._draft(family, level.calls)
        is_changed = rng.random() < level.changed and self.changes
        known = tuple(
            (param.kind, str(step.values[param.name]))
            for step in draft.plan
            for param in step.function.params
            if param.of.letter and param.name in step.values
        )
        scene = Scene(rng.randrange(2**32), known, self._offered(draft, is_changed, level.tools))
        try:
            gold = _gold_calls(draft.plan, scene) if draft.right == "call" else ()
        except (LookupError, ValueError):
            return None
        calls = tuple(call.expected for call in gold)
        truth = Truth(calls, draft.right, gold, scene, draft.ask, draft.answer, draft.plan)
        prompt = (Message(role="system", content=SYSTEM), Message(role="user", content=draft.request))
        tags = {
            "split": self.split,
            "family": family,
            "level": str(self.level),
            "signature": "plain" if all(one == catalogue()[one.name] for one in scene.functions) else "changed",
            "null": "true" if draft.right == "decline" else "false",
        }
        return Task(f"{self.split}-{self.level}-{number:04d}", prompt, truth, tags, seed=scene.seed)

    def _draft(self, family: str, num: int) -> _Draft:
        if family == "answer":
            return self._question()
        if family == "missing":
            return self._missing("chain" if self.level >= 4 else "single")
        num_calls = (3 if self.level == 5 else 2) if family == "chain" else num
        plan = PlanSampler(self.rng, self.split).plan(family, num_calls)
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
            plan = PlanSampler(self.rng, self.split).plan(family, 2)
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
        stated = tuple((one, step.values[one.name]) for one, step in named)
        return _Draft(plan, request, "ask", Ask(plan[place].function.name, missing, request, stated))

    def _question(self) -> _Draft:
        kinds = vocabulary().kinds
        text, wanted = self.rng.choice(request_specs().questions)
        values = {name: kind.draw(self.rng, self.split) for name, kind in kinds.items() if f"{{{name}}}" in text}
        request = text.format(**{name: kinds[name].in_words(value) for name, value in values.items()})
        return _Draft((), request, "answer", answer=ExpectedAnswers((str(values[wanted]),)))

    def _offered(self, draft: _Draft, is_changed: bool, num: int) -> tuple[Function, ...]:
        """Return the functions of the plan (none if no call is right) and others, shuffled."""
        rng = self.rng
        needed = {step.function.name: step.function for step in draft.plan}
        declines = draft.right == "decline"
        chosen = [] if declines else list(needed.values())
        excluded = set(needed).union(*map(looks_like, needed.values() if declines else ()))
        kind = draft.ask.param.kind if draft.ask else None
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


def _gold_calls(plan: Plan, scene: Scene) -> tuple[GoldCall, ...]:
    """Run the plan on the initial state, and return its calls with the signatures of the task.

    Raises LookupError or ValueError if a call fails.
    """
    state, results, found = DomainState(scene.seed, scene.known), list[Row](), list[GoldCall]()
    for step in plan:
        given = {**step.values, **{name: results[place][key] for name, (place, key) in step.links.items()}}
        left = {param.name: param.default for param in step.function.params if param.name not in given}
        results.append(step.function.run(state, **given, **left))
        function = scene.function(step.function.name)
        accepted = {name: (value,) for name, value in function.encode({**given, **left}).items()}
        optional = frozenset(param.offered for param in function.params if param.name in left)
        after = tuple(sorted({place for place, _ in step.links.values()}))
        found.append(GoldCall(function.name, accepted, optional, after))
    return tuple(found)


def make_tasks(
    split: str, num: int, levels: Sequence[int], seed: int, taken: Set[str] = frozenset(), changes: bool = True
) -> tuple[Task, ...]:
    """Return `num` tasks of a split that alternate between levels; no request occurs twice or is in `taken`.

    Without `changes` no signature is changed. Raises ConfigError if there are too few different tasks.
    """
    makers = [TaskSampler(random.Random(f"{split}/{level}/{seed}"), split, level, changes) for level in levels]
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
