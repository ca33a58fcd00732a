"""Concurrent episodes and lockstep turns: each statement of the two module docstrings."""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest

from ledger_total import total
from ludus.config import load_config
from ludus.config.sections.rollout import RolloutConfig
from ludus.diagnostics.metrics import rollout_metrics
from ludus.engines.base import Request
from ludus.envs.registry import build_world
from ludus.errors import EngineError, UserError, WorldError
from ludus.rollouts.ledger import Ledger, RolloutOutcome
from ludus.rollouts.scheduler import FailureBudget, LockstepEngine, SamplingPlan, engine_scheduler, episode_name
from ludus.rollouts.scheduler import scheduler as build_scheduler
from ludus.sandbox import NamespacesSandbox
from ludus.types import Group, SamplingParams, StopReason, Task
from scripted_engine import Faults, ScriptedEngine
from small_worlds import (
    RecordingWorld,
    call,
    end_token,
    make_requests,
    make_scheduler,
    make_task,
    renderer,
    scripted,
    tokenizer,
    tool_of,
)
from waiting import until

SEARCH = call("echo", text="The capital is Paris.")
NO_FAULTS = Faults()
BROKE = RuntimeError("it broke")


def run(scheduler, requests, on_done=None):
    return asyncio.run(scheduler.run(requests, on_done))


def answers(request, turn):
    return "Paris"


def unstable(fails, error=BROKE, what="start"):
    """Hooks by which environments break where `fails` says so of their number."""

    async def hook(number):
        if fails(number):
            raise error

    return {what: hook}


def naps(seed=0, most_s=0.004):
    """Hooks by which every method takes a random time."""
    source = random.Random(seed)

    async def nap(_):
        await asyncio.sleep(source.uniform(0, most_s))

    return dict.fromkeys(("start", "step", "close"), nap)


def account_of(scheduler, episodes, step=0):
    """Close the step as a trainer does: all finished episodes are trained."""
    for episode in episodes:
        if episode.trajectory.failure is None:
            scheduler.ledger.finish(episode.key, RolloutOutcome.TRAINED, "used")
    return scheduler.ledger.close(step)


# Takes requests in order, gives episodes in their order, with a bounded number in flight


def test_episodes_are_returned_in_request_order():
    requests = make_requests(12, samples=2)
    scheduler = make_scheduler(scripted(answers), RecordingWorld(hooks=naps()), concurrency=5)
    ended = []
    episodes = run(scheduler, requests, on_done=ended.append)
    assert [e.key for e in episodes] == [request.key for request in requests]
    assert [(e.trajectory.task_id, e.trajectory.sample) for e in episodes] == [
        (request.key.task_id, request.key.sample) for request in requests
    ]
    assert sorted(e.key for e in ended) == [request.key for request in requests]


@pytest.mark.parametrize("concurrency", [1, 3, 20])
def test_episodes_in_flight_reach_but_never_exceed_the_limit(concurrency):
    world = RecordingWorld(hooks=naps())
    most = 0

    async def watch(_):
        nonlocal most
        most = max(most, len(world.open))

    world.hooks["step"] = watch
    run(make_scheduler(scripted(answers), world, concurrency=concurrency), make_requests(10))
    assert most == min(concurrency, 10)
    assert world.open == []


def test_next_job_starts_as_soon_as_one_ends():
    done = []
    everyone_else = asyncio.Event()

    async def wait(number):
        if number == 0:
            await asyncio.wait_for(everyone_else.wait(), 10)

    def note(episode):
        done.append(episode.key.task_id)
        if len(done) == 5:
            everyone_else.set()

    world = RecordingWorld(hooks={"step": wait})
    run(make_scheduler(scripted(answers), world, concurrency=2), make_requests(6), note)
    assert done == ["t001", "t002", "t003", "t004", "t005", "t000"]


def test_empty_request_list_returns_no_episodes():
    assert run(make_scheduler(scripted(answers), RecordingWorld()), []) == []


# Retries infrastructure failures, and only those


