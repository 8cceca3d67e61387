"""Sharded data parallelism by FSDP2: ZeRO-1/2/3 (Rajbhandari et al. 2020, arXiv:1910.02054) and HSDP."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ascendfactory.core.plan import Layout


def apply_fsdp(model: nn.Module, layers: list[nn.Module], mesh: DeviceMesh, layout: Layout, dtype: torch.dtype) -> nn.Module:
    """Shards each layer, then what is left of the model (embedding, last norm, head).

    Args:
        mesh: axes (replicate, shard).
        dtype: compute dtype; master weights and gradient sums stay fp32.

    Gradients are summed and never averaged: the loss is already divided by the step's token count.
    """
    used = mesh if layout.replicate > 1 else mesh["shard"]
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    for module in layers:
        fully_shard(module, mesh=used, mp_policy=policy, reshard_after_forward=layout.zero == 3)
    # backward begins with the head, so giving the root's weights back after forward would only gather them twice
    fully_shard(model, mesh=used, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # without this, a factor of 1 asks for ReduceOp.PREMUL_SUM, which gloo and bf16 NCCL lack
            module.set_force_sum_reduction_for_comms(True)
    return model


def mark_micro_batch(model: nn.Module, layout: Layout, is_last: bool) -> None:
    """Before a micro-batch: ZeRO-1 keeps whole gradients and parameters on every device until the last one of a step."""
    if isinstance(model, FSDPModule) and layout.zero == 1:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
