"""Bodies of completions and chat completions: validated requests, and responses in the formats of OpenAI and vLLM.

Unknown fields of a request are rejected, and so are unsupported fields that change the result, unless they have their
neutral value. Fields that only label a request are ignored.

The types of the package `openai` are not used: they lack vLLM's fields (`token_ids`, `prompt_logprobs`, ...).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate, groupby
from typing import Annotated, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from ludus.chat.parse_json import tool_call
from ludus.images import from_openai
from ludus.tools.base import DescribedTool, FunctionSchema, ToolSchema, described_tool
from ludus.types import MAX_TOP_LOGPROBS, PARAM_BOUNDS, Guide, Message, SamplingParams

_LABELS = frozenset({"user", "metadata", "store", "service_tier", "priority", "session_id", "cache_salt"})
_NUM_CHOICES, _NUM_STOPS, _NUM_STOP_IDS, _MAX_GUIDE_CHARS = 128, 64, 1024, 2**16

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
StopText = Annotated[str, Field(max_length=1000)]
RequestBody = TypeVar("RequestBody", bound=BaseModel)


class BadRequest(ValueError):
    """Raised if a request is invalid or unsupported. `code` is a machine-readable reason."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code


@cache
def neutral_values(kind: str) -> Mapping[str, Sequence[object]]:
    """Return the neutral values, besides null, of the unsupported fields of a kind of request."""
    values: dict[str, dict[str, list[object]]] = json.loads((files(__package__) / "neutral.json").read_text("utf-8"))
    return values[kind]


class StreamOptions(BaseModel):
    """`include_usage` requests a last chunk with token counts."""

    include_usage: bool = False


class StructuredOutputs(BaseModel):
    """A JSON schema, a regular expression or a Lark grammar, as in vLLM."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    json_: dict[str, JsonValue] | str | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None

    def guides(self) -> list[Guide]:
        schema = self.json_ if self.json_ is None or isinstance(self.json_, str) else json.dumps(self.json_)
        guides: list[tuple[Literal["json_schema", "regex", "lark"], str | None]]
        guides = [("json_schema", schema), ("regex", self.regex), ("lark", self.grammar)]
        return [Guide(kind, text) for kind, text in guides if text is not None]


class ResponseFormat(BaseModel):
    """Format of a chat response: text, any JSON object, or an object that matches `json_schema.schema`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, JsonValue] | None = None


def _check_num_top(num: int) -> int:
    if num > MAX_TOP_LOGPROBS:
        raise ValueError(f"at most {MAX_TOP_LOGPROBS} top_logprobs are supported, {num} requested")
    return num


def _within(name: str, *, also: int | None = None) -> AfterValidator:
    """Return a validator for the bound `name` of the engines; `also` is an additional valid value."""
    bound = PARAM_BOUNDS[name]

    def check(value: float) -> float:
        if value != also and not bound.contains(value):
            raise ValueError(bound.words)
        return value

    return AfterValidator(check)


NumTop = Annotated[int, Field(ge=0), AfterValidator(_check_num_top)]  # number of top log-probabilities per position


