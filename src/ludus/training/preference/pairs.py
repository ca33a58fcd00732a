"""Preference pairs as token ids, with the reference model's log-probabilities.

Pairs of a run use the sampled ids, which are never re-tokenized. Prompts and observations never train. The pairs
of a run folder are built once and stored in `pairs.jsonl.gz` with the reference's log-probabilities, so that a
resumed run trains on the same ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ludus.chat.render import Renderer, render_dialogue
from ludus.errors import UserError
from ludus.rollout.rollout_files import RolloutRecord, read_rollouts
from ludus.training.batches.rows import Row, microbatches
from ludus.training.datasets.files import FileLabelled, FilePair, load_records, read_pairs, read_preferences
from ludus.training.learner.logprobs import LogprobScorer
from ludus.types import Message

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


NO_ARM = PairSide((), ())
"""Missing side of a labelled dialogue."""


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two trajectories with one prompt. `source` names its origin, `gap` is the reward difference.

    A labelled dialogue has one side; the other one is `NO_ARM`. `others` are this prompt with the answers to
    another one, on which KTO estimates its baseline.
    """

    source: str
    gap: float
    chosen: PairSide
    rejected: PairSide
    others: tuple[PairSide, ...] = ()

    @property
    def sides(self) -> tuple[PairSide, ...]:
        """The existing ones of `chosen` and `rejected`."""
        return tuple(arm for arm in (self.chosen, self.rejected) if arm.tokens)

    @property
    def arms(self) -> tuple[PairSide, ...]:
        """All trajectories, `chosen` first."""
        return (*self.sides, *self.others)


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
    for source, group in _groups(name, (r for r in records if is_usable(r, max_tokens))):
        best = max(group, key=lambda r: r.trajectory.reward)
        worst = min(group, key=lambda r: r.trajectory.reward)
        gap = best.trajectory.reward - worst.trajectory.reward
        if gap > 0 and gap >= min_gap:
            pairs.append(PreferencePair(source, gap, _sampled(best), _sampled(worst)))
    return pairs


def pairs_of_branches(
    name: str, records: Iterable[RolloutRecord], min_gap: float, max_tokens: int
) -> list[PreferencePair]:
    """Pair the best with the worst action at each step where a group tried several.

    All paths of a group form one tree: two actions branch at a step if all tokens before them are equal. A branch
    is worth the mean reward of the leaves below it, each path counted once. Both sides are the shared history and
    the action, which alone trains (step-level preferences, arXiv:2405.00451). Otherwise as `pairs_of_attempts`.
    """
    pairs = []
    for source, group in _groups(name, records):
        for history, branches in _steps(group, max_tokens).items():
            worth = {action: math.fsum(rewards) / len(rewards) for action, rewards in branches.items()}
            best, worst = max(worth, key=lambda a: worth[a]), min(worth, key=lambda a: worth[a])
            gap = worth[best] - worth[worst]
            if gap > 0 and gap >= min_gap:
                where = f"{source}/step of {len(history)} tokens"
                pairs.append(PreferencePair(where, gap, _step(history, best), _step(history, worst)))
    return pairs


def pairs_of_rollouts(
    files: Sequence[Path], min_gap: float, max_tokens: int, made: PairMaker = pairs_of_attempts
) -> list[PreferencePair]:
    """Return the pairs that `made` builds from each file, in file order."""
    return [pair for file in files for pair in made(_name(file), read_rollouts(file), min_gap, max_tokens)]


Steps = dict[tuple[int, ...], dict[tuple[int, ...], list[float]]]
"""Rewards of the leaves below each action, by preceding tokens and by its own tokens."""


def _steps(records: Sequence[RolloutRecord], max_tokens: int) -> Steps:
    """Return the steps in the order in which they occur."""
    steps: Steps = {}
    for record in records:
        if record.trajectory.failure is not None:
            continue
        for path in record.trajectory.paths():
            history: tuple[int, ...] = ()
            for segment in path.trajectory.segments:
                if segment.kind == "action" and segment.tokens:
                    if len(history) + len(segment.tokens) > max_tokens:
                        break
                    rewards = steps.setdefault(history, {}).setdefault(segment.tokens, [])
                    rewards.append(path.trajectory.reward)
                history += segment.tokens
    return steps


def _step(history: tuple[int, ...], action: tuple[int, ...]) -> PairSide:
    return PairSide(history + action, (False,) * len(history) + (True,) * len(action))


def _groups(name: str, records: Iterable[RolloutRecord]) -> Iterator[tuple[str, list[RolloutRecord]]]:
    """Yield the groups of a file with their names."""
    groups: dict[str, list[RolloutRecord]] = {}
    for record in records:
        groups.setdefault(record.group, []).append(record)
    for task, group in groups.items():
        yield f"{name}/{task}", group


def _name(file: Path) -> str:
    return file.name.removesuffix(".jsonl.gz")


