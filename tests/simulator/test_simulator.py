"""The cost model and the simulator: exact in hand-computed cases, with the staleness bounds of training."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.closed_form import estimate, model_seconds, running_sequences, slowest_episode

from ludus.config.load import load_config
from ludus.config.toml import to_toml
from ludus.errors import LudusError, UserError
from ludus.rollouts import group_queue
from ludus.rollouts.stream_control import ConcurrencyController, EngineLoad, PassTimeModel, PassTimes, StreamThroughput
from ludus.simulator.costs import Costs, EngineCost, EpisodeShape, LearnerCost, RunLayout, ToolCost
from ludus.simulator.devices import DevicePool, Overlap, SimEngine, SimLearner, run_virtual
from ludus.simulator.fit import fit, measured_steps, tool_cost
from ludus.simulator.simulate import simulate
from ludus.training.run.run_dir import RunFolder
from tiny_run import ludus, refused

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SLOW = ToolCost(0.15, 0.5, 0.05, 20)
TINY = Costs(
    EngineCost(0.002, 0.0002, 0.00002), LearnerCost(0.02, 0.00005), SLOW, EpisodeShape(4, 24, 30, 170, 160), sync_s=0.01
)
EXACT = Costs(EngineCost(0.5, 0.25), LearnerCost(3.0, 0.01), ToolCost(), EpisodeShape(1, 10), 1.0)
"""Every episode is one turn of ten tokens; `n` at once take 10 * (0.5 + 0.25 n) seconds."""


@pytest.fixture
def plan(monkeypatch):
    """The benchmark that holds the simulation against real runs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("plan")


def test_virtual_clock_advances_when_all_tasks_wait_and_reports_deadlock():
    async def two():
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(86400))
        return "done"

    assert run_virtual(two()) == ("done", 86400)
    with pytest.raises(LudusError, match="deadlocked"):
        run_virtual(asyncio.Event().wait())


def test_concurrent_sequences_share_engine_passes():
    async def play():
        loop, engine = asyncio.get_running_loop(), SimEngine(EngineCost(0.5, 0.5, 0.25), Overlap(1.0))
        ends = {}

        async def turn(name, wait, tokens, read=0.0):
            await asyncio.sleep(wait)
            await engine.generate(tokens, read)
            ends[name] = loop.time()

        await asyncio.gather(turn("long", 0, 10), turn("late", 4, 2, 8))
        return ends, engine.counts

    (ends, counts), _ = run_virtual(play())
    # 4 passes alone; 8 tokens are read in 2 s; 2 passes of 1.5 s together; 4 passes alone
    assert ends == pytest.approx({"late": 9.0, "long": 13.0})
    assert (counts.passes, counts.tokens) == pytest.approx((10, 12))


def test_simulated_engine_has_limited_slots_and_pauses_for_weights():
    async def play():
        engine = SimEngine(EngineCost(1.0, 0.0, slots=1), Overlap(1.0))
        first, second = asyncio.create_task(engine.generate(4)), asyncio.create_task(engine.generate(3))
        await asyncio.sleep(1)
        await engine.load_weights(1, 10.0)
        return await first, await second

    spans, seconds = run_virtual(play())
    assert spans == ([(0, 1), (1, 3)], [(1, 3)])
    assert seconds == pytest.approx(17)


def test_learner_and_engine_slow_each_other_while_both_work():
    async def play():
        overlap = Overlap(0.5)
        engine, learner = SimEngine(EngineCost(1.0, 0.0), overlap), SimLearner(overlap)
        loop, ends = asyncio.get_running_loop(), []
        sampling = asyncio.create_task(engine.generate(10))
        await asyncio.sleep(2)
        await learner.work(3)
        ends.append(loop.time())
        await sampling
        return [*ends, loop.time()]

    ends, _ = run_virtual(play())
    assert ends == pytest.approx([8, 13])  # 3 s of work take 6 s, and 5 of the engine's 10 passes are left then


