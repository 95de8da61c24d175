"""The vision part of a checkpoint's configuration, translated once. Torch-free.

Gemma 4 has a tower (pooled 3 by 3) or the 12B's "unified" embedder; Gemma 3 SigLIP's encoder, always 256 soft tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt, prod
from typing import Literal

from .config import TYPES, VOCAB, Foreign, misread, text_part

Shapes = dict[str, tuple[int, ...]]  # of tensors, by name
IMAGE_TOKENS = (70, 140, 280, 560, 1120)  # soft-token budgets that the checkpoints were trained with
NO_MMPROJ = "this model takes no images: no mmproj file lies next to the GGUF file"
NO_VISION = "this model takes no images: its checkpoint has no vision weights"


@dataclass(frozen=True)
class VisionConfig:
    kind: Literal["tower", "unified", "siglip"]
    text_hidden: int
    hidden: int
    patch: int  # pixels of a patch's side
    pool: int  # patches of a soft token's side
    positions: int  # rows of the position table
    eps: float
    bidirectional: bool  # rows of one image see each other: on Gemma 4's sliding layers, on all of Gemma 3's
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
    tokens: int = 0  # soft tokens of every image; 0: as many as the image and the budget have

    @property
    def placeholder_id(self) -> int:
        return self.boi_id if self.kind == "siglip" else self.image_id

    def image_text(self, token: Callable[[int], str | None]) -> tuple[str, str] | None:
        """Gemma 3's empty lines around an image: (the template's text, its replacement). token: the text of an id."""
        begin = token(self.boi_id)
        end = token(self.eoi_id)
        if self.kind != "siglip" or begin is None or end is None:
            return None
        return begin, f"\n\n{begin}{end}\n\n"

    @property
    def square(self) -> int:
        """Pixels of the side that every image is resized to; 0: its own aspect ratio is kept."""
        return isqrt(self.tokens) * self.side

    @property
    def side(self) -> int:
        return self.patch * self.pool

    @staticmethod
    def from_hf(raw: Foreign) -> VisionConfig | None:
        vision = raw.get("vision_config")
        kind = raw.get("model_type")
        if not isinstance(vision, dict) or kind not in ("gemma3", "gemma4", "gemma4_unified"):
            return None
        vocab = int(text_part(raw).get("vocab_size", VOCAB[TYPES[kind]]))
        config = _siglip(raw, vision, vocab) if kind == "gemma3" else _gemma4(raw, vision, kind == "gemma4_unified")
        # with a truncated vocabulary no text can contain the image token
        return config if max(config.image_id, config.boi_id, config.eoi_id) < vocab else None

    def tensors(self) -> Shapes:
        """The checkpoint's tensors by name, without the wrapping `model.`, and their shapes."""
        d = self.hidden
        wide = self.side**2 * 3
        if self.kind == "siglip":
            return self._siglip_tensors()
        last = {"embed_vision.embedding_projection.weight": (self.text_hidden, d)}
        if self.kind == "unified":
            parts = {"patch_ln1": (wide,), "patch_ln2": (d,), "pos_norm": (d,), "patch_dense": (d, wide)}
            table = {"vision_embedder.pos_embedding": (self.positions, 2, d)}
            return {**_biased({f"vision_embedder.{name}": shape for name, shape in parts.items()}), **table, **last}
        shapes: Shapes = {
            "vision_tower.patch_embedder.input_proj.weight": (d, self.patch**2 * 3),
            "vision_tower.patch_embedder.position_embedding_table": (2, self.positions, d),
        }
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
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

    def _siglip_tensors(self) -> Shapes:
        d = self.hidden
        wide = self.intermediate
        tower = "vision_tower."
        biased: Shapes = {f"{tower}embeddings.patch_embedding": (d, 3, self.patch, self.patch)}
        for i in range(self.layers):
            here = f"{tower}encoder.layers.{i}."
            biased |= {f"{here}layer_norm{n}": (d,) for n in (1, 2)}
            biased |= {f"{here}self_attn.{n}_proj": (d, d) for n in ("q", "k", "v", "out")}
            biased |= {f"{here}mlp.fc1": (wide, d), f"{here}mlp.fc2": (d, wide)}
        return _biased({**biased, f"{tower}post_layernorm": (d,)}) | {
            f"{tower}embeddings.position_embedding.weight": (self.positions, d),
            "multi_modal_projector.mm_soft_emb_norm.weight": (d,),
            "multi_modal_projector.mm_input_projection_weight": (d, self.text_hidden),
        }

    def flops(self, tokens: int) -> float:
        """Arithmetic of one image of `tokens` soft tokens."""
        patches = tokens * (1 if self.kind == "unified" else self.pool**2)
        total = 4.0 * patches**2 * self.heads * self.head_dim * self.layers
        for name, shape in self.tensors().items():
            if len(shape) > 1 and "pos" not in name.rpartition(".layers.")[2]:
                total += 2.0 * prod(shape) * (tokens if "projection" in name else patches)
        return total

    def nbytes(self, item: int = 2) -> int:
        return item * sum(prod(shape) for shape in self.tensors().values())


