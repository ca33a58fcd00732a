"""Data of programs, models, tools and servers: it never blocks the event loop and always has a verdict."""

import asyncio
import gzip
import json
import re
import time
import zlib

import httpx
import pytest
from pydantic import BaseModel

import heartbeat
from ludus.engines.remote.http_client import RemoteEngineSettings, Replica, get_once
from ludus.engines.remote.metrics import ServerStats
from ludus.envs.git_objects import GitObjects, object_head
from ludus.envs.tool_env import ToolExecutor
from ludus.errors import LudusError, did_you_mean
from ludus.rewards.code.sql_rows import Rows, read_rows, same_rows
from ludus.rollouts.openai_client import OpenAIClient, OpenAIClientSettings
from ludus.sandbox.base import Outcome, SandboxSettings
from ludus.sandbox.guest.wire import unpack_frame
from ludus.sandbox.remote import client as sandbox_client
from ludus.sandbox.remote.client import FusionSandbox, PistonSandbox, RemoteSandbox
from ludus.tools.mcp.client import ServedTool
from ludus.types import Action, ToolCall, ToolStatus
from ludus.untrusted import json_client, worker
from ludus.untrusted.json_client import bounded_client
from ludus.untrusted.worker import LimitExceeded, call_bounded
from ludus.worlds.code import guest_runner
from ludus.worlds.code.grader import CodeGrader, CodeTruth, TestCase, read_value, same_value, shorten
from ludus.worlds.code.world import program_of
from ludus.worlds.terminal.checks import SessionState, git_files, gzip_has_text
from ludus.worlds.terminal.git import MAX_OBJECT_BYTES
from ludus.worlds.terminal.task import check_bounded

PRIME = 2**61 - 1
"""Multiples of it have the hash 0."""
SAME_HASH = [PRIME * n for n in range(1, 40_000)]


class ForgingSandbox:
    """A sandbox whose program has learnt the nonce and prints what it likes."""

    def __init__(self, *lines):
        self.lines = lines

    async def run(self, program, *, files=None, stdin=b"", limits=None):
        nonce = stdin.decode().splitlines()[0]
        return Outcome("".join(f"\n{nonce}{line}\n" for line in self.lines).encode(), exit=0)

    async def close(self):
        pass


def judged(due, *lines):
    """The verdict on a program that returned this, where that is due."""
    truth = CodeTruth(("a",), cases=(TestCase("a", (), due),))
    work = CodeGrader(ForgingSandbox('{"loaded": true}', *lines)).grade("def solve(): ...", truth, truth.cases)
    (verdict,) = heartbeat.run(work).verdicts
    return verdict


RETURNED = {
    "a set of numbers with one hash": {"set": SAME_HASH},
    "a set of tuples of them": {"set": [{"tuple": [n, n]} for n in SAME_HASH[:20_000]]},
    "a dictionary of them": {"dict": [[n, 0] for n in SAME_HASH]},
    "a dictionary of one key": {"dict": [[0, 0]] * 40_000},
    "floats with few hashes": {"set": [float(2 ** (61 * k)) for k in range(16)] * 2_000},
    "many elements": [0] * 300_000,
    "many frozen sets": {"set": [{"frozenset": [n]} for n in range(20_000)]},
    "a number of 200,000 digits": {"int": "0x" + "f" * 200_000},
    "a float of 200,000 digits": {"float": "1" * 200_000},
    "bytes with blanks": {"bytes": "00 " * 100_000},
    "a kind that is none": {"int": [1] * 50_000},
    "an object of two keys": {"set": [], "dict": []},
    "a complex number that is none": {"complex": [10**400, 1]},
    "an element that has no hash": {"set": [[1]]},
    "a pair of three": {"dict": [[1, 2, 3]]},
}


@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
def test_whatever_a_program_returns_has_a_verdict_in_time(returned):
    verdict = judged({1, 2}, json.dumps({"number": 0, "value": returned}))
    assert not verdict.passed
    assert len(verdict.failure) < 300


RECORDS = {
    "numbers with one hash": [json.dumps({"number": n}) for n in SAME_HASH[:15_000]],
    "a record of 5,000 digits": [f'{{"number": {"9" * 5_000}}}'],
    "deep": ["[" * 100_000, '{"number": 0, "value": ' + "[" * 900 + "]" * 900 + "}"],
    "deeper than the words of a message": ['{"number": 0, "error": ' + "[" * 900 + "]" * 900 + "}"],
    "numbers that are none": ['{"number": true}', '{"number": 0.0}', '{"number": []}', '{"number": 1e999}'],
}


@pytest.mark.parametrize("records", RECORDS.values(), ids=RECORDS)
def test_whatever_a_program_prints_for_records_has_a_verdict_in_time(records):
    assert not judged({1, 2}, *records).passed


