"""Tool calls always end as observations: each statement of the module docstring of the toolbox."""

import asyncio
import subprocess
import sys
import threading
from typing import Annotated

import pytest
from pydantic import AfterValidator

from ludus.envs.tool_env import ToolEnv, ToolExecutor, ToolLimits, as_text, describe_error
from ludus.errors import UserError
from ludus.tools.base import tool
from ludus.types import Action, CallError, Message, ToolCall, ToolStatus
from small_worlds import call, echo, renderer, tokenizer, tool_of
from waiting import until

QUICK = ToolLimits(timeout_s=0.05)
PATIENT = ToolLimits(timeout_s=10.0)


def action(*calls, errors=()):
    return Action(Message(role="assistant", content=""), tuple(calls), tuple(errors))


def ask(name="it", number=0, **arguments):
    return ToolCall(f"call_0_{number}", name, arguments)


def run(tools, *calls, limits=PATIENT, errors=()):
    return asyncio.run(ToolExecutor(tools, limits).run(action(*calls, errors=errors)))


def run_one(function, limits=PATIENT):
    (outcome,) = run([tool_of(function)], ask(), limits=limits)
    return outcome


def can_be_shown(outcome):
    """Render an outcome as an observation and read it back."""
    message = Message(role="tool", content=outcome.output, tool_call_id=outcome.call_id, name="it")
    return tokenizer().decode(renderer().observation([message]))


@tool
def add(a: int, b: int) -> str:
    """Add."""
    return str(a + b)


# Takes the calls of one action, gives one outcome for each, in order


def test_outcomes_follow_call_order_with_malformed_calls_last():
    errors = [CallError("call_0_1", "<tool_call>", "no JSON"), CallError("call_0_9", "x", "too deep")]
    outcomes = run(
        [add, echo], ask("add", 0, a=1, b=2), ask("echo", 2, text="hello"), ask("add", 3, a=3, b=4), errors=errors
    )
    assert [(o.call_id, o.tool, o.status, o.output) for o in outcomes] == [
        ("call_0_0", "add", ToolStatus.OK, "3"),
        ("call_0_2", "echo", ToolStatus.OK, "hello"),
        ("call_0_3", "add", ToolStatus.OK, "7"),
        ("call_0_1", "", ToolStatus.MALFORMED, "Error: no JSON"),
        ("call_0_9", "", ToolStatus.MALFORMED, "Error: too deep"),
    ]


def test_action_without_calls_returns_no_outcomes():
    assert run([echo]) == ()


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        (ask("subtract"), ToolStatus.UNKNOWN_TOOL, "no tool 'subtract'. Tools: add, echo."),
        (ask("\ud800"), ToolStatus.UNKNOWN_TOOL, r"no tool '\ud800'"),
        (ask("add", a=1), ToolStatus.BAD_ARGUMENTS, "'b' is missing"),
        (ask("add", a=1, b="2"), ToolStatus.BAD_ARGUMENTS, "'b' is wrong"),
        (ask("add", a=1, b=2, c=3), ToolStatus.BAD_ARGUMENTS, "no argument 'c'"),
        (ask("echo", text={"a": [1]}), ToolStatus.BAD_ARGUMENTS, "'text' is wrong"),
        (ask("echo", text="\ud800"), ToolStatus.BAD_ARGUMENTS, "wrong"),
    ],
)
def test_invalid_calls_return_an_error_with_the_reason(asked, status, words):
    (outcome,) = run([add, echo], asked)
    assert outcome.status is status
    assert outcome.output.startswith("Error: ")
    assert words in outcome.output
    assert can_be_shown(outcome)


def test_unprintable_characters_in_validator_messages_are_replaced():
    def refuse(value: str) -> str:
        raise ValueError("never\x00")

    @tool
    def pick(key: Annotated[str, AfterValidator(refuse)]) -> str:
        return key

    (outcome,) = run([pick], ask("pick", key="x"))
    assert outcome.status is ToolStatus.BAD_ARGUMENTS
    assert "never\ufffd" in outcome.output


def test_unknown_tool_error_reports_that_there_are_no_tools():
    (outcome,) = run([], ask("search"))
    assert outcome.output == "Error: there is no tool 'search'. Tools: none."


