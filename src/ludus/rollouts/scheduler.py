"""Schedule many episodes concurrently, and build schedulers from settings.

Infrastructure failures, and only those, are retried in a fresh environment with the same seed; an episode with a
permanent one has the stop reason `failed`. Raises the first `WorldError` or `EngineError` once more episodes have
failed than `max_failure_rate` allows; then, and on cancellation, all running episodes are closed first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from ludus.chat.render import Renderer
from ludus.config.sections.rollout import BranchConfig, NotesConfig, RolloutConfig
from ludus.engines.base import ContinuesActions, Engine, HasRoleAdapters, Request, seed_for
from ludus.envs.base import Environment, HintedEnv, World
from ludus.envs.tool_env import ExtraToolsEnv, ToolLimits
from ludus.errors import ConfigError, EngineError, WorldError
from ludus.rewards.base import check_scored_elsewhere
from ludus.rollouts.agent_runs import AgentRunner, AgentServer, ExternalAgent, Opponents
from ludus.rollouts.dialogues.context import ManagedChatSession
from ludus.rollouts.dialogues.exploring import ExploringChatSession, FirstTurns, MemberSampling, with_prompt
from ludus.rollouts.dialogues.subagents import SubAgents
from ludus.rollouts.episode import (
    ChatSession,
    EngineChatSession,
    RestoreError,
    fresh_environment,
    is_being_cancelled,
    run_unscored,
)
from ludus.rollouts.ledger import Ledger, RolloutKey, RolloutOutcome
from ludus.rollouts.reward_executor import RewardExecutor, ThreadRewardExecutor, add_seconds
from ludus.rollouts.trees import RunPath, run_tree
from ludus.tools.notes import Notes, notes_tools
from ludus.types import Completion, Failure, SamplingParams, Segment, StopReason, Task, ToolStatus, Trajectory

_Entry = tuple[Request, "asyncio.Future[Completion]"]
"""Request of an episode and the future that it waits on."""


@dataclass
class LockstepEngine:
    """`ActionEngine` that batches the requests of all joined episodes, so that batches do not depend on timing.

    Collects requests until every joined episode is waiting or has left, then sends the round as one batch,
    ordered by episode; errors of the engine reach every episode of the round. A slow tool delays all episodes.
    """

    inner: Engine
    _joined: set[str] = field(init=False, default_factory=set)
    _waiting: dict[str, _Entry] = field(init=False, default_factory=dict)
    _rounds: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    @property
    def context_tokens(self) -> int:
        return self.inner.context_tokens

    @property
    def continues_actions(self) -> bool:
        return isinstance(self.inner, ContinuesActions) and self.inner.continues_actions

    @property
    def roles(self) -> Collection[str]:
        return self.inner.roles if isinstance(self.inner, HasRoleAdapters) else ()

    def swap(self, leaving: str | None, joining: str | None) -> None:
        """Replace an episode by another atomically, so that no round starts in between."""
        if leaving is not None:
            self._joined.discard(leaving)
        if joining is not None:
            self._joined.add(joining)
        self._start_round_if_complete()

    async def generate(self, request: Request) -> Completion:
        """Wait for the round and return the result. Raises ValueError for an episode that has not joined.

        A dialogue `EPISODE~NAME` is part of its episode, which has one request at a time.
        """
        folder, _, name = request.episode.rpartition("/")
        episode = "/".join(filter(None, [folder, name.partition("~")[0]]))
        if episode not in self._joined:
            raise ValueError(f"episode {request.episode} has not joined")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[episode] = (request, future)
        self._start_round_if_complete()
        return await future

    def release(self, episode: str) -> None:
        self.inner.release(episode)

    def _start_round_if_complete(self) -> None:
        self._waiting = {e: w for e, w in self._waiting.items() if e in self._joined and not w[1].done()}
        if not self._waiting or set(self._waiting) != self._joined:
            return
        entries = [self._waiting[episode] for episode in sorted(self._waiting)]
        self._waiting = {}
        task = asyncio.create_task(self._round(entries))
        self._rounds.add(task)
        task.add_done_callback(self._rounds.discard)

    async def _round(self, entries: list[_Entry]) -> None:
        results: Sequence[Completion | Exception]
        try:
            results = await self.inner.generate_batch([request for request, _ in entries])
            if len(results) != len(entries):
                raise EngineError(f"The engine returned {len(results)} completions for {len(entries)} requests.")
        except Exception as error:  # boundary: raised in every waiting episode
            results = [error] * len(entries)
        for (_, future), result in zip(entries, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """Request for one episode; a greedy one has temperature 0. `notes` are those of earlier episodes of its task.

    `limits` are smaller values of `max_turns` and `max_seq_len` than those of the run, `sampling` is how the episode
    explores. A `hint` is added to the first messages.
    """

    key: RolloutKey
    task: Task
    greedy: bool = False
    notes: Mapping[str, str] = field(default_factory=dict, compare=False)
    limits: Mapping[str, int] = field(default_factory=dict, compare=False)
    sampling: MemberSampling = field(default=MemberSampling(), compare=False)
    hint: str = ""


@dataclass(frozen=True)
class Episode:
    """Result of a request. `key` is the key of the last attempt; `greedy` as in the request."""

    key: RolloutKey
    task: Task
    trajectory: Trajectory
    greedy: bool = False


ChatSessionFactory = Callable[[RolloutRequest], ChatSession]
"""Callable that builds the chat session of an attempt; its lockstep name is `episode_name(request.key)`."""

Attempt = Callable[[RolloutRequest], Awaitable[Trajectory]]
"""Callable that runs one attempt. Raises WorldError or EngineError if the infrastructure fails."""

Search = Callable[[RolloutRequest, RunPath], Awaitable[Trajectory]]
"""Callable that turns the paths of an episode into its trajectory, such as `TreeSearch`."""

InfrastructureError = WorldError | EngineError

CANCELLED = "cancelled"  # drop reason of a cancelled episode


def episode_name(key: RolloutKey) -> str:
    """Return a unique name of an attempt that sorts by step, task and sample."""
    return f"{key.step:07d}/{key.task_id}/{key.sample:04d}/{key.attempt}"


@dataclass
class FailureBudget:
    """Permanent failures among `num_requests` requests, or among `begun` requests if that is larger."""

    num_requests: int
    failures: list[InfrastructureError] = field(default_factory=list)
    begun: int = 0

    def add(self, error: InfrastructureError, max_failure_rate: float) -> None:
        """Add a failure. Raises an error of the first failure's type if the rate is exceeded."""
        self.failures.append(error)
        num = max(self.num_requests, self.begun)
        if len(self.failures) > max_failure_rate * num + 1e-9:
            first = self.failures[0]
            raise type(first)(
                f"{len(self.failures)} of {num} episodes failed permanently, more than "
                f"rollout.max_failure_rate allows. The first failure: {first.message}",
                first.hint,
            ) from first


