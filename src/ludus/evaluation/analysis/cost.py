"""Cost of an evaluation: tokens, tool calls, turns, seconds, and money by a table of prices."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ludus.errors import UserError
from ludus.rollouts.openai_client import TokenUsage
from ludus.rollouts.scheduler import Episode
from ludus.types import Message, Trajectory

_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """Money per million prompt tokens (`input`) and per million sampled tokens (`output`)."""

    input: float
    output: float


@dataclass(frozen=True, slots=True)
class EvaluationCost:
    """Totals over the episodes of an evaluation by name, None if unknown; with a price also of `money`.

    `prompt_tokens` is the sum over turns of the tokens of the whole context, as servers count them; it ignores prefix
    caches. `seconds` is the sum of the wall-clock times of the episodes.
    """

    num_tasks: int
    num_solved: int
    totals: Mapping[str, float | None]

    def per(self, num: int) -> dict[str, float | None]:
        """Return the totals divided by a number of tasks, all or those with a successful attempt; None for 0."""
        return {name: None if total is None or not num else total / num for name, total in self.totals.items()}


def measure_cost(
    episodes: Sequence[Episode], num_solved: int, usage: TokenUsage | None = None, price: TokenPrice | None = None
) -> EvaluationCost:
    """Return the cost of the episodes of an evaluation, of which `num_solved` tasks were solved.

    `usage` has the counts of an endpoint, without tokens in trajectories; unknown if it left out any of them.
    """
    trajectories = [episode.trajectory for episode in episodes]
    pairs = [context_tokens(trajectory) for trajectory in trajectories]
    prompt, sampled = sum(tokens for tokens, _ in pairs), sum(tokens for _, tokens in pairs)
    if usage is not None:
        prompt, sampled = usage.prompt_tokens, usage.completion_tokens
    known = usage is None or usage.num_counted == usage.num_answers
    totals: dict[str, float | None] = {
        "prompt_tokens": prompt if known else None,
        "completion_tokens": sampled if known else None,
        "calls": sum(len(t.call_outcomes) for t in trajectories),
        "turns": sum(num_turns(episode.trajectory, episode.task.prompt) for episode in episodes),
        "seconds": sum(t.timings.total_s for t in trajectories),
    }
    if price is not None:
        totals["money"] = (prompt * price.input + sampled * price.output) / _MILLION if known else None
    return EvaluationCost(len({episode.task.id for episode in episodes}), num_solved, totals)


def context_tokens(trajectory: Trajectory) -> tuple[int, int]:
    """Return the tokens of the contexts of all turns, and the sampled tokens."""
    ends: list[int] = []
    prompt = sampled = 0
    for i, segment in enumerate(trajectory.segments):
        parent = i - 1 if segment.parent is None else segment.parent
        before = ends[parent] if parent >= 0 else 0
        if segment.kind == "action":
            prompt += before
            sampled += len(segment.tokens)
        ends.append(before + len(segment.tokens))
    return prompt, sampled


def num_turns(trajectory: Trajectory, prompt: Sequence[Message] = ()) -> int:
    """Return the number of sampled turns, also of a trajectory without tokens, whose messages begin with `prompt`."""
    if trajectory.segments:
        return trajectory.num_turns
    turns, shown = (sum(message["role"] == "assistant" for message in part) for part in (trajectory.messages, prompt))
    return max(0, turns - shown)


def read_price(path: Path, model: str) -> TokenPrice:
    """Return the price of a model from a TOML file of tables `["MODEL"]` with `input` and `output`, or UserError."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"The prices cannot be read from {path}: {error}.", "Check --prices.") from error
    if model not in table:
        raise UserError(f"{path} has no price of {model!r}.", f"It has prices of {', '.join(table) or 'no model'}.")
    row = table[model]
    if not isinstance(row, dict) or row.keys() != {"input", "output"}:
        text = f"The price of {model!r} in {path} is not a table with exactly the keys input and output."
        raise UserError(text, "Set both, as money per million tokens.")
    return checked_price(row["input"], row["output"])


def checked_price(price_in: object, price_out: object) -> TokenPrice:
    """Return the price. Raises UserError unless both are numbers from 0 to a billion."""
    for price in (price_in, price_out):
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price <= 1e9:
            raise UserError(f"The price {price!r} is not valid.", "It is money per million tokens, 0 or more.")
    return TokenPrice(float(str(price_in)), float(str(price_out)))
