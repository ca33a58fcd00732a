"""One learner step on an episode of 64k tokens and 200 tool calls: seconds, memory, exactness.

    python benchmarks/long_step.py                            # about 8 minutes of processor time
    python benchmarks/long_step.py --calls 25 50
    python benchmarks/long_step.py --page docs/use/context.md

A Qwen3 with random weights plays one episode on the embedded engine: each action is one call of a tool, sampled under
a guide, and each result a page of text. The learner takes one GRPO step (forward, backward, AdamW) on the first 25,
50, 100 and all 200 calls, with and without activation checkpointing, in a new process of one thread each. Seconds are
processor time; gigabytes are the peak of the resident memory above the loaded model and the row.

halves     the gradient of the row against the sum of the gradients of the first and the second half of its action
           tokens, float32: largest difference of a parameter's gradient over its largest element
reference  the same in float64, on the first 12 calls, and against transformers' eager attention with all logits
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from learner import learner, status_mb
from ludus.chat.render import TemplateRenderer
from ludus.config.sections.rollout import RolloutConfig
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.envs.tool_env import ToolEnv
from ludus.rollouts.episode import EngineChatSession, run_unscored
from ludus.tools.base import tool
from ludus.training.batches.rows import Row, apply_mask, row_of_trajectory
from ludus.training.learner.logprobs import LogprobScorer, in_float64
from ludus.types import Guide, Message, SamplingParams, Task, Trajectory
from pages import fill

CONTEXT = 65_536
CALLS = (25, 50, 100, 200)
REFERENCE_CALLS = 12
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
"""0.2 million parameters, with the vocabulary of the recipe `search`."""

Gradient = Mapping[str, Tensor]
"""Gradients by parameter name."""


@tool
def page(number: Annotated[int, Field(ge=1, le=999)]) -> str:
    """Return a page of a long book."""
    return " ".join(str(random.Random(f"{number}/{i}").randrange(1000)) for i in range(100))


class Step(NamedTuple):
    """Cost of a step, the largest gap to the engine's log-probabilities in nats, and the difference of the halves."""

    seconds: float
    gigabytes: float
    gap: float
    halves: float