def test_duplicate_tool_names_raise_user_error():
    with pytest.raises(UserError, match="share a name: echo, echo"):
        ToolExecutor([echo, tool_of(lambda: "", name="echo")])


# Never raises for what a call does


class UnusualError(BaseException):
    pass


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError("no words")


FAULTS = [
    ValueError("bad"),
    SystemExit(3),
    KeyboardInterrupt(),
    UnusualError("odd"),
    GeneratorExit(),
    StopIteration("over"),
    StopAsyncIteration(),
    asyncio.CancelledError(),
    TimeoutError("of its own"),
    RecursionError("deep"),
    UnprintableError(),
    ValueError("\ud800 and \x00"),
    ExceptionGroup("many", [ValueError("x")]),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_exception_in_a_tool_returns_an_error_observation(fault, is_async):
    def plain() -> str:
        raise fault

    async def coroutine() -> str:
        await asyncio.sleep(0)
        raise fault

    outcome = run_one(coroutine if is_async else plain)
    assert outcome.status is ToolStatus.RAISED
    assert outcome.output.startswith("Error: ")
    assert type(fault).__name__ in outcome.output
    assert "\x00" not in outcome.output
    assert can_be_shown(outcome)


def test_describe_error_keeps_the_message_and_tolerates_a_missing_one():
    assert describe_error(ValueError("bad")) == "ValueError: bad"
    assert describe_error(SystemExit(3)) == "SystemExit: 3"
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert describe_error(UnprintableError()) == "UnprintableError"


class UnprintableResult:
    def __str__(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("", ""),
        (None, "None"),
        ({"a": [1, "é"]}, "{'a': [1, 'é']}"),
        (3.5, "3.5"),
        (b"caf\xc3\xa9", "café"),
        (b"\xff\xfe ok", "\ufffd\ufffd ok"),
        (bytearray(b"\x80"), "\ufffd"),
        ("a\ud800b", "a?b"),
        ("a\x00b", "a\ufffdb"),
        (b"a\x00b", "a\ufffdb"),
        ("日本 🙂", "日本 🙂"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_tool_result_of_any_type_is_converted_to_text(value, shown, is_async):
    async def coroutine() -> str:
        return value

    outcome = run_one(coroutine if is_async else lambda: value)
    assert (outcome.status, outcome.output, outcome.truncated) == (ToolStatus.OK, shown, False)
    assert as_text(value) == shown
    assert shown in can_be_shown(outcome)


@pytest.mark.parametrize("value", [10**5000, UnprintableResult()], ids=["number", "object"])
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_unprintable_tool_result_returns_an_error_observation(value, is_async):
    async def coroutine() -> str:
        return value

    outcome = run_one(coroutine if is_async else lambda: value)
    assert outcome.status is ToolStatus.RAISED
    assert outcome.output.startswith("Error: ")


def test_sync_tool_returning_a_coroutine_reports_missing_async():
    async def inner():
        return "x"

    outcome = run_one(lambda: inner())
    assert outcome.status is ToolStatus.RAISED
    assert "not declared async" in outcome.output


def test_output_above_the_limit_keeps_its_head_and_tail():
    outcome = run_one(lambda: "a" * 500_000 + "b" * 500_000, ToolLimits(max_output=90))
    assert outcome.truncated
    assert outcome.output == "a" * 60 + "\n... 999910 characters left out ...\n" + "b" * 30
    assert can_be_shown(outcome)


@pytest.mark.parametrize(("length", "truncated"), [(15, False), (16, False), (17, True)])
def test_output_is_truncated_only_above_the_limit(length, truncated):
    outcome = run_one(lambda: "x" * length, ToolLimits(max_output=16))
    assert outcome.truncated is truncated
    assert outcome.output.count("x") == min(length, 16)


def test_error_outputs_are_truncated_to_the_limit():
    def fail() -> str:
        raise ValueError("x" * 1_000_000)

    raised = run_one(fail, ToolLimits(max_output=100))
    assert raised.truncated
    assert len(raised.output) < 200
    bad = CallError("call_0_0", "", "y" * 1_000_000)
    (malformed, unknown) = run([], ask("z" * 1_000_000), errors=[bad], limits=ToolLimits(max_output=100))
    for outcome in (malformed, unknown):
        assert outcome.truncated
        assert len(outcome.output) < 200


# Runs in parallel; waits for the slowest, at most its deadline


def test_sync_calls_of_one_action_run_concurrently():
    meeting = threading.Barrier(3, timeout=10)

    def meet() -> str:
        meeting.wait()
        return "met"

    outcomes = run([tool_of(meet)], ask(number=0), ask(number=1), ask(number=2))
    assert [o.output for o in outcomes] == ["met"] * 3


def test_sync_tool_does_not_block_the_event_loop():
    begun, released = threading.Event(), threading.Event()

    def wait() -> str:
        begun.set()
        return str(released.wait(10))

    async def both():
        running = asyncio.create_task(ToolExecutor([tool_of(wait)], PATIENT).run(action(ask())))
        await until(begun.is_set)
        released.set()
        return await running

    assert asyncio.run(both())[0].output == "True"


async def never() -> str:
    await asyncio.Event().wait()
    return "unreachable"


async def refuses() -> str:
    """Swallows every cancellation while the test runs."""
    while not refuses.over.is_set():
        try:
            await refuses.over.wait()
        except asyncio.CancelledError:
            refuses.num_cancelled += 1
    return "late"


def test_hanging_call_does_not_affect_outputs_of_other_calls():
    stuck = threading.Event()

    def hang() -> str:
        stuck.wait(10)
        return "late"

    tools = [tool_of(hang, "hang", timeout_s=0.05), tool_of(never, "never", timeout_s=0.05), add, echo]
    outcomes = run(tools, ask("add", 0, a=1, b=1), ask("hang", 1), ask("never", 2), ask("echo", 3, text="here"))
    stuck.set()
    assert [(o.call_id, o.status, o.output) for o in outcomes] == [
        ("call_0_0", ToolStatus.OK, "2"),
        ("call_0_1", ToolStatus.TIMED_OUT, "Error: hang took longer than 0.05 s."),
        ("call_0_2", ToolStatus.TIMED_OUT, "Error: never took longer than 0.05 s."),
        ("call_0_3", ToolStatus.OK, "here"),
    ]
    assert outcomes[1].seconds >= 0.05


def test_tool_ignoring_cancellation_times_out_after_one_cancel():
    async def run_it():
        refuses.over, refuses.num_cancelled = asyncio.Event(), 0
        (outcome,) = await ToolExecutor([tool_of(refuses)], QUICK).run(action(ask()))
        await asyncio.sleep(0)
        refused = refuses.num_cancelled
        refuses.over.set()
        return outcome, refused

    outcome, refused = asyncio.run(run_it())
    assert outcome.status is ToolStatus.TIMED_OUT
    assert refused == 1


def test_tool_timeout_overrides_the_rollout_timeout():
    patient = tool_of(never, timeout_s=0.01)
    (outcome,) = run([patient], ask(), limits=PATIENT)
    assert outcome.output == "Error: it took longer than 0.01 s."
    (outcome,) = run([tool_of(never)], ask(), limits=QUICK)
    assert outcome.output == "Error: it took longer than 0.05 s."


def test_timeout_error_raised_by_a_tool_is_reported_as_raised():
    async def fail() -> str:
        raise TimeoutError("the server is slow")

    outcome = run_one(fail)
    assert (outcome.status, outcome.output) == (ToolStatus.RAISED, "Error: TimeoutError: the server is slow")


def most_at_once(concurrency):
    """How many of six calls, two in each of three episodes, run at the same time."""
    running, most = 0, 0

    async def work() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return "done"

    shared = tool_of(work, concurrency=concurrency)

    async def episodes():
        boxes = [ToolExecutor([shared], PATIENT) for _ in range(3)]
        return await asyncio.gather(*(box.run(action(ask(), ask(number=1))) for box in boxes))

    outcomes = [o for episode in asyncio.run(episodes()) for o in episode]
    assert [o.status for o in outcomes] == [ToolStatus.OK] * 6
    return most


def test_tool_concurrency_limit_applies_across_all_episodes():
    assert most_at_once(1) == 1
    assert most_at_once(2) == 2
    assert most_at_once(0) == 6


def test_timed_out_call_releases_its_concurrency_slot():
    stuck = threading.Event()

    def may_hang(hangs: bool) -> str:
        if hangs:
            stuck.wait(10)
        return "done"

    async def one_after_the_other():
        made = tool_of(may_hang, concurrency=1)
        given = [(True, ToolLimits(timeout_s=0.5)), (False, PATIENT)]
        runs = [ToolExecutor([made], limits).run(action(ask(hangs=hangs))) for hangs, limits in given]
        return [(await run)[0].status for run in runs]

    assert asyncio.run(one_after_the_other()) == [ToolStatus.TIMED_OUT, ToolStatus.OK]
    stuck.set()


def test_waiting_for_a_concurrency_slot_counts_towards_the_timeout():
    outcomes = run([tool_of(never, concurrency=1)], ask(), ask(number=1), limits=QUICK)
    assert [o.status for o in outcomes] == [ToolStatus.TIMED_OUT] * 2


def test_cancelling_the_episode_cancels_its_tool_calls():
    begun, ended = [], []

    async def work() -> str:
        begun.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")
        return "unreachable"

    async def cancel():
        running = asyncio.create_task(ToolExecutor([tool_of(work)], PATIENT).run(action(ask(), ask(number=1))))
        await until(lambda: len(begun) == 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(0)

    asyncio.run(cancel())
    assert ended == ["cancelled"] * 2


HANGS = """
import asyncio, sys, time
from ludus.envs.tool_env import ToolExecutor, ToolLimits
from ludus.tools.base import tool
from ludus.types import Action, Message, ToolCall

@tool(timeout_s=0.05)
def hang() -> str:
    time.sleep(600)
    return "late"

@tool
def leave() -> str:
    sys.exit(7)

calls = (ToolCall("a", "hang", {}), ToolCall("b", "leave", {}))
action = Action(Message(role="assistant", content=""), calls)
outcomes = asyncio.run(ToolExecutor([hang, leave], ToolLimits()).run(action))
print(*(outcome.status for outcome in outcomes))
"""


def test_hanging_tool_does_not_block_interpreter_exit():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["timed_out", "raised"], "")


# The environment around it


def step(text, *tools):
    return asyncio.run(ToolEnv(tools, ()).step(renderer().parse(tokenizer().encode(text), 3, "stop")))


def test_a_message_without_calls_ends_the_episode():
    result = step("Paris", echo)
    assert (result.done, result.messages, result.outcomes) == (True, (), ())


def test_call_results_are_returned_as_tool_messages_naming_their_call():
    result = step(call("echo", text="a") + call("add", a=1, b=2), echo, add)
    assert not result.done
    assert result.messages == (
        Message(role="tool", content="a", tool_call_id="call_3_0", name="echo"),
        Message(role="tool", content="3", tool_call_id="call_3_1", name="add"),
    )
    assert [o.output for o in result.outcomes] == ["a", "3"]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>not JSON</tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "echo", "arguments": [1]}</tool_call>',
        '<tool_call><tool_call>{"name": "echo"}</tool_call></tool_call>',
        "Paris</tool_call>",
        '<tool_call>{"name": "echo", "arguments": ' + "[" * 5000 + "</tool_call>",
    ],
)
def test_malformed_call_returns_an_error_observation_without_ending_the_episode(text):
    result = step(text, echo)
    assert not result.done
    assert {o.status for o in result.outcomes} == {ToolStatus.MALFORMED}
    assert [m["content"] for m in result.messages] == [o.output for o in result.outcomes]
    assert all(m["name"] == "error" for m in result.messages)
    assert renderer().observation(result.messages)


def test_valid_calls_run_alongside_malformed_ones():
    result = step(call("echo", text="kept") + "<tool_call>{</tool_call>", echo)
    assert [(o.status, o.output.partition(":")[0]) for o in result.outcomes] == [
        (ToolStatus.OK, "kept"),
        (ToolStatus.MALFORMED, "Error"),
    ]


def test_tool_outcome_records_seconds_outside_the_output():
    outcome = run_one(lambda: "x")
    assert outcome.seconds > 0
    assert outcome.output == "x"
