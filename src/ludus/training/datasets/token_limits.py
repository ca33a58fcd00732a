"""Check that a world's prompts and demonstrations fit the token limits of a rollout, before training.

In a pretrained model's chat template the tool schemas alone may take hundreds of tokens, so limits chosen for
another model may leave no room for an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from ludus.chat.render import Renderer
from ludus.config.sections.rollout import RolloutConfig
from ludus.engines.models.loading import num_positions
from ludus.envs.base import Demonstration, World, permutation
from ludus.errors import UserError
from ludus.rollouts.scheduler import rollout_for
from ludus.tools.base import Tool
from ludus.training.datasets.files import FileText
from ludus.training.datasets.sources import dialogue_segments, sources_of
from ludus.training.run.session import TrainingSession
from ludus.types import Task

NUM_PROMPTS = 32
NUM_DIALOGUES = 64
_STEP = 64
"""Limits suggested in messages are multiples of this value."""


@dataclass(frozen=True, slots=True)
class DialogueLength:
    """Token counts of a dialogue (total, prompt, longest action) and its number of assistant turns."""

    total: int
    prompt: int
    longest_action: int
    num_turns: int


def dialogue_length(renderer: Renderer, dialogue: Demonstration) -> DialogueLength:
    """Return the lengths of a dialogue under the renderer's chat template."""
    segments = dialogue_segments(renderer, dialogue)
    actions = [len(segment.tokens) for segment in segments if segment.kind == "action"]
    total = sum(len(segment.tokens) for segment in segments)
    return DialogueLength(total, len(segments[0].tokens), max(actions), len(actions))


def check_dialogues(session: TrainingSession) -> None:
    """Raise UserError for a source of which no checked dialogue fits into `rollout.max_seq_len`."""
    budget = session.config.rollout.max_seq_len
    for source in sources_of(session.config, session.world):
        lengths: list[DialogueLength] = []
        for dialogue in source.first(NUM_DIALOGUES):
            lengths.append(dialogue_length(session.renderer, dialogue))
            if lengths[-1].total <= budget or isinstance(dialogue, FileText):
                break
        else:
            totals, prompt = [one.total for one in lengths], min(one.prompt for one in lengths)
            raise UserError(
                f"No dialogue of {source.title} fits into rollout.max_seq_len ({budget}): under this model's chat "
                f"template {len(lengths)} of them take {min(totals)} to {max(totals)} tokens, the prompt {prompt} or "
                "more.",
                f"Set --rollout.max_seq_len {round_up(max(totals))}.",
            )


def sft_warnings(session: TrainingSession) -> list[str]:
    """Return warnings about the first fine-tuning dialogues that exceed the limits of a rollout."""
    found = []
    for source in sources_of(session.config, session.world):
        first = [d for d in islice(source.first(NUM_DIALOGUES), NUM_DIALOGUES) if not isinstance(d, FileText)]
        lengths = [dialogue_length(session.renderer, dialogue) for dialogue in first]
        found += dialogue_warnings(lengths, session.config.rollout, "they are left out")
    return found


def dialogue_warnings(lengths: Sequence[DialogueLength], rollout: RolloutConfig, effect: str) -> list[str]:
    """Return warnings about dialogues that exceed the limits; `effect` describes the consequence."""
    warnings = []
    long = [one for one in lengths if one.total > rollout.max_seq_len]
    if long:
        several, long_several = (sum(one.num_turns > 2 for one in group) for group in (lengths, long))
        shown = f" ({long_several} of the {several} with three turns or more)" if several else ""
        warnings.append(
            f"{len(long)} of {len(lengths)} demonstrations{shown} are longer than rollout.max_seq_len "
            f"({rollout.max_seq_len}) under this model's chat template: {effect}. "
            f"--rollout.max_seq_len {round_up(max(one.total for one in long))} fits all of them."
        )
    long_actions = [one for one in lengths if one.longest_action > rollout.max_tokens_per_turn]
    if long_actions:
        warnings.append(
            f"{len(long_actions)} of {len(lengths)} demonstrations have an action that is longer than "
            f"rollout.max_tokens_per_turn ({rollout.max_tokens_per_turn}), which a rollout would cut off: "
            f"--rollout.max_tokens_per_turn {round_up(max(one.longest_action for one in long_actions))} fits all."
        )
    return warnings


def check_prompts(session: TrainingSession) -> list[str]:
    """Return warnings about prompts without room for a whole action. Raises UserError if none has room for a token."""
    rollout, world = session.config.rollout, session.world
    tasks = world.tasks("train")
    chosen = [tasks[i] for i in permutation(len(tasks), "prompts", 0)[:NUM_PROMPTS]]
    context = num_positions(session.model)
    prompts, crowded, fits = [], 0, False
    for task in chosen:
        limits = rollout_for(world, rollout, task)
        limit = min(limits.max_seq_len, context or limits.max_seq_len)
        if (tools := _tools(world, task)) is None:
            continue
        prompt = len(session.renderer.prompt(task.prompt, tools))
        prompts.append(prompt)
        fits = fits or prompt < limit
        crowded += prompt + limits.max_tokens_per_turn > limit
    if prompts and not fits:
        longest = max(prompts) + rollout.max_turns * rollout.max_tokens_per_turn
        raise UserError(
            f"No prompt of the world {world.name!r} leaves room for an answer: under this model's chat "
            f"template prompts with tools take {min(prompts)} to {max(prompts)} tokens, rollout.max_seq_len "
            f"allows {rollout.max_seq_len}{f' and the model {context}' if context else ''}.",
            f"Set --rollout.max_seq_len {round_up(longest)}.",
        )
    if not crowded:
        return []
    warning = (
        f"{crowded} of {len(prompts)} prompts leave less room than one action of rollout.max_tokens_per_turn "
        f"({rollout.max_tokens_per_turn}) within rollout.max_seq_len ({rollout.max_seq_len}): the longest "
        "takes "
        f"{max(prompts)} tokens with its tools."
    )
    return [warning]


def _tools(world: World, task: Task) -> Sequence[Tool] | None:
    """Return the tools of a task, or None if its environment raises (rollouts retry and report it)."""
    try:
        return world.environment(task).tools
    except Exception:  # boundary: foreign code; rollouts report the error
        return None


def rollout_warnings(session: TrainingSession) -> list[str]:
    """Return warnings about prompts and demonstrations that exceed the limits. Raises as `check_prompts`."""
    found = check_prompts(session)
    if session.config.rollout.context.max_tokens:
        return found  # dialogues above the budget are rewritten, not cut off
    effect = "an episode that solves its task like them is cut off"
    lengths = [dialogue_length(session.renderer, dialogue) for dialogue in _demonstrations(session)]
    return found + dialogue_warnings(lengths, session.config.rollout, effect)


def _demonstrations(session: TrainingSession) -> list[Demonstration]:
    """Return the first demonstrations of the world; empty if it has none, as RL needs none."""
    if not session.world.implements("demonstrations"):
        return []
    try:
        return list(islice(session.world.demonstrations(session.config.run.seed), NUM_DIALOGUES))
    except UserError:
        return []


def round_up(tokens: int) -> int:
    """Round up to a multiple of 64."""
    return -(-tokens // _STEP) * _STEP
