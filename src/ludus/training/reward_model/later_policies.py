"""AUC of reward models on rollouts of later policies and of other splits, beside the success of those policies.

A reward model that orders a benchmark best may train a worse policy than another (arXiv:2210.10760 on the shift of the
policy away from its data): what matters is the AUC on rollouts of the policies that it trains.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean

from ludus.config.schema import Config
from ludus.engines.models.loading import load_tokenizer
from ludus.envs.registry import build_world
from ludus.errors import UserError
from ludus.evaluation.roc import clustered_auc
from ludus.evaluation.stats import Estimate
from ludus.rewards.base import success
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts
from ludus.training.reward_model.data import EXAMPLES_FILE, load_examples
from ludus.training.run.run_dir import RunFolder, policy_path
from ludus.training.value_models.reward_model import RewardEnsemble, find_reward_model, is_usable, load_ensemble


@dataclass(frozen=True)
class RolloutBin:
    """Rollouts of a run: of successive training steps, or of one evaluation. `outcomes` are the verifier's."""

    run: str
    where: str
    records: Sequence[RolloutRecord]
    outcomes: Sequence[bool]

    @property
    def success(self) -> float:
        """The share of successes."""
        return fmean(self.outcomes)


def rollout_bins(run: RunFolder, every: int) -> list[RolloutBin]:
    """Return the saved rollouts of each `every` training steps, then those of each evaluation.

    Rollouts that failed or have several rows are left out. Raises UserError if none are left.
    """
    config = run.load_config()
    rewards = build_world(config.env, config.rollout, config.sandbox).rewards

    def make(where: str, files: Sequence[Path]) -> Iterator[RolloutBin]:
        records = [record for file in files for record in read_rollouts(file) if is_usable(record, sys.maxsize)]
        if records:
            yield RolloutBin(run.path.name, where, records, [success(rewards, r.trajectory) for r in records])

    found: list[RolloutBin] = []
    files = [(int(file.name[5:11]), file) for file in sorted(run.rollouts.glob("step-*.jsonl.gz"))]
    for number, members in groupby(files, key=lambda pair: (pair[0] - 1) // every):
        own = [file for _, file in members]
        found += make(f"steps {number * every + 1} to {(number + 1) * every}", own)
    for file in sorted(run.evaluations.glob("*.jsonl.gz")):
        found += make(f"evaluation {file.name.removesuffix('.jsonl.gz')}", [file])
    if not found:
        raise UserError(f"The run {run.path} has no saved rollouts.", "run.save_rollouts may be off.")
    return found


def load_single(path: Path, run: RunFolder) -> RewardEnsemble:
    """Load a reward model to score the rollouts of a run. Raises UserError for another vocabulary."""
    policy, config = policy_path(run), run.load_config()
    own = load_tokenizer(str(find_reward_model(path)[0]), needs_template=False).get_vocab()
    if policy is not None and load_tokenizer(str(policy), needs_template=False).get_vocab() != own:
        hint = "Use a model that was trained on a run with this policy's tokenizer."
        raise UserError(f"The reward model {path} has a different vocabulary from the policy of {run.path}.", hint)
    return load_ensemble([str(path)], 0.0, config)


def bin_auc(model: RewardEnsemble, one: RolloutBin, max_tokens: int) -> Estimate | None:
    """Return the AUC on a bin with its interval over tasks; None if all outcomes are equal."""
    predictions = model.predict_trajectories([record.trajectory for record in one.records], max_tokens)
    tasks = [record.trajectory.task_id for record in one.records]
    return clustered_auc([prediction.mean for prediction in predictions], one.outcomes, tasks)


def held_out_auc(model: RewardEnsemble, path: Path, max_tokens: int) -> Estimate | None:
    """Return the AUC on the held-out examples of a reward model's own run, over prompts; None without any."""
    file = path / EXAMPLES_FILE
    examples = [example for example in load_examples(file) if example.held_out] if file.is_file() else []
    sequences = [(example, sequence) for example in examples for sequence in example.sequences]
    if not sequences:
        return None
    scores = [one.mean for one in model.predict([sequence for _, sequence in sequences], max_tokens)]
    outcomes = [sequence.targets[-1] > 0.5 for _, sequence in sequences]
    return clustered_auc(scores, outcomes, [e.sequences[0].tokens[: e.prompt_length] for e, _ in sequences])


def relation(path: Path, run: RunFolder, config: Config) -> str:
    """Return how a reward model relates to a run: `trained on it`, `rewards it`, both, or an empty text."""
    folder = RunFolder(path)
    own = folder.load_config() if (path / "config.toml").is_file() else None
    trained = own is not None and own.reward_model.run is not None and _same(own.reward_model.run, run.path)
    rewards = any(_same(name, path) or _same(str(Path(name).parent.parent), path) for name in config.rewards.models)
    return " and ".join([text for text, holds in (("trained on it", trained), ("rewards it", rewards)) if holds])


def _same(name: str, path: Path) -> bool:
    return Path(name).resolve() == path.resolve()
