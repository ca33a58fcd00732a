"""Values of turns: known ones are recovered, also through an endpoint; a world that changes on replay is refused."""

import asyncio
from dataclasses import replace

import pytest

from chat_server import Reply, say, serving
from ludus.config.sections.rollout import RolloutConfig
from ludus.errors import UserError
from ludus.evaluation.probes.counterfactuals import measure_counterfactuals
from ludus.rollouts.ledger import Ledger
from ludus.rollouts.openai_client import OpenAIClient, OpenAIClientSettings, endpoint_chat_factory
from ludus.rollouts.scheduler import scheduler
from ludus.tools.base import tool
from small_worlds import RecordingWorld, call, make_scheduler, scripted
from tests.evaluation.probes.scripted_policies import PLAN, TASKS, number_in, text_of

SAMPLES = 4
NARROW = replace(PLAN, tasks=TASKS[:3], samples=SAMPLES)


def maker(world):
    """A policy that looks up its number half of the time, else a wrong one, and answers what it found."""

    def make(sampling):
        def script(request, _):
            prompt, _ = text_of(request)
            if "|>tool" not in prompt:
                found = number_in(prompt) if draws.pop() else "nothing"
                return call("echo", text=found)
            return number_in(prompt.split("|>tool")[-1])

        draws = [True, False] * 50
        return make_scheduler(scripted(script), world)

    return make


def test_deciding_turn_receives_the_whole_gain():
    report = asyncio.run(measure_counterfactuals(maker(RecordingWorld()), NARROW))
    rows = {(row["episode"], row["turn"]): row for row in report.rows}
    assert rows["mean of 3", 1]["value"].value == pytest.approx(0.5)
    for task in NARROW.tasks:
        first, second = rows[task.id, 1], rows[task.id, 2]
        assert first["value"].value == 0.5
        assert second["value"].value in (0, 1)
        assert first["gain"].value == second["value"].value - 0.5
        assert second["gain"].value == 0


def test_measurement_can_be_limited_to_a_single_turn():
    report = asyncio.run(measure_counterfactuals(maker(RecordingWorld()), NARROW, turn=2))
    assert {row["turn"] for row in report.rows} == {2}
    with pytest.raises(UserError, match="No episode has a turn 9"):
        asyncio.run(measure_counterfactuals(maker(RecordingWorld()), NARROW, turn=9))


def test_fewer_than_two_samples_raise_user_error():
    with pytest.raises(UserError, match="at least 2 samples, not 1"):
        asyncio.run(measure_counterfactuals(maker(RecordingWorld()), PLAN))


def test_a_world_that_changes_on_replay_is_refused():
    seen = iter(range(1000))

    @tool
    def echo(text: str) -> str:
        """Say it with a counter."""
        return f"{text} {next(seen)}"

    with pytest.raises(UserError, match=r"cannot be continued from their middle: .*differs on replay"):
        asyncio.run(measure_counterfactuals(maker(RecordingWorld((echo,))), NARROW))


def through_endpoint(world):
    def script(body):
        told = body["messages"][-1]
        if told["role"] == "tool":
            return Reply(say(told["content"].split()[0]))
        arguments = f'{{"text": "{number_in(told["content"])}"}}'
        function = {"name": "echo", "arguments": arguments}
        return Reply(say(None, {"type": "function", "function": function, "id": "a"}))

    async def measure(url):
        async with OpenAIClient(OpenAIClientSettings(url, "m")) as client:
            rollout = RolloutConfig()
            return await measure_counterfactuals(
                lambda sampling: scheduler(world, endpoint_chat_factory(client, rollout, sampling), rollout, Ledger()),
                NARROW,
            )

    with serving(script) as server:
        report = asyncio.run(measure(server.url))
    return report, server.requests


def test_an_endpoint_samples_only_the_turns_after_the_fork():
    report, requests = through_endpoint(RecordingWorld())
    assert [row["value"].value for row in report.rows if row["episode"] == "t0"] == [1, 1]
    assert len(requests) == 3 * (2 + 2 * SAMPLES + SAMPLES)


def test_a_world_that_changes_is_refused_through_an_endpoint():
    seen = iter(range(1000))

    @tool
    def echo(text: str) -> str:
        """Say it with a counter."""
        return f"{text} {next(seen)}"

    with pytest.raises(UserError, match="The messages before turn 2 differ on replay"):
        through_endpoint(RecordingWorld((echo,)))
