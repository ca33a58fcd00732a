"""`ludus rewards replay` and the section `rewards`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ludus.cli.results.calibrate import agreement_lines
from ludus.evaluation.stats import cohens_kappa
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path, write_rollouts
from ludus.types import Message, StopReason, Trajectory
from tiny_run import WORLD, cold_start, copy_run, ludus, make_recipe, refused
from tiny_world import PRICES


@pytest.fixture(scope="module")
def run(tiny_run, tmp_path_factory):
    """A copy whose step 1 has, for each of three tasks, a right answer, one said twice, and a wrong one."""
    folder = copy_run(tiny_run, tmp_path_factory.mktemp("replay"))
    rollouts_path(folder, 2).unlink()
    path = rollouts_path(folder, 1)
    write_rollouts(path, [with_answer(record) for record in read_rollouts(path)])
    return folder


def with_answer(record):
    """The rollout with an answer of our own, without calls, and the rewards that the world gives for it."""
    price = PRICES[record.group.removeprefix("train:")]
    answer, f1 = [(price, 1.0), (f"{price} {price}", 2 / 3), ("none", 0.0)][record.trajectory.sample]
    messages = (*record.trajectory.messages[:2], Message(role="assistant", content=answer))
    exact = float(answer == price)
    parts = {"exact_match": exact, "f1": f1, "well_formed": 1.0}
    trajectory = replace(
        record.trajectory,
        messages=messages,
        outcomes=(),
        rewards=parts,
        reward=exact + 0.1,
        stop_reason=StopReason.ANSWERED,
    )
    return replace(record, trajectory=trajectory)


def config(folder, text):
    path = folder / "other.toml"
    path.write_text(text)
    return path


def table(said):
    """The cells of all tables, a list a row."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if "│" in line]
    return [row for row in rows if any(row)]


def replay(run, *words):
    said = ludus("rewards", "replay", run, *words)
    assert said.code == 0, said
    return said.out


def test_another_way_to_combine_shows_what_it_changes(run, tmp_path):
    said = replay(run, "--config", config(tmp_path, '[rewards]\naggregation = "gated"'))
    assert "9 rollouts scored again: 6 have a changed reward." in said
    assert "Success changed" not in said
    assert ["reward", f"{1.3 / 3:.4f}", f"{1.1 / 3:.4f}", "6"] in table(said)
    assert ["exact_match", f"{1 / 3:.4f}", f"{1 / 3:.4f}", "0"] in table(said)
    (row,) = [row for row in table(said) if row[0] == "step-000001"]
    assert row[1:] == ["train", "9", "0.4333", "0.3667", "0.3333", "0.3333", "0"]


def test_settings_go_on_top_of_the_file(run, tmp_path):
    file = config(tmp_path, '[rewards]\naggregation = "gated"\n[rewards.weights]\nwell_formed = 0.2')
    said = replay(run, "--config", file, "--rewards.aggregation", "weighted_sum")
    assert ["reward", f"{1.3 / 3:.4f}", f"{1.6 / 3:.4f}", "9"] in table(said)


def test_a_preset_brings_its_own_parts(run):
    said = replay(run, "--rewards.preset", "search_r1")
    assert ["reward", f"{1.3 / 3:.4f}", f"{1.4 / 3:.4f}", "9"] in table(said)
    assert ["wrong_and_ill_formed", "none", "0.0000", "9"] in table(said)


def test_the_sentence_and_the_table_count_the_same_rollouts(run):
    words = ("--rewards.extra.citation_support.weight", "0.05", "--rewards.weights.f1", "0.0")
    said = replay(run, *words)
    assert "9 rollouts scored again: 0 have a changed reward, 9 more have changed parts and the same reward." in said
    assert ["citation_support", "none", "0.0000", "9"] in table(said)
    assert ["reward", "0.4333", "0.4333", "0"] in table(said)
    assert "the largest changes" not in said
    said = replay(run, "--rewards.extra.long_answer.weight", "0.1", *long_answer())
    assert "9 rollouts scored again: 3 have a changed reward, 6 more have changed parts and the same reward." in said
    (row,) = [row for row in table(said) if row[0] == "reward"]
    assert row[-1] == "3"
    assert len([row for row in table(said) if row[0] == "1"]) == 3


def long_answer():
    return ("--rewards.extra.long_answer.free", "1", "--rewards.extra.long_answer.limit", "2")


