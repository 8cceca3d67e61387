"""`ascendfactory plan`: every decision and its reason, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ascendfactory.cli.recipes import read_recipe
from ascendfactory.core.messages import UserError, nearest, pick

if TYPE_CHECKING:
    from ascendfactory.core.plan import Plan, Refusal
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
    top: Annotated[int, typer.Option(help=pick("how many of the next best layouts to show", "显示多少个次优布局"))] = 3,
    layout: Annotated[str, typer.Option(help=pick("price one layout: tp=8,pp=2", "评估指定布局：tp=8,pp=2"))] = "",
    table: Annotated[
        bool,
        typer.Option(
            "--table",
            help=pick(
                "the minimum-device table beside the published one; a model or a recipe may follow",
                "最少设备表与已公布数据对照；可跟模型名或配方",
            ),
        ),
    ] = False,
    simulate: Annotated[
        bool,
        typer.Option(help=pick("trace the engine's own step for these devices, without them", "无需设备，追踪内置引擎自身的一步")),
    ] = False,
) -> None:
    """Show how a recipe will run, and why."""
    _refuse_what_does_not_go_together(top, {"--table": table, "--min-devices": min_devices}, {"--json": json_out, "--simulate": simulate})
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
        typer.echo("\n" + pick(f"to run it there, write backend: {made.backend}", f"如需在其上运行，请写 backend: {made.backend}"))
        install = f"'ascendfactory install {made.backend}'"
        typer.echo(pick(f"({install} makes its environment)", f"（{install} 安装其环境）"))


def _refuse_what_does_not_go_together(top: int, tables: dict[str, bool], of_a_plan: dict[str, bool]) -> None:
    """Options that would be ignored are errors.

    Raises:
        UserError: for two tables at once, an option of a plan beside a table, or a negative number of alternatives.
    """
    if top < 0:
        raise UserError("--top", f"{top} is below 0; write 0 or more", f"{top} 小于 0；请写 0 或更大的数")
    shown = [name for name, given in tables.items() if given]
    beside = [*shown[1:], *(name for name, given in of_a_plan.items() if given)]
    if shown and beside:
        first, other = shown[0], beside[0]
        raise UserError(
            other, f"does not go with {first}, which makes no plan; leave one out", f"不能与 {first} 同用（它不生成计划）；请去掉其一"
        )
    if of_a_plan["--json"] and of_a_plan["--simulate"]:
        raise UserError("--simulate", "prints a table, and --json a plan; leave one out", "输出表格，而 --json 输出计划；请去掉其一")


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
    """The smallest cluster for each engine that takes the recipe, and why others do not.

    Raises:
        UserError: when no engine holds it.
    """
    from rich.console import Console
    from rich.table import Table

    from ascendfactory.backends import BACKENDS
    from ascendfactory.catalog.read import find_card, find_device
    from ascendfactory.core.plan import Layout
    from ascendfactory.launch.devices import resolve_cluster
    from ascendfactory.planner.explain import layout_words
    from ascendfactory.planner.fewest import fewest_devices
    from ascendfactory.planner.priced import priced_engines

    card, cluster = find_card(recipe.model.path), resolve_cluster(recipe.cluster, find_device)
    judges = {**priced_engines(), **BACKENDS}
    names = list(judges) if recipe.backend == "auto" else [recipe.backend]
    held: list[tuple[int, tuple[str, ...]]] = []
    others: list[str] = []
    for name in names:
        if name not in judges:
            others.append(
                f"{name}: {pick('not a back end; all of them: ascendfactory backends', '没有这个后端；全部：ascendfactory backends')}"
            )
        elif found := fewest_devices(recipe, card, cluster.device, name, judges[name]):
            where = f"{found.cluster.nodes}x{found.cluster.nproc} {cluster.device.name}"
            figures = (f"{found.peak_bytes / 2**30:.1f}", f"{found.tokens_per_s_device:.0f}", layout_words(found.layout))
            held.append((found.cluster.num_devices, (name, where, *figures)))
        else:
            why = _why_none(judges[name].refuse(recipe, card, Layout()), cluster.device.name)
            others.append(f"{name}: {why.removeprefix(f'{name}: ').removeprefix(f'{name}：')}")
    if not held:
        raise UserError("cluster", "; ".join(others), "；".join(others))
    shown = Table(box=None, pad_edge=False)
    titles = ("back end", "devices", "GiB", "tokens/s a device", "layout"), ("后端", "设备", "GiB", "每设备 tokens/s", "布局")
    for en, zh in zip(*titles, strict=True):
        shown.add_column(pick(en, zh), justify="right" if en in ("GiB", "tokens/s a device") else "left")
    for _, row in sorted(held):
        shown.add_row(*row)
    Console(highlight=False).print(shown)
    if others:
        typer.echo("\n" + "\n".join([pick("passed over:", "未选用："), *(f"· {line}" for line in others)]))


def _why_none(refusals: list[Refusal], device: str) -> str:
    """Why an engine is not in the list: what it refuses whatever the layout, or that too many devices are needed."""
    for refusal in refusals:
        if not refusal.where.startswith(("layout.", "cluster.")):
            return pick(refusal.en, refusal.zh)
    return pick(f"no number of {device} up to 1024 holds it", f"1024 个以内的 {device} 都容纳不下")


def _print_table(model: str | None) -> None:
    """The published smallest device counts beside the planner's; of one model (its name, or a recipe of it) or of all."""
    from rich.console import Console
    from rich.table import Table

    from ascendfactory.catalog.read import find_card
    from ascendfactory.planner.priced import priced_engines
    from ascendfactory.planner.table import cells

    if model and model.endswith((".yaml", ".yml")):
        model = read_recipe(model).model.path
    name = find_card(model).name if model else None
    shown = Table(box=None, pad_edge=False)
    titles = (
        ("model", "tuning", "tokens", "back end", "published", "planner", "reason"),
        ("模型", "调优", "token 数", "后端", "已公布", "规划器", "原因"),
    )
    for i, (en, zh) in enumerate(zip(*titles, strict=True)):
        shown.add_column(pick(en, zh), justify="right" if i in (2, 4, 5) else "left", no_wrap=i < 6)
    for cell in cells(priced_engines(), model=name):
        row = cell.row
        published = f"{row.num_devices}{'' if row.confidence == 'exact' else '?'}"
        words = (row.model, row.tuning, str(cell.seq_len), row.backend, published, str(cell.num_devices or "-"))
        shown.add_row(*words, str(cell.reason or ""))
    if not shown.row_count:
        raise UserError("--table", f"nothing is published for {name}", f"没有 {name} 的已公布数据")
    Console(highlight=False).print(shown)
    typer.echo(pick("Snt9b devices; ?: an inferred reading of the published table", "Snt9b 设备；?：对已公布表格的推断读法"))
