"""Bytes of a device as a sum of named terms, for one layout or thousands at once.

Symbols in formulas: T trained parameters of a stage on a tp rank, F frozen ones, n = dp / replicate x cp (devices that share
a copy), L layers, h hidden size, f feed-forward size, V vocabulary, t tokens of a micro-batch on a device, e bytes of a
compute-dtype element (4 or 2), g of a gradient, k micro-batches in flight.

States follow ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) and Megatron-Core's distributed optimizer; activations
Korthikanti et al. 2022 (arXiv:2205.05198); micro-batches in flight Narayanan et al. 2021 (arXiv:2104.04473).
Parameters are those of the card's real shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ascendfactory.core.plan import Cluster, Layout, MemoryTerm, ModelCard
from ascendfactory.core.recipe import Dpo, Lora, PolicyGradient, Ppo, Recipe, Reward
from ascendfactory.core.stages import SPLIT_BACKWARD
from ascendfactory.planner.activations import LEAN_MLP_FAMILIES, LEAN_NORM_FAMILIES, exchanged_output_bytes, layer_bytes, layer_saved_bytes
from ascendfactory.planner.adapters import TARGETS, adapter_params, lora_params, trainable_params
from ascendfactory.planner.engines import GIB, Engine, engine_of
from ascendfactory.planner.grid import RECOMPUTES, SCHEDULES, Grid, Ints, grid_of, pipelines
from ascendfactory.planner.weights import Stages, kv_extra_params, layout_stages

__all__ = [
    "GIB", "HEAD_CHUNK_BYTES", "LEAN_MLP_FAMILIES", "LEAN_NORM_FAMILIES", "RUNTIME_BYTES", "TARGETS", "Setting", "layer_saved_bytes",
    "lora_params", "memory_terms", "peak_bytes", "stage_terms", "trainable_params",
]  # fmt: skip

HEAD_CHUNK_BYTES = 64 * 2**20  # the engine's fp32 logits alive at once (engine/objective/cross_entropy.py)
RUNTIME_BYTES = {"cpu": 700 * 2**20, "cuda": 3 * GIB // 2, "npu": 2 * GIB}  # interpreter and libraries; context, collectives
CHANNEL_BYTES = {"cpu": 0, "cuda": GIB // 4, "npu": 2 * 200 * 2**20}  # of one more communicator (HCCL_BUFFSIZE is 200 MB, twice)
IMBALANCE = 1.2  # tokens of the fullest expert device over the mean, with a balancing loss or bias at work
VISION_SHARE = 4  # patches of the vision tower: as many as a quarter of the row's tokens, each merged from four
UPDATE_BYTES = GIB // 2  # slices of an offloaded optimizer on their way

FORMULAS = {
    "weights": "what FSDP shards: (4·T + e·F) / n; a compute copy: 2·(T + F), / n under zero 3",
    "masters": "4·T / n, less 2·T / n where the bf16 weights are a part of them",
    "gradients": "g·T, / n under zero 2 and 3; of the largest layer alone where the optimizer works in the backward pass",
    "reduced gradients": "g·T / n, where whole gradients are kept until the last micro-batch: their shards, of another stream's memory",
    "moments": "8·T / n (4·T / n in bf16)",
    "gathered weights": "e × (2 largest layers + embedding + head); or e × (P + 2 largest layers) under zero 1 and 2 and in pipelines",
    "activations": "k × layers × saved bytes of a layer + one layer being recomputed (in advance: all of a chunk) + last norm",
    "backward": "of one layer: gradients of its gathered inputs 2·e·t·h and of its MLP e·t·f / tp, its weight gradients e·P_layer",
    "stage buffers": "e·t·h x (an input, an output and their gradients on their way; k outputs where weight gradients wait; or, of torch's "
    "stages, a gradient and an input of every micro-batch)",
    "vision": "saved tensors of the vision tower, patches x layers",
    "logits": "2 fp32 chunks + 4·V·h (the head's gradient on its way; under gpipe of every micro-batch), or t·V/tp in several copies",
    "reference": "e·P, sharded as the weights are",
    "critic": "weights, gradients, masters and moments of a second model",
    "checkpoint copy": "12·T / n, while a checkpoint is written beside training (elsewhere the copy is in the host's memory)",
    "buffers": "buckets, slices of an offloaded state, a communicator an axis",
    "runtime": "interpreter, libraries, device context",
}


@dataclass(frozen=True)
class Setting:
    """What is priced: everything but the layout."""

    card: ModelCard
    recipe: Recipe
    cluster: Cluster
    dtype: str
    engine: Engine

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the compute dtype."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def row_tokens(self) -> int:
        """Tokens of one row of a batch: a preference pair has two sequences."""
        return self.recipe.data.seq_len * (2 if isinstance(self.recipe.objective, Dpo | Reward) else 1)

    def stages(self, layout: Layout) -> Stages:
        """What the pipeline stages of a layout hold."""
        return layout_stages(self.card, layout, self.recipe.data.seq_len, self.engine.cuts_by_cost)


def memory_terms(
    card: ModelCard, recipe: Recipe, layout: Layout, dtype: str, cluster: Cluster, backend: str = "native"
) -> list[MemoryTerm]:
    """Predicted peak of the fullest device, term by term.

    Args:
        dtype: `float32` or `bfloat16`, of the computation.
        backend: whose habits count; unknown names count as the embedded engine.
    """
    stages = stage_terms(Setting(card, recipe, cluster, dtype, engine_of(backend, recipe.layout)), layout)
    return max(stages, key=lambda terms: sum(term.num_bytes for term in terms))


def activation_bytes(card: ModelCard, recipe: Recipe, layout: Layout, element_bytes: int) -> tuple[int, str]:
    """Saved activations of the embedded engine's fullest stage at the end of a forward pass, with their formula."""
    from ascendfactory.core.plan import Device

    device = Device(
        name="cpu", title="cpu", kind="cpu", memory_bytes=0, peak_bf16_flops=1, peak_fp32_flops=1, memory_bandwidth_bytes_s=1,
        devices_per_node=1, intra_node_bytes_s=1, inter_node_bytes_s=1,
    )  # fmt: skip
    cluster = Cluster(device=device, nodes=1, nproc=layout.num_devices)
    dtype = "bfloat16" if element_bytes == 2 else "float32"
    setting = Setting(card, recipe, cluster, dtype, engine_of("native"))
    held = _price(setting, grid_of([layout]), setting.stages(layout))["activations"]
    return int(held.max()), FORMULAS["activations"]


