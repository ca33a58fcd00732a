"""Hostile clients: large, slow, many, deeply nested and foreign requests, and their effect on other clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
import types
import typing
from dataclasses import asdict, dataclass, fields, is_dataclass

import httpx
import pytest
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ludus.engines.control_tokens import find_token, publish_token
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.gateway.app import ControlEndpoints, PublicEndpoints, make_app
from ludus.gateway.endpoints import check_shape, error_response
from ludus.gateway.limits import HttpLimits, http_server, open_socket
from ludus.gateway.protocol.bodies import BadRequest, error_body, json_bytes, response_body
from ludus.gateway.protocol.detokenize import Scored, TokenNames, chat_logprobs
from ludus.gateway.service import CompletionService, ServedModel
from ludus.sandbox.base import FileChange, Limits, Outcome, RunRequest, Snapshot, make_request, validate_files
from ludus.sandbox.local.unsafe_process import ProcessSandbox
from ludus.sandbox.remote.client import Payload, SessionMessage
from ludus.sandbox.remote.server import SandboxServerSettings
from ludus.sandbox.remote.server import make_app as make_sandbox_app
from tests.engines.test_engine_local import VOCAB, build, byte_tokenizer

TOKEN = "a token of these tests"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
JSON = {"Content-Type": "application/json"}
NARROW = HttpLimits(
    body_bytes=10_000, buffered_bytes=15_000, connections=8, requests=4, head_s=1.0, part_s=1.0, body_s=1.5
)


@contextlib.contextmanager
def running(app, limits):
    listener = open_socket("127.0.0.1", 0)
    server = http_server(app, limits, error_response)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def narrow():
    """A listener that reads bodies and counts them."""

    async def count(request):
        return PlainTextResponse(str(len(await request.body())))

    async def health(_):
        return PlainTextResponse("ok")

    async def http_error(_, error):
        answer = error_response(error.status_code, error.detail)
        answer.headers.update(error.headers or {})
        return answer

    routes = [Route("/", count, methods=["POST"]), Route("/health", health)]
    with running(Starlette(routes=routes, exception_handlers={413: http_error, 503: http_error}), NARROW) as port:
        yield port


def parts(num, size=1000):
    return (b"x" * size for _ in range(num))


@pytest.mark.parametrize("body", [b"x" * 10_001, b"x" * 5_000_000, 11, 3000])
def test_oversized_body_is_rejected_while_streaming(narrow, body):
    content = body if isinstance(body, bytes) else parts(body)
    answer = httpx.post(f"http://127.0.0.1:{narrow}/", content=content)
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    assert "exceeds the limit of 10000 bytes" in answer.text
    assert httpx.post(f"http://127.0.0.1:{narrow}/", content=parts(10)).text == "10000"


def opened(port, sent):
    line = socket.create_connection(("127.0.0.1", port))
    line.sendall(sent)
    return line


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\n"


def test_incomplete_requests_time_out(narrow):
    halves = [b"", b"POST / HT", HEAD[:-2], HEAD, HEAD + b"x" * 8999]
    lines = [opened(narrow, sent) for sent in halves]
    begin = time.monotonic()
    for line, sent in zip(lines, halves, strict=True):
        line.settimeout(5)
        said = b""
        while part := line.recv(4096):
            said += part
        assert said.startswith(b"HTTP/1.1 408 "), sent
        line.close()
    assert time.monotonic() - begin < 6
    drip = opened(narrow, HEAD)
    with contextlib.suppress(OSError):
        for _ in range(90):  # a little at a time, for ever
            drip.sendall(b"x")
            time.sleep(0.1)
        pytest.fail("a body that drips in was read for ever")
    drip.close()


def test_connections_requests_and_bytes_over_the_limits_receive_503(narrow):
    url = f"http://127.0.0.1:{narrow}"
    held = [opened(narrow, HEAD) for _ in range(NARROW.requests)]
    time.sleep(0.05)
    answer = httpx.post(url, content=b"x")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert httpx.get(f"{url}/health").status_code == 200
    for line in held:
        line.close()
    time.sleep(0.05)
    held = [opened(narrow, HEAD + b"x" * 8000) for _ in range(1)]
    time.sleep(0.05)
    assert httpx.post(url, content=b"x" * 9000).status_code == 503
    held += [opened(narrow, b"") for _ in range(NARROW.connections - 1)]
    time.sleep(0.05)
    with opened(narrow, b"") as line:
        assert line.recv(4096).startswith(b"HTTP/1.1 503 ")
    for line in held:
        line.close()


@pytest.mark.parametrize("body", [b"[" * 20_000, b"{" * 20_000, b'{"a":' * 9_000, b"[" + b"0," * 200_000 + b"0]"])
def test_json_with_too_many_values_is_rejected_before_decoding(body):
    with pytest.raises(BadRequest, match="more than a request"):
        check_shape(body, 1000)
    check_shape(json.dumps({"prompt": [[5] * 1000] * 8}).encode(), 1000)


def test_published_token_is_readable_only_by_the_same_user(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with publish_token(8123, TOKEN):
        assert find_token("http://127.0.0.1:8123") == find_token("http://localhost:8123") == TOKEN
        assert find_token("http://127.0.0.1:8124") == find_token("http://example.org:8123") == ""
        (path,) = tmp_path.glob("*/8123.token")
        assert path.stat().st_mode & 0o077 == path.parent.stat().st_mode & 0o077 == 0
        path.chmod(0o644)  # anybody may have written or read it
        assert find_token("http://127.0.0.1:8123") == ""
        path.chmod(0o600)
    assert find_token("http://127.0.0.1:8123") == ""
    (tmp_path / path.parent.name).chmod(0o777)
    with publish_token(8123, TOKEN):
        assert find_token("http://127.0.0.1:8123") == ""


@dataclass
class LocalServer:
    """A server in this process. `known` are good bodies by path."""

    service: CompletionService
    model: object
    client: httpx.AsyncClient

    async def post(self, path, content, **headers):
        return await self.client.post(path, content=content, headers=AUTHORIZED | JSON | headers)


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}<assistant>"
)


def here(act):
    """Run `act` with a server of a tiny random model."""

    async def run():
        model, tokenizer = build(), byte_tokenizer()
        engine = LocalEngine(model, tokenizer, EngineSettings(context_tokens=200, max_batch=16, threads=1))
        app_model = ServedModel("m", "m", 0, tokenizer, (), VOCAB, 2)
        service = CompletionService(engine, app_model, TOKEN)
        transport = httpx.ASGITransport(make_app(service, model), raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await act(LocalServer(service, model, client))
        finally:
            await engine.close()

    return asyncio.run(run())


def test_control_requires_the_token_and_foreign_hosts_or_origins_are_rejected():
    async def act(server):
        bare, ask = server.client, server.post

        async def status(**headers):
            return (await ask("/pause?mode=keep", b"{}", **headers)).status_code

        assert (await bare.post("/pause", json={})).status_code == 401
        assert (await bare.get("/fingerprint")).status_code == 401
        assert await status(Authorization="Bearer wrong") == 401
        assert await status(Authorization="Bearer ä".encode()) == 401
        assert await status(Host="evil.example:8000") == 403
        assert await status(Host="127.0.0.1.evil.example") == 403
        for origin in ("http://evil.example", "null", "http://127.0.0.1:9", "file://", "http://[::1"):
            assert await status(Origin=origin) == 403
            body = json.dumps({"prompt": [5], "max_tokens": 1}).encode()
            assert (await ask("/v1/completions", body, Origin=origin)).status_code == 403
            assert (await ask("/v1/completions", body, Origin="http://127.0.0.1")).status_code == 200
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            assert await status(**{"Content-Type": kind}) == 415
            assert (await ask("/v1/completions", body, **{"Content-Type": kind})).status_code == 415
        assert not server.service.is_paused
        for host in ("localhost:8000", "[::1]:8000", "10.1.2.3", socket.gethostname()):
            assert await status(Host=host) == 200
        assert server.service.is_paused
        await ask("/resume", b"")

    here(act)


ANSWERS = [
    *(
        response_body("text_completion", "a\ud800", "m", [{"index": i, "text": "é"} for i in range(n)])
        for n in (0, 1, 64)
    ),
    response_body("chat.completion.chunk", "b", "m", [{"index": i, "delta": {"content": '"'}} for i in range(2)])
    | {"prompt_token_ids": [1, 2]},
    error_body(400, "x"),
]
NAMES = ["a", '"', "\\", "\n", "é", "\u2028", "</script>", "🙂", ""]


class CountingTokenizer:
    """A tokenizer of NAMES that counts what it decodes."""

    num_decoded = 0

    def decode(self, ids, **_):
        self.num_decoded += 1
        return "".join(NAMES[i] for i in ids)


@pytest.mark.parametrize("as_ids", [False, True])
def test_chat_logprobs_encoding_matches_json_and_decodes_each_token_once(as_ids, monkeypatch):
    rows = list(range(len(NAMES)))
    values = [-1e-300, -0.0, -123.456, -1 / 3, -1e22, *[-5.0] * (len(NAMES) - 5)]
    top = [tuple(zip(rows, values, strict=True))[:n] for n in rows]
    tokenizer = CountingTokenizer()
    names = TokenNames(tokenizer, as_ids)

    def alternative(token, logprob):
        name = f"token_id:{token}" if as_ids else NAMES[token]
        return {"token": name, "logprob": logprob, "bytes": list(NAMES[token].encode())}

    content = [
        alternative(token, logprob) | {"top_logprobs": [alternative(*one) for one in likeliest]}
        for token, logprob, likeliest in zip(rows, values, top, strict=True)
    ]
    whole = json.dumps({"content": content}, separators=(",", ":")).encode()
    num, dumps = 0, json.dumps

    def counted(value, **given):
        nonlocal num
        num += 1
        return dumps(value, **given)

    monkeypatch.setattr(json, "dumps", counted)
    for _ in range(20):
        assert chat_logprobs(names, Scored(rows, values, top)) == whole
    assert num == tokenizer.num_decoded == len(NAMES)


def test_decoded_token_names_are_cached_across_requests():
    async def act(server):
        body = json.dumps({"prompt": [5], "max_tokens": 20, "logprobs": 20, "seed": 1}).encode()
        decode, counts = type(server.service.model.tokenizer).decode, []

        def counted(self, ids, **given):
            counts[-1] += len(ids) == 1
            return decode(self, ids, **given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(server.service.model.tokenizer), "decode", counted)
            for _ in range(2):
                counts.append(0)
                assert (await server.post("/v1/completions", body)).status_code == 200
        assert counts[0] >= 20
        assert counts[1] == 0

    here(act)


def test_responses_are_sent_without_delayed_acknowledgement():
    async def answer(_):
        return PlainTextResponse("here")

    with running(Starlette(routes=[Route("/", answer)]), NARROW) as port, httpx.Client() as client:
        durations = []
        for _ in range(20):
            begun = time.perf_counter()
            assert client.get(f"http://127.0.0.1:{port}/").text == "here"
            durations.append(time.perf_counter() - begun)
    assert min(durations[5:]) < 0.03  # what is delayed waits 40 ms for the client's acknowledgement


@pytest.mark.parametrize("answer", ANSWERS)
def test_choicewise_json_encoding_equals_whole_encoding(answer, monkeypatch):
    whole = json.dumps(answer, separators=(",", ":")).encode()
    sizes, dumps = [], json.dumps

    def noted(value, **given):
        sizes.append(len(dumps(value, **given)))
        return dumps(value, **given)

    monkeypatch.setattr(json, "dumps", noted)
    assert json_bytes(answer) == whole
    assert max(sizes) < 400


def test_overlong_text_is_rejected_by_length_before_tokenization():
    async def act(server):
        for text, words in (("a" * 401, "401 characters, at least 201 tokens"), ("a" * 400, "400 tokens")):
            answer = await server.post("/v1/completions", json.dumps({"prompt": text}).encode())
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]

    here(act)


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("runs", {"source": "***"}, "source: Data should be valid base64"),
        ("runs", {"source": "YQ=x"}, "source: Data should be valid base64"),
        ("runs", {"source": "//4="}, "source: it is not UTF-8"),
        ("runs", {"files": {"a": "?"}}, "files.a: Data should be valid base64"),
        ("sessions", {"kind": "king"}, "kind"),
    ],
)
def test_sandbox_server_rejects_malformed_requests_without_running_them(path, change, words):
    limits = asdict(Limits())
    app = make_sandbox_app(ProcessSandbox(unsafe=True), SandboxServerSettings(token=TOKEN, ceiling=Limits()))

    async def run(body):
        if path == "runs":
            body = {"content": {"source": None, "argv": [], "files": {}, "stdin": ""} | body}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.post(f"/v1/{path}", content=json.dumps(body), headers=AUTHORIZED)

    answer = asyncio.run(run({"limits": limits} | change))
    assert (answer.status_code, answer.json()["kind"]) == (400, "input")
    assert words in answer.json()["message"]
    for number in (float("nan"), float("inf"), -1, 10**30):
        answer = asyncio.run(run({"limits": limits | {"wall_s": number}, "source": "YQ==", "kind": "python"}))
        assert answer.status_code == 400


NUMBERS = ["NaN", "Infinity", "-1", "0", "1e-320", "1e400", str(2**63), str(10**30), "9" * 5000, "0.5", "-0.0"]
OTHERS = ["null", "true", '""', '"x\\u0000y"', '"\\ud800"', "[]", "{}", '["x"]', "[1e308, -1]", '{"a": 1}']
NESTED = ["[" * 3000 + "]" * 3000, '"' + "x" * 70_000 + '"', json.dumps("[" * 3000), '{"type": "json_schema"}']
VALUES = NUMBERS + OTHERS + NESTED
GOOD = {
    "/v1/completions": {"prompt": [5, 6, 7], "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/abort": {"request_ids": ["x"]},
    "/abort_requests": {"request_ids": ["x"]},
    "/update_weights": {"update_info": {"weights_path": "/none"}},
    "/finish_weight_update": {},
    "/collective_rpc": {"method": "reload_weights", "kwargs": {"weights_path": "/none"}},
    "/join_weight_group": {"host": "127.0.0.1", "port": 1, "rank": 1, "count": 2, "timeout_s": 0.01},
    "/prepare_weights": {"version": 1, "base": None, "digest": "", "tensors": []},
    "/update_weight_version": {"new_version": "0"},
    "/weight_checker": {"action": "compare", "baseline": {}},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/none", "weight_version": "0"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
UNNAMED = {"frequency_penalty", "presence_penalty", "logit_bias", "best_of", "min_tokens", "user", "metadata"}


def models_in(kind):
    """The models and dataclasses that a field's type mentions."""
    if isinstance(kind, type) and (issubclass(kind, BaseModel) or is_dataclass(kind)):
        return [kind]
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is not None:
        return [model for inner in typing.get_args(kind) for model in models_in(inner)]
    return []


