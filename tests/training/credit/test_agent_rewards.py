"""Episodes of several agents: rewards by agent, compared by role."""

import json
from dataclasses import replace

import pytest
import torch

from ludus.algorithms import advantages
from ludus.algorithms.advantages.running_baselines import RoleBaselines
from ludus.algorithms.spec.resolve import PRESETS
from ludus.diagnostics.metrics import rollout_metrics
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord, parse_rollout, rollout_line
from ludus.rollouts.scheduler import Episode
from ludus.training.collection.filters import filter_low_variance, with_role_baselines
from ludus.training.credit.advantages import Estimates, assign_credit, recompute_samples, with_estimates
from ludus.training.rl.validate import check_roles
from ludus.training.value_models.factory import bootstrap_values
from ludus.types import Group, Segment, StopReason, Task, Trajectory

TASK = Task("t", (), None)


def action(agent, *tokens, turn=0, parent=None):
    return Segment("action", tokens, turn, parent, agent, (-1.0,) * len(tokens), (0,) * len(tokens))


def played(sample, **rewards):
    """An episode in which each agent has a row of 2 and 1 action tokens; the first agent has a second row of 3."""
    segments = []
    for place, agent in enumerate(rewards):
        segments.append(Segment("prompt", (1, 2), place, -1 if place else None, agent))
        segments += [action(agent, 10, 11), Segment("observation", (3,), place, None, agent), action(agent, 12)]
    first = next(iter(rewards))
    segments += [Segment("prompt", (1, 9), 9, -1, first), action(first, 13, 14, 15)]
    found = Trajectory("t", sample, tuple(segments), (), StopReason.ANSWERED, shared_reward=True, agent_rewards=rewards)
    return replace(found, reward=sum(rewards.values()) / len(rewards))


def episode(trajectory, task=TASK):
    return Episode(RolloutKey(1, "t", trajectory.sample), task, trajectory)


def values(sample):
    """The advantages of the first agent's 3 first tokens, of the second agent's, and of the first agent's last row."""
    row = sample.advantages
    return row[:3], row[3:6], row[6:]


def test_each_agent_is_a_path_with_its_reward_and_all_of_its_rows():
    x, o = played(0, x=1.0, o=0.25).paths()
    assert [path.trajectory.reward for path in (x, o)] == [1.0, 0.25]
    assert (x.places, o.places) == ((0, 1, 2, 6, 7, 8), (3, 4, 5))
    assert (x.row, o.row) == (2, 1)
    assert [s.tokens for s in x.trajectory.segments if s.kind == "action"] == [(10, 11), (12,), (13, 14, 15)]
    alone = replace(played(0, x=1.0), segments=played(0, x=1.0).segments[:4], reward=0.0)
    assert [path.trajectory.reward for path in alone.paths()] == [1.0]


def test_agents_are_compared_with_the_same_role_of_the_group():
    group = [episode(played(0, x=1.0, o=0.0)), episode(played(1, x=0.0, o=0.5)), episode(played(2, x=0.5, o=0.5))]
    samples = assign_credit([group], PRESETS["grpo"])
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.5, 0.5], dtype=torch.float64)
    expected = advantages.grpo(rewards=rewards, group=ids, mask=torch.ones(6, 1, dtype=torch.bool))[:, 0].tolist()
    for number, sample in enumerate(samples):
        first, second, last = values(sample)
        assert first + last == pytest.approx([expected[number]] * 6, abs=1e-12)
        assert second == pytest.approx([expected[3 + number]] * 3, abs=1e-12)


def test_groups_train_if_the_rewards_of_any_role_vary():
    algorithm = replace(PRESETS["grpo"], filter_zero_variance=True)
    equal = [episode(played(i, x=1.0, o=0.0)) for i in range(2)]
    varied = [episode(played(0, x=1.0, o=0.0)), episode(played(1, x=1.0, o=0.5))]
    samples = assign_credit([equal, varied], algorithm)
    assert [one.outcome is RolloutOutcome.TRAINED for one in samples] == [False, False, True, True]
    top = replace(PRESETS["grpo"], variance_filter="top_p", top_variance_fraction=0.5)
    kept = filter_low_variance(assign_credit([equal, varied], top), top)
    assert [one.advantages is not None for one in kept] == [False, False, True, True]


def test_role_averages_are_kept_for_each_agent():
    algorithm, start = PRESETS["rae"], RoleBaselines(means={("chess", "x"): 0.75, ("chess", "o"): 0.25})
    samples = assign_credit([[episode(played(0, x=1.0, o=0.5))]], algorithm)
    updated, after = with_role_baselines(samples, "chess", start)
    assert updated[0].baselines == (0.75, 0.25)
    first, second, last = values(assign_again(updated, algorithm)[0])
    assert first + last == (0.25,) * 6
    assert second == (0.25,) * 3
    expected = start.updated([("chess", "x"), ("chess", "o")], torch.tensor([1.0, 0.5]))
    assert after == expected


def assign_again(samples, algorithm):
    return with_estimates(samples, algorithm, 0, Estimates())


