"""Tools of MCP servers: results, failures, cleanup, and third-party servers."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import heartbeat
from ludus.config import config_from_toml
from ludus.envs import registry
from ludus.envs.tool_env import ToolEnv, ToolExecutor, ToolLimits
from ludus.envs.tool_world import ToolWorld
from ludus.errors import ConfigError, ToolFault, UserError, WorldError
from ludus.tools.mcp.client import McpServer, McpSettings, mcp_server
from ludus.tools.mcp.transport import MessageFilter
from ludus.types import Action, Message, ToolCall, ToolStatus
from waiting import free_port, until

pytest.importorskip("mcp", reason="needs the extra mcp")

SMALL = ("-S", str(Path(__file__).parents[1] / "mcp_small_server.py"))


def small(*words, **settings):
    return McpServer(McpSettings(command=sys.executable, args=(*SMALL, *words), **settings))


@pytest.fixture(scope="module")
def server():
    made = small()
    yield made
    made.disconnect()


def action(*calls):
    made = tuple(ToolCall(str(i), name, arguments) for i, (name, arguments) in enumerate(calls))
    return Action(Message(role="assistant", content=""), made)


def ask(server, *calls, tools=None):
    return asyncio.run(ToolExecutor(tools or server.tools, ToolLimits(max_output=5000)).run(action(*calls)))


def say(server, name, **arguments):
    (outcome,) = ask(server, (name, arguments))
    return outcome.status, outcome.output


def python(code):
    """What a program prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def processes(server):
    """The server's process and its child."""
    status, output = say(server, "pid")
    assert status is ToolStatus.OK
    return [psutil.Process(int(word)) for word in output.split()]


# What the tools are


def test_tools_of_all_pages_are_listed_with_valid_names(server):
    names = [tool.name for tool in server.tools]
    assert names[:3] == ["echo", "many_kinds", "data"]
    assert names[-1] == "pid"
    echo = server.tools[0]
    assert echo.schema == {
        "type": "function",
        "function": {
            "name": "echo",
            "description": "Say it again.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        },
    }


def test_traits_come_from_the_server_and_from_the_settings():
    made = small(cost=0.5, concurrency=2, timeout_s=7, latency="fast", prefix="my_", only=("die", "echo"))
    die, echo = made.tools
    made.disconnect()
    assert (die.name, echo.name) == ("my_die", "my_echo")
    assert (die.traits.idempotent, echo.traits.idempotent) == (False, True)
    assert (echo.traits.cost, echo.traits.latency, echo.concurrency, echo.timeout_s) == (0.5, "fast", 2, 7)


def test_unknown_tool_name_raises_and_lists_available_tools():
    made = small(only=("ehco",))
    with pytest.raises(UserError, match=r"has no tool 'ehco'.*Its tools: echo, many.kinds"):
        _ = made.tools
    made.disconnect()


# What a call gives


def test_results_of_every_kind_become_text(server):
    assert say(server, "echo", text="日本") == (ToolStatus.OK, "日本")
    assert say(server, "data") == (ToolStatus.OK, '{"a": [1, "é"]}')
    assert say(server, "nothing") == (ToolStatus.OK, "[no output]")
    assert say(server, "many_kinds")[1].splitlines() == [
        "seen",
        "[image: image/png, 5 bytes]",
        "[audio: audio/wav, 3 bytes]",
        "[resource memo://a]",
        "a memo",
        "[resource memo://b: x/y, 3 bytes]",
        "[resource memo://c: c: another]",
    ]


def test_server_errors_are_returned_to_the_model(server):
    assert say(server, "fail") == (ToolStatus.RAISED, "Error: no such thing: try echo")
    assert say(server, "refuse") == (ToolStatus.RAISED, "Error: there is no such method")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({}, "the argument 'text' is missing"), ({"text": 3}, "the argument 'text' is wrong: 3 is not of type 'string'")],
)
def test_arguments_are_checked_against_the_servers_schema(server, arguments, said):
    assert say(server, "echo", **arguments) == (ToolStatus.BAD_ARGUMENTS, f"Error: {said}.")


def test_unknown_argument_is_rejected(server):
    status, output = say(server, "count", what=1)
    assert status is ToolStatus.BAD_ARGUMENTS
    assert "unknown argument" in output
    assert "'what'" in output


def test_concurrent_calls_return_to_their_own_callers(server):
    outcomes = ask(server, *(("echo", {"text": str(n)}) for n in range(50)))
    assert [o.output for o in outcomes] == [str(n) for n in range(50)]


