"""What an option of a part is where nobody sets it. Imports no torch.

The numbers are those of the calls that read the options; a test holds the two equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ludus.algorithms.spec.algorithm import OPTION_WORDS

_CRITIC = {"whiten": 1.0, "bootstrap": 0.0}
_GAE = {"gamma": 1.0, "lam": 1.0} | _CRITIC

ADVANTAGE_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "grpo": {"std_floor": 0.0},
    "optimal_token_baseline": {"zero_tail": 1.0},
    "rae": {"decay": 0.95},
    "gigpo": {"gamma": 0.95, "weight": 1.0},
    "prime": {"beta": 0.05, "gamma": 1.0},
    "pass_at_k": {"k": 4},
    "reinforce_pp": {"gamma": 1.0},
    "turn_grpo": {"turn_weight": 1.0, "outcome_weight": 1.0},
    "turn_return": {"gamma": 1.0},
    "turn_return_hybrid": {"gamma": 0.9, "outcome_weight": 0.3},
    "gae": _GAE | {"lam_critic": 1.0},
    "step_gae": _GAE,
    "turn_gae": {"gamma_turn": 1.0, "lam_turn": 1.0, "gamma_token": 1.0, "lam_token": 1.0} | _CRITIC,
    "vapo": {"gamma": 1.0, "alpha": 0.05, "lam_critic": 1.0} | _CRITIC,
    "vtrace": {"gamma": 1.0, "rho_bar": 1.0, "c_bar": 1.0} | _CRITIC,
    "retrace": _GAE,
}
LOSS_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "dppo": {"bound": 0.2},
    "gtpo": {"amplify": 2.0, "contiguous": 1.0, "entropy_bound": math.log(2), "entropy_penalty": 0.1},
    "clip_cov": {"share": 2e-4, "low": 1.0, "high": 5.0},
    "kl_cov": {"share": 2e-4, "coef": 1.0},
    "mixed_policy": {"gamma": 0.1},
}
CORRECTION_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "tis": {"low": 0.0},
    "icepop": {"low": 0.5, "high": 5.0},
    "decoupled": {"cap": 5.0},
    "reject_sequence": {"low": 0.5, "high": 2.0, "veto": 0.0},
    "m2po": {"bound": 0.04},
}
DEFAULTS: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "advantage": ADVANTAGE_DEFAULTS,
    "loss": LOSS_DEFAULTS,
    "correction": CORRECTION_DEFAULTS,
}


def default_of(part: str, name: str, option: str) -> float | str:
    """What an option of a part is by default: a number, or the first of the words that it may be.

    A term (`echo`, `positive_nll`) is 0. Raises KeyError for an option that the part does not have.
    """
    if option in OPTION_WORDS:
        return OPTION_WORDS[option][0]
    return 0.0 if part == "terms" else DEFAULTS[part][name][option]
