"""Wrong rewards, which make the runs of `alarm_table.py` show an alarm."""

from ludus.types import Task, Trajectory


def more_calls(task: Task, trajectory: Trajectory) -> float:
    """Return the number of tool calls, at most 4."""
    return min(4, len(trajectory.call_outcomes))


def no_call(task: Task, trajectory: Trajectory) -> float:
    """Return 3 without a tool call."""
    return 3.0 * (not trajectory.call_outcomes)


def longer(task: Task, trajectory: Trajectory) -> float:
    """Return the number of sampled tokens in hundreds, at most 4."""
    return min(4.0, trajectory.num_action_tokens / 100)


def failed_call(task: Task, trajectory: Trajectory) -> float:
    """Return 3 if a call failed."""
    return 3.0 * any(outcome.status != "ok" for outcome in trajectory.call_outcomes)
