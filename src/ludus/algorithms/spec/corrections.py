"""The corrections of the gap between engine and learner; options of KL and of auxiliary losses. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from ludus.algorithms.spec.parts import NOT_NEGATIVE, POSITIVE, CorrectionSpec, Need, Option
from ludus.algorithms.spec.words import CRITERIA, GRANULARITIES, IMPORTANCES, LEVELS, MEASURES

_MODULE = "ludus.algorithms.corrections"

CORRECTIONS: Mapping[str, CorrectionSpec] = {
    "none": CorrectionSpec(help="none", function=f"{_MODULE}:no_weights", needs=frozenset()),
    "tis": CorrectionSpec(
        help="truncated importance sampling",
        function=f"{_MODULE}:weights_of_tis",
        needs=frozenset({Need.LIMITED_RATIO, Need.BEHAVIOR_RATIO}),
        options={
            "level": Option(LEVELS[0], "ratio of a token, of the sequence, or its geometric mean", choices=LEVELS),
            "low": Option(0.0, "lower bound", NOT_NEGATIVE),
        },
    ),
    "icepop": CorrectionSpec(
        help="weights within bounds, 0 outside",
        function=f"{_MODULE}:weights_of_icepop",
        needs=frozenset({Need.LIMITED_RATIO, Need.BEHAVIOR_RATIO}),
        options={
            "low": Option(0.5, "lower bound", NOT_NEGATIVE),
            "high": Option(5.0, "upper bound", POSITIVE),
            "level": Option(LEVELS[0], "ratio of a token, of the sequence, or its geometric mean", choices=LEVELS),
        },
    ),
    "decoupled": CorrectionSpec(
        help="weights of token ratios up to a cap",
        function=f"{_MODULE}:weights_of_decoupled",
        needs=frozenset({Need.LIMITED_RATIO, Need.BEHAVIOR_RATIO}),
        options={"cap": Option(5.0, "upper bound of the ratio", POSITIVE)},
    ),
    "reject_sequence": CorrectionSpec(
        help="trajectories or tokens out of bounds do not train",
        function=f"{_MODULE}:no_weights",
        needs=frozenset({Need.REJECTION}),
        options={
            "low": Option(0.5, "lower bound", NOT_NEGATIVE),
            "high": Option(2.0, "upper bound", POSITIVE),
            "by": Option(CRITERIA[0], "what is compared with the bounds", choices=CRITERIA),
            "veto": Option(0.0, "a token with a smaller ratio removes its trajectory; 0: none", NOT_NEGATIVE),
            "measure": Option(MEASURES[0], "compare ratios, or an estimator of the KL", choices=MEASURES),
        },
        keep=f"{_MODULE}:kept_by_reject_sequence",
    ),
    "m2po": CorrectionSpec(
        help="tokens with the largest log-ratios do not train",
        function=f"{_MODULE}:no_weights",
        needs=frozenset({Need.REJECTION}),
        options={"bound": Option(0.04, "bound of the mean squared log-ratio", POSITIVE)},
        keep=f"{_MODULE}:kept_by_m2po",
    ),
}

KL_OPTIONS: Mapping[str, Option] = {
    "granularity": Option(
        GRANULARITIES[0], "subtract at each token, or the mean of the trajectory", choices=GRANULARITIES
    ),
    "importance": Option(IMPORTANCES[0], "weigh the term in the loss by the ratio, or do not", choices=IMPORTANCES),
}
"""The options of every KL estimator."""
TERM_OPTIONS: Mapping[str, Option] = {
    "echo": Option(0.0, "coefficient of the log-likelihood of observations", NOT_NEGATIVE),
    "positive_nll": Option(0.0, "coefficient of the log-likelihood of solved attempts", NOT_NEGATIVE),
}
"""The coefficients of the auxiliary losses."""
