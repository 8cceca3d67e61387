"""Seconds of a step as a sum of named parts, for one layout or thousands at once.

A step = micro-batches x (compute + communication that nothing hides) of the slowest stage + pipeline bubble + what happens
once a step. Compute is operations / (peak x efficiency of the operator at its size); what moves through memory (norms,
activations, the optimizer) is bytes / bandwidth. The bubble is (pp - 1) / vpp micro-batches (Narayanan et al. 2021,
arXiv:2104.04473), of which the schedules that put weight gradients off fill a part (Qi et al. 2023, arXiv:2401.10241). A
factor for the device and the engine, measured, multiplies the step (see calibrate.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ascendfactory.core.plan import Layout, Prediction, TimeTerm
from ascendfactory.core.recipe import Lora
from ascendfactory.core.stages import SPLIT_BACKWARD
from ascendfactory.planner.activations import layer_bytes
from ascendfactory.planner.calibrate import Factor
from ascendfactory.planner.grid import RECOMPUTES, SCHEDULES, Floats, Grid, grid_of, pipelines
from ascendfactory.planner.memory import Setting
from ascendfactory.planner.traffic import traffic_of
from ascendfactory.planner.weights import Stages
from ascendfactory.planner.work import SELECTIVE_SHARE, Work, recomputed_share, work_of

GEMM = 0.80  # of the peak, for large matrix products
ATTENTION = 0.55  # of the peak, for flash attention
HALF_TOKENS, HALF_WIDTH = 96.0, 160.0  # tokens, and narrower side of a matrix, at which a product reaches half of GEMM
MOVES = 3.0  # times that a saved byte of an elementwise operator passes the memory in forward and backward
HOST_BYTES_S = 20e9  # between a device and its host's memory, one way
LAUNCH_S = {"cpu": 0.0, "cuda": 2e-4, "npu": 4e-4}  # of a layer's operators, forward and backward, that nothing hides
ROUTED_ROW_S = {"cpu": 1e-7, "cuda": 2e-8, "npu": 1e-7}  # of sorting one token for one expert, there and back; fitted where measured
HIDDEN = {"ring": 0.9, "ep": 0.3, "pp": 0.7, "host": 0.9}  # share of each that hides behind compute

DETAILS = {
    "matrix products": "attention projections and MLPs",
    "experts": "matrix products of routed experts",
    "routing": "sorting tokens for experts and back",
    "attention": "scores and values",
    "head": "logits and loss",
    "memory bound": "norms, activations, residuals, launches",
    "tp": "all-gather and reduce-scatter of activations",
    "ulysses": "all-to-all of heads",
    "ring": "keys and values round the ring",
    "ep": "dispatch and combine",
    "pp": "activations between stages",
    "dp": "weights gathered, gradients reduced",
    "bubble": "stages that wait for their first and last micro-batch",
    "optimizer": "reads and writes of masters, moments and gradients",
    "host": "offloaded tensors on their way",
}


@dataclass(frozen=True)
class Timing:
    """Seconds a step [N]: the parts, before the measured factor, and the model's own operations on all devices."""

    parts: dict[str, Floats]
    model_flops: Floats

    @property
    def step_s(self) -> Floats:
        """The sum of the parts [N]."""
        return np.asarray(sum(self.parts.values()))


def modelled_seconds(setting: Setting, layout: Layout, attended_tokens: int | None = None) -> tuple[float, float]:
    """Seconds of a step before any measured factor: without the routing of experts, and of the routing."""
    grid, stages = grid_of([layout]), setting.stages(layout)
    without = float(timing_of(setting, grid, stages, 0.0, attended_tokens).step_s[0])
    return without, float(timing_of(setting, grid, stages, 1.0, attended_tokens).step_s[0]) - without


def step_seconds(setting: Setting, grid: Grid, factor: Factor) -> Floats:
    """Predicted seconds of a step of each layout [N]."""
    seconds = np.zeros(len(grid))
    for index, one in pipelines(grid):
        seconds[index] = timing_of(setting, grid.take(index), setting.stages(one), factor.routing).step_s * factor.slowdown
    return seconds


