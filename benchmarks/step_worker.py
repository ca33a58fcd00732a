"""Run whole RL steps of one system in this process; print the measurements as a line of JSON.

    python benchmarks/step_worker.py '{"system": "ludus", "model": "FOLDER", ...}' STEPS

`step.py` starts it, in the environment of that system.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable

import torch

import rollout_work
from rollout_work import Clock
from rollout_worker import Job, read_job


def reward(i: int) -> float:
    """Return the reward of episode `i`: half of each group succeeds."""
    return float(i % 2)


def figures(job: Job, clocks: list[tuple[float, float]]) -> dict[str, float]:
    """Return means over the counted steps; medians would hide a slow step."""
    plan = rollout_work.episodes(job.work)
    return {
        "wall": sum(wall for wall, _ in clocks) / len(clocks),
        "processor": sum(cpu for _, cpu in clocks) / len(clocks),
        "tokens": float(rollout_work.num_generated(plan)),
        "peak_mb": rollout_work.peak_mb(),
    }


def trl(job: Job, steps: int) -> dict[str, float]:
    """Run `GRPOTrainer.train()` with the trainer's own generation and tool loop."""
    from transformers import TrainerCallback

    from rollout_others import feed_lengths, make_trainer, play_trl

    torch.set_num_threads(job.threads)
    plan = rollout_work.episodes(job.work)
    clocks: list[Clock] = []
    counted: list[tuple[float, float]] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            clocks.append(Clock())

        def on_step_end(self, *_: object, **__: object) -> None:
            counted.append((clocks[-1].wall_s, clocks[-1].cpu_s))

    def rewards(completions: list[object], **_: object) -> list[float]:
        return [reward(i) for i in range(len(completions))]

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(job, plan, folder, rewards, max_steps=steps + 1)
        trainer.rollout_func = lambda *_: play_trl(trainer, plan)
        feed_lengths(trainer, plan)
        trainer.add_callback(Watch())
        trainer.train()
    return figures(job, counted[1:])


def ludus(job: Job, steps: int) -> dict[str, float]:
    """Run engine, learner and weight transfer as in a training run."""
    return asyncio.run(_ludus(job, steps))


async def _ludus(job: Job, steps: int) -> dict[str, float]:
    from ludus.algorithms.spec.resolve import PRESETS
    from ludus.engines.embedded.engine import LocalEngine
    from ludus.training.learner.learner import Learner
    from ludus.training.learner.logprobs import LogprobScorer
    from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
    from ludus.training.rl.weight_sync import WeightSync
    from rollout_hf import load
    from rollout_ours import Player, settings

    model, plan = load(job), rollout_work.episodes(job.work)
    engine = LocalEngine(model, settings=settings(job))
    optimizer = Optimizer(model, OptimizerSettings(learning_rate=1e-6, total_steps=steps + 1))
    learner = Learner(LogprobScorer(model), optimizer, PRESETS["grpo"])
    sync = WeightSync(model, engine, plan[0].prompt)
    counted = []
    for step in range(steps + 1):
        clock = Clock()
        played = await Player(engine, job.work).record(plan)
        learner.train([_row(i, *episode) for i, episode in enumerate(played)], seed=step)
        await sync.publish(step + 1)
        counted.append((clock.wall_s, clock.cpu_s))
    await engine.close()
    return figures(job, counted[1:])


def _row(i: int, tokens: list[int], logprobs: list[float | None]):  # noqa: ANN202 (imported late)
    """Return a row that trains the tokens with a log-probability; the advantage is 1 for success, else -1."""
    from ludus.training.batches.rows import Row

    trains = tuple(logprob is not None for logprob in logprobs)
    sign = 2 * reward(i) - 1
    return Row(
        tuple(tokens),
        trains,
        trains,
        tuple(logprob or 0.0 for logprob in logprobs),
        tuple(sign * float(t) for t in trains),
    )


def main() -> None:
    """Run the job in the first argument."""
    job = read_job(sys.argv[1])
    systems: dict[str, Callable[[Job, int], dict[str, float]]] = {"trl": trl, "ludus": ludus}
    print("\n" + json.dumps(systems[job.system](job, int(sys.argv[2]))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
