"""Proposals of programs: rewards of proposers and solvers, cheats, the repetition penalty, tasks and demonstrations."""

import asyncio
import math
from dataclasses import replace
from itertools import islice

import pytest
import torch

from ludus.algorithms.spec.resolve import PRESETS
from ludus.config.sections.rollout import RolloutConfig
from ludus.envs.registry import closing
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError
from ludus.rewards.base import score
from ludus.rollouts.agent_runs import AgentRunner
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.scheduler import Episode
from ludus.tools.notes import Notes
from ludus.training.credit.advantages import assign_credit
from ludus.training.rl.validate import check_roles
from ludus.worlds.proposals.programs import Problem, bleu, cluster_shares, is_pure
from ludus.worlds.proposals.world import make_proposals_world
from small_worlds import in_order, make_chat, scripted

LIMITS = RolloutConfig(max_turns=40)
DOUBLE = "def f(x):\n    return x * 2"
PROPOSAL = f"{DOUBLE}\ninput: 3"
MANY = f"{DOUBLE}\ninput: 1\ninput: 2\ninput: 'a'\ninput: [5]"


def world_of(**settings):
    return make_proposals_world({"num_inputs": 4, "num_solvers": 4, **settings}, ToolLimits())


def play(world, kind, *replies, sample=0, split="train", notes=None):
    """Return the scored episode in which the agents reply in order: the proposers, then the solvers."""
    task = next(task for task in world.tasks(split) if task.tags["kind"] == kind)
    engine = scripted(in_order(*replies))

    async def run():
        async with closing(world):
            environment = world.environment(task)
            return await AgentRunner(notes=notes).run(task, sample, environment, lambda: make_chat(engine), LIMITS)

    return score(world.rewards, task, asyncio.run(run()))


def solvers(found):
    return [value for name, value in found.agent_rewards.items() if name.startswith("solver")]


def test_solvers_of_deduction_are_graded_by_the_output_and_the_proposer_by_its_difficulty():
    found = play(world_of(), "deduction", PROPOSAL, "6", " 6 ", "5", "six!")
    assert found.agent_rewards == {
        "solver:deduction/0/0": 1.0,
        "solver:deduction/0/1": 1.0,
        "solver:deduction/0/2": -0.5,
        "solver:deduction/0/3": -1.0,
        "proposer:deduction/0": 0.5,
    }
    assert (found.rewards, found.reward) == ({"solved": 0.5, "valid": 1.0}, 0.5)
    rows = {found.segments[row[-1]].agent for row in found.rows}
    assert rows == set(found.agent_rewards)
    assert len(found.rows) == 5


def test_every_input_with_the_output_solves_abduction():
    text = "def f(x):\n    return x % 5\ninput: 3"
    assert solvers(play(world_of(), "abduction", text, "3", "8", "-2", "4")) == [1.0, 1.0, 1.0, -0.5]
    assert solvers(play(world_of(), "abduction", text, "3.0", "'a'", "x", "[" * 150)) == [-0.5, -0.5, -1.0, -1.0]


def test_programs_of_induction_are_tested_on_inputs_that_were_not_shown():
    table = "def f(x):\n    return {1: 2, 2: 4}[x]"
    other = "Here:\n```python\ndef f(y):\n    return y + y\n```"
    found = play(world_of(), "induction", MANY, DOUBLE, other, table, "x * 2")
    assert solvers(found) == [1.0, 1.0, -0.5, -1.0]
    assert found.agent_rewards["proposer:induction/0"] == 0.5
    problem = Problem("induction", DOUBLE, (1, 2, "a", [5]), ("2", "4", "'aa'", "[5, 5]"))
    assert "f(1) == 2\nf(2) == 4\n" in problem.prompt[-1]["content"]
    assert "aa" not in problem.prompt[-1]["content"]


