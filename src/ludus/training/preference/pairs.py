"""Preference pairs as token ids, with the reference model's log-probabilities.

Pairs of a run use the sampled ids, which are never re-tokenized. Prompts and observations are not trained. The pairs
of a run folder are built once and stored in `pairs.jsonl.gz` with the reference's log-probabilities, so that a
resumed run trains on the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import torch

from ludus.chat.render import Renderer, render_dialogue
from ludus.config.sections.tree_search import StepSearchConfig
from ludus.errors import UserError
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts
from ludus.rollouts.scheduler import Scheduler
from ludus.rollouts.tree_search import (
    Candidate,
    SearchBudget,
    SearchNode,
    SearchResult,
    TreeSearch,
    action_value,
    outcome_selector,
)
from ludus.tools.base import Tool
from ludus.training.batches.rows import Row, microbatches
from ludus.training.datasets.files import FileDialogue, FilePair, load_records, read_pairs, read_preferences
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.value_models.reward_model import is_usable
from ludus.types import Message, Trajectory, grouped

PAIRS_FILE = "pairs.jsonl.gz"


@dataclass(frozen=True, slots=True)
class PairSide:
    """One trajectory: tokens `[T]`, training mask `[T]`, and the reference's log-probabilities.

    `reference` has one value (nats) per training token, in order; empty without a reference.
    """

    tokens: tuple[int, ...]
    trains: tuple[bool, ...]
    reference: tuple[float, ...] = ()

    @property
    def row(self) -> Row:
        """The side as a row."""
        nothing, zeros = (False,) * len(self.tokens), (0.0,) * len(self.tokens)
        return Row(self.tokens, self.trains, nothing, zeros, zeros)

    @property
    def prompt_length(self) -> int:
        """The number of tokens before the first training token."""
        return self.trains.index(True)


NO_SIDE = PairSide((), ())
"""Missing side of a labelled dialogue."""


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two trajectories with one prompt. `source` names its origin, `gap` is the reward difference.

    A labelled dialogue has one side; the other is `NO_SIDE`. `mismatched` are this prompt with the answers to
    another prompt, from which KTO estimates its baseline.
    """

    source: str
    gap: float
    chosen: PairSide
    rejected: PairSide
    mismatched: tuple[PairSide, ...] = ()

    @property
    def sides(self) -> tuple[PairSide, ...]:
        """The existing ones of `chosen` and `rejected`."""
        return tuple(side for side in (self.chosen, self.rejected) if side.tokens)

    @property
    def all_sides(self) -> tuple[PairSide, ...]:
        """All trajectories, `chosen` first."""
        return (*self.sides, *self.mismatched)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the existing sides; their prompt counts once."""
        return sum(len(side.tokens) for side in self.sides) - (len(self.sides) - 1) * self.sides[0].prompt_length


PairMaker = Callable[[str, Iterable[RolloutRecord], float, int], list["PreferencePair"]]
"""Build pairs from a file: its name, its records, the minimum gap, the maximum number of tokens."""


def pairs_of_attempts(
    name: str, records: Iterable[RolloutRecord], min_gap: float, max_tokens: int
) -> list[PreferencePair]:
    """Pair the best with the worst attempt of each group of the file `name`.

    Groups with equal rewards or a gap below `min_gap` are skipped. Ties go to the first attempt. Attempts that
    failed, have no action tokens, branch, or exceed `max_tokens` are ignored.
    """
    pairs = []
    for source, group in groups_of(name, (r for r in records if is_usable(r, max_tokens))):
        sides = [PairSide(r.trajectory.token_ids, r.trajectory.action_mask) for r in group]
        pairs += _best_against_worst(source, sides, [r.trajectory.reward for r in group], min_gap)
    return pairs


def pairs_of_branches(
    name: str, records: Iterable[RolloutRecord], min_gap: float, max_tokens: int
) -> list[PreferencePair]:
    """Pair the best with the worst action at each step where a group tried several.

    All paths of a group form one tree: two actions branch at a step if all tokens before them are equal. A branch
    has the mean reward of the leaves below it, each path counted once. Both sides are the shared history and
    the action; only the action is trained (step-level preferences, arXiv:2405.00451). Otherwise as `pairs_of_attempts`.
    """
    pairs = []
    for source, group in groups_of(name, records):
        for history, branches in steps_of(group, max_tokens).items():
            values = {action: math.fsum(rewards) / len(rewards) for action, rewards in branches.items()}
            pairs += pair_of_step(source, history, values, min_gap)
    return pairs


def pair_of_step(
    source: str, history: tuple[int, ...], values: Mapping[tuple[int, ...], float], min_gap: float
) -> list[PreferencePair]:
    """Return the pair of the actions after `history` with the largest and the smallest value, if they differ enough."""
    before = (False,) * len(history)
    sides = [PairSide(history + action, before + (True,) * len(action)) for action in values]
    return _best_against_worst(f"{source}/step of {len(history)} tokens", sides, [*values.values()], min_gap)


def _best_against_worst(
    source: str, sides: Sequence[PairSide], values: Sequence[float], min_gap: float
) -> list[PreferencePair]:
    """Return the pair of the first best and the first worst side; none if their values are equal or too close."""
    best, worst = values.index(max(values)), values.index(min(values))
    gap = values[best] - values[worst]
    return [PreferencePair(source, gap, sides[best], sides[worst])] if gap > 0 and gap >= min_gap else []


def pairs_of_rollouts(
    files: Sequence[Path], min_gap: float, max_tokens: int, made: PairMaker = pairs_of_attempts
) -> list[PreferencePair]:
    """Return the pairs that `made` builds from each file, in file order."""
    rollouts = [(file.name.removesuffix(".jsonl.gz"), read_rollouts(file)) for file in files]
    return [pair for name, records in rollouts for pair in made(name, records, min_gap, max_tokens)]


def labels_of_rollouts(files: Sequence[Path], threshold: float | None, max_tokens: int) -> list[PreferencePair]:
    """Return each row of the rollouts as a labelled dialogue: desirable if its reward is at least the threshold.

    The threshold defaults to the mean of the rollouts; there are then no labels if all rewards are equal. Ignored are
    rollouts that failed, sessions without feedback, and rows above `max_tokens`. An action that
    several rows share is trained in the first one.
    """
    found = [
        (f"{file.name.removesuffix('.jsonl.gz')}/{record.group}/{record.trajectory.sample}", record.trajectory)
        for file in files
        for record in read_rollouts(file)
        if record.is_scored
    ]
    rewards = [trajectory.reward for _, trajectory in found]
    if threshold is None and len(set(rewards)) < 2:
        return []
    level = math.fsum(rewards) / len(rewards) if threshold is None else threshold
    pairs = []
    for source, trajectory in found:
        for number, (side, reward) in enumerate(_sides_of_rows(trajectory)):
            if len(side.tokens) <= max_tokens and any(side.trains):
                sides = (side, NO_SIDE) if reward >= level else (NO_SIDE, side)
                pairs.append(PreferencePair(f"{source}/row {number}", 0.0, *sides))
    return pairs


def _sides_of_rows(trajectory: Trajectory) -> Iterator[tuple[PairSide, float]]:
    """Yield each row and its reward."""
    seen: set[int] = set()
    for row, reward in _rewarded_rows(trajectory):
        segments = [(i, trajectory.segments[i]) for i in row]
        tokens = tuple(token for _, one in segments for token in one.tokens)
        trains = tuple(one.kind == "action" and i not in seen for i, one in segments for _ in one.tokens)
        seen.update(row)
        yield PairSide(tokens, trains), reward


def _rewarded_rows(trajectory: Trajectory) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield each row, as segment indices, and the reward of its agent or else its own."""
    for row, own in zip(trajectory.rows, trajectory.row_rewards, strict=True):
        yield row, trajectory.agent_rewards.get(trajectory.segments[row[-1]].agent, own)


