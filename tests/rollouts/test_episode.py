"""Single episodes: every stop reason has a name, and infrastructure failures are distinguished from errors of the
model.
"""

import asyncio
import json
import math
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ludus.config.sections.rollout import RolloutConfig
from ludus.diagnostics.metrics import rollout_metrics
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.errors import EngineError, UserError, WorldError
from ludus.rewards.base import Reward
from ludus.rollouts.episode import run_episode
from ludus.types import Completion, Group, Message, StepResult, StopReason, ToolStatus
from scripted_engine import Faults
from small_worlds import (
    RecordingWorld,
    call,
    echo,
    end_token,
    make_chat,
    make_task,
    play,
    renderer,
    scripted,
    tokenizer,
    tool_of,
)
from waiting import until

SEARCH = call("echo", text="The capital is Paris.")
BAD = "<tool_call>{</tool_call>"


def ids(text):
    return tuple(tokenizer().encode(text, add_special_tokens=False))


def lengths():
    """The tokens of the prompt, of a search, and of what it finds."""
    prompt = renderer().prompt(make_task().prompt, [echo])
    found = Message(role="tool", content="The capital is Paris.")
    return len(prompt), len(ids(SEARCH)) + 1, len(renderer().observation([found]))


def statuses(trajectory):
    return [outcome.status for outcome in trajectory.outcomes]


# Takes a task, gives a scored trajectory


def test_episode_with_a_tool_call_and_an_answer_is_recorded():
    world = RecordingWorld()
    engine = scripted([SEARCH, "Paris"], version=3)
    t = play(engine, world)
    assert t.stop_reason is StopReason.ANSWERED
    assert (t.answer, t.reward, t.rewards) == ("Paris", 1.0, {"right": 1.0})
    assert [m["role"] for m in t.messages] == ["user", "assistant", "tool", "assistant"]
    assert [s.kind for s in t.segments] == ["prompt", "action", "observation", "action"]
    assert [s.turn for s in t.segments] == [0, 0, 0, 1]
    assert world.made[0].events == ["start", "step", "step", "close"]
    assert engine.released == ["e"]


def test_trajectory_tokens_equal_the_tokens_of_engine_requests_and_completions():
    call_tokens = (*ids(SEARCH), end_token())
    odd = tuple(token for letter in "Paris" for token in ids(letter))  # not how the tokenizer writes it
    assert odd != ids("Paris")
    said = [
        Completion(tokens, (logprob,) * len(tokens), (version,) * len(tokens), "stop")
        for tokens, logprob, version in ((call_tokens, -0.5, 7), (odd, -0.25, 8))
    ]
    engine = scripted(said)
    t = play(engine)
    assert t.answer == "Paris"
    assert t.segments[1].tokens == call_tokens
    assert t.segments[3].tokens == odd
    assert [r.token_ids for r in engine.requests] == [t.segments[0].tokens, sum((s.tokens for s in t.segments[:3]), ())]
    assert t.token_ids[: len(engine.requests[1].token_ids)] == engine.requests[1].token_ids
    mask = t.action_mask
    assert {lp for lp, on in zip(t.behavior_logprobs, mask, strict=True) if on} == {-0.5, -0.25}
    assert {v for v, on in zip(t.versions, mask, strict=True) if on} == {7, 8}


def test_observation_tokens_are_those_of_the_renderer():
    t = play(scripted([SEARCH, "Paris"]))
    assert t.segments[2].tokens == renderer().observation([t.messages[2]])


def test_each_turn_has_a_distinct_seed_derived_from_the_episode_seed():
    def seeds(seed):
        engine = scripted([SEARCH, SEARCH, "Paris"])
        play(engine, seed=seed)
        return [request.params.seed for request in engine.requests]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 6
    assert all(0 <= seed < 2**63 for seed in seeds(1))


def test_requests_have_renderer_stop_tokens_and_fit_the_remaining_context():
    engine = scripted([SEARCH, "Paris"])
    prompt, action, observation = lengths()
    play(engine, max_tokens=prompt + action + observation + 10, max_new_tokens=action + 5)
    first, second = engine.requests
    assert first.params.stop_token_ids == renderer().stop_token_ids
    assert first.params.max_new_tokens == action + 5
    assert second.params.max_new_tokens == 10


# Every ending has a name, which the reward sees and the metrics count


def too_long_a_prompt():
    return scripted(["unused"]), {"max_tokens": 20}


