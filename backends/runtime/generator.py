"""Prompts to text: what `edgecc.load` returns."""

from __future__ import annotations

import threading
import warnings
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any, Unpack

from edgecc.backends.base import Engine, IntArray, greedy_rounds
from edgecc.backends.runtime.chat import ChatTemplates, Message
from edgecc.backends.runtime.decoder import (
    Decoder,
    FinishReason,
    PlainDecoder,
    Round,
    SpeculativeDecoder,
)
from edgecc.backends.runtime.model_info import ModelInfo
from edgecc.backends.runtime.prompt import Images, PromptReader
from edgecc.backends.runtime.proposer import PROPOSERS
from edgecc.backends.runtime.request import (
    Request,
    check_max_new_tokens,
    check_num_speculative_tokens,
    check_stop,
)
from edgecc.backends.runtime.sampling import (
    SamplingOptions,
    SamplingParams,
    TokenLogprobs,
    params_from_generation_config,
    resolve_sampling,
)
from edgecc.backends.runtime.session import Session
from edgecc.backends.runtime.stats import AcceptanceMonitor, SpeculationWarning, Stats
from edgecc.backends.runtime.text import TextBuilder
from edgecc.backends.runtime.tokenizer import Tokenizer
from edgecc.errors import RequestError


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added to an answer.

    Text and tokens of one chunk need not belong together: text waits until its characters are
    complete and until it cannot be the beginning of a stop string.

    Attributes:
        text: The next piece of text, in whole characters; may be empty.
        token_ids: The tokens added; several with speculation.
        finish_reason: Set on the last chunk.
        stats: Counts and times so far: one object, which grows until the last chunk.
        logprobs: Of each of `token_ids`; None unless asked for.
        seed: What random numbers follow from; None where there are none.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer.

    Attributes:
        token_ids: The tokens generated, up to and with the stop token or the token that completes a
            stop string.
        text: Their text, without special tokens and up to a stop string. A character cut off by the
            length limit shows as U+FFFD.
        finish_reason: `stop` at a stop token or stop string, `length` at a limit.
        prompt_tokens: Tokens of the prompt.
        stats: Counts and times.
        logprobs: Of each of `token_ids`; None unless asked for.
        seed: What random numbers followed from; None where there were none.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None
    seed: int | None = None


