"""Write the table of model families in the docs: python -m generators.model_families [--check].

Each family is a tiny model with random weights from its configuration in transformers. The table shows what is measured
on it: the engine that runs it, SFT and RL steps, the proof of its weights in the engine after a step, and LoRA.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from generators.algorithm_tables import MARKED, table
from ludus.algorithms.spec.resolve import PRESETS
from ludus.config.sections.model import LoraConfig
from ludus.engines.base import Request, copies
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.embedded.generic_scheduler import GenericForward
from ludus.errors import LudusError, UserError
from ludus.training.batches.rows import Row
from ludus.training.learner.learner import Learner, LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.rl.weight_sync import WeightSync
from ludus.training.run.session import add_lora
from ludus.training.sft import sft_step
from ludus.types import Completion, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAGE = Path(__file__).parents[1] / "docs/use/models.md"
NAME = "families"
WORKERS = 2
TOLERANCE = 1e-3
"""Maximum difference of log-probabilities between engine and learner, in nats."""

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_expand": 2,
}
"""Sizes, for the configurations that have a setting of that name."""
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_LATENT = {"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_YARN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "gemma2": {},
    "gemma3_text": {},
    "mistral": {},
    "ministral": {},
    "mixtral": {},
    "phi": {},
    "phi3": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "olmo_hybrid": {},
    "granite": {},
    "granitemoe": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "smollm3": {},
    "glm4": {},
    "glm4_moe": _GROUPS,
    "deepseek_v2": _LATENT | _GROUPS | {"head_dim": 8, "topk_method": "greedy"},
    "deepseek_v3": _LATENT | _GROUPS,
    "gpt_oss": _YARN,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"intermediate_size_mlp": 48},
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    "falcon_h1": {},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": {"ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2}
    | {"layers_block_type": ["mamba", "attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 64},
    "minimax": {},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 8, "linear_num_heads": 4}
    | _LATENT,
    "rwkv": {},
    "gpt2": {},
    "gpt_neox": {},
    "openai-gpt": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {},
    "starcoder2": {},
    "stablelm": {},
    "cohere": {},
    "cohere2": {},
    "exaone4": {},
    "seed_oss": {},
}
"""Model types of transformers, with settings beyond `SHAPE`."""


ATTENTION = ("q_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa", "in_proj", "key", "value", "receptance")
"""Names of linear layers to which LoRA is limited if all linear layers do not work."""


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """Return a tiny model of a family in eval mode. Its matrices are large enough for distinct log-probabilities."""
    defaults = AutoConfig.for_model(family)
    known = {*defaults.to_dict(), *defaults.attribute_map}
    shape = {name: value for name, value in SHAPE.items() if name in known}
    config = AutoConfig.for_model(family, **(shape | FAMILIES[family]))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model


@dataclass
class Report:
    """One row of the table."""

    family: str
    engine: str = ""
    learner: str = ""
    lora: str = "no"
    passed: dict[str, bool] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def attempt(self, what: str, check: Callable[[], None]) -> None:
        """Run a check; note why it fails."""
        try:
            check()
            self.passed[what] = True
        except Exception as error:  # boundary: a model's code may raise anything
            self.passed[what] = False
            self.missing.append(f"{what}: {describe(error)}")

    @property
    def cells(self) -> list[str]:
        """Return the cells of the row."""
        checks = ["yes" if self.passed.get(name) else "no" for name in CHECKS]
        return [f"`{self.family}`", self.engine, self.learner, *checks, self.lora, "; ".join(self.missing)]


CHECKS = ("exact", "SFT", "RL", "sync")
HEAD = ("model type", "engine", "learner", *CHECKS, "LoRA", "missing")
WAYS = {
    "one cache per episode, batches of equal length": "generic",
    "one cache per episode, extended token by token, batches of equal length": "generic, token by token",
    "one cache per episode, one sequence per pass": "generic, one by one",
    "one cache per episode, extended token by token, one sequence per pass": "generic, one by one, token by token",
    "no cache, the whole history is computed for each token": "generic, no cache",
}
"""Cells for the ways of `GenericForward`."""


def describe(error: Exception) -> str:
    """Return the first sentence of an error."""
    text = error.message if isinstance(error, LudusError) else str(error) or type(error).__name__
    return text.splitlines()[0].partition(". ")[0].rstrip(".").replace("base_model.model.", "")


def examine(family: str) -> Report:
    """Return what works for one family."""
    report, model = Report(family), build(family)
    try:
        engine = make_engine(model)
    except UserError as error:
        report.missing.append(f"engine: {describe(error)}")
        return report
    forward = engine._forward
    report.engine = WAYS[forward.mode.description] if isinstance(forward, GenericForward) else "paged"
    report.learner = "packed" if LogprobScorer(model).shares_prefixes else "padded"
    report.attempt("exact", lambda: check_sampling(engine, model))
    report.attempt("SFT", lambda: check_sft(copy.deepcopy(model)))
    report.attempt("RL", lambda: check_rl(engine, model))
    report.attempt("sync", lambda: check_sync(engine, model))
    asyncio.run(engine.close())
    ways = {"all-linear": "all-linear", "attention": attention_layers(model)}
    for name, targets in ((name, targets) for name, targets in ways.items() if targets):
        report.attempt(f"LoRA on {name}", lambda targets=targets: check_lora(build(family), targets))
        if report.passed[f"LoRA on {name}"]:
            report.lora = name
            break
    return report


def attention_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers in attention and similar mixers."""
    return sorted(
        {
            path.rpartition(".")[2]
            for path, module in model.named_modules()
            if type(module) is torch.nn.Linear and path.rpartition(".")[2] in ATTENTION
        }
    )


