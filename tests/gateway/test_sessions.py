"""The session server: replies in each dialect, as the SDKs parse them, and what clients may not do."""

import asyncio
import json
from contextlib import asynccontextmanager

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from ludus.config.sections.rollout import AgentConfig, RolloutConfig
from ludus.engines.base import TOKEN_WATCHERS
from ludus.gateway.agents import agent_server
from ludus.gateway.sessions import SessionServer
from ludus.rollouts.agent_session import AgentSession
from ludus.types import StopReason, Trajectory
from small_worlds import RecordingWorld, call, end_token, in_order, make_chat, scripted, tokenizer

PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
LIMITS = RolloutConfig()
SEARCH = call("echo", text="x")
TOOL = {"type": "function", "function": {"name": "echo", "parameters": {"type": "object", "properties": {}}}}
THOUGHT = "<think>\nhm\n</think>\nhello"


@asynccontextmanager
async def serving(*lines, limits=LIMITS, server=None, **options):
    """Yield a session, and an HTTP client with its base URL and key."""
    engine = scripted(in_order(*lines), **options)
    session = AgentSession(lambda: make_chat(engine), limits)
    server = server or SessionServer()
    url, key = session.address = await server.add(session)
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=20) as client:
        try:
            yield session, client, engine
        finally:
            session.close()
            server.remove(session)


@pytest.fixture(scope="module")
def refusing():
    """Send a body to a session of one server; return the response."""
    server = SessionServer()

    async def ask(path, body):
        async with serving("a", server=server) as (_, client, _):
            return await client.post(f"/{path}", json=body)

    with asyncio.Runner() as runner:
        yield lambda path, body: runner.run(ask(path, body))


def chat(*messages, **fields):
    return {"model": "m", "messages": list(messages), **fields}


def user(text):
    return {"role": "user", "content": text}


def run(coroutine):
    return asyncio.run(coroutine)


def data_of(stream):
    """The data of the server-sent events."""
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_chat_completions_continue_one_row():
    async def dialogue():
        async with serving(SEARCH, THOUGHT) as (session, client, engine):
            first = (await client.post("/chat/completions", json=chat(user("a"), tools=[TOOL]))).json()
            message = first["choices"][0]["message"]
            assert first["choices"][0]["finish_reason"] == "tool_calls"
            assert message["content"] is None
            found = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
            body = chat(user("a"), message, found, tools=[TOOL], stream=True, stream_options={"include_usage": True})
            response = await client.post("/chat/completions", json=body)
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.text.endswith("data: [DONE]\n\n")
            deltas = [one["choices"][0]["delta"] for one in data_of(response.text) if one["choices"]]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert deltas[1:] == [{"reasoning_content": "hm"}, {"content": "hello"}, {}]
            usage = data_of(response.text)[-1]["usage"]
            return [segment.kind for segment in session.segments()], usage, engine.requests

    kinds, usage, requests = run(dialogue())
    assert kinds == ["prompt", "action", "observation", "action"]
    assert usage["prompt_tokens"] == len(requests[1].token_ids)


def test_responses_continue_by_items_and_by_id():
    async def dialogue():
        async with serving(SEARCH, THOUGHT, "bye") as (session, client, _):
            tools = [{"type": "function", "name": "echo", "parameters": {"type": "object"}}, {"type": "web_search"}]
            first = (await client.post("/responses", json={"input": "a", "instructions": "i", "tools": tools})).json()
            (item,) = first["output"]
            assert (item["type"], item["name"]) == ("function_call", "echo")
            items = [user("a"), item, {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}]
            body = {"input": items, "instructions": "i", "tools": tools, "stream": True}
            events = data_of((await client.post("/responses", json=body)).text)
            assert [one["sequence_number"] for one in events] == list(range(len(events)))
            whole = events[-1]["response"]
            assert [one["type"] for one in whole["output"]] == ["reasoning", "message"]
            parts = [one["part"]["type"] for one in events if one["type"] == "response.content_part.added"]
            assert parts == ["reasoning_text", "output_text"]
            body = {"input": "b", "instructions": "i", "tools": tools, "previous_response_id": whole["id"]}
            last = (await client.post("/responses", json=body)).json()
            assert last["output"][0]["content"][0]["text"] == "bye"
            missing = await client.post("/responses", json={"input": "b", "previous_response_id": "resp_x"})
            assert missing.status_code == 404
            return [segment.kind for segment in session.segments()]

    assert run(dialogue()) == ["prompt", "action", "observation", "action", "observation", "action"]


