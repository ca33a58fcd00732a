"""The tools of any MCP server: a program that speaks over its standard streams, or a server with a URL.

    server = mcp_server(command="mcp-server-time")
    ToolWorld(..., tools=server.tools, resources=[server])

Needs the extra `mcp` (the official package). A server is spoken to from a thread of its own, so that its
tools work from any event loop, and from all episodes at once. One that died is started again by the next
call. A call in which it dies raises WorldError: the toolbox sends it once more where the tool is idempotent,
and otherwise the episode fails as one of the infrastructure. Closing ends the server's processes; so does the
end of the interpreter.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ludus.errors import ConfigError, LudusError, UserError, WorldError
from ludus.tools.base import ArgumentError, FunctionSchema, Latency, Tool, ToolError, ToolSchema, Traits
from ludus.tools.mcp.messages import MOST_BYTES, Screen
from ludus.tools.mcp.transport import ServerProgram, program_transport, screened_client
from ludus.types import JSON
from ludus.untrusted.worker import LimitExceeded, call_bounded

if TYPE_CHECKING:
    import mcp
    from jsonschema import ValidationError
    from mcp import types
    from mcp.client import Transport
    from mcp.client._transport import TransportStreams

T = TypeVar("T")

MAX_NAME: Final = 64
"""Characters of a tool's name, by the rule of OpenAI-compatible servers."""
STOP_S: Final = 10.0
"""What a server may take to end; its processes are killed well before."""
_CLOSED: Final = "Connection closed"
"""What the package says of a call whose connection went away; servers use the same code for other things."""
_BROKEN: Final = ("Session terminated", "Server returned an error response", "SSE stream ")
"""How the package begins where an HTTP server lost the session, failed, or broke off its answer."""


class McpSettings(BaseModel):
    """Which server, and how its tools are used. `command` or `url`, one of them.

    A relative path in `command` or `args` is seen from `cwd`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str = ""
    """A program that serves over its standard streams."""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = Field(default_factory=dict)
    """Beside HOME, PATH and the like, which the program gets in any case."""
    cwd: str | None = None
    url: str = ""
    """A server that is running (streamable HTTP)."""
    headers: Mapping[str, str] = Field(default_factory=dict)
    token_file: str = ""
    """A file whose text is sent as bearer token: settings are written into the run folder, tokens are not."""
    only: tuple[str, ...] = ()
    """The tools to use, by the server's names; none named: all."""
    prefix: str = ""
    """Stands before the names of the tools, where those of several servers would meet."""
    timeout_s: float = Field(30.0, gt=0)
    """Of a call."""
    start_timeout_s: float = Field(60.0, gt=0)
    max_message_bytes: int = Field(MOST_BYTES, ge=2**16)
    """Of one message of the server. A call whose answer is longer fails with an error that says so."""
    concurrency: int = Field(0, ge=0)
    """Calls of each tool at once; 0 is no bound."""
    latency: Latency = "slow"
    cost: float = 0.0
    """Of a call."""

    @model_validator(mode="after")
    def _one_way(self) -> McpSettings:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either command or url")
        return self

    @property
    def name(self) -> str:
        """The server, for messages."""
        return self.url or " ".join([self.command, *self.args])


@dataclass(frozen=True)
class ServedTool(Tool):
    """A tool of a server, with the schema that the server gave."""

    given: ToolSchema | None = field(default=None, kw_only=True)

    @cached_property
    def schema(self) -> ToolSchema:
        """The schema as it was given."""
        assert self.given is not None
        return self.given

    def check(self, arguments: Mapping[str, JSON]) -> dict[str, JSON]:
        """The arguments as they are. Raises `ArgumentError` where they do not fit the schema."""
        return _fitting(arguments, misfits(self.schema["function"]["parameters"], arguments))

    async def check_bounded(self, arguments: Mapping[str, JSON]) -> Mapping[str, object]:
        """As `check`, in a process with limits: patterns and unique items of a schema may take long."""
        try:
            found = await call_bounded(misfits, self.schema["function"]["parameters"], dict(arguments))
        except LimitExceeded as error:
            raise ArgumentError("the arguments take too long to compare with the schema") from error
        return _fitting(arguments, found)


