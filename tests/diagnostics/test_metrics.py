"""The metrics of a step against hand-computed values."""

import math
from dataclasses import replace

import pytest

from ludus.diagnostics.metrics import LOW_ENTROPY_GROUPS, SAMPLED_ENTROPY, rollout_metrics
from ludus.types import Failure, Group, Segment, StopReason, Task, ToolOutcome, ToolStatus, Trajectory


def call(tool="find", status=ToolStatus.OK, truncated=False, **more):
    return ToolOutcome("id", tool, status, "text", truncated, **more)


def attempt(reward, actions=(2,), stop=StopReason.ANSWERED, outcomes=(), failure=None, **parts):
    """A prompt of 3 tokens, then for each entry of `actions` an action of so many, 1 observed between."""
    segments = [Segment("prompt", (1, 1, 1))]
    for turn, size in enumerate(actions):
        if turn:
            segments.append(Segment("observation", (9,), turn=turn - 1))
        segments.append(Segment("action", (5,) * size, turn=turn, logprobs=(-1.0,) * size, versions=(0,) * size))
    return Trajectory(
        task_id="t",
        sample=0,
        segments=tuple(segments),
        messages=(),
        stop_reason=stop,
        outcomes=tuple(outcomes),
        rewards=parts,
        reward=reward,
        failure=failure,
    )


VERDICT = ToolOutcome("", "verdict", ToolStatus.OK, "left by the environment")


def group(*trajectories):
    return Group(Task("t", (), truth=None), trajectories)


MIXED = group(
    attempt(1.5, actions=(2, 4), outcomes=[call(cost=1.5), call("sum", cost=0.25, retried=True)], right=1.0, brief=0.5),
    attempt(0.5, actions=(10,), outcomes=[VERDICT], stop=StopReason.TRUNCATED, right=0.0, brief=0.5),
    attempt(0.0, failure=Failure("engine", "gone", 3), stop=StopReason.FAILED),
)
SOLVED = group(
    attempt(1.0, actions=(1, 1, 2), outcomes=[call(status=ToolStatus.RAISED, truncated=True)], right=1.0),
    attempt(
        1.0, actions=(4,), outcomes=[call("made_up", ToolStatus.UNKNOWN_TOOL)], stop=StopReason.MAX_TURNS, right=1.0
    ),
)


def test_rollout_metrics_of_two_groups_equal_hand_computed_values():
    """Four finished episodes: rewards 1.5, 0.5, 1, 1; action tokens 6, 10, 4, 4; all tokens 10, 13, 9, 7."""
    metrics = rollout_metrics([MIXED, SOLVED], success="right")
    stops = {f"episode/stop/{reason}": 0.0 for reason in StopReason}
    statuses = {f"tools/status/{status}": 0.0 for status in ToolStatus}
    expected = {
        "episodes/count": 5,
        "episodes/finished": 4,
        "groups/count": 2,
        "reward/mean": 1.0,
        "reward/std": math.sqrt((0.25 + 0.25 + 0 + 0) / 4),
        "reward/brief": (0.5 + 0.5) / 4,
        "reward/right": 3 / 4,
        "success/mean": 3 / 4,
        "response_length/mean": 24 / 4,
        "response_length/max": 10,
        "length/total_tokens/mean": 39 / 4,
        "turns/mean": (2 + 1 + 3 + 1) / 4,
        SAMPLED_ENTROPY: 1.0,
        LOW_ENTROPY_GROUPS: 0,
        "tools/calls_per_episode": 4 / 4,
        "tools/error_rate": 2 / 4,
        "tools/truncated_rate": 1 / 4,
        "tools/cost_per_episode": (1.5 + 0.25) / 4,
        **statuses,
        "tools/status/ok": 2 / 4,
        "tools/status/raised": 1 / 4,
        "tools/status/unknown_tool": 1 / 4,
        "tools/find/calls": 2,
        "tools/find/error_rate": 1 / 2,
        "tools/find/timeout_rate": 0,
        "tools/find/retried": 0,
        "tools/find/cost": 1.5 / 4,
        "tools/sum/calls": 1,
        "tools/sum/error_rate": 0,
        "tools/sum/timeout_rate": 0,
        "tools/sum/retried": 1,
        "tools/sum/cost": 0.25 / 4,
        "text/repeated": 9 / 24,  # of ten equal tokens, all but the first
        "text/copied": 0,
        "text/foreign_script": 0,
        "tools/repeated": 0,
        "tools/unused_results": 0,
        "tools/sequences": 1,
        **stops,
        "episode/stop/answered": 2 / 5,
        "episode/stop/truncated": 1 / 5,
        "episode/stop/max_turns": 1 / 5,
        "episode/stop/failed": 1 / 5,
        "groups/zero_variance": 1 / 2,
        "groups/reward_std": 0.5 / 2,
        "groups/solve_all": 1 / 2,
        "groups/solve_none": 0,
    }
    assert metrics == pytest.approx(expected)
    assert list(metrics) == list(expected)