def test_a_failed_episode_is_retried_in_a_new_environment_with_the_same_seed():
    engine = scripted([SEARCH, "Paris"], faults=Faults(fail_at={1}))
    world = RecordingWorld()
    scheduler = make_scheduler(engine, world)
    (episode,) = run(scheduler, make_requests(1))
    assert episode.trajectory.answer == "Paris"
    assert episode.key.attempt == 1
    assert [env.events[-1] for env in world.made] == ["close", "close"]
    first, failed, again, second = engine.requests
    assert (again.token_ids, again.params) == (first.token_ids, first.params)
    assert (second.token_ids, second.params) == (failed.token_ids, failed.params)
    assert first.episode != again.episode
    account = account_of(scheduler, [episode])
    assert (account.started, account.trained, account.failed) == (2, 1, 1)
    assert account.by_reason == {"failed/engine": 1, "trained/used": 1}


@pytest.mark.parametrize("what", ["start", "step", "close"])
def test_failed_environment_is_replaced_and_the_episode_retried(what):
    world = RecordingWorld(hooks=unstable(lambda number: number < 2, what=what))
    scheduler = make_scheduler(scripted(answers), world, retries=2)
    (episode,) = run(scheduler, make_requests(1))
    assert (episode.trajectory.answer, episode.key.attempt) == ("Paris", 2)
    assert world.open == []
    assert total(scheduler.ledger).by_reason == {"failed/environment": 2}


def test_environment_creation_error_is_a_failure():
    @dataclass
    class Fragile(RecordingWorld):
        def environment(self, task):
            if not self.made:
                self.made.append(None)
                raise OSError("no sandbox left")
            return super().environment(task)

    scheduler = make_scheduler(scripted(answers), Fragile())
    (episode,) = run(scheduler, make_requests(1))
    assert (episode.trajectory.answer, episode.key.attempt) == ("Paris", 1)
    assert total(scheduler.ledger).by_reason == {"failed/environment": 1}


def test_job_starting_at_a_later_attempt_has_all_its_retries():
    """As one that is played anew after a resume."""
    (request,) = make_requests(1)
    later = replace(request, key=replace(request.key, attempt=3))
    scheduler = make_scheduler(scripted(answers, faults=Faults(fail_at={0, 1})), RecordingWorld())
    episode = asyncio.run(scheduler.run_one(later, FailureBudget(1)))
    assert (episode.trajectory.answer, episode.key.attempt) == ("Paris", 5)


def test_model_errors_are_not_retried():
    lines = ["<tool_call>{</tool_call>"] * 9
    for script, stop in ((lines, StopReason.TOOL_ERRORS), ([""], StopReason.EMPTY_ANSWER)):
        world = RecordingWorld()
        scheduler = make_scheduler(scripted(script), world)
        (episode,) = run(scheduler, make_requests(1))
        assert (episode.trajectory.stop_reason, episode.key.attempt) == (stop, 0)
        assert len(world.made) == 1


def test_permanently_failing_job_is_returned_as_failed():
    broken = unstable(lambda number: number < 3)
    scheduler = make_scheduler(
        scripted(answers), RecordingWorld(hooks=broken), concurrency=1, retries=2, max_failure_rate=0.5
    )
    requests = make_requests(2)
    failed, fine = run(scheduler, requests)
    t = failed.trajectory
    assert (t.stop_reason, t.segments, t.messages, t.reward) == (StopReason.FAILED, (), (), 0.0)
    assert (t.failure.part, t.failure.attempts) == ("environment", 3)
    assert t.failure.error == "The environment's start raised RuntimeError: it broke"
    assert fine.trajectory.answer == "Paris"
    account = account_of(scheduler, [failed, fine])
    assert (account.started, account.trained, account.failed) == (4, 1, 3)
    metrics = rollout_metrics([Group(make_task(), (failed.trajectory, fine.trajectory))])
    assert metrics["episode/stop/failed"] == 0.5
    assert metrics["reward/mean"] == 1.0


# Raises with the first failure's own words, once too many have failed


@pytest.mark.parametrize(
    ("rate", "num_broken", "aborts"),
    [(0.0, 1, True), (0.2, 2, False), (0.2, 3, True), (0.29, 29, False), (1.0, 10, False)],
)
def test_too_many_failures_end_the_run(rate, num_broken, aborts):
    num_requests = 100 if rate == 0.29 else 10
    world = RecordingWorld(hooks=unstable(lambda number: number < num_broken))
    scheduler = make_scheduler(scripted(answers), world, concurrency=1, retries=0, max_failure_rate=rate)
    if not aborts:
        episodes = run(scheduler, make_requests(num_requests))
        assert sum(e.trajectory.failure is not None for e in episodes) == num_broken
        return
    with pytest.raises(WorldError) as failure:
        run(scheduler, make_requests(num_requests))
    assert f"{num_broken} of {num_requests} episodes failed permanently" in str(failure.value)
    assert "The environment's start raised RuntimeError: it broke" in str(failure.value)
    assert "max_failure_rate" in str(failure.value)