@pytest.mark.parametrize(("num_right", "reward"), [(0, 0.0), (1, 0.75), (3, 0.25), (4, 0.0)])
def test_proposals_that_nobody_or_everybody_solves_earn_nothing(num_right, reward):
    replies = ["6"] * num_right + ["7"] * (4 - num_right)
    found = play(world_of(), "deduction", PROPOSAL, *replies)
    assert found.agent_rewards["proposer:deduction/0"] == reward
    assert found.rewards["solved"] == num_right / 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        DOUBLE,
        f"{DOUBLE}\ninput: 1\ninput: 2",
        f"{DOUBLE}\ninput: y",
        f"{DOUBLE}\ninput: ...",
        f"{DOUBLE}\ninput: '{'a' * 300}'",
        "def g(x):\n    return x\ninput: 1",
        "def f(x, y):\n    return x\ninput: 1",
        "def f(x):\nreturn x\ninput: 1",
        f"def f(x):\n    return {'(' * 300}x{')' * 300}\ninput: 1",
        f"def f(x):\n    return x{' + x' * 400}\ninput: 1",
    ],
)
def test_malformed_proposals_have_the_penalty_and_no_solvers(text):
    found = play(world_of(), "deduction", text)
    assert found.agent_rewards == {"proposer:deduction/0": -1.0}
    assert (found.rewards, found.reward) == ({"solved": 0.0, "valid": 0.0}, 0.0)


CHEATS = {
    "file": "def f(x):\n    return open('/etc/passwd').read()[:3]",
    "random": "import random\ndef f(x):\n    return random.random()",
    "time": "def f(x):\n    from time import time\n    return time() // 1e6",
    "hidden import": "def f(x):\n    return __import__('time').time() // 1e6",
    "dunder": "def f(x):\n    return len(x.__class__.__base__.__subclasses__())",
    "frame": "def f(x):\n    return len((i for i in ()).gi_frame.f_builtins['open']('/etc/passwd').read())",
    "state": "seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)",
    "default": "def f(x, *, s=[]):\n    s.append(x)\n    return s[0]",
    "address": "def f(x):\n    return id(object())",
    "loop": "def f(x):\n    while True: pass",
    "huge": "def f(x):\n    return 'a' * 10**8",
    "long": "def f(x):\n    return [x] * 100",
    "memory": "def f(x):\n    return len([0] * 10**10)",
    "raises": "def f(x):\n    return x[0]",
    "exit": "def f(x):\n    raise SystemExit(0)",
    "object": "def f(x):\n    return f",
    "generator": "def f(x):\n    yield x",
}


def test_impure_endless_and_failing_programs_are_invalid():
    world = world_of(timeout_s=0.2)
    for name, text in CHEATS.items():
        found = play(world, "induction", text + "\ninput: 1\ninput: 2\ninput: 3\ninput: 4")
        assert found.agent_rewards == {"proposer:induction/0": -0.5}, name


def test_each_rule_of_pure_programs_and_the_second_run_are_needed():
    pure = {name for name, text in CHEATS.items() if is_pure(text)}
    assert pure == {"state", "default", "loop", "huge", "long", "memory", "raises", "exit", "object", "generator"}


def test_inputs_of_induction_are_different():
    found = play(world_of(), "induction", DOUBLE + "\ninput: 1" * 4)
    assert found.agent_rewards == {"proposer:induction/0": -0.5}


def test_printing_changes_nothing():
    text = "def f(x):\n    print({'number': 0, 'value': 7})\n    return x\ninput: 3"
    assert solvers(play(world_of(), "deduction", text, "3", "7", "{'value': 7}", "print")) == [1.0, -0.5, -0.5, -1.0]


def test_a_solver_that_repeats_its_prompt_is_wrong():
    world = world_of()
    one = next(t.truth for t in world.tasks("test") if t.tags["kind"] == "induction")
    echoes = {"deduction": DOUBLE, "abduction": DOUBLE, "induction": one.prompt[-1]["content"]}
    for kind, echo in echoes.items():
        found = play(world_of(), kind, MANY if kind == "induction" else PROPOSAL, *[echo] * 4)
        assert solvers(found) == [-1.0] * 4
        assert found.agent_rewards[f"proposer:{kind}/0"] == 0.0


