"""`ascendfactory plan`: every decision and its reason, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ascendfactory.cli.recipes import read_recipe
from ascendfactory.core.messages import UserError, nearest, pick

if TYPE_CHECKING:
    from ascendfactory.core.plan import Plan
    from ascendfactory.core.recipe import Recipe

OPTIONS = ["--json", "--devices", "--min-devices", "--top", "--layout", "--table", "--simulate"]


def plan(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(help=pick("recipe file; settings may follow: --optim.lr=1e-5", "配方文件；其后可跟设置项：--optim.lr=1e-5")),
    ] = None,
    json_out: Annotated[bool, typer.Option("--json", help=pick("print the plan as JSON", "以 JSON 输出计划"))] = False,
    devices: Annotated[str, typer.Option(help=pick('plan for other devices: "2x8 snt9b"', '为其他设备规划："2x8 snt9b"'))] = "",
    min_devices: Annotated[
        bool, typer.Option("--min-devices", help=pick("the fewest devices that hold the recipe", "能容纳该配方的最少设备数"))
    ] = False,
    top: Annotated[int, typer.Option(min=0, help=pick("how many of the next best layouts to show", "显示多少个次优布局"))] = 3,
    layout: Annotated[str, typer.Option(help=pick("price one layout: tp=8,pp=2", "评估指定布局：tp=8,pp=2"))] = "",
    table: Annotated[
        bool,
        typer.Option(
            "--table",
            help=pick("the minimum-device table beside the published one; MODEL may follow", "最少设备表与已公布数据对照；可跟模型名"),
        ),
    ] = False,
    simulate: Annotated[
        bool,
        typer.Option(help=pick("trace the engine's own step for these devices, without them", "无需设备，追踪内置引擎自身的一步")),
    ] = False,
) -> None:
    """Show how a recipe will run, and why."""
    if table:
        _print_table(recipe)
        return
    if recipe is None:
        raise UserError(
            "", "Missing argument 'recipe'; see 'ascendfactory plan --help'", "缺少参数 'recipe'；见 'ascendfactory plan --help'"
        )
    settings = [*([f"--cluster={devices}"] if devices else []), *_layout_settings(layout)]
    read = read_recipe(recipe, [*context.args, *settings], OPTIONS)
    if min_devices:
        _print_fewest(read)
        return
    from ascendfactory.api import make_plan

    made = make_plan(read, launchable=False, num_alternatives=top)
    if json_out:
        typer.echo(made.model_dump_json(indent=2))
        return
    from rich.console import Console

    from ascendfactory.planner.explain import render

    Console(highlight=False).print(render(made))
    if simulate:
        _print_simulation(made)
    if made.backend not in ("native", made.recipe.backend):
        en = f"to run it there, write backend: {made.backend} ('ascendfactory install {made.backend}' makes its environment)"
        typer.echo("\n" + pick(en, f"如需在其上运行，请写 backend: {made.backend}（'ascendfactory install {made.backend}' 安装其环境）"))


def _print_simulation(made: Plan) -> None:
    """Bytes that the engine's code would hold and receive, beside the planner's terms.

    Raises:
        UserError: the plan is not of the embedded engine, or the model's config.json is not at hand.
    """
    if made.backend != "native":
        raise UserError(
            "--simulate",
            f"only the embedded engine can be traced, and this plan is for {made.backend}; write --backend=native",
            f"只能追踪内置引擎，而该计划属于 {made.backend}；请写 --backend=native",
        )
    from rich.console import Console
    from rich.table import Table

    from ascendfactory.engine.simulate import simulate

    found = simulate(made)
    planned = {term.name: term.num_bytes for term in made.memory}
    shown = Table(box=None, pad_edge=False)
    shown.add_column(pick("traced, a device", "追踪所得（单设备）"))
    for title in ("GiB", pick("planned", "规划")):
        shown.add_column(title, justify="right")
    for name, size in found.peak_bytes.items():
        shown.add_row(name, f"{size / 2**30:.3f}", f"{planned[name] / 2**30:.3f}" if name in planned else "")
    for name, size in found.communicated_bytes.items():
        shown.add_row(pick(f"{name}, a step", f"{name}（每步）"), f"{size / 2**30:.3f}", "")
    Console(highlight=False).print("", shown)


def _layout_settings(text: str) -> list[str]:
    """`tp=8,pp=2` as settings of the recipe.

    Raises:
        UserError: for a word without "=", or a key that a layout does not have.
    """
    from ascendfactory.core.recipe import LayoutSpec

    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = word.partition("=")
        if not equals or key not in LayoutSpec.model_fields:
            guess = nearest(key, LayoutSpec.model_fields) or "tp"
            raise UserError(
                "--layout",
                f"'{word}' is no part of a layout; did you mean '{guess}=...'? such as tp=8,pp=2",
                f"'{word}' 不是布局的一部分，是否想写 '{guess}=...'？例如 tp=8,pp=2",
            )
        found.append(f"--layout.{key}={value}")
    return found


def _print_fewest(recipe: Recipe) -> None:
    """The smallest cluster for each engine that takes the recipe."""
    from ascendfactory.backends import BACKENDS
    from ascendfactory.catalog.read import find_card, find_device
    from ascendfactory.launch.devices import resolve_cluster
    from ascendfactory.planner.explain import layout_words
    from ascendfactory.planner.fewest import fewest_devices
    from ascendfactory.planner.priced import priced_engines

    card, cluster = find_card(recipe.model.path), resolve_cluster(recipe.cluster, find_device)
    judges = {**priced_engines(), **BACKENDS}
    names = list(judges) if recipe.backend == "auto" else [recipe.backend]
    lines = []
    for name in names:
        found = fewest_devices(recipe, card, cluster.device, name, judges[name])
        if found:
            words = f"{found.cluster.nodes}x{found.cluster.nproc} {cluster.device.name}: {layout_words(found.layout)}"
            speed = pick(f"{found.tokens_per_s_device:.0f} tokens/s a device", f"每设备 {found.tokens_per_s_device:.0f} tokens/s")
            lines.append((found.cluster.num_devices, f"{name:<14} {words}, {found.peak_bytes / 2**30:.1f} GiB, {speed}"))
    if not lines:
        raise UserError(
            "cluster", f"no number of {cluster.device.name} up to 1024 holds it", f"1024 个以内的 {cluster.device.name} 都容纳不下"
        )
    for _, line in sorted(lines):
        typer.echo(line)


def _print_table(model: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from ascendfactory.catalog.read import find_card
    from ascendfactory.planner.priced import priced_engines
    from ascendfactory.planner.table import cells

    shown = Table(box=None, pad_edge=False)
    for title in ("model", "tuning", "tokens", "backend", "published", "planner", "reason"):
        shown.add_column(title, justify="right" if title in ("tokens", "published", "planner") else "left")
    for cell in cells(priced_engines(), model=find_card(model).name if model else None):
        row = cell.row
        number = "-" if cell.num_devices is None else str(cell.num_devices)
        shown.add_row(
            row.model,
            row.tuning,
            str(cell.seq_len),
            row.backend,
            f"{row.num_devices}{'' if row.confidence == 'exact' else '?'}",
            number,
            cell.reason,
        )
    Console(highlight=False).print(shown)
