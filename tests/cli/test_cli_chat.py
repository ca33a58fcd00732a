"""`ludus chat`: a dialogue keeps its tokens over turns and shows calls and results."""

import asyncio
import io

import pytest

from ludus.cli.serving.chat import ChatRepl
from ludus.cli.ui.load_run import LoadedRun
from ludus.cli.ui.transcripts import shorten
from ludus.config import load_config
from ludus.envs.registry import build_world
from ludus.errors import WorldError
from ludus.training.run.session import TrainingSession
from ludus.types import Message
from ludus.worlds.search.world import SYSTEM
from small_worlds import RecordingWorld, call, end_token, renderer, scripted, tokenizer
from tiny_run import WORLD, copy_run, ludus, refused
from tiny_world import PRICES


def dialogue(script, world=None, **settings):
    """A dialogue with an engine that plays `script`, on the tiny world unless another is given."""
    words = [word for key, value in settings.items() for word in (f"--rollout.{key}", str(value))]
    config = load_config(None, ["--env.name", str(WORLD), "--rollout.max_seq_len", "2000", *words])
    engine = scripted(script)
    session = TrainingSession(config, world or build_world(config.env, config.rollout), None, tokenizer(), renderer())
    return ChatRepl(LoadedRun(session, 0, engine), 0.0), engine


def into(parts):
    return lambda *part: parts.append(part)


def ask(dialogue, *questions):
    """The parts that each question brings about."""
    shown = []
    for question in questions:
        parts = []
        asyncio.run(dialogue.send(question, into(parts)))
        shown.append(parts)
    return shown


def test_reply_parts_are_shown_in_order():
    script = [f"<think>Look.</think>\n{call('look', item='pear')}", PRICES["pear"]]
    talk, _ = dialogue(script)
    assert ask(talk, "What does pear cost?") == [
        [
            ("thinking", "Look."),
            ("call", 'look {"item": "pear"}'),
            ("tool", f"look: pear costs {PRICES['pear']}"),
            ("answer", PRICES["pear"]),
        ]
    ]


def test_failed_and_malformed_calls_are_marked():
    script = [f"Hm. {call('look', item='moon')}", "<tool_call>\n{nonsense}\n</tool_call>", "I give up."]
    (parts,) = ask(dialogue(script)[0], "What does the moon cost?")
    assert [kind for kind, _ in parts] == ["text", "call", "tool", "malformed call", "tool", "answer"]
    assert parts[0][1] == "Hm."
    assert parts[2][1].startswith("look (raised): ")
    assert parts[3][1] == "<tool_call>\n{nonsense}\n</tool_call>"
    assert parts[4][1].startswith("no tool (malformed): Error: ")


def test_follow_up_question_extends_the_previous_token_sequence():
    talk, engine = dialogue(["3", "4"])
    ask(talk, "What does pear cost?", "And the plum?")
    first, second = engine.requests
    said = [*tokenizer().encode("3", add_special_tokens=False), end_token()]
    delta = renderer().observation([Message(role="user", content="And the plum?")])
    assert second.token_ids == (*first.token_ids, *said, *delta)
    assert second.episode == first.episode


def test_restart_releases_the_previous_dialogue():
    talk, engine = dialogue(["3", "4"])
    ask(talk, "What does pear cost?")
    assert not talk.is_new
    talk.restart()
    assert talk.is_new
    ask(talk, "What does plum cost?")
    first, second = engine.requests
    assert engine.released == [first.episode]
    assert second.episode != first.episode
    assert "pear" not in tokenizer().decode(second.token_ids)
    assert second.params.seed != first.params.seed


def test_after_the_last_turn_the_tools_answer_is_seen_with_the_next_question():
    look = call("look", item="pear")
    talk, engine = dialogue([look, look, "ok"], max_turns=2)
    first, second = ask(talk, "What does pear cost?", "Well?")
    assert first[-1] == ("end", "No answer within rollout.max_turns turns.")
    assert second == [("answer", "ok")]
    text = tokenizer().decode(engine.requests[2].token_ids)
    assert text.count(f"pear costs {PRICES['pear']}") == 2
    assert text.index("Well?") > text.rindex("pear costs")


