"""What a person sees while training: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections import deque
from types import TracebackType
from typing import Any

from ascendfactory.core.messages import pick
from ascendfactory.core.plan import StepMetrics
from ascendfactory.launch.report import duration_text

_NUM_RECENT = 20  # steps over which the time left is estimated


class Progress:
    """Shows steps and events. Used as a context manager.

    Args:
        log_every: steps between plain lines (the live line follows every step).
        live: draw one live line instead; by default when stdout is a terminal.
    """

    def __init__(self, log_every: int, live: bool | None = None) -> None:
        self._log_every = log_every
        self._live = sys.stdout.isatty() if live is None else live
        self._recent_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._eval_loss: float | None = None
        self.last: StepMetrics | None = None

    def __enter__(self) -> Progress:
        if self._live:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar
            from rich.table import Column

            count = TextColumn("{task.completed:.0f}/{task.total}", table_column=Column(no_wrap=True, min_width=9))
            figures = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1, overflow="ellipsis"))
            self._bar = Bar(BarColumn(bar_width=12), count, figures, expand=True)
            self._task = self._bar.add_task(pick("starting ...", "正在启动 ..."), total=None)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._bar.stop()

    def step(self, step: StepMetrics) -> None:
        """Shows one optimizer step."""
        self.last = step
        self._recent_s.append(step.step_s)
        if step.eval_loss is not None:
            self._eval_loss = step.eval_loss
        if self._live:
            text = step_text(step, self.eta_s, self._eval_loss)
            self._bar.update(self._task, completed=step.step, total=step.num_steps, description=text)
        elif step.step % self._log_every == 0 or step.step in (1, step.num_steps) or step.eval_loss is not None or step.skipped:
            print(f"{step.step:>6}/{step.num_steps}  {step_text(step, self.eta_s, step.eval_loss)}", flush=True)

    @property
    def eta_s(self) -> float:
        """Seconds left, from the mean of the newest steps."""
        if self.last is None or not self._recent_s:
            return 0.0
        return (self.last.num_steps - self.last.step) * sum(self._recent_s) / len(self._recent_s)

    def event(self, event: dict[str, Any]) -> None:
        """Shows other news; a failure goes to stderr with the job's last lines."""
        text = pick(str(event.get("text_en", "")), str(event.get("text_zh", "")))
        if event.get("kind") == "failed":
            for line in event.get("lines", []):
                print(f"  | {line}", file=sys.stderr)
            print(f"{pick('error', '错误')}: {text}", file=sys.stderr, flush=True)
        elif text and self._live:
            self._bar.console.print(text, markup=False, highlight=False)
        elif text:
            print(text, flush=True)


def step_text(step: StepMetrics, eta_s: float, eval_loss: float | None) -> str:
    """`loss 2.3456  eval 2.1000  eta 3 min 5 s  12,345 tok/s  lr 1.0e-05  grad 1.23  mfu 41%  3.2 GiB`.

    The figures that matter most come first: a narrow terminal cuts the end.
    """
    parts = [f"loss {step.loss:.4f}"]
    if eval_loss is not None:
        parts.append(f"eval {eval_loss:.4f}")
    parts += [f"eta {duration_text(eta_s)}", f"{step.tokens_per_s:,.0f} tok/s", f"lr {step.lr:.1e}", f"grad {step.grad_norm:.2f}"]
    if step.mfu is not None:
        parts.append(f"mfu {step.mfu:.0%}")
    if step.memory_bytes is not None:
        parts.append(f"{step.memory_bytes / 2**30:.1f} GiB")
    if step.skipped:
        parts.append(f"skipped: {step.skipped}")
    return "  ".join(parts)
