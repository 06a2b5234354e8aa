"""Writes the expected values of the tokenizer and chat template tests with transformers.

Run by hand, in an environment that has transformers; the results are committed beside this file:

    python tests/data/runtime/make_reference.py

The templates are written for these tests. Each exercises what published templates use.
"""

from __future__ import annotations

import datetime
import json
import tempfile
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent
TARGET = HERE.parent / "pairs" / "tiny-qwen3-nvfp4"

USER = {"role": "user", "content": "Add 1 < 2 & 'three' \u2264 \"four\" \U0001f642"}
SYSTEM = {"role": "system", "content": "  You are terse.\n"}
ASSISTANT = {"role": "assistant", "content": "Sure\n\n"}
CHAT = [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "Go on."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds <b>caf\u00e9s</b> & more",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    },
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "look_up", "arguments": {"n": 3, "a": "\u00e9"}}},
        {"type": "function", "function": {"name": "look_up", "arguments": '{"n": 4}'}},
    ],
}

NAMESPACE = """\
{%- set ns = namespace(seen=false, last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if not ns.seen and message.role == 'user' %}
        {%- set ns.seen = true %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{{- 'last=' ~ ns.last ~ '\\n' }}
{%- for message in messages %}
    {{- loop.index ~ '/' ~ loop.length ~ ':' ~ message['role'] ~ '=' ~ message.content | trim }}
    {{- ' (last)\\n' if loop.index0 == ns.last else '\\n' }}
{%- endfor %}
"""

LOOP_CONTROLS = """\
{%- for message in messages -%}
    {%- if message.role == 'system' %}{% continue %}{% endif -%}
    [{{ message.role }}]
    {%- if message.role == 'assistant' %}{% break %}{% endif -%}
{%- endfor -%}
"""

MACRO = """\
{%- macro turn(role, text='', end='<|im_end|>') -%}
<|im_start|>{{ role }}
{{ text }}{{ end }}
{% endmacro -%}
{%- for message in messages %}{{ turn(message.role, text=message.content) }}{% endfor -%}
{{ turn('assistant', end='') if add_generation_prompt else '' }}
"""

TOOLS = """\
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n' + (tools | tojson(indent=2)) + '\\n' }}
    {{- tools[0] | tojson(sort_keys=true, separators=(',', ':')) + '\\n' }}
    {{- tools[0].function.description | tojson(ensure_ascii=true) }}
{%- endif %}
{%- for message in messages %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {%- if call.function.arguments is string %}
            {{- call.function.arguments }}
        {%- else %}
            {{- call.function.arguments | tojson }}
        {%- endif %}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- message.content if message.content is defined else '(none)' }}
{%- endfor %}
"""

GENERATION = """\
{% for message in messages %}
    {% if message.role == 'assistant' %}
        {% set inside = 'outer' %}
<|im_start|>{% generation %}{% set inside = 'inner' %}{{ message.content }}|{{ inside }}\
{% endgeneration %}{{ inside }}<|im_end|>
    {% else %}
<{{ message.content }}>
    {% endif %}
{% endfor %}
"""

BLOCKS = """\
first line
    {% if messages %}
  indented {{ messages | length }}
    {% endif %}
\t{# a comment #}
{{ messages[0].content }}   {%- raw %} {{ kept }} {% endraw %}
{% filter upper %}
filtered {{ messages[0].role }}
{% endfilter %}


"""

EXPRESSIONS = """\
{%- set text = messages[1].content -%}
{{ text.split(' ')[0] ~ '|' ~ text.upper()[:3] ~ '|' ~ text.startswith('Add') ~ '\\n' }}
{{- messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('+') }}
{{- '\\n' ~ dict(a=1, b=[true, none, 1.5, 'x']) ~ '\\n' }}
{%- for key, value in {'k': 1, 'j': 2}.items() %}{{ key ~ '=' ~ value ~ ';' }}{% endfor %}
{{- missing | default('unset') ~ (missing is defined) ~ '\\n' }}
{{- "%s-%03d" | format('a', 7) ~ '{:>5}'.format('b') ~ 'c'.rjust(3) ~ '\\n' }}
{{- messages[0].content.strip() ~ '|' ~ messages[0].content.lstrip('\\n ') ~ 7 // 2 ~ 2 ** 5 }}
{{- ('a' in 'cat') ~ ('role' in messages[0]) ~ (messages[-1]['role'] == 'user') }}
{{- range(3) | list ~ (messages | length > 2 and 'many') ~ dict.fromkeys('ab', 0) }}
"""

REASONING = """\
{%- for message in messages %}
    {{- message.role ~ ': ' }}
    {%- set reasoning = message.reasoning_content %}
    {%- if reasoning is string %}{{ '<think>' ~ reasoning }}{% endif %}
    {{- '|' ~ message.thinking ~ '|' ~ message.reasoning ~ '|' ~ message.content ~ '\\n' }}
{%- endfor %}
"""

SPECIALS = """\
{{ bos_token }}{{ eos_token }}[{{ pad_token }}]{{ unk_token is defined }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>' }}{% endif %}
{{- documents | length if documents else 'no documents' }}{{ tools is none }}{{ documents is none }}
{{- add_generation_prompt }}
"""

