"""Reference advantages of turns and tokens as slow loops, written from the definitions, and random batches.

Every loop works on Python floats, one row at a time, over the columns of its action tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from algorithms_oracle import GROUP_IDS, REWARDS

BAD = [float("nan"), float("inf"), float("-inf")]
Rows = list[list[float]]


@dataclass(frozen=True)
class TurnBatch:
    """A ragged batch of turns. Values outside the mask, or after the last turn of a row, are NaN or infinite."""

    rewards: Tensor
    turn_rewards: Tensor
    group: Tensor
    mask: Tensor
    turn: Tensor
    anchors: Tensor
    greedy: Tensor
    bootstrap: Tensor
    values: Tensor
    old: Tensor
    behavior: Tensor
    kl: Tensor
    probs: Tensor

    def columns(self, row: int) -> list[int]:
        return [t for t, m in enumerate(self.mask[row].tolist()) if m]

    def turns(self, row: int) -> list[list[int]]:
        """Return the columns of each turn of a row."""
        found: list[list[int]] = []
        for t in self.columns(row):
            k = int(self.turn[row, t])
            if k == len(found):
                found.append([])
            found[k].append(t)
        return found

    def members(self) -> list[list[int]]:
        ids = self.group.tolist()
        return [[i for i, g in enumerate(ids) if g == name] for name in sorted(set(ids))]

    def dense(self, row_of: Callable[[int], dict[int, float]]) -> Tensor:
        """Return [N, L] from the values of each row by column."""
        found = torch.zeros(self.mask.shape, dtype=torch.float64)
        for i in range(len(self.mask)):
            for t, value in row_of(i).items():
                found[i, t] = value
        return found


@st.composite
def turn_batches(draw: st.DrawFn, rewards: list[float] = REWARDS) -> TurnBatch:
    """Draw rows in which every run of action tokens is a turn; they start and end with either kind, or are empty."""
    runs = st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=6)
    rows = draw(st.lists(runs, min_size=2, max_size=6))
    width = max(sum(length for _, length in row) for row in rows) + draw(st.integers(1, 2))
    ids = [GROUP_IDS[min(i // 2, len(rows) // 2 - 1)] for i in range(len(rows))]
    return turn_batch(
        rows,
        width,
        draw(st.permutations(ids)),
        draw(st.lists(st.sampled_from(rewards), min_size=len(rows), max_size=len(rows))),
        seed=draw(st.integers(0, 2**16)),
        ended=draw(st.sampled_from(["all", "none", "some"])),
    )


def turn_batch(rows, width, group, rewards, seed, ended="some") -> TurnBatch:
    """Return a batch. `rows`: runs (is action, length); `ended`: rows that terminated and thus do not bootstrap."""
    generator = torch.Generator().manual_seed(seed)
    mask, turn = torch.zeros(len(rows), width, dtype=torch.bool), torch.full((len(rows), width), 99)
    counts = []
    for i, row in enumerate(rows):
        column, k = 0, 0
        for acts, length in row:
            if acts:
                mask[i, column : column + length] = True
                turn[i, column : column + length] = k
                k += 1
            column += length
        counts.append(k)
    turn[~mask] = torch.randint(-5, 50, (int((~mask).sum()),), generator=generator)
    num_turns = max(counts) + 1
    reached = torch.arange(num_turns) < torch.tensor(counts)[:, None]

    def noise(shape, where=None) -> Tensor:
        found = torch.randn(shape, generator=generator, dtype=torch.float64)
        picks = torch.randint(3, shape, generator=generator)
        return found if where is None else torch.where(where, found, torch.tensor(BAD).double()[picks])

    shares = torch.tensor(REWARDS, dtype=torch.float64)[torch.randint(3, reached.shape, generator=generator)]
    bootstrap = noise((len(rows),))
    keep = {"all": 0.0, "none": 1.0, "some": (torch.arange(len(rows)) % 2).double()}[ended]
    return TurnBatch(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        turn_rewards=torch.where(reached, shares, noise(reached.shape, torch.zeros_like(reached))),
        group=torch.tensor(group),
        mask=mask,
        turn=turn,
        anchors=torch.randint(-1, 2, reached.shape, generator=generator),
        greedy=noise((len(rows),)),
        bootstrap=bootstrap * keep,
        values=noise(mask.shape, mask),
        old=noise(mask.shape, mask),
        behavior=noise(mask.shape, mask),
        kl=noise(mask.shape, mask),
        probs=noise(mask.shape, mask).sigmoid().where(mask, torch.tensor(float("nan")).double()),
    )


def norm(xs: list[float], ddof: int = 1, divide: bool = True) -> list[float]:
    if len(xs) < 2 or max(xs) - min(xs) < 1e-12:
        return [0.0] * len(xs)
    mean = sum(xs) / len(xs)
    std = math.sqrt(sum((x - mean) ** 2 for x in xs) / (len(xs) - ddof))
    return [(x - mean) / (std + 1e-6) if divide else x - mean for x in xs]


def norm_groups(b: TurnBatch, xs: list[float], ddof: int = 1, divide: bool = True) -> list[float]:
    found = [0.0] * len(xs)
    for members in b.members():
        for i, x in zip(members, norm([xs[i] for i in members], ddof, divide), strict=True):
            found[i] = x
    return found


def placed(b: TurnBatch, how: str, kl_coef: float) -> Rows:
    """Return the rewards of the action tokens of each row; `how` selects outcomes, turn rewards or both."""
    found = []
    for i in range(len(b.mask)):
        row = {t: -kl_coef * float(b.kl[i, t]) if kl_coef else 0.0 for t in b.columns(i)}
        if row and how in ("rewards", "both"):
            row[b.columns(i)[-1]] += float(b.rewards[i])
        if how in ("turns", "both"):
            for k, columns in enumerate(b.turns(i)):
                row[columns[-1]] += float(b.turn_rewards[i, k])
        found.append([row[t] for t in b.columns(i)])
    return found


def given(b: TurnBatch, how: str, kl_coef: float = 0.0) -> dict[str, object]:
    """Return the arguments of the library functions that correspond to `placed`."""
    found: dict[str, object] = {"mask": b.mask}
    if how in ("rewards", "both"):
        found["rewards"] = b.rewards
    if how in ("turns", "both"):
        found |= {"turn_rewards": b.turn_rewards, "turn": b.turn}
    return found | ({"kl": b.kl, "kl_coef": kl_coef} if kl_coef else {})


def of_row(b: TurnBatch, values: Tensor, i: int) -> list[float]:
    return [float(values[i, t]) for t in b.columns(i)]


def lay(b: TurnBatch, rows: Rows) -> Tensor:
    return b.dense(lambda i: dict(zip(b.columns(i), rows[i], strict=True)))


def gae(b: TurnBatch, how: str, kl_coef: float, gamma: float, lams: list[float]) -> Tensor:
    rows = []
    for i, rewards in enumerate(placed(b, how, kl_coef)):
        values = [*of_row(b, b.values, i), float(b.bootstrap[i])]
        found, ahead = [], 0.0
        for t in reversed(range(len(rewards))):
            delta = rewards[t] + gamma * values[t + 1] - values[t]
            ahead = delta + gamma * lams[i] * ahead
            found.insert(0, ahead)
        rows.append(found)
    return lay(b, rows)


def vapo_lam(b: TurnBatch, alpha: float = 0.05) -> list[float]:
    lengths = [len(b.columns(i)) for i in range(len(b.mask))]
    return [min(1.0, max(0.0, 1 - 1 / (alpha * n))) if n else 0.0 for n in lengths]


def reinforce_pp(b: TurnBatch, how: str, kl_coef: float, gamma: float, ddof: int) -> Tensor:
    rows = [discounted(rewards, gamma) for rewards in placed(b, how, kl_coef)]
    flat = [x for row in rows for x in row]
    if not flat or max(flat) - min(flat) < 1e-12:
        return torch.zeros(b.mask.shape, dtype=torch.float64)
    mean = sum(flat) / len(flat)
    var = sum((x - mean) ** 2 for x in flat) / max(len(flat) - ddof, 1)
    return lay(b, [[(x - mean) / math.sqrt(var + 1e-8) for x in row] for row in rows])


def of_turns(b: TurnBatch, how: str) -> Rows:
    found = []
    for i in range(len(b.mask)):
        row = [float(b.turn_rewards[i, k]) if how != "rewards" else 0.0 for k in range(len(b.turns(i)))]
        if row and how != "turns":
            row[-1] += float(b.rewards[i])
        found.append(row)
    return found


def turn_advantages(b: TurnBatch, rewards: Rows, gamma: float, lam: float) -> Rows:
    """Return GAE over turns; the value of a turn is that of its first token."""
    rows = []
    for i, row in enumerate(rewards):
        values = [float(b.values[i, columns[0]]) for columns in b.turns(i)] + [float(b.bootstrap[i])]
        found, ahead = [0.0] * len(row), 0.0
        for k in reversed(range(len(row))):
            ahead = row[k] + gamma * values[k + 1] - values[k] + gamma * lam * ahead
            found[k] = ahead
        rows.append(found)
    return rows


def spread_turns(b: TurnBatch, rows: Rows) -> Tensor:
    return b.dense(lambda i: {t: rows[i][k] for k, columns in enumerate(b.turns(i)) for t in columns})


def step_gae(b: TurnBatch, how: str, kl_coef: float, gamma: float, lam: float) -> Tensor:
    rewards = of_turns(b, how)
    for i, row in enumerate(rewards):
        for k, columns in enumerate(b.turns(i)):
            row[k] -= sum(kl_coef * float(b.kl[i, t]) for t in columns)
    return spread_turns(b, turn_advantages(b, rewards, gamma, lam))


def turn_gae(b: TurnBatch, how: str, kl_coef: float, gammas: tuple[float, float, float, float]) -> Tensor:
    gamma_turn, lam_turn, gamma, lam = gammas
    rewards = of_turns(b, how)
    for i, row in enumerate(rewards):
        for k, columns in enumerate(b.turns(i)):
            row[k] -= kl_coef * float(b.kl[i, columns[-1]])
    high = turn_advantages(b, rewards, gamma_turn, lam_turn)

    def row_of(i: int) -> dict[int, float]:
        found: dict[int, float] = {}
        for k, columns in enumerate(b.turns(i)):
            found[columns[-1]] = high[i][k]
            for t, after in reversed(list(pairwise(columns))):
                step = gamma * float(b.values[i, after]) - float(b.values[i, t]) - kl_coef * float(b.kl[i, t])
                found[t] = step + gamma * lam * found[after]
        return found

    return b.dense(row_of)


def norm_turns(b: TurnBatch, xs: Rows, ddof: int = 1) -> Rows:
    """Normalise each turn over the members of its group that reached it."""
    found = [[0.0] * len(row) for row in xs]
    for members in b.members():
        for k in range(max(len(xs[i]) for i in members)):
            reached = [i for i in members if len(xs[i]) > k]
            for i, x in zip(reached, norm([xs[i][k] for i in reached], ddof), strict=True):
                found[i][k] = x
    return found


def discounted(row: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (j - k) * row[j] for j in range(k, len(row))) for k in range(len(row))]


def turn_grpo(b: TurnBatch, weights: tuple[float, float], ddof: int) -> Tensor:
    outcome = norm_groups(b, b.rewards.tolist(), ddof)
    rows = norm_turns(b, of_turns(b, "turns"), ddof)
    for i, row in enumerate(rows):
        for k in range(len(row)):
            own = 0.0 if k == len(row) - 1 else weights[0] * row[k]
            row[k] = own + weights[1] * outcome[i]
    return spread_turns(b, rows)


def turn_return(b: TurnBatch, how: str, gamma: float, ddof: int) -> Tensor:
    rows = [discounted(row, gamma) for row in of_turns(b, how)]
    return spread_turns(b, norm_turns(b, rows, ddof))


def turn_return_hybrid(b: TurnBatch, gamma: float, damping: float, ddof: int) -> Tensor:
    outcome = norm_groups(b, b.rewards.tolist(), ddof)
    rows = []
    for i, row in enumerate(of_turns(b, "turns")):
        later = discounted(row, gamma)
        rows.append([x + gamma ** (len(row) - k) * float(b.rewards[i]) for k, x in enumerate(later)])
    rows = norm_turns(b, rows, ddof)
    return spread_turns(b, [[x + damping * outcome[i] for x in row] for i, row in enumerate(rows)])


def gigpo(b: TurnBatch, how: str, gamma: float, weight: float, divide: bool) -> Tensor:
    outcome = norm_groups(b, b.rewards.tolist(), 1, divide)
    rows = [discounted(row, gamma) for row in of_turns(b, how)]
    local = [[0.0] * len(row) for row in rows]
    for members in b.members():
        cells = [(i, k) for i in members for k in range(len(rows[i]))]
        for anchor in {int(b.anchors[i, k]) for i, k in cells}:
            same = [(i, k) for i, k in cells if int(b.anchors[i, k]) == anchor]
            for (i, k), x in zip(same, norm([rows[i][k] for i, k in same], 1, divide), strict=True):
                local[i][k] = x
    return spread_turns(b, [[outcome[i] + weight * x for x in row] for i, row in enumerate(local)])


def nodes_of(b: TurnBatch) -> Tensor:
    """Return node ids in which neighbours of a group share the actions of their first 0 to 2 turns."""
    found = torch.arange(b.turn_rewards.numel()).view(b.turn_rewards.shape)
    for i in range(1, len(found), 2):
        if b.group[i] == b.group[i - 1]:
            found[i, : i % 4] = found[i - 1, : i % 4]
    return found


def siblings(b: TurnBatch, divide: bool) -> Tensor:
    nodes, rows = nodes_of(b).tolist(), [[0.0] * len(b.turns(i)) for i in range(len(b.rewards))]
    for members in b.members():
        for k in range(max(map(len, rows), default=0)):
            reached = [i for i in members if k < len(rows[i])]
            for start in {tuple(nodes[i][:k]) for i in reached}:
                here = [i for i in reached if tuple(nodes[i][:k]) == start]
                actions = list(dict.fromkeys(nodes[i][k] for i in here))
                worth = {a: [float(b.rewards[i]) for i in here if nodes[i][k] == a] for a in actions}
                credit = norm([sum(own) / len(own) for own in worth.values()], 1, divide)
                for i in here:
                    alone = len(actions) == 1
                    own = credit[actions.index(nodes[i][k])]
                    rows[i][k] = rows[i][k - 1] if alone and k else own
    return spread_turns(b, rows)


def ratios(b: TurnBatch, i: int) -> list[float]:
    pairs = zip(of_row(b, b.old, i), of_row(b, b.behavior, i), strict=True)
    return [math.exp(max(-20.0, min(20.0, old - beh))) for old, beh in pairs]


def vtrace(b: TurnBatch, how: str, gamma: float, rho_bar: float, c_bar: float) -> tuple[Tensor, Tensor]:
    """Return the advantages and the targets `v`."""
    advantages, targets = [], []
    for i, rewards in enumerate(placed(b, how, 0.0)):
        values, w = [*of_row(b, b.values, i), float(b.bootstrap[i])], ratios(b, i)
        v = [*[0.0] * len(rewards), values[-1]]
        row = [0.0] * len(rewards)
        for t in reversed(range(len(rewards))):
            rho, c = min(rho_bar, w[t]), min(c_bar, w[t])
            delta = rho * (rewards[t] + gamma * values[t + 1] - values[t])
            v[t] = values[t] + delta + gamma * c * (v[t + 1] - values[t + 1])
            row[t] = rho * (rewards[t] + gamma * v[t + 1] - values[t])
        advantages.append(row)
        targets.append(v[:-1])
    return lay(b, advantages), lay(b, targets)


def retrace(b: TurnBatch, how: str, gamma: float, lam: float) -> Tensor:
    rows = []
    for i, rewards in enumerate(placed(b, how, 0.0)):
        values, w = [*of_row(b, b.values, i), float(b.bootstrap[i])], ratios(b, i)
        row = []
        for t in range(len(rewards)):
            total = 0.0
            for s in range(t, len(rewards)):
                product = math.prod(lam * min(1.0, w[u]) for u in range(t + 1, s + 1))
                total += gamma ** (s - t) * product * (rewards[s] + gamma * values[s + 1] - values[s])
            row.append(total)
        rows.append(row)
    return lay(b, rows)


def prime(b: TurnBatch, beta: float, gamma: float) -> Tensor:
    """Return PRIME advantages; `old` is used as the implicit reward model, `behavior` as the reference."""
    q = [
        [beta * (x - y) for x, y in zip(of_row(b, b.old, i), of_row(b, b.behavior, i), strict=True)]
        for i in range(len(b.mask))
    ]
    rewards = b.rewards.tolist()
    rows: Rows = [[] for _ in q]
    for members in b.members():
        for i in members:
            others = [sum(q[j]) / len(q[j]) for j in members if j != i and q[j]]
            baseline = sum(others) / len(others) if others else 0.0
            peers = [rewards[j] for j in members if j != i]
            outcome = rewards[i] - sum(peers) / len(peers)
            rows[i] = [
                sum(gamma ** (s - t) * (q[i][s] - baseline) for s in range(t, len(q[i]))) + outcome
                for t in range(len(q[i]))
            ]
    return lay(b, rows)


def whole(b: TurnBatch, scores: list[float]) -> Tensor:
    return b.dense(lambda i: dict.fromkeys(b.columns(i), scores[i]))


def maxrl(b: TurnBatch) -> Tensor:
    rewards, scores = b.rewards.tolist(), [0.0] * len(b.mask)
    for members in b.members():
        mean = sum(rewards[i] for i in members) / len(members)
        for i in members:
            scores[i] = (rewards[i] - mean) / mean if mean > 1e-12 else 0.0
    return whole(b, scores)


def best_of_group(b: TurnBatch) -> Tensor:
    rewards, scores = b.rewards.tolist(), [0.0] * len(b.mask)
    for members in b.members():
        order = sorted(members, key=lambda i: rewards[i])
        scores[order[-1]] = rewards[order[-1]] - rewards[order[-2]]
    return whole(b, scores)


def pass_at_k(b: TurnBatch, k: int) -> Tensor:
    rewards, scores = b.rewards.tolist(), [0.0] * len(b.mask)
    for members in b.members():
        size, failed = len(members), sum(rewards[i] == 0 for i in members)
        reach = 1 - math.comb(failed, k) / math.comb(size, k)
        scale = math.sqrt(reach * (1 - reach))
        for i in members:
            if scale and rewards[i] == 1:
                scores[i] = (1 - reach) / scale
            elif scale:
                rest = math.comb(failed - 1, k - 1) / math.comb(size - 1, k - 1)
                scores[i] = (1 - reach - rest) / scale
    return whole(b, scores)
