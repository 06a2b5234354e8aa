"""Vision tower of Qwen3.5, 3.6 and 3.8: pixels of one image to features of its tokens.

As in transformers' Qwen3_5VisionModel. x = patches W + b, plus learned position embeddings of a
square grid, resampled to the grid of the image; per block x += attention(norm(x)) and
x += mlp(norm(x)) with layer norms; then each block of 2x2 patches becomes one row: norm,
concatenate, two linear layers with a GELU. Patches come in the order of these blocks. Half of each
head's frequencies turn with the row of a patch, the others with its column.

The graph takes one image (or frame) a call, so all its rows attend to each other and there is no
mask: several images would only see each other through one, at the price of all pairs of patches.
What depends on the size of the image but not on its pixels (positions, interpolation) is an input,
made by `edgecc.backends.runtime.image_grid`.
"""

from __future__ import annotations

from edgecc.errors import InputError
from edgecc.frontends.config import TextConfig
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.targets.image_processor import read_image_processor
from edgecc.frontends.targets.qwen3_5_vision_config import VisionConfig, read_vision
from edgecc.ir.builder import Builder
from edgecc.ir.core import Json, Value
from edgecc.ir.ops.elementwise import GeluAttributes
from edgecc.ir.ops.norm import LayerNormAttributes
from edgecc.ir.ops.shape import SplitAttributes
from edgecc.ir.ops.vision import (
    MergeRowsAttributes,
    MultiAxisRopeAttributes,
    MultiHeadAttentionAttributes,
)
from edgecc.ir.types import DType, SymbolRange, sym
from edgecc.roles import Role

PREFIXES = ("model.visual.", "visual.")
PREPROCESSING = "qwen2-vl-1"
"""Name of the steps from a file to patches, which a runtime must know to read images."""

_EPS = 1e-6
_NEIGHBOURS = 4


def has_tower(weights: ModuleWeights) -> bool:
    """Whether the checkpoint stores a vision tower."""
    return any(name.startswith(PREFIXES) for name in weights.checkpoint.tensors)