def model(dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(dtype)


def one_call(renderer: TemplateRenderer) -> Guide:
    """Return the grammar of exactly one call, without text around it."""
    guide = renderer.guide([page], required=True)
    start, rules = guide.text.split("\n", 1)
    return replace(guide, text=start.replace("(text ", "").replace(")+ text", "") + "\n" + rules)


async def play(calls: int) -> Trajectory:
    """Run an episode of so many calls on the embedded engine."""
    tokenizer = AutoTokenizer.from_pretrained(str(resources.files("ludus.recipes") / "search" / "cold_start"))
    renderer = TemplateRenderer(tokenizer)
    settings = EngineSettings(context_tokens=CONTEXT, max_batch=1, kv_cache_tokens=CONTEXT + 64, threads=1)
    engine = LocalEngine(model(), tokenizer, settings)
    params = SamplingParams(max_new_tokens=200, guide=one_call(renderer))
    chat = EngineChatSession(engine, renderer, params, CONTEXT, "long", seed=1)
    task = Task("book", (Message(role="user", content="Read the book."),), None)
    trajectory = await run_unscored(task, 0, ToolEnv((page,), ()), chat, RolloutConfig(max_turns=calls))
    await engine.close()
    if [outcome.status for outcome in trajectory.outcomes] != ["ok"] * calls:
        raise SystemExit(f"The episode ended with {trajectory.stop_reason} after {len(trajectory.outcomes)} calls.")
    return trajectory


def row_of(trajectory: Trajectory, calls: int) -> Row:
    """Return the row of the first calls: the prompt, `calls` actions, and the observations between them."""
    return row_of_trajectory(replace(trajectory, segments=trajectory.segments[: 2 * calls]), 1.0)


def gradients(policy: Qwen3ForCausalLM) -> Gradient:
    """Return copies of the gradients."""
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def step(row: Row, recompute: bool) -> Step:
    """Measure one optimizer step on the row, and without `recompute` also the halves. Call it in a new process."""
    torch.set_num_threads(1)
    policy = model()
    one = learner(policy)
    one.scorer = LogprobScorer(policy, recompute=recompute)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, begin = status_mb("VmRSS"), time.process_time()
    statistics, _ = one.gradient([row])
    whole = gradients(policy)
    one.optimizer.step()
    seconds, gigabytes = time.process_time() - begin, (status_mb("VmHWM") - before) / 1024
    parts = math.nan if recompute else difference(halves(row), whole)
    return Step(seconds, gigabytes, statistics.mismatch.gap_max, parts)


def halves(row: Row, dtype: torch.dtype = torch.float32) -> Gradient:
    """Return the gradient of the row as the sum over the two halves of its action tokens."""
    policy, num = model(dtype), sum(row.trains)
    one, total = learner(policy), dict[str, Tensor]()
    for first, last in ((0, num // 2), (num // 2, num)):
        one.gradient([apply_mask(row, [first <= i < last for i in range(num)])])
        for name, part in gradients(policy).items():
            total[name] = total.get(name, 0) + part * ((last - first) / num)
        policy.zero_grad()
    return total


def unchunked(row: Row) -> Gradient:
    """Return the float64 gradient by eager attention with all logits."""
    plain = model(torch.float64)
    plain.set_attn_implementation("eager")
    tokens, trains = torch.tensor([row.tokens]), torch.tensor(row.trains[1:])
    with in_float64(plain):
        table = plain(input_ids=tokens).logits[0, :-1].log_softmax(-1)
    torch.autograd.backward(-table.gather(1, tokens[0, 1:, None])[trains].mean())  # all ratios are 1
    return gradients(plain)


def reference(row: Row) -> tuple[float, float]:
    """Return the differences of the halves and of the unchunked computation, in float64."""
    torch.set_num_threads(1)
    policy = model(torch.float64)
    learner(policy).gradient([row])
    whole = gradients(policy)
    return difference(halves(row, torch.float64), whole), difference(unchunked(row), whole)


def difference(found: Gradient, expected: Gradient) -> float:
    """Return the largest difference of a parameter's gradient over the largest element of that gradient."""
    gaps = ((found[name] - whole).abs().max() / whole.abs().max() for name, whole in expected.items())
    return max(map(float, gaps))


def report(trajectory: Trajectory, calls: Sequence[int]) -> str:
    """Measure the step at each number of calls; return the table."""
    kinds = ("seconds", "GB", "seconds, checkpointing", "GB, checkpointing", "halves", "engine's log-probabilities")
    lines = [f"| calls | tokens | trained | {' | '.join(kinds)} |", "|" + "---:|" * (3 + len(kinds))]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        for num in calls:
            row = row_of(trajectory, num)
            plain, small = (pool.submit(step, row, recompute).result() for recompute in (False, True))
            costs = " | ".join(f"{one.seconds:.1f} | {one.gigabytes:.2f}" for one in (plain, small))
            sizes = f"{num} | {len(row.tokens):,} | {sum(row.trains):,}"
            lines.append(f"| {sizes} | {costs} | {plain.halves:.0e} | {plain.gap:.0e} |")
            print(lines[-1], flush=True)
        row = row_of(trajectory, min(REFERENCE_CALLS, max(calls)))
        parts, plain_way = pool.submit(reference, row).result()
    return "\n".join(lines) + (
        f"\n\nIn float64, on the first {len(row.tokens):,} tokens: halves {parts:.0e}; eager attention with all logits "
        f"{plain_way:.0e}."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the episode and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, nargs="+", default=CALLS)
    parser.add_argument("--page", type=Path, help="insert the table into this page")
    args = parser.parse_args(arguments)
    begin = time.process_time()
    trajectory = asyncio.run(play(max(args.calls)))
    print(f"The episode took {time.process_time() - begin:.0f} s of processor time.", flush=True)
    text = report(trajectory, args.calls)
    print(text)
    if args.page:
        fill(args.page, "long step", text)


if __name__ == "__main__":
    main()
