"""Where the gradients of weights go: back to autograd, straight into `.grad`, or into a later pass of their own.

Accumulated gradients: where a weight already has a gradient, the product that forms the next one adds to it (one GEMM with β = 1)
instead of filling a temporary of the weight's size that is added after.

Split backward (Qi et al. 2024, arXiv:2401.10241): a pipeline sends a micro-batch's input gradient on at once, and forms the weight
gradients when it would otherwise wait. An autograd Function cannot see which of its gradients a pass is after, so both are one
ordinary backward pass here: inside `late_weights` the Functions leave the products of weight gradients to be formed afterwards, each
once. Whatever does not go through `Targets` (norms, biases, modules without a lean form) is complete after the first pass.

Shape letters: T tokens, I inputs, O outputs of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class LateWork:
    """Products of weight gradients that a backward pass left to be formed."""

    def __init__(self) -> None:
        self._left: list[Callable[[], None]] = []

    def add(self, form: Callable[[], None]) -> None:
        """Leaves one to be formed; what it holds lives until then."""
        self._left.append(form)

    def __len__(self) -> int:
        return len(self._left)

    @torch.no_grad()
    def run(self) -> None:
        """Forms all, in the order in which they were left (the same on tensor-parallel partners), and adds them to `.grad`."""
        left, self._left = self._left[::-1], []
        while left:
            left.pop()()


# autograd's threads do not see it: Functions read it in their forward pass
_LATE: ContextVar[LateWork | None] = ContextVar("late", default=None)


@contextmanager
def late_weights(work: LateWork) -> Iterator[None]:
    """Around a forward pass: its backward pass leaves weight gradients in `work`."""
    token = _LATE.set(work)
    try:
        yield
    finally:
        _LATE.reset(token)


class Targets:
    """The weights of one autograd Function call, as they stand in its forward pass, and where their gradients go.

    Args:
        weights: in the Function's own order; None where there is none.
    """

    def __init__(self, *weights: Tensor | None) -> None:
        # others are not a model's own (a weight's cast copy, a tensor whose gradient is asked of torch.autograd.grad)
        self._weights = [weight if isinstance(weight, nn.Parameter) and weight.requires_grad else None for weight in weights]
        self._late = _LATE.get()

    def is_late(self, number: int) -> bool:
        """Whether a gradient is formed in a later pass."""
        return self._late is not None and self._free(number) is not None

    def product(self, number: int, left_TO: Tensor, right_TI: Callable[[], Tensor], scale: float = 1.0) -> Tensor | None:
        """scale · leftᵀ · right, the gradient of a weight [O, I].

        Args:
            number: of the weight.
            right_TI: gives the right factor when it is wanted, which may be in a later pass.

        Returns:
            What the Function must return for this weight; None where the gradient has been taken care of.
        """
        weight = self._free(number)
        if self._late is not None and weight is not None:
            self._late.add(partial(_form, weight, left_TO, right_TI, scale))
            return None
        right = right_TI()
        if weight is not None and _adds_in_place(weight, left_TO):
            assert weight.grad is not None
            weight.grad.addmm_(left_TO.T, right, alpha=scale)
            return None
        product_OI = left_TO.T @ right
        return product_OI if scale == 1.0 else product_OI.mul_(scale)

    def whole(self, number: int, gradient: Tensor | None) -> Tensor | None:
        """A gradient as large as its weight: becomes `.grad`, or is added to it, so that the weight's other users add in place.

        Returns:
            As `product`.
        """
        weight = self._free(number)
        if gradient is None or weight is None or gradient.dtype != torch.float32:
            return gradient
        _put(weight, gradient)
        return None

    def rows(self, number: int, at_N: Tensor, gradient_NI: Tensor) -> bool:
        """Adds to the rows `at_N` of a weight's gradient, where there is one to add to; True if so."""
        weight = self._free(number)
        if weight is None or not _adds_in_place(weight, gradient_NI):
            return False
        assert weight.grad is not None
        weight.grad.index_add_(0, at_N, gradient_NI)
        return True

    def _free(self, number: int) -> Any:
        """The weight, if its gradient may be put in place by us: a parameter whose gradient nobody watches."""
        weight = self._weights[number]
        if weight is None or weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return None
        return weight


def _adds_in_place(weight: Tensor, factor: Tensor) -> bool:
    """Whether a product of such factors can be added to the gradient and lose nothing."""
    grad = weight.grad
    return grad is not None and type(grad) is Tensor and grad.dtype == factor.dtype == torch.float32 and grad.layout == torch.strided


def _put(weight: Tensor, gradient: Tensor) -> None:
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


def _form(weight: Tensor, left_TO: Tensor, right_TI: Callable[[], Tensor], scale: float) -> None:
    right = right_TI()
    if _adds_in_place(weight, left_TO):
        assert weight.grad is not None
        weight.grad.addmm_(left_TO.T, right, alpha=scale)
        return
    product_OI = left_TO.T @ right
    _put(weight, product_OI if scale == 1.0 else product_OI.mul_(scale))
