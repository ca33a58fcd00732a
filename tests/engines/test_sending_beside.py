"""Weights are sent to a remote engine while the learner trains the next step."""

from __future__ import annotations

import asyncio
import signal
from contextlib import contextmanager, suppress

import pytest
import torch

from ludus.diagnostics.trackers import read_metrics
from ludus.engines.embedded.engine import LocalEngine
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.training.collection.rollout_collector import RolloutCollector
from ludus.training.rl import build
from ludus.training.run.session import engine_settings
from tests.training.rl.test_async_run import run, words
from tiny_run import ludus
from waiting import until

BOUND, STEPS = 2, 4
GAP = 5e-4
"""What the engine's scores of version 3 are off by, in nats."""


class RemoteLikeEngine(LocalEngine):
    """An engine that counts as one of another process: it is asked how it goes at both ends of a step."""

    learner: torch.Tensor
    """A parameter of the model that learns."""
    arrived: list[int]
    evaluated: set[int]
    stepped: set[int]
    """Versions that were on their way until the learner's next weights were there."""
    loading: int
    together: int
    """The most transfers at once."""

    @classmethod
    def of(cls, session):
        made = cls(session.model, session.tokenizer, engine_settings(session.config, session.model))
        made.learner = next(session.model.parameters())
        made.arrived, made.evaluated, made.stepped = [], set(), set()
        made.loading, made.together = 0, 0
        return made

    async def measure(self) -> None:
        """Nothing to ask for."""

    async def load_weights(self, version, state) -> None:
        self.loading += 1
        self.together = max(self.together, self.loading)
        if version % 2:
            await self.until_learned(version)
        elif version:
            await asyncio.sleep(0.2)  # an evaluation waits for it
        await super().load_weights(version, state)
        self.arrived.append(version)
        self.loading -= 1

    async def until_learned(self, version) -> None:
        before = self.learner.detach().clone()
        with suppress(TimeoutError):  # where no group of the step had anything to teach
            await until(lambda: not torch.equal(self.learner, before), 40)
            self.stepped.add(version)
        await asyncio.sleep(0.2)  # the next transfer waits for it

    async def score(self, token_ids):
        found = await super().score(token_ids)
        return [logprob + GAP for logprob in found] if self.version == 3 else found

    async def generate(self, request):
        if request.params.temperature == 0:
            self.evaluated.add(self.version)
        return await super().generate(request)

    async def generate_batch(self, requests):
        if requests[0].params.temperature == 0:
            self.evaluated.add(self.version)
        return await super().generate_batch(requests)


@contextmanager
def ending(limit_s):
    """Raise TimeoutError in a block that takes longer."""

    def late(*_):
        raise TimeoutError(f"still waiting after {limit_s} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def played_by(kind, monkeypatch) -> list[RemoteLikeEngine]:
    made: list[RemoteLikeEngine] = []

    def make(session):
        made.append(kind.of(session))
        return made[-1]

    monkeypatch.setattr(build, "make_engine", make)
    return made


@pytest.mark.slow
def test_learner_continues_while_a_remote_engine_loads_weights(tiny_run, tmp_path, monkeypatch):
    made = played_by(RemoteLikeEngine, monkeypatch)
    changes = {"training__steps": STEPS, "staleness__max_staleness": BOUND, "evaluation__every": 2}
    folder = run(tiny_run, tmp_path / "beside", "async", **changes)
    assert made[0].arrived == [0, 0, 1, 2, 3, 4]
    assert made[0].evaluated == {0, 2, 4}
    assert made[0].stepped  # and yet the digest was that of the weights of when they were sent
    assert made[0].together == 1
    for step in range(1, STEPS + 1):
        for record in read_rollouts(rollouts_path(folder, step)):
            versions = [v for s in record.trajectory.segments for v in s.versions]
            assert all(0 <= step - 1 - version <= BOUND for version in versions)
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")]
    gaps = [row.get("sync/probe_gap") for row in rows]
    assert [gap and gap > GAP / 2 for gap in gaps] == [None, False, None, True]  # 3 and 4 arrived in step 4
    assert not any("sync/engines" in row for row in rows)  # those that take weights at once are not counted


class RefusingEngine(RemoteLikeEngine):
    """Takes other weights than it is sent."""

    async def load_weights(self, version, state) -> None:
        changed = {name: tensor * (1.5 if version == 2 else 1.0) for name, tensor in state.items()}
        await super().load_weights(version, changed)


@pytest.mark.slow
def test_wrong_weights_in_a_background_transfer_stop_the_run(tiny_run, tmp_path, monkeypatch):
    played_by(RefusingEngine, monkeypatch)
    (tmp_path / "refused").mkdir()
    said = ludus(*words(tiny_run, tmp_path / "refused", "async", training__steps=STEPS))
    assert said.code != 0
    assert "are not those of version 2" in said.err


class BreakingEngine(RemoteLikeEngine):
    """Meets what no engine tells of."""

    async def load_weights(self, version, state) -> None:
        if version == 1:
            await asyncio.sleep(0.1)
            raise RuntimeError("a fault of the program")
        await LocalEngine.load_weights(self, version, state)


def test_background_transfer_error_stops_a_run_waiting_for_it(tiny_run, tmp_path, monkeypatch):
    played_by(BreakingEngine, monkeypatch)
    (tmp_path / "broken").mkdir()
    changes = {"training__steps": STEPS, "staleness__max_staleness": 0}
    with ending(120), pytest.raises(RuntimeError, match="a fault of the program"):
        ludus(*words(tiny_run, tmp_path / "broken", "async", **changes))


class SlowEngine(RemoteLikeEngine):
    """Takes its time."""

    async def load_weights(self, version, state) -> None:
        await asyncio.sleep(0.5 if version else 0.0)
        await LocalEngine.load_weights(self, version, state)


@pytest.mark.slow
def test_step_timings_include_waits_for_rewards_and_transfers(tiny_run, tmp_path, monkeypatch):
    """For the rewards that settings add, and for a transfer that an evaluation waits for."""
    credit = RolloutCollector.make_samples

    async def slow(self, *given):
        await asyncio.sleep(0.3)
        return await credit(self, *given)

    monkeypatch.setattr(RolloutCollector, "make_samples", slow)
    played_by(SlowEngine, monkeypatch)
    folder = run(tiny_run, tmp_path / "slow", "async", training__steps=3, evaluation__every=1)
    for row in read_metrics(folder / "timings.jsonl"):
        assert row.metrics["time/rollout_s"] > 0.29
        assert row.metrics["time/sync_s"] > 0.49
        if row.step < 3:
            assert row.metrics["sync/transfer_s"] > 0.49
