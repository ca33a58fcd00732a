"""Self-play on programs: the policy proposes tasks, which the sandbox validates, and solves them.

After Absolute Zero (arXiv:2505.03335), with the challenger's reward of R-Zero (arXiv:2508.05004) as an option. An
episode has the agents `proposer:KIND/i` and, if proposal i is valid, `solver:KIND/i/j`, all of them the policy, so that
`algorithm.preset = "rae"` has a baseline for each role and kind, and `hierarchical` compares the solvers of a proposal.

As in the papers: rewards, penalties, kinds, 6 references, 8 solvers, 10 inputs, clusters. Choices of this module:

- Values are equal if their texts are equal (`1`, `1.0` and `True` differ).
- A program is deterministic if a second run, with the inputs in the reverse and then in the given order, has the same
  outputs. Imports are forbidden altogether, inputs are different, and outputs have at most `MAX_VALUE` characters.
- The proposer of induction writes the program, too. References are drawn from the seed programs and, if
  `rollout.notes.scope` is `run`, the different valid proposals of the kind in earlier steps: their notes.
- The batch of the repetition penalty is an episode. Solvers are rewarded by execution, not by their majority.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from statistics import fmean
from typing import Final, Literal, NamedTuple, get_args

from pydantic import Field

from ludus.envs.base import Environment, PolicySession, SandboxWorld
from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import Dialogue, assistant, split_of
from ludus.rewards.base import Reward
from ludus.tools.notes import Notes
from ludus.types import Action, Message, StepResult, Task, Trajectory
from ludus.worlds.code.grader import LIMITS, CodeGrader, Grading, read_value
from ludus.worlds.code.guest_runner import encode
from ludus.worlds.proposals.programs import (
    ENTRY,
    MAX_VALUE,
    Kind,
    Malformed,
    Problem,
    cluster_shares,
    draw_problem,
    is_pure,
    proposer_prompt,
    read_literal,
    read_program,
    read_proposal,
    text_of,
)

MALFORMED: Final = -1.0
"""Reward of a reply that does not have the requested form, and under `uncertainty` of every invalid proposal."""
WRONG: Final = -0.5
"""Reward of a well-formed reply that is a wrong answer or an invalid proposal."""
NUM_SEEDS: Final = 60
"""Number of programs that serve as references."""


class ProposalsSettings(WorldSettings):
    """Settings of the proposals world (`env.settings`)."""

    kinds: tuple[Kind, ...] = Field(get_args(Kind), min_length=1)
    """Part that a solver has to find: an input, the output, or the program."""
    reward: Literal["learnability", "uncertainty"] = "learnability"
    """Reward of a valid proposal: 1 minus the share of correct solvers (0 if none is), or min(p, 1 - p) for the share p
    of the most frequent answer minus the share of similar proposals."""
    num_proposals: int = Field(1, ge=1)
    """Number of proposals in an episode. `rollout.max_turns` must be at least (1 + num_solvers) times as large."""
    num_solvers: int = Field(8, ge=1)
    """Number of attempts at each valid proposal."""
    num_inputs: int = Field(10, ge=2)
    """Number of inputs of an induction task; the solver sees half of them."""
    num_references: int = Field(6, ge=0, le=NUM_SEEDS)
    """Number of programs in the prompt of a proposer; with rollout.notes.scope run, also of earlier proposals."""
    num_prompts: int = Field(200, ge=1)
    """Number of prompts for proposers of each kind in `train`."""
    num_programs: int = Field(60, ge=1, le=1000)
    """Number of programs in `validation` and `test`, each a task of every kind for a solver."""
    timeout_s: float = Field(1.0, gt=0, le=60)
    """CPU time limit of a run in seconds."""
    seed: int = 0


def solved(task: Task, trajectory: Trajectory) -> float:
    """Return the share of correct solvers; 0 if there are none."""
    values = [value for name, value in trajectory.agent_rewards.items() if name.startswith("solver")]
    return fmean(value == 1 for value in values) if values else 0.0


def valid(task: Task, trajectory: Trajectory) -> float:
    """Return the share of proposals that have solvers, which are the valid ones; 0 if there are no proposals."""
    names = [name.partition(":")[2] for name in trajectory.agent_rewards if name.startswith("proposer")]
    return fmean(f"solver:{name}/0" in trajectory.agent_rewards for name in names) if names else 0.0


REWARDS = (Reward("solved", solved, outcome=True), Reward("valid", valid, weight=0.0))


class GradedReply(NamedTuple):
    """A solver's reply: its reward, and the answer in a form that is equal for equal answers."""

    reward: float
    answer: str


