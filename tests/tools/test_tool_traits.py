"""Declared tool traits take effect: timeouts by latency class, retries, costs, concurrency."""

import asyncio
import threading

import pytest

from ludus.config.sections.rollout import RolloutConfig
from ludus.diagnostics.metrics import rollout_metrics
from ludus.diagnostics.timings import StepTimings
from ludus.envs.tool_env import ToolExecutor, ToolLimits
from ludus.errors import EngineError, ToolFault, UserError, WorldError
from ludus.rollouts.ledger import RolloutOutcome
from ludus.tools.base import Traits, tool
from ludus.types import Action, Group, Message, ToolCall, ToolStatus
from small_worlds import RecordingWorld, make_requests, make_scheduler, make_task, play, scripted, tool_of
from small_worlds import call as write
from waiting import until

PATIENT = ToolLimits(timeout_s=10.0)
SAFE = Traits(idempotent=True, cost=2.0)
UNSAFE = Traits(cost=2.0)


def run(tools, *names, limits=PATIENT):
    calls = tuple(ToolCall(str(i), name, {}) for i, name in enumerate(names))
    return asyncio.run(ToolExecutor(tools, limits).run(Action(Message(role="assistant", content=""), calls)))


class FlakyTool:
    """Fails the first `times` calls with `error`; counts all."""

    def __init__(self, times, error=None, is_async=True):
        self.times, self.called = times, 0
        self.error = error or WorldError("The server is gone.", "Start it.")
        self.is_async = is_async

    def plain(self) -> str:
        self.called += 1
        if self.called <= self.times:
            raise self.error
        return "done"

    def tool(self, name="it", **options):
        async def coroutine() -> str:
            return self.plain()

        return tool_of(coroutine if self.is_async else lambda: self.plain(), name, **options)


# Second tries


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("error", [WorldError("gone"), EngineError("gone"), ToolFault("gone")], ids=repr)
def test_idempotent_call_is_retried_once_after_an_infrastructure_fault(error, is_async):
    failing = FlakyTool(1, error, is_async)
    (outcome,) = run([failing.tool(traits=SAFE)], "it")
    assert (outcome.status, outcome.output, outcome.retried) == (ToolStatus.OK, "done", True)
    assert failing.called == 2
    assert outcome.cost == 4.0


@pytest.mark.parametrize(("traits", "called"), [(UNSAFE, 1), (SAFE, 2)], ids=["not idempotent", "idempotent"])
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_persistent_infrastructure_fault_raises_tool_fault(traits, called, is_async):
    failing = FlakyTool(9, is_async=is_async)
    with pytest.raises(ToolFault, match=r"^The tool it failed: The server is gone\. Start it\.$") as fault:
        run([failing.tool(traits=traits)], "it")
    assert failing.called == called
    assert fault.value.__cause__ is failing.error
    assert fault.value.part == "tool"


@pytest.mark.parametrize("error", [ValueError("x"), UserError("x"), ConnectionError("x"), TimeoutError()], ids=repr)
def test_other_errors_are_observations_and_not_retried(error):
    failing = FlakyTool(9, error)
    (outcome,) = run([failing.tool(traits=SAFE)], "it")
    assert (outcome.status, outcome.retried, failing.called) == (ToolStatus.RAISED, False, 1)
    assert outcome.cost == 2.0


def test_other_calls_of_the_action_finish_before_fault_is_raised():
    ended = []

    async def slow() -> str:
        await asyncio.sleep(0.02)
        ended.append("slow")
        return "done"

    with pytest.raises(ToolFault):
        run([FlakyTool(9).tool(), tool_of(slow, "slow")], "it", "slow")
    assert ended == ["slow"]


def test_retry_counts_towards_the_deadline_of_the_call():
    tries = 0

    async def late() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise WorldError("gone")
        await asyncio.Event().wait()
        return "never"

    (outcome,) = run([tool_of(late, traits=SAFE)], "it", limits=ToolLimits(timeout_s=0.05))
    assert (outcome.status, outcome.retried, outcome.cost) == (ToolStatus.TIMED_OUT, True, 4.0)


def test_episode_with_tool_fault_is_retried_in_a_new_environment():
    failing = FlakyTool(2)
    world = RecordingWorld(tools=(failing.tool(),))
    scheduler = make_scheduler(scripted([write("it"), "Paris"]), world, retries=2)
    (episode,) = asyncio.run(scheduler.run(make_requests(1)))
    assert (failing.called, episode.key.attempt, episode.trajectory.answer) == (3, 2, "Paris")
    scheduler.ledger.finish(episode.key, RolloutOutcome.TRAINED, "used")
    account = scheduler.ledger.close(0)
    assert account.by_reason == {"failed/tool": 2, "trained/used": 1}
    assert len(world.made) == 3
    assert all(env.events[-1] == "close" for env in world.made)


def test_episode_with_permanent_tool_fault_fails_without_rewards():
    world = RecordingWorld(tools=(FlakyTool(99).tool(),))
    limits = RolloutConfig(retries=1, max_failure_rate=1.0)
    (episode,) = asyncio.run(make_scheduler(scripted([write("it"), "Paris"]), world, limits).run(make_requests(1)))
    failure = episode.trajectory.failure
    assert (failure.part, failure.attempts) == ("tool", 2)
    assert "The server is gone." in failure.error
    assert episode.trajectory.rewards == {}


