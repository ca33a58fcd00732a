"""The metrics of what a policy writes and does, against numbers counted by hand."""

import pytest

from ludus.diagnostics.behavior_metrics import behavior_metrics
from ludus.types import Segment, StopReason, Trajectory


def call(name, arguments):
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def says(text, *calls):
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def found(text):
    return {"role": "tool", "content": text, "name": "search", "tool_call_id": "c"}


def episode(*messages, segments=()):
    asked = {"role": "user", "content": "Who wrote Faust?"}
    return Trajectory("t", 0, tuple(segments), (asked, *messages), StopReason.ANSWERED)


FAUST, AGAIN = call("search", '{"q": "Faust"}'), call("search", '{"q": "Faust", "k": 2}')


def test_call_equal_to_the_previous_one_counts_as_repeated():
    loop = episode(says("", FAUST), found("none"), says("", FAUST), found("none"), says("", AGAIN))
    varied = episode(says("", FAUST, AGAIN, FAUST))
    metrics = behavior_metrics([loop, varied])
    assert metrics["tools/repeated"] == pytest.approx(1 / 6)
    assert metrics["tools/sequences"] == 1
    assert behavior_metrics([loop, episode(says("Goethe"))])["tools/sequences"] == 2


@pytest.mark.parametrize(
    ("messages", "unused"),
    [
        ((says("", FAUST), found("Johann Goethe"), says("Goethe.")), 0.0),
        ((says("", FAUST), found("Johann Goethe"), says("Schiller.")), 1.0),
        ((says("", FAUST), found("Johann Goethe"), says("", call("search", '{"q": "Johann"}'))), 0.0),
        ((says("", FAUST), found("Faust"), says("Schiller.")), 0.0),
        ((says("", FAUST), found("Goethe"), says("", AGAIN), found("Weimar"), says("Goethe.")), 0.5),
    ],
    ids=["in the answer", "nowhere", "in a call", "no new word", "one of two"],
)
def test_result_is_used_if_one_of_its_new_words_appears_later(messages, unused):
    assert behavior_metrics([episode(*messages)])["tools/unused_results"] == unused


def test_repeated_text_within_a_turn_and_copied_observations_are_measured():
    loop = tuple(range(10)) * 2  # the second ten tokens repeat the first
    seen = Segment("observation", tuple(range(100, 120)))
    copy = Segment("action", tuple(range(105, 115)), logprobs=(-1.0,) * 10, versions=(0,) * 10)
    spoken = Segment("action", loop, logprobs=(-1.0,) * 20, versions=(0,) * 20)
    metrics = behavior_metrics([episode(segments=[Segment("prompt", (1,)), spoken, seen, copy])])
    assert metrics["text/repeated"] == pytest.approx(10 / 30)
    assert metrics["text/copied"] == pytest.approx(10 / 30)
    short = Segment("action", tuple(range(105, 112)), logprobs=(-1.0,) * 7, versions=(0,) * 7)
    assert behavior_metrics([episode(segments=[seen, short])])["text/copied"] == 0


def test_letters_of_scripts_absent_from_other_messages_are_foreign():
    assert behavior_metrics([episode(says("Goethe 歌德"))])["text/foreign_script"] == pytest.approx(2 / 8)
    assert behavior_metrics([episode(found("歌德"), says("Goethe 歌德"))])["text/foreign_script"] == 0
    assert behavior_metrics([episode(says("Müller, 42"))])["text/foreign_script"] == 0


def test_metrics_of_no_episodes_and_of_empty_episodes_are_zero():
    assert set(behavior_metrics([]).values()) == {0.0}
    assert behavior_metrics([episode()])["text/repeated"] == 0
