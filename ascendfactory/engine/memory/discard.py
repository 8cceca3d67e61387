"""Results that nobody keeps: a norm's output and an MLP's product are computed again from their inputs, which are kept anyway.

Consumers of such a result save it for their own backward pass. Inside `discarding`, autograd gets a note of how to
compute it instead (Korthikanti et al. 2022, arXiv:2205.05198, is where the bytes are counted).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ascendfactory.engine.memory.store import Store


class _Recipe:
    """How a result is computed again; done once, the result lives as long as somebody has still to use it."""

    def __init__(self, function: Callable[..., Tensor], inputs: list[Any], store: Store) -> None:
        self._function, self._inputs, self._store = function, inputs, store
        self._value: Tensor | None = None

    def value(self) -> Tensor:
        if self._value is None:
            with torch.no_grad():
                self._value = self._function(*(self._store.unpack(packed) for packed in self._inputs))
            self._inputs = []
        return self._value


@dataclass(frozen=True)
class _View:
    """A saved tensor that lies in a discarded result."""

    recipe: _Recipe
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Discards:
    """The discarded results of one pass through a layer."""

    def __init__(self) -> None:
        self._store = Store.around()
        self.recipes: dict[StorageWeakRef, _Recipe] = {}

    def pack(self, tensor: Tensor) -> Any:
        recipe = self.recipes.get(StorageWeakRef(tensor.untyped_storage()))
        if recipe is None:
            return self._store.pack(tensor)
        return _View(recipe, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _View):
            return packed.recipe.value().as_strided(packed.shape, packed.stride, packed.offset)
        return self._store.unpack(packed)

    def add(self, result: Tensor, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        packed = [self.pack(tensor.detach()) for tensor in inputs]
        self.recipes[StorageWeakRef(result.untyped_storage())] = _Recipe(function, packed, Store(self.pack, self.unpack))


_DISCARDS: ContextVar[_Discards | None] = ContextVar("discards", default=None)


@contextmanager
def discarding() -> Iterator[None]:
    """Inside, `discard` takes effect."""
    discards = _Discards()
    token = _DISCARDS.set(discards)
    try:
        with torch.autograd.graph.saved_tensors_hooks(discards.pack, discards.unpack):
            yield
    finally:
        _DISCARDS.reset(token)
        discards.recipes.clear()


def discard(function: Callable[..., Tensor], *inputs: Tensor, recompute: Callable[..., Tensor] | None = None) -> Tensor:
    """function(*inputs); inside `discarding` whoever saves the result keeps only the inputs.

    Args:
        function: gives one new tensor of its own, deterministic; it may hold weights. What it saves itself is kept as ever.
        recompute: the same result from the same inputs without autograd; by default the function.
    """
    result = function(*inputs)
    discards = _DISCARDS.get()
    if discards is not None and torch.is_grad_enabled() and result.requires_grad:
        discards.add(result, recompute or function, inputs)
    return result
