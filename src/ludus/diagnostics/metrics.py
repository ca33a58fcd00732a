"""Metrics of a step that come from its rollouts.

The names depend on the reward parts, tools and trees of a step, never on the outcome of an episode. A
share whose denominator is 0 is 0. An episode with an infrastructure failure counts in `episode/stop/failed` and
`episodes/count` only. No metric depends on wall-clock time.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, cast

from ludus.config.schema import DiagnosticsConfig
from ludus.diagnostics.alarms import GROUP_STD, JUDGE, UNTESTED
from ludus.diagnostics.behavior_metrics import behavior_metrics
from ludus.diagnostics.history import SUCCESS
from ludus.plugins import check_numbers, find_plugin, result_error
from ludus.types import WORLD_TAG, Group, StopReason, ToolStatus, Trajectory, role_of_agent

SAMPLED_ENTROPY: Final = "policy/sampled_entropy"
"""Mean of `-logprob` over the action tokens of all episodes, dropped groups included, in nats: an unbiased
estimate of the entropy of the distribution that was sampled."""
LOW_ENTROPY_GROUPS: Final = "groups/low_entropy"
"""Share of the groups in which that mean is below `MIN_ENTROPY`."""
MIN_ENTROPY: Final = 0.02
"""Nats per action token below which a policy has collapsed onto one continuation."""
_WORLD_METRICS: Final = {
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "zero_variance": "groups/zero_variance",
    "action_tokens": "response_length/mean",
    "turns": "turns/mean",
    "tool_calls": "tools/calls_per_episode",
    "tool_errors": "tools/error_rate",
}
"""Metrics of each world of a mixture, by the metrics of all worlds that they correspond to."""
_NO_TOOL = (ToolStatus.UNKNOWN_TOOL, ToolStatus.MALFORMED)
"""Calls without a tool: the model invents the name, so metrics by name would be unbounded."""


def rollout_metrics(
    groups: Sequence[Group], success: str | None = None, equal: Sequence[bool | None] = ()
) -> dict[str, float]:
    """Return the metrics of one step's groups, in a fixed order.

    `success` names the reward part that is 1 if the task was solved; it adds `success/mean`, `groups/solve_all`
    and `groups/solve_none`. A missing part counts as 0. Standard deviations have `ddof=0`. Lengths are in tokens,
    and a token that several rows share counts once; tools and stop reasons are those of the paths of trees. In a
    mixture, `env/NAME/` covers each world, and a part of one world is averaged over its own episodes. `equal`
    holds for each group whether the advantage compares equal members; if empty or None, equal rewards count.
    """
    equal = equal or [None] * len(groups)
    trajectories = [t for group in groups for t in group.trajectories]
    finished = [t for group in groups for t in _finished(group)]
    metrics = {
        "episodes/count": float(len(trajectories)),
        "episodes/finished": float(len(finished)),
        "groups/count": float(len(groups)),
    }
    metrics |= _reward_metrics(finished)
    if success is not None:
        metrics[SUCCESS] = mean([t.rewards.get(success, 0.0) for t in finished])
    metrics |= _length_metrics(finished)
    surprisals = [[-value for t in _finished(g) for s in t.segments for value in s.logprobs] for g in groups]
    sampled = [own for own in surprisals if own]
    metrics[SAMPLED_ENTROPY] = mean([value for own in sampled for value in own])
    metrics[LOW_ENTROPY_GROUPS] = _share(sum(mean(own) < MIN_ENTROPY for own in sampled), len(sampled))
    metrics |= _tool_metrics(finished) | behavior_metrics(finished)
    stops = Counter(path.stop_reason for t in trajectories for path in t.attempts())
    metrics |= {f"episode/stop/{reason}": _share(stops[reason], stops.total()) for reason in StopReason}
    if of_agents := [t for t in finished if t.shared_reward]:
        metrics |= _agent_metrics(of_agents)
    if trees := [t for t in finished if t.leaves]:
        metrics["tree/leaves"] = mean([len(t.leaves) for t in trees])
        metrics["tree/reward_std"] = mean([std(t.leaf_rewards) for t in trees])
    return metrics | _group_metrics(groups, success, equal) | _world_metrics(groups, success, equal)


Metric = Callable[[Sequence[Group]], Mapping[str, float]]
"""A plug-in metric: a function of the groups of a step that returns numbers by name."""


def step_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Return the plug-ins of `run.metrics` by their names. Raises ConfigError for an unknown name."""
    return {name: cast(Metric, find_plugin("metrics", name, "run.metrics", ())) for name in names}


