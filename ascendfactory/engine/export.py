"""Export to the public Hugging Face layout: weights under their own names, with every side file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Plan
from ascendfactory.core.recipe import Full, Lora
from ascendfactory.engine.adapter import lora_layers
from ascendfactory.engine.kept import Kept
from ascendfactory.engine.mesh import Mesh
from ascendfactory.engine.model import unique_tensors
from ascendfactory.engine.names import pieces_of, public_name
from ascendfactory.engine.state import give_back_whole_weights, iter_whole, trained_tensors

SHARD_BYTES = 5 * 2**30  # the hub's usual file size; also what is held in memory at a time
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json", ".h5", ".msgpack")


def torch_dtype(name: str) -> torch.dtype:
    """`float32`, `bfloat16` or `float16` → torch's."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def copy_side_files(source: Path, target: Path, *, with_config: bool) -> None:
    """Copies tokenizer, chat template, generation config, licence: every file of the model folder that is no weight."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES) and (with_config or path.name != "config.json"):
            shutil.copyfile(path, target / path.name)


def write_weights(target: Path, tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype, *, writes: bool) -> None:
    """Writes model.safetensors, or shards of 5 GiB with an index.

    Args:
        tensors: whole tensors by public name; consumed one at a time on every process.
        writes: whether this process writes (the others only help to gather).
    """
    shards: list[dict[str, int]] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        save_file(held, target / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append({name: t.numel() * t.element_size() for name, t in held.items()})
        held.clear()

    for name, tensor in tensors:
        if not writes:
            continue
        stored = tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
        if held and sum(t.numel() * t.element_size() for t in held.values()) + stored.numel() * stored.element_size() > SHARD_BYTES:
            flush()
        held[name] = stored
    if not writes:
        return
    flush()
    _name_shards(target, shards)


def _name_shards(target: Path, shards: list[dict[str, int]]) -> None:
    if len(shards) == 1:
        (target / "part-0").rename(target / "model.safetensors")
        return
    weight_map = {}
    for number, sizes in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (target / f"part-{number}").rename(target / file)
        weight_map |= dict.fromkeys(sizes, file)
    total = sum(sum(sizes.values()) for sizes in shards)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def whole_model(model: nn.Module, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model in our root module, gathered, under its public name; tied weights once."""
    give_back_whole_weights(model)
    pieces = pieces_of(model)
    named = {public_name(name): tensor for name, tensor in unique_tensors(model)}
    return iter_whole({name: Kept(tensor, pieces.get(name)) for name, tensor in named.items()}, mesh)


def export_model(model: nn.Module, plan: Plan, mesh: Mesh, target: Path) -> None:
    """Writes the trained model (full tuning) or the adapter (LoRA); every process must call it.

    The folder appears whole, by a rename; an older one of the same name is replaced.
    """
    temporary = target.with_name(target.name + ".writing")
    if mesh.is_first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    if isinstance(plan.recipe.tuning, Lora):
        _write_adapter(model, plan, temporary, mesh)
    else:
        dtype = _export_dtype(plan, plan.recipe.output.dtype)
        write_weights(temporary, whole_model(model, mesh), dtype, writes=mesh.is_first)
        if mesh.is_first:
            _write_config(Path(plan.recipe.model.path), temporary, dtype)
    if mesh.is_first:
        _own_template(plan, temporary)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    mesh.barrier()


def _export_dtype(plan: Plan, wanted: str) -> torch.dtype:
    return torch_dtype(plan.card.dtype if wanted == "auto" else wanted)


def _adapter_dtype(wanted: str) -> torch.dtype:
    """Adapters are small and trained in fp32, so auto loses nothing."""
    return torch_dtype("float32" if wanted == "auto" else wanted)


