"""The search of a system prompt: it finds the prompt that a scripted policy needs."""

import asyncio
import sys

import pytest

from ludus.errors import EngineError, UserError
from ludus.evaluation.prompt_search import search_prompt, system_prompt, transcript, with_system_prompt
from ludus.rewards.base import Reward
from ludus.types import Message, StopReason, Task, Trajectory

REWARDS = (Reward("right", lambda task, trajectory: 0.0, outcome=True),)
TASKS = [
    Task(str(i), (Message(role="system", content="Answer."), Message(role="user", content=f"{i} + 1?")), i + 1)
    for i in range(8)
]


async def sample(tasks):
    """Episodes of a policy that is right if its system prompt mentions steps."""
    return [
        Trajectory(
            task.id,
            i,
            (),
            (*task.prompt, Message(role="assistant", content="42")),
            StopReason.ANSWERED,
            rewards={"right": float("step" in system_prompt(task))},
        )
        for i, task in enumerate(tasks)
    ]


def search(reflect, tasks=TASKS, episodes=40):
    return asyncio.run(search_prompt(tasks, sample, reflect, REWARDS, episodes=episodes, seed=0))


def test_search_returns_the_prompt_with_the_highest_success():
    asked = []

    async def reflect(prompt):
        asked.append(prompt)
        return "```\nAnswer in one step.\n```" if len(asked) == 2 else "```\nAnswer quickly.\n```"

    assert search(reflect) == "Answer in one step."
    assert "The task was not solved. Rewards: right = 0. The episode ended by answered." in asked[0]
    assert "assistant: 42" in asked[0]


def test_search_keeps_the_first_prompt_if_none_is_better():
    async def reflect(prompt):
        return "```\nAnswer quickly.\n```"

    assert search(reflect) == "Answer."


def test_error_of_the_reflection_stops_the_search():
    async def reflect(prompt):
        raise EngineError("the server is gone")

    with pytest.raises(EngineError, match="the server is gone"):
        search(reflect)


def test_tasks_with_different_system_prompts_are_rejected():
    with pytest.raises(UserError, match="different system prompts"):
        search(None, [TASKS[0], with_system_prompt(TASKS[1], "Think.")])


def test_missing_package_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gepa", None)
    with pytest.raises(UserError, match=r"ludus\[gepa\]"):
        search(None)


def test_task_without_a_system_message_gets_one():
    task = Task("t", (Message(role="user", content="q"),), None)
    assert system_prompt(task) == ""
    assert [m["role"] for m in with_system_prompt(task, "Answer.").prompt] == ["system", "user"]
    assert with_system_prompt(TASKS[0], "Think.").prompt == (
        Message(role="system", content="Think."),
        TASKS[0].prompt[1],
    )


def test_transcript_shows_calls_and_keeps_both_ends_of_a_long_text():
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"item": "saw"}'}}
    said = Message(role="assistant", content="", reasoning_content="Look.", tool_calls=[call])
    assert transcript([said]) == 'assistant: Look. look {"item": "saw"}'
    long = transcript([Message(role="tool", content="a" * 9000 + "end")])
    assert (len(long), long.endswith("end"), "\n...\n" in long) == (6005, True, True)
