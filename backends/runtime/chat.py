"""Chat templates: messages to the text of a prompt.

Templates come with a checkpoint and are programs, so they run in Jinja's sandbox over plain JSON
data: they reach no attribute of Python's internals and cannot change what they are given. The
environment has what published templates rely on (block trimming, loop controls, `raise_exception`,
`strftime_now`, a `tojson` that does not escape HTML, `{% generation %}`), so that a prompt is byte
for byte the one the model was trained with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from edgecc.backends.runtime.tokenizer import read_config, unicode_text
from edgecc.errors import BundleError, RequestError, did_you_mean

Message = Mapping[str, Any]
"""One message of a chat: `role`, `content` and whatever else the template reads."""

_NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

_MESSAGES_HELP = 'pass messages=[{"role": "user", "content": "..."}]'

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplates:
    """The chat templates of a bundle.

    Args:
        templates: Template text by name. `default` is the one used unless another is asked for, or
            tools are given and there is one named `tool_use`.
        special_tokens: What templates may name: `bos_token`, `eos_token` and so on, as text.
        now: The clock that `strftime_now` reads.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._sources = dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._now = now
        self._environment = _environment(now)
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplates:
        """Collect the templates of a tokenizer folder; there may be none.

        Files (`chat_template.jinja`, `additional_chat_templates/*.jinja`) replace what
        `tokenizer_config.json` holds, which is one template or a list of named ones.

        Raises:
            BundleError: A file cannot be read, or the config is malformed.
        """
        config = read_config(directory)
        files = _template_files(directory)
        special_tokens = {
            name: text
            for name in _NAMED_SPECIAL_TOKENS
            if (text := _token_text(config.get(name))) is not None
        }
        return cls(files or _templates_in_config(config, directory), special_tokens)

    def with_default(self, template: str) -> ChatTemplates:
        """These templates with another default; no `tool_use` goes before it."""
        others = {name: text for name, text in self._sources.items() if name != "tool_use"}
        return ChatTemplates({**others, "default": template}, self._special_tokens, now=self._now)

    @property
    def names(self) -> list[str]:
        """Names of the templates, sorted."""
        return sorted(self._sources)

    def mentions(self, word: str) -> bool:
        """Whether one of the templates has a word in it, such as the name of a role."""
        return any(word in source for source in self._sources.values())

    @property
    def tool_source(self) -> str | None:
        """Text of the template that is used with tools; None if it takes none."""
        for name in ("tool_use", "default"):
            source = self._sources.get(name)
            if source is not None:
                parsed = self._environment.parse(source)
                names = jinja2.meta.find_undeclared_variables(parsed)
                return source if "tools" in names else None
        return None

    def check(self) -> None:
        """Compile every template.

        Raises:
            BundleError: One of them is not Jinja.
        """
        for name in self.names:
            self._compile(name)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a chat.

        Args:
            messages: The chat so far, oldest first. Keys whose value is None are left out;
                reasoning is found under any of the names in use.
            tools: JSON schemas of the functions the model may call.
            documents: Documents for templates that take them.
            add_generation_prompt: End with the beginning of the assistant's answer.
            template: Name of the template to use.
            **variables: Further variables that the template reads (`enable_thinking`, ...). They
                go before special tokens of the same name.

        Returns:
            The prompt. It names its special tokens itself.

        Raises:
            RequestError: There is no such template, the messages are malformed, or the template
                refuses them; the message is the template's own.
            BundleError: The template is not Jinja.
        """
        name = self._choose(template, tools is not None)
        scope = {
            **self._special_tokens,
            **{key: _plain(value, key) for key, value in variables.items()},
            "messages": _plain_messages(messages),
            "tools": None if tools is None else _plain(list(tools), "tools"),
            "documents": None if documents is None else _plain(list(documents), "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        compiled = self._compile(name)
        try:
            return compiled.render(scope)
        except _Refusal as error:
            raise RequestError(
                "chat/refused-by-template", str(error), where=f"chat template '{name}'"
            ) from error
        except Exception as error:  # a template is a program: anything may go wrong in it
            raise RequestError(
                "chat/template-failed",
                f"{type(error).__name__}: {error}",
                where=f"chat template '{name}'",
                help="check the roles and contents of the messages against what the model expects",
            ) from error

    def _choose(self, template: str | None, with_tools: bool) -> str:
        if not self._sources:
            raise RequestError(
                "chat/no-template",
                "the model has no chat template",
                help="pass a prompt instead of messages",
            )
        if template is not None and template not in self._sources:
            raise RequestError(
                "chat/unknown-template",
                f"there is no chat template '{template}'",
                help=did_you_mean(template, self._sources),
            )
        name = template or ("tool_use" if with_tools and "tool_use" in self._sources else "default")
        if name not in self._sources:
            raise RequestError(
                "chat/no-default-template",
                "the model has several chat templates and none is the default",
                help="name one of: " + ", ".join(self.names),
            )
        return name

    def _compile(self, name: str) -> jinja2.Template:
        compiled = self._compiled.get(name)
        if compiled is None:
            try:
                compiled = self._environment.from_string(self._sources[name])
            except jinja2.TemplateSyntaxError as error:
                raise BundleError(
                    "chat/template-syntax",
                    f"line {error.lineno}: {error.message}",
                    where=f"chat template '{name}'",
                ) from error
            self._compiled[name] = compiled
        return compiled


class _Refusal(Exception):
    """What a template raised with `raise_exception`."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; rendering just shows it."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in the reference: names set inside it stay inside.
        show = self.call_method("_show")
        return jinja2.nodes.CallBlock(show, [], [], body).set_lineno(line)

    def _show(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscored names, which could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` is a legal keyword here
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _DictMaker:
    """The global `dict`: what templates call, but not the type with its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses to print what it hides instead of printing nothing."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise jinja2.exceptions.SecurityError(
            f"templates cannot reach {attribute!r} of a {type(obj).__name__}"
        )


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )

    def strftime_now(format: str) -> str:
        return now().strftime(format)

    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=strftime_now,
        namespace=_Namespace,
        dict=_DictMaker(),
    )
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the model saw it in training: no HTML escapes, Unicode as it is."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


def _plain_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as new plain dicts, without empty keys and with reasoning under its usual names."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError(
            "chat/bad-messages",
            f"expected a list of messages, not a {type(messages).__name__}",
            help=_MESSAGES_HELP,
        )
    if not messages:
        raise RequestError("request/empty-prompt", "there are no messages", help=_MESSAGES_HELP)
    plain = []
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                "chat/bad-messages", "a message is an object with a role", where=where
            )
        kept = {key: value for key, value in message.items() if value is not None}
        plain.append(_with_reasoning(_plain(kept, where)))
    return plain


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    found = [message[key] for key in _REASONING_KEYS if message.get(key) is not None]
    if not found:
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


def _plain(value: Any, where: str) -> Any:
    """A copy of a value in plain JSON types: a template gets no object that has methods of ours.

    Raises:
        RequestError: Something in it is not JSON, or no Unicode, or it is nested too deeply.
    """
    try:
        return _copied(value, where)
    except RecursionError as error:
        raise RequestError(
            "chat/too-deep", "values are nested too deeply for a template", where=where
        ) from error


def _copied(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    # Subclasses (string enums, NumPy floats) become the bare value.
    if isinstance(value, str):
        return unicode_text(str.__str__(value), where)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_copied(key, where): _copied(item, where) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item, where) for item in value]
    if isinstance(value, tuple):
        return tuple(_copied(item, where) for item in value)
    raise RequestError(
        "chat/not-json",
        f"a {type(value).__name__} cannot be passed to a chat template",
        where=where,
        help="pass strings, numbers, lists and dicts",
    )


def _template_files(directory: Path) -> dict[str, str]:
    files = {
        path.stem: path
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    single = directory / "chat_template.jinja"
    if single.is_file():
        files["default"] = single
    return {name: _read(path) for name, path in files.items()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(
            "chat/unreadable-template", f"cannot be read as text: {error}", where=str(path)
        ) from error


def _templates_in_config(config: Mapping[str, Any], directory: Path) -> dict[str, str]:
    found = config.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    entries = (
        [{"name": name, "template": text} for name, text in found.items()]
        if isinstance(found, Mapping)
        else found
    )
    try:
        named = {entry["name"]: entry["template"] for entry in entries}
    except (TypeError, KeyError) as error:
        raise _bad_templates(directory) from error
    if not all(isinstance(item, str) for pair in named.items() for item in pair):
        raise _bad_templates(directory)
    return named


def _bad_templates(directory: Path) -> BundleError:
    return BundleError(
        "chat/bad-templates",
        "expected a template, or a list of objects with a name and a template",
        where=f"{directory / 'tokenizer_config.json'}: chat_template",
    )


def _token_text(value: object) -> str | None:
    """A special token as text: the config has it as a string or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None
