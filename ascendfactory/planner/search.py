"""From a recipe to a plan: layout, micro-batch and recomputation that fit, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ascendfactory.core.plan import Backend, Cluster, Layout, MemoryTerm, ModelCard, NoPlan, Plan, Refusal
from ascendfactory.core.recipe import Lora, Recipe, Tuning
from ascendfactory.planner.memory import GIB, memory_terms
from ascendfactory.planner.rules import illegal

USABLE = 0.92  # share of a device's memory that is planned with; the rest is for fragmentation
SHORTEST_ROW_TOKENS = 256  # rows are not advised to be cut below this
ROOMIER = "memory.roomier"  # refused only because a leaner layout follows
ENOUGH_TOKENS = {"cpu": 2048, "cuda": 16384, "npu": 16384}  # of a micro-batch; more no longer makes the GEMMs faster


def make_plan(recipe: Recipe, card: ModelCard, cluster: Cluster, backends: Mapping[str, Backend], run_dir: str) -> Plan:
    """The first layout that is legal, accepted by a back end and fits.

    Order of preference: no recomputation before recomputation (it costs a third of the compute), then larger micro-batches.

    Args:
        cluster: the devices at hand; `memory_bytes` is what a device has free.
        backends: name → back end, asked in order if the recipe says `auto`.

    Raises:
        NoPlan: with every reason and what would mend it.
    """
    dtype = choose_dtype(recipe, cluster)
    names = list(backends) if recipe.backend == "auto" else [recipe.backend]
    refusals: list[Refusal] = []
    for layout in candidates(recipe, cluster):
        broken = illegal(recipe, card, cluster, layout)
        # bytes of a layout that cannot exist mean nothing
        terms = [] if broken else memory_terms(card, recipe, layout, dtype, cluster)
        for name in names:
            refused = _unknown_backend(name) if name not in backends else backends[name].refuse(recipe, card, layout)
            refused = [*refused, *broken, *_too_big(recipe, card, layout, cluster, terms, dtype)]
            if not refused:
                return Plan(
                    recipe=recipe,
                    card=card,
                    backend=name,
                    cluster=cluster,
                    layout=layout,
                    dtype=dtype,
                    run_dir=run_dir,
                    memory=terms,
                    why=_reasons(recipe, layout, cluster, dtype, name),
                )
            refusals += [r for r in refused if r.code not in {known.code for known in refusals}]
    # what leaner layouts were tried for is no reason by itself
    raise NoPlan([refusal for refusal in refusals if refusal.code != ROOMIER])


def choose_dtype(recipe: Recipe, cluster: Cluster) -> str:
    """Compute dtype: what the recipe says, else bfloat16 where the device has units for it."""
    if recipe.model.dtype != "auto":
        return recipe.model.dtype
    return "bfloat16" if cluster.device.has_bf16 else "float32"


def candidates(recipe: Recipe, cluster: Cluster) -> Iterator[Layout]:
    """Layouts in order of preference. An illegal one may be among them; the rules say why."""
    spec = recipe.layout
    model_devices = spec.tp * spec.pp * spec.ring * spec.ulysses
    dp = max(1, cluster.num_devices // model_devices) if spec.dp == "auto" else spec.dp
    rows = max(1, recipe.batch.global_size // dp)
    recomputes = ("none", "full") if spec.recompute == "auto" else (spec.recompute,)
    for recompute in recomputes:
        for micro in _micro_sizes(recipe, rows, cluster):
            yield Layout(
                dp=dp,
                replicate=spec.replicate,
                zero=spec.zero,
                tp=spec.tp,
                pp=spec.pp,
                vpp=spec.vpp,
                ring=spec.ring,
                ulysses=spec.ulysses,
                ep=spec.ep,
                recompute=recompute,
                micro_size=micro,
                num_micro=max(1, rows // micro),
            )


def _micro_sizes(recipe: Recipe, rows: int, cluster: Cluster) -> list[int]:
    """Divisors of a device's rows, from the largest that is worth it down to 1."""
    if recipe.batch.micro_size != "auto":
        return [recipe.batch.micro_size]
    most = max(1, ENOUGH_TOKENS[cluster.device.kind] // recipe.data.seq_len)
    return [m for m in range(min(most, rows), 0, -1) if rows % m == 0]


def _too_big(recipe: Recipe, card: ModelCard, layout: Layout, cluster: Cluster, terms: list[MemoryTerm], dtype: str) -> list[Refusal]:
    need, room = sum(term.num_bytes for term in terms), _room_bytes(cluster)
    if need <= room:
        return []
    en = f"needs {need / GIB:.1f} GiB a device, {room / GIB:.1f} can be used"
    zh = f"每个设备需要 {need / GIB:.1f} GiB,可用 {room / GIB:.1f} GiB"
    if not _is_leanest(recipe, layout):
        return [Refusal(code=ROOMIER, where="layout", en=en, zh=zh)]
    fix = _leaner_setting(recipe, card, layout, cluster, dtype)
    words = ", ".join(f"{key}: {value}" for key, value in fix.items())
    return [
        Refusal(
            code="memory",
            where="cluster",
            en=f"{en}, even at its leanest; " + (f"write {words}, or take more devices" if fix else "take more devices or a smaller model"),
            zh=f"{zh}，即使以最省的方式;" + (f"请写 {words}，或增加设备" if fix else "请增加设备或换用更小的模型"),
            fix=fix,
        )
    ]


def _room_bytes(cluster: Cluster) -> int:
    return int(cluster.device.memory_bytes * USABLE)


def _leaner_setting(recipe: Recipe, card: ModelCard, layout: Layout, cluster: Cluster, dtype: str) -> dict[str, Any]:
    """The mildest change with which the recipe fits; {} = none does.

    Tried one upon the other: recomputation, micro-batches of one row, full sharding; then ever shorter rows; at last LoRA.
    """

    def fits(tried: Recipe) -> bool:
        return sum(term.num_bytes for term in memory_terms(card, tried, layout, dtype, cluster)) <= _room_bytes(cluster)

    changes: dict[str, Any] = {}
    for key, value, leaner in (
        ("layout.recompute", "auto", {"recompute": "full"}),
        ("batch.micro_size", "auto", {"micro_size": 1, "num_micro": layout.num_micro * layout.micro_size}),
        ("layout.zero", 3, {"zero": 3}),
        ("layout.replicate", 1, {"replicate": 1}),
    ):
        changed = layout.model_copy(update=leaner)
        if changed != layout:
            layout, changes = changed, changes | {key: value}
            if fits(recipe):
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


def _is_leanest(recipe: Recipe, layout: Layout) -> bool:
    smallest = layout.micro_size == 1 or recipe.batch.micro_size != "auto"
    return smallest and (layout.recompute == "full" or recipe.layout.recompute != "auto")


def _unknown_backend(name: str) -> list[Refusal]:
    return [
        Refusal(
            code="backend",
            where="backend",
            en=f"'{name}' cannot be launched by this release; write backend: native",
            zh=f"本版本尚不能启动 '{name}';请写 backend: native",
            fix={"backend": "native"},
        )
    ]


def _reasons(recipe: Recipe, layout: Layout, cluster: Cluster, dtype: str, backend: str) -> list[str]:
    spec, device = recipe.layout, cluster.device
    reasons = [f"backend {backend}: " + ("asked for" if recipe.backend != "auto" else "the first that accepts this recipe")]
    if recipe.model.dtype == "auto":
        reasons.append(f"dtype {dtype}: {device.name} has {'' if device.has_bf16 else 'no '}bfloat16 matrix units")
    if spec.dp == "auto":
        reasons.append(f"dp {layout.dp}: all {cluster.num_devices} device(s)")
    if spec.recompute == "auto":
        needed = "the activations do not fit otherwise; costs a third more compute"
        text = "everything fits without" if layout.recompute == "none" else needed
        reasons.append(f"recompute {layout.recompute}: {text}")
    if recipe.batch.micro_size == "auto":
        reasons.append(
            f"micro-batch {layout.micro_size} x {layout.num_micro}: the most that fits, up to {ENOUGH_TOKENS[device.kind]} tokens, "
            "beyond which matrix products gain nothing"
        )
    return reasons
