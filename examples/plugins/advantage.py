"""Divide by the largest deviation of the group, to a power: with power 1 no advantage exceeds 1."""

import torch

from ludus.algorithms.advantages import dr_grpo
from ludus.algorithms.algorithm import FRACTION, AdvantageSpec, Need, Option


@AdvantageSpec(
    help="rewards minus the mean of the group, over the largest deviation",
    needs={Need.GROUP},
    options={"power": Option("exponent of the deviation", FRACTION)},
)
def max_scaled(*, rewards, group, mask, power=1.0):
    centred = dr_grpo(rewards=rewards, group=group, mask=mask)
    same = group[:, None] == group
    largest = torch.where(same, centred.abs().amax(1), 0.0).amax(1, keepdim=True).clamp(min=1e-6)
    return centred / largest**power
