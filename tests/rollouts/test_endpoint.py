"""Episodes against a local chat-completions server that replays a script."""

import asyncio
import json
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_server import DROP, Reply, call, error, fault_in, say, serving
from ludus.chat.parse import PARSERS
from ludus.config.sections.rollout import RolloutConfig
from ludus.envs.base import World
from ludus.envs.tool_env import ToolEnv
from ludus.errors import ConfigError, EngineError, UserError
from ludus.evaluation.evaluate import EvaluationPlan, evaluate
from ludus.rewards.base import Reward
from ludus.rewards.exact_match import ExpectedAnswers, exact_match, well_formed
from ludus.rollouts.episode import ChatSession, run_episode
from ludus.rollouts.ledger import Ledger, RolloutKey
from ludus.rollouts.openai_client import (
    OpenAIChatSession,
    OpenAIClient,
    OpenAIClientSettings,
    TokenUsage,
    endpoint_chat_factory,
    read_answer,
)
from ludus.rollouts.scheduler import RolloutRequest, SamplingPlan, scheduler
from ludus.tools.search import PassageIndex, search_tool
from ludus.types import SamplingParams, StopReason, Task, ToolStatus

PASSAGES = (
    "The airport EGLL lies near the city of London.",
    "London is the capital of the United Kingdom.",
    "The airport LFPG lies near the city of Paris.",
    "Paris is the capital of France.",
)
REWARDS = (Reward("exact_match", exact_match, outcome=True), Reward("well_formed", well_formed, weight=0.1))
PARAMS = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=32)


def task(name="t", truth="United Kingdom"):
    question = {"role": "user", "content": "Of which country is the city of EGLL the capital?"}
    return Task(name, ({"role": "system", "content": "Search."}, question), ExpectedAnswers((truth,)), {"hops": "2"})


def no_sleep(waits):
    async def sleep(seconds):
        waits.append(seconds)

    return sleep


def play(script, waits=None, parser=None, max_tokens=None, max_turns=6, **options):
    """One episode against a script; gives the trajectory, the server and the endpoint."""

    async def run(server):
        options.setdefault("timeout_s", 5.0)
        sleep = no_sleep([] if waits is None else waits)
        where = OpenAIClientSettings(server.url, "m", **options)
        async with OpenAIClient(where, sleep=sleep) as endpoint:
            conversation: ChatSession = OpenAIChatSession(endpoint, PARAMS, 7, max_tokens, parser)
            world = ToolEnv([search_tool(PassageIndex(PASSAGES), 1)], REWARDS)
            limits = RolloutConfig(max_turns=max_turns)
            return await run_episode(task(), 0, world, conversation, limits), endpoint

    with serving(script) as server:
        trajectory, endpoint = asyncio.run(run(server))
        return trajectory, server, endpoint


def fails(script, kind=EngineError, **options):
    """The error of an episode that ends in one, and the requests of the server."""

    async def run(server):
        options.setdefault("timeout_s", 5.0)
        where = OpenAIClientSettings(server.url, "m", **options)
        async with OpenAIClient(where, sleep=no_sleep([])) as endpoint:
            conversation = OpenAIChatSession(endpoint, PARAMS, 7)
            conversation.open(task().prompt, ())
            await conversation.act()

    with serving(script) as server, pytest.raises(kind) as caught:
        asyncio.run(run(server))
    return caught.value, server


TWO_HOPS = [
    Reply(say(None, call("airport EGLL city", "x1"), finish="tool_calls", reasoning_content="First EGLL.")),
    Reply(say("", call("London capital", "x2"), finish="tool_calls", prompt=30, reasoning="Then London.")),
    Reply(say("The United Kingdom", prompt=50)),
]


