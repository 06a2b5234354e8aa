"""Prompts to text: what `edgecc.load` returns."""

from __future__ import annotations

import threading
import warnings
from collections import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, TypeVar, Unpack

from edgecc.backends.base import Engine, Executable, GreedyRounds, IntArray, greedy_rounds
from edgecc.backends.runtime.answer import Answer, Chunk, Generation
from edgecc.backends.runtime.batch import Batch
from edgecc.backends.runtime.calls import Entry, Steps
from edgecc.backends.runtime.chat import ChatTemplates, Message
from edgecc.backends.runtime.decoder import Decoder, PlainDecoder
from edgecc.backends.runtime.grammar import CompiledGrammar, Grammar, GrammarCompiler
from edgecc.backends.runtime.model_info import ModelInfo
from edgecc.backends.runtime.prompt import Images, PromptReader
from edgecc.backends.runtime.proposer import PROPOSERS
from edgecc.backends.runtime.request import (
    Request,
    check_confidence_threshold,
    check_lookup,
    check_max_new_tokens,
    check_num_speculative_tokens,
    check_stop,
)
from edgecc.backends.runtime.round import Round
from edgecc.backends.runtime.sampling import (
    SamplingOptions,
    SamplingParams,
    params_from_generation_config,
    resolve_sampling,
)
from edgecc.backends.runtime.scheduler import Scheduler, slots_of
from edgecc.backends.runtime.session import Session
from edgecc.backends.runtime.speculative import LookupDecoder, SpeculativeDecoder
from edgecc.backends.runtime.stats import (
    CAUSES,
    LOOKUP_CAUSES,
    OTHER_CAUSES,
    AcceptanceMonitor,
    SpeculationWarning,
)
from edgecc.backends.runtime.tokenizer import Tokenizer
from edgecc.errors import RequestError, UnsupportedError
from edgecc.prompt_lookup import PromptLookup

T = TypeVar("T")


