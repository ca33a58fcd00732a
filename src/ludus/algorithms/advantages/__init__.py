"""Advantages: from the rewards of a whole batch to one number per action token.

Every function takes its tensors by keyword and returns [N, L]: `rewards` [N] (or `turn_rewards` [N, K] with
`turn` [N, L]), `group` [N] integers, `mask` [N, L], and what else it names. 0 stands where the mask is 0,
whatever stood there before. They compute in float64. A number that is not finite where it is read, and a
group with one member where members are compared, raise ValueError naming the row. Equal rewards that are
compared give exactly 0, rounding noise notwithstanding.

| module | compares or sums |
|---|---|
| `group_relative` | trajectories of a group |
| `turns` | turns of a group, without a critic |
| `gae_tokens` | rewards and values over the action tokens |
| `gae_turns` | the same with a turn as the step |
| `off_policy` | the same, sampled by another policy |
| `optimal` | returns of a group, token by token |
| `running_baselines` | statistics that outlive a step |
| `calibration` | per-turn reward tiers, from recorded rollouts |

To add one, write its function in a module here and its spec in `spec.advantages`.
"""

from ludus.algorithms.advantages.calibration import TierCalibration, calibrate_tiers, tier_advantages
from ludus.algorithms.advantages.gae_tokens import coderl, gae, prime, reinforce_pp, value_targets, vapo
from ludus.algorithms.advantages.gae_turns import step_gae, turn_gae
from ludus.algorithms.advantages.group_relative import (
    best_of_group,
    dr_grpo,
    gpg,
    grpo,
    hierarchical,
    maxrl,
    opo,
    pass_at_k,
    raw,
    reinforce_pp_baseline,
    remax,
    rloo,
    role_groups,
    whiten,
)
from ludus.algorithms.advantages.off_policy import retrace, vtrace, vtrace_targets
from ludus.algorithms.advantages.optimal import optimal_token_baseline
from ludus.algorithms.advantages.running_baselines import (
    DomainMoments,
    Moments,
    RoleBaselines,
    RoleKey,
    domain_normalised,
    rae,
)
from ludus.algorithms.advantages.token_rewards import token_rewards
from ludus.algorithms.advantages.turns import gigpo, siblings, turn_grpo, turn_return, turn_return_hybrid

__all__ = [
    "DomainMoments",
    "Moments",
    "RoleBaselines",
    "RoleKey",
    "TierCalibration",
    "best_of_group",
    "calibrate_tiers",
    "coderl",
    "domain_normalised",
    "dr_grpo",
    "gae",
    "gigpo",
    "gpg",
    "grpo",
    "hierarchical",
    "maxrl",
    "opo",
    "optimal_token_baseline",
    "pass_at_k",
    "prime",
    "rae",
    "raw",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "retrace",
    "rloo",
    "role_groups",
    "siblings",
    "step_gae",
    "tier_advantages",
    "token_rewards",
    "turn_gae",
    "turn_grpo",
    "turn_return",
    "turn_return_hybrid",
    "value_targets",
    "vapo",
    "vtrace",
    "vtrace_targets",
    "whiten",
]
