"""Action tokens packed without gaps: reverse scans over them, their turns, and their rewards.

Returns and temporal differences are defined on the subsequence of action tokens: an observation is neither a step nor
a discount. `turn` [N, L] integers counts from 0 in each row, without gaps, on action tokens only (None: each run of
action tokens is a turn); `turn_rewards` [N, K] is used up to the last turn of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from ludus.algorithms.tensors import Tensor, cells, numbers, select, torch


@dataclass(frozen=True, slots=True)
class ActionTokens:
    """Positions of the action tokens of `mask` [N, L].

    `columns` [N, T] int is the column of each row's t-th action token; `present` [N, T] bool is set if it exists.
    """

    mask: Tensor
    columns: Tensor
    present: Tensor

    @property
    def last(self) -> Tensor:
        """[N, T] bool, set on the last action token of each row."""
        return self.present & ~shift_left(self.present, False)

    def take(self, name: str, values: Tensor) -> Tensor:
        """Return `values` [N, L] at the action tokens, [N, T] float64, 0 past the end of a row.

        Other positions (NaN too) are ignored. Raises ValueError for a wrong shape or a non-finite number.
        """
        return cells(name, values, self.mask).gather(1, self.columns)

    def spread(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `values` [N, T] at their columns, [N, L] in `dtype`, 0 elsewhere; the inverse of `take`."""
        empty = torch.zeros(self.mask.shape, dtype=torch.float64, device=self.mask.device)
        return empty.scatter(1, self.columns, select(values, self.present)).to(dtype)

    def following(self, values: Tensor, after: Tensor) -> Tensor:
        """Return `values` [N, T] shifted to the next action token, with `after` [N] at the last one of each row."""
        return torch.where(self.last, after[:, None], select(shift_left(values, 0.0), self.present))


def action_tokens(mask: Tensor) -> ActionTokens:
    """Return the action tokens of `mask` [N, L]. Raises ValueError unless `mask` has two axes."""
    if mask.ndim != 2:
        raise ValueError(f"mask must be [N, L], not {list(mask.shape)}")
    chosen = mask.bool()
    counts = chosen.sum(1)
    longest = int(counts.max()) if counts.numel() else 0
    columns = torch.sort((~chosen).long(), dim=1, stable=True).indices[:, :longest]
    return ActionTokens(chosen, columns, torch.arange(longest, device=mask.device) < counts[:, None])


def shift_left(values: Tensor, fill: float | bool) -> Tensor:
    """Return `values` [N, X] shifted left by one, with `fill` in the last column."""
    return torch.cat([values[:, 1:], torch.full_like(values[:, :1], fill)], 1)


