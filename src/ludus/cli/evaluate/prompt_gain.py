"""The gain by an optimised prompt, for `ludus doctor ENV --model M --optimise-prompt N`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from ludus.cli.evaluate.eval import EvalBackend
from ludus.config.schema import Config
from ludus.engines.remote.http_client import check_reachable
from ludus.envs.base import World
from ludus.errors import EngineError, UserError
from ludus.evaluation.prompt_search import search_prompt, system_prompt, with_system_prompt
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.openai_client import OpenAIClient, OpenAIClientSettings
from ludus.rollouts.scheduler import RolloutRequest, SamplingPlan
from ludus.types import SamplingParams, Task, Trajectory

_REFLECTION = SamplingParams(temperature=1.0, max_new_tokens=2048)


def reflection_client(args: argparse.Namespace) -> OpenAIClient:
    """Return the client of the model that proposes prompts: --reflection, or the endpoint under test.

    Raises UserError without either, EngineError if the server is unreachable.
    """
    if args.reflection is None and args.endpoint is None:
        raise UserError(
            "--optimise-prompt needs a model that proposes prompts.",
            "Add --reflection URL NAME, an OpenAI-compatible server.",
        )
    url, name = args.reflection or (args.endpoint, args.model)
    check_reachable(url)
    return OpenAIClient(OpenAIClientSettings(url, name))


async def optimised_prompt(
    args: argparse.Namespace, config: Config, world: World, backend: EvalBackend, tasks: Sequence[Task]
) -> str:
    """Return the best system prompt after about `args.optimise_prompt` episodes on these tasks."""
    runner = backend.scheduler(SamplingPlan("evaluate", config.rollout.temperature, config.run.seed))
    number = 0

    async def sample(batch: Sequence[Task]) -> Sequence[Trajectory]:
        nonlocal number
        number += 1  # the step of the keys, so that repeated tasks have new seeds
        requests = [RolloutRequest(RolloutKey(number, task.id, i), task) for i, task in enumerate(batch)]
        return [episode.trajectory for episode in await runner.run(requests)]

    async with reflection_client(args) as client:

        async def reflect(prompt: str) -> str:
            params = replace(_REFLECTION, seed=number)
            answer = await client.chat([{"role": "user", "content": prompt}], [], params, 0)
            if answer is None:
                raise EngineError(
                    "The reflection prompt exceeds the context of its model.", "Use another --reflection."
                )
            return answer.action.message["content"]

        budget, seed = args.optimise_prompt, config.run.seed
        return await search_prompt(tasks, sample, reflect, world.rewards, episodes=budget, seed=seed)


def changed_tasks(tasks: Sequence[Task], text: str) -> list[Task]:
    """Return the tasks with this system prompt, unchanged if they have it already."""
    return [task if system_prompt(task) == text else with_system_prompt(task, text) for task in tasks]
