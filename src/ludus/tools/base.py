"""`Tool`: a typed function that a model can call, and `@tool`, which creates one from a signature.

    @tool
    def search(query: str, k: int = 2) -> str:
        \"\"\"Search the encyclopedia.

        Args:
            query: the words to look for.
            k: the number of passages to return.
        \"\"\"

The schema is built from the annotations, the descriptions from the docstring. Arguments are validated before
the function runs; its exceptions become observations (`ludus.envs.tool_env`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal, TypedDict, get_type_hints, overload
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from ludus.sandbox.local.namespaces import CALL_TIMEOUTS, LoopSlots, PausableTimeout
from ludus.types import JSON

JsonSchema = dict[str, Any]


class FunctionSchema(TypedDict):
    """The `function` part of an OpenAI tool description; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: JsonSchema


class ToolSchema(TypedDict):
    """Tool description in the format of chat templates and OpenAI-compatible servers."""

    type: str
    function: FunctionSchema


class ToolError(Exception):
    """Raised for a failed call; the message is shown to the model verbatim, without a type name."""


Latency = Literal["instant", "fast", "slow"]
"""Usual duration of a call: below 10 ms, below 1 s, longer."""

TIMEOUT_FACTORS: Final[Mapping[Latency, float]] = MappingProxyType({"instant": 0.25, "fast": 1.0, "slow": 3.0})
"""Factor on the default timeout of a call, by latency class."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a tool's calls.

    `latency` determines the timeout of a tool without `timeout_s` (`TIMEOUT_FACTORS`). `cost` per call, in a unit
    defined by the world, is summed in `ToolOutcome.cost`. If `idempotent`, a call is retried once after an
    infrastructure failure. If `ends`, a successful call ends the episode.
    """

    latency: Latency = "fast"
    cost: float = 0.0
    idempotent: bool = False
    ends: bool = False


_num_sharing_processes: ContextVar[int] = ContextVar("ludus-tool-sharers", default=1)


@contextmanager
def shared_by(num_processes: int) -> Iterator[None]:
    """Divide the `concurrency` of tools equally among processes within the block, rounded down, but at least 1."""
    token = _num_sharing_processes.set(num_processes)
    try:
        yield
    finally:
        _num_sharing_processes.reset(token)