def _fitting(arguments: Mapping[str, JSON], found: Sequence[str]) -> dict[str, JSON]:
    if found:
        raise ArgumentError("; ".join(found))
    return dict(arguments)


def misfits(schema: Mapping[str, JSON], arguments: Mapping[str, JSON]) -> list[str]:
    """What does not fit the schema, in words; nothing where the schema cannot be used: the server checks."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from referencing.exceptions import Unresolvable

    validator = Draft202012Validator(dict(schema))
    try:
        errors = sorted(validator.iter_errors(dict(arguments)), key=lambda error: list(map(str, error.path)))
    except (SchemaError, Unresolvable, re.error, RecursionError):
        return []
    return [_in_words(error) for error in errors[:4]]


class _Any(BaseModel):
    """Arguments are checked against the server's schema."""


@dataclass(eq=False)
class _Life:
    """One connection, from its start to its end."""

    up: asyncio.Future[tuple[types.Tool, ...]]
    """The server's tools, once it has answered."""
    task: asyncio.Task[None] | None = None
    client: mcp.Client | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Asked for, or the server's own doing."""


class McpServer:
    """One server and its tools. A closed one stays closed; `starts` counts how often it was begun."""

    def __init__(self, settings: McpSettings, listed: Sequence[types.Tool] | None = None) -> None:
        self.settings = settings
        self.starts = 0
        self._listed = listed
        self._loop = asyncio.new_event_loop()
        self._life: _Life | None = None
        self._thread = Thread(target=self._loop.run_forever, name=f"mcp-{settings.name}", daemon=True)
        self._lives: list[_Life] = []
        self._stop = weakref.finalize(self, _stop, self._loop, self._thread, self._lives)

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        """The tools, in the server's order. Connects where nothing is known of them; raises as `connect`."""
        if self._listed is None:
            self.connect()
        assert self._listed is not None
        chosen = _chosen(self._listed, self.settings)
        made = tuple(self._tool(listed) for listed in chosen)
        if len({tool.name for tool in made}) < len(made):
            names = ", ".join(tool.name for tool in made)
            raise UserError(f"Two tools of the MCP server {self.settings.name} share a name: {names}.")
        return made

    def fresh(self) -> McpServer:
        """The same server for one episode, not yet started: for one that keeps a state.

        Its tools are known already; give it to `ToolEnv` as a resource.
        """
        return McpServer(self.settings, tuple(self._listed or ()) or None)

    def connect(self) -> None:
        """Start the server and list its tools.

        Raises UserError where the extra is missing or the program cannot be started, WorldError where the
        server does not answer.
        """
        if importlib.util.find_spec("mcp") is None:
            raise UserError("Tools of an MCP server need the package mcp.", "pip install 'ludus[mcp]'")
        self._submit(self._alive()).result()

    def disconnect(self) -> None:
        """End the server. Once more does no harm."""
        self._stop()

    async def open(self) -> None:
        """As `connect`, beside the event loop."""
        await asyncio.to_thread(self.connect)

    async def close(self) -> None:
        """As `disconnect`, beside the event loop."""
        await asyncio.to_thread(self.disconnect)

    def _submit(self, work: Coroutine[object, None, T]) -> Future[T]:
        """Run it on the server's own event loop."""
        if not self._stop.alive:
            work.close()
            raise WorldError(f"The MCP server {self.settings.name} is closed.", "Make a new one.")
        if not self._thread.is_alive():
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _tool(self, listed: types.Tool) -> Tool:
        async def call(**arguments: JSON) -> str:
            return await asyncio.wrap_future(self._submit(self._call(listed.name, arguments)))

        return ServedTool(
            name=_name(self.settings.prefix + listed.name),
            description=listed.description or listed.title or "",
            function=call,
            arguments=_Any,
            timeout_s=self.settings.timeout_s,
            concurrency=self.settings.concurrency,
            traits=Traits(self.settings.latency, self.settings.cost, _is_idempotent(listed)),
            given=_schema(_name(self.settings.prefix + listed.name), listed),
        )

    async def _call(self, name: str, arguments: dict[str, JSON]) -> str:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        life = await self._alive()
        assert life.client is not None
        try:
            limit_s = self.settings.timeout_s + 1
            return _said(await life.client.call_tool(name, arguments, read_timeout_seconds=limit_s))
        except MCPError as error:
            closed = error.code == CONNECTION_CLOSED and (life.ended.is_set() or error.message == _CLOSED)
            if closed or (self.settings.url and error.message.startswith(_BROKEN)):
                life.ended.set()
                raise WorldError(
                    f"The MCP server {self.settings.name} broke off: {error.message}."
                ) from error
            if error.code == REQUEST_TIMEOUT:
                raise ToolError(f"{name} took longer than {limit_s:g} s") from error
            raise ToolError(error.message) from error

    async def _alive(self) -> _Life:
        """The connection; a new one where there is none, or the last has ended."""
        life = self._life
        if life is None or life.ended.is_set():
            life = self._begin(life)
        self._listed = await asyncio.shield(life.up)
        return life

    def _begin(self, last: _Life | None) -> _Life:
        life = self._life = _Life(self._loop.create_future())
        life.up.add_done_callback(lambda up: up.cancelled() or up.exception())  # heard, if only here
        life.task = self._loop.create_task(self._live(life, last))
        self._lives[:] = [life]
        self.starts += 1
        return life

    async def _live(self, life: _Life, last: _Life | None) -> None:
        """One connection in one task, as the package asks for."""
        from mcp import Client

        if last is not None and last.task is not None:
            await asyncio.wait({last.task})
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            try:
                async with asyncio.timeout(self.settings.start_timeout_s) as clock, AsyncExitStack() as stack:
                    transport = _watched(await _transport(self.settings, errors, stack), life.ended)
                    life.client = await stack.enter_async_context(Client(transport))
                    listed = await _all_tools(life.client)
                    clock.reschedule(None)
                    life.up.set_result(listed)
                    await life.ended.wait()
            except Exception as error:  # boundary: foreign server, foreign transport; the cause travels on
                if not life.up.done():
                    life.up.set_exception(_refusal(self.settings, error, errors))
            finally:
                life.ended.set()
                life.up.cancel()


