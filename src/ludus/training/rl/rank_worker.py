"""Learner process of a rank other than 0.

It joins the rendezvous of rank 0, receives the run's configuration, builds the learner and runs the methods called by
rank 0 until `stop`. A rank started by rank 0 (`main`) exits with rank 0, even before the rendezvous.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch

from ludus.algorithms.algorithm import Algorithm
from ludus.algorithms.spec.resolve import resolve
from ludus.config.schema import Config
from ludus.engines.models.loading import hide_progress
from ludus.errors import LearnerError
from ludus.training.batches.rows import Row
from ludus.training.distributed.collectives import RankMethod, full_state_dict
from ludus.training.distributed.launcher import CommandedRank, Rendezvous, destroy_group
from ludus.training.learner.learner import set_temperature
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.rl.build import LearnerParts, make_parts
from ludus.training.rl.memory_check import dry_run
from ludus.training.rl.weight_sync import probe_logprobs
from ludus.training.run.checkpoint import save_shards
from ludus.training.run.run_dir import RunFolder, attach_run_log, list_checkpoints
from ludus.training.run.session import TrainingSession, open_session
from ludus.training.value_models.factory import checkpoint_parts

log = logging.getLogger(__name__)


def run_rank(device: torch.device, timeout_s: float) -> None:
    """Join the other ranks within `timeout_s` and execute the commands of rank 0."""
    rendezvous = Rendezvous.join(timeout_s)
    try:
        rendezvous.form_group(device)
        _execute_commands(rendezvous, device)
    except Exception as error:
        rendezvous.store_error(f"{type(error).__name__}: {error}")
        log.error("rank failed: %s: %s", type(error).__name__, error)
        raise
    finally:
        destroy_group()


def _execute_commands(rendezvous: Rendezvous, device: torch.device) -> None:
    ranks = CommandedRank()
    method, arguments = ranks.broadcast()
    if method != "start":
        return
    config, folder, resumed = cast("tuple[Config, Path, Path | None]", arguments)
    if folder.is_dir():  # missing on a machine without the shared disk
        attach_run_log(RunFolder(folder), f"rank {rendezvous.rank}")
    log.info("ready (process %d)", os.getpid())
    if config.training.learner.shard:
        ranks.shard_device = device
    cold_start = RunFolder(folder / "cold_start").checkpoints
    session = open_session(config, list_checkpoints(cold_start)[-1][1] if config.model.from_scratch else None)
    methods = rank_methods(session, make_parts(session, resolve(config.algorithm), ranks, resumed))
    while (command := ranks.broadcast())[0] != "stop":
        method, arguments = command
        try:
            methods[method](*arguments)
        except LearnerError as error:  # rank 0 raises it as well and handles it
            log.warning("%s", error)
            rendezvous.store_error(str(error))


def rank_methods(session: TrainingSession, parts: LearnerParts) -> dict[RankMethod, Callable[..., object]]:
    """Return the methods that rank 0 may call on this rank."""
    learner, value_model, model = parts.learner, parts.value_model, session.model

    def train(rows: Sequence[Row], seed: int, algorithm: Algorithm, learning_rate_factor: float) -> None:
        learner.algorithm, learner.optimizer.learning_rate_factor = algorithm, learning_rate_factor
        learner.train(rows, seed)

    methods: dict[RankMethod, Callable[..., object]] = {
        "score": learner.score_with,
        "set_temperature": lambda temperature: set_temperature(learner, temperature),
        "train": train,
        "gather_weights": lambda: full_state_dict(model),
        "probe": lambda tokens: probe_logprobs(LogprobScorer(model), tokens),
        "save": lambda folder: save_shards(folder, model, learner.optimizer, checkpoint_parts(value_model)),
        "dry_run": lambda longest: dry_run(learner, longest),
    }
    if value_model is not None:
        methods |= {"score_values": value_model.score, "train_values": value_model.train}
    return methods


def _exit_with_parent(parent: int) -> None:
    """Exit when rank 0 exits, even before the rendezvous."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(timeout_s: str, device_type: str, parent: str) -> None:
    """Run as a rank on a device of type `device_type`; `parent` is the process id of rank 0."""
    threading.Thread(target=_exit_with_parent, args=(int(parent),), name="ludus-parent", daemon=True).start()
    hide_progress()
    run_rank(torch.device(device_type), float(timeout_s))
