"""From a recipe to a plan: it fits, it is the cheapest that does, and a "no" says what works."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendfactory.backends import BACKENDS
from ascendfactory.catalog.read import find_card, find_device
from ascendfactory.core.load import load_recipe
from ascendfactory.core.plan import Cluster, Device, Layout, NoPlan, Plan
from ascendfactory.core.recipe import Recipe
from ascendfactory.planner.memory import GIB, memory_terms
from ascendfactory.planner.search import ENOUGH_TOKENS, USABLE, choose_dtype, make_plan
from ascendfactory.planner.space import freedom, space
from tests.examples import CPU, device

CARD = find_card("qwen3-8b")
NPU = device("snt9b", "npu").model_copy(update={"memory_bytes": 60 * GIB})


def recipe_of(*overrides: str) -> Recipe:
    return load_recipe("model: m\ndata: d.jsonl", overrides)


def cluster_of(nproc: int, gib: float = 60, of: Device = NPU) -> Cluster:
    return Cluster(device=of.model_copy(update={"memory_bytes": int(gib * GIB)}), nodes=1, nproc=nproc)


def plan_of(cluster: Cluster, *overrides: str) -> Plan:
    recipe = recipe_of(*overrides)
    judges = {"native": BACKENDS["native"]} if recipe.backend == "auto" else BACKENDS  # as api.make_plan has it
    return make_plan(recipe, CARD, cluster, judges, "runs/a")


def fits(plan: Plan, **layout: Any) -> bool:
    changed = plan.layout.model_copy(update=layout)
    peak = sum(t.num_bytes for t in memory_terms(plan.card, plan.recipe, changed, plan.dtype, plan.cluster))
    return peak <= plan.cluster.device.memory_bytes * USABLE


OVERRIDES = st.fixed_dictionaries(
    {
        "batch.global_size": st.integers(1, 96),
        "layout.dp": st.sampled_from(["auto", "auto", "auto", "2", "8"]),
        "layout.replicate": st.sampled_from([1, 1, 2, 3]),
        "layout.zero": st.sampled_from([1, 2, 3]),
        "layout.recompute": st.sampled_from(["auto", "none", "full"]),
        "batch.micro_size": st.sampled_from(["auto", "auto", "1", "3"]),
        "data.seq_len": st.sampled_from([512, 4096, 16384, 100_000]),
        "tuning": st.sampled_from(["full", "lora"]),
        "layout.tp": st.sampled_from([1, 1, 1, 2]),
    }
)


@settings(max_examples=30, deadline=None)
@given(OVERRIDES, st.sampled_from([1, 2, 3, 8]), st.sampled_from([8, 20, 40, 100, 400]))
def test_a_plan_fits_or_its_fixes_lead_to_one(overrides: dict[str, Any], nproc: int, gib: int) -> None:
    """Each fix is applied as given; no fix at all means that nothing fits."""
    for _ in range(8):
        cluster = cluster_of(nproc, gib)
        try:
            plan = plan_of(cluster, *(f"--{key}={value}" for key, value in overrides.items()))
        except NoPlan as no:
            changes: dict[str, Any] = {}
            for refusal in no.refusals:
                assert refusal.en
                assert refusal.zh
                changes |= refusal.fix
            if not changes:
                assert [refusal.code for refusal in no.refusals] == ["memory"]
                # the advice keeps to the cut that the recipe pins, or that its number of rows leaves
                only_dp = overrides["layout.dp"] == "auto" and overrides["layout.tp"] == 1 and overrides["batch.global_size"] % nproc == 0
                assert not (only_dp and leanest_fits(nproc, gib))
                return
            overrides = overrides | changes
            continue
        check(plan, cluster)
        return
    raise AssertionError(f"the fixes lead nowhere: {overrides}")


def leanest_fits(nproc: int, gib: int) -> bool:
    """Whether the leanest of all advisable recipes fits, by the terms alone."""
    lean = recipe_of("--tuning=lora", "--data.seq_len=256")
    terms = memory_terms(CARD, lean, Layout(dp=nproc, recompute="full"), "bfloat16", cluster_of(nproc, gib))
    return sum(t.num_bytes for t in terms) <= gib * GIB * USABLE


def check(plan: Plan, cluster: Cluster) -> None:
    layout, recipe = plan.layout, plan.recipe
    assert plan.peak_bytes == sum(term.num_bytes for term in plan.memory)
    assert plan.peak_bytes <= cluster.device.memory_bytes * USABLE
    assert layout.num_devices == cluster.num_devices
    assert layout.dp * layout.micro_size * layout.num_micro == recipe.batch.global_size
    assert layout.dp % layout.replicate == 0
    only_dp = layout.dp == cluster.num_devices
    if only_dp and layout.recompute == "full" and recipe.layout.recompute == "auto":
        micro = 1 if recipe.batch.micro_size == "auto" else layout.micro_size
        assert not fits(plan, recompute="none", micro_size=micro, num_micro=layout.num_micro * layout.micro_size // micro)
    if only_dp and recipe.batch.micro_size == "auto":
        rows = layout.micro_size * layout.num_micro
        larger = [m for m in range(layout.micro_size + 1, rows + 1) if rows % m == 0 and m * recipe.data.seq_len <= ENOUGH_TOKENS["npu"]]
        assert not any(fits(plan, micro_size=m, num_micro=rows // m) for m in larger)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_recomputation_only_when_needed() -> None:
    roomy = plan_of(cluster_of(8, 400), "--data.seq_len=4096")
    tight = plan_of(cluster_of(8, 40), "--data.seq_len=4096", "--batch.global_size=8", "--layout.tp=1", "--layout.pp=1")
    assert roomy.layout.recompute == "none"
    assert tight.layout.recompute == "full"
    assert any("recompute full" in reason.en for reason in tight.why)


def test_micro_batches_grow_up_to_enough_tokens() -> None:
    plan = plan_of(cluster_of(1, 400), "--data.seq_len=2048", "--batch.global_size=64", "--tuning=lora")
    assert (plan.layout.micro_size, plan.layout.num_micro) == (8, 8)
    assert plan_of(cluster_of(1, 400), "--data.seq_len=32768", "--tuning=lora").layout.micro_size == 1
    assert plan_of(cluster_of(1, 400), "--batch.global_size=7", "--data.seq_len=2048", "--tuning=lora").layout.micro_size == 7


def test_the_refusal_for_memory_tells_figures_and_a_way() -> None:
    with pytest.raises(NoPlan) as caught:
        plan_of(cluster_of(1, 40))
    (refusal,) = caught.value.refusals
    assert (refusal.code, refusal.fix) == ("memory", {"tuning": "lora"})
    assert "36.8 can be used, even at its leanest; write tuning: lora, or take more devices" in refusal.en
    with pytest.raises(NoPlan) as caught:
        plan_of(cluster_of(1, 8))
    (refusal,) = caught.value.refusals
    assert refusal.fix == {}
    assert "take more devices or a smaller model" in refusal.en


def test_settings_that_waste_memory_are_undone_first() -> None:
    one_row, only_dp = ("--batch.micro_size=1",), ("--layout.tp=1", "--layout.pp=1", "--layout.ring=1", "--layout.ulysses=1")
    overrides = ("--tuning=lora", "--layout.recompute=none", "--batch.micro_size=8", "--data.seq_len=16384")
    with pytest.raises(NoPlan) as caught:
        plan_of(cluster_of(1, 40), *overrides)
    fix = caught.value.refusals[0].fix
    assert fix == {"layout.recompute": "auto", "batch.micro_size": "auto"}
    with pytest.raises(NoPlan) as caught:
        plan_of(cluster_of(8, 60), "--layout.zero=1", "--layout.recompute=full", "--batch.global_size=16", *one_row, *only_dp)
    assert caught.value.refusals[0].fix == {"layout.zero": 3}
    assert plan_of(cluster_of(1, 40), *overrides, *(f"--{k}={v}" for k, v in fix.items())).layout.recompute == "full"


def test_every_reason_is_told_once() -> None:
    with pytest.raises(NoPlan) as caught:
        plan_of(cluster_of(8), "--data.seq_len=1000000", "--batch.global_size=9", "--layout.tp=2", "--layout.replicate=3")
    codes = [refusal.code for refusal in caught.value.refusals]
    assert len(codes) == len(set(codes))
    assert {"replicate", "global_batch", "seq_len"} <= set(codes)
    assert "memory.roomier" not in codes


@pytest.mark.parametrize(("sizes", "vpp"), [([18, 18], 1), ([9, 9, 9, 9], 2)])
def test_the_number_of_stage_sizes_decides_the_chunks(sizes: list[int], vpp: int) -> None:
    layout = plan_of(cluster_of(8, 400), "--layout.pp=2", f"--layout.stage_layers={sizes}", "--data.seq_len=4096").layout
    assert (layout.pp, layout.vpp, layout.stage_layers) == (2, vpp, tuple(sizes))


def test_a_named_back_end_says_what_it_needs() -> None:
    with pytest.raises(NoPlan) as caught:
        plan_of(cluster_of(8), "--backend=verl")
    assert ("verl.objective", {"objective": "grpo"}) in [(r.code, r.fix) for r in caught.value.refusals]


@pytest.mark.parametrize(
    ("asked", "has_bf16", "expected"),
    [("auto", True, "bfloat16"), ("auto", False, "float32"), ("float32", True, "float32"), ("bfloat16", False, "bfloat16")],
)
def test_dtype_follows_the_device_unless_asked(asked: str, has_bf16: bool, expected: str) -> None:
    cluster = cluster_of(1, of=CPU.model_copy(update={"has_bf16": has_bf16}))
    assert choose_dtype(recipe_of(f"--model.dtype={asked}"), cluster) == expected


@pytest.mark.parametrize(
    ("model", "backend", "words", "expected"),
    [
        ("qwen3-30b-a3b", "mindspeed_llm", (), {True}),  # experts under tp, with sequence parallelism only
        ("internvl3-8b", "mindspeed_mm", (), {False}),  # whose tower it breaks
        ("qwen3-8b", "mindspeed_llm", (), {True}),
        ("qwen3-8b", "mindspeed_llm", ("layout.sp=false",), {False}),
    ],
)
def test_tensor_parallelism_is_tried_in_the_form_that_the_engine_has(
    model: str, backend: str, words: tuple[str, ...], expected: set[bool]
) -> None:
    card, recipe = find_card(model), recipe_of("duration=10 steps", "batch=64", *words)
    cluster = Cluster(device=find_device("snt9b"), nodes=1, nproc=8)
    grid = space(recipe, card, cluster, freedom(partial(BACKENDS[backend].refuse, recipe, card), cluster))
    assert {bool(sp) for sp, tp in zip(grid.sp, grid.tp, strict=True) if tp > 1} == expected


def test_known_devices_take_known_models() -> None:
    """Qwen3-8B, all weights: 16 bytes a parameter over 8 devices of 64 GB, as users of that machine run it."""
    for name in ("snt9b", "a100-80g"):
        known = find_device(name)
        plan = plan_of(Cluster(device=known, nodes=1, nproc=8), "--data.seq_len=4096")
        states = sum(term.num_bytes for term in plan.memory if term.name in ("weights", "gradients", "moments"))
        assert states == pytest.approx(16 * CARD.num_params / 8, rel=1e-6)
