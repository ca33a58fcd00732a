"""GTPO of arXiv:2508.03772: no negative update on tokens shared by good and bad trajectories of a group.

The weights need whole groups and are computed once for the batch; `filters.entropy_bound` is its filter. It has no KL
term and no reference. (arXiv:2604.02869 and arXiv:2508.04349 use the name GTPO for other algorithms.)
"""

from __future__ import annotations

import math
from typing import Unpack

from ludus.algorithms.algorithm import NOT_NEGATIVE, POSITIVE, SWITCH, LossSpec, Need, Option
from ludus.algorithms.losses.clipped import PolicyInputs, PolicyTokens
from ludus.algorithms.losses.sequence import trajectory_mean
from ludus.algorithms.tensors import Tensor, check_per_row, check_shapes, select, torch


@LossSpec(
    help="REINFORCE with weights of conflict tokens",
    needs={Need.CONFLICT_WEIGHTS},
    options={
        "amplify": Option("weight of conflict tokens of solved attempts", NOT_NEGATIVE, default=2.0),
        "contiguous": Option("1: conflict tokens are a common prefix or suffix", SWITCH, default=1.0),
        "entropy_bound": Option("entropy (nats) above which an attempt does not train", POSITIVE, default=math.log(2)),
        "entropy_penalty": Option("coefficient of the entropy penalty", NOT_NEGATIVE, default=0.1),
    },
)
def gtpo(*, weights: Tensor | None = None, **inputs: Unpack[PolicyInputs]) -> Tensor:
    """Return `-w ratio A`, [N, L], with `w` from `conflict_weights` (arXiv:2508.03772); None: `advantages` contain it.

    The authors run one step per batch: the ratio is 1, with a gradient.
    """
    tokens = PolicyTokens.of(**inputs)
    scores = tokens.scores
    if weights is not None:
        check_shapes(tokens.mask, weights=weights)
        scores = select(weights, tokens.mask).detach() * scores
    return select(-tokens.ratio * scores, tokens.mask)


def conflict_weights(
    *, token_ids: Tensor, group: Tensor, advantages: Tensor, mask: Tensor, amplify: float = 2.0, contiguous: bool = True
) -> Tensor:
    """Return 0 on conflict tokens of negative trajectories, `amplify` on those of positive ones, else 1, [N, L].

    A trajectory has the sign of its mean advantage; see `conflict_tokens`. 0 off the mask. `amplify` 2 as in the
    authors' code, which multiplies twice if prefix and suffix overlap.
    """
    check_shapes(mask, token_ids=token_ids, advantages=advantages)
    scores = trajectory_mean(advantages.detach(), mask)
    conflict = conflict_tokens(token_ids=token_ids, group=group, scores=scores, mask=mask, contiguous=contiguous)
    weights = torch.ones(mask.shape, dtype=advantages.dtype, device=mask.device)
    weights = torch.where(conflict & (scores > 0)[:, None], amplify, weights)
    weights = torch.where(conflict & (scores < 0)[:, None], 0.0, weights)
    return select(weights, mask)


def conflict_tokens(
    *, token_ids: Tensor, group: Tensor, scores: Tensor, mask: Tensor, contiguous: bool = True
) -> Tensor:
    """Return the conflict tokens (arXiv:2508.03772), [N, L] bool.

    A token is in conflict if a positive and a negative member of its group (by the sign of `scores` [N]) have
    the same id at the same action index, counted from the left or from the right. With `contiguous` only a common
    prefix or suffix counts, as in the paper and its code; otherwise every such token. `token_ids` [N, L], `group` [N]
    integers.
    """
    check_per_row(mask, group=group)
    actions = mask.bool()
    members = torch.unique(group, return_inverse=True)[1].to(mask.device)
    from_left = actions.cumsum(1) - 1
    from_right = actions.sum(1, keepdim=True) - 1 - from_left
    conflict = torch.zeros_like(actions)
    for index in (from_left, from_right):
        found = _shared(index, token_ids, members, scores, actions)
        conflict |= _unbroken(found, index, actions) if contiguous else found
    return conflict


def _shared(index: Tensor, token_ids: Tensor, members: Tensor, scores: Tensor, actions: Tensor) -> Tensor:
    """Return action tokens whose (group, index, id) occurs in a positive and in a negative trajectory, [N, L]."""
    rows = actions.nonzero()[:, 0]
    keys = torch.stack([members[rows], index[actions], token_ids[actions].long()], 1)
    names, inverse = torch.unique(keys, dim=0, return_inverse=True)
    seen = torch.zeros(2, len(names), dtype=torch.bool, device=actions.device)
    seen[0, inverse[scores[rows] > 0]] = True
    seen[1, inverse[scores[rows] < 0]] = True
    both = (seen[0] & seen[1])[inverse] & (scores[rows] != 0)
    return torch.zeros_like(actions).masked_scatter(actions, both)


def _unbroken(found: Tensor, index: Tensor, actions: Tensor) -> Tensor:
    """Return the tokens of `found` whose predecessors by index are all in `found`, [N, L] bool."""
    length = actions.shape[1]
    first_break = torch.where(actions & ~found, index, length).amin(1, keepdim=True) if length else index
    return found & (index < first_break)