def test_items_of_earlier_responses_are_named_by_their_ids():
    async def dialogue():
        async with serving(SEARCH, THOUGHT, "bye") as (session, client, _):
            body = {"input": [user("a")], "tools": [{"type": "function", "name": "echo", "parameters": {}}]}
            (called,) = (await client.post("/responses", json=body)).json()["output"]
            body["input"] += [called, {"type": "function_call_output", "call_id": called["call_id"], "output": "x"}]
            said = (await client.post("/responses", json=body)).json()["output"]
            assert [one["type"] for one in said] == ["reasoning", "message"]
            body["input"][1] = {"type": "item_reference", "id": called["id"]}
            body["input"] += [*({"type": "item_reference", "id": one["id"]} for one in said), user("b")]
            assert (await client.post("/responses", json=body)).status_code == 200
            return [segment.kind for segment in session.segments()]

    assert run(dialogue()) == ["prompt", "action", "observation", "action", "observation", "action"]


def test_tool_runner_of_anthropic_sends_whole_dialogues():
    @anthropic.beta_async_tool
    async def echo(text: str) -> str:
        """Repeat a text."""
        return text

    async def dialogue():
        async with serving(SEARCH, "bye") as (session, _, _):
            url, key = session.address
            async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0) as sdk:
                runner = sdk.beta.messages.tool_runner(model="m", max_tokens=50, tools=[echo], messages=[user("a")])
                last = await runner.until_done()
            assert last.content[0].text == "bye"
            return [segment.kind for segment in session.segments()]

    assert run(dialogue()) == ["prompt", "action", "observation", "action"]


def test_messages_continue_by_content_blocks():
    async def dialogue():
        async with serving(SEARCH, THOUGHT) as (session, client, engine):
            tools = [{"name": "echo", "input_schema": {"type": "object"}}]
            body = {"max_tokens": 50, "system": "s", "messages": [user("a")], "tools": tools}
            first = (await client.post("/messages", json=body)).json()
            (block,) = first["content"]
            assert (block["type"], block["input"], first["stop_reason"]) == ("tool_use", {"text": "x"}, "tool_use")
            found = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "x"}]}
            said = [user("a"), {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [found]}]
            count = (await client.post("/messages/count_tokens", json=body | {"messages": said})).json()
            assert count["input_tokens"] > 0
            text = (await client.post("/messages", json=body | {"messages": said, "stream": True})).text
            names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
            block_events = ["content_block_start", "content_block_delta", "content_block_stop"] * 2
            assert names == ["message_start", *block_events, "message_delta", "message_stop"]
            assert data_of(text)[-2]["usage"]["input_tokens"] == len(engine.requests[1].token_ids)
            assert engine.requests[0].params.max_new_tokens == 50
            return [segment.kind for segment in session.segments()]

    assert run(dialogue()) == ["prompt", "action", "observation", "action"]


def test_unexpected_error_is_one_that_sdks_do_not_repeat(caplog):
    async def ask():
        async with serving() as (_, client, _):  # a script without replies raises an error of no request
            return await client.post("/chat/completions", json=chat(user("a")))

    response = run(ask())
    assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
    assert response.json()["error"]["message"]
    assert "A request of an agent failed" in caplog.text


def test_several_choices_are_siblings():
    async def dialogue():
        async with serving("a", "b", "c") as (session, client, _):
            found = (await client.post("/chat/completions", json=chat(user("x"), n=3))).json()
            assert [one["message"]["content"] for one in found["choices"]] == ["a", "b", "c"]
            return session.segments()

    segments = run(dialogue())
    assert [s.kind for s in segments] == ["prompt", "action"] * 3


