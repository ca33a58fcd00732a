"""`ludus serve` from the client's side: response formats, streaming, tools, errors, control endpoints."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from ludus.cli.serving import serve
from ludus.engines.base import Request
from ludus.engines.models.loading import load_model, load_tokenizer
from ludus.engines.remote.engine import ServerEngine
from ludus.engines.remote.http_client import RemoteEngineSettings
from ludus.gateway.protocol.detokenize import StreamedText, TextRules
from ludus.types import SamplingParams
from served import COLD_START, CONTEXT, counted, serving_model, until_counts
from tiny_run import refused

TOKENS = [5, 6, 7, 8, 9, 10, 300, 400]
QUESTION = [{"role": "user", "content": "In which country is Paris?"}]
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the encyclopedia.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "the words"}},
            "required": ["query"],
        },
    },
}
ORDER = [
    {"role": "system", "content": "Answer the question. Search until you know."},
    {"role": "user", "content": "Which currency does the country of Maroua use?"},
]


@pytest.fixture(scope="module")
def server(served):
    with httpx.Client(base_url=served.url, headers=served.headers, timeout=60) as client:
        client.served = served
        yield client


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(COLD_START))


def post(client, path, **body):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(client, **body):
    return post(client, "/v1/completions", **({"prompt": TOKENS, "temperature": 0} | body))


def events(client, path, **body):
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error(client, path, expected, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == expected, answer.text
    said = answer.json()["error"]
    assert said["message"].endswith((".", "nothing here"))
    return said["message"]


def test_models_endpoint_lists_the_served_model(server):
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["owned_by"], model["max_model_len"]) == ("policy", "ludus", CONTEXT)
    assert model["weight_version"] == server.get("/weight_info").json()["weight_version"]
    assert server.get("/health").json() == {"status": "ok"}


def test_completion_returns_prompt_and_sampled_token_ids(server, tokenizer):
    (choice,) = complete(server, max_tokens=6, return_token_ids=True, logprobs=0)["choices"]
    assert choice["prompt_token_ids"] == TOKENS
    assert len(choice["token_ids"]) == 6
    assert choice["text"] == tokenizer.decode(choice["token_ids"])
    assert choice["logprobs"]["tokens"] == [tokenizer.decode([token]) for token in choice["token_ids"]]
    assert [list(row.values()) for row in choice["logprobs"]["top_logprobs"]] == [
        [logprob] for logprob in choice["logprobs"]["token_logprobs"]
    ]
    spans = choice["weight_versions"]
    assert (spans[0]["start"], spans[-1]["end"], choice["finish_reason"]) == (0, 6, "length")


def test_text_and_token_id_prompts_are_equivalent(server, tokenizer):
    text = "Paris is a city in the country of"
    ids = tokenizer.encode(text)
    asked = {"max_tokens": 5, "return_token_ids": True}
    by_text, by_ids = (complete(server, prompt=prompt, **asked)["choices"][0] for prompt in (text, ids))
    assert by_text["prompt_token_ids"] == ids
    assert by_text["token_ids"] == by_ids["token_ids"]


def test_choices_of_several_prompts_are_indexed_in_order(server):
    asked = {"prompt": [TOKENS, TOKENS[:3]], "n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 8}
    answer = complete(server, return_token_ids=True, **asked)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [len(choice["prompt_token_ids"]) for choice in answer["choices"]] == [8, 8, 8, 3, 3, 3]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"][:3]}) == 3
    assert answer["usage"] == {"prompt_tokens": 11, "completion_tokens": 48, "total_tokens": 59}
    again = complete(server, return_token_ids=True, **asked)
    assert [c["token_ids"] for c in again["choices"]] == [c["token_ids"] for c in answer["choices"]]


def test_echo_scores_the_prompt_and_samples_nothing(server):
    model = load_model(str(COLD_START))
    with torch.no_grad():
        own = model(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    own = own.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()
    (choice,) = complete(server, max_tokens=0, echo=True, logprobs=0, prompt_logprobs=0)["choices"]
    first, *scores = choice["logprobs"]["token_logprobs"]
    assert first is None
    assert scores == pytest.approx(own, abs=1e-4)
    named = [row[str(t)]["logprob"] for t, row in zip(TOKENS[1:], choice["prompt_logprobs"][1:], strict=True)]
    assert named == scores
    both = complete(server, max_tokens=2, echo=True, logprobs=0)["choices"][0]
    assert both["text"].startswith(choice["text"])
    assert len(both["logprobs"]["token_logprobs"]) == len(TOKENS) + 2


@pytest.fixture(scope="module")
def reference():
    model = load_model(str(COLD_START))

    @torch.no_grad()
    def logprobs(tokens, temperature=1.0):
        return (model(torch.tensor([tokens])).logits[0].double() / temperature).log_softmax(-1)

    return logprobs


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_completion_logprobs_match_the_reference_model(server, tokenizer, reference, temperature):
    asked = {"temperature": temperature, "seed": 3, "max_tokens": 12, "return_token_ids": True, "logprobs": 4}
    named = complete(server, return_tokens_as_token_ids=True, **asked)["choices"][0]
    expected = reference(TOKENS + named["token_ids"], temperature or 1.0)[len(TOKENS) - 1 : -1]
    given = named["logprobs"]
    assert given["tokens"] == [f"token_id:{token}" for token in named["token_ids"]]
    for row, top, name, own in zip(
        expected, given["top_logprobs"], given["tokens"], given["token_logprobs"], strict=True
    ):
        best = row.topk(4)
        likeliest = {f"token_id:{token}" for token in best.indices.tolist()}
        assert set(top) == likeliest | {name}
        assert top[name] == own
        assert list(top.values())[:4] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert temperature or own == max(top.values())
    by_text = complete(server, **asked)["choices"][0]["logprobs"]
    for top, ids in zip(by_text["top_logprobs"], given["top_logprobs"], strict=True):
        texts = [tokenizer.decode([int(name.removeprefix("token_id:"))]) for name in ids]
        assert list(top) == list(dict.fromkeys(texts))
        assert max(top.values()) == max(ids.values())
    assert by_text["token_logprobs"] == given["token_logprobs"]
    assert by_text["text_offset"] == given["text_offset"]


def test_echoed_prompt_logprobs_match_the_reference_model(server, reference):
    """As harnesses ask for it that score the answers of multiple choice."""
    asked = {"max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    choice = complete(server, return_tokens_as_token_ids=True, return_token_ids=True, **asked)["choices"][0]
    expected = reference(TOKENS)
    given = choice["logprobs"]
    assert given["tokens"] == [f"token_id:{token}" for token in TOKENS + choice["token_ids"]]
    assert given["top_logprobs"][0] is given["token_logprobs"][0] is choice["prompt_logprobs"][0] is None
    for row, top, own, token in zip(
        expected, given["top_logprobs"][1:], given["token_logprobs"][1:], TOKENS[1:], strict=False
    ):
        assert set(top) == {f"token_id:{int(row.argmax())}", f"token_id:{token}"}
        assert top[f"token_id:{token}"] == own
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
    for row, found, token in zip(expected, choice["prompt_logprobs"][1:], TOKENS[1:], strict=False):
        best = row.topk(3).indices.tolist()
        assert [found[str(t)]["rank"] for t in best] == [1, 2, 3]
        assert set(found) == {str(t) for t in [*best, token]}
    last = len(TOKENS)
    assert given["token_logprobs"][last] == max(given["top_logprobs"][last].values())


def test_chat_logprobs_match_the_reference_model_with_and_without_streaming(server, tokenizer, reference):
    asked = {"messages": QUESTION, "temperature": 0.8, "seed": 5, "max_tokens": 8, "return_token_ids": True}
    asked |= {"logprobs": True, "top_logprobs": 5}
    answer = post(server, "/v1/chat/completions", **asked)
    (choice,) = answer["choices"]
    whole = choice["logprobs"]["content"]
    prompt, tokens = answer["prompt_token_ids"], choice["token_ids"]
    expected = reference(prompt + tokens, 0.8)[len(prompt) - 1 : -1]
    for row, entry, token in zip(expected, whole, tokens, strict=True):
        best = row.topk(5)
        assert [one["logprob"] for one in entry["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-4)
        words = [tokenizer.decode([token]) for token in best.indices.tolist()]
        assert [one["token"] for one in entry["top_logprobs"]] == words
        assert [bytes(one["bytes"]).decode() for one in entry["top_logprobs"]] == words
        assert entry["token"] == tokenizer.decode([token])
        assert entry["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
    pieces = events(server, "/v1/chat/completions", **asked)
    given = [p["choices"][0]["logprobs"] for p in pieces if p["choices"][0]["logprobs"]]
    assert [entry for part in given for entry in part["content"]] == whole
    silent = post(server, "/v1/chat/completions", **(asked | {"top_logprobs": 0}))["choices"][0]["logprobs"]
    assert [entry["top_logprobs"] for entry in silent["content"]] == [[]] * len(tokens)


def test_a_stop_string_is_cut_from_the_text_and_never_from_the_tokens(server, tokenizer):
    free = complete(server, max_tokens=30, return_token_ids=True)["choices"][0]
    stop = free["text"][8:11]
    asked = {"max_tokens": 30, "stop": [stop], "return_token_ids": True}
    cut = complete(server, **asked)["choices"][0]
    kept = complete(server, include_stop_str_in_output=True, **asked)["choices"][0]
    assert cut["token_ids"] == kept["token_ids"] == free["token_ids"][: len(cut["token_ids"])]
    assert cut["text"] == free["text"][: free["text"].find(stop)]
    assert kept["text"] == tokenizer.decode(kept["token_ids"])
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    token = free["token_ids"][4]
    by_id = complete(server, max_tokens=30, stop_token_ids=[token])["choices"][0]
    assert (by_id["finish_reason"], by_id["stop_reason"]) == ("stop", token)


def test_eos_token_ends_generation_unless_ignore_eos_is_set(server, tokenizer):
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    ended = complete(server, prompt=prompt, max_tokens=20, return_token_ids=True)["choices"][0]
    assert (ended["finish_reason"], ended["token_ids"][-1]) == ("stop", tokenizer.eos_token_id)
    assert "<|im_end|>" not in ended["text"]
    more = complete(server, prompt=prompt, max_tokens=20, ignore_eos=True, return_token_ids=True)["choices"][0]
    assert (more["finish_reason"], len(more["token_ids"])) == ("length", 20)


@pytest.mark.parametrize("stop", [None, ["E"], ["  "]])
def test_concatenated_stream_equals_the_unstreamed_response(server, stop):
    asked = {"prompt": TOKENS, "max_tokens": 60, "temperature": 1.0, "seed": 5, "n": 2, "stop": stop}
    asked |= {"return_token_ids": True, "logprobs": 2, "ignore_eos": True}
    whole = complete(server, **asked)
    pieces = events(server, "/v1/completions", stream_options={"include_usage": True}, **asked)
    assert pieces[-1]["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        own = [p["choices"][0] for p in pieces[:-1] if p["choices"][0]["index"] == index]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        assert [token for piece in own for token in piece["token_ids"]] == choice["token_ids"]
        logprobs = [x for piece in own for x in piece["logprobs"]["token_logprobs"]]
        assert logprobs == choice["logprobs"]["token_logprobs"]
        top = [row for piece in own for row in piece["logprobs"]["top_logprobs"]]
        assert top == choice["logprobs"]["top_logprobs"]
        assert [piece["finish_reason"] for piece in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        assert own[0]["prompt_token_ids"] == TOKENS
    assert stop is not None or len(pieces) > 5


def test_chat_returns_message_token_ids_and_usage(server, tokenizer):
    asked = {"messages": QUESTION, "temperature": 0, "logprobs": True, "return_token_ids": True}
    answer = post(server, "/v1/chat/completions", **asked)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("France", "stop")
    assert answer["prompt_token_ids"] == tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == 2
    assert answer["usage"]["completion_tokens"] == 2
    pieces = events(server, "/v1/chat/completions", **asked)
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [piece["choices"][0] for piece in pieces]
    assert "".join(d["delta"].get("content", "") for d in deltas) == "France"
    assert [t for d in deltas for t in d["token_ids"] or ()] == choice["token_ids"]


def test_tool_calls_are_parsed_and_their_results_go_back(server, tokenizer):
    asked = {"tools": [SEARCH], "temperature": 0, "max_tokens": 60}
    answer = post(server, "/v1/chat/completions", messages=ORDER, **asked)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "search"
    assert "Maroua" in json.loads(call["function"]["arguments"])["query"]
    assert choice["message"]["reasoning_content"]
    pieces = events(server, "/v1/chat/completions", messages=ORDER, **asked)
    last = pieces[-1]["choices"][0]
    assert last["finish_reason"] == "tool_calls"
    assert last["delta"]["tool_calls"] == [{"index": 0, **call}]
    assert [piece["choices"][0]["delta"] for piece in pieces[:-1]] == [{"role": "assistant", "content": ""}]
    with_ids = events(server, "/v1/chat/completions", messages=ORDER, return_token_ids=True, **asked)
    assert sum(len(p["choices"][0]["token_ids"] or ()) for p in with_ids) == answer["usage"]["completion_tokens"]
    found = {"role": "tool", "tool_call_id": call["id"], "content": "Maroua is a city in Cameroon."}
    history = [*ORDER, choice["message"], found]
    second = post(server, "/v1/chat/completions", messages=history, return_token_ids=True, **asked)
    shown = tokenizer.decode(second["prompt_token_ids"])
    assert call["function"]["arguments"] in shown
    assert f"<|im_start|>tool\n{found['content']}<|im_end|>" in shown


def test_tool_choice_none_omits_tools_and_forced_tool_choice_is_obeyed(server, tokenizer):
    plain, auto, none = (
        post(server, "/v1/chat/completions", messages=ORDER, max_tokens=1, return_token_ids=True, **choice)
        for choice in ({}, {"tools": [SEARCH], "tool_choice": "auto"}, {"tools": [SEARCH], "tool_choice": "none"})
    )
    assert none["prompt_token_ids"] == plain["prompt_token_ids"] != auto["prompt_token_ids"]
    greeting = [{"role": "user", "content": "hello"}]
    for forced in ("required", {"type": "function", "function": {"name": "search"}}):
        given = {"tools": [SEARCH], "tool_choice": forced, "max_tokens": 200, "temperature": 0}
        message = post(server, "/v1/chat/completions", messages=greeting, **given)["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["search"]
        assert message["content"] is None
    given = {"tools": [SEARCH], "parallel_tool_calls": False, "return_token_ids": True, "temperature": 0}
    (choice,) = post(server, "/v1/chat/completions", messages=ORDER, **given)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert tokenizer.decode(choice["token_ids"][-1:]) == "</tool_call>"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    body = {"messages": ORDER, "tools": [SEARCH], "tool_choice": {"type": "function", "function": {"name": "other"}}}
    assert "no such tool" in error(server, "/v1/chat/completions", 400, body)


@pytest.mark.parametrize(
    ("path", "status", "body", "words"),
    [
        ("completions", 400, b"{", "Invalid JSON"),
        ("completions", 400, {}, "prompt"),
        ("completions", 400, {"prompt": []}, "empty"),
        ("completions", 400, {"prompt": [5, 10**7]}, "vocabulary"),
        ("completions", 400, {"prompt": [-1]}, "prompt"),
        ("completions", 400, {"prompt": [5] * CONTEXT}, "maximum context length is 768"),
        ("completions", 400, {"prompt": "x", "temperature": -1}, "temperature"),
        ("completions", 400, {"prompt": "x", "top_p": 0}, "top_p"),
        ("completions", 400, {"prompt": "x", "max_tokens": 0}, "samples nothing"),
        ("completions", 400, {"prompt": "x", "logprobs": 21}, "logprobs: at most 20 top_logprobs"),
        ("completions", 400, {"prompt": "x", "prompt_logprobs": 50}, "at most 20 top_logprobs are supported, 50"),
        ("completions", 400, {"prompt": "x", "top_logprobs": 2}, "top_logprobs is not a field"),
        (
            "chat/completions",
            400,
            {"messages": QUESTION, "logprobs": True, "top_logprobs": 21},
            "top_logprobs: at most 20 top_logprobs are supported, 21 requested",
        ),
        ("chat/completions", 400, {"messages": QUESTION, "top_logprobs": 2}, "needs logprobs = true"),
        ("completions", 400, {"prompt": "x", "n": 0}, "n"),
        ("completions", 400, {"prompt": "x", "frequency_penalty": 0.5}, "frequency_penalty = 0.5 is not supported"),
        ("completions", 400, {"prompt": "x", "temprature": 1}, "temprature is not a field"),
        ("completions", 404, {"prompt": "x", "model": "gpt"}, "'gpt' is not served; available"),
        ("chat/completions", 400, {"messages": []}, "messages"),
        ("chat/completions", 400, {"messages": [{"role": "king", "content": ""}]}, "role"),
        (
            "chat/completions",
            400,
            {"messages": QUESTION, "response_format": {"type": "json_schema"}},
            "json_schema.schema",
        ),
        ("completions", 400, {"prompt": "x", "structured_outputs": {"regex": "("}}, "regex of the guide"),
        ("completions", 400, {"prompt": "x", "structured_outputs": {}}, "accepts one of"),
        ("completions", 400, {"prompt": "x", "min_p": 2}, "min_p"),
        ("nothing", 404, {}, "Not Found"),
    ],
)
def test_invalid_request_is_rejected_with_a_message(server, path, status, body, words):
    assert words in error(server, f"/v1/{path}", status, body)


def test_labels_and_neutral_parameters_do_not_change_the_completion(server):
    plain = complete(server, max_tokens=5)["choices"]
    more = {"user": "me", "frequency_penalty": 0.0, "logit_bias": {}, "suffix": None, "min_p": 0}
    assert complete(server, max_tokens=5, **more)["choices"] == plain


def test_structured_outputs_match_their_regex_or_json_schema(server):
    (choice,) = complete(server, max_tokens=40, structured_outputs={"regex": "(left|right), [0-9]"})["choices"]
    assert choice["text"].startswith(("left, ", "right, "))
    schema = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = post(server, "/v1/chat/completions", messages=QUESTION, max_tokens=60, response_format=form)
    assert json.loads(answer["choices"][0]["message"]["content"])["n"] in (True, False)


def test_repeated_request_id_is_computed_once(server):
    asked = {"temperature": 1.0, "max_tokens": 9, "request_id": "once"}
    before = counts(server)["requests_total"]
    answers = [complete(server, **asked) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert counts(server)["requests_total"] == before + 1
    error(server, "/v1/completions", 409, {"prompt": TOKENS, "max_tokens": 3, "request_id": "once"})


def counts(client):
    return counted(client.get("/metrics").text)


def head(length, path="/v1/completions"):
    lines = ["Host: x", "Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode()


def wait_until_idle(client):
    deadline = time.monotonic() + 60
    while counts(client)["choices_in_flight"]:
        assert time.monotonic() < deadline, "a request goes on that nobody waits for"
        time.sleep(0.02)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("stops", [(), ("Bern 🏔",)])
def test_a_stream_decodes_each_token_a_bounded_number_of_times(tokenizer, size, stops):
    """Characters whose bytes are spread over tokens and additions come once, and whole."""
    counted = []

    class Counting:
        def decode(self, ids, **options):
            counted.append(len(ids))
            return tokenizer.decode(ids, **options)

    tokens = tokenizer.encode("Zürich 🏔️ 日本語 is\n" * 30 + "Bern 🏔")
    rules = TextRules(Counting(), stops=stops)
    growing = StreamedText(rules)
    cuts = range(0, len(tokens), size)
    pieces = [growing.add(tokens[at : at + size], None if at < cuts[-1] else "stop") for at in cuts]
    assert sum(counted) < 16 * len(tokens)
    assert "".join(pieces) == rules.text(tokens, "stop")
    assert not any(piece.endswith("\ufffd") for piece in pieces)


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_cancels_its_request(server, stream):
    body = {"prompt": TOKENS, "max_tokens": 700, "ignore_eos": True, "stream": stream, "n": 8}
    body = json.dumps(body | {"request_id": f"gone{stream}"}).encode()
    with socket.create_connection(("127.0.0.1", int(server.served.port))) as line:
        line.sendall(head(len(body)) + body)
        while counts(server)["choices_in_flight"] < 8:
            time.sleep(0.01)
    wait_until_idle(server)
    assert counts(server)["decode_tokens_total"] < 8 * 700


def test_pause_holds_or_aborts_requests_and_resume_continues_them(server):
    async def run():
        async with httpx.AsyncClient(base_url=server.served.url, headers=server.served.headers, timeout=60) as client:
            await client.post("/pause?mode=keep")
            asked = client.post("/v1/completions", json={"prompt": TOKENS, "max_tokens": 4})
            waiting = asyncio.create_task(asked)
            await asyncio.sleep(0.3)
            assert not waiting.done()
            assert (await client.get("/is_paused")).json() == {"is_paused": True}
            assert (await client.get("/health")).json() == {"status": "paused"}
            await client.post("/resume")
            assert (await waiting).json()["choices"][0]["finish_reason"] == "length"
            long = {"prompt": TOKENS, "max_tokens": 700, "ignore_eos": True, "return_token_ids": True}
            before = counts(server)["decode_tokens_total"]
            cut = asyncio.create_task(client.post("/v1/completions", json=long))
            await until_counts(client, lambda now: now["decode_tokens_total"] > before)
            await client.post("/pause?mode=abort")
            (choice,) = (await cut).json()["choices"]
            assert choice["finish_reason"] == "abort"
            assert 0 < len(choice["token_ids"]) < 700
            await client.post("/resume")

    asyncio.run(run())
    error(server, "/pause?mode=now", 400, {})


def test_abort_ends_one_request_with_its_partial_output(server):
    async def run():
        async with httpx.AsyncClient(base_url=server.served.url, headers=server.served.headers, timeout=60) as client:
            long = {"prompt": TOKENS, "max_tokens": 700, "ignore_eos": True, "return_token_ids": True}
            tasks = [
                asyncio.create_task(client.post("/v1/completions", json=long | {"request_id": name}))
                for name in ("mine", "yours")
            ]
            await until_counts(client, lambda now: now["choices_in_flight"] == 2)
            said = (await client.post("/abort_requests", json={"request_ids": ["cmpl-mine"]})).json()
            assert said == {"status": "aborted", "aborted": 1}
            mine = (await tasks[0]).json()["choices"][0]
            assert (mine["finish_reason"], len(mine["token_ids"]) < 700) == ("abort", True)
            assert not tasks[1].done()
            assert (await client.post("/abort")).json()["aborted"] == 1
            await tasks[1]

    asyncio.run(run())


def test_weight_updates_in_parts_are_atomic(server, tmp_path):
    weights = load_file(COLD_START / "model.safetensors")
    names = sorted(weights)
    changed = {name: tensor * 1.01 for name, tensor in weights.items()}
    for part, chosen in (("a", names[:20]), ("b", names[20:])):
        save_file({name: changed[name] for name in chosen}, tmp_path / f"{part}.safetensors")
    (tmp_path / "odd").mkdir()
    save_file({"nobody.weight": torch.ones(2)}, tmp_path / "odd" / "model.safetensors")
    before = post(server, "/weight_checker", action="checksum")["checksums"]

    assert "No weight update is open" in error(server, "/finish_weight_update", 409, {})
    post(server, "/start_weight_update")
    assert "open already" in error(server, "/start_weight_update", 409, {})
    for part in "ab":
        post(server, "/update_weights", update_info={"weights_path": str(tmp_path / f"{part}.safetensors")})
    assert post(server, "/weight_checker", action="compare", baseline=before)["match"]
    post(server, "/finish_weight_update", weight_version="41")
    assert not post(server, "/weight_checker", action="compare", baseline=before)["match"]
    assert server.get("/weight_info").json() == {"weight_version": "41"}
    fingerprint = server.get("/fingerprint").json()

    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "odd")}}
    assert "nobody.weight" in error(server, "/collective_rpc", 400, rpc)
    rpc["kwargs"] = {"weights_path": str(tmp_path / "none")}
    assert "No safetensors" in error(server, "/collective_rpc", 400, rpc)
    assert "reload_weights" in error(server, "/collective_rpc", 400, {"method": "exit"})
    assert server.get("/fingerprint").json() == fingerprint

    post(server, "/collective_rpc", method="reload_weights", kwargs={"weights_path": str(COLD_START)})
    assert post(server, "/weight_checker", action="compare", baseline=before)["match"]
    post(server, "/update_weight_version", new_version="42")
    spans = complete(server, max_tokens=2, return_token_ids=True)["choices"][0]["weight_versions"]
    assert spans == [{"version": "42", "start": 0, "end": 2}]
    assert "integer" in error(server, "/update_weight_version", 400, {"new_version": "new"})


def test_control_endpoints_require_the_control_option(tmp_path):
    from ludus.engines.embedded.engine import LocalEngine
    from ludus.gateway.app import make_app
    from ludus.gateway.service import CompletionService, ServedModel
    from tests.engines.test_engine_local import VOCAB, build, byte_tokenizer

    model = build()
    engine = LocalEngine(model, byte_tokenizer())
    app = make_app(CompletionService(engine, ServedModel("m", "m", 0, byte_tokenizer(), (), VOCAB)), model)

    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            for path in ("pause", "resume", "abort", "start_weight_update", "collective_rpc", "weight_checker"):
                answer = await client.post(f"/{path}", json={})
                assert answer.status_code == 403
                assert "--control" in answer.json()["error"]["message"]
            answer = await client.post("/v1/chat/completions", json={"messages": QUESTION})
            assert answer.status_code == 400
            assert "no chat template" in answer.json()["error"]["message"]
        await engine.close()

    asyncio.run(run())


@pytest.mark.scale
def test_requests_over_the_limit_receive_429_and_are_retried(reference):
    prompt, long = (5, 6, 7), {"max_tokens": 20, "ignore_eos": True}
    params = SamplingParams(temperature=0.0, max_new_tokens=6)

    async def run(served):
        engine = ServerEngine([served.url], settings=RemoteEngineSettings(backoff_s=0.02))
        async with httpx.AsyncClient(base_url=served.url, headers=served.headers, timeout=60) as client:
            await client.post("/pause?mode=keep")
            asked = client.post("/v1/completions", json={"prompt": list(prompt), "n": 2, **long})
            held = asyncio.create_task(asked)
            while "choices_in_flight 2" not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.01)
            busy = await client.post("/v1/completions", json={"prompt": list(prompt), **long})
            never = await client.post("/v1/completions", json={"prompt": list(prompt), "n": 3, **long})
            waiting = asyncio.create_task(engine.generate_batch([Request(f"e{i}", prompt, params) for i in range(8)]))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await client.post("/resume")
            answers, first = await asyncio.wait_for(waiting, 60), await held
        await engine.close()
        return busy, never, answers, first

    with serving_model("--max-requests", "2", "--control") as served:
        busy, never, answers, first = asyncio.run(run(served))
        refusals = refused("serve", COLD_START, "--max-requests", "-1")
    assert (busy.status_code, busy.headers["Retry-After"]) == (429, "1")
    assert "accepts 2 at most" in busy.json()["error"]["message"]
    assert (never.status_code, "3 requests in one batch" in never.text) == (400, True)
    assert "--max-requests" in refusals
    assert first.status_code == 200
    best = reference([*prompt, *answers[0].tokens])[2:-1].argmax(-1)
    assert {answer.tokens for answer in answers} == {tuple(best.tolist())}


def test_a_busy_port_is_reported_before_the_model_is_loaded(server, monkeypatch):
    monkeypatch.delattr(serve, "_service")
    assert "cannot be bound" in refused("serve", COLD_START, "--port", server.served.port)


def test_serve_command_rejects_missing_checkpoint_and_invalid_context_length(server, tmp_path):
    assert "does not exist" in refused("serve", tmp_path / "none")
    assert "--context-tokens must be 2 to 1024" in refused("serve", COLD_START, "--context-tokens", "9999")