def stage_terms(setting: Setting, layout: Layout) -> list[list[MemoryTerm]]:
    """The terms of every pipeline stage."""
    priced = _price(setting, grid_of([layout]), setting.stages(layout))
    return [
        [MemoryTerm(name=name, num_bytes=int(column[0, s]), formula=FORMULAS[name]) for name, column in priced.items() if column[0, s]]
        for s in range(layout.pp)
    ]


def peak_bytes(setting: Setting, grid: Grid) -> Ints:
    """Predicted peak of the fullest device of each layout [N]."""
    peaks = np.zeros(len(grid), np.int64)
    for index, one in pipelines(grid):
        priced = _price(setting, grid.take(index), setting.stages(one))
        peaks[index] = sum(priced.values()).max(axis=1)  # type: ignore[union-attr]
    return peaks


def _price(setting: Setting, grid: Grid, stages: Stages) -> dict[str, Ints]:
    """Terms [N, S] of layouts that cut the model alike."""
    wide = Columns(setting, grid, stages)
    terms = dict(_states(wide))
    terms["activations"] = _activations(wide)
    terms["backward"] = _backward(wide)
    terms["stage buffers"] = _stage_buffers(wide)
    terms["vision"] = _vision(wide)
    terms["logits"] = _logits(wide)
    if setting.recipe.checkpoint.asynchronous and setting.cluster.device.kind == "cpu":
        trained, expert = wide.trained()
        terms["checkpoint copy"] = wide.over(12 * trained, 12 * expert, True)
    terms["buffers"] = _buffers(wide)
    reserve = (setting.engine.reserve or RUNTIME_BYTES)[setting.cluster.device.kind]
    terms["runtime"] = np.full_like(terms["activations"], reserve)
    return terms