def test_two_hop_dialogue_is_played_and_scored():
    trajectory, server, endpoint = play(TWO_HOPS, api_key="sk-1")
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ANSWERED, 1.1)
    assert trajectory.segments == ()
    assert [outcome.output for outcome in trajectory.outcomes] == [PASSAGES[0], PASSAGES[1]]
    assert [m.get("reasoning_content") for m in trajectory.messages if m["role"] == "assistant"] == [
        "First EGLL.",
        "Then London.",
        None,
    ]
    assert endpoint.usage == TokenUsage(90, 15, 3, 3)
    first, _, last = server.requests
    assert [m["role"] for m in last["messages"]] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert last["messages"][2] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [call("airport EGLL city", "x1")],
        "reasoning_content": "First EGLL.",
    }
    assert last["messages"][4]["reasoning"] == "Then London."
    assert last["messages"][3] == {"role": "tool", "content": PASSAGES[0], "tool_call_id": "x1", "name": "search"}
    assert first["tools"][0]["function"]["parameters"]["required"] == ["query"]
    assert {k: first[k] for k in ("model", "temperature", "top_p", "max_tokens")} == {
        "model": "m",
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 32,
    }
    assert "top_k" not in first
    assert "stop" not in first
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-1"}
    assert set(server.paths) == {"/v1/chat/completions"}
    seeds = [request["seed"] for request in server.requests]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds == [request["seed"] for request in play(TWO_HOPS)[1].requests]


def answers_by_itself(body):
    """A model that solves the search tasks from what it has read."""
    results = [m["content"] for m in body["messages"] if m["role"] == "tool"]
    if not results:
        return Reply(say(None, call("airport EGLL city")), delay_s=0.02)
    if len(results) == 1:
        return Reply(say(None, call(f"capital {results[0].split()[-1]}")))
    return Reply(say(results[1].partition("capital of ")[2].strip(".").removeprefix("the ")))


@dataclass
class SmallWorld(World):
    name: str = "small"
    splits: tuple = ("test",)
    rewards: tuple = REWARDS

    def tasks(self, split):
        return [task(f"{split}-{i}", "United Kingdom" if i else "France") for i in range(3)]

    def environment(self, task):
        return ToolEnv([search_tool(PassageIndex(PASSAGES), 1)], REWARDS)


def evaluated(script, rollout):
    async def run(server):
        where = OpenAIClientSettings(server.url, "m", concurrency=2, retries=0, timeout_s=60)
        async with OpenAIClient(where) as endpoint:
            make_chat = endpoint_chat_factory(endpoint, rollout, SamplingPlan("eval", 0.5, seed=3))
            world = SmallWorld()
            plan = EvaluationPlan("test", 3, 2, 0.5, seed=3)
            result, episodes = await evaluate(scheduler(world, make_chat, rollout, Ledger()), world.tasks("test"), plan)
            return result, episodes, endpoint.usage

    with serving(script) as server:
        return *asyncio.run(run(server)), server


def test_training_evaluation_runs_against_an_endpoint():
    result, episodes, usage, server = evaluated(answers_by_itself, RolloutConfig(concurrency=6))
    assert result.successes == (0, 2, 2)
    assert {episode.trajectory.stop_reason for episode in episodes} == {StopReason.ANSWERED}
    assert usage.num_answers == len(server.requests) == 18
    assert server.most_active <= 2
    assert len({request["seed"] for request in server.requests}) == 18
    assert {request["temperature"] for request in server.requests} == {0.5}


def test_retried_episode_uses_the_same_request_seeds():
    broken = iter([True] * 2)

    def script(body):
        return Reply(error("out of memory"), 500) if next(broken, False) else answers_by_itself(body)

    first = evaluated(script, RolloutConfig(concurrency=1, retries=2))
    calm = evaluated(answers_by_itself, RolloutConfig(concurrency=1, retries=2))
    assert first[0].successes == calm[0].successes
    assert [r["seed"] for r in first[3].requests[2:]] == [r["seed"] for r in calm[3].requests]
    assert len({r["seed"] for r in first[3].requests[:3]}) == 1


@pytest.mark.parametrize("trouble", [Reply(error("busy"), 500), Reply(b"<html>", 503), DROP])
def test_temporary_failures_are_retried_with_the_same_request(trouble):
    waits = []
    trajectory, server, endpoint = play([trouble, trouble, *TWO_HOPS], waits, backoff_s=0.25)
    assert trajectory.reward == 1.1
    assert server.raw[0] == server.raw[1] == server.raw[2] != server.raw[3]
    assert waits == [0.25, 0.5]
    assert endpoint.usage.num_answers == 3


