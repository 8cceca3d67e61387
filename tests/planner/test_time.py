"""Step times: the parts add up, operations are those of theory, measurements take over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascendfactory.catalog.read import find_card, find_device
from ascendfactory.core.load import load_recipe
from ascendfactory.core.measured import Measurement, add_measurement, measured_path, read_measurements
from ascendfactory.core.plan import Cluster, Layout
from ascendfactory.planner.calibrate import Factor, Sample, factor_of, fit, leave_one_out
from ascendfactory.planner.engines import engine_of
from ascendfactory.planner.grid import grid_of
from ascendfactory.planner.memory import Setting
from ascendfactory.planner.search import make_plan
from ascendfactory.planner.time import modelled_seconds, predict, step_seconds, timing_of
from ascendfactory.planner.weights import stages_of
from ascendfactory.planner.work import attention_flops_a_token, work_of

CARD = find_card("llama-3.1-8b")
CLUSTER = Cluster(device=find_device("snt9b"), nodes=2, nproc=8)


class Anything:
    """Accepts every layout."""

    def refuse(self, *_: Any) -> list[Any]:
        return []


def setting_of(name: str = "llama-3.1-8b", *overrides: str, engine: str = "megatron", cluster: Cluster = CLUSTER) -> Setting:
    recipe = load_recipe("model: m\ndata: {train: d.jsonl, seq_len: 4096}\nbatch: 64", overrides)
    return Setting(find_card(name), recipe, cluster, "bfloat16", engine_of(engine))


def test_the_parts_are_the_step() -> None:
    for layout in (Layout(dp=16, num_micro=4), Layout(dp=2, tp=4, sp=True, pp=2, num_micro=32, vpp=2, schedule="interleaved")):
        found = predict(setting_of(), layout, Factor(slowdown=1.5))
        assert found.step_s == pytest.approx(sum(part.seconds for part in found.parts))
        assert found.step_s == pytest.approx(1.5 * sum(modelled_seconds(setting_of(), layout)))
        assert found.tokens_per_s_device == pytest.approx(64 * 4096 / found.step_s / 16)


def test_operations_are_six_a_parameter_and_token() -> None:
    """Of the matrix products 6·P a token (P without the embedding), of causal attention 3.5·2·S·h a layer and token."""
    layout = Layout(num_micro=1)
    work = work_of(setting_of(), grid_of([layout]), stages_of(CARD, 1, 1))
    norms = (2 * CARD.num_layers + 1) * CARD.hidden_size
    matrices = CARD.num_params - CARD.vocab_size * CARD.hidden_size - norms
    attention = 3.5 * 2 * 4096 * CARD.num_heads * CARD.head_dim * CARD.num_layers
    assert work.model[0, 0] == pytest.approx(4096 * (6 * matrices + attention), rel=1e-3)


def test_full_recomputation_is_another_forward_pass() -> None:
    plain, full, half = (
        work_of(setting_of(), grid_of([Layout(**change)]), stages_of(CARD, 1, 1))
        for change in ({}, {"recompute": "full"}, {"recompute": "full", "recompute_layers": 16})
    )
    assert full.dense[0, 0] == pytest.approx(4 / 3 * plain.dense[0, 0])
    assert half.dense[0, 0] == pytest.approx(3.5 / 3 * plain.dense[0, 0])
    assert full.attention[0, 0] == pytest.approx(4.5 / 3.5 * plain.attention[0, 0])
    assert full.head[0, 0] == plain.head[0, 0]
    assert full.model[0, 0] == plain.model[0, 0]


def test_frozen_weights_need_no_gradient() -> None:
    full, lora = (
        work_of(setting_of("llama-3.1-8b", f"--tuning={t}"), grid_of([Layout()]), stages_of(CARD, 1, 1)) for t in ("full", "lora")
    )
    assert lora.dense[0, 0] == pytest.approx(2 / 3 * full.dense[0, 0])


def test_only_active_experts_compute() -> None:
    card = find_card("qwen3-30b-a3b")
    work = work_of(setting_of("qwen3-30b-a3b"), grid_of([Layout()]), stages_of(card, 1, 1))
    expert = 3 * card.hidden_size * 768 * 8 * card.num_layers
    assert work.expert[0, 0] == pytest.approx(6 * 4096 * expert)


def test_a_sliding_window_saves_attention() -> None:
    card = find_card("gemma3-27b")
    setting = Setting(card, load_recipe("model: m\ndata: {train: d, seq_len: 32768}"), CLUSTER, "bfloat16", engine_of("native"))
    full = Setting(card.model_copy(update={"sliding_window": None}), setting.recipe, CLUSTER, "bfloat16", engine_of("native"))
    assert attention_flops_a_token(setting) < 0.35 * attention_flops_a_token(full)


def test_the_bubble_is_that_of_its_schedule() -> None:
    """(pp - 1) / (m·vpp) of the ideal time (arXiv:2104.04473)."""
    stages = stages_of(CARD, 4, 1)
    one = timing_of(setting_of(), grid_of([Layout(pp=4, num_micro=16)]), stages).parts
    work = sum(float(v[0]) for name, v in one.items() if name not in ("bubble", "optimizer", "dp", "host"))
    assert float(one["bubble"][0]) / work == pytest.approx(3 / 16)
    two = timing_of(setting_of(), grid_of([Layout(pp=4, vpp=2, schedule="interleaved", num_micro=16)]), stages_of(CARD, 4, 2)).parts
    assert float(two["bubble"][0]) < 0.55 * float(one["bubble"][0])


def test_more_devices_and_fewer_tokens_are_faster() -> None:
    setting = setting_of()
    by_dp = step_seconds(setting, grid_of([Layout(dp=d, num_micro=64 // d) for d in (1, 2, 4, 8, 16)]), Factor())
    assert (np.diff(by_dp) < 0).all()
    short = step_seconds(setting_of("llama-3.1-8b", "--data.seq_len=2048"), grid_of([Layout(num_micro=64)]), Factor())
    assert short[0] < by_dp[0]


def test_the_fit_finds_what_made_the_samples() -> None:
    samples = [
        Sample(str(i), 1.7 * (plain + 3 * routing), plain, routing) for i, (plain, routing) in enumerate([(1, 0), (2, 1), (1, 2), (5, 0.5)])
    ]
    slowdown, routing = fit(samples)
    assert slowdown == pytest.approx(1.7, rel=0.02)
    assert routing == pytest.approx(3, rel=0.05)
    assert leave_one_out(samples) == pytest.approx([1] * 4, rel=0.05)
    assert fit([]) == (1.0, 1.0)


def test_a_prediction_says_what_it_rests_on() -> None:
    measured = factor_of(setting_of(engine="mindspeed_llm"), modelled_seconds)
    borrowed = factor_of(setting_of(engine="native"), modelled_seconds)
    assert "9 measured rows on npu" in measured.basis.en
    assert "of other engines" in borrowed.basis.en
    assert borrowed.band >= 0.35 > measured.band >= 0.1


def plan_in(folder: Path) -> Any:
    recipe = load_recipe("model: m\ndata: {train: d.jsonl, seq_len: 4096}\nbatch: 16")
    cluster = Cluster(device=find_device("a100-80g"), nodes=1, nproc=8)
    return make_plan(recipe, CARD, cluster, {"native": Anything()}, str(folder / "run"))


def test_a_run_teaches_the_next_prediction(tmp_path: Path) -> None:
    first = plan_in(tmp_path)
    row = Measurement(
        backend=first.backend, recipe=first.recipe, card=first.card, cluster=first.cluster, layout=first.layout, dtype=first.dtype,
        step_s=3.0 * first.prediction.step_s, tokens=1e5, memory_bytes=None, predicted_step_s=1.0, predicted_bytes=1,
    )  # fmt: skip
    add_measurement(row, measured_path(first.run_dir))
    assert read_measurements(measured_path(first.run_dir)) == [row]
    setting = Setting(first.card, first.recipe, first.cluster, first.dtype, engine_of("native"))
    learned = factor_of(setting, modelled_seconds, [row])
    assert predict(setting, first.layout, learned).step_s == pytest.approx(row.step_s)
    assert "1 of your own runs" in plan_in(tmp_path).prediction.basis.en
    other = setting_of("qwen3-8b")
    assert "own runs" not in factor_of(other, modelled_seconds, [row]).basis.en


def test_a_damaged_line_of_measurements_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "measured.jsonl").write_text('{"backend": 1}\nnonsense\n')
    assert read_measurements(tmp_path / "measured.jsonl") == []
    assert read_measurements(tmp_path / "none.jsonl") == []
