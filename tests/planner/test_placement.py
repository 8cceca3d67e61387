"""Where answers are generated: beside training or on devices of their own, and what the recipe says of their number and length."""

from __future__ import annotations

from typing import Any

import pytest

from ascendfactory.api import make_plan
from ascendfactory.core.load import load_recipe
from ascendfactory.core.plan import NoPlan, Plan

BASE = "model: qwen3-8b\ndata: {train: d.jsonl, seq_len: 4096}\nbatch: 64\nbackend: verl\noptim: {schedule: constant}\ncluster: 8 snt9b"


def plan_of(*overrides: str, objective: str = "grpo") -> Plan:
    return make_plan(load_recipe(BASE, [f"--objective={objective}", *overrides]))


def placement(*overrides: str, objective: str = "grpo") -> Any:
    found = plan_of(*overrides, objective=objective).placement
    assert found is not None
    return found


def test_devices_take_turns_unless_asked_otherwise() -> None:
    plan = plan_of()
    assert plan.placement is not None and plan.placement.colocated
    assert plan.placement.rollout_devices == plan.layout.num_devices == 8


@pytest.mark.parametrize(("cluster", "unit"), [("8 snt9b", 1), ("4x8 snt9b", 8), ("2 snt9b", 1)])
def test_one_step_off_training_and_generation_share_the_devices_out(cluster: str, unit: int) -> None:
    plan = plan_of(f"--cluster={cluster}", "--objective.off_policy_steps=1", "--model=qwen3-0.6b")
    assert plan.placement is not None and plan.prediction is not None and not plan.placement.colocated
    assert plan.layout.num_devices + plan.placement.rollout_devices == plan.cluster.num_devices
    assert plan.placement.rollout_devices % unit == 0 and plan.placement.rollout_devices % plan.placement.rollout_tp == 0
    assert plan.placement.step_s == max(plan.prediction.step_s, plan.placement.rollout_s)


def test_one_step_off_wants_two_devices() -> None:
    with pytest.raises(NoPlan) as caught:
        plan_of("--cluster=1 snt9b", "--objective.off_policy_steps=1", "--model=qwen3-0.6b")
    assert [(r.where, r.fix) for r in caught.value.refusals] == [("objective.off_policy_steps", {"objective.off_policy_steps": 0})]


def test_a_layout_for_all_devices_says_that_some_generate() -> None:
    with pytest.raises(NoPlan) as caught:
        plan_of("--objective.off_policy_steps=1", "--layout.dp=8")
    assert "beside those that generate training has 6" in caught.value.refusals[0].en


def test_every_answer_is_trained_and_generated() -> None:
    few, many = plan_of("--objective.num_answers=2"), plan_of("--objective.num_answers=8")
    assert few.prediction and many.prediction and few.placement and many.placement
    assert (few.layout.num_micro * few.layout.micro_size * few.layout.dp, many.layout.num_micro * many.layout.micro_size * 8) == (128, 512)
    assert many.prediction.step_s == pytest.approx(4 * few.prediction.step_s, rel=0.1)
    assert many.placement.rollout_s > few.placement.rollout_s


def test_longer_prompts_leave_less_to_generate() -> None:
    assert placement("--objective.max_prompt_tokens=3072").rollout_s < 0.5 * placement().rollout_s


def test_the_engine_gets_weights_and_workspace_beside_its_cache() -> None:
    plan = plan_of()
    assert plan.placement is not None
    weights = 2 * plan.card.num_params / plan.placement.rollout_tp / plan.cluster.device.memory_bytes
    assert plan.placement.kv_share + weights < plan.placement.memory_share <= 0.9


def test_a_reference_costs_memory_and_time_only_where_it_is_kept() -> None:
    kept, none = plan_of(), plan_of("--objective.kl_coef=0")
    assert kept.prediction and none.prediction and kept.prediction.step_s > none.prediction.step_s
    assert "reference" in {t.name for t in kept.memory} and "reference" not in {t.name for t in none.memory}
    assert "reference" in {t.name for t in plan_of("--objective.kl_coef=0.01", "--cluster=2x8 snt9b", objective="ppo").memory}


def test_megatron_is_priced_as_megatron_where_tp_is_asked_for() -> None:
    plan = plan_of("--layout.tp=4")
    assert (plan.layout.tp, plan.layout.zero) == (4, 1)
    by_name = {term.name: term.num_bytes for term in plan.memory}
    assert by_name["weights"] == pytest.approx(2 * plan.card.num_params / 4, rel=0.02)  # whole copies, not shards


def test_a_batch_that_cannot_be_shared_counts_prompts() -> None:
    with pytest.raises(NoPlan) as caught:
        plan_of("--batch=3", "--objective.num_answers=4")
    [refusal] = [r for r in caught.value.refusals if r.where == "batch.global_size"]
    assert refusal.fix == {"batch.global_size": 4} and refusal.en.startswith("12 rows cannot be shared by dp 8")
