"""What numbers the options of a part may be. Imports no torch.

The one table of them: a configuration is checked against it, and `ludus algorithms NAME` shows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ludus.algorithms.spec.algorithm import OPTION_WORDS, TERM_NAMES, Algorithm, Options, number, word
from ludus.algorithms.spec.defaults import default_of
from ludus.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OptionBounds:
    """From `low` to `high`, both included; with `above` without `low` itself, with `whole` whole numbers."""

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    above: bool = False

    def hold(self, value: float) -> bool:
        """Whether the value is one of them."""
        inside = self.low < value if self.above else self.low <= value
        return inside and value <= self.high and (not self.whole or value == int(value))

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "any number"
        kind = "a whole number " if self.whole else ""
        if self.above:
            most = f" and at most {self.high:g}" if self.high < math.inf else ""
            return f"{kind}above {self.low:g}{most}"
        return f"{kind}from {self.low:g} " + (f"to {self.high:g}" if self.high < math.inf else "on")


_ANY, _POSITIVE, _NOT_NEGATIVE, _SHARE = (
    OptionBounds(),
    OptionBounds(0, above=True),
    OptionBounds(0),
    OptionBounds(0, 1),
)
_SWITCH = OptionBounds(0, 1, whole=True)

BOUNDS: Mapping[str, Mapping[str, OptionBounds]] = {
    "advantage": {
        "std_floor": _NOT_NEGATIVE,
        "decay": _SHARE,
        "gamma": _SHARE,
        "weight": _NOT_NEGATIVE,
        "beta": _POSITIVE,
        "k": OptionBounds(1, whole=True),
        "turn_weight": _NOT_NEGATIVE,
        "outcome_weight": _NOT_NEGATIVE,
        "lam": _SHARE,
        "gamma_turn": _SHARE,
        "lam_turn": _SHARE,
        "gamma_token": _SHARE,
        "lam_token": _SHARE,
        "lam_critic": _SHARE,
        "alpha": _POSITIVE,
        "rho_bar": _POSITIVE,
        "c_bar": _POSITIVE,
        "whiten": _SWITCH,
        "bootstrap": _SWITCH,
        "zero_tail": _SWITCH,
    },
    "loss": {
        "tau_pos": _POSITIVE,
        "tau_neg": _POSITIVE,
        "bound": _NOT_NEGATIVE,
        "amplify": _NOT_NEGATIVE,
        "contiguous": _SWITCH,
        "entropy_bound": _POSITIVE,
        "entropy_penalty": _NOT_NEGATIVE,
        "share": OptionBounds(0, 1, above=True),
        "low": _ANY,
        "high": _ANY,
        "coef": _NOT_NEGATIVE,
        "gamma": _POSITIVE,
    },
    "correction": {
        "low": _NOT_NEGATIVE,
        "high": _POSITIVE,
        "cap": _POSITIVE,
        "veto": _NOT_NEGATIVE,
        "bound": _POSITIVE,
    },
    "kl": {},
    "terms": dict.fromkeys(TERM_NAMES, _NOT_NEGATIVE),
}
"""The numbers that each kind of part takes, by the names of the options."""


def check_option(part: str, key: str, options: Options) -> None:
    """Raises ConfigError for a word that is none of the option's, and for a number out of its bounds."""
    if key in OPTION_WORDS:
        word(options, key, OPTION_WORDS[key])
        return
    value, bounds = number(options, key, 0.0), BOUNDS[part][key]
    if not bounds.hold(value):
        raise ConfigError(f"algorithm.options.{part}.{key} is {value:g}, but must be {bounds}.")


def check_together(algorithm: Algorithm) -> None:
    """Raises ConfigError for options that do not go with each other or with the size of the groups."""
    for part, name, options in (
        ("loss", algorithm.loss, algorithm.options.loss),
        ("correction", algorithm.correction, algorithm.options.correction),
    ):
        if options.get("measure", "ratio") != "ratio":
            if "low" in options:
                raise ConfigError(
                    f"algorithm.options.{part}.low bounds ratios; with measure {options['measure']} there is"
                    " high alone."
                )
        elif "low" in options or "high" in options:
            low = number(options, "low", _number_of(part, name, "low"))
            upper, high = "high", algorithm.tis_cap
            if name == "tis":
                upper = "algorithm.tis_cap"
            else:
                high = number(options, "high", _number_of(part, name, "high"))
            if low > high:
                raise ConfigError(
                    f"algorithm.options.{part}.low is {low:g}, but must be at most {upper}, which is"
                    f" {high:g}."
                )
    if algorithm.advantage == "pass_at_k":
        k = number(algorithm.options.advantage, "k", _number_of("advantage", "pass_at_k", "k"))
        if k > algorithm.group_size:
            raise ConfigError(
                f"algorithm.options.advantage.k is {k:g}, but must be at most algorithm.group_size, which is"
                f" {algorithm.group_size}."
            )


def _number_of(part: str, name: str, option: str) -> float:
    default = default_of(part, name, option)
    return number({option: default}, option, 0.0)
