"""From bodies to requests that the runtime can run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgecc.backends.runtime import ChatTemplates, Generator, Grammar, Request, SamplingParams
from edgecc.backends.runtime.image_messages import images_of, without_sources
from edgecc.backends.runtime.tokenizer import unicode_text
from edgecc.backends.server.errors import UnknownModelError
from edgecc.backends.server.formats import naming_the_grammar, wanted_grammar
from edgecc.backends.server.history import readable
from edgecc.backends.server.options import ServerOptions
from edgecc.backends.server.protocol import (
    HARMLESS,
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    GenerationBody,
    TokenizeBody,
    Tool,
)
from edgecc.backends.server.tool_calls import ToolCallParser
from edgecc.backends.server.tool_forms import form_of
from edgecc.backends.server.tools import (
    tool_grammar,
    wanted_tools,
)
from edgecc.errors import RequestError

MAX_TOP_LOGPROBS = 20
"""As in OpenAI's API: each costs a sort of the vocabulary and a line of the answer."""

DEFAULT_COMPLETION_TOKENS = 16
"""As in OpenAI's API; a chat is answered up to the length of the model."""

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "template", "self"}
)
_SHOWN_FIELD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_SHOWN = 20


class RequestReader:
    """Reads bodies for one model.

    What a request leaves open about sampling is as the checkpoint recommends it, with temperature
    1 if it says nothing: what clients of other servers expect.

    Args:
        generator: Checks requests; called from any thread.
        options: Of the server.
    """

    def __init__(self, generator: Generator, options: ServerOptions) -> None:
        self._generator = generator
        self._options = options
        self._chat = _templates(generator.chat, options)
        self._chat.check()
        self._sampling = generator.recommended_sampling

    def check_model(self, name: str | None) -> None:
        """Check that a request is for the model that is served; one without a name is.

        Raises:
            UnknownModelError: It is for another one.
        """
        if name is not None and name != self._options.model_name:
            raise UnknownModelError(
                "server/unknown-model",
                f"the model {name[:200]!r} is not served here",
                where="model",
                help=f"valid: {self._options.model_name}",
            )

    def ignored(self, body: GenerationBody | TokenizeBody) -> list[str]:
        """Names of fields that nothing here reads.

        Raises:
            RequestError: A field asks for what we cannot do, or, if the server is strict, is
                unknown.
        """
        extra = {k: v for k, v in (body.model_extra or {}).items() if v is not None}
        for name, value in extra.items():
            if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
                raise RequestError(
                    "server/unsupported-field",
                    f"{name} is not supported",
                    where=name,
                    help="leave it out",
                )
        unknown = [name for name in extra if name not in UNSUPPORTED and name not in HARMLESS]
        shown = [name for name in unknown if _SHOWN_FIELD.fullmatch(name)][:_MAX_SHOWN]
        if unknown and self._options.strict:
            raise RequestError(
                "server/unknown-field",
                "unknown fields: " + (", ".join(shown) or f"{len(unknown)}"),
                where=shown[0] if shown else "",
                help="leave them out",
            )
        return shown

    def completion(self, body: CompletionBody) -> list[Request]:
        """The requests of `/v1/completions`: `n` for each prompt, one after another.

        Raises:
            EdgeccError: One cannot be run.
        """
        count = _checked_logprobs("logprobs", body.logprobs)
        prompts = [
            {"prompt": unicode_text(prompt, "prompt")}
            if isinstance(prompt, str)
            else {"token_ids": prompt}
            for prompt in _prompts(body.prompt)
        ]
        most = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        with naming_the_grammar(body):
            return self._requests(body, prompts, most, count, wanted_grammar(body))

    def chat(self, body: ChatBody) -> list[Request]:
        """The `n` requests of `/v1/chat/completions`.

        Raises:
            EdgeccError: It cannot be run.
        """
        count = _checked_logprobs("top_logprobs", body.top_logprobs)
        if count is not None and not body.logprobs:
            raise RequestError(
                "server/logprobs", "top_logprobs needs logprobs: true", where="top_logprobs"
            )
        limits = [n for n in (body.max_completion_tokens, body.max_tokens) if n is not None]
        most = limits[0] if limits else self._generator.model.max_model_len
        logprobs = (count or 0) if body.logprobs else None
        with naming_the_grammar(body):
            tools, grammar = wanted_tools(body), wanted_grammar(body)
            if tools:
                grammar = tool_grammar(body, tools, form_of(self._chat), grammar)
            return self._requests(body, [self._rendered(body, tools)], most, logprobs, grammar)

    def parser(self, body: ChatBody) -> Callable[[], ToolCallParser] | None:
        """Makes what finds calls of tools in an answer; None if there are none to call.

        Raises:
            RequestError: As `chat`.
        """
        tools = wanted_tools(body)
        if not tools:
            return None
        reader = form_of(self._chat).reader(tools)
        most = 1 if body.parallel_tool_calls is False else None
        return lambda: ToolCallParser(reader, most)

    def tokens(self, body: TokenizeBody) -> list[int]:
        """The token ids of `/tokenize`, images left out.

        Raises:
            RequestError: Not one of prompt and messages was given, or it cannot be used.
        """
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("request/one-prompt", "give exactly one of prompt and messages")
        text = None if body.prompt is None else unicode_text(body.prompt, "prompt")
        if text is None:
            text = self._rendered(body, body.tools or [])["prompt"]
        return self._generator.tokenizer.encode(text)

    def _rendered(self, body: ChatBody | TokenizeBody, tools: Sequence[Tool]) -> dict[str, Any]:
        reads_images = self._generator.model.images is not None
        messages = readable(
            body.messages or (),
            images=reads_images,
            developer=self._chat.mentions("developer"),
        )
        variables = body.chat_template_kwargs or {}
        if taken := sorted(_RESERVED & variables.keys()):
            raise RequestError(
                "server/template-variable",
                f"{taken[0]} is no variable of a template",
                where="chat_template_kwargs",
            )
        images = images_of(messages, allow_files=False)
        if images and not reads_images:
            raise RequestError(
                "request/no-vision",
                "the model reads text only, and there is an image",
                where=images[0].name,
            )
        text = self._chat.render(
            without_sources(messages) if images else messages,
            tools=[tool.shown() for tool in tools] or None,
            add_generation_prompt=body.add_generation_prompt is not False,
            **variables,
        )
        return {"prompt": text, "images": images or None}

    def _requests(
        self,
        body: GenerationBody,
        prompts: Sequence[Mapping[str, Any]],
        max_new_tokens: int,
        logprobs: int | None,
        grammar: Grammar | None,
    ) -> list[Request]:
        if max_new_tokens < 0:
            fields = ("max_completion_tokens", "max_tokens")
            field = next(name for name in fields if getattr(body, name, None) is not None)
            raise RequestError(
                "request/bad-max-new-tokens",
                f"{field} must be 0 or more, not {max_new_tokens}",
                where=field,
            )
        options = self._options
        wanted: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "num_speculative_tokens": body.num_speculative_tokens
            if body.num_speculative_tokens is not None
            else options.num_speculative_tokens,
            "confidence_threshold": body.confidence_threshold
            if body.confidence_threshold is not None
            else options.confidence_threshold,
            "speculation": options.speculation and not body.disable_spec_decode,
            "stop": body.stop if body.stop is not None else (),
            "ignore_eos": bool(body.ignore_eos),
            "grammar": grammar,
        }
        sampling = self._sampling_of(body, logprobs)
        made = []
        for prompt in prompts:
            first = self._generator.request(**prompt, **wanted, sampling=sampling)
            made += [_choice(first, body.seed, i) for i in range(body.n or 1)]
        return made

    def _sampling_of(self, body: GenerationBody, logprobs: int | None) -> SamplingParams:
        given = {name: getattr(body, name) for name in _SAMPLING}
        changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        if body.logit_bias is not None:
            changes["logit_bias"] = _bias(body.logit_bias)
        return replace(self._sampling, **changes, seed=body.seed, logprobs=logprobs)


