"""Starts (or resumes) a planned run and stops after its first new step; started by resume.py.

    python first_step.py PLAN.json                 time to the first step
    python first_step.py PLAN.json --save STEP     goes to that step without training, and saves there

The last line printed is JSON: seconds of wall clock and CPU after imports.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from ascendfactory.core.plan import Plan
from ascendfactory.engine.build import build
from ascendfactory.engine.trainer import save, train_steps


def save_at(plan: Plan, step: int) -> None:
    """A checkpoint as if `step` steps had been trained: the data path really goes there, the weights stay."""
    run = build(plan)
    for _ in range(step):
        run.data.next_step()
    run.step = step
    save(run)
    run.checkpoints.wait()


def main() -> None:
    """Command line."""
    plan = Plan.model_validate_json(Path(sys.argv[1]).read_text())
    wall, cpu = time.perf_counter(), time.process_time()
    if "--save" in sys.argv:
        save_at(plan, int(sys.argv[3]))
    else:
        next(train_steps(plan))
    print(json.dumps({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}))


if __name__ == "__main__":
    main()
