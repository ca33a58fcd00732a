"""Planted faults of the runs of `alarm_table.py` that are not settings: worlds, engines, parts of an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Never

import numpy as np
from torch import Tensor

from ludus.algorithms.algorithm import AdvantageSpec, Need
from ludus.algorithms.tensors import float_dtype, groups_to_compare, per_action
from ludus.engines.base import Request
from ludus.engines.embedded.engine import LocalEngine
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.envs.tool_world import assistant
from ludus.tools.base import Tool, ToolError
from ludus.training.run.session import TrainingSession, local_engine
from ludus.types import Action, Completion, Group, Message, StepResult
from ludus.worlds.guess.world import GuessEnv, GuessWorld, make_guess_world
from ludus.worlds.search.world import SearchWorld, make_search_world

SearchPlugin = Callable[[Mapping[str, object], ToolLimits], SearchWorld]


def search_with(change: Callable[[Tool], Tool]) -> SearchPlugin:
    """Return a plug-in: the search world whose episodes have a changed tool."""

    def make(settings: Mapping[str, object], limits: ToolLimits) -> SearchWorld:
        world = make_search_world(settings, limits)
        vars(world)["environment"] = lambda task: ToolEnv([change(world.tool)], world.rewards, limits)
        return world

    return make


def unavailable(**arguments: object) -> Never:
    raise ToolError("The index is not available.")


renamed_tool = search_with(lambda tool: replace(tool, name="lookup"))
broken_tool = search_with(lambda tool: replace(tool, function=unavailable))


def shown_with(change: Callable[[Sequence[Message]], Iterable[Message]]) -> SearchPlugin:
    """Return a plug-in: the search world whose demonstrations are changed."""

    def make(settings: Mapping[str, object], limits: ToolLimits) -> SearchWorld:
        world = make_search_world(settings, limits)
        plain = world.demonstrations
        vars(world)["demonstrations"] = lambda seed: (
            replace(dialogue, messages=tuple(change(dialogue.messages))) for dialogue in plain(seed)
        )
        return world

    return make


@shown_with
def quotes(messages: Sequence[Message]) -> Iterable[Message]:
    """Quote all passages three times before the answer."""
    found = [message["content"] for message in messages if message["role"] == "tool"]
    return *messages[:-1], assistant("\n".join([*found * 3, f"Answer: {messages[-1]['content']}"]))


@shown_with
def repeats(messages: Sequence[Message]) -> Iterable[Message]:
    """Make each call three times."""
    calls = [turn for turn in pairwise(messages) if turn[1]["role"] == "tool"]
    opening = [message for message in messages if message["role"] in ("system", "user")]
    return *opening, *(message for turn in calls for message in turn * 3), messages[-1]


@shown_with
def russian_thoughts(messages: Sequence[Message]) -> Iterable[Message]:
    """Reason in Russian."""
    return (one | {"reasoning_content": "Ищу ответ."} if "reasoning_content" in one else one for one in messages)


class LostGame(GuessEnv):
    """A game that replies "higher" to the right number."""

    async def step(self, action: Action) -> StepResult:
        if action.message["content"].strip() == str(self._number):
            return StepResult((Message(role="user", content="higher"),), reward=0.0)
        return await super().step(action)


def lost_games(settings: Mapping[str, object], limits: ToolLimits) -> GuessWorld:
    """Return the guess world, in which about three of four games cannot be won."""
    world = make_guess_world(settings, limits)
    vars(world)["environment"] = lambda task: LostGame() if int(task.truth) % 4 else GuessEnv()
    return world


def engine_with(change: Callable[[Request, int], Request]) -> Callable[[TrainingSession], LocalEngine]:
    """Return a plug-in: the embedded engine, whose requests are changed, depending on the version of its weights."""

    def make(session: TrainingSession) -> LocalEngine:
        engine = local_engine(session)
        plain = engine.generate_batch

        async def generate_batch(requests: Sequence[Request]) -> list[Completion]:
            return await plain([change(request, engine.version) for request in requests])

        engine.generate_batch = generate_batch
        return engine

    return make


def colder(request: Request) -> Request:
    """Return the request at temperature 0.6, unless it is greedy."""
    return replace(request, params=replace(request.params, temperature=request.params.temperature and 0.6))


cold_engine = engine_with(lambda request, version: colder(request))
engine_that_cools = engine_with(lambda request, version: colder(request) if version > 1 else request)
engine_of_short_contexts = engine_with(
    lambda request, version: colder(request) if len(request.token_ids) > 512 else request
)


@AdvantageSpec(help="rewards minus the mean of the group, on the last token alone", needs={Need.GROUP})
def last_token(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """The advantage of an episode, not copied to its other tokens."""
    grouped = groups_to_compare(rewards, group, mask)
    num_later = mask.bool().flip(1).cumsum(1).flip(1)
    advantages = per_action(grouped.subtract(grouped.mean()), mask, float_dtype(rewards))
    return advantages * (num_later == 1)


def inverted_clip(*, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The loss of the tokens that the clip should exclude."""
    ratio = ((logprobs - old_logprobs) * mask).exp()
    return -ratio * advantages * mask * ((ratio - 1).abs() > 0.2)


def tokens_per_failure(groups: Sequence[Group]) -> dict[str, float]:
    """A metric that divides by the number of failed calls."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    failed = sum(outcome.status != "ok" for one in episodes for outcome in one.call_outcomes)
    return {"mine/tokens_per_failure": float(np.divide(sum(one.num_action_tokens for one in episodes), failed))}
