"""Algorithm state that persists between steps and is part of every checkpoint, besides weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace

from ludus.algorithms.advantages.running_baselines import RoleBaselines
from ludus.algorithms.filters import GresoState
from ludus.algorithms.parts import Need
from ludus.algorithms.spec.algorithm import Algorithm


@dataclass(frozen=True, slots=True)
class AlgorithmState:
    """`averages`: moving average of rewards per role (`rae`).

    `greso` is the state of GRESO and `position` its place in the task order. `initial_entropy` is the
    policy's mean entropy on the first batch, nats per token (`gtpo`). `owed` are tasks of past steps whose
    groups were not trained, since the run left asynchronous training.
    """

    averages: RoleBaselines = field(default_factory=RoleBaselines)
    greso: GresoState = field(default_factory=GresoState)
    position: int = 0
    initial_entropy: float | None = None
    owed: tuple[str, ...] = ()

    @classmethod
    def start(cls, algorithm: Algorithm, text: str = "") -> AlgorithmState:
        """Restore the state from `to_json`, or create an empty one; `decay` is the algorithm's."""
        saved = json.loads(text) if text else {}
        averages = RoleBaselines.from_json(saved["averages"]) if "averages" in saved else RoleBaselines()
        decay = algorithm.number("advantage", "decay") if algorithm.advantage_spec.has(Need.ROLE_BASELINES) else 0.95
        greso = GresoState(**saved.get("greso", {}))
        entropy = saved.get("initial_entropy")
        owed = tuple(map(str, saved.get("owed", ())))
        return cls(replace(averages, decay=decay), greso, saved.get("position", 0), entropy, owed)

    def to_json(self) -> str:
        """Serialize the state to one line, as read by `start`."""
        greso = asdict(self.greso)
        parts = {"averages": self.averages.to_json(), "greso": greso, "position": self.position}
        if self.initial_entropy is not None:
            parts["initial_entropy"] = self.initial_entropy
        if self.owed:
            parts["owed"] = list(self.owed)
        return json.dumps(parts, sort_keys=True)
