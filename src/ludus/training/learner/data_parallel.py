"""Split rows over data-parallel ranks for models that train next to the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ludus.training.batches.rows import Microbatch, Row, balanced, blank, microbatches
from ludus.training.distributed.collectives import Collectives
from ludus.training.distributed.fsdp import is_sharded


@dataclass(frozen=True)
class DataParallelSplitter:
    """Split rows over the `ranks` that train `model`. Every rank calls it with all rows.

    A microbatch's `index` refers to all rows. If weights are sharded, all ranks get equally many
    microbatches; some may be empty.
    """

    ranks: Collectives
    model: nn.Module
    max_tokens: int
    shared: bool = True

    def parts(self, rows: Sequence[Row]) -> list[Microbatch]:
        """Return this rank's microbatches."""
        parameter = next(self.model.parameters())
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        mine: Sequence[int] = range(len(rows))
        if self.ranks.count > 1:
            mine = balanced(rows, self.ranks.count, shared=self.shared)[self.ranks.rank]
        own = [rows[i] for i in mine]
        found = [
            replace(part, index=tuple(mine[i] for i in part.index))
            for part in microbatches(own, self.max_tokens, parameter.device, dtype, shared=self.shared)
        ]
        if is_sharded(self.model):
            most = max(self.ranks.gather(len(found)))
            found += [blank(parameter.device, dtype)] * (most - len(found))
        return found
