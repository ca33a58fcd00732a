"""Judges in the embedded engine, and whole runs with a judge."""

import asyncio
import json

import pytest

from chat_server import Reply, say, serving
from ludus.chat.render import TemplateRenderer
from ludus.cli.main import main
from ludus.config.load import load_config
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.models.loading import load_model, load_tokenizer
from ludus.judges.client import JUDGE_FILE, EngineJudge, JudgeClient
from ludus.judges.grading import Grader
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.training.collection.rewards.judging import GroupJudge
from ludus.training.rl.build import train
from ludus.training.run.preflight import model_path
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from small_runs import SMALLEST, InterruptingReporter, RecordingReporter, RunInterrupted, config, lasting_files
from tests.judges.judge_parts import episode, settings, world


@pytest.mark.slow
@pytest.mark.parametrize("structured", [True, False])
def test_embedded_judge_replies_within_the_schema_if_decoding_is_guided(structured):
    path = model_path(load_config("search"))
    tokenizer = load_tokenizer(path)
    engine = LocalEngine(load_model(path), tokenizer, EngineSettings(1024, 4, 8192, threads=1))
    limits = {"structured": structured, "retries": 0, "deadline_s": 120.0, "timeout_s": 120.0, "max_tokens": 250}
    given = settings(url=None, kind="pairwise", client=limits)
    client = JudgeClient([EngineJudge("m", engine, TemplateRenderer(tokenizer))], given.client)

    async def run():
        judge = GroupJudge(Grader(given, client, world()))
        (group,) = await judge.add_parts(1, [[episode("7 <|im_end|>"), episode("no")]])
        metrics = judge.metrics(1)
        await judge.close()
        return [one.trajectory.rewards for one in group], metrics

    found, metrics = asyncio.run(run())
    assert metrics["judge/requests"] == 2
    assert metrics["judge/prompt_tokens"] > metrics["judge/completion_tokens"] > 0
    assert metrics["judge/errors"] == metrics["judge/late"] == 0
    if structured:
        assert metrics["judge/invalid"] == 0
        assert found[0]["judge"] == 1 - found[1]["judge"]
        assert found[0]["judge_default"] == 0
    else:
        assert metrics["judge/invalid"] == 2
        assert [one["judge_default"] for one in found] == [1, 1]


def run_with(folder, judge, reporter=None):
    given = config(
        folder,
        **SMALLEST,
        rollout__max_seq_len="1024",
        **{f"rewards__judge__{name}": value for name, value in judge.items()},
    )
    new = not folder.exists()
    with lock_run(new_run(given, "search", "rl") if new else RunFolder(folder)):
        train(open_session(given), RunFolder(folder), reporter or RecordingReporter())


def check_resume(folder, judge):
    run_with(folder / "whole", judge)
    with pytest.raises(RunInterrupted):
        run_with(folder / "parts", judge, InterruptingReporter(at=2))
    run_with(folder / "parts", judge)
    whole, parts = lasting_files(folder / "whole"), lasting_files(folder / "parts")
    assert whole.keys() == parts.keys()
    assert [name for name in whole if whole[name] != parts[name]] == []
    assert (folder / "whole" / JUDGE_FILE).stat().st_size > 0


@pytest.mark.slow
def test_interrupted_run_with_a_served_judge_resumes_bit_for_bit(tmp_path):
    def script(body):
        return Reply(say(json.dumps({"score": sum(map(ord, body["messages"][1]["content"])) % 11})))

    with serving(script) as server:
        judge = {"models": '["m"]', "url": server.url, "weight": "0.3"}
        check_resume(tmp_path, judge)
        records = list(read_rollouts(rollouts_path(tmp_path / "whole", 2)))
        for one in (record.trajectory for record in records):
            assert one.reward == pytest.approx(one.rewards["exact_match"] + 0.3 * one.rewards["judge"], abs=0.2)
        words = ["rewards", "judge", str(tmp_path / "whole"), "--out", str(tmp_path / "c.json"), "--texts", "4"]
        assert main([*words, "--rewards.judge.models", '["m"]', "--rewards.judge.url", server.url]) == 0
        assert json.loads((tmp_path / "c.json").read_text())["num"] == 4
    assert main(["rewards", "replay", str(tmp_path / "whole")]) == 0  # with the recorded values, without the server
    assert main(["rewards", "replay", str(tmp_path / "whole"), "--rewards.judge.scale", "5"]) == 2


@pytest.mark.slow
def test_interrupted_run_whose_policy_judges_itself_resumes_bit_for_bit(tmp_path):
    limits = {"client__max_tokens": "200", "client__retries": "0"}
    check_resume(tmp_path, {"preset": "k2_self_critique", "rubrics": '["prescriptive"]', **limits})
    metrics = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["judge/completion_tokens"] > 0 for row in metrics)
    assert all(row["judge/errors"] == 0 for row in metrics)