def test_raised_error_is_the_first_failure_with_its_type_and_hint():
    async def start(number):
        raise EngineError("The judge is down.", "Start it.") if number == 0 else RuntimeError("later")

    world = RecordingWorld(hooks={"start": start})
    with pytest.raises(EngineError) as failure:
        run(make_scheduler(scripted(answers), world, concurrency=1, retries=0, max_failure_rate=0.1), make_requests(10))
    assert failure.value.message.endswith("The first failure: The judge is down.")
    assert failure.value.hint == "Start it."
    assert failure.value.exit_code == EngineError.exit_code


def test_user_error_ends_the_run_immediately_as_a_single_error():
    world = RecordingWorld(hooks=unstable(lambda number: number >= 2, UserError("Bad task.", "Mend it.")))
    with pytest.raises(UserError, match=r"^Bad task\. Mend it\.$") as failure:
        run(make_scheduler(scripted(answers), world, concurrency=3), make_requests(9))
    assert not isinstance(failure.value, BaseExceptionGroup)
    assert len(world.made) <= 5
    assert world.open == []


def test_internal_error_is_not_treated_as_infrastructure_failure():
    def broken(request, turn):
        return {}["key"]

    world = RecordingWorld()
    with pytest.raises(KeyError):
        run(make_scheduler(scripted(broken), world), make_requests(3))
    assert world.open == []


def test_episodes_in_flight_are_closed_before_the_run_fails():
    async def start(number):
        if number < 4:
            await asyncio.sleep(0)
            return
        raise RuntimeError("it broke")

    async def hang(_):
        await asyncio.Event().wait()

    world = RecordingWorld(hooks={"start": start, "step": hang})
    scheduler = make_scheduler(scripted(answers), world, concurrency=5, retries=0, max_failure_rate=0.0)
    with pytest.raises(WorldError, match="it broke"):
        run(scheduler, make_requests(20))
    assert len(world.made) == 5
    assert [env.events[-1] for env in world.made] == ["close"] * 5


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("close_breaks", [False, True])
def test_cancellation_closes_all_episodes_without_retries(lockstep, close_breaks):
    async def hang(_):
        await asyncio.Event().wait()

    hooks = {"step": hang} | (unstable(lambda _: True, what="close") if close_breaks else {})
    world = RecordingWorld(hooks=hooks)
    engine = scripted(answers)

    async def cancel():
        scheduler = make_scheduler(engine, world, concurrency=4, retries=9, lockstep=lockstep)
        running = asyncio.create_task(scheduler.run(make_requests(9)))
        await until(lambda: sum("step" in env.events for env in world.made) == 4)
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    assert len(world.made) == 4
    assert [env.events[-1] for env in world.made] == ["close"] * 4
    assert len(engine.released) == 4


def test_environment_raising_on_cancellation_is_not_retried():
    async def step(_):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("the connection is gone") from None

    world = RecordingWorld(hooks={"step": step})

    async def cancel():
        running = asyncio.create_task(make_scheduler(scripted(answers), world).run(make_requests(2)))
        await until(lambda: sum("step" in env.events for env in world.made) == 2)
        running.cancel()
        await asyncio.wait_for(running, 10)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    assert [env.events for env in world.made] == [["start", "step", "close"]] * 2


def test_episode_is_dropped_if_its_environment_suppresses_cancellation():
    async def step(_):
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    world = RecordingWorld(hooks={"step": step})
    scheduler = make_scheduler(scripted(answers), world)

    async def cancel():
        playing = asyncio.create_task(scheduler.run_one(*make_requests(1), FailureBudget(1)))
        await until(lambda: any("step" in env.events for env in world.made))
        playing.cancel()
        await asyncio.wait({playing}, timeout=10)
        return playing.cancelled()

    assert asyncio.run(cancel())
    assert scheduler.ledger.close(0).by_reason == {"dropped/cancelled": 1}


