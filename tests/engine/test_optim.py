"""Schedule, AdamW, gradient norm and clipping, against formulas and torch's own."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ascendfactory.core.plan import Layout
from ascendfactory.core.recipe import Optim, Warmup
from ascendfactory.engine.mesh import Mesh, make_mesh
from ascendfactory.engine.optim import Optimizer, lr_at, warmup_steps
from ascendfactory.engine.parallel.fsdp import apply_fsdp
from ascendfactory.engine.parallel.pieces import local
from tests.pool import Pool

ALONE = Mesh(torch.device("cpu"))
SCHEDULES = ("cosine", "linear", "constant", "wsd")


def warmup(amount: float, unit: Any = "steps") -> Warmup:
    return Warmup(amount=float(amount), unit=unit)


@settings(deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 300),
    st.integers(0, 300),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_schedule_rises_then_never_rises_again(schedule: Any, num_steps: int, warm: int, least: float, decay: float) -> None:
    optim = Optim(lr=0.5, schedule=schedule, warmup=warmup(warm), min_lr_ratio=least, decay_fraction=decay)
    rates = [lr_at(step, num_steps, optim) for step in range(num_steps)]
    assert all(0 <= rate <= 0.5 for rate in rates)
    rising, falling = rates[: min(warm, num_steps)], rates[min(warm, num_steps) :]
    assert all(a < b for a, b in pairwise(rising))
    assert all(a >= b - 1e-15 for a, b in pairwise(falling))
    assert all(rate >= 0.5 * least - 1e-12 for rate in falling)
    if rising:
        assert rates[0] == pytest.approx(0.5 / warm)
    if falling and schedule != "constant" and not (schedule == "wsd" and decay == 0):
        assert lr_at(num_steps, num_steps, optim) == pytest.approx(0.5 * least, abs=1e-12)  # where the next update would be
    if falling and least < 1:
        assert rates[-1] > 0.5 * least  # the last update still counts
    if schedule == "constant":
        assert set(falling) <= {0.5}


def test_cosine_and_linear_follow_their_formulas() -> None:
    optim = Optim(lr=2.0, warmup=warmup(4), min_lr_ratio=0.1)
    for step in range(4, 24):
        share = (step - 4) / 20
        assert lr_at(step, 24, optim) == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2))
        assert lr_at(step, 24, optim.model_copy(update={"schedule": "linear"})) == pytest.approx(2.0 * (1 - 0.9 * share))


def test_wsd_is_flat_until_the_decay() -> None:
    optim = Optim(lr=1.0, schedule="wsd", warmup=warmup(5), decay_fraction=0.2)
    rates = [lr_at(step, 50, optim) for step in range(50)]
    assert rates[4:41] == [1.0] * 37
    assert rates[41:] == pytest.approx([1 - k / 10 for k in range(1, 10)])


@pytest.mark.parametrize(
    ("amount", "unit", "expected"), [(0.03, "fraction", 3), (0.031, "fraction", 4), (0.0, "fraction", 0), (7, "steps", 7)]
)
def test_warmup_steps(amount: float, unit: Any, expected: int) -> None:
    assert warmup_steps(Optim(warmup=warmup(amount, unit)), 100) == expected


class Net(nn.Module):
    """Matrices, a norm weight and a bias; one frozen layer."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm, self.second = nn.Linear(size, size), nn.LayerNorm(size), nn.Linear(size, 3, bias=False)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.second(self.norm(self.first(x).relu()))).square().sum()


def inputs(step: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(step)) * 3


def test_weight_decay_is_for_matrices_only() -> None:
    optim = Optim(lr=0.1, warmup=warmup(0), schedule="constant", weight_decay=0.5)
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = Optimizer(net, optim, Layout(), 10, ALONE)
    assert set(optimizer.parameters) == {"first.weight", "first.bias", "norm.weight", "norm.bias", "second.weight"}
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step(0, 0.0)
    for name, parameter in net.named_parameters():
        factor = 0.95 if name in ("first.weight", "second.weight") else 1.0
        torch.testing.assert_close(parameter, before[name] * factor)