def plugin_metrics(names: Sequence[str], groups: Sequence[Group], others: Iterable[str]) -> dict[str, float]:
    """Return the metrics of the plug-ins of `run.metrics`.

    Raises ConfigError for a result that is not a mapping to numbers, and for a name that is `step` or one of `others`.
    """
    taken, metrics = {"step", *others}, dict[str, float]()
    for name, metric in step_metrics(names).items():
        plugin = f"run.metrics = {name}"
        found = check_numbers(plugin, metric(groups))
        if twice := sorted(taken & found.keys()):
            raise result_error(plugin, f"names that are taken ({', '.join(twice)})", "names of new metrics")
        taken |= found.keys()
        metrics |= found
    return metrics


def _is_finished(trajectory: Trajectory) -> bool:
    return trajectory.failure is None and trajectory.stop_reason is not StopReason.FAILED


def _finished(group: Group) -> list[Trajectory]:
    return [t for t in group.trajectories if _is_finished(t)]


def _reward_metrics(finished: Sequence[Trajectory]) -> dict[str, float]:
    rewards = [t.reward for t in finished]
    metrics = {"reward/mean": mean(rewards), "reward/std": std(rewards)}
    for name in sorted({name for t in finished for name in t.rewards}):
        # in a mixture, worlds may have their own parts
        values = [t.rewards.get(name, 0.0) for t in finished if "/" not in name or name in t.rewards]
        metrics[f"reward/{name}"] = mean(values)
    return metrics


def _agent_metrics(finished: Sequence[Trajectory]) -> dict[str, float]:
    rows = [len(t.rows) for t in finished]
    roots = [[len(s.tokens) for i, s in enumerate(t.segments) if i and s.parent == -1] for t in finished]
    tokens = sum(len(s.tokens) for t in finished for s in t.segments)
    by_role: dict[str, list[float]] = {}
    for agent, value in (pair for t in finished for pair in t.agent_rewards.items()):
        by_role.setdefault(role_of_agent(agent), []).append(value)
    return {
        "agent/rows/mean": mean(rows),
        "agent/rows/max": float(max(rows)),
        "agent/new_prompt_tokens": _share(sum(map(sum, roots)), tokens),
        **{f"agent/reward/{role}": mean(values) for role, values in sorted(by_role.items())},
    }


def _length_metrics(finished: Sequence[Trajectory]) -> dict[str, float]:
    actions = [t.num_action_tokens for t in finished]
    return {
        "response_length/mean": mean(actions),
        "response_length/max": float(max(actions, default=0)),
        "length/total_tokens/mean": mean([sum(len(s.tokens) for s in t.segments) for t in finished]),
        "turns/mean": mean([t.num_turns for t in finished]),
    }


def _tool_metrics(finished: Sequence[Trajectory]) -> dict[str, float]:
    finished = [path for t in finished for path in t.attempts()]
    calls = [outcome for t in finished for outcome in t.call_outcomes]
    statuses = Counter(call.status for call in calls)
    by_tool = Counter(call.tool for call in calls if call.status not in _NO_TOOL)
    metrics = {
        "tools/calls_per_episode": _share(len(calls), len(finished)),
        "tools/error_rate": _share(len(calls) - statuses[ToolStatus.OK], len(calls)),
        "tools/truncated_rate": _share(sum(call.truncated for call in calls), len(calls)),
        "tools/cost_per_episode": mean([t.tool_cost for t in finished]),
    }
    metrics |= {f"tools/status/{status}": _share(statuses[status], len(calls)) for status in ToolStatus}
    errors = Counter(call.tool for call in calls if call.status not in (*_NO_TOOL, ToolStatus.OK))
    for tool, count in sorted(by_tool.items()):
        own = [call for call in calls if call.tool == tool and call.status not in _NO_TOOL]
        timed_out = sum(call.status is ToolStatus.TIMED_OUT for call in own)
        metrics[f"tools/{tool}/calls"] = float(count)
        metrics[f"tools/{tool}/error_rate"] = errors[tool] / count
        metrics[f"tools/{tool}/timeout_rate"] = timed_out / count
        metrics[f"tools/{tool}/retried"] = float(sum(call.retried for call in own))
        metrics[f"tools/{tool}/cost"] = math.fsum(call.cost for call in own) / len(finished)
    return metrics


