"""Generation of tasks: a plan, its request, the offered functions and the truth."""

from __future__ import annotations

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

from ludus.errors import ConfigError
from ludus.rewards.exact_match import ExpectedAnswers
from ludus.types import Message, Task
from ludus.worlds.functions.catalogue import Function, Param, Scene, change_signature
from ludus.worlds.functions.gold_calls import GoldCall, Right, Truth
from ludus.worlds.functions.plans import Plan, PlanSampler, functions_for, request_specs
from ludus.worlds.functions.replies import Ask
from ludus.worlds.functions.state import Row, vocabulary

SYSTEM: Final = "Do what is asked with the tools. Ask back where something is missing; call nothing where no tool fits."
SPLITS: Final = ("train", "validation", "test", "composition")


def looks_like(function: Function) -> frozenset[str]:
    """Return the names of the function and its lookalikes."""
    return frozenset({function.name}).union(*(own for own in request_specs().lookalikes if function.name in own))


@dataclass(frozen=True, slots=True)
class _Draft:
    """A task before its tools are chosen: requests with and without values, and the right response.

    `missing` is the parameter that the request omits, and the index of its step.
    """

    plan: Plan
    request: str
    form: str
    right: Right
    missing: tuple[int, Param] | None = None
    answer: ExpectedAnswers | None = None

    def truth(self, scene: Scene) -> Truth:
        """Return the truth. Raises LookupError or ValueError if a gold call fails."""
        gold = self._gold(scene) if self.right == "call" else ()
        shape = f"{self.right}: " + "; ".join(sorted(step.shape for step in self.plan))
        ask = None
        if self.missing is not None:
            place, param = self.missing
            shape += f" without {place}.{param.name}"
            function = scene.function(self.plan[place].function.name)
            (offered,) = (one.offered for one in function.params if one.name == param.name)
            stated = [(one, step.values.get(one.name)) for step in self.plan for one in step.function.required]
            values = tuple((one, value) for one, value in stated if value is not None)
            ask = Ask(function.name, param, offered, self.request, values)
        elif self.answer is not None:
            shape += self.form
        calls = tuple(call.expected for call in gold)
        return Truth(calls, self.right, gold, scene, ask, self.answer, shape, self.form)

    def _gold(self, scene: Scene) -> tuple[GoldCall, ...]:
        """Run the plan on the initial state, and return its calls with the signatures of the task."""
        state, results, found = scene.state(), list[Row](), list[GoldCall]()
        for step in self.plan:
            given = {**step.values, **{name: results[place][key] for name, (place, key) in step.links.items()}}
            left = {param.name: param.default for param in step.function.params if param.name not in given}
            results.append(step.function.run(state, **given, **left))
            function = scene.function(step.function.name)
            accepted = {name: (value,) for name, value in function.encode({**given, **left}).items()}
            optional = frozenset(param.offered for param in function.params if param.name in left)
            after = tuple(sorted({place for place, _ in step.links.values()}))
            found.append(GoldCall(function.name, accepted, optional, after))
        return tuple(found)


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
            truth = draft.truth(scene)
        except (LookupError, ValueError):
            return None
        prompt = (Message(role="system", content=SYSTEM), Message(role="user", content=draft.request))
        tags = {
            "split": self.split,
            "family": family,
            "level": str(self.level),
            "signature": "changed" if any(function.is_changed for function in scene.functions) else "plain",
            "null": "true" if draft.right == "decline" else "false",
        }
        return Task(f"{self.split}-{self.level}-{number:04d}", prompt, truth, tags, seed=scene.seed)

    def _draft(self, family: str, num: int) -> _Draft:
        if family == "answer":
            return self._question()
        maker = PlanSampler(self.rng, self.split)
        if family == "missing":
            return self._missing(maker)
        plan = maker.plan(family, (3 if self.level == 5 else 2) if family == "chain" else num)
        return _Draft(plan, *self._render(plan, family), "decline" if family == "decline" else "call")

    def _render(self, plan: Plan, family: str, missing: tuple[int, Param] | None = None) -> tuple[str, str]:
        """Return the request, and the same without values."""
        rng, specs = self.rng, request_specs()
        verbs = [rng.choice(step.function.verbs) for step in plan]
        joints = rng.choice(specs.joints.get(family, specs.joints["parallel"]))
        style = rng.choice(specs.styles[:3] if missing else specs.styles)
        texts = []
        for masked in (False, True):
            parts = [
                step.say(verb, without=missing[1].name if missing and missing[0] == i else "", masked=masked)
                for i, (step, verb) in enumerate(zip(plan, verbs, strict=True))
            ]
            text = style.format(parts[0] + "".join(map(str.__add__, joints, parts[1:])))
            texts.append(text[0].upper() + text[1:])
        return texts[0], texts[1]

    def _missing(self, maker: PlanSampler) -> _Draft:
        """Return a request without one value, neither an identifier nor the only required one."""
        family = "chain" if self.level >= 4 else "single"
        while True:
            plan = maker.plan(family, 2)
            free = [
                (i, param)
                for i, step in enumerate(plan)
                for param in step.function.required
                if param.name in step.values and not param.of.letter and len(step.function.required) > 1
            ]
            if free:
                missing = self.rng.choice(free)
                return _Draft(plan, *self._render(plan, family, missing), "ask", missing)

    def _question(self) -> _Draft:
        kinds = vocabulary().kinds
        text, wanted = self.rng.choice(request_specs().questions)
        values = {name: kind.draw(self.rng, self.split) for name, kind in kinds.items() if f"{{{name}}}" in text}
        request = text.format(**{name: kinds[name].say(value) for name, value in values.items()})
        return _Draft((), request, text, "answer", answer=ExpectedAnswers((str(values[wanted]),)))

    def _offered(self, draft: _Draft, is_changed: bool, num: int) -> tuple[Function, ...]:
        """Return the functions of the plan (none if no call is right) and others, shuffled."""
        rng = self.rng
        needed = {step.function.name: step.function for step in draft.plan}
        declines = draft.right == "decline"
        chosen = [] if declines else list(needed.values())
        excluded = set(needed).union(*map(looks_like, needed.values() if declines else ()))
        kind = draft.missing[1].kind if draft.missing else None
        domains = {function.domain for function in needed.values()}
        near, far = list[Function](), list[Function]()
        for function in functions_for(self.split):
            if function.name not in excluded and kind not in function.returns.values():
                (near if function.domain in domains else far).append(function)
        num_others = max(num - len(chosen), 1)
        num_near = min(len(near), num_others // 2 + rng.randrange(2), num_others) if self.level > 1 else 0
        chosen += rng.sample(near, num_near)
        chosen += rng.sample(far, num_others - num_near)
        rng.shuffle(chosen)
        return tuple(
            change_signature(function, rng, self.split)
            if is_changed and (function.name in needed or rng.random() < 0.5)
            else function
            for function in chosen
        )


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
