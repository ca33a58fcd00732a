"""Responses and Messages of `ludus serve`: as the SDKs parse them, streamed while they are sampled."""

from __future__ import annotations

import json
import time

import anthropic
import openai
import pytest

from gateway.test_serve import ORDER, QUESTION, SEARCH, counts, post, server

__all__ = ["server"]  # a fixture
LETTERS = {"type": "string", "pattern": "^[a-z]{80}$"}
INSTRUCTIONS = ORDER[0]["content"]
FUNCTION = {"type": "function", "strict": False, **SEARCH["function"]}


@pytest.fixture
def openai_sdk(server):
    return openai.OpenAI(base_url=f"{server.served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def anthropic_sdk(server):
    return anthropic.Anthropic(base_url=server.served.url, api_key="none", max_retries=0)


def test_messages_are_served_with_tools_and_structured_output(server, anthropic_sdk):
    sdk = anthropic_sdk
    schema = {"type": "object", "properties": {"country": {"enum": ["France", "Chad"]}}, "required": ["country"]}
    asked = {"model": "policy", "max_tokens": 60, "messages": QUESTION}
    config = {"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}}
    found = sdk.messages.create(**asked, output_config=config)
    assert json.loads(found.content[0].text)["country"] in ("France", "Chad")
    with sdk.messages.stream(**asked, output_config=config) as stream:
        assert json.loads(stream.get_final_text())["country"] in ("France", "Chad")
    function = SEARCH["function"]
    tool = {"name": "search", "description": function["description"], "input_schema": function["parameters"]}
    order = {"system": ORDER[0]["content"], "messages": ORDER[1:], "tools": [tool], "extra_body": {"temperature": 0}}
    called = sdk.messages.create(**asked | order)
    (call,) = post(server, "/v1/chat/completions", messages=ORDER, tools=[SEARCH], temperature=0)["choices"]
    (call,) = call["message"]["tool_calls"]
    assert called.stop_reason == "tool_use"
    assert called.content[-1].input == json.loads(call["function"]["arguments"])
    with pytest.raises(anthropic.NotFoundError, match="not served") as caught:
        sdk.messages.create(**asked | {"model": "other"})
    assert caught.value.body["error"]["type"] == "not_found_error"


def test_responses_sample_what_chat_completions_do(server, openai_sdk):
    asked = {"model": "policy", "instructions": INSTRUCTIONS, "tools": [FUNCTION], "temperature": 0}
    first = openai_sdk.responses.create(input=ORDER[1:], **asked)
    whole = post(server, "/v1/chat/completions", messages=ORDER, tools=[SEARCH], temperature=0)
    (call,), item = whole["choices"][0]["message"]["tool_calls"], first.output[-1]
    assert (item.name, item.arguments) == (call["function"]["name"], call["function"]["arguments"])
    assert first.usage.input_tokens == whole["usage"]["prompt_tokens"]
    assert first.temperature == 0
    found = {"type": "function_call_output", "call_id": item.call_id, "output": "Maroua is a city of Cameroon."}
    by_id = openai_sdk.responses.create(input=[found], previous_response_id=first.id, **asked)
    by_items = openai_sdk.responses.create(
        input=[*ORDER[1:], *(one.model_dump() for one in first.output), found], **asked
    )
    assert by_id.usage == by_items.usage
    assert [one.type for one in by_id.output] == [one.type for one in by_items.output]


def test_unknown_response_and_model_are_not_found(openai_sdk):
    for given in ({"model": "policy", "previous_response_id": "resp_x"}, {"model": "other"}):
        with pytest.raises(openai.NotFoundError, match=r"'(resp_x|other)'"):
            openai_sdk.responses.create(input="a", **given)


def test_text_of_responses_is_streamed_while_it_is_sampled(openai_sdk):
    form = {"format": {"type": "json_schema", "name": "letters", "schema": LETTERS}}
    with openai_sdk.responses.stream(model="policy", input=QUESTION, text=form) as stream:
        deltas = [one.delta for one in stream if one.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(deltas)
    assert len(deltas) > 1


def test_text_of_messages_is_streamed_while_it_is_sampled(anthropic_sdk):
    asked = {"model": "policy", "max_tokens": 300, "messages": QUESTION}
    form = {"format": {"type": "json_schema", "schema": LETTERS}}
    with anthropic_sdk.messages.stream(**asked, output_config=form) as stream:
        deltas = [one.text for one in stream if one.type == "text"]
        assert len(json.loads(stream.get_final_text())) == 80
        usage = stream.get_final_message().usage
    assert len(deltas) > 1
    assert usage.input_tokens == anthropic_sdk.messages.count_tokens(model="policy", messages=QUESTION).input_tokens


def test_error_of_a_streamed_message_has_the_form_of_its_dialect(server):
    body = {"messages": QUESTION, "tool_choice": {"type": "any"}, "stream": True}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = server.post(path, json=body if path.endswith("messages") else body | {"messages": []})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["type"] == "error"


def test_dialogue_longer_than_the_context_is_counted(server):
    long = [{"role": "user", "content": "word " * 5000}]
    assert post(server, "/v1/messages/count_tokens", messages=long)["input_tokens"] > 5000
    refused = server.post("/v1/messages", json={"messages": long, "stream": True})
    assert (refused.status_code, "context" in refused.text) == (400, True)


def test_client_that_leaves_a_streamed_message_cancels_it(server):
    letters = {"type": "string", "pattern": "^[a-z]{700}$"}
    form = {"format": {"type": "json_schema", "schema": letters}}
    body = {"messages": QUESTION, "stream": True, "output_config": form}
    with server.stream("POST", "/v1/messages", json=body) as answer:
        lines = answer.iter_lines()  # closes the stream when it is collected
        next(lines)
        assert counts(server)["choices_in_flight"] == 1
    before = counts(server)["decode_tokens_total"]
    while counts(server)["choices_in_flight"]:
        time.sleep(0.01)
    assert counts(server)["decode_tokens_total"] < before + 400
