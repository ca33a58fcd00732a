"""Warn about settings that have no effect because of other settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ludus.algorithms.spec.parts import Need
from ludus.algorithms.spec.resolve import resolve
from ludus.config.schema import Config
from ludus.config.sections.cluster import ClusterConfig
from ludus.config.sections.section import Section, changed
from ludus.rewards.registry import has_extra_rewards

_OF_ENGINES: Final = ("engines", "engine_cpus", "engine_gpus", "engine_resources")
_OF_REWARD_WORKERS: Final = (
    "scorings_per_worker",
    "scoring_timeout_s",
    "reward_cpus",
    "reward_gpus",
    "reward_resources",
)
_OF_RAY: Final = (
    "address",
    "engine_cpus",
    "engine_gpus",
    "engine_resources",
    "worker_cpus",
    "worker_resources",
    "reward_cpus",
    "reward_gpus",
    "reward_resources",
)
_OF_SERVERS: Final = ("api", "timeout_s", "connect_timeout_s", "weights_folder", "broadcast_host", "weight_delta")
_OF_SCORING: Final = ("reward_timeout_s", "reward_processes")


def unread_settings(config: Config) -> list[str]:
    """Return a warning for each cluster, engine or staleness setting that has no effect."""
    return [
        *_said("cluster", config.cluster, _of_cluster(config)),
        *_said("engine", config.engine, _of_engine(config)),
        *_said("rollout", config.rollout, _of_scoring(config)),
        *(_of_streams(config) if config.training.streams else ()),
        *(_of_partial(config) if config.training.streams else ()),
    ]


def _said(section: str, given: Section, reasons: Mapping[str, str]) -> list[str]:
    return [
        f"{section}.{name} = {value} has no effect: {reasons[name]}."
        for name, value in changed(given).items()
        if name in reasons
    ]


def _of_cluster(config: Config) -> dict[str, str]:
    """Return why cluster settings have no effect, by name."""
    own, reasons = config.cluster, dict[str, str]()
    if own.kind == "none":
        return dict.fromkeys(ClusterConfig.model_fields, "cluster.kind is none")
    if own.kind == "local":
        reasons |= dict.fromkeys(_OF_RAY, "cluster.kind is local, and it needs ray")
    if not own.reward_workers:
        reasons |= dict.fromkeys(_OF_REWARD_WORKERS, "cluster.reward_workers is 0")
    if config.engine.url:
        reasons |= dict.fromkeys(_OF_ENGINES, "the engines are those at engine.url")
    return reasons


def _of_engine(config: Config) -> dict[str, str]:
    if config.engine.url:
        return {"kv_cache_tokens": "it needs embedded engines, and engine.url is set"}
    if config.cluster.kind == "none":
        return dict.fromkeys(_OF_SERVERS, "this process samples, with neither engine.url nor a cluster")
    return {}


def _of_scoring(config: Config) -> dict[str, str]:
    """Return why scoring settings have no effect with reward workers.

    Experts and the extra reward parts are still scored in processes.
    """
    own, experts = config.cluster, resolve(config.algorithm).loss_spec.has(Need.DEMONSTRATIONS)
    if own.kind == "none" or not own.reward_workers or experts or has_extra_rewards(config.rewards):
        return {}
    why = "the episodes of training are scored by cluster.reward_workers, within cluster.scoring_timeout_s"
    return dict.fromkeys(_OF_SCORING, why)


def _of_partial(config: Config) -> list[str]:
    own = config.rollout.partial
    why = "training.mode is async, which streams episodes"
    return _said("rollout.partial", own, dict.fromkeys(type(own).model_fields, why))


def _of_streams(config: Config) -> list[str]:
    own, most = config.staleness, config.rollout.concurrency
    if not own.replay.share:
        reasons = dict.fromkeys(type(own.replay).model_fields, "staleness.replay.share is 0")
    else:
        reasons = {}
    found = _said("staleness.replay", own.replay, reasons)
    if own.in_flight_weight_updates:
        found += _said("staleness", own, {"moves": "new weights take effect in the middle of episodes"})
    elif config.engine.url is None or config.cluster.kind != "none":
        found += _said("staleness", own, {"moves": "no servers at engine.url sample for this process"})
    if own.oversample >= most:
        found.append(
            f"staleness.oversample = {own.oversample} has no effect beyond {most - 1}: no more members "
            f"start before the trained ones have ended (rollout.concurrency = {most})."
        )
    return found
