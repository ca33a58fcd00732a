"""Training examples of a reward model: attempts as token ids, scored positions and their targets.

Examples are stored in the run folder, so that a resumed run trains on the same ones; ids of a run are never
re-tokenized. Targets of a process model come from Monte Carlo rollouts: recorded actions are replayed in a fresh
environment, which must respond equally to equal actions.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ludus.envs.registry import closing
from ludus.errors import ConfigError, UserError
from ludus.rollouts.episode import ChatSession, EngineChatSession
from ludus.rollouts.ledger import Ledger, RolloutKey
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts
from ludus.rollouts.scheduler import Episode, RolloutRequest, SamplingPlan
from ludus.training.collection.demonstrations import Demonstrations, given_dialogues
from ludus.training.datasets.files import load_records, read_rollout_file
from ludus.training.preference.pairs import PreferencePair, pairs_of_file, pairs_of_rollouts, rollout_files
from ludus.training.run.run_dir import RunFolder
from ludus.training.run.session import (
    TrainingSession,
    check_tokenizer,
    check_vocabulary,
    make_engine,
    session_scheduler,
)
from ludus.training.value_models.labels import TurnLabels, examples_of_rollouts, turn_example
from ludus.training.value_models.reward_model import RewardExample, ScoredSequence, action_ends, is_usable
from ludus.types import Segment, Trajectory, grouped

History = tuple[Segment, ...]
"""Segments of an attempt up to and including an action."""


def sample_continuations(
    session: TrainingSession, records: Sequence[tuple[str, RolloutRecord]], num: int
) -> list[Trajectory]:
    """Sample `num` continuations after each action except the last of an attempt; equal histories count once.

    The session's model samples at `rollout.temperature`. Raises UserError if the world has no such task, and
    WorldError if it does not respond as recorded.
    """
    if session.config.engine.is_external:
        raise ConfigError(
            "reward_model.rollouts are sampled by the model that becomes the reward model, in this process.",
            "Unset engine.url.",
        )
    tasks = {task.id: task for task in session.world.tasks("train")}
    histories: dict[tuple[str, tuple[int, ...]], History] = {}
    for _, record in records:
        chain = record.trajectory.chain
        for i in [i for i, segment in enumerate(chain) if segment.kind == "action"][:-1]:
            tokens = tuple(token for segment in chain[: i + 1] for token in segment.tokens)
            histories[record.trajectory.task_id, tokens] = chain[: i + 1]
    if missing := [task_id for task_id, _ in histories if task_id not in tasks]:
        raise UserError(
            f"The world has no task {missing[0]} to continue.", "Use the recipe and the settings of that run."
        )
    requests = [
        RolloutRequest(RolloutKey(number, task_id, sample), tasks[task_id])
        for number, (task_id, _) in enumerate(histories, start=1)
        for sample in range(num)
    ]
    by_number = dict(enumerate(histories.values(), start=1))
    episodes = asyncio.run(_run_rollouts(session, requests, by_number))
    return [e.trajectory for e in episodes if e.trajectory.failure is None]


async def _run_rollouts(
    session: TrainingSession, requests: Sequence[RolloutRequest], histories: dict[int, History]
) -> list[Episode]:
    config, engine = session.config, make_engine(session)
    plan = SamplingPlan("play on", config.rollout.temperature, config.run.seed)
    scheduler = session_scheduler(session, engine, plan, Ledger())
    make_chat = scheduler.make_chat

    def resume_from_history(request: RolloutRequest) -> ChatSession:
        conversation = make_chat(request)
        assert isinstance(conversation, EngineChatSession)
        return replace(conversation, recorded=histories[request.key.step])

    scheduler.make_chat = resume_from_history
    try:
        async with closing(session.world):
            return await scheduler.run(requests)
    finally:
        await engine.close()


EXAMPLES_FILE = "examples.jsonl.gz"


def gather_examples(session: TrainingSession) -> list[RewardExample]:
    """Gather the configured examples, before anything is written. Raises UserError if there are none."""
    settings, limit = session.config.reward_model, session.config.rollout.max_seq_len
    if settings.run is None and settings.data is None:
        raise UserError(
            "The reward model has no training data.", "Pass --run RUN (its rollouts) or --reward_model.data FILE."
        )
    files: list[Path] = []
    if settings.run is not None:
        files = rollout_files(Path(settings.run))
        check_tokenizer(RunFolder(Path(settings.run)), session)
    if settings.kind == "pairwise":
        pairs = (
            pairs_of_rollouts(files, settings.min_reward_gap, limit)
            if settings.data is None
            else pairs_of_file(Path(settings.data), session.renderer, limit)
        )
        examples = [_pair_example(pair) for pair in pairs]
    else:
        rows = _read_usable(files, settings.data, limit)
        further = sample_continuations(session, rows, settings.rollouts) if settings.rollouts else []
        if settings.labels == "inverse":
            examples = asyncio.run(inverse_examples(session, rows))
        else:
            labels = TurnLabels(settings.labels, settings.discount) if settings.kind == "process" else None
            examples = examples_of_rollouts(rows, session.world.rewards, labels, further)
    _check(examples, session)
    return hold_out(examples, settings.held_out, session.config.run.seed)


async def inverse_examples(
    session: TrainingSession, records: Sequence[tuple[str, RolloutRecord]]
) -> list[RewardExample]:
    """Return demonstrations, whose turns have the target 1, and as many of the attempts at their tasks, with 0.

    The attempts are drawn at random by the seed of the run. Raises UserError without demonstrations of these tasks.
    """
    by_task = grouped(records, lambda one: one[1].trajectory.task_id)
    experts = Demonstrations(session, given_dialogues(session))
    tasks = [task for task in session.world.tasks("train") if task.id in by_task]
    async with closing(session.world):
        shown = await experts.replay(tasks)
    if not any(shown.values()):
        raise UserError(
            "reward_model.labels inverse needs demonstrations, and none of the attempted tasks has one.",
            "Use a world with an expert, or set experts.path to dialogues with the ids of these tasks.",
        )
    examples = []
    for task_id, played in shown.items():
        attempts = by_task[task_id]
        random.Random(f"inverse:{session.config.run.seed}:{task_id}").shuffle(attempts)
        rows = [(f"demonstration of {task_id}", one, 1.0) for one in played]
        rows += [(source, record.trajectory, 0.0) for source, record in attempts[: len(played)]]
        for source, one, target in rows:
            examples.append(turn_example(source, one, action_ends(one), (target,) * len(action_ends(one))))
    return examples


def hold_out(examples: Sequence[RewardExample], share: float, seed: int) -> list[RewardExample]:
    """Mark the examples of a share of the prompts as held out: at least one prompt, never all of them."""
    prompts = [example.sequences[0].tokens[: example.prompt_length] for example in examples]
    unique = sorted(set(prompts))
    random.Random(f"held out:{seed}").shuffle(unique)
    num = min(len(unique) - 1, math.ceil(share * len(unique)))
    held_out = set(unique[:num])
    return [replace(example, held_out=prompt in held_out) for example, prompt in zip(examples, prompts, strict=True)]


def load_examples(path: Path) -> list[RewardExample]:
    """Load the examples of a run folder. Raises StorageError if the file is invalid."""
    return load_records(path, RewardExample)


def _read_usable(files: Sequence[Path], data: str | None, limit: int) -> list[tuple[str, RolloutRecord]]:
    if data is not None:
        rollouts = [(f"rollout {n}", record) for n, record in enumerate(read_rollout_file(Path(data)), start=1)]
    else:
        rollouts = [
            (f"{file.name.removesuffix('.jsonl.gz')}/{record.group}/{record.trajectory.sample}", record)
            for file in files
            for record in read_rollouts(file)
        ]
    return [(name, record) for name, record in rollouts if is_usable(record, limit)]


def _pair_example(pair: PreferencePair) -> RewardExample:
    sequences = [
        ScoredSequence(side.tokens, (max(i for i, trains in enumerate(side.trains) if trains),), (target,))
        for side, target in ((pair.chosen, 1.0), (pair.rejected, 0.0))
    ]
    return RewardExample(pair.source, pair.chosen.prompt_length, tuple(sequences))


def _check(examples: Sequence[RewardExample], session: TrainingSession) -> None:
    settings = session.config.reward_model
    where = settings.data or settings.run
    if not examples:
        what = "pair" if settings.kind == "pairwise" else "attempt"
        raise UserError(
            f"{where} has no {what} of at most {session.config.rollout.max_seq_len} tokens.",
            "See docs/use/reward_models.md, or raise rollout.max_seq_len.",
        )
    targets = {target for example in examples for sequence in example.sequences for target in sequence.targets}
    if len(targets) == 1:
        how = {1.0: "succeeded", 0.0: "failed"}.get(min(targets), "have turns of the same value")
        raise UserError(
            f"All {len(examples)} attempts of {where} {how}, and a reward model needs both outcomes.",
            "Use a run with successes and failures, and its world.",
        )
    check_vocabulary((sequence.tokens for example in examples for sequence in example.sequences), session)