Steps = dict[tuple[int, ...], dict[tuple[int, ...], list[float]]]
"""Rewards of the leaves below each action, by preceding tokens and by its own tokens."""


def steps_of(records: Sequence[RolloutRecord], max_tokens: int) -> Steps:
    """Return the actions of a group's rollouts by their histories; those beyond `max_tokens` are left out."""
    steps: Steps = {}
    for record in records:
        if not record.is_scored:
            continue
        for row, reward in _rewarded_rows(record.trajectory):
            history: tuple[int, ...] = ()
            for segment in (record.trajectory.segments[i] for i in row):
                if segment.kind == "action" and segment.tokens:
                    if len(history) + len(segment.tokens) > max_tokens:
                        break
                    rewards = steps.setdefault(history, {}).setdefault(segment.tokens, [])
                    rewards.append(reward)
                history += segment.tokens
    return steps


def groups_of(name: str, records: Iterable[RolloutRecord]) -> Iterator[tuple[str, list[RolloutRecord]]]:
    """Yield each group of a file, with the name of its pairs."""
    for task, group in grouped(records, lambda one: one.group).items():
        yield f"{name}/{task}", group


def pairs_of_file(path: Path, renderer: Renderer, max_tokens: int, labelled: bool = False) -> list[PreferencePair]:
    """Return the pairs of a file, rendered as in a rollout; those longer than `max_tokens` are skipped.

    `labelled`: the file may contain labelled dialogues instead.
    """
    pairs = []
    for number, record in enumerate(read_preferences(path) if labelled else read_pairs(path), start=1):
        if isinstance(record, FileDialogue):
            side = _render_side(renderer, record.messages, record.trains, record.tools)
            pair = PreferencePair(f"dialogue {number}", 0.0, *((side, NO_SIDE) if record.label else (NO_SIDE, side)))
        else:
            chosen, rejected = (_render_continuation(renderer, record, s) for s in (record.chosen, record.rejected))
            pair = PreferencePair(f"pair {number}", 0.0, chosen, rejected)
        if max(len(side.tokens) for side in pair.sides) <= max_tokens:
            pairs.append(pair)
    return pairs


