"""How models write calls of tools, and the grammars of that."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from edgecc.backends.runtime import ChatTemplates
from edgecc.backends.runtime.grammar import json_rule, lark_string
from edgecc.backends.server.call_readers import OPEN, JsonReader
from edgecc.backends.server.errors import bad_tools
from edgecc.backends.server.protocol import Tool
from edgecc.backends.server.tag_schemas import object_schema, value_rule
from edgecc.backends.server.tool_calls import MakeReader, TagReader
from edgecc.errors import RequestError

_DEFINITIONS = ("$defs", "definitions")
_TAG_NAME = re.compile(r"[^>\n]+")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolForm(ABC):
    """How a model writes calls."""

    @abstractmethod
    def reader(self, tools: Sequence[Tool]) -> MakeReader:
        """Reads calls."""

    @abstractmethod
    def rules(self, tool: Tool, name: str) -> list[str]:
        """Rules of a grammar; the first one, of this name, is what stands between a call's tags.

        Names of the others begin with this one.
        """


class JsonForm(ToolForm):
    """As JSON: Qwen2.5, Qwen3, Hermes."""

    def reader(self, tools: Sequence[Tool]) -> MakeReader:
        """See `ToolForm`."""
        return JsonReader

    def rules(self, tool: Tool, name: str) -> list[str]:
        """See `ToolForm`."""
        schema = {**schema_of(tool), "type": "object"}
        head = '\n{"name": ' + json.dumps(tool.function.name) + ', "arguments": '
        return [f'{name}: {lark_string(head)} {json_rule(schema)} "}}\\n"']


class TagForm(ToolForm):
    """As tags: Qwen3-Coder, Qwen3.5."""

    def reader(self, tools: Sequence[Tool]) -> MakeReader:
        """See `ToolForm`."""
        schemas = {tool.function.name: schema_of(tool) for tool in tools}
        return lambda: TagReader(schemas)

    def rules(self, tool: Tool, name: str) -> list[str]:
        """See `ToolForm`. Parameters come in the order of the schema.

        Raises:
            RequestError: The name of one cannot stand in a tag, or a schema says what calls in tags
                cannot be held to.
        """
        schema = schema_of(tool)
        what = f"tool {tool.function.name!r}"
        required = schema.get("required", [])
        definitions = {key: value for key, value in schema.items() if key in _DEFINITIONS}
        parts, rules = [lark_string(f"\n<function={tool.function.name}>\n")], []
        for index, (key, value) in enumerate(object_schema(schema, what).items()):
            if not _TAG_NAME.fullmatch(key):
                raise bad_tools("tools", f"{what}: the parameter {key!r:.40} has no name for a tag")
            place = f"{what}, parameter {key!r:.40}"
            held, more = value_rule(value, definitions, f"{name}_{index}", place)
            opening = lark_string(f"<parameter={key}>\n")
            parts.append(f"({opening} {held})" + ("" if key in required else "?"))
            rules += more
        return [" ".join([f"{name}:", *parts, lark_string("</function>\n")]), *rules]


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


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    return _NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters
