"""A plan, run: folder, job, processes, report."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ascendfactory.backends import BACKENDS
from ascendfactory.core.measured import add_measurement, measure, measured_path
from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Job, Plan, StepMetrics
from ascendfactory.core.recipe import PolicyGradient
from ascendfactory.launch.devices import check_present
from ascendfactory.launch.environments import require_environment
from ascendfactory.launch.failure import USER_ERROR
from ascendfactory.launch.local import launch
from ascendfactory.launch.place import Place, find_place
from ascendfactory.launch.preflight import check_nodes, meeting_job
from ascendfactory.launch.report import write_report
from ascendfactory.launch.runs import create_run, read_metrics
from ascendfactory.launch.team import Lost, Team
from ascendfactory.launch.watch import Event


def start(
    plan: Plan,
    *,
    on_step: Callable[[StepMetrics], None] = lambda step: None,
    on_event: Callable[[Event], None] = lambda event: None,
    env: dict[str, str] | None = None,
    on_folder: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Runs a plan and writes its report; returns the job's exit code. A plan for several nodes is started on each of them.

    Args:
        plan: from `make_plan`, or read from a run's plan.json; several nodes all run that of node 0.
        on_step: called with each optimizer step, on node 0.
        on_event: called with each other news of the run (kind, text_en, text_zh).
        env: environment variables beside those of the job.
        on_folder: called once with the run folder, just before the job starts, on node 0.

    Raises:
        UserError: when the devices are not here, the folder is in use, its checkpoints belong to another recipe, or the nodes do
            not fit together.
    """
    place = _place_of(plan)
    digest = hashlib.blake2b(plan.recipe.model_dump_json().encode(), digest_size=4).hexdigest()
    team = Team(place, f"{plan.recipe.name}-{digest}")
    try:
        plan = Plan.model_validate_json(team.gather(plan.model_dump_json())[0])
        is_new = not Path(plan.run_dir).exists()
        job = _checked_job(plan, team)
        if team.is_first:
            on_folder(create_run(plan))
        team.gather("the folder is made")
        job = job.model_copy(update={"env": job.env | (env or {})})
        return _run(plan, job, team, is_new, on_step, on_event)
    except Lost as lost:
        where = f"node {lost.rank}"
        raise UserError(where, "it left before the training; its own message says why", "它在训练前退出；原因见其自身的消息") from None
    finally:
        team.close()


def _place_of(plan: Plan) -> Place:
    """Where this machine stands in the plan's nodes.

    Raises:
        UserError: the plan wants several, and nobody said which one this is.
    """
    place, nodes = find_place(os.environ), plan.cluster.nodes
    if nodes == 1:
        return Place(master_port=place.master_port)
    if place.nodes != nodes:
        raise UserError(
            "cluster.nodes",
            f"the plan wants {nodes} nodes and this is one of {place.nodes}; add --hosts a,b to start them from here by ssh, hand it to a "
            f"scheduler (ascendfactory submit), or export NNODES={nodes}, NODE_RANK and MASTER_ADDR on each node",
            f"计划需要 {nodes} 个节点，而这里是 {place.nodes} 个之一；请加 --hosts a,b 从本机经 ssh 启动，或交给调度器"
            f"（ascendfactory submit），或在各节点 export NNODES={nodes}、NODE_RANK、MASTER_ADDR",
        )
    return place


def _checked_job(plan: Plan, team: Team) -> Job:
    """The job, once this machine, and the others with it, are found fit for it."""
    job = BACKENDS[plan.backend].render(plan)

    def own() -> None:
        check_present(plan.cluster)
        check_model(plan)
        if job.environment:
            require_environment(job.environment)

    if team.place.nodes > 1:
        check_nodes(plan, team, job.environment, own)
    else:
        own()
    return job


def _run(plan: Plan, job: Job, team: Team, is_new: bool, on_step: Callable[[StepMetrics], None], on_event: Callable[[Event], None]) -> int:
    folder, backend = Path(plan.run_dir), BACKENDS[plan.backend]

    def kept(step: StepMetrics) -> None:
        if not job.keeps_metrics:
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as out:
                out.write(step.model_dump_json(exclude_none=True) + "\n")
        on_step(step)

    first = meeting_job(plan, job.environment) if team.place.nodes > 1 else None
    code = launch(
        job.model_copy(update={"files": job.files | first.files}) if first else job,
        folder,
        read_step=lambda line: backend.read_step(line, plan),
        on_step=kept,
        on_event=on_event,
        team=team,
        first=first,
    )
    if not team.is_first:
        return code
    if steps := read_metrics(folder):
        write_report(folder)
        if row := measure(plan, steps):  # the next prediction of this model here starts from it
            add_measurement(row, measured_path(folder))
    elif is_new and code == USER_ERROR:
        shutil.rmtree(folder, ignore_errors=True)  # wrong input, said in one line: nothing of a run is left behind
    return code


def check_model(plan: Plan) -> None:
    """A plan can be made from a name of the catalogue; training needs the folder with its files."""
    if not Path(plan.recipe.model.path).expanduser().is_dir():
        hub = plan.card.hub_id or plan.card.name
        raise UserError(
            "model.path",
            f"there is no folder '{plan.recipe.model.path}' here; download {hub} (hf download {hub} --local-dir models/{plan.card.name}) "
            f"and write model: models/{plan.card.name}",
            f"此处没有文件夹 '{plan.recipe.model.path}'；请下载 {hub}（hf download {hub} --local-dir models/{plan.card.name}），"
            f"再写 model: models/{plan.card.name}",
        )
    for key, path in plan.recipe.objective.own_files() if isinstance(plan.recipe.objective, PolicyGradient) else []:
        if not Path(path).is_file():
            raise UserError(
                key, f"there is no file {path} here; write its path from this folder", f"此处没有文件 {path}；请写自此目录起的路径"
            )
