"""Search as a decoding strategy, compared with independent attempts at equal sampled tokens.

Each task has the attempts of an ordinary evaluation. A selector chooses one of them (best of N), or one of the episodes
of a tree with as many sampled tokens as all of these attempts have (`ludus.rollouts.tree_search`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ludus.chat.render import decode_exactly
from ludus.config.sections.tree_search import DecodingSearchConfig, SelectorName
from ludus.diagnostics.metrics import mean
from ludus.evaluation.evaluate import EvaluationPlan, best_attempt
from ludus.evaluation.probes.common import Cell, ProbeReport, answer_key, check_tasks_suffice, compared, succeeded
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.scheduler import ChatSessionFactory, Episode, RolloutRequest, Scheduler
from ludus.rollouts.tree_search import (
    SearchBudget,
    Selector,
    SelfCritique,
    TreeSearch,
    check_searchable,
    outcome_selector,
    token_session,
)
from ludus.rollouts.trees import RunPath, mean_surprisal
from ludus.types import Segment, Trajectory, grouped


async def majority(request: RolloutRequest, attempts: Sequence[Trajectory]) -> list[float]:
    """Score an episode by the share of episodes with its answer; 0 without an answer."""
    answers = [answer_key(one) for one in attempts]
    counts = Counter(answers)
    return [counts[answer] / len(answers) if answer else 0.0 for answer in answers]


async def likelihood(request: RolloutRequest, attempts: Sequence[Trajectory]) -> list[float]:
    """Score an episode by the geometric mean of the probabilities of its sampled tokens."""
    logprobs = ([value for segment in one.segments for value in segment.logprobs] for one in attempts)
    return [math.exp(-mean_surprisal(values)) if values else 0.0 for values in logprobs]


@dataclass(frozen=True)
class CritiqueSelector:
    """Selector that scores finished episodes by the model's ranking; adds the sampled tokens to `tokens` by task."""

    make_chat: ChatSessionFactory
    max_tokens: int
    tokens: dict[str, int]

    async def __call__(self, request: RolloutRequest, attempts: Sequence[Trajectory]) -> list[float]:
        critic = SelfCritique(lambda: self.make_chat(request), self.max_tokens)
        tokenizer = token_session(self.make_chat(request)).renderer.tokenizer

        def text(segments: Sequence[Segment]) -> str:
            tokens = [token for segment in segments for token in segment.tokens]
            return decode_exactly(tokenizer, tokens, skip_special=True).strip()

        dialogues = [text(one.segments[1:]) for one in attempts]
        found = await critic.scores(text(attempts[0].segments[:1]), "the rest of the dialogue", dialogues)
        self.tokens[request.task.id] = critic.num_tokens
        return found


SELECTORS: Mapping[SelectorName, Callable[[Scheduler, DecodingSearchConfig, dict[str, int]], Selector]] = {
    "majority": lambda scheduler, settings, tokens: majority,
    "likelihood": lambda scheduler, settings, tokens: likelihood,
    "critique": lambda scheduler, settings, tokens: CritiqueSelector(
        scheduler.make_chat, settings.critic_tokens, tokens
    ),
    "outcome": lambda scheduler, settings, tokens: outcome_selector(scheduler.world.rewards),
}
"""Selectors by name: functions of the scheduler, the settings, and a dictionary for sampled tokens by task."""


@dataclass(frozen=True)
class Searched:
    """Result of a search of all tasks: success, sampled tokens and episodes by task, and the selected episodes."""

    method: str
    success: Mapping[str, float]
    tokens: Mapping[str, float]
    num_episodes: Mapping[str, float]
    selected: Sequence[Episode]
    note: str = ""

    @property
    def row(self) -> dict[str, Cell]:
        """Cells of its cost."""
        tokens, episodes = (f"{mean(list(values.values())):.1f}" for values in (self.tokens, self.num_episodes))
        return {"tokens per task": tokens, "episodes per task": episodes}


