"""Metrics of a step that need the training samples: untrained tasks, conflict tokens and template collapse.

Template collapse (RAGEN-2, arXiv:2604.06268): a policy can write the same varied text for every prompt. Its entropy is
unchanged, and the mutual information of prompt and reasoning is about 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ludus.chat.parse_json import THINK_CLOSE, THINK_OPEN
from ludus.diagnostics.history import COLLAPSE
from ludus.rollouts.ledger import RolloutOutcome
from ludus.training.batches.rows import new_actions, row_of_segments
from ludus.training.credit.advantages import TrainingSample
from ludus.training.learner.learner import Learner
from ludus.training.run.session import TrainingSession
from ludus.types import Segment, Trajectory

STARVED = 3
"""Consecutive groups of a task without a trained token after which it is starved."""


def count_untrained(before: Mapping[str, int], samples: Sequence[TrainingSample]) -> dict[str, int]:
    """Return for each task the number of its newest groups in a row without a trained token.

    A group trains if the outcome of a member is TRAINED and its advantage is not 0 on some token. `before` are the
    counts of the steps before; tasks with a count of 0 are left out.
    """
    trains: dict[int, bool] = {}
    tasks = {sample.group: sample.episode.task.id for sample in samples}
    for sample in samples:
        trained = sample.outcome is RolloutOutcome.TRAINED and any(sample.advantages or ())
        trains[sample.group] = trains.get(sample.group, False) or trained
    counts = dict(before)
    for group, trained in trains.items():
        counts[tasks[group]] = 0 if trained else counts.get(tasks[group], 0) + 1
    return {task: count for task, count in counts.items() if count}


def starved_metrics(counts: Mapping[str, int], samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return the share of the step's tasks that are starved, and the number of starved tasks of the run."""
    starved = {task for task, count in counts.items() if count >= STARVED}
    sampled = {sample.episode.task.id for sample in samples}
    return {"tasks/starved": len(starved & sampled) / max(1, len(sampled)), "tasks/starved_in_run": float(len(starved))}


def conflict_share(samples: Sequence[TrainingSample]) -> float:
    """Return the share of conflict tokens (`gtpo.conflict_tokens`) among the action tokens of trained samples."""
    groups: dict[int, list[tuple[list[int], bool]]] = {}
    for sample in samples:
        if sample.outcome is RolloutOutcome.TRAINED and not sample.expert and sample.advantage:
            tokens = [token for segment in new_actions(sample.episode.trajectory) for token in segment.tokens]
            groups.setdefault(sample.group, []).append((tokens, sample.advantage > 0))
    conflicts = sum(_conflicts(group) for group in groups.values())
    return conflicts / max(1, sum(len(tokens) for group in groups.values() for tokens, _ in group))


def _conflicts(group: Sequence[tuple[list[int], bool]]) -> int:
    """Return the conflict tokens of a group: the prefixes and suffixes of its attempts without their overlap."""
    reversed_group = [(tokens[::-1], positive) for tokens, positive in group]
    pairs = zip(group, _prefixes(group), _prefixes(reversed_group), strict=True)
    return sum(min(len(tokens), left + right) for (tokens, _), left, right in pairs)


def _prefixes(group: Sequence[tuple[list[int], bool]]) -> list[int]:
    """Return the length of the conflict prefix of each attempt; reads no token after the last one of any prefix."""
    lengths = [0] * len(group)
    unbroken, index = [*range(len(group))], 0
    while unbroken:
        seen: tuple[set[int], set[int]] = (set(), set())
        for tokens, positive in group:
            if index < len(tokens):
                seen[positive].add(tokens[index])
        both = seen[0] & seen[1]
        unbroken = [i for i in unbroken if index < len(group[i][0]) and group[i][0][index] in both]
        index += 1
        for i in unbroken:
            lengths[i] = index
    return lengths


class Reasoning(NamedTuple):
    """The tokens of a first turn: its prompt, the opening tag if the model wrote it, and the reasoning."""

    prompt: tuple[int, ...]
    opening: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass
