"""Replies of judges: backends, concurrency limit, retries, deadline and cache. A failure is counted, never raised.

A reply is a function of prompt, judge, its weights, sampling and sample number, which are its key in the cache. New
replies and failures are lines of `judge.jsonl` in the run folder, so that a resumed run has the same cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Protocol, TypeVar

from ludus.chat.render import Renderer, decode_exactly
from ludus.config.sections.parts.judges import POLICY_JUDGE, JudgeClientConfig
from ludus.engines.base import Engine, seed_for
from ludus.engines.embedded.engine import LocalEngine
from ludus.errors import EngineError, StorageError
from ludus.rewards.judge_prompts import JudgePrompt, parse_reply
from ludus.rollouts.episode import EngineChatSession
from ludus.rollouts.openai_client import OpenAIClient
from ludus.types import Guide, Message, SamplingParams, StopReason

T = TypeVar("T")
log = logging.getLogger(__name__)

JUDGE_FILE: Final = "judge.jsonl"
"""File of the replies and failures in a run folder."""
CACHE_REPLIES: Final = 100_000
"""Maximum number of cached replies; the oldest are dropped."""
RETRY_TEMPERATURE: Final = 0.5
"""Least temperature of a second attempt after an invalid reply, which would otherwise be the same."""


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """A reply and its tokens."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class JudgeBackend(Protocol):
    """A judge."""

    @property
    def name(self) -> str:
        """The name in `rewards.judge.models`."""

    @property
    def version(self) -> int:
        """Version of the weights; 0 unless they change."""

    async def reply(self, messages: Sequence[Message], params: SamplingParams) -> JudgeReply:
        """Sample a reply. Raises EngineError or UserError; TimeoutError."""

    async def close(self) -> None:
        """Free all resources."""


@dataclass(frozen=True)
class EndpointJudge:
    """A model served by an OpenAI-compatible endpoint."""

    client: OpenAIClient
    version: int = 0

    @property
    def name(self) -> str:
        return self.client.settings.model

    async def reply(self, messages: Sequence[Message], params: SamplingParams) -> JudgeReply:
        found = await self.client.chat(messages, (), replace(params, seed=params.seed >> 32), 0)
        if found is None:
            raise EngineError("The prompt exceeds the context of the judge.", "Lower rewards.judge.client.max_chars.")
        content, usage = found.action.message["content"], found.usage
        return JudgeReply(content, usage.prompt_tokens, usage.completion_tokens)

    async def close(self) -> None:
        await self.client.close()


@dataclass(frozen=True)
class EngineJudge:
    """A model in an engine: the policy, whose `engine` is not closed, or one that was loaded for this purpose."""

    name: str
    engine: Engine
    renderer: Renderer
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def version(self) -> int:
        return self.engine.version

    async def reply(self, messages: Sequence[Message], params: SamplingParams) -> JudgeReply:
        if not isinstance(self.engine, LocalEngine) or find_spec("llguidance") is None:
            params = replace(params, guide=None)
        episode = f"judge/{self.name}/{next(self._numbers)}"
        chat = EngineChatSession(self.engine, self.renderer, params, self.engine.context_tokens, episode, params.seed)
        try:
            action = chat.open([self._plain(message) for message in messages], ()) or await chat.act()
        finally:
            chat.close()
        if isinstance(action, StopReason):
            raise EngineError("The prompt exceeds the context of the judge.", "Lower rewards.judge.client.max_chars.")
        prompt, tokens = chat.segments[0].tokens, chat.segments[-1].tokens
        return JudgeReply(decode_exactly(self.renderer.tokenizer, tokens, skip_special=True), len(prompt), len(tokens))

    def _plain(self, message: Message) -> Message:
        """Return the message without control tokens: their first character is replaced."""
        content = message["content"]
        for token in self.renderer.tokenizer.get_added_vocab():
            content = content.replace(token, f"‹{token[1:]}")
        return Message(role=message["role"], content=content)

    async def close(self) -> None:
        if self.name != POLICY_JUDGE:
            await self.engine.close()


@dataclass
class JudgeStats:
    """Counts of a step by metric, the seconds of its requests and of the wait for all of them, and the last failure."""

    counts: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    wait_s: float = 0.0
    failure: str = ""

    def metrics(self) -> dict[str, float]:
        """Return the counts; those of failures depend on the judge's speed."""
        names = ("requests", "cached", "prompt_tokens", "completion_tokens", "invalid", "timeouts", "errors", "late")
        return {f"judge/{name}": float(self.counts[name]) for name in names}

    def timings(self) -> dict[str, float]:
        """Return the mean and longest seconds of a request, and the wait of the step."""
        found = {"judge/wait_s": self.wait_s}
        if self.latencies:
            mean = sum(self.latencies) / len(self.latencies)
            found |= {"judge/latency_s": mean, "judge/latency_max_s": max(self.latencies)}
        return found


