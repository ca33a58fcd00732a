"""REINFORCE weighted by the ratio to the policy that sampled, without a clip."""


def importance(batch, algorithm):
    """The importance-sampled policy gradient."""
    ratio = ((batch.logprobs - batch.old_logprobs) * batch.mask).exp()
    return -ratio * batch.advantages * batch.mask
