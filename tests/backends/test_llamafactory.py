"""LLaMA-Factory's rules about DeepSpeed and torchrun, as its own parser has them."""

from __future__ import annotations

from typing import Any

import pytest

from ascendfactory.backends import BACKENDS
from tests.backends.plans import make_job_plan, make_recipe


def refused(layout: dict[str, Any], stage: str = "sft_full", **settings: Any) -> list[tuple[str, str]]:
    plan = make_job_plan(make_recipe("qwen2.5-7b", "llamafactory", stage, **settings), layout)
    return [(r.where, r.en) for r in BACKENDS["llamafactory"].refuse(plan.recipe, plan.card, plan.layout)]


@pytest.mark.parametrize(
    ("option", "bad", "good", "way"),
    [
        ("use_galore", {"zero": 2}, None, "leave it out"),
        ("use_apollo", {"zero": 3}, None, "leave it out"),
        ("pissa_init", {"zero": 3}, {"zero": 2}, "write layout.zero: 2"),
        ("pure_bf16", {"zero": 3}, {"zero": 1}, "write layout.zero: 2"),
        ("use_badam", {"zero": 2}, {"zero": 3}, "write layout.zero: 3"),
    ],
)
def test_options_that_contradict_deepspeed(option: str, bad: dict[str, Any], good: dict[str, Any] | None, way: str) -> None:
    [(where, en)] = refused(bad, extra={option: True})
    assert where == f"extra.{option}" and en.endswith(f"not with DeepSpeed ZeRO {bad['zero']}; {way}")
    assert refused(bad, extra={option: False}) == refused(bad, extra={option: True}, cluster="8 cpu") == []
    if good is not None:
        assert refused(good, extra={option: True}) == []


@pytest.mark.parametrize("offload", [False, True])
def test_deepspeed_on_one_device_is_started_by_torchrun(offload: bool) -> None:
    recipe = make_recipe("qwen2.5-7b", "llamafactory", "sft_lora", cluster="1 snt9b")
    job = BACKENDS["llamafactory"].render(make_job_plan(recipe, {"zero": 3, "offload_optimizer": offload}, nproc=1))
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"] if offload else []
    assert job.argv == ["python", *start, "runs/run/job/train.py", "runs/run/job/train.yaml", "runs/run/export"]
    assert ("job/deepspeed.json" in job.files) == offload
