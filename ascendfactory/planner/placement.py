"""Where the rollout engine of a reinforcement-learning run goes: on the training devices, or on some of its own.

Colocated (the hybrid engine of Sheng et al. 2024, arXiv:2409.19256): the training states stay, activations are free while
tokens are generated, and the cache of keys and values takes what is left. Split (one step off policy): some devices only
generate, while the others train on the batch before.
"""

from __future__ import annotations

from ascendfactory.core.plan import Cluster, Layout, Placement
from ascendfactory.core.recipe import PolicyGradient, Recipe
from ascendfactory.planner.memory import GIB, Setting, stage_terms

STATES = ("weights", "masters", "gradients", "moments", "reference", "critic", "runtime")
ROLLOUT_USABLE = 0.9  # of a device that only generates, as inference engines have it by default
WORKSPACE_BYTES = 2 * GIB  # activations and graphs of the inference engine
DECODE_EFFICIENCY = 0.6  # of the memory bandwidth
SPLITS = (0.25, 0.5, 0.75)  # shares of the devices that are tried for generation alone


def training_parts(recipe: Recipe, cluster: Cluster) -> list[Cluster]:
    """The devices that training may have: all where both take turns; one step off policy, what each split leaves of them.

    Splits are by whole nodes, or by devices of the only node; a single device cannot be split.
    """
    if not isinstance(recipe.objective, PolicyGradient) or recipe.objective.off_policy_steps == 0:
        return [cluster]
    unit = "nodes" if cluster.nodes > 1 else "nproc"
    size = getattr(cluster, unit)
    taken = sorted({min(size - 1, max(1, round(share * size))) for share in SPLITS} - {0})
    return [cluster.model_copy(update={unit: size - number}) for number in taken]


def place(setting: Setting, layout: Layout, train_s: float, cluster: Cluster) -> Placement:
    """The placement with the shortest predicted step of those whose weights and cache fit.

    Args:
        setting: of training, on its part of the devices.
        cluster: all devices.
    """
    others = cluster.num_devices - setting.cluster.num_devices
    options = _split(setting, others, train_s) if others else _colocated(setting, layout, train_s)
    return min(options, key=lambda option: option.step_s) if options else _cramped(setting, others, train_s)


def kv_bytes_a_token(setting: Setting) -> int:
    """Keys and values of one token in all layers, 2 bytes each; MLA keeps its latent and the rotary part."""
    card = setting.card
    width = card.mla.kv_lora_rank + card.mla.qk_rope_head_dim if card.mla else 2 * card.num_kv_heads * card.head_dim
    return 2 * width * card.num_layers


def _colocated(setting: Setting, layout: Layout, train_s: float) -> list[Placement]:
    stages = stage_terms(setting, layout)
    held = max(sum(t.num_bytes for t in terms if t.name in STATES) for terms in stages)
    found = []
    for tp in _rollout_tps(setting, setting.cluster.num_devices):
        room = int(setting.cluster.device.memory_bytes * ROLLOUT_USABLE) - held - WORKSPACE_BYTES - 2 * setting.card.num_params // tp
        if room > 0:
            found.append(_placement(setting, setting.cluster.num_devices, tp, room, train_s, colocated=True))
    return found


def _split(setting: Setting, devices: int, train_s: float) -> list[Placement]:
    found = []
    for tp in _rollout_tps(setting, devices):
        room = int(setting.cluster.device.memory_bytes * ROLLOUT_USABLE) - WORKSPACE_BYTES - 2 * setting.card.num_params // tp
        if room > 0:
            found.append(_placement(setting, devices, tp, room, train_s, colocated=False))
    return found


def _placement(setting: Setting, devices: int, tp: int, room: int, train_s: float, *, colocated: bool) -> Placement:
    kv_tokens = room * devices // kv_bytes_a_token(setting)
    rollout_s = _rollout_s(setting, devices, tp, kv_tokens)
    step_s = train_s + rollout_s if colocated else max(train_s, rollout_s)
    memory_bytes = setting.cluster.device.memory_bytes
    engine_bytes = room + WORKSPACE_BYTES + 2 * setting.card.num_params // tp
    return Placement(
        colocated=colocated,
        rollout_devices=devices,
        rollout_tp=tp,
        kv_share=round(room / memory_bytes, 3),
        memory_share=round(min(ROLLOUT_USABLE, engine_bytes / memory_bytes), 3),
        kv_tokens=kv_tokens,
        rollout_s=rollout_s,
        step_s=step_s,
    )


def _rollout_s(setting: Setting, devices: int, tp: int, kv_tokens: int) -> float:
    """Decoding reads the active weights once a token of the batch and each sequence's cache once a token."""
    card, device, seq_len = setting.card, setting.cluster.device, setting.recipe.data.seq_len
    num_sequences = setting.recipe.rows_a_step
    objective = setting.recipe.objective
    answer = seq_len - (objective.prompt_tokens(seq_len) if isinstance(objective, PolicyGradient) else 0)
    at_once = max(1, min(num_sequences, kv_tokens // seq_len))
    copies = devices // tp
    bandwidth = device.memory_bandwidth_bytes_s * DECODE_EFFICIENCY
    rows = max(1, at_once // copies)  # of one copy
    active = card.num_active_params + (card.num_params - card.num_active_params) * min(1.0, rows / 32)
    weights_s = 2 * active / tp / bandwidth
    cache_s = rows * kv_bytes_a_token(setting) * (seq_len - answer / 2) / tp / bandwidth
    compute_s = 2 * card.num_active_params * rows / tp / (0.5 * device.peak_bf16_flops)
    rounds = -(-num_sequences // at_once)
    return float(rounds * answer * (max(weights_s, compute_s) + cache_s))


def _rollout_tps(setting: Setting, devices: int) -> list[int]:
    """Degrees that lie inside a node and divide the rollout devices."""
    inside = min(devices, setting.cluster.nproc) if setting.cluster.nodes > 1 else devices
    return [tp for tp in (1, 2, 4, 8, 16) if inside % tp == 0 and setting.card.num_heads % tp == 0]


def _cramped(setting: Setting, others: int, train_s: float) -> Placement:
    """Nothing has room for a cache beside the states: the largest tp and the least cache, for the person to see."""
    devices = others or setting.cluster.num_devices
    tp = _rollout_tps(setting, devices)[-1]
    return _placement(setting, devices, tp, kv_bytes_a_token(setting), train_s, colocated=not others)
