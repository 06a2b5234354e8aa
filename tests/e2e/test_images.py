"""Bundles that read images against transformers: prompts, logits, greedy text; and speculation.

The reference is `Qwen3_5ForConditionalGeneration` behind the processor of its family, which renders
the chat, expands placeholders and prepares pixels. The weights are random.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgecc
from edgecc.backends.base import Role
from edgecc.backends.runtime import Generator
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

    def logits(self, chat: str) -> Array:
        """Of all rows of the prompt, and the embeddings that go in."""
        with torch.no_grad():
            out = self.model(**self.inputs(chat), output_hidden_states=True)
        logits: Array = out.logits[0].numpy()
        return logits

    def embeddings(self, chat: str) -> Array:
        """What goes into the first layer."""
        with torch.no_grad():
            out = self.model(**self.inputs(chat), output_hidden_states=True)
        found: Array = out.hidden_states[0][0].numpy()
        return found

    def greedy(self, chat: str, count: int) -> list[int]:
        """Tokens of `generate`, padding rows left out."""
        inputs = self.inputs(chat)
        with torch.no_grad():
            out = self.model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=count,
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
        max_batch_size=2,
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
        messages=messages(chat), max_new_tokens=24, ignore_eos=True, **options
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
    rows = {Role.LOGITS: [], Role.HIDDEN_TAP: []}
    target = pair.engine.entry("target")
    for call in calls(pair, prompt):
        out = target.run(call, list(rows))
        for role, found in rows.items():
            found.append(out[role][0].copy())
    logits, taps = (np.concatenate(found) for found in rows.values())
    assert relative(taps[:, :HIDDEN], reference.embeddings(chat)) < TOLERANCE
    assert relative(logits, reference.logits(chat)) < TOLERANCE


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


@pytest.mark.parametrize("chat", CHATS)
def test_greedy_text(pair: Generator, alone: Generator, reference: Reference, chat: str) -> None:
    """Tokens of transformers: prompts in one call or in many, with and without the draft."""
    expected = reference.greedy(chat, 24)
    assert answer(alone, chat) == expected
    assert answer(pair, chat, speculation=False) == expected
    assert answer(pair, chat) == expected


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("proposals", range(1, 8))
def test_speculation(pair: Generator, chat: str, proposals: int) -> None:
    """The text is the same for any number of proposals."""
    plain = answer(pair, chat, speculation=False)
    assert answer(pair, chat, num_speculative_tokens=proposals) == plain


def test_text_alone(pair: Generator, bundles: Bundles) -> None:
    """A bundle that reads images writes what one that reads text only does."""
    with edgecc.load(bundles.text) as text:
        for prompt in ("a", "def f(x):", "x" * 3 * CHUNK, "some text " * 9):
            for options in ({"speculation": False}, {}):
                found = [
                    g.generate(prompt, max_new_tokens=24, ignore_eos=True, **options).token_ids
                    for g in (pair, text)
                ]
                assert found[0] == found[1], prompt


def test_images_in_a_batch(pair: Generator) -> None:
    """Chats with and without images beside each other, with the draft and without."""
    wanted = [
        {"messages": messages(chat), "max_new_tokens": 12, "ignore_eos": True, "speculation": draft}
        for draft in (True, False)
        for chat in CHATS
    ]
    singles = [pair.generate(**arguments) for arguments in wanted]
    found = pair.generate_batch([pair.request(**arguments) for arguments in wanted])
    assert [f.token_ids for f in found] == [s.token_ids for s in singles]
