"""What is shown while training."""

from __future__ import annotations

import pytest

from ascendfactory.cli.progress import Progress, step_text
from ascendfactory.core.plan import StepMetrics


def step(number: int, num_steps: int = 10, **facts: float | str | None) -> StepMetrics:
    base = {
        "loss": 2.0,
        "lr": 1e-5,
        "grad_norm": 1.234,
        "label_tokens": 5,
        "tokens": 10,
        "epoch": 0.1,
        "step_s": 2.0,
        "tokens_per_s": 12345.6,
    }
    return StepMetrics.model_validate({"step": number, "num_steps": num_steps, **base, **facts})


def test_a_line_holds_the_figures_that_are_known() -> None:
    full = step(3, mfu=0.414, memory_bytes=3 * 2**30, skipped="NaN")
    assert step_text(full, 65.0, 2.1) == (
        "loss 2.0000  eval 2.1000  eta 1 min 5 s  12,346 tok/s  lr 1.0e-05  grad 1.23  mfu 41%  3.0 GiB  skipped: NaN"
    )
    assert step_text(step(3), 0.0, None) == "loss 2.0000  eta 0 s  12,346 tok/s  lr 1.0e-05  grad 1.23"


def test_plain_lines_come_every_few_steps_and_whenever_there_is_news(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(4, live=False) as progress:
        for number in range(1, 11):
            progress.step(step(number, eval_loss=1.5 if number == 6 else None, skipped="NaN" if number == 7 else None))
    shown = [int(line.split("/")[0]) for line in capsys.readouterr().out.splitlines()]
    assert shown == [1, 4, 6, 7, 8, 10]


def test_the_time_left_follows_the_newest_steps() -> None:
    progress = Progress(1, live=False)
    progress.step(step(1, step_s=100.0))
    for number in range(2, 22):
        progress.step(step(number, 31, step_s=0.5))
    assert progress.eta_s == pytest.approx(5.0)


def test_a_failure_goes_to_stderr_with_its_last_lines(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(1, live=False)
    progress.event({"kind": "saved", "text_en": "saved", "text_zh": "已保存"})
    progress.event({"kind": "failed", "text_en": "training ended with code 1", "text_zh": "", "lines": ["a", "b"]})
    shown = capsys.readouterr()
    assert shown.out == "saved\n"
    assert shown.err == "  | a\n  | b\nerror: training ended with code 1\n"


def test_the_live_line_ends_with_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1, live=True) as progress:
        progress.step(step(10, eval_loss=1.5))
        progress.event({"kind": "exported", "text_en": "exported to [x]", "text_zh": ""})
    shown = capsys.readouterr().out
    assert "exported to [x]" in shown
    assert "10/10" in shown