def test_session_is_named_by_its_key_only():
    async def dialogue():
        server = SessionServer()
        async with serving("a", server=server) as (_, one, _), serving("b", server=server) as (_, two, _):
            port = one.base_url.port
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                for headers in ({}, {"Authorization": "Bearer sk-guess"}):
                    assert (
                        await client.post("/v1/chat/completions", json=chat(user("x")), headers=headers)
                    ).status_code == 401
                own = {"x-api-key": one.headers["Authorization"].removeprefix("Bearer ")}
                assert (await client.post("/v1/chat/completions", json=chat(user("x")), headers=own)).status_code == 200
                assert (await client.post(f"{two.base_url}reward", json={"reward": 1}, headers=own)).status_code == 401
            assert (await two.post("/reward", json={"reward": 0.5})).status_code == 200
        assert two.base_url
        async with httpx.AsyncClient() as client:
            assert (await client.post(f"{two.base_url}chat/completions", json=chat(user("x")))).status_code == 409

    run(dialogue())


def test_retries_get_the_sent_reply_and_repeated_bodies_are_new():
    async def dialogue():
        async with serving("a", "b") as (session, client, engine):
            texts = []
            for count in (0, 1, 0):
                headers = {"x-stainless-retry-count": str(count)}
                found = await client.post("/chat/completions", json=chat(user("x")), headers=headers)
                texts.append(found.json()["choices"][0]["message"]["content"])
            return texts, len(engine.requests), session.num_turns

    assert run(dialogue()) == (["a", "a", "b"], 2, 2)


def test_client_that_disconnects_leaves_nothing():
    async def dialogue():
        release = asyncio.Event()
        async with serving("a", "b") as (session, client, engine):
            generate = engine.generate

            async def slow(request):
                await release.wait()
                return await generate(request)

            engine.generate = slow
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/chat/completions", json=chat(user("x")), timeout=0.3)
            release.set()
            await asyncio.sleep(0.3)
            assert session.segments() == ()
            engine.generate = generate
            assert (await client.post("/chat/completions", json=chat(user("x")))).status_code == 200
            return session.num_turns

    assert run(dialogue()) == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("chat/completions", chat(user("x"), frequency_penalty=1), 400, "frequency_penalty"),
        ("chat/completions", chat(user("x"), reasoning_effort="low", prompt_cache_key="k", temperature=3), 200, ""),
        ("chat/completions", chat(user("x"), logprobs=True), 400, "logprobs"),
        ("chat/completions", chat(user("x"), ignore_eos=True), 400, "ignore_eos"),
        ("chat/completions", chat(user("x"), tools=[TOOL], tool_choice=None, stop=[""]), 200, "a"),
        ("responses", {"input": "x", "tools": None, "tool_choice": None, "model": None}, 200, "a"),
        ("messages", {"messages": [user("x")], "tools": None, "tool_choice": None, "stop_sequences": None}, 200, "a"),
        ("messages", {"messages": [user("x")], "output_config": {"format": {"type": "json_schema"}}}, 400, "schema"),
        (
            "messages",
            {"messages": [user("x")], "output_config": {"format": {"type": "xml", "schema": {}}}},
            400,
            "type",
        ),
        ("messages", {"messages": [user("x")], "output_config": {"effort": "low", "format": None}}, 200, "a"),
        (
            "messages/count_tokens",
            {"messages": [user("x")], "tools": [{"name": "a", "input_schema": {"properties": 3}}]},
            400,
            "render",
        ),
        ("chat/completions", chat(user("x"), {"role": "assistant", "content": "so"}), 200, "a"),
        ("responses", {"input": [{"role": "assistant", "content": "so"}]}, 200, "a"),
        ("responses", {"input": []}, 400, "messages"),
        ("messages", {"messages": [user("x"), {"role": "assistant", "content": "so"}]}, 400, "last message"),
        ("messages/count_tokens", {"messages": [user("x"), {"role": "assistant", "content": "so"}]}, 200, "input_to"),
        ("chat/completions", chat(user("x"), tool_choice={"type": "allowed_tools"}), 400, "tool_choice"),
        ("chat/completions", chat(), 400, "messages"),
        ("chat/completions", chat(user([{"type": "input_audio"}])), 400, "messages.0.content.list[_Part].0.type"),
        ("chat/completions", chat(user([{"type": "image_url"}])), 400, "image_url is missing"),
        ("chat/completions", chat(user([{"type": "image_url", "image_url": {"url": PIXEL}}])), 400, "images"),
        (
            "chat/completions",
            chat(
                user("x"), {"role": "assistant", "content": [{"type": "text", "text": "a", "refusal": None}]}, user("y")
            ),
            200,
            "a",
        ),
        ("messages", {"messages": [user("x")], "thread": {"type": "create"}}, 400, "thread_unsupported_request"),
        ("responses", {"input": [{"type": "item_reference", "id": "msg_x"}]}, 404, "msg_x"),
        ("chat/completions", [], 400, ""),
        ("responses", {"input": "x", "background": True}, 400, "background"),
        ("responses", {"input": [{"type": "computer_call"}]}, 400, "computer_call"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "image"),
        ("messages", {"messages": 3}, 400, "messages"),
        ("messages", {"messages": [{"role": "user", "content": []}]}, 400, "no messages"),
        ("reward", {"reward": "much"}, 400, "reward"),
        ("chat/completions", chat(user("word " * 3000)), 400, "prompt_too_long"),
        ("completions", {"prompt": "x", "echo": True}, 400, "echo"),
        ("completions", {"prompt": "x", "logprobs": 1}, 400, "logprobs"),
        ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("completions", {"prompt": "x", "add_special_tokens": False}, 400, "add_special_tokens"),
        ("completions", {"prompt": ["x", "y"]}, 400, "prompt"),
        ("completions", {"prompt": ""}, 400, "no tokens"),
        ("completions", {"prompt": "x", "temperature": 3, "user": "u", "max_tokens": None, "stop": None}, 200, "a"),
    ],
)
def test_invalid_requests_name_the_field(path, body, status, text, refusing):
    response = refusing(path, body)
    assert response.status_code == status
    assert text in response.text


