"""Bytes of the fullest device as a sum of named terms.

Symbols in formulas: P parameters, T trainable ones, n = dp / replicate (devices that share a copy), L layers,
h hidden size, f feed-forward size, H/K query/key-value heads, D head size, V vocabulary, t tokens of a micro-batch,
e bytes of a compute-dtype element (4 or 2).

What a layer keeps for the backward pass is read off the autograd graph of transformers' decoders; a test counts it
on real models through saved-tensor hooks.
"""

from __future__ import annotations

from ascendfactory.catalog.params import layer_shapes, parameter_shapes
from ascendfactory.core.plan import Cluster, Layout, MemoryTerm, ModelCard
from ascendfactory.core.recipe import Lora, Recipe, Tuning

GIB = 2**30
HEAD_CHUNK_BYTES = 64 * 2**20  # the engine's fp32 logits alive at once (engine/objective/cross_entropy.py)
RUNTIME_BYTES = {"cpu": 700 * 2**20, "cuda": 3 * GIB // 2, "npu": 2 * GIB}  # interpreter and libraries; context, collectives
LEAN_MLP_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})  # those that engine/kernels.py knows
LEAN_NORM_FAMILIES = LEAN_MLP_FAMILIES | {"glm", "glm4", "phi3"}
FUSED_MLP_FAMILIES = frozenset({"glm", "glm4", "phi3"})  # gate and up are one linear layer, gate_up_proj
FUSED_QKV_FAMILIES = frozenset({"phi3"})  # q, k and v are one linear layer, qkv_proj
NUM_TARGETS = 7  # adapted linear layers of a decoder layer: q, k, v, o, gate, up, down
TARGETS = {
    **{"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"},
    **{"mlp_gate": "gate_proj", "mlp_up": "up_proj", "mlp_down": "down_proj"},
}


def lora_params(card: ModelCard, lora: Lora) -> int:
    """Parameters of the adapters: rank × (in + out) for every target, plus out for DoRA's magnitudes."""
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


def layer_saved_bytes(card: ModelCard, tuning: Tuning, tokens: int, element_bytes: int) -> int:
    """What one decoder layer keeps for its backward pass, without recomputation.

    Per token: a lean norm keeps its input (e·h) and a scale (4); an eager one (Gemma and families unknown to the engine's
    kernels) its fp32 input (4h), a scale and, if its weight is trained, the normalised input (4h). Each linear layer whose
    weight or adapter is trained keeps its input. Attention keeps q, k, v, its output and a log-sum-exp a head. The lean gated
    MLP keeps gate and up (2e·f); the eager one silu(gate) and, for the down projection's own gradient, the product as well.

    Args:
        tokens: of a micro-batch on one device.
        element_bytes: of the compute dtype.
    """
    h, f, e = card.hidden_size, card.ffn_size, element_bytes
    q_size, kv_size = card.num_heads * card.head_dim, card.num_kv_heads * card.head_dim
    is_lora, eager_norm = isinstance(tuning, Lora), card.family not in LEAN_NORM_FAMILIES
    norm_unit = (4 if is_lora else 8) if eager_norm else e
    norms = card.num_norms_per_layer * (norm_unit * h + 4)
    if card.qk_norm:
        norms += norm_unit * (q_size + kv_size) + 4 * (card.num_heads + card.num_kv_heads)
    attention = e * (2 * q_size + 2 * kv_size) + 4 * card.num_heads
    if card.family in FUSED_QKV_FAMILIES:
        attention += e * (q_size + kv_size)  # v is a view of the one product, which stays whole beside the rotated q and k
    lean_mlp = not is_lora and card.family in LEAN_MLP_FAMILIES
    mlp = (2 if lean_mlp else 4) * e * f
    # q, k, v share one input, gate and up another
    inputs = 2 * h * e
    adapters = e * NUM_TARGETS * tuning.rank if isinstance(tuning, Lora) else 0
    if isinstance(tuning, Lora) and tuning.dropout:
        # each target keeps a dropped copy of its input and the noise, in place of the shared input
        num_inputs = 4 if card.family in FUSED_MLP_FAMILIES else 5
        adapters += 2 * e * (num_inputs * h + q_size + f) - e * (2 * h + f)
    return tokens * (norms + inputs + attention + mlp + adapters)


