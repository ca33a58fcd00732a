"""Reachability and speed of engines, and limits of this process, for `ludus doctor`."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from ludus.errors import LudusError

_TOKENS = 64
"""Tokens of the generation whose speed is measured."""
_PROMPT = tuple(range(4, 20))
_MIN_FILES = 4096
_MIN_PROCESSES = 1024
_MIN_LOCKED = 64 << 20


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """A checked subject, its state, and a description."""

    what: str
    state: Literal["fine", "note", "fault"]
    text: str


class _ListedModel(BaseModel):
    id: str
    max_model_len: int | None = None


class _ListedModels(BaseModel):
    data: list[_ListedModel] = Field(min_length=1)


class _Version(BaseModel):
    version: str


def check_ulimits(has_gpu: bool) -> Iterator[DoctorFinding]:
    """Yield a finding for each resource limit that Ludus or its engines need."""
    files = "every connection to an engine, tool server or sandbox session is an open file"
    processes = "reward workers, sandboxes and compute threads are counted as processes"
    yield _ulimit("open files", "ulimit -n", resource.RLIMIT_NOFILE, _MIN_FILES, files)
    yield _ulimit("processes", "ulimit -u", resource.RLIMIT_NPROC, _MIN_PROCESSES, processes)
    if has_gpu:
        locked = "vLLM, SGLang and NCCL pin host memory for transfers to GPUs and network cards"
        yield _ulimit("locked memory", "ulimit -l", resource.RLIMIT_MEMLOCK, _MIN_LOCKED, locked)


def _ulimit(name: str, command: str, kind: int, least: int, why: str) -> DoctorFinding:
    soft, _ = resource.getrlimit(kind)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    if soft == resource.RLIM_INFINITY or soft >= least:
        return DoctorFinding(f"limit of {name}", "fine", shown)
    return DoctorFinding(f"limit of {name}", "note", f"{shown}, below {least:,}: {why}; raise it with {command}")


def check_server(url: str, api: str) -> Iterator[DoctorFinding]:
    """Yield findings about an OpenAI-compatible server: models, version, latency, speed, and what RL needs."""
    from ludus.engines.remote.http_client import get_once

    base = url.rstrip("/").removesuffix("/v1")
    what = f"engine {base}"
    try:
        models = get_once(base, "/v1/models", _ListedModels).data
    except LudusError as error:
        yield DoctorFinding(what, "fault", str(error))
        return
    version = "unknown"
    with suppress(LudusError):
        version = get_once(base, "/version", _Version).version
    names = ", ".join(one.id for one in models)
    context = f"context {models[0].max_model_len} tokens" if models[0].max_model_len else "context length unknown"
    yield DoctorFinding(what, "fine", f"serves {names}; {context}; version {version}")
    try:
        yield DoctorFinding(what, "fine", asyncio.run(_token_speed(base, api)))
        yield DoctorFinding(what, "fine", "returns token ids and log-probabilities, as RL needs")
    except LudusError as error:
        reason = f"no token ids with log-probabilities: it can be evaluated, but RL needs them. {error.message}"
        yield DoctorFinding(what, "note", reason)
        try:
            yield DoctorFinding(what, "fine", asyncio.run(_chat_speed(base, models[0].id)))
        except LudusError as error:
            yield DoctorFinding(what, "fault", str(error))


async def _token_speed(base: str, api: str) -> str:
    """Sample token ids; return latency and speed. Raises EngineError if ids or log-probabilities are missing."""
    from ludus.engines.base import Request
    from ludus.engines.remote.engine import APIS
    from ludus.engines.remote.http_client import RemoteEngineSettings, Replica
    from ludus.types import SamplingParams

    server = APIS[api]
    facts = await asyncio.to_thread(server.describe, base)
    replica = Replica(base, RemoteEngineSettings(timeout_s=60.0, connect_timeout_s=0.0))

    async def timed(num: int, name: str) -> tuple[float, int]:
        begin = time.perf_counter()
        request = Request(name, _PROMPT, SamplingParams(max_new_tokens=num, seed=1))
        done = await server.generate(replica, facts, name, request, "")
        return time.perf_counter() - begin, len(done.tokens)

    try:
        await timed(1, "doctor-warm-up")
        (latency_s, _), (seconds, num) = await timed(1, "doctor-latency"), await timed(_TOKENS, "doctor-speed")
    finally:
        await replica.close()
    return speed_text(latency_s, seconds, num)


async def _chat_speed(base: str, model: str) -> str:
    from ludus.rollouts.openai_client import OpenAIClient, OpenAIClientSettings
    from ludus.types import Message, SamplingParams

    message = Message(role="user", content="Count from 1 to 30.")
    async with OpenAIClient(OpenAIClientSettings(f"{base}/v1", model, timeout_s=60.0, retries=0)) as client:
        begin = time.perf_counter()
        await client.chat([message], (), SamplingParams(max_new_tokens=1), 0)
        between = time.perf_counter()
        answer = await client.chat([message], (), SamplingParams(max_new_tokens=_TOKENS), 0)
        seconds = time.perf_counter() - between
    return speed_text(between - begin, seconds, answer.usage.completion_tokens if answer else 0)


def speed_text(latency_s: float, seconds: float, num: int) -> str:
    """Return a text about the seconds of one token, and the seconds of `num` tokens (0: unknown)."""
    speed = f"{num / seconds:,.0f} tokens/s in one request of {num} tokens" if num else "speed unknown"
    return f"latency {1000 * latency_s:.0f} ms for one token; {speed}"


async def measure_embedded() -> DoctorFinding:
    """Measure the speed of the embedded engine with a small random model."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from ludus.engines.base import Request
    from ludus.engines.embedded.engine import EngineSettings, LocalEngine
    from ludus.types import SamplingParams

    sizes = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).float().eval()
    engine = LocalEngine(model, settings=EngineSettings(context_tokens=128, max_batch=32, kv_cache_tokens=32 * 128))
    params, speeds = SamplingParams(max_new_tokens=_TOKENS), []
    try:
        for num in (1, 1, 32):  # the first is a warm-up
            requests = [Request(f"speed-{num}-{i}", _PROMPT, params) for i in range(num)]
            begin = time.perf_counter()
            done = await engine.generate_batch(requests)
            speeds.append(sum(len(one.tokens) for one in done) / (time.perf_counter() - begin))
    finally:
        await engine.close()
    text = f"{speeds[1]:,.0f} tokens/s with 1 request, {speeds[2]:,.0f} with 32, for a random model of 1 M weights"
    return DoctorFinding("embedded engine", "fine", text)
