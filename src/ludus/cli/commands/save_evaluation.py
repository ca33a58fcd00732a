"""Keeping evaluations: nothing is overwritten, and one that was there already is checked bit for bit."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from ludus.evaluation.evaluate import Evaluation, EvaluationPlan, load_evaluation, save_evaluation
from ludus.rollout.scheduler import Episode


@dataclass(frozen=True, slots=True)
class SavedEvaluation:
    """Where an evaluation lies. `earlier` is one of the same plan that was there before.

    Verdicts: `new`, nothing to compare with; `same`, the earlier one has the same numbers and rollouts bit
    for bit, and nothing was written; `differs`, it does not, and this one lies beside it.
    """

    path: Path
    verdict: Literal["new", "same", "differs"]
    earlier: Path | None = None
    note: str = ""


def keep(folder: Path, result: Evaluation, episodes: Sequence[Episode], label: str = "") -> SavedEvaluation:
    """Save an evaluation as PLAN, PLAN-LABEL or, where that is taken, with the next free number.

    Where what has the name is of another number of tasks, the name says this one's: PLAN-200-tasks.
    """
    base = "-".join(filter(None, [result.plan.name, label]))
    first = folder / f"{base}.json"
    if first.exists() and load_evaluation(first).plan.num_tasks != result.plan.num_tasks:
        base += f"-{result.plan.num_tasks}-tasks"
    earlier, note = None, ""
    for number in count(1):
        name = base if number == 1 else f"{base}-{number}"
        path = folder / f"{name}.json"
        if not path.exists():
            save_evaluation(folder, result, episodes, name)
            return SavedEvaluation(path, "differs" if earlier else "new", earlier, note)
        stored = load_evaluation(path)
        if _same_plan(stored.plan, result.plan):
            earlier, note = path, _difference(path, stored, result, episodes)
            if not note:
                return SavedEvaluation(path, "same", path)
    raise AssertionError("numbers do not end")


def _same_plan(stored: EvaluationPlan, plan: EvaluationPlan) -> bool:
    conditions = plan.conditions if stored.conditions is None else stored.conditions
    return replace(stored, conditions=conditions) == plan


def _difference(path: Path, stored: Evaluation, result: Evaluation, episodes: Sequence[Episode]) -> str:
    """What differs between a stored evaluation and this one of the same plan; empty where nothing does."""
    if replace(stored, plan=result.plan) != result:
        pairs = zip(stored.task_ids, stored.successes, result.successes, strict=True)
        changed = [task_id for task_id, before, now in pairs if before != now]
        first = f", the first is {changed[0]}" if changed else ""
        return f"success was {stored.rate:.4f} and is {result.rate:.4f}; {len(changed)} tasks differ{first}"
    with TemporaryDirectory() as scratch:
        again = save_evaluation(Path(scratch), result, episodes)
        if _rollout_lines(again) != _rollout_lines(path):
            return "success is the same, and the rollouts differ"
    return ""


def _rollout_lines(path: Path) -> bytes:
    file = path.with_suffix(".jsonl.gz")
    return gzip.decompress(file.read_bytes()) if file.is_file() else b""
