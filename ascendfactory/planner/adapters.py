"""Parameters that LoRA adds, counted from the card's shapes."""

from __future__ import annotations

from ascendfactory.catalog.params import parameter_shapes
from ascendfactory.core.plan import ModelCard
from ascendfactory.core.recipe import Lora, Tuning

FUSED_MLP_FAMILIES = frozenset({"glm", "glm4", "phi3"})  # gate and up are one linear layer, gate_up_proj
FUSED_QKV_FAMILIES = frozenset({"phi3"})  # q, k and v are one linear layer, qkv_proj
NUM_TARGETS = 7  # adapted linear layers of a decoder layer: q, k, v, o, gate, up, down
TARGETS = {
    **{"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"},
    **{"mlp_gate": "gate_proj", "mlp_up": "up_proj", "mlp_down": "down_proj"},
    **{"mla_q_down": "q_a_proj", "mla_q_up": "q_b_proj", "mla_kv_down": "kv_a_proj_with_mqa", "mla_kv_up": "kv_b_proj"},
    **{"shared_gate": "gate_proj", "shared_up": "up_proj", "shared_down": "down_proj"},
}


def lora_params(card: ModelCard, lora: Lora) -> int:
    """Parameters of the adapters: rank × (in + out) for every target, plus out for DoRA's magnitudes. Routed experts get none."""
    wanted = None if lora.targets == ["all-linear"] else {target.rsplit(".", 1)[-1] for target in lora.targets}
    total = 0
    for weight in parameter_shapes(card):
        if weight.layer is None or len(weight.shape) != 2 or weight.role not in TARGETS:
            continue
        target = _fused_target(card, weight.role) or TARGETS[weight.role]
        if wanted is None or target in wanted:
            out_size, in_size = weight.shape
            # the parts of a fused layer share one A, which is counted with its first part
            rows = 0 if target.startswith(("qkv", "gate_up")) and weight.role not in ("q", "mlp_gate") else in_size
            total += weight.copies * (lora.rank * (rows + out_size) + (out_size if lora.dora else 0))
    return total


def _fused_target(card: ModelCard, role: str) -> str | None:
    """The linear layer that holds a projection together with its neighbours, where a family has one."""
    if card.family in FUSED_MLP_FAMILIES and role in ("mlp_gate", "mlp_up"):
        return "gate_up_proj"
    return "qkv_proj" if card.family in FUSED_QKV_FAMILIES and role in ("q", "k", "v") else None


def trainable_params(card: ModelCard, tuning: Tuning) -> int:
    """Parameters that get a gradient."""
    return lora_params(card, tuning) if isinstance(tuning, Lora) else card.num_params