FORCED = [
    ("chat/completions", chat(user("x"), tools=[TOOL]), {"type": "function", "function": {"name": "echo"}}, "required"),
    (
        "responses",
        {"input": "x", "tools": [{"type": "function", "name": "echo"}]},
        {"type": "function", "name": "echo"},
        "required",
    ),
    (
        "messages",
        {"messages": [user("x")], "tools": [{"name": "echo", "input_schema": {}}]},
        {"type": "tool", "name": "echo"},
        {"type": "any"},
    ),
]
FORCED += [
    (path, body, {"type": "allowed_tools", **({field: allowed} if field else allowed)}, named)
    for (path, body, named, _), field in zip(FORCED[:2], ("allowed_tools", ""), strict=True)
    for allowed in [{"mode": "required", "tools": [named]}]
]


@pytest.mark.parametrize(("path", "body", "named", "required"), FORCED)
def test_forced_tool_choice_guides_the_reply(path, body, named, required):
    async def ask():
        async with serving(SEARCH, SEARCH, SEARCH) as (_, client, engine):
            for choice in (named, required):
                assert (await client.post(f"/{path}", json=body | {"tool_choice": choice})).status_code == 200
            other = json.loads(json.dumps(named).replace("echo", "other"))
            refused = await client.post(f"/{path}", json=body | {"tool_choice": other})
            assert refused.status_code == 400
            assert "tool_choice" in refused.text
            return [request.params.guide for request in engine.requests]

    for guide in run(ask()):
        assert guide.kind == "lark"
        assert ")+\n" in guide.text


SINGLE = [
    ("chat/completions", {"parallel_tool_calls": False}),
    ("responses", {"parallel_tool_calls": False}),
    ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
]


