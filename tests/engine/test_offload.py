"""Activations that wait in host memory come back as they were, to the bit."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ascendfactory.core.recipe import Lora
from ascendfactory.engine.memory import offload
from ascendfactory.engine.memory.offload import apply_offload
from ascendfactory.engine.memory.recompute import apply_recompute
from tests.engine.decoders import decoder, forward, gradients
from tests.tiny import FAMILIES, write_model

pytestmark = pytest.mark.parallel

SMALL = 4096  # bytes; the rotary angles of the tiny models are larger, and stay because all layers share them


ALIVE: weakref.WeakSet[Any] = weakref.WeakSet()


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every offloaded storage is noted in ALIVE."""

    class Slot(offload._Slot):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            ALIVE.add(self)

    monkeypatch.setattr(offload, "_Slot", Slot)


def live_slots() -> list[Any]:
    return list(ALIVE)


def step(
    folder: str, recompute: Any, lora: Lora | None, is_offloaded: bool, order: tuple[int, ...] = (0, 1)
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two micro-batches in flight, whose backward passes come in the given order."""
    hf, layers = decoder(folder, lora)
    names = list(hf.state_dict())
    apply_recompute(layers, recompute)
    if is_offloaded:
        apply_offload(layers, SMALL)
    assert names == list(hf.state_dict())
    torch.manual_seed(11)
    losses = [forward(hf, seed) for seed in (1, 2)]
    for number in order:
        losses[number].backward()
    return [loss.detach() for loss in losses], gradients(hf)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", ["none", "norm", "selective", "full"])
def test_numbers_are_equal_to_the_bit(tiny_models: dict[str, str], family: str, recompute: str) -> None:
    lora = Lora(rank=4, dropout=0.2) if family in ("qwen3", "gemma3") else None
    losses, expected = step(tiny_models[family], recompute, lora, is_offloaded=False)
    found_losses, found = step(tiny_models[family], recompute, lora, is_offloaded=True)
    assert all(torch.equal(a, b) for a, b in zip(losses, found_losses, strict=True))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    assert not live_slots()


def test_micro_batches_may_end_in_any_order(tiny_models: dict[str, str]) -> None:
    _, expected = step(tiny_models["llama"], "none", None, is_offloaded=False, order=(1, 0))
    _, found = step(tiny_models["llama"], "none", None, is_offloaded=True, order=(1, 0))
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def on_device_bytes(slots: list[Any]) -> int:
    return sum(slot._on_device.nbytes for slot in slots if slot._on_device is not None)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_two_layers_are_on_the_device_at_most(tmp_path: Any, recompute: str) -> None:
    hf, layers = decoder(write_model(tmp_path, "llama", num_hidden_layers=5))
    apply_recompute(layers, recompute)
    apply_offload(layers, SMALL)
    seen: list[int] = []
    for layer in layers:
        layer.register_full_backward_hook(lambda *_: seen.append(on_device_bytes(live_slots())))
    loss = forward(hf)
    slots = live_slots()
    total = sum(slot._host.nbytes for slot in slots)
    assert on_device_bytes(slots) == total * 2 // 5
    del slots
    loss.backward()
    assert not live_slots()
    # while a layer computes, its own and those of the layer before are there
    assert max(seen) <= total * 2 // 5


class Layer(nn.Module):
    """Saves its input, a view of it, a weight, a small tensor and one that all layers are given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor, shared: Tensor | None = None) -> Tensor:
        assert shared is not None
        y = (x @ self.weight).sin() * shared
        return y + x[:, ::2].repeat(1, 2).exp() * 1e-3 * x.mean(-1, keepdim=True)


def test_what_stays_on_the_device() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(3))
    shared = torch.randn(128, 64)
    kept: list[Tensor] = []

    def run() -> Tensor:
        x = torch.ones(128, 64, requires_grad=True)
        for layer in layers:
            x = layer(x, shared=shared)
        return x.sum()

    run().backward()
    expected = [layer.weight.grad.clone() for layer in layers]
    layers.zero_grad()
    apply_offload(list(layers), SMALL)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = run()
    pointers = {t.untyped_storage().data_ptr() for t in kept}
    assert {layer.weight.untyped_storage().data_ptr() for layer in layers} <= pointers
    assert shared.untyped_storage().data_ptr() in pointers
    assert all(t.untyped_storage().nbytes() < SMALL for t in kept if t is not shared and t.shape != (64, 64) and t.shape != shared.shape)
    assert all(slot._host.nbytes >= SMALL for slot in live_slots())
    # one storage an input, whatever the number of its views: input, its product with the weight, their sine and exponential
    assert len(live_slots()) == len({slot._host.data_ptr() for slot in live_slots()})
    loss.backward()
    for layer, gradient in zip(layers, expected, strict=True):
        assert torch.equal(layer.weight.grad, gradient)


def test_evaluation_copies_nothing(tiny_models: dict[str, str]) -> None:
    hf, layers = decoder(tiny_models["llama"])
    apply_recompute(layers, "full")
    apply_offload(layers, SMALL)
    with torch.no_grad():
        forward(hf)
    assert not live_slots()
