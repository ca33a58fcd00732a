"""Client and chat session of an OpenAI-compatible chat-completions endpoint, without token segments: for evaluation.

A request is retried after a connection error, a 429 and a 5xx, but not after a timeout, since the server may still be
processing it. One that is rejected because of a field, such as `max_tokens` or a temperature of 0, is adapted and
retried, and the adaptation is reused (`AcceptedFields`). Proxies of the environment are ignored.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Self

import httpx
from pydantic import BaseModel, Field, JsonValue

from ludus.chat.parse import PARSERS
from ludus.chat.parse_json import MalformedCall, ToolCallParser, call_of, decode, tool_call
from ludus.config.sections.rollout import RolloutConfig
from ludus.engines.base import seed_for
from ludus.engines.remote.http_client import CONNECTION_ERRORS, error_message, excerpt
from ludus.envs.base import World
from ludus.errors import ConfigError, EngineError, UserError
from ludus.images import to_openai
from ludus.rollouts.episode import ChatSession
from ludus.rollouts.scheduler import ChatSessionFactory, RolloutRequest, SamplingPlan, rollout_of, sampling_params
from ludus.tools.base import Tool, ToolSchema
from ludus.types import JSON, Action, CallError, Message, MessageToolCall, SamplingParams, Segment, StopReason, ToolCall
from ludus.untrusted.json_client import bounded_client

WireMessage = Mapping[str, object]
"""Message as sent. Unlike `Message`, its content may be null."""

_PATH = "/chat/completions"
_LENGTH_STATUS = (400, 413, 422, 500)
_TOO_LONG = re.compile(
    r"context_length_exceeded|exceed_context_size|maximum context length|maximum model length"
    r"|context (length|size|window)|prompt is too long|max_tokens must be at least 1, got -"
    r"|input token count .* exceeds",
    re.IGNORECASE,
)
_RESULT_WRAPPERS = {
    "hermes": ("<tool_response>\n", "\n</tool_response>"),
    "search_r1": ("<information>", "</information>"),
    "retool": ("<interpreter>", "</interpreter>"),
}
"""Text before and after a tool's output in a user message, by chat format."""
REJECTED_STATUS = (400, 422)  # of a rejected request
REASONING = ("reasoning_content", "reasoning")  # names of the model's reasoning in an assistant message
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "response_format")
NEAR_ZERO = 0.01  # temperature sent instead of a rejected 0
_RENAMED = "max_completion_tokens"
_SENT_AS_MAX_TOKENS = ("max_tokens", _RENAMED)