def _write_config(source: Path, target: Path, dtype: torch.dtype) -> None:
    """The model's own config.json and side files; only the dtype is changed."""
    copy_side_files(source, target, with_config=True)
    config = json.loads((target / "config.json").read_text())
    for section in [config, *(v for v in config.values() if isinstance(v, dict) and ("dtype" in v or "torch_dtype" in v))]:
        section.pop("torch_dtype", None)
        section["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False))


def _own_template(plan: Plan, target: Path) -> None:
    """The chat template that the model was trained with is the one that it is served with."""
    if plan.recipe.data.chat_template:
        shutil.copyfile(plan.recipe.data.chat_template, target / "chat_template.jinja")


def _write_adapter(model: nn.Module, plan: Plan, target: Path, mesh: Mesh) -> None:
    dtype = _adapter_dtype(plan.recipe.output.dtype)
    whole = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in iter_whole(trained_tensors(model), mesh)}
    if not mesh.is_first:
        return
    save_file(whole, target / "adapter_model.safetensors", metadata={"format": "pt"})
    config = next(module.peft_config["default"] for module in model.modules() if hasattr(module, "peft_config"))
    config.base_model_name_or_path = str(Path(plan.recipe.model.path).resolve())
    config.inference_mode = True
    config.save_pretrained(target)
    copy_side_files(Path(plan.recipe.model.path), target, with_config=False)


@torch.no_grad()
def merged_tensors(hf: Any, dtype: torch.dtype, lost: list[float]) -> Iterator[tuple[str, Tensor]]:
    """The model with its adapter merged by peft in fp32, then cast.

    Args:
        hf: a peft model on one process, fp32.
        lost: gets ‖Δ‖² and ‖Δ − (cast(W + Δ) − W)‖², summed over layers.
    """
    for layer in lora_layers(hf):
        before = layer.base_layer.weight.detach().clone()
        layer.merge()
        after = layer.base_layer.weight.detach()
        delta = after - before
        lost[0] += float(delta.double().square().sum())
        lost[1] += float((delta - (after.to(dtype).float() - before)).double().square().sum())
    for name, tensor in unique_tensors(hf.get_base_model()):
        yield public_name(name), tensor.detach()


def merge_adapter(hf: Any, plan: Plan, target: Path, dtype: torch.dtype) -> float:
    """Writes base + adapter as one Hugging Face folder.

    Returns:
        The share of the adapter's effect (Frobenius norm) that the cast to `dtype` lost: 0 none, 1 all of it.
    """
    temporary = target.with_name(target.name + ".writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    sums = [0.0, 0.0]
    write_weights(temporary, merged_tensors(hf, dtype, sums), dtype, writes=True)
    _write_config(Path(plan.recipe.model.path), temporary, dtype)
    _own_template(plan, temporary)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    return (sums[1] / sums[0]) ** 0.5 if sums[0] else 0.0


def export_run(run: str, out: str, dtype: str = "auto", *, merge: bool = False) -> dict[str, Any]:
    """Exports a checkpoint of a run (the newest healthy one, or the folder given), on one process.

    Args:
        run: a run folder, or one of its `checkpoints/step-*` folders.
        out: the folder to write.
        dtype: of the weights; auto = the model's own, float32 for an adapter.
        merge: LoRA only: merge the adapter into the base weights.

    Returns:
        {"out", "step", "dtype", and for a merge "lost": share of the adapter's effect lost by the cast}.

    Raises:
        UserError: no run or no healthy checkpoint there, or a merge of a run without adapter.
    """
    from ascendfactory.engine.build import build_for_export

    root = Path(run)
    checkpoint = "auto"
    if root.parent.name == "checkpoints":
        root, checkpoint = root.parent.parent, str(root)
    if not (root / "plan.json").exists():
        raise UserError(
            run,
            "no run folder (plan.json is missing); see `ascendfactory runs list`",
            "不是运行目录（缺少 plan.json）；参见 `ascendfactory runs list`",
        )
    plan = Plan.model_validate_json((root / "plan.json").read_text())
    if merge and isinstance(plan.recipe.tuning, Full):
        raise UserError("--merge", "this run has no adapter; leave --merge out", "该运行没有适配器；请去掉 --merge")
    model, mesh, step = build_for_export(plan, checkpoint)
    adapter_only = isinstance(plan.recipe.tuning, Lora) and not merge
    wanted = _adapter_dtype(dtype) if adapter_only else _export_dtype(plan, dtype)
    target = Path(out)
    result: dict[str, Any] = {"out": out, "step": step, "dtype": str(wanted).removeprefix("torch.")}
    if merge:
        result["lost"] = merge_adapter(model.hf, plan, target, wanted)
    else:
        recipe = plan.recipe.model_copy(update={"output": plan.recipe.output.model_copy(update={"dtype": dtype})})
        export_model(model, plan.model_copy(update={"recipe": recipe}), mesh, target)
    return result