def places(kind, inside=()):
    """The path of every field of a body, of those of the objects in it too."""
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        for field in fields(kind):
            yield (*inside, field.name)
            for inner in models_in(hints[field.name]):
                yield from places(inner, (*inside, field.name))
        return
    for name, info in kind.model_fields.items():
        alias = info.alias or getattr(info.validation_alias, "choices", [None])[0] or name
        yield (*inside, alias)
        for inner in models_in(info.annotation):
            yield from places(inner, (*inside, alias))


def changed(body, place, value):
    """The body as JSON, with `value` (JSON) at a place; lists are gone into at their first element."""
    whole = at = json.loads(json.dumps(body))
    for name in place[:-1]:
        inner = at.get(name)
        if isinstance(inner, list):
            inner[:] = inner[:1] if inner and isinstance(inner[0], dict) else [{}]
            at = inner[0]
            continue
        if not isinstance(inner, dict):
            at[name] = inner = {}
        at = inner
    at[place[-1]] = "@@@"
    return json.dumps(whole).replace('"@@@"', value).encode()


class Recorder:
    """Records paths and body types in place of a router."""

    def __init__(self):
        self.endpoints = []

    def add(self, path, body, act, **_):
        self.endpoints.append((path, body))


def all_endpoints(server):
    recorder = Recorder()
    PublicEndpoints(server.service).add_to(recorder)
    ControlEndpoints(server.service, server.model).add_to(recorder)
    return recorder.endpoints


