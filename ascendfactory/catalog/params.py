"""Every weight of a model by layer, role and shape: what the planner adds up.

    B batch · S tokens · H hidden · F feed-forward · V vocabulary
    N heads · K key/value heads · D head size · E experts · X expert feed-forward · R latent rank

Shapes are `[out, in]`, as torch stores a linear layer. Buffers (rotary tables, the routing bias of
DeepSeek-V3) and multi-token-prediction layers are not trained by the HF classes and not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ascendfactory.catalog.families import traits_of
from ascendfactory.core.plan import Mla, ModelCard, Moe

Role = Literal[
    "embedding",
    "norm",
    "q",
    "k",
    "v",
    "o",
    "qk_norm",
    "mla_q_down",
    "mla_q_up",
    "mla_kv_down",
    "mla_kv_up",
    "mla_norm",
    "mlp_gate",
    "mlp_up",
    "mlp_down",
    "router",
    "expert_gate",
    "expert_up",
    "expert_down",
    "shared_gate",
    "shared_up",
    "shared_down",
    "shared_router",
    "head",
    "vision",
]

EXPERT_ROLES: frozenset[Role] = frozenset({"expert_gate", "expert_up", "expert_down"})


@dataclass(frozen=True, slots=True)
class Weight:
    """`copies` tensors of one shape; `layer` is None outside the decoder layers."""

    layer: int | None
    role: Role
    shape: tuple[int, ...]
    copies: int = 1

    @property
    def num_params(self) -> int:
        """Elements of all copies."""
        return self.copies * math.prod(self.shape)


def parameter_shapes(card: ModelCard) -> Iterator[Weight]:
    """All weights from input to output; a tied head is not repeated.

    The vision tower comes first, as one flat weight of `vision.num_params` elements.
    """
    if card.vision:
        yield Weight(None, "vision", (card.vision.num_params,))
    yield Weight(None, "embedding", (card.vocab_size, card.hidden_size))
    for layer in range(card.num_layers):
        yield from layer_shapes(card, layer)
    yield Weight(None, "norm", (card.hidden_size,))
    if not card.tied_embeddings:
        yield Weight(None, "head", (card.vocab_size, card.hidden_size))


def layer_shapes(card: ModelCard, layer: int) -> Iterator[Weight]:
    """The weights of decoder layer `layer` (0 ... num_layers - 1)."""
    yield Weight(layer, "norm", (card.hidden_size,), copies=card.num_norms_per_layer)
    yield from _latent_attention(card, card.mla, layer) if card.mla else _attention(card, layer)
    if card.moe and is_moe_layer(card.moe, layer):
        yield from _experts(card, card.moe, layer)
    else:
        yield from _feed_forward(card, layer)


def is_moe_layer(moe: Moe, layer: int) -> bool:
    """Whether a layer routes to experts: after the leading dense layers, every `layer_period`-th one."""
    return layer >= moe.first_dense_layers and (layer + 1) % moe.layer_period == 0


def count_params(card: ModelCard) -> int:
    """All weights, tied ones once."""
    return sum(weight.num_params for weight in parameter_shapes(card))


def count_active_params(card: ModelCard) -> int:
    """The weights that one token passes through: all but the experts that it is not routed to."""
    share = (card.moe.experts_per_token, card.moe.num_experts) if card.moe else (1, 1)
    return sum(
        weight.num_params * share[0] // share[1] if weight.role in EXPERT_ROLES else weight.num_params for weight in parameter_shapes(card)
    )


def _attention(card: ModelCard, layer: int) -> Iterator[Weight]:
    """Grouped-query attention (arXiv:2305.13245): N query heads share K key/value heads."""
    traits = traits_of(card.family)
    q_size, kv_size = card.num_heads * card.head_dim, card.num_kv_heads * card.head_dim
    sizes: tuple[tuple[Role, int], ...] = (("q", q_size), ("k", kv_size), ("v", kv_size))
    for role, size in sizes:
        yield Weight(layer, role, (size, card.hidden_size))
        if card.attention_bias:
            yield Weight(layer, role, (size,))
    yield Weight(layer, "o", (card.hidden_size, q_size))
    if card.attention_bias and traits.output_bias:
        yield Weight(layer, "o", (card.hidden_size,))
    if card.qk_norm and traits.qk_norm == "full":
        yield Weight(layer, "qk_norm", (q_size,))
        yield Weight(layer, "qk_norm", (kv_size,))
    elif card.qk_norm:
        yield Weight(layer, "qk_norm", (card.head_dim,), copies=2)


def _latent_attention(card: ModelCard, mla: Mla, layer: int) -> Iterator[Weight]:
    """Multi-head latent attention (arXiv:2405.04434): keys and values pass through a latent of rank R."""
    hidden, num_heads = card.hidden_size, card.num_heads
    q_size = num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        yield Weight(layer, "q", (q_size, hidden))
    else:
        yield Weight(layer, "mla_q_down", (mla.q_lora_rank, hidden))
        yield Weight(layer, "mla_norm", (mla.q_lora_rank,))
        yield Weight(layer, "mla_q_up", (q_size, mla.q_lora_rank))
    yield Weight(layer, "mla_kv_down", (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden))
    yield Weight(layer, "mla_norm", (mla.kv_lora_rank,))
    yield Weight(layer, "mla_kv_up", (num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank))
    yield Weight(layer, "o", (hidden, num_heads * mla.v_head_dim))


def _feed_forward(card: ModelCard, layer: int) -> Iterator[Weight]:
    if card.gated_mlp:
        yield Weight(layer, "mlp_gate", (card.ffn_size, card.hidden_size))
    yield Weight(layer, "mlp_up", (card.ffn_size, card.hidden_size))
    yield Weight(layer, "mlp_down", (card.hidden_size, card.ffn_size))


def _experts(card: ModelCard, moe: Moe, layer: int) -> Iterator[Weight]:
    hidden, ffn, shared = card.hidden_size, moe.expert_ffn_size, moe.shared_ffn_size
    yield Weight(layer, "router", (moe.num_experts, hidden))
    yield Weight(layer, "expert_gate", (ffn, hidden), copies=moe.num_experts)
    yield Weight(layer, "expert_up", (ffn, hidden), copies=moe.num_experts)
    yield Weight(layer, "expert_down", (hidden, ffn), copies=moe.num_experts)
    if shared:
        yield Weight(layer, "shared_gate", (shared, hidden))
        yield Weight(layer, "shared_up", (shared, hidden))
        yield Weight(layer, "shared_down", (hidden, shared))
        if traits_of(card.family).shared_expert_gate:
            yield Weight(layer, "shared_router", (1, hidden))
