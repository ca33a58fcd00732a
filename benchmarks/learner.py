"""Measure time and memory of a learner step. Ratios are taken within one run.

    python benchmarks/learner.py                    # all three parts, 5 repetitions
    python benchmarks/learner.py --only speed,shapes --repeats 3
    python benchmarks/learner.py --page docs/understand/performance.md

speed   64 ragged sequences of 100 to 2,000 tokens without shared prefixes: the gradient of the batch against bare
        passes over the same tokens (each sequence alone, forward and backward, a plain log-likelihood); and a
        step with two updates, old log-probabilities and a reference in the loss, against those passes plus a
        bare forward pass for old and one for the reference
shapes  speedup from computing shared prefixes once: a long prompt with short answers, a multi-turn chain sent
        again at each turn, a branching tree; against the same rows without sharing, and padded
trees   episodes with the branches of `rollout.branch`: each tree as one row, in which a shared action is
        trained once, against its paths trained separately
memory  peak above the model at a vocabulary of 150,000: chunks of the output layer against all logits
Every part runs with one thread, each measurement of memory in a new process.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from ludus.algorithms.spec.resolve import PRESETS
from ludus.config.sections.rollout import BranchConfig
from ludus.rollouts.trees import run_tree
from ludus.training.batches import prefix_packing
from ludus.training.batches import rows as row_module
from ludus.training.batches.rows import BREAK, Row, row_of_trajectory
from ludus.training.learner.learner import Learner, LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.types import Segment, StopReason, Trajectory
from pages import fill

VOCAB = 4096
WIDE_VOCAB = 150_000


def model(vocabulary: int = VOCAB) -> Qwen3ForCausalLM:
    """Return a model of 3.1 million parameters (at the small vocabulary)."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(shape)


def learner(policy: Qwen3ForCausalLM, microbatch_tokens: int = 8192) -> Learner:
    """Return a GRPO learner with one optimizer step per batch."""
    optimizer = Optimizer(policy, OptimizerSettings(learning_rate=1e-4, total_steps=1))
    settings = LearnerSettings(microbatch_tokens=microbatch_tokens)
    return Learner(LogprobScorer(policy), optimizer, PRESETS["grpo"], settings)


def learner_with_reference(policy: Qwen3ForCausalLM) -> Learner:
    """Return a GRPO learner with a KL to a copy and two optimizer steps per batch, which need old log-probabilities."""
    optimizer = Optimizer(policy, OptimizerSettings(learning_rate=1e-6, total_steps=1))
    settings = LearnerSettings(microbatch_tokens=8192, minibatches=2)
    reference = LogprobScorer(copy.deepcopy(policy).requires_grad_(False).eval())
    scorers = {"reference": reference}
    return Learner(LogprobScorer(policy), optimizer, PRESETS["grpo_paper"], settings, scorers)


def row(tokens: Sequence[int], prompt: int, sign: float) -> Row:
    """Return a row in which all tokens after the prompt are trained."""
    trains = tuple(i >= prompt for i in range(len(tokens)))
    numbers = tuple(map(float, trains))
    return Row(tuple(tokens), trains, trains, tuple(-2.0 * n for n in numbers), tuple(sign * n for n in numbers))


def draw(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(num)]


