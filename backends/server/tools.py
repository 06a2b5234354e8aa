"""Tools that a model may call: what clients declare, and the grammar of their calls."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from edgecc.backends.runtime import ChatTemplates, Grammar
from edgecc.backends.runtime.grammar import GrammarKind, json_rule, lark_string
from edgecc.backends.server.call_readers import CLOSE, OPEN, JsonReader, read_json
from edgecc.backends.server.protocol import ChatBody, NamedChoice, Tool
from edgecc.backends.server.tool_calls import MakeReader, TagReader, takes_text
from edgecc.errors import RequestError

_DEFINITIONS = ("$defs", "definitions")
_TAG_NAME = re.compile(r"[^>\n]+")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolForm(ABC):
    """How a model writes calls."""

    @abstractmethod
    def reader(self, tools: Sequence[Tool]) -> MakeReader:
        """Reads calls."""

    terminals = ""
    """What rules need besides."""

    @abstractmethod
    def rule(self, tool: Tool) -> str:
        """What is between the tags of a call, as part of a rule."""


class JsonForm(ToolForm):
    """As JSON: Qwen2.5, Qwen3, Hermes."""

    def reader(self, tools: Sequence[Tool]) -> MakeReader:
        """See `ToolForm`."""
        return JsonReader

    def rule(self, tool: Tool) -> str:
        """See `ToolForm`."""
        head = '{"name": ' + json.dumps(tool.function.name) + ', "arguments": '
        return f'"\\n" {lark_string(head)} {json_rule(_parameters(tool))} "}}\\n"'


class TagForm(ToolForm):
    """As tags: Qwen3-Coder, Qwen3.5."""

    terminals = "text_value[lazy]: /(.|\\n)*\\n<\\/parameter>\\n/"

    def reader(self, tools: Sequence[Tool]) -> MakeReader:
        """See `ToolForm`."""
        schemas = {tool.function.name: _parameters(tool) for tool in tools}
        return lambda: TagReader(schemas)

    def rule(self, tool: Tool) -> str:
        """See `ToolForm`. Parameters come in the order of the schema.

        Raises:
            RequestError: The name of one cannot stand in a tag.
        """
        schema = _parameters(tool)
        required = schema.get("required", [])
        definitions = {key: value for key, value in schema.items() if key in _DEFINITIONS}
        parts = [lark_string(f"\n<function={tool.function.name}>\n")]
        for name, value in schema.get("properties", {}).items():
            if not _TAG_NAME.fullmatch(name):
                raise _bad("tools", f"the parameter {name[:40]!r} has no name for a tag")
            part = lark_string(f"<parameter={name}>\n") + " " + _tag_value(value, definitions)
            parts.append(f"({part})" + ("" if name in required else "?"))
        return " ".join([*parts, lark_string("</function>\n")])


def form_of(chat: ChatTemplates) -> ToolForm:
    """How a model writes calls, by what its chat template shows it.

    Raises:
        RequestError: The template takes no tools, or shows calls in another way.
    """
    source = chat.tool_source
    if source is None:
        raise RequestError(
            "server/no-tools",
            "the model's chat template takes no tools, so the model would not know them",
            where="tools",
            help="leave them out, or serve with a template that does: --chat-template",
        )
    if OPEN not in source:
        raise RequestError(
            "server/unknown-tool-calls",
            f"the model's chat template writes calls of tools in another way than {OPEN}",
            where="tools",
            help="leave them out, or serve with a template that does: --chat-template",
        )
    return TagForm() if "<function=" in source else JsonForm()


def wanted_tools(body: ChatBody) -> list[Tool]:
    """The tools that an answer may call.

    Raises:
        RequestError: Two have one name, or the one to call is not among them.
    """
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise _bad("tools", "two tools have one name")
    for index, tool in enumerate(tools):
        schema = _parameters(tool)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise _bad(f"tools[{index}].function.parameters", "expected the schema of an object")
    if not tools and choice not in (None, "none", "auto"):
        raise _bad("tool_choice", "tool_choice needs tools")
    if choice == "none":
        return []
    if isinstance(choice, NamedChoice):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        if not chosen:
            raise _bad("tool_choice", f"there is no tool {choice.function.name!r}")
    return tools


def tool_grammar(
    body: ChatBody, tools: Sequence[Tool], form: ToolForm, answer: Grammar | None
) -> Grammar | None:
    """What holds an answer to calls that are valid; None where it may be anything.

    That is so if the model chooses whether to call, no tool is strict, and the format is free.

    Args:
        body: Says which calls are wanted.
        tools: What may be called, at least one.
        form: How it is written.
        answer: What an answer without calls must be.

    Raises:
        RequestError: Such an answer must be something else than JSON.
    """
    choice, several = body.tool_choice, body.parallel_tool_calls is not False
    calls = f"{lark_string(OPEN)} call" + (f' ("\\n" {lark_string(OPEN)} call)*' if several else "")
    if isinstance(choice, NamedChoice):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        return _lark([f"start: {lark_string(OPEN)} call"], chosen, form)
    if choice == "required":
        return _lark([f"start: {calls}"], tools, form)
    if answer is not None:
        if answer.kind is not GrammarKind.JSON_SCHEMA:
            raise _bad("structured_outputs", "with tools, an answer can be held to JSON only")
        json_answer = json_rule(json.loads(answer.text))
        return _lark([f"start: answer | {calls}", f"answer: {json_answer}"], tools, form)
    if not any(tool.function.strict for tool in tools):
        return None
    start = f"start: lead_call{'*' if several else '?'} TEXT"
    lead = f"lead[lazy]: /(.|\\n)*{re.escape(OPEN)}/"
    rules = [start, "lead_call: lead call", "TEXT: /(.|\\n)*/", lead]
    return _lark(rules, tools, form)


def _lark(rules: Sequence[str], tools: Sequence[Tool], form: ToolForm) -> Grammar:
    """A grammar of rules that name `call`."""
    either = " | ".join(f"call{i}" for i in range(len(tools)))
    calls = [f"call{i}: {form.rule(tool)} {lark_string(CLOSE)}" for i, tool in enumerate(tools)]
    return Grammar.lark("\n".join([*rules, f"call: {either}", *calls, form.terminals]))


def without_call_strings(message: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """A message of the history whose calls have arguments as objects, as templates take them.

    Args:
        message: A message.
        index: Its place, for errors.

    Raises:
        RequestError: Its calls are malformed.
    """
    calls = message.get("tool_calls")
    if calls is None:
        return message
    where = f"messages[{index}].tool_calls"
    if not isinstance(calls, list):
        raise _bad(where, "tool_calls is a list of calls")
    read = [_read_call(call, f"{where}[{place}]") for place, call in enumerate(calls)]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    content = message.get("content")
    return {**kept, "content": "" if content is None else content, "tool_calls": read}


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _bad(where, "a call has a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise _bad(where, "the arguments of a call are no JSON") from error
    if not isinstance(arguments, Mapping | None):
        raise _bad(where, "the arguments of a call are no object")
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _tag_value(schema: Any, definitions: Mapping[str, Any]) -> str:
    """A value, up to the tag behind it."""
    end = lark_string("\n</parameter>\n")
    if takes_text(schema):
        if not isinstance(schema, Mapping) or not schema.keys() & {"enum", "const"}:
            return "text_value"
        choices = [schema["const"]] if "const" in schema else schema["enum"]
        if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
            return f"({' | '.join(map(lark_string, choices))}) {end}"
    return f"{json_rule({**schema, **definitions})} {end}"


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    return _NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters


def _bad(where: str, message: str) -> RequestError:
    return RequestError("server/bad-tools", message, where=where)
