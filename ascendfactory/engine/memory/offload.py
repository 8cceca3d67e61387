"""Saved activations wait in host memory between a layer's forward and backward passes ("swap attention").

Rajbhandari et al. 2021 (arXiv:2104.07857, section 5.2) is one source of the idea. A layer's saved tensors are copied out by a stream of
their own while the next layer computes; they leave the device when the layer after that begins, so two layers are there at
most. In backward the layer before is fetched while one computes. On a CPU the same happens without streams. Numbers are equal to the bit:
whole storages are copied as bytes, and saved tensors come back as the same views of them.

What stays: weights and buffers, small tensors, tensors that all layers share (rotary angles). With recomputation (which must be
applied first) a layer's input and what its selection keeps are what is copied.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ascendfactory.engine.memory.store import Store

SMALLEST_BYTES = 2**20  # below, a copy costs more than it frees
LAYERS_ON_DEVICE = 2  # whose tensors may wait for their copy to end


class Stream:
    """A queue of copies beside the computation; on a CPU, copies are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = self._module.Stream(device=device) if self._module else None

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Starts a copy of what the computation so far has written.

        Returns:
            an event for `wait`.
        """
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """What is computed from now on comes after the copy."""
        if event is not None:
            self._module.current_stream().wait_event(event)


class _Slot:
    """One storage on its way out, in host memory, or back. Handles hold it: it goes with the last of them."""

    def __init__(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        self._stream = stream
        self._on_device: Tensor | None = _as_bytes(storage)
        self._host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
        self._device = storage.device
        self._event = stream.copy(self._host, self._on_device)

    def leave(self) -> None:
        """Frees the device's memory; the next computation waits for the copy, so that it may write there."""
        if self._on_device is not None:
            self._stream.wait(self._event)
            self._on_device, self._event = None, None

    def fetch(self) -> None:
        """Starts the copy back, unless the tensor is still there."""
        if self._on_device is None:
            self._on_device = torch.empty_like(self._host, device=self._device, pin_memory=False)
            self._event = self._stream.copy(self._on_device, self._host)

    def storage(self) -> torch.UntypedStorage:
        """On the device, ready for use."""
        self.fetch()
        assert self._on_device is not None
        self._stream.wait(self._event)
        return self._on_device.untyped_storage()

    def __del__(self) -> None:
        # fetched for nothing: nobody may be given this memory while the copy still writes to it
        self._stream.wait(getattr(self, "_event", None))


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass(frozen=True)
class _Handle:
    """A saved tensor: a view of an offloaded storage."""

    parcel: _Parcel
    slot: _Slot
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Parcel:
    """What one pass through one layer saves.

    Args:
        before: of the layer before, in the same pass.
        staying: storages that are not to be copied.
    """

    def __init__(
        self, stream: Stream, smallest_bytes: int, before: _Parcel | None, staying: set[StorageWeakRef], device: torch.device
    ) -> None:
        self._stream, self._smallest_bytes, self._device = stream, smallest_bytes, device
        self._before = before
        self._staying = staying
        self._store = Store.around()
        self._slots: dict[StorageWeakRef, weakref.ref[_Slot]] = {}
        self._is_opened = False

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage)
        if tensor.device != self._device or storage.nbytes() < self._smallest_bytes or key in self._staying or type(tensor) not in _PLAIN:
            return self._store.pack(tensor)
        known = self._slots.get(key)
        slot = known() if known is not None else None
        if slot is None:
            slot = _Slot(storage, self._stream)
            self._slots[key] = weakref.ref(slot)
        return _Handle(self, slot, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Handle):
            return self._store.unpack(packed)
        self._open()
        empty = torch.empty(0, dtype=packed.dtype, device=self._device)
        return empty.set_(packed.slot.storage(), packed.offset, packed.shape, packed.stride)

    def leave(self) -> None:
        """Takes off the device what has been copied; no storage that comes later is taken for one of these."""
        for slot in self._alive():
            slot.leave()

    def fetch(self) -> None:
        """Starts all copies back."""
        for slot in self._alive():
            slot.fetch()

    def _open(self) -> None:
        """The first to ask in backward: everything of this layer comes back, then that of the layer before."""
        if not self._is_opened:
            self._is_opened = True
            self.fetch()
            if self._before is not None:
                self._before.fetch()
                self._before = None

    def _alive(self) -> list[_Slot]:
        return [slot for ref in self._slots.values() if (slot := ref()) is not None]


_PLAIN = (Tensor, nn.Parameter)


class _Track:
    """The layers of a stage, one after another, pass after pass."""

    def __init__(self, smallest_bytes: int) -> None:
        self._smallest_bytes = smallest_bytes
        self._stream: Stream | None = None
        self._last: weakref.ref[_Parcel] | None = None
        self._leaving: deque[weakref.ref[_Parcel]] = deque()

    def enter(
        self, layer: nn.Module, is_first: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> contextlib.AbstractContextManager[Any]:
        """Saved-tensor hooks for a pass through a layer; what lies too many layers back leaves the device."""
        while len(self._leaving) >= LAYERS_ON_DEVICE:
            if (parcel := self._leaving.popleft()()) is not None:
                parcel.leave()
        device = next(t.device for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        self._stream = self._stream or Stream(device)
        # weights as they stand now: FSDP has just put whole ones in place
        staying = [
            *layer.parameters(),
            *layer.buffers(),
            *(t for t in tree_leaves(kwargs) if isinstance(t, Tensor) and not t.requires_grad),
        ]
        before = None if is_first or self._last is None else self._last()
        parcel = _Parcel(self._stream, self._smallest_bytes, before, {StorageWeakRef(t.untyped_storage()) for t in staying}, device)
        self._last = weakref.ref(parcel)
        self._leaving.append(self._last)
        hooks: contextlib.AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(parcel.pack, parcel.unpack)
        return hooks


def apply_offload(layers: Sequence[nn.Module], smallest_bytes: int = SMALLEST_BYTES) -> None:
    """Lets the layers' saved activations wait in host memory. Call after `apply_recompute`, before FSDP.

    Args:
        layers: decoder layers of a stage (of each chunk by itself), in the order in which they run.
        smallest_bytes: smaller storages stay on the device.
    """
    track = _Track(smallest_bytes)
    for number, layer in enumerate(layers):
        _offload_layer(layer, track, number == 0)


def _offload_layer(layer: Any, track: _Track, is_first: bool) -> None:
    inner = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        with track.enter(layer, is_first, args, kwargs):
            return inner(*args, **kwargs)

    layer.forward = forward
