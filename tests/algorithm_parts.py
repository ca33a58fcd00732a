"""Every advantage, loss and correction as a function of batch and algorithm."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from ludus.algorithms import advantages
from ludus.algorithms.advantages import ADVANTAGES as ADVANTAGE_SPECS
from ludus.algorithms.algorithm import Need
from ludus.algorithms.corrections import CORRECTIONS as CORRECTION_SPECS
from ludus.algorithms.losses import LOSSES as LOSS_SPECS


def _called(part: str, specs: Mapping) -> dict[str, Callable]:
    def call(name):
        return lambda batch, algorithm: replace(algorithm, **{part: name}).compute(part, batch)

    return {name: call(name) for name in specs}


ADVANTAGES = _called("advantage", ADVANTAGE_SPECS)
VALUE_ERRORS = _called("advantage", {"vtrace_error": None})
LOSSES = _called("loss", LOSS_SPECS)
CORRECTIONS = _called("correction", CORRECTION_SPECS)
FUNCTIONS = {name: getattr(advantages, name) for name in ADVANTAGE_SPECS}
"""The advantages as pure functions of tensors."""


def advantages_with(*needs) -> list[str]:
    return [name for name, spec in ADVANTAGE_SPECS.items() if all(spec.has(need) for need in needs)]


def losses_with(*needs) -> list[str]:
    return [name for name, spec in LOSS_SPECS.items() if all(spec.has(need) for need in needs)]


CRITIC_ADVANTAGES = advantages_with(Need.CRITIC)
GREEDY_ADVANTAGES = advantages_with(Need.GREEDY_ROLLOUT)
GROUP_ADVANTAGES = advantages_with(Need.GROUP)
TOKEN_ADVANTAGES = advantages_with(Need.TOKEN_KL)
TURN_READING_ADVANTAGES = advantages_with(Need.OPTIONAL_TURN_REWARDS)
WHITENED_ADVANTAGES = advantages_with(Need.BATCH_STATISTICS)
CLIPPING_LOSSES = losses_with(Need.CLIP)
CUTS = [name for name, spec in LOSS_SPECS.items() if spec.cut]
RATIO_PARTS = [name for name, spec in LOSS_SPECS.items() if spec.ratio_part]
ADVANTAGE_OPTIONS = {name: tuple(spec.options) for name, spec in ADVANTAGE_SPECS.items()}
