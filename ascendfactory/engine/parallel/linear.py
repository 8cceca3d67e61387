"""Linear modules that share an input or a reduced output, with LoRA inside (Hu et al. 2021, arXiv:2106.09685).

Shape letters: B rows, S positions of a row, s those of one device, T tokens (B·S), I inputs, O outputs, r rank of an adapter,
M hidden size, F what lies between the two linear modules of a block.

y = x Wᵀ + b + a · (x Aᵀ) Bᵀ is one node of the graph: the base and its adapter, and all modules that read the same input, share
one gathered x, one stored x and one summed input gradient. Where the input is shared out over the devices it is kept like
that and gathered again in the backward pass, while the input gradient is formed; its reduce-scatter runs beside the weight
gradients.

Two forms of the same product. Low: (x Aᵀ) Bᵀ, 2·T·r·(I + O) operations. Merged: x (W + a·B A)ᵀ, 2·r·I·O to form the weight, here
twice, since it is formed again in the backward pass and not kept. A step needs x Aᵀ (for B's gradient) and g B (for A's) in
either, so what merging saves is 2·T·r·O forward and 2·T·r·I backward, what it costs 4·r·I·O: it pays from T·(I + O) > 2·I·O. It is
taken in fp32 only: in bf16 an adapter much smaller than W would be rounded away in the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ascendfactory.engine.gradients import Targets
from ascendfactory.engine.parallel.collectives import (
    ALONE,
    Gathered,
    Parallel,
    Pending,
    fused_matmul_reduce,
    join_gathered,
    join_reduced,
    start_gather,
    start_reduce,
)


@dataclass
class Linear:
    """The tensors of one module as its forward pass finds them, and (in the Functions) what that pass left for the backward one."""

    weight: Tensor  # [O, I]
    bias: Tensor | None = None  # [O]
    a: Tensor | None = None  # [r, I]
    b: Tensor | None = None  # [O, r]
    scale: float = 1.0
    dropout: float = 0.0
    low: Tensor | None = None  # x Aᵀ, [.., r]
    kept: Tensor | None = None  # dropout's mask, bool [T, I]

    def is_merged(self, num_tokens: int) -> bool:
        """Whether the adapter is added to the weight (see the head of this file)."""
        return self.a is not None and not self.dropout and merging_pays(num_tokens, self.weight)

    def effective_weight(self, num_tokens: int) -> Tensor:
        """W, or W + a·B A where that is the cheaper form."""
        if not self.is_merged(num_tokens):
            return self.weight
        assert self.a is not None and self.b is not None
        return torch.addmm(self.weight, self.b, self.a, alpha=self.scale)

    def dropped(self, x_TI: Tensor) -> Tensor:
        """The adapter's input: x, or what dropout left of it."""
        return x_TI if self.kept is None else (x_TI * self.kept).div_(1 - self.dropout)


def merging_pays(num_tokens: int, weight_OI: Tensor) -> bool:
    """Whether W + a·B A costs fewer operations than the two products by A and B, and loses nothing by rounding."""
    num_out, num_in = weight_OI.shape
    return bool(weight_OI.dtype == torch.float32 and num_tokens * (num_in + num_out) > 2 * num_in * num_out)