def test_hanging_call_times_out_and_the_next_one_succeeds():
    made = small(timeout_s=2)
    assert say(made, "hang") == (ToolStatus.TIMED_OUT, "Error: hang took longer than 2 s.")
    assert say(made, "echo", text="here") == (ToolStatus.OK, "here")
    assert made.starts == 1
    made.disconnect()


# Messages that would harm


@pytest.fixture(scope="module")
def hostile():
    made = small(max_message_bytes=150_000, timeout_s=20)
    yield made
    assert made.starts == 1
    made.disconnect()


LONG = "its answer has more than 150000 bytes"
HOSTILE = {
    "long": LONG,
    "id last": LONG,
    "values": "its answer cannot be read: it has more than 65536 values",
    "pieces": "its answer cannot be read: it has more than 1024 pieces",
    "deep": "its answer cannot be read: maximum recursion depth exceeded",
    "no JSON": "its answer cannot be read: Expecting value",
    "digits": "its answer cannot be read: Exceeds the limit",
}


@pytest.mark.parametrize(("kind", "words"), HOSTILE.items(), ids=HOSTILE)
def test_hostile_message_fails_only_its_own_call(hostile, kind, words):
    calls = ("hostile", {"kind": kind}), ("echo", {"text": "here"})
    bad, good = heartbeat.run(ToolExecutor(hostile.tools, ToolLimits(max_output=5000)).run(action(*calls)))
    assert bad.status is ToolStatus.RAISED
    assert words in bad.output
    assert (good.status, good.output) == (ToolStatus.OK, "here")


def test_large_results_are_converted_in_another_process(hostile):
    assert say(hostile, "hostile", kind="structured")[1].startswith('{"x": [0, 0, ')
    status, output = say(hostile, "hostile", kind="texts")
    assert (status, output.count("a"), output[-1]) == (ToolStatus.OK, 2_000, "?")


def event(number, text):
    return b'{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"%s"}]}}' % (number, text)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_message_filter_is_independent_of_chunk_boundaries(size):
    good, long = event(1, b"here"), event(2, b"a" * 300)
    streams = {
        "lines": [good, long, b"no JSON", good],
        "events": [b"id: 1\r\ndata: " + good, b": a comment", b"data:" + long, b"data: " + good],
    }

    async def filtered(read, joined, *call):
        async def parts():
            for begin in range(0, len(joined), size):
                yield joined[begin : begin + size]

        return [message async for message in read(MessageFilter(200), parts(), *call)]

    async def all_kinds():
        lines = await filtered(MessageFilter.lines, b"\n".join(streams["lines"]) + b"\n")
        events = await filtered(MessageFilter.events, b"\n\n".join(streams["events"]) + b"\n\n", b"2")
        long_body = await filtered(MessageFilter.body, long, b"2")
        return lines, events, long_body, await filtered(MessageFilter.body, good, b"1")

    lines, events, long_body, body = asyncio.run(all_kinds())
    refused = json.loads(long_body[0])
    assert refused["error"]["message"] == "the tool failed: its answer has more than 200 bytes"
    assert [json.loads(line) for line in lines] == [json.loads(good), refused, json.loads(good)]
    assert body == [good]
    assert events[0] == b"id: 1\ndata: " + good + b"\n\n"
    assert json.loads(events[2].removeprefix(b"data: ")) == refused
    assert b"".join(events).endswith(b"data: " + good + b"\n\n")


def test_unterminated_event_is_not_buffered_whole():
    read = []

    async def parts():
        for _ in range(100):
            read.append(1)
            yield b"data: aaaa"

    async def ask():
        return [part async for part in MessageFilter(100).events(parts(), b'"x"')]

    (only,) = asyncio.run(ask())
    assert b'"id": "x"' in only
    assert len(read) < 25


def test_output_schema_patterns_are_ignored(hostile):
    assert say(hostile, "pattern")[0] is ToolStatus.OK


def test_oversized_message_without_a_call_is_dropped(hostile, caplog):
    tool = next(tool for tool in hostile.tools if tool.name == "hostile")

    async def use():
        waits = asyncio.ensure_future(tool.function(kind="long and nothing else"))
        await until(lambda: "Dropped a message" in caplog.text)
        waits.cancel()

    asyncio.run(use())
    assert say(hostile, "echo", text="here") == (ToolStatus.OK, "here")


# Servers that die


def test_dead_server_is_restarted_by_the_next_call():
    made = small()
    parent, child = processes(made)
    parent.kill()
    parent.wait(10)
    (life,) = made._connections
    deadline = time.monotonic() + 60
    while not life.ended.is_set() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert say(made, "count") == (ToolStatus.OK, "1")
    assert made.starts == 2
    made.disconnect()
    child.kill()


