"""Digests of models that are reloaded on resume and must not change.

The reference, the base of adapters and the teacher are outside the checkpoint. It stores their digests, and
resuming is refused if one has changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from ludus.engines.models.fingerprint import fingerprint_adapted
from ludus.errors import UserError
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.learner.ref_and_teacher import TokenScorer
from ludus.training.run.session import TrainingSession

START, TEACHER = "start", "teacher"


def origins_of(session: TrainingSession, scorers: Mapping[str, TokenScorer]) -> dict[str, str]:
    """Return the digests of the fixed models by name, before a checkpoint is loaded.

    `start` is the initial model, if it is the reference or the base of adapters.
    """
    found = {}
    if "reference" in scorers or session.config.model.lora is not None:
        found[START] = fingerprint_adapted(session.model, {})
    teacher = scorers.get(TEACHER)
    if isinstance(teacher, LogprobScorer):
        found[TEACHER] = fingerprint_adapted(teacher.model, {})
    return found


def check_origins(stored: Mapping[str, str], now: Mapping[str, str], session: TrainingSession) -> None:
    """Raise UserError if a model differs from the checkpoint's digest.

    Models without a stored digest are not compared.
    """
    paths = {START: f"model that the run started with ({session.source})"}
    paths[TEACHER] = f"teacher ({session.config.teacher.path})"
    for name, digest in now.items():
        before = stored.get(name, digest)
        if before != digest:
            raise UserError(
                f"The {paths[name]} has changed: its weights have the digest {digest[:12]}, and had"
                f" {before[:12]} when the checkpoint was written.",
                "Restore them, or start a new run.",
            )
