"""The rollout benchmark: all systems run the same workload and report correct measurements."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _importable():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    import rollout_models
    from rollout_work import Work
    from rollout_worker import Job

    folder = rollout_models.make("tiny", tmp_path_factory.mktemp("models"))
    work = Work(vocab=320, prompts=3, members=3, turns=3, new=6, new_limit=14, observation=(20, 60), greedy=True)
    return Job("", str(folder), 1, work)


def play(job, system):
    from rollout_worker import find

    return find(system)(replace(job, system=system))


@pytest.mark.scale
def test_all_systems_generate_the_same_tokens(job):
    import rollout_ours
    import rollout_work

    plan = rollout_work.episodes(job.work)
    naive = play(job, "naive")
    assert naive.tokens == rollout_work.num_generated(plan)
    names = ("ours", rollout_ours.FORGETFUL, rollout_ours.LOCKSTEP, rollout_ours.VARIANT, "continuous")
    others = {name: play(job, name) for name in names}
    assert {name: r.digest for name, r in others.items()} == dict.fromkeys(names, naive.digest)
    unshared = play(job, rollout_ours.UNSHARED)
    assert unshared.tokens == naive.tokens
    reusable = rollout_work.num_reusable(plan, job.work)
    assert 0.99 * reusable <= others["ours"].cached_tokens <= 1.01 * reusable
    for other in (others[rollout_ours.FORGETFUL], unshared):
        assert other.cached_tokens < 0.95 * reusable


def test_reusable_tokens_equal_a_brute_force_prefix_search(job):
    import rollout_work

    plan, known, found = rollout_work.episodes(job.work), [], 0

    def common(left, right):
        both = enumerate(zip(left, right, strict=False))
        return next((i for i, (a, b) in both if a != b), min(len(left), len(right)))

    for episode in plan:
        history = episode.prompt
        for turn, length in enumerate(episode.lengths):
            found += max((common(history[:-1], other) for other in known), default=0)
            history += (-1 - len(known),) * length
            known.append(history[:-1])
            history += (*episode.observations, ())[turn]
    assert found == pytest.approx(rollout_work.num_reusable(plan, job.work), rel=0.002)


def test_read_time_counts_weights_per_step_and_context_per_token(job, monkeypatch):
    import rollout_hf
    import rollout_ours
    import rollout_work

    plan, context = rollout_work.episodes(job.work), 0
    for episode in plan:
        held = len(episode.prompt)
        for length, observation in zip(episode.lengths, (*episode.observations, ()), strict=True):
            for _ in range(length):
                context += held
                held += 1
            held += len(observation)
    assert rollout_work.num_context(plan) == context
    model = rollout_hf.load(replace(job, dtype="bfloat16"))
    monkeypatch.setattr(rollout_ours, "bytes_per_second", lambda device: 1e9)
    weights = 2 * sum(p.numel() for p in model.parameters())
    keys_and_values = 2 * 2 * 2 * 8 * 2  # both, layers, heads, width, bytes
    assert rollout_ours.read_s(model, plan, 7) * 1e9 == pytest.approx(7 * weights + context * keys_and_values)


@pytest.mark.scale
def test_command_runs_systems_in_subprocesses_and_writes_results(job, tmp_path, capsys):
    import rollout
    from rollout_work import Work

    out = tmp_path / "results.jsonl"
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(job.model)
    sizes = ["--model", "tiny", "--prompts", "2", "--members", "2", "--new-limit", "8", "--repeats", "1"]
    only = ["--greedy", "--only", "ours no-kernel,trl"]
    rollout.main([*sizes, *only, "--folder", str(tmp_path), "--out", str(out)])
    (result,) = map(json.loads, out.read_text().splitlines())
    naive = play(replace(job, work=Work(vocab=320, prompts=2, members=2, new_limit=8, greedy=True)), "naive")
    assert (result["system"], result["digest"]) == ("ours no-kernel", naive.digest)
    printed = capsys.readouterr().out
    assert f"| Ludus, torch's attention | {result['tokens'] / result['wall_s']:,.0f} |" in printed
    assert "TRL's trainer and tool loop: not run, no environment for it" in printed


def test_saved_results_of_the_same_job_are_reused(job, tmp_path):
    import rollout
    from rollout_worker import Result

    out, slow = tmp_path / "results.jsonl", replace(job, threads=2)
    result = Result("ours", 100, 2.0, 2.0, 30.0, 10.0, "")
    rollout.save(out, job, 0, result)
    rollout.save(out, slow, 1, replace(result, wall_s=1.0))
    assert rollout.saved(out, job) == {(0, "ours"): result}
    pythons, kept = rollout.Pythons(None, None), []
    jobs = [replace(job, system="ours"), replace(job, system="trl")]
    rounds, skipped = rollout.run_all(jobs, pythons, 1, (), rollout.saved(out, job), lambda *it: kept.append(it))
    assert (rounds, kept, list(skipped)) == ([{"ours": result}], [], ["trl"])


def test_ratios_are_computed_within_each_repetition(job):
    import rollout
    from rollout_worker import Result

    def result(system, wall_s):
        return Result(system, 100, wall_s, wall_s / 2, 30.0, 10.0, "")

    rounds = [
        {"naive": result("naive", 10.0), "ours": result("ours", 2.0)},
        {"naive": result("naive", 40.0), "ours": result("ours", 5.0)},
        {"naive": result("naive", 9.0), "ours": result("ours", 1.5)},
    ]
    assert rollout.ratios(rounds, "ours", "wall") == [5.0, 8.0, 6.0]
    assert rollout.row(rounds, "ours", 1, "wall") == ("| Ludus | 50 | 2.00 | 30 | 20 | 6.00 (5.00 to 8.00) |  |  |")
    assert "| 100 | 1.00 |" in rollout.row(rounds, "ours", 1, "processor")
    with pytest.raises(SystemExit, match="naive generated 100 tokens instead of 99"):
        rollout.check(rounds, 99)


def test_fill_replaces_the_marked_section_of_a_page(tmp_path):
    import rollout

    page = tmp_path / "page.md"
    page.write_text("above\n<!-- begin small -->\nold\n<!-- end small -->\nbelow\n", encoding="utf-8")
    rollout.fill(page, "small", "new")
    assert page.read_text(encoding="utf-8") == ("above\n<!-- begin small -->\nnew\n<!-- end small -->\nbelow\n")
    with pytest.raises(SystemExit, match="no place for smollm2"):
        rollout.fill(page, "smollm2", "new")
