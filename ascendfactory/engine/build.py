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
from ascendfactory.core.plan import Plan
from ascendfactory.core.recipe import Lora
from ascendfactory.engine import adapter, checkpoint
from ascendfactory.engine import device as devices
from ascendfactory.engine import model as models
from ascendfactory.engine.checkpoint import Checkpoints
from ascendfactory.engine.data.loader import Loader, open_data
from ascendfactory.engine.data.tokenizer import load_tokenizer
from ascendfactory.engine.export import torch_dtype
from ascendfactory.engine.kernels import apply_kernels
from ascendfactory.engine.memory.recompute import apply_recompute
from ascendfactory.engine.mesh import Mesh, make_mesh
from ascendfactory.engine.metrics import Reporter
from ascendfactory.engine.objective.causal_lm import CausalLM
from ascendfactory.engine.optim import Optimizer
from ascendfactory.engine.parallel.fsdp import apply_fsdp


@dataclass
class Run:
    """Everything that the step loop touches."""

    plan: Plan
    mesh: Mesh
    tokenizer: Any
    data: Loader
    model: CausalLM
    optimizer: Optimizer
    checkpoints: Checkpoints
    reporter: Reporter
    num_steps: int
    step: int = 0  # optimizer steps done
    best_eval_loss: float | None = None


def build(plan: Plan) -> Run:
    """Assembles a run; its tensors are those of a fresh start.

    Raises:
        UserError: the model, its data or its tokenizer cannot be read.
    """
    recipe, layout = plan.recipe, plan.layout
    devices.keep_freed_memory()
    mesh = make_mesh(layout, plan.cluster.device.kind, grouped=needs_fsdp(plan))
    torch.manual_seed(models.name_seed(recipe.seed, f"dropout of rank {mesh.rank}"))
    tokenizer = load_tokenizer(recipe.model.path, recipe.data.chat_template)
    data = open_data(recipe, tokenizer, dp_rank=mesh.rank, dp_size=mesh.size, micro_size=layout.micro_size, num_micro=layout.num_micro)
    model = build_model(plan, mesh)
    num_steps = data.num_steps(recipe.duration)
    optimizer = Optimizer(model, recipe.optim, num_steps, mesh, layout.replicate)
    run_dir = Path(plan.run_dir)
    checkpoints = Checkpoints(run_dir / "checkpoints", mesh, keep=recipe.checkpoint.keep, asynchronous=recipe.checkpoint.asynchronous)
    return Run(plan, mesh, tokenizer, data, model, optimizer, checkpoints, Reporter(run_dir, mesh.is_first), num_steps)


def needs_fsdp(plan: Plan) -> bool:
    """FSDP shards over several processes and, also on one, keeps fp32 masters beside bf16 compute."""
    return plan.layout.dp > 1 or plan.dtype != "float32"


def build_model(plan: Plan, mesh: Mesh) -> CausalLM:
    """The model on its device, sharded, filled, in training mode."""
    recipe = plan.recipe
    model, base = assemble_model(plan, mesh, models.read_config(recipe.model.path))
    models.materialize(model, base, mesh.device)
    if recipe.model.init == "random":
        models.draw_weights(base, recipe.seed)
    else:
        models.load_weights(base, recipe.model.path)
    if isinstance(recipe.tuning, Lora):
        adapter.draw_adapter(model.hf, recipe.seed)
        if recipe.tuning.adapter:
            adapter.load_adapter(model.hf, recipe.tuning.adapter)
    return model.train()


def assemble_model(plan: Plan, mesh: Mesh, config: Any) -> tuple[CausalLM, Any]:
    """The model as it will run, still on meta.

    Returns:
        The root module, and the transformers model inside it (below peft's wrapper if there are adapters).
    """
    dtype = torch_dtype(plan.dtype)
    hf: Any = models.build_on_meta(config)
    base = hf
    if isinstance(plan.recipe.tuning, Lora):
        hf = adapter.apply_lora(base, plan.recipe.tuning)
        _store_frozen_as(hf, dtype)
    apply_kernels(base)
    apply_recompute(base, plan.layout.recompute)
    model = CausalLM(hf)
    if mesh.dp is not None:
        apply_fsdp(model, models.decoder_layers(base), mesh.dp, plan.layout, dtype)
        register_fsdp_forward_method(model, "generate")
    return model, base


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
            "layout": plan.layout.model_copy(update={"dp": 1, "replicate": 1}),
            "dtype": "float32",
            "cluster": plan.cluster.model_copy(update={"device": device, "nodes": 1, "nproc": 1}),
        }
    )
    mesh = make_mesh(alone.layout, "cpu", grouped=False)
    folder, damaged = Checkpoints(Path(plan.run_dir) / "checkpoints", mesh, keep=1, asynchronous=False).find(resume)
    if folder is None:
        reason = damaged[0] if damaged else f"no checkpoint in {plan.run_dir}/checkpoints"
        raise UserError(plan.run_dir, f"{reason}; nothing to export", f"{reason}；没有可导出的内容")
    model = build_model(alone, mesh)
    tensors = {f"model.{name}": p.detach() for name, p in checkpoint.trained_tensors(model).items()}
    checkpoint.load_tensors(folder, tensors, mesh)
    return model, mesh, int(checkpoint.read_trainer(folder)["step"])
