"""Properties that a trajectory derives from its segments, for chains and for trees."""

from dataclasses import replace

import pytest

from ludus.types import Message, Segment, StopReason, Trajectory

PROMPT = Segment("prompt", (1, 2, 3))
FIRST = Segment("action", (10, 11), 0, logprobs=(-0.1, -0.2), versions=(4, 4), finish_reason="stop")
SEEN = Segment("observation", (20, 21, 22, 23), 0)
SECOND = Segment("action", (12,), 1, logprobs=(-0.3,), versions=(5,), finish_reason="stop")


def trajectory(*segments, messages=(), stop=StopReason.ANSWERED):
    return Trajectory("t", 0, segments, tuple(messages), stop)


def branch(parent, *tokens, kind="action"):
    sampled = kind == "action"
    return Segment(
        kind,
        tokens,
        parent=parent,
        logprobs=(-1.0,) * len(tokens) if sampled else (),
        versions=(0,) * len(tokens) if sampled else (),
    )


def test_chain_with_an_intermediate_observation_has_aligned_token_fields():
    t = trajectory(PROMPT, FIRST, SEEN, SECOND)
    assert t.rows == ((0, 1, 2, 3),)
    assert t.token_ids == (1, 2, 3, 10, 11, 20, 21, 22, 23, 12)
    assert t.action_mask == (*(False,) * 3, True, True, *(False,) * 4, True)
    assert t.behavior_logprobs == (0.0, 0.0, 0.0, -0.1, -0.2, 0.0, 0.0, 0.0, 0.0, -0.3)
    assert t.turn_index == (0, 0, 0, 0, 0, 0, 0, 0, 0, 1)
    assert t.versions == (-1, -1, -1, 4, 4, -1, -1, -1, -1, 5)
    assert t.num_action_tokens == 3
    assert t.num_turns == 2


def test_action_mask_selects_exactly_the_sampled_tokens():
    t = trajectory(PROMPT, FIRST, SEEN, SECOND)
    sampled = [token for token, on in zip(t.token_ids, t.action_mask, strict=True) if on]
    logprobs = [lp for lp, on in zip(t.behavior_logprobs, t.action_mask, strict=True) if on]
    assert sampled == [*FIRST.tokens, *SECOND.tokens]
    assert logprobs == [*FIRST.logprobs, *SECOND.logprobs]


def test_final_observation_is_masked_and_empty_trajectory_has_no_tokens():
    ends_on_tool = trajectory(PROMPT, FIRST, SEEN)
    assert ends_on_tool.action_mask[-4:] == (False,) * 4
    assert ends_on_tool.behavior_logprobs[-4:] == (0.0,) * 4
    empty = trajectory()
    assert (empty.rows, empty.token_ids, empty.action_mask, empty.num_turns) == ((), (), (), 0)


def test_empty_action_keeps_token_fields_aligned():
    nothing = Segment("action", (), 1, finish_reason="stop")
    t = trajectory(PROMPT, FIRST, SEEN, nothing)
    assert len(t.token_ids) == len(t.action_mask) == len(t.behavior_logprobs) == len(t.versions) == 9
    assert t.num_turns == 2
    assert t.num_action_tokens == 2


def test_rows_of_a_tree_share_their_prefix():
    #         0 prompt - 1 action - 2 observation - 3 action
    #                             \ 4 observation - 5 action
    #                                             \ 6 action - 7 observation
    t = trajectory(
        PROMPT,
        FIRST,
        SEEN,
        SECOND,
        branch(1, 30, kind="observation"),
        branch(None, 13, 14),
        branch(4, 15),
        branch(None, 31, kind="observation"),
    )
    assert t.rows == ((0, 1, 2, 3), (0, 1, 4, 5), (0, 1, 4, 6, 7))
    assert t.num_action_tokens == 2 + 1 + 2 + 1
    assert t.num_turns == 4


def test_every_leaf_of_a_tree_is_a_row():
    t = trajectory(PROMPT, branch(0, 10), branch(0, 11), branch(0, 12))
    assert t.rows == ((0, 1), (0, 2), (0, 3))
    assert t.num_action_tokens == 3


def test_turn_data_of_rows_with_one_reward_follow_the_order_of_the_rows():
    #         0 prompt - 1 action - 4 action
    #                  \ 2 observation - 3 action
    t = trajectory(PROMPT, FIRST, branch(0, 30, kind="observation"), branch(None, 11), branch(1, 12))
    (path,) = replace(t, shared_reward=True, turn_rewards=(1.0, 2.0, 3.0)).paths()
    assert t.rows == ((0, 2, 3), (0, 1, 4))
    assert path.trajectory.turn_rewards == (2.0, 1.0, 3.0)
    assert [s.tokens for s in path.trajectory.segments if s.kind == "action"] == [(11,), FIRST.tokens, (12,)]


@pytest.mark.parametrize("name", ["chain", "token_ids", "action_mask", "behavior_logprobs", "versions"])
def test_chain_properties_of_a_tree_raise_value_error(name):
    tree = trajectory(PROMPT, FIRST, branch(0, 11))
    with pytest.raises(ValueError, match="2 rows"):
        _ = vars(Trajectory)[name].func(tree)


def said(role, content, **more):
    return Message(role=role, content=content, **more)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "stop", "answer"),
    [
        ([said("user", "q"), said("assistant", "Paris")], StopReason.ANSWERED, "Paris"),
        ([said("user", "q"), said("assistant", "Par")], StopReason.TRUNCATED, ""),
        ([said("user", "q"), said("assistant", "Paris")], StopReason.TIMEOUT, ""),
        ([said("assistant", "Let me see.", tool_calls=[CALL])], StopReason.ANSWERED, ""),
        ([said("assistant", "Paris"), said("tool", "Rome")], StopReason.ANSWERED, ""),
        ([said("user", "Paris")], StopReason.ANSWERED, ""),
        ([], StopReason.ANSWERED, ""),
    ],
)
def test_the_answer_is_the_last_complete_message(messages, stop, answer):
    assert trajectory(PROMPT, FIRST, messages=messages, stop=stop).answer == answer


def test_timings_are_ignored_in_trajectory_equality():
    from ludus.types import Timings

    one = trajectory(PROMPT, FIRST)
    assert one == replace(one, timings=Timings(1.0, 0.5, 0.25))
    assert one != replace(one, reward=0.5)


def test_the_repr_of_a_trajectory_is_one_short_line():
    question: Message = {"role": "user", "content": "long " * 1000}
    shown = repr(trajectory(PROMPT, FIRST, SEEN, SECOND, messages=[question]))
    assert shown == "Trajectory('t', sample=0, reward=0, turns=2, tokens=10, stop_reason='answered')"
