"""Divide by the largest deviation of the group, to a power: with power 1 no advantage exceeds 1."""

import torch

from ludus.algorithms.algorithm import FRACTION, AdvantageSpec, Need, Option
from ludus.algorithms.tensors import float_dtype, groups_to_compare, per_action


@AdvantageSpec(
    help="rewards minus the mean of the group, over the largest deviation",
    needs={Need.GROUP},
    options={"power": Option("exponent of the deviation", FRACTION)},
)
def max_scaled(*, rewards, group, mask, power=1.0):
    grouped = groups_to_compare(rewards, group, mask)
    centred = grouped.subtract(grouped.mean())
    largest = torch.zeros_like(grouped.sizes).scatter_reduce(0, grouped.index, centred.abs(), "amax").clamp(min=1e-6)
    return per_action(centred / largest[grouped.index] ** power, mask, float_dtype(rewards))
