"""Random models of the dense families, made and saved by transformers, with its names and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.byte_tokenizer import NUM_TOKENS, write_tokenizer

LAYERS = 3
MOST_POSITIONS = 512


@dataclass(frozen=True)
class Model:
    """One architecture with what is special about it.

    Attributes:
        family: Begin of the names of its classes.
        config: Keys besides the sizes all share.
        wrapper: Begin of the name of a class that wraps the language model, if one does.
        dtype: Type of the stored weights.
    """

    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    wrapper: str = ""
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Begin of the names of the classes of the whole model."""
        return self.wrapper or self.family

    @property
    def architecture(self) -> str:
        """The class of the whole model."""
        return f"{self.name}{'ForConditionalGeneration' if self.wrapper else 'ForCausalLM'}"


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """The key `rope_parameters`."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
FULL, SLIDING = "full_attention", "sliding_attention"

MODELS: Mapping[str, Model] = {
    "llama": Model("Llama"),
    "llama3-scaling": Model("Llama", LLAMA3),
    "llama-tied": Model("Llama", {"tie_word_embeddings": True}, dtype="float32"),
    "llama-biases": Model("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": Model("Llama", rope("linear", factor=2.5), dtype="float32"),
    "llama-dynamic": Model("Llama", rope("dynamic", factor=2.0)),
    "llama-one-kv-head": Model("Llama", {"num_key_value_heads": 1, "head_dim": 20}),
    "mistral": Model("Mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral-window": Model("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "mistral-window-odd-heads": Model("Mistral", {"sliding_window": 5, "head_dim": 10}),
    "ministral": Model("Ministral", {"sliding_window": 6, "layer_types": [SLIDING, FULL, SLIDING]}),
    "qwen2": Model("Qwen2", {"use_sliding_window": False, "sliding_window": None}),
    "qwen2-tied-yarn": Model("Qwen2", {"tie_word_embeddings": True, **YARN}, dtype="float32"),
    "qwen2-window": Model(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    ),
    "qwen3-window": Model(
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": [SLIDING, SLIDING, FULL],
            "head_dim": 24,
        },
    ),
    "qwen3-biases": Model("Qwen3", {"attention_bias": True, "head_dim": 32, **YARN}),
    "mistral3": Model("Mistral", {"sliding_window": 8, "head_dim": 16}, wrapper="Mistral3"),
    "llava": Model("Llama", wrapper="Llava"),
    "qwen2-vl": Model("Qwen2VLText", wrapper="Qwen2VL"),
    "qwen2.5-vl": Model("Qwen2_5_VLText", wrapper="Qwen2_5_VL"),
}
"""Every family, each with its variants; heads of 16 dims unless they say another width."""

_VISION: Mapping[str, dict[str, Any]] = {
    "Qwen2VL": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
    "Qwen2_5_VL": {
        "depth": 1,
        "hidden_size": 16,
        "out_hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 16,
    },
    "Mistral3": {
        "model_type": "pixtral",
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
    },
    "Llava": {
        "model_type": "clip_vision_model",
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "image_size": 28,
    },
}


def save(model: Model, folder: Path, seed: int = 0) -> Path:
    """Write a checkpoint with random weights, biases and norms, and a tokenizer.

    Args:
        model: What to make.
        folder: Where to write.
        seed: Of the weights.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": NUM_TOKENS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MOST_POSITIONS,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "bos_token_id": NUM_TOKENS - 3,
        "eos_token_id": NUM_TOKENS - 1,
        "pad_token_id": None,
    }
    keys = {**sizes, **model.config}
    if model.family.startswith("Qwen2"):
        del keys["head_dim"]  # these have none
    if "VL" in model.family:
        keys["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [1, 1, 2],
        }
    if model.wrapper:
        text = {**keys, "model_type": getattr(transformers, f"{model.family}Config").model_type}
        keys = {"text_config": text, "vision_config": _VISION[model.wrapper]}
        keys["tie_word_embeddings"] = False
        keys["image_token_index" if model.wrapper == "Llava" else "image_token_id"] = 255
    config = getattr(transformers, f"{model.name}Config")(**keys)
    made = getattr(transformers, model.architecture)(config)
    state = {
        name: (1.0 if "norm" in name else 0.0)
        + (0.2 if value.ndim == 2 else 0.3) * torch.randn(value.shape)
        for name, value in made.state_dict().items()
        if value.is_floating_point()
    }
    made.load_state_dict(state, strict=False)
    made.tie_weights()
    made.to(getattr(torch, model.dtype)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def load(model: Model, folder: Path) -> Any:
    """What transformers makes of a checkpoint, in float32."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    made = getattr(transformers, model.architecture).from_pretrained(folder, dtype="float32")
    made.generation_config.eos_token_id = None
    return made.eval()