def test_retry_after_header_is_honoured_up_to_a_bound():
    waits = []
    told = [Reply(error("slow down"), 429, {"Retry-After": value}) for value in ("3", "1.5", "999", "soon")]
    trajectory, *_ = play([*told, *TWO_HOPS], waits, backoff_s=0.25, max_wait_s=20.0)
    assert trajectory.reward == 1.1
    assert waits == [3.0, 1.5, 20.0, 2.0]


def test_error_after_the_last_retry_contains_the_server_message():
    failed, server = fails([Reply(error("CUDA is\nout of memory"), 503)] * 3, retries=2)
    assert len(server.requests) == 3
    assert "503: CUDA is out of memory" in str(failed)
    assert server.url in str(failed)


@pytest.mark.parametrize(
    ("status", "words"),
    [(404, "does not serve the model 'm'"), (401, "rejects the API key for the model 'm'"), (403, "rejects")],
)
def test_wrong_model_or_key_raises_user_error(status, words):
    failed, server = fails([Reply(error("no such thing"), status)], UserError, api_key="sk-secret")
    assert words in str(failed)
    assert "no such thing" in str(failed)
    assert server.url in str(failed)
    assert "sk-secret" not in str(failed)
    assert failed.hint
    assert len(server.requests) == 1


def test_rejected_request_is_not_retried():
    failed, server = fails([Reply({"detail": "tools are not supported"}, 422)])
    assert "422" in str(failed)
    assert "tools are not supported" in str(failed)
    assert len(server.requests) == 1


def picky(*refusals):
    """A server that refuses a body by the first of `refusals`, functions of it, that returns a reply."""

    def script(body):
        refused = next(filter(None, (refuse(body) for refuse in refusals)), None)
        thought = {} if any(m["role"] == "assistant" for m in body["messages"]) else {"reasoning": "EGLL?"}
        return refused or Reply(say(None, call("EGLL", "x1"), **thought) if thought else say("United Kingdom"))

    return script


def openai(name, allowed=lambda _: False):
    """Refuses a field as OpenAI does."""
    told = f"Unsupported parameter: '{name}' is not supported with this model. Change 'top_p' at will."
    return lambda body: Reply(error(told, param=name), 400) if not allowed(body.get(name)) else None


def pydantic_style(name):
    """Refuses a field as servers built on FastAPI do."""
    detail = [{"loc": ["body", name], "msg": "Extra inputs are not permitted"}]
    return lambda body: Reply({"detail": detail}, 422) if name in body else None


def hidden_reasoning(body):
    """Refuses reasoning in the history."""
    found = any("reasoning" in message for message in body["messages"])
    return Reply(error("messages.2: unknown field reasoning"), 400) if found else None


ABSENT = (lambda value: value is None,)
REFUSALS = {
    "max_tokens": (openai("max_tokens", *ABSENT), {"max_completion_tokens": 32}, {"max_tokens"}),
    "temperature": (openai("temperature", lambda v: v in (None, 1)), {}, {"temperature"}),
    "seed": (pydantic_style("seed"), {"max_tokens": 32}, {"seed"}),
    "reasoning": (hidden_reasoning, {"temperature": 0.7}, set()),
}


@pytest.mark.parametrize("field", REFUSALS)
def test_rejected_field_is_adapted_once_and_remembered(field):
    refusal, kept, gone = REFUSALS[field]
    trajectory, server, endpoint = play(picky(refusal))
    assert trajectory.stop_reason is StopReason.ANSWERED
    last = server.requests[-1]
    assert kept.items() <= last.items()
    assert not gone & last.keys()
    assert not any("reasoning" in message for message in last["messages"]) or field != "reasoning"
    assert last["top_p"] == 0.9
    assert len(server.requests) == 3  # two turns, and one refusal
    assert [field in notice for notice in endpoint.accepted.notices()] == [True]