ENDINGS = {
    StopReason.ANSWERED: lambda: (scripted(["Rome"]), {}),
    StopReason.EMPTY_ANSWER: lambda: (scripted([SEARCH, " \n"]), {}),
    StopReason.MAX_TURNS: lambda: (scripted([SEARCH] * 9), {}),
    StopReason.MAX_TOKENS: lambda: (scripted([SEARCH] * 9), {"max_tokens": sum(lengths()) + 10}),
    StopReason.TRUNCATED: lambda: (scripted(["word " * 500]), {}),
    StopReason.TOOL_ERRORS: lambda: (scripted([BAD] * 9), {}),
    StopReason.PROMPT_TOO_LONG: too_long_a_prompt,
    StopReason.TIMEOUT: lambda: (scripted([SEARCH] * 9, faults=Faults(hang_at={1})), {}),
}


def test_every_stop_reason_of_an_environment_has_an_episode():
    assert ENDINGS.keys() == set(StopReason) - {StopReason.FAILED, StopReason.AGENT_FAILED}


@pytest.mark.parametrize("stop", ENDINGS)
def test_stop_reason_is_passed_to_rewards_and_counted_in_metrics(stop):
    seen = []

    def look(task, trajectory):
        seen.append(trajectory.stop_reason)
        return 0.25

    engine, options = ENDINGS[stop]()
    world = RecordingWorld(rewards=(Reward("look", look, outcome=True),))
    limits = RolloutConfig(max_turns=4, episode_timeout_s=0.2 if stop is StopReason.TIMEOUT else None)
    t = play(engine, world, limits, **options)
    assert t.stop_reason is stop
    assert seen == [stop]
    assert t.reward == 0.25
    assert world.open == []
    assert engine.released == ["e"]
    metrics = rollout_metrics([Group(make_task(), (t,))])
    assert {name: value for name, value in metrics.items() if name.startswith("episode/stop/") and value} == {
        f"episode/stop/{stop}": 1.0
    }


def test_overlong_prompt_samples_no_tokens():
    engine, options = too_long_a_prompt()
    t = play(engine, **options)
    assert (t.segments, engine.requests) == ((), [])
    assert t.messages == make_task().prompt


@pytest.mark.parametrize(("room", "stop"), [(0, StopReason.PROMPT_TOO_LONG), (1, StopReason.MAX_TOKENS)])
def test_prompt_fits_if_one_token_can_follow(room, stop):
    prompt, *_ = lengths()
    assert play(scripted(["Paris"]), max_tokens=prompt + room).stop_reason is stop


def test_engine_context_length_limits_an_episode():
    context = sum(lengths())
    t = play(scripted([SEARCH, "Paris"], context_tokens=context))
    assert t.stop_reason is StopReason.MAX_TOKENS
    assert len(t.token_ids) <= context
    assert play(scripted([SEARCH, "Paris"], context_tokens=context + 50)).stop_reason is StopReason.ANSWERED


def test_outcomes_of_the_last_turn_are_recorded_but_not_observed():
    t = play(scripted([SEARCH] * 9), limits=RolloutConfig(max_turns=3))
    assert t.stop_reason is StopReason.MAX_TURNS
    assert t.num_turns == 3
    assert [s.kind for s in t.segments][-3:] == ["action", "observation", "action"]
    assert [m["role"] for m in t.messages].count("tool") == len(t.outcomes) == 3


def test_overlong_observation_is_kept_in_messages_but_not_in_segments():
    prompt, action, observation = lengths()
    fits = prompt + action + observation
    for room, kinds in ((0, ["prompt", "action"]), (1, ["prompt", "action", "observation", "action"])):
        t = play(scripted([SEARCH, "Paris"]), max_tokens=fits + room)
        assert t.stop_reason is StopReason.MAX_TOKENS
        assert [s.kind for s in t.segments] == kinds
        assert t.messages[2]["content"] == "The capital is Paris."
        assert len(t.token_ids) == fits + 1 if room else prompt + action


def test_truncated_action_keeps_its_tokens():
    t = play(scripted(["word " * 50]), max_new_tokens=7)
    assert t.stop_reason is StopReason.TRUNCATED
    assert t.segments[-1].finish_reason == "length"
    assert t.num_action_tokens == 7
    assert t.answer == ""