# Never drops a request silently: the account adds up


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_ledger_balances_under_random_failures(seed, lockstep):
    source = random.Random(seed)
    where = {number: source.choice(["start", "step", "close"]) for number in range(400)}
    broken = {number for number in where if source.random() < 0.3}

    def hook(what):
        async def breaks(number):
            if number in broken and where[number] == what:
                raise RuntimeError(what)

        return breaks

    world = RecordingWorld(hooks={what: hook(what) for what in ("start", "step", "close")})
    engine = scripted([SEARCH, "Paris"], faults=Faults(fail_at=set(source.sample(range(100), 10))))
    scheduler = make_scheduler(engine, world, concurrency=7, retries=2, max_failure_rate=1.0, lockstep=lockstep)
    requests = make_requests(20, samples=2, step=3)
    episodes = run(scheduler, requests)
    assert [(e.key.task_id, e.key.sample) for e in episodes] == [(j.key.task_id, j.key.sample) for j in requests]
    account = account_of(scheduler, episodes, step=3)
    finished = [e for e in episodes if e.trajectory.failure is None]
    assert account.started == sum((account.trained, account.masked, account.dropped, account.failed))
    assert account.trained == len(finished)
    assert account.started == sum(e.key.attempt + 1 for e in episodes) == len(world.made)
    assert account.failed == account.started - len(finished) > 0
    assert set(account.by_reason) == {"failed/engine", "failed/environment", "trained/used"}
    assert all(e.trajectory.failure.attempts == 3 for e in episodes if e.trajectory.failure)
    assert world.open == []
    assert len(engine.released) == account.started


def test_triggered_wall_clock_limit_is_recorded_in_the_ledger():
    async def hang() -> str:
        await asyncio.Event().wait()
        return ""

    hangs = tool_of(hang, "hangs", timeout_s=0.01)

    async def hang_once(number):
        if number == 0:
            await asyncio.Event().wait()

    cases = [
        (RecordingWorld(), [SEARCH, "Paris"], RolloutConfig(), False),
        (RecordingWorld(tools=[hangs]), [call("hangs"), "Paris"], RolloutConfig(), True),
        (RecordingWorld(hooks={"step": hang_once}), ["Paris"], RolloutConfig(episode_timeout_s=0.02), True),
        (RecordingWorld(hooks={"start": hang_once}), ["Paris"], RolloutConfig(environment_timeout_s=0.4), True),
    ]
    for world, script, limits, fired in cases:
        scheduler = make_scheduler(scripted(script), world, limits)
        run(scheduler, make_requests(1))
        assert total(scheduler.ledger).clock_limited is fired


# Lock-step


class RecordingEngine(ScriptedEngine):
    """Notes the batches that it is given, and how many episodes were with their environment then."""

    def __init__(self, script, **options):
        super().__init__(script, tokenizer(), end_token(), **options)
        self.batches, self.num_busy, self.busy = [], [], 0

    async def generate_batch(self, requests):
        self.batches.append([(r.episode, r.token_ids, r.params.seed) for r in requests])
        self.num_busy.append(self.busy)
        return await super().generate_batch(requests)


def uneven(request, turn):
    """Episodes of one to four turns, by the number in their task's name."""
    length = int(request.episode.split("/")[1][1:]) % 4
    return "Paris" if turn >= length else SEARCH


def lockstep_run(naps_seed, *, concurrency=4, num_requests=14, faults=NO_FAULTS):
    """The batches of a run whose tools take random times, and its episodes."""
    source = random.Random(naps_seed)
    engine = RecordingEngine(uneven, faults=faults)

    async def nap(_):
        engine.busy += 1
        await asyncio.sleep(source.uniform(0, 0.003))
        engine.busy -= 1

    hooks = dict.fromkeys(("start", "step", "close"), nap)
    limits = RolloutConfig(concurrency=concurrency, retries=3, max_failure_rate=1.0)
    scheduler = make_scheduler(engine, RecordingWorld(hooks=hooks), limits, lockstep=True)
    episodes = run(scheduler, make_requests(num_requests))
    assert not scheduler.lockstep._joined
    return engine, [(e.key, e.trajectory) for e in episodes]


def test_lockstep_batches_do_not_depend_on_tool_latency():
    engine, episodes = lockstep_run(0)
    assert len(engine.batches) > 6
    assert max(map(len, engine.batches)) == 4
    for seed in range(1, 4):
        again, same = lockstep_run(seed)
        assert again.batches == engine.batches
        assert same == episodes


def test_lockstep_batches_with_engine_failures_do_not_depend_on_tool_latency():
    engine, episodes = lockstep_run(0, faults=Faults(fail_at={3, 9, 10}))
    assert any(key.attempt for key, _ in episodes)
    for seed in range(1, 4):
        again, same = lockstep_run(seed, faults=Faults(fail_at={3, 9, 10}))
        assert again.batches == engine.batches
        assert same == episodes


