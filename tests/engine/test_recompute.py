"""Recomputation changes bytes and time, never numbers."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ascendfactory.core.recipe import Lora
from ascendfactory.engine.memory.recompute import apply_recompute, kept_products
from ascendfactory.engine.memory.region import Selection, checkpoint, collect, is_result_needed, keep
from tests.engine.decoders import decoder, documents, forward, gradients
from tests.pool import Pool
from tests.tiny import FAMILIES

pytestmark = pytest.mark.parallel

LORAS = {"full": None, "lora": Lora(rank=4), "dropout": Lora(rank=4, dropout=0.2)}


def step(folder: str, recompute: Any, tuning: str, num_layers: int = 0) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    hf, layers = decoder(folder, LORAS[tuning])
    names = [name for name, _ in hf.named_parameters()]
    apply_recompute(layers, recompute, num_layers)
    assert names == [name for name, _ in hf.named_parameters()]
    torch.manual_seed(11)
    loss = forward(hf)
    loss.backward()
    return loss.detach(), gradients(hf), names


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tuning", LORAS)
def test_every_setting_gives_the_same_gradients(tiny_models: dict[str, str], family: str, tuning: str) -> None:
    loss, expected, _ = step(tiny_models[family], "none", tuning)
    settings = [("norm", 0), ("selective", 0), ("full", 0), ("full", 2)]
    for recompute, num_layers in settings:
        found_loss, found, _ = step(tiny_models[family], recompute, tuning, num_layers)
        assert torch.equal(found_loss, loss)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9, msg=f"{recompute} {num_layers} {name}")


def test_no_tensor_survives_the_backward_pass(tiny_models: dict[str, str]) -> None:
    for recompute in ("norm", "selective", "full"):
        hf, layers = decoder(tiny_models["qwen3"])
        apply_recompute(layers, recompute)
        with collect() as regions:
            loss = forward(hf)
        loss.backward()
        watched = [weakref.ref(region) for region in regions]
        regions.clear()
        gc.collect()
        assert all(ref() is None for ref in watched)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_region_may_run_before_its_gradient_comes(tiny_models: dict[str, str], recompute: Any) -> None:
    _, expected, _ = step(tiny_models["qwen3"], "none", "dropout")
    hf, layers = decoder(tiny_models["qwen3"], LORAS["dropout"])
    calls = count_calls(layers)
    apply_recompute(layers, recompute)
    torch.manual_seed(11)
    with collect() as regions:
        loss = forward(hf)
    assert len(regions) == len(layers) == calls[0]
    state = torch.get_rng_state()
    for region in reversed(regions):
        region.replay()
    assert torch.equal(state, torch.get_rng_state())
    assert calls[0] == 2 * len(layers)
    loss.backward()
    assert calls[0] == 2 * len(layers)
    for name, gradient in gradients(hf).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-9)


def count_calls(layers: list[Any]) -> list[int]:
    calls = [0]
    for layer in layers:
        inner = layer.forward

        def counted(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
            calls[0] += 1
            return inner(*args, **kwargs)

        layer.forward = counted
    return calls


@pytest.mark.parametrize("recompute", ["norm", "selective", "full"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_backward_pass_in_two_parts_computes_once(tiny_models: dict[str, str], family: str, recompute: Any) -> None:
    """As zero-bubble pipelines do: gradients of the inputs first, those of the weights later."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    def halves(recompute: Any) -> tuple[Tensor, dict[str, Tensor], int, int]:
        hf, layers = decoder(tiny_models[family])
        calls = count_calls(layers)
        apply_recompute(layers, recompute)
        body = hf.get_decoder()
        x = torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
        cos_sin = (
            body.rotary_emb(x, torch.arange(128)[None])
            if family == "llama"
            else body.rotary_emb(x, torch.arange(128)[None], "sliding_attention")
        )
        hidden = x
        for layer in layers:
            hidden = layer(hidden, position_embeddings=cos_sin, **documents())
        weights = [p for layer in layers for p in layer.parameters()]
        grad = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(4))
        (dx,), groups = stage_backward_input([hidden], [grad], [x], iter(weights))
        assert dx is not None
        stage_backward_weight(iter(weights), groups)
        names = {name: p.grad for i, layer in enumerate(layers) for name, p in ((f"{i}.{n}", q) for n, q in layer.named_parameters())}
        return dx, {name: grad for name, grad in names.items() if grad is not None}, calls[0], len(layers)

    expected_dx, expected, _, _ = halves("none")
    dx, found, num_calls, num_layers = halves(recompute)
    torch.testing.assert_close(dx, expected_dx, rtol=1e-6, atol=1e-8)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-7, msg=name)
    assert num_calls == (1 if recompute == "norm" else 2) * num_layers


