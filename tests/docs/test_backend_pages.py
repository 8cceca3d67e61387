"""The pages about back ends: the example of the guide is a back end that works, and the tables name what exists."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ascendfactory.backends import BACKENDS
from ascendfactory.backends.common import options
from ascendfactory.catalog.read import find_card, find_device
from ascendfactory.core.fields import all_keys
from ascendfactory.core.load import load_recipe
from ascendfactory.core.plan import Cluster, Job, Plan
from ascendfactory.launch.environments import profiles
from ascendfactory.planner.search import make_plan
from tests.backends.plans import make_job_plan, make_recipe
from tests.backends.test_jobs import CHANGES, LAYOUT_CASES, _with, text_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {name: name.replace("_", "-") for name in BACKENDS if name != "native"}


def example(language: str) -> str:
    """The first Python block of the guide."""
    found = re.search(r"```python\n(.*?)```", (DOCS / language / "adding-a-backend.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def tuner() -> Any:
    module = types.ModuleType("tuner_backend")
    exec(compile(example("en"), "adding-a-backend.md", "exec"), module.__dict__)
    return module


def test_the_example_is_the_same_in_both_languages() -> None:
    assert example("en") == example("zh") and len(example("en").splitlines()) < 90


def job_of(tuner: Any, settings: dict[str, Any], layout: dict[str, Any]) -> Job | None:
    """The job, or None where it is refused."""
    plan = make_job_plan(make_recipe("qwen2.5-7b", "native", "sft_full", **settings), layout)
    adapter = tuner.Tuner()
    return None if adapter.refuse(plan.recipe, plan.card, plan.layout) else adapter.render(plan)


def test_every_setting_of_the_example_counts_or_is_refused(tuner: Any) -> None:
    before = job_of(tuner, {}, {})
    assert before is not None
    silent, counted = [], []
    cases = [(path, _with({}, path, value), {}) for path, value in CHANGES.items() if not path.startswith(("objective.", "tuning."))]
    cases += [("objective", {"objective": "grpo"}, {}), ("tuning", {"tuning": "lora"}, {})]
    cases += [("objective.train_on", {"objective": {"train_on": "all"}}, {})]
    cases += [
        (f"layout.{name}", {}, {name: value}) for name, value in LAYOUT_CASES if name not in ("stage_layers", "sp")
    ]  # sp: false is its default here
    for path, settings, layout in cases:
        changed = job_of(tuner, settings, layout)
        if changed is not None:
            (silent if text_of(changed) == text_of(before) else counted).append(path)
    planned = {"name", "batch.micro_size"}  # the run folder, and the plan's layout, carry them
    assert set(silent) - planned == set(tuner.NO_EFFECT)
    assert {"optim.lr", "data.seq_len", "data.shuffle", "seed", "duration", "batch.global_size", "layout.micro_size"} <= set(counted)


def test_the_planner_plans_the_example_and_its_job_says_so(tuner: Any, tmp_path: Path) -> None:
    recipe = load_recipe("{model: qwen2.5-0.5b, data: d.jsonl, duration: 3 steps, cluster: 8 snt9b, batch: 16, extra: {dropout: 0.1}}")
    cluster = Cluster(device=find_device("snt9b"), nodes=1, nproc=8)
    plan = make_plan(recipe, find_card("qwen2.5-0.5b"), cluster, {"tuner": tuner.Tuner()}, str(tmp_path))
    assert (plan.backend, plan.layout.dp, plan.layout.tp, plan.layout.recompute) == ("tuner", 8, 1, "none")
    job = tuner.Tuner().render(plan)
    config = json.loads(job.files["job/tuner.json"])
    assert (config["rows"] * config["accumulate"] * 8, config["steps"], config["dropout"], config["export"]) == (
        16,
        3,
        0.1,
        f"{tmp_path}/export",
    )
    assert job.argv[-4:] == ["8", "-m", "tuner", f"{tmp_path}/job/tuner.json"] and job.before[0].name == "data"
    step = tuner.Tuner().read_step("step 2 loss 1.25 norm 0.5 tokens 4096 seconds 0.5\n", plan)
    assert (step.step, step.num_steps, step.loss, step.tokens_per_s) == (2, 3, 1.25, 8192.0)
    assert tuner.Tuner().read_step("loading weights", plan) is None
    wrong = recipe.model_copy(update={"extra": {"dropuot": 0.1, "lr": 1.0}})
    told = {refusal.where: refusal.en for refusal in tuner.Tuner().refuse(wrong, plan.card, plan.layout)}
    assert told["extra.dropuot"] == "tuner: no such option; did you mean dropout?"
    assert told["extra.lr"] == "tuner: this is set from the recipe; change the recipe's own key instead"


def table_rows(text: str) -> list[list[str]]:
    """Cells of the table that maps settings to options: it stands in the second section."""
    section = text.split("\n## ")[2]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line.startswith("| `")]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("backend", PAGES)
def test_tables_name_settings_and_options_that_exist(backend: str, language: str) -> None:
    text = (DOCS / language / "backends" / f"{PAGES[backend]}.md").read_text(encoding="utf-8")
    rows = table_rows(text)
    keys = [name.split(":")[0] for row in rows for name in names_in(row[0])]
    assert len(keys) >= 12 and [key for key in keys if key not in all_keys()] == []
    if backend == "mindspeed_rl":  # options without a parser that could be asked: they are keys of the rendered configuration
        plan = make_job_plan(make_recipe("qwen2.5-7b", backend, "grpo_full"), {"zero": 1, "tp": 2, "sp": True, "pp": 2})
        known: set[str] = set(re.findall(r"(\w+):", BACKENDS[backend].render(plan).files["job/grpo.yaml"]))
        known |= {"expert_model_parallel_size", "context_parallel_size", "context_parallel_algo", "num_layers_per_virtual_pipeline_stage"}
        known |= {"recompute_granularity", "recompute_method", "recompute_num_layers"}
    else:
        known = {name for profile in profiles() if profile.backend == backend for name in options(profile.environment)}
    written = [name.removeprefix("--").split("=")[0] for row in rows for name in names_in(row[1])]
    known |= {name[i + 1 :] for name in known for i, letter in enumerate(name) if letter == "."}  # dotted names by their ends
    assert [name for name in written if name not in known and not name.endswith((".json", ".yaml", "/"))] == []


@pytest.mark.parametrize("backend", PAGES)
def test_both_languages_say_the_same_settings_and_every_profile(backend: str) -> None:
    texts = [(DOCS / language / "backends" / f"{PAGES[backend]}.md").read_text(encoding="utf-8") for language in ("en", "zh")]
    english, chinese = ([[names_in(cell) for cell in row] for row in table_rows(text)] for text in texts)
    assert english == chinese
    no_effect = sys.modules[type(BACKENDS[backend]).__module__].NO_EFFECT
    for text in texts:
        assert [profile.name for profile in profiles() if profile.backend == backend and f"`{profile.name}`" not in text] == []
        assert [key for key in no_effect if f"`{key}`" not in text] == []


def example_recipe(language: str, backend: str) -> Plan:
    text = (DOCS / language / "backends" / f"{PAGES[backend]}.md").read_text(encoding="utf-8")
    found = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert found is not None
    recipe = load_recipe(found[1])
    assert recipe.backend == backend
    device = find_device(recipe.cluster.device)
    nproc = recipe.cluster.nproc if recipe.cluster.nproc != "auto" else 8
    cluster = Cluster(device=device, nodes=recipe.cluster.nodes, nproc=nproc)
    return make_plan(recipe, find_card(recipe.model.path), cluster, dict(BACKENDS), "runs/x")


@pytest.mark.parametrize("backend", PAGES)
def test_the_recipe_of_a_page_is_planned_for_its_back_end(backend: str) -> None:
    plan = example_recipe("en", backend)
    assert plan.backend == backend and BACKENDS[backend].render(plan).argv
    assert example_recipe("zh", backend).recipe == plan.recipe
