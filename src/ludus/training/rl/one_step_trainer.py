"""One-step-off-policy training: sample the next batch while the learner trains on the current one.

Each batch is sampled by one version, one step old, so runs are as reproducible as synchronous ones. The
learner runs in a separate thread; event loop, ledger and episodes stay in the caller's.
"""

from __future__ import annotations

import asyncio

import torch

from ludus.diagnostics.timings import StepTimings
from ludus.engines.base import drain_stats
from ludus.training.credit.advantages import TrainingSample
from ludus.training.rl.sync_trainer import SyncTrainer, task_order
from ludus.training.rl.train_step import LearnerThread, cancel_and_wait


async def run_one_step(trainer: SyncTrainer, done: int) -> None:
    """Train on each batch while the next one is sampled; sync weights after both."""
    last = trainer.session.config.training.steps
    order = task_order(trainer.session.config, trainer.session.world)
    await trainer.weight_sync.publish(done)
    if done >= last:
        return
    thread = LearnerThread(torch.get_num_threads())
    sampling: asyncio.Task[list[TrainingSample]] | None = None
    try:
        samples = await trainer.collector.sample(done + 1, order)
        for step in range(done + 1, last + 1):
            clock = StepTimings(concurrent=True)
            trainer.collector_state = trainer.collector.state
            await drain_stats(trainer.engine)
            if step < last:
                sampling = asyncio.create_task(trainer.collector.sample(step + 1, order))
            with clock.phase("train"):
                samples, learned = await trainer.train_step.run(step, samples, thread)
            with clock.phase("rollout"):
                following = await sampling if sampling is not None else []
            clock.engine = (await drain_stats(trainer.engine)).metrics()
            with clock.phase("sync"):
                proof = await trainer.weight_sync.publish(step)
            metrics = await trainer.report(step, samples, learned | proof.metrics, clock)
            await trainer.end_step(step, metrics)
            samples, sampling = following, None
    finally:
        await cancel_and_wait(sampling)
        thread.close()
