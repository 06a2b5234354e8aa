"""Makes qwen3-bias-yarn.safetensors: a random Qwen3 with biases and YaRN, run by transformers.

Needs torch and transformers (5.24 made the committed file); the tests need neither:

    python make_qwen3.py

The file holds the checkpoint (BF16 tensors under their usual names, its config in the metadata) and
what transformers computes with it in float32: `golden.ids` [T], `golden.logits` [T, V] and
`golden.hidden_states` [1 + layers, T, H], where the last entry is taken before the final norm.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 1024,
    "model_type": "qwen3",
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 64,
    },
    "tie_word_embeddings": False,
    "vocab_size": 112,
}


def main() -> None:
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).eval()
    state = {}
    for name, value in model.state_dict().items():
        scale = 0.2 if value.ndim == 2 else 0.3
        center = 1.0 if name.endswith("norm.weight") else 0.0
        state[name] = (center + scale * torch.randn(value.shape)).to(torch.bfloat16)
    model.load_state_dict({name: value.float() for name, value in state.items()})
    ids = torch.randint(0, CONFIG["vocab_size"], (1, 90))
    last = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    states = [*out.hidden_states[:-1], last[0]]
    golden = {
        "golden.ids": ids[0].to(torch.int32),
        "golden.logits": out.logits[0],
        "golden.hidden_states": torch.cat(states),
    }
    path = Path(__file__).with_name("qwen3-bias-yarn.safetensors")
    save_file({**state, **golden}, path, metadata={"config": json.dumps(CONFIG)})


if __name__ == "__main__":
    main()
