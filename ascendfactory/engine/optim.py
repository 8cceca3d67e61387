"""AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101), its schedule, the gradient norm and clipping."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Layout
from ascendfactory.core.recipe import Optim
from ascendfactory.engine.memory import replicas
from ascendfactory.engine.mesh import Mesh
from ascendfactory.engine.names import pieces_of, public_name
from ascendfactory.engine.parallel.pieces import Piece, local

SLICE_ELEMENTS = 1 << 22  # 16 MiB of fp32: what an update outside the plain path holds at a time of each tensor


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


@dataclass
class Slot:
    """A trained parameter and what is kept beside it, all laid out as its part on this device."""

    name: str  # public; also seeds the rounding, so that copies on other devices round alike
    parameter: nn.Parameter
    piece: Piece | None
    weight_decay: float
    exp_avg: Tensor
    exp_avg_sq: Tensor
    residual: Tensor | None = None  # with it the weight is bf16 and the pair is an fp32 master

    @property
    def is_plain(self) -> bool:
        """Whether everything is fp32 and in one place, so that one call of the kernel does."""
        weight = local(self.parameter)
        return weight.dtype == self.exp_avg.dtype == torch.float32 and weight.device == self.exp_avg.device

    @property
    def copies(self) -> int:
        """Devices outside FSDP's axes with the same part."""
        return self.piece.copies if self.piece else 1

    def master(self) -> Tensor | None:
        """The fp32 weights as a tensor of their own, where the parameter itself holds only their upper halves."""
        return None if self.residual is None else replicas.join(self.parameter.detach(), self.residual)

    def set_master(self, values: Tensor) -> None:
        """Undoes `master`."""
        weight, residual = replicas.split(values)
        assert self.residual is not None
        self.parameter.detach().copy_(weight)
        self.residual.copy_(residual)


