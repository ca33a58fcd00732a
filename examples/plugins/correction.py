"""Importance weights, shrunk towards 1."""

from ludus.algorithms.algorithm import FRACTION, CorrectionSpec, Need, Option


@CorrectionSpec(
    help="importance weights, shrunk towards 1",
    needs={Need.BEHAVIOR_RATIO},
    options={"share": Option("exponent of the ratio", FRACTION)},
)
def shrunk(*, old_logprobs, behavior_logprobs, mask, share=0.5):
    return (share * (old_logprobs - behavior_logprobs) * mask).clamp(-2, 2).exp().detach() * mask