def read_linear(module: Any) -> Linear:
    """The tensors of an nn.Linear, or of peft's wrapper round one."""
    base = getattr(module, "base_layer", module)
    if base is module or module.disable_adapters or module.merged:
        return Linear(base.weight, base.bias)
    rate = getattr(module.lora_dropout["default"], "p", 0.0) if module.training else 0.0
    a_rI, b_Or = module.lora_A["default"].weight, module.lora_B["default"].weight
    dtype = base.weight.dtype
    return Linear(base.weight, base.bias, a_rI.to(dtype), b_Or.to(dtype), module.scaling["default"], rate)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _multiply(linear: Linear, weight_OI: Tensor, x: Tensor, num_tokens: int, bias_O: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """x Wᵀ with the adapter (and a bias), and x Aᵀ where it was formed. x is a chunk of `num_tokens` in all."""
    x_TI = _flat(x)
    y_TO = x_TI @ weight_OI.T if bias_O is None else torch.addmm(bias_O, x_TI, weight_OI.T)
    if linear.a is None or linear.is_merged(num_tokens):
        return y_TO.view(*x.shape[:-1], -1), None
    assert linear.b is not None
    if linear.dropout:
        linear.kept = torch.rand_like(x_TI) >= linear.dropout
    low_Tr = linear.dropped(x_TI) @ linear.a.T
    y_TO.addmm_(low_Tr, linear.b.T, alpha=linear.scale)
    return y_TO.view(*x.shape[:-1], -1), low_Tr.view(*x.shape[:-1], -1)


def _input_gradient(linear: Linear, weight_OI: Tensor, grad: Tensor, low_grad: Tensor | None, merged: bool, into: Tensor | None) -> Tensor:
    """g W + a · (g B) A, [T, I], added to `into` if there is one. `low_grad` is a · g B."""
    grad_TO = _flat(grad)
    dx_TI = grad_TO @ weight_OI if into is None else into.addmm_(grad_TO, weight_OI)
    if low_grad is not None and not merged:
        assert linear.a is not None
        if linear.kept is None:
            dx_TI.addmm_(_flat(low_grad), linear.a)
        else:
            dx_TI.add_(linear.dropped(_flat(low_grad) @ linear.a))
    return dx_TI


def _weight_gradients(
    linear: Linear, targets: Targets, first: int, needs: tuple[bool, ...], grad: Tensor, low_grad: Tensor | None, x: Gathered
) -> list[Tensor | None]:
    """Gradients of W, A and B (none of the bias), or None for those that `targets` took or nothing asks for.

    Args:
        first: number of W among the targets; A and B follow.
    """
    need_weight, _, need_a, need_b = needs
    grad_TO = _flat(grad)
    result: list[Tensor | None] = [None, None, None, None]
    if need_weight:
        result[0] = targets.product(first, grad_TO, x.wait)
    if need_a and low_grad is not None:
        result[2] = targets.product(first + 1, _flat(low_grad), lambda: linear.dropped(x.wait()))
    if need_b:
        result[3] = targets.product(first + 2, grad_TO, partial(_low_input, linear, x), linear.scale)
    return result


def _low_input(linear: Linear, x: Gathered) -> Tensor:
    """x Aᵀ, [T, r]."""
    assert linear.a is not None
    return x.wait() @ linear.a.T if linear.low is None else _flat(linear.low)


def _low_gradient(linear: Linear, grad: Tensor) -> Tensor | None:
    """a · g B, [.., r]."""
    return None if linear.b is None else (grad @ linear.b).mul_(linear.scale)


def _save(ctx: Any, x: Tensor, linears: list[Linear]) -> None:
    tensors = [t for linear in linears for t in (linear.weight, linear.a, linear.b, linear.low, linear.kept)]
    ctx.save_for_backward(x, *tensors)
    ctx.rates = [(linear.scale, linear.dropout) for linear in linears]
    ctx.targets = Targets(*(t for linear in linears for t in (linear.weight, linear.a, linear.b)))


def _saved(ctx: Any) -> tuple[Tensor, list[Linear]]:
    x, *rest = ctx.saved_tensors
    linears = []
    for number, (scale, dropout) in enumerate(ctx.rates):
        weight_OI, a_rI, b_Or, low_Tr, kept_TI = rest[5 * number : 5 * number + 5]
        linears.append(Linear(weight_OI, None, a_rI, b_Or, scale, dropout, low_Tr, kept_TI))
    return x, linears


def _rebuild(rates: list[tuple[float, float]], tensors: tuple[Tensor | None, ...]) -> list[Linear]:
    linears = []
    for number, (scale, dropout) in enumerate(rates):
        weight_OI, bias_O, a_rI, b_Or = tensors[4 * number : 4 * number + 4]
        assert weight_OI is not None
        linears.append(Linear(weight_OI, bias_O, a_rI, b_Or, scale, dropout))
    return linears


class _Columns(torch.autograd.Function):
    """Modules that read one input: [B, s, M] → [B, S, O] of each."""

    @staticmethod
    def forward(
        ctx: Any, x_BsM: Tensor, parallel: Parallel, rates: list[tuple[float, float]], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        linears = _rebuild(rates, tensors)
        num_chunks = parallel.num_chunks(x_BsM.shape[1]) if parallel.sequence and not any(linear.dropout for linear in linears) else 1
        num_tokens = x_BsM.shape[:-1].numel() * (parallel.axis.size if parallel.sequence else 1)
        weights = [linear.effective_weight(num_tokens) for linear in linears]
        outs: list[list[Tensor]] = [[] for _ in linears]
        lows: list[list[Tensor]] = [[] for _ in linears]
        chunks = []
        for pending in start_gather(x_BsM, parallel, num_chunks):
            chunk = pending.wait()
            if num_chunks == 1:
                chunk = join_gathered([chunk], parallel)
            chunks.append(chunk)
            for linear, weight_OI, out, low in zip(linears, weights, outs, lows, strict=True):
                y, low_y = _multiply(linear, weight_OI, chunk, num_tokens, linear.bias)
                out.append(y)
                low += [] if low_y is None else [low_y]
        join = _first if num_chunks == 1 else join_gathered
        for linear, low in zip(linears, lows, strict=True):
            linear.low = join(low, parallel) if low else None
        ctx.parallel, ctx.num_chunks, ctx.gathered = parallel, num_chunks, not (parallel.sequence and parallel.regather)
        _save(ctx, join(chunks, parallel) if ctx.gathered else x_BsM, linears)
        return tuple(join(out, parallel) for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, linears = _saved(ctx)
        parallel, targets = ctx.parallel, ctx.targets
        needs = [ctx.needs_input_grad[3 + 4 * i : 7 + 4 * i] for i in range(len(linears))]
        whole = Gathered(x, None if ctx.gathered else parallel)
        if any(_reads_input_now(linear, need, targets, 3 * i) for i, (linear, need) in enumerate(zip(linears, needs, strict=True))):
            whole.start()
        lows = [_low_gradient(linear, grad) for linear, grad in zip(linears, grads, strict=True)]
        reducing = _start_input_gradient(linears, grads, lows, parallel, ctx.num_chunks) if ctx.needs_input_grad[0] else []
        results: list[Tensor | None] = []
        for number, (linear, need, grad, low) in enumerate(zip(linears, needs, grads, lows, strict=True)):
            parts = _weight_gradients(linear, targets, 3 * number, need, grad, low, whole)
            parts[1] = _flat(grad).sum(0) if need[1] else None
            results += parts
        return join_reduced(reducing) if reducing else None, None, None, *results


def _reads_input_now(linear: Linear, needs: tuple[bool, ...], targets: Targets, first: int) -> bool:
    """Whether a weight gradient that is not left for later needs the whole input."""
    wanted = (needs[0], needs[2], needs[3] and linear.low is None)
    return any(want and not targets.is_late(first + number) for number, want in enumerate(wanted))


def _first(parts: list[Tensor], _: Parallel) -> Tensor:
    return parts[0]


def _start_input_gradient(
    linears: list[Linear], grads: tuple[Tensor, ...], lows: list[Tensor | None], parallel: Parallel, num_chunks: int
) -> list[Pending]:
    """The summed gradient of a shared input, chunk by chunk; each travels while the next is multiplied."""
    num_tokens = grads[0].shape[:-1].numel()
    weights = [linear.effective_weight(num_tokens) for linear in linears]
    reducing = []
    for number in range(num_chunks):
        total: Tensor | None = None
        for linear, weight_OI, grad, low in zip(linears, weights, grads, lows, strict=True):
            part = grad if num_chunks == 1 else parallel.chunk(grad, number, num_chunks)
            low_part = low if low is None or num_chunks == 1 else parallel.chunk(low, number, num_chunks)
            total = _input_gradient(linear, weight_OI, part, low_part, linear.is_merged(num_tokens), total)
        assert total is not None
        dx = total.view(*part.shape[:-1], -1)
        reducing.append(start_reduce(parallel.chunk(dx, 0, 1) if num_chunks == 1 else dx, parallel))
    return reducing


class _Row(torch.autograd.Function):
    """A module whose inputs are shared out: [B, S, F] of this device → the sum over devices, [B, s, M]."""

    @staticmethod
    def forward(ctx: Any, x_BSF: Tensor, parallel: Parallel, rates: list[tuple[float, float]], *tensors: Tensor | None) -> Tensor:
        (linear,) = _rebuild(rates, tensors)
        num_chunks = 1 if linear.dropout else parallel.num_chunks(parallel.local_positions(x_BSF.shape[1]))
        num_tokens = x_BSF.shape[:-1].numel()
        weight_OI = linear.effective_weight(num_tokens)
        fused = fused_matmul_reduce(x_BSF, weight_OI, parallel) if linear.a is None or linear.is_merged(num_tokens) else None
        lows = []
        if fused is not None:
            y = fused
        else:
            reducing = []
            for number in range(num_chunks):
                part = x_BSF if num_chunks == 1 else parallel.chunk(x_BSF, number, num_chunks)
                out, low = _multiply(linear, weight_OI, part, num_tokens)
                lows += [] if low is None else [low]
                reducing.append(start_reduce(parallel.chunk(out, 0, 1) if num_chunks == 1 else out, parallel))
            y = join_reduced(reducing)
        linear.low = (lows[0] if num_chunks == 1 else join_gathered(lows, parallel)) if lows else None
        ctx.parallel, ctx.num_chunks = parallel, num_chunks if parallel.sequence else 1  # nothing travels backward otherwise
        _save(ctx, x_BSF, [linear])
        return y if linear.bias is None else y.add_(linear.bias)

    @staticmethod
    def backward(ctx: Any, grad_BsM: Tensor) -> tuple[Any, ...]:
        x_BSF, (linear,) = _saved(ctx)
        parallel: Parallel = ctx.parallel
        needs = ctx.needs_input_grad[3:7]
        num_tokens = x_BSF.shape[:-1].numel()
        weight_OI = linear.effective_weight(num_tokens)
        grads, lows, dxs = [], [], []
        for pending in start_gather(grad_BsM, parallel, ctx.num_chunks):
            grad = pending.wait()
            if ctx.num_chunks == 1:
                grad = join_gathered([grad], parallel)
            grads.append(grad)
            low = _low_gradient(linear, grad)
            lows += [] if low is None else [low]
            if ctx.needs_input_grad[0]:
                dx_TF = _input_gradient(linear, weight_OI, grad, low, linear.is_merged(num_tokens), None)
                dxs.append(dx_TF.view(*grad.shape[:-1], -1))
        join = _first if ctx.num_chunks == 1 else join_gathered
        low_BSr = join(lows, parallel) if lows else None
        results = _weight_gradients(linear, ctx.targets, 0, needs, join(grads, parallel), low_BSr, Gathered(x_BSF, None))
        results[1] = _flat(grad_BsM).sum(0) if needs[1] else None
        return join(dxs, parallel) if dxs else None, None, None, *results


def columns(x_BsM: Tensor, linears: list[Linear], parallel: Parallel = ALONE) -> list[Tensor]:
    """The outputs of modules that read the same input and whose outputs are shared out.

    Args:
        x_BsM: [B, s, M] under sequence parallelism, else the whole [B, S, M], equal on all devices.

    Returns:
        [B, S, O] of each module, O the outputs on this device.
    """
    rates = [(linear.scale, linear.dropout) for linear in linears]
    tensors = [t for linear in linears for t in (linear.weight, linear.bias, linear.a, linear.b)]
    return list(_Columns.apply(x_BsM, parallel, rates, *tensors))


def row(x_BSF: Tensor, linear: Linear, parallel: Parallel) -> Tensor:
    """The output of a module whose inputs are shared out, summed over the devices; the bias is added once, after the sum.

    Args:
        x_BSF: this device's inputs at all positions.

    Returns:
        [B, s, M] under sequence parallelism, else [B, S, M], equal on all devices.
    """
    rates = [(linear.scale, linear.dropout)]
    out: Tensor = _Row.apply(x_BSF, parallel, rates, linear.weight, linear.bias, linear.a, linear.b)
    return out


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """Forward of an nn.Linear, or of peft's LoRA module round one, on one device. Takes [..., I], gives [..., O]."""
    return columns(x, [read_linear(module)])[0]
