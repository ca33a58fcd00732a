"""AdamW with a learning rate schedule that depends on the step alone, so it needs no checkpoint state."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ludus.config.sections.section import OptimizerSection
from ludus.errors import LearnerError
from ludus.training.distributed.collectives import (
    ONE_PROCESS,
    Collectives,
    copy_into,
    full_tensor,
    local_shard,
    raise_on_all_ranks,
    sum_gradients,
)

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step/"


class OptimizerSettings(OptimizerSection):
    """The settings of AdamW, and the number of optimizer steps of its schedule."""

    total_steps: int

    @classmethod
    def from_config(cls, config: OptimizerSection, total_steps: int) -> OptimizerSettings:
        return cls(total_steps=total_steps, **config.model_dump(include=set(OptimizerSection.model_fields)))

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        span = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / span)
        if self.schedule == "linear":
            return self.learning_rate * (1.0 - done)
        if self.schedule == "cosine":
            return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
        return self.learning_rate


class Optimizer:
    """AdamW over the trainable parameters. Weight decay applies to matrices, not vectors.

    `ranks` train the same model; sharded parameters have sharded state.

    With `master_weights` a parameter of less than 32 bits is updated through a float32 master copy with float32
    moments, so that updates below its resolution accumulate.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings,
        *,
        master_weights: bool = True,
        ranks: Collectives | None = None,
    ) -> None:
        self.settings = settings
        self.ranks: Collectives = ONE_PROCESS if ranks is None else ranks
        self.num_steps = 0
        self.learning_rate_factor = 1.0
        """Factor of the scheduled learning rate."""
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {
            name: p.detach().float()
            for name, p in self._named.items()
            if master_weights and p.dtype in (torch.bfloat16, torch.float16)
        }
        self._updated: dict[str, torch.Tensor] = {**self._named, **self._masters}
        matrices = [p for p in self._updated.values() if p.ndim > 1]
        vectors = [p for p in self._updated.values() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
        )

    @property
    def learning_rate(self) -> float:
        return self.settings.learning_rate_at(self.num_steps) * self.learning_rate_factor

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        return self._named.values()

    def zero_grad(self) -> None:
        for parameter in [*self.parameters, *self._masters.values()]:
            parameter.grad = None

    @property
    def unallocated_bytes(self) -> int:
        """Return the memory that the first step will allocate for moments; 0 once they exist.

        Gradients of master weights are excluded: activations are freed before they are allocated.
        """
        if self._adamw.state:
            return 0
        return sum(2 * local_shard(p).numel() * p.element_size() for p in self._updated.values())

    def step(self) -> float:
        """Clip gradients, take a step and clear them; return their norm. Raises LearnerError if it is not finite."""
        self._move_gradients_to_masters()
        moved = [p for p in self._updated.values() if p.grad is not None]
        total = full_tensor(get_total_norm([p.grad for p in moved if p.grad is not None]))
        clip_grads_with_norm_(moved, self.settings.max_grad_norm, total)
        norm = float(total)
        if not math.isfinite(norm):
            self.zero_grad()
            raise LearnerError(
                f"The gradient norm is {norm} at optimizer step {self.num_steps}.",
                "Lower the learning rate, or look for extreme rewards in the rollouts of this step.",
            )
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate
        self._adamw.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                self._named[name].copy_(master)
        self.zero_grad()
        self.num_steps += 1
        return norm

    def reduce_and_step(self, fault: str, hint: str) -> float:
        """All-reduce the gradients, then `step`. Raises LearnerError on all ranks if one has a `fault`."""
        try:
            raise_on_all_ranks(fault, hint, self.ranks)
        except LearnerError:
            self.zero_grad()
            raise
        sum_gradients(self.parameters, self.ranks)
        return self.step()

    def _move_gradients_to_masters(self) -> None:
        """Move the gradients to the master weights, which are created before the first step."""
        for name, master in self._masters.items():
            parameter = self._named[name]
            if self.num_steps == 0:
                master.copy_(parameter.detach())
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the moments by parameter name, and the master weights, as plain tensors; also the number of steps of
        each parameter that had no gradient in some steps."""
        moments = {
            f"{kind}/{name}": self._adamw.state[moved][kind]
            for name, moved in self._updated.items()
            if moved in self._adamw.state
            for kind in _MOMENTS
        }
        counts = {
            name: int(self._adamw.state[p]["step"]) if p in self._adamw.state else 0
            for name, p in self._updated.items()
        }
        fewer = {f"{_STEP}{name}": torch.tensor(count) for name, count in counts.items() if count != self.num_steps}
        return moments | fewer | {f"master/{name}": m for name, m in self._masters.items() if self.num_steps}

    def zero_state_dict(self) -> dict[str, torch.Tensor]:
        """Return zeros in the shapes, types and sharding of `state_dict` after a step."""
        moments = {f"{kind}/{name}": torch.zeros_like(m) for name, m in self._updated.items() for kind in _MOMENTS}
        return moments | {f"master/{name}": torch.zeros_like(m) for name, m in self._masters.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor], num_steps: int) -> None:
        """Restore a `state_dict` saved after `num_steps` steps. Raises LearnerError if parameters differ."""
        self.num_steps = num_steps
        if num_steps == 0:
            return
        fewer = {name.removeprefix(_STEP): int(count) for name, count in state.items() if name.startswith(_STEP)}
        counts = {name: fewer.pop(name, num_steps) for name in self._updated}
        expected = {f"{kind}/{name}" for name, count in counts.items() if count for kind in _MOMENTS}
        expected |= {f"master/{name}" for name in self._masters}
        stored = {name for name in state if not name.startswith(_STEP)} | fewer.keys()
        if stored != expected:
            mismatch = sorted(expected ^ stored)[0]
            raise LearnerError(
                f"The optimizer state does not match the model: {mismatch}.",
                "Resume with the run's original model.master_weights." if mismatch.startswith("master/") else "",
            )
        for name, moved in self._updated.items():
            if not counts[name]:
                continue
            moments = {kind: torch.zeros_like(moved) for kind in _MOMENTS}
            for kind, moment in moments.items():
                copy_into(moment, state[f"{kind}/{name}"])
            self._adamw.state[moved] = {"step": torch.tensor(float(counts[name])), **moments}
        for name, master in self._masters.items():
            copy_into(master, state[f"master/{name}"])
