"""Functions that each process runs in the tests of sharded weights; see `rank_processes.work`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed

from ludus.algorithms.spec.resolve import PRESETS
from ludus.engines.models.loading import load_tokenizer
from ludus.errors import LearnerError
from ludus.rollouts.ledger import Ledger
from ludus.training.distributed.collectives import Collectives, SharedBatch, full_tensor, is_sharded
from ludus.training.learner.learner import CachedLogprobs, Learner, LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.rl import memory_check as dry_run_module
from ludus.training.rl.memory_check import dry_run
from ludus.training.run.checkpoint import (
    SHARDS,
    Extra,
    TrainerState,
    load_part,
    load_trainer,
    load_weights,
    save_checkpoint,
    save_shards,
)
from ludus.training.value_models.base import ValueModelSettings
from ludus.training.value_models.critic import Critic
from rank_processes import work
from served import COLD_START
from tests.training.batches.test_forest import in_double
from tests.training.learner.test_learner import WITH_ALL_TERMS, random_rows, tiny_model
from tests.training.learner.test_routing import mixture

CASES = {
    "tokens": WITH_ALL_TERMS,
    "sums": replace(WITH_ALL_TERMS, aggregation="seq_mean_token_sum", entropy_coef=0.01),
    "gspo": PRESETS["gspo"],
}
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def policy(kind, dtype):
    """Return a tiny model: plain, mixture of experts, with adapters, untied, or padded (without prefix packing)."""
    if kind == "experts":
        return in_double(mixture(dtype))
    model = tiny_model(dtype)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, config)
    elif kind == "untied":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.5)
        model.config.tie_word_embeddings = False
    elif kind == "padded":
        model.set_attn_implementation("eager")
    return model


def ranks_here():
    """Return the collectives of all processes with sharded weights, or of one process if there is no group."""
    if not distributed.is_initialized():
        return Collectives()
    return SharedBatch(torch.device("cpu"))


def make(kind, dtype, algorithm, settings, ranks):
    """Return a learner, with sharded weights if there are several processes."""
    model, reference = policy(kind, dtype), tiny_model(dtype, seed=1).requires_grad_(False)
    ranks.shard_model(model)
    ranks.shard_model(reference)
    how = OptimizerSettings(learning_rate=1e-2, total_steps=10, max_grad_norm=0.05)
    scorer = LogprobScorer(model, recompute=kind == "recomputed")
    optimizer = Optimizer(model, how, ranks=ranks)
    return Learner(scorer, optimizer, algorithm, settings, {"reference": LogprobScorer(reference)}, ranks)


def policy_results(kind, dtype):
    """Return results by name: gradients and losses of each case, metrics and weights after two clipped steps."""
    ranks, rows, found = ranks_here(), random_rows(), {}
    known = CachedLogprobs([torch.full((len(row.tokens),), -2.0, dtype=dtype) for row in rows])
    for case, algorithm in CASES.items():
        one = make(kind, dtype, algorithm, LearnerSettings(microbatch_tokens=60), ranks)
        statistics, tokens = one.gradient(rows, known)
        named = {n: p for n, p in one.scorer.model.named_parameters() if p.requires_grad}
        found |= {f"{case}/gradient/{n}": full_tensor(p.grad).clone() for n, p in named.items()}
        found[f"{case}/loss"] = torch.tensor([statistics.loss, (statistics.kl_sum or 0.0) / tokens, tokens])
    one = make(kind, dtype, WITH_ALL_TERMS, LearnerSettings(60), ranks)
    found |= {f"first/{n}": torch.tensor(value) for n, value in one.train(rows, seed=3).items()}
    one = make(kind, dtype, WITH_ALL_TERMS, LearnerSettings(60, epochs=2, minibatches=2), ranks)
    found |= {f"metrics/{n}": torch.tensor(value) for n, value in one.train(rows, seed=3).items()}
    found |= {f"weights/{n}": full_tensor(p).clone() for n, p in one.scorer.model.named_parameters()}
    return found | {f"score/{i}": scores for i, scores in enumerate(one.score(rows))}


def critic_results(dtype):
    """Return the values of a critic before and after two steps, its metrics, weights and the gradient of one step.

    Each step uses half of the rows: over all of them the gradient of the bias, which starts at the mean of the
    targets, is only rounding error.
    """
    ranks, rows, found = ranks_here(), random_rows(), {}
    targets = [torch.linspace(0, 1, len(row.tokens), dtype=dtype) for row in rows]
    unclipped = OptimizerSettings(learning_rate=1e-2, total_steps=10, max_grad_norm=1e9)
    critic = Critic(tiny_model(dtype), unclipped, ValueModelSettings(microbatch_tokens=60), ranks)
    old = critic.score(rows)
    found |= {f"first/{n}": torch.tensor(v) for n, v in critic.train(rows, (targets, old)).items()}
    found |= {f"old/{i}": values for i, values in enumerate(old)}
    found |= {f"gradient/{n}": g for n, g in first_gradient(critic.optimizer).items()}
    how = unclipped.model_copy(update={"max_grad_norm": 0.05})
    critic = Critic(tiny_model(dtype), how, ValueModelSettings(minibatches=2, microbatch_tokens=60), ranks)
    found |= {f"metrics/{n}": torch.tensor(v) for n, v in critic.train(rows, (targets, old)).items()}
    found |= {f"weights/{n}": full_tensor(p).clone() for n, p in critic.model.named_parameters()}
    return found | {f"value/{i}": values for i, values in enumerate(critic.score(rows))}


def first_gradient(optimizer):
    """Return the gradient of the first step, which was not clipped, from its first moment."""
    share = 1.0 - optimizer.settings.beta1
    moments = {n: m for n, m in optimizer.state_dict().items() if n.startswith("exp_avg/")}
    return {n.removeprefix("exp_avg/"): full_tensor(m) / share for n, m in moments.items()}


def results(*cases):
    """Return the results of cases such as `lora:float64`, with names `CASE/NAME`."""
    found = {}
    for case in cases:
        kind, _, name = case.partition(":")
        dtype = DTYPES[name]
        own = critic_results(dtype) if kind == "critic" else policy_results(kind, dtype)
        found |= {f"{case}/{name}": value for name, value in own.items()}
    return found


def dry_runs(split):
    """Return the estimate of a dry run of 3 rows of 30 tokens, its error if memory suffices for only one and a half
    such processes, and whether weights and gradients are unchanged."""
    ranks = ranks_here() if split == "split" else SharedBatch()
    one = make("plain", torch.float32, WITH_ALL_TERMS, LearnerSettings(microbatch_tokens=100), ranks)
    before = {n: full_tensor(p).clone() for n, p in one.scorer.model.named_parameters()}
    estimate, said = dry_run(one, 30), ""
    dry_run_module._available = lambda device: estimate.total * 3 // 2
    try:
        dry_run(one, 30)
    except LearnerError as error:
        said = str(error)
    unchanged = all(torch.equal(before[n], full_tensor(p)) for n, p in one.scorer.model.named_parameters())
    clean = unchanged and not any(p.grad is not None for p in one.scorer.model.parameters())
    return estimate, said, clean


def parts_of_run(kind, ranks, resumed=None):
    """Return a learner and a critic in float64, loaded from the checkpoint `resumed` if set."""
    model, reference = policy(kind, torch.float64), tiny_model(seed=1).requires_grad_(False)
    how = OptimizerSettings(learning_rate=1e-2, total_steps=10, max_grad_norm=0.05)
    critic = Critic(tiny_model(seed=2), how, ValueModelSettings(microbatch_tokens=60), ranks)
    if resumed is not None:
        load_weights(resumed, model)
    ranks.shard_model(model)
    ranks.shard_model(reference)
    optimizer = Optimizer(model, how, ranks=ranks)
    if resumed is not None:
        state = load_trainer(resumed, optimizer)
        critic.load_state(load_part(resumed, "critic", critic.state(blank=True)), state.value_model_steps)
    scorers = {"reference": LogprobScorer(reference)}
    settings = LearnerSettings(microbatch_tokens=60)
    return Learner(LogprobScorer(model), optimizer, WITH_ALL_TERMS, settings, scorers, ranks), critic


def take_step(one, critic, seed):
    """Train critic and learner for one step; return the metrics."""
    rows = random_rows(seed=seed)
    targets = [torch.linspace(0, 1, len(row.tokens), dtype=torch.float64) for row in rows]
    return critic.train(rows, (targets, critic.score(rows))) | one.train(rows, seed)


def everything(one, critic):
    """Return the full weights and moments of both."""
    model = one.scorer.model
    found = {f"policy/{n}": p for n, p in model.named_parameters()}
    found |= {f"optimizer/{n}": t for n, t in one.optimizer.state_dict().items()}
    found |= {f"critic/{n}": t for n, t in critic.state().items()}
    return {n: full_tensor(t).clone() for n, t in found.items()}


def saves(kind, shelf):
    """Train two steps, save a checkpoint, train another; return the states before and after it, and its metrics."""
    ranks, shelf = ranks_here(), Path(shelf)
    one, critic = parts_of_run(kind, ranks)
    for seed in (1, 2):
        take_step(one, critic, seed)
    model, parts = one.scorer.model, {"critic": critic.state()}
    if ranks.rank == 0:
        state = TrainerState(2, one.optimizer.num_steps, Ledger().state(), critic.optimizer.num_steps)
        save_checkpoint(shelf, model, load_tokenizer(str(COLD_START)), one.optimizer, state, Extra(parts))
    elif is_sharded(model):
        save_shards(shelf / ".step-000002.tmp" / "trainer" / SHARDS, model, one.optimizer, parts)
    before = everything(one, critic)
    return before, take_step(one, critic, 3), everything(one, critic)


def resumes(kind, checkpoint):
    """Load a checkpoint and train a step; return the states before and after it, and its metrics."""
    one, critic = parts_of_run(kind, ranks_here(), Path(checkpoint))
    before = everything(one, critic)
    return before, take_step(one, critic, 3), everything(one, critic)


def short_of_memory():
    """Return the errors and the seconds of each process if one of them runs out of memory."""
    ranks = SharedBatch()
    one = make("plain", torch.float32, WITH_ALL_TERMS, LearnerSettings(microbatch_tokens=100), ranks)
    if ranks.rank == 1:

        def score(*_):
            raise torch.OutOfMemoryError("out of memory")

        one.scorer.score = score
    said, begin = [], time.monotonic()
    for ask in (one.gradient, one.score):
        try:
            ask(random_rows())
        except LearnerError as error:
            said.append(str(error))
    return said, time.monotonic() - begin


if __name__ == "__main__":
    work(
        {
            "results": results,
            "saves": saves,
            "resumes": resumes,
            "dry_runs": dry_runs,
            "short_of_memory": short_of_memory,
        }
    )
