"""The proofs world: prove a statement from hypotheses, step by step or as a whole with the checker's critique.

At the end of a proof, a verifier of Metamath that shares no code with the prover checks all of it again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from pydantic import Field

from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.simulator_world import Observation, Simulator, SimulatorWorld, make_task
from ludus.envs.tool_env import ToolLimits
from ludus.types import Task
from ludus.worlds.proofs.metamath import ProofError
from ludus.worlds.proofs.prover import VARIABLES, Formula, InferenceRule, Proof, logic, match, replaced, subformulas

Level = Literal[1, 2, 3, 4]
_SHARES: Final = {"train": 0.7, "validation": 0.1, "test": 0.2}
_MAX_HYPOTHESES: Final = 4
_MAX_LENGTH: Final = 15
"""Maximum number of symbols of a hypothesis or goal."""
_MAX_STEPS: Final = 100
_UNDO: Final = "undo"


class ProofsSettings(WorldSettings):
    """Settings of the proofs world (`env.settings`)."""

    levels: tuple[Level, ...] = Field((1, 2), min_length=1)
    """Depths of the shortest known proofs in all splits but `composition`, whose depth is one more than the largest."""
    mode: Literal["steps", "whole"] = "steps"
    """An action is a step, with the open goals in the reply, or all steps, one a line, with the first error in it."""
    attempts: int = Field(4, ge=1)
    """Number of proofs in an episode of the mode `whole`."""
    show_rules: bool = False
    """Whether the system message has the rules with their hypotheses; otherwise only their names."""
    num_tasks: int = Field(1200, ge=10)
    """Number of tasks of each level."""
    flaw: float = Field(0.15, ge=0, le=1)
    """Fraction of random steps in demonstrations, which the expert takes back with `undo`."""
    seed: int = 0


class Statement(NamedTuple):
    """A provable statement: hypotheses by label, the goal, and the step of a known proof for each goal within."""

    hypotheses: Mapping[str, Formula]
    goal: Formula
    plan: Mapping[Formula, str]


class StepProver(Simulator):
    """An episode of the mode `steps`: a rule with the formulas that the goal does not determine, or `undo`."""

    def __init__(self, statement: Statement) -> None:
        self._plan, self.proof = statement.plan, Proof(logic().rules, statement.hypotheses, statement.goal)

    def reset(self) -> str:
        given = "".join(f"{label} {' '.join(formula)}\n" for label, formula in self.proof.hypotheses.items())
        return f"{given}{self._goals()}"

    def _goals(self) -> str:
        return "\n".join(f"goal {' '.join(goal)}" for goal in self.proof.goals)

    def step(self, action: str) -> Observation:
        if action == _UNDO:
            self.proof.undo()
            return Observation(self._goals())
        try:
            self.proof.apply(action)
        except ProofError as error:
            return Observation(f"Error: {error}.\n{self._goals()}", valid=False)
        if len(self.proof.steps) >= _MAX_STEPS or max(map(len, self.proof.goals), default=0) > 10 * _MAX_LENGTH:
            self.proof.undo()
            return Observation(f"Error: the proof becomes too long.\n{self._goals()}", valid=False)
        if not self.proof.goals:
            logic().database.verify(self.proof.assertion())
            self.success = 1.0
        return Observation(self._goals(), self.success, bool(self.success))

    def actions(self) -> Sequence[str]:
        """Return the steps that the first goal permits, with subformulas of the statement for further variables."""
        if not self.proof.goals:
            return ()
        goal, values = self.proof.goals[0], dict[str, None]()
        for formula in (*self.proof.hypotheses.values(), self.proof.goal):
            values |= dict.fromkeys(" ".join(one) for one in subformulas(formula))
        found = [label for label, formula in self.proof.hypotheses.items() if formula == goal]
        for rule in self.proof.rules.values():
            if match(rule.statement, goal, {}):
                found += [f"{rule.label} {value}" for value in values] if rule.extra else [rule.label]
        return found

    def expert_action(self) -> str:
        return self._plan.get(self.proof.goals[0], _UNDO)

    def state_key(self) -> str:
        return self._goals()


class WholeProver(Simulator):
    """An episode of the mode `whole`: the reply to a proof is the first wrong line and the goals before it."""

    def __init__(self, statement: Statement, attempts: int) -> None:
        self._statement, self._left, self._best = statement, attempts, 0.0

    def reset(self) -> str:
        return StepProver(self._statement).reset()

    def step(self, action: str) -> Observation:
        self._left -= 1
        prover, lines, text = StepProver(self._statement), action.strip().split("\n"), ""
        for number, line in enumerate(lines[:_MAX_STEPS]):
            seen = prover.step(line.strip())
            if not seen.valid or seen.done:
                text = f"Line {number + 1}: {seen.text}"
                break
        self.success = prover.success
        text = text or f"The proof is not complete.\n{seen.text}"
        return Observation(text, self.success, bool(self.success) or self._left == 0, bool(self.success))

    def expert_action(self) -> str:
        prover, lines = StepProver(self._statement), list[str]()
        while not prover.success:
            lines.append(prover.expert_action())
            prover.step(lines[-1])
        return "\n".join(lines)


def draw_statement(rng: random.Random, depth: int) -> Statement | None:
    """Return a random statement whose known proof has a depth; None if the draw fails."""
    hypotheses: dict[Formula, str] = {}
    plan: dict[Formula, str] = {}
    goal = _formula(rng, 2)
    if not _prove(rng, goal, depth, hypotheses, plan) or any(len(one) > _MAX_LENGTH for one in (*plan, goal)):
        return None
    names = {label: formula for formula, label in hypotheses.items()}
    return Statement(names, goal, plan) if len(names) <= _MAX_HYPOTHESES and plan[goal] not in names else None


def _formula(rng: random.Random, depth: int) -> Formula:
    kind = rng.choice(("", "", "->", "~", "&")) if depth else ""
    if not kind:
        return (rng.choice(VARIABLES[:4]),)
    if kind == "~":
        return ("~", *_formula(rng, depth - 1))
    return ("(", *_formula(rng, depth - 1), kind, *_formula(rng, depth - 1), ")")


def _prove(
    rng: random.Random, goal: Formula, depth: int, hypotheses: dict[Formula, str], plan: dict[Formula, str]
) -> bool:
    """Fill the plan with a random proof of the goal from new hypotheses; False if the goal is within its own proof."""
    if goal in plan:
        return plan[goal] != ""
    plan[goal] = ""
    rules = [rule for rule in logic().rules.values() if match(rule.statement, goal, {})]
    if depth == 0 or not rules:
        plan[goal] = hypotheses.setdefault(goal, f"h{len(hypotheses) + 1}")
        return True
    rule = rng.choice(rules)
    found: dict[str, Formula] = {}
    match(rule.statement, goal, found)
    found |= {name: _formula(rng, 1) for name in rule.extra}
    step = " ".join((rule.label, *(symbol for name in rule.extra for symbol in found[name])))
    deepest = rng.randrange(max(1, len(rule.hypotheses)))
    for number, one in enumerate(rule.hypotheses):
        below = depth - 1 if number == deepest else rng.randrange(depth)
        if not _prove(rng, replaced(one, found), below, hypotheses, plan):
            return False
    plan[goal] = step
    return True


def _system(settings: ProofsSettings) -> str:
    rules = logic().rules.values()
    how = "one step" if settings.mode == "steps" else "all steps, one a line"
    named = "; ".join(map(_described, rules)) if settings.show_rules else " ".join(rule.label for rule in rules)
    return f"Prove the goal. Reply with {how}: h1, a rule with the missing formula, or undo. Rules: {named}"


def _described(rule: InferenceRule) -> str:
    given = ", ".join(" ".join(one) for one in rule.hypotheses)
    return f"{rule.label}: {given} |- {' '.join(rule.statement)}"


def make_proofs_world(settings: Mapping[str, object], limits: ToolLimits) -> SimulatorWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    chosen = read_settings(ProofsSettings, settings)
    statements: dict[str, Statement] = {}

    def simulator(task: Task) -> Simulator:
        return _simulator(statements[task.id], chosen)

    lists: dict[str, list[Task]] = {split: [] for split in (*_SHARES, "composition")}
    rng, system, seen = random.Random(f"proofs:{chosen.seed}"), _system(chosen), set[str]()
    for depth in (*sorted(set(chosen.levels)), max(chosen.levels) + 1):
        is_new = depth > max(chosen.levels)
        wanted = len(seen) + (chosen.num_tasks // 5 if is_new else chosen.num_tasks)
        while len(seen) < wanted:
            statement = draw_statement(rng, depth)
            key = "" if statement is None else _renamed(StepProver(statement).reset())
            if statement is None or key in seen:
                continue
            seen.add(key)
            split = "composition" if is_new else rng.choices(list(_SHARES), list(_SHARES.values()))[0]
            name = f"{split}-{depth}-{len(lists[split])}"
            statements[name] = statement
            tags = {"split": split, "family": f"depth {depth}"}
            lists[split].append(make_task(_simulator(statement, chosen), name, system, tags))
    for tasks in lists.values():
        rng.shuffle(tasks)
    flaw = chosen.flaw if chosen.mode == "steps" else 0.0
    return SimulatorWorld("proofs", lists, simulator, flaw=flaw, flaws_train=False)


def _simulator(statement: Statement, settings: ProofsSettings) -> Simulator:
    return StepProver(statement) if settings.mode == "steps" else WholeProver(statement, settings.attempts)


def _renamed(text: str) -> str:
    """Return a statement with its variables renamed in the order of their occurrence, to find equal ones."""
    names: dict[str, str] = {}
    return " ".join(
        names.setdefault(one, f"v{len(names)}") if one in VARIABLES and len(one) == 1 else one for one in text.split()
    )
