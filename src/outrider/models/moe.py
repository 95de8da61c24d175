"""Gemma 4's mixture of experts (26B-A4B): routed experts beside the dense MLP of the same layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..ops.backend import Backend
from ..ops.formats import Held
from ..ops.reference import plain
from .config import ModelConfig
from .split import Together


@dataclass(frozen=True)
class Experts:
    """One layer's experts and their router."""

    router: Held  # [E, H]
    router_norm: Tensor  # [H] float32: the router's own scale times hidden^-0.5
    expert_scale: Tensor  # [E] float32
    gate_up: Held  # [E, 2·I, H]
    down: Held  # [E, H, I]
    norm: Tensor  # before the experts
    post_norm: Tensor  # after the experts
    post_dense_norm: Tensor  # after the dense MLP


def gather_experts(weights: Mapping[str, Held], config: ModelConfig) -> list[Experts]:
    return [
        Experts(
            router=weights[f"layers.{i}.router"],
            router_norm=plain(weights[f"layers.{i}.router_scale"]) * config.hidden**-0.5,
            expert_scale=plain(weights[f"layers.{i}.expert_scale"]),
            gate_up=weights[f"layers.{i}.experts_gate_up"],
            down=weights[f"layers.{i}.experts_down"],
            norm=plain(weights[f"layers.{i}.mlp_norm_2"]),
            post_norm=plain(weights[f"layers.{i}.post_mlp_norm_2"]),
            post_dense_norm=plain(weights[f"layers.{i}.post_mlp_norm_1"]),
        )
        for i in range(len(config.layers))
    ]


def mix_experts(
    ops: Backend, experts: Experts, gate_up: Held, down: Held, h: Tensor, router_in: Tensor, expert_in: Tensor,
    top_k: int, act: str, eps: float, together: Together,
) -> Tensor:  # fmt: skip
    """gate_up, down: the dense MLP. h, router_in, expert_in [R, H]: norms of the residual stream that it, router and experts read."""
    routing = (router_in, expert_in, experts.router, experts.expert_scale, experts.gate_up, experts.down, top_k, act)
    if together.share.world == 1:
        return ops.moe_beside(*routing, h, gate_up, down, experts.post_dense_norm, experts.post_norm, eps)
    # Each process has a piece of every expert: the sum comes before the norm.
    dense, routed = together.total(ops.linear(ops.gated_linear(h, gate_up, act), down)), together.total(ops.moe(*routing))
    return ops.residual_norm(ops.rms_norm(dense, experts.post_dense_norm, eps), routed, experts.post_norm, None, None, eps)[0]
