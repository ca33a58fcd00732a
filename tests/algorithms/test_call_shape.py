"""The public functions of `ludus.algorithms`: one import, standard names, simple arguments."""

import inspect
import subprocess
import sys

import pytest
import torch

import ludus.algorithms
from ludus.algorithms import advantages, losses
from ludus.algorithms.filters import zero_variance

MASK = torch.tensor([[0, 1, 1, 0, 0, 1], [1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0], [1, 0, 1, 0, 1, 0]])
TURN = torch.tensor([[9, 0, 0, 9, 9, 1], [0, 0, 9, 1, 1, 1], [9, 9, 0, 0, 9, 9], [0, 9, 1, 9, 2, 9]])
GROUP = torch.tensor([0, 0, 1, 1])
NAMES = """
import sys, ludus.algorithms as a
print(a.advantages.grpo.__name__, a.losses.gspo.__name__, a.kl.k3.__name__, a.corrections.tis.__name__)
assert "torch" not in sys.modules
"""


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def test_package_import_exposes_submodules_and_defers_torch_import():
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("grpo gspo k3 tis\n", 0), done.stderr
    assert float(ludus.algorithms.aggregate(loss=torch.ones(2, 3), mask=torch.ones(2, 3))) == 1.0


def test_unknown_attribute_raises_attribute_error():
    with pytest.raises(AttributeError, match="'advantage'"):
        _ = ludus.algorithms.advantage


@pytest.mark.parametrize(
    "name",
    [
        *("gae", "reinforce_pp", "retrace", "step_gae", "turn_gae", "turn_grpo", "turn_return", "gigpo"),
        *("vtrace", "siblings", "optimal_token_baseline"),
    ],
)
def test_without_turns_each_run_of_action_tokens_is_one(name):
    function = getattr(advantages, name)
    of_turns = random(4, 3)
    more = {
        "values": random(4, 6),
        "rewards": random(4),
        "anchors": torch.zeros(4, 3, dtype=torch.long),
        "nodes": torch.arange(12).view(4, 3),
        "old_logprobs": random(4, 6),
        "behavior_logprobs": random(4, 6),
        "logprobs": random(4, 6),
    }
    more["turn_rewards"] = of_turns
    given = {key: more[key] for key in more if key in takes(function)} | {"mask": MASK, "group": GROUP}
    assert torch.equal(function(**given), function(**given, turn=TURN))


def takes(function):
    return set(inspect.signature(function).parameters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rewards", [[1, 0.75, 0.5, 0.75], [0.05, 0, 0.02, 0.03], [1e-6, 3e-6, 0, 2e-6]])
def test_low_precision_rewards_yield_same_advantages_as_float64(dtype, rewards):
    given, group = torch.tensor(rewards, dtype=dtype), torch.zeros(4, dtype=torch.long)
    exact = given.double()
    mask = torch.ones(4, 2)
    for name in ("grpo", "rloo", "best_of_group", "maxrl"):
        function = getattr(advantages, name)
        found = function(rewards=given, group=group, mask=mask)
        torch.testing.assert_close(found, function(rewards=exact, group=group, mask=mask).to(dtype))
        assert found.abs().sum() > 0
    assert bool(zero_variance(rewards=given, group=group).all())


def test_equal_sums_in_another_order_are_equal_rewards():
    for dtype, parts in ((torch.float32, [0.1, 0.7, 0.2, 0.3]), (torch.float64, [0.1, 0.7, 0.3, 0.2])):
        left, right = (sum(torch.tensor(p, dtype=dtype) for p in order) for order in (parts, parts[::-1]))
        assert left != right
        rewards = torch.stack([left, right])
        found = advantages.grpo(rewards=rewards, group=torch.zeros(2, dtype=torch.long), mask=torch.ones(2, 3))
        assert not found.any()


def test_gmpo_clips_each_token_by_its_own_advantage_sign():
    """By hand: one row of two tokens, gaps 0.9 and 0.9 with advantages 3 and -1, the mean of which is 1."""
    lp = torch.tensor([[0.9, 0.9]], dtype=torch.float64)
    found = losses.gmpo(
        logprobs=lp,
        old_logprobs=torch.zeros_like(lp),
        advantages=torch.tensor([[3.0, -1.0]], dtype=torch.float64),
        mask=torch.ones(1, 2),
    )
    assert float(found[0]) == pytest.approx(-1.0 * 2.718281828459045 ** ((0.4 + 0.9) / 2), abs=1e-12)


@pytest.mark.parametrize(("name", "choose"), [("clip_cov", "select_clip_cov"), ("kl_cov", "select_kl_cov")])
def test_covariance_losses_without_token_choice_select_within_the_rows(name, choose):
    shape = (40, 30)
    lp, old, scores = 3 * random(*shape), 3 * random(*shape).flip(0), random(*shape).flip(1)
    mask = torch.ones(shape)
    given = {"old_logprobs": old, "advantages": scores, "mask": mask}
    means = losses.CovarianceMeans.of(**given)
    more = {"seed": 0} if name == "clip_cov" else {}
    chosen = getattr(losses, choose)(covariance=losses.token_covariance(**given, means=means), mask=mask, **more)
    assert chosen.any()
    function = getattr(losses, name)
    assert torch.equal(function(logprobs=lp, **given), function(logprobs=lp, **given, chosen=chosen))


@pytest.mark.parametrize(
    ("function", "defaults"),
    [
        (advantages.turn_grpo, {"turn": None, "ddof": 1, "eps": 1e-6}),
        (advantages.gae, {"turn": None, "bootstrap_values": None, "kl_coef": 0.0}),
        (advantages.vtrace, {"rewards": None, "kl_coef": 0.0}),
        (losses.clip_cov, {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": None}),
        (losses.mixed_policy, {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": None}),
    ],
)
def test_signature_shows_the_defaults_of_shared_inputs(function, defaults):
    shown = inspect.signature(function).parameters
    assert {name: shown[name].default for name in defaults} == defaults
