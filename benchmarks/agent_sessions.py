"""What the session server costs: processor time and throughput of agents over HTTP against the same in this process.

    python benchmarks/agent_sessions.py                # 64 sessions at once
    python benchmarks/agent_sessions.py --sessions 500 --turns 4 --engine none

Each session is a dialogue of `--turns` requests. With `--engine small` the cold start of the recipe `search` samples 16
tokens a reply, with `0.1b` a model of 0.08 billion random weights; with `none` a reply is there at once, so that only
the server and the bookkeeping remain. The clients of the HTTP arm are another process, whose time does not count. Arms
alternate; the figures are medians of the repetitions.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from statistics import median
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_clients import dialogue, serve_work
from ludus.chat.render import TemplateRenderer
from ludus.config.sections.model import ModelInitConfig
from ludus.config.sections.rollout import RolloutConfig
from ludus.engines.base import Request
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.models.loading import build_tiny
from ludus.gateway.sessions import SessionServer
from ludus.rollouts.agent_session import AgentSession, ReplyLimits
from ludus.rollouts.episode import EngineChatSession
from ludus.types import Completion, SamplingParams

NUM_TOKENS = 16
LARGE = ModelInitConfig(
    vocab_size=2048,
    hidden_size=768,
    intermediate_size=2304,
    num_layers=12,
    num_heads=12,
    num_kv_heads=4,
    context_tokens=1024,
)


class Cost(NamedTuple):
    """Wall-clock and processor seconds of one arm."""

    wall_s: float
    processor_s: float


class NoEngine:
    """An engine whose replies are there at once."""

    context_tokens = 4096

    def __init__(self, token: int) -> None:
        self.token = token

    async def generate(self, request: Request) -> Completion:
        zeros = (0.0,) * NUM_TOKENS
        return Completion((self.token,) * NUM_TOKENS, zeros, (0,) * NUM_TOKENS, "stop")

    def release(self, episode: str) -> None: ...


@dataclass
class Clients:
    """The process of the HTTP clients."""

    turns: int

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._work, self._done = context.Queue(), context.Queue()
        context.Process(target=serve_work, args=(self._work, self._done), daemon=True).start()
        self._done.get()

    async def talk(self, sessions: Sequence[AgentSession]) -> None:
        server = SessionServer()
        addresses = [await server.add(session) for session in sessions]
        self._work.put((addresses, self.turns, NUM_TOKENS))
        await asyncio.to_thread(self._done.get)
        for session in sessions:
            server.remove(session)


async def in_process(sessions: Sequence[AgentSession], turns: int) -> None:
    async def one(session: AgentSession, number: int) -> None:
        messages = dialogue(number)
        for _ in range(turns):
            reply = await session.sample(messages, limits=ReplyLimits(NUM_TOKENS))
            reply.commit()
            messages += [dict(reply.action.message), {"role": "user", "content": "Go on."}]

    await asyncio.gather(*(one(session, number) for number, session in enumerate(sessions)))


async def measured(arm: Callable[[], Awaitable[None]]) -> Cost:
    begin, used = time.perf_counter(), time.process_time()
    await arm()
    return Cost(time.perf_counter() - begin, time.process_time() - used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", choices=("small", "0.1b", "none"), default="small")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = str(resources.files("ludus.recipes") / "search" / "cold_start")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    renderer = TemplateRenderer(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if args.engine == "0.1b":
        model = build_tiny(LARGE, tokenizer, 0)
    size = EngineSettings(context_tokens=1024, max_batch=args.sessions, kv_cache_tokens=1040 * args.sessions)
    engine = NoEngine(5) if args.engine == "none" else LocalEngine(model, tokenizer, size)
    params = SamplingParams(max_new_tokens=64)
    limits = RolloutConfig(max_turns=10_000)
    clients = Clients(args.turns)
    round_number = 0

    def sessions() -> list[AgentSession]:
        nonlocal round_number
        round_number += 1
        names = [f"{round_number}/{i}" for i in range(args.sessions)]
        return [
            AgentSession(lambda name=name: EngineChatSession(engine, renderer, params, 1024, name, 1), limits)
            for name in names
        ]

    async def run() -> tuple[list[Cost], list[Cost]]:
        ours: list[Cost] = []
        http: list[Cost] = []
        for _ in range(args.repeats + 1):
            for arm, costs in ((partial(in_process, turns=args.turns), ours), (clients.talk, http)):
                made = sessions()
                costs.append(await measured(partial(arm, made)))
                for session in made:
                    session.close()
        return ours[1:], http[1:]

    ours, http = asyncio.run(run())
    num = args.sessions * args.turns
    extra = median((b.processor_s - a.processor_s) / num for a, b in zip(ours, http, strict=True))
    share = median(b.processor_s / a.processor_s for a, b in zip(ours, http, strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{args.sessions} sessions of {args.turns} requests, engine {args.engine}, medians of {args.repeats}:")
    print(f"processor time of a request over HTTP, more than in this process: {1e3 * extra:.2f} ms")
    print(f"processor time, HTTP / in this process: {share:.3f}")
    print(f"wall clock of a round: {median(c.wall_s for c in ours):.2f} s and {median(c.wall_s for c in http):.2f} s")
    print(f"peak memory: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
