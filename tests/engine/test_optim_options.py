"""Where and how finely moments and weights are kept: bf16, host memory, two halves, updates in backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Layout
from ascendfactory.core.recipe import Optim, Warmup
from ascendfactory.engine import optim as optim_module
from ascendfactory.engine.checkpoint import Checkpoints, load_run
from ascendfactory.engine.mesh import Mesh, make_mesh
from ascendfactory.engine.optim import Optimizer, lr_at
from ascendfactory.engine.parallel.fsdp import apply_fsdp
from ascendfactory.engine.state import tensor_state
from tests.engine.toy import LAYOUTS, OPTIM, SHAPES, build, numbers, train
from tests.pool import Pool

ALONE = Mesh(torch.device("cpu"))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"optim_dtype": "bfloat16"},
    {"offload_optimizer": True},
    {"reuse_params": True},
    {"optim_dtype": "bfloat16", "offload_optimizer": True, "reuse_params": True},
]


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def trained(num_steps: int, **options: Any) -> tuple[nn.Module, Optimizer]:
    net, optimizer, _ = build(LAYOUTS["one"], **options)
    train(net, optimizer, range(num_steps))
    return net, optimizer


def test_host_memory_gives_the_same_bits() -> None:
    for dtype in ("float32", "bfloat16"):
        right, _ = trained(3, optim_dtype=dtype)
        net, optimizer = trained(3, optim_dtype=dtype, offload_optimizer=True)
        assert all(torch.equal(tensor, weights(right)[name]) for name, tensor in weights(net).items())
        assert {t.device.type for t in optimizer.moments().values()} == {"cpu"}


@pytest.mark.parametrize("elements", [1, 7, 10**6])
def test_slices_give_the_same_bits_whatever_their_size(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """The path of other devices, forced: no slot is plain, and copies are made of a few elements at a time."""
    right, _ = trained(3)
    monkeypatch.setattr(optim_module, "SLICE_ELEMENTS", elements)
    monkeypatch.setattr(optim_module.Slot, "is_plain", False)
    net, _ = trained(3)
    for name, tensor in weights(net).items():
        torch.testing.assert_close(tensor, weights(right)[name], rtol=1e-6, atol=1e-7)


def test_halves_train_like_fp32_masters() -> None:
    """Gradients are those of bf16 weights here; given the same ones, the joined masters are those of fp32 training."""
    net, optimizer = trained(3, reuse_params=True)
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    expected = by_hand({name: numbers("weight", name) for name in SHAPES}, 3, lambda gradient: gradient.bfloat16().float())
    for slot in optimizer.slots.values():
        master = slot.master()
        assert master is not None
        torch.testing.assert_close(master, expected[slot.name], rtol=1e-5, atol=1e-6)


def by_hand(start: dict[str, Tensor], num_steps: int, rounded: Any) -> dict[str, Tensor]:
    """torch.optim.AdamW in fp32 on the toy's gradients."""
    parameters = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    adamw = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in parameters.values()],
        lr=0.05,
        betas=(0.9, 0.95),
        foreach=False,
    )
    for step in range(num_steps):
        for name, parameter in parameters.items():
            parameter.grad = rounded(numbers(f"gradient {step}", name))
        nn.utils.clip_grad_norm_(list(parameters.values()), OPTIM.max_grad_norm)
        adamw.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def test_bf16_moments_stay_near_fp32_ones() -> None:
    right, precise = trained(6)
    net, optimizer = trained(6, optim_dtype="bfloat16")
    for name, moment in optimizer.moments().items():
        assert moment.dtype == torch.bfloat16
        torch.testing.assert_close(moment.float(), precise.moments()[name], rtol=0.05, atol=0.01)
    for name, tensor in weights(net).items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, weights(right)[name], rtol=0.02, atol=0.02)


