"""Response bodies and streamed chunks, in the formats of OpenAI and vLLM.

Not the types of the package `openai`: it would be a new dependency (30 MB, 0.3 s to import), they lack vLLM's fields
(`token_ids`, `prompt_logprobs`, `weight_versions`, ...), and they cannot hold log-probabilities that are already
encoded.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer


class Usage(BaseModel):
    """Token counts: prompts, each counted once, and all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt: int, completion: int) -> Usage:
        return cls(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


@dataclass(frozen=True)
class EncodedJson:
    """A value already encoded as JSON, to avoid creating an object per part."""

    text: bytes


class TextLogprobs(BaseModel):
    """Log-probabilities of a completion's tokens. `top_logprobs` includes the sampled token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(BaseModel):
    """Log-probability of a prompt token or an alternative. `rank` (from 1) is set only for top tokens."""

    logprob: float
    rank: int | None = None
    decoded_token: str


class VersionSpan(BaseModel):
    """Tokens [`start`, `end`) were sampled by the weights of `version`."""

    version: str
    start: int
    end: int


class TextChoice(BaseModel):
    """One completion, or a chunk of it (`finish_reason` may then be null)."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    weight_versions: list[VersionSpan] | None = None


class TextAnswer(BaseModel):
    """Response of `/v1/completions`, or a chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class CalledFunction(BaseModel):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class CallReply(BaseModel):
    """A tool call of the model."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatReply(BaseModel):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[CallReply] | None = None


class ChatChoice(BaseModel):
    """One message."""

    index: int
    message: ChatReply
    logprobs: EncodedJson | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[VersionSpan] | None = None


class ChatAnswer(BaseModel):
    """Response of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class CallPiece(CallReply):
    """A tool call in a stream, sent whole."""

    index: int


class ChatDelta(BaseModel):
    """New parts of a streamed message; None is omitted."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPiece] | None = None

    @model_serializer(mode="wrap")
    def _only_what_is_new(self, whole: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: value for name, value in whole(self).items() if value is not None}


class ChatPieceChoice(BaseModel):
    """A chunk of one message."""

    index: int
    delta: ChatDelta
    logprobs: EncodedJson | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatPiece(BaseModel):
    """A chunk of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[ChatPieceChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class ErrorInfo(BaseModel):
    """Error message; `code` is a machine-readable reason or the status."""

    message: str
    type: str
    param: str | None = None
    code: int | str


class ErrorAnswer(BaseModel):
    """Body of every error response."""

    error: ErrorInfo


class ModelCard(BaseModel):
    """A served model or one of its adapters, whose `parent` is the model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["ludus"] = "ludus"
    root: str
    parent: str | None = None
    weight_version: str
    max_model_len: int
    batch_invariant: bool


class ModelList(BaseModel):
    """Response of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