def test_equals_torch_adamw_with_clip_grad_norm() -> None:
    """Ten steps with a schedule and clipping, beside torch.optim.AdamW (not fused) and torch's clipping."""
    optim = Optim(lr=0.05, warmup=warmup(3), weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-6, max_grad_norm=0.7)
    mine, theirs = Net(), Net()
    optimizer = Optimizer(mine, optim, Layout(), 10, ALONE)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim == 2], "weight_decay": 0.1}, {"params": [p for p in trained if p.ndim == 1]}]
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0, foreach=False, fused=False)
    for step in range(10):
        loss = mine(inputs(step))
        loss.backward()
        total, norm = optimizer.gradient_norm(loss.item())
        used = optimizer.step(step, norm)
        assert all(p.grad is None for p in mine.parameters())
        right = theirs(inputs(step))
        right.backward()
        norm_right = nn.utils.clip_grad_norm_(trained, 0.7)
        for group in adamw.param_groups:
            group["lr"] = lr_at(step, 10, optim)
        adamw.step()
        adamw.zero_grad()
        assert (used, total) == (lr_at(step, 10, optim), pytest.approx(right.item(), rel=1e-5))
        assert norm == pytest.approx(norm_right.item(), rel=1e-5)
        assert norm > 0.7  # clipping is at work
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("limit", "factor"), [(0.0, 1.0), (100.0, 1.0), (2.0, 0.5)])
def test_clipping_scales_only_above_the_limit(limit: float, factor: float) -> None:
    """With beta2 = beta1 = 0 the moments after a step are the clipped gradient and its square."""
    net = nn.Linear(2, 2, bias=False)
    optimizer = Optimizer(net, Optim(max_grad_norm=limit, beta1=0.0, beta2=0.0), Layout(), 1, ALONE)
    net.weight.grad = torch.full((2, 2), 2.0)
    norm = optimizer.gradient_norm(0.0)[1]
    assert norm == pytest.approx(4.0)
    optimizer.step(0, norm)
    torch.testing.assert_close(optimizer.moments()["exp_avg.weight"], torch.full((2, 2), 2.0 * factor))


def test_moments_resume_to_the_bit() -> None:
    optim = Optim(lr=0.05, warmup=warmup(0), schedule="constant")

    def train(net: Net, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            net(inputs(step)).backward()
            optimizer.step(step, optimizer.gradient_norm(0.0)[1])

    whole = Net()
    train(whole, Optimizer(whole, optim, Layout(), 6, ALONE), range(6))

    first, second = Net(), Net()
    before = Optimizer(first, optim, Layout(), 6, ALONE)
    train(first, before, range(3))
    assert before.num_updates == 3
    second.load_state_dict(first.state_dict())
    after = Optimizer(second, optim, Layout(), 6, ALONE)
    for name, tensor in after.moments().items():
        assert not tensor.any()
        tensor.copy_(before.moments()[name])
    after.set_num_updates(before.num_updates)
    train(second, after, range(3, 6))
    assert after.num_updates == 6
    for one, other in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_norm_without_gradients_is_zero() -> None:
    assert Optimizer(Net(), Optim(), Layout(), 1, ALONE).gradient_norm(1.5) == (1.5, 0.0)


def sharded_steps(size: int, replicate: int) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Three steps of a net whose gradients are summed over ranks, each rank with its own rows; norms, whole weights."""
    layout = Layout(dp=size, replicate=replicate)
    mesh = make_mesh(layout, "cpu", sharded=size > 1)
    net = Net()
    if mesh.fsdp is not None:
        apply_fsdp(net, [], mesh.fsdp, layout, torch.float32)
    optim = Optim(lr=0.05, warmup=warmup(0), max_grad_norm=0.5)
    optimizer = Optimizer(net, optim, layout, 3, mesh)
    norms = []
    for step in range(3):
        rows = inputs(step, rows=8).chunk(size)[mesh.rank]
        loss = net(rows)
        loss.backward()
        norms.append(optimizer.gradient_norm(loss.item()))
        optimizer.step(step, norms[-1][1])
    whole = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in net.named_parameters()}
    return norms, whole


@pytest.mark.parametrize(("size", "replicate"), [(2, 1), (2, 2)])
def test_norm_and_updates_on_two_ranks_equal_one(pool: Pool, size: int, replicate: int) -> None:
    norms, weights = sharded_steps(1, 1)
    for other_norms, other_weights in pool.run(sharded_steps, size, size, replicate):
        for (loss, norm), (other_loss, other_norm) in zip(norms, other_norms, strict=True):
            assert other_loss == pytest.approx(loss, rel=1e-6)
            assert other_norm == pytest.approx(norm, rel=1e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(other_weights[name], weight, rtol=1e-5, atol=1e-6)


def norm_of_one_row(replicate: int) -> tuple[float, int]:
    """A net of one output row: the second rank holds nothing of it."""
    layout = Layout(dp=2, replicate=replicate)
    mesh = make_mesh(layout, "cpu", sharded=True)
    net = nn.Linear(4, 1, bias=False)
    nn.init.ones_(net.weight)
    assert mesh.fsdp is not None
    apply_fsdp(net, [], mesh.fsdp, layout, torch.float32)
    optimizer = Optimizer(net, Optim(), layout, 1, mesh)
    net(torch.full((1, 4), 2.0)).sum().backward()
    elements = local(next(net.parameters())).numel()
    norm = optimizer.gradient_norm(0.0)[1]
    optimizer.step(0, norm)
    return norm, elements


def test_a_rank_without_a_row_takes_part(pool: Pool) -> None:
    assert pool.run(norm_of_one_row, 2, 1) == [(pytest.approx(8.0), 4), (pytest.approx(8.0), 0)]


def test_a_wrong_number_of_processes_is_named() -> None:
    with pytest.raises(ValueError, match="the plan is for 2 processes, but 1 were started"):
        make_mesh(Layout(dp=2), "cpu", sharded=True)
