"""Real runs of tiny models, inside a test's process or on every rank of the pool."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ascendfactory.core.plan import Plan, StepMetrics


def make_tiny_plan(model: str, data: str, run_dir: str, /, *, nproc: int = 1, **settings: Any) -> Plan:
    """The plan of a small recipe; `settings` are top-level recipe sections that replace or extend the defaults."""
    import yaml

    import ascendfactory
    from ascendfactory.core.load import load_recipe

    recipe: dict[str, Any] = {
        "model": {"path": model, "dtype": "float32"},
        "data": {"train": data, "seq_len": 64, "cache_dir": str(Path(run_dir).parent / "cache"), "workers": 1},
        "batch": {"global_size": 8, "micro_size": 2},
        "duration": "3 steps",
        "optim": {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup": 0.0},
        "cluster": {"device": "cpu", "nproc": nproc},
        "checkpoint": {"every": "1000 steps"},
        "output": {"dir": run_dir, "export": False},
        "seed": 5,
    }
    for name, value in settings.items():
        known = recipe.get(name)
        recipe[name] = known | value if isinstance(known, dict) and isinstance(value, dict) else value
    return ascendfactory.make_plan(load_recipe(yaml.safe_dump(recipe)), run_dir=run_dir)


def train(plan_json: str) -> list[StepMetrics]:
    """Trains to the end; call it on every rank."""
    from ascendfactory.engine.trainer import train_steps

    return list(train_steps(Plan.model_validate_json(plan_json)))


def train_and_look(plan_json: str, grads_at: int = 1) -> dict[str, Any]:
    """Trains, and hands back what parity tests compare.

    Returns:
        losses and grad_norms by step, gradients of step `grads_at` before clipping, weights after the last step; whole tensors
        by public name (numpy, so that they travel between processes).
    """
    from ascendfactory.engine import trainer
    from ascendfactory.engine.build import build
    from ascendfactory.engine.state import gradients, iter_whole, trained_tensors

    run = build(Plan.model_validate_json(plan_json))
    trainer.start(run)
    found: dict[str, Any] = {"losses": [], "grad_norms": [], "gradients": {}, "weights": {}}
    real_norm = run.optimizer.gradient_norm

    def norm_and_look(loss: float) -> tuple[float, float]:
        if run.step + 1 == grads_at:
            run.optimizer.sum_partial_gradients()
            found["gradients"] = {name: whole.float().cpu().numpy().copy() for name, whole in iter_whole(gradients(run.model), run.mesh)}
        return real_norm(loss)

    run.optimizer.gradient_norm = norm_and_look  # type: ignore[method-assign]
    stop = trainer.StopSignal()
    while run.step < run.num_steps:
        metrics = trainer.train_step(run, stop)
        found["losses"].append(metrics.loss)
        found["grad_norms"].append(metrics.grad_norm)
    found["weights"] = {name: whole.float().cpu().numpy().copy() for name, whole in iter_whole(trained_tensors(run.model), run.mesh)}
    run.reporter.close()
    return found


def with_environment(name: str, value: str) -> None:
    """Sets a variable in a worker."""
    os.environ[name] = value
