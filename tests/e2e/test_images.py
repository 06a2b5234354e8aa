"""Bundles that read images against transformers: prompts, logits, greedy text; and speculation.

The reference is `Qwen3_5ForConditionalGeneration` behind the processor of its family, which renders
the chat, expands placeholders and prepares pixels. The weights are random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgecc
from edgecc.backends.base import Role
from edgecc.backends.runtime import Generator, Session, SpeculativeDecoder
from edgecc.backends.runtime.golden import GOLDEN_FILE, compare_golden, read_golden
from edgecc.backends.runtime.image_prompt import ImagePrompt
from edgecc.backends.runtime.prompt import Prompt, PromptReader
from helpers.byte_tokenizer import NUM_TOKENS, VISION_CHAT_TEMPLATE, VISION_SPECIAL, write_tokenizer
from helpers.checkpoints import VOCAB, Array, write_draft
from helpers.hybrid import FULL, LINEAR, HybridSizes
from helpers.vision import IMAGE, VisionSizes, write_vision_target

Image = pytest.importorskip("PIL.Image")
transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

TOLERANCE = 1e-4
"""Relative. Transformers computes in float32, in which a whole hybrid model is that uncertain."""

PLACEHOLDER = VISION_SPECIAL[-1]
TOKENS = NUM_TOKENS + len(VISION_SPECIAL)
HIDDEN = HybridSizes().hidden
LENGTH = 320
ANSWER = 20
CHUNK = 16
"""Rows of a target call: smaller than an image, and no multiple of anything in a prompt."""

SIZES = [(24, 40), (100, 23), (31, 200), (1, 1), (16, 16), (257, 255)]
"""Height and width: of one token and of many, wide and narrow, enlarged and reduced."""

CHATS: dict[str, tuple[int, ...]] = {
    "wide": (2,),
    "narrow": (1,),
    "tiny": (3,),
    "large": (5,),
    "three": (0, 3, 1),
    "none": (),
}
"""Images of each chat, by their place in `SIZES`."""


@dataclass(frozen=True)
class Reference:
    """The checkpoint in transformers."""

    model: Any
    tokenizer: Any
    images: Any

    def inputs(self, chat: str) -> dict[str, Any]:
        """What the family's processor makes of a chat: `<|image_pad|>` as often as there are
        patches, divided by those of a token.
        """
        text = self.tokenizer.apply_chat_template(
            messages(chat), tokenize=False, add_generation_prompt=True
        )
        found: dict[str, Any] = {}
        if CHATS[chat]:
            found |= self.images(images=pictures(chat), return_tensors="pt")
            pieces = text.split(PLACEHOLDER)
            counts = (found["image_grid_thw"].prod(dim=1) // 4).tolist()
            text = pieces[0] + "".join(
                PLACEHOLDER * count + piece for count, piece in zip(counts, pieces[1:], strict=True)
            )
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), **found}

    def forward(self, chat: str) -> tuple[Array, Array]:
        """What goes into the first layer, and logits, of all rows of the prompt."""
        with torch.no_grad():
            out = self.model(**self.inputs(chat), output_hidden_states=True)
        return out.hidden_states[0][0].numpy(), out.logits[0].numpy()

    def greedy(self, chat: str) -> list[int]:
        """Tokens of `generate`, padding rows left out."""
        inputs = self.inputs(chat)
        with torch.no_grad():
            out = self.model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=ANSWER,
                suppress_tokens=list(range(TOKENS, VOCAB)),
            )
        tokens: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens


@dataclass(frozen=True)
class Bundles:
    """One checkpoint compiled in several ways."""

    target: Path
    pair: Path
    alone: Path
    text: Path


def pictures(chat: str) -> list[Any]:
    """Noise: every pixel matters."""
    found = []
    for place in CHATS[chat]:
        rng = np.random.default_rng(place)
        found.append(Image.fromarray(rng.integers(0, 256, (*SIZES[place], 3), dtype=np.uint8)))
    return found


def messages(chat: str) -> list[dict[str, Any]]:
    """A chat with its images between texts."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Look: "}]
    for image in pictures(chat):
        parts += [{"type": "image", "image": image}, {"type": "text", "text": " and "}]
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]},
    ]


def some(*quick: str) -> list[Any]:
    """All chats, those that are not named only in slow runs."""
    return [pytest.param(c, marks=[] if c in quick else [pytest.mark.slow]) for c in CHATS]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    folder = tmp_path_factory.mktemp("images")
    kinds = (LINEAR, FULL, LINEAR, FULL)
    target = write_vision_target(
        folder / "t", VisionSizes(depth=3, heads=3), HybridSizes(layer_types=kinds)
    )
    write_tokenizer(target, images=True)
    draft = write_draft(folder / "d", hidden=32, target_layer_ids=(-1, 1, 2), block_size=7)
    made = Bundles(target, folder / "pair", folder / "alone", folder / "text")
    edgecc.compile(
        target,
        draft,
        out=made.pair,
        components="all",
        max_model_len=LENGTH,
        prefill_chunk=CHUNK,
        max_batch_size=3,
    )
    options = {"max_model_len": LENGTH, "prefill_chunk": LENGTH}
    edgecc.compile(target, out=made.alone, components="target,vision", **options)
    edgecc.compile(target, draft, out=made.text, **options)
    return made


