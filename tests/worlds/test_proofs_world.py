"""Proofs: the verifier of Metamath, the prover over it, and the tasks."""

import asyncio
import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.envs.tool_env import ToolLimits
from ludus.types import Action
from ludus.worlds.proofs.metamath import ProofError, read_database
from ludus.worlds.proofs.prover import Proof, logic, read_formula
from ludus.worlds.proofs.world import StepProver, draw_statement, make_proofs_world

# The example of the Metamath book: t = t in a fragment of arithmetic.
TERMS = """
$c 0 + = -> ( ) term wff |- $. $v t r s P Q $.
tt $f term t $. tr $f term r $. ts $f term s $. wp $f wff P $. wq $f wff Q $.
tze $a term 0 $. tpl $a term ( t + r ) $. weq $a wff t = r $. wim $a wff ( P -> Q ) $.
a1 $a |- ( t = r -> ( t = s -> r = s ) ) $. a2 $a |- ( t + 0 ) = t $.
${ min $e |- P $. maj $e |- ( P -> Q ) $. mp $a |- Q $. $}
th1 $p |- t = t $= tt tze tpl tt weq tt tt weq tt a2 tt tze tpl tt weq tt tze tpl tt weq tt tt weq wim tt a2
  tt tze tpl tt tt a1 mp mp $.
"""
DISJOINT = """
$c |- term A $. $v x y $. tx $f term x $. ty $f term y $.
${ $d x y $. ax $a |- A x y $. $}
"""


def world_of(**settings):
    return make_proofs_world({"num_tasks": 60, **settings}, ToolLimits())


def test_database_of_the_book_is_verified():
    assert list(read_database(TERMS).assertions)[-1] == "th1"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tt a1 mp mp $.", "tt a1 mp $.", "another statement"),
        ("tt a1 mp mp $.", "tt a1 mp mp mp $.", "too few"),
        ("th1 $p |- t = t", "th1 $p |- t = 0", "another statement"),
        ("tt tze tpl tt weq tt tt weq tt a2", "tt tze tpl tt weq tt tze weq tt a2", "is not the hypothesis"),
        ("tt a1 mp mp $.", "tt a1 mp th1 $.", "no such label"),
        ("tt tze tpl tt weq tt tt", "wp tze tpl tt weq tt tt", "another type"),
        ("tt a1 mp mp $.", "tt a1 mp ? $.", "no such label"),
        ("|- t = t $=", "|- t = u $=", "undeclared"),
        ("a1 mp mp $.", "a1 mp mp", "missing"),
    ],
)
def test_wrong_proofs_are_refused(old, new, message):
    assert old in TERMS
    with pytest.raises(ProofError, match=message):
        read_database(TERMS.replace(old, new))


@pytest.mark.parametrize(
    ("theorem", "is_valid"),
    [
        ("${ $d x y $. t $p |- A x y $= tx ty ax $. $}", True),
        ("t $p |- A x y $= tx ty ax $.", False),
        ("t $p |- A x x $= tx tx ax $.", False),
    ],
)
def test_variables_that_must_be_disjoint(theorem, is_valid):
    if is_valid:
        read_database(DISJOINT + theorem)
    else:
        with pytest.raises(ProofError, match="disjoint"):
            read_database(DISJOINT + theorem)


@pytest.mark.parametrize("text", ["${", "$}", "$( open", "$v a $. b $a a $.", "x y", "$a |- A $.", "$d"])
def test_broken_databases_are_refused(text):
    with pytest.raises(ProofError):
        read_database("$c |- A $. " + text)


def test_lemmas_are_proven_from_the_axioms():
    axioms = {label for label, one in logic().database.assertions.items() if one.proof is None}
    assert axioms == {"wi", "wa", "wn", "mp", "ax-1", "ax-2", "ax-3", "and-1", "and-2", "and-3"}
    with pytest.raises(ProofError):
        read_database(logic().text.replace("jca $p |- ( p -> ( q & r ) )", "jca $p |- ( p -> ( r & q ) )"))


@given(st.integers(0, 10_000), st.integers(1, 4))
def test_known_proofs_are_valid_and_altered_ones_are_not(seed, depth):
    statement = draw_statement(random.Random(seed), depth)
    if statement is None:
        return
    prover = StepProver(statement)
    while not prover.success:
        assert prover.step(prover.expert_action()).valid
    found = prover.proof.assertion()
    logic().database.verify(found)
    used = [one for one in found.hypotheses if not one.floating and one.label in found.proof]
    for altered in (
        replace(found, proof=found.proof[:-1]),
        replace(found, statement=("|-", "~", *found.statement[1:])),
        replace(found, hypotheses=tuple(one for one in found.hypotheses if one not in used[:1])),
    ):
        if altered != found:
            with pytest.raises(ProofError):
                logic().database.verify(altered)


@given(st.lists(st.sampled_from("( ) -> & ~ p q h1 mp syl , undo u"), max_size=12))
def test_no_text_raises_or_proves_a_false_goal(symbols):
    proof = Proof(logic().rules, {"h1": read_formula("( p -> q )")}, read_formula("q"))
    prover = StepProver(draw_statement(random.Random(5), 2))
    prover.proof = proof
    prover.step(" ".join(symbols))
    assert proof.goals
    assert not prover.success


def test_undo_returns_to_the_goals_before():
    prover = StepProver(draw_statement(random.Random(5), 3))
    seen = []
    while not prover.success:
        seen.append(prover.state_key())
        prover.step(prover.expert_action())
    assert len(seen) > 2
    for before in reversed(seen):
        prover.proof.undo()
        assert prover.state_key() == before


def episode(world, task, texts):
    async def run():
        environment = world.environment(task)
        await environment.start(task)
        return [await environment.step(Action({"role": "assistant", "content": text})) for text in texts]

    return asyncio.run(run())


def test_whole_proof_is_criticised_and_may_be_corrected():
    world = world_of(mode="whole", levels=[2])
    task = world.tasks("test")[0]
    right = world.expert(task).messages[-1]["content"]
    wrong = "\n".join([*right.split("\n")[:1], "ax-2", "h1"])
    results = episode(world, task, [wrong, right.split("\n")[0], right])
    assert results[0].messages[0]["content"].startswith("Line 2: Error: ax-2 does not prove the first goal.\ngoal ")
    assert results[1].messages[0]["content"].startswith("The proof is not complete.\ngoal ")
    assert [result.done for result in results] == [False, False, True]
    assert results[-1].reward == 1
    assert [result.done for result in episode(world, task, [wrong] * 4)] == [False, False, False, True]


def test_splits_share_no_statement_and_demonstrations_undo_flaws():
    world = world_of()
    prompts = {split: {task.prompt[-1]["content"] for task in world.tasks(split)} for split in world.splits}
    assert all(len(prompts[split]) == len(world.tasks(split)) > 0 for split in world.splits)
    assert not prompts["train"] & (prompts["test"] | prompts["validation"] | prompts["composition"])
    shown = list(itertools.islice(world.demonstrations(0), 30))
    undone = [m for one in shown for m in one.messages if m["content"] == "undo"]
    assert undone
    assert all(m.get("train", True) for m in undone)
    assert any(not m.get("train", True) for one in shown for m in one.messages)