class Sampling(BaseModel):
    """Fields of both kinds of request. If `seed` is None, it is drawn at random."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, hide_input_in_errors=True)

    model: str | None = Field(None, max_length=512)
    request_id: str | None = Field(None, min_length=1, max_length=200)
    temperature: Annotated[float, _within("temperature")] | None = None
    top_p: Annotated[float, _within("top_p")] | None = None
    top_k: Annotated[int, _within("top_k", also=-1)] | None = None
    min_p: Annotated[float, _within("min_p")] | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    n: int = Field(1, ge=1, le=_NUM_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=_NUM_STOPS)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=_NUM_STOP_IDS)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_extra_fields(self) -> Self:
        self.check_extra_fields()
        return self

    def check_extra_fields(self) -> None:
        """Raise ValueError for an unknown field, and for an unsupported one without its neutral value."""
        neutral = neutral_values("completions")
        for name, value in (self.__pydantic_extra__ or {}).items():
            if name in _LABELS or value is None or value in neutral.get(name, ()):
                continue
            if name in neutral:
                raise ValueError(f"{name} = {json.dumps(value)[:80]} is not supported")
            raise ValueError(f"{name[:80]} is not a field of this request")

    @property
    def guide(self) -> Guide | None:
        """Constraint on the sampled text. Raises BadRequest if it is ambiguous or incomplete."""
        structured, form = self.structured_outputs, self.response_format
        guides = [] if structured is None else structured.guides()
        if form is not None and form.type == "json_object":
            guides.append(Guide("json_schema", '{"type": "object"}'))
        elif form is not None and form.type == "json_schema":
            if form.json_schema is None or "schema" not in form.json_schema:
                raise BadRequest("response_format needs json_schema.schema.")
            guides.append(Guide("json_schema", json.dumps(form.json_schema["schema"])))
        if len(guides) > 1 or (structured is not None and not guides):
            raise BadRequest("structured_outputs accepts one of json, regex, grammar, without response_format.")
        if guides and len(guides[0].text) > _MAX_GUIDE_CHARS:
            raise BadRequest(f"The guide has {len(guides[0].text)} characters; the maximum is {_MAX_GUIDE_CHARS}.")
        return guides[0] if guides else None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def params(self, max_new_tokens: int, end_ids: tuple[int, ...], num_top: int) -> SamplingParams:
        """Return the sampling parameters of the first choice; `end_ids` are stop tokens unless `ignore_eos` is set."""
        ends = () if self.ignore_eos else end_ids
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            max_new_tokens=max_new_tokens,
            stop=self.stops,
            stop_token_ids=tuple(dict.fromkeys([*(self.stop_token_ids or ()), *ends])),
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            guide=self.guide,
            top_logprobs=num_top,
        )


class CompletionRequest(Sampling):
    """Body of `/v1/completions`: a text, token ids, or a list of either."""

    prompt: (
        str | TokenIds | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    max_tokens: Annotated[int, _within("max_new_tokens", also=0)] | None = 16
    logprobs: NumTop | None = None
    prompt_logprobs: NumTop | None = None
    echo: bool | None = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_max_tokens_and_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens = 0 samples nothing; set echo, or increase max_tokens")
        if self.stream and (self.echo or self.prompt_logprobs is not None):
            raise ValueError("echo and prompt_logprobs are not supported with stream")
        return self

    @property
    def num_prompt_top(self) -> int | None:
        """Number of top log-probabilities per prompt token; None if the prompt is not scored."""
        echoed = self.logprobs if self.echo else None
        counts = [num for num in (self.prompt_logprobs, echoed) if num is not None]
        return max(counts, default=None)

    @property
    def prompts(self) -> list[str | TokenIds]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        texts: list[str | TokenIds] = [item for item in prompt if isinstance(item, str)]
        lists: list[str | TokenIds] = [item for item in prompt if isinstance(item, list)]
        return texts or lists or [[item for item in prompt if isinstance(item, int)]]


class _Function(BaseModel):
    name: str = Field(min_length=1)
    arguments: str | None = "{}"


class _Call(BaseModel):
    id: str | None = None
    function: _Function


class _ImageUrl(BaseModel):
    url: str


class _Part(BaseModel):
    type: Literal["text", "refusal", "thinking", "image_url"]
    text: str | None = None
    refusal: str | None = None
    image_url: _ImageUrl | None = None

    @property
    def value(self) -> tuple[str, str]:
        """The type and the text or URL."""
        return ("image_url", self.image_url.url) if self.image_url else ("text", self.text or self.refusal or "")


class ChatMessage(BaseModel):
    """One chat message. Its content may be null or a list of texts and images."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[_Part], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = Field(None, validation_alias=AliasChoices("reasoning_content", "reasoning"))
    tool_calls: Annotated[list[_Call], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _has_images(self) -> Self:
        parts = self.content if isinstance(self.content, list) else ()
        if any(part.type == "image_url" and part.image_url is None for part in parts):
            raise ValueError("image_url is missing")
        return self

    @property
    def message(self) -> Message:
        content = self.content or ""
        text, images = (content, []) if isinstance(content, str) else from_openai([part.value for part in content])
        message = Message(role="system" if self.role == "developer" else self.role, content=text)
        if images:
            message["images"] = images
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [
                tool_call(call.id or "", call.function.name, call.function.arguments or "{}")
                for call in self.tool_calls
            ]
        return message


NO_PARAMETERS: Mapping[str, JsonValue] = {"type": "object", "properties": {}}


def function_tool(name: str, description: str | None, parameters: Mapping[str, JsonValue]) -> DescribedTool:
    """Return a tool of a request, which its client executes."""
    function = FunctionSchema(name=name, description=description or "", parameters=dict(parameters))
    return described_tool(ToolSchema(type="function", function=function))


class _ToolFunction(BaseModel):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None


class ChatTool(BaseModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: _ToolFunction

    @property
    def described(self) -> DescribedTool:
        tool = self.function
        return function_tool(tool.name, tool.description, NO_PARAMETERS if tool.parameters is None else tool.parameters)


class _ToolName(BaseModel):
    name: str


class _ToolChoice(BaseModel):
    type: Literal["function"]
    function: _ToolName


class _AllowedTools(BaseModel):
    mode: Literal["required"]
    tools: list[_ToolChoice] = Field(min_length=1)


class _AllowedChoice(BaseModel):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


class ChatRequest(Sampling):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]
    tools: Annotated[list[ChatTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | _ToolChoice | _AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Annotated[int, _within("max_new_tokens")] | None = None
    max_completion_tokens: Annotated[int, _within("max_new_tokens")] | None = None
    logprobs: bool | None = False
    top_logprobs: NumTop | None = None

    @property
    def must_call(self) -> bool:
        """Whether the reply has a call."""
        return self.tool_choice not in (None, "auto", "none")

    @property
    def single_call(self) -> bool:
        """Whether the reply has at most one call."""
        return self.parallel_tool_calls is False

    @property
    def call_of(self) -> tuple[str, ...]:
        """The tools of which the reply calls some; empty if it may be any."""
        match self.tool_choice:
            case _ToolChoice():
                return (self.tool_choice.function.name,)
            case _AllowedChoice():
                return tuple(tool.function.name for tool in self.tool_choice.allowed_tools.tools)
        return ()

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        return self


def read_body(kind: type[RequestBody], body: bytes) -> RequestBody:
    """Parse a request body. Raises BadRequest with a one-sentence message."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        first = min(found, key=lambda e: (e["type"] == "string_type", len(e["loc"])))  # not the text of a union
        field_path = ".".join(str(part) for part in first["loc"] if part != "")[:200]
        message = first["msg"].removeprefix("Value error, ").removesuffix(".")
        raise BadRequest(f"{field_path}: {message}." if field_path else f"{message}.") from None


def check_calls(messages: Sequence[Message]) -> None:
    """Raise BadRequest if the arguments of a call in the history are not a JSON object."""
    for call in (call for message in messages for call in message.get("tool_calls", [])):
        try:
            is_object = isinstance(json.loads(call["function"]["arguments"]), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise BadRequest(f"The arguments of tool call {call['id'][:80]!r} cannot be parsed as a JSON object.")


JsonBody = dict[str, object]


class EncodedJson(bytes):
    """Value that is already encoded as JSON, to avoid creating an object for each part."""


def response_body(
    kind: str, name: str, model: str, choices: list[JsonBody], usage: tuple[int, int] | None = None
) -> JsonBody:
    """Return a response or chunk; `usage` is the number of prompt tokens and of tokens of all choices."""
    tokens: JsonBody | None = None
    if usage is not None:
        tokens = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    created = int(time.time())
    return {"id": name, "object": kind, "created": created, "model": model, "choices": choices, "usage": tokens}


def text_choice(index: int, text: str, finish: str | None) -> JsonBody:
    """Return a choice of completions; fields that were not requested are null."""
    head = {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    return head | dict.fromkeys(("token_ids", "prompt_logprobs", "prompt_token_ids", "weight_versions"))


def version_spans(versions: Sequence[int]) -> list[JsonBody]:
    """Group consecutive tokens by weight version: tokens [`start`, `end`) were sampled by `version`."""
    lengths = [(str(version), len(list(run))) for version, run in groupby(versions)]
    ends = accumulate(num for _, num in lengths)
    return [
        {"version": version, "start": end - num, "end": end} for (version, num), end in zip(lengths, ends, strict=True)
    ]


def error_body(status: int, message: str, code: str | None = None) -> JsonBody:
    """Return the body of an error response of OpenAI; `code` is a machine-readable reason, by default the status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code or status}}


def json_bytes(body: JsonBody) -> bytes:
    """Serialize a body to JSON; `EncodedJson` values are copied. Unpaired surrogates are escaped, not rejected."""
    return b"{" + b",".join(_json(name) + b":" + _value(value) for name, value in body.items()) + b"}"


def _value(value: object) -> bytes:
    if isinstance(value, EncodedJson):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return b"[" + b",".join(map(json_bytes, value)) + b"]"
    return _json(value)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
