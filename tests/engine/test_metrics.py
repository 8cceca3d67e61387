"""FLOPs, utilisation, and where metrics go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from ascendfactory.catalog.read import find_card
from ascendfactory.core.lines import EVENT_MARK, STEP_MARK
from ascendfactory.core.plan import StepMetrics
from ascendfactory.engine.metrics import Reporter, forget_steps_after, model_flops_utilisation, training_flops
from tests.examples import make


def step(number: int, **changes: Any) -> StepMetrics:
    facts: dict[str, Any] = {"num_steps": 9, "loss": 1.5, "lr": 0.1, "grad_norm": 2.0, "label_tokens": 3, "tokens": 4}
    return StepMetrics(step=number, **(facts | {"epoch": 0.5, "step_s": 0.1, "tokens_per_s": 40.0} | changes))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_flops_equal_those_that_torch_counts(tiny_models: dict[str, str], family: str) -> None:
    """torch counts the whole square of an attention without a mask; ours is its causal half."""
    card = find_card(tiny_models[family])
    hf = AutoModelForCausalLM.from_pretrained(tiny_models[family], attn_implementation="eager")
    tokens = 24
    with FlopCounterMode(display=False) as counter:
        hf(torch.zeros(1, tokens, dtype=torch.long), use_cache=False).logits.sum().backward()
    attention = 6.0 * card.num_layers * card.num_heads * card.head_dim * tokens**2
    mine = training_flops(card, tokens, tokens, tokens**2, frozen=False)
    # norms and biases are counted as if they were matrices: the whole difference
    vectors = sum(p.numel() for p in hf.parameters() if p.ndim == 1)
    assert mine + attention - counter.get_total_flops() == pytest.approx(6.0 * vectors * tokens, rel=1e-9)


def test_flops_by_hand() -> None:
    card = make("r").card.model_copy(update={"num_params": 10_000, "num_active_params": 10_000})  # 64 x 16 embedding and head
    inner, head, attention = 10_000 - 2 * 1024, 1024, 6 * 2 * 2 * 8 * 50
    assert training_flops(card, 10, 4, 50, frozen=False) == 6 * (inner * 10 + head * 4) + attention
    assert training_flops(card, 10, 4, 50, frozen=True) == 4 * (inner * 10 + head * 4) + attention
    tied = card.model_copy(update={"tied_embeddings": True, "num_active_params": 10_000 - 1024})
    assert training_flops(tied, 10, 4, 50, frozen=False) == training_flops(card, 10, 4, 50, frozen=False)


def test_utilisation_is_of_all_devices_in_the_dtype_of_the_plan() -> None:
    plan = make("r", nproc=2)
    assert model_flops_utilisation(plan, 1e11, 2.0) == pytest.approx(1e11 / (2.0 * 1e11 * 2))
    half = plan.model_copy(update={"dtype": "bfloat16"})
    assert model_flops_utilisation(half, 1e9, 1.0) == pytest.approx(0.5)
    device = plan.cluster.device.model_copy(update={"peak_fp32_flops": 0.0})
    unknown = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"device": device})})
    assert model_flops_utilisation(unknown, 1e9, 1.0) is None


def test_reporter_writes_lines_that_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path / "run", speaks=True)
    steps = [step(1), step(2, eval_loss=0.7, mfu=0.4)]
    for metrics in steps:
        reporter.step(metrics)
    reporter.event("saved", "saved at 2", "已保存", step=2)
    reporter.close()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [StepMetrics.model_validate_json(line) for line in lines] == steps
    printed = capsys.readouterr().out.splitlines()
    assert [line.removeprefix(STEP_MARK) for line in printed[:2]] == lines
    assert json.loads(printed[2].removeprefix(EVENT_MARK)) == {"kind": "saved", "text_en": "saved at 2", "text_zh": "已保存", "step": 2}
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path / "run", speaks=False)
    reporter.step(step(1))
    reporter.event("saved", "a", "b")
    reporter.close()
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "run").exists()


def test_steps_after_a_resume_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [step(number).model_dump_json() for number in range(1, 5)]
    path.write_text("\n".join(lines) + '\n{"step": 5, "lo')
    forget_steps_after(tmp_path, 2)
    assert path.read_text().splitlines() == lines[:2]
    forget_steps_after(tmp_path / "none", 2)
    assert not (tmp_path / "none").exists()