class CollapseScoring:
    """Measure template collapse every `every` steps (0: never) on up to `num_samples` reasonings.

    Rows are cut to `max_tokens`. `open_tag` and `close_tag` are the tokens around the reasoning; a first turn without
    them counts as a whole. `last` are the metrics of the previous measurement, which `restore` reads from a history.
    Measurements use no random numbers and change no weights, so that training is the same with and without them.
    """

    every: int = 0
    num_samples: int = 64
    max_tokens: int = 0
    open_tag: int = -1
    close_tag: int = -1
    last: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, session: TrainingSession) -> CollapseScoring:
        """Build from the configuration; a tag that is not a single token is not recognised."""
        config, settings = session.config, session.config.run.diagnostics
        if not settings.collapse_every:
            return cls()
        vocabulary = session.tokenizer.get_vocab()
        tags = (vocabulary.get(THINK_OPEN, -1), vocabulary.get(THINK_CLOSE, -1))
        return cls(settings.collapse_every, settings.collapse_samples, config.rollout.max_seq_len, *tags)

    def restore(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Continue the moving average of a resumed run from the metrics of its steps."""
        for row in rows:
            if any(name.startswith(COLLAPSE) for name in row):
                self.last = row

    def measure(self, step: int, samples: Sequence[TrainingSample], learner: Learner) -> dict[str, float]:
        """Return the metrics of a step; empty if it is not due, or has fewer than two distinct prompts."""
        if not self.every or step % self.every:
            return {}
        chosen = self._choose(samples)
        prompts = list(dict.fromkeys(one.prompt for one in chosen))
        if len(prompts) < 2:
            return {}
        room = self.max_tokens - max(map(len, prompts)) - 1
        cut = [one._replace(tokens=one.tokens[: max(1, room)]) for one in chosen]
        pairs = ((prompt + one.opening, one.tokens) for one in cut for prompt in prompts)
        rows = [row_of_segments([Segment("prompt", before), Segment("action", tokens)]) for before, tokens in pairs]
        scored = learner.score(rows)
        sums = np.array([float(values.double().sum()) for values in scored]).reshape(len(cut), len(prompts))
        numbers = {prompt: number for number, prompt in enumerate(prompts)}
        metrics = collapse_metrics(sums, [numbers[o.prompt] for o in cut], [len(o.tokens) for o in cut], self.last)
        self.last = metrics
        return metrics

    def _choose(self, samples: Sequence[TrainingSample]) -> list[Reasoning]:
        """Return the reasonings of the policy's samples, taking one of each prompt in turn."""
        by_prompt: dict[tuple[int, ...], list[Reasoning]] = {}
        for sample in samples:
            own = not (sample.expert or sample.replayed or sample.episode.greedy or sample.episode.trajectory.failure)
            if own and (found := self._first_turn(sample.episode.trajectory)):
                by_prompt.setdefault(found.prompt, []).append(found)
        rounds = max(map(len, by_prompt.values()), default=0)
        return [one[i] for i in range(rounds) for one in by_prompt.values() if i < len(one)][: self.num_samples]

    def _first_turn(self, trajectory: Trajectory) -> Reasoning | None:
        prompt: tuple[int, ...] = ()
        for segment in (trajectory.segments[i] for i in trajectory.rows[0]):
            if segment.kind == "action":
                opens = segment.tokens[:1] == (self.open_tag,)
                opening, tokens = segment.tokens[:opens], segment.tokens[opens:]
                end = tokens.index(self.close_tag) if self.close_tag in tokens else len(tokens)
                return Reasoning(prompt, opening, tokens[:end]) if end else None
            prompt += segment.tokens
        return None


MARGINAL_STD: Final = COLLAPSE + "marginal_std"
_TOP: Final = (1, 2, 4, 8)
_DECAY: Final = 0.9
_EPSILON: Final = 1e-3


def collapse_metrics(
    logprobs: NDArray[np.float64], own: Sequence[int], num_tokens: Sequence[int], before: Mapping[str, float]
) -> dict[str, float]:
    """Return the collapse metrics of S reasonings under N distinct prompts.

    `logprobs` [S, N]: summed log-probability in nats of reasoning `s` under prompt `j`; `own` [S]: the prompt of each
    reasoning; `num_tokens` [S]: their lengths. Information and entropies are of per-token means, and with `_sum` of
    sums. `retrieval_K` is the share of reasonings whose own prompt is among the K most likely (ties count in part),
    `chance` is 1/N. The z-score divides `matched - marginal` by the standard deviation of `marginal`, a moving average
    that continues that of the metrics `before`. Raises ValueError if the shapes differ or S or N is 0.
    """
    sums = np.asarray(logprobs, np.float64)
    if sums.ndim != 2 or not sums.size or sums.shape[0] != len(own) or len(own) != len(num_tokens):
        raise ValueError(f"logprobs {sums.shape}, own [{len(own)}] and num_tokens [{len(num_tokens)}] do not fit")
    prompts = np.asarray(own)
    means = sums / np.asarray(num_tokens, np.float64)[:, None]
    matched, marginal = _matched_and_marginal(means, prompts)
    std = float(marginal.std())
    if MARGINAL_STD in before:
        std = _DECAY * before[MARGINAL_STD] + (1 - _DECAY) * std
    of_sums = _matched_and_marginal(sums, prompts)
    metrics = {
        "mutual_information": float(matched.mean() - marginal.mean()),
        "mutual_information_sum": float(of_sums[0].mean() - of_sums[1].mean()),
        "conditional_entropy": -float(matched.mean()),
        "marginal_entropy": -float(marginal.mean()),
        "z_score": float(((matched - marginal) / (std + _EPSILON)).mean()),
        "marginal_std": std,
        "chance": 1 / sums.shape[1],
        "samples": float(sums.shape[0]),
    }
    mine = sums[np.arange(len(sums)), prompts][:, None]
    above, equal = (sums > mine).sum(1), (sums == mine).sum(1)
    for k in _TOP:
        metrics[f"retrieval_{k}"] = math.fsum(np.clip((k - above) / equal, 0.0, 1.0)) / len(sums)
    return {COLLAPSE + name: value for name, value in metrics.items()}


def _matched_and_marginal(
    values: NDArray[np.float64], own: NDArray[np.int_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return `l_own(z)` and `logsumexp_j l_j(z) - log N`, [S] each."""
    largest = values.max(1)
    marginal = largest + np.log(np.exp(values - largest[:, None]).mean(1))
    return values[np.arange(len(values)), own], marginal
