"""Plug-ins with the wrong parameters or results: one sentence names the setting, the plug-in and the expected."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ludus.algorithms.spec.resolve import PRESETS
from ludus.algorithms.tensors import Outcomes, TokenBatch
from ludus.config import load_config
from ludus.diagnostics.metrics import plugin_metrics
from ludus.diagnostics.trackers import make_tracker
from ludus.envs.registry import build_world
from ludus.errors import ConfigError
from ludus.plugins import find_plugin
from ludus.training.run.session import TrainingSession, make_engine
from ludus.types import Group, Task

GROUPS = [Group(Task("t", (), None), ())]


@pytest.fixture
def written(tmp_path):
    """A function that writes a plug-in file and returns its path."""

    def write(text: str) -> str:
        file = tmp_path / f"plug_in_{len(list(tmp_path.iterdir()))}.py"
        file.write_text(text, "utf-8")
        return str(file)

    return write


@pytest.mark.parametrize(
    ("kind", "setting"), [("tools", "env.tools"), ("metrics", "run.metrics"), ("engines", "engine.plugin")]
)
def test_unknown_name_without_builtins_lists_accepted_forms(kind, setting):
    with pytest.raises(ConfigError) as caught:
        find_plugin(kind, "my_package.parts:mine", setting, ())
    assert str(caught.value) == (
        f"{setting} = 'my_package.parts:mine' is not known. None are built in; otherwise write path/to/file.py:name or "
        f"the name of an installed entry point of ludus.{kind} (an import path does not work)."
    )


@pytest.mark.parametrize(
    ("kind", "takes"),
    [
        ("engines", "session"),
        ("metrics", "groups"),
        ("trackers", "folder, resume_step"),
        ("worlds", "settings, limits"),
    ],
)
def test_plugin_with_wrong_signature_is_rejected_naming_the_expected_one(written, kind, takes):
    name = f"{written('def mine(a, b, c): ...')}:mine"
    with pytest.raises(ConfigError) as caught:
        find_plugin(kind, name, "some.setting", ())
    expected = f"expected a function of ({takes})."
    assert f"some.setting = {name} has the parameters (a, b, c); {expected}" in str(caught.value)
    name = f"{written('mine = {}')}:mine"
    with pytest.raises(ConfigError) as caught:
        find_plugin(kind, name, "some.setting", ())
    assert f"some.setting = {name} is {{}}; {expected}" in str(caught.value)


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ("'many'", "'many'"),
        ("[1, 2]", "[1, 2]"),
        ("None", "None"),
        ("{'mine/text': 'many'}", "'many' for 'mine/text'"),
        ("{3: 1.0}", "1.0 for 3"),
    ],
)
def test_metric_must_return_a_mapping_to_numbers(written, result, found):
    name = f"{written(f'def mine(groups): return {result}')}:mine"
    with pytest.raises(ConfigError) as caught:
        plugin_metrics([name], GROUPS, ())
    expected = f"run.metrics = {name} returned {found}; expected a mapping of names to numbers."
    assert expected in str(caught.value)


def test_metric_with_an_existing_name_is_rejected(written):
    good = f"{written('def mine(groups): return {chr(97): len(groups)}')}:mine"
    assert plugin_metrics([good], GROUPS, ["reward/mean"]) == {"a": 1}
    for text in ("reward/mean", "step", "a"):
        bad = f"{written(f'def mine(groups): return {{{text!r}: 0.5}}')}:mine"
        with pytest.raises(ConfigError) as caught:
            plugin_metrics([good, bad], GROUPS, ["reward/mean"])
        expected = f"run.metrics = {bad} returned names that are taken ({text}); expected names of new metrics."
        assert expected in str(caught.value)


def test_tracker_without_close_is_rejected(written, tmp_path):
    text = "class Mine:\n    def __init__(self, folder, resume_step): ...\n    def log(self, step, metrics): ...\n"
    name = f"{written(text)}:Mine"
    with pytest.raises(ConfigError) as caught:
        make_tracker(name, tmp_path)
    expected = f"run.trackers = {name} returned a value of type Mine without close; expected Tracker with log, close."
    assert expected in str(caught.value)


def test_environment_plugin_must_return_a_world(written):
    config = load_config(None, ["--env.name", f"{written('def mine(settings, limits): return 3')}:mine"])
    with pytest.raises(ConfigError, match="mine: make_world returned 3"):
        build_world(config.env, config.rollout)


def test_engine_without_protocol_members_is_rejected(written):
    name = f"{written('def mine(session): return None')}:mine"
    config = load_config("search", ["--engine.plugin", name])
    with pytest.raises(ConfigError) as caught:
        make_engine(TrainingSession(config, None, None, None, None))
    assert f"engine.plugin = {name} returned None without context_tokens, version, batch" in str(caught.value)
    wrapper = "class Mine:\n    def __init__(self, inner): ...\n    def __getattr__(self, name): return name\n"
    name = f"{written(wrapper)}:Mine"
    config = load_config("search", ["--engine.plugin", name])
    assert make_engine(TrainingSession(config, None, None, None, None)).version == "version"


N, L = 4, 3
REWARDS, GROUP, MASK = torch.rand(N), torch.tensor([0, 0, 1, 1]), torch.ones(N, L, dtype=torch.bool)
OUTCOMES = Outcomes(REWARDS, GROUP, MASK)
BATCH = TokenBatch(torch.zeros(N, L), torch.zeros(N, L), torch.zeros(N, L), torch.zeros(N, L), MASK)


@pytest.mark.parametrize(
    ("part", "takes", "batch"),
    [("advantage", "rewards", OUTCOMES), ("loss", "logprobs", BATCH), ("correction", "old_logprobs", BATCH)],
)
def test_algorithm_part_must_return_a_tensor_of_mask_shape(written, part, takes, batch):
    file = written(f"def few(*, {takes}): return {takes}.reshape(-1)[:4]\ndef none(*, {takes}): return None\n")
    for function, found in (("few", "a tensor [4]"), ("none", "None")):
        algorithm = replace(PRESETS["grpo"], **{part: f"{file}:{function}"})
        with pytest.raises(ConfigError) as caught:
            algorithm.compute(part, batch)
        expected = f"algorithm.{part} = {file}:{function} returned {found}; expected a tensor [N, L] = [4, 3]."
        assert expected in str(caught.value)


def test_per_trajectory_loss_must_return_one_term_per_trajectory(written):
    head = "from ludus.algorithms.algorithm import LossSpec\n@LossSpec(help='h', per_trajectory=True)\n"
    name = f"{written(head + 'def mine(*, logprobs): return logprobs')}:mine"
    with pytest.raises(ConfigError, match=r"returned a tensor \[4, 3\]; expected a tensor \[N\] = \[4\]"):
        replace(PRESETS["grpo"], loss=name).compute("loss", BATCH)


def test_part_reads_a_field_of_the_batch_by_another_name(written):
    head = "from ludus.algorithms.algorithm import LossSpec\n@LossSpec(help='h', reads={{'sampled': {!r}}})\n"
    body = "def mine(*, sampled): return sampled + 1"
    name = f"{written(head.format('behavior_logprobs') + body)}:mine"
    found = replace(PRESETS["grpo"], loss=name).compute("loss", BATCH)
    assert torch.equal(found, BATCH.behavior_logprobs + 1)
    name = f"{written(head.format('nothing') + body)}:mine"
    with pytest.raises(ConfigError, match="reads 'nothing', but TokenBatch has no such field"):
        replace(PRESETS["grpo"], loss=name).compute("loss", BATCH)