class Optimizer:
    """Updates the trainable parameters of a model.

    Everything is done on local tensors: parameters may be cut by FSDP over any mesh, by tensor parallelism, or not at all.
    Moments exist from the start, so that memory is what it will be and a checkpoint can be read into them.

    Args:
        model: materialised, its weights loaded. With `layout.reuse_params` its trained weights (fp32, outside FSDP) become bf16.
        optim: of the recipe.
        layout: says where moments live and in which precision.
        num_steps: of the whole run.
        mesh: of the processes.

    Raises:
        UserError: `optim.in_backward` with what needs all gradients at once.
    """

    def __init__(self, model: nn.Module, optim: Optim, layout: Layout, num_steps: int, mesh: Mesh) -> None:
        if optim.in_backward:
            _refuse_in_backward(optim, layout)
        self._optim, self._layout, self._num_steps, self._mesh = optim, layout, num_steps, mesh
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        pieces = pieces_of(model)
        self.slots = {name: self._slot(public_name(name), p, pieces.get(public_name(name))) for name, p in self.parameters.items()}
        self._counts: dict[torch.device, Tensor] = {}
        self.num_updates = 0
        self._summed = False
        self._lr: float | None = None  # in_backward: of the step under way
        self._norms: list[tuple[Slot, Tensor]] = []  # in_backward: of the gradients used so far
        if optim.in_backward:
            for slot in self.slots.values():
                slot.parameter.register_post_accumulate_grad_hook(partial(self._update_now, slot))

    def _slot(self, name: str, parameter: nn.Parameter, piece: Piece | None) -> Slot:
        residual = None
        if self._layout.reuse_params:
            if isinstance(parameter, DTensor):
                raise ValueError(f"{name} is sharded by FSDP, which keeps no second copy; reuse_params is for the rest")
            parameter.data, residual = replicas.split(parameter.data)
        weight = local(parameter)
        on_host = self._layout.offload_optimizer
        moments = [
            torch.zeros(
                weight.shape,
                dtype=getattr(torch, self._layout.optim_dtype),
                device="cpu" if on_host else weight.device,
                pin_memory=on_host and weight.device.type != "cpu",
            )
            for _ in range(2)
        ]
        decay = self._optim.weight_decay if parameter.ndim > 1 else 0.0  # norms and biases are not decayed
        return Slot(name, parameter, piece, decay, *moments, residual)

    def moments(self) -> dict[str, Tensor]:
        """`exp_avg.<name>` and `exp_avg_sq.<name>` of every trainable parameter: live tensors of this device's parts."""
        return {f"{key}.{name}": getattr(slot, key) for name, slot in self.slots.items() for key in ("exp_avg", "exp_avg_sq")}

    def set_num_updates(self, num_updates: int) -> None:
        """After a resume: how many updates the moments have seen (bias correction depends on it)."""
        self.num_updates = num_updates

    def start_step(self, step: int) -> None:
        """Before the first forward of a step; with `in_backward` its updates begin there.

        Args:
            step: number of the optimizer step, 0 the first.
        """
        self._lr = lr_at(step, self._num_steps, self._optim)

    @torch.no_grad()
    def sum_partial_gradients(self) -> None:
        """Sums gradients of which every partner sees a part, over each of their groups; a second call in a step does nothing.

        One message a group. Groups come in the order of their members' ranks on every process, so no two wait for each other.
        """
        if self._summed:
            return
        self._summed = True
        groups: dict[dist.ProcessGroup, list[Slot]] = {}
        for slot in self.slots.values():
            if slot.piece is not None and slot.piece.partial_over is not None:
                groups.setdefault(slot.piece.partial_over, []).append(slot)
        for group in sorted(groups, key=dist.get_process_group_ranks):
            _sum_over(group, [slot.parameter for slot in groups[group]])

    def gradient_norm(self, loss: float) -> tuple[float, float]:
        """Global L2 norm of the gradients, and the loss summed over all processes, in one all-reduce.

        Partial gradients are summed first. Squares are summed per part in fp32 and across parts in fp64; a part that several
        devices hold (HSDP replicas, copies of a piece) counts once.

        Args:
            loss: this process's share; where several processes know the same loss, divided among them.
        """
        if self._optim.in_backward:
            norms, self._norms = self._norms, []
        else:
            self.sum_partial_gradients()
            norms = _norms([slot for slot in self.slots.values() if _gradient(slot) is not None])
        shares = torch.tensor([1.0 / slot.copies for slot, _ in norms], dtype=torch.float64)
        # on CPU, because some accelerators have no fp64
        squares = torch.stack([norm for _, norm in norms]).cpu().double().square() if norms else shares
        total_loss, total_square = self._mesh.sum([loss, float((squares * shares).sum())])
        return total_loss, math.sqrt(total_square / self._layout.replicate)

    @torch.no_grad()
    def step(self, step: int, grad_norm: float) -> float:
        """Clips, updates, clears the gradients.

        Args:
            step: number of the optimizer step, 0 the first; decides the learning rate.
            grad_norm: from `gradient_norm`, finite.

        Returns:
            The learning rate that was used.
        """
        lr = lr_at(step, self._num_steps, self._optim)
        limit = self._optim.max_grad_norm
        if not self._optim.in_backward:
            self._update(list(self.slots.values()), lr, (grad_norm + 1e-6) / limit if limit and grad_norm > limit else None)
        self.num_updates += 1
        self.drop_gradients()
        return lr

    def drop_gradients(self) -> None:
        """Frees all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self._summed = False

    @torch.no_grad()
    def _update_now(self, slot: Slot, parameter: Tensor) -> None:
        """As soon as a gradient is complete: update, and free it."""
        assert self._lr is not None, "start_step was not called"
        if slot.piece is not None and slot.piece.partial_over is not None:
            _sum_over(slot.piece.partial_over, [slot.parameter])
        if _gradient(slot) is not None:
            self._norms += _norms([slot])
            self._update([slot], self._lr, None)
        parameter.grad = None

    def _update(self, slots: list[Slot], lr: float, divisor: float | None) -> None:
        """One update by gradients / divisor."""
        plain: dict[tuple[torch.device, float], list[Slot]] = {}
        for slot in slots:
            if _gradient(slot) is None:
                continue
            if slot.is_plain:
                plain.setdefault((slot.exp_avg.device, slot.weight_decay), []).append(slot)
            else:
                self._update_in_slices(slot, lr, divisor)
        for (_, decay), group in plain.items():
            weights = [local(slot.parameter).detach() for slot in group]
            grads = [_gradient(slot) for slot in group]
            self._kernel(weights, grads, [s.exp_avg for s in group], [s.exp_avg_sq for s in group], decay, lr, divisor)

    def _update_in_slices(self, slot: Slot, lr: float, divisor: float | None) -> None:
        """The same through fp32 copies of a few elements at a time, made where the moments live."""
        weight, grad = local(slot.parameter).detach().view(-1), _gradient(slot).reshape(-1)
        moments = [slot.exp_avg.view(-1), slot.exp_avg_sq.view(-1)]
        residual = None if slot.residual is None else slot.residual.view(-1)
        place = slot.exp_avg.device
        dice = torch.Generator(place).manual_seed(_rounding_seed(slot.name, self.num_updates))
        for low in range(0, weight.numel(), SLICE_ELEMENTS):
            cut = slice(low, low + SLICE_ELEMENTS)
            kept = weight[cut] if residual is None else replicas.join(weight[cut], residual[cut])
            master = kept.to(place, torch.float32)
            averages = [moment[cut].float() for moment in moments]
            decay = slot.weight_decay
            self._kernel([master], [grad[cut].to(place, torch.float32)], averages[:1], averages[1:], decay, lr, divisor)
            for moment, average in zip(moments, averages, strict=True):
                if moment.dtype != torch.float32:  # else it was updated in place
                    moment[cut] = replicas.round_at_random(average, dice)
            if residual is not None:
                weight[cut], residual[cut] = replicas.split(master.to(weight.device))
            elif weight.dtype == torch.bfloat16:
                weight[cut] = replicas.round_at_random(master, dice)
            elif master is not kept:
                weight[cut] = master

    def _kernel(
        self,
        weights: list[Tensor],
        grads: list[Any],
        first: list[Tensor],
        second: list[Tensor],
        decay: float,
        lr: float,
        divisor: float | None,
    ) -> None:
        """The kernel of torch.optim.AdamW(fused=True), which also divides the gradients on the way: no extra pass for clipping."""
        device = weights[0].device
        count = self._counts.setdefault(device, torch.zeros((), device=device)).fill_(self.num_updates + 1)
        torch._fused_adamw_(
            weights,
            grads,
            first,
            second,
            [],
            [count] * len(weights),
            lr=lr,
            beta1=self._optim.beta1,
            beta2=self._optim.beta2,
            weight_decay=decay,
            eps=self._optim.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None if divisor is None else torch.tensor(divisor, dtype=torch.float32, device=device),
            found_inf=None,
        )


def _gradient(slot: Slot) -> Tensor | None:
    """This device's part of the gradient; None where there is none or no element of it."""
    if slot.parameter.grad is None:
        return None
    part = local(slot.parameter.grad)
    return part if part.numel() else None


