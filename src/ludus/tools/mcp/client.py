"""Tools of MCP servers: programs that communicate over standard streams, or servers with a URL.

    server = mcp_server(command="mcp-server-time")
    ToolWorld(..., tools=server.tools, resources=[server])

Each server has a separate thread, so its tools work from any event loop. If a server died, the next call restarts it.
If it dies during a call, the call raises WorldError. Closing, or interpreter exit, stops the server's processes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ludus.errors import ConfigError, LudusError, UserError, WorldError
from ludus.tools.base import ArgumentError, DescribedTool, FunctionSchema, Latency, Tool, ToolError, ToolSchema, Traits
from ludus.tools.mcp.transport import MAX_BYTES, MessageFilter, filtered_client, program_transport
from ludus.types import JSON
from ludus.untrusted.worker import LimitExceeded, call_bounded

if TYPE_CHECKING:
    import mcp
    from jsonschema import ValidationError
    from mcp import types
    from mcp.client import Transport

T = TypeVar("T")

MAX_NAME: Final = 64  # maximum length of a tool's name in OpenAI-compatible servers
STOP_S: Final = 10.0  # timeout for a server to stop (s); its processes are killed earlier
_CLOSED: Final = "Connection closed"  # the package's message; servers use its error code for other errors too
_LOST_SESSION: Final = ("Session terminated", "Server returned an error response", "SSE stream ")
"""Prefixes of the package's messages when an HTTP server lost the session, failed, or dropped a response."""


class McpSettings(BaseModel):
    """Settings of a server (`command` or `url`) and its tools. Paths in `command` and `args` are relative to `cwd`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str = ""
    """Program that serves over standard streams."""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables in addition to the default ones such as HOME and PATH."""
    cwd: str | None = None
    url: str = ""
    """URL of a running server (streamable HTTP)."""
    headers: Mapping[str, str] = Field(default_factory=dict)
    token_file: str = ""
    """File with a bearer token. A file, because settings are saved in the run folder."""
    only: tuple[str, ...] = ()
    """Names of the tools to use; empty: all."""
    prefix: str = ""
    """Prefix of tool names, to avoid collisions between servers."""
    timeout_s: float = Field(30.0, gt=0)
    """Timeout of a call."""
    start_timeout_s: float = Field(60.0, gt=0)
    max_message_bytes: int = Field(MAX_BYTES, ge=2**16)
    """Maximum size of a server message. A call with a longer response fails."""
    concurrency: int = Field(0, ge=0)
    """Maximum number of concurrent calls per tool; 0: unlimited."""
    latency: Latency = "slow"
    cost: float = 0.0
    """Cost of a call."""

    @model_validator(mode="after")
    def _check_command_or_url(self) -> McpSettings:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either command or url")
        return self

    @property
    def name(self) -> str:
        """Name of the server in messages."""
        return self.url or " ".join([self.command, *self.args])


@dataclass(frozen=True)
class ServedTool(DescribedTool):
    """Tool of a server, with the schema sent by the server."""

    def check(self, arguments: Mapping[str, JSON]) -> dict[str, JSON]:
        """Return the arguments unchanged. Raises `ArgumentError` if they do not match the schema."""
        return _check(arguments, schema_errors(self.schema["function"]["parameters"], arguments))

    async def check_bounded(self, arguments: Mapping[str, JSON]) -> Mapping[str, object]:
        """Check in a process with limits, since patterns and unique items of a schema may be slow."""
        try:
            found = await call_bounded(schema_errors, self.schema["function"]["parameters"], dict(arguments))
        except LimitExceeded as error:
            raise ArgumentError("the arguments take too long to compare with the schema") from error
        return _check(arguments, found)


def _check(arguments: Mapping[str, JSON], found: Sequence[str]) -> dict[str, JSON]:
    if found:
        raise ArgumentError("; ".join(found))
    return dict(arguments)