def test_paused_engine_takes_longer_and_does_not_slow_the_learner():
    async def play(times):
        overlap = Overlap(0.5)
        engine, learner = SimEngine(EngineCost(1.0, 0.0), overlap), SimLearner(overlap)
        loop = asyncio.get_running_loop()
        sampling = asyncio.create_task(engine.generate(10))
        await asyncio.sleep(0)
        overlap.throttle(times)
        await learner.work(3)
        learned = loop.time()
        overlap.throttle(0)
        await sampling
        return learned, loop.time(), engine.counts.busy_s

    # the learner has 1, then 1 - 0.5 / 4 of its speed; the engine half of its own in a fourth of the time
    assert run_virtual(play(0))[0] == pytest.approx((6, 6 + 7, 13))
    learned = 3 / 0.875
    assert run_virtual(play(3))[0] == pytest.approx(
        (learned, learned + 10 - learned / 8, learned / 4 + 10 - learned / 8)
    )


@pytest.mark.slow
def test_only_a_simulated_engine_in_the_learner_process_is_throttled(monkeypatch):
    slow = replace(TINY, learner=LearnerCost(0.5, 0.0003), overlap=0.5)
    setup = RunLayout(groups=4, members=4, steps=30, max_staleness=6)

    def both(costs):
        with monkeypatch.context() as patch:
            patch.setattr(group_queue, "PAUSE_FACTOR", 0.0)
            never = simulate(costs, setup)
        return never, simulate(costs, setup)

    never, rested = both(slow)
    assert rested.step_s < 0.95 * never.step_s
    assert rested.engine_idle > never.engine_idle + 0.1
    assert rested.oldest <= 6
    never, elsewhere = both(replace(slow, transfer_s=0.01))
    assert elsewhere == never


def test_episodes_are_routed_to_the_engine_with_the_fewest_episodes():
    overlap = Overlap(1.0)
    pool = DevicePool([SimEngine(EngineCost(1, 0), overlap) for _ in range(3)])
    assert [pool.join() for _ in range(4)] == [0, 1, 2, 0]
    pool.leave(1)
    pool.leave(0)
    assert sorted(pool.join() for _ in range(2)) == [0, 1]


def test_simulation_starts_no_thread(monkeypatch):
    begun = []
    monkeypatch.setattr(threading.Thread, "start", begun.append)
    simulate(EXACT, RunLayout(mode="sync", groups=2, members=4, steps=2))
    simulate(EXACT, RunLayout(mode="async", groups=2, members=4, steps=2))
    assert begun == []


@pytest.mark.parametrize("engines", [1, 2, 4])
def test_synchronous_simulation_matches_hand_computed_times(engines):
    run = simulate(EXACT, RunLayout(mode="sync", engines=engines, groups=2, members=4, steps=3))
    rollout = 10 * (0.5 + 0.25 * 8 / engines)
    assert [step.rollout_s for step in run.steps] == pytest.approx([rollout] * 3)
    assert run.step_s == pytest.approx(rollout + 3 + 0.01 * 80 + 1)
    assert run.learner_idle == pytest.approx(1 - 3.8 / run.step_s)
    assert run.engine_idle == pytest.approx(1 - rollout / run.step_s)
    assert run.step_s == pytest.approx(estimate(EXACT, run.layout).step_s)
    assert (run.age, run.oldest) == (0, 0)


def test_one_step_mode_step_time_is_the_longer_phase():
    run = simulate(EXACT, RunLayout(mode="one_step", groups=2, members=4, steps=5))
    inner = run.steps[1:-1]
    assert [step.rollout_s + step.learn_s + step.sync_s for step in inner] == pytest.approx([25 + 1] * 3)
    assert {step.oldest for step in inner} == {1}
    assert run.steps[0].oldest == 0


def test_streaming_step_time_without_tools_matches_the_closed_form():
    for costs in (EXACT, replace(EXACT, learner=LearnerCost(60.0, 0.0))):
        setup = RunLayout(groups=2, members=4, steps=30, max_staleness=2, in_flight=8)
        run, bound = simulate(costs, setup), estimate(costs, setup)
        assert run.step_s == pytest.approx(bound.step_s, rel=0.05)
    assert run.learner_idle < 0.05


