"""Forward and backward of the micro-batches of an optimizer step: what the trainer runs, and the simulator traces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascendfactory.core.plan import Layout
from ascendfactory.engine.objective.causal_lm import CausalLM
from ascendfactory.engine.parallel.context import LocalBatch
from ascendfactory.engine.parallel.fsdp import mark_micro_batch
from ascendfactory.engine.parallel.pipeline import Pipeline


def forward_backward(model: CausalLM, pipeline: Pipeline | None, layout: Layout, batches: Sequence[LocalBatch], scale: float) -> Tensor:
    """Leaves the gradients of all micro-batches on the parameters.

    Args:
        pipeline: what runs the model's stages; None where there is one.
        batches: this device's parts of the step's micro-batches, on the device.
        scale: 1 / (trained tokens of the whole step over all devices).

    Returns:
        fp32 scalar: this device's share of the loss; 0 on pipeline stages where none appears.
    """
    if pipeline is not None:
        return pipeline.step(batches, scale)
    loss = torch.zeros((), dtype=torch.float32, device=batches[0].input_ids_BS.device)
    for number, batch in enumerate(batches):
        mark_micro_batch(model, layout, is_last=number == len(batches) - 1)
        part: Tensor = model(batch, scale)
        part.backward()
        loss += part.detach()
    return loss