def test_server_death_during_a_call_raises_tool_fault():
    made = small()
    with pytest.raises(ToolFault, match=r"The tool die failed: The MCP server .* failed"):
        say(made, "die")
    assert made.starts == 1
    assert say(made, "echo", text="again") == (ToolStatus.OK, "again")
    assert made.starts == 2
    made.disconnect()


def test_call_is_retried_after_server_death_only_if_idempotent(tmp_path):
    made = small(env={"FLAG": str(tmp_path / "safe")})
    (outcome,) = ask(made, ("die_once", {}))
    assert (outcome.status, outcome.output, outcome.retried) == (ToolStatus.OK, "alive", True)
    assert made.starts == 2
    made.disconnect()
    unsafe = small(env={"FLAG": str(tmp_path / "unsafe")})
    with pytest.raises(ToolFault):
        say(unsafe, "die_once_unsafe")
    assert unsafe.starts == 1
    unsafe.disconnect()


# Servers that do not start


def test_missing_program_raises_user_error():
    with pytest.raises(UserError, match=r"no-such-server cannot be started.*is installed"):
        mcp_server(command="no-such-server")


def test_error_quotes_output_of_a_server_that_exits_at_start():
    with pytest.raises(WorldError, match=r"failed to start.*Its output: the licence has run out"):
        mcp_server(command=sys.executable, args=(*SMALL, "dies"))


def test_silent_server_times_out_at_start_and_is_killed():
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(WorldError, match=r"no response within 0\.5 s"):
        mcp_server(command=sys.executable, args=(*SMALL, "mute"), start_timeout_s=0.5)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_url_without_a_server_raises_world_error():
    with pytest.raises(WorldError, match="failed to start"):
        mcp_server(url=f"http://127.0.0.1:{free_port()}/mcp", start_timeout_s=10)


@pytest.mark.parametrize("given", [{}, {"command": "a", "url": "http://b"}])
def test_exactly_one_of_command_and_url_is_required(given):
    with pytest.raises(ConfigError, match="give either command or url"):
        mcp_server(**given)


def test_without_the_package_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['mcp'] = None; import importlib.util as u\n"
        "u.find_spec = lambda name: None\n"
        "from ludus.tools.mcp.client import mcp_server\n"
        "from ludus.errors import UserError\n"
        "try: mcp_server(command='x')\n"
        "except UserError as error: print(error)\n"
    )
    assert python(code).strip() == "Tools of an MCP server need the package mcp. Install it: pip install 'ludus[mcp]'."


# Nothing stays


