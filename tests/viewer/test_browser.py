"""The viewer in headless Chromium, with real clicks, and a page full of hostile markup."""

import json
import re
import shutil
import threading
from dataclasses import replace

import pytest
import uvicorn

from ludus.gateway.limits import open_socket
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path, token_values_path, write_lines, write_rollouts
from ludus.rollouts.trees import join_rows
from ludus.training.run.run_dir import RunFolder
from ludus.viewer.index import RolloutIndex
from ludus.viewer.pages import RunPages
from ludus.viewer.server import make_app
from tiny_run import copy_run

pytestmark = pytest.mark.browser
HOSTILE = (
    "</pre><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<style>*{display:none}</style><a href=\"javascript:document.title='owned'\">click</a><!--${alert(1)}"
)


def token_values(record):
    """A line of `run.token_values`: the first token of each action is clipped."""
    segments = {
        i: {
            "advantage": [1.5] * len(segment.tokens),
            "logprob": [value + 0.25 for value in segment.logprobs],
            "old": list(segment.logprobs),
            "reference": list(segment.logprobs),
            "entropy": [0.7] * len(segment.tokens),
            "clipped": [1.0] + [0.0] * (len(segment.tokens) - 1),
        }
        for i, segment in enumerate(record.trajectory.segments)
        if segment.kind == "action"
    }
    key = {"task": record.group, "sample": record.trajectory.sample, "attempt": record.attempt}
    return json.dumps(key | {"segments": segments})


def two_rows(record):
    """The record with a second row, which forks after the prompt with hostile markup as agent."""
    prompt, *rest = record.trajectory.segments
    forked = [prompt, *(replace(one, agent="<b>worker</b>", policy="worker") for one in rest)]
    segments, _ = join_rows([([prompt, *rest], 0, 0), (forked, 0, 1)])
    return replace(record, trajectory=replace(record.trajectory, segments=tuple(segments), shared_reward=True))


