"""A process of a learner that follows: `python -m ludus.training.follow FOLDER RANK COUNT`.

It meets the others in FOLDER, hears from the first which run it is, builds the parts that learn, and does
what it is told until it is told to stop. Under torchrun `follow_launched` does the same in its place.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch
from torch import distributed

from ludus.algorithms.resolve import resolve
from ludus.config.schema import Config
from ludus.engines.loading import hide_progress
from ludus.errors import LearnerError
from ludus.training.checkpoint import list_checkpoints
from ludus.training.crew import (
    Follower,
    Gather,
    JudgeLearns,
    JudgeSays,
    Probe,
    Save,
    Score,
    Start,
    Stop,
    Train,
    here,
    join,
    meeting_place,
)
from ludus.training.judges import part_name, say, teach
from ludus.training.run import RunFolder, log_into
from ludus.training.scoring import Scorer
from ludus.training.session import Session, open_session
from ludus.training.sharding import gathered
from ludus.training.shards import save_shards
from ludus.training.start import LearnerParts, make_parts
from ludus.training.sync import probe_logprobs

log = logging.getLogger("ludus.follow")


def follow(device: torch.device) -> None:
    """Follow the leader of the group that this process has joined."""
    follower = Follower()
    command = follower.hear()
    if not isinstance(command, Start):
        return
    if command.folder.is_dir():  # not so on another machine without a shared disk
        log_into(RunFolder(command.folder), f"rank {distributed.get_rank()}")
    log.info("follows the learner (%d)", os.getpid())
    try:
        _obey_all(follower, command, device)
    except Exception as error:
        log.error("it cannot go on: %s: %s", type(error).__name__, error)
        raise


def _obey_all(follower: Follower, command: Start, device: torch.device) -> None:
    """Build the parts that learn, and do what is heard until it is to stop."""
    if command.config.training.learner.shard:
        follower.split_on(device)
    session = open_session(command.config, cold_start(command.config, command.folder))
    learning = make_parts(session, resolve(command.config.algorithm), follower, command.resumed)
    while not isinstance(heard := follower.hear(), Stop):
        try:
            obey(heard, session, learning)
        except LearnerError as error:  # the leader raises it as well, and decides
            log.warning("%s", error)


def obey(command: object, session: Session, learning: LearnerParts) -> None:
    """Do this process's part of a command."""
    learner, judge = learning.learner, learning.judge
    match command:
        case Score(name, rows, entropy, keep):
            learner.ask(name, rows, entropy, keep=keep)
        case Train(rows, seed, algorithm):
            learner.algorithm = algorithm
            learner.train(rows, seed)
        case JudgeSays(rows, solved, after) if judge is not None:
            say(judge, rows, solved, after)
        case JudgeLearns(rows, tables, solved) if judge is not None:
            teach(judge, rows, tables, solved)
        case Probe(tokens):
            probe_logprobs(Scorer(session.model), tokens)
        case Gather():
            gathered(session.model)
        case Save(folder):
            parts = {} if judge is None else {part_name(judge): judge.state()}
            save_shards(folder, session.model, learner.optimiser, parts)


def cold_start(config: Config, folder: Path) -> Path | None:
    """The checkpoint that a run from scratch begins with."""
    if not config.model.from_scratch:
        return None
    return list_checkpoints(RunFolder(folder / "cold_start").checkpoints)[-1][1]


def follow_launched(device: torch.device) -> None:
    """Follow under torchrun, which says where the others are."""
    join(device, "env://", -1, -1)
    try:
        follow(device)
    finally:
        distributed.destroy_process_group()


def main(folder: str, rank: str, count: str, kind: str) -> None:
    """Follow a leader on this machine, on a device of this kind."""
    device = torch.device(kind)
    hide_progress()
    (Path(folder) / here(int(rank))).touch()
    join(device, meeting_place(Path(folder)), int(rank), int(count))
    try:
        follow(device)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