def test_truncated_call_does_not_run():
    ran = []
    tool = tool_of(lambda: ran.append(1) or "x")
    t = play(scripted(lambda *_: call("it") + "and so on" * 20), RecordingWorld(tools=[tool]), max_new_tokens=60)
    assert t.stop_reason is StopReason.TRUNCATED
    assert ran == []


@pytest.mark.parametrize("text", ["", "   ", "\n\n", "<think>hm</think>", "<think>never closed"])
def test_empty_answer_ends_the_episode_without_reward(text):
    t = play(scripted([text]))
    assert t.stop_reason is StopReason.EMPTY_ANSWER
    assert t.reward == 0.0
    assert t.num_turns == 1


UNKNOWN = call("nothing")
WRONG = call("echo", words="x")
RAISES = call("fails")


@pytest.mark.parametrize("error", [BAD, UNKNOWN, WRONG, RAISES], ids=["malformed", "unknown", "wrong", "raises"])
def test_consecutive_tool_errors_end_the_episode(error):
    def fails() -> str:
        raise ValueError("no")

    world = RecordingWorld(tools=[echo, tool_of(fails, "fails")])
    t = play(scripted([error] * 9), world, RolloutConfig(max_turns=9, max_tool_errors=3))
    assert t.stop_reason is StopReason.TOOL_ERRORS
    assert len(t.outcomes) == 3
    assert rollout_metrics([Group(make_task(), (t,))])["tools/error_rate"] == 1.0


def test_successful_call_resets_the_error_streak():
    lines = [BAD, UNKNOWN, SEARCH, BAD, UNKNOWN, SEARCH, BAD, WRONG, RAISES, "Paris"]
    t = play(scripted(lines), limits=RolloutConfig(max_turns=20, max_tool_errors=3))
    assert t.stop_reason is StopReason.TOOL_ERRORS
    assert t.num_turns == 9


def test_each_error_of_a_turn_counts_towards_the_streak():
    limits = RolloutConfig(max_tool_errors=3)
    assert play(scripted([BAD * 3, "Paris"]), limits=limits).stop_reason is StopReason.TOOL_ERRORS
    mixed = [SEARCH + UNKNOWN * 2, SEARCH + WRONG, "Paris"]
    assert play(scripted(mixed), limits=limits).stop_reason is StopReason.ANSWERED


def test_every_status_of_a_call_is_a_metric():
    def fails() -> str:
        raise ValueError("no")

    async def hangs() -> str:
        await asyncio.Event().wait()
        return ""

    world = RecordingWorld(tools=[echo, tool_of(fails, "fails"), tool_of(hangs, "hangs", timeout_s=0.02)])
    turn = SEARCH + UNKNOWN + WRONG + RAISES + call("hangs") + BAD
    t = play(scripted([turn, "Paris"]), world, RolloutConfig(max_tool_errors=9))
    assert sorted(statuses(t)) == sorted(ToolStatus)
    assert t.stop_reason is StopReason.ANSWERED
    metrics = rollout_metrics([Group(make_task(), (t,))])
    assert all(metrics[f"tools/status/{status}"] == pytest.approx(1 / 6) for status in ToolStatus)
    assert metrics["tools/hangs/calls"] == 1


# Raises for the infrastructure only, with its own words; always closes


async def hang(_):
    await asyncio.Event().wait()


def raising(error):
    async def hook(_):
        raise error

    return hook


def giving(value):
    async def hook(_):
        return value

    return hook


def breaks(hooks=None, script=(SEARCH, "Paris"), kind=WorldError, **options):
    """The error of an episode that breaks; environment and conversation are closed all the same."""
    world = RecordingWorld(hooks=hooks or {}, **options.pop("world", {}))
    engine = options.pop("engine", None) or scripted(list(script))
    with pytest.raises(kind) as failure:
        play(engine, world, **options)
    assert [env.events[-1] for env in world.made] == ["close"]
    assert engine.released == ["e"]
    return failure.value


@pytest.mark.parametrize("what", ["start", "step", "close"])
@pytest.mark.parametrize(
    "error",
    [RuntimeError("no disk"), SystemExit("no disk"), asyncio.CancelledError("no disk"), TimeoutError("no disk")],
    ids=lambda error: type(error).__name__,
)
def test_environment_exception_is_reported_with_its_type_and_message(what, error):
    failure = breaks({what: raising(error)})
    assert str(failure) == f"The environment's {what} raised {type(error).__name__}: no disk"
    assert failure.__cause__ is error


