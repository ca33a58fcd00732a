"""Dialogues that exceed their budget are rewritten: rows of one attempt, with the turns of the environment."""

import asyncio

import pytest

from ludus.algorithms.spec.resolve import PRESETS
from ludus.config.schema import Config
from ludus.config.sections.rollout import ContextConfig, RolloutConfig
from ludus.envs.registry import build_world
from ludus.envs.tool_world import SUMMARY
from ludus.errors import ConfigError
from ludus.rollouts.dialogues.context import DROPPED, ManagedChatSession, drop_outputs, last_turns
from ludus.rollouts.episode import run_episode
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.scheduler import Episode
from ludus.training.credit.advantages import assign_credit
from ludus.training.rl.validate import check_agents
from ludus.types import Message, StopReason
from small_worlds import (
    RecordingWorld,
    call,
    in_order,
    make_chat,
    make_requests,
    make_scheduler,
    make_task,
    scripted,
    tokenizer,
)

SEARCH = call("echo", text="The capital of a large country in the middle of Europe is Paris.")
LIMITS = RolloutConfig(max_turns=8)


def play(*lines, max_seq_len=2000, **settings):
    engine = scripted(in_order(*lines))
    session = ManagedChatSession(make_chat(engine, max_tokens=max_seq_len), ContextConfig(**settings))
    world = RecordingWorld()
    task = make_task()
    found = asyncio.run(run_episode(task, 0, world.environment(task), session, LIMITS))
    return engine, found


def size(num_searches):
    """The tokens of a dialogue with this many searches."""
    _, found = play(*[SEARCH] * num_searches, "Paris", max_tokens=10_000)
    return len(found.token_ids) - len(found.segments[-1].tokens)


def row_tokens(trajectory):
    return [tuple(t for i in row for t in trajectory.segments[i].tokens) for row in trajectory.rows]


def test_summary_replaces_the_dialogue_and_the_last_turns_stay():
    lines = [SEARCH, SEARCH, "I know it: Paris.", SEARCH, "Still Paris.", "Paris"]
    engine, found = play(*lines, max_tokens=size(1) + 10)
    assert (found.stop_reason, found.reward, found.shared_reward) == (StopReason.ANSWERED, 1.0, True)
    rows = row_tokens(found)
    assert len(rows) == 3
    for request in engine.requests:
        assert any(row[: len(request.token_ids)] == request.token_ids for row in rows)
    second = tokenizer().decode(rows[1])
    assert f"{SUMMARY}I know it: Paris." in second
    assert second.count("<tool_call>") >= 1
    # the messages are those of the environment
    assert [m["role"] for m in found.messages][:4] == ["user", "assistant", "tool", "assistant"]


def test_summary_and_next_action_have_the_same_turn():
    _, found = play(SEARCH, SEARCH, "summary", "Paris", max_tokens=size(1) + 10)
    actions = [segment for segment in found.segments if segment.kind == "action"]
    assert [segment.turn for segment in actions] == [0, 1, 2, 2]
    assert [segment.parent for segment in found.segments if segment.kind == "prompt"] == [None, -1]


def test_rewritten_dialogues_advance_in_lockstep():
    def script(request, turn):
        return "Paris" if "~" in request.episode else [SEARCH, SEARCH, "summary"][turn]

    scheduler = make_scheduler(scripted(script), RecordingWorld(), lockstep=True)
    make, budget = scheduler.make_chat, ContextConfig(max_tokens=size(1) + 10)
    scheduler.make_chat = lambda request: ManagedChatSession(make(request), budget)
    for one in asyncio.run(scheduler.run(make_requests(3))):
        assert (one.trajectory.stop_reason, len(one.trajectory.rows)) == (StopReason.ANSWERED, 2)


def test_summary_is_not_trained_if_switched_off():
    _, found = play(SEARCH, SEARCH, "summary", "Paris", max_tokens=size(1) + 10, train_summary=False)
    assert [segment.turn for segment in found.segments if segment.kind == "action"] == [0, 1, 2]
    text = [tokenizer().decode(segment.tokens) for segment in found.segments if segment.kind == "observation"]
    assert any(one.startswith("summary") for one in text)


def test_outputs_are_dropped_first_and_summarized_if_that_is_not_enough():
    budget = size(2) + 10
    engine, found = play(SEARCH, SEARCH, SEARCH, "Paris", max_tokens=budget, strategy="drop")
    assert found.reward == 1.0
    assert len(engine.requests) == 4
    last = tokenizer().decode(engine.requests[-1].token_ids)
    assert last.count(DROPPED) == 2
    engine, found = play(SEARCH, SEARCH, SEARCH, "Paris", max_tokens=size(3) - 5, strategy="both")
    assert len(engine.requests) == 4
    assert tokenizer().decode(engine.requests[-1].token_ids).count(DROPPED) == 2
    engine, found = play(SEARCH, SEARCH, "summary", "Paris", max_tokens=size(1) + 5, strategy="both", keep_turns=2)
    assert len(engine.requests) == 4
    assert SUMMARY in tokenizer().decode(engine.requests[-1].token_ids)


def test_dialogue_without_outputs_to_drop_stays_one_row():
    _, found = play(SEARCH, SEARCH, SEARCH, "Paris", max_tokens=size(1), strategy="drop", keep_turns=9)
    assert len(found.rows) == 1


def test_dialogue_that_cannot_be_shortened_ends():
    _, found = play(SEARCH, SEARCH, SEARCH, max_tokens=size(1) + 10, max_seq_len=size(2) + 5)
    assert found.stop_reason is StopReason.MAX_TOKENS


def test_rewritten_episode_is_one_member_of_its_group():
    _, long = play(SEARCH, SEARCH, "summary", "Paris", max_tokens=size(1) + 10)
    _, short = play("Lyon", max_tokens=size(1) + 10)
    group = [Episode(RolloutKey(1, "t", i), make_task(), one) for i, one in enumerate((long, short))]
    first, second = assign_credit([group], PRESETS["grpo"])
    assert len(first.advantages) == long.num_action_tokens
    assert set(first.advantages) == {-value for value in second.advantages}


def test_last_turns_and_dropped_outputs():
    def of(*roles):
        return [Message(role=role, content=f"{role}{i}") for i, role in enumerate(roles)]

    messages = of("user", "assistant", "tool", "assistant", "tool", "tool")
    assert last_turns(messages, 1) == messages[3:]
    assert last_turns(messages, 0) == []
    assert last_turns(messages, 5) == messages
    assert [m["content"] for m in drop_outputs(messages, 1)][2:5] == [DROPPED, "assistant3", "tool4"]
    assert messages[2]["content"] == "tool2"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"context": {"max_tokens": 500}, "branch": {"branches": 1, "turns": [0]}}, "rollout.branch"),
        ({"context": {"max_tokens": 500}, "partial": {"tokens": 10}}, "rollout.partial"),
        ({"context": {"max_tokens": 640}, "max_seq_len": 640}, "not below"),
        ({"context": {"max_tokens": 500}, "agent": {"command": ["a"]}}, "rollout.context"),
    ],
)
def test_settings_that_do_not_apply_are_refused(changes, text):
    config = Config.model_validate({"rollout": changes})
    world = build_world(config.env, config.rollout, config.sandbox)
    with pytest.raises(ConfigError, match=text):
        check_agents(config, world)
