"""The models that a run reads anew whenever it starts, and that must be the same each time.

A checkpoint holds what trains. The reference is the model that the run began with, adapters stand on it, and
a teacher is a model of its own: all three come from where the settings say. A checkpoint has their digests,
and a resumed run is refused where one of them is another model by now.
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
    """The digests of the models that must not change, by name, before a checkpoint is loaded.

    `start` is the model that the run began with: where it is the reference, or stands below adapters.
    """
    found = {}
    if "reference" in scorers or session.config.model.lora is not None:
        found[START] = fingerprint_adapted(session.model, {})
    teacher = scorers.get(TEACHER)
    if isinstance(teacher, LogprobScorer):
        found[TEACHER] = fingerprint_adapted(teacher.model, {})
    return found


def check_origins(stored: Mapping[str, str], now: Mapping[str, str], session: TrainingSession) -> None:
    """Raise UserError where a model is not the one that the checkpoint was made with.

    What a checkpoint does not name, as it did not need it, is not compared.
    """
    paths = {START: f"model that the run began with ({session.source})"}
    paths[TEACHER] = f"teacher ({session.config.teacher.path})"
    for name, digest in now.items():
        before = stored.get(name, digest)
        if before != digest:
            raise UserError(
                f"The {paths[name]} has changed: its weights have the digest {digest[:12]}, and had"
                f" {before[:12]} when the checkpoint was written.",
                "Put them back: what is compared with them would mean something else. Or start a new run.",
            )