@pytest.mark.parametrize("what", ["start", "step", "close"])
def test_hanging_environment_fails_after_its_time_limit(what):
    failure = breaks({what: hang}, limits=RolloutConfig(environment_timeout_s=1))
    assert str(failure).startswith(f"The environment's {what} took longer than 1 s.")
    assert "rollout.environment_timeout_s" in failure.hint


def test_ludus_errors_of_an_environment_propagate_unchanged():
    given = UserError("The disk is full.", "Make room.")
    assert breaks({"start": raising(given)}, kind=UserError) is given


@pytest.mark.parametrize(
    ("what", "value", "words"),
    [
        ("start", 3, "start returned int, not list"),
        ("step", "done", "step returned str, not StepResult"),
        ("step", StepResult(reward=math.nan), "step returned the reward nan"),
        ("start", [Message(role="user", content=None)], "cannot be rendered"),
        ("start", [{"content": "no role"}], "cannot be rendered"),
    ],
)
def test_invalid_return_value_of_an_environment_is_its_failure(what, value, words):
    assert words in str(breaks({what: giving(value)}))


def test_an_observation_that_cannot_be_rendered_is_the_environments_failure():
    odd = StepResult(messages=(Message(role="tool", content="\ud800"),))
    assert "cannot be rendered" in str(breaks({"step": giving(odd)}))


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda task, t: 1 / 0, "A reward of task t raised ZeroDivisionError"),
        (lambda task, t: math.nan, "reward 'odd' of task t is nan"),
        (lambda task, t: None, "raised TypeError"),
    ],
    ids=["raises", "nan", "none"],
)
def test_failing_reward_is_never_treated_as_zero(reward, words):
    failure = breaks(world={"rewards": (Reward("odd", reward, outcome=True),)})
    assert words in str(failure)


def test_engine_failure_fails_the_episode():
    failure = breaks(kind=EngineError, engine=scripted([SEARCH, "Paris"], faults=Faults(fail_at={1})))
    assert "Scripted failure of call 1" in str(failure)


@pytest.mark.parametrize(
    ("completion", "words"),
    [
        (Completion((5, 6), (-1.0, -1.0), (0, 0), "abort"), "aborted an action"),
        (Completion((5, 6), (-1.0,), (0, 0), "stop"), "2 tokens, 1 log-probabilities and 2 versions"),
        (Completion((5, 6), (-1.0, -1.0), (), "stop"), "2 tokens, 2 log-probabilities and 0 versions"),
        (Completion((5, 6), (-1.0, math.nan), (0, 0), "stop"), "not a finite number"),
        (Completion((5,), (-math.inf,), (0,), "stop"), "not a finite number"),
    ],
)
def test_invalid_completion_is_an_engine_failure(completion, words):
    assert words in str(breaks(kind=EngineError, engine=scripted([completion])))


def test_engine_that_cancels_itself_is_a_failure():
    def cancel(request, turn):
        raise asyncio.CancelledError

    assert "cancelled from inside" in str(breaks(kind=EngineError, engine=scripted(cancel)))


def test_an_action_without_tokens_is_an_empty_answer():
    assert play(scripted([Completion((), (), (), "stop")])).stop_reason is StopReason.EMPTY_ANSWER


def test_the_first_failure_is_raised_and_the_second_is_a_note():
    failure = breaks({"step": raising(RuntimeError("first")), "close": raising(RuntimeError("second"))})
    assert "first" in str(failure)
    assert any("second" in note for note in failure.__notes__)


@pytest.mark.parametrize("what", ["start", "step", "act"])
def test_cancelling_closes_environment_and_conversation(what):
    world = RecordingWorld(hooks={what: hang})
    engine = scripted([SEARCH] * 3, faults=Faults(hang_at={0} if what == "act" else ()))

    async def cancel():
        env = world.environment(make_task())
        running = asyncio.create_task(run_episode(make_task(), 0, env, make_chat(engine), RolloutConfig()))
        await until(lambda: engine.requests if what == "act" else what in env.events)
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    assert world.made[0].events[-1] == "close"
    assert engine.released == ["e"]


def test_time_limit_keeps_the_segments_recorded_so_far():
    t = play(
        scripted([SEARCH] * 9, faults=Faults(hang_at={2})), limits=RolloutConfig(max_turns=9, episode_timeout_s=2.0)
    )
    assert t.stop_reason is StopReason.TIMEOUT
    assert [s.kind for s in t.segments] == ["prompt", "action", "observation", "action", "observation"]