@pytest.mark.parametrize("learn_s", [60.0, 1.0])
def test_background_transfer_stops_only_the_engines(learn_s):
    costs = replace(EXACT, learner=LearnerCost(learn_s, 0.0), sync_s=0.0, transfer_s=20.0)
    setup = RunLayout(groups=2, members=4, steps=30, max_staleness=2, in_flight=8)
    run = simulate(costs, setup)
    assert run.step_s == pytest.approx(max(learn_s, 25 + 20), rel=0.05)
    assert run.step_s == pytest.approx(estimate(costs, setup).step_s, rel=0.05)
    assert run.oldest <= 2
    waits = replace(costs, sync_s=20.0, transfer_s=0.0)
    for mode in ("sync", "one_step"):
        other = replace(setup, mode=mode, steps=4)
        assert simulate(costs, other) == simulate(waits, other)
        assert estimate(costs, other) == estimate(waits, other)


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("engines", [1, 5])
def test_staleness_bound_holds_and_all_steps_complete(bound, engines):
    layout = RunLayout(engines=engines, groups=3, members=4, steps=12, max_staleness=bound, seed=bound)
    run = simulate(TINY, layout)
    assert run.oldest <= bound
    assert len(run.steps) == 12


def test_simulation_depends_only_on_its_seed():
    setup = RunLayout(groups=2, members=4, steps=8)
    assert simulate(TINY, setup) == simulate(TINY, setup)
    assert simulate(TINY, setup).steps != simulate(TINY, replace(setup, seed=1)).steps


@pytest.mark.slow
def test_streaming_is_faster_than_synchronous_steps_with_slow_tools():
    runs = {
        mode: simulate(TINY, RunLayout(mode=mode, groups=2, steps=40, max_staleness=10))
        for mode in ("sync", "one_step", "async")
    }
    assert runs["async"].episodes_per_s > 3 * runs["sync"].episodes_per_s
    assert runs["one_step"].episodes_per_s > runs["sync"].episodes_per_s
    for run in runs.values():
        assert run.step_s == pytest.approx(estimate(TINY, run.layout).step_s, rel=0.25)


@pytest.mark.scale
def test_measured_concurrency_is_close_to_the_best():
    for bound in (5, 10):
        setup = RunLayout(groups=2, steps=60, max_staleness=bound)
        best = min(simulate(TINY, replace(setup, in_flight=n)).step_s for n in (24, 48, 96))
        assert simulate(TINY, setup).step_s < 1.12 * best


@pytest.mark.scale
def test_concurrency_converges_and_the_learner_does_not_wait():
    costs = replace(TINY, learner=LearnerCost(0.0, 0.0006), overlap=0.9)
    run = simulate(costs, RunLayout(groups=8, steps=80, max_staleness=6))
    later = run.steps[20:-7]
    numbers = [step.in_flight for step in later]
    assert max(numbers) < 2 * min(numbers)
    assert sum(step.rollout_s for step in later) < 0.02 * sum(step.learn_s for step in later)
    assert run.age < 4.5  # with as many in flight as there is room for, the bound


def test_concurrency_limit_follows_the_pace_of_the_learner():
    limit = ConcurrencyController(12, 4, 100)
    fills, busy = EngineLoad(0.9, 0.0, 0.0, 0.0, seconds=100.0), EngineLoad(0.0, 0.0, 0.0, 1.5, seconds=10.0)
    limit.after(fills, None, None)  # the stream fills: that it was waited for says nothing of later
    assert limit.after(busy, None, StreamThroughput(200.0, 2.0)) == 10  # a batch flies 100 s, and is wanted every 10 s
    assert limit.after(busy, None, StreamThroughput(100.0, 0.0)) == 13  # none came: they fly longer than was thought


