"""Shortened chat templates of model families, and tokenizers for them."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ludus.chat.tokenizer import train_tokenizer

TEXTS = ["Paris is the capital of France. Where is it? The Seine flows through Paris."] * 3


def byte_level(template=None, special=()):
    """Return a small byte-level tokenizer, as in Qwen, Llama 3 and SmolLM2."""
    tokenizer = train_tokenizer(TEXTS, 400)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)}, replace_extra_special_tokens=False)
    if template:
        tokenizer.chat_template = template
    return tokenizer


def metaspace(template, special):
    """Return a character tokenizer with byte fallback and a space mark before the text, as in Mistral and Gemma 1."""
    pieces = [*(f"<0x{i:02X}>" for i in range(256)), "▁", *(chr(i) for i in range(33, 127))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=list(special), clean_up_tokenization_spaces=True
    )
    wrapped.chat_template = template
    return wrapped


CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""No tools, no thinking, no tool messages (SmolLM2)."""

QWEN3 = """
{%- if messages[0].role == 'system' or tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {%- for tool in tools or [] %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'Write <tool_call>\\n{...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(asked=messages | length - 1, looking=true) %}
{%- for m in messages[::-1] %}
    {%- if ns.looking and m.role == 'user' and not m.content.startswith('<tool_response>') %}
        {%- set ns.asked = messages | length - 1 - loop.index0 %}
        {%- set ns.looking = false %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = m.reasoning_content or '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.asked and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or m.content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Thinking only after the last user message; tool output in a user turn."""

LLAMA3 = """
{{- '<|begin_of_text|>' }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nUse {"name": name, "parameters": dictionary}.' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls | length > 1 %}{{- raise_exception('only single tool-calls') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name }}
        {{- '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
"""Calls as bare JSON, one per turn and without text; tool output as JSON from `ipython`."""
LLAMA3_SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""No system message, no tools, strict alternation."""
GEMMA_SPECIAL = ("<bos>", "<start_of_turn>", "<end_of_turn>")

MISTRAL = """
{{- '<s>' }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and m == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [{"name": "' + m.tool_calls[0].function.name + '"}]</s>' }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content + '</s>' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
"""Tools before the last user message, wherever it is; no system message; no generation prompt."""
MISTRAL_SPECIAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)

KIMI = """
{%- macro turn(mark, name, text) %}{{- mark + name + '<|im_middle|>' + text + '<|im_end|>' }}{%- endmacro %}
{%- if tools %}
    {{- turn('<|im_system|>', 'tool_declare', tools | tojson(separators=(',', ':'), sort_keys=True)) }}
{%- endif %}
{%- if messages[0].role != 'system' %}
    {{- turn('<|im_system|>', 'system', 'You are Kimi, an AI assistant created by Moonshot AI.') + '\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- turn('<|im_system|>', m.name or 'tool', '## Return of ' + m.tool_call_id + '\\n' + m.content) }}
    {%- elif m.tool_calls %}
        {{- '<|im_assistant|>assistant<|im_middle|>' + m.content + '<|tool_calls_section_begin|>' }}
        {%- for call in m.tool_calls %}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
            {{- call.function.arguments | tojson + '<|tool_call_end|>' }}
        {%- endfor %}
        {{- '<|tool_calls_section_end|><|im_end|>' }}
    {%- else %}
        {{- turn('<|im_' + m.role + '|>', m.role, m.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""
"""Calls with ids of the form functions.NAME:INDEX, which the results repeat; no thinking."""

GLM = """
{{- '[gMASK]<sop>' }}
{%- for tool in tools or [] %}{{- '<|system|>\\n' + tool | tojson }}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + m.role + '|>\\n' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + value | string + '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
"""No end of turn: the model ends its turn with the role token of the next message."""
GLM_SPECIAL = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

GEMMA4 = """
{%- macro quote(value) %}{{- '<|"|>' + value + '<|"|>' if value is string else value | tojson }}{%- endmacro %}
{%- for tool in tools or [] %}{{- '<|tool>' + tool.function.name + '<tool|>' }}{%- endfor %}
{%- set ns = namespace(open=false) %}
{%- for m in messages if m.role != 'tool' %}
    {%- if not (ns.open and m.role == 'assistant') %}
        {{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
    {%- endif %}
    {%- set ns.open = m.tool_calls is defined %}
    {%- set at = messages.index(m) %}
    {%- for call in m.tool_calls or [] %}
        {{- '<|tool_call>call:' + call.function.name + '{' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- ',' * (not loop.first) + key + ':' + quote(value) }}
        {%- endfor %}
        {{- '}<tool_call|>' }}
    {%- endfor %}
    {%- for result in messages[at + 1 : at + 1 + (m.tool_calls or []) | length] if result.role == 'tool' %}
        {{- '<|tool_response>response:' + result.name + '{value:' + quote(result.content) + '}<tool_response|>' }}
    {%- endfor %}
    {{- m.content }}
    {%- if not ns.open %}{{- '<turn|>\\n' }}{%- elif loop.last and at == messages | length - 1 %}
        {{- '<|tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.open %}{{- '<|turn>model\\n' }}{%- endif %}
"""
"""Results inside the turn of the calls, which ends with <|tool_response>; results without calls are dropped."""
GEMMA4_SPECIAL = (
    *("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>'),
)

GPT_OSS = """
{%- for tool in tools or [] %}{{- '<|start|>developer<|message|>' + tool | tojson + '<|end|>' }}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if not messages[loop.index0 - 1].tool_calls %}{{- raise_exception('no call') }}{%- endif %}
        {{- '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role != 'assistant' %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- else %}
        {%- if m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {%- if m.tool_calls %}
            {{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json' }}
            {{- '<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
            {{- '<|return|>' if loop.last else '<|end|>' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
"""Channels; the key `thinking`; turns end with <|return|>, after calls with <|call|>, in the history with <|end|>."""
GPT_OSS_SPECIAL = ("<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|call|>", "<|return|>")
