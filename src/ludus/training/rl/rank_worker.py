"""Learner process of a rank other than 0.

It joins the rendezvous of rank 0, receives the run's configuration, builds the learner and executes broadcast
commands until `StopRanks`. A rank that rank 0 started (`main`) exits when rank 0 ends, even before the rendezvous.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import torch

from ludus.algorithms.spec.resolve import resolve
from ludus.config.schema import Config
from ludus.engines.models.loading import hide_progress
from ludus.errors import LearnerError
from ludus.training.distributed.collectives import gathered
from ludus.training.distributed.launcher import (
    DryRun,
    EvaluateValues,
    GatherWeights,
    ProbeTokens,
    SaveShards,
    ScoreRows,
    StartRanks,
    StopRanks,
    TrainRows,
    TrainValues,
    WorkerRank,
)
from ludus.training.distributed.rendezvous import Rendezvous, destroy_group
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.rl.build import LearnerParts, make_parts
from ludus.training.rl.memory_check import dry_run
from ludus.training.rl.weight_sync import probe_logprobs
from ludus.training.run.checkpoint import list_checkpoints, save_shards
from ludus.training.run.run_dir import RunFolder, log_into
from ludus.training.run.session import TrainingSession, open_session
from ludus.training.value_models.factory import part_name, score_values, train_on_tables

_LOOK_S = 1.0

log = logging.getLogger("ludus.follow")


def run_rank(device: torch.device, limit_s: float) -> None:
    """Join the other ranks within `limit_s` and execute the commands of rank 0."""
    rendezvous = Rendezvous.join(limit_s)
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
    follower = WorkerRank()
    command = follower.receive()
    if not isinstance(command, StartRanks):
        return
    if command.folder.is_dir():  # missing on a machine without the shared disk
        log_into(RunFolder(command.folder), f"rank {rendezvous.rank}")
    log.info("ready (process %d)", os.getpid())
    if command.config.training.learner.shard:
        follower.split_on(device)
    session = open_session(command.config, cold_start(command.config, command.folder))
    learning = make_parts(session, resolve(command.config.algorithm), follower, command.resumed)
    while not isinstance(command := follower.receive(), StopRanks):
        try:
            execute(command, session, learning)
        except LearnerError as error:  # rank 0 raises it as well and handles it
            log.warning("%s", error)
            rendezvous.store_error(str(error))


def execute(command: object, session: TrainingSession, learning: LearnerParts) -> None:
    """Execute this rank's part of a command."""
    learner, judge = learning.learner, learning.value_model
    match command:
        case ScoreRows(name, rows, entropy, keep):
            learner.score_with(name, rows, entropy, keep=keep)
        case TrainRows(rows, seed, algorithm):
            learner.algorithm = algorithm
            learner.train(rows, seed)
        case EvaluateValues(rows, solved, after) if judge is not None:
            score_values(judge, rows, solved, after)
        case TrainValues(rows, tables, solved) if judge is not None:
            train_on_tables(judge, rows, tables, solved)
        case ProbeTokens(tokens):
            probe_logprobs(LogprobScorer(session.model), tokens)
        case GatherWeights():
            gathered(session.model)
        case SaveShards(folder):
            parts = {} if judge is None else {part_name(judge): judge.state()}
            save_shards(folder, session.model, learner.optimizer, parts)
        case DryRun(longest):
            dry_run(learner, longest)


def cold_start(config: Config, folder: Path) -> Path | None:
    """Return the checkpoint that a run from scratch starts with, or None."""
    if not config.model.from_scratch:
        return None
    return list_checkpoints(RunFolder(folder / "cold_start").checkpoints)[-1][1]


def _exit_with_parent(leader: int) -> None:
    """Exit once rank 0 is gone; this also covers the time before the rendezvous."""
    while os.getppid() == leader:
        time.sleep(_LOOK_S)
    os._exit(1)


def main(limit_s: str, kind: str, leader: str) -> None:
    """Run as a rank on a device of this kind; process `leader`, which started it, is rank 0."""
    threading.Thread(target=_exit_with_parent, args=(int(leader),), name="ludus-leader", daemon=True).start()
    hide_progress()
    run_rank(torch.device(kind), float(limit_s))
