"""Former names of settings, for the sentence about an unknown key."""

from __future__ import annotations

from collections.abc import Mapping

RENAMED: Mapping[str, str] = {
    "engine.give_up_cache": "engine.sleep",
    "engine.cache_tokens": "engine.kv_cache_tokens",
    "engine.patience_s": "engine.connect_timeout_s",
    "engine.dialect": "engine.api",
    "engine.delta": "engine.weight_delta",
    "staleness.over_age": "staleness.on_stale",
    "staleness.cache": "staleness.kv_cache_on_update",
    "staleness.in_flight": "staleness.max_concurrent_rollouts",
    "staleness.interruptible": "staleness.in_flight_weight_updates",
    "training.tasks_per_step": "training.prompts_per_step",
    "rollout.max_new_tokens": "rollout.max_tokens_per_turn",
    "rollout.max_tokens": "rollout.max_seq_len",
    "algorithm.zero_variance": "algorithm.filter_zero_variance",
    "algorithm.variance_top": "algorithm.top_variance_fraction",
    "algorithm.overlong_cache": "algorithm.overlong_buffer",
    "algorithm.eps_low": "algorithm.clip_low",
    "algorithm.eps_high": "algorithm.clip_high",
    "algorithm.resample_rounds": "algorithm.max_resample_rounds",
    "kl_control.most": "kl_control.max_coef",
    "rewards.combination": "rewards.aggregation",
    "rewards.parts": "rewards.extra",
    "cluster.silence_s": "cluster.heartbeat_timeout_s",
    "cluster.start_s": "cluster.startup_timeout_s",
    "run.folder": "run.dir",
    "sft.dialogues": "sft.data",
    "model.scratch": "model.init",
}
"""Former dotted name -> present one. A former name is not a setting."""


def present_name(key: str) -> str | None:
    """Return the present name of a former key, or of a key inside a former table; None for other keys."""
    for former, present in RENAMED.items():
        if key == former or key.startswith(f"{former}."):
            return present + key.removeprefix(former)
    return None
