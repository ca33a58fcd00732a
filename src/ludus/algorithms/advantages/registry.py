"""The advantages by name: those that a configuration knows, and all there are."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ludus.algorithms.advantages.groups import (
    best_of_group,
    dr_grpo,
    grpo,
    hierarchical,
    maxrl,
    opo,
    pass_at_k,
    raw,
    reinforce_pp_baseline,
    remax,
    rloo,
)
from ludus.algorithms.advantages.off_policy import retrace, vtrace
from ludus.algorithms.advantages.returns import coderl, gae, prime, reinforce_pp, vapo
from ludus.algorithms.advantages.running import rae
from ludus.algorithms.advantages.turn_values import step_gae, turn_gae
from ludus.algorithms.advantages.turns import gigpo, turn_grpo, turn_return, turn_return_hybrid
from ludus.algorithms.batch import Outcomes
from ludus.algorithms.presets import Algorithm

AdvantageFn = Callable[[Outcomes, Algorithm], Tensor]

ADVANTAGES: dict[str, AdvantageFn] = {
    "grpo": lambda o, a: grpo(rewards=o.rewards, group=o.group, mask=o.mask, ddof=a.std_ddof),
    "dr_grpo": lambda o, a: dr_grpo(rewards=o.rewards, group=o.group, mask=o.mask),
    "rloo": lambda o, a: rloo(rewards=o.rewards, group=o.group, mask=o.mask),
    "opo": lambda o, a: opo(rewards=o.rewards, group=o.group, mask=o.mask),
    "reinforce_pp_baseline": lambda o, a: reinforce_pp_baseline(
        rewards=o.rewards, group=o.group, mask=o.mask, ddof=a.std_ddof
    ),
    "raw": lambda o, a: raw(rewards=o.rewards, group=o.group, mask=o.mask),
}
"""What a configuration may name: where the arguments come from."""

UNNAMED: dict[str, AdvantageFn] = {
    "reinforce_pp": lambda o, a: reinforce_pp(rewards=o.rewards, mask=o.mask, ddof=a.std_ddof),
    "maxrl": lambda o, a: maxrl(rewards=o.rewards, group=o.group, mask=o.mask),
    "best_of_group": lambda o, a: best_of_group(rewards=o.rewards, group=o.group, mask=o.mask),
}
"""Adapters of the same kind that `presets.ADVANTAGE_NAMES` does not list: no configuration reaches them."""

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "remax": remax,
    "opo": opo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "raw": raw,
    "gae": gae,
    "step_gae": step_gae,
    "turn_gae": turn_gae,
    "vapo": vapo,
    "turn_grpo": turn_grpo,
    "turn_return": turn_return,
    "turn_return_hybrid": turn_return_hybrid,
    "gigpo": gigpo,
    "maxrl": maxrl,
    "rae": rae,
    "hierarchical": hierarchical,
    "best_of_group": best_of_group,
    "pass_at_k": pass_at_k,
    "prime": prime,
    "coderl": coderl,
    "vtrace": vtrace,
    "retrace": retrace,
}
"""Every advantage as a pure function of tensors, keyword only, to [N, L]."""
