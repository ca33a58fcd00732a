"""Step pairs ranked by a process reward model: the policy update of AgentPRM (arXiv:2502.10325, stage 3).

At each state of the attempts the policy samples further actions; the best against the worst by the values of the model
is a pair. The environment is not needed. Training on these pairs with DPO and repeating both stages is online DPO.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ludus.engines.base import Engine, Request
from ludus.errors import ConfigError, EngineError, UserError
from ludus.rollouts.episode import EngineChatSession
from ludus.rollouts.ledger import Ledger, RolloutKey
from ludus.rollouts.rollout_files import RolloutRecord
from ludus.rollouts.scheduler import RolloutRequest, SamplingPlan
from ludus.training.preference.pairs import PreferencePair, groups_of, pair_of_step, steps_of
from ludus.training.rl.build import probe_tokens
from ludus.training.rl.weight_sync import WeightSync
from ludus.training.run.session import TrainingSession, make_engine, session_scheduler
from ludus.training.value_models.reward_model import (
    RewardEnsemble,
    ScoredSequence,
    check_ensemble,
    check_reward_vocabulary,
    find_reward_model,
    load_ensemble,
)

log = logging.getLogger(__name__)

Step = tuple[str, tuple[int, ...]]
"""Id of a task, and the tokens before an action."""


def check_ranking(models: Sequence[str]) -> None:
    """Raise UserError for a path without a reward model, and ConfigError for one that does not score turns."""
    check_ensemble(models)
    for path in models:
        if (kind := find_reward_model(Path(path))[1]) != "process":
            raise ConfigError(
                f"preference.model {path} is {kind}; it scores whole attempts, not actions.",
                "Train one with reward_model.kind = process.",
            )


@dataclass(frozen=True)
class RankedPairs:
    """A `PairMaker`: pairs of the actions at each step of a group with the best and the worst value."""

    session: TrainingSession
    model: RewardEnsemble

    @classmethod
    def of(cls, session: TrainingSession) -> RankedPairs:
        """Load the model of the settings. Raises UserError as `check_ranking`, and for one of another vocabulary."""
        models = session.config.preference.models
        check_ranking(models)
        check_reward_vocabulary(models, session.tokenizer)
        return cls(session, load_ensemble(models, 0.0, session.config))

    def __call__(
        self, name: str, records: Iterable[RolloutRecord], min_gap: float, max_tokens: int
    ) -> list[PreferencePair]:
        """Return the pairs of the attempts in the file `name`."""
        settings = self.session.config.preference
        taken = [
            (source, (group[0].trajectory.task_id, history), [*actions])
            for source, group in groups_of(name, records)
            for history, actions in steps_of(group, max_tokens).items()
        ]
        if settings.actions:
            sampled = sample_actions(self.session, [step for _, step, _ in taken], settings.actions, max_tokens)
            for (_, _, actions), further in zip(taken, sampled, strict=True):
                actions += [action for action in dict.fromkeys(further) if action not in actions]
        several = [(source, history, actions) for source, (_, history), actions in taken if len(actions) > 1]
        inputs = [
            ScoredSequence(history + action, (len(history) + len(action) - 1,), (0.0,))
            for _, history, actions in several
            for action in actions
        ]
        found = iter(self.model.predict(inputs, settings.microbatch_tokens) if inputs else ())
        pairs: list[PreferencePair] = []
        for source, history, actions in several:
            values = {action: next(found).values[0] for action in actions}
            pairs += pair_of_step(source, history, values, min_gap)
        return pairs


def sample_actions(
    session: TrainingSession, steps: Sequence[Step], num: int, max_tokens: int
) -> list[list[tuple[int, ...]]]:
    """Sample `num` actions of the session's model at each step, at `rollout.temperature`.

    Actions without tokens are left out, and histories that leave no room have none. Raises UserError if the world has
    no such task.
    """
    engine = make_engine(session)

    async def sample() -> list[list[tuple[int, ...]]]:
        try:
            return await _sample(session, engine, steps, num, max_tokens)
        finally:
            await engine.close()

    return asyncio.run(sample())


async def _sample(
    session: TrainingSession, engine: Engine, steps: Sequence[Step], num: int, max_tokens: int
) -> list[list[tuple[int, ...]]]:
    config = session.config
    plan = SamplingPlan("actions", config.rollout.temperature, config.run.seed)
    make_chat = session_scheduler(session, engine, plan, Ledger()).make_chat
    tasks = {task.id: task for task in session.world.tasks("train")}
    at_once = asyncio.Semaphore(config.rollout.concurrency)

    async def one(number: int, task_id: str, history: tuple[int, ...], sample: int) -> tuple[int, ...]:
        if task_id not in tasks:
            raise UserError(f"The world has no task {task_id}.", "Use the recipe and the settings of that run.")
        chat = make_chat(RolloutRequest(RolloutKey(number, task_id, sample), tasks[task_id]))
        assert isinstance(chat, EngineChatSession)
        room = min(max_tokens, engine.context_tokens) - len(history)
        if room <= 0:
            return ()
        params = chat.action_params(room, 0)
        if chat.guided:
            params = replace(params, guide=chat.renderer.guide(session.world.environment(tasks[task_id]).tools))
        try:
            async with at_once:
                return (await engine.generate(Request(chat.episode, history, params))).tokens
        except EngineError as error:
            log.warning("An action of task %s could not be sampled: %s", task_id, error.message)
            return ()
        finally:
            chat.close()

    await WeightSync.of(config, session.model, engine, probe_tokens(session)).publish(0)
    calls = [one(number, *step, i) for number, step in enumerate(steps, start=1) for i in range(num)]
    found = await asyncio.gather(*calls)
    return [[tokens for tokens in found[i : i + num] if tokens] for i in range(0, len(found), num)]