def with_mismatched(pairs: Sequence[PreferencePair], max_tokens: int) -> list[PreferencePair]:
    """Add to each pair its prompt with the answers of the next pair with another prompt, if they fit."""
    prompts = [pair.sides[0].tokens[: pair.sides[0].prompt_length] for pair in pairs]
    mismatched = []
    for i, pair in enumerate(pairs):
        later = (j % len(pairs) for j in range(i + 1, i + len(pairs)))
        other = next((pairs[j] for j in later if prompts[j] != prompts[i]), None)
        sides = () if other is None else tuple(_with_prompt(prompts[i], side) for side in other.sides)
        mismatched.append(replace(pair, mismatched=tuple(side for side in sides if len(side.tokens) <= max_tokens)))
    return mismatched


@torch.no_grad()
def with_reference(
    pairs: Sequence[PreferencePair], scorer: LogprobScorer, max_tokens: int, entropies: bool = False
) -> list[PreferencePair]:
    """Return the pairs with the reference's log-probabilities or `entropies`, unless they have logged ones.

    `max_tokens` limits a forward pass.
    """
    sides = [side for pair in pairs for side in pair.all_sides]
    device = next(scorer.model.parameters()).device
    scored = {i: side for i, side in enumerate(sides) if side.reference}
    unscored = [i for i in range(len(sides)) if i not in scored]
    rows = [sides[i].row for i in unscored]
    for part in microbatches(rows, max_tokens, device, torch.float32, shared=scorer.shares_prefixes):
        scores = scorer.score(part.tokens, part.trains, "value" if entropies else "none")
        logprobs = (scores.logprobs if scores.entropy is None else scores.entropy).cpu()
        trains = part.trains.cpu()
        for place, index in enumerate(part.index):
            i = unscored[index]
            scored[i] = replace(sides[i], reference=tuple(logprobs[place][trains[place]].tolist()))
    in_order = iter([scored[i] for i in range(len(sides))])
    return [_with_sides(pair, [next(in_order) for _ in pair.all_sides]) for pair in pairs]


def load_pairs(path: Path) -> list[PreferencePair]:
    """Load the pairs of a run folder. Raises StorageError if the file is invalid."""
    return load_records(path, PreferencePair)


def rollout_files(run: Path) -> list[Path]:
    """Return the training rollouts of a run, oldest first. Raises UserError if there are none."""
    if not (run / "config.toml").is_file():
        raise UserError(f"{run} is not a run folder: it has no config.toml.", "Check the path.")
    files = sorted((run / "rollouts").glob("step-*.jsonl.gz"))
    if not files:
        raise UserError(
            f"The run {run} has no rollouts of training.",
            "Use a run of `ludus train` or `ludus rft` with run.save_rollouts.",
        )
    return files


