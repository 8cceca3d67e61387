"""`ascendfactory submit`: a run of one or many nodes, handed to a scheduler."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from ascendfactory.cli.recipes import read_recipe
from ascendfactory.core.messages import pick

OPTIONS = ["--to", "--send", "--image", "--volume", "--option"]


def submit(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help=pick("recipe file; settings may follow: --optim.lr=1e-5", "配方文件；其后可跟设置项"))],
    to: Annotated[str, typer.Option("--to", help="slurm, kubeflow, volcano")],
    is_sent: Annotated[
        bool, typer.Option("--send", help=pick("hand it over at once (sbatch, kubectl apply)", "立即提交（sbatch、kubectl apply）"))
    ] = False,
    image: Annotated[str, typer.Option("--image", help=pick("container image (Kubernetes)", "容器镜像（Kubernetes）"))] = "",
    volumes: Annotated[
        list[str] | None,
        typer.Option("--volume", help=pick("CLAIM:/path, may be repeated (Kubernetes)", "CLAIM:/path，可重复（Kubernetes）")),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            help=pick(
                "an option of sbatch, or YAML for the manifest ('metadata: {namespace: team}'); may be repeated",
                "sbatch 的选项，或并入清单的 YAML（'metadata: {namespace: team}'）；可重复",
            ),
        ),
    ] = None,
) -> int:
    """Write the job of a scheduler into the run folder, and hand it over."""
    from ascendfactory.api import make_plan
    from ascendfactory.launch.submit import check_named, prepare, send

    read = read_recipe(recipe, context.args, OPTIONS)
    check_named(read.cluster)
    plan = make_plan(read)
    made = prepare(plan, to, options=options or [], image=image, volumes=volumes or [])
    typer.echo(f"{pick('written', '已写入')}: {made.file}")
    for note in made.notes:
        typer.echo(f"{pick('note', '注意')}: {pick(note.en, note.zh)}")
    typer.echo(send(made) if is_sent else f"{pick('hand it over', '提交')}: {shlex.join(made.command)}")
    typer.echo(f"{pick('logs', '日志')}: {plan.run_dir}/logs")
    return 0