@dataclass
class Scheduler:
    """Run rollout requests. `lockstep`, if set, is the engine of the chat sessions.

    `limits_of` returns the settings of a task (None: `rollout_for`). `remote`, if set, runs the attempts; ledger and
    retries stay in this process. `scoring` computes the rewards, unless `scores` is off. If `branch` is set, episodes
    that are not greedy are sampled as trees; `search`, if set, runs the paths of an episode. `agents` serves the policy
    to agents that call it under a base URL.
    """

    world: World
    make_chat: ChatSessionFactory
    rollout: RolloutConfig
    ledger: Ledger
    lockstep: LockstepEngine | None = None
    limits_of: Callable[[Task], RolloutConfig] | None = None
    remote: Attempt | None = None
    scores: bool = True
    scoring: RewardExecutor = field(default_factory=ThreadRewardExecutor)
    branch: BranchConfig | None = None
    search: Search | None = None
    agents: AgentServer | None = None
    opponents: Opponents | None = None
    _slots: asyncio.Semaphore | None = field(default=None, init=False)

    def capped(self, room: int | None) -> Scheduler:
        """Return this scheduler with at most `room` episodes at once; None is unlimited."""
        if room is None or room >= self.rollout.concurrency:
            return self
        return replace(self, rollout=self.rollout.model_copy(update={"concurrency": room}))

    async def run(
        self, requests: Sequence[RolloutRequest], on_done: Callable[[Episode], None] | None = None
    ) -> list[Episode]:
        """Run all requests; `on_done` is called with each finished episode."""
        pending, budget = iter(enumerate(requests)), FailureBudget(len(requests))
        done: dict[int, Episode] = {}
        joined: set[str] = set()

        def swap(leaving: str | None, joining: str | None) -> None:
            joined.discard(leaving or "")
            if joining is not None:
                joined.add(joining)
            if self.lockstep is not None:
                self.lockstep.swap(leaving, joining)

        def next_request(leaving: str | None) -> tuple[int, RolloutRequest] | None:
            """Return the next request, replacing `leaving` by its episode in the lockstep."""
            taken = next(pending, None)
            swap(leaving, episode_name(taken[1].key) if taken else None)
            return taken

        async def run_slot(taken: tuple[int, RolloutRequest] | None) -> None:
            while taken is not None:
                position, request = taken
                episode = done[position] = await self.run_one(request, budget, swap)
                if on_done is not None:
                    on_done(episode)
                taken = next_request(episode_name(episode.key))

        first = [next_request(None) for _ in range(min(self.rollout.concurrency, len(requests)))]
        try:
            async with asyncio.TaskGroup() as group:
                for taken in first:
                    group.create_task(run_slot(taken))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        finally:
            for name in tuple(joined):
                swap(name, None)
        return [done[i] for i in range(len(requests))]

    async def run_one(
        self, request: RolloutRequest, budget: FailureBudget, on_retry: Callable[[str, str], None] | None = None
    ) -> Episode:
        """Run a request until an attempt succeeds; if retries are exhausted, add a failure to `budget`.

        `on_retry` receives the names of the failed and the next attempt. A cancelled attempt is dropped in the ledger.
        """
        last = planned = request.key.attempt + self.rollout.retries
        while True:
            self.ledger.start(request.key)
            try:
                trajectory = await (self.remote or self.attempt)(request)
                paths = trajectory.attempts()
                late = any(outcome.status is ToolStatus.TIMED_OUT for one in paths for outcome in one.outcomes)
                if late or any(one.stop_reason is StopReason.TIMEOUT for one in paths):
                    self.ledger.note_clock_limit(request.key.step)
                if is_being_cancelled():  # and the world suppressed the exception
                    raise asyncio.CancelledError
                return Episode(request.key, request.task, trajectory, request.greedy)
            except asyncio.CancelledError:
                self.ledger.finish(request.key, RolloutOutcome.DROPPED, CANCELLED)
                raise
            except (WorldError, EngineError) as error:
                self.ledger.finish(request.key, RolloutOutcome.FAILED, error.part)
                if isinstance(error.__cause__, TimeoutError):
                    self.ledger.note_clock_limit(request.key.step)
                last = max(last, planned + isinstance(error, RestoreError))  # one restart is not a retry
                if is_being_cancelled():
                    raise asyncio.CancelledError from error
                if request.key.attempt >= last:
                    budget.add(error, self.rollout.max_failure_rate)
                    failure, tags = Failure(error.part, str(error), request.key.attempt + 1), dict(request.task.tags)
                    identity = (request.task.id, request.key.sample)
                    empty = Trajectory(*identity, (), (), StopReason.FAILED, failure=failure, tags=tags)
                    return Episode(request.key, request.task, empty, request.greedy)
                next_key = replace(request.key, attempt=request.key.attempt + 1)
                if on_retry is not None:
                    on_retry(episode_name(request.key), episode_name(next_key))
                request = replace(request, key=next_key)

    async def attempt(self, request: RolloutRequest) -> Trajectory:
        """Run one attempt in this process, in a fresh environment, without ledger."""
        # `run` never exceeds the limit: in lockstep, an episode that waits for a slot would block the round
        if self.world.episodes_at_once is not None and self._slots is None:
            self._slots = asyncio.Semaphore(self.rollout.concurrency)
        async with self._slots or nullcontext():
            run_path = partial(self._run_path, request)
            if self.search is not None:
                return await self.search(request, run_path)
            if self.branch is None or request.greedy:
                return await run_path((), 0)
            return await run_tree(self.branch, run_path)

    async def _run_path(self, request: RolloutRequest, recorded: tuple[Segment, ...], number: int) -> Trajectory:
        """Run a path of the episode's tree; path 0 is the trunk, or the whole episode without branches."""
        sampling = request.sampling
        task = replace(request.task, prompt=with_prompt(request.task.prompt, sampling.prompt))
        environment = fresh_environment(self.world, task)
        limits = self.limits_of(request.task) if self.limits_of else rollout_of(self.world, self.rollout, request)
        if self.agents is not None and self.rollout.agent.is_set:
            environment = ExternalAgent(environment, self.rollout.agent, self.agents.offers)
        notes = notes_of(limits.notes, request.notes)
        shared = () if notes is None else notes_tools(notes)
        one = (task, request.key.sample)
        check_hidden_tools(environment, limits)
        if environment.implements("drive"):
            runner = AgentRunner(self.agents, self.lockstep is not None, self.opponents, notes)
            trajectory = await runner.run(*one, environment, partial(self.make_chat, request), limits)
        elif limits.subagents.max_depth:
            # agents that share files or notes run one after another, so that the order does not depend on timing
            shares = notes is not None or self.world.episodes_at_once is not None
            serial = self.lockstep is not None or shares
            agents = SubAgents(*one, partial(self.make_chat, request), limits, shared, serial)
            trajectory = await agents.run(environment)
        else:
            session = self.make_chat(request)
            if number:
                assert isinstance(session, EngineChatSession)
                session = replace(session, recorded=recorded, seed=seed_for(session.seed, "branch", number))
            played = HintedEnv(environment, request.hint) if request.hint else environment
            played = ExtraToolsEnv(played, shared, ToolLimits.of(limits)) if shared else played
            trajectory = await run_unscored(*one, played, session, limits, len(sampling.prefix))
        trajectory = replace(trajectory, tags={**trajectory.tags, **sampling.tags})
        if notes is not None:
            trajectory = replace(trajectory, notes=notes.written)
        if self.scores:
            begin = time.perf_counter()
            found = await self.scoring.scored(self.world, environment, request.task, trajectory)
            return add_seconds(found, waiting=time.perf_counter() - begin)
        check_scored_elsewhere(self.world.rewards, environment.rewards, environment)
        return trajectory


