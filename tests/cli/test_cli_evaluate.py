"""`ludus eval`: reproduces the numbers of training bit for bit; models, endpoints and baselines; overwrites nothing."""

import fcntl
import gzip
import json
import shutil
import subprocess
import sys
import time
import warnings
from threading import Thread

import pytest
import torch

from chat_server import Reply, error, say, serving
from ludus.cli.evaluate import eval as eval_command
from ludus.config import load_config
from ludus.engines.models.loading import load_model
from ludus.evaluation.evaluate import load_evaluation
from ludus.evaluation.stats import pass_at_k, pass_hat_k
from ludus.rollouts.rollout_files import read_rollouts
from ludus.types import ToolStatus
from tiny_run import copy_run, ludus, make_recipe, refused
from tiny_world import PRICES


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_repeated_evaluation_is_bit_identical_and_writes_no_files(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    before = contents(run / "evaluations")
    said = ludus("eval", "--run", run)
    assert said.code == 0, said
    assert "step-000002-test-greedy: reproduces the existing evaluation, bit for bit." in said.out
    assert "step-000002-test-t1: reproduces" in said.out
    assert contents(run / "evaluations") == before


@pytest.mark.parametrize("what", ["success", "rollouts"])
def test_non_reproduced_evaluation_exits_with_1_and_keeps_both_results(tiny_run, tmp_path, what):
    run = copy_run(tiny_run, tmp_path)
    name = "step-000002-test-greedy"
    path = run / "evaluations" / f"{name}.json"
    if what == "success":
        data = json.loads(path.read_text())
        data["tasks"][3]["successes"] = 1 - data["tasks"][3]["successes"]
        path.write_text(json.dumps(data))
    else:
        rollouts = run / "evaluations" / f"{name}.jsonl.gz"
        lines = gzip.decompress(rollouts.read_bytes())
        rollouts.write_bytes(gzip.compress(lines.replace(b'"reward":', b'"reward":1', 1)))
    before = contents(run / "evaluations")
    said = ludus("eval", "--run", run, "--evaluation.temperatures", "[0.0]")
    assert said.code == 1
    assert f"{name}-2: does not reproduce {name}: " in said.out
    assert ("1 tasks differ, the first is test:" if what == "success" else "the rollouts differ") in said.out
    after = contents(run / "evaluations")
    assert {file: after[file] for file in before} == before
    assert set(after) - set(before) == {f"{name}-2.json", f"{name}-2.jsonl.gz"}


def test_other_conditions_are_another_evaluation(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    words = ("--evaluation.temperatures", "[1.0]", "--rollout.top_p", "0.5")
    said = ludus("eval", "--run", run, *words)
    assert said.code == 0, said
    assert "step-000002-test-t1-2: saved." in said.out
    plan = load_evaluation(run / "evaluations" / "step-000002-test-t1-2.json").plan
    assert plan.conditions is not None
    assert (plan.conditions.top_p, plan.conditions.max_turns, plan.temperature) == (0.5, 3, 1.0)
    assert "step-000002-test-t1-2: reproduces" in ludus("eval", "--run", run, *words).out


def test_split_smaller_than_requested_task_count_is_evaluated_entirely(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    said = ludus("eval", "--run", run, "--evaluation.tasks", "9", "--evaluation.temperatures", "[0.0]")
    assert said.code == 0, said
    told = " ".join(said.out.split())
    assert "has 8 tasks, fewer than evaluation.tasks = 9: all are evaluated." in told
    assert "detectable difference is 70.0 points" in told
    found = [load_evaluation(path) for path in run.glob("evaluations/step-000002-test-greedy*.json")]
    assert 8 in {len(one.successes) for one in found}


def test_several_attempts_give_pass_at_k(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    words = ("--evaluation.samples", "3", "--evaluation.tasks", "5", "--evaluation.temperatures", "[0.7]")
    files = ("--json", tmp_path / "all.json", "--markdown", tmp_path / "all.md")
    said = ludus("eval", "--run", run, *words, *files, "--price-in", "1", "--price-out", "2")
    assert said.code == 0, said
    result = load_evaluation(run / "evaluations" / "step-000002-test-t0.7-x3.json")
    assert len(result.successes) == 5
    for k in (1, 2, 3):
        at = sum(pass_at_k(3, c, k) for c in result.successes) / 5
        hat = sum(pass_hat_k(3, c, k) for c in result.successes) / 5
        row = [cell.strip() for line in said.out.splitlines() if f"│ {k} │" in line for cell in line.split("│")]
        assert [cell.split(" ")[0] for cell in row[-3:-1]] == [f"{at:.1%}", f"{hat:.1%}"]
        assert f"| {k} | {at:.1%} \\[" in (tmp_path / "all.md").read_text()
    records = list(read_rollouts(run / "evaluations" / "step-000002-test-t0.7-x3.jsonl.gz"))
    assert [(r.group, r.trajectory.sample) for r in records] == [
        (task_id, sample) for task_id in result.task_ids for sample in range(3)
    ]
    (data,) = json.loads((tmp_path / "all.json").read_text())
    cost, trajectories = data["cost"], [record.trajectory for record in records]
    assert cost["total"]["completion_tokens"] == sum(t.num_action_tokens for t in trajectories)
    assert cost["total"]["turns"] == sum(t.num_turns for t in trajectories)
    assert cost["total"]["seconds"] > 0
    assert cost["per_task"]["money"] == cost["total"]["money"] / 5 > 0
    assert set(data["by_tag"]["family"]) == {"fruit", "tool"}


@pytest.mark.slow
def test_model_evaluation_writes_results_to_the_output_folder(tiny_run, tmp_path):
    model = tiny_run / "checkpoints" / "step-000002"
    words = ("eval", make_recipe(tmp_path), "--model", model, "--out", tmp_path / "out")
    said = ludus(*words)
    assert said.code == 0, said
    ours = load_evaluation(tmp_path / "out" / "evaluations" / "step-000000-test-greedy.json")
    theirs = load_evaluation(tiny_run / "evaluations" / "step-000002-test-greedy.json")
    assert ours.successes == theirs.successes
    assert ours.plan.policy == str(model)
    assert load_config(tmp_path / "out" / "config.toml").model.path == str(model)
    assert "reproduces" in ludus(*words).out


def test_results_without_a_folder_go_under_runs(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--evaluation.tasks", "2", "--evaluation.temperatures", "[0.0]")
    model = tiny_run / "checkpoints" / "step-000002"
    for number in (1, 2):
        assert ludus("eval", make_recipe(tmp_path), "--model", model, *words).code == 0
        assert (tmp_path / f"runs/eval-{number}/evaluations/step-000000-test-greedy.json").is_file()


@pytest.mark.parametrize("counts", [True, False])
def test_an_endpoint_plays_the_same_tasks(tmp_path, counts):
    (tmp_path / "key").write_text("secret\n")

    def play(body):
        asked = body["messages"][1]["content"].split()[2]
        if body["messages"][-1]["role"] == "user":
            function = {"name": "look", "arguments": json.dumps({"item": asked})}
            reply = say(None, {"type": "function", "id": "a", "function": function})
        else:
            reply = say("0" if asked == "fork" else body["messages"][-1]["content"].split()[-1])
        return Reply({**reply, "usage": reply["usage"] if counts else None})

    with serving(play) as server:
        words = ("--endpoint", server.url, "--model", "m", "--api-key-file", tmp_path / "key")
        said = ludus("eval", make_recipe(tmp_path), *words, "--out", tmp_path / "out")
        assert said.code == 0, said
        assert all(headers["Authorization"] == "Bearer secret" for headers in server.headers)
    greedy = load_evaluation(tmp_path / "out" / "evaluations" / "step-000000-test-greedy.json")
    wrong = [task_id for task_id, count in zip(greedy.task_ids, greedy.successes, strict=True) if not count]
    assert wrong == ["test:fork"]
    assert greedy.plan.policy == f"m at {server.url}"
    assert "87.5%" in said.out
    data = json.loads((tmp_path / "out" / "evaluations" / "step-000000-test-greedy.json").read_text())
    assert data["cost"]["per_task"]["turns"] == 2
    assert bool(data["cost"]["total"]["prompt_tokens"]) == counts
    assert (data["cost"]["per_task"]["completion_tokens"] is None) == (not counts)
    assert set(PRICES) >= {task_id.removeprefix("test:") for task_id in greedy.task_ids}
    assert "secret" not in "".join(path.read_text() for path in (tmp_path / "out").rglob("*.*ml"))


@pytest.mark.parametrize(("baseline", "opening"), [("none", "from memory"), ("once", "from the passages")])
def test_baselines_of_the_search_world_have_no_tool(tiny_run, tmp_path, baseline, opening):
    model = tiny_run / "checkpoints" / "step-000002"
    words = ("--evaluation.tasks", "2", "--evaluation.splits", '["test"]', "--evaluation.temperatures", "[0.0]")
    scale = ("--rollout.max_tokens_per_turn", "8", "--rollout.max_seq_len", "500", "--baseline", baseline)
    said = ludus("eval", "search", "--model", model, "--out", tmp_path / "out", *words, *scale)
    assert said.code == 0, said
    name = f"step-000000-test-greedy-baseline-{baseline}"
    for record in read_rollouts(tmp_path / "out" / "evaluations" / f"{name}.jsonl.gz"):
        system, user = record.trajectory.messages[:2]
        assert opening in system["content"]
        assert ("\n" in user["content"]) == (baseline == "once")
        assert not any(outcome.status is ToolStatus.OK for outcome in record.trajectory.outcomes)
    plan = load_evaluation(tmp_path / "out" / "evaluations" / f"{name}.json").plan
    assert json.loads(plan.conditions.world_settings) == {"access": baseline}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "Name a recipe, or a run"),
        (("--run", "nope"), "nope does not exist"),
        (("--run", "RUN", "--model", "m"), "--run takes world and weights from the run"),
        (("search", "--run", "RUN"), "--run takes world and weights from the run"),
        (("TINY", "--endpoint", "http://h"), "--endpoint needs --model"),
        (("TINY", "--api-key-file", "k"), "--api-key-file needs --endpoint"),
        (("TINY", "--price-in", "2"), "--price-in and --price-out need each other"),
        (("TINY", "--price-in", "2", "--price-out", "-1"), "The price -1.0 is not valid"),
        (("TINY", "--prices", "k", "--price-in", "2"), "--prices excludes"),
        (("TINY", "--prices", "k"), "The prices cannot be read from k"),
        (("TINY", "--endpoint", "http://h", "--model", "m", "--api-key-file", "k"), "k cannot be read: "),
        (("TINY", "--endpoint", "ftp://h", "--model", "m"), "is not an HTTP URL"),
        (("TINY", "--endpoint", "http://h", "--model", "m", "--env.rendering", "tags"), "env.rendering"),
        (("TINY", "--model", "./nope"), "./nope"),
        (("TINY", "--model", "RUN"), "is a run folder, not a model. Use its newest checkpoint: "),
        (("TINY", "--model", "RUN"), "/checkpoints/step-000002\n"),
        (("--run", "RUN", "--baseline", "none"), "has tools despite"),
        (("--run", "RUN", "--evaluation.splits", '["tset"]'), "no split 'tset'"),
        (("--run", "RUN", "--evaluation.splits", "[]"), "nothing to evaluate"),
        (("--run", "RUN", "--out", "full"), "exists and is not empty"),
    ],
)
def test_bad_input_is_one_sentence(words, expected, tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = make_recipe(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    stand_for = {"RUN": tiny_run, "TINY": recipe}
    before = contents(tiny_run / "evaluations")
    assert expected in refused("eval", *(stand_for.get(word, word) for word in words))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "tiny.toml"]
    assert contents(tiny_run / "evaluations") == before


def test_eval_rejects_a_run_without_checkpoint(tiny_run, tmp_path):
    (tmp_path / "config.toml").write_bytes((tiny_run / "config.toml").read_bytes())
    assert "has no checkpoint yet" in refused("eval", "--run", tmp_path)


def test_an_unreachable_endpoint_is_reported_before_the_first_episode(tmp_path):
    words = ("--endpoint", "http://127.0.0.1:1", "--model", "m")
    assert "http://127.0.0.1:1 is unreachable" in refused("eval", make_recipe(tmp_path), *words, code=3)


def test_an_endpoint_that_fails_ends_with_the_code_of_engines(tmp_path):
    with serving(lambda body: Reply(error("out of order"), 400)) as server:
        words = ("--endpoint", server.url, "--model", "m", "--rollout.retries", "0")
        said = refused("eval", make_recipe(tmp_path), *words, "--out", tmp_path / "out", code=3)
    assert "out of order" in said
    assert server.url in said
    assert said.endswith(f"\nNo result was saved; the folder {tmp_path / 'out'} was removed.\n")
    assert not (tmp_path / "out").exists()


def test_failed_evaluation_keeps_existing_files_in_output_folder(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    with serving(lambda body: Reply(error("out of order"), 400)) as server:
        words = ("--endpoint", server.url, "--model", "m", "--rollout.retries", "0")
        said = refused("eval", make_recipe(tmp_path), *words, "--out", run, code=3)
    assert "is removed" not in said
    assert (run / "metrics.jsonl").is_file()


@pytest.mark.slow
def test_a_run_with_adapters_is_reproduced_from_base_and_adapters(tiny_run, tmp_path):
    pytest.importorskip("peft")
    model = tiny_run / "checkpoints" / "step-000002"
    small = ("--training.steps", "1", "--training.learning_rate", "0.05", "--evaluation.temperatures", "[1.0]")
    words = ("--model", model, "--model.lora.rank", "4", "--run.dir", tmp_path / "run", *small)
    assert ludus("train", make_recipe(tmp_path), *words).code == 0
    assert not (tmp_path / "run" / "checkpoints" / "step-000001" / "model.safetensors").exists()
    said = ludus("eval", "--run", tmp_path / "run")
    assert said.code == 0, said
    assert "step-000001-test-t1: reproduces the existing evaluation, bit for bit." in said.out


@pytest.mark.slow
def test_endpoint_evaluation_does_not_import_torch(tmp_path):
    program = (
        "import sys; from ludus.cli.main import main; code = main(sys.argv[1:]); print('torch' in sys.modules, code)"
    )
    with serving(lambda body: Reply(say("3"))) as server:
        where = ["--endpoint", server.url, "--model", "m", "--out", tmp_path / "out"]
        words = ["eval", make_recipe(tmp_path), *where, "--evaluation.tasks", "2"]
        command = [sys.executable, "-c", program, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False 0", done


def test_first_output_line_describes_the_evaluation(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    words = ("--evaluation.tasks", "5", "--evaluation.splits", '["test"]')
    lines = ludus("eval", "--run", run, *words).out.splitlines()
    assert any(line.startswith("detectable: the smallest difference to a run over other tasks") for line in lines)
    assert lines[0] == (
        f"Evaluating step 2 of {run} in the world prices: split test; 5 tasks per split, 1 attempt per task; "
        "greedy and temperature 1."
    )


def test_another_number_of_tasks_is_in_the_name(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    before = contents(run / "evaluations")
    words = ("--evaluation.tasks", "5", "--evaluation.temperatures", "[0.0]")
    assert "step-000002-test-greedy-5-tasks: saved." in ludus("eval", "--run", run, *words).out
    assert "step-000002-test-greedy-5-tasks: reproduces" in ludus("eval", "--run", run, *words).out
    after = contents(run / "evaluations")
    assert {name: after[name] for name in before} == before
    assert len(load_evaluation(run / "evaluations" / "step-000002-test-greedy-5-tasks.json").task_ids) == 5


def test_interval_of_one_task_with_several_attempts_is_0_to_100(tiny_run, tmp_path):
    words = ("--evaluation.tasks", "1", "--evaluation.samples", "2", "--evaluation.temperatures", "[0.0]")
    said = ludus("eval", "--run", copy_run(tiny_run, tmp_path), *words)
    assert said.code == 0, said
    assert "[0.0%, 100.0%]" in said.out


@pytest.mark.slow
def test_a_checkpoint_of_adapters_is_base_and_adapters(tiny_run, tmp_path):
    pytest.importorskip("peft")
    recipe, base = make_recipe(tmp_path), tiny_run / "checkpoints" / "step-000002"
    one = ("--training.steps", "1", "--training.learning_rate", "0.05", "--evaluation.temperatures", "[0.0]")
    words = ("--model", base, "--model.lora.rank", "4", "--run.dir", tmp_path / "run", *one)
    with warnings.catch_warnings(record=True) as caught:
        assert ludus("train", recipe, *words).code == 0
    assert [str(w.message) for w in caught if w.category is FutureWarning] == []
    adapters = tmp_path / "run" / "checkpoints" / "step-000001"
    model, untrained = load_model(str(adapters), device="cpu"), load_model(str(base), device="cpu")
    assert model.state_dict().keys() == untrained.state_dict().keys()
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, untrained.get_parameter(n))]
    assert moved
    assert all("proj" in name for name in moved)
    again = ("--model", adapters, "--run.dir", tmp_path / "again", *one)
    assert ludus("train", recipe, *again).code == 0
    shelf = "evaluations/step-00000{}-test-greedy.json"
    before = load_evaluation(tmp_path / "again" / shelf.format(0))
    assert before.successes == load_evaluation(tmp_path / "run" / shelf.format(1)).successes
    checked = ludus("doctor", recipe, "--model", tmp_path / "run", "--tasks", "2", "--attempts", "2", "--json")
    assert f"--model {adapters}" in json.loads(checked.out)["command"]
    named = adapters / "adapter_config.json"
    named.write_text(named.read_text().replace(str(base), "/no/base"))
    said = refused("train", recipe, "--model", adapters, "--run.dir", tmp_path / "third")
    assert "holds only adapters" in said
    assert "'/no/base'" in said


def test_each_new_checkpoint_is_evaluated_until_the_run_ends(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(eval_command, "POLL_S", 0.05)
    run = copy_run(tiny_run, tmp_path)
    shutil.rmtree(run / "evaluations")
    later = (run / "checkpoints" / "step-000002").rename(tmp_path / "later")

    def train(lock):
        deadline = time.monotonic() + 60
        while not list((run / "evaluations").glob("step-000001-test-greedy*.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        later.rename(run / "checkpoints" / "step-000002")
        lock.close()

    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        trainer = Thread(target=train, args=(lock,))
        trainer.start()
        said = ludus("eval", "--run", run, "--follow", "--evaluation.tasks", 2, "--evaluation.temperatures", "[0.0]")
        trainer.join()
    assert said.code == 0, said
    steps = [step for step in (1, 2) if list((run / "evaluations").glob(f"step-{step:06d}-test-greedy*.json"))]
    assert steps == [1, 2]


def test_a_run_without_a_checkpoint_cannot_be_followed(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    shutil.rmtree(run / "checkpoints")
    assert "ended without a checkpoint" in refused("eval", "--run", run, "--follow")
    assert "--follow needs a run" in refused("eval", "search", "--model", "nowhere", "--follow")


@pytest.mark.slow
def test_search_is_compared_with_attempts_of_equal_tokens(tmp_path):
    folder, out = tmp_path / "found", tmp_path / "out.json"
    words = ("--evaluation.samples", 4, "--evaluation.tasks", 8, "--evaluation.splits", '["test"]')
    words += ("--evaluation.search.method", "mcts", "--evaluation.search.alpha", "1", "--run.threads", 1)
    said = ludus("eval", "guess", *words, "--run.dir", folder, "--json", out)
    assert said.code == 0, said
    assert "mcts by majority" in said.out
    report = json.loads(out.read_text())[-1]
    names = [row["method"].split(" by")[0] for row in report["rows"]]
    assert names == ["one attempt (pass@1)", "any of 4 (pass@4)", "best of 4", "mcts"]
    (rollouts,) = (folder / "probes").glob("search-mcts-majority-*.jsonl.gz")
    selected = list(read_rollouts(rollouts))
    assert len(selected) == 8
    assert report["rows"][-1]["success"]["value"] == sum(one.trajectory.rewards["found"] for one in selected) / 8
    refused("eval", "guess", "--evaluation.search.method", "mcts", "--run.dir", folder)  # a single attempt per task