def test_replies_that_are_cut_off_are_malformed_and_others_continue():
    world = world_of(num_solvers=2)
    task = next(task for task in world.tasks("train") if task.tags["kind"] == "deduction")
    engine = scripted(in_order(PROPOSAL, "9" * 200, "6"))
    make = lambda: replace(  # noqa: E731
        make_chat(engine), params=replace(make_chat(engine).params, max_new_tokens=100)
    )

    async def run():
        async with closing(world):
            return await AgentRunner().run(task, 0, world.environment(task), make, LIMITS)

    assert solvers(asyncio.run(run()))[1] == 1.0


def test_uncertainty_rewards_the_most_frequent_answer_and_penalises_repetition():
    texts = [PROPOSAL, PROPOSAL, "def f(x):\n    y = sorted(set(x))\n    return y[-1] - len(y)\ninput: [4, 1, 4]", ""]
    world = world_of(reward="uncertainty", num_proposals=4)
    attempts = [*["6", "6", "6", "1"], *["6", "7", "(7)", "?"], *["2"] * 4]
    found = play(world, "deduction", *texts, *attempts).agent_rewards
    assert found["proposer:deduction/0"] == 0.25 - 0.5
    assert found["proposer:deduction/1"] == 0.5 - 0.5
    assert found["proposer:deduction/2"] == 0.0 - 0.25
    assert found["proposer:deduction/3"] == -1 - 0.25
    assert len(found) == 4 + 12


def test_repetition_is_the_share_of_a_cluster_with_average_linkage():
    a, b = list("abcdefgh"), list("abcdefgx")
    precisions = [7 / 8, 6 / 7, 5 / 6, 4 / 5]
    assert bleu(a, b) == pytest.approx(math.prod(precisions) ** 0.25)
    assert bleu(a[:6], a) == pytest.approx(math.exp(1 - 8 / 6))
    assert bleu(list("abx"), list("abc")) == pytest.approx((2 / 3 * 1 / 2 * 0.1 * 0.1) ** 0.25)
    assert (bleu([], a), bleu(["z"], a)) == (0.0, 0.0)
    close, far = " ".join(a), "q r s t u v w"
    assert cluster_shares([close, " ".join(b), far, close]) == [0.75, 0.75, 0.25, 0.75]
    chain = map(" ".join, ["abcdefgh", "abcdefgx", "abcdeygx", "zbcdeygx"])  # two neighbours have a distance of 0.41
    assert cluster_shares([*chain]) == [0.5] * 4
    assert cluster_shares(["", "", "x y"]) == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert (cluster_shares([]), cluster_shares(["a"])) == ([], [1.0])


def test_valid_proposals_are_notes_and_later_references():
    notes = Notes(max_chars=len(DOUBLE) + 20)
    play(world_of(num_proposals=4), "deduction", PROPOSAL, f"{DOUBLE}\ninput:  3", DOUBLE, *["6"] * 8, notes=notes)
    assert [*notes.written.values()] == [PROPOSAL]  # equal ones count once, invalid ones do not
    play(world_of(), "deduction", f"{DOUBLE}\ninput: '{'a' * 40}'", *["'a'"] * 4, notes=notes)
    assert len(notes.written) == 1  # the second one is too long
    (title,) = notes.written
    world = world_of(num_references=60, num_prompts=2)
    environment, task = world.environment(world.tasks("train")[0]), in_kind(world, "deduction")
    earlier = Notes({title: PROPOSAL, "proposal/induction/0": "another kind"})
    pool = {one.replace(PROPOSAL, "past") for one in references(environment.prompt_of(task, earlier))}
    seeds = {*references(task.prompt)}
    assert len(seeds) == 60
    assert len(pool & seeds) == 59 + ("past" not in pool)
    assert environment.prompt_of(task, Notes()) == task.prompt