def test_running_sequences_follow_littles_law_and_slowest_episode_matches_expectation():
    costs = replace(EXACT, tool=ToolCost(5.0), episode=EpisodeShape(2, 10))
    inside = model_seconds(costs, running_sequences(costs, 6))
    assert running_sequences(costs, 6) == pytest.approx(6 * inside / (inside + 5), rel=1e-6)
    assert running_sequences(costs, 1000) == 128  # no more than there are slots
    one, many = slowest_episode((1, 64), replace(TINY, episode=EpisodeShape(2, 1)), 1)
    assert one == pytest.approx(SLOW.mean_s, rel=0.1)
    assert many == pytest.approx(3.0, rel=0.05)  # nearly always a straggler's 20 * 0.15 s


def test_a_fit_over_passes_estimates_the_gain_of_larger_batches():
    line = PassTimeModel()
    assert line.gain(4) == pytest.approx(0.3)  # nothing is known: it is tried
    for running in (4.0, 8.0, 16.0):
        line.add(PassTimes(running, 0.01 + 0.001 * running))
    assert line.gain(10) == pytest.approx(1.3 * 0.02 / 0.023 - 1)
    assert line.gain(1000) < 0.01
    flat = PassTimeModel()
    for running in (4.0, 8.0):
        flat.add(PassTimes(running, 0.001 * running))
    assert flat.gain(10) == pytest.approx(0, abs=1e-9)


def test_concurrency_limit_grows_fast_then_slowly():
    waits = EngineLoad(0.8, 0.5, 0.0, 0.0)
    limit = ConcurrencyController(8, 4, 100)
    assert [limit.after(waits, None) for _ in range(2)] == [16, 32]
    assert limit.after(replace(waits, limited=False), None) == 32  # the bound on staleness lets no more start
    assert limit.after(waits, None) == 42
    assert limit.after(replace(waits, engine_queue=1.0), None) == 36
    assert ConcurrencyController(8, 10, 9).limit <= 10


