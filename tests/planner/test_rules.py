"""What makes a layout illegal, and that the fixes mend it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendfactory.core.load import load_recipe
from ascendfactory.core.plan import Cluster, Layout, Refusal
from ascendfactory.planner.rules import illegal
from tests.examples import CARD, CPU


def refusals(layout: Layout, *overrides: str, devices: int = 4) -> list[Refusal]:
    recipe = load_recipe("model: m\ndata: {train: d.jsonl, seq_len: 64}", overrides)
    return illegal(recipe, CARD, Cluster(device=CPU, nodes=1, nproc=devices), layout)


def test_a_legal_layout() -> None:
    assert refusals(Layout(dp=4, replicate=2, micro_size=2, num_micro=1), "--batch.global_size=8") == []
    assert refusals(Layout(dp=2, tp=2, micro_size=2, num_micro=2), "--batch.global_size=8") == []


@pytest.mark.parametrize(
    ("layout", "overrides", "code", "fix"),
    [
        ({"dp": 2, "num_micro": 4}, (), "devices", {"layout.dp": "auto"}),
        ({"dp": 4, "replicate": 3, "num_micro": 2}, (), "replicate", {"layout.replicate": 1}),
        ({"dp": 4, "replicate": 8, "num_micro": 2}, (), "replicate", {"layout.replicate": 1}),
        ({"dp": 4, "num_micro": 2}, ("--batch.global_size=10",), "global_batch", {"batch.global_size": 8}),
        ({"dp": 4, "num_micro": 2}, ("--batch.global_size=11",), "global_batch", {"batch.global_size": 12}),
        ({"dp": 4}, ("--batch.global_size=1",), "global_batch", {"batch.global_size": 4}),
        ({"dp": 4, "micro_size": 3}, ("--batch.global_size=8", "--batch.micro_size=3"), "global_batch", {"batch.global_size": 12}),
        ({"dp": 4, "num_micro": 2}, ("--data.seq_len=129",), "seq_len", {"data.seq_len": 128}),
    ],
)
def test_each_rule(layout: dict[str, Any], overrides: tuple[str, ...], code: str, fix: dict[str, Any]) -> None:
    (refusal,) = refusals(Layout(**layout), *overrides)
    assert (refusal.code, refusal.fix) == (code, fix)
    assert refusal.where in fix
    for value in fix.values():
        assert str(value) in refusal.en
        assert str(value) in refusal.zh


def test_every_broken_rule_is_told() -> None:
    found = refusals(Layout(dp=3, replicate=2), "--data.seq_len=1000", "--batch.global_size=7")
    assert [refusal.code for refusal in found] == ["devices", "replicate", "global_batch", "seq_len"]


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 200))
def test_the_nearest_global_size_is_legal(dp: int, micro: int, rows: int) -> None:
    found = refusals(
        Layout(dp=dp, micro_size=micro, num_micro=max(1, rows // (dp * micro))),
        *(f"--batch.global_size={rows}", f"--batch.micro_size={micro}"),
        devices=dp,
    )
    if rows % (dp * micro) == 0:
        assert found == []
        return
    better = found[0].fix["batch.global_size"]
    assert better % (dp * micro) == 0
    assert abs(better - rows) < dp * micro
    again = Layout(dp=dp, micro_size=micro, num_micro=better // (dp * micro))
    assert refusals(again, f"--batch.global_size={better}", f"--batch.micro_size={micro}", devices=dp) == []
