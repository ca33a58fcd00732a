"""Self-play roles: moving averages per role over steps, and groups of proposers and solvers."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ludus.algorithms import advantages
from ludus.algorithms.advantages.running_baselines import RoleBaselines
from ludus.algorithms.algorithm import PartOptions
from ludus.algorithms.spec.resolve import PRESETS
from ludus.cli.main import main
from ludus.config.schema import Config
from ludus.config.sections.algorithm import AlgorithmConfig
from ludus.config.sections.training import ReplayConfig
from ludus.envs.registry import build_world
from ludus.errors import ConfigError
from ludus.recipes import recipe_folder
from ludus.rollouts.ledger import Ledger
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.training.collection.filters import AlgorithmState, with_role_baselines
from ludus.training.collection.replay_buffer import ReplayBuffer
from ludus.training.collection.rollout_collector import RolloutCollector, filter_batch
from ludus.training.credit.advantages import assign_credit
from ludus.training.rl.build import train
from ludus.training.rl.validate import check_roles
from ludus.training.run.checkpoint import checkpoint_path
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from small_runs import SMALLEST, InterruptingReporter, RecordingReporter, RunInterrupted, config, lasting_files
from tests.training.credit.test_credit import group, same, table
from tests.training.rl.test_baselines import run
from tiny_run import WORLD

FIRST, SECOND = (1.0, 0.0, 0.4, 0.0), (0.5, 0.5, 1.0, 0.2)


def played(rewards, name, **tags):
    """A group whose task has tags."""
    episodes = group(rewards, name)
    return [replace(e, task=replace(e.task, tags=tags)) for e in episodes]


def test_role_advantages_use_the_average_before_its_update():
    episodes = [played(FIRST, "a", role="white"), played(SECOND, "b", role="black"), played(FIRST, "c")]
    algorithm = PRESETS["rae"]
    start = RoleBaselines(means={("chess", "white"): 0.7, ("go", "black"): 9.0})
    credits, after = with_role_baselines(assign_credit(episodes, algorithm), "chess", start)
    found, mask = table(filter_batch(credits, algorithm, 0))
    rewards = torch.tensor([*FIRST, *SECOND, *FIRST], dtype=torch.float64)
    roles = [("chess", role) for role in ("white", "black", "policy") for _ in range(4)]
    same(found, advantages.rae(rewards=rewards, roles=roles, baselines=start, mask=mask))
    assert found[0, 0] == 1.0 - 0.7
    assert after == start.updated(roles, rewards)
    assert after.means["go", "black"] == 9.0


def test_replayed_groups_use_current_role_averages_without_updating_them():
    algorithm, session = PRESETS["rae"], SimpleNamespace(config=Config(), world=SimpleNamespace(name="chess"))
    sampler = RolloutCollector(session, None, algorithm, None, Ledger())
    sampler.algorithm_state = AlgorithmState(RoleBaselines(means={("chess", "white"): 0.7}))
    replay = ReplayBuffer(ReplayConfig(share=0.5, max_age=9), 1)
    replay.add(sampler.apply_batch_filters(assign_credit([played(FIRST, "a", role="white")], algorithm), 1))
    before = sampler.algorithm_state
    again = sampler.replay_samples(replay.draw(1, algorithm, 0, 1))
    expected, _ = with_role_baselines(again, "chess", before.averages)
    assert [credit.baselines for credit in again] == [credit.baselines for credit in expected]
    assert again[0].advantage == pytest.approx(1.0 - before.averages.means["chess", "white"])
    assert again[0].baselines[0] > 0.5
    assert sampler.algorithm_state == before


def test_restored_role_averages_use_the_configured_decay():
    algorithm = replace(PRESETS["rae"], options=PartOptions(advantage={"decay": 0.5}))
    memory = AlgorithmState(RoleBaselines(0.95, 0.0, {("chess", "white"): 0.1 + 0.2}))
    again = AlgorithmState.start(algorithm, memory.to_json())
    assert again.averages == replace(memory.averages, decay=0.5)
    assert AlgorithmState.start(PRESETS["grpo"]) == AlgorithmState()


@pytest.mark.fault
def test_resumed_rae_run_equals_the_uninterrupted_one(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    changes = {"algorithm__preset": "rae", "rollout__temperature": "2"}
    run(whole, **changes)

    settings = config(cut, **(SMALLEST | changes))
    with lock_run(new_run(settings, "search", "rl")), pytest.raises(RunInterrupted):
        train(open_session(settings), RunFolder(cut), InterruptingReporter(2))
    assert main(["train", "--resume", str(cut)]) == 0
    first, second = lasting_files(whole), lasting_files(cut)
    assert [name for name in first if first[name] != second.get(name)] == []
    records = [r for n in (1, 2) for r in read_rollouts(rollouts_path(whole, n))]
    average = 0.0
    for record in records:
        assert record.advantage == pytest.approx(record.trajectory.reward - average, abs=1e-12)
        average = 0.95 * average + 0.05 * record.trajectory.reward
    state = json.loads((checkpoint_path(whole / "checkpoints", 2) / "trainer" / "state.json").read_text())
    means = RoleBaselines.from_json(json.loads(state["algorithm_state"])["averages"]).means
    assert list(means) == [("search", "policy")]
    assert means["search", "policy"] == pytest.approx(average)


def test_solvers_are_compared_within_a_proposal_and_proposers_across():
    solvers = {"role": "solver", "proposal": "p"}
    episodes = [
        played(FIRST, "s1", **solvers),
        played(SECOND, "s2", **solvers),
        played(FIRST, "q1", role="proposer"),
        played(SECOND, "q2", role="proposer"),
        played(FIRST, "s3", role="solver"),
    ]
    found, mask = table(assign_credit(episodes, PRESETS["hierarchical"]))
    rewards = torch.tensor([*FIRST, *SECOND, *FIRST, *SECOND, *FIRST], dtype=torch.float64)
    ids = torch.tensor([0] * 8 + [1] * 8 + [2] * 4)
    same(found, advantages.grpo(rewards=rewards, group=ids, mask=mask))
    proposer = torch.tensor([False] * 8 + [True] * 8 + [False] * 4)
    same(found, advantages.hierarchical(rewards=rewards, group=ids, proposer=proposer, mask=mask))


def test_hierarchical_preset_with_a_roleless_world_raises():
    with pytest.raises(ConfigError, match="no task of the world 'prices' has the tag 'role'"):
        check_roles(PRESETS["hierarchical"], tiny_world())
    check_roles(PRESETS["hierarchical"], tiny_world(roles=True))
    check_roles(PRESETS["rae"], tiny_world())


def tiny_world(**settings):
    given = Config.model_validate({"env": {"name": str(WORLD), "settings": settings}})
    return build_world(given.env, given.rollout)


@pytest.mark.slow
def test_proposers_are_compared_across_tasks_in_a_run(tmp_path):
    changes = {
        "algorithm__preset": "hierarchical",
        "training__steps": "1",
        "training__prompts_per_step": "4",
        "rollout__temperature": "2",
        "rollout__max_turns": "2",
        "env__name": str(WORLD),
        "env__settings__roles": "true",
        "model__path": str(recipe_folder("search") / "cold_start"),
    }
    settings = config(tmp_path / "run", **(SMALLEST | changes))
    with lock_run(new_run(settings, None, "rl")):
        train(open_session(settings), RunFolder(tmp_path / "run"), RecordingReporter())
    records = list(read_rollouts(rollouts_path(tmp_path / "run", 1)))
    assert {r.trajectory.tags["role"] for r in records} == {"proposer", "solver"}
    names = {}
    keys = [("",) if (t := r.trajectory.tags)["role"] == "proposer" else (t["proposal"],) for r in records]
    ids = torch.tensor([names.setdefault(key, len(names)) for key in keys])
    rewards = torch.tensor([r.trajectory.reward for r in records], dtype=torch.float64)
    expected = advantages.grpo(rewards=rewards, group=ids, mask=torch.ones(len(records), 1))
    assert [r.advantage for r in records] == pytest.approx(expected[:, 0].tolist(), abs=1e-12)
    assert AlgorithmConfig(preset="hierarchical").preset == "hierarchical"
