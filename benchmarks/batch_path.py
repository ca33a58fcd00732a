"""List the source files that a synchronous batch passes through, from its first rollout to the optimizer step.

    python benchmarks/batch_path.py                                  # `ludus train search`, one step, 2 groups of 2
    python benchmarks/batch_path.py --algorithm.preset ppo           # more settings of the run

Runs `ludus train` in this process and prints, by folder, the files below `src/ludus` in which a function was
called. Evaluations, other processes (reward processes) and code that runs at import are not counted.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import threading
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import ludus
from ludus.cli.main import main as run_ludus
from ludus.training.collection.rollout_collector import RolloutCollector

PACKAGE = Path(ludus.__file__).parent
COMMAND = (
    "train search --training.steps 1 --training.prompts_per_step 2 --algorithm.group_size 2 "
    "--algorithm.filter_zero_variance false --evaluation.tasks 1 --evaluation.every 2"
)


def record(arguments: list[str]) -> list[Path]:
    """Run `ludus` with these arguments; return the files that the batch of the first step passes through."""
    called: set[CodeType] = set()
    recording = threading.Event()
    sample = RolloutCollector.sample

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and recording.is_set():
            called.add(frame.f_code)

    def start(*args: object) -> object:
        recording.set()
        return sample(*args)  # type: ignore[arg-type]

    def stop(*_: Optimizer | tuple[object, ...] | dict[str, object]) -> None:
        recording.clear()

    RolloutCollector.sample = start  # type: ignore[method-assign, assignment]
    hook = register_optimizer_step_post_hook(stop)
    profile_all_threads(on_event)
    try:
        if run_ludus(arguments) or recording.is_set():
            raise RuntimeError("The run failed, or no sample of its batch was trained.")
    finally:
        profile_all_threads(None)
        hook.remove()
        RolloutCollector.sample = sample  # type: ignore[method-assign]
    functions = (code for code in called if code.co_flags & inspect.CO_OPTIMIZED)  # not modules and classes
    files = {Path(code.co_filename).resolve() for code in functions}
    found = (file.relative_to(PACKAGE) for file in files if file.is_relative_to(PACKAGE))
    return sorted(found, key=lambda file: (file.parent, file.name))


def profile_all_threads(function: Callable[[FrameType, str, object], None] | None) -> None:
    """Set the profile function of this thread and of threads that start later."""
    threading.setprofile(function)
    sys.setprofile(function)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = record([*COMMAND.split(), "--run.dir", f"{folder}/run", *sys.argv[1:]])
    print(f"{len(files)} files")
    for parent, group in groupby(files, key=lambda file: file.parent):
        names = [file.stem for file in group]
        print(f"{len(names):4}  {parent.as_posix():22} {' '.join(names)}")


if __name__ == "__main__":
    main()
