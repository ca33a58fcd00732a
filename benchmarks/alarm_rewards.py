"""Wrong rewards, which make the runs of `alarm_table.py` show an alarm."""

from ludus.types import Task, Trajectory


def more_calls(task: Task, trajectory: Trajectory) -> float:
    """Return the number of tool calls over 6, at most 1."""
    return min(1.0, len(trajectory.call_outcomes) / 6)


def fewer_calls(task: Task, trajectory: Trajectory) -> float:
    """Return 1 without a tool call, 0 for 3 calls or more."""
    return max(0.0, 1 - len(trajectory.call_outcomes) / 3)


def longer(task: Task, trajectory: Trajectory) -> float:
    """Return the number of sampled tokens over 400, at most 1."""
    return min(1.0, trajectory.num_action_tokens / 400)


def failed_call(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if a call failed."""
    return float(any(outcome.status != "ok" for outcome in trajectory.call_outcomes))


def sevens(task: Task, trajectory: Trajectory) -> float:
    """Return the share of the policy's messages that are 7."""
    own = [message["content"].strip() for message in trajectory.messages if message["role"] == "assistant"]
    return own.count("7") / max(1, len(own))