DATE = "{{ strftime_now('%Y-%m-%d %H:%M, %A %d %B') }} {{ messages[0].content }}"

REFUSES = """\
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- raise_exception('System role is not "supported" here') }}
    {%- endif %}
    {{- message.content }}
{%- endfor %}
"""


def chat_cases() -> list[dict[str, Any]]:
    """What to render: a template, or the value of `chat_template`, with its input."""
    named = [
        {"name": "default", "template": "default: {{ messages[0].content }}"},
        {"name": "tool_use", "template": "tools: {{ tools | length }}"},
        {"name": "rag", "template": "{% for d in documents %}{{ d.title }};{% endfor %}"},
    ]
    thinking = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "why"},
        {"role": "assistant", "content": "c", "thinking": "how", "reasoning_content": None},
        {"role": "assistant", "content": "d", "reasoning_content": "who", "thinking": "old"},
    ]
    documents = [{"title": "t1", "text": "x"}, {"title": "t2", "text": "y"}]
    return [
        case("the model's own", None, CHAT[:2]),
        case("the model's own, no prompt", None, CHAT, add_generation_prompt=False),
        case("namespace", NAMESPACE, CHAT),
        case("loop controls", LOOP_CONTROLS, CHAT),
        case("macro", MACRO, CHAT),
        case("macro, no prompt", MACRO, CHAT, add_generation_prompt=False),
        case("tools", TOOLS, [USER, CALL], tools=[TOOL, TOOL]),
        case("no tools", TOOLS, [USER]),
        case("generation tag", GENERATION, CHAT),
        case("block trimming", BLOCKS, CHAT),
        case("expressions", EXPRESSIONS, CHAT),
        case("reasoning", REASONING, thinking),
        case("special tokens", SPECIALS, CHAT),
        case("variables", SPECIALS, CHAT, enable_thinking=False, bos_token="<s>", tools=[TOOL]),
        case("date", DATE, CHAT),
        case("raise_exception not reached", REFUSES, [USER]),
        case("named, default", named, CHAT[1:2]),
        case("named, tools", named, CHAT[1:2], tools=[TOOL]),
        case("named, chosen", named, CHAT[1:2], documents=documents, template="rag"),
    ]


def case(
    name: str, chat_template: Any, messages: list[dict[str, Any]], **arguments: Any
) -> dict[str, Any]:
    """One case; `arguments` are those of `ChatTemplates.render`."""
    return {
        "name": name,
        "chat_template": chat_template,
        "messages": messages,
        "arguments": arguments,
    }


class FixedClock(datetime.datetime):
    """A clock that always says the same."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        """A Sunday."""
        return datetime.datetime(2026, 2, 1, 9, 5, tzinfo=tz)


def render(case: dict[str, Any]) -> str:
    """What transformers makes of a case."""
    arguments = dict(case["arguments"])
    arguments.setdefault("add_generation_prompt", True)
    arguments["chat_template"] = arguments.pop("template", None)
    with tempfile.TemporaryDirectory() as folder:
        for source in TARGET.glob("*token*.json"):
            (Path(folder) / source.name).write_bytes(source.read_bytes())
        if case["chat_template"] is None:
            text = (TARGET / "chat_template.jinja").read_text(encoding="utf-8")
            (Path(folder) / "chat_template.jinja").write_text(text, encoding="utf-8")
        else:
            path = Path(folder) / "tokenizer_config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            config["chat_template"] = case["chat_template"]
            path.write_text(json.dumps(config), encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return tokenizer.apply_chat_template(case["messages"], tokenize=False, **arguments)


TEXTS = [
    "",
    " ",
    "\n\n  \n",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1)\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "no<|im_end|>space <|endoftext|> <|im_en d|> <|im_start|><|im_start|>",
    "e\u0301 is not \u00e9 before NFC, and \u212b is \u00c5",
    "\u65e5\u672c\u8a9e, \u0440\u0443\u0441\u0441\u043a\u0438\u0439, \U0001f469\u200d\U0001f680",
    "1234567 3.14159 0x1F\t\ttabs\r\nand CRLF\r",
    "I'll don't WE'RE \u00a0nbsp\u2003em",
    "\x00\x01\x7f control, \ufffd replacement",
]


def main() -> None:
    """Write `chat_cases.json` and `tokenizer_cases.json`."""
    chat_template_utils.datetime = FixedClock
    producer = f"transformers {transformers.__version__}"
    cases = [{**item, "expected": render(item)} for item in chat_cases()]
    write("chat_cases.json", {"producer": producer, "refuses": REFUSES, "cases": cases})
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    texts = []
    for text in TEXTS:
        ids = tokenizer.encode(text)
        shown = tokenizer.decode(ids)
        plain = tokenizer.decode(ids, skip_special_tokens=True)
        texts.append({"text": text, "ids": ids, "decoded": shown, "without_specials": plain})
    write("tokenizer_cases.json", {"producer": producer, "cases": texts})


def write(name: str, value: object) -> None:
    """Write JSON beside this file."""
    text = json.dumps(value, indent=1)
    (HERE / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
