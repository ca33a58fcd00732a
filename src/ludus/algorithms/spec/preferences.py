"""What each preference loss needs. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreferenceSpec:
    """What a preference loss needs.

    `reference`: log-probabilities of a reference. `mismatched`: answers of other pairs, for an estimate of
    the KL. `running_mean`: the mean of all implicit rewards so far. `per_token`: margins are means over
    tokens. `beta` is the default of `preference.beta`, `baseline_metric` the name of what it compares with.
    """

    reference: bool = True
    mismatched: bool = False
    running_mean: bool = False
    per_token: bool = False
    beta: float = 0.1
    baseline_metric: str = ""


_PLAIN = PreferenceSpec()
_BCO = PreferenceSpec(running_mean=True, baseline_metric="preference/bco_delta")

PREFERENCES: Mapping[str, PreferenceSpec] = {
    **dict.fromkeys(("dpo", "robust", "hinge", "exo", "nca", "sppo", "discopop"), _PLAIN),
    **dict.fromkeys(("apo_zero", "apo_down"), _PLAIN),
    **dict.fromkeys(("bco", "bco_pair"), _BCO),
    "ipo": PreferenceSpec(per_token=True),
    "simpo": PreferenceSpec(reference=False, per_token=True, beta=2.0),
    "kto": PreferenceSpec(mismatched=True, baseline_metric="preference/kto_baseline"),
}
"""The losses that `preference.loss` may name."""
