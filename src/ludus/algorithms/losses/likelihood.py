"""Losses without a ratio to an old policy: likelihoods, the value loss, distillation.

`reinforce`, `sft`, `value_loss` and `distill` return one term per token; `echo` and `positive_nll` are means over other
tokens, with a separate normaliser, and return [].

In `sdpo` and `sdft` the teacher is the same model, whose prompt also shows a success or feedback: `teacher_kl` [N, L]
is the divergence from it (`algorithms.kl.jensen_shannon`), 0 on trajectories for which it has nothing to show.
"""

from __future__ import annotations

from typing import Unpack

from ludus.algorithms.algorithm import FRACTION, POSITIVE, LossSpec, Need, Option, OptionBounds
from ludus.algorithms.kl import full_reverse
from ludus.algorithms.losses.clipped import ClipInputs, ppo_clip, token_cut, token_ratio
from ludus.algorithms.tensors import Cut, Tensor, check_per_row, check_shapes, select, torch


@LossSpec(help="the policy gradient without a ratio")
def reinforce(*, logprobs: Tensor, advantages: Tensor, mask: Tensor, old_logprobs: Tensor | None = None) -> Tensor:
    """Return `-A logprobs`, [N, L] (Williams 1992). `old_logprobs` are ignored."""
    check_shapes(mask, logprobs=logprobs, advantages=advantages)
    return -select(advantages, mask).detach() * select(logprobs, mask)