VALUES = [
    *(None, True, 0, -1, 1.5, float("inf"), "text", b"bytes", 2 + 3j, [], set(), frozenset(), {}),
    *([1, [2]], (1,), {1, 2}, frozenset({1}), {1: {2: [3]}}, {(1, "a"): {frozenset({1}), b"b"}}),
    *({None: 1}, {1.5, "a"}, 10**5_000, [-(10**5_000)], {10**5_000}),
]


def sent(value):
    """The value as it comes out of a sandbox."""
    return read_value(json.loads(json.dumps(guest_runner.encode(value))))


def test_values_compare_equal_only_to_themselves():
    for place, value in enumerate(VALUES):
        assert [same_value(sent(value), due) for due in VALUES] == [n == place for n in range(len(VALUES))]


def test_values_are_shown_as_python_writes_them():
    for value in VALUES[:-3]:
        assert eval(shorten(repr(sent(value)), 1_000), {"inf": float("inf")}) == value


@pytest.mark.parametrize(
    ("value", "due", "same"),
    [
        ({1, 2}, {2.0, True}, True),
        ({1: "a"}, {True: "a"}, True),
        ({1: 0.1 + 0.2}, {1: 0.3}, True),
        ({0.1 + 0.2}, {0.3}, False),
        ({(1, 2)}, {(1.0, 2)}, True),
        ({("a", "b")}, {("ab", "")}, False),
        ({("a", "b")}, {("a,b",)}, False),
        ({1}, frozenset({1}), False),
        ({frozenset({1, 2})}, {frozenset({2, 1})}, True),
        ({1 + 0j}, {1}, True),
        ({"1"}, {1}, False),
        ({b"a"}, {"a"}, False),
        ({-0.0}, {0}, True),
        ([10**400], [1e308], False),
        ([10**5_000 + 1], [10**5_000], False),
    ],
)
def test_elements_and_keys_compare_equal_as_in_python(value, due, same):
    assert same_value(sent(value), due) is same


def test_long_number_is_parsed_if_it_is_the_expected_value():
    due = 3**20_000
    line = json.dumps({"number": 0, "value": guest_runner.encode(due)})
    assert judged(due, line).passed
    assert judged(due + 1, line).failure.startswith("it gave 0x")


def many_objects(count):
    """A pack of empty blobs of which each inflates to 8 MiB."""
    one = b"\xb0" + zlib.compress(bytes(MAX_OBJECT_BYTES - 1))
    return b"PACK\0\0\0\2" + count.to_bytes(4, "big") + one * count


def nested_trees():
    """A repository in which each tree names the next one twice: 2**30 paths."""
    objects = GitObjects()
    tree = objects.add("tree", b"")
    for _ in range(30):
        tree = objects.add("tree", b"".join(b"40000 %s\0" % name + tree for name in (b"a", b"b")))
    commit = objects.add("commit", f"tree {tree.hex()}\nauthor a <a> 0 +0000\n\nm".encode())
    files = {".git/HEAD": b"ref: refs/heads/main", ".git/refs/heads/main": commit.hex().encode()}
    for digest, (kind, content) in objects.held.items():
        name = digest.hex()
        whole = object_head(kind, content) + content
        files[f".git/objects/{name[:2]}/{name[2:]}"] = zlib.compress(whole)
    return files


LEFT = {
    "trees that grow without end": nested_trees(),
    "a pack of many objects": {
        ".git/HEAD": b"ref: refs/heads/main",
        ".git/refs/heads/main": b"0" * 40,
        ".git/objects/pack/a.pack": many_objects(400),
    },
}


@pytest.mark.parametrize("files", LEFT.values(), ids=LEFT)
def test_whatever_an_episode_leaves_is_judged_in_time(files, monkeypatch):
    monkeypatch.setattr(worker, "CPU_S", 0.3)
    checks = (git_files("", "main", {"a": "b"}), gzip_has_text("a.gz", "text"))
    found = heartbeat.run(check_bounded(checks, SessionState(files)))
    assert found == {check.name: False for check in checks}


def backtracks(number):
    return re.match("(a+)+$", "a" * number + "b")


def fills_memory(number):
    return len(bytes(number))


@pytest.mark.parametrize(("function", "number"), [(backtracks, 60), (fills_memory, 1 << 40), (int, "9" * 9)])
def test_bounded_call_stops_at_its_limits(function, number, monkeypatch):
    monkeypatch.setattr(worker, "CPU_S", 0.3)
    if function is int:
        assert heartbeat.run(call_bounded(function, number)) == 999_999_999
    else:
        with pytest.raises(LimitExceeded):
            heartbeat.run(call_bounded(function, number))


def test_bounded_call_reraises_exceptions():
    with pytest.raises(ValueError, match="invalid literal"):
        heartbeat.run(call_bounded(int, "x"))