@dataclass(frozen=True, slots=True)
class OpenAIClientSettings:
    """Endpoint, timeouts and retries.

    `url` is the base URL, usually ending in `/v1`. `timeout_s` bounds one request as a whole. Attempt `n` is retried up
    to `retries` times, after `backoff_s * 2**n` seconds or the server's Retry-After, at most `max_wait_s`. `extra` is
    merged into each request body last; null removes a field. Raises UserError for an invalid URL or key.
    """

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    timeout_s: float = 120.0
    concurrency: int = 16
    retries: int = 4
    backoff_s: float = 0.5
    max_wait_s: float = 30.0
    extra: Mapping[str, JSON] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise UserError(f"The endpoint {self.url!r} is not a URL: {error}.", "Start it with http://.") from error
        if url.userinfo:
            raise UserError("The endpoint's URL contains a user or password.", "Set the API key instead.")
        if url.scheme not in ("http", "https") or not url.host:
            raise UserError(f"The endpoint {self.url!r} is not an HTTP URL.", "Start it with http:// or https://.")
        if not re.fullmatch(r"[!-~]*", self.api_key):
            raise UserError("The API key contains whitespace or non-ASCII characters.", "Set the key alone.")
        if self.concurrency < 1 or self.retries < 0 or self.timeout_s <= 0:
            text = "An endpoint needs a concurrency of 1 or more, a timeout above 0 and no negative retries."
            raise ConfigError(text, "See EndpointSettings.")

    @property
    def target(self) -> httpx.URL:
        url = httpx.URL(self.url)
        return url.copy_with(path=url.path.rstrip("/").removesuffix(_PATH) + _PATH)

    def wait_s(self, attempt: int, retry_after: str = "") -> float:
        """Return the seconds to wait after attempt `attempt` (from 0). A date in Retry-After is ignored."""
        seconds = re.fullmatch(r"\d+(\.\d+)?", retry_after.strip())
        return min(float(seconds[0]) if seconds else self.backoff_s * 2**attempt, self.max_wait_s)


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts reported by the server, summed over `num_answers` responses, of which `num_counted` report both."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_answers: int = 0
    num_counted: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(*(ours - theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class AcceptedFields:
    """Adaptations of requests: omitted fields, the name of the length limit, the substitute of a temperature of 0."""

    dropped: frozenset[str] = frozenset()
    max_tokens_name: str = "max_tokens"
    zero_as: float = 0.0

    def apply(self, body: Mapping[str, object]) -> dict[str, object]:
        """Return the body adapted to this server."""
        names = {"max_tokens": self.max_tokens_name}
        adapted = {names.get(key, key): self._adapted_value(key, value) for key, value in body.items()}
        return {key: value for key, value in adapted.items() if key not in self.dropped}

    def after_rejection(self, body: Mapping[str, object], response: bytes) -> AcceptedFields | None:
        """Return the next adaptation to try after a rejection, or None if it names no adaptable field."""
        sent = self.apply(body)
        named = [name for name in _adaptable_fields(sent) if re.search(rf"(?<!\w){name}(?!\w)".encode(), response)]
        if not named:
            return None
        param = _error_param(response)
        name = param if param in named else named[0]
        if name == "max_tokens":
            return replace(self, max_tokens_name=_RENAMED)
        if name == "temperature" and sent[name] == 0:
            return replace(self, zero_as=NEAR_ZERO)
        return replace(self, dropped=self.dropped | {name})

    def union(self, other: AcceptedFields) -> AcceptedFields:
        names = {self.max_tokens_name, other.max_tokens_name}
        name = _RENAMED if _RENAMED in names else "max_tokens"
        return AcceptedFields(self.dropped | other.dropped, name, max(self.zero_as, other.zero_as))

    def notices(self) -> Iterator[str]:
        """Yield one message per adaptation."""
        if self.max_tokens_name == _RENAMED and _RENAMED not in self.dropped:
            yield f"The server rejects max_tokens: {_RENAMED} is sent instead."
        if self.zero_as and "temperature" not in self.dropped:
            yield f"The server rejects a temperature of 0: {self.zero_as:g} is sent instead."
        consequences = {
            **dict.fromkeys(REASONING, "so the model does not see its earlier reasoning"),
            **dict.fromkeys(_SENT_AS_MAX_TOKENS, "so turns are as long as the server allows"),
            "seed": "so repeated evaluations may differ",
        }
        for name in sorted(self.dropped):
            consequence = consequences.get(name, "so the server's default applies")
            yield f"The server rejects {name}: it is omitted, {consequence}."

    def _adapted_value(self, key: str, value: object) -> object:
        if key == "temperature" and value == 0:
            return self.zero_as
        if key == "messages" and isinstance(value, list):
            hidden = self.dropped.intersection(REASONING)
            return [{k: v for k, v in message.items() if k not in hidden} for message in value]
        return value


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """One turn of the agent: action, message for the history, and token counts."""

    action: Action
    history: WireMessage
    usage: TokenUsage


@dataclass
class OpenAIClient:
    """Client of a chat-completions server, shared by many dialogues in one event loop.

    Use it as a context manager, or call `close`. `sleep` is replaceable in tests.
    """

    settings: OpenAIClientSettings
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    usage: TokenUsage = field(init=False, default_factory=TokenUsage)
    accepted: AcceptedFields = field(init=False, default=AcceptedFields())
    _http: httpx.AsyncClient = field(init=False)
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.settings.concurrency)
        self._http = bounded_client(httpx.Limits(max_connections=self.settings.concurrency))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def chat(
        self,
        messages: Sequence[WireMessage],
        tools: Sequence[ToolSchema],
        params: SamplingParams,
        turn: int,
        parser: ToolCallParser | None = None,
    ) -> ChatCompletion | None:
        """Request turn `turn` (from 0); None if the context is too long. EngineError; UserError: model or key."""
        body = self._body(messages, tools, params)
        async with self._slots:
            response = await self._send_accepted(body)
        if response.status_code in _LENGTH_STATUS and _TOO_LONG.search(response.text):
            return None
        if response.status_code != httpx.codes.OK:
            raise self._response_error(response)
        try:
            answer = read_answer(response.content, turn, parser)
        except EngineError as error:
            raise EngineError(f"{self.settings.target} {error.message}", error.hint) from error
        self.usage += answer.usage
        return answer

    def _body(
        self, messages: Sequence[WireMessage], tools: Sequence[ToolSchema], params: SamplingParams
    ) -> dict[str, object]:
        """Return the request without `settings.extra`."""
        body: dict[str, object] = {"model": self.settings.model, "messages": list(messages)}
        body |= {"temperature": params.temperature, "top_p": params.top_p}
        body |= {"max_tokens": params.max_new_tokens, "seed": params.seed}
        optional = {"tools": tools, "top_k": params.top_k, "min_p": params.min_p, "stop": params.stop}
        if params.guide is not None and params.guide.kind == "json_schema":
            schema = {"name": "reply", "schema": json.loads(params.guide.text)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        body |= {key: value for key, value in optional.items() if value}
        return {key: value for key, value in body.items() if key not in self.settings.extra}

    async def _send_accepted(self, body: Mapping[str, object]) -> httpx.Response:
        """Send a request, adapting it until the server accepts its fields or its error names none of them."""
        fields: AcceptedFields | None = self.accepted
        while fields is not None:
            tried = fields
            merged_body = {**tried.apply(body), **self.settings.extra}
            sent = {key: value for key, value in merged_body.items() if value is not None}
            response = await self._send(json.dumps(sent).encode())  # ASCII also encodes lone surrogates
            if response.status_code == httpx.codes.OK:
                self.accepted = self.accepted.union(tried)
            rejected = response.status_code in REJECTED_STATUS and not _TOO_LONG.search(response.text)
            fields = tried.after_rejection(body, response.content) if rejected else None
        return response

    async def _send(self, body: bytes) -> httpx.Response:
        attempt = 0
        while True:
            last, retry_after = attempt >= self.settings.retries, ""
            try:
                response = await self._post(body)
            except httpx.HTTPError as error:
                if last or not isinstance(error, CONNECTION_ERRORS):
                    tried = f"{attempt + 1} attempt{'s' * (attempt > 0)}"
                    text = f"{self.settings.target} did not respond ({tried}): {type(error).__name__}: {error}."
                    hint = "Check that the server is running and that the URL is correct."
                    raise EngineError(text, hint) from error
            else:
                is_limited = response.status_code == httpx.codes.TOO_MANY_REQUESTS
                if last or not (is_limited or (response.is_server_error and not _TOO_LONG.search(response.text))):
                    return response
                retry_after = response.headers.get("retry-after", "")
            await self.sleep(self.settings.wait_s(attempt, retry_after))
            attempt += 1

    async def _post(self, body: bytes) -> httpx.Response:
        settings = self.settings
        headers = {"Content-Type": "application/json"}
        if settings.api_key:
            headers["Authorization"] = f"Bearer {settings.api_key}"
        try:
            async with asyncio.timeout(settings.timeout_s):
                request = self._http.build_request("POST", settings.target, content=body, headers=headers, timeout=None)
                return await self._http.send(request, follow_redirects=False)
        except TimeoutError as error:
            text = f"{settings.target} did not respond within {settings.timeout_s:g} s."
            raise EngineError(text, "Raise the timeout or lower the concurrency.") from error

    def _response_error(self, response: httpx.Response) -> EngineError | UserError:
        status, target, model = response.status_code, self.settings.target, self.settings.model
        detail = f"{status}: {error_message(response)}"
        if status in (401, 403):
            key = "the API key" if self.settings.api_key else "requests without an API key"
            return UserError(f"{target} rejects {key} for the model {model!r} ({detail}).", "Set a valid key.")
        if status == httpx.codes.NOT_FOUND:
            hint = "Check the model's name and the URL, which usually ends in /v1."
            return UserError(f"{target} does not serve the model {model!r} ({detail}).", hint)
        return EngineError(f"{target} failed for the model {model!r} ({detail}).")


@dataclass
class OpenAIChatSession:
    """Dialogue of an episode with an endpoint, without token segments.

    `seed` and the turn determine the seed of each request. `max_tokens`, if set, bounds the whole trajectory by the
    server's token counts, if it reports them. `parser` extracts calls from text responses without structured ones.
    """

    endpoint: OpenAIClient
    params: SamplingParams
    seed: int
    max_tokens: int | None = None
    parser: ToolCallParser | None = None
    _messages: list[WireMessage] = field(init=False, default_factory=list)
    _tools: tuple[ToolSchema, ...] = field(init=False, default=())
    _structured_call_ids: frozenset[str] = field(init=False, default=frozenset())
    _num_tokens: int = field(init=False, default=0)
    _turn: int = field(init=False, default=0)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return ()  # an endpoint returns text, not tokens

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        self._messages = list(map(to_openai, messages))
        self._tools = tuple(tool.schema for tool in tools)
        return None  # the server checks the length of the prompt at the first request

    async def act(self) -> Action | StopReason:
        """Request one action. Raises as `OpenAIClient.chat`."""
        too_long = StopReason.MAX_TOKENS if self._turn else StopReason.PROMPT_TOO_LONG
        room = None if self.max_tokens is None else self.max_tokens - self._num_tokens
        if room is not None and room <= 0:
            return too_long
        limit = self.params.max_new_tokens
        params = replace(
            self.params,
            max_new_tokens=limit if room is None else min(limit, room),
            seed=seed_for(self.seed, self._turn) >> 32,  # 31 bits, accepted by every server
        )
        answer = await self.endpoint.chat(self._messages, self._tools, params, self._turn, self.parser)
        if answer is None or (self.max_tokens is not None and answer.usage.prompt_tokens >= self.max_tokens):
            return too_long
        self._append_answer(answer)
        cut = answer.action.finish_reason == "length" and params.max_new_tokens < limit
        if cut or (self.max_tokens is not None and self._num_tokens > self.max_tokens):
            return StopReason.MAX_TOKENS
        return answer.action

    def observe(self, messages: Sequence[Message]) -> StopReason | None:
        """Append the environment's messages; results of structured calls come first, as servers require."""
        answers = [m for m in messages if m["role"] == "tool" and m.get("tool_call_id") in self._structured_call_ids]
        others = [m for m in messages if m["role"] == "tool" and m not in answers]
        self._messages += map(to_openai, answers)
        if others:
            before, after = _RESULT_WRAPPERS.get(self.parser.name, ("", "")) if self.parser else ("", "")
            text = "\n".join(f"{before}{message['content']}{after}" for message in others)
            images = [url for message in others for url in message.get("images", ())]
            told = Message(role="user", content=text)
            self._messages.append(to_openai(Message(**told, images=images) if images else told))
        self._messages += [to_openai(message) for message in messages if message["role"] != "tool"]
        return None

    def close(self) -> None:
        """Do nothing: the server is stateless."""

    def _append_answer(self, answer: ChatCompletion) -> None:
        self._turn += 1
        self._num_tokens = answer.usage.prompt_tokens + answer.usage.completion_tokens
        self._messages.append(answer.history)
        structured = "tool_calls" in answer.history
        self._structured_call_ids = frozenset(call.id for call in answer.action.calls if structured)


def endpoint_chat_factory(
    endpoint: OpenAIClient, rollout: RolloutConfig, plan: SamplingPlan, parser: str = "", world: World | None = None
) -> ChatSessionFactory:
    """Return the chat session factory of an endpoint, with the same seeds as for a local engine.

    `parser` is empty or one of `PARSERS`, for servers that return tool calls as text; raises ConfigError for
    another name. `world`, if set, may override the limits of a task.
    """
    if parser and parser not in PARSERS:
        raise ConfigError(f"Unknown tool parser {parser!r}.", f"Parsers: {', '.join(PARSERS)}.")

    def make_chat(request: RolloutRequest) -> ChatSession:
        key = request.key
        settings = rollout if world is None else rollout_of(world, rollout, request)
        return OpenAIChatSession(
            endpoint=endpoint,
            params=sampling_params(settings, plan.temperature),
            seed=seed_for(plan.seed, plan.purpose, key.step, key.task_id, key.sample),
            max_tokens=settings.max_seq_len,
            parser=PARSERS[parser] if parser else None,
        )

    return make_chat


class _ReplyCall(BaseModel):
    id: str | None = None
    function: dict[str, JsonValue]


class _ReplyMessage(BaseModel):
    content: str | None = None
    reasoning_content: JsonValue = None
    reasoning: JsonValue = None
    tool_calls: list[_ReplyCall] | None = None


class _ReplyChoice(BaseModel):
    message: _ReplyMessage
    finish_reason: str | None = None


class _ReplyUsage(BaseModel):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Reply(BaseModel):
    choices: list[_ReplyChoice] = Field(min_length=1)
    usage: _ReplyUsage | None = None


def read_answer(body: bytes, turn: int, parser: ToolCallParser | None = None) -> ChatCompletion:
    """Parse a chat completion. Raises EngineError if the body is not one; never because of the model's output.

    Null content is empty text; blank arguments are empty. If an id is missing or repeated, the calls of the turn
    are numbered `call_{turn}_{index}`. The finish reason `length` is preserved; `abort` and `error` raise
    EngineError, and all others become `stop`.
    """
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
        reply = _Reply.model_validate(json.loads(text.encode("utf-8", "replace")))
    except (ValueError, RecursionError) as error:
        hint = "Check that the URL belongs to an OpenAI-compatible server."
        raise EngineError(f"returned an invalid chat completion: {excerpt(body)}", hint) from error
    choice = reply.choices[0]
    if choice.finish_reason in ("abort", "error"):
        raise EngineError(f"aborted its response (finish reason {choice.finish_reason!r}): {excerpt(body)}")
    action, history = _read_message(choice.message, turn, parser)
    counted = reply.usage or _ReplyUsage()
    tokens = (counted.prompt_tokens, counted.completion_tokens)
    usage = TokenUsage(tokens[0] or 0, tokens[1] or 0, 1, int(None not in tokens))
    cut = choice.finish_reason == "length"
    return ChatCompletion(replace(action, finish_reason="length" if cut else "stop"), history, usage)


def _read_message(message: _ReplyMessage, turn: int, parser: ToolCallParser | None) -> tuple[Action, WireMessage]:
    content = message.content or ""
    if parser is not None and not message.tool_calls:
        action = parser.parse(content, turn=turn)
        history: dict[str, object] = {"role": "assistant", "content": content}
    else:
        action = _read_calls(content, message.tool_calls or [], turn)
        shown = action.message["content"] if action.errors else message.content
        history = {"role": "assistant", "content": shown}
        if action.calls:
            history["tool_calls"] = action.message["tool_calls"]
    for name, reasoning in zip(REASONING, (message.reasoning_content, message.reasoning), strict=True):
        if isinstance(reasoning, str) and reasoning:
            action.message.setdefault("reasoning_content", reasoning)
            history[name] = reasoning
    return action, history


def _read_calls(content: str, raw: Sequence[_ReplyCall], turn: int) -> Action:
    """Parse structured calls; the text of malformed ones is appended to the content."""
    ids = [call.id or "" for call in raw]
    if "" in ids or len(set(ids)) < len(ids):
        ids = [f"call_{turn}_{i}" for i in range(len(ids))]
    calls, errors, structured = list[ToolCall](), list[CallError](), list[MessageToolCall]()
    for name, call in zip(ids, raw, strict=True):
        try:
            tool, arguments, text = _read_function(call.function)
        except MalformedCall as error:
            errors.append(CallError(name, json.dumps(call.function, ensure_ascii=False), error.reason))
            continue
        calls.append(ToolCall(name, tool, arguments))
        structured.append(tool_call(name, tool, text))
    shown = "\n".join(filter(None, [content.strip(), *(error.text for error in errors)]))
    message = Message(role="assistant", content=shown)
    if structured:
        message["tool_calls"] = structured
    return Action(message, tuple(calls), tuple(errors))


def _read_function(function: Mapping[str, JsonValue]) -> tuple[str, dict[str, JSON], str]:
    """Return name, arguments and their JSON text, unmodified if it encodes an object. Raises MalformedCall."""
    raw = function.get("arguments")
    text = raw.strip() if isinstance(raw, str) else ""
    value: object = decode(text) if text else {} if raw is None or isinstance(raw, str) else raw
    tool, arguments = call_of({**function, "arguments": value}, "arguments")
    is_unmodified = text and isinstance(value, dict)
    return tool, arguments, text if is_unmodified else json.dumps(arguments, ensure_ascii=False)


def _adaptable_fields(sent: Mapping[str, object]) -> Iterator[str]:
    """Yield the fields of a body that can be changed or omitted."""
    yield from (name for name in (*_SENT_AS_MAX_TOKENS, *SAMPLING) if name in sent)
    messages = sent.get("messages")
    for name in REASONING:
        if isinstance(messages, list) and any(name in message for message in messages):
            yield name


def _error_param(response: bytes) -> object:
    try:
        return json.loads(response)["error"]["param"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