@pytest.mark.parametrize(("field", "body"), list(zip(SINGLE, (body for _, body, *_ in FORCED[:3]), strict=True)))
def test_without_parallel_calls_a_reply_ends_after_its_first_call(field, body):
    path, limit = field

    async def ask():
        async with serving(SEARCH, SEARCH, SEARCH) as (_, client, engine):
            without = {name: value for name, value in body.items() if name != "tools"}
            for asked in (body, body | limit, without | limit):
                assert (await client.post(f"/{path}", json=asked)).status_code == 200
            return [request.params.stop for request in engine.requests]

    assert run(ask()) == [(), ("</tool_call>",), ()]


class Place(BaseModel):
    country: str


def test_structured_output_of_messages_guides_the_reply():
    async def ask():
        async with serving('{"country": "France"}', "b") as (_, client, engine):
            sdk = anthropic_of(client)
            asked = {"model": "m", "max_tokens": 50, "messages": [user("x")]}
            found = await sdk.messages.parse(**asked, output_format=Place)
            older = asked | {"output_format": {"type": "json_schema", "schema": {"type": "array"}}}
            assert (await client.post("/messages", json=older)).status_code == 200
            return found.parsed_output, [request.params.guide for request in engine.requests]

    place, guides = run(ask())
    assert place == Place(country="France")
    assert [guide.kind for guide in guides] == ["json_schema"] * 2
    assert json.loads(guides[0].text)["required"] == ["country"]


def test_stop_sequence_is_cut_and_named():
    async def ask():
        async with serving("one END two", "three") as (session, client, _):
            body = {"messages": [user("x")], "stop_sequences": ["END"]}
            found = (await client.post("/messages", json=body)).json()
            said = [user("x"), {"role": "assistant", "content": found["content"]}, user("y")]
            assert (await client.post("/messages", json={"messages": said})).status_code == 200
            kinds = [segment.kind for segment in session.segments()]
            return found["content"][0]["text"], found["stop_reason"], found["stop_sequence"], kinds

    text, reason, stop, kinds = run(ask())
    assert (text.strip(), reason, stop) == ("one", "stop_sequence", "END")
    assert kinds == ["prompt", "action", "observation", "action"]


def test_history_with_malformed_arguments_is_rendered_as_text():
    async def ask():
        async with serving("a") as (_, client, engine):
            bad = {"id": None, "type": "function", "function": {"name": "echo", "arguments": "{bad"}}
            said = {"role": "assistant", "content": None, "tool_calls": [bad]}
            body = chat(user("x"), said, {"role": "tool", "tool_call_id": None, "content": "error"}, tools=[TOOL])
            assert (await client.post("/chat/completions", json=body)).status_code == 200
            return engine.requests[0].token_ids

    assert "echo({bad)" in tokenizer().decode(run(ask()))


def test_requests_after_the_end_are_conflicts():
    async def dialogue():
        async with serving("a", limits=RolloutConfig(max_turns=1)) as (session, client, _):
            first = await client.post("/chat/completions", json=chat(user("x")))
            second = await client.post("/messages", json={"messages": [user("x")]})
            assert second.json()["type"] == "error"
            assert second.headers["x-should-retry"] == "false"
            return first.status_code, second.status_code, session.stop

    assert run(dialogue()) == (200, 409, StopReason.MAX_TURNS)


def openai_of(client):
    key = client.headers["Authorization"].removeprefix("Bearer ")
    return openai.AsyncOpenAI(base_url=str(client.base_url), api_key=key, max_retries=0)


def anthropic_of(client):
    key = client.headers["Authorization"].removeprefix("Bearer ")
    return anthropic.AsyncAnthropic(base_url=str(client.base_url).removesuffix("/v1/"), api_key=key, max_retries=0)


def row_kinds(session):
    segments = session.segments()
    trajectory = Trajectory("t", 0, segments, (), StopReason.ANSWERED, shared_reward=True)
    return [[segments[i].kind for i in row] for row in trajectory.rows]


