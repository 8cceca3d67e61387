"""Why a layout was chosen; and when nothing fits, what would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ascendfactory.core.plan import Cluster, Layout, ModelCard, Refusal
from ascendfactory.core.recipe import Lora, Recipe, Tuning
from ascendfactory.planner.grid import Grid, grid_of
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
    fix = leaner_setting(setting, layout)
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
) -> list[str]:
    """Why this layout, in sentences.

    Args:
        slower_without: degree above 1 → how much longer the best step without it is predicted to take; None: none without it fits.
    """
    recipe, spec, device = setting.recipe, setting.recipe.layout, setting.cluster.device
    found = [f"backend {backend}: " + ("asked for" if recipe.backend != "auto" else "the fastest of those that accept this recipe")]
    found.append(f"layout: the shortest predicted step of {num_fit} that are legal and fit, of {num_weighed} weighed")
    if recipe.model.dtype == "auto":
        found.append(f"dtype {setting.dtype}: {device.name} has {'' if device.has_bf16 else 'no '}bfloat16 matrix units")
    if spec.dp == "auto":
        left = "all" if layout.dp == setting.cluster.num_devices else "what the other degrees leave of"
        found.append(f"dp {layout.dp}: {left} {setting.cluster.num_devices} device(s)")
    found += _costs(setting, layout)
    for name, slower in slower_without.items():
        words = "none that fits does without" if slower is None else f"the best without it takes {100 * slower:.1f} % longer"
        found.append(f"{name} {getattr(layout, name)}: {words}")
    if recipe.batch.micro_size == "auto":
        found.append(
            f"micro-batch {layout.micro_size} x {layout.num_micro}: the fastest that fits, up to {ENOUGH_TOKENS[device.kind]} tokens, "
            "beyond which matrix products gain nothing"
        )
    return found


def _costs(setting: Setting, layout: Layout) -> list[str]:
    """What the chosen savings are for: the bytes that the layout would need without them."""
    room, found = room_bytes(setting.cluster), []

    def without(**change: Any) -> int:
        return int(peak_bytes(setting, _one(layout, **change))[0])

    if setting.recipe.layout.recompute == "auto":
        if layout.recompute == "none":
            found.append("recompute none: everything fits without")
        else:
            need = without(recompute="none", recompute_layers=0)
            over = f"{need / GIB:.1f} GiB otherwise, of {room / GIB:.1f}" if need > room else "a larger micro-batch is worth it"
            part = f" in {layout.recompute_layers} layers of a stage" if layout.recompute_layers else ""
            found.append(f"recompute {layout.recompute}{part}: {over}; costs {_cost(layout)} more compute")
    return found


def _one(layout: Layout, **change: Any) -> Grid:
    return grid_of([layout.model_copy(update=change)])


def _cost(layout: Layout) -> str:
    return {"norm": "hardly any", "selective": "about a sixth", "full": "up to a third"}[layout.recompute]
