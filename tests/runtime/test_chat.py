"""Chat templates against strings that transformers rendered, and what templates may not do."""

from __future__ import annotations

import enum
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from edgecc.backends.runtime import ChatTemplates
from edgecc.errors import BundleError, RequestError

DATA = Path(__file__).parents[1] / "data"
REFERENCE = json.loads((DATA / "runtime" / "chat_cases.json").read_text(encoding="utf-8"))
CASES = {case["name"]: case for case in REFERENCE["cases"]}
PAIR = DATA / "pairs" / "tiny-qwen3-nvfp4"
USER = [{"role": "user", "content": "hi"}]


def sunday() -> datetime:
    return datetime(2026, 2, 1, 9, 5)


def one(template: str) -> ChatTemplates:
    return ChatTemplates({"default": template}, now=sunday)


def folder(tmp_path: Path, **config: Any) -> Path:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_byte_for_byte(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    config = json.loads((PAIR / "tokenizer_config.json").read_text(encoding="utf-8"))
    if case["chat_template"] is None:
        source = PAIR / "chat_template.jinja"
        (tmp_path / "chat_template.jinja").write_bytes(source.read_bytes())
    else:
        config["chat_template"] = case["chat_template"]
    chat = ChatTemplates.from_directory(folder(tmp_path, **config))
    monkeypatch.setattr(chat, "_environment", one("")._environment)  # its clock stands still
    assert chat.render(case["messages"], **case["arguments"]) == case["expected"]


def test_the_reference_has_a_case_for_each_kind_of_template() -> None:
    kinds = {type(case["chat_template"]) for case in CASES.values()}
    assert kinds == {type(None), str, list}
    assert any("generation" in str(case["chat_template"]) for case in CASES.values())


def test_a_template_refuses_with_its_own_message() -> None:
    with pytest.raises(RequestError, match='System role is not "supported" here') as caught:
        one(REFERENCE["refuses"]).render([{"role": "system", "content": "x"}, *USER])
    assert caught.value.id == "chat/refused-by-template"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') | string }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ strftime_now.__code__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ dict.__class__.__base__ }}",
        "{{ (messages | tojson).__class__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context.environment }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
        "{{ namespace(__class__=1) }}",
        "{{ namespace({'_x': 1}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_no_way_out_of_the_sandbox(template: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError) as caught:
        one(template).render(messages)
    assert caught.value.id == "chat/template-failed"
    assert messages == USER


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
    ],
)
def test_errors_inside_a_template_are_request_errors(template: str, part: str) -> None:
    with pytest.raises(RequestError, match=part) as caught:
        one(template).render(USER)
    assert caught.value.id == "chat/template-failed"


def test_a_template_that_is_not_jinja_is_the_bundles_fault() -> None:
    chat = one("line one\n{% for x in %}")
    with pytest.raises(BundleError, match="line 2") as caught:
        chat.render(USER)
    assert caught.value.id == "chat/template-syntax"


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("messages", "identifier"),
    [
        ([], "request/empty-prompt"),
        ((), "request/empty-prompt"),
        ("hi", "chat/bad-messages"),
        ({"role": "user", "content": "hi"}, "chat/bad-messages"),
        (["hi"], "chat/bad-messages"),
        ([{"content": "hi"}], "chat/bad-messages"),
        ([{"role": None, "content": "hi"}], "chat/bad-messages"),
        ([{"role": "user", "content": "\ud800"}], "request/not-unicode"),
        ([{"role": "user", "content": nested(2000)}], "chat/too-deep"),
        ([{"role": "user", "content": b"hi"}], "chat/not-json"),
        ([{"role": "user", "content": [{"image": object()}]}], "chat/not-json"),
    ],
)
def test_malformed_messages(messages: Any, identifier: str) -> None:
    with pytest.raises(RequestError) as caught:
        one("{{ messages[0].role }}").render(messages)
    assert caught.value.id == identifier


def test_values_reach_the_template_as_plain_json() -> None:
    class Role(str, enum.Enum):  # noqa: UP042 - the older way, whose str() is "Role.USER"
        USER = "user"

    class Loud(str):
        def shout(self) -> str:
            return self.upper()

    messages = [{"role": Role.USER, "content": Loud("x"), "n": (1, True), "f": 0.5, "gone": None}]
    text = one("{{ messages | tojson }}{{ messages[0].content.shout is defined }}").render(messages)
    assert text == '[{"role": "user", "content": "x", "n": [1, true], "f": 0.5}]False'


def test_files_replace_the_config(tmp_path: Path) -> None:
    folder(tmp_path, chat_template="config")
    assert ChatTemplates.from_directory(tmp_path).render(USER) == "config"
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "short.jinja").write_text("short", encoding="utf-8")
    chat = ChatTemplates.from_directory(tmp_path)
    assert chat.names == ["default", "short"]
    assert chat.render(USER) == "file"
    assert chat.render(USER, template="short") == "short"


def test_special_tokens_as_text_or_object(tmp_path: Path) -> None:
    config = {
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}",
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "pad_token": None,
    }
    assert ChatTemplates.from_directory(folder(tmp_path, **config)).render(USER) == "<s></s>False"


def test_choosing_among_templates(tmp_path: Path) -> None:
    assert ChatTemplates.from_directory(tmp_path).names == []
    with pytest.raises(RequestError) as caught:
        ChatTemplates({}).render(USER)
    assert caught.value.id == "chat/no-template"
    chat = ChatTemplates({"tool_use": "t", "rag": "r"})
    with pytest.raises(RequestError, match="rag, tool_use") as caught:
        chat.render(USER)
    assert caught.value.id == "chat/no-default-template"
    assert chat.render(USER, tools=[]) == "t"
    with pytest.raises(RequestError, match="did you mean 'rag'") as caught:
        chat.render(USER, template="rga")
    assert caught.value.id == "chat/unknown-template"


@pytest.mark.parametrize(
    "value", [3, [1], ["text"], [{"name": "default"}], [{"name": "default", "template": 1}]]
)
def test_malformed_template_lists(tmp_path: Path, value: Any) -> None:
    with pytest.raises(BundleError, match="chat_template") as caught:
        ChatTemplates.from_directory(folder(tmp_path, chat_template=value))
    assert caught.value.id == "chat/bad-templates"


def test_templates_as_an_object_of_names(tmp_path: Path) -> None:
    chat = ChatTemplates.from_directory(folder(tmp_path, chat_template={"default": "d", "x": "y"}))
    assert chat.names == ["default", "x"]
    assert chat.render(USER) == "d"


def test_a_template_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(BundleError, match=r"chat_template\.jinja"):
        ChatTemplates.from_directory(tmp_path)
