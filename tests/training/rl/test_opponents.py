"""Self-play against past versions of the policy."""

import asyncio
import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from ludus.algorithms.advantages.running_baselines import RoleBaselines
from ludus.cli.main import main
from ludus.config.sections.rollout import OpponentsConfig
from ludus.envs.registry import build_world
from ludus.errors import ConfigError
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.training.collection.opponents import OpponentPool
from ludus.training.rl.build import remove_later_steps, train
from ludus.training.rl.validate import check_agents, check_opponents
from ludus.training.run.checkpoint import checkpoint_path
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from small_runs import SMALLEST, InterruptingReporter, RecordingReporter, RunInterrupted, config, lasting_files
from tests.training.learner.test_learner import tiny_model

GAME = SMALLEST | {
    "env__name": "games",
    "env__settings__game": "kuhn",
    "env__settings__opponents": '["past"]',
    "algorithm__preset": "rae",
    "rollout__opponents__every": "1",
    "rollout__opponents__size": "2",
    "training__steps": "3",
    "training__learning_rate": "0.01",
}


def play(folder, reporter=None, **changes):
    settings = config(folder, **(GAME | changes))
    with lock_run(new_run(settings, "games", "rl")):
        train(open_session(settings), RunFolder(folder), reporter or RecordingReporter())


def records(folder, step):
    return list(read_rollouts(rollouts_path(folder, step)))


@pytest.mark.slow
def test_each_step_plays_against_a_saved_version(tmp_path):
    play(tmp_path / "run")
    saved = sorted((tmp_path / "run" / "opponents").iterdir())
    assert [path.name for path in saved] == [f"step-{number:06d}.safetensors" for number in range(3)]
    weights = [load_file(path) for path in saved]
    assert all(any(not torch.equal(a[name], b[name]) for name in a) for a, b in pairwise(weights))
    for step in (1, 2, 3):
        tags = [one.trajectory.tags.get("opponent_version") for one in records(tmp_path / "run", step)]
        (version,) = {int(tag) for tag in tags if tag is not None}  # an illegal first move has no opponent
        assert step - 2 <= version < step
    agents = {s.agent for one in records(tmp_path / "run", 1) for s in one.trajectory.segments}
    assert agents == {"first", "second"}
    state = json.loads((checkpoint_path(tmp_path / "run" / "checkpoints", 3) / "trainer" / "state.json").read_text())
    results = RoleBaselines.from_json(json.loads(state["algorithm_state"])["opponents"])
    assert {role for role, _ in results.means} == {"opponent"}


@pytest.mark.parametrize(("every", "size"), [(3, 1), (1, 2), (2, 3)])
def test_versions_of_a_checkpoint_are_kept(tmp_path, every, size):
    """A run whose last checkpoints are those of the steps 5 and 10 fails in step 19."""
    folder = RunFolder(tmp_path)

    async def opponents(first, last):
        settings = OpponentsConfig(every=every, size=size)
        pool, found = OpponentPool(folder.opponents, folder.checkpoints, tiny_model(), Loads(), settings, 0), {}
        for step in range(first, last + 1):
            await pool.begin_step(step, RoleBaselines())
            found[step] = pool.version
            if step in (5, 10):
                checkpoint_path(folder.checkpoints, step).mkdir(parents=True, exist_ok=True)
        return found

    whole = asyncio.run(opponents(1, 19))
    assert len(list(folder.opponents.iterdir())) <= 3 * size
    remove_later_steps(folder, 10)
    assert asyncio.run(opponents(11, 19)).items() <= whole.items()


@pytest.mark.fault
def test_resumed_run_has_the_same_opponents(tmp_path):
    play(tmp_path / "whole")
    with pytest.raises(RunInterrupted):
        play(tmp_path / "cut", InterruptingReporter(2))
    assert main(["train", "--resume", str(tmp_path / "cut")]) == 0
    first, second = lasting_files(tmp_path / "whole"), lasting_files(tmp_path / "cut")
    assert [name for name in first if first[name] != second.get(name)] == []


class Loads:
    """An engine that notes the values of the weights that it loads."""

    def __init__(self):
        self.loaded = []

    async def load_weights(self, version, state):
        self.loaded.append(float(next(iter(state.values())).flatten()[0]))


async def chosen(folder, sampling, means, steps=200):
    """How often each of the versions 0, 1 and 2 is the opponent."""
    model, counts = tiny_model(), [0, 0, 0]
    pool = OpponentPool(folder, folder, model, Loads(), OpponentsConfig(every=1, size=3, sampling=sampling), 0)
    results = RoleBaselines(means={("opponent", str(version)): mean for version, mean in enumerate(means)})
    for version in range(3):
        with torch.no_grad():
            next(model.parameters()).fill_(float(version))
        await pool.begin_step(version + 1, results)
    pool.settings = OpponentsConfig(every=10**6, size=3, sampling=sampling)
    for step in range(4, steps + 4):
        await pool.begin_step(step, results)
        counts[pool.version] += 1
        assert pool.engine.loaded[-1] == pool.version
    return counts


@pytest.mark.parametrize(
    ("sampling", "shares"), [("win_rate", (0.01 / 0.26, 0.16 / 0.26, 0.09 / 0.26)), ("uniform", (1 / 3,) * 3)]
)
def test_versions_against_which_the_policy_loses_are_chosen_more_often(tmp_path, sampling, shares):
    # (1 - w)^2 for rewards w of 0.9, 0.6 and 0.7 is 0.01, 0.16 and 0.09
    counts = asyncio.run(chosen(tmp_path, sampling, (0.9, 0.6, 0.7)))
    for count, share in zip(counts, shares, strict=True):
        assert abs(count / 200 - share) < 4 * (share * (1 - share) / 200) ** 0.5


def test_settings_of_opponents_are_checked(tmp_path):
    def check(**changes):
        settings = config(tmp_path, **(GAME | changes))
        check_opponents(settings, build_world(settings.env, settings.rollout))

    check()
    with pytest.raises(ConfigError, match="are played against past versions"):
        check(rollout__opponents__every="0")
    with pytest.raises(ConfigError, match="would have no effect"):
        check(env__settings__opponents='["self"]')
    with pytest.raises(ConfigError, match=r"cannot be combined with training\.mode"):
        check(training__mode="one_step")


def test_settings_of_agents_in_a_mixture_are_checked(tmp_path):
    mixture = {name: value for name, value in GAME.items() if not name.startswith("env__")}
    mixture |= {"env__name": "mixture", "env__mixture__math__weight": "1", "env__mixture__games__weight": "1"}
    past = {"env__mixture__games__settings__opponents": '["past"]'}

    def check(what, **changes):
        settings = config(tmp_path, **(mixture | changes))
        what(settings, build_world(settings.env, settings.rollout))

    check(check_opponents, **past)
    with pytest.raises(ConfigError, match="are played against past versions"):
        check(check_opponents, rollout__opponents__every="0", **past)
    with pytest.raises(ConfigError, match="does not apply to episodes of agents"):
        check(check_agents, rollout__partial__tokens="100")