def test_which_products_are_kept(tiny_models: dict[str, str]) -> None:
    def kept(family: str, lora: Lora | None = None) -> list[str]:
        _, layers = decoder(tiny_models[family], lora)
        names = {module: name for name, module in layers[0].named_modules()}
        return [names[module].removesuffix(".base_layer").split(".")[-1] for module in kept_products(layers[0])]

    assert kept("llama") == kept("llama", Lora(rank=4)) == ["q_proj", "v_proj", "gate_proj"]
    assert kept("gemma3") == ["q_proj", "v_proj", "gate_proj", "down_proj"]  # a norm reads the last one
    assert kept("glm4") == ["q_proj", "v_proj", "gate_up_proj"]


class _Doubled(torch.autograd.Function):
    """2·x, formed by a unit that is counted."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        def unit(x: Tensor) -> tuple[Tensor, Tensor]:
            _Doubled.runs += 1
            return x @ weight + x, x.sum()

        doubled, total = keep(unit, x)
        ctx.save_for_backward(doubled, total)
        return doubled.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        doubled, total = ctx.saved_tensors
        return grad * doubled * total, None


def test_a_kept_unit_runs_once() -> None:
    layer = nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return layer(_Doubled.apply(x.sin(), torch.eye(8))).cos()

    (expected,) = torch.autograd.grad(function(x).sum(), x)
    _Doubled.runs = 0
    (found,) = torch.autograd.grad(checkpoint(function, x, selection=Selection([layer])).sum(), x)
    assert torch.equal(found, expected)
    assert _Doubled.runs == 1
    (found,) = torch.autograd.grad(checkpoint(function, x).sum(), x)
    assert torch.equal(found, expected)
    assert _Doubled.runs == 3


class _Last(torch.autograd.Function):
    """exp(x), which it does not save; notes whether its result was asked for."""

    asked: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        _Last.asked.append(is_result_needed(1))
        return x.exp() if _Last.asked[-1] else torch.full_like(x, float("nan"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].exp()


def test_the_last_result_of_a_replay_is_not_asked_for() -> None:
    x = torch.randn(4, requires_grad=True)
    cases = [(lambda x: _Last.apply(x) + x, [True, False]), (lambda x: _Last.apply(x).sin(), [True, True])]
    for function, expected in cases:
        _Last.asked.clear()
        (found,) = torch.autograd.grad(checkpoint(function, x).sum(), x)
        assert _Last.asked == expected
        assert torch.allclose(found, torch.autograd.grad(function(x).sum(), x)[0])


def test_a_function_that_changes_is_found_out() -> None:
    calls = [0]

    def fickle(x: Tensor) -> Tensor:
        calls[0] += 1
        return x.sin().exp().cos() if calls[0] == 1 else x.sin()

    out = checkpoint(fickle, torch.randn(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="recomputed 1 saved tensors, forward saved 3"):
        out.sum().backward()


def sharded_step(folder: str, recompute: Any, tuning: str) -> dict[str, Tensor]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    hf, layers = decoder(folder, LORAS[tuning])
    apply_recompute(layers, recompute)
    base = hf.get_base_model() if tuning != "full" else hf
    for module in [*layers, base.get_decoder()]:
        fully_shard(module, mesh=mesh, reshard_after_forward=module is not base.get_decoder())
    loss = forward(hf, seed=1 + dist.get_rank())
    loss.backward()
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in gradients(hf).items()}


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_sharded_layers_give_the_same_gradients(pool: Pool, tiny_models: dict[str, str], tuning: str) -> None:
    expected = pool.run(sharded_step, 2, tiny_models["qwen3"], "none", tuning)
    for recompute in ("norm", "selective", "full"):
        for found, wanted in zip(pool.run(sharded_step, 2, tiny_models["qwen3"], recompute, tuning), expected, strict=True):
            assert found.keys() == wanted.keys()
            for name, gradient in wanted.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9, msg=f"{recompute} {name}")