class Columns:
    """The quantities that several terms need, as [N, 1] (layouts) or [N, S] (stages of layouts)."""

    def __init__(self, setting: Setting, grid: Grid, stages: Stages) -> None:
        self.setting, self.stages, self.engine = setting, stages, setting.engine
        self.grid = grid
        self.e = setting.element_bytes
        as_column: Callable[[Ints], Ints] = lambda a: a[:, None]  # noqa: E731
        self.tp, self.ep, self.shard = as_column(grid.tp), as_column(grid.ep), as_column(grid.shard)
        self.zero, self.num_micro = as_column(grid.zero), as_column(grid.num_micro)
        self.sequence_split = np.where(as_column(grid.sp) == 1, self.tp, 1)
        self.tokens = -(-as_column(grid.micro_size) * setting.row_tokens // as_column(grid.cp))
        self.expert_shard = np.maximum(1, self.shard * self.tp // self.ep)
        # parameters of a stage on one rank of the tp and ep groups; a tied head's copy counts in every stage that has one
        last_norm = np.minimum(stages.head, setting.card.hidden_size)
        self.dense = (stages.split + stages.embedding + stages.head - last_norm) // self.tp + stages.whole + last_norm
        self.dense = self.dense + stages.layers * kv_extra_params(setting.card, self.tp)
        self.expert = stages.expert // self.ep
        self.layers = stages.layers
        self.is_last = (stages.head > 0).astype(np.int64)  # whether a stage has the head [S]
        waits = (as_column(grid.pp) > 1) & (as_column(grid.schedule) == SCHEDULES.index("gpipe"))
        self.losses = np.where(waits, self.num_micro, 1) * self.is_last  # micro-batches between their loss and its backward pass [N, S]

    @property
    def weights_sharded(self) -> Ints:
        """Whether the weights at rest are shards [N, 1]."""
        return np.asarray((self.zero == 3) | (not self.engine.keeps_copy and self.engine.weight_bytes == 0))

    def over(self, dense: Ints, expert: Ints, sharded: Ints | bool) -> Ints:
        """Bytes after sharding by data parallelism: dense parts over n, experts over their own mesh."""
        if self.setting.card.moe is None:
            return np.where(sharded, dense // self.shard, dense)
        return np.where(sharded, dense // self.shard + expert // self.expert_shard, dense + expert)

    def trained(self) -> tuple[Ints, Ints]:
        """Trained parameters of a stage: dense ones and experts."""
        tuning = self.setting.recipe.tuning
        if not isinstance(tuning, Lora):
            return self.dense, np.broadcast_to(self.expert, self.dense.shape)
        parts, card = adapter_params(self.setting.card, tuning), self.setting.card
        each = parts.whole + parts.split // self.tp + parts.kv // np.minimum(self.tp, card.num_kv_heads)
        adapters = each * self.layers // max(1, card.num_layers)
        return np.broadcast_to(adapters, self.dense.shape), np.zeros_like(self.dense)

    def frozen(self) -> tuple[Ints, Ints]:
        """Frozen parameters of a stage."""
        if isinstance(self.setting.recipe.tuning, Lora):
            return self.dense, np.broadcast_to(self.expert, self.dense.shape)
        return np.zeros_like(self.dense), np.zeros_like(self.dense)


def _states(c: Columns) -> dict[str, Ints]:
    """Weights, masters, gradients, moments, gathered copies and the other models of a run."""
    engine, grid = c.engine, c.grid
    (trained, trained_expert), (frozen, frozen_expert) = c.trained(), c.frozen()
    has_copy = engine.weight_bytes and c.e == 2
    weight = engine.weight_bytes if has_copy else 4  # without a copy the fp32 masters are the weights
    at_rest = c.weights_sharded
    weights = c.over(weight * trained + c.e * frozen, weight * trained_expert + c.e * frozen_expert, at_rest)
    on_device = 1 - grid.offload_optimizer[:, None]
    master = (engine.master_bytes - np.where(grid.reuse_params[:, None] == 1, 2, 0)) * on_device if has_copy else 0 * on_device
    moment = np.where(grid.optim_dtype[:, None] == 1, 4, 8) * on_device
    grad_bytes = engine.grad_bytes if c.e == 2 else 4
    whole_grads = (c.zero == 1) & ((c.num_micro > 1) | engine.keeps_copy)
    # torch's pipeline stages reduce FSDP's gradients after the last micro-batch only
    whole_grads |= engine.torch_stages & (grid.pp[:, None] > 1) & (c.num_micro > 1)
    gradients = c.over(grad_bytes * trained, grad_bytes * trained_expert, ~whole_grads)
    if c.setting.recipe.optim.in_backward:
        largest = np.maximum(c.stages.largest_layer, c.stages.embedding + c.stages.head) // c.tp
        gradients = np.minimum(gradients, c.over(grad_bytes * largest, grad_bytes * c.stages.largest_expert // c.ep, True))
    shards = c.over(grad_bytes * trained, grad_bytes * trained_expert, True)
    terms = {
        "weights": weights,
        "masters": c.over(master * trained, master * trained_expert, True),
        "gradients": gradients,
        "reduced gradients": np.where(whole_grads & (c.shard > 1) & (not engine.keeps_copy), shards, 0),
        "moments": c.over(moment * trained, moment * trained_expert, True),
        "gathered weights": _gathered(c),
    }
    other = c.over(c.e * c.dense, c.e * c.expert, at_rest)
    objective, is_lora = c.setting.recipe.objective, isinstance(c.setting.recipe.tuning, Lora)
    compares = isinstance(objective, Dpo) or (isinstance(objective, PolicyGradient) and objective.kl_coef > 0)
    if compares and not is_lora:  # under LoRA the base without adapters is the reference
        terms["reference"] = other
    if isinstance(objective, Ppo):
        terms["critic"] = terms["weights"] + terms["masters"] + terms["gradients"] + terms["moments"]
    return terms


def _gathered(c: Columns) -> Ints:
    """Whole weights that FSDP or ZeRO-3 holds beside the shards while they are used."""
    stages = c.stages
    root = (stages.embedding + _head_weights(c)) // c.tp
    layers = 2 * (stages.largest_layer // c.tp) if stages.layers.max() > 1 else stages.largest_layer // c.tp
    lean = c.e * (layers + root) + np.where(c.expert_shard > 1, 2 * c.e * stages.largest_expert // c.ep, 0)
    whole = c.e * (c.dense + c.expert)
    if c.engine.keeps_copy:
        return np.zeros_like(c.dense)
    if c.engine.weight_bytes and c.e == 2:  # a copy at rest: gathered only where it is sharded
        return np.where((c.zero == 3) & (c.shard > 1), lean, 0)
    # torch's stages of a pipeline keep their weights from the first micro-batch to the last, as levels 1 and 2 do
    stays = (c.zero < 3) | (c.engine.torch_stages & (c.grid.pp[:, None] > 1))
    # all-gathers land in buffers of their own: of the layer being copied out and of the one that is on its way
    landing = np.where(c.shard > 1, 2 * c.e * (stages.largest_layer // c.tp + stages.largest_expert // c.ep), 0)
    gathered = np.where(stays, whole + landing, lean)
    return np.where((c.shard == 1) & (c.e == 4), 0, gathered)


def _head_weights(c: Columns) -> Ints:
    """The head without the last norm."""
    return np.where(c.stages.head > c.setting.card.hidden_size, c.stages.head - c.setting.card.hidden_size, 0)


def _in_flight(c: Columns) -> Ints:
    """Micro-batches x vpp whose activations a stage holds at its peak, in chunks of 1 / vpp of its layers.

    GPipe: all; 1F1B: pp - stage; interleaved: 2·(pp - stage - 1) + (vpp - 1)·pp + 1 chunks (arXiv:2104.04473, section 2.2). Zero bubble
    and ZBV: pp·vpp chunks on every stage, since inputs wait for their weight gradients (arXiv:2401.10241, arXiv:2405.15362); DualPipeV
    one more (DeepSeek-V3, arXiv:2412.19437). Equal to what torch's schedules hold when their actions are played through.
    """
    grid, pp = c.grid, len(c.layers)
    stage, vpp = np.arange(pp)[None, :], grid.vpp[:, None]
    schedule = grid.schedule[:, None]
    most = c.num_micro * vpp
    by_name = {
        "gpipe": most, "1f1b": (pp - stage) * vpp, "interleaved": 2 * (pp - stage - 1) + (vpp - 1) * pp + 1,
        "zero_bubble": pp * vpp, "zbv": pp * vpp, "dualpipev": pp * vpp + 1,
    }  # fmt: skip
    chunks = np.zeros((len(grid), pp), np.int64)
    for name in SCHEDULES:
        chunks = np.where(schedule == SCHEDULES.index(name), by_name[name], chunks)
    return np.minimum(most, chunks) if pp > 1 else np.broadcast_to(vpp, (len(grid), 1))


def _activations(c: Columns) -> Ints:
    setting, grid, stages = c.setting, c.grid, c.stages
    hidden = setting.card.hidden_size
    per_layer: dict[tuple[int, bool], Ints] = {}
    kinds = [flag for flag, layers in ((False, stages.dense_layers), (True, stages.moe_layers)) if layers.any()]
    for mode in {0, *set(grid.recompute.tolist())}:
        for is_moe in kinds:
            per_layer[mode, is_moe] = _layer_on_device(c, RECOMPUTES[mode], is_moe)
    mode_column = grid.recompute[:, None]
    limit = np.where(grid.recompute_layers[:, None] > 0, grid.recompute_layers[:, None], c.layers)
    limit = np.minimum(limit, c.layers)
    dense_done = np.minimum(stages.dense_layers, limit)
    done = {False: dense_done, True: np.minimum(stages.moe_layers, limit - dense_done)}
    counts = {False: stages.dense_layers, True: stages.moe_layers}
    kept = np.zeros((len(grid), len(c.layers)), np.int64)
    largest = _largest_layer(c)
    for is_moe in kinds:
        plain = per_layer[0, is_moe]
        for mode in set(grid.recompute.tolist()):
            layers = done[is_moe] * per_layer[mode, is_moe] + (counts[is_moe] - done[is_moe]) * plain
            kept += np.where(mode_column == mode, layers, 0)
    held = kept * _in_flight(c) // grid.vpp[:, None]
    held = np.where(grid.offload_activations[:, None] == 1, np.minimum(held, 2 * largest), held)
    # the last norm's input and scale, and the gradient that the head leaves: of the embedded engine's head, of all positions
    gradient_split = 1 if setting.engine.name == "native" else c.sequence_split
    tail = c.losses * (c.tokens * hidden * (4 + c.e) // c.sequence_split + c.tokens * hidden * c.e // gradient_split)
    total = held + _replayed(c) + tail
    return np.asarray(total + (total * setting.engine.overhead).astype(np.int64))


def _largest_layer(c: Columns) -> Ints:
    """Saved bytes of the largest layer without recomputation [N, 1]."""
    sizes = [_layer_on_device(c, "none", flag) for flag, n in ((False, c.stages.dense_layers), (True, c.stages.moe_layers)) if n.any()]
    return np.asarray(np.maximum.reduce(sizes))


def _replayed(c: Columns) -> Ints:
    """The layer that is being computed again, or, in advance, all of a chunk's [N, S]."""
    grid, largest = c.grid, _largest_layer(c)
    one = np.where(grid.recompute[:, None] > 0, largest, 0)
    limit = np.where(grid.recompute_layers[:, None] > 0, np.minimum(grid.recompute_layers[:, None], c.layers), c.layers)
    # where the backward pass follows its forward pass at once, nothing is computed before its time
    at_once = (c.is_last == 1) & (grid.schedule[:, None] == SCHEDULES.index("1f1b"))
    early = (grid.recompute_in_advance[:, None] == 1) & ~at_once
    return np.asarray(np.where(early, one * np.maximum(1, -(-limit // grid.vpp[:, None])), one + 0 * c.layers))


def _layer_on_device(c: Columns, recompute: str, is_moe: bool) -> Ints:
    """Saved bytes of one layer of one micro-batch on a device [N, 1]."""
    setting = c.setting
    token = layer_bytes(setting.card, setting.recipe.tuning, c.e, c.engine, recompute, is_moe)
    shards = -(-token.inputs // c.sequence_split)
    match c.engine.inputs:
        case "whole":
            inputs = token.inputs + 0 * shards
        case "shards":
            inputs = shards
        case "regathered":  # not where whole layers run again: what they gather is soon gone
            all_again = (c.grid.recompute == RECOMPUTES.index("full")) & (c.grid.recompute_layers == 0)
            inputs = np.where(all_again[:, None], token.inputs, shards)
    routed = np.where(c.ep > 1, int(IMBALANCE * token.routed), token.routed) // c.tp  # tokens of a tp group are dispatched once
    kv = -(-token.kv // np.minimum(c.tp, setting.card.num_kv_heads))
    kv = kv + np.where(c.grid.ulysses[:, None] > 1, exchanged_output_bytes(setting.card, c.e, recompute) // c.tp, 0)
    return np.asarray(c.tokens * (-(-token.hidden // c.sequence_split) + inputs + -(-token.split // c.tp) + kv + token.whole + routed))


def _vision(c: Columns) -> Ints:
    vision = c.setting.card.vision
    none = np.zeros((len(c.grid), len(c.layers)), np.int64)
    if vision is None:
        return none
    patches = c.tokens * 4 // VISION_SHARE
    saved = c.e * (10 * vision.hidden_size + 2 * vision.ffn_size) // c.tp
    full = patches * (c.e * vision.hidden_size * vision.num_layers + saved)
    none[:, :1] = np.where(c.grid.recompute[:, None] == RECOMPUTES.index("full"), full, patches * saved * vision.num_layers)
    return none


def _logits(c: Columns) -> Ints:
    """The last stage's: chunks; or logits of the whole micro-batch in the copies that a loss makes, which are gone by the time that
    a layer is computed again, so only what they need beyond that layer counts."""
    card, is_lora = c.setting.card, isinstance(c.setting.recipe.tuning, Lora)
    if c.engine.logit_bytes == 0:
        head = 0 if is_lora else 4 * card.vocab_size * card.hidden_size // c.tp
        return np.asarray(c.is_last * (2 * HEAD_CHUNK_BYTES + 0 * c.tokens) + c.losses * head)
    copies = np.where(c.tp > 1, c.engine.split_logit_bytes, c.engine.logit_bytes)
    words = c.tokens * card.vocab_size // c.tp
    others = np.where(c.grid.pp[:, None] > 1, c.num_micro - 1, 0) * words * c.engine.kept_logit_bytes
    return np.asarray(c.is_last * (np.maximum(0, words * copies - _replayed(c) - _backward(c)) + others))


def _backward(c: Columns) -> Ints:
    """What the backward pass of one layer makes beside the tensors that the forward pass saved [N, S].

    The gradient of the MLP's product, those of the two inputs that q, k, v and that gate and up share (whole under tp, before they
    are reduced), and the weights' gradients before they are added to fp32 ones or reduced.
    """
    card = c.setting.card
    width = max(card.ffn_size, 0) if card.moe is None else card.moe.shared_ffn_size
    inputs = c.tokens * c.e * (2 * card.hidden_size + width // c.tp)
    is_lora = isinstance(c.setting.recipe.tuning, Lora)
    weights = 0 if is_lora or c.e == 4 else c.e * (c.stages.largest_layer // c.tp + c.stages.largest_expert // c.ep)
    return np.asarray(inputs + weights * np.ones_like(c.layers))


def _stage_buffers(c: Columns) -> Ints:
    """Hidden states between stages [N, S].

    The embedded engine makes them when they are needed, and keeps an output only where its weight gradients wait (an input in flight
    is an activation); so does Megatron. torch's pipeline stages make a buffer for every micro-batch before the first, and keep their
    outputs until their gradients come.
    """
    none = np.zeros((len(c.grid), len(c.layers)), np.int64)
    if len(c.layers) == 1 or c.engine.keeps_copy:
        return none
    size = c.tokens * c.setting.card.hidden_size * c.e // c.sequence_split
    flying, vpp = _in_flight(c), c.grid.vpp[:, None]
    if not c.engine.torch_stages:
        splits = np.isin(c.grid.schedule, [SCHEDULES.index(name) for name in SPLIT_BACKWARD])[:, None]
        ends = (c.stages.inputs > 0).astype(np.int64) + (c.stages.outputs > 0)
        return np.asarray(size * (2 * ends + np.where(splits, flying * c.stages.outputs // vpp, 0)))
    received = c.num_micro * (c.stages.inputs + c.stages.outputs) - flying * c.stages.inputs // vpp
    return np.asarray(size * (received + flying * c.stages.outputs // vpp))


def _buffers(c: Columns) -> Ints:
    grid = c.grid
    axes = sum((a > 1).astype(np.int64) for a in (grid.tp, grid.pp, grid.cp, grid.ep))
    fixed = np.where(grid.num_devices > 1, c.engine.buffer_bytes, 0) + grid.offload_optimizer * UPDATE_BYTES
    column = (fixed + axes * CHANNEL_BYTES[c.setting.cluster.device.kind])[:, None]
    return np.broadcast_to(column, (len(grid), len(c.layers)))