@pytest.fixture(scope="module")
def address(tiny_run, tmp_path_factory):
    """The address of a viewer of a run whose texts are hostile."""
    run = copy_run(tiny_run, tmp_path_factory.mktemp("browser"))
    call = {"id": "c", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    said = {"role": "assistant", "content": HOSTILE, "reasoning_content": HOSTILE, "tool_calls": [call]}
    messages = ({"role": "user", "content": HOSTILE}, said)
    records = [
        replace(r, trajectory=replace(r.trajectory, messages=messages, rewards={HOSTILE: 1.0}, tags={HOSTILE: HOSTILE}))
        for r in read_rollouts(rollouts_path(run, 1))
    ]
    write_rollouts(rollouts_path(run, 1), records)
    records = [two_rows(r) if r.trajectory.sample == 0 else r for r in read_rollouts(rollouts_path(run, 2))]
    write_rollouts(rollouts_path(run, 2), records)
    write_lines(token_values_path(run, 2), map(token_values, records))
    (run / "probes").mkdir()
    row = {"task": HOSTILE, "value": {"value": 0.5, "low": 0.1, "high": 0.9, "text": HOSTILE}, "note": None}
    report = {"kind": "forks", "title": HOSTILE, "rows": [row], "notes": [HOSTILE]}
    report["texts"] = [{"name": HOSTILE, "spans": [[HOSTILE, ""], [HOSTILE, HOSTILE]]}]
    (run / "probes" / "forks-step-000002.json").write_text(json.dumps(report))
    index = RolloutIndex(RunFolder(run), lambda record: record.trajectory.reward > 0)
    index.refresh()
    with open_socket("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(make_app(RunPages(index)), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()
    index.close()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    assert program, "install chromium"
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-quic"])
        yield started
        started.close()


@pytest.fixture
def page(browser):
    """A page whose console errors fail the test."""
    page, errors = browser.new_page(viewport={"width": 1280, "height": 800}), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    yield page
    page.close()
    assert errors == []


def test_rollouts_are_filtered_opened_and_labelled_by_clicks(page, address):
    page.goto(f"{address}/")
    page.wait_for_selector("tbody tr")
    everything = page.locator(".pager span").first.inner_text()
    page.select_option("select[name=source]", "training")
    page.wait_for_function("text => (document.querySelector('.pager span') || {}).innerText !== text", arg=everything)
    assert "training=1" in page.url
    page.locator("tbody tr").nth(1).click()
    page.wait_for_selector(".message")
    assert "#/rollout/" in page.url
    page.get_by_role("button", name="tokens").click()
    page.wait_for_selector(".segment.action .token")
    assert "log-probability" in page.locator(".segment.action .token").first.get_attribute("title")
    page.locator(".segment.action .token").first.click()
    assert "log-probability" in page.locator(".exact").inner_text()
    page.get_by_role("button", name="wrong").click()
    page.wait_for_selector("button.on:has-text('wrong')")
    page.get_by_role("link", name="labels").click()
    page.wait_for_selector("td:has-text('wrong')")


def test_tokens_are_colored_by_what_the_learner_saw(page, address):
    page.goto(f"{address}/#/rollouts?training=1&step=2")
    page.locator("tbody tr").first.click()
    page.get_by_role("button", name="tokens").click()
    page.wait_for_selector(".token.clipped")
    facts = page.locator(".token.clipped").first.get_attribute("title")
    assert "ratio 1.2840, clipped" in facts
    assert "entropy 0.7000 nats" in facts
    assert "advantage 1.5" in facts
    for name, style in (("entropy", "p2"), ("mismatch", "p0"), ("advantage", "p0")):
        page.get_by_role("button", name=name).click()
        page.wait_for_selector(f".segment.action .token.{style}")


def test_rows_of_an_agent_are_shown_with_their_fork_and_adapter(page, address):
    page.goto(f"{address}/#/rollouts?training=1&step=2")
    page.locator("tbody tr", has=page.locator("td", has_text=re.compile("^0$"))).first.click()
    page.get_by_role("button", name="tokens").click()
    page.wait_for_selector("text=row 1 forks from row 0 after")
    assert page.locator(".segment", has_text="<b>worker</b>, adapter worker, branches after segment 0").count() == 1


def test_random_rollouts_are_judged_before_their_result_is_shown(page, address):
    page.goto(f"{address}/#/labels")
    page.get_by_role("button", name="label a random rollout").click()
    page.wait_for_selector("text=The result is shown after your label.")
    assert page.locator("text=ledger").count() == 0
    page.get_by_role("button", name="right").click()
    page.wait_for_selector("text=ledger")
    before = page.url
    page.keyboard.press("r")
    page.wait_for_function("url => location.href !== url", arg=before)
    page.wait_for_selector("text=The result is shown after your label.")


def test_keys_move_open_and_go_back(page, address):
    page.goto(f"{address}/#/rollouts?training=1")
    page.wait_for_selector("tr.chosen")
    page.keyboard.press("j")
    page.wait_for_selector("tbody tr:nth-child(2).chosen")
    page.keyboard.press("g")
    page.wait_for_selector(".side section")
    page.keyboard.press("Escape")
    page.wait_for_selector("tbody tr")
    page.keyboard.press("/")
    page.keyboard.type("nothing has these words")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=No rollout matches.")


def test_two_evaluations_are_compared_by_clicks(page, address):
    page.goto(f"{address}/#/compare")
    page.wait_for_selector("tbody tr.chosen")
    task = page.locator("tbody tr td").first.inner_text()
    page.locator("tbody tr").first.click()
    page.wait_for_selector(".side section:nth-child(2) .message")
    assert page.locator("h2").first.inner_text() == task
    page.keyboard.press("Escape")
    page.wait_for_selector("tbody tr.chosen")
    page.select_option("select[name=only]", "equal")
    page.wait_for_function("() => location.hash.includes('only=equal')")


@pytest.mark.parametrize("name", ["timeline/2", "curves", "probes", "labels", "task?task=none"])
def test_every_page_opens_by_its_url(page, address, name):
    page.goto(f"{address}/#/{name}")
    page.wait_for_selector("main *")
    page.wait_for_function("() => !document.body.innerText.includes('Loading')")
    assert page.locator(".error").count() == 0
    if name == "curves":
        page.wait_for_selector("canvas")
    if name == "timeline/2":
        seconds = page.locator(".timeline text").all_text_contents()
        assert seconds[0] == "0 s"
        assert 4 <= len(seconds) <= 10


def test_hostile_text_is_displayed_and_never_executed(page, address):
    for view in ("", "?view=tokens"):
        page.goto(f"{address}/#/rollout/1{view}")
        page.wait_for_selector(".facts")
        page.wait_for_timeout(300)
        assert page.title() == "Ludus"
        assert page.locator("main script, main img, main style, main a[href^=javascript]").count() == 0
    page.goto(f"{address}/#/probes")
    page.wait_for_selector("td")
    assert page.locator("main script, main img, main style, main a[href^=javascript]").count() == 0
    page.goto(f"{address}/#/group/1")
    page.wait_for_selector(".side")
    assert "<script>document.title = 'owned'</script>" in page.locator("main").inner_text()
    assert page.title() == "Ludus"


@pytest.mark.parametrize("width", [1280, 768, 390])
def test_no_page_is_wider_than_the_window(browser, address, width, tmp_path):
    page = browser.new_page(viewport={"width": width, "height": 844})
    for name in (
        "rollouts",
        "rollout/2",
        "rollout/2?view=tokens",
        "group/2",
        "compare",
        "timeline/2",
        "curves",
        "probes",
    ):
        page.goto(f"{address}/#/{name}")
        page.wait_for_selector("main *")
        page.wait_for_timeout(400)
        page.screenshot(path=tmp_path / f"{width}-{name.replace('/', '-').replace('?', '-')}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
    page.close()
