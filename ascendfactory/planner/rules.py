"""What makes a layout illegal: one row a rule, each with its text and its fix.

A rule's mask judges thousands of layouts at once; its words are for one. The constraints of MindSpeed and Megatron-Core that
hold for every engine are here; those of a single engine are in `engine_rules.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ascendfactory.core.plan import Cluster, Layout, ModelCard, Refusal
from ascendfactory.core.recipe import PolicyGradient, Recipe, Schedule
from ascendfactory.core.stages import V_SHAPED
from ascendfactory.planner.grid import RECOMPUTES, SCHEDULES, Grid, Mask, grid_of

Words = tuple[str, str, dict[str, Any]]  # English, Chinese, fix


@dataclass(frozen=True)
class Case:
    """What a layout is judged against."""

    recipe: Recipe
    card: ModelCard
    cluster: Cluster


@dataclass(frozen=True)
class Rule:
    """One constraint: where it is broken, and what to say and do about it."""

    code: str
    where: str
    broken: Callable[[Case, Grid], Mask]
    words: Callable[[Case, Layout], Words]


def illegal(recipe: Recipe, card: ModelCard, cluster: Cluster, layout: Layout) -> list[Refusal]:
    """Every rule that a layout breaks. A fix is a value that the rule accepts for the layout as it is otherwise."""
    case, grid = Case(recipe, card, cluster), grid_of([layout])
    found = []
    for rule in RULES:
        if rule.broken(case, grid)[0]:
            en, zh, fix = rule.words(case, layout)
            found.append(Refusal(code=rule.code, where=rule.where, en=en, zh=zh, fix=fix))
    return found


def legal(recipe: Recipe, card: ModelCard, cluster: Cluster, grid: Grid) -> Mask:
    """Which layouts break no rule [N]."""
    case = Case(recipe, card, cluster)
    good = np.ones(len(grid), np.bool_)
    for rule in RULES:
        good &= ~rule.broken(case, grid)
    return good


def divisor_up_to(number: int, most: int) -> int:
    """The largest divisor of `number` that is not above `most`."""
    return next(d for d in range(max(1, min(number, most)), 0, -1) if number % d == 0)


def best_tp(case: Case, most: int) -> int:
    """The largest tensor-parallel degree up to `most` that every rule about tp alone accepts."""
    kv_heads = _kv_heads(case)
    common = math.gcd(case.card.num_heads, math.gcd(case.card.vocab_size, case.cluster.nproc))
    return max(d for d in range(1, max(1, most) + 1) if common % d == 0 and max(kv_heads, d) % min(kv_heads, d) == 0)


def _devices_words(case: Case, layout: Layout) -> Words:
    used, have = layout.num_devices, case.cluster.num_devices
    fix: dict[str, Any] = {"layout.dp": "auto"}
    left = have
    for name in ("tp", "pp", "ring", "ulysses"):
        degree = getattr(layout, name)
        fitting = best_tp(case, math.gcd(left, degree)) if name == "tp" else math.gcd(left, degree)
        if fitting != degree:
            fix[f"layout.{name}"] = fitting
        left //= fitting
    written = case.recipe.layout.dp != "auto" or len(fix) == 1
    words = [f"{key.removeprefix('layout.')}: {value}" for key, value in fix.items() if written or key != "layout.dp"]
    degrees = " x ".join(f"{name} {value}" for name in ("dp", "tp", "pp", "ring", "ulysses") if (value := getattr(layout, name)) > 1)
    objective, has, has_zh = case.recipe.objective, "the cluster has", "集群有"
    if isinstance(objective, PolicyGradient) and objective.off_policy_steps:
        has, has_zh = "beside those that generate training has", "除生成所用外训练有"
    return (
        f"{degrees or 'dp 1'} makes {used} devices, {has} {have}; write {', '.join(words)}",
        f"{degrees or 'dp 1'} 合计 {used} 个设备，而{has_zh} {have} 个；请写 {'、'.join(words)}",
        fix,
    )


def _replicate_words(case: Case, layout: Layout) -> Words:
    r, dp = layout.replicate, layout.dp
    return (
        f"replicate {r} does not divide dp {dp}; write replicate: 1",
        f"replicate {r} 不能整除 dp {dp}；请写 replicate: 1",
        {"layout.replicate": 1},
    )


def _nearest_batch(case: Case, rows: int) -> int:
    """The global_size closest to the recipe's whose rows are a multiple of `rows`: under reinforcement learning a prompt has several."""
    size = case.recipe.batch.global_size
    unit = rows // math.gcd(rows, case.recipe.rows_a_step // size)
    return max(unit, round(size / unit) * unit)


