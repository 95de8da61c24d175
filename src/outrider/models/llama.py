"""The Llama family: Llama 2 and 3, SmolLM2, Mistral (sliding window), Qwen 2 (biases), Qwen 3 (q/k norms); and Gemma 3, text only
(norms after each sublayer too, five sliding layers to a full one, two RoPE bases).

The differences are configuration: a part that a checkpoint lacks is None in its `Block`. Gemma 3's checkpoints store norm weights minus
one; the loader adds the one, so nothing here knows of it.
"""

from __future__ import annotations

from torch import Tensor

from ..types import KVView, Wanted
from .layers import TextModel


class Llama(TextModel):
    def forward(
        self, ids: Tensor, kv: KVView, taps: tuple[int, ...] = (), wanted: Wanted | None = None
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """ids [R] at kv.positions -> hidden [R, H] after the final norm, of the rows that are wanted (None: all of them, else [W, H]); with
        taps also their residual streams after those layers."""
        ops, total, eps, act = self.ops, self.total, self.config.norm_eps, self.config.activation
        angles = self.angles(kv.positions)
        x = self.embed(ids)  # [R, H] the residual stream
        h = ops.rms_norm(x, self.blocks[0].attn_norm, eps)  # [R, H] what the next sublayer reads
        streams: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks):
            qkv = ops.linear(h, block.qkv, block.qkv_bias)
            q = ops.rope_write(qkv, *angles[block.rope], block.q_norm, block.k_norm, block.spec, kv)  # [R, heads·D]
            if wanted is not None and i == self.last_write:  # nobody reads what the other rows would become
                if not wanted.rows.shape[0]:
                    return (x[:0], (x[:0],) * len(taps)) if taps else x[:0]
                q, x, kv, angles, streams = self.narrowed(wanted, q, x, streams)
            y = total(ops.linear(ops.attend(q, block.spec, kv), block.out, block.out_bias))
            x, h = ops.residual_norm(x, y, block.post_attn_norm, None, block.mlp_norm, eps)

            if block.gate_up_bias is None:
                y = total(ops.linear(ops.gated_linear(h, block.gate_up, act), block.down))
            else:
                gate, up = ops.linear(h, block.gate_up, block.gate_up_bias).chunk(2, dim=-1)
                y = total(ops.linear(ops.act_mul(gate, up, act), block.down, block.down_bias))
            x, h = ops.residual_norm(x, y, block.post_mlp_norm, None, block.next_norm, eps)
            if i in taps:
                streams[i] = x
        return (h, tuple(streams[i] for i in taps)) if taps else h
