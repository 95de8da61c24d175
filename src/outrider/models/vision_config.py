"""The vision part of a checkpoint's configuration, translated once. Torch-free.

Gemma 4 has two kinds: a tower (E2B, E4B, 26B, 31B: a bidirectional encoder whose output is pooled 3 by 3) and the
12B's "unified" embedder (one projection of 48 x 48 pixels). `VisionConfig.from_hf` returns None for a checkpoint
without vision; `no_vision` says in one line why a model takes no images.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..types import OutriderError
from .config import GEMMA3_TYPES, Foreign, text_part

IMAGE_TOKENS = (70, 140, 280, 560, 1120)  # soft-token budgets that the checkpoints were trained with
DEFAULT_IMAGE_TOKENS = 280


@dataclass(frozen=True)
class VisionConfig:
    unified: bool  # the 12B's projection of pixels; False: a tower
    text_hidden: int
    hidden: int
    patch: int  # pixels of a patch's side
    pool: int  # patches of a soft token's side
    positions: int  # rows of the position table
    eps: float
    bidirectional: bool  # rows of one image see each other on the text model's sliding layers
    image_id: int
    boi_id: int  # begin and end of image
    eoi_id: int
    pad_id: int  # per-layer embeddings of image positions are read at this id
    layers: int = 0
    intermediate: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    theta: float = 100.0
    clipped: bool = False  # linears clamp their inputs and outputs
    standardize: bool = False

    @property
    def side(self) -> int:
        """Pixels of a soft token's side."""
        return self.patch * self.pool

    @staticmethod
    def from_hf(raw: Foreign) -> VisionConfig | None:
        vision, kind = raw.get("vision_config"), raw.get("model_type")
        if not isinstance(vision, dict) or kind not in ("gemma4", "gemma4_unified"):
            return None
        text, unified = text_part(raw), kind == "gemma4_unified"
        rope = vision.get("rope_parameters") or {}
        default = 12 if not unified else 0
        heads = int(vision.get("num_attention_heads", default))
        config = VisionConfig(
            unified=unified,
            text_hidden=int(text["hidden_size"]),
            hidden=int(vision.get("mm_embed_dim", 3840) if unified else vision.get("hidden_size", 768)),
            patch=int(vision.get("patch_size", 16)),
            pool=int(vision.get("pooling_kernel_size", 3)),
            positions=int(
                vision.get("mm_posemb_size", 1120) if unified else vision.get("position_embedding_size", 10240)
            ),
            eps=float(vision.get("rms_norm_eps", 1e-6)),
            bidirectional=text.get("use_bidirectional_attention", "vision" if unified else None) == "vision",
            image_id=int(raw.get("image_token_id") or 258880),
            boi_id=int(raw.get("boi_token_id") or 255999),
            eoi_id=int(raw.get("eoi_token_id") or 258882),
            pad_id=int(text.get("pad_token_id") or 0),
            layers=0 if unified else int(vision.get("num_hidden_layers", 16)),
            intermediate=int(vision.get("intermediate_size", 3072)),
            heads=heads,
            kv_heads=int(vision.get("num_key_value_heads", heads)),
            head_dim=int(vision.get("head_dim", 64)),
            theta=float(rope.get("rope_theta", 100.0)),
            clipped=bool(vision.get("use_clipped_linears", False)),
            standardize=bool(vision.get("standardize", False)),
        )
        vocab = int(text.get("vocab_size", 262144))
        if any(i >= vocab for i in (config.image_id, config.boi_id, config.eoi_id)):
            return None  # the vocabulary was cut: no text can place an image
        if not unified and (config.head_dim % 4 or not heads or heads % max(1, config.kv_heads)):
            raise OutriderError(
                f"config.json: vision_config has {heads} heads of {config.head_dim}, which cannot be run"
            )
        return config

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The checkpoint's tensors by name, without the wrapping `model.`, and their shapes."""
        d, wide = self.hidden, self.side**2 * 3
        last = {"embed_vision.embedding_projection.weight": (self.text_hidden, d)}
        if self.unified:
            norms = {"patch_ln1": wide, "patch_ln2": d, "pos_norm": d}
            shapes: dict[str, tuple[int, ...]] = {
                f"vision_embedder.{n}.{p}": (size,) for n, size in norms.items() for p in ("weight", "bias")
            }
            dense = {"patch_dense.weight": (d, wide), "patch_dense.bias": (d,), "pos_embedding": (self.positions, 2, d)}
            return {**shapes, **{f"vision_embedder.{n}": shape for n, shape in dense.items()}, **last}
        shapes = {
            "vision_tower.patch_embedder.input_proj.weight": (d, self.patch**2 * 3),
            "vision_tower.patch_embedder.position_embedding_table": (2, self.positions, d),
        }
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q), "mlp.gate_proj": (self.intermediate, d), "mlp.up_proj": (self.intermediate, d),
            "mlp.down_proj": (d, self.intermediate),
        }  # fmt: skip
        for i in range(self.layers):
            here = f"vision_tower.encoder.layers.{i}."
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
                shapes[f"{here}{name}_layernorm.weight"] = (d,)
            for name in ("q_norm", "k_norm"):
                shapes[f"{here}self_attn.{name}.weight"] = (self.head_dim,)
            for name, shape in linears.items():
                shapes[f"{here}{name}.linear.weight"] = shape
                if self.clipped:
                    shapes |= {f"{here}{name}.{end}": () for end in CLIPS}
        if self.standardize:
            shapes |= {"vision_tower.std_bias": (d,), "vision_tower.std_scale": (d,)}
        return {**shapes, **last}

    def nbytes(self, item: int = 2) -> int:
        """What the weights take."""
        total = 0
        for shape in self.tensors().values():
            size = 1
            for n in shape:
                size *= n
            total += size
        return item * total


CLIPS = ("input_min", "input_max", "output_min", "output_max")


def no_vision(raw: Foreign) -> str:
    """Why a model takes no images, for an error of one line."""
    if raw.get("model_type") in GEMMA3_TYPES and raw.get("vision_config"):
        return "images of Gemma 3 cannot be read yet, only Gemma 4's"
    return "this model takes no images: its checkpoint has no vision weights"