def test_start_step_and_close_run_in_one_task():
    tasks = []

    async def note(_):
        tasks.append(asyncio.current_task())

    play(scripted([SEARCH, "Paris"]), RecordingWorld(hooks=dict.fromkeys(("start", "step", "close"), note)))
    assert len(tasks) == 4
    assert len(set(tasks)) == 1


def test_turn_rewards_are_ordered_and_default_to_zero():
    results = iter([StepResult(reward=0.5), StepResult(), StepResult(done=True, reward=-1.0)])

    async def step(_):
        return next(results)

    t = play(scripted(["a", "b", "c"]), RecordingWorld(hooks={"step": step}))
    assert t.turn_rewards == (0.5, 0.0, -1.0)
    assert play(scripted(["Paris"])).turn_rewards == ()


def test_reward_receives_tags_outcomes_and_the_whole_dialogue():
    seen = []

    def look(task, trajectory):
        seen.append((task.truth, len(trajectory.messages), statuses(trajectory), trajectory.segments != ()))
        return 1.0

    play(scripted([SEARCH, "Paris"]), RecordingWorld(rewards=(Reward("look", look, outcome=True),)))
    assert seen == [("Paris", 4, [ToolStatus.OK], True)]


# Whatever is sampled


@dataclass
class Loop:
    """One event loop for all examples."""

    runner: asyncio.Runner

    def play(self, script, max_turns=3):
        world = RecordingWorld(limits=ToolLimits(max_output=200))
        conversation = make_chat(scripted(script), max_tokens=700, max_new_tokens=200)
        env = world.environment(None)
        limits = RolloutConfig(max_turns=max_turns)
        return self.runner.run(run_episode(make_task(), 0, env, conversation, limits))

    def step(self, action):
        return self.runner.run(ToolEnv([echo], ()).step(action))


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield Loop(runner)


ANYTHING = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|im_end|>",
        "<|im_start|>",
        '{"name": "echo", "arguments": ',
        '{"text": "x"}',
        '"arguments": {',
        "}",
        "]",
        "[",
        "\\",
        '"',
        "```json\n",
        "NaN",
        "1e999",
        "\\ud800",
        "\x00",
        call("echo", text="fine"),
        call("echo", text=["nested", {"deep": None}]),
        call("echo", txt=1),
        call("other", text="x"),
    ]
)
WRITTEN = st.lists(PIECES | st.text(max_size=12), max_size=12).map("".join)
SAMPLED = st.lists(st.integers(0, 339), max_size=40)


def cut(text):
    """The text with a piece of it left out or said twice."""
    return st.tuples(st.just(text), st.integers(0, len(text)), st.integers(0, len(text))).map(
        lambda parts: parts[0][: parts[1]] + parts[0][parts[2] :]
    )


MUTATED = cut(call("echo", text='quotes " and { braces }')) | cut(call("echo", text="a") * 2)


@pytest.mark.slow
@settings(max_examples=200, **ANYTHING)
@given(text=WRITTEN | MUTATED)
def test_arbitrary_text_does_not_make_parser_environment_or_renderer_raise(loop, text):
    tokens = tokenizer().encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False)
    action = renderer().parse(tokens, 0, "stop")
    result = loop.step(action)
    assert result.done is (not action.calls and not action.errors)
    assert len(result.messages) == len(result.outcomes) == len(action.calls) + len(action.errors)
    if result.messages:
        assert renderer().observation(result.messages)
    json.dumps(result.messages, ensure_ascii=False).encode("utf-8")


@pytest.mark.slow
@settings(max_examples=120, **ANYTHING)
@given(turns=st.lists(SAMPLED, min_size=3, max_size=3))
def test_arbitrary_token_sequences_do_not_make_an_episode_raise(loop, turns):
    script = [Completion(tuple(t), (-1.0,) * len(t), (0,) * len(t), "stop") for t in turns]
    trajectory = loop.play(script)
    assert trajectory.stop_reason in set(StopReason) - {StopReason.FAILED, StopReason.TIMEOUT}
    actions = [s.tokens for s in trajectory.segments if s.kind == "action"]
    assert actions == [tuple(t) for t in turns[: len(actions)]]
    assert len(trajectory.token_ids) == len(trajectory.action_mask) == len(trajectory.behavior_logprobs)
    json.dumps(trajectory.messages, ensure_ascii=False).encode("utf-8")