def test_unknown_tool_call_adds_no_per_tool_metric():
    metrics = rollout_metrics([SOLVED], success="right")
    assert "tools/made_up/calls" not in metrics
    assert metrics["tools/status/unknown_tool"] == 0.5


def test_metric_names_do_not_depend_on_episode_results():
    empty = rollout_metrics([], success="right")
    full = rollout_metrics([group(attempt(0.0, right=0.0), attempt(0.0))], success="right")
    assert [n for n in full if not n.startswith("reward/") or n in empty] == list(empty)
    assert set(empty.values()) == {0.0}


def test_success_metrics_are_omitted_without_an_outcome_reward():
    metrics = rollout_metrics([SOLVED])
    assert not {"success/mean", "groups/solve_all", "groups/solve_none"} & metrics.keys()
    assert metrics["groups/zero_variance"] == 1.0


def test_a_missing_outcome_is_not_a_success():
    metrics = rollout_metrics([group(attempt(0.0), attempt(0.0, right=0.0))], success="right")
    assert (metrics["success/mean"], metrics["groups/solve_none"], metrics["groups/solve_all"]) == (0.0, 1.0, 0.0)


def test_group_of_failed_episodes_is_excluded_from_group_shares():
    lost = group(attempt(0.0, failure=Failure("engine", "gone", 3), stop=StopReason.FAILED))
    metrics = rollout_metrics([lost, MIXED], success="right")
    assert (metrics["groups/count"], metrics["groups/zero_variance"]) == (2, 0.0)
    assert rollout_metrics([lost, SOLVED], success="right")["groups/zero_variance"] == 1.0


@pytest.mark.parametrize(
    "lost", [attempt(-9.0, stop=StopReason.FAILED), attempt(-9.0, failure=Failure("engine", "gone", 3))]
)
def test_episode_with_failure_or_failed_stop_reason_is_excluded_from_means(lost):
    metrics = rollout_metrics([group(lost, attempt(1.0))])
    assert (metrics["reward/mean"], metrics["episodes/finished"]) == (1.0, 1.0)


def test_equal_rewards_have_exactly_zero_standard_deviation():
    """The mean of three times 0.1 is not 0.1 in floating point; the deviation is 0 all the same."""
    assert rollout_metrics([group(*[attempt(0.1)] * 3)])["reward/std"] == 0.0


def test_token_shared_by_two_rows_counts_once():
    """Prompt 3, shared action 2, then two alternatives of 4 and 1 tokens."""
    tree = Trajectory(
        task_id="t",
        sample=0,
        segments=(
            Segment("prompt", (1, 1, 1)),
            Segment("action", (5, 5)),
            Segment("action", (6,) * 4, turn=1, parent=1),
            Segment("action", (7,), turn=1, parent=1),
        ),
        messages=(),
        stop_reason=StopReason.ANSWERED,
    )
    metrics = rollout_metrics([group(tree)])
    assert metrics["response_length/mean"] == 7
    assert metrics["length/total_tokens/mean"] == 10


def test_call_durations_do_not_change_rollout_metrics():
    fast, slow = (rollout_metrics([group(attempt(1.0, outcomes=[call(seconds=s)]))]) for s in (0.0, 9.0))
    assert fast == slow


def sampled(logprobs, reward=1.0):
    """An attempt whose one action has these log-probabilities."""
    num = len(logprobs)
    action = Segment("action", (1,) * num, 0, logprobs=tuple(logprobs), versions=(0,) * num)
    return replace(attempt(reward), segments=(Segment("prompt", (1,)), action))


def test_entropy_is_averaged_over_all_groups_including_dropped_ones():
    certain, torn = sampled([-0.001, -0.002]), sampled([-1.0, -0.5, -0.3], reward=0.0)
    metrics = rollout_metrics([group(certain, certain), group(certain, torn), group(certain)])
    assert metrics[SAMPLED_ENTROPY] == pytest.approx((4 * 0.003 + 1.8) / 11, abs=1e-12)
    assert metrics[LOW_ENTROPY_GROUPS] == pytest.approx(2 / 3)
    unrecorded = replace(attempt(1.0), segments=(Segment("prompt", (1,)),))
    assert rollout_metrics([group(unrecorded)])[LOW_ENTROPY_GROUPS] == 0


def test_truncated_call_rate_is_divided_by_the_number_of_calls():
    """Two episodes, five calls of three tools, two of them cut."""
    calls = [call(truncated=True), call(), call("sum", truncated=True), call("sum"), call("other")]
    metrics = rollout_metrics([group(attempt(1.0, outcomes=calls), attempt(0.0))])
    assert metrics["tools/truncated_rate"] == 2 / 5
    assert metrics["tools/calls_per_episode"] == 5 / 2
