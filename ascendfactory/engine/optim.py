"""AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101), its schedule, the gradient norm and clipping."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ascendfactory.core.recipe import Optim
from ascendfactory.engine.mesh import Mesh


def warmup_steps(optim: Optim, num_steps: int) -> int:
    """Steps in which the learning rate rises, from a fraction of the run or a count."""
    amount = optim.warmup.amount
    return math.ceil(amount * num_steps) if optim.warmup.unit == "fraction" else int(amount)


def lr_at(step: int, num_steps: int, optim: Optim) -> float:
    """Learning rate of the update with this number (0 is the first).

    Rises linearly to `lr` over the warm-up, then follows the schedule down to `lr * min_lr_ratio`, which the step after the
    last would have: with a ratio of 0 the last update still counts.
    wsd (Hu et al. 2024, arXiv:2404.06395): constant, then linear over the last `decay_fraction` of the run.
    """
    warm = warmup_steps(optim, num_steps)
    if step < warm:
        return optim.lr * (step + 1) / warm
    if optim.schedule == "constant":
        return optim.lr
    start = warm if optim.schedule != "wsd" else max(warm, num_steps - math.ceil(optim.decay_fraction * num_steps))
    if step < start:
        return optim.lr
    progress = min(1.0, (step - start) / max(1, num_steps - start))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1 - progress
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * remaining)


def local(tensor: Tensor) -> Tensor:
    """This device's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Optimizer:
    """Updates the trainable parameters of a model.

    Moments exist from the start, so that memory is what it will be and a checkpoint can be read into them.
    """

    def __init__(self, model: nn.Module, optim: Optim, num_steps: int, mesh: Mesh, replicate: int) -> None:
        self._optim, self._num_steps, self._mesh, self._replicate = optim, num_steps, mesh, replicate
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        decayed = [p for p in self.parameters.values() if p.ndim > 1]
        plain = [p for p in self.parameters.values() if p.ndim <= 1]  # norms and biases
        groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
        )
        for parameter in self.parameters.values():
            self.adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=local(parameter).device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
        self.num_updates = 0

    def moments(self) -> dict[str, Tensor]:
        """`exp_avg.<name>` and `exp_avg_sq.<name>` of every trainable parameter; live tensors."""
        return {f"{key}.{name}": self.adamw.state[p][key] for name, p in self.parameters.items() for key in ("exp_avg", "exp_avg_sq")}

    def set_num_updates(self, num_updates: int) -> None:
        """After a resume: how many updates the moments have seen (bias correction depends on it)."""
        self.num_updates = num_updates
        for state in self.adamw.state.values():
            state["step"].fill_(num_updates)

    def gradient_norm(self, loss: float) -> tuple[float, float]:
        """Global L2 norm of the gradients, and the loss summed over all processes, in one all-reduce.

        Squares are summed per shard in fp32 and across shards in fp64. HSDP holds `replicate` equal copies of each gradient.
        """
        grads = [g for p in self.parameters.values() if p.grad is not None and (g := local(p.grad)).numel()]
        norms = torch.stack(torch._foreach_norm(grads)) if grads else torch.zeros(1)
        square = float(norms.double().square().sum()) if norms.device.type == "cpu" else float(norms.cpu().double().square().sum())
        total_loss, total_square = self._mesh.sum([loss, square])
        return total_loss, math.sqrt(total_square / self._replicate)

    def step(self, step: int, grad_norm: float) -> float:
        """Clips, updates, clears the gradients.

        Args:
            step: number of the optimizer step, 0 the first; decides the learning rate.
            grad_norm: from `gradient_norm`, finite.

        Returns:
            The learning rate that was used.
        """
        limit = self._optim.max_grad_norm
        if limit and grad_norm > limit:
            grads = [g for p in self.parameters.values() if p.grad is not None and (g := local(p.grad)).numel()]
            if grads:  # none where a device holds no row of anything
                torch._foreach_mul_(grads, limit / (grad_norm + 1e-6))
        lr = lr_at(step, self._num_steps, self._optim)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.num_updates += 1
        self.drop_gradients()
        return lr

    def drop_gradients(self) -> None:
        """Frees all gradients."""
        self.adamw.zero_grad(set_to_none=True)
