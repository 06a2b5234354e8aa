"""Tools that a model may call: what clients declare, and the grammar of an answer with calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from edgecc.backends.runtime.grammar import Grammar, GrammarKind, json_rule, lark_string
from edgecc.backends.server.call_readers import CLOSE, OPEN, read_json
from edgecc.backends.server.errors import bad_tools
from edgecc.backends.server.protocol import ChatBody, NamedChoice, Tool
from edgecc.backends.server.tool_forms import ToolForm, schema_of


def wanted_tools(body: ChatBody) -> list[Tool]:
    """The tools that an answer may call.

    Raises:
        RequestError: Two have one name, or the one to call is not among them.
    """
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_tools("tools", "two tools have one name")
    for index, tool in enumerate(tools):
        _check_schema(schema_of(tool), f"tools[{index}].function.parameters")
    if not tools and choice not in (None, "none", "auto"):
        raise bad_tools("tool_choice", "tool_choice needs tools")
    if choice == "none":
        return []
    if isinstance(choice, NamedChoice):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        if not chosen:
            raise bad_tools("tool_choice", f"there is no tool {choice.function.name!r}")
    return tools


def _check_schema(schema: Mapping[str, Any], where: str) -> None:
    """Check that a schema is one of an object.

    Raises:
        RequestError: It is not.
    """
    kind, properties = schema.get("type", "object"), schema.get("properties", {})
    if kind not in ("object", ["object"]):
        raise bad_tools(f"{where}.type", f"expected 'object', found {kind!r:.40}")
    if not isinstance(properties, dict):
        raise bad_tools(f"{where}.properties", "expected an object of schemas")
    for name, value in properties.items():
        if not isinstance(value, dict | bool):
            message = f"expected a schema, an object or a boolean, found {value!r:.40}"
            raise bad_tools(f"{where}.properties.{name:.40}", message)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad_tools(f"{where}.required", "expected a list of names")


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
            raise bad_tools("structured_outputs", "with tools, an answer can be held to JSON only")
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
    calls = [f"call{i}: inner{i} {lark_string(CLOSE)}" for i in range(len(tools))]
    inner = [rule for i, tool in enumerate(tools) for rule in form.rules(tool, f"inner{i}")]
    return Grammar.lark("\n".join([*rules, f"call: {either}", *calls, *inner]))


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
        raise bad_tools(where, "tool_calls is a list of calls")
    read = [_read_call(call, f"{where}[{place}]") for place, call in enumerate(calls)]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    content = message.get("content")
    return {**kept, "content": "" if content is None else content, "tool_calls": read}


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad_tools(where, "a call has a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise bad_tools(where, "the arguments of a call are no JSON") from error
    if not isinstance(arguments, Mapping | None):
        raise bad_tools(where, "the arguments of a call are no object")
    return {**call, "function": {**function, "arguments": arguments or {}}}