def reverse_scan(terms: Tensor, decay: Tensor) -> Tensor:
    """Return the reverse scan `y_t = terms_t + decay_t y_{t+1}`, with 0 after the last column; all [N, X]."""
    found = torch.empty_like(terms)
    running = terms.new_zeros(terms.shape[0])
    for t in range(terms.shape[1] - 1, -1, -1):
        running = terms[:, t] + decay[:, t] * running
        found[:, t] = running
    return found


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of each row; T is the maximum number of action tokens of a row, K at least that of turns.

    `index` [N, T] the turn of each action token; `opens`, `closes` [N, T] bool, set on the first and the last
    action token of each turn; `reached` [N, K] bool.
    """

    tokens: ActionTokens
    index: Tensor
    opens: Tensor
    closes: Tensor
    reached: Tensor

    @property
    def last(self) -> Tensor:
        """[N, K] bool, set on the last turn of each row."""
        return self.reached & ~shift_left(self.reached, False)

    def at_turn_start(self, values: Tensor) -> Tensor:
        """Return `values` [N, T] at the first action token of each turn, [N, K]; 0 for turns not reached."""
        return self._gathered(values, self.opens)

    def sum_per_turn(self, values: Tensor) -> Tensor:
        """Return `values` [N, T] summed over the action tokens of each turn, [N, K]."""
        return self._gathered(values, self.tokens.present)

    def _gathered(self, values: Tensor, where: Tensor) -> Tensor:
        empty = torch.zeros(self.reached.shape, dtype=torch.float64, device=self.reached.device)
        return empty.scatter_add(1, self.index, select(values, where))

    def spread(self, scores: Tensor) -> Tensor:
        """Return `scores` [N, K] on every action token of their turn, [N, T]."""
        return select(scores.gather(1, self.index), self.tokens.present)


def turns_of(turn: Tensor | None, mask: Tensor, num_turns: int | None = None) -> Turns:
    """Return the turns of `turn` [N, L]; `num_turns` is K, by default the maximum over rows.

    Raises ValueError (naming the row) if turns do not count up from 0, or a row has more than K.
    """
    tokens = action_tokens(mask)
    if turn is None:
        turn = _runs(tokens.mask)
    if turn.shape != mask.shape:
        raise ValueError(f"turn must be {list(mask.shape)}, not {list(turn.shape)}")
    if turn.is_floating_point():
        raise ValueError("turn must hold integers")
    index = select(turn.to(mask.device).long().gather(1, tokens.columns), tokens.present)
    before = torch.cat([torch.full_like(index[:, :1], -1), index[:, :-1]], 1)
    step = index - before
    first = torch.arange(index.shape[1], device=index.device) == 0
    wrong = tokens.present & ((step < 0) | (step > 1) | (first & (step != 1)))
    if wrong.any():
        row = int(wrong.any(1).nonzero()[0])
        raise ValueError(f"row {row}: turns of action tokens must count up from 0 without gaps")
    most = int(index.max()) + 1 if tokens.present.any() else 0
    if num_turns is not None and most > num_turns:
        row = int((index == most - 1).any(1).nonzero()[0])
        raise ValueError(f"row {row} has {most} turns, turn_rewards {num_turns}")
    opens = tokens.present & (step == 1)
    closes = tokens.present & (tokens.last | shift_left(opens, False))
    reached = torch.arange(most if num_turns is None else num_turns, device=index.device) < opens.sum(1)[:, None]
    return Turns(tokens, index, opens, closes, reached)


def _runs(mask: Tensor) -> Tensor:
    """Return the run index, from 0, of each action token of `mask` [N, L] bool."""
    begins = mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]
    return begins.cumsum(1) - 1


def rewards_of_turns(
    mask: Tensor, turn: Tensor | None, turn_rewards: Tensor | None, rewards: Tensor | None
) -> tuple[Turns, Tensor]:
    """Return the turns and their rewards, [N, K] float64: `turn_rewards` [N, K], plus `rewards` [N] on the last turn.

    Raises ValueError for numbers that are not finite (naming the row), or if both rewards are None.
    """
    if turn_rewards is None and rewards is None:
        raise ValueError("rewards or turn_rewards must be given")
    if turn_rewards is not None and turn_rewards.ndim != 2:
        raise ValueError(f"turn_rewards must be [N, K], not {list(turn_rewards.shape)}")
    turns = turns_of(turn, mask, None if turn_rewards is None else turn_rewards.shape[1])
    found = torch.zeros(turns.reached.shape, dtype=torch.float64, device=mask.device)
    if turn_rewards is not None:
        found = found + cells("turn_rewards", turn_rewards, turns.reached)
    if rewards is not None:
        found = found + select(numbers("rewards", rewards, mask)[:, None].expand(found.shape), turns.last)
    return turns, found


def token_rewards(
    *,
    mask: Tensor,
    rewards: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    turn: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """Return the reward of each action token, [N, L] float64, 0 elsewhere; the input of `reinforce_pp` and `gae`.

    `rewards` [N] on the last action token of a row (dropped if there is none); `turn_rewards`
    [N, K] on the last action token of each turn of `turn` [N, L] (MT-PPO, arXiv:2505.11821), added if both
    are given; `-kl_coef kl` [N, L] on every action token (KL placed in the reward, as in verl and OpenRLHF;
    no gradient flows). Raises ValueError for a number that is not finite (naming the row), or if both rewards are None.
    """
    tokens = action_tokens(mask)
    if turn_rewards is not None:
        turns, of_turns = rewards_of_turns(mask, turn, turn_rewards, rewards)
        found = select(turns.spread(of_turns), turns.closes)
    elif rewards is not None:
        found = select(numbers("rewards", rewards, mask)[:, None].expand(tokens.last.shape), tokens.last)
    else:
        raise ValueError("rewards or turn_rewards must be given")
    if kl is not None:
        found = found - kl_coef * tokens.take("kl", kl)
    return tokens.spread(found, torch.float64)
