"""Adapters to the HTTP APIs of inference servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal
from urllib.parse import quote

from pydantic import BaseModel, Field

from ludus.engines.base import Request
from ludus.engines.remote.http_client import HttpStatusError, Replica, Reply, get_once
from ludus.errors import EngineError
from ludus.types import FinishReason, SamplingParams, TopLogprobs

LogprobMode = Literal["exact", "raw", "processed"]
"""Distribution of a server's log-probabilities: `exact` is always tempered and before top-k, top-p, min-p and
guide; `raw` is the model's at temperature 1; `processed` is tempered and filtered."""

_MODELS = "/v1/models"
_SEED = (1 << 63) - 1
_TOKEN_ID = "token_id:"
"""vLLM's prefix of a token id in place of a token's text."""
_PENALTIES_OFF = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Override the defaults of `generation_config.json`."""
_NOT_FOUND = 404
_UNAUTHORIZED, _FORBIDDEN = 401, 403


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Properties reported by a server. `logprobs` is None if unknown."""

    model: str
    context_tokens: int
    batch_invariant: bool = False
    logprobs: LogprobMode | None = None


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Tokens [`start`, `end`) were sampled by the weights labeled `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """An action as returned by the server. `spans` is None if the server does not report versions."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    spans: tuple[VersionRange, ...] | None
    top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class RemoteAdapter:
    """A LoRA adapter of `rank` in a folder accessible to the server; `name` is its name there."""

    name: str
    folder: str
    version: int
    rank: int


class ListedModel(BaseModel):
    """A model of `/v1/models`."""

    id: str
    owned_by: str = ""
    max_model_len: int | None = None
    batch_invariant: bool = False


class ModelList(BaseModel):
    """The response of `/v1/models`."""

    data: list[ListedModel] = Field(min_length=1)


class _Logprobs(BaseModel):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Logprob(BaseModel):
    logprob: float


class _Choice(BaseModel):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    weight_versions: list[VersionRange] | None = None


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


class _WeightInfo(BaseModel):
    weight_version: str


class _Checksums(BaseModel):
    checksums: dict[str, str]


class _Fingerprint(BaseModel):
    fingerprint: str


class ApiAdapter(ABC):
    """Interface to one kind of server. All methods but `describe` raise only EngineError."""

    PAUSE: ClassVar[tuple[str, Mapping[str, object]]]
    """Path and body of the request that pauses computation and keeps the requests."""
    RESUME: ClassVar[str]
    UNLOAD_ADAPTER: ClassVar[str]
    facts: ServerFacts
    """Properties of the replicas, equal for all; set before the first request."""

    def describe(self, url: str) -> ServerFacts:
        """Query the server's properties. Raises EngineError, UserError for an invalid address."""
        model = get_once(url, _MODELS, ModelList).data[0]
        if model.max_model_len is None:
            raise EngineError(f"{url} does not report its context length.", "Check engine.api.")
        is_ludus = model.owned_by == "ludus"
        return ServerFacts(model.id, model.max_model_len, model.batch_invariant, logprobs="exact" if is_ludus else None)

    @abstractmethod
    async def generate(self, replica: Replica, name: str, request: Request, adapter: str) -> SampledTokens:
        """Sample one action; `name` is the request id, the same for retries, `adapter` a loaded one, "" for none."""

    @abstractmethod
    async def score(self, replica: Replica, token_ids: Sequence[int], adapter: str) -> list[float]:
        """Return the log-probability of each token at temperature 1; 0 for the first."""

    @abstractmethod
    async def version(self, replica: Replica) -> str:
        """Return the label of the current weights."""

    @abstractmethod
    async def update(self, replica: Replica, folder: str, version: int) -> None:
        """Load the weights in a folder between two steps."""

    async def digests(self, replica: Replica) -> Mapping[str, str] | None:
        """Return the SHA-256 of each tensor's bytes by name; None if unsupported."""
        return None

    async def fingerprint(self, replica: Replica, adapter: str) -> str | None:
        """Return `fingerprint_module` of the current weights with an adapter; None if unsupported."""
        return None

    @abstractmethod
    async def load_adapter(self, replica: Replica, adapter: RemoteAdapter) -> None:
        """Load an adapter from its folder in addition to others."""

    async def unload_adapter(self, replica: Replica, name: str) -> None:
        await replica.send(self.UNLOAD_ADAPTER, {"lora_name": name})

    async def adapters(self, replica: Replica) -> frozenset[str]:
        """Return the names of the loaded adapters and of the model."""
        return frozenset(model.id for model in (await replica.get(_MODELS, ModelList)).data)

    @abstractmethod
    async def abort(self, replica: Replica, name: str) -> None:
        """End a request with the tokens so far."""

    async def pause(self, replica: Replica) -> None:
        """Pause computation; requests stay queued."""
        await replica.send(*self.PAUSE)

    async def resume(self, replica: Replica) -> None:
        await replica.send(self.RESUME, {})


class VllmApi(ApiAdapter):
    """vLLM's HTTP server, started with VLLM_SERVER_DEV_MODE=1, and `ludus serve --control`."""

    PAUSE = "/pause?mode=keep", {}
    RESUME = "/resume"
    UNLOAD_ADAPTER = "/v1/unload_lora_adapter"

    async def generate(self, replica: Replica, name: str, request: Request, adapter: str) -> SampledTokens:
        """Request one completion from token ids. Penalties and end-of-text handling are disabled."""
        params, room = request.params, self.facts.context_tokens - len(request.token_ids)
        body = _sampling(params) | _PENALTIES_OFF
        if params.guide is not None:  # in the format of vLLM 0.12 and later
            kind = {"json_schema": "json", "regex": "regex", "lark": "grammar"}[params.guide.kind]
            body["structured_outputs"] = {kind: params.guide.text}
        body |= {
            "top_k": params.top_k,
            "seed": params.seed & _SEED,
            "include_stop_str_in_output": True,
            "model": adapter or self.facts.model,
            "request_id": name,
            "prompt": request.token_ids,
            "max_tokens": min(params.max_new_tokens, room),
            "logprobs": params.top_logprobs,
            "return_token_ids": True,
        }
        if params.top_logprobs:
            body["return_tokens_as_token_ids"] = True
        choice = (await replica.post("/v1/completions", body, _Completion, samples=True)).choices[0]
        if choice.token_ids is None or choice.prompt_token_ids is None or choice.logprobs is None:
            raise EngineError(
                f"{replica.url} returned no token ids of prompt or completion, or no log-probabilities.",
                "It must support `return_token_ids`, as vLLM and `ludus serve` do.",
            )
        if choice.prompt_token_ids != list(request.token_ids):
            raise EngineError(f"{replica.url} sampled from a different prompt than the one sent.")
        rows = [row or {} for row in choice.logprobs.top_logprobs or ()] if params.top_logprobs else []
        if not all(name.startswith(_TOKEN_ID) for row in rows for name in row):
            raise EngineError(f"{replica.url} returned top tokens as text, not as {_TOKEN_ID}N.")
        top = [[(int(name.removeprefix(_TOKEN_ID)), lp) for name, lp in row.items()] for row in rows]
        spans = choice.weight_versions
        return SampledTokens(
            tuple(choice.token_ids),
            tuple(_finite(choice.logprobs.token_logprobs, len(choice.token_ids), replica.url)),
            _finish(choice.finish_reason, replica.url),
            None if spans is None else tuple(spans),
            _top(top, params, len(choice.token_ids), replica.url),
        )

    async def score(self, replica: Replica, token_ids: Sequence[int], adapter: str) -> list[float]:
        body = {"model": adapter or self.facts.model, "prompt": list(token_ids), "prompt_logprobs": 0}
        body |= {"max_tokens": 0, "echo": True, "temperature": 0.0, "return_token_ids": True}
        choice = (await replica.post("/v1/completions", body, _Completion)).choices[0]
        entries = choice.prompt_logprobs or []
        rows = [row.get(token) if row else None for row, token in zip(entries, token_ids, strict=False)]
        return [0.0, *_finite([r.logprob if r else None for r in rows[1:]], len(token_ids) - 1, replica.url)]

    async def version(self, replica: Replica) -> str:
        return (await replica.get("/weight_info", _WeightInfo)).weight_version

    async def update(self, replica: Replica, folder: str, version: int) -> None:
        """Reload from the folder through `exchange`."""
        reload: Mapping[str, object] = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self.exchange(replica, version, lambda: replica.send("/collective_rpc", reload))

    async def exchange(self, replica: Replica, version: int, load: Callable[[], Awaitable[object]]) -> None:
        """Pause, `load`, clear the prefix cache, set the version, resume."""
        await self.pause(replica)
        try:
            await load()
            await replica.send("/reset_prefix_cache?reset_running_requests=true", {})
            await replica.send("/update_weight_version", {"new_version": str(version)})
        finally:
            await self.resume(replica)

    async def digests(self, replica: Replica) -> Mapping[str, str] | None:
        found = await _if_supported(replica.post("/weight_checker", {"action": "checksum"}, _Checksums))
        return None if found is None else found.checksums

    async def fingerprint(self, replica: Replica, adapter: str) -> str | None:
        path = f"/fingerprint?model={quote(adapter)}" if adapter else "/fingerprint"
        found = await _if_supported(replica.get(path, _Fingerprint))
        return None if found is None else found.fingerprint

    async def load_adapter(self, replica: Replica, adapter: RemoteAdapter) -> None:
        """Call `/v1/load_lora_adapter`; vLLM ignores the version."""
        body = {"lora_name": adapter.name, "lora_path": adapter.folder}
        try:
            await replica.send("/v1/load_lora_adapter", body | {"weight_version": str(adapter.version)})
        except HttpStatusError as error:
            error.hint = (
                f"Start vLLM with --enable-lora --max-loras 2 --max-lora-rank {max(16, adapter.rank)} and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, `ludus serve` with --control."
            )
            if "Not Found" in error.message or error.status == _FORBIDDEN:
                error.message = f"{replica.url} does not support LoRA adapters."
            raise

    async def abort(self, replica: Replica, name: str) -> None:
        await replica.send("/abort_requests", {"request_ids": [f"cmpl-{name}-0"]})

    async def pause(self, replica: Replica) -> None:
        try:
            await super().pause(replica)
        except HttpStatusError as error:
            if error.status in (_NOT_FOUND, _FORBIDDEN):
                error.hint = "Start `ludus serve` with --control, vLLM with VLLM_SERVER_DEV_MODE=1."
            if error.status == _UNAUTHORIZED:
                error.hint = "Save the token printed by `ludus serve --control` to a file and set engine.token_file."
            raise


class _SglangFinish(BaseModel):
    type: str


class _SglangMeta(BaseModel):
    finish_reason: _SglangFinish | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    input_token_logprobs: list[tuple[float | None, int, str | None]] = []
    output_top_logprobs: list[list[tuple[float, int, str | None]] | None] | None = None


class _SglangResponse(BaseModel):
    output_ids: list[int] = []
    meta_info: _SglangMeta


class _SglangInfo(BaseModel):
    weight_version: str = ""


class _SglangResult(BaseModel):
    success: bool
    message: str = ""
    error_message: str | None = None


class SglangApi(ApiAdapter):
    """SGLang's native HTTP server, by its documentation. Untested against a real one."""

    PAUSE = "/pause_generation", {"mode": "in_place"}
    RESUME = "/continue_generation"
    UNLOAD_ADAPTER = "/unload_lora_adapter"

    async def generate(self, replica: Replica, name: str, request: Request, adapter: str) -> SampledTokens:
        params, room = request.params, self.facts.context_tokens - len(request.token_ids)
        sampling = _sampling(params) | {
            "top_k": params.top_k or -1,
            "max_new_tokens": min(params.max_new_tokens, room),
            "no_stop_trim": True,
            "sampling_seed": params.seed & _SEED,
        }
        if params.guide is not None:
            if params.guide.kind == "lark":
                raise EngineError("SGLang does not support Lark grammars.", "Use a JSON schema.")
            sampling[params.guide.kind] = params.guide.text
        body: dict[str, object] = {"rid": name, "input_ids": list(request.token_ids), "sampling_params": sampling}
        body |= {"return_logprob": True, "top_logprobs_num": params.top_logprobs} | _lora_path(adapter)
        response = await replica.post("/generate", body, _SglangResponse, samples=True)
        entries = response.meta_info.output_token_logprobs
        rows = [[(t, lp) for lp, t, _ in row or ()] for row in response.meta_info.output_top_logprobs or ()]
        top = _top(rows, params, len(entries), replica.url)
        tokens = tuple(token for _, token, _ in entries)
        if response.output_ids and tokens != tuple(response.output_ids):
            raise EngineError(f"{replica.url} returned log-probabilities of other tokens than its token ids.")
        logprobs = _finite([logprob for logprob, _, _ in entries], len(tokens), replica.url)
        finish = response.meta_info.finish_reason
        return SampledTokens(tokens, tuple(logprobs), _finish(finish.type if finish else None, replica.url), None, top)

    async def score(self, replica: Replica, token_ids: Sequence[int], adapter: str) -> list[float]:
        body: dict[str, object] = {"input_ids": list(token_ids), "return_logprob": True}
        body |= {"logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0, "temperature": 0.0}}
        response = await replica.post("/generate", body | _lora_path(adapter), _SglangResponse)
        entries = [logprob for logprob, _, _ in response.meta_info.input_token_logprobs]
        return [0.0, *_finite(entries[1:], len(token_ids) - 1, replica.url)]

    async def version(self, replica: Replica) -> str:
        return (await replica.get("/get_model_info", _SglangInfo)).weight_version

    async def update(self, replica: Replica, folder: str, version: int) -> None:
        body = {"model_path": folder, "weight_version": str(version), "flush_cache": True}
        await self.pause(replica)
        try:
            done = await replica.post("/update_weights_from_disk", body, _SglangResult)
        finally:
            await self.resume(replica)
        if not done.success:
            raise EngineError(f"{replica.url} did not load the weights: {done.message}")

    async def load_adapter(self, replica: Replica, adapter: RemoteAdapter) -> None:
        body = {"lora_name": adapter.name, "lora_path": adapter.folder}
        try:
            done = await replica.post("/load_lora_adapter", body, _SglangResult)
        except HttpStatusError as error:
            error.hint = f"Start SGLang with --enable-lora --max-lora-rank {adapter.rank} --lora-target-modules all."
            raise
        if not done.success:
            raise EngineError(f"{replica.url} did not load the adapter: {done.error_message}")

    async def abort(self, replica: Replica, name: str) -> None:
        await replica.send("/abort_request", {"rid": name})


async def _if_supported(reply: Awaitable[Reply]) -> Reply | None:
    """Return the reply, or None if the server lacks the endpoint."""
    try:
        return await reply
    except HttpStatusError as error:
        if error.status == _NOT_FOUND:
            return None
        raise


def _sampling(params: SamplingParams) -> dict[str, object]:
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,
        "skip_special_tokens": False,
    }


def _lora_path(adapter: str) -> dict[str, object]:
    return {"lora_path": adapter} if adapter else {}


def _finish(reason: str | None, url: str) -> FinishReason:
    match reason:
        case "stop" | "length" | "abort":
            return reason
    raise EngineError(f"{url} aborted its response (finish reason {reason!r}).")


def _finite(logprobs: Sequence[float | None], num: int, url: str) -> list[float]:
    found = [value for value in logprobs if value is not None]
    if len(found) != num or len(logprobs) != num:
        raise EngineError(f"{url} returned {len(found)} log-probabilities for {num} tokens.")
    return found


def _top(
    rows: Sequence[Sequence[tuple[int, float]]], params: SamplingParams, num: int, url: str
) -> tuple[TopLogprobs, ...]:
    """Return the requested number of most likely tokens; servers add the sampled one."""
    if not params.top_logprobs:
        return ()
    if len(rows) != num or not all(rows):
        raise EngineError(f"{url} returned top tokens for {sum(map(bool, rows))} of {num} tokens.")
    ranked = (sorted(row, key=lambda pair: (-pair[1], pair[0])) for row in rows)
    return tuple(tuple(row[: params.top_logprobs]) for row in ranked)