def lives(pid: int) -> bool:
    """Whether a process is there and no zombie. One that has been killed may take a moment to go."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_disconnect_ends_the_server_and_its_child_processes():
    made = small()
    running = processes(made)
    made.disconnect()
    made.disconnect()
    asyncio.run(until(lambda: not any(lives(process.pid) for process in running)))
    with pytest.raises(ToolFault, match="is closed"):
        say(made, "echo", text="x")


LEAVES = f"""
import asyncio
from ludus.tools.mcp.client import mcp_server
server = mcp_server(command={sys.executable!r}, args={SMALL!r})
tool = next(tool for tool in server.tools if tool.name == "pid")
print(asyncio.run(tool.function()))
"""


STOPS = """
import os, signal
pid = int(asyncio.run(tool.function()).split()[0])
os.kill(pid, signal.SIGSTOP)
print(pid, flush=True)
"""


def test_interpreter_exit_ends_the_server():
    pids = [int(word) for word in python(LEAVES).split()]
    assert len(pids) == 2
    asyncio.run(until(lambda: not any(lives(pid) for pid in pids)))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux is not there")
def test_hung_server_ends_when_its_parent_is_killed():
    leaves = LEAVES + "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    stops = leaves.replace("print(asyncio.run(tool.function()))", STOPS)
    ended = subprocess.run([sys.executable, "-c", stops], capture_output=True, text=True, timeout=120)
    hung = int(ended.stdout)
    asyncio.run(until(lambda: not lives(hung)))


def test_a_world_closes_its_servers(server):
    made = small()
    world = ToolWorld("mine", {}, made.tools, (), resources=[made])

    async def use():
        async with registry.closing(world):
            await ToolExecutor(world.tools).run(action(("echo", {"text": "x"})))

    asyncio.run(use())
    with pytest.raises(WorldError, match="is closed"):
        made.connect()


def test_episodes_can_use_separate_servers(server):
    first, second = server.fresh(), server.fresh()

    async def play(own):
        environment = ToolEnv(own.tools, (), resources=[own])
        await environment.start(type("Task", (), {"prompt": ()}))
        await environment.step(action(("count", {})))
        result = await environment.step(action(("count", {})))
        await environment.close()
        return result.outcomes[0].output

    async def both():
        return await asyncio.gather(play(first), play(second))

    assert asyncio.run(both()) == ["2", "2"]
    assert (first.starts, second.starts) == (1, 1)


# Servers that nobody here wrote


def program(name):
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name} (pip install ludus[dev])")
    return found


@pytest.mark.slow
def test_time_server_tools_can_be_called():
    made = mcp_server(command=program("mcp-server-time"), args=("--local-timezone", "UTC"), timeout_s=60)
    try:
        assert {"get_current_time", "convert_time"} <= {tool.name for tool in made.tools}
        asked = {"source_timezone": "Asia/Tokyo", "time": "14:30", "target_timezone": "Asia/Kolkata"}
        good, bad, short = ask(
            made, ("convert_time", asked), ("get_current_time", {"timezone": "Mars/Base"}), ("convert_time", {})
        )
        assert "T11:00:00+05:30" in good.output
        assert (bad.status, short.status) == (ToolStatus.RAISED, ToolStatus.BAD_ARGUMENTS)
        assert "Mars" in bad.output
    finally:
        made.disconnect()


@pytest.mark.slow
def test_world_settings_can_name_a_server():
    program("mcp-server-time")
    root = Path(__file__).parents[2]
    config = config_from_toml((root / "examples" / "clock.toml").read_text("utf-8"), "clock.toml")
    env = config.env.model_copy(update={"name": str(root / "examples" / "clock.py")})
    world = registry.build_world(env, config.rollout)

    async def use():
        async with registry.closing(world):
            outcomes = []
            for task in world.tasks("test")[:5]:
                said = task.prompt[0]["content"]
                time_, here, there = re.search(r"It is (\S+) in (\S+)\. .* in (\S+)\?", said).groups()
                asked = {"time": time_, "source_timezone": here, "target_timezone": there}
                (outcome,) = await ToolExecutor(world.tools).run(action(("convert_time", asked)))
                outcomes.append((task.truth, json.loads(outcome.output)["target"]["datetime"]))
        return outcomes

    for truth, found in asyncio.run(use()):
        assert f"T{truth}:00" in found
    assert [tool.name for tool in world.tools] == ["convert_time"]


@pytest.mark.slow
def test_git_server_tools_can_be_called(tmp_path):
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first", "--allow-empty"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "new.txt").write_text("text")
    made = mcp_server(command=program("mcp-server-git"), timeout_s=60)
    try:
        status, log, wrong = ask(
            made,
            ("git_status", {"repo_path": str(tmp_path)}),
            ("git_log", {"repo_path": str(tmp_path)}),
            ("git_log", {"repo_path": str(tmp_path / "none")}),
        )
        assert "new.txt" in status.output
        assert "first" in log.output
        assert wrong.status is ToolStatus.RAISED
    finally:
        made.disconnect()


HTTP = """
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    "Add."
    return a + b

@server.tool()
def long(number: int) -> str:
    "Long."
    return "a" * number

@server.tool()
def divide(a: int, b: int) -> float:
    "Divide."
    return a / b

server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
"""


def test_http_server_limits_messages_and_raises_when_gone(tmp_path):
    port = free_port()
    (tmp_path / "token").write_text("secret\n")
    process = subprocess.Popen([sys.executable, "-c", HTTP, str(port)], stderr=subprocess.DEVNULL)
    settings = McpSettings(
        url=f"http://127.0.0.1:{port}/mcp",
        headers={"X-A": "b"},
        token_file=str(tmp_path / "token"),
        max_message_bytes=2_000_000,
    )
    try:
        made = until_it_serves(settings)
        good, bad = ask(made, ("add", {"a": 2, "b": 3}), ("divide", {"a": 1, "b": 0}))
        assert (good.status, good.output) == (ToolStatus.OK, "5")
        assert (bad.status, "divide" in bad.output) == (ToolStatus.RAISED, True)
        status, output = say(made, "long", number=2_500_000)
        assert (status, "its answer has more than 2000000 bytes" in output) == (ToolStatus.RAISED, True)
        assert say(made, "long", number=900_000)[0] is ToolStatus.OK
        assert made.starts == 1
        process.kill()
        process.wait(10)
        with pytest.raises(ToolFault):
            say(made, "add", a=1, b=1)
        made.disconnect()
    finally:
        process.kill()
        process.wait(10)


def until_it_serves(settings):
    """A server that takes seconds to come up."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return mcp_server(settings)
        except WorldError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