def predict(setting: Setting, layout: Layout, factor: Factor, attended_tokens: int | None = None) -> Prediction:
    """The step of one layout, with its parts, speed and error band."""
    timing = timing_of(setting, grid_of([layout]), setting.stages(layout), factor.routing, attended_tokens)
    step_s = float(timing.step_s[0]) * factor.slowdown
    tokens = layout.dp * layout.micro_size * layout.num_micro * setting.row_tokens
    peak = peak_flops(setting) * layout.num_devices
    parts = [
        TimeTerm(name=name, seconds=float(value[0]) * factor.slowdown, detail=DETAILS[name])
        for name, value in timing.parts.items()
        if value[0] > 0
    ]
    return Prediction(
        step_s=sum(part.seconds for part in parts),
        parts=parts,
        tokens_per_s_device=tokens / step_s / layout.num_devices,
        mfu=float(timing.model_flops[0]) / step_s / peak,
        band=factor.band,
        basis=factor.basis,
    )


def peak_flops(setting: Setting) -> float:
    """Peak of a device in the compute dtype."""
    device = setting.cluster.device
    return device.peak_bf16_flops if setting.dtype == "bfloat16" else device.peak_fp32_flops


def timing_of(setting: Setting, grid: Grid, stages: Stages, routing: float = 1.0, attended_tokens: int | None = None) -> Timing:
    """The parts of layouts that share pp and vpp.

    Args:
        routing: multiplies the cost of sorting tokens for experts.
        attended_tokens: length of a document within a row; None: documents fill their rows.
    """
    work, traffic = work_of(setting, grid, stages, attended_tokens), traffic_of(setting, grid, stages)
    compute = _compute(setting, grid, stages, work, routing)
    busy = np.asarray(sum(compute.values()))
    # what is gathered again travels beside the products for the inputs' gradients; what is overlapped, beside the rest
    products = compute["matrix products"]
    alone = traffic.tp - np.minimum(traffic.tp_beside, products / 3)
    waits = {
        "tp": alone - (1 - 1 / grid.overlap_chunks[:, None]) * np.minimum(alone, products),
        "ulysses": traffic.ulysses,
        "ring": np.maximum(traffic.ring * 0.1, traffic.ring - HIDDEN["ring"] * compute["attention"]),
        "ep": traffic.ep * (1 - HIDDEN["ep"]),
        "pp": traffic.pp * (1 - HIDDEN["pp"]),
    }
    overlap = setting.engine.overlap
    waits["dp"] = np.maximum(traffic.dp_micro * 0.05, traffic.dp_micro - overlap * busy)
    waits["host"] = _offload(setting, grid, stages, busy)
    micro = busy + np.asarray(sum(waits.values()))
    slowest = micro.argmax(axis=1)
    rows = np.arange(len(grid))
    count = grid.num_micro
    parts = {name: np.broadcast_to(value, micro.shape)[rows, slowest] * count for name, value in {**compute, **waits}.items()}
    parts["bubble"] = micro[rows, slowest] * _bubble(setting, grid)
    step = np.broadcast_to(traffic.dp_step, micro.shape)[rows, slowest]
    parts["dp"] = parts["dp"] + np.maximum(step * 0.1, step - overlap * micro[rows, slowest])
    update, moved = _update(setting, grid, stages)
    parts["optimizer"] = update[rows, slowest]
    parts["host"] = parts["host"] + moved[rows, slowest]
    model = work.model.sum(axis=1) * grid.dp * grid.tp * grid.cp * count
    return Timing(parts, model)


def _bubble(setting: Setting, grid: Grid) -> Floats:
    """Micro-batches that a device waits for in a step [N].

    With F, I, W the times of a forward pass, of the inputs' gradients (with what is computed again) and of the weights': pp - 1 of
    F + I + W, over vpp; where W is put off into the gaps, pp - 1 of F + I - W. Frozen weights have no W, so nothing fills the gaps.
    What is computed again in advance is done while the gradient is on its way, so the waiting is shorter by it.
    """
    again = np.array([{"full": 1.0, "selective": SELECTIVE_SHARE}.get(RECOMPUTES[mode], 0.0) for mode in grid.recompute])
    weight = 0.0 if isinstance(setting.recipe.tuning, Lora) else 1.0
    filled = np.isin(grid.schedule, [SCHEDULES.index(name) for name in SPLIT_BACKWARD])
    waited = 2 + np.where(grid.recompute_in_advance == 1, 0.0, again)
    share = (waited + np.where(filled, -weight, weight)) / (2 + again + weight)
    return np.asarray(share * (grid.pp - 1) / grid.vpp)


