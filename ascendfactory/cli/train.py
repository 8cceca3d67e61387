"""`ascendfactory train`: from a recipe (or a plan.json) to a trained model."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from ascendfactory.cli.progress import Progress
from ascendfactory.cli.recipes import is_legacy, read_recipe, read_text
from ascendfactory.core.messages import UserError, pick
from ascendfactory.core.plan import Plan


def train(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            help=pick(
                "recipe file, or a plan.json to repeat; settings may follow: --optim.lr=1e-5",
                "配方文件，或要重跑的 plan.json；其后可跟设置项",
            )
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help=pick("show the plan and the command; start nothing", "只显示计划与命令，不启动"))
    ] = False,
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", help=pick("start on these machines by ssh: a,b,c or @FILE", "经 ssh 在这些机器上启动：a,b,c 或 @文件")),
    ] = None,
    ssh: Annotated[str | None, typer.Option("--ssh", help=pick("the ssh command, with its options", "ssh 命令及其选项"))] = None,
) -> int:
    """Run a recipe; the same command resumes it."""
    is_old = _is_old(recipe)
    names = _hosts_of(hosts, ssh, is_old)
    plan = _plan_of(recipe, context.args, is_old, num_hosts=len(names))
    if dry_run:
        _show(plan)
        return 0
    if names:
        return _train_on(names, ssh, plan)
    from ascendfactory.launch.place import find_place
    from ascendfactory.launch.start import start

    def prepare(folder: Path) -> None:
        if is_old:
            from ascendfactory.cli.legacy import old_tree
            from ascendfactory.launch.old_names import keep_old_names

            keep_old_names(folder, plan, old_tree(recipe, context.args))

    if is_old:
        from ascendfactory.cli.legacy import set_environment

        set_environment(recipe, context.args)
    with Progress(plan.recipe.output.log_every) as progress:
        code = start(plan, on_step=progress.step, on_event=progress.event, on_folder=prepare)
    if is_old:
        from ascendfactory.launch.old_names import link_results

        link_results(Path(plan.run_dir), plan)
    last = progress.last
    if plan.cluster.nodes == 1 or find_place(os.environ).rank == 0:
        _say_where(plan, finished=code == 0 and (last is None or last.step >= last.num_steps))
    return code


def _is_old(path: str) -> bool:
    """Whether a file is AscendFactory 6.5's own YAML."""
    return path != "-" and not path.endswith(".json") and is_legacy(read_text(path))


def _hosts_of(hosts: str | None, ssh: str | None, is_old: bool) -> list[str]:
    """The machines of --hosts; empty without it."""
    if hosts is None:
        if ssh is not None:
            raise UserError("--ssh", "says how to reach machines; name them by --hosts a,b", "说明如何连接机器；请用 --hosts a,b 写明机器")
        return []
    if is_old:
        en = "a file of AscendFactory 6.5 is started on each node with NODE_RANK; for --hosts turn it into a recipe (ascendfactory migrate)"
        zh = "6.5 版文件须在各节点以 NODE_RANK 启动；如需 --hosts，请先转为配方（ascendfactory migrate）"
        raise UserError("--hosts", en, zh)
    from ascendfactory.launch.ssh import read_hosts

    return read_hosts(hosts)


def _train_on(hosts: list[str], ssh: str | None, plan: Plan) -> int:
    from ascendfactory.launch.ssh import SSH, start_on_hosts

    with Progress(plan.recipe.output.log_every) as progress:
        command = shlex.split(ssh) if ssh else SSH
        code = start_on_hosts(plan, hosts, on_step=progress.step, on_event=progress.event, ssh=command)
    last = progress.last
    _say_where(plan, finished=code == 0 and (last is None or last.step >= last.num_steps))
    return code


def _plan_of(path: str, arguments: list[str], is_old: bool, num_hosts: int) -> Plan:
    if path.endswith(".json"):
        from ascendfactory.launch.runs import read_plan

        if arguments:
            en = "a plan is run as it is; change the recipe instead"
            raise UserError(arguments[0], en, "计划按原样运行；请改用配方来修改设置")
        plan = read_plan(Path(path))
        _check_hosts(num_hosts, plan.cluster.nodes)
        return plan
    if is_old:
        from ascendfactory.cli.legacy import legacy_plan

        return legacy_plan(path, arguments)
    from ascendfactory.api import make_plan

    recipe = read_recipe(path, arguments, ["--dry-run", "--hosts", "--ssh"])
    if num_hosts and recipe.cluster.nodes == 1:  # the recipe does not say: the hosts do
        recipe = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"nodes": num_hosts})})
    _check_hosts(num_hosts, recipe.cluster.nodes)
    return make_plan(recipe)


def _check_hosts(num_hosts: int, nodes: int) -> None:
    if num_hosts and num_hosts != nodes:
        raise UserError(
            "--hosts", f"names {num_hosts} machines, cluster.nodes is {nodes}", f"写了 {num_hosts} 台机器，而 cluster.nodes 为 {nodes}"
        )


def _show(plan: Plan) -> None:
    from rich.console import Console

    from ascendfactory.backends import BACKENDS
    from ascendfactory.planner.explain import render

    Console(highlight=False).print(render(plan))
    job = BACKENDS[plan.backend].render(plan)
    for task in (*job.before, job, *job.after):
        typer.echo("\n" + " ".join([*(f"{k}={shlex.quote(v)}" for k, v in task.env.items()), shlex.join(task.argv)]))
    for name, text in job.files.items():
        if not name.endswith(".py"):
            typer.echo(f"\n--- {plan.run_dir}/{name}\n{text.rstrip()}")


def _say_where(plan: Plan, finished: bool) -> None:
    """The lines after training: results, and what to do next."""
    folder = Path(plan.run_dir)
    lines = []
    if (folder / "report.html").exists():
        lines.append((pick("report", "报告"), str(folder / "report.html")))
    if finished and (folder / "export").is_dir():
        lines.append((pick("model", "模型"), str(folder / "export")))
        lines.append((pick("talk to it", "对话"), f"ascendfactory chat {shlex.quote(str(folder / 'export'))}"))
    for name, text in lines:
        typer.echo(f"{name}: {text}")
