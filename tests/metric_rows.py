"""Metrics of synthetic runs: one that learns, and changes of it."""

import random


def healthy(num=40, seed=0):
    """Metrics of a run that learns, with noise."""
    draw = random.Random(seed)
    rows = []
    for step in range(num):
        done = step / 40
        solved = min(0.9, 0.3 + 0.5 * done + draw.uniform(-0.05, 0.05))
        rows.append(
            {
                "reward/mean": solved + 0.1,
                "reward/std": 0.4 - 0.1 * done,
                "reward/right": solved,
                "reward/format": 0.9 + 0.05 * done,
                "success/mean": solved,
                "groups/reward_std": 0.35 - 0.1 * done,
                "groups/zero_variance": 0.2 + 0.2 * done,
                "groups/low_entropy": 0.1,
                "tasks/starved": 0.1,
                "groups/conflict_tokens": 0.2,
                "groups/solve_all": 0.1 + 0.3 * done,
                "groups/solve_none": 0.1,
                "policy/entropy": 0.5 - 0.3 * done,
                "policy/kl_reference": 0.002 * step,
                "policy/ratio_max": 1.0,
                "policy/clip_fraction": 0.0,
                "optim/grad_norm": 0.5 + draw.uniform(-0.1, 0.2),
                "optim/top_token_share": 0.03,
                "mismatch/by_probability/<=0.01": 3e-6,
                "mismatch/by_probability/<=1": 1e-6,
                "judge/reward_model/agreement": 0.8,
                "tools/untested": 0.2,
                "loss/total": 0.01,
                "mismatch/logprob_diff": 1e-6,
                "mismatch/logprob_diff/<=512": 1e-6,
                "mismatch/logprob_diff/<=1024": 2e-6,
                "response_length/mean": 100 + 20 * done,
                "turns/mean": 3.0,
                "groups/count": 16.0,
                "tools/calls_per_episode": 2.0,
                "tools/error_rate": 0.1,
                "tools/status/unknown_tool": 0.0,
                "tools/search/calls": 100.0,
                "tools/search/error_rate": 0.1,
                "tools/repeated": 0.05,
                "tools/unused_results": 0.2,
                "tools/sequences": 8.0,
                "text/repeated": 0.05,
                "text/copied": 0.1,
                "text/foreign_script": 0.0,
                "episode/stop/truncated": 0.02,
                "episode/stop/tool_errors": 0.0,
                "critic/explained_variance": 0.4,
            }
            | (
                {"collapse/retrieval_1": 0.9, "collapse/chance": 0.1, "collapse/mutual_information": 0.4}
                if step % 2
                else {}
            )
            | ({"eval/validation/sampled/success": solved} if step % 10 == 9 else {})
        )
    return rows


def with_end(steps, **changes):
    """A healthy run whose last steps have other metrics; `__` is a slash."""
    rows = healthy()
    change = {name.replace("__", "/"): value for name, value in changes.items()}
    return rows[:-steps] + [row | change for row in rows[-steps:]]


def unsolved(rows, success):
    """The same run without a rise of success."""
    return [row | {"success/mean": success, "reward/right": success} for row in rows]
