"""`ludus report`: the page, its summary, hostile text, several runs, and input that it rejects."""

import base64
import hashlib
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ludus.report.svg import downsample, histogram, ticks
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path, write_rollouts
from tiny_run import copy_run, ludus, refused

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'><style>*{}</style><!--"


class Tags(HTMLParser):
    """Counts the tags of a page, and collects its attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs


@pytest.fixture(scope="module")
def page(tiny_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "page.html"
    said = ludus("report", tiny_run, "--output", path)
    assert said.code == 0, said
    return path.read_text()


def test_the_page_has_the_parts_of_the_run(page):
    for title in ("Runs", "Findings", "Evaluations", "Curves", "Distributions", "Stop reasons", "Reward parts"):
        assert f"<h2>{title}" in page
    assert "2 of 2" in page
    assert "finished" in page
    assert "<figcaption>reward</figcaption>" in page
    assert "held-out success, validation, greedy" in page


def test_the_page_loads_nothing_and_runs_only_its_own_script(page):
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:" in page
    assert {"link", "img", "iframe", "object"} & set(Tags(page).tags) == set()
    assert not [name for name, _ in Tags(page).attributes if name in ("src", "href") or name.startswith("on")]


def test_text_of_models_and_tools_is_escaped(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    path = rollouts_path(run, 2)
    records = list(read_rollouts(path))
    hostile = [
        replace(
            r,
            trajectory=replace(
                r.trajectory,
                rewards=r.trajectory.rewards | {HOSTILE: 1.0},
                messages=tuple(
                    m | {"content": HOSTILE * (1 + 20 * (m["role"] == "tool"))} for m in r.trajectory.messages
                ),
            ),
        )
        for r in records
    ]
    write_rollouts(path, hostile)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, f"x/{HOSTILE}": 1.0, f"y/{HOSTILE}": 2.0, "reward/mean": 0.5}) + "\n")
    out = tmp_path / "page.html"
    assert ludus("report", run, "--output", out).code == 0
    text = out.read_text()
    found = Tags(text)
    assert found.tags.count("script") == 1
    assert found.tags.count("style") == 1
    assert "img" not in found.tags
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert "&lt;script&gt;alert(1)" in text


def test_the_summary_is_also_markdown_and_json(tiny_run):
    text = ludus("report", tiny_run, "--markdown").out
    assert "## Evaluations" in text
    assert "| run | recipe |" in text
    data = json.loads(ludus("report", tiny_run, "--json").out)
    assert data["runs"][0]["steps"] == "2 of 2"
    assert data["evaluations"]


def test_runs_of_two_seeds_are_one_curve_and_others_are_compared(tiny_run, tmp_path):
    seed, other = (shutil.copytree(tiny_run, tmp_path / name) for name in ("seed", "other"))
    config = (seed / "config.toml").read_text()
    (seed / "config.toml").write_text(config.replace("\nseed = 0", "\nseed = 1"))
    (other / "config.toml").write_text(config.replace("max_turns = 3", "max_turns = 2"))
    out = tmp_path / "page.html"
    assert ludus("report", tiny_run, seed, other, "--output", out).code == 0
    text = out.read_text()
    assert "(mean of 2 seeds, 95 % interval)" in text
    assert 'class="band c0"' in text
    (held_out,) = re.findall(r"<figcaption>held-out success, validation, greedy</figcaption>.*?</svg>", text, re.S)
    assert held_out.count('class="band c0"') == 1  # over the two seeds; the other run has intervals over its tasks
    assert "<td>rollout.max_turns</td><td>3</td><td>3</td><td>2</td>" in text
    assert "no difference seen" in text


def test_a_run_without_rollouts_and_evaluations_says_what_is_missing(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    for name in ("rollouts", "evaluations"):
        shutil.rmtree(run / name)
    first = (run / "metrics.jsonl").read_text().splitlines()[0]
    (run / "metrics.jsonl").write_text(first + "\n")
    (run / "log.txt").write_text("")  # other tests of this run may have logged errors
    assert ludus("report", run).code == 0
    text = (run / "report.html").read_text()
    assert "No evaluation is stored" in text
    assert "No rollouts are stored" in text
    assert "One step only" in text
    assert "stopped, no reason in log.txt" in text


def test_a_report_of_metrics_only(tiny_run, tmp_path):
    run = tmp_path / "sft"
    run.mkdir()
    shutil.copy(tiny_run / "config.toml", run)
    (run / "run.json").write_text(json.dumps({"kind": "sft", "settings": 1}))
    rows = [{"step": step, "loss/total": 1 / step} for step in range(1, 31)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert ludus("report", run).code == 0
    assert "<figcaption>loss</figcaption>" in (run / "report.html").read_text()


def test_a_long_curve_keeps_its_extremes():
    points = [(step, float(step == 777)) for step in range(1000)]
    found = downsample(points)
    assert len(found) <= 600
    assert (777, 1.0) in found
    assert downsample(points[:600]) == points[:600]


def test_a_histogram_counts_the_largest_value():
    chart = histogram("reward", [0.0] * 50 + [0.9] * 50, [0.0] * 10 + [0.9] * 90, 0)
    assert [share for *_, share in chart.columns if share] == [0.5, 0.5, 0.1, 0.9]


def test_ticks_are_round_and_inside():
    assert ticks(0.03, 1.02) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(2.0, 2.0) == [2.0]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("nowhere",), "does not exist"),
        (("FILE",), "file is not a run folder"),
        (("EMPTY",), "is not a run folder"),
        (("RUN", "RUN"), "is named twice"),
        (("RUN", "--output", "EMPTY"), "is a folder"),
        (("RUN", "--output", "EMPTY/no/such/page.html"), "cannot be written"),
        (("RUN", "--training.steps", "3"), "`ludus report` has no argument --training.steps"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(tiny_run, tmp_path, words, error):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    places = {"RUN": tiny_run, "EMPTY": tmp_path / "empty", "FILE": tmp_path / "file"}
    given = []
    for word in words:
        first, slash, rest = word.partition("/")
        given.append(f"{places[first]}{slash}{rest}" if first in places else word)
    assert error in refused("report", *given)


def test_a_run_without_a_step_is_refused(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    (run / "metrics.jsonl").unlink()
    assert "No run has a finished step" in refused("report", run)


def test_a_distribution_has_the_colour_of_the_curve_in_the_legend(tiny_run, tmp_path):
    seed, other = (shutil.copytree(tiny_run, tmp_path / name) for name in ("seed", "other"))
    config = (seed / "config.toml").read_text()
    (seed / "config.toml").write_text(config.replace("\nseed = 0", "\nseed = 1"))
    (other / "config.toml").write_text(config.replace("max_turns = 3", "max_turns = 2"))
    out = tmp_path / "page.html"
    assert ludus("report", tiny_run, seed, other, "--output", out).code == 0
    assert set(re.findall(r'class="after (c\d)"', out.read_text())) == {"c0", "c1"}
