"""A recipe from the command line: a file, and settings that go over it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ascendfactory.core.fields import all_keys
from ascendfactory.core.load import load_recipe
from ascendfactory.core.messages import UserError, nearest
from ascendfactory.core.recipe import Recipe


def read_recipe(path: str, arguments: Sequence[str] = (), options: Iterable[str] = ()) -> Recipe:
    """The recipe of a file with settings over it. A recipe without a name is called after its file.

    Args:
        path: a YAML file; `-` reads standard input.
        arguments: `--a.b=c` or `--a.b c`, as left over by the command line.
        options: the verb's own options, to guess from when one is misspelt.

    Raises:
        UserError: when there is no such file, or a setting or the recipe is wrong.
    """
    text = read_text(path)
    if is_legacy(text):
        from ascendfactory.cli.legacy import legacy_recipe

        return legacy_recipe(path, list(arguments))[0]
    recipe = load_recipe(text, settings(arguments, options))
    if "name" in recipe.model_fields_set or path == "-":
        return recipe
    return recipe.model_copy(update={"name": re.sub(r"[^\w.\-]+", "-", Path(path).stem) or "run"})


def is_legacy(text: str) -> bool:
    """Whether a YAML file is one of AscendFactory 6.5."""
    return bool(re.search(r"^(backend_config|af_\w+)\s*:", text, re.MULTILINE))


def read_text(path: str) -> str:
    """The text of a recipe file.

    Raises:
        UserError: naming the nearest YAML file beside it.
    """
    if path == "-":
        import sys

        return sys.stdin.read()
    file = Path(path).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        beside = [p.name for p in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
        guess = nearest(file.name, beside)
        found = str(file.parent / guess) if guess else None
        hint, hint_zh = "; 'ascendfactory config' writes one", "；可用 'ascendfactory config' 生成"
        if found:
            hint, hint_zh = f"; did you mean '{found}'?", f"，是否想用 '{found}'？"
        raise UserError(path, f"no such recipe file{hint}", f"没有这个配方文件{hint_zh}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(path, f"cannot be read as UTF-8 text: {error}", f"无法按 UTF-8 文本读取：{error}") from None


def settings(arguments: Sequence[str], options: Iterable[str] = ()) -> list[str]:
    """Arguments as `--key=value`; `--key value` is joined.

    Raises:
        UserError: for an argument that is no setting.
    """
    found: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            guess = nearest(word, all_keys())
            hint = f"--{guess}=..." if guess else "--optim.lr=1e-5"
            raise UserError(word, f"unexpected; settings are written such as {hint}", f"多余的参数；设置项写作 {hint}")
        if "=" in word:
            found.append(word)
        elif word[2:] in all_keys() and rest and not rest[0].startswith("--"):
            found.append(f"{word}={rest.pop(0)}")
        else:
            raise _unknown(word, options)
    return found


def _unknown(word: str, options: Iterable[str]) -> UserError:
    if word[2:] in all_keys():
        return UserError(word, f"needs a value: {word}=...", f"缺少值：{word}=...")
    keys = [f"--{key}=..." for key in all_keys()]
    bare = {option.strip("-"): option for option in options}
    guess = bare.get(nearest(word.strip("-"), bare) or "") or nearest(f"{word}=...", keys)
    hint, hint_zh = (f"; did you mean '{guess}'?", f"，是否想写 '{guess}'？") if guess else ("", "")
    return UserError(word, f"no such option{hint}", f"没有这个选项{hint_zh}")