def test_references_are_drawn_from_seeds_and_past_proposals_alike():
    world = world_of(num_prompts=200)
    environment = world.environment(world.tasks("train")[0])
    past = {f"proposal/abduction/{i}": f"def f(x):\n    return {i}\ninput: 0" for i in range(40)}
    tasks = [task for task in world.tasks("train") if task.tags["kind"] == "abduction"]
    drawn = [references(environment.prompt_of(task, Notes(past))) for task in tasks]
    assert {len({*one}) for one in drawn} == {6}
    share = sum(one in past.values() for own in drawn for one in own) / (6 * len(tasks))
    assert share == pytest.approx(0.4, abs=4 * (0.24 / 1200) ** 0.5)
    assert environment.prompt_of(tasks[0], Notes(past)) == environment.prompt_of(tasks[0], Notes(past))


def in_kind(world, kind):
    return next(task for task in world.tasks("train") if task.tags["kind"] == kind)


def references(prompt):
    return prompt[-1]["content"].partition("differ from:\n\n")[2].split("\n\n")


def test_hierarchical_compares_solvers_within_each_proposal():
    world = world_of(num_proposals=2, num_solvers=2)
    check_roles(PRESETS["hierarchical"], world)
    task = next(task for task in world.tasks("train") if task.tags["kind"] == "deduction")
    group = [
        Episode(RolloutKey(1, task.id, i), task, play(world_of(num_proposals=2, num_solvers=2), "deduction", *r))
        for i, r in enumerate([(PROPOSAL, PROPOSAL, "6", "6", "6", "7"), (PROPOSAL, "", "6", "6")])
    ]
    values = {}
    for sample in assign_credit([group], PRESETS["hierarchical"]):
        for path in sample.episode.trajectory.paths():
            (name,) = path.trajectory.agent_rewards
            values[name, sample.episode.key.sample] = sample.advantages[path.places[0]]
    proposers = torch.tensor([values[f"proposer:deduction/{i}", j] for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))])
    expected = torch.tensor([0.0, 0.5, 0.0, -1.0])
    assert torch.allclose(proposers, (expected - expected.mean()) / (expected.std() + 1e-6), atol=1e-5)
    assert values["solver:deduction/0/0", 0] == 0.0
    assert values["solver:deduction/1/0", 0] == -values["solver:deduction/1/1", 0] > 0


def test_held_out_problems_are_solved_by_their_answers_and_never_shown():
    world = world_of(num_programs=5, num_prompts=20)
    assert [len(world.tasks(split)) for split in world.splits] == [60, 15, 15]
    held_out = {task.truth.program for split in ("validation", "test") for task in world.tasks(split)}
    assert len(held_out) == 10
    shown = [task.prompt[-1]["content"] for task in world.tasks("train")]
    shown += [message["content"] for one in islice(world.demonstrations(0), 300) for message in one.messages]
    assert not [text for text in shown for program in held_out if f"{program}\n" in f"{text}\n"]
    for kind in ("abduction", "deduction", "induction"):
        truth = next(task.truth for task in world.tasks("test") if task.tags["kind"] == kind)
        found = play(world_of(num_programs=5), kind, truth.answer, split="test")
        assert (found.agent_rewards, found.rewards["solved"]) == ({f"solver:{kind}": 1.0}, 1.0)


def test_demonstrations_are_valid_proposals_and_correct_answers_of_all_kinds():
    world = world_of()
    environment = world.environment(world.tasks("train")[0])
    shown = list(islice(world.demonstrations(1), 120))
    assert shown == list(islice(world_of().demonstrations(1), 120))

    async def checked():
        kinds = []
        async with closing(world):
            for one in shown:
                asked, reply = (message["content"] for message in one.messages)
                if asked.startswith("Write"):
                    kind = asked.partition("task of ")[2].partition(".")[0]
                    problem = await environment.validate(kind, reply)
                    assert isinstance(problem, Problem)
                    assert (await environment.grade(problem, problem.answer)).reward == 1.0
                    kinds.append(kind)
        return kinds

    assert set(asyncio.run(checked())) == {"abduction", "deduction", "induction"}


def test_roles_are_those_of_the_chosen_kinds():
    assert world_of(kinds=["induction"]).roles == ["proposer:induction", "solver:induction"]
    with pytest.raises(ConfigError, match="kinds"):
        world_of(kinds=["guess"])