def pairs_of_file(path: Path, renderer: Renderer, max_tokens: int, labelled: bool = False) -> list[PreferencePair]:
    """Return the pairs of a file, rendered as in a rollout; those longer than `max_tokens` are skipped.

    `labelled`: the file may contain labelled dialogues instead.
    """
    pairs = []
    records: Sequence[FilePair | FileLabelled] = read_preferences(path) if labelled else read_pairs(path)
    for number, given in enumerate(records, start=1):
        if isinstance(given, FileLabelled):
            arm = _render_labelled(renderer, given)
            sides = (arm, NO_ARM) if given.label else (NO_ARM, arm)
            found = PreferencePair(f"dialogue {number}", 0.0, *sides)
        else:
            chosen, rejected = (_render_side(renderer, given, arm) for arm in (given.chosen, given.rejected))
            found = PreferencePair(f"pair {number}", 0.0, chosen, rejected)
        if max(len(arm.tokens) for arm in found.sides) <= max_tokens:
            pairs.append(found)
    return pairs


def with_others(pairs: Sequence[PreferencePair], max_tokens: int) -> list[PreferencePair]:
    """Add to each pair its prompt with the answers of the next pair with another prompt, if they fit."""
    prompts = [pair.sides[0].tokens[: pair.sides[0].prompt_length] for pair in pairs]
    found = []
    for i, pair in enumerate(pairs):
        later = (j % len(pairs) for j in range(i + 1, i + len(pairs)))
        other = next((pairs[j] for j in later if prompts[j] != prompts[i]), None)
        arms = () if other is None else tuple(_with_prompt(prompts[i], arm) for arm in other.sides)
        found.append(replace(pair, others=tuple(arm for arm in arms if len(arm.tokens) <= max_tokens)))
    return found


@torch.no_grad()
def with_reference(pairs: Sequence[PreferencePair], scorer: LogprobScorer, max_tokens: int) -> list[PreferencePair]:
    """Return the pairs with the reference's log-probabilities; `max_tokens` limits a forward pass."""
    arms = [arm for pair in pairs for arm in pair.arms]
    device = next(scorer.model.parameters()).device
    scored: dict[int, PairSide] = {}
    rows = [arm.row for arm in arms]
    for part in microbatches(rows, max_tokens, device, torch.float32, shared=scorer.shares_prefixes):
        logprobs = scorer.score(part.tokens, part.trains).logprobs.cpu()
        trains = part.trains.cpu()
        for place, i in enumerate(part.index):
            scored[i] = replace(arms[i], reference=tuple(logprobs[place][trains[place]].tolist()))
    in_order = iter([scored[i] for i in range(len(arms))])
    return [_with_arms(pair, [next(in_order) for _ in pair.arms]) for pair in pairs]


def load_pairs(path: Path) -> list[PreferencePair]:
    """Load the pairs of a run folder. Raises StorageError if the file is invalid."""
    return load_records(path, _pair)


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


def is_usable(record: RolloutRecord, max_tokens: int) -> bool:
    """Return whether a record is a linear trajectory with action tokens, within `max_tokens`, that did not fail."""
    trajectory = record.trajectory
    return (
        trajectory.failure is None
        and trajectory.num_action_tokens > 0
        and len(trajectory.rows) == 1
        and len(trajectory.token_ids) <= max_tokens
    )


def _sampled(record: RolloutRecord) -> PairSide:
    return PairSide(record.trajectory.token_ids, record.trajectory.action_mask)


def _render_side(renderer: Renderer, pair: FilePair, arm: Sequence[Message]) -> PairSide:
    """Render the prompt and one side; assistant messages in the prompt do not train."""
    told = sum(message["role"] == "assistant" for message in pair.prompt)
    segments = render_dialogue(renderer, (*pair.prompt, *arm), pair.tools)
    tokens = tuple(token for segment in segments for token in segment.tokens)
    return PairSide(tokens, tuple(s.kind == "action" and s.turn >= told for s in segments for _ in s.tokens))


def _render_labelled(renderer: Renderer, dialogue: FileLabelled) -> PairSide:
    segments = render_dialogue(renderer, dialogue.messages, dialogue.tools)
    said = zip(dialogue.messages, dialogue.trains, strict=True)
    trains = [trained for message, trained in said if message["role"] == "assistant"]
    tokens = tuple(token for segment in segments for token in segment.tokens)
    return PairSide(tokens, tuple(s.kind == "action" and trains[s.turn] for s in segments for _ in s.tokens))


def _with_prompt(prompt: tuple[int, ...], arm: PairSide) -> PairSide:
    """Return the part of a side after its own prompt, appended to another prompt."""
    start = arm.prompt_length
    return PairSide(prompt + arm.tokens[start:], (False,) * len(prompt) + arm.trains[start:])


def _with_arms(pair: PreferencePair, arms: Sequence[PairSide]) -> PreferencePair:
    following = iter(arms)
    chosen, rejected = (next(following) if arm.tokens else arm for arm in (pair.chosen, pair.rejected))
    return replace(pair, chosen=chosen, rejected=rejected, others=tuple(following))


def _pair(line: bytes) -> PreferencePair:
    data = json.loads(line)
    others = tuple(_arm(other) for other in data["others"])
    return PreferencePair(data["source"], data["gap"], _arm(data["chosen"]), _arm(data["rejected"]), others)


def _arm(data: dict[str, list[float]]) -> PairSide:
    return PairSide(tuple(map(int, data["tokens"])), tuple(map(bool, data["trains"])), tuple(data["reference"]))


def arms_of(pairs: Sequence[PreferencePair]) -> Iterator[PairSide]:
    """Yield every `chosen`, then every `rejected`."""
    yield from (pair.chosen for pair in pairs if pair.chosen.tokens)
    yield from (pair.rejected for pair in pairs if pair.rejected.tokens)