def test_completion_of_a_text_continues_its_row_by_recorded_tokens():
    async def dialogue():
        async with serving("one END two", "yes", "more", "other") as (session, client, engine):
            complete = openai_of(client).completions.create
            first = await complete(model="m", prompt="Q: a\nA:", stop=" END two", max_tokens=50)
            assert (first.object, first.choices[0].finish_reason) == ("text_completion", "stop")
            text = f"Q: a\nA:{first.choices[0].text} END two<|im_end|>\nQ: b\nA:"
            second = await complete(model="m", prompt=text)
            assert engine.requests[0].params.max_new_tokens == 50
            sampled = (*tokenizer().encode("one END two"), end_token())
            assert engine.requests[1].token_ids[: len(engine.requests[0].token_ids + sampled)] == (
                engine.requests[0].token_ids + sampled
            )
            assert tokenizer().decode(engine.requests[1].token_ids) == text
            assert second.usage.prompt_tokens == len(engine.requests[1].token_ids)
            chunks = [one async for one in await complete(model="m", prompt="else", stream=True)]
            assert "".join(one.choices[0].text for one in chunks) == "more"
            return first.choices[0].text, row_kinds(session)

    text, rows = run(dialogue())
    assert text == "one"
    assert rows == [["prompt", "action", "observation", "action"], ["prompt", "action"]]


def test_text_after_a_reply_without_its_end_token_is_a_fork_of_recorded_tokens():
    """The policy sees what the client wrote: no end-of-turn token within the text."""

    async def dialogue():
        async with serving("Paris", "yes") as (session, client, engine):
            complete = openai_of(client).completions.create
            first = await complete(model="m", prompt="Q: a\nA: ")
            text = f"Q: a\nA: {first.choices[0].text}\nSure?"
            await complete(model="m", prompt=text)
            assert tokenizer().decode(engine.requests[1].token_ids) == text
            return row_kinds(session)

    assert run(dialogue()) == [["prompt", "action"], ["prompt", "observation", "action"]]


def test_completion_of_token_ids_continues_any_row():
    async def dialogue():
        async with serving("a", "b", "c", "d") as (session, client, engine):
            complete = openai_of(client).completions.create
            prompt = tokenizer().encode("x y")
            found = await complete(model="m", prompt=prompt, extra_body={"return_token_ids": True})
            sampled = found.choices[0].model_extra["token_ids"]
            assert found.choices[0].model_extra["prompt_token_ids"] == prompt
            await complete(model="m", prompt=[*prompt, *sampled, *tokenizer().encode("z")])
            assert row_kinds(session) == [["prompt", "action", "observation", "action"]]
            await complete(model="m", prompt=[[*prompt, *sampled, *tokenizer().encode("else")]])  # a fork
            assert row_kinds(session)[1] == ["prompt", "action", "observation", "action"]
            (one, other) = (tuple(request.token_ids) for request in engine.requests[1:])
            assert one[: len(prompt) + len(sampled)] == other[: len(prompt) + len(sampled)]
            await complete(model="m", prompt=tokenizer().encode("quite other"))
            return session.segments(), session.num_turns

    segments, num = run(dialogue())
    assert [s.kind for s in segments] == ["prompt", "action", *["observation", "action"] * 2, "prompt", "action"]
    assert num == 4


def test_text_completion_and_chat_of_the_same_words_are_different_rows():
    async def dialogue():
        async with serving("a", "b") as (session, client, _):
            sdk = openai_of(client)
            await sdk.completions.create(model="m", prompt="x")
            said = [user("x"), {"role": "assistant", "content": "a"}, user("y")]
            await sdk.chat.completions.create(model="m", messages=said)
            return row_kinds(session)

    assert run(dialogue()) == [["prompt", "action"]] * 2