def mcp_server(settings: McpSettings | None = None, **given: object) -> McpServer:
    """A server of these settings (or of an `McpSettings`), connected.

    Raises ConfigError for settings that do not fit, and as `McpServer.connect`.
    """
    try:
        server = McpServer(settings or McpSettings.model_validate(given))
    except ValueError as error:
        raise ConfigError(f"The settings of an MCP server do not fit: {error}") from error
    try:
        server.connect()
    except LudusError:
        server.disconnect()
        raise
    return server


def _stop(loop: asyncio.AbstractEventLoop, thread: Thread, lives: Sequence[_Life]) -> None:
    """End the connection, then the event loop. For the end of the interpreter as well."""

    async def end() -> None:
        for life in lives:
            life.ended.set()
            if life.task is not None:
                if not life.up.done():
                    life.task.cancel()
                await asyncio.wait({life.task}, timeout=STOP_S)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    if thread.is_alive():
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(end(), loop).result(2 * STOP_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(STOP_S)
    if not loop.is_running():
        loop.close()


async def _transport(settings: McpSettings, errors: IO[str], stack: AsyncExitStack) -> Transport:
    screen = Screen(settings.max_message_bytes)
    if settings.command:
        from mcp.client.stdio import get_default_environment

        path = (get_default_environment() | dict(settings.env)).get("PATH")
        command = [_program(settings, path), *settings.args]
        return program_transport(ServerProgram(command, settings.env, settings.cwd, errors), screen)
    from mcp.client.streamable_http import streamable_http_client

    headers = dict(settings.headers)
    if settings.token_file:
        headers["Authorization"] = f"Bearer {Path(settings.token_file).read_text('utf-8').strip()}"
    client = await stack.enter_async_context(screened_client(headers, screen))
    return streamable_http_client(settings.url, http_client=client, max_sse_event_size=None)


def _program(settings: McpSettings, path: str | None) -> str:
    """The command: on the path, or beside the interpreter. Raises UserError where there is none."""
    if settings.cwd and "/" in settings.command:
        return settings.command
    beside = str(Path(sys.executable).parent)
    found = shutil.which(settings.command, path=path) or shutil.which(settings.command, path=beside)
    if found is None:
        raise UserError(
            f"The MCP server {settings.name} cannot be started: there is no program {settings.command}.",
            "Is it installed, and on the PATH?",
        )
    return found


@asynccontextmanager
async def _watched(transport: Transport, ended: asyncio.Event) -> AsyncIterator[TransportStreams]:
    """The transport, and `ended` is set before the session hears that the server's side is closed."""
    import anyio
    from mcp.shared.message import SessionMessage

    async with transport as (reader, writer):
        send, receive = anyio.create_memory_object_stream[SessionMessage | Exception](0)

        async def pump() -> None:
            async with send:
                with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                    async for message in reader:
                        await send.send(message)
                ended.set()

        async with anyio.create_task_group() as group:
            group.start_soon(pump)
            try:
                yield receive, writer
            finally:
                group.cancel_scope.cancel()


async def _all_tools(client: mcp.Client) -> tuple[types.Tool, ...]:
    """The tools of all pages of the list."""
    found: list[types.Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tuple(found)


def _refusal(settings: McpSettings, error: BaseException, errors: IO[str]) -> LudusError:
    """Why a server did not start, with the end of what it printed as errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, LudusError):
        return error
    errors.seek(0)
    printed = errors.read().strip()[-500:]
    if isinstance(error, TimeoutError):
        words = f"no answer within {settings.start_timeout_s:g} s"
    else:
        words = f"{type(error).__name__}: {error}"
    said = f" It printed: {printed}" if printed else ""
    return WorldError(f"The MCP server {settings.name} does not start: {words}.{said}", "Run it by hand.")


def _chosen(listed: Sequence[types.Tool], settings: McpSettings) -> list[types.Tool]:
    """The tools that are asked for. Raises UserError for one that the server does not have."""
    by_name = {tool.name: tool for tool in listed}
    for name in settings.only:
        if name not in by_name:
            raise UserError(
                f"The MCP server {settings.name} has no tool {name!r}.", f"It has: {', '.join(by_name)}."
            )
    return [by_name[name] for name in settings.only] if settings.only else list(listed)


def _name(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:MAX_NAME]


def _is_idempotent(listed: types.Tool) -> bool:
    """Whether the server says that a repeated call changes nothing; it is taken at its word."""
    hints = listed.annotations
    return hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)


def _schema(name: str, listed: types.Tool) -> ToolSchema:
    parameters = {key: value for key, value in listed.input_schema.items() if key != "$schema"}
    parameters = {"type": "object", "properties": {}} | parameters
    function = FunctionSchema(
        name=name, description=listed.description or listed.title or "", parameters=parameters
    )
    return ToolSchema(type="function", function=function)


def _in_words(error: ValidationError) -> str:
    """What is wrong with the arguments, in the words of `Tool.check`."""
    where = ".".join(map(str, error.absolute_path)) or "arguments"
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        return "; ".join(f"the argument {name!r} is missing" for name in missing)
    if error.validator == "additionalProperties":
        return f"there is no such argument: {error.message}"
    return f"the argument {where!r} is wrong: {error.message[:300]}"


def _said(result: types.CallToolResult) -> str:
    """A result as text. Raises ToolError with the same text where the server calls it an error."""
    parts = [_block(block) for block in result.content]
    text = "\n".join(part for part in parts if part) or "[no output]"
    if result.is_error:
        raise ToolError(text)
    return text


def _block(block: types.ContentBlock) -> str:
    """One piece of a result; what is no text is named, with its kind and size."""
    from mcp import types

    if isinstance(block, types.TextContent):
        return block.text
    if isinstance(block, types.ImageContent | types.AudioContent):
        return f"[{block.type}: {block.mime_type}, {_size(block.data)} bytes]"
    if isinstance(block, types.ResourceLink):
        about = f": {block.description}" if block.description else ""
        return f"[resource {block.uri}: {block.name}{about}]"
    resource = block.resource
    if isinstance(resource, types.TextResourceContents):
        return f"[resource {resource.uri}]\n{resource.text}"
    return f"[resource {resource.uri}: {resource.mime_type or 'data'}, {_size(resource.blob)} bytes]"


def _size(base64: str) -> int:
    """Bytes that a text in base64 stands for."""
    return len(base64.rstrip("=")) * 3 // 4
