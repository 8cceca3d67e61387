"""A part of the forward pass that keeps its inputs and runs again when backward asks for what it saved.

Chen et al. 2016 (arXiv:1604.06174), by saved-tensor hooks: whatever autograd saves inside a region becomes a handle with a
number; the first handle that backward opens runs the region again and fills all of them. Against torch.utils.checkpoint:
the run can be started before its gradient comes (`Region.replay`), a backward split in two (zero-bubble pipelines) runs it
once, results named by `Selection` are kept so that only the rest is computed, and hooks around (offload, counters) see
what is kept. A replay repeats the collectives inside, in the same order and up to the same point on all ranks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ascendfactory.engine.memory.store import Store

# name → place of the first factor: addmm begins with what it adds
_MATRIX_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::linear": 0, "npu::npu_linear": 0}


class _Enough(Exception):
    """Ends a replay: all that the region saved is there again."""


class _Handle:
    """One saved tensor of a region; autograd holds it, so it dies with the node that needs it."""

    __slots__ = ("__weakref__", "meta", "region", "value")

    def __init__(self, region: Region, tensor: Tensor) -> None:
        self.region = region
        self.meta = (tensor.shape, tensor.dtype)
        self.value: Tensor | None = None


class Selection:
    """Results that a region keeps: products with certain weights, attention kernels, and units marked by `keep`.

    Args:
        weights: modules whose product with `.weight` is kept, in whatever function it happens.
    """

    def __init__(self, weights: list[Any]) -> None:
        self.weights = weights


class _Weights:
    """The storages of certain weights, and of weights formed from them (W + B A of a merged adapter)."""

    def __init__(self, weights: list[Any]) -> None:
        # FSDP puts whole weights in place just before forward, so they are looked up at every entry
        self._storages = {StorageWeakRef(module.weight.untyped_storage()) for module in weights}

    def is_kept(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether an operator's result is one that the selection names."""
        if name in _MATRIX_PRODUCTS:
            return any(self._has(a) for a in args[_MATRIX_PRODUCTS[name] :])
        return ("attention" in name or "flash_attn" in name) and "backward" not in name

    def follow(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        """Takes note of a weight formed from one of these."""
        if name == "aten::addmm" and self._has(args[0]):
            self._storages.add(StorageWeakRef(out.untyped_storage()))

    def _has(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and StorageWeakRef(tensor.untyped_storage()) in self._storages


class _Recorder(TorchDispatchMode):  # type: ignore[misc,unused-ignore]
    """Runs everything, and notes the results that a selection names."""

    def __init__(self, weights: _Weights) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self._weights = weights
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        self._weights.follow(name, args, out)
        if not self._paused and self._weights.is_kept(name, args):
            self.kept.append(_aliases(out))
        return out

    def unit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a unit; its result is kept, those inside it are not."""
        self._paused = True
        try:
            out = function(*args)
        finally:
            self._paused = False
        self.kept.append(_aliases(out))
        return out


class _Player(TorchDispatchMode):  # type: ignore[misc,unused-ignore]
    """Gives the kept results back instead of computing them.

    What was added to a result in place (an adapter's product, a bias) is in it already, so such operators do nothing here.
    """

    def __init__(self, weights: _Weights, kept: list[Any]) -> None:
        super().__init__()
        self._weights = weights
        self._kept = iter(kept)
        self._given: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if self._weights.is_kept(name, args):
            result = _aliases(next(self._kept))
            self._given.update(StorageWeakRef(t.untyped_storage()) for t in tree_leaves(result) if isinstance(t, Tensor))
            return result
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and StorageWeakRef(args[0].untyped_storage()) in self._given:
            return args[0]
        out = func(*args, **(kwargs or {}))
        self._weights.follow(name, args, out)
        return out

    def unit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The kept result of a unit."""
        return _aliases(next(self._kept))


def _aliases(out: Any) -> Any:
    """The same memory in new tensors: autograd marks those that it is given, and a marked one would hold its whole graph."""
    return tree_map_only(Tensor, Tensor.detach, out)


_SELECTING: ContextVar[_Recorder | _Player | None] = ContextVar("selecting", default=None)
_REPLAYING: ContextVar[Region | None] = ContextVar("replaying", default=None)
_COLLECTED: ContextVar[list[Region] | None] = ContextVar("collected", default=None)


class Region:
    """One call of a function whose saved tensors are computed again for backward."""

    def __init__(self, function: Callable[..., Any], selection: Selection | None = None) -> None:
        self._function: Callable[..., Any] | None = function
        self._selection = selection
        self._store = Store.around()
        self._handles: list[weakref.ref[_Handle]] = []
        self._num_replayed = 0

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result; from now on the region holds its inputs and what the selection keeps."""
        self._inputs = self._keep_inputs(args, kwargs)
        self._kept: list[Any] = []
        self._device = next((t.device for t in tree_flatten(args)[0] if isinstance(t, Tensor)), torch.device("cpu"))
        self._random = _random_states(self._device)
        assert self._function is not None
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            if self._selection is None:
                return self._function(*args, **kwargs)
            recorder = _Recorder(_Weights(self._selection.weights))
            with _set(_SELECTING, recorder), recorder:
                out = self._function(*args, **kwargs)
        self._kept = tree_map_only(Tensor, lambda t: _Packed(self._store, t), recorder.kept)
        return out

    def replay(self) -> None:
        """Computes what the region saved, now. Does nothing the second time.

        Under FSDP the weights must be whole: without resharding after forward, or inside backward.

        Raises:
            RuntimeError: the function saved other tensors than in forward.
        """
        function, self._function = self._function, None
        if function is None:
            return
        args, kwargs = self._inputs()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(_Enough))
            stack.enter_context(_random_restored(self._random, self._device))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_set(_REPLAYING, self))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._refill, _nothing))
            if self._selection is not None:
                kept = tree_map_only(_Packed, _Packed.unpack, self._kept)
                player = _Player(_Weights(self._selection.weights), kept)
                stack.enter_context(_set(_SELECTING, player))
                stack.enter_context(player)
            function(*args, **kwargs)
        del self._inputs, self._kept
        if self._num_replayed != len(self._handles):
            raise RuntimeError(f"recomputed {self._num_replayed} saved tensors, forward saved {len(self._handles)}")

    def needs_only(self, num_saved: int) -> bool:
        """In a replay: nothing is needed after the next `num_saved` saved tensors."""
        return self._num_replayed + num_saved >= len(self._handles)

    def _keep_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
        """Positional tensors and all that need a gradient go to the store; the others (positions, cos and sin) all layers share."""
        num_positional = len(tree_flatten(args)[0])
        leaves, spec = tree_flatten((args, kwargs))
        stored = [
            _Packed(self._store, leaf) if isinstance(leaf, Tensor) and (at < num_positional or leaf.requires_grad) else leaf
            for at, leaf in enumerate(leaves)
        ]

        def restore() -> tuple[tuple[Any, ...], dict[str, Any]]:
            found: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(
                [x.unpack() if isinstance(x, _Packed) else x for x in stored], spec
            )
            return found

        return restore

    def _pack(self, tensor: Tensor) -> _Handle:
        handle = _Handle(self, tensor)
        self._handles.append(weakref.ref(handle))
        return handle

    def _refill(self, tensor: Tensor) -> None:
        if self._num_replayed == len(self._handles):
            raise RuntimeError("the recomputation saved more tensors than forward did")
        handle = self._handles[self._num_replayed]()
        self._num_replayed += 1
        if handle is not None:
            if handle.meta != (tensor.shape, tensor.dtype):
                raise RuntimeError(f"recomputed a tensor of {tuple(tensor.shape)} {tensor.dtype}, forward saved {handle.meta}")
            handle.value = tensor.detach()
        if self._num_replayed == len(self._handles):
            raise _Enough


def _unpack(handle: _Handle) -> Tensor:
    handle.region.replay()
    assert handle.value is not None, "a tensor that backward needs was not computed again"
    return handle.value


def _nothing(_: Any) -> Tensor:
    raise RuntimeError("backward inside a region that is being recomputed")


class _Packed:
    """A tensor in a store; comes back detached, with the same wish for a gradient."""

    __slots__ = ("needs_grad", "packed", "store")

    def __init__(self, store: Store, tensor: Tensor) -> None:
        self.store, self.needs_grad = store, tensor.requires_grad
        self.packed = store.pack(tensor.detach())

    def unpack(self) -> Tensor:
        return self.store.unpack(self.packed).detach().requires_grad_(self.needs_grad)


@contextlib.contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _random_states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """States of the random numbers of the CPU and of an accelerator; both live on the host."""
    return torch.get_rng_state(), None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()


@contextlib.contextmanager
def _random_restored(states: tuple[Tensor, Tensor | None], device: torch.device) -> Iterator[None]:
    """Draws as after `states`, and puts the present states back at the end, so that dropout is the same in the replay."""
    before = _random_states(device)
    try:
        _set_random(states, device)
        yield
    finally:
        _set_random(before, device)


def _set_random(states: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.get_device_module(device).set_rng_state(states[1])


def checkpoint(function: Callable[..., Any], *args: Any, selection: Selection | None = None, **kwargs: Any) -> Any:
    """function(*args, **kwargs) as a region; without gradients a plain call.

    Args:
        selection: results to keep; None keeps the inputs alone.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    region = Region(function, selection)
    if (regions := _COLLECTED.get()) is not None:
        regions.append(region)
    return region.run(args, kwargs)


def keep(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args); under selective recomputation its result is kept whole, and the function does not run again.

    For the inside of an autograd Function's forward (nothing below is recorded by autograd): ring attention keeps its merged
    output this way, instead of one output a step, and sends nothing again.

    Args:
        function: gives a tensor or a tuple of tensors, and has no other effect that matters.
    """
    selecting = _SELECTING.get()
    return function(*args) if selecting is None else selecting.unit(function, args)


def is_result_needed(num_saved: int) -> bool:
    """Whether an autograd Function must compute its result, or only the `num_saved` tensors that it is about to save.

    False in a replay that ends with this Function: the last product of a layer is saved nowhere.
    """
    region = _REPLAYING.get()
    return region is None or not region.needs_only(num_saved)


@contextlib.contextmanager
def collect() -> Iterator[list[Region]]:
    """The regions that are entered inside, in order: a pipeline replays them while it waits for a gradient."""
    regions: list[Region] = []
    with _set(_COLLECTED, regions):
        yield regions
