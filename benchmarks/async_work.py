"""The work of the asynchrony benchmark: a small model with random weights that acts in a world of slow tools.

The model speaks through a chat template of one word a token. One token ends a turn, and the model gives it
about the same probability everywhere, so that the length of an action is about geometric.
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
"""What the first channel of every word is, so that all states have a part in common."""


def made(shape: dict[str, Any], sizes: Sizes, folder: Path) -> Path:
    """A model of this shape, always the same one, and its tokenizer, in a folder."""
    from transformers import Qwen3Config

    torch.manual_seed(0)
    tokenizer = words(int(shape["vocab_size"]))
    model = Qwen3ForCausalLM(Qwen3Config(**shape, eos_token_id=tokenizer.eos_token_id))
    end_turns(model, tokenizer.eos_token_id, sizes.new)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def words(vocab: int) -> PreTrainedTokenizerBase:
    """A tokenizer of `vocab` tokens, nearly all of them words `w0`, `w1`, ..."""
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
    """Make one in `every` tokens the end of a turn: its logit is that much above what the others' are."""
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
    """The URL of `ludus serve` for the model, in a process of its own with one thread."""
    serve = [sys.executable, "-m", "ludus", "serve", str(model), "--port", "0", "--control"]
    command = ["env", "OMP_NUM_THREADS=1", *serve]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.readline().strip() if process.stdout else ""
        try:
            yield said.rsplit(" at ", 1)[1]
        finally:
            process.terminate()


def settings(setup: RunLayout, sizes: Sizes, latency: Latency, model: str, folder: Path, **more: object) -> Config:
    """The configuration of a run of this layout in `folder / "run"`; `more` has `__` for dots.

    The model is written into `folder`, unless it is there.
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
        "training.learning_rate": 1e-6,  # hardly any, so that the lengths of actions stay as they are
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
    """As the command line takes it."""
    return str(list(value)) if isinstance(value, tuple) else str(value)


LIKE = {"initializer_range": 0.02, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": rollout_models.TINY | {"vocab_size": 512} | LIKE,
    "small": rollout_models.SMALL | LIKE,
    "medium": rollout_models.SMALL | {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 12} | LIKE,
}
"""About 0.06, 3.9 and 13.6 million parameters. A small range makes all words about equally likely."""
