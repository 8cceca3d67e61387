"""The batch script of Slurm: one launch on every node by srun, tried again after a failure.

Options and their meaning are those of Slurm 26.05, unchanged since 22.05: https://slurm.schedmd.com/sbatch.html, srun.html.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from ascendfactory.core.messages import UserError, pick
from ascendfactory.launch.order import STOP_S, Order

_FROM_THE_PLAN = {"--nodes": "cluster.nodes", "-N": "cluster.nodes"} | dict.fromkeys(("--ntasks", "-n", "--ntasks-per-node"), "")
_GPUS = ("--gpus-per-node", "--gpus", "-G", "--gpus-per-task")

# Ports: two jobs that share a node keep apart, below the range from which the kernel takes ports; the next one is used as well.
# NNODES and NODE_RANK of the shell that sent the job would make every node the same one.
# --wait=0: node 0 goes on alone after training (weights converted back); WaitTime of a site would end the step before.
# srun takes --cpus-per-task from the job no longer by itself since 22.05.
_BODY = """
unset NNODES NODE_RANK
cd {work_dir} || exit
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 5000 * 2))
export MASTER_ADDR MASTER_PORT

restarts_left={restarts}
while true; do
    srun --ntasks-per-node=1 ${{SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}} --kill-on-bad-exit=1 --wait=0 \\
        {command}
    code=$?
    case $code in
        0 | 2 | 130) break ;; # {never}
    esac
    [ "$restarts_left" -gt 0 ] || break
    echo "{again}"
    restarts_left=$((restarts_left - 1))
done
exit "$code"
"""


def script(order: Order, python: str = sys.executable) -> str:
    """The text of the batch script.

    Args:
        order: what runs.
        python: the interpreter on the nodes, which share the disk with this machine.

    Raises:
        UserError: an option is none of sbatch, or says what the plan says.
    """
    body = _BODY.format(
        work_dir=shlex.quote(str(order.work_dir)),
        restarts=order.plan.recipe.cluster.restarts,
        command=shlex.join(order.argv(python)),
        never=pick("done, wrong input, stopped by hand", "完成、输入有误、人为停止"),
        again=pick("ended with code $code; starting again, $restarts_left left", "以代码 $code 结束；重新启动，剩余 $restarts_left 次"),
    )
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in _directives(order)), body])


def _directives(order: Order) -> list[str]:
    """Ours, then the person's; one of theirs takes the place of ours with the same meaning."""
    names = {_name(option) for option in order.options}
    if any(_name(option) == "--gres" and "gpu" in option for option in order.options):
        names |= set(_GPUS)
    recipe, cluster = order.plan.recipe, order.plan.cluster
    log = str(order.folder / "logs").replace("%", "%%") + "/slurm-%j.out"
    rows: list[tuple[Sequence[str], str]] = [
        (("--job-name", "-J"), f"--job-name={recipe.name}"),
        ((), f"--nodes={cluster.nodes}"),
        ((), "--ntasks-per-node=1"),
        (("--cpus-per-task", "-c", "--cpus-per-gpu"), f"--cpus-per-task={order.cpus}"),
        (("--output", "-o"), f"--output={log}"),
        (("--open-mode",), "--open-mode=append"),  # a job that is queued again goes on in its log
        (("--signal",), f"--signal=TERM@{STOP_S}"),  # to the launches, not to this script
    ]
    match cluster.device.kind:
        case "cuda":
            rows.append((_GPUS, f"--gpus-per-node={cluster.nproc}"))
        case "npu":
            rows.append((("--gres",), f"--gres=npu:{cluster.nproc}"))
        case "cpu":
            pass
    if recipe.cluster.restarts:
        rows.append((("--requeue", "--no-requeue"), "--requeue"))  # after the loss of a node Slurm starts the whole script again
    return [*(shlex.quote(line) for aliases, line in rows if not names & set(aliases)), *order.options]


def _name(option: str) -> str:
    """`--gres` of `--gres=npu:8`, `-p` of `-p gpu` or `-pgpu`."""
    if not option.startswith("-") or "\n" in option or not option.strip("- "):
        raise UserError(
            "--option",
            f"'{option}' is no option of sbatch; write --option=--partition=gpu",
            f"'{option}' 不是 sbatch 的选项；请写 --option=--partition=gpu",
        )
    name = option.replace("=", " ").split()[0] if option.startswith("--") else option[:2]
    if name in _FROM_THE_PLAN:
        key = _FROM_THE_PLAN[name]
        fix, fix_zh = (f"set {key} in the recipe", f"请在配方中设置 {key}") if key else ("there is one task a node", "每个节点只有一个任务")
        raise UserError("--option", f"{name} comes from the plan; {fix}", f"{name} 由计划决定；{fix_zh}")
    return name