def test_a_retry_answers_the_last_question_again_after_the_same_dialogue():
    talk, engine = dialogue(["3", "4", "5", "6"])
    ask(talk, "What does pear cost?", "And the plum?")
    parts = []
    asyncio.run(talk.retry(into(parts)))
    assert parts == [("answer", "3")]
    _, second, third = engine.requests
    assert third.token_ids == second.token_ids
    assert third.episode != second.episode
    assert third.params.seed != second.params.seed
    assert (second.params.temperature, third.params.temperature) == (0.0, 1.0)
    ask(talk, "Well?")
    said = [*tokenizer().encode("3", add_special_tokens=False), end_token()]
    assert engine.requests[3].token_ids[: len(third.token_ids) + len(said)] == (*third.token_ids, *said)
    assert engine.requests[3].params.temperature == 0.0


def test_retry_of_first_question_restarts_dialogue_with_new_seed():
    talk, engine = dialogue(["3", "4"])
    ask(talk, "What does pear cost?")
    asyncio.run(talk.retry(lambda *part: None))
    first, second = engine.requests
    assert second.token_ids == first.token_ids
    assert second.params.seed != first.params.seed
    assert engine.released == [first.episode]


def test_long_tool_results_are_shortened_to_their_first_lines():
    assert shorten("one\ntwo", 80) == "one\ntwo"
    lines = [f"line {number}" for number in range(20)]
    assert shorten("\n".join(lines), 80, 5) == "\n".join([*lines[:5], "... 15 more lines"])
    assert shorten("\n".join(["x" * 100, "y" * 100, "z"]), 40, 5) == f"{'x' * 100}\n... 2 more lines"
    assert shorten("x" * 500, 40, 5) == f"{'x' * 200}\n... 300 more characters"


@pytest.mark.parametrize(
    ("script", "settings", "kinds", "end"),
    [
        (["What? " * 30], {"max_tokens_per_turn": 16}, ["text", "end"], "The model was cut off"),
        (["3"], {"max_seq_len": 64, "max_tokens_per_turn": 8}, ["end"], "The question does not fit"),
    ],
)
def test_a_dialogue_that_cannot_continue_restarts(script, settings, kinds, end):
    talk, _ = dialogue(script, **settings)
    (parts,) = ask(talk, "What does pear cost?")
    assert [kind for kind, _ in parts] == kinds
    assert parts[-1][1].startswith(end)
    assert talk.is_new


def test_a_full_context_is_reported_and_the_dialogue_restarts():
    script = [call("look", item="pear"), "3", "4"]
    talk, engine = dialogue(script)
    ask(talk, "What does pear cost?")
    full = len(engine.requests[1].token_ids)
    talk, _ = dialogue(script, max_seq_len=full, max_tokens_per_turn=60)
    assert ask(talk, "What does pear cost?")[0][-1] == ("end", "The dialogue is full (rollout.max_seq_len).")
    assert talk.is_new
    talk, _ = dialogue(script, max_seq_len=full + 1, max_tokens_per_turn=60)
    assert ask(talk, "What does pear cost?")[0][-1][0] != "call"


def test_a_turn_without_text_is_shown_as_empty():
    talk, _ = dialogue(["", "3"])
    assert ask(talk, "What?", "Well?") == [[("end", "The model returned an empty answer.")], [("answer", "3")]]


def test_failing_world_raises_world_error_with_its_message():
    async def broken(_):
        raise OSError("the shop is shut")

    world = RecordingWorld(hooks={"step": broken})
    with pytest.raises(WorldError, match="the shop is shut"):
        ask(dialogue(["3"], world)[0], "What?")
    assert world.open == []


def test_a_world_that_cannot_start_from_a_question_answers_its_tasks():
    async def fails_twice(number):
        if number < 2:
            raise KeyError("truth")

    talk, _ = dialogue(["3"], world := RecordingWorld(hooks={"start": fails_twice}))
    [[(kind, text)]] = ask(talk, "What?")
    assert kind == "end"
    assert "KeyError: 'truth'" in text
    assert "/task" in text
    tasks = world.tasks("train")
    assert [talk.next_task() for _ in range(len(tasks) + 1)] == [*tasks, tasks[0]]
    with pytest.raises(WorldError, match="truth"):
        ask(talk, tasks[0])
    assert ask(talk, tasks[0]) == [[("answer", "3")]]
    assert talk.last_text == tasks[0].prompt[-1]["content"]
    asyncio.run(talk.retry(into(parts := [])))
    assert parts == [("answer", "3")]
    assert world.open == []


