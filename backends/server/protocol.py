"""What requests say: the fields of OpenAI's API that are known here, and our own.

Types are strict: a number is no string. Ranges are checked where requests are read, by the runtime.
Fields that are not listed are kept apart, as `model_extra`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

_MAX_STOPS = 64
_MAX_CHOICES = 128

Stop = Annotated[str, StringConstraints(max_length=1024)]

Messages = Annotated[list[dict[str, Any]], Field(min_length=1)]


class _Body(BaseModel):
    """A body that may have more fields than we know."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class StreamOptions(_Body):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_rounds: bool | None = None


class GenerationBody(_Body):
    """What both kinds of requests have. A field that is null counts as absent."""

    model: str | None = None
    max_tokens: int | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=_MAX_STOPS)] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    num_speculative_tokens: int | None = None
    disable_spec_decode: bool | None = None
    confidence_threshold: float | None = None
    user: str | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_rounds(self) -> bool:
        """Whether the events of a stream tell of the rounds they come from."""
        return bool(self.stream_options and self.stream_options.include_rounds)


class CompletionBody(GenerationBody):
    """`/v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[list[int]], Field(min_length=1)]
    )
    logprobs: int | None = None


class ChatBody(GenerationBody):
    """`/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(_Body):
    """`/tokenize`: one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
"""Fields that would change the answer and that we cannot do, with the values that ask for nothing.
They are never ignored."""

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
    }
)
"""Fields for OpenAI's own service. They change no answer and are not worth a remark."""