def challenge(answers: Sequence[str]) -> float:
    """Return R-Zero's min(p, 1 - p), with the share p of the most frequent answer."""
    share = Counter(answers).most_common(1)[0][1] / len(answers)
    return min(share, 1 - share)


class ProposalsEnv(Environment):
    """One episode: proposals and attempts at them, or one attempt at a held-out problem."""

    rewards: Sequence[Reward] = REWARDS

    def __init__(self, world: ProposalsWorld) -> None:
        self._world, self._grader, self._settings = world, world.grader, world.settings

    async def start(self, task: Task) -> list[Message]:
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        return StepResult(done=True)

    async def drive(self, task: Task, policy: PolicySession) -> None:
        """Run the episode; set the reward of each agent."""
        if isinstance(problem := task.truth, Problem):
            name = f"solver:{problem.kind}"
            policy.agent_rewards[name] = (await self._attempts(policy, {name: problem}))[0].reward
            return
        names = [f"{task.tags['kind']}/{number}" for number in range(self._settings.num_proposals)]
        prompt = self.prompt_of(task, policy.notes)
        sampled = await asyncio.gather(*(policy.chat(prompt, agent=f"proposer:{name}") for name in names))
        texts = [message["content"] for message in sampled]
        checked = await asyncio.gather(*(self.validate(task.tags["kind"], text) for text in texts))
        problems = {name: one for name, one in zip(names, checked, strict=True) if isinstance(one, Problem)}
        proposals = [one.proposal for one in problems.values()]
        short = [text for text in proposals if len(text) <= policy.notes.max_chars]
        policy.notes.written |= {_title(task.tags["kind"], text): text for text in short}
        solvers = {
            f"solver:{name}/{number}": problem
            for name, problem in problems.items()
            for number in range(self._settings.num_solvers)
        }
        found = dict(zip(solvers, await self._attempts(policy, solvers), strict=True))
        shares = cluster_shares(texts) if self._settings.reward == "uncertainty" else [0.0] * len(texts)
        rewards = {name: one.reward for name, one in found.items()}
        for name, result, share in zip(names, checked, shares, strict=True):
            own = [one for agent, one in found.items() if agent.startswith(f"solver:{name}/")]
            rewards[f"proposer:{name}"] = self._proposer_reward(result, own, share)
        policy.agent_rewards |= rewards

    def prompt_of(self, task: Task, notes: Notes) -> tuple[Message, ...]:
        """Return a proposer's prompt, with references from the seeds and the proposals of earlier steps, if any."""
        kind = task.tags["kind"]
        past = [text for title, text in notes.earlier.items() if title.startswith(_title(kind))]
        return self._world.asked(kind, random.Random(f"{task.id}/{len(past)}"), past) if past else task.prompt

    def _proposer_reward(self, result: Problem | float, attempts: Sequence[GradedReply], share: float) -> float:
        if self._settings.reward == "uncertainty":
            return (challenge([one.answer for one in attempts]) if isinstance(result, Problem) else MALFORMED) - share
        if not isinstance(result, Problem):
            return result
        accuracy = fmean(one.reward == 1 for one in attempts)
        return 1 - accuracy if accuracy > 0 else 0.0

    async def validate(self, kind: str, text: str) -> Problem | float:
        """Return the problem that a proposer's reply describes, or the reward of an invalid reply."""
        try:
            program, inputs = read_proposal(text, self._settings.num_inputs if kind == "induction" else 1)
        except Malformed:
            return MALFORMED
        if not is_pure(program) or len(set(map(text_of, inputs))) < len(inputs):
            return WRONG
        outputs = await self._outputs(program, inputs)
        if None in outputs or await self._outputs(program, [*inputs[::-1], *inputs]) != [*outputs[::-1], *outputs]:
            return WRONG
        return Problem(kind, program, inputs, tuple(one for one in outputs if one is not None))

    async def _attempts(self, policy: PolicySession, problems: Mapping[str, Problem]) -> list[GradedReply]:
        """Let an agent attempt each of the problems, and grade the replies."""
        chats = (policy.chat(problem.prompt, agent=name) for name, problem in problems.items())
        replies = [message["content"] for message in await asyncio.gather(*chats)]
        return await asyncio.gather(*map(self.grade, problems.values(), replies))

    async def grade(self, problem: Problem, reply: str) -> GradedReply:
        """Grade a solver's reply."""
        try:
            if problem.kind == "induction":
                answer = read_program(reply)
                hidden = problem.inputs[problem.num_shown :]
                right = await self._outputs(answer, hidden) == [*problem.outputs[problem.num_shown :]]
            else:
                value = read_literal(reply)
                answer = text_of(value)
                wanted = problem.kind == "abduction"
                output = (await self._outputs(problem.program, [value]))[0] if wanted else answer
                right = output == problem.outputs[0]
        except Malformed:
            return GradedReply(MALFORMED, reply)
        return GradedReply(1.0 if right else WRONG, answer)

    async def _outputs(self, program: str, inputs: Sequence[object]) -> list[str | None]:
        """Return the output for each input as text; None for a call that fails or has a long output."""
        records = await self._grader.results(program, ENTRY, [[encode(one)] for one in inputs], Grading())
        return [_output(record) for record in records]