@pytest.fixture(scope="module")
def pair(bundles: Bundles) -> Iterator[Generator]:
    with edgecc.load(bundles.pair) as generator:
        yield generator


@pytest.fixture(scope="module")
def alone(bundles: Bundles) -> Iterator[Generator]:
    with edgecc.load(bundles.alone) as generator:
        yield generator


@pytest.fixture(scope="module")
def reference(bundles: Bundles) -> Reference:
    name = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
    images = pytest.importorskip(name).Qwen2VLImageProcessorPil.from_pretrained(bundles.target)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(bundles.target / "tokenizer.json"), chat_template=VISION_CHAT_TEMPLATE
    )
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
        bundles.target, dtype="float32"
    ).eval()
    model.generation_config.eos_token_id = None
    return Reference(model, tokenizer, images)


def relative(found: Array, expected: Array) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def read(generator: Generator, chat: str) -> Prompt:
    """A chat as the runtime reads it."""
    reader = PromptReader(generator.model, generator.tokenizer, generator.chat)
    return reader.read(None, None, messages(chat), None)


def answer(generator: Generator, chat: str, **options: Any) -> list[int]:
    return generator.generate(
        messages=messages(chat), max_new_tokens=ANSWER, ignore_eos=True, **options
    ).token_ids


@pytest.mark.parametrize("chat", CHATS)
def test_prompts(pair: Generator, reference: Reference, chat: str) -> None:
    """Tokens, pixels bit for bit, and positions."""
    found, expected = read(pair, chat), reference.inputs(chat)
    assert found.token_ids.tolist() == expected["input_ids"][0].tolist()
    assert (found.images is None) is (not CHATS[chat])
    if found.images is None:
        return
    pixels = np.concatenate([p.pixel_values[0] for p in found.images.pictures])
    assert pixels.tobytes() == expected["pixel_values"].numpy().tobytes()
    positions, delta = reference.model.model.get_rope_index(
        expected["input_ids"], expected["mm_token_type_ids"], expected["image_grid_thw"]
    )
    assert np.array_equal(found.images.prompt.positions, positions[:, 0].numpy())
    assert found.images.prompt.delta == delta.item()


@pytest.mark.parametrize("chat", CHATS)
def test_logits_and_embeddings(pair: Generator, reference: Reference, chat: str) -> None:
    """Of every row, in calls that cut images anywhere; features of the tower among the rows."""
    prompt = read(pair, chat)
    rows: dict[Role, list[Array]] = {Role.LOGITS: [], Role.HIDDEN_TAP: []}
    target = pair.engine.entry("target")
    for call in calls(pair, prompt):
        out = target.run(call, list(rows))
        for role, found in rows.items():
            found.append(out[role][0].copy())
    logits, taps = (np.concatenate(found) for found in rows.values())
    embeddings, expected = reference.forward(chat)
    assert relative(taps[:, :HIDDEN], embeddings) < TOLERANCE
    assert relative(logits, expected) < TOLERANCE


def calls(generator: Generator, prompt: Prompt) -> Iterator[dict[Role, Array]]:
    """The target calls that read a prompt, with logits of all rows."""
    ids, images = prompt.token_ids, prompt.images
    tower, features = generator.engine.entry("vision"), [np.zeros((0, HIDDEN), np.float32)]
    for picture in images.pictures if images else ():
        out = tower.run(picture.inputs, [Role.IMAGE_FEATURES])
        features.append(out[Role.IMAGE_FEATURES][0].copy())
    placed = images.prompt if images else ImagePrompt.of_text(ids)
    for first in range(0, len(ids), CHUNK):
        chunk = ids[first : first + CHUNK]
        yield {
            Role.TOKEN_IDS: chunk[None],
            Role.CACHE_LENGTH: np.array([first]),
            Role.LOGIT_ROWS: np.arange(len(chunk)),
            Role.REPLAY_LENGTH: np.array([0]),
            Role.COMMIT_LENGTH: np.array([len(chunk)]),
            **placed.inputs_from(first, len(chunk), np.concatenate(features)),
        }


@pytest.mark.parametrize("chat", some("wide", "three", "none"))
def test_greedy_text(pair: Generator, alone: Generator, reference: Reference, chat: str) -> None:
    """Tokens of transformers: prompts in one call or in many, with and without the draft."""
    expected = reference.greedy(chat)
    assert answer(alone, chat) == expected
    assert answer(pair, chat, speculation=False) == expected
    assert answer(pair, chat) == expected


