"""A 1.5B that writes what the 0.5B writes: a target for a draft model where the larger checkpoint is not at hand.

    python benchmarks/cpu_standin.py qwen2.5-coder-0.5b-q4_k_m.gguf standin-1.5b.gguf [--noise 0.05]

Qwen2.5-0.5B is put into the shapes of Qwen2.5-1.5B so that the function stays: zeros beside the hidden state, dead heads, dead channels
of the MLP, four layers that add nothing. Every matrix has the size and the format it has in a Q4_K_M of the 1.5B, so a pass costs what the
1.5B's costs, while the text is the 0.5B's: rounded anew to 4 bits and, with `--noise`, disturbed by so much of every matrix's spread, until
the 0.5B foresees it as well as the real 1.5B (3.9 tokens a cycle at K = 4 on code).

    outrider bench standin-1.5b.gguf --drafters draft:qwen2.5-coder-0.5b-q4_k_m.gguf --draft-tokens 0,2,4,auto --categories humaneval
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
from cpu_formats import rounded

from outrider.models.config import ModelConfig
from outrider.ops.formats import BLOCKS, QuantPart
from outrider.weights.dummy_file import ALIGN, SHAPES, Tensor, Written, gguf_header, metadata, nbytes, tensors
from outrider.weights.gguf import GGUF, read
from outrider.weights.gguf_config import hf_name

HEAD = 64
SMALL, LARGE = (SHAPES[f"Qwen/Qwen2.5-{size}-Instruct"] for size in ("0.5B", "1.5B"))
# 24 heads of 64 where the 1.5B has 12 of 128, 4 K/V heads where it has 2: the same matrices. The 0.5B's seven heads of a K/V head become
# six that share its first copy and one that has the second; the other ten are dead.
HEADS = [*range(6), 6, *range(12, 18), 18]  # where the 14 heads go
KV_HEADS = [0, 0, 1, 1]  # whose copies the four are


def into(w: np.ndarray, axis: int, at: np.ndarray, size: int) -> np.ndarray:
    """w's slices along the axis at these places of a larger array of zeros."""
    out = np.zeros([size if i == axis else n for i, n in enumerate(w.shape)], np.float32)
    out[(slice(None),) * axis + (at,)] = w
    return out


class Grown:
    def __init__(self, file: GGUF, noise: float):
        self.by_name = {hf_name(name, file.arch): entry for name, entry in file.tensors.items()}
        self.noise, self.rng = noise, np.random.default_rng(0)
        spread = np.arange(HEAD)
        self.q = np.concatenate([HEAD * h + spread for h in HEADS])
        self.kv = np.concatenate([HEAD * h + spread for h in KV_HEADS])

    def stored(self, name: str) -> np.ndarray:
        entry = self.by_name[name if name in self.by_name else "model.embed_tokens.weight"]  # a tied head
        if entry.kind in BLOCKS:
            return QuantPart(entry.kind, entry.shape, entry.data()).dense()
        assert entry.kind == "F32", entry.kind
        return entry.data().view("<f4").reshape(entry.shape)

    def tensor(self, t: Tensor) -> np.ndarray:
        """float32 of the large shape."""
        hidden, inner, layer = LARGE["hidden_size"], LARGE["intermediate_size"], re.match(r"model\.layers\.(\d+)\.", t.name)
        if layer and int(layer[1]) >= SMALL["num_hidden_layers"]:
            return np.ones(t.shape, np.float32) if "norm" in t.name else np.zeros(t.shape, np.float32)
        w = self.stored(t.name)
        if "norm" in t.name:  # the mean of squares is taken over more places
            grown = np.ones(hidden, np.float32)
            grown[: len(w)] = w * np.float32((len(w) / hidden) ** 0.5)
            return grown
        if w.ndim == 2 and self.noise:
            w = w + self.rng.normal(0, self.noise * w.std(), w.shape).astype(np.float32)
        narrow = np.arange(SMALL["hidden_size"])
        if ".q_proj." in t.name:
            w = into(w, 0, self.q, hidden)
        elif ".k_proj." in t.name or ".v_proj." in t.name:
            w = w[self.kv]
        elif ".gate_proj." in t.name or ".up_proj." in t.name:
            w = into(w, 0, np.arange(len(w)), inner)
        elif ".o_proj." in t.name:
            return into(into(w, 1, self.q, hidden), 0, narrow, hidden)
        elif ".down_proj." in t.name:
            return into(into(w, 1, np.arange(w.shape[1]), inner), 0, narrow, hidden)
        return w if w.ndim == 1 else into(w, 1, narrow, hidden)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("to", type=Path)
    parser.add_argument("--noise", type=float, default=0.0)
    args = parser.parse_args()
    file = read(args.model)
    grown = Grown(file, args.noise)
    config = ModelConfig.from_hf(LARGE | {"num_attention_heads": 24, "num_key_value_heads": 4, "vocab_size": SMALL["vocab_size"]})
    held = tensors(config, "q4_k_m")
    text: dict[str, Written] = {key: value for key, value in file.meta.items() if key.startswith("tokenizer.")}
    keys = {key: value for key, value in metadata(config, "qwen2").items() if not key.startswith("tokenizer.")} | text
    with open(args.to, "wb") as out:
        out.write(gguf_header(keys, held, "qwen2"))
        for t in held:
            w = grown.tensor(t)
            assert w.shape == t.shape, (t.name, w.shape, t.shape)
            data = w.astype("<f4") if t.kind == "F32" else rounded(t.kind, w).data
            assert data.nbytes == nbytes(t), (t.name, t.kind)
            out.write(data.tobytes() + b"\0" * (-data.nbytes % ALIGN))
    print(f"{args.to}: {args.to.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
