"""Parameters that LoRA adds, counted from the card's shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ascendfactory.catalog.params import is_moe_layer, layer_shapes
from ascendfactory.core.plan import ModelCard
from ascendfactory.core.recipe import Lora, Tuning

FUSED_MLP_FAMILIES = frozenset({"glm", "glm4", "phi3"})  # gate and up are one linear layer, gate_up_proj
FUSED_QKV_FAMILIES = frozenset({"phi3"})  # q, k and v are one linear layer, qkv_proj
ROW_ROLES = frozenset({"o", "mlp_down", "shared_down"})  # their inputs are cut by tp, not their outputs
NUM_TARGETS = 7  # adapted linear layers of a decoder layer: q, k, v, o, gate, up, down
TARGETS = {
    **{"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"},
    **{"mlp_gate": "gate_proj", "mlp_up": "up_proj", "mlp_down": "down_proj"},
    **{"mla_q_down": "q_a_proj", "mla_q_up": "q_b_proj", "mla_kv_down": "kv_a_proj_with_mqa", "mla_kv_up": "kv_b_proj"},
    **{"shared_gate": "gate_proj", "shared_up": "up_proj", "shared_down": "down_proj"},
}


@dataclass(frozen=True)
class AdapterParams:
    """Parameters of adapters: on every device of a tp group, cut by tp, and cut down to one key/value head."""

    whole: int = 0
    split: int = 0
    kv: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.whole + self.split + self.kv


def lora_params(card: ModelCard, lora: Lora) -> int:
    """Parameters of the adapters: rank × (in + out) for every target, plus out for DoRA's magnitudes. Routed experts get none."""
    return adapter_params(card, lora).total


def adapter_params(card: ModelCard, lora: Lora) -> AdapterParams:
    """The same by what tp does to them: of a column-parallel layer B is cut with its outputs, of a row-parallel one A with its inputs."""
    wanted = None if lora.targets == ["all-linear"] else {target.rsplit(".", 1)[-1] for target in lora.targets}
    # layers of a kind have the same shapes: one of each is counted
    is_moe = [card.moe is not None and is_moe_layer(card.moe, layer) for layer in range(card.num_layers)]
    parts = [(count, _layer_params(card, lora, wanted, is_moe.index(kind))) for kind, count in Counter(is_moe).items()]
    return AdapterParams(*(sum(count * getattr(part, name) for count, part in parts) for name in ("whole", "split", "kv")))


def _layer_params(card: ModelCard, lora: Lora, wanted: set[str] | None, layer: int) -> AdapterParams:
    """Parameters of the adapters of one decoder layer."""
    sizes = dict.fromkeys(("whole", "split", "kv"), 0)
    for weight in layer_shapes(card, layer):
        if len(weight.shape) != 2 or weight.role not in TARGETS:
            continue
        target = _fused_target(card, weight.role) or TARGETS[weight.role]
        if wanted is None or target in wanted:
            out_size, in_size = weight.shape
            # the parts of a fused layer share one A, which is counted with its first part
            rows = 0 if target.startswith(("qkv", "gate_up")) and weight.role not in ("q", "mlp_gate") else in_size
            a, b = weight.copies * lora.rank * rows, weight.copies * out_size * (lora.rank + lora.dora)
            if weight.role in ROW_ROLES:
                a, b = b, a
            sizes["whole"] += a
            sizes["kv" if weight.role in ("k", "v") else "split"] += b
    return AdapterParams(**sizes)


def _fused_target(card: ModelCard, role: str) -> str | None:
    """The linear layer that holds a projection together with its neighbours, where a family has one."""
    if card.family in FUSED_MLP_FAMILIES and role in ("mlp_gate", "mlp_up"):
        return "gate_up_proj"
    return "qkv_proj" if card.family in FUSED_QKV_FAMILIES and role in ("q", "k", "v") else None


def trainable_params(card: ModelCard, tuning: Tuning) -> int:
    """Parameters that get a gradient."""
    return lora_params(card, tuning) if isinstance(tuning, Lora) else card.num_params