def test_reward_of_a_response_is_the_reward_of_its_turn():
    async def dialogue():
        server = SessionServer()
        lines = ("a", "b", "c", "d", "e", "f")
        async with serving(*lines, server=server) as (session, client, _), serving("z", server=server) as (_, two, _):
            sdk, messages = openai_of(client), [user("x")]
            await sdk.chat.completions.create(model="m", messages=messages)
            messages += [{"role": "assistant", "content": "a"}, user("y")]
            second = await sdk.responses.create(model="m", input=messages)
            third = await anthropic_of(client).messages.create(model="m", max_tokens=9, messages=[user("z")])
            fork = await sdk.completions.create(model="m", prompt="q", n=2)
            assert session.turn_rewards() == ()
            other = (await two.post("/chat/completions", json=chat(user("x")))).json()
            bodies = (
                {"response_id": second.id, "reward": 2},
                {"response_id": third.id, "reward": 7},
                {"response_id": third.id, "reward": 3},
                {"response_id": fork.id, "index": 1, "reward": -1},
                {"reward": 0.5},
                {"response_id": fork.id, "reward": 1},
                {"response_id": fork.id, "index": 2, "reward": 1},
                {"response_id": other["id"], "reward": 1},
                {"response_id": "chatcmpl-x", "reward": 1},
            )
            status = [await client.post("/reward", json=body) for body in bodies]
            assert [one.status_code for one in status] == [200] * 5 + [400, 404, 404, 404]
            assert [one.json()["error"]["message"] for one in status[-2:]] == [
                f"The rollout has no reply {other['id']!r}.",
                "The rollout has no reply 'chatcmpl-x'.",
            ]
            await sdk.chat.completions.create(model="m", messages=messages)  # the second turn again, as a fork
            return session.reward, session.turn_rewards(), [s.kind for s in session.segments()].count("action")

    assert run(dialogue()) == (0.5, (0.0, 2.0, 3.0, 0.0, -1.0, 0.0), 6)


def reports_tokens(engine, gate=None):
    """Let a scripted engine report half of its tokens one by one, wait for `gate`, and report the others."""
    generate = engine.generate

    async def reported(request):
        completion = await generate(request)
        for place, token in enumerate(completion.tokens):
            if gate is not None and place == len(completion.tokens) // 2:
                await gate.wait()
            if watch := TOKEN_WATCHERS.get(request.episode):
                watch([token])
            await asyncio.sleep(0.001)
        return completion

    engine.generate = reported


LIVE = f"Let me see, it may be long. {SEARCH}"
FUNCTION = {"name": "echo", "parameters": {"type": "object", "properties": {}}}


async def stream_chat(client, add):
    sdk = openai_of(client).chat.completions
    async with sdk.stream(model="m", messages=[user("a")], tools=[TOOL | {"function": FUNCTION}]) as stream:
        async for event in stream:
            if event.type == "content.delta":
                add(event.delta)
        message = (await stream.get_final_completion()).choices[0].message
        return message.content, message.tool_calls[0].function.arguments


async def stream_responses(client, add):
    async with openai_of(client).responses.stream(
        model="m", input="a", tools=[{"type": "function", **FUNCTION, "strict": False}]
    ) as stream:
        numbers = []
        async for event in stream:
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                add(event.delta)
        assert numbers == list(range(len(numbers)))
        found = await stream.get_final_response()
        assert [one.type for one in found.output] == ["message", "function_call"]
        return found.output_text, found.output[1].arguments


async def stream_messages(client, add):
    tools = [{"name": "echo", "input_schema": FUNCTION["parameters"]}]
    asked = {"model": "m", "max_tokens": 200, "messages": [user("a")], "tools": tools}
    async with anthropic_of(client).messages.stream(**asked) as stream:
        async for text in stream.text_stream:
            add(text)
        found = await stream.get_final_message()
        assert found.usage.input_tokens > 0
        assert (found.stop_reason, [one.type for one in found.content]) == ("tool_use", ["text", "tool_use"])
        return found.content[0].text, json.dumps(found.content[1].input)


async def stream_completion(client, add):
    async for chunk in await openai_of(client).completions.create(model="m", prompt="a", stream=True, max_tokens=200):
        add(chunk.choices[0].text)
    return


@pytest.mark.parametrize("read", [stream_chat, stream_responses, stream_messages, stream_completion])
def test_text_is_streamed_while_it_is_sampled(read):
    async def dialogue():
        gate, texts = asyncio.Event(), []

        def add(text):
            texts.append(text)
            gate.set()  # the engine waits for the first text

        async with serving(LIVE) as (session, client, engine):
            reports_tokens(engine, gate)
            found = await asyncio.wait_for(read(client, add), 10)
            assert session.num_turns == 1
            return texts, found

    texts, found = run(dialogue())
    assert len([text for text in texts if text]) > 2
    if found is None:
        assert "".join(texts) == LIVE
        return
    content, arguments = found
    assert "".join(texts) == content == "Let me see, it may be long."
    assert json.loads(arguments) == {"text": "x"}