@dataclass
class JudgeClient:
    """Send prompts to judges. `folder`, if set, keeps the replies in a file."""

    backends: Sequence[JudgeBackend]
    settings: JudgeClientConfig
    seed: int = 0
    folder: Path | None = None
    cache: dict[str, str] = field(default_factory=dict)
    _slots: asyncio.Semaphore = field(init=False)
    _warned: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.settings.concurrency)
        if self.folder is not None and (file := self.folder / JUDGE_FILE).is_file():
            lines = map(json.loads, file.read_text("utf-8").splitlines())
            self._remember({line["key"]: line["reply"] for line in lines if "reply" in line})

    async def close(self) -> None:
        """Close the judges."""
        for backend in self.backends:
            await backend.close()

    async def replies(
        self,
        prompts: Sequence[JudgePrompt[T]],
        step: int,
        stats: JudgeStats,
        until: float,
        samples: int = 1,
        backends: Sequence[JudgeBackend] = (),
    ) -> list[list[T | None]]:
        """Return the replies of each judge and sample to each prompt; None without a valid one.

        At `until` (`time.monotonic`) unanswered requests are cancelled. Equal prompts share a request. `backends`:
        only these judges.
        """
        variants = [(backend, sample) for backend in backends or self.backends for sample in range(samples)]
        keys = [[self._key(backend, sample, prompt) for prompt in prompts] for backend, sample in variants]
        wanted = {
            key: (backend, prompt)
            for own, (backend, _) in zip(keys, variants, strict=True)
            for key, prompt in zip(own, prompts, strict=True)
            if key not in self.cache
        }
        stats.counts["cached"] += sum(map(len, keys)) - len(wanted)
        found = await self._until(wanted, stats, until)
        self._remember(found)
        self._write(step, found, len(wanted) - len(found))
        return [[self._read(key, prompt) for key, prompt in zip(own, prompts, strict=True)] for own in keys]

    def _read(self, key: str, prompt: JudgePrompt[T]) -> T | None:
        return prompt.read(json.loads(self.cache[key])) if key in self.cache else None

    def _key(self, backend: JudgeBackend, sample: int, prompt: JudgePrompt[T]) -> str:
        sampling = (self.settings.temperature, self.settings.max_tokens, self.settings.structured)
        text = json.dumps([backend.name, backend.version, self.seed, sample, sampling, prompt.key_text])
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    async def _until(
        self, wanted: Mapping[str, tuple[JudgeBackend, JudgePrompt[T]]], stats: JudgeStats, until: float
    ) -> dict[str, str]:
        """Return the replies that arrive in time, in the order of `wanted`."""
        begin = time.monotonic()
        tasks = {key: asyncio.create_task(self._ask(one, key, prompt, stats)) for key, (one, prompt) in wanted.items()}
        try:
            if tasks:
                await asyncio.wait(tasks.values(), timeout=max(0.0, until - begin))
        finally:
            late = [task for task in tasks.values() if not task.done()]
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        stats.counts["late"] += len(late)
        stats.wait_s += time.monotonic() - begin
        replies = {key: task.result() for key, task in tasks.items() if not task.cancelled()}
        return {key: reply for key, reply in replies.items() if reply is not None}

    async def _ask(self, backend: JudgeBackend, key: str, prompt: JudgePrompt[T], stats: JudgeStats) -> str | None:
        """Return the JSON of a valid reply, or None."""
        settings, guide = self.settings, Guide("json_schema", json.dumps(prompt.schema))
        for attempt in range(settings.retries + 1):
            temperature = max(settings.temperature, RETRY_TEMPERATURE) if attempt else settings.temperature
            params = SamplingParams(
                temperature=temperature,
                max_new_tokens=settings.max_tokens,
                seed=seed_for(key, attempt),
                guide=guide if settings.structured else None,
            )
            reply = await self._request(backend, prompt, params, stats)
            if reply is None:
                return None
            try:
                return parse_reply(reply.text, prompt.read)[1]
            except ValueError as error:
                stats.counts["invalid"] += 1
                stats.failure = f"invalid reply: {error}"
                log.debug("invalid reply of judge %s: %s", backend.name, error)
        return None

    async def _request(
        self, backend: JudgeBackend, prompt: JudgePrompt[T], params: SamplingParams, stats: JudgeStats
    ) -> JudgeReply | None:
        """Return one reply; None, counted, after an error or timeout."""
        async with self._slots:
            stats.counts["requests"] += 1
            begin = time.monotonic()
            try:
                async with asyncio.timeout(self.settings.timeout_s):
                    reply = await backend.reply(prompt.messages, params)
            except Exception as error:  # boundary: no failure of a judge may end a step
                is_timeout = isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)
                stats.counts["timeouts" if is_timeout else "errors"] += 1
                stats.failure = str(error) or repr(error)
                if backend.name not in self._warned:
                    self._warned.add(backend.name)
                    log.warning("judge %s failed, logged once per run: %s", backend.name, stats.failure)
                return None
            stats.latencies.append(time.monotonic() - begin)
        stats.counts["prompt_tokens"] += reply.prompt_tokens
        stats.counts["completion_tokens"] += reply.completion_tokens
        return reply

    def _remember(self, replies: Mapping[str, str]) -> None:
        self.cache |= replies
        for key in list(itertools.islice(self.cache, max(0, len(self.cache) - CACHE_REPLIES))):
            del self.cache[key]

    def _write(self, step: int, replies: Mapping[str, str], num_failed: int) -> None:
        if self.folder is None:
            return
        rows: Iterable[dict[str, object]] = [{"step": step, "key": key, "reply": text} for key, text in replies.items()]
        failed: list[dict[str, object]] = [{"step": step, "failed": num_failed}] if num_failed else []
        try:
            with (self.folder / JUDGE_FILE).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in (*rows, *failed))
        except OSError as error:
            raise StorageError(f"{self.folder / JUDGE_FILE} cannot be written: {error}.") from error
