"""A tokenizer whose id of a byte is the byte: 256 bytes, then three special tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_TOKENS: Final = 256 + len(SPECIAL)
CHAT_TEMPLATE: Final = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content"
    " + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


VISION_SPECIAL: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
"""What the tokenizer of a model that reads images has besides."""

VISION_CHAT_TEMPLATE: Final = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}"
    "{%- for part in message.content %}{%- if part.type == 'image' or 'image_url' in part %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>' + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def byte_tokenizer(special: Sequence[str] = SPECIAL) -> Tokenizer:
    """The tokenizer: no merges, no normalization, exact for every byte string that is UTF-8."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def write_tokenizer(path: Path, *, images: bool = False) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into a folder.

    Args:
        path: The folder.
        images: Whether there are tokens for images, and a template that writes them.
    """
    special = (*SPECIAL, *(VISION_SPECIAL if images else ()))
    template = VISION_CHAT_TEMPLATE if images else CHAT_TEMPLATE
    byte_tokenizer(special).save(str(path / "tokenizer.json"))
    added = {
        str(256 + index): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for index, token in enumerate(special)
    }
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL[2],
        "model_max_length": 512,
        "pad_token": SPECIAL[0],
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    (path / "chat_template.jinja").write_text(template, "utf-8")


def _byte_characters() -> list[str]:
    """The character GPT-2's byte-level alphabet uses for each byte: printable ones stand for
    themselves, the rest are moved to U+0100 and up.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]
