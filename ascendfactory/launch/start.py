"""A plan, run: folder, job, processes, report."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ascendfactory.backends import BACKENDS
from ascendfactory.core.measured import add_measurement, measure, measured_path
from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Plan, StepMetrics
from ascendfactory.launch.devices import check_present
from ascendfactory.launch.environments import require_environment
from ascendfactory.launch.failure import USER_ERROR
from ascendfactory.launch.local import Event, launch
from ascendfactory.launch.report import write_report
from ascendfactory.launch.runs import create_run, read_metrics


def start(
    plan: Plan,
    *,
    on_step: Callable[[StepMetrics], None] = lambda step: None,
    on_event: Callable[[Event], None] = lambda event: None,
    env: dict[str, str] | None = None,
    on_folder: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Runs a plan on this machine and writes its report; returns the job's exit code.

    Args:
        plan: from `make_plan`, or read from a run's plan.json.
        on_step: called with each optimizer step.
        on_event: called with each other news of the run (kind, text_en, text_zh).
        env: environment variables beside those of the job.
        on_folder: called once with the run folder, just before the job starts.

    Raises:
        UserError: when the devices are not here, the folder is in use, or its checkpoints belong to another recipe.
    """
    check_present(plan.cluster)
    _check_model(plan)
    backend = BACKENDS[plan.backend]
    if environment := backend.render(plan).environment:
        require_environment(environment)
    is_new = not Path(plan.run_dir).exists()
    folder = create_run(plan)
    on_folder(folder)
    job = backend.render(plan)
    job = job.model_copy(update={"env": job.env | (env or {})})

    def kept(step: StepMetrics) -> None:
        if not job.keeps_metrics:
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as out:
                out.write(step.model_dump_json(exclude_none=True) + "\n")
        on_step(step)

    code = launch(job, folder, read_step=lambda line: backend.read_step(line, plan), on_step=kept, on_event=on_event)
    if steps := read_metrics(folder):
        write_report(folder)
        if row := measure(plan, steps):  # the next prediction of this model here starts from it
            add_measurement(row, measured_path(folder))
    elif is_new and code == USER_ERROR:
        shutil.rmtree(folder, ignore_errors=True)  # wrong input, said in one line: nothing of a run is left behind
    return code


def _check_model(plan: Plan) -> None:
    """A plan can be made from a name of the catalogue; training needs the folder with its files."""
    if not Path(plan.recipe.model.path).expanduser().is_dir():
        hub = plan.card.hub_id or plan.card.name
        raise UserError(
            "model.path",
            f"'{plan.recipe.model.path}' is a name, not a folder; download {hub} (hf download {hub} --local-dir models/{plan.card.name}) "
            f"and write model: models/{plan.card.name}",
            f"'{plan.recipe.model.path}' 是名称而非文件夹；请下载 {hub}（hf download {hub} --local-dir models/{plan.card.name}），"
            f"再写 model: models/{plan.card.name}",
        )
