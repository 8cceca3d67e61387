"""A run, assembled in a fixed order: mesh, data, model, adapters, recomputation, sharding, weights, optimizer, checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Layout, Plan
from ascendfactory.core.recipe import Lora
from ascendfactory.core.stages import V_SHAPED, chunks_of, layout_cut, model_costs
from ascendfactory.engine import adapter, checkpoint
from ascendfactory.engine import device as devices
from ascendfactory.engine import model as models
from ascendfactory.engine.checkpoint import Checkpoints
from ascendfactory.engine.data.loader import Loader, open_data
from ascendfactory.engine.data.tokenizer import load_tokenizer
from ascendfactory.engine.export import torch_dtype
from ascendfactory.engine.kernels import apply_kernels
from ascendfactory.engine.memory.offload import apply_offload
from ascendfactory.engine.memory.recompute import apply_recompute
from ascendfactory.engine.mesh import Mesh, make_mesh
from ascendfactory.engine.metrics import Reporter
from ascendfactory.engine.names import public_name, weight_names
from ascendfactory.engine.objective.causal_lm import CausalLM
from ascendfactory.engine.optim import Optimizer
from ascendfactory.engine.parallel import tensor
from ascendfactory.engine.parallel.context import width_multiple
from ascendfactory.engine.parallel.fsdp import apply_fsdp
from ascendfactory.engine.parallel.pieces import Piece
from ascendfactory.engine.parallel.pipeline import Pipeline, StageModel
from ascendfactory.engine.parallel.stages import cut_model, share_tied, tied_ends
from ascendfactory.engine.position import Position
from ascendfactory.engine.state import trained_tensors


@dataclass
class Run:
    """Everything that the step loop touches."""

    plan: Plan
    mesh: Mesh
    tokenizer: Any
    data: Loader
    model: CausalLM
    pipeline: Pipeline | None
    optimizer: Optimizer
    checkpoints: Checkpoints
    reporter: Reporter
    position: Position
    num_steps: int
    step: int = 0  # optimizer steps done
    best_eval_loss: float | None = None


def build(plan: Plan) -> Run:
    """Assembles a run; its tensors are those of a fresh start.

    Raises:
        UserError: the model, its data or its tokenizer cannot be read.
    """
    recipe, layout = plan.recipe, plan.layout
    if layout.reuse_params and plan.dtype == "float32":
        raise UserError(
            "layout.reuse_params",
            "this run computes in float32, so there is no bfloat16 copy to share; write reuse_params: false, or model.dtype: bfloat16",
            "本次运行以 float32 计算，没有可共享的 bfloat16 副本；请写 reuse_params: false，或 model.dtype: bfloat16",
        )
    devices.keep_freed_memory()
    mesh = make_mesh(layout, plan.cluster.device.kind, sharded=needs_fsdp(plan))
    # tensor-parallel partners must drop the same elements of the input that they share
    torch.manual_seed(models.name_seed(recipe.seed, f"dropout of rank {mesh.rank // mesh.tp.size}"))
    tokenizer = load_tokenizer(recipe.model.path, recipe.data.chat_template)
    data = open_data(
        recipe,
        tokenizer,
        dp_rank=mesh.data.rank,
        dp_size=mesh.data.size,
        micro_size=layout.micro_size,
        num_micro=layout.num_micro,
        width_multiple=width_multiple(layout),
    )
    model = build_model(plan, mesh)
    num_steps = data.num_steps(recipe.duration)
    optimizer = Optimizer(model, recipe.optim, layout, num_steps, mesh)
    pipeline = make_pipeline(plan, mesh, model)
    run_dir = Path(plan.run_dir)
    checkpoints = Checkpoints(run_dir / "checkpoints", mesh, keep=recipe.checkpoint.keep, asynchronous=recipe.checkpoint.asynchronous)
    return Run(
        plan,
        mesh,
        tokenizer,
        data,
        model,
        pipeline,
        optimizer,
        checkpoints,
        Reporter(run_dir, mesh.is_first),
        Position(run_dir, mesh.rank),
        num_steps,
    )


def needs_fsdp(plan: Plan) -> bool:
    """FSDP shards over several processes and, also on one, keeps fp32 masters beside bf16 compute, unless they are one and the same."""
    return plan.layout.shard * plan.layout.replicate > 1 or (plan.dtype != "float32" and not plan.layout.reuse_params)


def build_model(plan: Plan, mesh: Mesh) -> CausalLM:
    """The model on its device (of a pipeline: its stage), cut as the layout says, filled, in training mode."""
    recipe = plan.recipe
    skeleton = assemble_model(plan, mesh, models.read_config(recipe.model.path))
    model, base, pieces = skeleton.model, skeleton.base, skeleton.model.pieces
    models.materialize(model, base, mesh.device)
    if recipe.model.init == "random":
        models.draw_weights(base, recipe.seed, pieces)
    else:
        models.load_weights(base, recipe.model.path, pieces, skeleton.weight_names)
    if isinstance(recipe.tuning, Lora):
        adapter.draw_adapter(model.hf, recipe.seed, pieces)
        if recipe.tuning.adapter:
            adapter.load_adapter(model.hf, recipe.tuning.adapter, pieces, skeleton.adapter_names)
    return model.train()


@dataclass(frozen=True)
class Skeleton:
    """A model on meta, cut as it will run, and what its files may name, the parts on other devices included."""

    model: CausalLM
    base: Any  # transformers' model, below peft's wrapper if there are adapters
    weight_names: set[str]
    adapter_names: set[str]


def assemble_model(plan: Plan, mesh: Mesh, config: Any) -> Skeleton:
    """The model as it will run, still on meta: adapters, tensor parallelism, kernels, stages, recomputation, FSDP."""
    recipe, layout, dtype = plan.recipe, plan.layout, torch_dtype(plan.dtype)
    hf: Any = models.build_on_meta(config)
    base = hf
    known_adapters: set[str] = set()
    if isinstance(recipe.tuning, Lora):
        hf = adapter.apply_lora(base, recipe.tuning)
        known_adapters = adapter.adapter_names(hf)
        _store_frozen_as(hf, dtype)
    known_weights = weight_names(base)
    whole_layers_again = layout.recompute == "full" and layout.recompute_layers == 0
    shared = tensor.apply(hf, mesh.tp, sequence=layout.sp, overlap_chunks=layout.overlap_chunks, regather=not whole_layers_again)
    pieces = {public_name(name): piece for name, piece in shared.items()}
    apply_kernels(base)
    model, runs = _staged(plan, mesh, hf, base, pieces) if layout.pp > 1 else (CausalLM(hf, pieces), [models.decoder_layers(base)])
    _save_memory(runs, layout)
    if mesh.fsdp is not None:
        apply_fsdp(model, runs, mesh.fsdp, layout, dtype)
        register_fsdp_forward_method(model, "generate")
    return Skeleton(model, base, known_weights, known_adapters)


def _staged(plan: Plan, mesh: Mesh, hf: Any, base: Any, pieces: dict[str, Piece]) -> tuple[CausalLM, list[list[nn.Module]]]:
    """This device's stage of the pipeline, and the layers of each of its chunks."""
    layout = plan.layout
    head, embedding = base.get_output_embeddings().weight, base.get_input_embeddings().weight
    if head is embedding and embedding.requires_grad and layout.schedule not in V_SHAPED:
        ends = tied_ends(mesh)
        if ends is not None:
            name = next(name for name, p in base.named_parameters() if p is embedding)
            share_tied(pieces, base, name, ends)
    costs = model_costs(plan.card, plan.recipe.data.seq_len)
    stage = cut_model(base, layout_cut(layout, costs), chunks_of(mesh.pp.rank, layout.pp, layout.vpp, layout.schedule))
    return StageModel(hf, pieces, stage), stage.layer_runs