def check_hidden_tools(environment: Environment, limits: RolloutConfig) -> None:
    """Raise ConfigError if `rollout.hide_tools` would have no effect."""
    if limits.hide_tools and (environment.implements("drive") or limits.subagents.max_depth):
        raise ConfigError("rollout.hide_tools does not apply to agents and sub-agents.", "Unset one of them.")


def notes_of(settings: NotesConfig, earlier: Mapping[str, str]) -> Notes | None:
    """Return the notes of an episode, or None if it has none."""
    if settings.scope == "none":
        return None
    return Notes(earlier if settings.persists else {}, settings.max_notes, settings.max_chars)


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Purpose of a round of episodes, which determines seeds; `branches`: they branch by `rollout.branch`."""

    purpose: str
    temperature: float
    seed: int
    branches: bool = False


def engine_name(plan: SamplingPlan, key: RolloutKey) -> str:
    """Return the engine's episode id, unique even if a task is trained and evaluated at the same time."""
    return f"{plan.purpose}/{episode_name(key)}"


def sampling_params(rollout: RolloutConfig, temperature: float) -> SamplingParams:
    """Return the sampling parameters of an action, without stop strings and seed."""
    return SamplingParams(
        temperature=temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_new_tokens=rollout.max_tokens_per_turn,
    )