def _global_batch_words(case: Case, layout: Layout) -> Words:
    rows = case.recipe.rows_a_step
    better = _nearest_batch(case, layout.dp if case.recipe.batch.micro_size == "auto" else layout.dp * layout.micro_size)
    return (
        f"{rows} rows cannot be shared by dp {layout.dp} in micro-batches of {layout.micro_size}; nearest: {better}",
        f"{rows} 行无法按 dp {layout.dp}、微批 {layout.micro_size} 均分；最接近的是 {better}",
        {"batch.global_size": better},
    )


def _seq_len_words(case: Case, layout: Layout) -> Words:
    known = case.card.max_seq_len
    return (
        f"{case.recipe.data.seq_len} is beyond the {known} positions that {case.card.name} knows; write {known} or less",
        f"{case.recipe.data.seq_len} 超出 {case.card.name} 支持的 {known} 个位置；请写 {known} 或更小",
        {"data.seq_len": known},
    )


def _tp_words(what_en: str, what_zh: str, size: Callable[[Case], int]) -> Callable[[Case, Layout], Words]:
    def words(case: Case, layout: Layout) -> Words:
        better, number = best_tp(case, layout.tp), size(case)
        return (
            f"tp {layout.tp} does not divide {number} {what_en}; write tp: {better}, dp: auto",
            f"tp {layout.tp} 不能整除{what_zh} {number}；请写 tp: {better}、dp: auto",
            {"layout.tp": better, "layout.dp": "auto"},
        )

    return words


def _node_words(case: Case, layout: Layout) -> Words:
    better = best_tp(case, layout.tp)
    return (
        f"a tp group must lie inside a node, and tp {layout.tp} does not divide its {case.cluster.nproc} devices; write tp: "
        f"{better}, dp: auto",
        f"tp 组必须位于一个节点内，而 tp {layout.tp} 不能整除其 {case.cluster.nproc} 个设备；请写 tp: {better}、dp: auto",
        {"layout.tp": better, "layout.dp": "auto"},
    )