def _save_memory(runs: list[list[nn.Module]], layout: Layout) -> None:
    """Recomputation and offload; `recompute_layers` counts over all chunks of a device."""
    left = layout.recompute_layers or sum(map(len, runs))
    for layers in runs:
        num_layers = min(left, len(layers))
        if num_layers:
            apply_recompute(layers, layout.recompute, num_layers)
        left -= num_layers
        if layout.offload_activations:
            apply_offload(layers)


def make_pipeline(plan: Plan, mesh: Mesh, model: CausalLM) -> Pipeline | None:
    """What runs the stages of a pipeline; None where there is one stage."""
    if not isinstance(model, StageModel):
        return None
    layout = plan.layout
    return Pipeline(
        model,
        mesh,
        layout,
        hidden_size=plan.card.hidden_size,
        dtype=torch_dtype(plan.dtype),
        sequence_parts=layout.tp if layout.sp else 1,
        recompute_in_advance=layout.recompute_in_advance,
    )


def _store_frozen_as(hf: nn.Module, dtype: torch.dtype) -> None:
    """Frozen weights need no fp32 master: they are kept in the compute dtype."""
    for parameter in hf.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def build_for_export(plan: Plan, resume: str) -> tuple[CausalLM, Mesh, int]:
    """The model of a checkpoint, whole and in fp32 on this process's CPU.

    Returns:
        model, mesh of one process, step of the checkpoint.

    Raises:
        UserError: there is no healthy checkpoint.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    device = plan.cluster.device.model_copy(update={"kind": "cpu"})
    alone = plan.model_copy(
        update={
            "layout": Layout(micro_size=1),
            "dtype": "float32",
            "cluster": plan.cluster.model_copy(update={"device": device, "nodes": 1, "nproc": 1}),
        }
    )
    mesh = make_mesh(alone.layout, "cpu", sharded=False)
    folder, damaged = Checkpoints(Path(plan.run_dir) / "checkpoints", mesh, keep=1, asynchronous=False).find(resume)
    if folder is None:
        reason = damaged[0] if damaged else f"no checkpoint in {plan.run_dir}/checkpoints"
        raise UserError(plan.run_dir, f"{reason}; nothing to export", f"{reason}；没有可导出的内容")
    model = build_model(alone, mesh)
    tensors = {f"model.{name}": kept for name, kept in trained_tensors(model).items()}
    checkpoint.load_tensors(folder, tensors, mesh)
    return model, mesh, int(checkpoint.read_trainer(folder)["step"])
