"""`ludus doctor`: its report here, for missing, old or unreachable parts, and before training."""

import argparse
import asyncio
import json
import resource
import shlex
import shutil
import subprocess
import sys
from importlib import metadata

import pytest

from chat_server import Reply, say, serving
from ludus.cli.arguments import split_settings
from ludus.cli.commands.doctor import (
    check_libraries,
    check_server,
    check_ulimits,
    examine_sandbox,
    locked_versions,
    measure_embedded,
)
from ludus.cli.evaluate.readiness import checked_world, learner_cost, with_examples
from ludus.config.load import load_config
from ludus.envs import registry
from ludus.errors import WorldError
from ludus.simulator.costs import EngineCost, LearnerCost
from tests.simulator.test_simulator import write_run
from tiny_run import WORLD, cold_start, ludus, make_recipe, refused


def test_a_healthy_machine_has_no_fault_and_a_model_that_works():
    said = ludus("doctor")
    assert said.code == 0, said.out
    assert "No faults: ready to train." in said.out
    assert "the shipped model: engine and learner agree to" in said.out
    assert "sandbox: a program (Python 3" in said.out


def test_a_machine_without_sandbox_is_told_what_does_not_work(monkeypatch):
    async def fail(*_, **__):
        raise WorldError("bwrap failed.", "Start the container with the option.")

    monkeypatch.setattr(registry, "try_sandbox", fail)
    finding = examine_sandbox()
    assert finding.state == "note"
    assert "environments that run programs do not work here: bwrap failed. Start the container" in finding.text


def test_what_the_tests_pass_with_is_what_is_installed_here():
    assert metadata.version("transformers") == locked_versions()["transformers"]
    assert locked_versions()["torch"] == "2.13.0"


@pytest.mark.parametrize(
    ("requirement", "tested", "state", "words"),
    [
        ("no-such-package>=1.0", {}, "fault", "pip install 'no-such-package>=1.0'"),
        ("numpy>=1000.1", {}, "fault", "older than 1000.1"),
        ("numpy>=1.0", {"numpy": "1.0.0"}, "note", "the tests pass with 1.0.0"),
        ("numpy>=1.0", {"numpy": metadata.version("numpy")}, "fine", "the versions"),
        ("no-such-package>=1.0; extra == 'lora'", {}, "fine", "the versions"),
    ],
)
def test_libraries(requirement, tested, state, words):
    (finding,) = check_libraries([requirement], tested)
    assert finding.state == state
    assert words in finding.text


def test_a_server_that_does_not_answer_is_a_fault(tmp_path):
    said = ludus("doctor", "--engine", "http://127.0.0.1:9")
    assert said.code == 1
    assert "fault  engine http://127.0.0.1:9:" in said.out


def test_a_server_reports_its_models_speed_and_what_rl_needs(served):
    found = list(check_server(served.url + "/v1", "vllm"))
    assert [one.state for one in found] == ["fine"] * 3, found
    assert "serves policy; context 768 tokens" in found[0].text
    assert "tokens/s in one request of 64 tokens" in found[1].text
    assert "token ids and log-probabilities" in found[2].text


def test_all_unreachable_engines_are_listed():
    said = ludus("doctor", "--engine", "http://127.0.0.1:9", "--engine", "http://127.0.0.1:11", "--json")
    assert said.code == 1
    faults = [one["what"] for one in json.loads(said.out) if one["state"] == "fault"]
    assert faults == ["engine http://127.0.0.1:9", "engine http://127.0.0.1:11"]


