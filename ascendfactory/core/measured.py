"""What a run measured, kept so that the next prediction is better: one JSON line a run."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from pydantic import ValidationError

from ascendfactory.core.plan import Cluster, Fact, Layout, ModelCard, Plan, StepMetrics
from ascendfactory.core.recipe import Recipe

NUM_KEPT = 200  # newest runs kept
NUM_WARMUP_STEPS = 2  # the first steps also compile, connect and fill caches


class Measurement(Fact):
    """A run's plan and its clock."""

    backend: str
    recipe: Recipe
    card: ModelCard
    cluster: Cluster
    layout: Layout
    dtype: str
    step_s: float  # median of the steps after the first
    tokens: float  # of a step, padding left out
    memory_bytes: int | None  # peak on the fullest device
    predicted_step_s: float | None
    predicted_bytes: int


def measure(plan: Plan, steps: list[StepMetrics]) -> Measurement | None:
    """What the steps of a run say; None when there are too few."""
    steady = steps[NUM_WARMUP_STEPS:]
    if not steady:
        return None
    peaks = [step.memory_bytes for step in steps if step.memory_bytes]
    return Measurement(
        backend=plan.backend,
        recipe=plan.recipe,
        card=plan.card,
        cluster=plan.cluster,
        layout=plan.layout,
        dtype=plan.dtype,
        step_s=median(step.step_s for step in steady),
        tokens=median(step.tokens for step in steady),
        memory_bytes=max(peaks, default=None),
        predicted_step_s=plan.prediction.step_s if plan.prediction else None,
        predicted_bytes=plan.peak_bytes,
    )


def measured_path(run_dir: str | Path) -> Path:
    """Where the runs beside a run folder keep what they measured: measured.jsonl in the folder above."""
    return Path(run_dir).expanduser().parent / "measured.jsonl"


def read_measurements(path: Path) -> list[Measurement]:
    """The measured runs, oldest first; lines of another version are passed over."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(Measurement.model_validate_json(line, strict=False))
        except ValidationError:
            continue
    return found


def add_measurement(row: Measurement, file: Path) -> None:
    """Appends a run; a folder that cannot be written costs the measurement, not the run."""
    kept = [*read_measurements(file), row][-NUM_KEPT:]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(entry.model_dump_json() + "\n" for entry in kept), encoding="utf-8")
    except OSError:
        return
