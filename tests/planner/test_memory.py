"""Predicted bytes against bytes counted on real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ascendfactory.catalog.read import find_card
from ascendfactory.core.load import load_recipe
from ascendfactory.core.plan import Layout, Plan
from ascendfactory.core.recipe import Recipe, Tuning
from ascendfactory.engine.build import build_model, make_pipeline, needs_fsdp
from ascendfactory.engine.data.batch import MicroBatch, Row, assemble
from ascendfactory.engine.mesh import make_mesh
from ascendfactory.engine.objective import cross_entropy
from ascendfactory.engine.optim import Optimizer
from ascendfactory.engine.parallel.context import cut
from ascendfactory.engine.parallel.pieces import local
from ascendfactory.planner import memory
from ascendfactory.planner.engines import NATIVE
from tests.examples import CPU, make
from tests.pool import Pool
from tests.tiny import FAMILIES, write_model

LENGTHS = [[100, 28], [64, 64]]
TOKENS = 256
TUNINGS = {"full": (), "lora": ("--tuning=lora",), "dropout": ("--tuning=lora", "--tuning.dropout=0.1", "--tuning.rank=4")}


def recipe(*overrides: str) -> Recipe:
    return load_recipe("model: m\ndata: d.jsonl", overrides)


def batch() -> MicroBatch:
    generator = torch.Generator().manual_seed(1)

    def document(length: int) -> Any:
        return torch.randint(3, 320, (length,), generator=generator).numpy(), torch.ones(length, dtype=torch.bool).numpy()

    return assemble([Row([document(n) for n in row], ["x"] * len(row)) for row in LENGTHS], 0, multiple=1)


def saved_bytes(plan: Plan) -> int:
    """Bytes of distinct storages that autograd keeps at the end of a forward pass, parameters and buffers left out."""
    mesh = make_mesh(plan.layout, "cpu", sharded=needs_fsdp(plan))
    model = build_model(plan, mesh)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(cut(batch(), mesh), 0.1)
    # after the forward pass, because FSDP's whole weights stand in the modules then (they stay until backward under zero 2)
    for tensor in [*model.parameters(), *model.buffers()]:
        kept.pop(local(tensor).untyped_storage().data_ptr(), None)
    assert loss.requires_grad
    return sum(kept.values())


def plan_of(folder: str, *overrides: str, dtype: Any = "float32") -> Plan:
    return make("r", *overrides, model=folder, zero=2).model_copy(update={"dtype": dtype})


def models(root: Path, family: str) -> list[str]:
    """The same model with 3 and with 4 layers."""
    extra = [{"layer_types": ["sliding_attention"] * n} if family == "gemma3" else {} for n in (3, 4)]
    return [write_model(root / str(n), family, num_hidden_layers=n, **more) for n, more in zip((3, 4), extra, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_layer_keeps_what_is_predicted(tmp_path: Path, family: str, tuning: str) -> None:
    three, four = models(tmp_path, family)
    plans = [plan_of(folder, *TUNINGS[tuning]) for folder in (three, four)]
    counted = saved_bytes(plans[1]) - saved_bytes(plans[0])
    predicted = memory.layer_saved_bytes(find_card(three), plans[0].recipe.tuning, TOKENS, 4)
    assert predicted == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("family", ["llama", "glm4"])
def test_dropout_keeps_copies_of_the_inputs(tmp_path: Path, family: str) -> None:
    three, four = models(tmp_path, family)
    plans = [plan_of(folder, *TUNINGS["dropout"]) for folder in (three, four)]
    counted = saved_bytes(plans[1]) - saved_bytes(plans[0])
    assert memory.layer_saved_bytes(find_card(three), plans[0].recipe.tuning, TOKENS, 4) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(
    ("family", "tuning"), [("llama", "full"), ("qwen3", "lora"), ("gemma3", "full"), ("glm4", "lora"), ("qwen2", "dropout")]
)
def test_a_layer_in_bfloat16_keeps_what_is_predicted(pool: Pool, tmp_path: Path, family: str, tuning: str) -> None:
    three, four = models(tmp_path, family)
    counts = [pool.run(saved_bytes, 1, plan_of(folder, *TUNINGS[tuning], dtype="bfloat16"))[0] for folder in (three, four)]
    predicted = memory.layer_saved_bytes(find_card(three), recipe(*TUNINGS[tuning]).tuning, TOKENS, 2)
    assert predicted == pytest.approx(counts[1] - counts[0], rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_model_keeps_no_more_than_predicted(tiny_models: dict[str, str], family: str) -> None:
    plan = plan_of(tiny_models[family], "--data.seq_len=128", "--batch.micro_size=2")
    predicted, _ = memory.activation_bytes(find_card(tiny_models[family]), plan.recipe, Layout(micro_size=2), 4)
    assert 0.9 * predicted < saved_bytes(plan) <= predicted


@pytest.mark.parametrize("family", ["Phi3", "Granite", "Olmo2"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_families_with_layers_of_their_own_keep_what_is_predicted(tmp_path: Path, family: str, tuning: str) -> None:
    """Fused projections; norms and MLPs that the engine has no lean form of."""
    import transformers

    shape = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
    counts = []
    for number in (3, 4):
        settings = getattr(transformers, f"{family}Config")(**shape, num_hidden_layers=number, pad_token_id=0, max_position_embeddings=512)
        settings.save_pretrained(tmp_path / str(number))
        counts.append(saved_bytes(plan_of(str(tmp_path / str(number)), "--model.init=random", *TUNINGS[tuning])))
    predicted = memory.layer_saved_bytes(find_card(str(tmp_path / "3")), recipe(*TUNINGS[tuning]).tuning, TOKENS, 4)
    assert predicted == pytest.approx(counts[1] - counts[0], rel=0.03)


def terms(plan: Plan) -> dict[str, int]:
    found = memory.memory_terms(find_card(plan.recipe.model.path), plan.recipe, plan.layout, plan.dtype, plan.cluster)
    return {term.name: term.num_bytes for term in found}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("--tuning=lora",),
        ("--tuning=lora", "--tuning.dora=true", "--tuning.rank=3"),
        ("--tuning=lora", "--tuning.targets=[q_proj, down_proj]"),
    ],
    ids=["full", "lora", "dora", "targets"],
)
def test_weights_gradients_and_moments_are_exact(tiny_models: dict[str, str], family: str, overrides: tuple[str, ...]) -> None:
    plan = plan_of(tiny_models[family], *overrides)
    mesh = make_mesh(plan.layout, "cpu", sharded=False)
    model = build_model(plan, mesh)
    optimizer = Optimizer(model, plan.recipe.optim, plan.layout, 1, mesh)
    model(cut(batch(), mesh), 0.1).backward()
    predicted = terms(plan)
    assert predicted["weights"] == sum(p.nbytes for p in model.parameters())
    assert predicted["gradients"] == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert predicted["moments"] == sum(t.nbytes for t in optimizer.moments().values())
    assert "gathered weights" not in predicted


@pytest.mark.parametrize("targets", ["[gate_up_proj]", "[gate_up_proj, o_proj]"])
def test_fused_targets_are_counted_exactly(tiny_models: dict[str, str], targets: str) -> None:
    plan = plan_of(tiny_models["glm4"], "--tuning=lora", f"--tuning.targets={targets}")
    model = build_model(plan, make_mesh(plan.layout, "cpu", sharded=False))
    counted = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert memory.trainable_params(find_card(tiny_models["glm4"]), plan.recipe.tuning) == counted


def test_phi3_keeps_qkv_in_one_matrix(tmp_path: Path) -> None:
    from transformers import Phi3Config

    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    Phi3Config(**shape, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0).save_pretrained(tmp_path)
    for targets in ("all-linear", "[qkv_proj, gate_up_proj]"):
        plan = plan_of(str(tmp_path), "--model.init=random", "--tuning=lora", f"--tuning.targets={targets}")
        model = build_model(plan, make_mesh(plan.layout, "cpu", sharded=False))
        counted = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert memory.trainable_params(find_card(str(tmp_path)), plan.recipe.tuning) == counted


def bytes_on_ranks(plan: Plan) -> tuple[int, int, int]:
    """What this rank holds of weights, gradients and moments after a backward pass."""
    mesh = make_mesh(plan.layout, "cpu", sharded=needs_fsdp(plan))
    model = build_model(plan, mesh)
    optimizer = Optimizer(model, plan.recipe.optim, plan.layout, 1, mesh)
    pipeline, part = make_pipeline(plan, mesh, model), cut(batch(), mesh)
    if pipeline:
        pipeline.step([part] * plan.layout.num_micro, 0.1)
    else:
        model(part, 0.1).backward()
    gradients = sum(local(p.grad).nbytes for p in optimizer.parameters.values() if p.grad is not None)
    return sum(local(p).nbytes for p in model.parameters()), gradients, sum(t.nbytes for t in optimizer.moments().values())


@pytest.mark.parametrize(("overrides", "dtype"), [((), "bfloat16"), (("--tuning=lora",), "bfloat16"), ((), "float32")])
def test_two_ranks_hold_a_half_each(pool: Pool, tiny_models: dict[str, str], overrides: tuple[str, ...], dtype: Any) -> None:
    plan = make("r", *overrides, model=tiny_models["qwen3"], nproc=2).model_copy(update={"dtype": dtype})
    predicted = terms(plan)
    for held in pool.run(bytes_on_ranks, 2, plan):
        assert held == (predicted["weights"], predicted["gradients"], predicted["moments"])


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sp": True},
    "ring": {"ring": 2},
    "ulysses": {"ulysses": 2},
    "pp": {"pp": 2, "num_micro": 2},
    "zbv": {"pp": 2, "vpp": 2, "schedule": "zbv", "num_micro": 4, "zero": 1},
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])  # the embedding of the second is tied
def test_each_rank_holds_what_its_stage_is_predicted_to(pool: Pool, tmp_path: Path, family: str, tuning: str, name: str) -> None:
    extra = {"layer_types": ["sliding_attention"] * 4} if family == "gemma3" else {}
    folder, layout = write_model(tmp_path, family, num_hidden_layers=4, **extra), Layout(**LAYOUTS[name])
    card = find_card(folder)
    plan = make("r", *TUNINGS[tuning], model=folder, nproc=2).model_copy(update={"layout": layout, "card": card})
    setting = memory.Setting(card, plan.recipe, plan.cluster, "float32", NATIVE)
    stages = [{t.name: t.num_bytes for t in stage} for stage in memory.stage_terms(setting, layout)]
    for rank, held in enumerate(pool.run(bytes_on_ranks, 2, plan)):
        stage = stages[rank * layout.pp // 2]
        assert held == (stage["weights"], stage["gradients"], stage["moments"])


@pytest.mark.parametrize("name", ["tp", "sp", "ring", "ulysses", "full sp", "selective sp"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_layer_of_a_device_keeps_what_is_predicted(pool: Pool, tmp_path: Path, tuning: str, name: str) -> None:
    recompute, _, cut_by = name.rpartition(" ")
    # under zero 3 the weights that autograd noted are given back, and could not be told from the rest
    layout, found, planned = Layout(**LAYOUTS[cut_by], zero=2, micro_size=2, recompute=recompute or "none"), [], []  # type: ignore[arg-type]
    for folder in models(tmp_path, "qwen3"):
        card = find_card(folder)
        plan = make("r", *TUNINGS[tuning], "--data.seq_len=128", model=folder, nproc=2).model_copy(update={"layout": layout, "card": card})
        found.append(pool.run(saved_bytes, 2, plan)[0])
        planned.append(memory.activation_bytes(card, plan.recipe, layout, 4)[0])
    assert planned[1] - planned[0] == pytest.approx(found[1] - found[0], rel=0.03)


def test_the_terms_follow_the_layout(tiny_models: dict[str, str]) -> None:
    card = find_card(tiny_models["llama"])
    cluster = make("r", nproc=4).cluster

    def of(layout: Layout, dtype: str = "bfloat16") -> dict[str, int]:
        return {t.name: t.num_bytes for t in memory.memory_terms(card, recipe(), layout, dtype, cluster)}

    whole, sharded = of(Layout(dp=4, replicate=4)), of(Layout(dp=4))
    for name in ("weights", "gradients", "moments"):
        assert sharded[name] == whole[name] // 4
    assert of(Layout(dp=4, zero=1, num_micro=2))["gradients"] == whole["gradients"]
    assert of(Layout(dp=4, zero=1, num_micro=2))["reduced gradients"] == whole["gradients"] // 4
    embedding = card.vocab_size * card.hidden_size
    layer = (card.num_params - 2 * embedding - card.hidden_size) // card.num_layers
    assert of(Layout(dp=4, zero=2))["gathered weights"] == 2 * (card.num_params + 2 * layer)
    assert sharded["gathered weights"] == 2 * (2 * layer + 2 * embedding)
    assert of(Layout(dp=4, micro_size=3))["activations"] == 3 * sharded["activations"]
    assert of(Layout(dp=4, recompute="full"))["activations"] < sharded["activations"]


def test_the_head_chunk_is_that_of_the_engine() -> None:
    assert cross_entropy.CHUNK_BYTES == memory.HEAD_CHUNK_BYTES
    assert memory.RUNTIME_BYTES.keys() == {"cpu", "cuda", "npu"}
    assert CPU.kind in memory.RUNTIME_BYTES


def test_lean_families_are_those_of_the_engines_kernels(tiny_models: dict[str, str]) -> None:
    from ascendfactory.engine.kernels import GATED_MLPS, RMS_NORMS

    assert {name.removesuffix("MLP").lower() for name in GATED_MLPS} == memory.LEAN_MLP_FAMILIES
    assert {name.removesuffix("RMSNorm").lower() for name in RMS_NORMS} == memory.LEAN_NORM_FAMILIES


def test_trainable_params_of_full_tuning_are_all(tiny_models: dict[str, str]) -> None:
    card = find_card(tiny_models["gemma3"])
    full: Tuning = recipe().tuning
    assert memory.trainable_params(card, full) == card.num_params