def write_run(folder, engine, learner, running=(4.0, 8.0, 16.0, 32.0)):
    """A run folder whose steps took exactly what these costs say."""
    folder.mkdir()
    metrics, timings = [], []
    for step, n in enumerate(running, start=1):
        episodes, decoded, read = 2 * n, 400.0 * n, 100.0 * n * (1 + step % 2)
        busy = engine.pass_s * decoded / n + engine.sequence_s * decoded + engine.read_s * read
        metrics.append(
            {
                "step": step,
                "episodes/finished": episodes,
                "turns/mean": 4.0,
                "response_length/mean": 100.0,
                "length/total_tokens/mean": 250.0,
            }
        )
        timings.append(
            {
                "step": step,
                "engine/busy_s": busy,
                "engine/decode_tokens_per_s": decoded / busy,
                "engine/prefill_tokens_per_s": read / busy,
                "engine/requests_running": n,
                "time/train_s": learner.seconds(250 * episodes),
                "time/sync_s": 0.5,
                "tools/look/total_s": 30.0,
                "tools/look/mean_s": 3.0,
                "tools/look/median_s": 2.0,
                "tools/look/spread": 0.5,
                "tools/look/stragglers": 1.0,
                "tools/look/stragglers_s": 24.0,
            }
        )
    for name, rows in (("metrics", metrics), ("timings", timings)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.toml").write_text(to_toml(load_config("search")))
    return RunFolder(folder)


def test_costs_are_recovered_from_the_files_of_a_run(tmp_path):
    engine, learner = EngineCost(0.01, 0.0005, 0.0001), LearnerCost(0.3, 0.002)
    found = fit([write_run(tmp_path / "run", engine, learner)])
    own = found.costs.engine
    assert (own.pass_s, own.sequence_s, own.read_s) == pytest.approx((0.01, 0.0005, 0.0001))
    assert (found.costs.learner.step_s, found.costs.learner.token_s) == pytest.approx((0.3, 0.002))
    assert max(found.engine_error, found.learner_error) < 1e-9
    assert found.num_steps == 3  # the first one warms up
    tool, shape = found.costs.tool, found.costs.episode
    assert (tool.median_s, tool.spread, tool.stragglers, tool.slow) == pytest.approx((2.0, 0.5, 0.1, 12.0))
    assert (shape.turns, shape.action, shape.context) == pytest.approx((4, 25, 150))
    assert (found.costs.sync_s, found.costs.transfer_s) == (0.5, 0.0)


def test_background_transfer_time_is_recovered_apart_from_learner_waits(tmp_path):
    folder = write_run(tmp_path / "run", EngineCost(0.01, 0.0005), LearnerCost(0.3, 0.002))
    rows = [json.loads(line) for line in folder.timings.read_text().splitlines()]
    for row in rows[1:]:
        row["sync/transfer_s"] = float(row["step"])
    folder.timings.write_text("".join(json.dumps(row) + "\n" for row in rows))
    costs = fit([folder]).costs
    assert (costs.sync_s, costs.transfer_s) == (0.5, 3.0)
    said = ludus("plan", folder.path, "--modes", "async", "--engines", 1, "--steps", 4)
    assert "a weight transfer 0.5 s, and 3 s during the next step" in said.out


def test_fitted_costs_are_not_negative(tmp_path):
    engine = EngineCost(0.0, 0.001, 0.0)
    found = fit([write_run(tmp_path / "run", engine, LearnerCost(0.0, 0.01))]).costs
    assert found.engine.pass_s == pytest.approx(0, abs=1e-9)
    assert found.engine.sequence_s == pytest.approx(0.001)
    assert found.learner.step_s == pytest.approx(0, abs=1e-9)


def test_uninformative_steps_are_rejected_and_few_or_heterogeneous_ones_warn(tmp_path):
    quicker = SimpleNamespace(pass_s=-1e-4, sequence_s=0.0, read_s=0.01)  # the more passes, the less time
    folder = write_run(tmp_path / "quicker", quicker, LearnerCost(0.0, 0.01))
    assert "The 3 steps of these runs do not determine" in refused("plan", folder.path)
    few = write_run(tmp_path / "few", EngineCost(0.01, 0.0005), LearnerCost(0.3, 0.002))
    assert "Warning: 3 steps are too few" in ludus("plan", few.path, "--engines", 1, "--steps", 2).out
    many = fit([write_run(tmp_path / "many", EngineCost(0.01, 0.0005), LearnerCost(0.3, 0.002), range(1, 9))])
    assert not many.warnings
    assert "do not describe these steps" in replace(many, learner_error=0.5).warnings[0]


def test_mixing_two_tools_increases_the_fitted_latency_spread():
    plain = {"mean_s": 1.0, "total_s": 10.0, "spread": 0.0, "stragglers": 0, "stragglers_s": 0.0}
    both = tool_cost([{f"tools/a/{name}": v for name, v in (plain | {"median_s": m}).items()} for m in (1.0, 4.0)])
    assert (both.median_s, both.spread, both.slow) == pytest.approx((2.0, 0.6931, 1.0), rel=1e-3)
    assert tool_cost([]) == ToolCost()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EngineCost(-1.0, 0.1), r"^EngineCost\.pass_s is -1"),
        (lambda: EngineCost(0.0, 0.0), "takes no time"),
        (lambda: EngineCost(0.1, 0.0, slots=0), "slots is 0"),
        (lambda: LearnerCost(float("nan"), 0.0), "step_s is nan"),
        (lambda: ToolCost(1.0, stragglers=2.0), "stragglers is 2"),
        (lambda: EpisodeShape(0.5, 10), "turns is 0.5"),
        (lambda: replace(EXACT, overlap=1.5), "overlap is 1.5"),
        (lambda: RunLayout(mode="fast"), "Unknown mode 'fast'"),
        (lambda: RunLayout(engines=0), "^engines is 0"),
        (lambda: RunLayout(in_flight=-1), r"^in_flight is -1\."),
    ],
)
def test_invalid_numbers_raise_error(make, message):
    with pytest.raises(UserError, match=message):
        make()