def activation_bytes(card: ModelCard, recipe: Recipe, layout: Layout, element_bytes: int) -> tuple[int, str]:
    """Saved activations of a micro-batch at the end of its forward pass, with their formula."""
    tokens = layout.micro_size * recipe.data.seq_len
    layer = layer_saved_bytes(card, recipe.tuning, tokens, element_bytes)
    tail = tokens * card.hidden_size * (4 + 2 * element_bytes)
    if layout.recompute == "full":
        kept = tokens * card.hidden_size * element_bytes * card.num_layers
        return kept + layer + tail, "t·e·h·L (inputs of layers) + one layer + last norm"
    return card.num_layers * layer + tail, "L × one layer's saved tensors + last norm"


def memory_terms(card: ModelCard, recipe: Recipe, layout: Layout, dtype: str, cluster: Cluster) -> list[MemoryTerm]:
    """Predicted peak of a device, term by term.

    Args:
        dtype: `float32` or `bfloat16`, of the computation; masters, gradients and moments are fp32.
    """
    e = 2 if dtype == "bfloat16" else 4
    trained = trainable_params(card, recipe.tuning)
    frozen = card.num_params if isinstance(recipe.tuning, Lora) else 0
    shard = layout.shard
    grads_shard = 1 if layout.zero == 1 and layout.num_micro > 1 else shard
    activation, formula = activation_bytes(card, recipe, layout, e)
    terms = [
        MemoryTerm(name="weights", num_bytes=(4 * trained + e * frozen) // shard, formula="(4·T + e·frozen) / n"),
        MemoryTerm(name="gradients", num_bytes=4 * trained // grads_shard, formula="4·T / n" if grads_shard > 1 else "4·T"),
        MemoryTerm(name="moments", num_bytes=8 * trained // shard, formula="8·T / n"),
        MemoryTerm(name="gathered weights", num_bytes=_gathered_bytes(card, layout, e, shard), formula=_GATHERED[layout.zero]),
        MemoryTerm(name="activations", num_bytes=activation, formula=formula),
        MemoryTerm(
            name="logits",
            num_bytes=2 * HEAD_CHUNK_BYTES + (0 if isinstance(recipe.tuning, Lora) else 4 * card.vocab_size * card.hidden_size),
            formula="2 fp32 chunks + 4·V·h (the head's gradient on its way)",
        ),
        MemoryTerm(
            name="checkpoint copy",
            # elsewhere the copy is in the host's memory
            num_bytes=12 * trained // shard if recipe.checkpoint.asynchronous and cluster.device.kind == "cpu" else 0,
            formula="12·T / n, while a checkpoint is written beside training",
        ),
        MemoryTerm(name="runtime", num_bytes=RUNTIME_BYTES[cluster.device.kind], formula="interpreter, libraries, device context"),
    ]
    return [term for term in terms if term.num_bytes]


_GATHERED = {1: "e·P", 2: "e·P", 3: "e × (2 largest layers + embedding + head)"}


def _gathered_bytes(card: ModelCard, layout: Layout, element_bytes: int, shard: int) -> int:
    """Weights that FSDP holds whole beside its shards."""
    if shard == 1 and element_bytes == 4:
        return 0
    if layout.zero < 3:
        return element_bytes * card.num_params
    layers = sorted((sum(w.num_params for w in layer_shapes(card, i)) for i in range(card.num_layers)), reverse=True)
    root = card.vocab_size * card.hidden_size * (1 if card.tied_embeddings else 2)
    return element_bytes * (sum(layers[:2]) + root)
