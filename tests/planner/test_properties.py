"""What must hold for every layout: legality can be mended, bytes fall with sharding, vectors agree with single layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ascendfactory.backends import BACKENDS
from ascendfactory.catalog.params import parameter_shapes
from ascendfactory.catalog.read import find_card, find_device
from ascendfactory.core.load import load_recipe
from ascendfactory.core.plan import Cluster, Layout, ModelCard, Plan
from ascendfactory.core.recipe import Recipe
from ascendfactory.planner.activations import layer_bytes
from ascendfactory.planner.calibrate import Factor
from ascendfactory.planner.engines import ENGINES, NATIVE, engine_of
from ascendfactory.planner.grid import SCHEDULES, grid_of
from ascendfactory.planner.memory import Setting, memory_terms, peak_bytes, stage_terms
from ascendfactory.planner.rules import RULES, illegal, legal
from ascendfactory.planner.time import predict
from ascendfactory.planner.weights import even_sizes, layout_stages, stage_layers

CARDS = {name: find_card(name) for name in ("qwen3-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "llama-3.2-1b", "qwen2.5-vl-7b", "gemma3-27b")}
CLUSTER = Cluster(device=find_device("snt9b"), nodes=2, nproc=8)
DEGREE = st.sampled_from([1, 1, 1, 2, 3, 4, 5, 8, 16])
LAYOUTS = st.builds(
    Layout,
    dp=st.sampled_from([1, 2, 3, 4, 8, 16]),
    replicate=st.sampled_from([1, 1, 2, 3]),
    zero=st.sampled_from([1, 2, 3]),
    tp=DEGREE,
    sp=st.booleans(),
    pp=st.sampled_from([1, 1, 2, 3, 4, 40]),
    vpp=st.sampled_from([1, 1, 2, 30]),
    schedule=st.sampled_from(SCHEDULES),
    stage_layers=st.sampled_from([(), (), (30, 6), (6, 0, 12, 18), (16, 0)]),
    overlap_chunks=st.sampled_from([1, 1, 2, 4]),
    ring=st.sampled_from([1, 1, 2, 3]),
    ulysses=st.sampled_from([1, 1, 2, 5]),
    ep=DEGREE,
    recompute=st.sampled_from(["none", "norm", "selective", "full"]),
    recompute_layers=st.sampled_from([0, 0, 1, 5, 99]),
    recompute_in_advance=st.booleans(),
    offload_optimizer=st.booleans(),
    reuse_params=st.booleans(),
    micro_size=st.sampled_from([1, 2, 3]),
    num_micro=st.sampled_from([1, 2, 7]),
)


def recipe_of(*overrides: str) -> Recipe:
    return load_recipe("model: m\ndata: d.jsonl", overrides)


def mended(recipe: Recipe, card: ModelCard, layout: Layout, fix: dict[str, Any]) -> tuple[Recipe, Layout]:
    """The fix as the recipe's reader would apply it: what it sets, and autos decided anew."""
    update = {key.removeprefix("layout."): value for key, value in fix.items() if key.startswith("layout.") and value != "auto"}
    autos = {key.removeprefix("layout.") for key, value in fix.items() if value == "auto"}
    layout = layout.model_copy(update=update)
    overrides = {key: value for key, value in fix.items() if not key.startswith("layout.")}
    if overrides:
        data = recipe.data.model_copy(update={"seq_len": overrides.get("data.seq_len", recipe.data.seq_len)})
        batch = recipe.batch.model_copy(update={"global_size": overrides.get("batch.global_size", recipe.batch.global_size)})
        optim = recipe.optim.model_copy(update={k.removeprefix("optim."): v for k, v in overrides.items() if k.startswith("optim.")})
        recipe = recipe.model_copy(update={"data": data, "batch": batch, "optim": optim})
    decided: dict[str, Any] = {}
    if "dp" in autos:
        decided["dp"] = max(1, CLUSTER.num_devices // (layout.tp * layout.pp * layout.cp))
    if "schedule" in autos:
        decided["schedule"] = "interleaved" if layout.vpp > 1 else "1f1b"
    if "recompute_layers" in autos:
        decided["recompute_layers"] = 0
    if "stage_layers" in autos:
        decided["stage_layers"] = ()
    layout = layout.model_copy(update=decided)
    if "sp" in autos or (layout.sp and layout.tp == 1):
        layout = layout.model_copy(update={"sp": layout.tp > 1})
    num_micro = max(1, recipe.batch.global_size // (layout.dp * layout.micro_size))
    return recipe, layout.model_copy(update={"num_micro": num_micro})


MANY_WRONGS = Layout(
    dp=1, replicate=2, zero=1, pp=40, vpp=2, schedule="gpipe", stage_layers=(30, 6), ring=2, ep=3, recompute_layers=1,
    recompute_in_advance=True, offload_optimizer=True, reuse_params=True, micro_size=2,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(LAYOUTS, st.sampled_from(sorted(CARDS)), st.sampled_from([96, 1000, 4096, 5000]), st.sampled_from([1, 16, 30]), st.booleans())
@example(MANY_WRONGS, "deepseek-v2-lite", 96, 1, True)
def test_the_fixes_of_an_illegal_layout_lead_to_a_legal_one(layout: Layout, name: str, seq_len: int, rows: int, early: bool) -> None:
    card = CARDS[name]
    sizes = (f"--data.seq_len={seq_len}", f"--batch.global_size={rows}", f"--batch.micro_size={layout.micro_size}")
    recipe = recipe_of(*sizes, f"--optim.in_backward={str(early).lower()}")
    seen: list[tuple[Recipe, Layout]] = []
    while found := illegal(recipe, card, CLUSTER, layout):
        assert (recipe, layout) not in seen, f"fixes go in a circle: {[r.code for r in found]} {layout}"
        seen.append((recipe, layout))
        assert len(seen) <= len(RULES), f"more fixes than rules: {[r.code for r in found]} {layout}"
        for refusal in found:
            assert refusal.en
            assert refusal.zh
            assert refusal.fix
            recipe, layout = mended(recipe, card, layout, refusal.fix)
            if (recipe, layout) != seen[-1]:
                break


@settings(max_examples=60, deadline=None)
@given(st.lists(LAYOUTS, min_size=1, max_size=8), st.sampled_from(sorted(CARDS)))
def test_the_mask_agrees_with_the_words(layouts: list[Layout], name: str) -> None:
    recipe = recipe_of("--data.seq_len=4096")
    mask = legal(recipe, CARDS[name], CLUSTER, grid_of(layouts))
    assert mask.tolist() == [not illegal(recipe, CARDS[name], CLUSTER, layout) for layout in layouts]


def setting_of(card: ModelCard, engine: str, *overrides: str) -> Setting:
    return Setting(card, recipe_of("--data.seq_len=4096", *overrides), CLUSTER, "bfloat16", engine_of(engine))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(LAYOUTS, min_size=1, max_size=6),
    st.sampled_from(sorted(CARDS)),
    st.sampled_from(sorted(ENGINES)),
    st.sampled_from(["full", "lora"]),
)
def test_thousands_are_priced_as_one_is(layouts: list[Layout], name: str, engine: str, tuning: str) -> None:
    card = CARDS[name]
    setting = setting_of(card, engine, f"--tuning={tuning}")
    shapes = {"layers", "stage_layers", "schedule"}
    layouts = [one for one in layouts if not shapes & {refusal.code for refusal in illegal(setting.recipe, card, CLUSTER, one)}]
    assume(layouts)
    peaks = peak_bytes(setting, grid_of(layouts))
    for peak, layout in zip(peaks, layouts, strict=True):
        stages = [sum(term.num_bytes for term in terms) for terms in stage_terms(setting, layout)]
        assert len(stages) == layout.pp
        assert peak == max(stages)
        assert peak == sum(t.num_bytes for t in memory_terms(card, setting.recipe, layout, "bfloat16", CLUSTER, engine))
        assert all(term.num_bytes > 0 for terms in stage_terms(setting, layout) for term in terms)


def peaks_of(setting: Setting, layouts: list[Layout]) -> list[int]:
    return [int(p) for p in peak_bytes(setting, grid_of(layouts))]


STRONGER: dict[str, list[dict[str, Any]]] = {
    "dp": [{"dp": n} for n in (2, 4, 8, 16)],
    "zero": [{"dp": 8, "zero": z, "num_micro": 4} for z in (1, 2, 3)],
    "recompute": [{"dp": 8, "recompute": mode} for mode in ("none", "norm", "selective", "full")],
    "micro-batch": [{"dp": 8, "micro_size": m} for m in (8, 4, 2, 1)],
    "ring": [{"ring": n} for n in (2, 4, 8)],
    "ulysses": [{"ulysses": n} for n in (2, 4, 8)],
    "tp": [{"tp": n, "sp": True} for n in (2, 4, 8)],
    "pp": [{"pp": n, "num_micro": 8} for n in (2, 4, 8)],
    "recompute_layers": [{"pp": 2, "num_micro": 4, "recompute": "full", "recompute_layers": n} for n in (1, 3, 6, 0)],
    "in flight": [{"pp": 4, "num_micro": 16, "schedule": name} for name in ("gpipe", "1f1b")],
    "moments": [{"optim_dtype": name} for name in ("float32", "bfloat16")],
    "replicate": [{"dp": 8, "replicate": n} for n in (8, 4, 2, 1)],
}


@pytest.mark.parametrize("axis", STRONGER)
@pytest.mark.parametrize("engine", ["native", "megatron", "llamafactory", "torchtitan"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "deepseek-v2-lite"])
def test_bytes_fall_or_stay_as_saving_grows(axis: str, engine: str, tuning: str, name: str) -> None:
    peaks = peaks_of(setting_of(CARDS[name], engine, f"--tuning={tuning}"), [Layout(**change) for change in STRONGER[axis]])
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("engine", ["native", "megatron"])
def test_more_expert_parallelism_never_costs_bytes_at_rest(engine: str) -> None:
    setting = setting_of(CARDS["qwen3-30b-a3b"], engine)
    held = []
    for ep in (2, 4, 8, 16):
        terms = memory_terms(setting.card, setting.recipe, Layout(dp=16, ep=ep), "bfloat16", CLUSTER, engine)
        held.append(sum(t.num_bytes for t in terms if t.name in ("weights", "masters", "gradients", "moments", "gathered weights")))
    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize(
    ("flag", "gone"), [("offload_optimizer", "moments"), ("reuse_params", "masters"), ("offload_activations", "activations")]
)
def test_savings_lower_their_term(flag: str, gone: str) -> None:
    setting = setting_of(CARDS["qwen3-8b"], "megatron")

    def term(**change: Any) -> int:
        terms = memory_terms(setting.card, setting.recipe, Layout(dp=2, zero=1, **change), "bfloat16", CLUSTER, "megatron")
        return sum(t.num_bytes for t in terms if t.name == gone)

    assert term(**{flag: True}) < term()


@pytest.mark.parametrize("name", sorted(CARDS))
@pytest.mark.parametrize("by_cost", [False, True])
def test_stages_hold_the_whole_model_once(name: str, by_cost: bool) -> None:
    card = CARDS[name]
    for pp, vpp, schedule in ((1, 1, "1f1b"), (2, 1, "1f1b"), (4, 2, "interleaved"), (3, 1, "1f1b"), (4, 2, "zbv")):
        stages = layout_stages(card, Layout(pp=pp, vpp=vpp, schedule=schedule), 4096, by_cost)
        held = sum(int(part.sum()) for part in (stages.split, stages.whole, stages.expert, stages.embedding, stages.head))
        copies = card.vocab_size * card.hidden_size if card.tied_embeddings and pp > 1 and schedule != "zbv" else 0
        assert held - copies == sum(weight.num_params for weight in parameter_shapes(card))
        assert int(stages.layers.sum()) == card.num_layers


@given(st.integers(1, 130), st.integers(1, 16), st.integers(1, 8))
def test_every_layer_has_one_stage(num_layers: int, pp: int, vpp: int) -> None:
    assume(pp * vpp <= num_layers)
    stages = stage_layers(even_sizes(num_layers, pp * vpp), pp, vpp)
    assert sorted(layer for stage in stages for layer in stage) == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= vpp


def test_explicit_stages_are_priced_as_written() -> None:
    """Fewer layers on the first stage: its weights shrink by theirs, and the last, empty but for the head, keeps no layer's tensors."""
    card = CARDS["qwen3-8b"]
    setting = setting_of(card, "native")
    layer = (card.num_params - 2 * card.vocab_size * card.hidden_size - card.hidden_size) // card.num_layers
    even, skewed = (
        [{t.name: t.num_bytes for t in stage} for stage in stage_terms(setting, Layout(pp=4, num_micro=4, stage_layers=sizes))]
        for sizes in ((9, 9, 9, 9), (6, 15, 15, 0))
    )
    assert even[0]["weights"] - skewed[0]["weights"] == 4 * 3 * layer
    assert skewed[1]["weights"] - even[1]["weights"] == 4 * 6 * layer
    assert skewed[3]["weights"] == 4 * (card.vocab_size + 1) * card.hidden_size
    assert skewed[3]["activations"] < even[3]["activations"] // 8


def test_a_v_has_both_ends_on_the_first_stage() -> None:
    card = CARDS["qwen3-8b"]
    stages = layout_stages(card, Layout(pp=4, vpp=2, schedule="zbv"), 4096, by_cost=False)
    table = card.vocab_size * card.hidden_size
    assert stages.embedding.tolist() == [table, 0, 0, 0]
    assert stages.head.tolist() == [table + card.hidden_size, 0, 0, 0]
    assert stages.inputs.tolist() == [1, 2, 2, 2]
    assert stages.outputs.tolist() == [1, 2, 2, 2]
    terms = [{t.name for t in stage} for stage in stage_terms(setting_of(card, "native"), Layout(pp=4, vpp=2, schedule="zbv", num_micro=8))]
    assert ["logits" in names for names in terms] == [True, False, False, False]


def test_an_optimizer_in_the_backward_pass_keeps_one_layers_gradients() -> None:
    card = CARDS["qwen3-8b"]
    whole, early = (
        {t.name: t.num_bytes for t in stage_terms(setting_of(card, "native", f"--optim.in_backward={flag}"), Layout(dp=8))[0]}
        for flag in ("false", "true")
    )
    assert whole["gradients"] == 4 * card.num_params // 8
    assert early["gradients"] == 4 * 2 * card.vocab_size * card.hidden_size // 8 + 4 * card.hidden_size // 8
    assert {name: size for name, size in early.items() if name != "gradients"} == {n: s for n, s in whole.items() if n != "gradients"}


def test_computing_again_in_advance_keeps_a_chunk_and_shortens_the_wait() -> None:
    """Of pp 4 on the first stage: 9 layers at once instead of 1; the waiting of 3 micro-batches is shorter by a forward pass of each."""
    card = CARDS["qwen3-8b"]
    setting = setting_of(card, "native")
    for vpp, schedule, layers in ((1, "1f1b", 9), (3, "interleaved", 3)):
        late, early = (
            Layout(pp=4, vpp=vpp, schedule=schedule, num_micro=8, zero=2, recompute="full", recompute_in_advance=flag)
            for flag in (False, True)
        )
        stages = [[{t.name: t.num_bytes for t in stage} for stage in stage_terms(setting, one)] for one in (late, early)]
        one_layer = layer_bytes(card, setting.recipe.tuning, 2, NATIVE, "none", is_moe=False).total * 4096
        assert stages[1][0]["activations"] - stages[0][0]["activations"] == (layers - 1) * one_layer
        assert (stages[1][3]["activations"] == stages[0][3]["activations"]) == (schedule == "1f1b")  # backward follows at once
        waits = [predict(setting, one, Factor()).parts for one in (late, early)]
        bubbles = [next(part.seconds for part in parts if part.name == "bubble") for parts in waits]
        assert bubbles[1] == pytest.approx(bubbles[0] * 3 / 4)


@settings(max_examples=80, deadline=None)
@given(LAYOUTS)
def test_what_the_rules_allow_in_advance_the_engine_accepts(layout: Layout) -> None:
    card, recipe = CARDS["llama-3.2-1b"], recipe_of()
    code = "recompute_in_advance"
    by_rule = code in {refusal.code for refusal in illegal(recipe, card, CLUSTER, layout)}
    assert by_rule == (f"native.{code}" in {refusal.code for refusal in BACKENDS["native"].refuse(recipe, card, layout)})


def test_torchs_stages_hold_buffers_of_every_micro_batch() -> None:
    """On the first of four 1F1B stages 4 outputs in flight and 16 gradients to receive, on the last 16 inputs, one of which is in
    flight and counts as an activation. The embedded engine has one of each on its way; Megatron counts none."""
    card = CARDS["qwen3-8b"]
    layout = Layout(pp=4, num_micro=16, micro_size=2)
    stages = [{t.name: t.num_bytes for t in stage} for stage in stage_terms(setting_of(card, "torchtitan"), layout)]
    own = [{t.name: t.num_bytes for t in stage} for stage in stage_terms(setting_of(card, "native"), layout)]
    unit = 2 * 4096 * 2 * card.hidden_size
    assert [stage["stage buffers"] // unit for stage in stages] == [4 + 16, 3 + 16 + 16 - 3, 2 + 16 + 16 - 2, 16 - 1]
    assert [stage["stage buffers"] // unit for stage in own] == [2, 4, 4, 2]
    assert all("stage buffers" not in {t.name for t in stage} for stage in stage_terms(setting_of(card, "megatron"), layout))


def test_megatron_states_are_18_bytes_or_6_and_12_shared() -> None:
    """Megatron-Core: bf16 weight 2, fp32 gradient 4, fp32 master and two moments 12, the last sharded by the distributed optimizer."""
    card = CARDS["llama-3.2-1b"]
    for dp, bytes_each in ((1, 18.0), (4, 6 + 12 / 4)):
        terms = memory_terms(card, recipe_of(), Layout(dp=dp, zero=1), "bfloat16", CLUSTER, "megatron")
        states = sum(t.num_bytes for t in terms if t.name in ("weights", "masters", "gradients", "moments"))
        assert states == pytest.approx(bytes_each * card.num_params, rel=1e-6)


def test_a_layer_of_megatron_keeps_the_published_bytes() -> None:
    """Korthikanti et al. 2022, equation 4 for tp with sequence parallelism: 34·s·b·h/t a layer for a GELU MLP of 4h with dropout and
    all heads. With flash attention, no dropout and a gated MLP: 2 norms and 2 inputs of linear layers 8h, q k v and output 8h,
    gate, up and product 6f; all of it is cut by t."""
    card = CARDS["llama-3.2-1b"].model_copy(update={"num_kv_heads": 32, "num_heads": 32, "head_dim": 64})
    h, f = card.hidden_size, card.ffn_size
    setting = setting_of(card, "megatron", "--data.seq_len=4096")

    def activations(tp: int) -> int:
        terms = stage_terms(setting, Layout(tp=tp, sp=tp > 1, zero=1))[0]
        return next(t.num_bytes for t in terms if t.name == "activations")

    expected = 4096 * (card.num_layers * (8 * h + 8 * h + 6 * f) + 8 * h)
    assert activations(1) == pytest.approx(expected, rel=0.01)
    assert activations(8) == pytest.approx(expected / 8, rel=0.01)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(Layout.model_fields)))
def test_changing_a_layout_field_changes_the_native_job_or_is_refused(field: str) -> None:
    """The sweep: no field is silently ignored."""
    card, recipe = CARDS["llama-3.2-1b"], recipe_of("--cluster=cpu")
    plain = Layout()
    others: dict[str, Any] = {"zero": 1, "sp": True, "schedule": "gpipe", "recompute": "full", "optim_dtype": "bfloat16"}
    others["stage_layers"] = (16,)
    value = others.get(
        field, True if isinstance(getattr(plain, field), bool) else getattr(plain, field) + 1 if field not in others else None
    )
    changed = plain.model_copy(update={field: value})
    native = BACKENDS["native"]

    def job(layout: Layout) -> Any:
        return native.render(
            Plan(
                recipe=recipe, card=card, backend="native", cluster=CLUSTER, layout=layout, dtype="float32", run_dir="r", memory=[], why=[]
            )
        )

    assert native.refuse(recipe, card, changed) or job(changed) != job(plain)


def test_a_row_of_a_grid_is_the_layout_it_came_from() -> None:
    layouts = [Layout(dp=2, tp=4, sp=True, recompute="norm", schedule="gpipe", optim_dtype="bfloat16", reuse_params=True), Layout()]
    grid = grid_of(layouts)
    assert [grid.row(i) for i in range(2)] == layouts
    assert grid.take(np.array([False, True])).row(0) == Layout()
    assert grid.changed(tp=3).tp.tolist() == [3, 3]