def schema_errors(schema: Mapping[str, JSON], arguments: Mapping[str, JSON]) -> list[str]:
    """Return descriptions of schema violations; [] if the schema is unusable, since the server checks too."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from referencing.exceptions import Unresolvable

    validator = Draft202012Validator(dict(schema))
    try:
        errors = sorted(validator.iter_errors(dict(arguments)), key=lambda error: list(map(str, error.path)))
    except (SchemaError, Unresolvable, re.error, RecursionError):
        return []
    return [_describe(error) for error in errors[:4]]


@dataclass(eq=False)
class _Connection:
    up: asyncio.Future[tuple[types.Tool, ...]]
    """The server's tools, set once it is connected."""
    task: asyncio.Task[None] | None = None
    client: mcp.Client | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the connection ends, by request or by the server."""


class McpServer:
    """MCP server and its tools. It cannot be reopened after closing; `starts` counts its starts."""

    def __init__(self, settings: McpSettings, listed: Sequence[types.Tool] | None = None) -> None:
        self.settings = settings
        self.starts = 0
        self._listed = listed
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=f"mcp-{settings.name}", daemon=True)
        self._connections: list[_Connection] = []
        self._stop = weakref.finalize(self, _stop, self._loop, self._thread, self._connections)

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        """The tools in the server's order. Connects if they are unknown; raises as `connect`."""
        if self._listed is None:
            self.connect()
        by_name = {tool.name: tool for tool in self._listed or ()}
        for name in self.settings.only:
            if name not in by_name:
                known = f"Its tools: {', '.join(by_name)}."
                raise UserError(f"The MCP server {self.settings.name} has no tool {name!r}.", known)
        selected = [by_name[name] for name in self.settings.only] or self._listed or ()
        made = tuple(map(self._tool, selected))
        if len({tool.name for tool in made}) < len(made):
            names = ", ".join(tool.name for tool in made)
            raise UserError(f"Two tools of the MCP server {self.settings.name} share a name: {names}.")
        return made

    def fresh(self) -> McpServer:
        """Return an unstarted copy with the same tools: a resource of one episode's `ToolEnv`, for stateful servers."""
        return McpServer(self.settings, tuple(self._listed or ()) or None)

    def connect(self) -> None:
        """Start the server and list its tools. Raises UserError if that cannot be, WorldError without a response."""
        if importlib.util.find_spec("mcp") is None:
            raise UserError("Tools of an MCP server need the package mcp.", "Install it: pip install 'ludus[mcp]'.")
        self._submit(self._ensure_connected()).result()

    def disconnect(self) -> None:
        """Stop the server. Idempotent."""
        self._stop()

    async def open(self) -> None:
        """Connect without blocking the event loop."""
        await asyncio.to_thread(self.connect)

    async def close(self) -> None:
        """Disconnect without blocking the event loop."""
        await asyncio.to_thread(self.disconnect)

    def _submit(self, work: Coroutine[object, None, T]) -> Future[T]:
        if not self._stop.alive:
            work.close()
            raise WorldError(f"The MCP server {self.settings.name} is closed.", "Create a new one.")
        if not self._thread.is_alive():
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _tool(self, listed: types.Tool) -> Tool:
        async def call(**arguments: JSON) -> str:
            return await asyncio.wrap_future(self._submit(self._call(listed.name, arguments)))

        name = re.sub(r"[^a-zA-Z0-9_-]", "_", self.settings.prefix + listed.name)[:MAX_NAME]
        parameters = {key: value for key, value in listed.input_schema.items() if key != "$schema"}
        parameters = {"type": "object", "properties": {}} | parameters
        about = listed.description or listed.title or ""
        hints = listed.annotations  # the server's declarations are trusted
        idempotent = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        function = FunctionSchema(name=name, description=about, parameters=parameters)
        return ServedTool(
            name,
            about,
            call,
            timeout_s=self.settings.timeout_s,
            concurrency=self.settings.concurrency,
            traits=Traits(self.settings.latency, self.settings.cost, idempotent),
            given=ToolSchema(type="function", function=function),
        )

    async def _call(self, name: str, arguments: dict[str, JSON]) -> str:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        connection = await self._ensure_connected()
        assert connection.client is not None
        try:
            limit_s = self.settings.timeout_s + 1
            result = await connection.client.call_tool(name, arguments, read_timeout_seconds=limit_s)
        except MCPError as error:
            closed = error.code == CONNECTION_CLOSED and (connection.ended.is_set() or error.message == _CLOSED)
            if closed or (self.settings.url and error.message.startswith(_LOST_SESSION)):
                connection.ended.set()
                raise WorldError(f"The MCP server {self.settings.name} failed: {error.message}.") from error
            if error.code == REQUEST_TIMEOUT:
                raise ToolError(f"{name} took longer than {limit_s:g} s") from error
            raise ToolError(error.message) from error
        text = "\n".join(filter(None, map(_content_text, result.content))) or "[no output]"
        if result.is_error:
            raise ToolError(text)
        return text

    async def _ensure_connected(self) -> _Connection:
        connection = last = self._connections[-1] if self._connections else None
        if connection is None or connection.ended.is_set():
            connection = _Connection(self._loop.create_future())
            connection.up.add_done_callback(lambda up: up.cancelled() or up.exception())  # retrieves the exception
            connection.task = self._loop.create_task(self._run_connection(connection, last))
            self._connections[:] = [connection]
            self.starts += 1
        self._listed = await asyncio.shield(connection.up)
        return connection

    async def _run_connection(self, connection: _Connection, last: _Connection | None) -> None:
        """Run a connection from start to end in one task, as required by the package."""
        from mcp import Client

        if last is not None and last.task is not None:
            await asyncio.wait({last.task})
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            try:
                async with asyncio.timeout(self.settings.start_timeout_s) as clock, AsyncExitStack() as stack:
                    transport = await _transport(self.settings, errors, stack, connection.ended)
                    connection.client = await stack.enter_async_context(Client(transport))
                    listed = await _all_tools(connection.client)
                    clock.reschedule(None)
                    connection.up.set_result(listed)
                    await connection.ended.wait()
            except Exception as error:  # boundary: foreign server and transport; the cause is kept
                if not connection.up.done():
                    connection.up.set_exception(_start_error(self.settings, error, errors))
            finally:
                connection.ended.set()
                connection.up.cancel()


