"""REINFORCE weighted by the ratio to the policy at the start of the step, without a clip."""


def importance(*, logprobs, old_logprobs, advantages, mask):
    """The importance-sampled policy gradient."""
    ratio = ((logprobs - old_logprobs) * mask).exp()
    return -ratio * advantages * mask