GIVEN = ["--pass-s", "0.01", "--learn-token-s", "1e-5", "--turns", "2", "--action", "20"]


def test_plan_command_prints_a_row_for_each_engine_count_and_mode():
    said = ludus("plan", *GIVEN, "--engines", 1, 3, "--modes", "sync", "async", "--groups", 2, "--steps", 6)
    assert said.code == 0, said
    rows = [line.split("│")[1:3] for line in said.out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        [engines, mode] for engines in ("1", "3") for mode in ("sync", "async")
    ]


def test_plan_command_uses_costs_of_a_run_unless_overridden(tmp_path):
    folder = write_run(tmp_path / "run", EngineCost(0.01, 0.0005), LearnerCost(0.3, 0.002)).path
    said = ludus("plan", folder, "--modes", "async", "--engines", 2, "--steps", 4, "--tool-median-s", "7")
    assert said.code == 0, said
    assert "fitted to 3 steps" in said.out
    assert "a pass 10 ms and 0.5 ms per sequence" in said.out
    assert "median 7 s" in said.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "or --pass-s, --learn-token-s, --turns, --action"),
        (["nowhere"], "nowhere does not exist"),
        ([*GIVEN, "--engines", "0"], "engines is 0"),
        ([*GIVEN, "--modes", "later"], "Unknown mode 'later'"),
        ([*GIVEN, "--in-flight", "-1"], "in-flight is -1"),
    ],
)
def test_plan_command_reports_invalid_arguments(words, message):
    said = ludus("plan", *words)
    assert said.code == 2
    assert message in said.err.replace("\n", " ")


def test_run_without_recorded_mode_is_rejected(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 1, "episodes/finished": 3}\n')
    folder.timings.write_text('{"step": 1, "time/train_s": 3}\n')
    with pytest.raises(UserError, match="no step with timings"):
        measured_steps(folder)


@pytest.mark.slow
def test_overlap_of_a_run_is_fitted_from_its_timings(plan):
    setup = RunLayout(steps=6, groups=1, max_staleness=2, in_flight=8)
    step_s = plan.predict(replace(TINY, overlap=0.6), setup).step_s
    assert plan.measured_overlap(TINY, setup, step_s) == pytest.approx(0.6, abs=0.02)


def test_page_without_a_placeholder_is_rejected_before_measuring(tmp_path, plan):
    page = tmp_path / "page.md"
    page.write_text("# A page\n")
    with pytest.raises(SystemExit, match="no place for plan"):
        plan.parse(["--page", str(page)])


@pytest.mark.scale
def test_simulation_of_1000_engines_runs_in_seconds_with_little_memory():
    """48,000 episodes of heavy-tailed tools, in a process of its own."""
    script = """
import re, time
from pathlib import Path
from ludus.simulator.costs import Costs, EngineCost, EpisodeShape, LearnerCost, RunLayout, ToolCost
from ludus.simulator.simulate import simulate
engine, learner, tools = EngineCost(0.012, 1e-4, 1e-5), LearnerCost(5.0, 4e-6), ToolCost(2.0, 1.0, 0.05, 20)
costs = Costs(engine, learner, tools, EpisodeShape(3, 200, 300, 1400), 2.0)
setup = RunLayout(engines=1000, groups=500, members=16, steps=6, max_staleness=2, in_flight=64_000)
begin = time.process_time()
run = simulate(costs, setup)
seconds = time.process_time() - begin
status = Path("/proc/self/status").read_text()  # what getrusage says may be the parent's
peak = int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024
print(run.oldest, sum(step.tokens for step in run.steps), max(s.in_flight for s in run.steps), seconds, peak)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=900)
    oldest, tokens, most, seconds, peak_mib = map(float, done.stdout.split())
    assert 0 < oldest <= 2
    assert tokens == 6 * 500 * 16 * 600  # all that trains, and each token once
    assert 16_000 < most <= 64_000
    assert seconds < 300
    assert peak_mib < 600