def mcp_server(settings: McpSettings | None = None, **given: object) -> McpServer:
    """Create a connected server. Raises ConfigError for invalid settings, and as `McpServer.connect`."""
    try:
        server = McpServer(settings or McpSettings.model_validate(given))
    except ValueError as error:
        raise ConfigError(f"Invalid settings of an MCP server: {error}") from error
    try:
        server.connect()
    except LudusError:
        server.disconnect()
        raise
    return server


def _stop(loop: asyncio.AbstractEventLoop, thread: Thread, connections: Sequence[_Connection]) -> None:
    """End the connection, then the event loop. Also runs at interpreter exit."""

    async def end() -> None:
        for connection in connections:
            connection.ended.set()
            if connection.task is not None:
                if not connection.up.done():
                    connection.task.cancel()
                await asyncio.wait({connection.task}, timeout=STOP_S)
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


async def _transport(settings: McpSettings, errors: IO[str], stack: AsyncExitStack, ended: asyncio.Event) -> Transport:
    filters = MessageFilter(settings.max_message_bytes)
    if settings.command:
        from mcp.client.stdio import get_default_environment

        env = get_default_environment() | dict(settings.env)
        command = [_find_program(settings, env.get("PATH")), *settings.args]
        return program_transport(command, env, settings.cwd, errors, filters, ended)
    from mcp.client.streamable_http import streamable_http_client

    headers = dict(settings.headers)
    if settings.token_file:
        headers["Authorization"] = f"Bearer {Path(settings.token_file).read_text('utf-8').strip()}"
    client = await stack.enter_async_context(filtered_client(headers, filters))
    return streamable_http_client(settings.url, http_client=client, max_sse_event_size=None)


def _find_program(settings: McpSettings, path: str | None) -> str:
    if settings.cwd and "/" in settings.command:
        return settings.command
    interpreter_dir = str(Path(sys.executable).parent)
    found = shutil.which(settings.command, path=path) or shutil.which(settings.command, path=interpreter_dir)
    if found is None:
        message = f"The MCP server {settings.name} cannot be started: program {settings.command} not found."
        raise UserError(message, "Check that it is installed and on the PATH.")
    return found


async def _all_tools(client: mcp.Client) -> tuple[types.Tool, ...]:
    page = await client.list_tools(cursor=None)
    found = [*page.tools]
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        found += page.tools
    return tuple(found)


def _start_error(settings: McpSettings, error: BaseException, errors: IO[str]) -> LudusError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, LudusError):
        return error
    errors.seek(0)
    printed = errors.read().strip()[-500:]
    late = f"no response within {settings.start_timeout_s:g} s"
    reason = late if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
    output = f" Its output: {printed}" if printed else ""
    return WorldError(f"The MCP server {settings.name} failed to start: {reason}.{output}", "Run it manually.")


def _describe(error: ValidationError) -> str:
    where = ".".join(map(str, error.absolute_path)) or "arguments"
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        return "; ".join(f"the argument {name!r} is missing" for name in missing)
    if error.validator == "additionalProperties":
        return f"unknown argument: {error.message}"
    return f"the argument {where!r} is wrong: {error.message[:300]}"


def _content_text(block: types.ContentBlock) -> str:
    from mcp import types

    if isinstance(block, types.TextContent):
        return block.text
    if isinstance(block, types.ImageContent | types.AudioContent):
        return f"[{block.type}: {block.mime_type}, {_decoded_size(block.data)} bytes]"
    if isinstance(block, types.ResourceLink):
        about = f": {block.description}" if block.description else ""
        return f"[resource {block.uri}: {block.name}{about}]"
    resource = block.resource
    if isinstance(resource, types.TextResourceContents):
        return f"[resource {resource.uri}]\n{resource.text}"
    return f"[resource {resource.uri}: {resource.mime_type or 'data'}, {_decoded_size(resource.blob)} bytes]"


def _decoded_size(base64: str) -> int:
    return len(base64.rstrip("=")) * 3 // 4