class Generator:
    """Generates text with one bundle: one request at a time, or a batch of them.

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
        self._reader = PromptReader(model, tokenizer, self._chat)
        self._grammars = None if tokenizer is None else GrammarCompiler(tokenizer, model.num_tokens)
        self._entries: dict[Entry, Executable] = {Entry.TARGET: engine.entry(Entry.TARGET)}
        if model.draft is not None:
            self._entries[Entry.DRAFT] = engine.entry(Entry.DRAFT)
        if model.images is not None:
            self._entries[Entry.VISION] = engine.entry(Entry.VISION)
        self._session = self._new_session(greedy_rounds(engine))
        method = model.draft.method if model.draft is not None else ""
        self._monitor = AcceptanceMonitor(CAUSES.get(method, OTHER_CAUSES))
        self._lookup_monitor = AcceptanceMonitor(LOOKUP_CAUSES)
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
        prompt_lookup: PromptLookup | None = None,
        confidence_threshold: float | None = None,
        grammar: Grammar | None = None,
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
            prompt_lookup: Propose what followed the same tokens before, instead of asking the
                draft; of a bundle compiled for that, other numbers of tokens.
            confidence_threshold: Verify no proposal that the draft's confidence head gives a lower
                probability, from 0 to 1, nor those after it.
            grammar: What the text must follow; needs llguidance, the extra `grammar`. The text may
                end before it is complete only at max_new_tokens or at one of `stop`.
            sampling: How tokens are chosen.
            **options: Fields of `SamplingParams`, instead of those of `sampling`: `temperature`,
                `top_k`, `top_p`, `min_p`, `repetition_penalty`, `presence_penalty`,
                `frequency_penalty`, `logit_bias`, `seed`, `logprobs`.

        Raises:
            RequestError: An argument is out of range, an image cannot be used, or another request
                is running.
            ResourceError: An image cannot be read.
            UnsupportedError: Pillow, which reads images, or llguidance, which reads grammars, is
                not installed.
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
            prompt_lookup=prompt_lookup,
            confidence_threshold=confidence_threshold,
            grammar=grammar,
            sampling=sampling,
            **options,
        )
        with closing(stream) as chunks:
            return Generation.of(_shown(chunks, on_text))

    def generate_batch(self, requests: Iterable[Request]) -> list[Generation]:
        """Answer several requests, as many at a time as the bundle was compiled for.

        Each answer is the one that its request gets alone.

        Args:
            requests: From `request`.

        Returns:
            The answers, in the order of the requests.

        Raises:
            RequestError: Another request is running, or what was given are no requests.
            EdgeccError: A request failed; the others are dropped.
        """
        if not isinstance(requests, Iterable):
            raise RequestError(
                "request/bad-request", f"requests are a list, not a {type(requests).__name__}"
            )
        with self.batch() as batch:
            chunks: dict[int, list[Chunk]] = {batch.submit(request): [] for request in requests}
            while batch:
                for progress in batch.step():
                    if progress.error is not None:
                        raise progress.error
                    if progress.chunk is not None:
                        chunks[progress.ticket].append(progress.chunk)
        return [Generation.of(own) for own in chunks.values()]

    def batch(self) -> Batch:
        """Answer requests as they come; see `Batch`.

        Nothing else runs until it is closed or dropped.

        Raises:
            RequestError: Another request is running, or the generator is closed.
        """
        self._check_open()
        self._begin()
        rounds = greedy_rounds(self._engine) if slots_of(self._entries) == 1 else None
        return Batch(
            Scheduler(self._entries, lambda: self._new_session(rounds)),
            self._steps,
            self._answer,
            self._guarded,
            self._busy.release,
        )

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
        prompt_lookup: PromptLookup | None = None,
        confidence_threshold: float | None = None,
        grammar: Grammar | None = None,
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
            UnsupportedError: Pillow, which reads images, or llguidance, which reads grammars, is
                not installed.
        """
        request = self.request(
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
            prompt_lookup=prompt_lookup,
            confidence_threshold=confidence_threshold,
            grammar=grammar,
            sampling=sampling,
            **options,
        )
        return self._run(request)

    def request(
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
        prompt_lookup: PromptLookup | None = None,
        confidence_threshold: float | None = None,
        grammar: Grammar | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Request:
        """Check the arguments of `generate` and keep them, for a batch.

        Raises:
            RequestError: An argument is out of range, or an image cannot be used.
            ResourceError: An image cannot be read.
            UnsupportedError: Pillow, which reads images, or llguidance, which reads grammars, is
                not installed.
        """
        self._check_open()
        read = self._reader.read(prompt, token_ids, messages, images)
        lookup = check_lookup(prompt_lookup, self._model)
        return Request(
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
            lookup=lookup,
            confidence_threshold=check_confidence_threshold(
                confidence_threshold, self._model, lookup
            ),
            grammar=self._compiled(grammar),
        )

    def prepare_grammars(self) -> bool:
        """Read the tokenizer for grammars now: seconds for large vocabularies, once.

        Returns:
            Whether there can be grammars: llguidance is installed and reads the tokenizer.
        """
        if self._grammars is None:
            return False
        try:
            self._grammars.prepare()
        except UnsupportedError:
            return False
        return True

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

    def _compiled(self, grammar: Grammar | None) -> CompiledGrammar | None:
        if grammar is None:
            return None
        if not isinstance(grammar, Grammar):
            raise RequestError(
                "request/bad-grammar",
                f"grammar must be a Grammar, not a {type(grammar).__name__}",
                help="for example grammar=edgecc.Grammar.json_schema(schema)",
            )
        if self._grammars is None:
            raise RequestError("request/no-tokenizer", "a grammar needs a bundle with a tokenizer")
        return self._grammars.compile(grammar)

    def _new_session(self, rounds: GreedyRounds | None) -> Session:
        model, entries = self._model, self._entries
        return Session(
            entries[Entry.TARGET],
            entries.get(Entry.DRAFT),
            prefill_chunk=model.prefill_chunk,
            rounds=rounds,
            proposer=PROPOSERS[model.draft.method if model.draft else "dspark"],
            vision=entries.get(Entry.VISION),
            feature_size=model.images.feature_size if model.images else 0,
        )

    def _decoder(self, session: Session, request: Request) -> Decoder:
        draft, lookup = self._model.draft, request.lookup
        wanted, adaptive = request.num_speculative_tokens, request.adaptive_speculation
        if wanted and lookup is not None:
            return LookupDecoder(session, self._model, lookup, wanted, adaptive=adaptive)
        if draft is None or not wanted:
            return PlainDecoder(session, self._model)
        return SpeculativeDecoder(
            session,
            self._model,
            draft,
            wanted,
            adaptive=adaptive,
            confidence_threshold=request.confidence_threshold,
        )

    def _steps(self, session: Session, request: Request) -> abc.Iterator[Steps[Round]]:
        return self._decoder(session, request).steps(
            request.token_ids,
            request.max_new_tokens,
            request.stop_ids,
            request.sampling,
            request.images,
            None if request.grammar is None else request.grammar.start(request.stop_ids),
        )

    def _answer(self, request: Request) -> Answer:
        monitor = self._monitor if request.lookup is None else self._lookup_monitor
        return Answer(request, self._tokenizer, monitor)

    def _begin(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise RequestError(
                "request/busy",
                "another request is running on this generator",
                help="finish or close its stream or batch first, or load the bundle twice",
            )

    def _run(self, request: Request) -> abc.Generator[Chunk, None, None]:
        self._begin()
        try:
            yield from self._chunks(request)
        finally:
            self._busy.release()

    def _chunks(self, request: Request) -> abc.Iterator[Chunk]:
        answer, session = self._answer(request), self._session
        rounds = map(session.run, self._steps(session, request))
        while (step := self._guarded(lambda: next(rounds, None))) is not None:
            chunk = answer.add(step)
            if answer.finding is not None:
                warnings.warn(answer.finding, SpeculationWarning, stacklevel=3)
            yield chunk
            if chunk.finish_reason is not None:
                return
        yield answer.end()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError(
                "request/closed", "the generator is closed", help="load the bundle again"
            )

    def _guarded(self, work: Callable[[], T]) -> T:
        """Do something with the engine: it is not closed meanwhile, nor used once it is."""
        with self._in_round:
            self._check_open()
            return work()


def _shown(
    chunks: abc.Iterable[Chunk], on_text: Callable[[str], None] | None
) -> abc.Iterator[Chunk]:
    """The same chunks, each piece of text handed out as it comes."""
    for chunk in chunks:
        if chunk.text and on_text is not None:
            on_text(chunk.text)
        yield chunk