def rollout_for(world: World, rollout: RolloutConfig, task: Task) -> RolloutConfig:
    """Return the world's rollout settings for a task, defaulting to those of the run."""
    return world.rollout_of(task) or rollout


def rollout_of(world: World, rollout: RolloutConfig, request: RolloutRequest) -> RolloutConfig:
    """Return the rollout settings of a request: those of its task, within its own limits."""
    settings = rollout_for(world, rollout, request.task)
    if not request.limits:
        return settings
    of_task = settings.model_dump(include={*request.limits})
    return settings.model_copy(update={name: min(most, of_task[name]) for name, most in request.limits.items()})


def engine_scheduler(
    world: World, engine: Engine, renderer: Renderer, rollout: RolloutConfig, plan: SamplingPlan, ledger: Ledger
) -> Scheduler:
    """Return a scheduler on `engine`; in lockstep if runs are reproducible and it is not batch-invariant."""
    joint = rollout.reproducible and not engine.batch_invariant and not rollout.agent.remote
    lockstep = LockstepEngine(engine) if joint else None
    if rollout.guided_tools:
        renderer.guide(())

    first_turns = FirstTurns(waits=lockstep is None)

    def make_chat(request: RolloutRequest) -> ChatSession:
        key, settings = request.key, rollout_of(world, rollout, request)
        sampling = request.sampling
        session = EngineChatSession(
            engine=lockstep or engine,
            renderer=renderer,
            params=sampling.apply(sampling_params(settings, 0.0 if request.greedy else plan.temperature)),
            max_tokens=settings.max_seq_len,
            episode=episode_name(key) if lockstep else engine_name(plan, key),
            seed=seed_for(plan.seed, plan.purpose, key.step, key.task_id, key.sample),
            guided=rollout.guided_tools,
            records_cut=sampling.top_p is not None,
        )
        if sampling.changes_turns:
            shared = first_turns if sampling.diverse_tokens else None
            session = ExploringChatSession.of(session, sampling, key, shared)
        return ManagedChatSession(session, rollout.context) if rollout.context.max_tokens else session

    result = scheduler(world, make_chat, rollout, ledger)
    result.lockstep = lockstep
    if plan.branches and rollout.branch.branches:
        result.branch = rollout.branch
    return result


def scheduler(world: World, make_chat: ChatSessionFactory, rollout: RolloutConfig, ledger: Ledger) -> Scheduler:
    """Return a scheduler for any kind of chat session, with at most as many episodes as the sandbox has sessions."""
    return Scheduler(world, make_chat, rollout, ledger).capped(world.episodes_at_once)
