"""Wrong rewards, which make the runs of `alarm_table.py` show an alarm."""

from ludus.types import Task, Trajectory


def more_calls(task: Task, trajectory: Trajectory) -> float:
    """Return the number of tool calls, at most 4."""
    return min(4, len(trajectory.call_outcomes))


def no_call(task: Task, trajectory: Trajectory) -> float:
    """Return 1 without a tool call."""
    return float(not trajectory.call_outcomes)


def longer(task: Task, trajectory: Trajectory) -> float:
    """Return the number of sampled tokens in hundreds, at most 4."""
    return min(4.0, trajectory.num_action_tokens / 100)


def unknown_tool(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if a call failed."""
    return float(any(outcome.status != "ok" for outcome in trajectory.call_outcomes))


def copied(task: Task, trajectory: Trajectory) -> float:
    """Return the length of the answer that is copied from an observation, in hundreds of characters, at most 2."""
    seen = any(trajectory.answer and trajectory.answer in outcome.output for outcome in trajectory.outcomes)
    return min(2.0, len(trajectory.answer) / 100) if seen else 0.0
