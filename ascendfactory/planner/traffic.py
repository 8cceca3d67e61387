"""Seconds that the links carry data, by axis: ring algorithms over the slower of the links that a group spans.

All-gather and reduce-scatter of B bytes in a group of n take B·(n-1)/n on each device, all-reduce twice that (Thakur et al. 2005);
an all-to-all sends (n-1)/n of what a device has. pp is the outermost axis of the ranks, tp the innermost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ascendfactory.core.recipe import Lora
from ascendfactory.planner.adapters import trainable_params
from ascendfactory.planner.grid import RECOMPUTES, Floats, Grid, Ints
from ascendfactory.planner.memory import IMBALANCE, Setting
from ascendfactory.planner.weights import Stages
from ascendfactory.planner.work import recomputed_share


@dataclass(frozen=True)
class Traffic:
    """Seconds [N, S]; `tp`, `ulysses`, `ring`, `ep`, `pp` of one micro-batch, `dp_micro` too, `dp_step` of a step.

    `tp_beside` is the part of `tp` that travels while the gradients of inputs are multiplied.
    """

    tp: Floats
    tp_beside: Floats
    ulysses: Floats
    ring: Floats
    ep: Floats
    pp: Floats
    dp_micro: Floats
    dp_step: Floats


def traffic_of(setting: Setting, grid: Grid, stages: Stages) -> Traffic:
    """Communication of layouts that share pp and vpp."""
    card, e, layers = setting.card, setting.element_bytes, stages.layers
    tp, ulysses, ring = (a[:, None] for a in (grid.tp, grid.ulysses, grid.ring))
    tokens = grid.micro_size[:, None] * setting.row_tokens / grid.cp[:, None]
    again = np.where(grid.recompute[:, None] == RECOMPUTES.index("full"), 0.5, 0.0) * recomputed_share(grid, stages)
    intra = setting.cluster.device.intra_node_bytes_s
    hidden = tokens * card.hidden_size * e
    # forward 2 all-gathers and 2 reduce-scatters a layer (or 2 all-reduces), backward as many; and of embedding and head 1 and 1
    beside = 2 * _gathered_again(setting, grid) * layers
    messages = 8 * (1 + _sent_again(setting, grid, stages)) * layers + 2 * (stages.embedding > 0) + 2 * (stages.head > 0) + beside
    message_s = hidden * (tp - 1) / tp / intra
    q_size, kv_size = card.num_heads * card.head_dim, card.num_kv_heads * card.head_dim
    cp_link = _link(setting, grid.tp, grid.cp)[:, None]
    # fewer key/value heads than devices are repeated
    kv_sent = np.maximum(kv_size, np.minimum(q_size, tp * ulysses * card.head_dim))
    exchanged = tokens * (2 * q_size + 2 * kv_sent) / tp * e
    ulysses_s = 2 * (1 + again) * layers * exchanged * (ulysses - 1) / ulysses / cp_link
    # keys and values travel round the ring, and with their gradients back
    ring_s = 3 * (1 + again) * layers * tokens * 2 * np.maximum(kv_size / tp, card.head_dim) * e * (ring - 1) / cp_link
    return Traffic(
        messages * message_s,
        beside * message_s,
        ulysses_s,
        ring_s,
        _experts_s(setting, grid, stages, hidden, again),
        _stages_s(setting, grid, hidden, layers),
        *_dp(setting, grid, stages),
    )


def _sent_again(setting: Setting, grid: Grid, stages: Stages) -> Floats:
    """Messages of tp that a recomputed layer sends a second time, as a share of those of forward and backward [N, S].

    Those of a forward pass; of the embedded engine without the last sum of a layer, which nothing of its backward pass needs, but also
    where the recomputation is selective.
    """
    is_native = setting.engine.name == "native"
    modes = ("full", "selective") if is_native else ("full",)
    repeats = np.isin(grid.recompute, [RECOMPUTES.index(mode) for mode in modes])[:, None]
    return np.where(repeats, 3 / 8 if is_native else 0.5, 0.0) * recomputed_share(grid, stages)


def _gathered_again(setting: Setting, grid: Grid) -> Ints:
    """1 where inputs that sequence parallelism gathered are not kept but gathered again in the backward pass [N, 1]."""
    if setting.engine.inputs == "whole":
        return np.zeros((len(grid), 1), np.int64)
    all_again = (grid.recompute == RECOMPUTES.index("full")) & (grid.recompute_layers == 0) & (setting.engine.inputs == "regathered")
    return np.asarray((grid.sp == 1) & ~all_again, np.int64)[:, None]


def _link(setting: Setting, inner: Ints, size: Ints) -> Floats:
    """Bytes/s of a ring of `size` devices, `inner` ranks apart: inside a node, or through the network."""
    device = setting.cluster.device
    inside = inner * size <= setting.cluster.nproc
    members = np.maximum(1, setting.cluster.nproc // np.maximum(1, inner))  # of a group in one node, each with its own port
    outside = np.minimum(device.intra_node_bytes_s, device.inter_node_bytes_s * members)
    return np.where(inside | (size == 1), device.intra_node_bytes_s, outside)


def _experts_s(setting: Setting, grid: Grid, stages: Stages, hidden: Floats, again: Floats) -> Floats:
    """Dispatch and combine, forward and backward; tokens of a tp group are dispatched once."""
    moe, device = setting.card.moe, setting.cluster.device
    if moe is None:
        return np.zeros_like(hidden * stages.layers)
    ep, tp = grid.ep[:, None], grid.tp[:, None]
    sent = IMBALANCE * hidden / tp * moe.experts_per_token
    near = np.minimum(ep, setting.cluster.nproc)
    time_s = sent * (near - 1) / ep / device.intra_node_bytes_s + sent * (ep - near) / ep / device.inter_node_bytes_s
    return np.asarray(4 * (1 + again) * stages.moe_layers * time_s)


def _stages_s(setting: Setting, grid: Grid, hidden: Floats, layers: Ints) -> Floats:
    """Activations to the next stage and gradients back, once a chunk."""
    if len(layers) == 1:
        return np.zeros((len(grid), 1))
    split = np.where(grid.sp == 1, grid.tp, 1)[:, None]
    device = setting.cluster.device
    inside = grid.num_devices <= setting.cluster.nproc
    link = np.where(inside, device.intra_node_bytes_s, device.inter_node_bytes_s)[:, None]
    return np.broadcast_to(2 * grid.vpp[:, None] * hidden / split / link, (len(grid), len(layers)))


def _dp(setting: Setting, grid: Grid, stages: Stages) -> tuple[Floats, Floats]:
    """Weights gathered and gradients reduced: seconds a micro-batch, seconds a step."""
    e, engine = setting.element_bytes, setting.engine
    shard, tp = grid.shard[:, None], grid.tp[:, None]
    params = (stages.split + stages.embedding + stages.head) / tp + stages.whole
    expert_shard = np.maximum(1, shard * tp // grid.ep[:, None])
    link = _link(setting, grid.tp, grid.shard)[:, None]
    ring, expert_ring = (shard - 1) / shard, (expert_shard - 1) / expert_shard
    passed = params * ring + stages.expert / grid.ep[:, None] * expert_ring
    tuning = setting.recipe.tuning
    trained = passed * (trainable_params(setting.card, tuning) / setting.card.num_params if isinstance(tuning, Lora) else 1.0)
    zero = grid.zero[:, None]
    # level 3 gathers layers for forward and again for backward, embedding and head once
    gathered_often = (zero == 3) & ((grid.pp[:, None] == 1) | (not engine.torch_stages))
    ends = (stages.embedding + stages.head) / tp * ring
    gathers = np.where(gathered_often, e * (2 * passed - ends), 0) / link
    reduces = np.maximum(engine.grad_bytes, e) * trained / link
    often = zero >= 2
    # the updated weights; FSDP keeps nothing whole between steps, so it gathers frozen ones as well
    once = np.where(gathered_often, 0, e * (trained if engine.keeps_copy or engine.weight_bytes else passed)) / link
    copies = grid.replicate[:, None]
    between = 2 * 4 * trained / shard * (copies - 1) / copies / setting.cluster.device.inter_node_bytes_s
    return gathers + np.where(often, reduces, 0), np.where(often, 0, reduces) + once + between