def test_no_round_starts_while_an_environment_is_busy():
    engine, _ = lockstep_run(2, concurrency=5)
    assert set(engine.num_busy) == {0}


def test_round_is_ordered_by_episode_key():
    engine, _ = lockstep_run(3, concurrency=9)
    for batch in engine.batches:
        assert [name for name, *_ in batch] == sorted(name for name, *_ in batch)


@pytest.mark.parametrize("concurrency", [1, 3, 14, 50])
def test_every_job_is_played_at_any_concurrency(concurrency):
    engine, episodes = lockstep_run(4, concurrency=concurrency)
    assert [t.answer for _, t in episodes] == ["Paris"] * 14
    assert max(map(len, engine.batches)) == min(concurrency, 14)
    if concurrency >= 14:
        assert list(map(len, engine.batches)) == [14, 10, 6, 3]


def test_first_round_includes_all_slots_even_if_an_episode_ends_early():
    long = Task("t000", make_task(said="word " * 900).prompt, "Paris")
    requests = make_requests(3)
    requests[0] = type(requests[0])(requests[0].key, long)
    engine = RecordingEngine(uneven)
    scheduler = make_scheduler(engine, RecordingWorld(), concurrency=2, lockstep=True)
    episodes = run(scheduler, requests)
    assert [e.trajectory.stop_reason for e in episodes] == [
        StopReason.PROMPT_TOO_LONG,
        StopReason.ANSWERED,
        StopReason.ANSWERED,
    ]
    assert [len(batch) for batch in engine.batches] == [2, 2, 1]


def test_an_engine_error_reaches_every_episode_of_the_round():
    engine = RecordingEngine(answers, faults=Faults(fail_at={1}))
    scheduler = make_scheduler(engine, RecordingWorld(), concurrency=5, lockstep=True)
    episodes = run(scheduler, make_requests(5))
    assert [e.key.attempt for e in episodes] == [1] * 5
    assert [len(batch) for batch in engine.batches] == [5, 5]
    assert total(scheduler.ledger).by_reason == {"failed/engine": 5}


class PartialEngine(RecordingEngine):
    """Answers one request too few."""

    def __init__(self):
        super().__init__(answers)

    async def generate_batch(self, requests):
        return (await super().generate_batch(requests))[:-1]


def test_too_few_completions_fail_the_round_and_all_waiting_requests():
    scheduler = make_scheduler(
        PartialEngine(), RecordingWorld(), concurrency=3, retries=0, max_failure_rate=0.0, lockstep=True
    )
    with pytest.raises(EngineError, match="returned 2 completions for 3 requests"):
        run(scheduler, make_requests(3))


def test_failed_run_releases_the_lockstep_engine_for_the_next_run():
    hooks = unstable(lambda number: number == 2, UserError("Stop."), "step")
    world = RecordingWorld(hooks=hooks)
    scheduler = make_scheduler(scripted(uneven), world, concurrency=2, lockstep=True)

    async def twice():
        with pytest.raises(UserError):
            await scheduler.run(make_requests(6))
        return await asyncio.wait_for(scheduler.run(make_requests(4, step=1)), 10)

    assert [e.trajectory.answer for e in asyncio.run(twice())] == ["Paris"] * 4


def test_an_episode_that_times_out_while_waiting_does_not_block_others():
    async def slow(number):
        await asyncio.sleep(0.15 if number == 0 else 0)

    world = RecordingWorld(hooks={"step": slow})
    options = {"episode_timeout_s": 0.05, "concurrency": 2}
    scheduler = make_scheduler(RecordingEngine(uneven), world, lockstep=True, **options)
    stops = [e.trajectory.stop_reason for e in run(scheduler, make_requests(2))]
    assert StopReason.TIMEOUT in stops


def ask(name):
    return Request(name, (1, 2), SamplingParams())


def test_request_of_an_episode_that_has_not_joined_raises_error():
    lockstep = LockstepEngine(scripted(answers))
    with pytest.raises(ValueError, match="episode e has not joined"):
        asyncio.run(lockstep.generate(ask("e")))


