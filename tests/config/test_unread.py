"""Settings that are set but unused: each one is reported, and none that has an effect."""

from __future__ import annotations

import pytest

from ludus.config import load_config
from ludus.errors import ConfigError
from ludus.recipes import list_recipes
from ludus.training.rl.validate import config_warnings, unused_settings

LOCAL = ("--cluster.kind", "local")
JUDGED = (*LOCAL, "--cluster.reward_workers", "2")
STREAMED = ("--training.mode", "async", "--training.prompts_per_step", "4")
SERVED = ("--engine.url", "http://127.0.0.1:1")
REPLAYED = (*STREAMED, "--staleness.replay.share", "0.5")


def said(*words: str) -> list[str]:
    return unused_settings(load_config("search", list(words)))


@pytest.mark.parametrize(
    ("without", "given", "within", "why"),
    [
        ((), "cluster.engines=4", LOCAL, "cluster.kind is none"),
        ((), "cluster.reward_workers=2", LOCAL, "cluster.kind is none"),
        (LOCAL, "cluster.address=auto", ("--cluster.kind", "ray"), "needs ray"),
        (LOCAL, "cluster.engine_gpus=1", ("--cluster.kind", "ray"), "needs ray"),
        (LOCAL, "cluster.worker_resources.disk=1", ("--cluster.kind", "ray"), "needs ray"),
        (LOCAL, "cluster.scoring_timeout_s=5", JUDGED, "cluster.reward_workers is 0"),
        (LOCAL, "cluster.scorings_per_worker=5", JUDGED, "cluster.reward_workers is 0"),
        ((*LOCAL, *SERVED), "cluster.engines=4", LOCAL, "engine.url"),
        (JUDGED, "rollout.reward_timeout_s=5", LOCAL, "cluster.scoring_timeout_s"),
        (JUDGED, "rollout.reward_timeout_s=5", (*JUDGED, "--rewards.extra.well_formed.weight", "0.1"), ""),
        (JUDGED, "rollout.reward_timeout_s=5", (*JUDGED, "--algorithm.preset", "mixed_policy"), ""),
        (JUDGED, "rollout.reward_processes=3", (), "cluster.scoring_timeout_s"),
        ((), "engine.weights_folder=/x", SERVED, "this process samples"),
        ((), "engine.broadcast_host=127.0.0.1", LOCAL, "this process samples"),
        (STREAMED, "staleness.replay.order=priority", REPLAYED, "staleness.replay.share is 0"),
        (STREAMED, "staleness.replay.times=2", REPLAYED, "staleness.replay.share is 0"),
        (STREAMED, "staleness.replay.max_age=2", REPLAYED, "staleness.replay.share is 0"),
        (STREAMED, "staleness.replay.size=9", REPLAYED, "staleness.replay.share is 0"),
    ],
)
def test_unused_setting_is_reported_with_the_reason(without, given, within, why):
    key, value = given.split("=")
    (found,) = said(*without, f"--{key}", value)
    assert found.startswith(f"{key.removesuffix('.disk')} = ")
    assert why in found
    assert said(*within, f"--{key}", value) == []
    assert found in config_warnings(load_config("search", [*without, f"--{key}", value]))


def test_oversample_above_its_effective_limit_is_reported():
    words = (*STREAMED, "--rollout.concurrency", "16", "--staleness.oversample")
    assert said(*words, "15") == []
    (found,) = said(*words, "20")
    assert found.startswith("staleness.oversample = 20 has no effect beyond 15")


def test_negative_cluster_resources_raise_config_error():
    with pytest.raises(ConfigError, match=r"cluster\.engine_resources\.disk"):
        load_config("search", ["--cluster.kind", "ray", "--cluster.engine_resources.disk", "-1"])


@pytest.mark.parametrize("recipe", list_recipes(), ids=lambda recipe: recipe.name)
def test_recipes_have_no_unused_settings(recipe):
    assert unused_settings(load_config(recipe.config)) == []


def test_default_cluster_and_streaming_configs_have_no_unused_settings():
    assert said() == said(*STREAMED) == said(*LOCAL) == said(*JUDGED) == said(*REPLAYED) == []