@pytest.mark.parametrize("chat", some("narrow", "three"))
@pytest.mark.parametrize("proposals", range(1, 8))
def test_speculation(pair: Generator, chat: str, proposals: int) -> None:
    """The text is the same for any number of proposals."""
    plain = answer(pair, chat, speculation=False)
    assert answer(pair, chat, num_speculative_tokens=proposals) == plain


@dataclass
class Oracle:
    """A draft that knows the text, and errs in one slot of each block: 7 never does."""

    text: list[int]
    errs: int
    capacity: int = 2 * LENGTH
    log_rows: int = 0
    batch_size: int = 1

    def run(self, inputs: Mapping[Role, Array], outputs: Sequence[Role]) -> dict[Role, Array]:
        if not outputs:
            return {}
        first = int(inputs[Role.CACHE_LENGTH][0]) + inputs[Role.FEATURES].shape[1] + 1
        block = [*self.text[first : first + 7], *[0] * 7][:7]
        if self.errs < 7:
            block[self.errs] = (block[self.errs] + 1) % TOKENS
        return {Role.PROPOSALS: np.array([block])}


@pytest.mark.parametrize("errs", range(8))
def test_any_acceptance(pair: Generator, errs: int) -> None:
    """Blocks of which a given number is accepted: rows of images are in caches and states."""
    prompt, plain = read(pair, "three"), answer(pair, "three", speculation=False)
    draft = Oracle([*prompt.token_ids.tolist(), *plain], errs)
    assert pair.model.draft is not None
    session = Session(
        pair.engine.entry("target"),
        draft,
        prefill_chunk=CHUNK,
        vision=pair.engine.entry("vision"),
        feature_size=HIDDEN,
    )
    decoder = SpeculativeDecoder(session, pair.model, pair.model.draft, 7)
    rounds = list(decoder.rounds(prompt.token_ids, len(plain), images=prompt.images))
    assert [token for step in rounds for token in step.tokens] == plain
    assert {step.accepted for step in rounds[1:-1]} == {min(errs, 7)}


def test_several_requests_at_a_time(pair: Generator) -> None:
    """Images of one request are nothing to another, and each answer is the one it gets alone."""
    asked = ["three", "none", "wide", "tiny", "three"]
    options = {"max_new_tokens": ANSWER, "ignore_eos": True}
    requests = [
        pair.request(messages=messages(chat), num_speculative_tokens=1 + place, **options)
        for place, chat in enumerate(asked)
    ]
    found = pair.generate_batch(requests)
    assert [each.token_ids for each in found] == [answer(pair, chat) for chat in asked]


def test_text_alone(pair: Generator, bundles: Bundles) -> None:
    """A bundle that reads images writes what one that reads text only does."""
    with edgecc.load(bundles.text) as text:
        for prompt in ("a", "def f(x):", "x" * 3 * CHUNK, "some text " * 9):
            for options in ({"speculation": False}, {}):
                found = [
                    g.generate(prompt, max_new_tokens=ANSWER, ignore_eos=True, **options).token_ids
                    for g in (pair, text)
                ]
                assert found[0] == found[1], prompt


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::edgecc.backends.runtime.stats.SpeculationWarning")
def test_a_draft_that_reads_tokens(tmp_path: Path) -> None:
    """The target's own block sees placeholders where the images are; the text stays."""
    text = HybridSizes(layer_types=(LINEAR, FULL))
    target = write_vision_target(tmp_path / "t", text=text, mtp=1)
    write_tokenizer(target, images=True)
    edgecc.compile(
        target,
        out=tmp_path / "b",
        components="target,draft,vision",
        spec_method="mtp",
        num_speculative_tokens=3,
        max_model_len=LENGTH,
        prefill_chunk=CHUNK,
    )
    with edgecc.load(tmp_path / "b") as generator:
        for chat in CHATS:
            plain = answer(generator, chat, speculation=False)
            for proposals in (1, 3):
                assert answer(generator, chat, num_speculative_tokens=proposals) == plain


def test_golden_rows_tell_a_wrong_tower(pair: Generator, bundles: Bundles) -> None:
    """A tower that computes something else, and a target that reads something else."""
    golden = read_golden(bundles.pair / GOLDEN_FILE)
    assert compare_golden(pair.engine, golden).passed

    def failed(name: str, change: Callable[[Array], Array]) -> set[str]:
        wrong = {**golden, name: change(golden[name])}
        return {c.name for c in compare_golden(pair.engine, wrong).checks if not c.passed}

    # The target is given the features of the reference.
    assert "image features" in failed("image_features", lambda x: x[::-1].copy())
    assert "image features" in failed("tower.positions", lambda x: x[::-1].copy())
    assert failed("positions", lambda x: np.arange(x.shape[1]) + 0 * x) >= {"target logits"}
    assert failed("image_rows", lambda x: np.full_like(x, -1)) >= {"target logits"}
