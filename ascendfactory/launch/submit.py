"""Hands a plan to a scheduler: the run folder as a launch makes it, the scheduler's file in it, and its own command."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ascendfactory.backends import BACKENDS
from ascendfactory.catalog.read import find_device
from ascendfactory.core.messages import UserError, nearest
from ascendfactory.core.plan import Line, Plan
from ascendfactory.core.recipe import ClusterSpec
from ascendfactory.launch import kubernetes, slurm
from ascendfactory.launch.environments import VARIABLE, environment_dir, require_environment
from ascendfactory.launch.order import Order, read_volumes
from ascendfactory.launch.runs import create_run
from ascendfactory.launch.start import check_model

_COMMANDS = {"slurm": ("sbatch",), "kubeflow": ("kubectl", "apply", "-f"), "volcano": ("kubectl", "apply", "-f")}
SCHEDULERS = tuple(_COMMANDS)


@dataclass(frozen=True)
class Submission:
    """A file that is ready for a scheduler."""

    file: Path
    command: tuple[str, ...]  # that hands it over
    notes: list[Line]  # what could not be checked from here


def check_named(cluster: ClusterSpec) -> None:
    """Makes sure that a recipe says which devices the nodes have: the machine it is submitted from has others, or none.

    Raises:
        UserError: with the form that says it.
    """
    nodes = f"{cluster.nodes}x" if cluster.nodes > 1 else ""
    if cluster.device == "auto":
        raise UserError(
            "cluster.device",
            f"auto is what this machine has, and the nodes are others; write their devices, such as cluster: {nodes}8 snt9b",
            f"auto 指本机的设备，而作业在其他节点上运行；请写明其设备，例如 cluster: {nodes}8 snt9b",
        )
    device = find_device(cluster.device)
    if cluster.nproc == "auto" and device.kind != "cpu":
        fix = f"cluster: {nodes}{device.devices_per_node} {device.name}"
        raise UserError("cluster.nproc", f"say how many devices a node has, such as {fix}", f"请写明每个节点的设备数，例如 {fix}")


def prepare(plan: Plan, to: str, *, options: Sequence[str] = (), image: str = "", volumes: Sequence[str] = ()) -> Submission:
    """Makes the run folder and writes the scheduler's file into it. The working folder is the nodes' as well.

    Args:
        plan: from `make_plan`.
        to: one of SCHEDULERS.
        options: additions in the scheduler's words: options of sbatch, or YAML for the manifest.
        image: container image; Kubernetes only.
        volumes: `claim:/path`; Kubernetes only.

    Raises:
        UserError: something is wrong or missing; no run folder has been made then.
    """
    _check_words(to, image, volumes)
    _check_resume(plan)
    check_model(plan)
    stamp = time.strftime("%m%d%H%M%S")
    order = Order(plan, Path.cwd(), tuple(options), image, read_volumes(volumes), _environment(plan), stamp)
    if to == "slurm":
        notes, name, text = _for_slurm(order), "slurm.sh", slurm.script(order)
    else:
        notes, name, text = _for_kubernetes(order), f"{to}.yaml", kubernetes.manifest(order, to)
    file = _make_run(plan) / "job" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return Submission(file, (*_COMMANDS[to], str(file)), notes)


def send(submission: Submission) -> str:
    """Hands the file over; returns what the scheduler's command said.

    Raises:
        UserError: there is no such command here, or it refused.
    """
    program, file = submission.command[0], submission.file
    if not shutil.which(program):
        raise UserError(
            program,
            f"is not on this machine; the file is {file}: run '{' '.join(submission.command)}' where it is",
            f"本机没有此命令；文件已写入 {file}：请在有此命令的机器上运行 '{' '.join(submission.command)}'",
        )
    done = subprocess.run(submission.command, capture_output=True, text=True, check=False)
    said = "\n".join(text.strip() for text in (done.stdout, done.stderr) if text.strip())
    if done.returncode:
        words = " ".join(said.split())
        raise UserError(program, f"refused {file}: {words}", f"拒绝了 {file}：{words}")
    return said


def _check_words(to: str, image: str, volumes: Sequence[str]) -> None:
    if to not in SCHEDULERS:
        near = nearest(to, SCHEDULERS) or SCHEDULERS[0]
        names = ", ".join(SCHEDULERS)
        raise UserError("--to", f"'{to}' is none of {names}; did you mean {near}?", f"'{to}' 不可用（{names}），是否想写 {near}？")
    if to == "slurm":
        for name, given in (("--image", image), ("--volume", volumes)):
            if given:
                raise UserError(name, "Slurm starts no container here; leave it out", "提交到 Slurm 时不启动容器；请删去")
    elif not image:
        raise UserError("--image", "is missing: an image in which AscendFactory is installed", "缺少：请写明已安装 AscendFactory 的镜像")


def _check_resume(plan: Plan) -> None:
    """A checkpoint that is named would be the start of every attempt, and undo what the one before has done."""
    resume = plan.recipe.checkpoint.resume
    if resume not in ("auto", "none"):
        raise UserError(
            "checkpoint.resume",
            f"every start on the nodes would go back to {resume}; copy it to {plan.run_dir}/checkpoints, and write checkpoint.resume: auto",
            f"节点上的每次启动都会回到 {resume}；请将其复制到 {plan.run_dir}/checkpoints，并写 checkpoint.resume: auto",
        )


def _for_slurm(order: Order) -> list[Line]:
    """The nodes share the disk with this machine: what is not here is not there."""
    if environment := BACKENDS[order.plan.backend].render(order.plan).environment:
        require_environment(environment)
    for where, path in order.inputs():
        if not order.absolute(Path(path).expanduser()).exists():
            raise UserError(where, f"no such file or folder: {path}", f"没有这个文件或文件夹：{path}")
    return []


def _for_kubernetes(order: Order) -> list[Line]:
    notes = kubernetes.check_paths(order)
    environment = BACKENDS[order.plan.backend].render(order.plan).environment
    if environment and not order.env:
        en = f"the image has to have the environment {environment}; or set {VARIABLE} to a folder on a volume"
        notes.append(Line(en=en, zh=f"镜像中须有环境 {environment}；或将 {VARIABLE} 设为卷上的文件夹"))
    return notes


def _environment(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Where the back end's environment lies, if the person has said so."""
    environment = BACKENDS[plan.backend].render(plan).environment
    return ((VARIABLE, str(environment_dir(environment).parent)),) if environment and os.environ.get(VARIABLE) else ()


def _make_run(plan: Plan) -> Path:
    """The run folder. One that starts over does so now, once; and only the scheduler, which can replace a node, starts it again."""
    folder = create_run(plan)
    recipe = plan.recipe
    changes = {"checkpoint": recipe.checkpoint.model_copy(update={"resume": "auto"})} if recipe.checkpoint.resume == "none" else {}
    cluster = recipe.cluster.model_copy(update={"restarts": 0})
    create_run(plan.model_copy(update={"recipe": recipe.model_copy(update=changes | {"cluster": cluster})}))
    return folder