def _ulysses_words(case: Case, layout: Layout) -> Words:
    better = divisor_up_to(max(1, case.card.num_heads // layout.tp), layout.ulysses)
    return (
        f"Ulysses shares the {case.card.num_heads} heads: tp x ulysses = {layout.tp * layout.ulysses} must divide them; "
        f"write ulysses: {better}, dp: auto",
        f"Ulysses 按头切分：tp x ulysses = {layout.tp * layout.ulysses} 须整除 {case.card.num_heads} 个头；请写 ulysses: "
        f"{better}、dp: auto",
        {"layout.ulysses": better, "layout.dp": "auto"},
    )


def _sequence_unit(layout: Layout) -> int:
    unit = layout.ulysses * layout.ring * (2 if layout.ring > 1 else 1)
    return unit * layout.tp if layout.sp else unit


def _sequence_words(case: Case, layout: Layout) -> Words:
    unit, seq_len = _sequence_unit(layout), case.recipe.data.seq_len
    better = max(unit, seq_len // unit * unit)
    if better > case.card.max_seq_len:
        return (
            f"rows of {seq_len} tokens cannot be cut into {unit} parts; write ring: 1, ulysses: 1, dp: auto",
            f"{seq_len} 个 token 的行无法切成 {unit} 份；请写 ring: 1、ulysses: 1、dp: auto",
            {"layout.ring": 1, "layout.ulysses": 1, "layout.sp": False, "layout.dp": "auto"},
        )
    return (
        f"rows are cut into {unit} parts (2 x ring, ulysses, tp under sp), and {seq_len} is no multiple; write {better}",
        f"每行要切成 {unit} 份（2 x ring、ulysses、sp 下的 tp），而 {seq_len} 不是其倍数；请写 {better}",
        {"data.seq_len": better},
    )


def _layers_words(case: Case, layout: Layout) -> Words:
    layers = case.card.num_layers
    pp = layout.pp if layout.pp <= layers else divisor_up_to(layout.pp, layers)
    vpp = max(1, layers // pp) if layout.vpp > 1 else 1
    vpp = min(vpp, layout.vpp)
    return (
        f"{layout.pp} stages x {layout.vpp} chunks need at least as many layers, and {case.card.name} has {layers}; write "
        f"pp: {pp}, vpp: {vpp}, dp: auto",
        f"{layout.pp} 级 x {layout.vpp} 块至少需要同样多的层，而 {case.card.name} 只有 {layers} 层；请写 pp: {pp}、vpp: {vpp}、dp: auto",
        {"layout.pp": pp, "layout.vpp": vpp, "layout.schedule": "auto", "layout.dp": "auto"},
    )


def _vpp_words(case: Case, layout: Layout) -> Words:
    return (
        f"vpp {layout.vpp} cuts the stages of a pipeline, and pp is 1; write vpp: 1",
        f"vpp {layout.vpp} 用于切分流水线各级，而 pp 为 1；请写 vpp: 1",
        {"layout.vpp": 1, "layout.schedule": "auto"},
    )


def _schedule_words(case: Case, layout: Layout) -> Words:
    needs_en = "zbv and dualpipev need vpp 2, interleaved vpp > 1, gpipe and 1f1b vpp 1"
    needs_zh = "zbv 与 dualpipev 需要 vpp 2，interleaved 需要 vpp > 1，gpipe 与 1f1b 需要 vpp 1"
    return (
        f"schedule {layout.schedule} does not go with vpp {layout.vpp} ({needs_en}); write schedule: auto",
        f"schedule {layout.schedule} 与 vpp {layout.vpp} 不符（{needs_zh}）；请写 schedule: auto",
        {"layout.schedule": "auto"},
    )


def _interleaved_words(case: Case, layout: Layout) -> Words:
    better = _nearest_batch(case, layout.dp * layout.micro_size * layout.pp)
    return (
        f"the {layout.schedule} schedule needs micro-batches in multiples of pp {layout.pp}, not {layout.num_micro}; write a "
        f"global_size of {better}",
        f"{layout.schedule} 调度要求微批数为 pp {layout.pp} 的倍数，而现为 {layout.num_micro}；请将 global_size 写为 {better}",
        {"batch.global_size": better},
    )


def _dualpipev_words(case: Case, layout: Layout) -> Words:
    return (
        f"dualpipev needs as many micro-batches as chunks, {2 * layout.pp}, and there are {layout.num_micro}; write schedule: zbv",
        f"dualpipev 要求微批数不少于分块数 {2 * layout.pp}，而现为 {layout.num_micro}；请写 schedule: zbv",
        {"layout.schedule": "zbv"},
    )


def _stage_layers_words(case: Case, layout: Layout) -> Words:
    count, total = layout.pp * layout.vpp, case.card.num_layers
    return (
        f"stage_layers has {len(layout.stage_layers)} numbers that add up to {sum(layout.stage_layers)}; pp {layout.pp} x vpp {layout.vpp} "
        f"wants {count} that add up to {total}; write stage_layers: auto",
        f"stage_layers 有 {len(layout.stage_layers)} 个数、总和 {sum(layout.stage_layers)}；pp {layout.pp} x vpp {layout.vpp} "
        f"需要 {count} 个、总和 {total}；请写 stage_layers: auto",
        {"layout.stage_layers": "auto"},
    )


def _wrong_stage_layers(case: Case, grid: Grid) -> Mask:
    wanted = case.card.num_layers
    lengths = np.array([len(sizes) or pp * vpp for sizes, pp, vpp in zip(grid.stage_layers, grid.pp, grid.vpp, strict=True)])
    sums = np.array([sum(sizes) if sizes else wanted for sizes in grid.stage_layers])
    return np.asarray((lengths != grid.pp * grid.vpp) | (sums != wanted))


def _overlap_words(case: Case, layout: Layout) -> Words:
    return (
        f"overlap_chunks {layout.overlap_chunks} hides the messages of tensor parallelism, and tp is 1; write overlap_chunks: 1",
        f"overlap_chunks {layout.overlap_chunks} 用于掩盖张量并行的通信，而 tp 为 1；请写 overlap_chunks: 1",
        {"layout.overlap_chunks": 1},
    )


def _in_backward_norm_words(case: Case, layout: Layout) -> Words:
    norm = case.recipe.optim.max_grad_norm
    return (
        f"in_backward updates weights before the whole gradient's norm is known, and max_grad_norm is {norm:g}; write max_grad_norm: 0",
        f"in_backward 在得知整体梯度范数之前就更新权重，而 max_grad_norm 为 {norm:g}；请写 max_grad_norm: 0",
        {"optim.max_grad_norm": 0.0},
    )


def _in_backward_words(case: Case, layout: Layout) -> Words:
    return (
        f"in_backward keeps no gradient to add to, and a step has {layout.num_micro} micro-batches over {layout.pp} stages "
        "(it needs one of each); write in_backward: false",
        f"in_backward 不保留可累加的梯度，而一步有 {layout.num_micro} 个微批、{layout.pp} 级流水（两者都须为 1）；请写 in_backward: false",
        {"optim.in_backward": False},
    )


def _experts_words(case: Case, layout: Layout) -> Words:
    experts = case.card.moe.num_experts if case.card.moe else 1
    better = math.gcd(divisor_up_to(experts, layout.ep), layout.shard * layout.tp) if case.card.moe else 1
    what_en = f"{experts} experts" if case.card.moe else "no experts in this model"
    what_zh = f"{experts} 个专家" if case.card.moe else "模型没有专家层"
    return (
        f"ep {layout.ep} does not go with {what_en}; write ep: {better}",
        f"ep {layout.ep} 与{what_zh}不符；请写 ep: {better}",
        {"layout.ep": better},
    )


def _expert_mesh_words(case: Case, layout: Layout) -> Words:
    region = layout.shard * layout.tp
    experts = case.card.moe.num_experts if case.card.moe else 1
    better = math.gcd(divisor_up_to(experts, layout.ep), math.gcd(region, experts))
    return (
        f"experts live on dp/replicate x cp x tp = {region} devices, which ep {layout.ep} does not divide; write ep: {better}",
        f"专家分布在 dp/replicate x cp x tp = {region} 个设备上，ep {layout.ep} 不能整除它；请写 ep: {better}",
        {"layout.ep": better},
    )


def _sp_words(case: Case, layout: Layout) -> Words:
    return (
        "sequence parallelism splits norms over a tp group, and tp is 1; write sp: auto",
        "序列并行在 tp 组内切分归一化层，而 tp 为 1；请写 sp: auto",
        {"layout.sp": "auto"},
    )


def _recompute_layers_words(case: Case, layout: Layout) -> Words:
    most = case.card.num_layers // layout.pp
    return (
        f"recompute_layers {layout.recompute_layers} does not go with recompute {layout.recompute} and {most} layers a "
        "stage; write recompute_layers: auto",
        f"recompute_layers {layout.recompute_layers} 与 recompute {layout.recompute}、每级 {most} 层不符；请写 recompute_layers: auto",
        {"layout.recompute_layers": "auto"},
    )


def _in_advance_words(case: Case, layout: Layout) -> Words:
    return (
        "computing again in advance needs pp > 1, recompute full or selective, and zero 1 or 2 (weights that stay); "
        "write recompute_in_advance: false",
        "提前重算要求 pp > 1、recompute 为 full 或 selective、zero 为 1 或 2（权重保持完整）；请写 recompute_in_advance: false",
        {"layout.recompute_in_advance": False},
    )


def _kv_heads_words(case: Case, layout: Layout) -> Words:
    better, number = best_tp(case, layout.tp), _kv_heads(case)
    return (
        f"of tp {layout.tp} and {number} key/value heads one must divide the other; write tp: {better}, dp: auto",
        f"tp {layout.tp} 与键值头数 {number} 须一方整除另一方；请写 tp: {better}、dp: auto",
        {"layout.tp": better, "layout.dp": "auto"},
    )


def _reuse_words(case: Case, layout: Layout) -> Words:
    return (
        "reuse_params keeps bf16 weights inside fp32 masters on the device: not with offload_optimizer; write reuse_params: false",
        "reuse_params 把 bf16 权重放在设备上的 fp32 主权重内，不能与 offload_optimizer 同用；请写 reuse_params: false",
        {"layout.reuse_params": False},
    )


def _kv_heads(case: Case) -> int:
    return case.card.num_heads if case.card.mla else case.card.num_kv_heads


def _experts(case: Case) -> int:
    return case.card.moe.num_experts if case.card.moe else 1


def _runs(grid: Grid, *schedules: Schedule) -> Mask:
    return np.isin(grid.schedule, [SCHEDULES.index(name) for name in schedules])


def _has_sizes(grid: Grid) -> Mask:
    return np.array([bool(sizes) for sizes in grid.stage_layers], np.bool_)


RULES = (
    Rule("devices", "layout.dp", lambda c, g: g.num_devices != c.cluster.num_devices, _devices_words),
    Rule("replicate", "layout.replicate", lambda c, g: g.dp % g.replicate != 0, _replicate_words),
    Rule(
        "global_batch",
        "batch.global_size",
        lambda c, g: g.dp * g.micro_size * g.num_micro != c.recipe.rows_a_step,
        _global_batch_words,
    ),
    Rule("seq_len", "data.seq_len", lambda c, g: np.full(len(g), c.recipe.data.seq_len > c.card.max_seq_len), _seq_len_words),
    Rule(
        "heads",
        "layout.tp",
        lambda c, g: c.card.num_heads % g.tp != 0,
        _tp_words("attention heads", "注意力头数", lambda c: c.card.num_heads),
    ),
    Rule("kv_heads", "layout.tp", lambda c, g: np.maximum(_kv_heads(c), g.tp) % np.minimum(_kv_heads(c), g.tp) != 0, _kv_heads_words),
    Rule(
        "vocabulary",
        "layout.tp",
        lambda c, g: c.card.vocab_size % g.tp != 0,
        _tp_words("words of the vocabulary", "词表大小", lambda c: c.card.vocab_size),
    ),
    Rule("node", "layout.tp", lambda c, g: c.cluster.nproc % g.tp != 0, _node_words),
    Rule("ulysses_heads", "layout.ulysses", lambda c, g: (g.ulysses > 1) & (c.card.num_heads % (g.tp * g.ulysses) != 0), _ulysses_words),
    Rule(
        "sequence",
        "data.seq_len",
        lambda c, g: c.recipe.data.seq_len % (g.cp * np.where(g.ring > 1, 2, 1) * np.where(g.sp == 1, g.tp, 1)) != 0,
        _sequence_words,
    ),
    Rule("layers", "layout.pp", lambda c, g: (g.pp * g.vpp > c.card.num_layers) & ~_has_sizes(g), _layers_words),
    Rule("stage_layers", "layout.stage_layers", _wrong_stage_layers, _stage_layers_words),
    Rule("vpp", "layout.vpp", lambda c, g: (g.vpp > 1) & (g.pp == 1), _vpp_words),
    Rule(
        "schedule",
        "layout.schedule",
        lambda c, g: (
            (_runs(g, "gpipe", "1f1b") & (g.vpp > 1)) | (_runs(g, "interleaved") & (g.vpp == 1)) | (_runs(g, *V_SHAPED) & (g.vpp != 2))
        ),
        _schedule_words,
    ),
    Rule(
        "interleaved",
        "batch.global_size",
        lambda c, g: _runs(g, "interleaved", "zero_bubble") & (g.pp > 1) & (g.num_micro % g.pp != 0),
        _interleaved_words,
    ),
    Rule("dualpipev", "layout.schedule", lambda c, g: _runs(g, "dualpipev") & (g.num_micro < 2 * g.pp), _dualpipev_words),
    Rule("overlap_chunks", "layout.overlap_chunks", lambda c, g: (g.overlap_chunks > 1) & (g.tp == 1), _overlap_words),
    Rule(
        "in_backward_norm",
        "optim.max_grad_norm",
        lambda c, g: np.full(len(g), c.recipe.optim.in_backward and c.recipe.optim.max_grad_norm > 0),
        _in_backward_norm_words,
    ),
    Rule(
        "in_backward",
        "optim.in_backward",
        lambda c, g: c.recipe.optim.in_backward & ((g.num_micro > 1) | (g.pp > 1)),
        _in_backward_words,
    ),
    Rule("experts", "layout.ep", lambda c, g: _experts(c) % g.ep != 0, _experts_words),
    Rule("expert_mesh", "layout.ep", lambda c, g: (g.shard * g.tp) % g.ep != 0, _expert_mesh_words),
    Rule("sp", "layout.sp", lambda c, g: (g.sp == 1) & (g.tp == 1), _sp_words),
    Rule(
        "recompute_layers",
        "layout.recompute_layers",
        lambda c, g: (g.recompute_layers > 0) & ((g.recompute == 0) | (g.recompute_layers > c.card.num_layers // g.pp)),
        _recompute_layers_words,
    ),
    Rule(
        "recompute_in_advance",
        "layout.recompute_in_advance",
        lambda c, g: (g.recompute_in_advance == 1) & ((g.pp == 1) | (g.recompute < RECOMPUTES.index("selective")) | (g.zero == 3)),
        _in_advance_words,
    ),
    Rule("reuse_params", "layout.reuse_params", lambda c, g: (g.reuse_params == 1) & (g.offload_optimizer == 1), _reuse_words),
)