def test_concurrent_requests_adapt_to_several_rejected_fields():
    def above_zero(body):
        refused = {"error": "`temperature` must be strictly positive", "error_type": "validation"}
        return Reply(refused, 422) if body["temperature"] == 0 else None

    fields = (above_zero, *map(pydantic_style, ("seed", "top_p", "max_tokens", "max_completion_tokens")))

    async def run(server):
        async with OpenAIClient(OpenAIClientSettings(server.url, "m")) as endpoint:
            params = SamplingParams(temperature=0.0, max_new_tokens=8)
            await asyncio.gather(*(endpoint.chat(task().prompt, (), params, 0) for _ in range(3)))
            before = len(server.requests)
            await endpoint.chat(task().prompt, (), params, 0)
            return tuple(endpoint.accepted.notices()), len(server.requests) - before

    with serving(picky(*fields)) as server:
        notices, requests = asyncio.run(run(server))
    assert requests == 1
    assert server.requests[-1].keys() == {"model", "messages", "temperature"}
    assert server.requests[-1]["temperature"] == 0.01
    assert len(notices) == 4


def test_unrelated_error_quoting_fields_fails_after_one_retry_per_field():
    failed, server = fails([Reply(error("bad history: {'temperature': 0.7, 'seed': 1}"), 400)] * 9)
    assert "bad history" in str(failed)
    assert len(server.requests) == 3  # without temperature, then without the seed


def test_rejected_field_set_by_the_user_is_not_changed():
    failed, server = fails([Reply(error("no seed", param="seed"), 400)] * 2, extra={"seed": 3})
    assert "no seed" in str(failed)
    assert [body["seed"] for body in server.requests] == [3]


def test_unreachable_server_raises_engine_error_after_retries():
    with serving([]) as server:
        url = server.url
    waits = []
    where = OpenAIClientSettings(url, "m", retries=2)

    async def run():
        async with OpenAIClient(where, sleep=no_sleep(waits)) as endpoint:
            await endpoint.chat(task().prompt, (), PARAMS, 0)

    with pytest.raises(EngineError, match=r"did not respond \(3 attempts\): ConnectError") as caught:
        asyncio.run(run())
    assert url in str(caught.value)
    assert len(waits) == 2


@pytest.mark.parametrize("slow", [Reply(say("late"), delay_s=20.0), Reply(say("x" * 2000), drip=True)])
def test_request_timeout_is_not_retried(slow):
    failed, server = fails([slow] * 3, timeout_s=1)
    assert "within 1 s" in str(failed)
    assert len(server.requests) == 1


def test_episode_timeout_is_not_reported_as_a_server_failure():
    async def run(server):
        async with OpenAIClient(OpenAIClientSettings(server.url, "m")) as endpoint:
            conversation = OpenAIChatSession(endpoint, PARAMS, 7)
            return await run_episode(
                task(), 0, ToolEnv([], REWARDS), conversation, RolloutConfig(episode_timeout_s=0.1)
            )

    with serving([Reply(say("late"), delay_s=20.0)]) as server:
        assert asyncio.run(run(server)).stop_reason is StopReason.TIMEOUT


def test_malformed_call_receives_an_error_and_history_stays_valid():
    script = [
        Reply(say("Hm.", call("", "x1", '{"query": '))),
        Reply(say(None, call("", "x2", "{'query': 1}"), call("airport EGLL city", "x3"))),
        Reply(say("United Kingdom")),
    ]
    trajectory, server, _ = play(script)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert [(o.status, o.call_id) for o in trajectory.outcomes] == [
        (ToolStatus.MALFORMED, "x1"),
        (ToolStatus.OK, "x3"),
        (ToolStatus.MALFORMED, "x2"),
    ]
    after_first, after_second = server.requests[1]["messages"][2:], server.requests[2]["messages"][4:]
    wrong = json.dumps({"name": "search", "arguments": '{"query": '})
    assert after_first[0] == {"role": "assistant", "content": f"Hm.\n{wrong}"}
    assert after_first[1]["role"] == "user"
    assert "ends too early" in after_first[1]["content"]
    assert [m["role"] for m in after_second] == ["assistant", "tool", "user"]
    assert [c["id"] for c in after_second[0]["tool_calls"]] == ["x3"]
    assert "Python, not JSON" in after_second[2]["content"]
    assert "{'query': 1}" in after_second[0]["content"]