def test_a_world_with_another_verifier_changes_success(run, tmp_path):
    world = tmp_path / "kinder_world.py"
    kinder = "lambda task, t: float(token_f1(task, t) > 0)"
    world.write_text(WORLD.read_text().replace('"exact_match", exact_match,', f'"exact_match", {kinder},'))
    said = replay(run, "--config", config(tmp_path, f'[env]\nname = "{world}"'), "--episodes", "3")
    assert "Success changed in 3: 3 succeed now that failed, 0 fail now that succeeded." in said
    (row,) = [row for row in table(said) if row[0] == "step-000001"]
    assert row[-3:] == ["0.3333", "0.6667", "3"]
    largest = [row for row in table(said) if row[0] == "1"]
    assert [row[2] for row in largest] == ["1", "1", "1"]
    assert {(row[4], row[5]) for row in largest} == {("0.1", "1.1")}


def test_a_reward_that_hangs_ends_the_replay_at_its_deadline(run, tmp_path):
    world = tmp_path / "hanging_world.py"
    hangs = "lambda task, t: float(any(iter(int, 1)))"
    world.write_text(WORLD.read_text().replace('"exact_match", exact_match,', f'"exact_match", {hangs},'))
    words = ("--config", config(tmp_path, f'[env]\nname = "{world}"'), "--rollout.reward_timeout_s", "1")
    said = refused("rewards", "replay", run, *words, code=4)
    assert "took longer than 1 s" in said
    assert "hanging_world.py, line" in said


def test_evaluations_are_judged_by_the_world_alone(run):
    said = replay(run, "--evaluations", "--rewards.aggregation", "gated")
    assert "all rewards are unchanged, bit for bit" in said
    rows = [row for row in table(said) if row[1] in ("validation", "test")]
    assert len(rows) == len(list((run / "evaluations").glob("*.gz")))
    one = replay(run, "--evaluation", "step-000002-test-greedy", "--rewards.aggregation", "gated")
    assert "8 rollouts scored again" in one


@pytest.mark.slow
def test_what_a_section_made_is_made_again_bit_for_bit(tiny_run, tmp_path):
    words = ["--rewards.aggregation", "gated", "--rewards.normalise_by", "family"]
    words += ["--evaluation.splits", "[]"]
    weights = ("--rewards.weights_end.well_formed", "0.0", "--rewards.schedule_steps", "2")
    run = tmp_path / "run"
    model = cold_start(tiny_run)
    made = ludus("train", make_recipe(tmp_path), "--model", model, "--run.dir", run, *words, *weights)
    assert made.code == 0, made
    stored = [record.trajectory for step in (1, 2) for record in read_rollouts(rollouts_path(run, step))]
    assert sum(t.reward != t.rewards["combined"] for t in stored) > 0
    assert "18 rollouts scored again: all rewards are unchanged" in replay(run)
    second = replay(run, "--step", "2")
    assert "9 rollouts scored again: all rewards are unchanged, bit for bit" in second
    plain = replay(run, "--rewards.aggregation", "weighted_sum", "--rewards.normalise_by", "none")
    assert "8 have a changed reward, 10 more have changed parts and the same reward." in plain


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--env.name", "nope.py"), "nope.py"),
        (("--config", "FILE"), "has no section rewards and no section env"),
        (("--config", "nope.toml"), "nope.toml does not exist"),
        (("--rewards.gate", "x"), "rewards.gate names 'x'"),
        (("--rewards.preset", "toolrl"), "needs tasks whose truth is ExpectedCalls"),
        (("--step", "7", "--rewards.aggregation", "gated"), "has no rollouts of step 7"),
        (("--episodes", "-1"), "--episodes is -1"),
    ],
)
def test_bad_input_is_one_sentence(words, expected, run, tmp_path):
    file = config(tmp_path, "[training]\nsteps = 3")
    assert expected in refused("rewards", "replay", run, *(file if word == "FILE" else word for word in words))


def judged(judge, verifier):
    return Trajectory("t", 0, (), (), StopReason.ANSWERED, rewards={"judge": judge, "exact": verifier, "f1": 0.5})


def test_a_judge_of_0_and_1_is_compared_with_the_verifier():
    pairs = [(1.0, 1.0)] * 20 + [(1.0, 0.0)] * 5 + [(0.0, 1.0)] * 10 + [(0.0, 0.0)] * 15
    found = cohens_kappa([a == 1 for a, _ in pairs], [b == 1 for _, b in pairs])
    (line,) = agreement_lines([judged(*pair) for pair in pairs], "exact")
    assert f"kappa {0.4:.2f} [{found.low:.2f}, {found.high:.2f}]" in line  # (0.7 - 0.5) / (1 - 0.5)
    assert "both 20, only judge 5, only exact 10, neither 15" in line
    assert agreement_lines([judged(0.5, 1.0), judged(1.0, 0.0)], "exact") == []
    assert agreement_lines([judged(1.0, 1.0)], "exact") == []
