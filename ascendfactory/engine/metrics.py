"""What a step reports, and where it goes: standard output, metrics.jsonl, TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ascendfactory.core.lines import event_line, step_line
from ascendfactory.core.plan import ModelCard, Plan, StepMetrics


def training_flops(card: ModelCard, tokens: int, trained_tokens: int, square_lengths: int, *, frozen: bool) -> float:
    """FLOPs of forward and backward that the model's mathematics needs (recomputation does not count).

    2 per weight and token forward; backward twice that (once where the weights are frozen); the head only at trained
    positions; causal attention 2·heads·head_dim·Σ length² a layer forward (half of the full square, for QKᵀ and PV),
    three times that with backward. (Kaplan et al. 2020, arXiv:2001.08361, without the causal half.)

    Args:
        tokens: tokens of the step without padding.
        trained_tokens: positions whose loss is computed.
        square_lengths: Σ of squared document lengths.
        frozen: the base weights get no gradient (LoRA).
    """
    head = card.vocab_size * card.hidden_size
    embeddings = head if card.tied_embeddings else 2 * head
    factor = 4.0 if frozen else 6.0
    matmul = factor * ((card.num_active_params - embeddings) * tokens + head * trained_tokens)
    attention = 6.0 * card.num_layers * card.num_heads * card.head_dim * square_lengths
    return matmul + attention


def model_flops_utilisation(plan: Plan, flops: float, step_s: float) -> float | None:
    """Share of the devices' peak that the model's own FLOPs make up; None where the peak is unknown."""
    device = plan.cluster.device
    peak = device.peak_bf16_flops if plan.dtype == "bfloat16" else device.peak_fp32_flops
    return flops / (step_s * peak * plan.cluster.num_devices) if peak else None


class Reporter:
    """Writes what the first process says; the other processes' reporters are silent."""

    def __init__(self, run_dir: Path, speaks: bool) -> None:
        self._speaks = speaks
        if speaks:
            from torch.utils.tensorboard import SummaryWriter

            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
            self._board = SummaryWriter(str(run_dir / "tensorboard"))

    def step(self, metrics: StepMetrics) -> None:
        """Reports one optimizer step."""
        if not self._speaks:
            return
        self._file.write(metrics.model_dump_json() + "\n")
        self._file.flush()
        print(step_line(metrics), flush=True)
        for name in ("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "eval_loss"):
            if (value := getattr(metrics, name)) is not None:
                self._board.add_scalar(name, value, metrics.step)

    def event(self, kind: str, en: str, zh: str, **facts: Any) -> None:
        """Reports anything else, once: resumed, saved, skipped, exported."""
        if self._speaks:
            print(event_line({"kind": kind, "text_en": en, "text_zh": zh, **facts}), flush=True)

    def close(self) -> None:
        """Flushes the files."""
        if self._speaks:
            self._file.close()
            self._board.close()


def forget_steps_after(run_dir: Path, step: int) -> None:
    """Before a resume: drops lines of metrics.jsonl that the run will report again, and a half-written last line."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