def test_null_content_without_calls_is_an_empty_answer():
    trajectory, server, _ = play([Reply(say(None))])
    assert trajectory.stop_reason is StopReason.EMPTY_ANSWER
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("given", "kept"), [(("p", "q"), ["p", "q"]), ((None, "q"), ["call_0_0", "call_0_1"]), (("p", "p"), None)]
)
def test_results_of_parallel_calls_are_ordered_with_unique_ids(given, kept):
    asked = [call("airport LFPG city", given[0]), call("airport EGLL city", given[1])]
    trajectory, server, _ = play([Reply(say(None, *asked)), Reply(say("United Kingdom"))])
    assert trajectory.reward == 1.1
    said, *results = server.requests[1]["messages"][2:]
    ids = [c["id"] for c in said["tool_calls"]]
    assert ids == (kept or ["call_0_0", "call_0_1"])
    assert [(r["tool_call_id"], r["content"]) for r in results] == [(ids[0], PASSAGES[2]), (ids[1], PASSAGES[0])]


TOO_LONG = [
    Reply(error("This model's maximum context length is 64 tokens. However, you requested 99 tokens."), 400),
    Reply(error("Input is too large.", code="context_length_exceeded"), 400),
    Reply(error("The input (99 tokens) is longer than the model's context length (64 tokens)."), 400),
    Reply(error("the request exceeds the available context size", type="exceed_context_size_error"), 500),
]


@pytest.mark.parametrize("refusal", TOO_LONG)
def test_context_overflow_is_a_stop_reason(refusal):
    trajectory, server, _ = play([refusal])
    assert trajectory.stop_reason is StopReason.PROMPT_TOO_LONG
    assert len(server.requests) == 1
    trajectory, server, _ = play([TWO_HOPS[0], refusal])
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("replies", "budget", "stop", "asked"),
    [
        ([say("United Kingdom", prompt=40)], 40, StopReason.PROMPT_TOO_LONG, [32]),
        ([say(None, call("EGLL"), prompt=60), say("x", prompt=90)], 90, StopReason.MAX_TOKENS, [32, 25]),
        ([say(None, call("EGLL"), prompt=85), say("x")], 90, StopReason.MAX_TOKENS, [32]),
        (
            [say(None, call("EGLL"), prompt=60), say("x", prompt=65, completion=25, finish="length")],
            90,
            StopReason.MAX_TOKENS,
            [32, 25],
        ),
        ([say("x", prompt=30, completion=32, finish="length")], 90, StopReason.TRUNCATED, [32]),
        ([say(None, call("EGLL"), prompt=60), say("x", prompt=85)], 90, StopReason.ANSWERED, [32, 25]),
        ([say(None, call("EGLL"), prompt=60), say("x", prompt=86)], 90, StopReason.MAX_TOKENS, [32, 25]),
    ],
)
def test_token_budget_uses_the_token_counts_of_the_server(replies, budget, stop, asked):
    trajectory, server, _ = play([Reply(reply) for reply in replies], max_tokens=budget)
    assert trajectory.stop_reason is stop
    assert [request["max_tokens"] for request in server.requests] == asked


@pytest.mark.parametrize(
    "body",
    [
        b"<html>Bad gateway</html>",
        b"",
        b"[]",
        b'"text"',
        b"\xff\xfe{",
        {"object": "list", "data": ["bad gateway"]},
        {"choices": []},
        {"choices": [{"text": "a completion, no chat"}]},
        {"choices": [{"message": {"content": 5}}]},
        {"choices": [{"message": {"content": "", "tool_calls": [{"id": "a"}]}}]},
        {"choices": {"message": {"content": "x"}}},
        b"[" * 100_000,
    ],
)
def test_malformed_response_raises_engine_error_with_an_excerpt(body):
    failed, server = fails([Reply(body)])
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert "invalid chat completion" in str(failed)
    assert (raw[:20].decode("utf-8", "replace") or "an empty body") in str(failed)
    assert server.url in str(failed)
    assert len(str(failed)) < 600