def _title(kind: str, text: str = "") -> str:
    """Return the title of the note of a proposal; without a text, its beginning."""
    return f"proposal/{kind}/{blake2b(text.encode(), digest_size=8).hexdigest() if text else ''}"


def _output(record: Mapping[str, object]) -> str | None:
    try:
        text = repr(read_value(record["value"]))
    except (KeyError, ValueError):
        return None
    return text if len(text) <= MAX_VALUE else None


@dataclass(frozen=True)
class ProposalsWorld(SandboxWorld):
    """Prompts for proposers, and held-out problems for solvers."""

    settings: ProposalsSettings
    name: str = "proposals"
    splits: Sequence[str] = ("train", "validation", "test")
    rewards: Sequence[Reward] = REWARDS

    def tasks(self, split: str) -> Sequence[Task]:
        return split_of(self._task_lists, split, self.name)

    def environment(self, task: Task) -> ProposalsEnv:
        return ProposalsEnv(self)

    @property
    def runs_agents(self) -> bool:
        return True

    @property
    def roles(self) -> Sequence[str]:
        return [f"{role}:{kind}" for role in ("proposer", "solver") for kind in self.settings.kinds]

    @cached_property
    def grader(self) -> CodeGrader:
        """The grader, in the given or the default sandbox."""
        seconds = self.settings.timeout_s
        limits = replace(LIMITS, cpu_s=seconds, wall_s=5 * seconds, memory_bytes=LIMITS.memory_bytes // 2)
        return CodeGrader(self.sandbox, limits)

    @cached_property
    def programs(self) -> Mapping[str, Sequence[Problem]]:
        """Different programs of each split, as problems of induction; those of `train` are the references."""
        rng, ends = random.Random("proposals"), [NUM_SEEDS + i * self.settings.num_programs for i in range(3)]
        found: dict[str, Problem] = {}
        while len(found) < ends[-1]:
            one = draw_problem(rng, "induction", self.settings.num_inputs)
            found.setdefault(one.program, one)
        parts = pairwise([0, *ends])
        return {split: [*found.values()][i:j] for split, (i, j) in zip(self.splits, parts, strict=True)}

    @cached_property
    def _task_lists(self) -> Mapping[str, Sequence[Task]]:
        rng, settings = random.Random("references"), self.settings
        lists: dict[str, list[Task]] = {split: [] for split in self.splits}
        for number in range(settings.num_prompts):
            for kind in settings.kinds:
                lists["train"].append(Task(f"train-{kind}-{number}", self.asked(kind, rng), None, {"kind": kind}))
        for split in self.splits[1:]:
            for number, program in enumerate(self.programs[split]):
                for kind in settings.kinds:
                    one = _as_kind(program, kind)
                    lists[split].append(Task(f"{split}-{kind}-{number}", one.prompt, one, {"kind": kind}))
        return lists

    def asked(self, kind: str, rng: random.Random, past: Sequence[str] = ()) -> tuple[Message, ...]:
        """Return the messages for a proposer, with references drawn from the seeds and `past` proposals."""
        pool = [*(_as_kind(one, kind).proposal for one in self.programs["train"]), *past]
        return proposer_prompt(kind, self.settings.num_inputs, rng.sample(pool, self.settings.num_references))

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield proposals and solutions of programs that are not held out."""
        rng = random.Random(f"{self.settings.seed}/{seed}/show")
        held_out = {one.program for split in self.splits[1:] for one in self.programs[split]}
        while True:
            kind = rng.choice(self.settings.kinds)
            one = draw_problem(rng, kind, self.settings.num_inputs if kind == "induction" else 1)
            if one.program in held_out:
                continue
            if rng.random() < 0.1:
                yield Dialogue((*self.asked(kind, rng), assistant(one.proposal)), ())
            else:
                yield Dialogue((*one.prompt, assistant(one.answer)), ())


def _as_kind(program: Problem, kind: str) -> Problem:
    """Return a problem of induction as one of another kind."""
    num = len(program.inputs) if kind == "induction" else 1
    return replace(program, kind=kind, inputs=program.inputs[:num], outputs=program.outputs[:num])


def make_proposals_world(settings: Mapping[str, object], limits: ToolLimits) -> ProposalsWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    return ProposalsWorld(read_settings(ProposalsSettings, settings))