class Generator:
    """Generates text with one bundle, one request at a time.

    Args:
        engine: The bundle's entries on a device; closed with the generator.
        model: What the bundle says about the model.
        tokenizer: The bundle's tokenizer; without it there are tokens only.
        chat: The bundle's chat templates.
        generation_config: What the checkpoint's `generation_config.json` says.
    """

    def __init__(
        self,
        engine: Engine,
        model: ModelInfo,
        tokenizer: Tokenizer | None = None,
        chat: ChatTemplates | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine = engine
        self._model = model
        self._tokenizer = tokenizer
        self._chat = chat if chat is not None else ChatTemplates({})
        self._generation_config = generation_config or {}
        draft = None if model.draft is None else engine.entry("draft")
        target = engine.entry("target")
        self._reader = PromptReader(model, tokenizer, self._chat)
        self._session = Session(
            target,
            draft,
            prefill_chunk=model.prefill_chunk,
            rounds=greedy_rounds(engine),
            proposer=PROPOSERS[model.draft.method if model.draft else "dspark"],
            vision=engine.entry("vision") if model.images else None,
            feature_size=model.images.feature_size if model.images else 0,
        )
        self._monitor = AcceptanceMonitor()
        self._busy = threading.Lock()
        self._in_round = threading.Lock()
        self._closed = False

    @property
    def engine(self) -> Engine:
        """The bundle's entries on the device."""
        return self._engine

    @property
    def model(self) -> ModelInfo:
        """What the bundle says about the model: its tokens and limits."""
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer.

        Raises:
            RequestError: The bundle has none.
        """
        return self._reader.tokenizer

    @property
    def chat(self) -> ChatTemplates:
        """The bundle's chat templates; possibly none."""
        return self._chat

    @property
    def recommended_sampling(self) -> SamplingParams:
        """What the authors of the checkpoint recommend; temperature 1 if they say nothing.

        Raises:
            RequestError: A value in the checkpoint's `generation_config.json` is out of range.
        """
        return params_from_generation_config(self._generation_config)

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | IntArray | None = None,
        messages: Sequence[Message] | None = None,
        images: Images | None = None,
        max_new_tokens: int = 128,
        num_speculative_tokens: int | None = None,
        speculation: bool = True,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        on_text: Callable[[str], None] | None = None,
        adaptive_speculation: bool = False,
        sampling: SamplingParams | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """Continue a prompt. Exactly one of prompt, token_ids and messages is given.

        Decoding is greedy unless a temperature is set, as an option or in `sampling`. The answer is
        the same with and without speculation; with a temperature, for the same seed.

        Args:
            prompt: Text to continue. Special tokens that it names are encoded as such; none are
                added.
            token_ids: The prompt as token ids.
            messages: A chat to answer; rendered with the bundle's chat template. Images are parts
                of its messages.
            images: Images that go with prompt or token_ids: paths, bytes of files, Pillow images.
                They take the places of the placeholders, in order; a prompt without any has them
                in front.
            max_new_tokens: Most tokens to generate; 0 gives an empty answer. The answer also ends,
                with reason `length`, where the model's length does.
            num_speculative_tokens: Proposals per round, at most the compiled number.
            speculation: Use the draft, if there is one.
            stop: Strings that end the text; they are not part of it.
            ignore_eos: Go on after the model's end tokens.
            on_text: Called with each piece of text as it comes.
            adaptive_speculation: Propose fewer tokens where it is faster by what is measured.
            sampling: How tokens are chosen.
            **options: Fields of `SamplingParams`, instead of those of `sampling`: `temperature`,
                `top_k`, `top_p`, `min_p`, `repetition_penalty`, `presence_penalty`,
                `frequency_penalty`, `logit_bias`, `seed`, `logprobs`.

        Raises:
            RequestError: An argument is out of range, an image cannot be used, or another request
                is running.
            ResourceError: An image cannot be read.
            UnsupportedError: Pillow, which reads images, is not installed.
        """
        stream = self.stream(
            prompt,
            token_ids=token_ids,
            messages=messages,
            images=images,
            max_new_tokens=max_new_tokens,
            num_speculative_tokens=num_speculative_tokens,
            speculation=speculation,
            stop=stop,
            ignore_eos=ignore_eos,
            adaptive_speculation=adaptive_speculation,
            sampling=sampling,
            **options,
        )
        pieces: list[str] = []
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] | None = None
        stats, reason, seed = Stats(), FinishReason.LENGTH, None
        with closing(stream) as chunks:
            for chunk in chunks:
                tokens += chunk.token_ids
                seed = chunk.seed
                if chunk.logprobs is not None:
                    logprobs = [*(logprobs or ()), *chunk.logprobs]
                stats, reason = chunk.stats, chunk.finish_reason or reason
                if chunk.text:
                    pieces.append(chunk.text)
                    if on_text is not None:
                        on_text(chunk.text)
        text = "".join(pieces)
        return Generation(tokens, text, reason, stats.prompt_tokens, stats, logprobs, seed)

    def stream(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | IntArray | None = None,
        messages: Sequence[Message] | None = None,
        images: Images | None = None,
        max_new_tokens: int = 128,
        num_speculative_tokens: int | None = None,
        speculation: bool = True,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        adaptive_speculation: bool = False,
        sampling: SamplingParams | None = None,
        **options: Unpack[SamplingOptions],
    ) -> abc.Generator[Chunk, None, None]:
        """Like `generate`, but hands out each round as it is done.

        The arguments are checked at once, the model runs as chunks are taken. Closing the iterator,
        or dropping it, ends the request.

        Returns:
            The chunks, at least one; the last has the finish reason. Their texts joined are
            `Generation.text`, their tokens joined `Generation.token_ids`.

        Raises:
            RequestError: An argument is out of range, or an image cannot be used; or, when the
                first chunk is taken, another request is running.
            ResourceError: An image cannot be read.
            UnsupportedError: Pillow, which reads images, is not installed.
        """
        self._check_open()
        read = self._reader.read(prompt, token_ids, messages, images)
        request = Request(
            token_ids=read.token_ids,
            images=read.images,
            max_new_tokens=check_max_new_tokens(max_new_tokens),
            num_speculative_tokens=check_num_speculative_tokens(
                num_speculative_tokens, speculation, self._model
            ),
            stop=check_stop(stop, has_tokenizer=self._tokenizer is not None),
            stop_ids=frozenset() if ignore_eos else self._model.eos_token_ids,
            sampling=resolve_sampling(
                sampling,
                options,
                num_tokens=self._model.num_tokens,
                vocab_size=self._model.vocab_size,
            ),
            adaptive_speculation=adaptive_speculation,
        )
        return self._run(request)

    def close(self) -> None:
        """Release the engine; nothing can be generated afterwards.

        A request of another thread ends with an error after the round it is in; so does a stream
        that is taken further.
        """
        with self._in_round:
            self._closed = True
            self._engine.close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _decoder(self, request: Request) -> Decoder:
        draft = self._model.draft
        if draft is None or not request.num_speculative_tokens:
            return PlainDecoder(self._session, self._model)
        wanted = request.num_speculative_tokens
        adaptive = request.adaptive_speculation
        return SpeculativeDecoder(self._session, self._model, draft, wanted, adaptive=adaptive)

    def _run(self, request: Request) -> abc.Generator[Chunk, None, None]:
        if not self._busy.acquire(blocking=False):
            raise RequestError(
                "request/busy",
                "another request is running on this generator",
                help="finish or close its stream first, or load the bundle twice",
            )
        try:
            yield from self._chunks(request)
        finally:
            self._busy.release()

    def _chunks(self, request: Request) -> abc.Iterator[Chunk]:
        stats = Stats(prompt_tokens=len(request.token_ids))
        builder = TextBuilder(self._tokenizer, request.stop, request.stop_ids)
        sampling = request.sampling
        rounds = self._decoder(request).rounds(
            request.token_ids, request.max_new_tokens, request.stop_ids, sampling, request.images
        )
        wants_logprobs = sampling.logprobs is not None
        seed = None if sampling.greedy else sampling.seed
        reason: FinishReason | None = None
        for step in self._while_open(rounds):
            begin = perf_counter()
            tokens, text = builder.push(step.tokens)
            reason = step.finish_reason
            if reason is not None and not builder.stopped:
                text += builder.finish()
            if builder.stopped:
                reason = FinishReason.STOP
            stats.add(step)
            stats.new_tokens += len(tokens)
            stats.host_seconds += perf_counter() - begin
            self._watch(step, stats)
            logprobs = list(step.logprobs[: len(tokens)]) if wants_logprobs else None
            yield Chunk(text, list(tokens), reason, stats, logprobs, seed)
            if reason is not None:
                return
        empty: list[TokenLogprobs] | None = [] if wants_logprobs else None
        yield Chunk("", [], FinishReason.LENGTH, stats, empty, seed)

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError(
                "request/closed", "the generator is closed", help="load the bundle again"
            )

    def _while_open(self, rounds: abc.Iterator[Round]) -> abc.Iterator[Round]:
        """The same rounds; the engine is not closed while one runs, nor used once it is."""
        while True:
            with self._in_round:
                self._check_open()
                step = next(rounds, None)
            if step is None:
                return
            yield step

    def _watch(self, step: Round, stats: Stats) -> None:
        finding = self._monitor.observe(step)
        if finding is not None:
            stats.warnings.append(finding)
            warnings.warn(finding, SpeculationWarning, stacklevel=4)