@asynccontextmanager
async def call_timeout(limit_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Raise TimeoutError if a call takes longer than `limit_s`, except waits for sandbox slots, also in its tasks."""
    async with asyncio.timeout(limit_s) as timeout:
        token = CALL_TIMEOUTS.set((*CALL_TIMEOUTS.get(), PausableTimeout(timeout)))
        try:
            yield timeout
        finally:
            CALL_TIMEOUTS.reset(token)


class ArgumentError(ValueError):
    """Raised if arguments do not match the tool's signature; the message is shown to the model."""


ToolFunction = Callable[..., str] | Callable[..., Awaitable[str]]


@dataclass(frozen=True)
class Tool:
    """Function with a schema.

    A plain function runs in a thread, an `async` function on the event loop; `timeout_s` (None: the rollout's,
    scaled by latency class) applies to both. Exceptions become observations for the model, except WorldError and
    EngineError, which are infrastructure failures. `concurrency` bounds the concurrent calls of this tool
    over all episodes, excluding calls that timed out; 0: unlimited.
    """

    name: str
    description: str
    function: ToolFunction
    arguments: type[BaseModel]
    timeout_s: float | None = None
    concurrency: int = 0
    traits: Traits = Traits()
    _slots: LoopSlots = field(init=False, repr=False, compare=False, default_factory=WeakKeyDictionary)

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function."""
        return inspect.iscoroutinefunction(self.function)

    def slot(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager that holds one of the `concurrency` slots. Requires a running event loop."""
        if not self.concurrency:
            return nullcontext()
        share = max(1, self.concurrency // _num_sharing_processes.get())
        return self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(share))

    @cached_property
    def schema(self) -> ToolSchema:
        """The tool description in OpenAI's format."""
        schema = self.arguments.model_json_schema()
        properties = schema.get("properties", {})
        for described in properties.values():
            described.pop("title", None)
        parameters = {"type": "object", "properties": properties, "required": schema.get("required", [])}
        if "$defs" in schema:
            parameters["$defs"] = schema["$defs"]
        function = FunctionSchema(name=self.name, description=self.description, parameters=parameters)
        return ToolSchema(type="function", function=function)

    def check(self, arguments: Mapping[str, JSON]) -> dict[str, Any]:
        """Return the validated and converted arguments. Raises `ArgumentError` with a message for the model."""
        try:
            model = self.arguments.model_validate_json(json.dumps(dict(arguments)))
        except ValidationError as error:
            raise ArgumentError("; ".join(map(_describe_error, error.errors()))) from None
        except Exception as error:  # boundary: a tool's own types may raise anything in validation
            raise ArgumentError(f"the arguments cannot be read: {type(error).__name__}: {error}") from error
        return {name: model.__dict__[name] for name in self.arguments.model_fields}

    async def check_bounded(self, arguments: Mapping[str, JSON]) -> Mapping[str, object]:
        """Validate as `check`; subclasses may do so in another process."""
        return self.check(arguments)


class _NoArguments(BaseModel):
    """Arguments of tools without a pydantic model."""


@dataclass(frozen=True)
class DescribedTool(Tool):
    """Tool with an external schema, from a client, a file or a server."""

    arguments: type[BaseModel] = _NoArguments
    given: ToolSchema = field(kw_only=True)

    @cached_property
    def schema(self) -> ToolSchema:
        """The schema `given`."""
        return self.given


def described_tool(schema: ToolSchema) -> DescribedTool:
    """Create a tool from an OpenAI tool description, to be shown to a model but not executed."""
    function = schema["function"]
    return DescribedTool(function["name"], function["description"], str, given=schema)


def _describe_error(error: Any) -> str:  # noqa: ANN401 (pydantic's own mapping)
    where = ".".join(str(part) for part in error["loc"]) or "arguments"
    if error["type"] == "missing":
        return f"the argument {where!r} is missing"
    if error["type"] == "extra_forbidden":
        return f"there is no argument {where!r}"
    return f"the argument {where!r} is wrong: {error['msg'].lower()}"


@overload
def tool(function: ToolFunction) -> Tool: ...


@overload
def tool(
    *, name: str | None = None, timeout_s: float | None = None, concurrency: int = 0, traits: Traits = Traits()
) -> Callable[[ToolFunction], Tool]: ...


def tool(
    function: ToolFunction | None = None,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    concurrency: int = 0,
    traits: Traits = Traits(),
) -> Tool | Callable[[ToolFunction], Tool]:
    """Create a `Tool` from a function. Raises TypeError for a parameter without annotation or only by position."""

    def make(fn: ToolFunction) -> Tool:
        summary, _, args = (inspect.getdoc(fn) or "").partition("\nArgs:")
        found = re.finditer(r"^\s+(\w+):\s*(.+?)(?=^\s+\w+:|^\s*$|\Z)", args, re.M | re.S)
        model = _arguments_model(fn, {match[1]: " ".join(match[2].split()) for match in found})
        return Tool(name or fn.__name__, " ".join(summary.split()), fn, model, timeout_s, concurrency, traits)

    return make if function is None else make(function)


def _arguments_model(fn: ToolFunction, described: Mapping[str, str]) -> type[BaseModel]:
    hints = get_type_hints(fn, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {fn.__name__}: parameter {parameter.name!r} cannot be passed by name")
        if parameter.name not in hints:
            raise TypeError(f"tool {fn.__name__}: parameter {parameter.name!r} needs a type annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        text = described.get(parameter.name)
        info = Field(default=default) if text is None else Field(default=default, description=text)
        fields[parameter.name] = (hints[parameter.name], info)
    config = ConfigDict(extra="forbid", strict=True)
    return create_model(f"{fn.__name__}_arguments", __config__=config, **fields)


def submit_tool() -> Tool:
    """Create the tool `submit(answer)`: `ToolEnv` ends the episode, and `Trajectory.answer` is the text."""

    async def submit(answer: str) -> str:
        """Hand in the final answer. This ends the task.

        Args:
            answer: the answer, and nothing else.
        """
        return answer

    return tool(traits=Traits(latency="instant", ends=True))(submit)
