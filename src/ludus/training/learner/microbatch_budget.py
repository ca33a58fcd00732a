"""Token budget of a pass, halved when memory runs out.

The gradient does not depend on how a batch is split, so a pass that ran out of memory is retried from its
beginning with smaller microbatches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ludus.errors import LearnerError
from ludus.training.batches.rows import Microbatch
from ludus.training.distributed.collectives import ONE_PROCESS, Collectives, raise_together

log = logging.getLogger("ludus.learner")

REMEDY = "Set model.activation_checkpointing, lower rollout.max_seq_len, or train adapters (model.lora)."


def out_of_memory(error: RuntimeError) -> bool:
    """Return whether a torch error means out of memory, on GPU or CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def naming_what_to_change() -> Iterator[None]:
    """Convert an out-of-memory error of a whole stage into an error with a hint."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise LearnerError(
            f"Out of memory: {str(error).splitlines()[0]}",
            f"Lower microbatch_tokens in the section of the stage. {REMEDY}",
        ) from error


@dataclass
class TokenBudget:
    """At most `tokens` per forward pass. With `halve` the number is halved when memory runs out."""

    tokens: int
    halve: bool = True

    def each(
        self,
        split: Callable[[int], Sequence[Microbatch]],
        work: Callable[[Microbatch], None],
        undo: Callable[[], None],
        ranks: Collectives = ONE_PROCESS,
    ) -> None:
        """Run `work` on each part of `split(tokens)`; if memory runs out, call `undo` and start over.

        Raises LearnerError if memory runs out on a single row, on all `ranks` if it does on one of them.
        """
        fault, hint = "", ""
        try:
            self._until_it_fits(split, work, undo)
        except LearnerError as error:
            fault, hint = error.message, error.hint
        raise_together(fault, hint, ranks)

    def _until_it_fits(
        self, split: Callable[[int], Sequence[Microbatch]], work: Callable[[Microbatch], None], undo: Callable[[], None]
    ) -> None:
        while (failed := self._first_that_fails(split(self.tokens), work)) is not None:
            undo()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.tokens = max(1, min(self.tokens, failed) // 2)
            log.warning(
                "Out of memory over %d tokens: retrying the pass with at most %d. "
                "Set training.microbatch_tokens = %d, or model.activation_checkpointing.",
                failed,
                self.tokens,
                self.tokens,
            )

    def _first_that_fails(self, parts: Sequence[Microbatch], work: Callable[[Microbatch], None]) -> int | None:
        """Return the token count, with padding, of the part that ran out of memory, or None."""
        for part in parts:
            try:
                work(part)
            except RuntimeError as error:
                if not (self.halve and out_of_memory(error)):
                    raise
                if len(part.index) == 1:
                    raise LearnerError(
                        f"One row of {part.tokens.shape[1]} tokens does not fit into memory.", REMEDY
                    ) from error
                return part.tokens.numel()
        return None