@pytest.mark.parametrize(
    ("given", "kept"),
    [*((name, "stop") for name in ("stop", "tool_calls", "content_filter", None, "eos")), ("length", "length")],
)
def test_server_finish_reasons_map_to_stop_or_length(given, kept):
    answer = read_answer(json.dumps(say("x", finish=given)).encode(), 0)
    assert answer.action.finish_reason == kept


@pytest.mark.parametrize("given", ["abort", "error"])
def test_abort_or_error_finish_reason_is_an_engine_failure(given):
    failed, _ = fails([Reply(say("x", finish=given))])
    assert f"finish reason '{given}'" in str(failed)


def test_parser_extracts_calls_left_in_the_text_by_the_server():
    asked = '<think>EGLL?</think><tool_call>{"name": "search", "arguments": {"query": "EGLL"}}</tool_call>'
    script = [Reply(say(asked)), Reply(say("<tool_call>{</tool_call>")), Reply(say("United Kingdom"))]
    trajectory, server, _ = play(script, parser=PARSERS["hermes"])
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert [o.status for o in trajectory.outcomes] == [ToolStatus.OK, ToolStatus.MALFORMED]
    assert trajectory.messages[2]["reasoning_content"] == "EGLL?"
    assert server.requests[1]["messages"][2:] == [
        {"role": "assistant", "content": asked},
        {"role": "user", "content": f"<tool_response>\n{PASSAGES[0]}\n</tool_response>"},
    ]
    without, *_ = play([Reply(say(asked))])
    assert without.answer == asked


def test_reasoning_and_user_messages_of_the_environment_are_sent():
    opening = [
        {"role": "user", "content": "Name a city."},
        {"role": "assistant", "content": "Oslo", "reasoning_content": "A capital."},
        {"role": "user", "content": "Another."},
    ]
    observed = [
        {"role": "user", "content": "Hurry."},
        {"role": "tool", "content": "Paris", "tool_call_id": "x1"},
        {"role": "tool", "content": "Bonn", "tool_call_id": "x0"},
    ]

    async def run(server):
        async with OpenAIClient(OpenAIClientSettings(server.url, "m")) as endpoint:
            conversation = OpenAIChatSession(endpoint, PARAMS, 7)
            assert conversation.open(opening, ()) is None
            await conversation.act()
            assert conversation.observe(observed) is None
            await conversation.act()

    with serving([Reply(say(None, call("cities", "x0"), call("more", "x1"))), Reply(say("Paris"))]) as server:
        asyncio.run(run(server))
    messages = server.requests[1]["messages"]
    assert messages[1] == {"role": "assistant", "content": "Oslo", "reasoning_content": "A capital."}
    assert [(m["role"], m["content"]) for m in messages[4:]] == [
        ("tool", "Paris"),
        ("tool", "Bonn"),
        ("user", "Hurry."),
    ]


def test_parser_leaves_structured_calls_unchanged():
    trajectory, server, _ = play(TWO_HOPS, parser=PARSERS["hermes"])
    assert trajectory.reward == 1.1
    assert server.requests[2]["messages"][3]["role"] == "tool"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [("", {}), ("  ", {}), (None, {}), ({"query": "a"}, {"query": "a"}), ('"{\\"query\\": 1}"', {"query": 1})],
)
def test_nonstandard_argument_encodings_are_parsed(text, arguments):
    body = say(None, {"id": "a", "function": {"name": "search", "arguments": text}})
    answer = read_answer(json.dumps(body).encode(), 0)
    assert answer.action.calls[0].arguments == arguments
    assert json.loads(answer.history["tool_calls"][0]["function"]["arguments"]) == arguments


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
arguments = st.text(st.characters()) | json_values.map(json.dumps) | json_values
functions = st.fixed_dictionaries({}, optional={"name": st.text(max_size=4) | json_values, "arguments": arguments})
calls = st.lists(st.fixed_dictionaries({"function": functions}, optional={"id": st.text(max_size=2)}), max_size=3)
contents = st.none() | st.text(st.characters()) | st.just("half a pair \ud800")