def sft(*, logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return `-logprobs`, [N, L]: the negative log-likelihood of the masked tokens, for supervised training."""
    check_shapes(mask, logprobs=logprobs)
    return -select(logprobs, mask)


def positive_nll(
    *, logprobs: Tensor, positive: Tensor, mask: Tensor, coef: float = 0.1, num_tokens: int | None = None
) -> Tensor:
    """Return `coef` times the mean of `-logprobs` over the action tokens of positive trajectories, [].

    VAPO's second term (arXiv:2504.05118, `coef` 0.1), to be added to the aggregated policy loss.
    `positive` [N] bool. `num_tokens` is the number of such tokens in the whole batch of the step, so that
    microbatches add up; None: those of the arguments. 0 without such tokens.
    """
    check_per_row(mask, positive=positive)
    tokens = mask.bool() & positive.bool()[:, None]
    return coef * _mean_nll(logprobs, tokens, num_tokens)


def echo(*, logprobs: Tensor, observations: Tensor, coef: float, num_tokens: int | None = None) -> Tensor:
    """Return `coef` times the mean of `-logprobs` over observation tokens, [].

    ECHO (arXiv:2605.24517), to be added to the aggregated policy loss. `observations` [N, L] is set on
    observation tokens (not on prompt or padding); `logprobs` must contain their
    log-probabilities. `num_tokens` is their number in the whole batch of the step, so that microbatches add
    up; None: those of the arguments. 0 without such tokens.
    """
    return coef * _mean_nll(logprobs, observations, num_tokens)


def forks(
    *,
    logprobs: Tensor,
    advantages: Tensor,
    decisions: Tensor,
    base_kl: Tensor,
    mask: Tensor,
    kl_coef: float = 0.2,
    counts: tuple[int, int] | None = None,
) -> Tensor:
    """Return `mean -A logprobs` over decision tokens plus `kl_coef mean KL(base || policy)` over all others, [].

    ReasonMaxxer (arXiv:2605.06241). `decisions` [N, L] bool: tokens at which the base model's entropy is high;
    `base_kl` [N, L] is over the full vocabulary. `counts` are the decision tokens and the others of the whole batch, so
    that microbatches add up; None: those of the arguments. A mean over no tokens is 0.
    """
    check_shapes(mask, logprobs=logprobs, advantages=advantages, decisions=decisions, base_kl=base_kl)
    chosen, others = mask.bool() & decisions.bool(), mask.bool() & ~decisions.bool()
    num_chosen, num_others = counts or (int(chosen.sum()), int(others.sum()))
    policy = -(select(advantages, chosen).detach() * select(logprobs, chosen)).sum() / max(num_chosen, 1)
    return policy + kl_coef * select(base_kl, others).sum() / max(num_others, 1)


def value_loss(*, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, eps: float | None = 0.2) -> Tensor:
    """Return `0.5 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2)`, [N, L].

    PPO's clipped value loss as in OpenAI baselines (`ppo2`), TRL and OpenRLHF (`eps` 0.2); verl's default is
    0.5. `eps` None: no clip. The gradient flows through `values` only.
    """
    check_shapes(mask, values=values, old_values=old_values, returns=returns)
    target = select(returns, mask).detach()
    value = select(values, mask)
    error = (value - target).square()
    if eps is not None:
        old = select(old_values, mask).detach()
        clipped = torch.minimum(torch.maximum(value, old - eps), old + eps)
        error = torch.maximum(error, (clipped - target).square())
    return select(0.5 * error, mask)


@LossSpec(help="reverse KL from a teacher, on sampled tokens", needs={Need.TEACHER})
def distill(
    *,
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor,
    old_logprobs: Tensor | None = None,
    advantages: Tensor | None = None,
) -> Tensor:
    """Return `ratio stop_grad(logprobs - teacher_logprobs)`, [N, L]: on-policy distillation, reverse KL as cost.

    `ratio` is `exp(logprobs - old_logprobs)`; without `old_logprobs` its value is 1 and the loss is
    `logprobs - teacher_logprobs`. The gradient is `ratio (logprobs - teacher) d logprobs`, that of the
    reverse KL at each token; the gradient of the difference itself has expectation 0.
    Sources: arXiv:2306.13649 (GKD), https://thinkingmachines.ai/blog/on-policy-distillation. Rewards and
    `advantages` are not used; the teacher scores the student's tokens in one forward pass.
    """
    check_shapes(mask, logprobs=logprobs, teacher_logprobs=teacher_logprobs)
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    check_shapes(mask, old_logprobs=old)
    cost = select(logprobs, mask).detach() - select(teacher_logprobs, mask).detach()
    return select(token_ratio(logprobs, old, mask) * cost, mask)


def distill_full(*, logits: Tensor, teacher_logits: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """Return `KL(student || teacher)` over the whole vocabulary at each action token, [N, L].

    `logits`, `teacher_logits` [N, L, V]; column `t` is the sampling distribution of token `t`. Its
    gradient has no sampling noise, at the cost of the teacher's logits. arXiv:2306.13649 (GKD).
    """
    if mask.ndim != 2 or logits.shape[:-1] != mask.shape or teacher_logits.shape != logits.shape:
        raise ValueError(
            f"logits {list(logits.shape)} and teacher_logits {list(teacher_logits.shape)} must be"
            f" [N, L, V] for the mask {list(mask.shape)}"
        )
    actions = mask.bool()
    divergence = full_reverse(
        logits=logits[actions], ref_logits=teacher_logits[actions].detach(), temperature=temperature
    )
    empty = torch.zeros(mask.shape, dtype=divergence.dtype, device=divergence.device)
    return empty.masked_scatter(actions, divergence)


@LossSpec(
    name="distill_full",
    help="reverse KL from a teacher, over the vocabulary",
    needs={Need.TEACHER, Need.TEACHER_DISTRIBUTION},
    off_policy=True,
)
def _distill_full(*, teacher_kl: Tensor, mask: Tensor) -> Tensor:
    """Return `teacher_kl` [N, L], which the learner computes in chunks, on action tokens."""
    return select(teacher_kl, mask)


def _mean_nll(logprobs: Tensor, tokens: Tensor, num_tokens: int | None) -> Tensor:
    check_shapes(tokens, logprobs=logprobs)
    total = -select(logprobs, tokens).sum()
    return total / (tokens.bool().sum() if num_tokens is None else torch.tensor(num_tokens)).clamp(min=1)


TOP_K = Option(
    "tokens that the divergence tells apart, the policy's most likely; all others are one event; 0 for the vocabulary",
    OptionBounds(0, is_integer=True),
    default=100.0,
)
RATIO_CAP = Option("largest importance ratio of the divergence", POSITIVE)
DIVERGENCE_OPTIONS: dict[str, Option] = {"top_k": TOP_K, "ratio_cap": RATIO_CAP}


def _policy_cut(*, weight: float = 1.0, **inputs: Unpack[ClipInputs]) -> Cut:
    """Return the tokens whose policy gradient is clipped; none without a policy gradient."""
    cut = token_cut(**inputs)
    return cut if weight < 1 else Cut(*map(torch.zeros_like, cut))


@LossSpec(
    help="policy gradient, and the divergence from the same model that is shown a success or feedback",
    needs={Need.CLIP, Need.DUAL_CLIP, Need.SELF_TEACHER},
    options={"weight": Option("weight of the divergence; that of the policy gradient is 1 - weight", FRACTION)}
    | DIVERGENCE_OPTIONS,
    ratio_part="The importance ratio",
    cut=_policy_cut,
)
def sdpo(*, teacher_kl: Tensor, weight: float = 1.0, ratio_cap: float = 2.0, **inputs: Unpack[ClipInputs]) -> Tensor:
    """Return `(1 - weight) ppo_clip + weight min(ratio, ratio_cap) teacher_kl`, [N, L].

    SDPO (arXiv:2601.20802). No gradient flows through `ratio = exp(logprobs - old_logprobs)`. With `weight` 1, the
    default of the paper, the reward only decides which attempts are shown.
    """
    distilled = sdft(
        teacher_kl=teacher_kl,
        logprobs=inputs["logprobs"],
        old_logprobs=inputs["old_logprobs"],
        mask=inputs["mask"],
        ratio_cap=ratio_cap,
    )
    return distilled if weight == 1 else (1 - weight) * ppo_clip(**inputs) + weight * distilled


@LossSpec(
    help="divergence from the same model that is shown the expert's dialogue",
    needs={Need.SELF_TEACHER, Need.SHOWN_DEMONSTRATION},
    options=DIVERGENCE_OPTIONS,
)
def sdft(
    *,
    teacher_kl: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor | None = None,
    ratio_cap: float = 2.0,
) -> Tensor:
    """Return `min(ratio, ratio_cap) teacher_kl`, [N, L]; self-distillation fine-tuning (SDFT, arXiv:2601.19897).

    No gradient flows through `ratio = exp(logprobs - old_logprobs)`. Rewards and `advantages` are not used.
    """
    check_shapes(mask, teacher_kl=teacher_kl, logprobs=logprobs, old_logprobs=old_logprobs)
    ratio = token_ratio(logprobs.detach(), old_logprobs, mask).clamp(max=ratio_cap)
    return ratio * select(teacher_kl, mask)