def test_chat_opening_matches_prompts_of_world_tasks():
    tiny = build_world(load_config(None, ["--env.name", str(WORLD)]).env, load_config(None).rollout)
    task = tiny.tasks("test")[0]
    assert tuple(tiny.opening(task.prompt[-1]["content"])) == task.prompt
    config = load_config("search")
    search = build_world(config.env, config.rollout)
    assert search.opening("Who?") == (
        Message(role="system", content=SYSTEM["tool"]),
        Message(role="user", content="Who?"),
    )


def chat(monkeypatch, lines, *words):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return ludus("chat", *words)


def test_a_run_answers_piped_questions_until_the_input_ends(tiny_run, monkeypatch):
    said = chat(monkeypatch, ["What does pear cost?", "What does saw cost?"], tiny_run)
    assert said.code == 0, said
    assert said.out.startswith(f"step 2 of {tiny_run}, in the world prices.")
    assert "[you] What does pear cost?" in said.out
    assert "[you] What does saw cost?" in said.out
    assert said.out.count("[answer]") + said.out.count("[end]") == 2


def test_greedy_answers_repeat_and_chat_commands_restart_or_exit(tiny_run, monkeypatch):
    question = "What does pear cost?"
    said = chat(monkeypatch, [question, "/new", question, "/quit", "never asked"], tiny_run)
    first, second = said.out.split("A new dialogue.\n")
    assert first.split("[you]")[1] == second.split("[you]")[1]
    assert said.out.count("new dialogue ─") == 2
    assert "never asked" not in said.out
    assert "[you]" not in chat(monkeypatch, ["", question], tiny_run).out


def test_chat_commands_list_commands_and_tools_and_retry_a_question(tiny_run, monkeypatch):
    said = chat(
        monkeypatch, ["/help", "/tools", "/retry", "/nope", "What does pear cost?", "/retry", "/exit"], tiny_run
    )
    assert said.code == 0, said
    for line in ("/retry   answer the last question again", "look(item): ", "No question has been answered yet."):
        assert line in said.out
    assert "Unknown command /nope. /help lists the commands." in said.out
    assert said.out.count("[you] What does pear cost?") == 2
    assert said.out.count("new dialogue ─") == 1


def test_chat_shows_the_prompt_of_a_task_and_its_answer(tiny_run, monkeypatch):
    said = chat(monkeypatch, ["/task", "/task"], tiny_run)
    assert said.code == 0, said
    assert said.out.count("─ task ") == said.out.count("[user] ") == 2
    assert said.out.count("[answer]") + said.out.count("[end]") == 2


def test_the_temperature_changes_the_answer(tiny_run, monkeypatch):
    lines = ["What does pear cost?", "/new"] * 4
    greedy = chat(monkeypatch, lines, tiny_run).out.split("A new dialogue.")
    warm = chat(monkeypatch, lines, tiny_run, "--temperature", "2").out.split("A new dialogue.")
    assert len({part.split("[you]")[-1] for part in greedy[:4]}) == 1
    assert len({part.split("[you]")[-1] for part in warm[:4]}) > 1


def test_chat_with_a_model_uses_the_world_option(tiny_run, monkeypatch):
    model = tiny_run / "checkpoints" / "step-000002"
    said = chat(monkeypatch, ["What does pear cost?"], model, "--world", WORLD, "--rollout.max_turns", "1")
    assert said.code == 0, said
    assert f"{model}, in the world prices." in said.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("./nope",), "./nope is neither a run nor a model"),
        (("runs/a/b",), "runs/a/b is neither a run nor a model"),
        (("full/nope",), "full/nope is neither a run nor a model"),
        (("full",), "full"),
        (("RUN", "--temperature", "-1"), "--temperature is -1"),
        (("MODEL", "--world", "serch"), "search"),
        (("MODEL", "--world", "nope.py"), "nope.py"),
        (("RUN", "--rollout.max_turn", "3"), "rollout.max_turns"),
    ],
)
def test_bad_input_is_one_sentence(words, expected, tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    stand_for = {"RUN": tiny_run, "MODEL": tiny_run / "checkpoints" / "step-000002"}
    assert expected in refused("chat", *(stand_for.get(word, word) for word in words))


def test_chat_rejects_a_run_without_checkpoint(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    (run / "checkpoints").rename(run / "gone")
    assert "has no checkpoint yet" in refused("chat", run)
