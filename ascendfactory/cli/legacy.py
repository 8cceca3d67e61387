"""`ascendfactory migrate`, and `train X.yaml` of the YAML of AscendFactory 6.5."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from ascendfactory.core.load import RecipeError, dump_recipe, load_recipe
from ascendfactory.core.messages import UserError, pick
from ascendfactory.core.plan import NoPlan, Plan
from ascendfactory.core.recipe import Recipe
from ascendfactory.launch.migration import Migration


def migrate(
    context: typer.Context,
    file: Annotated[str, typer.Argument(help=pick("AscendFactory YAML of release 6.5.905 or later", "6.5.905 及以后版本的 YAML"))],
    output: Annotated[str, typer.Option("--output", help=pick("recipe file to write; - prints it", "要写入的配方文件；- 表示打印"))] = "-",
) -> int:
    """Turn an old YAML into a recipe, and say what changed."""
    old, ours = split_words(context.args)
    text, found = recipe_text(file, old, ours)
    if ours:
        text = dump_recipe(load_recipe(text, ours))
    _tell(found)
    if output == "-":
        typer.echo(text, nl=False)
        return 0
    if Path(output).exists():
        raise UserError(output, "exists; name another file", "文件已存在；请换一个名称")
    Path(output).write_text(text, encoding="utf-8")
    typer.echo(pick(f"wrote {output}", f"已写入 {output}"))
    return 0


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Words of the command line that set keys of the old file (`--env.NNODES=2`), and of the recipe (`--cluster="8 snt9b"`)."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and not word.startswith("--"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    ours = [word for word in joined if re.split(r"[.=]", word.removeprefix("--"))[0] in Recipe.model_fields]
    return [word for word in joined if word not in ours], ours


def recipe_text(file: str, old: list[str], ours: list[str]) -> tuple[str, Migration]:
    """The recipe of an old file as YAML, and how it came about.

    Args:
        old: settings of the old file's keys.
        ours: settings of the recipe's keys: the devices among them count in what is a sum over devices.

    Raises:
        UserError: the file is missing, or something in it is wrong; named as the old file names it.
    """
    from ascendfactory.launch.legacy import migrate as convert

    devices = [word for word in ours if re.match(r"--cluster\b", word)]
    given = load_recipe("model: m\ndata: d", devices).cluster if devices else None
    found = convert(_tree(file, old), given)
    ordered = {key: found.recipe[key] for key in Recipe.model_fields if key in found.recipe}
    text = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True)
    try:
        load_recipe(text, ours)
    except RecipeError as error:
        raise RecipeError([UserError(_old_place(p.where, found.places), p.en, p.zh) for p in error.problems]) from None
    return text, found


def old_tree(file: str, words: list[str]) -> dict[str, Any]:
    """An old file with the words of the command line and its references filled in; what exp-config.yaml keeps.

    Raises:
        UserError: the file is missing, is no YAML, or refers to what is not there.
    """
    return _tree(file, split_words(words)[0])


def set_environment(file: str, words: list[str]) -> None:
    """Sets the variables of the file's `env` for what is started: addresses and ranks of the nodes, and whatever else it names."""
    from ascendfactory.launch.legacy import environment

    os.environ.update(environment(old_tree(file, words)))


def _tree(file: str, old: list[str]) -> dict[str, Any]:
    from ascendfactory.cli.recipes import read_text
    from ascendfactory.launch.legacy import read_legacy

    return read_legacy(read_text(file), old)


def _old_place(where: str, places: dict[str, str]) -> str:
    """The old key that stands for a recipe key, or for the group that it is in; the recipe key where none does."""
    key = re.sub(r"\[\d+\]", "", where)
    while key:
        if key in places:
            return places[key]
        key = key.rpartition(".")[0]
    return where


def _tell(found: Migration) -> None:
    for line in found.notes:
        typer.echo(f"· {line}", err=True)


def legacy_recipe(file: str, words: list[str]) -> tuple[Recipe, dict[str, str]]:
    """The recipe of an old file, and which old key said each of its keys; tells on stderr what changed.

    Args:
        words: settings of the old file's keys, or of the recipe's.

    Raises:
        UserError: the file is missing, or something in it is wrong; named as the old file names it.
    """
    old, ours = split_words(words)
    text, found = recipe_text(file, old, ours)
    _tell(found)
    return load_recipe(text, ours), found.places


def legacy_plan(file: str, words: list[str]) -> Plan:
    """The plan of an old file, for `train`.

    Raises:
        NoPlan: with reasons that name the old file's keys.
    """
    from ascendfactory.api import make_plan

    recipe, places = legacy_recipe(file, words)
    try:
        return make_plan(recipe)
    except NoPlan as no:
        raise NoPlan([r.model_copy(update={"where": _old_place(r.where, places)}) for r in no.refusals]) from None