def _compute(setting: Setting, grid: Grid, stages: Stages, work: Work, routing: float) -> dict[str, Floats]:
    """Seconds of one micro-batch that a device computes [N, S]."""
    card, peak = setting.card, peak_flops(setting)
    tokens = (grid.micro_size * setting.row_tokens / grid.cp)[:, None]
    tp = grid.tp[:, None]
    size = _full(tokens / grid.overlap_chunks[:, None], HALF_TOKENS) * GEMM * peak
    width = _full(np.minimum(card.hidden_size, _ffn(setting) / tp), HALF_WIDTH)
    compute = {"matrix products": work.dense / (size * width)}
    if card.moe:
        local = np.maximum(1, card.moe.num_experts // grid.ep[:, None])
        each = tokens / tp * card.moe.experts_per_token / local
        expert_size = _full(each, HALF_TOKENS) * _full(np.asarray(card.moe.expert_ffn_size * 1.0), HALF_WIDTH)
        # weights pass the memory once a product, however few tokens an expert gets
        read_s = setting.element_bytes * 3 * stages.expert / grid.ep[:, None] / setting.cluster.device.memory_bandwidth_bytes_s
        again = 1 + 0.3 * (grid.recompute[:, None] > 0) * recomputed_share(grid, stages)
        routed = tokens / tp * card.moe.experts_per_token * stages.moe_layers * again
        compute["routing"] = routing * routed * ROUTED_ROW_S[setting.cluster.device.kind]
        compute["experts"] = np.maximum(work.expert / (expert_size * GEMM * peak), read_s)
    compute["attention"] = work.attention / (ATTENTION * peak)
    compute["head"] = work.head / (size * _full(np.asarray(card.hidden_size * 1.0), HALF_WIDTH))
    compute["memory bound"] = _memory_bound(setting, grid, stages, tokens)
    return compute


def _ffn(setting: Setting) -> int:
    card = setting.card
    return card.ffn_size if card.moe is None else max(card.moe.shared_ffn_size, card.num_heads * card.head_dim)


def _full(amount: Floats, half: float) -> Floats:
    """Share of the speed that a dimension of this size reaches: amount / (amount + half)."""
    return amount / (amount + half)


def _memory_bound(setting: Setting, grid: Grid, stages: Stages, tokens: Floats) -> Floats:
    device = setting.cluster.device
    moved = np.zeros((len(grid), len(stages.layers)))
    tp = grid.tp[:, None]
    split = np.where(grid.sp == 1, grid.tp, 1)[:, None]
    for is_moe, count in ((False, stages.dense_layers), (True, stages.moe_layers)):
        if count.any():
            token = layer_bytes(setting.card, setting.recipe.tuning, setting.element_bytes, setting.engine, "none", is_moe)
            moved = moved + count * tokens * ((token.hidden + token.inputs) / split + (token.split + token.routed) / tp)
    again = 1 + 0.3 * (grid.recompute[:, None] > 0) * recomputed_share(grid, stages)
    return MOVES * again * moved / device.memory_bandwidth_bytes_s + LAUNCH_S[device.kind] * stages.layers


def _offload(setting: Setting, grid: Grid, stages: Stages, busy: Floats) -> Floats:
    """Saved activations to the host and back, a micro-batch."""
    token = layer_bytes(setting.card, setting.recipe.tuning, setting.element_bytes, setting.engine, "none", bool(stages.moe_layers.any()))
    tokens = (grid.micro_size * setting.row_tokens / grid.cp / grid.tp)[:, None]
    seconds = 2 * tokens * token.total * stages.layers / HOST_BYTES_S
    return np.where(grid.offload_activations[:, None] == 1, np.maximum(0.05 * seconds, seconds - HIDDEN["host"] * busy), 0.0)


def _update(setting: Setting, grid: Grid, stages: Stages) -> tuple[Floats, Floats]:
    """The optimizer's step: seconds in the device's memory, seconds of states from and to the host."""
    from ascendfactory.planner.memory import Columns

    dense, expert = Columns(setting, grid, stages).trained()
    owned = dense / grid.shard[:, None] + expert / np.maximum(1, grid.shard * grid.tp // grid.ep)[:, None]
    state = 24 + 4  # masters and both moments read and written, gradients read
    device_s = owned * state / setting.cluster.device.memory_bandwidth_bytes_s
    offloaded = grid.offload_optimizer[:, None] == 1
    return np.where(offloaded, 0.0, device_s), np.where(offloaded, owned * 24 / HOST_BYTES_S, 0.0)