def _group_metrics(groups: Sequence[Group], success: str | None, equal: Sequence[bool | None]) -> dict[str, float]:
    """Return shares of the groups with a finished episode; `zero_variance` counts only groups of several episodes."""
    several = []
    for group, known in zip(groups, equal, strict=True):
        if len(group.trajectories) > 1 and (finished := _finished(group)):
            rewards = {r for t in finished for r in t.leaf_rewards or (t.reward,)}
            several.append(len(rewards) == 1 if known is None else known)
    members = [finished for group in groups if (finished := _finished(group))]
    metrics = {
        "groups/zero_variance": _share(sum(several), len(several)),
        GROUP_STD: mean([std([r for t in group for r in t.row_rewards]) for group in members]),
    }
    if success is not None:
        scores = [[t.rewards.get(success, 0.0) for t in group] for group in members]
        metrics["groups/solve_all"] = _share(sum(min(group) >= 1 for group in scores), len(members))
        metrics["groups/solve_none"] = _share(sum(max(group) <= 0 for group in scores), len(members))
    return metrics


def _world_metrics(groups: Sequence[Group], success: str | None, equal: Sequence[bool | None]) -> dict[str, float]:
    by_world: dict[str, list[tuple[Group, bool | None]]] = {}
    for group, known in zip(groups, equal, strict=True):
        if (world := group.task.tags.get(WORLD_TAG)) is not None:
            by_world.setdefault(world, []).append((group, known))
    found: dict[str, float] = {}
    for world, members in sorted(by_world.items()):
        own, finished = [group for group, _ in members], [t for group, _ in members for t in _finished(group)]
        numbers = _reward_metrics(finished) | _length_metrics(finished) | _tool_metrics(finished)
        numbers |= _group_metrics(own, success, [known for _, known in members])
        values = {name: numbers[source] for name, source in _WORLD_METRICS.items()}
        if success is not None:
            values["success"] = mean([t.rewards.get(success, 0.0) for t in finished])
        shared = {name for t in finished for name in t.rewards if "/" not in name and name != success}
        values |= {f"part/{name}": numbers[f"reward/{name}"] for name in sorted(shared)}
        values["share"] = _share(len(members), len(groups))
        found |= {f"env/{world}/{name}": value for name, value in values.items()}
    return found


def configured_metrics(
    trajectories: Sequence[Trajectory], settings: DiagnosticsConfig, success: str
) -> dict[str, float]:
    """Return the metrics of the finished episodes; `success` names the verifier's reward part.

    `judge/NAME/agreement` is the mean of `1 - |judge - success|`, both limited to [0, 1], for each judge that scored an
    episode, without episodes whose part `NAME_default` is 1. `tools/untested` is the share of answered episodes without
    a call that ran tests, present if `test_calls` is set; 0 without answered episodes.
    """
    finished = [t for t in trajectories if _is_finished(t)]
    metrics = {}
    for name in settings.judges:
        judged = [t.rewards for t in finished if name in t.rewards and not t.rewards.get(f"{name}_default")]
        gaps = [abs(_unit(rewards[name]) - _unit(rewards.get(success, 0.0))) for rewards in judged]
        if gaps:
            metrics[f"{JUDGE}{name}/agreement"] = 1 - sum(gaps) / len(gaps)
    if settings.test_calls:
        paths = [path for t in finished for path in t.attempts() if path.stop_reason is StopReason.ANSWERED]
        untested = 0
        for path in paths:
            made = [call["function"] for message in path.messages for call in message.get("tool_calls") or []]
            patterns = ((settings.test_calls.get(one["name"]), one["arguments"]) for one in made)
            untested += not any(pattern is not None and re.search(pattern, text) for pattern, text in patterns)
        metrics[UNTESTED] = _share(untested, len(paths))
    return metrics


def _unit(value: float) -> float:
    return min(1.0, max(0.0, value))


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 without values."""
    return math.fsum(values) / len(values) if values else 0.0


def std(values: Sequence[float]) -> float:
    """Return the standard deviation (`ddof=0`); 0 without values."""
    if not values or min(values) == max(values):
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / len(values))


def _share(count: int, total: int) -> float:
    return count / total if total else 0.0
