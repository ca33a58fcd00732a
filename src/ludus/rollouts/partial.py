"""Partial rollouts: episodes that exceed a step's budget pause and continue in the next step.

Each step adds groups of requests and returns complete groups, oldest first. A token budget is split equally among the
unfinished episodes; the unused rest is split again until it is too small, so that results depend on token counts alone
and not on the clock. A group is due once the staleness bound admits no further wait: its episodes then run to their end
regardless of the budget. A waiting episode holds its environment, its asyncio task, its tokens and a concurrency slot.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from ludus.rollouts.episode import EPISODE_TIMEOUT, ChatSession, EngineChatSession, Grant
from ludus.rollouts.group_queue import StartedEpisode, StreamedGroup
from ludus.rollouts.scheduler import Episode, FailureBudget, RolloutRequest, Scheduler, episode_name

NOTHING = Grant(0)
UNBOUNDED = Grant()


@dataclass
class _OpenEpisode:
    """Running or waiting episode and the chat session of its attempt. `on_change` receives whether it now waits."""

    request: RolloutRequest
    begun: StartedEpisode | None
    grant: Grant
    on_change: Callable[[_OpenEpisode, bool], None]
    spent: int = 0
    waits: bool = False
    task: asyncio.Task[None] | None = None
    session: EngineChatSession | None = None
    _granted: asyncio.Event = field(default_factory=asyncio.Event)

    async def granted(self) -> Grant:
        """Return the current grant, waiting while it is empty."""
        while self._is_exhausted:
            self.waits = True
            self._granted.clear()
            self.on_change(self, True)
            timeout = EPISODE_TIMEOUT.get()
            with nullcontext() if timeout is None else timeout.paused():
                await self._granted.wait()
        return self.grant if self.grant.tokens is None else replace(self.grant, tokens=self.grant.tokens - self.spent)

    def spend(self, tokens: int) -> None:
        self.spent += tokens

    def take_spent(self) -> int:
        """Return the tokens sampled under the grant, and clear the grant."""
        spent, self.spent, self.grant = self.spent, 0, NOTHING
        return spent

    def allow(self, grant: Grant) -> None:
        """Set the grant and resume the episode unless the grant is empty."""
        self.grant = grant
        if self.waits and not self._is_exhausted:
            self.waits = False
            self.on_change(self, False)
            self._granted.set()

    def state(self) -> StartedEpisode | None:
        """Return the segments of the attempt so far; None before its first token."""
        recorded = () if self.session is None else self.session.current_segments
        return StartedEpisode(self.request.key, recorded) if recorded else self.begun

    @property
    def _is_exhausted(self) -> bool:
        tokens = self.grant.tokens
        return self.grant.is_over or (tokens is not None and self.spent >= tokens)


@dataclass
class PartialRollouts:
    """Unfinished episodes of a run, executed by `scheduler` within the budgets of `rollout.partial`.

    A group is due `max_waits` steps after its start. `kept` are groups restored from a checkpoint.
    """

    scheduler: Scheduler
    max_waits: int = 0
    kept: Sequence[StreamedGroup] = ()
    on_done: Callable[[Episode], None] | None = None
    num_sampled: int = field(default=0, init=False)
    """Tokens sampled in this step."""
    num_continued: int = field(default=0, init=False)
    """Unfinished episodes of earlier steps at the start of this one."""
    _groups: dict[int, StreamedGroup] = field(default_factory=dict, init=False)
    _pending: deque[tuple[int, int]] = field(default_factory=deque, init=False)
    _open: dict[tuple[int, int], _OpenEpisode] = field(default_factory=dict, init=False)
    _next_number: int = field(default=0, init=False)
    _equal_share: Grant = field(default=NOTHING, init=False)
    _tokens_left: int | None = field(default=None, init=False)
    _deadline: float | None = field(default=None, init=False)
    _step: int = field(default=0, init=False)
    _is_last_step: bool = field(default=False, init=False)
    _failures: FailureBudget = field(default_factory=lambda: FailureBudget(0), init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        make_chat = self.scheduler.make_chat
        self.scheduler.make_chat = lambda request: self._resume_session(request, make_chat(request))
        for group in self.kept:
            self._add_group(replace(group, done=dict(group.done), begun=dict(group.begun)))
            for episode in group.episodes:
                self.scheduler.ledger.start(episode.key)

    @property
    def num_unfinished(self) -> int:
        return len(self._open) + len(self._pending)

    @property
    def num_open(self) -> int:
        """The number of started, unfinished episodes; each holds an environment."""
        return len(self._open)

    @property
    def is_spent(self) -> bool:
        """Whether the step's budget is too small for another round."""
        left = self._tokens_left
        return self._is_past_deadline or (left is not None and left < max(1, self.num_unfinished))

    def begin_step(self, step: int, *, last: bool) -> None:
        """Reset the budget for a step. If `last`, every episode runs to its end."""
        budget = self.scheduler.rollout.partial
        self._step, self._is_last_step, self._tokens_left = step, last, budget.tokens or None
        self.num_sampled, self.num_continued = 0, self.num_unfinished
        self._deadline = None if last or not budget.seconds else time.monotonic() + budget.seconds

    async def run(self, groups: Sequence[Sequence[RolloutRequest]]) -> list[list[Episode]]:
        """Start `groups`, resume the unfinished episodes and return all complete groups."""
        for requests in groups:
            self._add_group(StreamedGroup(0, requests, requests[0].key.step - 1))
        self._failures = FailureBudget(self.num_unfinished)
        try:
            while self._can_continue():
                # an equal share of the budget for every unfinished episode, started in free slots if pending
                tokens = None if self._tokens_left is None else max(0, self._tokens_left) // self.num_unfinished
                self._equal_share = Grant(tokens, self._deadline)
                for (number, _), one in sorted(self._open.items()):
                    one.allow(self._grant_of(number))
                self._start_pending()
                while self._failure is None and any(not one.waits for one in self._open.values()):
                    self._changed.clear()
                    await self._changed.wait()
                for one in self._open.values():
                    self._charge(one.take_spent())
        except BaseException:
            await self.close()
            raise
        complete = [n for n, group in sorted(self._groups.items()) if len(group.done) == len(group.requests)]
        return [self._groups.pop(number).episodes for number in complete]

    def waiting(self) -> tuple[StreamedGroup, ...]:
        """Return copies of the incomplete groups, with their finished and partial episodes."""
        groups = sorted(self._groups.items())
        found = {number: replace(group, done=dict(group.done), begun=dict(group.begun)) for number, group in groups}
        for (number, index), one in self._open.items():
            if (state := one.state()) is not None:
                found[number].begun[index] = state
        return tuple(found.values())

    def metrics(self) -> dict[str, float]:
        waiting = {"waiting": self.num_unfinished, "groups_waiting": len(self._groups)}
        counts = {"tokens": self.num_sampled, "continued": self.num_continued, **waiting}
        return {f"partial/{name}": float(count) for name, count in counts.items()}

    async def close(self) -> None:
        """Cancel all open episodes; the ledger records them as cancelled."""
        tasks = [one.task for one in self._open.values() if one.task is not None]
        self._pending.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _is_past_deadline(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _is_due(self, number: int) -> bool:
        return self._is_last_step or self._step - self._groups[number].requests[0].key.step >= self.max_waits

    def _can_continue(self) -> bool:
        if self._failure is not None:
            raise self._failure
        if self._is_past_deadline and self.num_unfinished:
            self.scheduler.ledger.note_clock_limit(self._step)
        if any(map(self._is_due, {number for number, _ in (*self._open, *self._pending)})):
            return True
        return self.num_unfinished > 0 and not self.is_spent

    def _grant_of(self, number: int) -> Grant:
        return UNBOUNDED if self._is_due(number) else self._equal_share

    def _charge(self, tokens: int) -> None:
        self.num_sampled += tokens
        if self._tokens_left is not None:
            self._tokens_left -= tokens

    def _add_group(self, group: StreamedGroup) -> None:
        group.number, self._next_number = self._next_number, self._next_number + 1
        self._groups[group.number] = group
        self._pending.extend((group.number, index) for index in range(len(group.requests)) if index not in group.done)

    def _start_pending(self) -> None:
        """Start pending episodes, oldest first, while slots are free and the grant is not empty."""
        while self._pending and len(self._open) < self.scheduler.rollout.concurrency:
            number, index = self._pending[0]
            grant = self._grant_of(number)
            if grant.tokens == 0 or grant.is_over:
                return
            self._pending.popleft()
            group = self._groups[number]
            begun = group.begun.pop(index, None)
            request = group.requests[index] if begun is None else replace(group.requests[index], key=begun.key)
            one = self._open[number, index] = _OpenEpisode(request, begun, grant, self._update_lockstep)
            self._swap(None, episode_name(request.key))
            one.task = asyncio.create_task(self._run_episode(one, number, index))

    async def _run_episode(self, one: _OpenEpisode, number: int, index: int) -> None:
        """Run an episode to its end, possibly over several steps, and start the next pending one."""
        try:
            episode = await self.scheduler.run_one(one.request, self._failures, self._swap)
            self._groups[number].done[index] = episode
            if self.on_done is not None:
                self.on_done(episode)
        except Exception as error:  # boundary: `run` raises it
            self._failure = self._failure or error
        finally:
            self._charge(one.take_spent())
            del self._open[number, index]
            if self._failure is None:
                self._start_pending()
            self._swap(episode_name(one.request.key), None)
            self._changed.set()

    def _resume_session(self, request: RolloutRequest, session: ChatSession) -> ChatSession:
        assert isinstance(session, EngineChatSession)
        keys = ((one, replace(one.request.key, attempt=request.key.attempt)) for one in self._open.values())
        one = next(one for one, key in keys if key == request.key)
        recorded = one.begun.segments if one.begun is not None and one.begun.key == request.key else ()
        one.request, one.session = request, replace(session, allowance=one, recorded=recorded)
        return one.session

    def _update_lockstep(self, one: _OpenEpisode, waits: bool) -> None:
        name = episode_name(one.request.key)
        self._swap(name if waits else None, None if waits else name)
        self._changed.set()

    def _swap(self, leaving: str | None, joining: str | None) -> None:
        if self.scheduler.lockstep is not None:
            self.scheduler.lockstep.swap(leaving, joining)