def build(weights: ModuleWeights, config: TextConfig, max_tokens: int) -> dict[str, Json]:
    """Build graph `vision`.

    Inputs, for an image of m tokens: pixel_values f32 `[1, 4*m, 3*T*P*P]`, positions i64
    `[2, 1, 4*m]`, interpolation_ids i64 and interpolation_weights f32 `[1, 4*m, 4]`. Output:
    image_features f32 `[1, m, H]`.

    Args:
        weights: Tensors of the checkpoint.
        config: Hyperparameters of the language model.
        max_tokens: Most tokens a prompt can hold: no image needs to have more.

    Returns:
        What the runtime must know to make these inputs.

    Raises:
        InputError: Config and tensors contradict each other.
        UnsupportedError: The config asks for something this frontend does not build.
    """
    vision = read_vision(weights.checkpoint, config)
    processor = read_image_processor(weights.checkpoint, vision)
    area = (vision.patch_size * vision.spatial_merge_size) ** 2
    most = min(processor.max_pixels // area, max_tokens)
    least = -(-processor.min_pixels // area)
    if most < least:
        raise InputError(
            "vision/too-small",
            f"the smallest image has {least} tokens, but at most {most} fit",
            where=vision.where,
            help=f"compile with --max-input-len of more than {least}",
        )
    weights.module.symbols["m"] = SymbolRange(1, most)
    _TowerBuilder(weights, vision, most).build(config.hidden_size)
    return {
        "preprocessing": PREPROCESSING,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "spatial_merge_size": vision.spatial_merge_size,
        "grid_size": vision.grid_size,
        "min_pixels": processor.min_pixels,
        "max_pixels": processor.max_pixels,
        "image_mean": [*processor.mean],
        "image_std": [*processor.std],
        "max_image_tokens": most,
        "feature_size": config.hidden_size,
        "image_token_id": vision.image_token_id,
        "vision_start_token_id": vision.vision_start_token_id,
        "vision_end_token_id": vision.vision_end_token_id,
    }


class _TowerBuilder:
    """State of building one tower.

    Args:
        weights: Where tensors come from.
        config: Sizes.
        most: Most tokens of an image.
    """

    def __init__(self, weights: ModuleWeights, config: VisionConfig, most: int) -> None:
        self.b = Builder(weights.module, "vision")
        self.weights, self.config = weights, config
        stored = weights.checkpoint.tensors
        self.prefix = next(
            (p for p in PREFIXES if any(n.startswith(p) for n in stored)), PREFIXES[0]
        )
        # The longest side an image of so many tokens can have is one block wide.
        length = most * config.spatial_merge_size
        self.tables = weights.rope_tables(config.rope, length, "vision_rope")
        half = config.rope.dim // 4
        self.rope = MultiAxisRopeAttributes(config.num_heads, (0,) * half + (1,) * half)
        self.scores = MultiHeadAttentionAttributes(config.num_heads, config.head_dim**-0.5)

    def build(self, out_width: int) -> None:
        b, c = self.b, self.config
        patches = sym("m") * c.patches_per_token
        kernel = (c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size)
        embed = f"{self.prefix}patch_embed.proj"
        matrix = self.weights.kernel(f"{embed}.weight", c.hidden_size, kernel)
        flat = self.weights.module.weights[matrix].shape[1]
        pixels = b.input("pixel_values", DType.F32, (1, patches, flat), Role.PIXEL_VALUES)
        self.positions = b.input("positions", DType.I64, (2, 1, patches), Role.POSITIONS)
        taps = (1, patches, _NEIGHBOURS)
        ids = b.input("interpolation_ids", DType.I64, taps, Role.INTERPOLATION_IDS)
        factors = b.input("interpolation_weights", DType.F32, taps, Role.INTERPOLATION_WEIGHTS)
        bias = self.weights.vector(f"{embed}.bias", c.hidden_size)
        self._at(embed)
        x = b.op("linear", pixels, weights=(matrix, bias), name="x")
        table = self.weights.matrix(f"{self.prefix}pos_embed", c.grid_size**2, c.hidden_size)
        self._at(f"{self.prefix}pos_embed")
        learned = b.op("embedding_bag", ids, factors, weights=(table,), name="learned")
        x = b.op("add", x, learned, name="x")
        for i in range(c.depth):
            x = self._block(f"{self.prefix}blocks.{i}", x)
        features = self._merger(f"{self.prefix}merger", x, out_width)
        b.output(features, "image_features", Role.IMAGE_FEATURES)

    def _block(self, block: str, x: Value) -> Value:
        b, c = self.b, self.config
        y = self._attention(f"{block}.attn", self._norm(x, f"{block}.norm1"))
        x = b.op("add", x, y, name="x")
        y = self._norm(x, f"{block}.norm2")
        y = self._linear(y, f"{block}.mlp.linear_fc1", c.intermediate_size)
        y = b.op("gelu", y, attrs=GeluAttributes(c.approximate), name="act")
        y = self._linear(y, f"{block}.mlp.linear_fc2", c.hidden_size)
        return b.op("add", x, y, name="x")

    def _attention(self, module: str, x: Value) -> Value:
        b, width = self.b, self.config.hidden_size
        joined = self._linear(x, f"{module}.qkv", 3 * width)
        cut = SplitAttributes(2, (width,) * 3)
        q, k, v = b.node("split", (joined,), attrs=cut, names=("q", "k", "v")).results
        q, k = (
            b.op(
                "multi_axis_rope",
                value,
                self.positions,
                weights=self.tables,
                attrs=self.rope,
                name=value.name,
            )
            for value in (q, k)
        )
        y = b.op("multi_head_attention", q, k, v, attrs=self.scores, name="attn")
        return self._linear(y, f"{module}.proj", width)

    def _merger(self, module: str, x: Value, out_width: int) -> Value:
        b, count = self.b, self.config.patches_per_token
        width = self.config.hidden_size * count
        x = self._norm(x, f"{module}.norm")
        x = b.op("merge_rows", x, attrs=MergeRowsAttributes(count), name="merged")
        x = self._linear(x, f"{module}.linear_fc1", width)
        # Not the form of the blocks: the merger has the exact one whatever hidden_act says.
        x = b.op("gelu", x, attrs=GeluAttributes("none"), name="act")
        return self._linear(x, f"{module}.linear_fc2", out_width)

    def _linear(self, x: Value, module: str, rows: int) -> Value:
        columns = int(str(x.type.shape[-1]))
        symbols = (
            self.weights.matrix(module, rows, columns),
            self.weights.vector(f"{module}.bias", rows),
        )
        self._at(module)
        return self.b.op("linear", x, weights=symbols, name=module.rsplit(".", 1)[-1])

    def _norm(self, x: Value, module: str) -> Value:
        width = int(str(x.type.shape[-1]))
        symbols = [self.weights.vector(f"{module}.{part}", width) for part in ("weight", "bias")]
        self._at(module)
        attrs = LayerNormAttributes(_EPS)
        return self.b.op("layer_norm", x, weights=symbols, attrs=attrs, name="normed")

    def _at(self, module: str) -> None:
        self.b.at(f"{self.weights.checkpoint.role}: {module}")