def test_low_limits_are_notes_with_the_reason(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    files, processes, locked = check_ulimits(has_gpu=True)
    assert (files.state, processes.state, locked.state) == ("note", "note", "note")
    assert "open file; raise it with ulimit -n" in files.text
    assert "pin host memory" in locked.text
    assert len(list(check_ulimits(has_gpu=False))) == 2


@pytest.mark.slow
def test_the_embedded_engine_has_a_speed():
    assert "tokens/s with 1 request" in asyncio.run(measure_embedded()).text


@pytest.fixture(scope="module")
def before_training(tiny_run, tmp_path_factory):
    """The JSON report of the tiny cold start, with examples in the prompt, and the words of the command."""
    recipe = make_recipe(tmp_path_factory.mktemp("doctor"))
    words = ["doctor", recipe, "--model", cold_start(tiny_run), "--tasks", "6", "--attempts", "4"]
    said = ludus(*words, "--few-shot", "1", "--price-per-hour", "2", "--json")
    return json.loads(said.out), words, said.code


def test_the_report_before_training_is_complete_and_sets_the_exit_code(before_training):
    report, _, code = before_training
    assert sum(report["pass_rates"].values()) == len(report["tasks"]) == 6
    assert report["success"] == pytest.approx(sum(report["tasks"].values()) / 24)
    assert [one["group_size"] for one in report["usable_groups"]] == [2, 4, 8, 16, 32]
    assert report["lengths"]["prompt"]["p50"] > 0
    assert report["tools"]["calls_per_episode"] > 0
    assert report["step"]["episodes"] == 9
    assert report["step"]["sampling_s"] == pytest.approx(report["speed"]["seconds"] * 9 / report["speed"]["episodes"])
    assert code == (report["verdict"]["answer"] != "RL can start")
    ways = {one["name"]: one for one in report["alternatives"]}
    assert ways["prompt as is"]["cost"] == 0
    assert (report["step"]["learner_s"], ways["RL"]["hours"]) == (None, None)
    assert (ways["few-shot prompt"]["gain_low"] is None) == (report["success"] == 0)


def test_the_suggested_command_is_a_valid_configuration(before_training):
    report, words, _ = before_training
    program, command, *rest = shlex.split(report["command"])
    assert (program, command, rest[0]) == ("ludus", "train", str(words[1]))
    arguments, settings = split_settings(rest)
    assert arguments[1:] == ["--model", str(words[3])]
    config = load_config(rest[0], settings)
    assert config.algorithm.group_size >= 4
    assert config.training.prompts_per_step * config.algorithm.group_size == pytest.approx(9, abs=4)


def test_the_report_is_printed_for_a_world_file_and_a_run(tiny_run):
    said = ludus("doctor", WORLD, "--model", tiny_run, "--tasks", "4", "--attempts", "2", "--rollout.concurrency", "8")
    for words in ("Success: ", "group size", "prompt tokens", "Verdict: ", "Is RL worth it here?", "tiny_world.py"):
        assert words in said.out, said


def test_an_endpoint_is_sampled_with_the_model_that_it_serves(served):
    said = ludus("doctor", "guess", "--model", served.url + "/v1", "--tasks", "2", "--attempts", "2", "--json")
    report = json.loads(said.out)
    assert report["lengths"]["prompt"] is None
    assert "--model must name the weights of policy" in report["command_note"]


def test_a_server_without_token_ids_can_only_be_evaluated(monkeypatch):
    from ludus.engines.remote import http_client

    real = http_client.get_once
    listed = b'{"data": [{"id": "m"}]}'
    monkeypatch.setattr(
        http_client,
        "get_once",
        lambda url, path, reply: reply.model_validate_json(listed) if path == "/v1/models" else real(url, path, reply),
    )
    with serving(lambda body: Reply(say("1 2 3"))) as server:
        found = list(check_server(server.url, "vllm"))
    assert [one.state for one in found] == ["fine", "note", "fine"]
    assert "it can be evaluated, but RL needs them" in found[1].text


def test_all_tools_that_cannot_be_loaded_are_named():
    config = load_config("search", ["--env.tools", '["/no/a.py:one", "/no/b.py:two"]'])
    with pytest.raises(WorldError, match=r"2 tools do not work.*a\.py:one.*b\.py:two"):
        checked_world(config)


def test_the_learner_cost_is_fitted_to_a_run(tmp_path):
    run = write_run(tmp_path / "run", EngineCost(0.01, 0.0005), LearnerCost(0.5, 1e-4))
    (run.path / "checkpoints" / "step-1").mkdir(parents=True)
    known = learner_cost(argparse.Namespace(costs=run.path, model="x", endpoint=None))
    own = learner_cost(argparse.Namespace(costs=None, model=run.path / "checkpoints" / "step-1", endpoint=None))
    assert known.seconds(50_000) == own.seconds(50_000) == pytest.approx(5.5, rel=0.01)
    assert learner_cost(argparse.Namespace(costs=None, model=tmp_path / "x", endpoint=None)) is None


@pytest.mark.slow
def test_a_searched_prompt_is_compared_on_held_out_tasks(tiny_run):
    words = ("--tasks", "4", "--attempts", "2", "--rollout.concurrency", "8", "--optimise-prompt", "12", "--json")
    with serving(lambda body: Reply(say("```\nLook twice.\n```"))) as server:
        said = ludus("doctor", WORLD, "--model", tiny_run, *words, "--reflection", server.url, "proposer")
    report = json.loads(said.out)
    assert report["optimised_prompt"] in ("Look first.", "Look twice.")
    (row,) = [way for way in report["alternatives"] if way["name"] == "optimised prompt"]
    assert row["gain_low"] <= row["gain_high"]
    assert row["hours"] > 0
    assert {request["model"] for request in server.requests} == {"proposer"}
    asked = server.requests[0]["messages"][0]["content"]
    assert "Look first." in asked
    assert "The task was not solved. Rewards: " in asked
    assert "What does " in asked


def test_examples_follow_the_system_message():
    system, user, shown = ({"role": role, "content": role} for role in ("system", "user", "assistant"))
    assert with_examples((system, user), [[user, shown]]) == (system, user, shown, user)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("search",), "No model for the environment 'search'."),
        (("--model", "x"), "--model needs an environment."),
        (("--model", ""), "--model needs an environment."),
        (("search", "--model", ""), "The model folder '' does not exist."),
        (("nosuch", "--model", "x"), "Unknown environment 'nosuch'."),
        (("search", "--model", "x", "--attempts", "1"), "--attempts is 1."),
        (("search", "--model", "x", "--tasks", "1"), "--tasks is 1."),
        (("search", "--model", "x", "--few-shot", "-1"), "--optimise-prompt or --price-per-hour is negative."),
        (("search", "--model", "x", "--optimise-prompt", "9", "--tasks", "3"), "needs 4 tasks or more"),
        (("search", "--model", "x", "--reflection", "http://h", "m"), "--reflection needs --optimise-prompt."),
        (("guess", "--model", "/no/such"), "does not exist"),
        (("guess", "--model", "x", "--costs", "/no/run"), "/no/run does not exist"),
    ],
)
def test_bad_input_is_one_sentence(words, message):
    assert message in refused("doctor", *words)


def test_an_unreachable_endpoint_is_an_engine_error():
    assert "is unreachable" in refused("doctor", "search", "--model", "http://127.0.0.1:9/v1", code=3)


def test_runs_and_environments_are_distinguished(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run, "search")
    assert "is an environment and a run folder. Write ./search" in refused("doctor", "search")
    assert "is a run folder, whose check takes no --model" in refused("doctor", "./search", "--model", "x")
    shutil.rmtree("search/checkpoints")
    assert "has no checkpoint yet" in refused("doctor", "guess", "--model", "./search")


def test_the_check_of_the_machine_starts_without_numerical_libraries():
    code = "import sys, ludus.cli.commands.doctor; sys.exit(int('numpy' in sys.modules or 'scipy' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