async def fuzz(server, values, picked):
    """Every field of every endpoint, with values that `picked` picks, beside a neighbour's requests."""
    asked = {"prompt": [9, 8, 7], "max_tokens": 60, "temperature": 1.0, "top_k": 50, "seed": 5, "logprobs": 2}
    asked = json.dumps(asked | {"return_token_ids": True}).encode()

    async def neighbour():
        (choice,) = (await server.post("/v1/completions", asked)).json()["choices"]
        return choice["token_ids"], choice["logprobs"], choice["finish_reason"]

    expected, count, wrong = await neighbour(), 0, []
    beside = asyncio.create_task(neighbour())
    for path, kind in all_endpoints(server):
        extra = [(name,) for name in sorted(UNNAMED)] if path.startswith("/v1/c") else []
        if path == "/v1/chat/completions":
            extra.append(("messages", "tool_calls", "function", "arguments"))
        for place in [*places(kind), *extra]:
            for value in values:
                count += 1
                if not picked(count):
                    continue
                body = changed(GOOD[path], place, value)
                answer = await server.post(path, body)
                said = answer.text
                fine = answer.status_code == 200 or (
                    400 <= answer.status_code < 500 and json.loads(said)["error"]["message"]
                )
                if not fine or server.service.is_paused:
                    wrong.append((path, place, value[:40], answer.status_code, said[:200]))
                if path.startswith("/abort"):  # which may end the neighbour: by its name, or all
                    await beside
                    beside = asyncio.create_task(neighbour())
                elif beside.done():
                    assert beside.result() == expected, (path, place, value[:40])
                    beside = asyncio.create_task(neighbour())
    assert await beside == expected
    assert not wrong, wrong[:20]
    return count