# Deadlines


@pytest.mark.parametrize(
    ("latency", "timeout_s", "deadline_s"),
    [("instant", None, 5.0), ("fast", None, 20.0), ("slow", None, 60.0), ("slow", 7.0, 7.0), ("instant", 90, 90)],
)
def test_deadline_comes_from_the_tool_or_its_latency_class(latency, timeout_s, deadline_s):
    made = tool_of(lambda: "", timeout_s=timeout_s, traits=Traits(latency=latency))
    assert ToolLimits(timeout_s=20.0).deadline_s(made) == deadline_s


def test_hanging_tools_time_out_by_latency_class():
    async def never() -> str:
        await asyncio.Event().wait()
        return ""

    tools = [tool_of(never, name, traits=Traits(latency=name)) for name in ("instant", "fast", "slow")]
    outcomes = run(tools, "instant", "fast", "slow", limits=ToolLimits(timeout_s=0.08))
    assert [o.output for o in outcomes] == [
        "Error: instant took longer than 0.02 s.",
        "Error: fast took longer than 0.08 s.",
        "Error: slow took longer than 0.24 s.",
    ]


# Costs


def test_only_started_calls_have_a_cost():
    async def never() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)  # holds the only place until the second call's deadline has passed
        return ""

    @tool(traits=Traits(cost=0.5))
    def add(a: int) -> str:
        return str(a)

    crowded = tool_of(never, "crowded", concurrency=1, timeout_s=0.03, traits=Traits(cost=3.0))
    calls = [("add", {"a": 1}), ("add", {"a": "1"}), ("none", {}), ("crowded", {}), ("crowded", {})]
    asked = tuple(ToolCall(str(i), name, arguments) for i, (name, arguments) in enumerate(calls))
    outcomes = asyncio.run(
        ToolExecutor([add, crowded], PATIENT).run(Action(Message(role="assistant", content=""), asked))
    )
    assert [o.cost for o in outcomes] == [0.5, 0.0, 0.0, 3.0, 0.0]


def test_episode_cost_is_summed_and_reported_by_tool():
    late = threading.Event()

    @tool(traits=Traits(cost=0.1))
    def cheap() -> str:
        return "x"

    @tool(timeout_s=0.02, traits=Traits(cost=4.0))
    def dear() -> str:
        late.wait(10)
        return "x"

    world = RecordingWorld(tools=(cheap, dear))
    both = write("cheap") + write("cheap") + write("cheap") + write("dear")
    once = play(scripted([both, "Paris"]), world)
    none = play(scripted(["Paris"]), world)
    late.set()
    assert once.tool_cost == pytest.approx(4.3, abs=1e-12)
    assert none.tool_cost == 0.0
    metrics = rollout_metrics([Group(make_task(), (once, none))])
    assert metrics["tools/cost_per_episode"] == pytest.approx(2.15, abs=1e-12)
    assert metrics["tools/cheap/cost"] == pytest.approx(0.15, abs=1e-12)
    assert metrics["tools/dear/cost"] == 2.0
    assert (metrics["tools/cheap/timeout_rate"], metrics["tools/dear/timeout_rate"]) == (0.0, 1.0)
    assert metrics["tools/dear/retried"] == 0
    seconds = StepTimings().metrics([once, none])
    assert seconds["tools/cheap/total_s"] == pytest.approx(3 * seconds["tools/cheap/mean_s"])
    assert seconds["tools/dear/total_s"] >= 0.02


def test_retries_are_counted():
    world = RecordingWorld(tools=(FlakyTool(1).tool(traits=SAFE),))
    played = play(scripted([write("it") + write("it"), "Paris"]), world)
    metrics = rollout_metrics([Group(make_task(), (played,))])
    assert (metrics["tools/it/calls"], metrics["tools/it/retried"]) == (2, 1)
    assert metrics["tools/it/cost"] == 6.0
    assert metrics["tools/it/error_rate"] == 0


# Calls at once


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_tool_concurrency_limit_holds_across_episodes_of_a_scheduler(is_async):
    lock, running, most, full = threading.Lock(), 0, 0, threading.Event()

    def enter(change):
        nonlocal running, most
        with lock:
            running += change
            most = max(most, running)
            if most >= 3:
                full.set()

    async def coroutine() -> str:
        enter(1)
        await until(full.is_set)
        await asyncio.sleep(0.005)
        enter(-1)
        return "done"

    def plain() -> str:
        enter(1)
        full.wait(60)
        threading.Event().wait(0.005)
        enter(-1)
        return "done"

    bounded = tool_of(coroutine if is_async else plain, concurrency=3, traits=Traits(latency="slow"))
    scheduler = make_scheduler(scripted([write("it") + write("it"), "Paris"]), RecordingWorld(tools=(bounded,)))
    episodes = asyncio.run(scheduler.run(make_requests(8)))
    assert [e.trajectory.answer for e in episodes] == ["Paris"] * 8
    assert most == 3
