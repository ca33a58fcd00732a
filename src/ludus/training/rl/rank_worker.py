"""A process of a learner that follows a leader.

    python -m ludus.training.rl.rank_worker FOLDER RANK PORT COUNT LIMIT_S KIND PID

It says in FOLDER that it has begun, meets the others at the leader's PORT, hears from the first which run it
is, builds the parts that learn, and does what it is told until it is told to stop. It ends with the leader,
whose process is PID, also before they have met. Under torchrun `follow_launched` does the same in its place.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import distributed

from ludus.algorithms.spec.resolve import resolve
from ludus.config.schema import Config
from ludus.engines.models.loading import hide_progress
from ludus.errors import LearnerError
from ludus.training.checks.memory_check import dry_run
from ludus.training.distributed.fsdp import gathered
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
    here,
)
from ludus.training.distributed.rendezvous import Rendezvous
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.rl.build import LearnerParts, make_parts
from ludus.training.rl.weight_sync import probe_logprobs
from ludus.training.run.checkpoint import list_checkpoints
from ludus.training.run.run_dir import RunFolder, log_into
from ludus.training.run.session import TrainingSession, open_session
from ludus.training.run.sharded_checkpoint import save_shards
from ludus.training.value_models.factory import part_name, say, teach

_LOOK_S = 1.0

log = logging.getLogger("ludus.follow")


def follow(meeting: Rendezvous, device: torch.device) -> None:
    """Meet the others, and follow the leader."""
    try:
        meeting.form_group(device)
        _follow(meeting, device)
    except Exception as error:
        meeting.say(f"{type(error).__name__}: {error}")
        log.error("it cannot go on: %s: %s", type(error).__name__, error)
        raise
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _follow(meeting: Rendezvous, device: torch.device) -> None:
    follower = WorkerRank()
    command = follower.hear()
    if not isinstance(command, StartRanks):
        return
    if command.folder.is_dir():  # not so on another machine without a shared disk
        log_into(RunFolder(command.folder), f"rank {meeting.rank}")
    log.info("follows the learner (%d)", os.getpid())
    if command.config.training.learner.shard:
        follower.split_on(device)
    session = open_session(command.config, cold_start(command.config, command.folder))
    learning = make_parts(session, resolve(command.config.algorithm), follower, command.resumed)
    while not isinstance(heard := follower.hear(), StopRanks):
        try:
            obey(heard, session, learning)
        except LearnerError as error:  # the leader raises it as well, and decides
            log.warning("%s", error)
            meeting.say(str(error))


def obey(command: object, session: TrainingSession, learning: LearnerParts) -> None:
    """Do this process's part of a command."""
    learner, judge = learning.learner, learning.judge
    match command:
        case ScoreRows(name, rows, entropy, keep):
            learner.ask(name, rows, entropy, keep=keep)
        case TrainRows(rows, seed, algorithm):
            learner.algorithm = algorithm
            learner.train(rows, seed)
        case EvaluateValues(rows, solved, after) if judge is not None:
            say(judge, rows, solved, after)
        case TrainValues(rows, tables, solved) if judge is not None:
            teach(judge, rows, tables, solved)
        case ProbeTokens(tokens):
            probe_logprobs(LogprobScorer(session.model), tokens)
        case GatherWeights():
            gathered(session.model)
        case SaveShards(folder):
            parts = {} if judge is None else {part_name(judge): judge.state()}
            save_shards(folder, session.model, learner.optimiser, parts)
        case DryRun(longest):
            dry_run(learner, longest)


def cold_start(config: Config, folder: Path) -> Path | None:
    """The checkpoint that a run from scratch begins with."""
    if not config.model.from_scratch:
        return None
    return list_checkpoints(RunFolder(folder / "cold_start").checkpoints)[-1][1]


def follow_launched(device: torch.device, limit_s: float) -> None:
    """Follow under torchrun, which says where the others are. Nobody is waited for longer than `limit_s`."""
    follow(Rendezvous.launched(limit_s), device)


def _end_with(leader: int) -> None:
    """End this process once its leader is gone: before they have met, nobody else would tell it."""
    while os.getppid() == leader:
        time.sleep(_LOOK_S)
    os._exit(1)


def main(folder: str, rank: str, *where: str) -> None:
    """Follow a leader on this machine, on a device of this kind."""
    port, count, limit_s, kind, leader = where
    threading.Thread(target=_end_with, args=(int(leader),), name="ludus-leader", daemon=True).start()
    hide_progress()
    (Path(folder) / here(int(rank))).touch()
    follow(Rendezvous.joined(int(port), int(rank), int(count), float(limit_s)), torch.device(kind))


if __name__ == "__main__":
    main(*sys.argv[1:])