def test_updates_too_small_for_bf16_are_not_lost() -> None:
    """A bf16 weight of 1 under 400 updates of 1e-4, a fortieth of its spacing: rounding to nearest would leave it where it is."""
    net = nn.Module()
    net.weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    steady = Optim(lr=1e-4, schedule="constant", warmup=Warmup(amount=0.0, unit="steps"), max_grad_norm=0.0)
    optimizer = Optimizer(net, steady, Layout(optim_dtype="bfloat16"), 400, ALONE)
    for step in range(400):
        net.weight.grad = torch.ones(64, 64, dtype=torch.bfloat16)
        optimizer.step(step, 1.0)
    assert net.weight.float().mean().item() == pytest.approx(1 - 0.04, abs=2e-3)


@pytest.mark.parametrize("options", OPTIONS)
def test_resume_is_exact_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    whole_net, whole_optimizer = trained(5, **options)
    _, optimizer = trained(3, **options)
    checkpoints = Checkpoints(tmp_path, ALONE, keep=1, asynchronous=False)
    checkpoints.save(tensor_state(optimizer, ALONE), {"step": 3})
    again, later, _ = build(LAYOUTS["one"], **options)
    load_run(tmp_path / "step-00000003", later, ALONE)
    later.set_num_updates(3)
    train(again, later, range(3, 5))
    assert all(torch.equal(tensor, weights(whole_net)[name]) for name, tensor in weights(again).items())
    assert all(torch.equal(tensor, whole_optimizer.moments()[name]) for name, tensor in later.moments().items())


def test_a_checkpoint_of_halves_goes_on_in_fp32(tmp_path: Path) -> None:
    _, optimizer = trained(3, reuse_params=True)
    Checkpoints(tmp_path, ALONE, keep=1, asynchronous=True).save(tensor_state(optimizer, ALONE), {"step": 3}, last=True)
    plain, plain_optimizer, _ = build(LAYOUTS["one"])
    load_run(tmp_path / "step-00000003", plain_optimizer, ALONE)
    for slot in optimizer.slots.values():
        assert torch.equal(slot.master(), dict(plain.named_parameters())[slot.name])


def in_backward(size: int) -> tuple[list[float], dict[str, Tensor], bool]:
    """Three steps of a two-layer net, whose weights are updated during backward."""
    layout = Layout(dp=size)
    mesh = make_mesh(layout, "cpu", sharded=size > 1)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    if mesh.fsdp is not None:
        apply_fsdp(net, [[net[0], net[2]]], mesh.fsdp, layout, torch.float32)
    recipe = Optim(lr=0.05, max_grad_norm=0.0, in_backward=True, weight_decay=0.1)
    optimizer = Optimizer(net, recipe, layout, 3, mesh)
    norms, freed = [], True
    for step in range(3):
        optimizer.start_step(step)
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).chunk(size)[mesh.rank]
        net(rows).square().sum().backward()
        freed &= all(p.grad is None for p in net.parameters())
        norms.append(optimizer.gradient_norm(0.0)[1])
        assert optimizer.step(step, norms[-1]) == lr_at(step, 3, recipe)
    return norms, {n: (p.full_tensor() if size > 1 else p).detach() for n, p in net.named_parameters()}, freed


def test_updates_in_backward_equal_those_after_it(pool: Pool) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = Optimizer(net, Optim(lr=0.05, max_grad_norm=0.0, weight_decay=0.1), Layout(), 3, ALONE)
    right = []
    for step in range(3):
        net(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        right.append(optimizer.gradient_norm(0.0)[1])
        optimizer.step(step, right[-1])
    for norms, found, freed in [in_backward(1), *pool.run(in_backward, 2, 2)]:
        assert freed
        assert norms == pytest.approx(right, rel=1e-6)
        for name, tensor in weights(net).items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "layout", "where"),
    [
        ({}, Layout(), "optim.max_grad_norm"),
        ({"max_grad_norm": 0.0}, Layout(num_micro=2), "batch.micro_size"),
        ({"max_grad_norm": 0.0, "nonfinite": "skip"}, Layout(), "optim.nonfinite"),
    ],
)
def test_what_needs_all_gradients_is_refused(changes: dict[str, Any], layout: Layout, where: str) -> None:
    with pytest.raises(UserError) as caught:
        Optimizer(nn.Linear(2, 2), Optim(in_backward=True, **changes), layout, 1, ALONE)
    assert caught.value.where == where
    assert "in_backward" in caught.value.zh
