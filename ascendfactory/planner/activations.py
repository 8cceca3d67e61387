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

    `hidden` is cut by tp under sequence parallelism, `inputs` too unless the engine keeps them gathered; `split` always, `kv` down to
    one key/value head, `whole` never; `routed` is spread with the experts and grows with their imbalance.
    """

    hidden: int
    inputs: int
    split: int
    routed: int = 0
    kv: int = 0
    whole: int = 0

    @property
    def total(self) -> int:
        """All parts, as on a device that shares nothing."""
        return self.hidden + self.inputs + self.split + self.routed + self.kv + self.whole


def layer_bytes(card: ModelCard, tuning: Tuning, element_bytes: int, engine: Engine, recompute: str, is_moe: bool) -> LayerBytes:
    """What a token keeps in one layer under a recompute setting.

    none: norm inputs and scales; the inputs of each trained linear layer; q, k, v, the output and the log-sum-exp of attention;
    gate, up and, by engine, their product and silu(gate). norm: without the norms' outputs and the MLP's product. selective: the
    layer's input, attention's output, and every second matrix product (q, v, gate, down), the rule of torch's
    selective checkpointing; the embedded engine leaves out down's where nothing needs it. full: the layer's input.
    """
    h, e = card.hidden_size, element_bytes
    if recompute == "full":
        return LayerBytes(hidden=e * h, inputs=0, split=0)
    ffn, routed_ffn, routed_hidden = _widths(card, is_moe)
    attention, kv, lse = _attention_bytes(card, e)
    if recompute == "selective":
        hidden, split, kept_v = _selective_sizes(card, engine, ffn)
        return LayerBytes(hidden=e * hidden, inputs=0, split=e * split + lse, routed=e * (routed_ffn + routed_hidden), kv=e * kept_v)
    lora = tuning if isinstance(tuning, Lora) else None
    eager_norm = engine.eager_norm or (card.family not in LEAN_NORM_FAMILIES and engine.name == "native")
    keep_norms = recompute != "norm"
    unit = (4 if lora else 8) if eager_norm and keep_norms else e
    scale = 4 if keep_norms or not eager_norm else 0  # an eager norm that runs again keeps its input alone
    hidden = card.num_norms_per_layer * (unit * h + scale)
    q_norm, k_norm = _qk_norm_bytes(card, unit, scale)
    split = attention + lse + q_norm
    units = _mlp_units(card, engine, lora is not None) if keep_norms else 2
    split += units * e * ffn
    # routed: the dispatched copy, gate and up (and product), the output that its weight scales; and the router's scores
    routed = units * e * routed_ffn + 2 * e * routed_hidden if is_moe else 0
    hidden += 8 * card.moe.num_experts if is_moe and card.moe else 0
    if card.mla:
        hidden += e * 2 * (card.mla.kv_lora_rank + (card.mla.q_lora_rank or 0)) + e * card.mla.qk_rope_head_dim
    # q, k, v share one input, gate and up another
    inputs = 2 * h * e if keep_norms else 0
    if lora is None:
        return LayerBytes(hidden, inputs, split, routed, kv + k_norm)
    whole, cut = _adapter_bytes(card, lora, e, engine)
    if engine.name != "native":
        return LayerBytes(hidden, inputs + whole, split + cut, routed, kv + k_norm)
    return LayerBytes(hidden, inputs, split + cut, routed, kv + k_norm, whole)


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


def exchanged_output_bytes(card: ModelCard, element_bytes: int, recompute: str) -> int:
    """What Ulysses adds a token: attention's output before it is exchanged for the tokens' own heads, beside what the next layer reads."""
    return element_bytes * _attention_sizes(card)[2] if recompute in ("none", "norm") else 0


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


def _attention_bytes(card: ModelCard, element_bytes: int) -> tuple[int, int, int]:
    """q and the output; k and v; the fp32 log-sum-exp of each head. MLA's keys are expanded to all heads, and cut with q."""
    q_size, v_size, out_size = _attention_sizes(card)
    if card.mla:
        return element_bytes * (2 * q_size + v_size + out_size), 0, 4 * card.num_heads
    if card.family in FUSED_QKV_FAMILIES:
        out_size += q_size + v_size  # v is a view of the one product, which stays whole beside the rotated q and k
    return element_bytes * (q_size + out_size), element_bytes * 2 * v_size, 4 * card.num_heads


def _selective_sizes(card: ModelCard, engine: Engine, ffn: int) -> tuple[int, int, int]:
    """What selective recomputation keeps: elements of the hidden size; of q, attention's output and gate; of v.

    Where products are fused, "every second" falls on others: qkv and gate_up, or q, v and gate_up.
    """
    q_size, v_size, out_size = _attention_sizes(card)
    split = q_size + out_size + ffn
    if engine.name != "native":
        return 2 * card.hidden_size, split, v_size
    split += v_size if card.family in FUSED_QKV_FAMILIES else 0
    split += ffn if card.family in FUSED_MLP_FAMILIES else 0
    # q, k, v, o, gate, up, down: the seventh is down's, needed where a norm reads it
    is_down_kept = card.num_norms_per_layer > 2 and card.family not in FUSED_MLP_FAMILIES
    return (2 if is_down_kept else 1) * card.hidden_size, split, v_size


def _qk_norm_bytes(card: ModelCard, unit: int, scale: int) -> tuple[int, int]:
    """Of the norms of queries and of keys."""
    each = unit * card.head_dim + scale if card.qk_norm else 0
    return each * card.num_heads, each * card.num_kv_heads


def _mlp_units(card: ModelCard, engine: Engine, is_lora: bool) -> int:
    if engine.name != "native":
        return engine.mlp_units
    return 2 if not is_lora and card.family in LEAN_MLP_FAMILIES else 4


def _adapter_bytes(card: ModelCard, lora: Lora, element_bytes: int, engine: Engine) -> tuple[int, int]:
    """Products with A, and what dropout leaves: on every device of a tp group, and cut by it.

    The embedded engine keeps a byte of noise an element of each target's input, and no products where it adds the adapter to the
    weight (fp32 without dropout). Others keep a dropped copy of each input and the noise, in place of the shared inputs.
    """
    num_inputs = (
        NUM_TARGETS - 2 - (card.family in FUSED_MLP_FAMILIES) - 2 * (card.family in FUSED_QKV_FAMILIES)
    )  # reading the hidden states
    h, f, q_size = card.hidden_size, card.ffn_size, card.num_heads * card.head_dim
    products = element_bytes * (num_inputs + 2) * lora.rank
    if engine.name != "native":
        sizes = num_inputs * h + q_size + f
        return products + (2 * element_bytes * sizes - element_bytes * (2 * h + f) if lora.dropout else 0), 0
    if lora.dropout:
        return products + num_inputs * h, q_size + f
    return (0 if element_bytes == 4 else products), 0