def ragged(num: int = 64) -> list[Row]:
    """Return rows of log-uniform lengths of 100 to 2,000 tokens, one third of each a prompt."""
    rng = random.Random(0)
    lengths = [round(100 * 20 ** rng.random()) for _ in range(num)]
    return [row(draw(rng, n), n // 3, (-1.0) ** i) for i, n in enumerate(lengths)]


def long_prompt() -> list[Row]:
    """Return 4 groups of 8 rows: a prompt of 800 tokens, answers of 20 to 60."""
    rng = random.Random(1)
    groups = [draw(rng, 800) for _ in range(4)]
    return [row([*g, *draw(rng, rng.randint(20, 60))], 800, (-1.0) ** i) for g in groups for i in range(8)]


def resent_chain() -> list[Row]:
    """Return 8 episodes of 6 turns, one row per turn with the whole context."""
    rng = random.Random(2)
    rows = []
    for i in range(8):
        history = draw(rng, 150)
        for _ in range(6):
            start = len(history)
            history = [*history, *draw(rng, 40)]
            rows.append(row(history, start, (-1.0) ** i))
            history = [*history, *draw(rng, 60)]
    return rows


def tree() -> list[Row]:
    """Return the rows of 4 trees of 16 leaves: branches of 80 tokens split in two, four times."""
    rng = random.Random(3)

    def grow(stem: list[int], depth: int) -> list[list[int]]:
        here = [*stem, *draw(rng, 80)]
        return [here] if depth == 0 else [leaf for _ in range(2) for leaf in grow(here, depth - 1)]

    leaves = [leaf for _ in range(4) for leaf in grow([], 4)]
    return [row(leaf, 80, (-1.0) ** i) for i, leaf in enumerate(leaves)]


SHAPES: dict[str, Callable[[], list[Row]]] = {
    "a long prompt, short answers": long_prompt,
    "a chain sent again at each turn": resent_chain,
    "a branching tree": tree,
    "nothing shared": lambda: ragged(32),
}


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def bare(policy: Qwen3ForCausalLM, rows: Sequence[Row]) -> None:
    """Run forward and backward on each sequence alone, with the output layer only at trained positions."""
    for one in rows:
        first = one.trains.index(True)
        tokens = torch.tensor([one.tokens])
        logits = policy(input_ids=tokens[:, :-1], logits_to_keep=len(one.tokens) - first).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, tokens[0, first:])
        loss.backward()
    policy.zero_grad()


@torch.no_grad()
def bare_forward(policy: Qwen3ForCausalLM, rows: Sequence[Row]) -> None:
    """Run a forward pass on each sequence alone, without gradient."""
    for one in rows:
        first = one.trains.index(True)
        tokens = torch.tensor([one.tokens])
        logits = policy(input_ids=tokens[:, :-1], logits_to_keep=len(one.tokens) - first).logits[0]
        torch.nn.functional.cross_entropy(logits, tokens[0, first:])


def bare_step(policy: Qwen3ForCausalLM, rows: Sequence[Row]) -> None:
    """Run the passes that a step with old log-probabilities and a reference needs."""
    bare_forward(policy, rows)
    bare_forward(policy, rows)
    bare(policy, rows)


def gradient(one: Learner, rows: Sequence[Row]) -> None:
    one.gradient(rows)
    one.scorer.model.zero_grad()


def compare(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the processor seconds of each function per repetition, after one warm-up; the order rotates."""
    names = list(ways)
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in range(repeats + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            taken = seconds(ways[name])
            if i:
                found[name].append(taken)
    return found


def ratios(over: Sequence[float], under: Sequence[float]) -> str:
    each = [a / b for a, b in zip(over, under, strict=True)]
    return f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


def speed(repeats: int) -> list[str]:
    """Compare the learner's gradient, and its step with old log-probabilities and reference, with bare passes."""
    rows = ragged()
    one, whole, plain = learner(model()), learner_with_reference(model()), model()
    plain.train()
    ways = {
        "learner": lambda: gradient(one, rows),
        "bare": lambda: bare(plain, rows),
        "step": lambda: whole.train(rows, seed=0),
        "bare step": lambda: bare_step(plain, rows),
    }
    found = compare(ways, repeats)
    tokens = sum(len(r.tokens) for r in rows)
    under = {"bare": "bare", "learner": "bare", "bare step": "bare step", "step": "bare step"}
    said = {
        "bare": "bare forward and backward passes",
        "learner": "the learner's gradient",
        "bare step": "those bare passes, and two forward ones",
        "step": "a step of two updates with `old` and a reference",
    }
    lines = [
        f"64 sequences, {tokens:,} tokens, nothing shared; median of {repeats}, processor seconds.",
        "",
        "| way | tokens/s | seconds | times the bare passes (least to most) |",
        "|---|---:|---:|---:|",
    ]
    for way, words in said.items():
        taken = median(found[way])
        over = "1.00" if way == under[way] else ratios(found[way], found[under[way]])
        lines.append(f"| {words} | {tokens / taken:,.0f} | {taken:.2f} | {over} |")
    return lines


def shapes(repeats: int) -> list[str]:
    """Compare shared prefixes, packed rows without sharing, and padded rows."""
    columns = ("rows", "tokens", "computed once", "sharing, s", "packed without sharing, s", "padded, s")
    lines = [
        f"| {' | '.join((*columns, 'packed / sharing', 'padded / sharing'))} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, make in SHAPES.items():
        rows = make()
        total = sum(len(r.tokens) for r in rows)
        unique = prefix_packing.pack_sequences([r.tokens for r in rows], torch.device("cpu")).num_tokens
        sharing, padded = learner(model()), learner(model())
        padded.scorer.shares_prefixes = False
        ways = {
            "sharing": lambda one=sharing, rows=rows: gradient(one, rows),
            "packed": lambda one=sharing, rows=rows: without_sharing(one, rows),
            "padded": lambda one=padded, rows=rows: gradient(one, rows),
        }
        found = compare(ways, repeats)
        times = " | ".join(f"{median(found[way]):.2f}" for way in ways)
        lines.append(
            f"| {name} | {total:,} | {unique:,} | {times} | {ratios(found['packed'], found['sharing'])} | "
            f"{ratios(found['padded'], found['sharing'])} |"
        )
    return lines


def episode(rng: random.Random, told: tuple[Segment, ...], turns: int = 6) -> Trajectory:
    """Return an episode with a prompt of 300 tokens, turns of 40 and observations of 80; it continues `told`."""
    segments = list(told) or [Segment("prompt", tuple(draw(rng, 300)))]
    for turn in range(sum(s.kind == "action" for s in segments), turns):
        tokens = tuple(draw(rng, 40))
        segments.append(Segment("action", tokens, turn, None, "policy", (-2.0,) * 40, (0,) * 40))
        if turn < turns - 1:
            segments.append(Segment("observation", tuple(draw(rng, 80)), turn))
    return Trajectory("t", 0, tuple(segments), (), StopReason.ANSWERED, reward=rng.random())


async def branched(settings: BranchConfig, seed: int) -> Trajectory:
    rng = random.Random(seed)

    async def play(told: tuple[Segment, ...], number: int) -> Trajectory:
        return episode(rng, told)

    return await run_tree(settings, play)


TREES = {
    "8 leaves, forked at the last turn": BranchConfig(branches=7, turns=[5], max_leaves=8),
    "16 leaves, forked at the last turn": BranchConfig(branches=15, turns=[5], max_leaves=16),
    "32 leaves, forked at the last turn": BranchConfig(branches=31, turns=[5], max_leaves=32),
    "16 leaves, forked at the last two turns": BranchConfig(branches=3, turns=[4, 5], max_leaves=16),
    "16 leaves, forked at every turn": BranchConfig(branches=1, turns=list(range(6)), max_leaves=16),
}


def work(rows: Sequence[Row]) -> tuple[int, int, int]:
    """Return the numbers of tokens to compute, of pairs (token, attended token), and of trained tokens.

    Only paths of the same row share prefixes.
    """
    tokens = pairs = 0
    for one in rows:
        forest = forest_of(one)
        lengths = [node.end - node.start for node in forest.nodes]
        tokens += sum(lengths)
        for node, length in zip(forest.nodes, lengths, strict=True):
            pairs += length * sum(lengths[n] for n in node.above) + length * (length + 1) // 2
    return tokens, pairs, sum(sum(one.trains) for one in rows)


def forest_of(one: Row) -> prefix_packing.PrefixForest:
    """Return the packed prefixes that the learner computes for one row."""
    path_tokens: list[list[int]] = [[]]
    for token in one.tokens:
        if token == BREAK:
            path_tokens.append([])
        else:
            path_tokens[-1].append(token)
    return prefix_packing.pack_sequences(path_tokens, torch.device("cpu"))


def trees(repeats: int) -> list[str]:
    """Compare time and work of the gradient of a tree with those of its separate paths.

    Microbatches have 4,096 tokens, the default: with 8,192, a tenth of the time of the separate paths is spent
    on page faults of large tables, which would favour the trees.
    """
    fewer_of = ("fewer tokens", "fewer attended pairs", "fewer trained tokens")
    columns = ("tree", "tokens of the paths", "computed once", *fewer_of)
    lines = [
        f"| {' | '.join((*columns, 'as a tree, s', 'paths apart, s', 'apart / tree'))} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, settings in TREES.items():
        tree = asyncio.run(branched(settings, 0))
        whole = [row_of_trajectory(tree, 1.0)]
        apart = [row_of_trajectory(path.trajectory, 1.0) for path in tree.paths()]
        one = learner(model(), 4096)
        ways = {
            "trees": lambda one=one, rows=whole: gradient(one, rows),
            "apart": lambda one=one, rows=apart: without_sharing(one, rows),
        }
        found = compare(ways, repeats)
        over, under = work(apart), work(whole)
        fewer = " | ".join(f"{a / b:.1f}" for a, b in zip(over, under, strict=True))
        times = " | ".join(f"{median(found[way]):.2f}" for way in ways)
        lines.append(
            f"| {name} | {over[0]:,} | {under[0]:,} | {fewer} | {times} | {ratios(found['apart'], found['trees'])} |"
        )
    return lines


def without_sharing(one: Learner, rows: Sequence[Row]) -> None:
    """Compute the gradient with a minimum length of shared prefixes that no prefix reaches."""
    before = prefix_packing.MIN_SHARED_TOKENS
    prefix_packing.MIN_SHARED_TOKENS = row_module.MIN_SHARED_TOKENS = sys.maxsize
    try:
        gradient(one, rows)
    finally:
        prefix_packing.MIN_SHARED_TOKENS = row_module.MIN_SHARED_TOKENS = before


def status_mb(name: str) -> float:
    """Return VmRSS (current) or VmHWM (peak since the last reset) of this process."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) / 1024


WAYS = ("chunks", "whole", "kl-chunks", "kl-whole")


def memory_of(way: str) -> None:
    """Print the peak memory of one gradient above the loaded models, in MB. Call it in a new process.

    With `kl` a second model is loaded, and the full KL to it is part of the loss.
    """
    torch.set_num_threads(1)
    policy = model(WIDE_VOCAB)
    with_kl = way.startswith("kl")
    reference = copy.deepcopy(policy).requires_grad_(False).eval() if with_kl else None
    rng = random.Random(0)
    rows = [row(draw(rng, 512), 64, (-1.0) ** i) for i in range(4)]
    one = learner(policy)
    if reference is not None:
        one.algorithm = replace(one.algorithm, kl="full_reverse", kl_coef=0.1, kl_placement="loss")
        one.scorers = {"reference": LogprobScorer(reference)}
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status_mb("VmRSS")
    if way.endswith("chunks"):
        one.gradient(rows)
    else:
        all_logits(policy, reference, torch.tensor([r.tokens for r in rows]))
    print(status_mb("VmHWM") - before)


def all_logits(policy: Qwen3ForCausalLM, reference: Qwen3ForCausalLM | None, tokens: Tensor) -> None:
    """Compute the same gradient from all logits `[B, L, V]`."""
    table = policy(input_ids=tokens).logits.float().log_softmax(-1)
    loss = -table[:, :-1].gather(2, tokens[:, 1:, None]).mean()
    if reference is None:
        spread = -(table.exp() * table).sum(-1).detach()
        loss = loss + 0 * spread.mean()
    else:
        with torch.no_grad():
            theirs = reference(input_ids=tokens).logits.float().log_softmax(-1)
        loss = loss + 0.1 * (table.exp() * (table - theirs)).sum(-1).mean()
    torch.autograd.backward(loss)


def memory(repeats: int) -> list[str]:
    """Measure the peak memory of each method in a new process."""
    del repeats
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--memory-of", way]
        found[way] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    plain, full = found["chunks"] / found["whole"], found["kl-chunks"] / found["kl-whole"]
    return [
        f"4 sequences of 512 tokens, a vocabulary of {WIDE_VOCAB:,}, float32; above models and gradients.",
        "",
        "| way | peak MB | share |",
        "|---|---:|---:|",
        f"| all logits, their log-softmax, entropies | {found['whole']:,.0f} | 1.00 |",
        f"| the learner | {found['chunks']:,.0f} | {plain:.2f} |",
        f"| all logits of policy and reference, the KL between them | {found['kl-whole']:,.0f} | 1.00 |",
        f"| the learner, `algorithm.kl = full_reverse` | {found['kl-chunks']:,.0f} | {full:.2f} |",
    ]


PARTS = {"speed": speed, "shapes": shapes, "trees": trees, "memory": memory}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--page", type=Path, help="insert the tables into this page")
    parser.add_argument("--memory-of", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.memory_of:
        memory_of(args.memory_of)
        return
    torch.set_num_threads(1)
    for name in args.only.split(","):
        text = "\n".join(PARTS[name](args.repeats))
        print(f"{name}\n{text}\n", flush=True)
        if args.page:
            fill(args.page, f"learner {name}", text)


if __name__ == "__main__":
    main()
