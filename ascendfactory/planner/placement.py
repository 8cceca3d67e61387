"""Where the rollout engine of a reinforcement-learning run goes: on the training devices, or on some of its own.

Colocated (the hybrid engine of Sheng et al. 2024, arXiv:2409.19256): the training states stay, activations are free while
tokens are generated, and the cache of keys and values takes what is left. Split: some devices only generate, while the
others train on the batch before.
"""

from __future__ import annotations

from ascendfactory.core.plan import Layout, Placement
from ascendfactory.planner.memory import GIB, Setting, stage_terms

STATES = ("weights", "masters", "gradients", "moments", "reference", "critic", "runtime")
ROLLOUT_USABLE = 0.9  # of a device that only generates, as inference engines have it by default
WORKSPACE_BYTES = 2 * GIB  # activations and graphs of the inference engine
NUM_SAMPLES = 8  # answers a prompt, where the recipe does not say
DECODE_EFFICIENCY = 0.6  # of the memory bandwidth
RESPONSE_SHARE = 0.5  # of a row that is generated; the rest is the prompt


def place(setting: Setting, layout: Layout, train_s: float) -> Placement:
    """The placement with the shortest predicted step of those whose weights and cache fit."""
    options = [*_colocated(setting, layout, train_s), *_split(setting, train_s)]
    return min(options, key=lambda option: option.step_s) if options else _cramped(setting, layout, train_s)


def kv_bytes_a_token(setting: Setting) -> int:
    """Keys and values of one token in all layers, 2 bytes each; MLA keeps its latent and the rotary part."""
    card = setting.card
    width = card.mla.kv_lora_rank + card.mla.qk_rope_head_dim if card.mla else 2 * card.num_kv_heads * card.head_dim
    return 2 * width * card.num_layers


def _colocated(setting: Setting, layout: Layout, train_s: float) -> list[Placement]:
    stages = stage_terms(setting, layout)
    held = max(sum(t.num_bytes for t in terms if t.name in STATES) for terms in stages)
    found = []
    for tp in _rollout_tps(setting):
        room = int(setting.cluster.device.memory_bytes * ROLLOUT_USABLE) - held - WORKSPACE_BYTES - 2 * setting.card.num_params // tp
        if room > 0:
            found.append(_placement(setting, setting.cluster.num_devices, tp, room, train_s, colocated=True))
    return found


def _split(setting: Setting, train_s: float) -> list[Placement]:
    """Rollout devices in whole nodes (or halves of one), the rest trains slower by its share."""
    num, found = setting.cluster.num_devices, []
    unit = setting.cluster.nproc if setting.cluster.nodes > 1 else max(1, num // 4)
    for devices in range(unit, num, unit):
        for tp in _rollout_tps(setting):
            room = int(setting.cluster.device.memory_bytes * ROLLOUT_USABLE) - WORKSPACE_BYTES - 2 * setting.card.num_params // tp
            if devices % tp == 0 and room > 0:
                found.append(_placement(setting, devices, tp, room, train_s * num / (num - devices), colocated=False))
    return found


def _placement(setting: Setting, devices: int, tp: int, room: int, train_s: float, *, colocated: bool) -> Placement:
    kv_tokens = room * devices // kv_bytes_a_token(setting)
    rollout_s = _rollout_s(setting, devices, tp, kv_tokens)
    step_s = train_s + rollout_s if colocated else max(train_s, rollout_s)
    share = room / setting.cluster.device.memory_bytes
    return Placement(
        colocated=colocated,
        rollout_devices=devices,
        rollout_tp=tp,
        kv_share=round(share, 3),
        kv_tokens=kv_tokens,
        rollout_s=rollout_s,
        step_s=step_s,
    )


def _rollout_s(setting: Setting, devices: int, tp: int, kv_tokens: int) -> float:
    """Decoding reads the active weights once a token of the batch and each sequence's cache once a token."""
    card, device, seq_len = setting.card, setting.cluster.device, setting.recipe.data.seq_len
    num_sequences = setting.recipe.batch.global_size * NUM_SAMPLES
    at_once = max(1, min(num_sequences, kv_tokens // seq_len))
    copies = devices // tp
    bandwidth = device.memory_bandwidth_bytes_s * DECODE_EFFICIENCY
    rows = max(1, at_once // copies)  # of one copy
    active = card.num_active_params + (card.num_params - card.num_active_params) * min(1.0, rows / 32)
    weights_s = 2 * active / tp / bandwidth
    cache_s = rows * kv_bytes_a_token(setting) * seq_len * (1 - RESPONSE_SHARE / 2) / tp / bandwidth
    compute_s = 2 * card.num_active_params * rows / tp / (0.5 * device.peak_bf16_flops)
    rounds = -(-num_sequences // at_once)
    return float(rounds * seq_len * RESPONSE_SHARE * (max(weights_s, compute_s) + cache_s))


def _rollout_tps(setting: Setting) -> list[int]:
    card, nproc = setting.card, setting.cluster.nproc
    return [tp for tp in (1, 2, 4, 8, 16) if nproc % tp == 0 and card.num_heads % tp == 0]


def _cramped(setting: Setting, layout: Layout, train_s: float) -> Placement:
    """Nothing has room for a cache beside the states: the largest tp and the least cache, for the person to see."""
    tp = _rollout_tps(setting)[-1]
    return _placement(setting, setting.cluster.num_devices, tp, kv_bytes_a_token(setting), train_s, colocated=True)
