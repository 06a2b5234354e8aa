"""The runtime: speculative decoding over any engine.

From the outside in: `load` opens a bundle and returns a `Generator` (prompts, stop rules, text);
it runs a `Decoder` (draft, verify, accept) over a `Session` (tokens and lengths of one sequence),
whose calls of the engine's executables are values: a `Scheduler` makes those of several sequences
together, for a `Batch` of requests. Nothing here imports the compiler.
"""

from __future__ import annotations

from edgecc.backends.runtime.answer import Chunk, Generation
from edgecc.backends.runtime.batch import Batch, Progress
from edgecc.backends.runtime.chat import ChatTemplates, Message
from edgecc.backends.runtime.decoder import Decoder, PlainDecoder
from edgecc.backends.runtime.generator import Generator
from edgecc.backends.runtime.grammar import Grammar
from edgecc.backends.runtime.loader import load
from edgecc.backends.runtime.model_info import DraftInfo, LookupInfo, ModelInfo
from edgecc.backends.runtime.request import Request
from edgecc.backends.runtime.round import FinishReason, Round, Seconds
from edgecc.backends.runtime.sampling import SamplingParams, TokenLogprobs
from edgecc.backends.runtime.scheduler import Scheduler
from edgecc.backends.runtime.session import Session
from edgecc.backends.runtime.speculative import LookupDecoder, SpeculativeDecoder
from edgecc.backends.runtime.stats import SpeculationWarning, Stats
from edgecc.backends.runtime.tokenizer import DetokenizerStream, Tokenizer

__all__ = [
    "Batch",
    "ChatTemplates",
    "Chunk",
    "Decoder",
    "DetokenizerStream",
    "DraftInfo",
    "FinishReason",
    "Generation",
    "Generator",
    "Grammar",
    "LookupDecoder",
    "LookupInfo",
    "Message",
    "ModelInfo",
    "PlainDecoder",
    "Progress",
    "Request",
    "Round",
    "SamplingParams",
    "Scheduler",
    "Seconds",
    "Session",
    "SpeculationWarning",
    "SpeculativeDecoder",
    "Stats",
    "TokenLogprobs",
    "Tokenizer",
    "load",
]
