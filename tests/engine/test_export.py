"""What is exported, read back by transformers and peft."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ascendfactory.catalog.read import find_card
from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Layout, Plan
from ascendfactory.engine import export
from ascendfactory.engine.build import build_model
from ascendfactory.engine.checkpoint import Checkpoints
from ascendfactory.engine.mesh import Mesh, make_mesh
from ascendfactory.engine.optim import Optimizer
from ascendfactory.engine.state import tensor_state
from tests.examples import make
from tests.pool import Pool
from tests.tiny import FAMILIES, write_model

ALONE = Mesh(torch.device("cpu"))
IDS = torch.arange(3, 23)[None]


def plan_of(folder: str, run_dir: str | Path, *overrides: str, dtype: Literal["float32", "bfloat16"] = "float32", nproc: int = 1) -> Plan:
    plan = make(run_dir, *overrides, model=folder, nproc=nproc)
    return plan.model_copy(update={"card": find_card(folder), "dtype": dtype})


@torch.no_grad()
def trained(plan: Plan, mesh: Mesh = ALONE) -> Any:
    """A built model whose trainable weights were moved, as by training."""
    model = build_model(plan, mesh)
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        torch.manual_seed(number)
        change = torch.randn(parameter.shape) * 0.03
        if mesh.fsdp is not None:
            change = torch.distributed.tensor.distribute_tensor(change, parameter.device_mesh, parameter.placements)
        parameter.add_(change)
    return model


@torch.no_grad()
def own_logits(model: Any) -> Tensor:
    """Of the engine's own model, in memory, through transformers' eager attention."""
    hf = copy.deepcopy(model.hf).eval()
    hf.set_attn_implementation("eager") if not hasattr(hf, "get_base_model") else hf.get_base_model().set_attn_implementation("eager")
    return hf(IDS, use_cache=False).logits


@torch.no_grad()
def read_logits(folder: str | Path, dtype: torch.dtype = torch.float32) -> Tensor:
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    return hf(IDS, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_full_export_has_the_same_logits_in_transformers(tiny_models: dict[str, str], tmp_path: Path, family: str) -> None:
    plan = plan_of(tiny_models[family], tmp_path)
    model = trained(plan)
    export.export_model(model, plan, ALONE, tmp_path / "export")
    torch.testing.assert_close(read_logits(tmp_path / "export"), own_logits(model), rtol=2e-5, atol=2e-5)
    assert not torch.allclose(read_logits(tiny_models[family]), own_logits(model), atol=1e-2)
    stored = load_file(tmp_path / "export" / "model.safetensors")
    assert stored.keys() == load_file(Path(tiny_models[family]) / "model.safetensors").keys()
    assert ("lm_head.weight" in stored) == (family != "gemma3")


@pytest.mark.parametrize(
    ("written", "asked", "expected"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("bfloat16", "float16", "float16"),
    ],
)
def test_dtype(tmp_path: Path, written: str, asked: str, expected: str) -> None:
    folder = write_model(tmp_path / "m", "qwen2")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config.pop("dtype")
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"torch_dtype": written}))  # as older folders spell it
    plan = plan_of(folder, tmp_path, f"--output.dtype={asked}")
    model = trained(plan)
    export.export_model(model, plan, ALONE, tmp_path / "export")
    dtype = getattr(torch, expected)
    for name, tensor in load_file(tmp_path / "export" / "model.safetensors").items():
        assert torch.equal(tensor, dict(model.hf.named_parameters())[name].to(dtype)), name
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (config["dtype"], "torch_dtype" in config) == (expected, False)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto").dtype == dtype


def test_side_files_come_along(tiny_models: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_models["llama"], folder)
    (folder / "LICENSE").write_text("free")
    (folder / "pytorch_model.bin").write_text("old weights")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    (folder / "original").mkdir()
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "stale").write_text("of an earlier export")
    plan = plan_of(str(folder), tmp_path, f"--data.chat_template={tmp_path / 'own.jinja'}")
    export.export_model(build_model(plan, ALONE), plan, ALONE, tmp_path / "export")
    files = {path.name for path in (tmp_path / "export").iterdir()}
    assert files == ({path.name for path in Path(tiny_models["llama"]).iterdir()} | {"LICENSE", "chat_template.jinja"})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert not (tmp_path / "export.writing").exists()


def test_large_models_are_written_in_shards(tiny_models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "SHARD_BYTES", 100_000)
    plan = plan_of(tiny_models["llama"], tmp_path)
    model = trained(plan)
    export.export_model(model, plan, ALONE, tmp_path / "export")
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "export").glob("*.safetensors"))
    assert [path.name for path in files] == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.hf.parameters())
    for path in files:
        with safe_open(path, framework="pt") as opened:
            held = list(opened.keys())
        assert all(index["weight_map"][name] == path.name for name in held)
        assert path.stat().st_size < 110_000 or len(held) == 1
    torch.testing.assert_close(read_logits(tmp_path / "export"), own_logits(model), rtol=2e-5, atol=2e-5)


LORAS = [(), ("--tuning.dora=true",), ("--tuning.rslora=true", "--tuning.targets=[q_proj, v_proj]")]


@pytest.mark.parametrize("overrides", LORAS)
@pytest.mark.parametrize("family", ["llama", "glm4"])
def test_adapters_give_the_same_logits_in_peft(
    tiny_models: dict[str, str], tmp_path: Path, family: str, overrides: tuple[str, ...]
) -> None:
    plan = plan_of(tiny_models[family], tmp_path, "--tuning=lora", "--tuning.rank=4", *overrides)
    model = trained(plan)
    export.export_model(model, plan, ALONE, tmp_path / "export")
    config = json.loads((tmp_path / "export" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == tiny_models[family]
    base = AutoModelForCausalLM.from_pretrained(tiny_models[family], dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(base, tmp_path / "export").eval()(IDS, use_cache=False).logits
    torch.testing.assert_close(theirs, own_logits(model), rtol=2e-5, atol=2e-5)
    files = {path.name for path in (tmp_path / "export").iterdir()}
    assert {"adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files
    assert not {"model.safetensors", "config.json"} & files


@pytest.mark.parametrize(("asked", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_adapters_are_fp32_unless_asked(tiny_models: dict[str, str], tmp_path: Path, asked: str, expected: torch.dtype) -> None:
    plan = plan_of(tiny_models["llama"], tmp_path, "--tuning=lora", f"--output.dtype={asked}")
    export.export_model(build_model(plan, ALONE), plan, ALONE, tmp_path / "export")
    assert {t.dtype for t in load_file(tmp_path / "export" / "adapter_model.safetensors").values()} == {expected}


def square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


@pytest.mark.parametrize("overrides", LORAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_merge_equals_peft(
    tiny_models: dict[str, str], tmp_path: Path, family: str, overrides: tuple[str, ...], dtype: torch.dtype
) -> None:
    plan = plan_of(tiny_models[family], tmp_path, "--tuning=lora", "--tuning.rank=4", *overrides)
    model = trained(plan)
    export.export_model(model, plan, ALONE, tmp_path / "adapter")
    before = own_logits(model)
    lost = export.merge_adapter(model.hf, plan, tmp_path / "merged", dtype)
    base = AutoModelForCausalLM.from_pretrained(tiny_models[family], dtype=torch.float32)
    original = {name: p.detach().clone() for name, p in base.named_parameters()}
    right = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    deltas = left = 0.0
    for name, parameter in right.named_parameters():
        torch.testing.assert_close(stored[name], parameter.detach().to(dtype), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
        delta = parameter.detach() - original[name]
        if delta.any():
            deltas += square(delta)
            left += square(delta - (parameter.detach().to(dtype).float() - original[name]))
    assert deltas > 0
    assert lost == pytest.approx((left / deltas) ** 0.5, rel=1e-3, abs=1e-7)
    assert (lost > 1e-3) == (dtype == torch.bfloat16)
    if dtype == torch.float32:
        torch.testing.assert_close(read_logits(tmp_path / "merged"), before, rtol=1e-4, atol=1e-4)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_a_merge_of_an_untrained_adapter_loses_nothing(tiny_models: dict[str, str], tmp_path: Path) -> None:
    plan = plan_of(tiny_models["llama"], tmp_path, "--tuning=lora")
    assert export.merge_adapter(build_model(plan, ALONE).hf, plan, tmp_path / "merged", torch.bfloat16) == 0.0


def export_on_ranks(plan: Plan, target: str) -> bool:
    mesh = make_mesh(plan.layout, "cpu", sharded=True)
    model = trained(plan, mesh)
    export.export_model(model, plan, mesh, Path(target))
    return (Path(target) / "tokenizer.json").exists()


@pytest.mark.parametrize(("family", "tuning"), [("llama", "full"), ("gemma3", "full"), ("qwen3", "lora")])
def test_two_ranks_export_what_one_does(pool: Pool, tiny_models: dict[str, str], tmp_path: Path, family: str, tuning: str) -> None:
    alone = plan_of(tiny_models[family], tmp_path, f"--tuning={tuning}")
    export.export_model(trained(alone), alone, ALONE, tmp_path / "one")
    both = plan_of(tiny_models[family], tmp_path, f"--tuning={tuning}", nproc=2)
    assert pool.run(export_on_ranks, 2, both, str(tmp_path / "two")) == [True, True]
    file = "model.safetensors" if tuning == "full" else "adapter_model.safetensors"
    one, two = load_file(tmp_path / "one" / file), load_file(tmp_path / "two" / file)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], tensor) for name, tensor in two.items())


def run_folder(plan: Plan) -> Any:
    """A run folder with plan.json and checkpoints of steps 1 and 2; the model of step 2."""
    run_dir = Path(plan.run_dir)
    run_dir.mkdir()
    (run_dir / "plan.json").write_text(plan.model_dump_json())
    model = trained(plan)
    optimizer = Optimizer(model, plan.recipe.optim, Layout(), 2, ALONE)
    checkpoints = Checkpoints(run_dir / "checkpoints", ALONE, keep=2, asynchronous=False)
    for step in (1, 2):
        with torch.no_grad():
            next(p for p in model.parameters() if p.requires_grad).add_(0.01)
        checkpoints.save(tensor_state(optimizer, ALONE), {"step": step})
    return model


def test_export_of_a_run(tiny_models: dict[str, str], tmp_path: Path) -> None:
    plan = plan_of(tiny_models["llama"], tmp_path / "run")
    model = run_folder(plan)
    result = export.export_run(str(tmp_path / "run"), str(tmp_path / "out"), "bfloat16")
    assert result == {"out": str(tmp_path / "out"), "step": 2, "dtype": "bfloat16"}
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(stored[name], p.bfloat16()) for name, p in model.hf.named_parameters())
    older = export.export_run(str(tmp_path / "run" / "checkpoints" / "step-00000001"), str(tmp_path / "older"))
    assert (older["step"], older["dtype"]) == (1, "float32")


def test_export_and_merge_of_a_lora_run(tiny_models: dict[str, str], tmp_path: Path) -> None:
    plan = plan_of(tiny_models["llama"], tmp_path / "run", "--tuning=lora")
    model = run_folder(plan)
    assert export.export_run(str(tmp_path / "run"), str(tmp_path / "adapter"))["dtype"] == "float32"
    merged = export.export_run(str(tmp_path / "run"), str(tmp_path / "merged"), merge=True)
    assert merged["lost"] == pytest.approx(0, abs=1e-6)
    torch.testing.assert_close(read_logits(tmp_path / "merged"), own_logits(model), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_exported_is_told(tiny_models: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run folder \(plan\.json is missing\)"):
        export.export_run(str(tmp_path), str(tmp_path / "out"))
    plan = plan_of(tiny_models["llama"], tmp_path / "run")
    run_folder(plan)
    with pytest.raises(UserError, match="this run has no adapter; leave --merge out"):
        export.export_run(plan.run_dir, str(tmp_path / "out"), merge=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(UserError, match=r"no checkpoint in .*nothing to export"):
        export.export_run(plan.run_dir, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