def test_solvers_are_compared_within_their_proposal_and_proposers_across():
    rewards = [{"proposer": 0.5, "solver/0": 1.0, "solver/1": 0.0}, {"proposer": 1.0, "solver/0": 1.0, "solver/1": 1.0}]
    group = [episode(played(i, **given)) for i, given in enumerate(rewards)]
    samples = assign_credit([group], PRESETS["hierarchical"])
    by_agent = [(row[:3], row[3:6], row[6:9]) for row in (one.advantages for one in samples)]
    assert by_agent[0][0][0] == pytest.approx(-by_agent[1][0][0])
    assert by_agent[0][0][0] < 0
    assert by_agent[0][1][0] == pytest.approx(-by_agent[0][2][0])
    assert by_agent[0][1][0] > 0
    assert set(by_agent[1][1] + by_agent[1][2]) == {0.0}

    class Roles:
        roles = ("proposer", "solver")
        name = "r"

        def tasks(self, split):
            return [TASK]

    check_roles(PRESETS["hierarchical"], Roles())


def test_bootstrapped_values_are_those_of_the_last_row_of_each_agent():
    split = [played(0, x=1.0, o=0.0).paths()]
    found = Estimates(bootstrap=[torch.tensor([1.0, 2.0, 3.0])]).along(split)
    assert [float(one) for one in found.bootstrap] == [3.0, 2.0]


def cut_short(sample, *agents):
    """An episode that ended at a limit: its agents have no rewards."""
    found = played(sample, **dict.fromkeys(agents, 0.0))
    return replace(found, agent_rewards={}, reward=0.0, stop_reason=StopReason.MAX_TURNS)


@pytest.mark.parametrize("preset", ["grpo", "rloo", "dr_grpo", "rae"])
def test_agents_of_an_episode_that_ended_at_a_limit_are_compared_with_reward_zero(preset):
    group = [episode(played(0, x=1.0, o=0.5)), episode(played(1, x=1.0, o=0.5)), episode(cut_short(2, "x", "o"))]
    zero = [*group[:2], episode(played(2, x=0.0, o=0.0))]
    samples, expected = assign_credit([group], PRESETS[preset]), assign_credit([zero], PRESETS[preset])
    if preset == "rae":
        averages = RoleBaselines(means={("g", "x"): 0.75, ("g", "o"): 0.25})
        samples, expected = (with_role_baselines(given, "g", averages)[0] for given in (samples, expected))
        assert samples[2].baselines == expected[2].baselines
    assert [one.advantages for one in samples] == [one.advantages for one in expected]
    assert preset == "rae" or max(samples[2].advantages) < 0


@pytest.mark.parametrize("preset", ["grpo", "rloo", "hierarchical"])
def test_agent_without_another_one_to_compare_with_has_no_advantage(preset):
    rewards = [{"proposer": 0.5, "judge": 1.0}, {"proposer": 1.0}, {"proposer": 0.0, "worker/0": 0.25}]
    group = [*(episode(played(i, **given)) for i, given in enumerate(rewards)), episode(cut_short(3, "proposer"))]
    samples = assign_credit(
        [[*group, episode(replace(played(4, x=0.0), segments=(), agent_rewards={}))]], PRESETS[preset]
    )
    assert all(value != 0 for one in samples[:4] for value in one.advantages[:3])
    assert {*samples[0].advantages[3:6], *samples[2].advantages[3:6]} == {0.0}
    assert samples[4].advantages == ()


def test_greedy_rewards_are_those_of_the_role():
    greedy = replace(episode(played(2, **{"x/0": 1.0, "x/1": 0.5, "o": 0.25})), greedy=True)
    samples = assign_credit(
        [[episode(played(0, x=1.0, o=0.0)), episode(played(1, x=0.5, o=1.0)), greedy]], PRESETS["remax"]
    )
    first, second, _ = values(samples[1])
    assert (first[0], second[0]) == (0.25, -0.25)
    changed = replace(samples[0], episode=replace(greedy, trajectory=played(2, x=0.0, o=0.0)))
    first, second, _ = values(recompute_samples([changed, *samples[1:]], PRESETS["remax"], 0)[1])
    assert (first[0], second[0]) == (1.0, 0.0)


def test_episode_without_a_row_has_a_bootstrapped_value():
    empty = Trajectory("t", 1, (), (), StopReason.PROMPT_TOO_LONG, shared_reward=True)
    samples = assign_credit([[episode(played(0, x=1.0, o=0.0)), episode(empty)]], PRESETS["ppo"])
    critic = None  # no episode was cut off
    found = bootstrap_values(critic, samples, [])
    along = Estimates(bootstrap=found).along([one.episode.trajectory.paths() for one in samples])
    assert [one.tolist() for one in along.bootstrap] == [[0.0]] * 3


def test_rewards_of_agents_are_stored_and_counted_by_role():
    trajectory = played(0, **{"solver/0": 1.0, "solver/1": 0.0, "judge": 0.75})
    record = RolloutRecord(1, "t", RolloutOutcome.TRAINED, "trained", trajectory)
    assert parse_rollout(json.loads(rollout_line(record))).trajectory == trajectory
    metrics = rollout_metrics([Group(TASK, (trajectory,))])
    assert (metrics["agent/reward/solver"], metrics["agent/reward/judge"]) == (0.5, 0.75)
