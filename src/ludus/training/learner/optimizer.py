"""AdamW with a schedule that is a function of the step alone, so that a resumed run needs no memory of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ludus.config.sections.rewards import RewardModelConfig
from ludus.config.sections.stages import PreferenceConfig, RftConfig, SftConfig
from ludus.config.sections.training import TrainingConfig
from ludus.errors import LearnerError
from ludus.training.distributed.collectives import Collectives, SingleProcess, raise_together, sum_gradients
from ludus.training.distributed.fsdp import local, put, whole

_MOMENTS = ("exp_avg", "exp_avg_sq")

SectionOfOptimiser = TrainingConfig | SftConfig | PreferenceConfig | RftConfig | RewardModelConfig
"""The sections that set an optimiser, by the same names."""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Learning rate (peak), its schedule over `total_steps`, and AdamW's numbers."""

    learning_rate: float
    total_steps: int
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0

    @classmethod
    def of(cls, config: SectionOfOptimiser, total_steps: int) -> OptimizerSettings:
        """The settings of a configuration section."""
        return cls(
            learning_rate=config.learning_rate,
            total_steps=total_steps,
            warmup_steps=config.warmup_steps,
            schedule=config.schedule,
            weight_decay=config.weight_decay,
            beta1=config.beta1,
            beta2=config.beta2,
            max_grad_norm=config.max_grad_norm,
        )

    def rate(self, step: int) -> float:
        """The learning rate of optimiser step `step`, counted from 0."""
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
    """AdamW over the parameters that require a gradient. Matrices decay, vectors do not.

    `ranks` are the processes that train the same model; what is split between them stays split here.

    With `masters` a parameter of less than 32 bits is moved as a float32 copy, the moments are float32, and
    the parameter is the copy, rounded. An update below the parameter's resolution then adds up.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings,
        *,
        masters: bool = True,
        ranks: Collectives | None = None,
    ) -> None:
        self.settings = settings
        self.ranks: Collectives = SingleProcess() if ranks is None else ranks
        self.num_steps = 0
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {
            name: p.detach().float()
            for name, p in self._named.items()
            if masters and p.dtype in (torch.bfloat16, torch.float16)
        }
        self._moved: dict[str, torch.Tensor] = {**self._named, **self._masters}
        matrices = [p for p in self._moved.values() if p.ndim > 1]
        vectors = [p for p in self._moved.values() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
        )

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        """What is trained."""
        return self._named.values()

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in [*self.parameters, *self._masters.values()]:
            parameter.grad = None

    @property
    def bytes_to_come(self) -> int:
        """What the first step will add to the memory: the moments, where they are not there yet.

        The gradients of master weights are not counted: when they are made, the activations are gone.
        """
        if self._adamw.state:
            return 0
        return sum(2 * local(p).numel() * p.element_size() for p in self._moved.values())

    def step(self) -> float:
        """Clip the gradients, take one step, clear them. Gives the norm before clipping.

        Raises LearnerError, with the weights untouched, where the norm is not finite.
        """
        self._hand_over()
        moved = [p for p in self._moved.values() if p.grad is not None]
        total = whole(get_total_norm([p.grad for p in moved if p.grad is not None]))
        clip_grads_with_norm_(moved, self.settings.max_grad_norm, total)
        norm = float(total)
        if not math.isfinite(norm):
            self.clear()
            raise LearnerError(
                f"The gradient norm is {norm} at optimiser step {self.num_steps}.",
                "Lower the learning rate, or look for extreme rewards in the rollouts of this step.",
            )
        for group in self._adamw.param_groups:
            group["lr"] = self.settings.rate(self.num_steps)
        self._adamw.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                self._named[name].copy_(master)
        self.clear()
        self.num_steps += 1
        return norm

    def step_together(self, fault: str, hint: str) -> float:
        """Sum the gradients of the processes, then `step`.

        Raises LearnerError in all of them where one has a fault (a sentence; empty: none).
        """
        try:
            raise_together(fault, hint, self.ranks)
        except LearnerError:
            self.clear()
            raise
        sum_gradients(self.parameters, self.ranks)
        return self.step()

    def _hand_over(self) -> None:
        """Move the gradients to the master weights; before the first step these are the present weights."""
        for name, master in self._masters.items():
            parameter = self._named[name]
            if self.num_steps == 0:
                master.copy_(parameter.detach())
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None

    def state(self) -> dict[str, torch.Tensor]:
        """The moments by parameter name, and the master weights, as plain tensors."""
        moments = {
            f"{kind}/{name}": self._adamw.state[moved][kind]
            for name, moved in self._moved.items()
            if moved in self._adamw.state
            for kind in _MOMENTS
        }
        return moments | {f"master/{name}": m for name, m in self._masters.items() if self.num_steps}

    def blank_state(self) -> dict[str, torch.Tensor]:
        """What `state` gives after a step, in its shapes, types and split; the numbers are zeros."""
        moments = {
            f"{kind}/{name}": torch.zeros_like(m) for name, m in self._moved.items() for kind in _MOMENTS
        }
        return moments | {f"master/{name}": torch.zeros_like(m) for name, m in self._masters.items()}

    def load_state(self, state: dict[str, torch.Tensor], num_steps: int) -> None:
        """Put back what `state` gave after `num_steps` steps. Raises LearnerError for other parameters."""
        self.num_steps = num_steps
        if num_steps == 0:
            return
        expected = {f"{kind}/{name}" for name in self._named for kind in _MOMENTS}
        expected |= {f"master/{name}" for name in self._masters}
        if set(state) != expected:
            odd = sorted(expected ^ set(state))[0]
            raise LearnerError(
                f"The optimiser state does not fit the model: {odd}.",
                "Resume with the model.master_weights that the run was started with."
                if odd.startswith("master/")
                else "",
            )
        for name, moved in self._moved.items():
            moments = {kind: torch.zeros_like(moved) for kind in _MOMENTS}
            for kind, moment in moments.items():
                put(moment, state[f"{kind}/{name}"])
            self._adamw.state[moved] = {"step": torch.tensor(float(num_steps)), **moments}
        for name, master in self._masters.items():
            put(master, state[f"master/{name}"])
