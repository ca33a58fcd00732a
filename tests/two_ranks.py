"""One of two processes in the test of split batches: `python two_ranks.py RANK STORE RESULT`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed

from ludus.algorithms.spec.resolve import PRESETS
from ludus.training.learner.learner import CachedLogprobs, LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer
from tests.training.batches.test_forest import in_double
from tests.training.learner.test_learner import WITH_ALL_TERMS, gradients, learner, random_rows, tiny_model
from tests.training.learner.test_routing import mixture, replaying, rows_with_prefixes

CASES = {
    "tokens": WITH_ALL_TERMS,
    "sequences": replace(WITH_ALL_TERMS, aggregation="seq_mean_token_mean"),
    "sums": replace(WITH_ALL_TERMS, aggregation="seq_mean_token_sum", entropy_coef=0.01),
    "constant": replace(WITH_ALL_TERMS, aggregation="constant"),
    "gspo": PRESETS["gspo"],
}
SHARES = {"uneven": slice(0, 7), "all": slice(0, 9)}
"""Rows of rank 0, out of nine; rank 1 has the others (in the second case none)."""


def results(part: slice) -> dict[str, object]:
    """Return gradients and statistics of each case, and the weights after two steps, for these rows."""
    every = random_rows()
    proximal = [torch.full((len(row.tokens),), -2.0, dtype=torch.float64) for row in every]
    rows, known = every[part], CachedLogprobs(proximal[part])
    found: dict[str, object] = {}
    model = tiny_model()
    reference = {"reference": LogprobScorer(tiny_model(seed=1))}
    for name, algorithm in CASES.items():
        one = learner(model, algorithm, LearnerSettings(microbatch_tokens=60), reference)
        statistics, tokens = one.gradient(rows, known)
        found[name] = (gradients(model), statistics.loss, statistics.kl_sum, tokens)
    one = learner(model, settings=LearnerSettings(epochs=2))
    found["metrics"] = one.train(rows, seed=0)
    found["weights"] = {name: p.detach() for name, p in model.named_parameters()}
    found["nothing"] = one.train([], seed=0)
    return found


def results_of_experts(part: slice) -> dict[str, object]:
    """Return the gradient of a mixture of experts for these rows, and its weights after two updates of a step.

    `replayed` are the weights if the second update uses the experts that the first pass recorded.
    """
    every = rows_with_prefixes()
    proximal = [torch.full((len(row.tokens),), -2.0, dtype=torch.float64) for row in every]
    model = in_double(mixture())
    reference = {"reference": LogprobScorer(in_double(mixture(seed=1)))}
    one = learner(model, WITH_ALL_TERMS, LearnerSettings(microbatch_tokens=60), reference)
    statistics, tokens = one.gradient(every[part], CachedLogprobs(proximal[part]))
    found: dict[str, object] = {"gradient": gradients(model), "numbers": (statistics.loss, tokens)}
    for name, step in (("weights", learner), ("replayed", replaying)):
        model = in_double(mixture())
        step(model, settings=LearnerSettings(epochs=2)).train(every[part], seed=0)
        found[name] = {name: p.detach() for name, p in model.named_parameters()}
    return found


if __name__ == "__main__":
    rank, store, result = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    parts = {name: share if rank == 0 else slice(share.stop, 9) for name, share in SHARES.items()}
    of_each = {name: results(part) | {"experts": results_of_experts(part)} for name, part in parts.items()}
    torch.save(of_each, result)
    distributed.destroy_process_group()
