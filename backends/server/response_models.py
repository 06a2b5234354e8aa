"""What answers look like, for the OpenAPI document and whoever makes a client from it.

Answers are not built from these: they come from `replies`. The tests check that they agree.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "tool_calls"]


class _Answer(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class ErrorDetails(_Answer):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Answer):
    """Every answer that is not 200."""

    error: ErrorDetails


class StatusAnswer(_Answer):
    """`/health`, `/health/ready`."""

    status: str


class ModelAnswer(_Answer):
    """A model, and its limits in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    max_input_len: int
    num_speculative_tokens: int


class ModelsAnswer(_Answer):
    """`/v1/models`."""

    object: Literal["list"]
    data: list[ModelAnswer]


class TokenizeAnswer(_Answer):
    """`/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]


class Usage(_Answer):
    """Counts of tokens; those of the draft are edgecc's own."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    draft_tokens: int
    accepted_tokens: int


class _Whole(_Answer):
    id: str
    created: int
    model: str
    usage: Usage


class CompletionLogprobs(_Answer):
    """Of each token of a completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(_Answer):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class CompletionAnswer(_Whole):
    """`/v1/completions`, if it is not streamed."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TopLogprob(_Answer):
    """A token that might have been; `bytes` are those of part of a character as well."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of a chat."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """Of each token of a chat."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(_Answer):
    """A function to call; the arguments are JSON unless the answer was cut."""

    name: str
    arguments: str


class ToolCall(_Answer):
    """A tool to call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(_Answer):
    """What the assistant says; `tool_calls` is there if there are any."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = []


class ChatChoice(_Answer):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatAnswer(_Whole):
    """`/v1/chat/completions`, if it is not streamed."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


def documented(
    answer: type[BaseModel], *, streamed: bool = False
) -> dict[int | str, dict[str, Any]]:
    """The answers of an endpoint, as FastAPI's `responses`.

    Args:
        answer: The one with status 200.
        streamed: Whether it comes as events if the request says so.
    """
    good: dict[str, Any] = {"model": answer}
    if streamed:
        good["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: good, "4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}