SCHEMA = {"type": "object", "properties": {"x": {"pattern": "^(a+)+$"}, "y": {"uniqueItems": True}}}


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ({"x": "a" * 60 + "b"}, ToolStatus.BAD_ARGUMENTS),
        ({"y": [{"n": n} for n in range(5_000)]}, ToolStatus.BAD_ARGUMENTS),
        ({"x": "b"}, ToolStatus.BAD_ARGUMENTS),
        ({"x": "a"}, ToolStatus.OK),
    ],
)
def test_arguments_are_compared_with_a_server_s_schema_in_time(arguments, status, monkeypatch):
    monkeypatch.setattr(worker, "CPU_S", 0.5)

    async def answer(**given):
        return "fine"

    schema = {"type": "function", "function": {"name": "f", "description": "", "parameters": SCHEMA}}
    served = ServedTool("f", "", answer, given=schema)
    action = Action({"role": "assistant", "content": ""}, (ToolCall("c", "f", arguments),), ())
    (outcome,) = heartbeat.run(ToolExecutor([served]).run(action))
    assert outcome.status is status


def seconds(function, *args):
    """Of processor time."""
    begin = time.process_time()
    function(*args)
    return time.process_time() - begin


TEXTS = {
    "fences without a line break": lambda: program_of("```" * 60_000),
    "fences": lambda: program_of("```python\n" * 20_000),
    "a long wrong name": lambda: did_you_mean("ab" * 50_000, ["ba" * 50, "search" * 20_000]),
    "a frame of many empty blobs": lambda: unpack_frame({"sizes": [0] * 60_000}, b""),
    "rows of numbers with one hash": lambda: same_rows(
        read_rows(json.dumps([[n] for n in SAME_HASH[:9_999]])), Rows(tuple((n,) for n in range(9_999)))
    ),
}


@pytest.mark.parametrize("read", TEXTS.values(), ids=TEXTS)
def test_parsing_takes_linear_time(read):
    assert seconds(read) < heartbeat.MOST_S


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("x```py\na\n``` y ```\nb\n```", "b\n"),
        ("```text\na\n```", ""),
        ("```python\na\n", "a\n"),
        ("```python", ""),
        ("``` \tPython x\na```", "a"),
        ("a", "a"),
        ("````\na\n````", "a\n"),
    ],
)
def test_a_program_is_the_last_block_of_python(answer, program):
    assert program_of(answer) == program


@pytest.mark.parametrize(
    ("body", "headers"), [(bytes(200_000), {}), (gzip.compress(bytes(20_000_000)), {"Content-Encoding": "gzip"})]
)
def test_size_of_a_streaming_reply_is_limited(body, headers):
    sent = []

    async def parts():
        for begin in range(0, len(body), 100):
            sent.append(begin)
            yield body[begin : begin + 100]

    async def ask():
        server = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, content=parts()))
        async with bounded_client(transport=server, most=100_000) as client:
            await client.get("http://server/")

    with pytest.raises(httpx.DecodingError, match="more than"):
        asyncio.run(ask())
    assert sent[-1] <= 100_000


class Health(BaseModel):
    """What is read of any reply."""


async def read_metrics(url):
    stats = ServerStats(lambda: [url])
    await stats._read()
    return stats._servers


async def ask_endpoint(url):
    async with OpenAIClient(OpenAIClientSettings(url, "m", retries=0)) as endpoint:
        await endpoint._send(b"{}")


CLIENTS = {
    "an inference server": lambda url: Replica(url, RemoteEngineSettings()).post("/x", {}, Health),
    "before there is a loop": lambda url: asyncio.to_thread(get_once, url, "/x", Health),
    "an endpoint": ask_endpoint,
    "sandbox serve": lambda url: RemoteSandbox(SandboxSettings(url=url, token="t")).run("print()"),
    "SandboxFusion": lambda url: FusionSandbox(SandboxSettings(url=url)).run("print()"),
    "Piston": lambda url: PistonSandbox(SandboxSettings(url=url)).run("print()"),
}


async def asked_of_a_server_that_never_ends(ask):
    """What a client raises or returns, and the bytes that it was sent."""
    sent = 0

    async def answer(reader, writer):
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
        try:
            while True:
                writer.write(b"[" * 10_000)
                sent += 10_000
                await writer.drain()
        except OSError:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    async with server, asyncio.timeout(10):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            found = await ask(url)
        except LudusError as error:
            found = error
    return found, sent


MUCH = 50_000_000
"""Bytes: far more than the bound of the tests and than sockets hold."""


@pytest.mark.parametrize("ask", CLIENTS.values(), ids=CLIENTS)
def test_no_client_reads_a_reply_without_an_end(ask, monkeypatch):
    monkeypatch.setattr(json_client, "MAX_BYTES", 1_000_000)
    monkeypatch.setattr(sandbox_client.RemoteSandbox, "max_bytes", 1_000_000)
    error, sent = asyncio.run(asked_of_a_server_that_never_ends(ask))
    assert "the response has more than 1000000 bytes" in str(error)
    assert isinstance(error, LudusError)
    assert sent < MUCH


def test_unbounded_metrics_text_is_rejected():
    found, sent = asyncio.run(asked_of_a_server_that_never_ends(read_metrics))
    assert found == {}
    assert sent < MUCH