def make_engine(model: PreTrainedModel) -> LocalEngine:
    """Return an engine with a copy of the model."""
    return LocalEngine(model, settings=EngineSettings(context_tokens=128, max_batch=8, kv_cache_tokens=4096, threads=1))


def sample(engine: LocalEngine, seed: int = 0) -> list[tuple[tuple[int, ...], Completion]]:
    """Return histories and completions: a group and another prompt, and a second turn of each."""
    prompts = [tuple(7 * i % 250 for i in range(30)), tuple(5 * i % 240 + 3 for i in range(23))]
    params = SamplingParams(max_new_tokens=10, seed=seed)
    requests = [*copies(Request("group", prompts[0], params), 3), Request("other", prompts[1], params)]
    found: list[tuple[tuple[int, ...], Completion]] = []
    for _ in range(2):
        answers = asyncio.run(engine.generate_batch(requests))
        found += [(request.token_ids, answer) for request, answer in zip(requests, answers, strict=True)]
        requests = [
            Request(r.episode, (*r.token_ids, *a.tokens, 9, 8, 7), r.params)
            for r, a in zip(requests, answers, strict=True)
        ]
    for request in requests:
        engine.release(request.episode)
    return found


@torch.no_grad()
def check_sampling(engine: LocalEngine, model: PreTrainedModel) -> None:
    """Compare recorded log-probabilities with those of a plain pass."""
    for history, done in sample(engine):
        logits = model(input_ids=torch.tensor([[*history, *done.tokens]]), use_cache=False).logits[0].float()
        own = logits[len(history) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
        check_gap(float((own - torch.tensor(done.logprobs)).abs().max()))


def check_gap(gap: float) -> None:
    """Raise ValueError for a difference beyond the tolerance."""
    if not gap < TOLERANCE:
        raise ValueError(f"log-probabilities differ by {gap:.2g}")


def rows_of(samples: Sequence[tuple[tuple[int, ...], Completion]]) -> list[Row]:
    """Return training rows with advantages 1 and -1 in turn."""
    rows = []
    for i, (history, done) in enumerate(samples):
        before, count = len(history), len(done.tokens)
        trains = (False,) * before + (True,) * count
        advantages = (0.0,) * before + ((-1.0) ** i,) * count
        rows.append(Row((*history, *done.tokens), trains, trains, (0.0,) * before + done.logprobs, advantages))
    return rows


def check_sft(model: PreTrainedModel) -> None:
    """Fine-tune on one row; the loss must fall."""
    tokens = tuple(11 * i % 250 for i in range(40))
    trains, zeros = (True,) * 40, (0.0,) * 40
    rows = [
        Row(tokens[:length], trains[:length], trains[:length], zeros[:length], zeros[:length]) for length in (40, 25)
    ]
    optimizer = Optimizer(model, OptimizerSettings(learning_rate=1e-2, total_steps=4))
    scorer = LogprobScorer(model)
    losses = [sft_step(scorer, optimizer, rows, 1024)["loss/total"] for _ in range(4)]
    if not losses[-1] < losses[0] - 0.1:
        raise ValueError(f"the loss is {losses[0]:.3g}, and {losses[-1]:.3g} after 3 steps")


def check_rl(engine: LocalEngine, model: PreTrainedModel) -> None:
    """Take an RL step on sampled rows; the learner's log-probabilities must be the engine's, and the weights change."""
    rows = rows_of(sample(engine))
    optimizer = Optimizer(model, OptimizerSettings(learning_rate=1e-3, total_steps=1))
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    metrics = Learner(LogprobScorer(model), optimizer, PRESETS["grpo"], LearnerSettings()).train(rows, seed=0)
    check_gap(metrics["mismatch/logprob_diff_max"])
    after = [p for p in model.parameters() if p.requires_grad]
    if all(torch.equal(old, new) for old, new in zip(before, after, strict=True)):
        raise ValueError("the weights did not change")


def check_sync(engine: LocalEngine, model: PreTrainedModel) -> None:
    """Send the new weights and prove them by digest and probe; sample with them."""
    probe = tuple(3 * i % 250 for i in range(48))
    asyncio.run(WeightSync(model, engine, probe).publish(1))
    check_sampling(engine, model)


def check_lora(model: PreTrainedModel, targets: Any) -> None:  # noqa: ANN401 (a setting)
    """Take an RL step on adapters, send them and prove them."""
    adapted = add_lora(model, LoraConfig(rank=4, target_modules=targets)).eval()
    engine = make_engine(adapted)
    try:
        check_rl(engine, adapted)
        check_sync(engine, adapted)
    finally:
        asyncio.run(engine.close())


def filled(text: str, reports: Sequence[Report]) -> str:
    """Return the page with the table of these reports."""
    made = table(HEAD, [report.cells for report in reports])
    return MARKED.sub(lambda found: f"{found[1]}{made}{found[3]}" if found[2] == NAME else found[0], text)


def rows_of_page(text: str) -> dict[str, str]:
    """Return the rows of the table on a page by family."""
    return {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit with 1 if the page is outdated")
    check = parser.parse_args(arguments).check
    logging.getLogger("transformers").setLevel(logging.ERROR)
    reports = []
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        for report in pool.map(examine, FAMILIES):
            reports.append(report)
            print(" | ".join(report.cells), flush=True)
    text = PAGE.read_text("utf-8")
    made = filled(text, reports)
    if not check:
        PAGE.write_text(made, "utf-8")
    return int(check and made != text)


if __name__ == "__main__":
    sys.exit(main())