def test_sampled_field_values_break_neither_the_server_nor_other_requests():
    count = here(lambda server: fuzz(server, VALUES, lambda n: n % 23 == 0))
    assert count > 1500


def more_numbers():
    """Numbers beside the bounds of integers and floats, as JSON."""
    more = [str(2**k + d) for k in (31, 32, 53, 62, 63, 64, 128) for d in (-1, 0, 1)]
    exponents = (-400, -308, -45, -11, 11, 38, 308)
    return [*more, *(f"-{n}" for n in more), *(f"{m}e{e}" for m in (1, 9.99) for e in exponents)]


@pytest.mark.security
def test_all_field_values_break_neither_the_server_nor_other_requests():
    here(lambda server: fuzz(server, VALUES + more_numbers(), lambda n: True))


SESSION_ACTS = {
    "run": (Payload[bytes], {"content": "eD0x"}),
    "change": (Payload[FileChange], {"content": {"write": {"a": "YQ=="}, "executable": {"a": True}, "remove": ["b"]}}),
    "restore": (Payload[Snapshot], {"content": {"files": {"a": "YQ=="}, "executable": ["a"], "skipped": 0}}),
    "snapshot": (Payload[None], {"content": None}),
    "processes": (Payload[None], {"content": None}),
    "reset": (Payload[None], {"content": None}),
    "no such act": (Payload[None], {"content": None}),
}
PATHS = ["/etc/x", "../x", "a/../../x", "a\x00b", "", ".", "a" * 5000, "a/" * 3000 + "a", "x\ny", "é"]