CLIPS = ("input_min", "input_max", "output_min", "output_max")


def _biased(modules: Shapes) -> Shapes:
    """Weights and biases of modules, from the shapes of their weights."""
    return {f"{n}.{end}": s if end == "weight" else s[:1] for n, s in modules.items() for end in ("weight", "bias")}


def _gemma4(raw: Foreign, vision: Foreign, unified: bool) -> VisionConfig:
    text = text_part(raw)
    rope = vision.get("rope_parameters") or {}
    heads = int(vision.get("num_attention_heads", 0 if unified else 12))
    config = VisionConfig(
        kind="unified" if unified else "tower",
        text_hidden=int(text["hidden_size"]),
        hidden=int(vision.get("mm_embed_dim", 3840) if unified else vision.get("hidden_size", 768)),
        patch=int(vision.get("patch_size", 16)),
        pool=int(vision.get("pooling_kernel_size", 3)),
        positions=int(vision.get("mm_posemb_size", 1120) if unified else vision.get("position_embedding_size", 10240)),
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
    if not unified and (config.head_dim % 4 or not heads or heads % max(1, config.kv_heads)):
        raise misread(f"vision_config has {heads} heads of {config.head_dim}, which cannot be run")
    return config


def _siglip(raw: Foreign, vision: Foreign, vocab: int) -> VisionConfig:
    text = text_part(raw)
    tokens = int(raw.get("mm_tokens_per_image") or 256)
    hidden = int(vision.get("hidden_size", 1152))
    heads = int(vision.get("num_attention_heads", 16))
    size = int(vision.get("image_size", 896))
    patch = int(vision.get("patch_size", 14))
    across = size // patch
    pool = size // patch // isqrt(tokens)
    if size % patch or not pool or (across // pool) ** 2 != tokens or across % pool or hidden % heads:
        raise misread(f"{tokens} soft tokens of {size} x {size} pixels in patches of {patch}: cannot be run")
    image = int(raw.get("image_token_index") or 262144)
    if image >= vocab:  # GGUF files leave it out; its row is never read
        image = int(text.get("pad_token_id") or 0)
    return VisionConfig(
        kind="siglip", text_hidden=int(text["hidden_size"]), hidden=hidden, patch=patch, pool=pool,
        positions=across**2, eps=float(vision.get("layer_norm_eps", 1e-6)), bidirectional=True,
        image_id=image, boi_id=int(raw.get("boi_token_index") or 255999),
        eoi_id=int(raw.get("eoi_token_index") or 256000), pad_id=int(text.get("pad_token_id") or 0),
        layers=int(vision.get("num_hidden_layers", 27)), intermediate=int(vision.get("intermediate_size", 4304)),
        heads=heads, kv_heads=heads, head_dim=hidden // heads, tokens=tokens,
    )  # fmt: skip
