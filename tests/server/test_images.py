"""Images over HTTP, through OpenAI's own client, to a target with a vision tower (random weights).

What a model sees in an image is tested against transformers in tests/e2e/test_images.py; here,
that an image that comes over HTTP is the one that was sent.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import edgecc
from helpers.byte_tokenizer import write_tokenizer
from helpers.checkpoints import write_draft
from helpers.hybrid import FULL, LINEAR, HybridSizes
from helpers.serving import serving
from helpers.vision import write_vision_target

if TYPE_CHECKING:
    from edgecc.backends.server import Server

Image = pytest.importorskip("PIL.Image")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

# The draft is as random as the target, so it is right about nothing.
pytestmark = pytest.mark.filterwarnings("ignore::edgecc.backends.runtime.SpeculationWarning")

ANSWER = 12
MAX_BYTES = 100_000


def encoded(height: int, width: int, seed: int = 0, format: str = "PNG") -> bytes:
    """Noise: every pixel matters."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def chat(*urls: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Look: "}]
    for url in urls:
        parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    return [{"role": "user", "content": parts}]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    target = write_vision_target(folder / "t", text=HybridSizes(layer_types=(LINEAR, FULL)))
    write_tokenizer(target, images=True)
    draft = write_draft(folder / "d", hidden=32, layers=1, target_layers=2, target_layer_ids=(0, 1))
    out = folder / "bundle"
    sizes = {"max_model_len": 160, "max_input_len": 120, "prefill_chunk": 16, "max_batch_size": 2}
    edgecc.compile(target, draft, out=out, components="all", verify="none", **sizes)
    return out


@pytest.fixture(scope="module")
def server(seeing: Path) -> Iterator[Server]:
    with edgecc.load(seeing) as generator, serving(generator, max_request_bytes=MAX_BYTES) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def alone(seeing: Path) -> Iterator[Any]:
    """The same bundle without a server; images as bytes, not as URLs."""
    with edgecc.load(seeing) as generator:

        def text(*images: bytes) -> str:
            parts: list[dict[str, Any]] = [{"type": "text", "text": "Look: "}]
            for image in images:
                parts += [{"type": "image", "image": image}, {"type": "text", "text": "?"}]
            found: str = generator.generate(
                messages=[{"role": "user", "content": parts}],
                max_new_tokens=ANSWER,
                ignore_eos=True,
            ).text
            return found

        yield text


def ask(client: Any, messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=ANSWER,
        temperature=0,
        extra_body={"ignore_eos": True},
        **options,
    )


def test_the_image_that_was_sent(client: Any, alone: Any) -> None:
    first, second = encoded(24, 40), encoded(24, 40, seed=1)
    texts = [ask(client, chat(data_url(i))).choices[0].message.content for i in (first, second)]

    assert texts == [alone(first), alone(second)]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(("format", "kind"), [("JPEG", "image/jpeg"), ("WEBP", "IMAGE/WEBP")])
def test_formats(client: Any, alone: Any, format: str, kind: str) -> None:
    image = encoded(31, 30, format=format)
    text = ask(client, chat(data_url(image, kind))).choices[0].message.content

    assert text == alone(image)


def test_several_images_in_a_stream(client: Any, alone: Any) -> None:
    images = [encoded(16, 16, seed=2), encoded(40, 24, seed=3)]
    events = ask(
        client,
        chat(*map(data_url, images)),
        stream=True,
        stream_options={"include_usage": True},
    )
    *pieces, last = list(events)

    assert "".join(e.choices[0].delta.content or "" for e in pieces) == alone(*images)
    # 32 x 32 and 40 x 24 pixels, 64 of them a token, are 4 and 15 tokens among those of text.
    one = ask(client, chat(data_url(images[0]))).usage.prompt_tokens
    assert last.usage.prompt_tokens > one + 15
    assert last.usage.draft_tokens > 0


def test_together_with_others(client: Any, alone: Any) -> None:
    images = [encoded(24, 40, seed=n) for n in range(4)]
    expected = [alone(image) for image in images]
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda image: ask(client, chat(data_url(image))), images)
        texts = [answer.choices[0].message.content for answer in answers]

    assert texts == expected


def test_text_alone(client: Any, alone: Any) -> None:
    answer = ask(client, [{"role": "user", "content": [{"type": "text", "text": "Look: "}]}])

    assert answer.choices[0].message.content == alone()


PNG = encoded(16, 16)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://127.0.0.1:1/cat.png", "image/remote"),
        ("https://example.com/cat.png", "image/remote"),
        ("file:///etc/hostname", "image/remote"),
        ("/etc/hostname", "image/remote"),
        ("data:image/png;base64,****", "image/bad-base64"),
        ("data:text/html;base64,AAAA", "image/remote"),
        (data_url(b"no image at all"), "image/unknown-format"),
        (data_url(PNG[: len(PNG) // 2]), "image/damaged"),
        (data_url(b""), "image/unknown-format"),
        (data_url(encoded(1, 300)), "image/aspect-ratio"),
    ],
)
def test_what_is_refused(client: Any, url: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, chat(url))

    assert caught.value.code == code
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == "messages[0].content[1].image_url"


def test_too_many_pixels(client: Any) -> None:
    """Few bytes that would be gigabytes."""
    file = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(file, "TIFF", compression="group4")
    assert len(file.getvalue()) < MAX_BYTES / 2
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, chat(data_url(file.getvalue(), "image/tiff")))

    assert caught.value.code == "image/too-large"
    assert caught.value.param == "messages[0].content[1].image_url"


def test_an_image_that_is_too_narrow_is_not_decoded(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few bytes that would be hundreds of megabytes."""
    file = io.BytesIO()
    Image.new("1", (80_000_000, 1)).save(file, "PNG")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, chat(data_url(file.getvalue())))

    assert caught.value.code == "image/aspect-ratio"


def test_too_many_tokens(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, chat(*[data_url(encoded(64, 64, seed=n)) for n in range(2)]))

    assert caught.value.code in ("context_length_exceeded", "image/too-many-tokens")
    assert "120" in caught.value.message


def test_too_many_bytes(client: Any) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, chat(data_url(bytes(MAX_BYTES))))

    assert caught.value.status_code == 413
    assert caught.value.code == "server/request-too-large"