class FilesOnlySession:
    """A session that holds files and runs nothing."""

    def __init__(self, files):
        self.files = dict(files)

    async def run(self, code):
        return Outcome(code.encode("utf-8", "replace"), exit=0)

    async def change(self, change):
        self.files |= validate_files(change.write)
        for path in change.remove:
            self.files.pop(path, None)

    async def snapshot(self):
        return Snapshot(self.files)

    async def restore(self, snapshot):
        self.files = dict(validate_files(snapshot.files))

    async def processes(self):
        return ()

    async def reset(self):
        self.files = {}

    async def close(self):
        pass


class KeepsFiles:
    """A backend that runs nothing, after the checks that every backend makes first."""

    async def run(self, program, *, files=None, stdin=b"", limits=None):
        make_request(program, files, stdin, limits)
        return Outcome(b"ran", exit=0)

    async def session(self, kind="python", *, files=None, limits=None):
        return FilesOnlySession(validate_files(files or {}))

    async def close(self):
        pass


async def fuzz_sandbox(values, picked):
    """Every field of every endpoint of a sandbox server, beside a session; returns the number of cases."""
    limits = asdict(Limits())
    settings = SandboxServerSettings(token=TOKEN, ceiling=Limits(), sessions=10**6)
    transport = httpx.ASGITransport(make_sandbox_app(KeepsFiles(), settings), raise_app_exceptions=False)
    opening = {"kind": "python", "files": {"kept": "a2VwdA=="}, "limits": limits}
    run = {"source": "YQ==", "argv": [], "files": {"a": "YQ=="}, "stdin": "YQ==", "limits": limits}
    count, wrong = 0, []
    async with httpx.AsyncClient(transport=transport, base_url="http://x/v1") as client:

        async def post(path, content):
            return await client.post(path, content=content, headers=AUTHORIZED | JSON)

        neighbour, own = [(await post("/sessions", json.dumps(opening))).json()["content"] for _ in range(2)]
        cases = [("/runs", Payload[RunRequest], {"content": run}), ("/sessions", SessionMessage, opening)]
        cases += [(f"/sessions/{own}/{act}", kind, body) for act, (kind, body) in SESSION_ACTS.items()]
        for path, kind, body in cases:
            assert (await post(path, json.dumps(body))).status_code == (400 if "no such" in path else 200), path
            bad = [(None, value.encode()) for value in [*values, "", "{", '{"a": 1}']]
            for at in places(kind):
                of_paths = [json.dumps(given) for name in PATHS for given in ({name: "YQ=="}, [name])]
                bad += [(at, changed(body, at, value)) for value in [*values, *of_paths]]
            for place, content in bad:
                count += 1
                if not picked(count):
                    continue
                answer = await post(path, content)
                said = answer.json()
                fine = answer.status_code == 200 or (answer.status_code == 400 and said["kind"] == "input")
                if not fine or (answer.status_code == 400 and not said["message"]):
                    wrong.append((path, place, content[:60], answer.status_code, answer.text[:200]))
        files = (await post(f"/sessions/{neighbour}/snapshot", b"{}")).json()["content"]["files"]
        assert files == {"kept": "a2VwdA=="}
        assert (await post(f"/sessions/{own}/close", b"?")).status_code == 200
        gone = await post(f"/sessions/{own}/run", b"?")
        assert (gone.status_code, gone.json()["kind"]) == (502, "environment")
    assert not wrong, wrong[:20]
    return count


def test_sampled_field_values_break_neither_the_sandbox_server_nor_other_requests():
    assert asyncio.run(fuzz_sandbox(VALUES, lambda n: n % 13 == 0)) > 900


@pytest.mark.security
def test_all_field_values_break_neither_the_sandbox_server_nor_other_requests():
    asyncio.run(fuzz_sandbox(VALUES + more_numbers(), lambda n: True))
