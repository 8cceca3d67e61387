"""The generated pages are those that their generators write now; `make docs` renews them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args, get_origin

import pytest

from ascendfactory.core.fields import all_keys
from ascendfactory.core.load import load_recipe
from ascendfactory.core.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [("generate_recipe", "recipe.md"), ("generate_features", "features.md")]


def generator(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(("script", "file"), PAGES)
def test_page_is_current(script: str, file: str, language: str) -> None:
    written = (DOCS / language / file).read_text(encoding="utf-8")
    assert written == generator(script).page(language == "zh"), "stale: run 'make docs'"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_planners_page_is_current(language: str) -> None:
    """Of docs/min-devices.md the tables that take little time; the others take half a minute."""
    written = (DOCS / language / "min-devices.md").read_text(encoding="utf-8")
    module = generator("generate_planner")
    for table in (module.memory, module.speeds):
        assert table(language == "zh") in written, "stale: run 'make docs'"


def test_every_setting_has_a_meaning_and_no_meaning_is_left_over() -> None:
    wanted = {key for nodes in generator("generate_recipe").groups().values() for key in nodes}
    assert set(generator("generate_recipe").MEANINGS) == wanted
    # What the tables leave out is written in short forms and told in a note.
    left_out = set(all_keys()) - wanted
    assert {key.rpartition(".")[0] for key in left_out} == {
        "duration", "optim.warmup", "checkpoint.every", "output.eval_every", "data.eval",
    }  # fmt: skip


def test_chinese_meanings_are_chinese() -> None:
    texts = [text[1] if isinstance(text, tuple) else text for text in generator("generate_recipe").MEANINGS.values()]
    assert [text for text in texts if not re.search("[一-鿿]", text)] == []


def test_a_setting_that_nobody_described_stops_the_generator() -> None:
    module = generator("generate_recipe")
    with pytest.raises(KeyError):
        module.meaning("optim.momentum", all_keys()["optim.lr"], zh=True)
    module.MEANINGS["optim.lr"] = "只有中文"  # and recipe.py has no description of it
    with pytest.raises(KeyError, match=r"optim\.lr has no English meaning"):
        module.meaning("optim.lr", all_keys()["optim.lr"], zh=False)


def test_defaults_are_written_as_a_recipe_would_write_them() -> None:
    page = (DOCS / "en" / "recipe.md").read_text(encoding="utf-8")
    assert "| `lr` | a number above 0 | `1e-5` | peak learning rate |" in page
    assert "| `every` | such as '500 steps', '3 epochs' or '2e9 tokens' | `500 steps` | how often a checkpoint is saved |" in page
    assert "| `warmup` | such as 0.03 (a fraction of the run) or '100 steps' | `0.03` |" in page
    assert get_origin(Recipe.model_fields["backend"].annotation) is Literal
    for word in get_args(Recipe.model_fields["backend"].annotation):
        assert word in page


def yaml_blocks() -> list[tuple[str, str]]:
    pages = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted(DOCS.rglob("*.md"))]
    found = [(page, block) for page in pages for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)]
    return [(str(page.relative_to(ROOT)), block) for page, block in found]


def test_every_published_feature_has_a_setting_and_a_test_that_exist() -> None:
    module = generator("generate_features")
    assert set(module.HERE) == {(row.part, row.feature) for row in module.features()}
    for name, here in module.HERE.items():
        file, _, function = here.test.partition("::")
        assert (ROOT / file).is_file(), name
        assert not function or f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), name
        assert set(here.keys) <= set(all_keys()), name
        assert here.en and re.search("[一-鿿]|packing: false", here.zh), name


def test_recipes_shown_in_the_pages_load() -> None:
    blocks = yaml_blocks()
    assert {page for page, _ in blocks} >= {"README.md", "README.zh-CN.md"}
    for page, block in blocks:
        missing = [line for line in ("model: m", "data: d.jsonl") if not re.search(f"^{line.split(':')[0]}:", block, re.MULTILINE)]
        assert load_recipe("\n".join([block, *missing])).data.train, page


def test_both_languages_have_the_same_pages_and_links_lead_somewhere() -> None:
    names = {language: {path.relative_to(DOCS / language) for path in (DOCS / language).rglob("*.md")} for language in ("en", "zh")}
    assert names["en"] == names["zh"]
    for page in [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted(DOCS.rglob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