@settings(deadline=None, max_examples=60)
@given(content=contents, given_calls=calls, parser=st.sampled_from([None, *PARSERS.values()]))
def test_any_model_output_yields_an_action_with_a_valid_history(content, given_calls, parser):
    answer = read_answer(json.dumps(say(content, *given_calls)).encode(), 4, parser)
    action = answer.action
    if given_calls:
        assert len(action.calls) + len(action.errors) == len(given_calls)
    ids = [c.id for c in action.calls] + [e.id for e in action.errors]
    assert len(set(ids)) == len(ids)
    results = [{"role": "tool", "tool_call_id": c["id"]} for c in answer.history.get("tool_calls", ())]
    assert fault_in([answer.history, *results]) == ""
    json.dumps([action.message, answer.history, [e.text for e in action.errors]], ensure_ascii=False).encode()


def test_extra_fields_override_request_fields_and_null_removes_one():
    extra = {"max_tokens": None, "max_completion_tokens": 9, "temperature": 1}
    request = play(TWO_HOPS, extra=extra)[1].requests[0]
    assert "max_tokens" not in request
    assert (request["max_completion_tokens"], request["temperature"]) == (9, 1)


def test_arbitrary_text_and_vendor_parameters_are_sent():
    params = SamplingParams(top_k=5, stop=("</a>",))
    with serving([Reply(say("fine"))]) as server:

        async def run():
            async with OpenAIClient(OpenAIClientSettings(server.url, "m")) as endpoint:
                return await endpoint.chat([{"role": "user", "content": "ü \ud800 \x00"}], (), params, 0)

        assert asyncio.run(run()).action.message["content"] == "fine"
    (request,) = server.requests
    assert request["messages"][0]["content"] == "ü \ud800 \x00"
    assert (request["top_k"], request["stop"]) == (5, ["</a>"])
    assert "tools" not in request


@pytest.mark.parametrize(
    "url", ["http://h/v1", "http://h/v1/", "http://h/v1/chat/completions", "http://h/v1?version=2"]
)
def test_target_url_is_derived_from_the_base_url(url):
    target = OpenAIClientSettings(url, "m").target
    assert (target.host, target.path) == ("h", "/v1/chat/completions")
    assert target.query == (b"version=2" if "?" in url else b"")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        *((url, {}) for url in ("", "h:8000/v1", "localhost", "file:///x", "http://", "http://u:p@h/v1", "http://h:x")),
        *(("http://h", {"api_key": key}) for key in ("a b", "key\n", "ключ")),
        *(("http://h", options) for options in ({"concurrency": 0}, {"retries": -1}, {"timeout_s": 0})),
    ],
)
def test_invalid_endpoint_settings_raise_error(url, options):
    with pytest.raises(UserError) as caught:
        OpenAIClientSettings(url, "m", **options)
    assert caught.value.hint


def test_unknown_parser_is_rejected_and_the_key_is_not_shown():
    where = OpenAIClientSettings("http://h/v1", "m", "sk-secret")
    assert "sk-secret" not in repr(OpenAIClient(where))
    with pytest.raises(ConfigError, match="tool parser 'xml'"):
        endpoint_chat_factory(OpenAIClient(where), RolloutConfig(), SamplingPlan("eval", 0.0, 0), "xml")


def test_chat_seed_does_not_depend_on_the_attempt():
    make_chat = endpoint_chat_factory(
        OpenAIClient(OpenAIClientSettings("http://h", "m")),
        RolloutConfig(max_seq_len=99),
        SamplingPlan("eval", 0.0, 1),
        "hermes",
    )
    first, again, other = (
        make_chat(RolloutRequest(RolloutKey(0, "t", sample, attempt), task()))
        for sample, attempt in ((0, 0), (0, 1), (1, 0))
    )
    assert first.seed == again.seed != other.seed
    assert (first.max_tokens, first.params.temperature) == (99, 0.0)
    assert first.parser is PARSERS["hermes"]