def _render_continuation(renderer: Renderer, pair: FilePair, side: Sequence[Message]) -> PairSide:
    """Render the prompt and one side; prompt messages are not trained."""
    trains = [False] * len(pair.prompt) + [True] * len(side)
    return _render_side(renderer, (*pair.prompt, *side), trains, pair.tools)


def _render_side(
    renderer: Renderer, messages: Sequence[Message], trains: Sequence[bool], tools: Sequence[Tool]
) -> PairSide:
    """Render a dialogue; assistant messages marked in `trains` are trained."""
    segments = render_dialogue(renderer, messages, tools)
    turns = [trained for message, trained in zip(messages, trains, strict=True) if message["role"] == "assistant"]
    tokens = tuple(token for segment in segments for token in segment.tokens)
    return PairSide(tokens, tuple(s.kind == "action" and turns[s.turn] for s in segments for _ in s.tokens))


def _with_prompt(prompt: tuple[int, ...], side: PairSide) -> PairSide:
    """Return the part of a side after its own prompt, appended to another prompt."""
    start = side.prompt_length
    return PairSide(prompt + side.tokens[start:], (False,) * len(prompt) + side.trains[start:])


def _with_sides(pair: PreferencePair, sides: Sequence[PairSide]) -> PreferencePair:
    following = iter(sides)
    chosen, rejected = (next(following) if side.tokens else side for side in (pair.chosen, pair.rejected))
    return replace(pair, chosen=chosen, rejected=rejected, mismatched=tuple(following))


def sides_of(pairs: Sequence[PreferencePair]) -> Iterator[PairSide]:
    """Yield every `chosen`, then every `rejected`."""
    yield from (pair.chosen for pair in pairs if pair.chosen.tokens)
    yield from (pair.rejected for pair in pairs if pair.rejected.tokens)


SEARCH_FILE = "search.json"
"""File of a run with the metrics of its search."""


def tree_search(scheduler: Scheduler, settings: StepSearchConfig) -> TreeSearch:
    """Return the search of a scheduler by the outcome, within the budget of the settings."""
    budget = SearchBudget(settings.simulations, settings.max_tokens or None)
    return TreeSearch(settings, scheduler.make_chat, outcome_selector(scheduler.world.rewards), lambda task: budget)


def pairs_of_tree(
    source: str, root: SearchNode, settings: StepSearchConfig, max_tokens: int
) -> Iterator[PreferencePair]:
    """Yield the pairs of visited actions of a node whose values differ by more than the threshold.

    The gap of a pair is this difference. Pairs with a side of more than `max_tokens` tokens are skipped.
    """
    for node in root.walk():
        history = tuple(token for segment in node.history for token in segment.tokens)
        visited = [one for one in node.candidates if one.visits and one.action.tokens]
        for pair in combinations(visited, 2):
            values = [action_value(one.mean, one.critic, settings.alpha) for one in pair]
            better, worse = pair if values[0] > values[1] else reversed(pair)
            gap = abs(values[0] - values[1])
            chosen, rejected = _side(history, better), _side(history, worse)
            if gap > settings.threshold and max(len(chosen.tokens), len(rejected.tokens)) <= max_tokens:
                yield PreferencePair(f"{source}/step of {len(history)} tokens", gap, chosen, rejected)


def _side(history: tuple[int, ...], one: Candidate) -> PairSide:
    action = one.action
    mask = (False,) * len(history) + (True,) * len(action.tokens)
    return PairSide(history + action.tokens, mask, action.logprobs)


def search_metrics(results: Iterable[SearchResult]) -> dict[str, float]:
    """Return the metrics of the searches of a stage: sums of the counts, success of episodes and of their best."""
    found = list(results)
    metrics = {f"search/{name}": 0.0 for result in found[:1] for name in result.counts}
    for result in found:
        for name, count in result.counts.items():
            metrics[f"search/{name}"] += count
    num = sum(len(result.scores) for result in found)
    metrics["search/success"] = sum(sum(result.scores) for result in found) / max(1, num)
    metrics["search/solved_tasks"] = sum(max(result.scores) for result in found) / max(1, len(found))
    return metrics
