"""MindSpeed-MM: what its validator lets pass and its models do not, and files that only they read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ascendfactory.backends import BACKENDS
from ascendfactory.core.plan import Job
from tests.backends.plans import make_job_plan, make_recipe

MM = BACKENDS["mindspeed_mm"]


def job(model: str, layout: dict[str, Any], stage: str = "sft_full") -> Job:
    plan = make_job_plan(make_recipe(model, "mindspeed_mm", stage), {"zero": 1, **layout})
    assert MM.refuse(plan.recipe, plan.card, plan.layout) == []
    return MM.render(plan)


def refused(model: str, layout: dict[str, Any]) -> list[dict[str, Any]]:
    plan = make_job_plan(make_recipe(model, "mindspeed_mm"), {"zero": 1, **layout})
    return [refusal.fix for refusal in MM.refuse(plan.recipe, plan.card, plan.layout)]


@pytest.mark.parametrize(
    ("model", "layout", "fix"),
    [
        ("internvl3-8b", {"tp": 2, "sp": True}, {"layout.sp": False}),
        ("internvl3-8b", {"ulysses": 2}, {"layout.ulysses": 1}),
        ("qwen2.5-vl-7b", {"ring": 8}, {"layout.ring": 1}),
        ("qwen2.5-vl-7b", {"ring": 4, "ulysses": 2}, {"layout.ring": 1}),
        ("qwen2.5-vl-3b", {"tp": 4, "sp": True}, {"layout.tp": 2}),
    ],
)
def test_cuts_that_fail_on_its_rows_are_refused(model: str, layout: dict[str, Any], fix: dict[str, Any]) -> None:
    assert refused(model, layout) == [fix]


@pytest.mark.parametrize(
    ("model", "layout", "is_unaligned"),
    [
        ("internvl3-8b", {"pp": 2}, False),
        ("internvl3-8b", {"tp": 4}, True),  # 151674 words are no multiple of 4
        ("qwen2.5-vl-7b", {"tp": 4, "sp": True}, False),  # patches are a multiple of 4
        ("qwen2.5-vl-32b", {"tp": 8, "sp": True}, True),
        ("qwen2.5-vl-32b", {"tp": 8}, False),
        ("qwen2.5-vl-7b", {"tp": 4, "sp": True, "ulysses": 2}, False),  # rows are a multiple of 8
    ],
)
def test_shares_of_different_size_are_asked_for_where_they_occur(model: str, layout: dict[str, Any], is_unaligned: bool) -> None:
    assert ("--unaligned-linear" in job(model, layout).argv) is is_unaligned


@pytest.mark.parametrize("model", ["qwen2.5-vl-7b", "internvl3-8b"])
def test_recomputation_stands_where_its_models_read_it(model: str) -> None:
    part = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for stage, of_tower in (("sft_full", {}), ("pretrain_full", whole)):  # a tower that stays as it is keeps nothing
        made = job(model, {"pp": 2, "recompute": "full", "recompute_layers": 3}, stage)
        config = json.loads(made.files["job/model.json"])
        text, tower = config["text_decoder"], config["image_encoder"]["vision_encoder"]
        assert {name: value for name, value in text.items() if name.startswith("recompute")} == part
        assert {name: value for name, value in tower.items() if name.startswith("recompute")} == of_tower
        assert not [word for word in made.argv if "recompute" in word]


def test_the_converter_is_the_program_of_the_sources() -> None:
    made = job("qwen2.5-vl-7b", {"pp": 2, "stage_layers": (10, 18)})
    for step, direction, layers in ((made.before[0], "hf_to_mm", "[[10,18]]"), (made.after[0], "mm_to_hf", "[10,18]")):
        assert step.argv[:4] == ["python", "{env}/src/MindSpeed-MM/checkpoint/convert_cli.py", "Qwen2_5_VLConverter", direction]
        assert step.argv[step.argv.index("--cfg.parallel_config.llm_pp_layers") + 1] == layers
