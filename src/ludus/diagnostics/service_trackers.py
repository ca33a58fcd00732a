"""Trackers of other packages: wandb, MLflow and trackio. Each is an extra of the same name.

Without environment variables of the user nothing is sent over a network: wandb is in offline mode, MLflow writes a
SQLite file in the run folder, trackio its local database, and error reports and telemetry of the packages are off.
`NAME/run.json` in the run folder contains the id of the tracker's run and the last step that was logged. A resumed run
continues that run and skips the steps that it has, since none of the three can replace a step.
"""

from __future__ import annotations

import json
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from uuid import uuid4

from ludus.config.environment import set_default_variables, variable
from ludus.config.toml import flat_settings
from ludus.errors import LudusError, StorageError, UserError
from ludus.rollouts.rollout_files import replaced_file

_PROJECT = "ludus"
_QUIET = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1",  # seconds, so that a killed run loses no more
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables of the packages, unless the user has set them. They are read at import."""


@dataclass(frozen=True, slots=True)
class ServiceRun:
    """A run of a tracking package: its id, a function that logs metrics of a step, and one that ends the run."""

    id: str
    log: Callable[[dict[str, float], int], object]
    finish: Callable[[], object]


class ServiceTracker:
    """Tracker that logs to the package of its name, each step once, over all resumes of the run.

    `resume_step` is not needed, as the last logged step is stored. Raises UserError if the extra is missing,
    StorageError if the package raises an error.
    """

    def __init__(self, name: str, folder: Path, resume_step: int | None = None) -> None:
        set_default_variables(_QUIET)
        package = import_extra(name, name)
        self.name = name
        self.path = folder / name / "run.json"
        with self._errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            state = json.loads(self.path.read_text("utf-8")) if self.path.exists() else {}
            self._run = _STARTS[name](package, folder, state.get("id"))
            self._save(state.get("step", -1))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, unless the run already has it. Raises StorageError."""
        if step > self._last_step:
            with self._errors():
                self._run.log({name: float(value) for name, value in metrics.items()}, step)
                self._save(step)

    def close(self) -> None:
        """End the run and write buffered metrics. Raises StorageError."""
        with self._errors():
            self._run.finish()

    def _save(self, step: int) -> None:
        with replaced_file(self.path) as file:
            file.write(json.dumps({"id": self._run.id, "step": step}).encode())
        self._last_step = step

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except LudusError:
            raise
        except Exception as error:
            hint = "Resume the run after repair, or change run.trackers."
            raise StorageError(f"The tracker {self.name} failed: {error}.", hint) from error


def import_extra(package: str, extra: str) -> ModuleType:
    """Return a module that an extra installs. Raises UserError that names the extra if it is missing."""
    try:
        return import_module(package)
    except ImportError as error:
        text = f"The {extra} tracker needs a package that is not installed ({error.name})."
        raise UserError(text, f"Install it: pip install 'ludus[{extra}]'.") from error


def _wandb_run(wandb: ModuleType, folder: Path, run_id: str | None) -> ServiceRun:
    run = wandb.init(
        project=variable("WANDB_PROJECT", _PROJECT),
        name=variable("WANDB_NAME", folder.name),
        mode=variable("WANDB_MODE", "offline"),
        id=run_id or uuid4().hex[:8],
        resume="allow",
        reinit="create_new",
        dir=str(folder),
        config=tomllib.loads(_config(folder)),
        allow_val_change=True,
        settings=wandb.Settings(console="off"),
    )
    return ServiceRun(run.id, lambda metrics, step: run.log(metrics, step=step, commit=True), run.finish)


def _trackio_run(trackio: ModuleType, folder: Path, run_id: str | None) -> ServiceRun:
    name = run_id or f"{folder.name}-{uuid4().hex[:8]}"
    run = trackio.init(_PROJECT, name=name, config=tomllib.loads(_config(folder)), resume="allow", embed=False)
    return ServiceRun(name, run.log, run.finish)


def _mlflow_run(mlflow: ModuleType, folder: Path, run_id: str | None) -> ServiceRun:
    store = f"sqlite:///{(folder / 'mlflow' / 'mlflow.db').resolve()}"
    client = mlflow.MlflowClient(tracking_uri=variable("MLFLOW_TRACKING_URI", store))
    if run_id is None:
        name = variable("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        run_id = str(client.create_run(experiment, run_name=folder.name).info.run_id)
        settings = flat_settings(_config(folder)).items()
        client.log_batch(run_id, params=[mlflow.entities.Param(_mlflow_name(key), value) for key, value in settings])
    else:
        client.update_run(run_id, status="RUNNING")

    def log(metrics: dict[str, float], step: int) -> None:
        now = int(1000 * time.time())
        client.log_batch(
            run_id, [mlflow.entities.Metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        )

    return ServiceRun(run_id, log, lambda: client.set_terminated(run_id))


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def _config(folder: Path) -> str:
    path = folder / "config.toml"
    return path.read_text("utf-8") if path.exists() else ""


_STARTS: dict[str, Callable[[ModuleType, Path, str | None], ServiceRun]] = {
    "wandb": _wandb_run,
    "mlflow": _mlflow_run,
    "trackio": _trackio_run,
}
"""Functions of the package, the run folder and the id of the run to continue (None for a new one)."""
