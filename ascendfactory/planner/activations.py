"""Bytes a token leaves in a decoder layer for the backward pass, by the way they are split.

The parts are those of Korthikanti et al. 2022 (arXiv:2205.05198, section 4) with today's operators: flash attention keeps no
scores, there is no dropout, MLPs are gated, heads may be grouped. For the embedded engine they are read off the autograd
graph of transformers' decoders; a test counts them on real models through saved-tensor hooks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ascendfactory.core.plan import ModelCard
from ascendfactory.core.recipe import Lora, Tuning
from ascendfactory.planner.adapters import FUSED_MLP_FAMILIES, FUSED_QKV_FAMILIES, NUM_TARGETS
from ascendfactory.planner.engines import Engine

LEAN_MLP_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})  # those that engine/kernels.py knows
LEAN_NORM_FAMILIES = LEAN_MLP_FAMILIES | {"glm", "glm4", "phi3"}


@dataclass(frozen=True)
class LayerBytes:
    """Bytes a token in one layer.

    `hidden` is cut by tp under sequence parallelism, `inputs` too unless the engine keeps them gathered,
    `split` always; `routed` is spread with the experts and grows with their imbalance.
    """

    hidden: int
    inputs: int
    split: int
    routed: int = 0

    @property
    def total(self) -> int:
        """All parts, as on a device that shares nothing."""
        return self.hidden + self.inputs + self.split + self.routed


def layer_bytes(card: ModelCard, tuning: Tuning, element_bytes: int, engine: Engine, recompute: str, is_moe: bool) -> LayerBytes:
    """What a token keeps in one layer under a recompute setting.

    none: norm inputs and scales; the inputs of each trained linear layer; q, k, v, the output and the log-sum-exp of attention;
    gate, up and, by engine, their product and silu(gate). norm: without the norms' outputs and the MLP's product. selective: the
    layer's input, attention's output, and every second matrix product (q, v, gate, down), the rule of torch's
    selective checkpointing. full: the layer's input.
    """
    h, e = card.hidden_size, element_bytes
    if recompute == "full":
        return LayerBytes(hidden=e * h, inputs=0, split=0)
    ffn, routed_ffn, routed_hidden = _widths(card, is_moe)
    attention, lse = _attention_bytes(card, e)
    if recompute == "selective":
        q_size, v_size, out_size = _attention_sizes(card)
        return LayerBytes(
            hidden=2 * e * h, inputs=0, split=e * (q_size + v_size + out_size + ffn) + lse, routed=e * (routed_ffn + routed_hidden)
        )
    lora = tuning if isinstance(tuning, Lora) else None
    eager_norm = engine.eager_norm or (card.family not in LEAN_NORM_FAMILIES and engine.name == "native")
    keep_norms = recompute != "norm"
    unit = (4 if lora else 8) if eager_norm and keep_norms else e
    hidden = card.num_norms_per_layer * (unit * h + 4)
    split = attention + lse + (_qk_norm_bytes(card, unit) if keep_norms or not eager_norm else _qk_norm_bytes(card, e))
    units = _mlp_units(card, engine, lora is not None) if keep_norms else 2
    split += units * e * ffn
    # routed: the dispatched copy, gate and up (and product), the output that its weight scales; and the router's scores
    routed = units * e * routed_ffn + 2 * e * routed_hidden if is_moe else 0
    hidden += 8 * card.moe.num_experts if is_moe and card.moe else 0
    if card.mla:
        hidden += e * 2 * (card.mla.kv_lora_rank + (card.mla.q_lora_rank or 0)) + e * card.mla.qk_rope_head_dim
    # q, k, v share one input, gate and up another
    inputs = 2 * h * e if keep_norms else 0
    return LayerBytes(hidden, inputs + (_adapter_bytes(card, lora, e) if lora else 0), split, routed)


def layer_saved_bytes(card: ModelCard, tuning: Tuning, tokens: int, element_bytes: int) -> int:
    """What one dense decoder layer of the embedded engine keeps for its backward pass, without recomputation.

    Per token: a lean norm keeps its input (e·h) and a scale (4); an eager one (Gemma and families unknown to the engine's
    kernels) its fp32 input (4h), a scale and, if its weight is trained, the normalised input (4h). Each linear layer whose
    weight or adapter is trained keeps its input. Attention keeps q, k, v, its output and a log-sum-exp a head. The lean gated
    MLP keeps gate and up (2e·f); the eager one silu(gate) and, for the down projection's own gradient, the product as well.

    Args:
        tokens: of a micro-batch on one device.
        element_bytes: of the compute dtype.
    """
    from ascendfactory.planner.engines import NATIVE

    return tokens * layer_bytes(card, tuning, element_bytes, NATIVE, "none", is_moe=False).total


def _widths(card: ModelCard, is_moe: bool) -> tuple[int, int, int]:
    """Feed-forward width that every token sees; widths summed over the experts that a token is routed to."""
    if not (is_moe and card.moe):
        return card.ffn_size, 0, 0
    k = card.moe.experts_per_token
    return card.moe.shared_ffn_size, k * card.moe.expert_ffn_size, k * card.hidden_size


def _attention_sizes(card: ModelCard) -> tuple[int, int, int]:
    """Sizes of q, v and attention's output, over all heads."""
    if card.mla:
        out = card.num_heads * card.mla.v_head_dim
        return card.num_heads * (card.mla.qk_nope_head_dim + card.mla.qk_rope_head_dim), out, out
    q_size = card.num_heads * card.head_dim
    return q_size, card.num_kv_heads * card.head_dim, q_size


def _attention_bytes(card: ModelCard, element_bytes: int) -> tuple[int, int]:
    """q, k, v and the output; the fp32 log-sum-exp of each head. MLA's keys are expanded to all heads."""
    q_size, v_size, out_size = _attention_sizes(card)
    k_size = q_size if card.mla else v_size
    if card.family in FUSED_QKV_FAMILIES:
        out_size += q_size + k_size  # v is a view of the one product, which stays whole beside the rotated q and k
    return element_bytes * (q_size + k_size + v_size + out_size), 4 * card.num_heads


def _qk_norm_bytes(card: ModelCard, unit: int) -> int:
    if not card.qk_norm:
        return 0
    sizes = (card.num_heads + card.num_kv_heads) * card.head_dim
    return unit * sizes + 4 * (card.num_heads + card.num_kv_heads)


def _mlp_units(card: ModelCard, engine: Engine, is_lora: bool) -> int:
    if engine.name != "native":
        return engine.mlp_units
    return 2 if not is_lora and card.family in LEAN_MLP_FAMILIES else 4


def _adapter_bytes(card: ModelCard, lora: Lora, element_bytes: int) -> int:
    """The products with A; under dropout each target keeps a dropped copy of its input and the noise, in place of the shared input."""
    total = element_bytes * NUM_TARGETS * lora.rank
    if lora.dropout:
        num_inputs = 4 if card.family in FUSED_MLP_FAMILIES else 5
        h, f, q_size = card.hidden_size, card.ffn_size, card.num_heads * card.head_dim
        total += 2 * element_bytes * (num_inputs * h + q_size + f) - element_bytes * (2 * h + f)
    return total