def _norms(slots: list[Slot]) -> list[tuple[Slot, Tensor]]:
    """L2 norm of each slot's gradient, by one kernel."""
    if not slots:
        return []
    return list(zip(slots, torch._foreach_norm([_gradient(slot) for slot in slots], dtype=torch.float32), strict=True))


def _sum_over(group: dist.ProcessGroup, parameters: list[nn.Parameter]) -> None:
    """Sums the parameters' gradients over a group in one message; a missing one counts as zero."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if len(grads) == 1 and grads[0].is_contiguous():
        dist.all_reduce(grads[0], group=group)
        return
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(flat.split([g.numel() for g in grads]), grads, strict=True)])


def _rounding_seed(name: str, num_updates: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{name}:{num_updates}".encode()).digest()[:7], "big")


def _refuse_in_backward(optim: Optim, layout: Layout) -> None:
    """Updating during backward leaves no moment at which all gradients of a step exist."""
    clashes = [
        (optim.max_grad_norm > 0, "optim.max_grad_norm", "set it to 0", "请设为 0"),
        (layout.num_micro > 1, "batch.micro_size", "make it so large that a step has one micro-batch", "请增大，使每步只有一个微批次"),
        (optim.nonfinite == "skip", "optim.nonfinite", "set it to stop", "请设为 stop"),
    ]
    for clash, where, fix_en, fix_zh in clashes:
        if clash:
            raise UserError(
                where,
                f"optim.in_backward updates weights before the whole gradient is known; {fix_en}, or turn in_backward off",
                f"optim.in_backward 在得到全部梯度之前就更新权重；{fix_zh}，或关闭 in_backward",
            )