def _templates(chat: ChatTemplates, options: ServerOptions) -> ChatTemplates:
    return chat if options.chat_template is None else chat.with_default(options.chat_template)


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    """One or several prompts as several."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


def _choice(request: Request, seed: int | None, index: int) -> Request:
    """The same request for another answer: with the next seed, or one of its own."""
    if index == 0 or request.sampling.greedy:
        return request
    if seed is None:
        return replace(request, sampling=request.sampling.with_new_seed())
    return replace(request, sampling=replace(request.sampling, seed=(seed + index) % 2**64))


def _checked_logprobs(name: str, value: int | None) -> int | None:
    if value is None or 0 <= value <= MAX_TOP_LOGPROBS:
        return value
    raise RequestError(
        "request/bad-logprobs",
        f"{name} must be from 0 to {MAX_TOP_LOGPROBS}, not {value}",
        where=name,
    )


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    """Biases by id: JSON has them by text."""
    for token in bias:
        # The length first: Python refuses to read a number of thousands of digits.
        if not (token.isascii() and token.isdecimal() and len(token) < 19):
            raise RequestError(
                "request/bad-logit-bias",
                f"{token[:40]!r} in logit_bias is no token id",
                where="logit_bias",
            )
    return {int(token): value for token, value in bias.items()}