def test_round_waits_for_all_joined_episodes_until_they_leave():
    engine = RecordingEngine(answers)
    lockstep = LockstepEngine(engine)

    async def play():
        for name in ("b", "a", "c"):
            lockstep.swap(None, name)
        waiting = [asyncio.create_task(lockstep.generate(ask(name))) for name in ("b", "a")]
        await asyncio.sleep(0.01)
        assert engine.batches == []
        lockstep.swap("c", None)
        await asyncio.gather(*waiting)
        lockstep.swap("a", "d")
        await asyncio.gather(lockstep.generate(ask("d")), lockstep.generate(ask("b")))

    asyncio.run(play())
    assert [[name for name, *_ in batch] for batch in engine.batches] == [["a", "b"], ["b", "d"]]


def test_cancelled_request_is_not_sent_and_the_round_still_waits():
    engine = RecordingEngine(answers)
    lockstep = LockstepEngine(engine)

    async def play():
        lockstep.swap(None, "a")
        lockstep.swap(None, "b")
        gone = asyncio.create_task(lockstep.generate(ask("a")))
        await asyncio.sleep(0)
        gone.cancel()
        waiting = asyncio.create_task(lockstep.generate(ask("b")))
        await asyncio.sleep(0.01)
        assert engine.batches == []
        lockstep.swap("a", None)
        await waiting

    asyncio.run(play())
    assert [[name for name, *_ in batch] for batch in engine.batches] == [["b"]]


def test_lockstep_engine_delegates_context_and_release_to_the_inner_engine():
    engine = scripted(answers, context_tokens=99)
    lockstep = LockstepEngine(engine)
    assert lockstep.context_tokens == 99
    lockstep.release("x")
    assert engine.released == ["x"]


def test_names_sort_by_step_task_and_sample_and_differ_by_attempt():
    keys = [request.key for step in (2, 10) for request in make_requests(12, samples=11, step=step)]
    names = [episode_name(key) for key in keys]
    assert names == sorted(names)
    assert len(set(names)) == len(names)


# episodes that hold a session


@dataclass
class HoldingWorld(RecordingWorld):
    """There is room for two sessions, and every episode holds one."""

    open: int = 0
    most: int = 0
    episodes_at_once: int | None = 2

    def __post_init__(self):
        async def start(_):
            self.open += 1
            self.most = max(self.most, self.open)

        async def close(_):
            await asyncio.sleep(0.001)
            self.open -= 1

        self.hooks = {"start": start, "close": close}


@pytest.mark.parametrize("lockstep", [True, False])
def test_open_episodes_are_limited_by_session_capacity_and_all_complete(lockstep):
    world, engine = HoldingWorld(), scripted(uneven)
    scheduler = make_scheduler(engine, world, concurrency=8, lockstep=lockstep).capped(world.episodes_at_once)
    episodes = run(scheduler, make_requests(9))
    assert [e.trajectory.answer for e in episodes] == ["Paris"] * 9
    assert (world.most, world.open) == (2, 0)


def test_episodes_started_individually_wait_for_session_capacity():
    world = HoldingWorld()
    scheduler = make_scheduler(scripted(uneven), world, concurrency=2)

    async def all_at_once():
        budget = FailureBudget(9)
        return await asyncio.gather(*(scheduler.run_one(request, budget) for request in make_requests(9)))

    assert len(asyncio.run(all_at_once())) == 9
    assert (world.most, world.open) == (2, 0)


def test_worlds_with_sessions_are_limited_by_their_sandbox_capacity():
    config = load_config("terminal", ["--sandbox.sessions", "3"])
    world = build_world(config.env, config.rollout, config.sandbox)
    assert world.implements("episodes_at_once")
    found = [(128, world, 3), (2, world, 2), (128, RecordingWorld(), 128)]
    for concurrency, one, capped in found:
        made = build_scheduler(one, None, RolloutConfig(concurrency=concurrency), Ledger())
        assert made.rollout.concurrency == capped
    assert NamespacesSandbox().max_sessions >= 2


def test_an_engine_separates_evaluation_and_training_of_the_same_task():
    """At once, where episodes stream: neither is to end, or to go on from, what is kept for the other."""
    engine, rollout = scripted(["Paris"]), RolloutConfig(reproducible=False)
    for purpose in ("train", "evaluate"):
        play = SamplingPlan(purpose, 1.0, 0)
        one = engine_scheduler(RecordingWorld(), engine, renderer(), rollout, play, Ledger())
        run(one, make_requests(1))
    assert len({request.episode for request in engine.requests}) == len(set(engine.released)) == 2
