"""Divide by the largest deviation of the group, to a power: no advantage exceeds 1."""

import torch

from ludus.algorithms.advantages import dr_grpo
from ludus.algorithms.spec.parts import AdvantageSpec, Need, Option, OptionBounds


def scaled(outcomes, algorithm):
    centred = dr_grpo(rewards=outcomes.rewards, group=outcomes.group, mask=outcomes.mask)
    same = outcomes.group[:, None] == outcomes.group
    largest = torch.where(same, centred.abs().amax(1), 0.0).amax(1, keepdim=True).clamp(min=1e-6)
    return centred / largest ** algorithm.number("advantage", "power")


max_scaled = AdvantageSpec(
    help="rewards minus the mean of the group, over the largest deviation",
    function=scaled,
    options={"power": Option(1.0, "exponent of the deviation", OptionBounds(0, 1))},
    needs=frozenset({Need.GROUP}),
)