def test_streamed_reply_that_fails_or_has_no_client_leaves_nothing():
    async def dialogue():
        async with serving("one two three", "four five six", "b") as (session, client, engine):
            hangs = asyncio.Event()
            reports_tokens(engine, hangs)
            body = chat(user("x"), stream=True)
            async with client.stream("POST", "/chat/completions", json=body) as response:
                await anext(response.aiter_text())
            await asyncio.sleep(0.5)
            assert (session.num_turns, session.segments(), TOKEN_WATCHERS) == (0, (), {})
            failing = asyncio.create_task(client.post("/messages", json={"messages": [user("x")], "stream": True}))
            await asyncio.sleep(0.3)
            session.end(StopReason.MAX_TURNS)
            for one in session._acting:
                one.cancel()
            text = (await failing).text
            assert "event: content_block_delta" in text
            assert json.loads(text.split("event: error\ndata: ")[1])["type"] == "error"
            return session.num_turns

    assert run(dialogue()) == 0


ODD = (
    "one two</think>three",
    f"one</think>{SEARCH}",
    f"{SEARCH} {SEARCH}",
    "<tool_call>\n{bad",
    "",
    " one\n",
    "[1] <b>",
)
STREAMED = {
    "chat/completions": chat(user("a"), tools=[TOOL]),
    "responses": {"input": "a", "tools": [{"type": "function", "name": "echo", "parameters": {}}]},
    "messages": {"messages": [user("a")], "tools": [{"name": "echo", "input_schema": {}}]},
    "completions": {"prompt": "a", "max_tokens": 200},
}


def streamed_text(events):
    """The text of a stream in any dialect."""
    parts = []
    for one in events:
        if one.get("choices"):
            choice = one["choices"][0]
            parts.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
        elif one.get("type") == "response.output_text.delta":
            parts.append(one["delta"])
        elif one.get("type") == "content_block_delta":
            parts.append(one["delta"].get("text", ""))
    return "".join(parts)


@pytest.mark.parametrize("kind", STREAMED)
def test_stream_of_any_reply_has_its_whole_content(kind):
    """What was streamed as text and is none is followed by the content; parts have consecutive numbers."""

    async def dialogue():
        async with serving(*ODD, limits=RolloutConfig(max_turns=20)) as (session, client, engine):
            reports_tokens(engine)
            for _ in ODD:
                text = (await client.post(f"/{kind}", json=STREAMED[kind] | {"stream": True})).text
                events, reply = data_of(text), session.messages[-1]
                assert streamed_text(events).strip().endswith(reply["content"].strip())
                assert all(one["id"] in text for one in reply.get("tool_calls", []))
                check_numbers(events)
            return session.num_turns

    assert run(dialogue()) == len(ODD)


def check_numbers(events):
    """Blocks and items begin and end in order."""
    for begin, end, key in (
        ("content_block_start", "content_block_stop", "index"),
        ("response.output_item.added", "response.output_item.done", "output_index"),
    ):
        begun, ended = ([one[key] for one in events if one.get("type") == kind] for kind in (begin, end))
        assert begun == ended == list(range(len(begun)))
    if events[0].get("type", "").startswith("response."):
        assert len(events[-1]["response"]["output"]) == len(begun)


def test_thoughts_are_not_streamed_as_text():
    async def dialogue():
        async with serving(THOUGHT) as (_, client, engine):
            reports_tokens(engine)
            response = await client.post("/chat/completions", json=chat(user("a"), stream=True))
            return [one["choices"][0]["delta"] for one in data_of(response.text)]

    assert run(dialogue())[1:] == [{"reasoning_content": "hm"}, {"content": "hello"}, {}]


def test_run_without_agents_starts_no_server():
    assert agent_server(RecordingWorld(), AgentConfig()) is None
    assert agent_server(RecordingWorld(), AgentConfig(command=["true"])) is not None