async def measure_search(
    make: Callable[[], Scheduler], plan: EvaluationPlan, episodes: Sequence[Episode], settings: DecodingSearchConfig
) -> tuple[ProbeReport, list[Episode]]:
    """Return a table of success and cost, and the episodes that the search selected.

    `episodes` are those of the evaluation of `plan`; `make` returns a new scheduler with its sampling. Raises UserError
    for fewer than 2 tasks, and ConfigError for a world whose agents run the episodes.
    """
    by_task = grouped(episodes, lambda one: one.task.id)
    attempts = {task: [one.trajectory for one in own] for task, own in by_task.items()}
    check_tasks_suffice(list(attempts))
    tasks = {episode.task.id: episode.task for episode in episodes}
    requests = [RolloutRequest(RolloutKey(plan.step, task.id, 0), task) for task in tasks.values()]
    used = {task: float(sum(one.num_action_tokens for one in found)) for task, found in attempts.items()}
    scheduler, num = make(), plan.samples
    wins = {task: [succeeded(scheduler, one) for one in found] for task, found in attempts.items()}
    alone = {task: mean(found) for task, found in wins.items()}
    any_of = {task: max(found) for task, found in wins.items()}
    rows = [
        Searched(
            "one attempt (pass@1)", alone, {task: n / num for task, n in used.items()}, dict.fromkeys(used, 1), ()
        ),
        Searched(f"any of {num} (pass@{num})", any_of, used, dict.fromkeys(used, num), ()),
    ]
    if settings.selector != "outcome" or settings.method == "best_of_n":
        rows.append(await _best_of_n(scheduler, requests, attempts, settings))
    if settings.method == "mcts":
        rows.append(await _tree_search(make(), requests, used, settings))
    cells = [{"method": one.method, **compared(one.success, alone), **one.row} for one in rows]
    notes = [f"Differences are paired with one attempt. {one.note}".strip() for one in rows[-1:]]
    return ProbeReport("search", f"Search, split {plan.split}", cells, notes), list(rows[-1].selected)


async def _best_of_n(
    scheduler: Scheduler,
    requests: Sequence[RolloutRequest],
    attempts: Mapping[str, Sequence[Trajectory]],
    settings: DecodingSearchConfig,
) -> Searched:
    """Select one of the attempts at each task."""
    tokens: dict[str, int] = {}
    selector = SELECTORS[settings.selector](scheduler, settings, tokens)

    async def choose(request: RolloutRequest, run_path: RunPath) -> Trajectory:
        found = [one for one in attempts[request.task.id] if one.failure is None]
        scores = await selector(request, found) if found else ()
        return best_attempt(found, scores) if found else attempts[request.task.id][0]

    selected = await replace(scheduler, search=choose).run(requests)
    sizes = {task: len(found) for task, found in attempts.items()}
    used = {task: tokens.get(task, 0) + sum(t.num_action_tokens for t in found) for task, found in attempts.items()}
    success = {one.task.id: succeeded(scheduler, one.trajectory) for one in selected}
    return Searched(f"best of {max(sizes.values())} by {settings.selector}", success, used, sizes, selected)


async def _tree_search(
    scheduler: Scheduler,
    requests: Sequence[RolloutRequest],
    budgets: Mapping[str, float],
    settings: DecodingSearchConfig,
) -> Searched:
    """Search a tree for each task with its budget of sampled tokens."""
    check_searchable(scheduler.world, "evaluation.search.method mcts")
    selector = SELECTORS[settings.selector](scheduler, settings, {})
    until_solved = settings.selector == "outcome"

    def budget_of(task: str) -> SearchBudget:
        return SearchBudget(tokens=round(budgets[task]), until_solved=until_solved)

    search = TreeSearch(settings, scheduler.make_chat, selector, budget_of)
    trees = await replace(scheduler, search=search).run(requests)
    found = {task: search.results[task] for task in budgets if task in search.results}
    selected = [
        replace(one, trajectory=found[one.task.id].best(round(budgets[one.task.id])))
        if one.trajectory.failure is None
        else one
        for one in trees
    ]
    success = {one.task.id: succeeded(scheduler, one.trajectory) for one in selected}
    counts = {name: sum(one.counts[name] for one in found.values()) for name in next(iter(found.values())).counts}
    note = "Episodes of a tree that end above its budget of tokens are not selected. Trees: " + ", ".join(
        f"{count} {name.replace('_', ' ')}" for name, count in counts.items()
    )
    tokens, sizes = ({task: one.counts[name] for task, one in found.items()} for name in ("tokens", "simulations"))
    return Searched(f"mcts by {settings.selector}", success, tokens, sizes, selected, f"{note}.")
