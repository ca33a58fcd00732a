"""Workload of the asynchrony benchmark: a small model with random weights in a world of slow tools.

Each token is one word of the chat template. The end-of-turn token has about the same probability everywhere,
so that action lengths are roughly geometric.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

import rollout_models
from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.simulator.costs import RunLayout
from slow_tools import Latency, Sizes

END = "<end>"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
CONSTANT = 2.0
"""Value of the first embedding channel of every word, so that all hidden states share a component."""


def made(shape: dict[str, Any], sizes: Sizes, folder: Path) -> Path:
    """Write a model of this shape, always with the same weights, and its tokenizer; return the folder."""
    from transformers import Qwen3Config

    torch.manual_seed(0)
    tokenizer = words(int(shape["vocab_size"]))
    model = Qwen3ForCausalLM(Qwen3Config(**shape, eos_token_id=tokenizer.eos_token_id))
    end_turns(model, tokenizer.eos_token_id, sizes.new)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def words(vocab: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer of `vocab` tokens, most of them the words `w0`, `w1`, ..."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = [END, "unknown", "user", "assistant", "tool", "system"]
    table = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(vocab - len(special)))])}
    plain = Tokenizer(WordLevel(table, unk_token="unknown"))
    plain.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=END, chat_template=TEMPLATE)


@torch.no_grad()
def end_turns(model: Qwen3ForCausalLM, end: int, every: int) -> None:
    """Make one in `every` tokens an end of turn by raising its logit above the others."""
    model.model.embed_tokens.weight[:, 0] = CONSTANT
    head = model.lm_head.weight
    head[:, 0] = 0.0
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(len(head), (8, 64), generator=draw)
    states = model.model(tokens).last_hidden_state
    above = (states @ head.T).logsumexp(-1).mean() - math.log(every - 1)
    head[end] = 0.0
    head[end, 0] = above / states[..., 0].mean()


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """Start `ludus serve` for the model in another process with one thread; yield its URL."""
    serve = [sys.executable, "-m", "ludus", "serve", str(model), "--port", "0", "--control"]
    command = ["env", "OMP_NUM_THREADS=1", *serve]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.readline().strip() if process.stdout else ""
        try:
            yield said.rsplit(" at ", 1)[1]
        finally:
            process.terminate()


def settings(setup: RunLayout, sizes: Sizes, latency: Latency, model: str, folder: Path, **more: object) -> Config:
    """Return the configuration of a run of this layout in `folder / "run"`; keys of `more` have `__` for dots.

    The model is written into `folder` if missing.
    """
    shape = SHAPES[model]
    place = folder / "model"
    if not place.exists():
        made(shape, sizes, place)
    words_of = {f"env.settings.{key}": value for key, value in (asdict(latency) | asdict(sizes)).items()}
    words = words_of | {
        "env.settings.vocab": int(shape["vocab_size"]) - 6,
        "env.name": Path(__file__).with_name("slow_tools.py"),
        "env.check": "false",
        "model.path": place,
        "training.mode": setup.mode,
        "training.steps": setup.steps,
        "training.prompts_per_step": setup.groups,
        "training.checkpoint_every": 10**6,
        "training.learning_rate": 1e-6,  # tiny, so that action lengths do not change
        "training.report_kl": "false",
        "algorithm.group_size": setup.members,
        "algorithm.aggregation": "token_mean",
        "staleness.max_staleness": setup.max_staleness,
        "staleness.max_concurrent_rollouts": setup.in_flight,
        "staleness.min_ess": 0,
        "rollout.concurrency": setup.max_in_flight,
        "rollout.max_turns": sizes.turns,
        "rollout.max_tokens_per_turn": sizes.most,
        "rollout.max_seq_len": sizes.longest,
        "rollout.reproducible": "false",
        "rollout.reward_processes": 0,
        "evaluation.splits": "[]",
        "evaluation.every": 10**6,
        "run.threads": 1,
        "run.save_rollouts": "false",
        "run.dir": folder / "run",
    }
    words |= {key.replace("__", "."): value for key, value in more.items()}
    return load_config(None, [w for key, value in words.items() for w in (f"--{key}", written(value))])


def written(value: object) -> str:
    """Return a value as text for the command line."""
    return str(list(value)) if isinstance(value, tuple) else str(value)


LIKE = {"initializer_range": 0.02, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": rollout_models.TINY | {"vocab_size": 512} | LIKE,
    "small": rollout_models.SMALL | LIKE,
    "medium": rollout_models.SMALL | {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 12} | LIKE,
}
"""About 0.06, 3.9 and 13.6 million parameters. Small weights make all words about equally likely."""
