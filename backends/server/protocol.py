"""What requests say: the fields of OpenAI's API that are known here, and our own.

Types are strict: a number is no string. Ranges are checked where requests are read, by the runtime.
Fields that are not listed are kept apart, as `model_extra`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

_MAX_STOPS = 64
_MAX_CHOICES = 128
_MAX_TOOLS = 128

Stop = Annotated[str, StringConstraints(max_length=1024)]

Messages = Annotated[list[dict[str, Any]], Field(min_length=1)]


class _Body(BaseModel):
    """A body that may have more fields than we know."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class StreamOptions(_Body):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_rounds: bool | None = None


class JsonSchemaFormat(_Body):
    """The schema of an answer. It is held to whether or not it is `strict`."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_Body):
    """What an answer is."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(_Body):
    """The same as vLLM has it: one of the fields."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class FunctionSpec(_Body):
    """A function that a model may call."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """A tool: only functions are."""

    type: Literal["function"]
    function: FunctionSpec

    def shown(self) -> dict[str, Any]:
        """As chat templates take it: what the client wrote, without what is for the server."""
        return self.model_dump(exclude_unset=True, exclude={"function": {"strict"}})


class FunctionName(_Body):
    """A function, by name."""

    name: str


class NamedChoice(_Body):
    """The tool to call."""

    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], Field(max_length=_MAX_TOOLS)]


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
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

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
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(_Body):
    """`/tokenize`: one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None


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
