"""Sharded data parallelism by FSDP2: ZeRO-1/2/3 (Rajbhandari et al. 2020, arXiv:1910.02054) and HSDP.

What is sharded between steps is the same at every level: weights, gradients and optimizer states. The levels differ within a step:

| level | weights | gradients |
|---|---|---|
| 1 | gathered once, whole until the step's last backward | whole, summed over devices once a step |
| 2 | gathered once, whole until the step's last backward | summed and cut after every micro-batch |
| 3 | gathered for each layer's forward and backward, given back after | summed and cut after every micro-batch |

In a pipeline "the last backward" is each chunk's own: the gradients of a chunk that is done travel while the others still work.
Schedules that compute weight gradients apart need level 1, since FSDP's hooks run before those gradients exist.

Overlap: a layer's weights are asked for when the layer before it begins (in backward: the one after it), and a layer's gradients
travel while the layer before it computes. The order is given explicitly, since the one that FSDP2 records from the forward pass mixes
the micro-batches of a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ascendfactory.core.plan import Layout


def apply_fsdp(
    model: nn.Module, layer_runs: Sequence[Sequence[nn.Module]], mesh: DeviceMesh, layout: Layout, dtype: torch.dtype
) -> nn.Module:
    """Shards each layer, then what is left of the model (embedding, last norm, head).

    Args:
        layer_runs: layers that run one after the other: all of them, or those of each pipeline chunk of this device.
        mesh: axes (replicate, shard), or (shard,).
        dtype: compute dtype; master weights and gradient sums stay fp32.

    Gradients are summed and never averaged: the loss is already divided by the step's token count.
    """
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    for layer in (layer for run in layer_runs for layer in run):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=layout.zero == 3)
    # backward begins with the head, so giving the root's weights back after forward would only gather them twice
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        # without this, a factor of 1 asks for ReduceOp.PREMUL_SUM, which gloo and bf16 NCCL lack
        module.set_force_sum_reduction_for_comms(True)
    for run in layer_runs:
        _order_gathers([layer for layer in run if isinstance(layer, FSDPModule)])
    return model


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _order_gathers(layers: list[FSDPModule]) -> None:
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])


def mark_micro_batch(model: nn.Module, layout: Layout, is_last: bool) -> None:
    """Before a micro-batch without a pipeline: levels 1 and 2 keep weights, and 1 also gradients, whole until the last one of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last or layout.zero > 1)
        model.set_reshard_after_backward(is_last or layout.zero == 3)


def mark_backward(model: nn.Module, layers: Sequence[nn.Module], layout: Layout, *, chunk_ends: bool, step_ends: bool) -> None:
    """Before a backward pass of a pipeline chunk.

    Args:
        layers: of the chunk; other layers are left as they are.
        chunk_ends: this is the chunk's last backward of the step.
        step_ends: it is the last of all chunks of this device.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(step_ends)
    for module, ends in [(model, step_ends), *((layer, chunk_ends) for layer in layers)]:
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(ends or layout.zero > 1, recurse=False)
        module.set_reshard_after_backward(ends or layout.zero == 3, recurse=False)


def hold_gradients(model: nn.Module) -> None:
    """Until `reduce_gradients`, weights and gradients stay whole on this device, whichever pass of a split backward makes them."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(False)
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)


def reduce_gradients(model: nn.Module) -> None:
    """After the last pass of a split backward: sums the gradients over devices, cuts them, and gives the weights back."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(True)
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        # what a backward pass runs at its end; weight passes begin inside the graph, where FSDP2 has no hook
        model._get_fsdp_state()._root_post_backward_final_callback()


def give_weights_back(model: nn.Module) -> None:
    """After forward passes that no backward pass follows: else the model would go on holding whole weights, and name them as its own."""
    for module in _sharded(model):
        module.reshard()
