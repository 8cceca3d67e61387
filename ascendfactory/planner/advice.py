"""Why a layout was chosen; and when nothing fits, what would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ascendfactory.core.plan import Cluster, Layout, Line, ModelCard, Refusal
from ascendfactory.core.recipe import Lora, Recipe, Tuning
from ascendfactory.planner.grid import grid_of
from ascendfactory.planner.memory import GIB, Setting, peak_bytes
from ascendfactory.planner.space import ENOUGH_TOKENS

USABLE = 0.92  # share of a device's memory that is planned with; the rest is for fragmentation
SHORTEST_ROW_TOKENS = 256  # rows are not advised to be cut below this
MOST_DEVICES = 4096


class Judge(Protocol):
    """The part of a back end that advice needs."""

    def refuse(self, recipe: Recipe, card: ModelCard, layout: Layout) -> list[Refusal]:
        """Why the recipe cannot run under this layout."""


def room_bytes(cluster: Cluster) -> int:
    """What a plan may use of a device."""
    return int(cluster.device.memory_bytes * USABLE)


def too_big(setting: Setting, layout: Layout, judge: Judge) -> list[Refusal]:
    """The refusal of the leanest layout, if even that does not fit, with every change that would make it."""
    need, room = _peak(setting, layout), room_bytes(setting.cluster)
    if need <= room:
        return []
    name = setting.engine.name
    en = f"{name} needs {need / GIB:.1f} GiB a device, {room / GIB:.1f} can be used"
    zh = f"{name} 在每个设备上需要 {need / GIB:.1f} GiB，可用 {room / GIB:.1f} GiB"
    fix = leaner_setting(setting, layout) or leaner_setting(setting, _by_data(setting, layout))
    words = ", ".join(f"{key}: {value}" for key, value in fix.items())
    ways = _ways(setting, layout, judge)
    more_en = "".join(f"; {way}" for way, _ in ways)
    more_zh = "".join(f"；{way}" for _, way in ways)
    return [
        Refusal(
            code="memory",
            where="cluster",
            en=f"{en}, even at its leanest; "
            + (f"write {words}, or take more devices" if fix else "take more devices or a smaller model")
            + more_en,
            zh=f"{zh}，即使以最省的方式；" + (f"请写 {words}，或增加设备" if fix else "请增加设备或换用更小的模型") + more_zh,
            fix=fix,
        )
    ]


def _by_data(setting: Setting, layout: Layout) -> Layout:
    """The same rows cut by data parallelism alone, which full sharding helps most; the layout as it is where the recipe forbids that."""
    spec, num_devices, rows = setting.recipe.layout, setting.cluster.num_devices, setting.recipe.rows_a_step
    is_open = spec.dp in ("auto", num_devices) and all(
        getattr(spec, name) in ("auto", 1) for name in ("tp", "pp", "vpp", "ring", "ulysses")
    )
    if not is_open or rows % (num_devices * layout.micro_size):
        return layout
    uncut = Layout().model_dump(include={"tp", "sp", "pp", "vpp", "schedule", "stage_layers", "ring", "ulysses", "recompute_in_advance"})
    return layout.model_copy(update=uncut | {"dp": num_devices, "num_micro": rows // (num_devices * layout.micro_size)})


def leaner_setting(setting: Setting, layout: Layout) -> dict[str, Any]:
    """The mildest change with which the recipe fits; {} = none does.

    Tried one upon the other: recomputation, micro-batches of one row, full sharding; then ever shorter rows; at last LoRA.
    """
    recipe = setting.recipe

    def fits(tried: Recipe) -> bool:
        return _peak(_with(setting, tried), layout) <= room_bytes(setting.cluster)

    changes: dict[str, Any] = {}
    full_zero = max(setting.engine.zeros)
    for key, value, leaner in (
        ("layout.recompute", "auto", {"recompute": "full", "recompute_layers": 0}),
        ("batch.micro_size", "auto", {"micro_size": 1, "num_micro": layout.num_micro * layout.micro_size}),
        ("layout.zero", full_zero, {"zero": full_zero}),
        ("layout.replicate", 1, {"replicate": 1}),
    ):
        changed = layout.model_copy(update=leaner)
        if changed != layout:
            pinned = key == "layout.replicate" or getattr(recipe.layout if key[0] == "l" else recipe.batch, key.split(".")[1]) != "auto"
            layout, changes = changed, changes | ({key: value} if pinned else {})
            if fits(recipe) and changes:
                return changes
    tunings: list[Tuning] = [recipe.tuning] if isinstance(recipe.tuning, Lora) else [recipe.tuning, Lora()]
    for tuning in tunings:
        seq_len = recipe.data.seq_len
        while seq_len >= SHORTEST_ROW_TOKENS or seq_len == recipe.data.seq_len:
            data = recipe.data.model_copy(update={"seq_len": seq_len})
            if fits(recipe.model_copy(update={"tuning": tuning, "data": data})):
                shorter = {"data.seq_len": seq_len} if seq_len < recipe.data.seq_len else {}
                return changes | shorter | ({"tuning": "lora"} if tuning is not recipe.tuning else {})
            seq_len //= 2
    return {}


def _with(setting: Setting, recipe: Recipe) -> Setting:
    return Setting(setting.card, recipe, setting.cluster, setting.dtype, setting.engine)


def _peak(setting: Setting, layout: Layout) -> int:
    return int(peak_bytes(setting, grid_of([layout]))[0])


def _ways(setting: Setting, layout: Layout, judge: Judge) -> list[tuple[str, str]]:
    """Each single change that makes the leanest layout fit, with its number: devices, row length, LoRA, offload."""
    recipe, room, ways = setting.recipe, room_bytes(setting.cluster), []
    dp = layout.dp
    while dp * layout.tp * layout.pp * layout.cp < MOST_DEVICES:
        dp *= 2
        wider = layout.model_copy(update={"dp": dp})
        if _peak(setting, wider) <= room:
            num = wider.num_devices
            ways.append((f"{num} devices hold it as it is", f"{num} 个设备可按原样容纳"))
            break
    seq_len = recipe.data.seq_len // 2
    while seq_len >= SHORTEST_ROW_TOKENS:
        if _peak(_with(setting, recipe.model_copy(update={"data": recipe.data.model_copy(update={"seq_len": seq_len})})), layout) <= room:
            ways.append((f"rows of {seq_len} tokens fit", f"{seq_len} 个 token 的行可以放下"))
            break
        seq_len //= 2
    if not isinstance(recipe.tuning, Lora):
        lora = _peak(_with(setting, recipe.model_copy(update={"tuning": Lora()})), layout)
        ways.append((f"LoRA needs {lora / GIB:.1f} GiB", f"LoRA 需要 {lora / GIB:.1f} GiB"))
    for name, key in (("offload_optimizer", "optimizer"), ("offload_activations", "activations")):
        other = layout.model_copy(update={name: True})
        if not judge.refuse(recipe, setting.card, other) and (need := _peak(setting, other)) <= room:
            ways.append((f"layout.{name}: true needs {need / GIB:.1f} GiB", f"layout.{name}: true（卸载 {key}）需要 {need / GIB:.1f} GiB"))
    return ways


def reasons(
    setting: Setting, layout: Layout, backend: str, num_weighed: int, num_fit: int, slower_without: Mapping[str, float | None]
) -> list[Line]:
    """Why this layout, in sentences.

    Args:
        slower_without: degree above 1 → how much longer the best step without it is predicted to take; None: none without it fits.
    """
    recipe, device = setting.recipe, setting.cluster.device
    asked = recipe.backend != "auto"
    found = [
        Line(
            en=f"backend {backend}: {'asked for' if asked else 'the fastest of those that accept this recipe'}",
            zh=f"backend {backend}：{'由配方指定' if asked else '接受该配方的后端中最快'}",
        ),
        Line(
            en=f"layout: the shortest predicted step of the {num_fit} that are legal and fit, of {num_weighed} weighed",
            zh=f"布局：共比较 {num_weighed} 种，其中 {num_fit} 种合法且放得下，取预测单步最短者",
        ),
    ]
    if recipe.model.dtype == "auto":
        found.append(
            Line(
                en=f"dtype {setting.dtype}: {device.name} has {'' if device.has_bf16 else 'no '}bfloat16 matrix units",
                zh=f"dtype {setting.dtype}：{device.name} {'有' if device.has_bf16 else '没有'} bfloat16 矩阵单元",
            )
        )
    found += [*_nodes(setting.cluster), *_shares(setting, layout), *_costs(setting, layout)]
    for name, slower in slower_without.items():
        degree = f"{name} {getattr(layout, name)}"
        if slower is None:
            found.append(Line(en=f"{degree}: no layout without it fits", zh=f"{degree}：不用它的布局都放不下"))
        else:
            longer = f"{100 * slower:.1f} %"
            found.append(Line(en=f"{degree}: the best without it takes {longer} longer", zh=f"{degree}：不用它的最优布局慢 {longer}"))
    if recipe.batch.micro_size == "auto":
        found.append(_micro(layout, ENOUGH_TOKENS[device.kind]))
    return found


def _nodes(cluster: Cluster) -> list[Line]:
    """A word of caution where a machine was written with more devices than machines of that kind have."""
    usual, name = cluster.device.devices_per_node, cluster.device.name
    if cluster.device.kind == "cpu" or cluster.nproc <= usual:
        return []
    nodes = -(-cluster.num_devices // usual)
    return [
        Line(
            en=f"cluster: {cluster.nproc} devices in one machine, as written; machines with {name} usually have {usual}: "
            f'for {nodes} of them write "{nodes}x{usual} {name}"',
            zh=f"集群：按所写，一台机器有 {cluster.nproc} 个设备；{name} 机器通常有 {usual} 个：若为 {nodes} 台，请写 "
            f'"{nodes}x{usual} {name}"',
        )
    ]


def _shares(setting: Setting, layout: Layout) -> list[Line]:
    """What data parallelism got."""
    num = setting.cluster.num_devices
    if setting.recipe.layout.dp != "auto":
        return []
    if layout.dp == num:
        words = Line(en="every device", zh="全部设备") if num > 1 else Line(en="there is one device", zh="只有一个设备")
    else:
        words = Line(en=f"what the other degrees leave of {num} devices", zh=f"{num} 个设备除以其余并行度")
    return [Line(en=f"dp {layout.dp}: {words.en}", zh=f"dp {layout.dp}：{words.zh}")]


def _micro(layout: Layout, enough: int) -> Line:
    shape = f"{layout.num_micro} x {layout.micro_size}"
    return Line(
        en=f"micro-batches {shape} rows: the fastest that fit, up to {enough} tokens each, beyond which matrix products gain nothing",
        zh=f"微批 {shape} 行：放得下的里面最快；每个不超过 {enough} 个 token，再大矩阵乘也不会更快",
    )


def _costs(setting: Setting, layout: Layout) -> list[Line]:
    """What recomputation is for: the bytes that the layout would need without."""
    if setting.recipe.layout.recompute != "auto":
        return []
    if layout.recompute == "none":
        return [Line(en="recompute none: everything fits without", zh="recompute none：不重算也放得下")]
    room = room_bytes(setting.cluster)
    without = layout.model_copy(update={"recompute": "none", "recompute_layers": 0})
    need, num = _peak(setting, without), layout.recompute_layers
    if need > room:
        over = Line(
            en=f"{need / GIB:.1f} GiB otherwise, of {room / GIB:.1f} usable", zh=f"否则需要 {need / GIB:.1f} GiB，可用 {room / GIB:.1f}"
        )
    else:
        over = Line(en="a larger micro-batch is worth it", zh="换来更大的微批，值得")
    cost = _COSTS[layout.recompute]
    return [
        Line(
            en=f"recompute {layout.recompute}{f' in {num} layers of a stage' if num else ''}: {over.en}; costs {cost.en} more compute",
            zh=f"recompute {layout.recompute}{f'（每级 {num} 层）' if num else ''}：{over.zh}；多算{cost.zh}",
        )
    ]


_COSTS = {
    "norm": Line(en="hardly any", zh="极少"),
    "selective": Line(en="about a sixth", zh="约六分之一"),
    "full": Line(en="up to a third", zh="至多三分之一"),
}
