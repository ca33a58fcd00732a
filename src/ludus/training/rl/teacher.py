"""Teacher of on-policy distillation: a separate model that scores the student's samples."""

from __future__ import annotations

from ludus.algorithms.parts import Need
from ludus.algorithms.spec.algorithm import Algorithm
from ludus.config.schema import Config
from ludus.engines.models.loading import load_model, load_tokenizer
from ludus.errors import ConfigError
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.run.session import TrainingSession


def check_teacher(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError if the loss lacks its teacher, or a configured teacher is unused."""
    path, needed = config.teacher.path, algorithm.loss_spec.has(Need.TEACHER)
    if needed and path is None:
        raise ConfigError(
            f"The loss {algorithm.loss} needs a teacher, but teacher.path is not set.",
            "Set teacher.path to a model folder with the policy's tokenizer.",
        )
    if path is not None and not needed:
        raise ConfigError(
            f"teacher.path = {path} would have no effect: the loss {algorithm.loss} uses no teacher.",
            "Unset it, or set algorithm.preset = 'distill'.",
        )


def load_teacher(session: TrainingSession) -> LogprobScorer:
    """Load the configured teacher, frozen, at the rollout temperature.

    Raises ConfigError if its vocabulary differs from the policy's.
    """
    config = session.config
    path = config.teacher.path or ""
    theirs, own = load_tokenizer(path, needs_template=False).get_vocab(), session.tokenizer.get_vocab()
    if theirs != own:
        odd = min(t for t in theirs.keys() | own.keys() if theirs.get(t) != own.get(t))
        raise ConfigError(
            f"The teacher {path} has a different vocabulary from the policy ({len(theirs)} tokens and"
            f" {len(own)}; first difference: {odd!r}).",
            "Use a teacher with the policy's tokenizer.",
        )
    model = load_model(path, config.model.dtype, config.model.device).requires_grad_(False).eval()
    return LogprobScorer(model, config.rollout.temperature or 1.0)
