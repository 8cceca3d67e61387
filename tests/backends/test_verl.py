"""verl's configuration of reinforcement-learning recipes: where each setting goes, what is refused, and how its lines are read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ascendfactory.backends import BACKENDS
from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Job, Plan
from ascendfactory.core.recipe import Model
from ascendfactory.launch.start import check_model
from tests.backends.plans import make_job_plan, make_recipe

FSDP: dict[str, Any] = {}
MEGATRON = {"tp": 2, "sp": True, "zero": 1}
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


def plan_of(stage: str, layout: dict[str, Any] = FSDP, model: str = "qwen3-8b", device: str = "snt9b", **settings: Any) -> Plan:
    recipe = make_recipe(model, "verl", stage, **settings)
    return make_job_plan(recipe, layout, recipe.cluster.nodes, device=device)


def job_of(stage: str, layout: dict[str, Any] = FSDP, **settings: Any) -> Job:
    plan = plan_of(stage, layout, **settings)
    assert BACKENDS["verl"].refuse(plan.recipe, plan.card, plan.layout) == []
    return BACKENDS["verl"].render(plan)


def words_of(stage: str, layout: dict[str, Any] = FSDP, **settings: Any) -> dict[str, str]:
    """The overrides of the driver, as they are written."""
    return dict(word.partition("=")[::2] for word in job_of(stage, layout, **settings).argv if "=" in word)


def refused(stage: str, layout: dict[str, Any] = FSDP, **settings: Any) -> list[tuple[str, str, dict[str, Any]]]:
    plan = plan_of(stage, layout, **settings)
    return [(r.where, r.en, r.fix) for r in BACKENDS["verl"].refuse(plan.recipe, plan.card, plan.layout)]


def test_the_short_form_is_grpo_as_it_is_published() -> None:
    words = words_of("grpo_full")
    assert words[f"{ROLLOUT}.n"] == "8" and words["algorithm.adv_estimator"] == "grpo"
    assert (words["data.max_prompt_length"], words["data.max_response_length"]) == ("1024", "3072")
    assert (words[f"{ACTOR}.use_kl_loss"], words[f"{ACTOR}.kl_loss_coef"], words[f"{ACTOR}.kl_loss_type"]) == (
        "True",
        "0.001",
        "low_var_kl",
    )
    assert (words[f"{ACTOR}.clip_ratio_low"], words[f"{ACTOR}.clip_ratio_high"]) == ("0.2", "0.2")
    assert "trainer.v1.trainer_mode" not in words and "reward.custom_reward_function.path" not in words


def test_dapo_filters_by_the_answers_own_score_and_punishes_its_last_fifth() -> None:
    words = words_of("dapo_full")
    assert words["algorithm.filter_groups.enable"] == "True" and words["algorithm.filter_groups.metric"] == "acc"
    part = "+reward.reward_kwargs"
    assert words[f"{part}.overlong_buffer_cfg.len"] == str(3072 // 5) and words[f"{part}.max_resp_len"] == "3072"
    assert (words[f"{ACTOR}.clip_ratio_high"], words[f"{ACTOR}.use_kl_loss"]) == ("0.28", "False")
    plain = words_of("dapo_full", objective={"overlong_tokens": 0, "dynamic_sampling": False})
    assert not [name for name in plain if name.startswith("+")] and plain["algorithm.filter_groups.enable"] == "False"


def test_ppo_takes_the_divergence_off_the_reward() -> None:
    words = words_of("ppo_full", objective={"kl_coef": 0.02, "critic_lr": 2e-5, "gamma": 0.99, "gae_lambda": 0.95})
    assert words["algorithm.use_kl_in_reward"] == "True" and words[f"{ACTOR}.use_kl_loss"] == "False"
    assert (words["algorithm.kl_ctrl.kl_coef"], words["algorithm.kl_penalty"]) == ("0.02", "kl")
    assert (words["critic.optim.lr"], words["algorithm.gamma"], words["algorithm.lam"]) == ("2e-05", "0.99", "0.95")
    assert words[f"{ROLLOUT}.n"] == "1" and words_of("ppo_full")["algorithm.use_kl_in_reward"] == "False"


def test_the_critic_is_split_as_the_actor_is() -> None:
    words = words_of("ppo_full", {"tp": 4, "sp": True, "pp": 2, "zero": 1})
    for part in (ACTOR, "critic"):
        assert (words[f"{part}.megatron.tensor_model_parallel_size"], words[f"{part}.megatron.pipeline_model_parallel_size"]) == ("4", "2")
    long = words_of("ppo_full", {"ulysses": 2})
    assert long["critic.fsdp.ulysses_sequence_parallel_size"] == "2"


def test_one_step_off_parts_the_devices_and_bounds_the_age_of_answers() -> None:
    words = words_of("grpo_full", objective={"off_policy_steps": 1})
    assert (words["trainer.nnodes"], words["trainer.n_gpus_per_node"]) == ("1", "6")
    assert (words[f"{ROLLOUT}.nnodes"], words[f"{ROLLOUT}.n_gpus_per_node"]) == ("1", "2")
    assert words["trainer.v1.trainer_mode"] == "separate_async" and words["actor_rollout_ref.hybrid_engine"] == "False"
    assert words["trainer.v1.separate_async.parameter_sync_step"] == "1" and words["trainer.v1.sampler.max_off_policy_threshold"] == "2"
    assert words["algorithm.rollout_correction.bypass_mode"] == "True" and words[f"{ROLLOUT}.gpu_memory_utilization"] == "0.8"
    many = words_of("grpo_full", objective={"off_policy_steps": 1}, cluster="4x8 snt9b")
    assert (many["trainer.nnodes"], many[f"{ROLLOUT}.nnodes"], many[f"{ROLLOUT}.n_gpus_per_node"]) == ("3", "1", "8")


def test_one_step_off_without_devices_of_its_own_is_no_job() -> None:
    plan = plan_of("grpo_full", objective={"off_policy_steps": 1}).model_copy(update={"placement": None})
    with pytest.raises(ValueError, match="off_policy_steps: 1 needs a plan"):
        BACKENDS["verl"].render(plan)


def test_adapters_travel_merged_to_devices_that_only_generate() -> None:
    """verl sends whole weights there; adapters would never arrive (verl issue 7495)."""
    apart = words_of("grpo_lora", objective={"off_policy_steps": 1})
    assert apart["actor_rollout_ref.model.lora.merge"] == "True" and f"{ROLLOUT}.load_format" not in apart
    together = words_of("grpo_lora")
    assert "actor_rollout_ref.model.lora.merge" not in together and together[f"{ROLLOUT}.load_format"] == "safetensors"


def test_adapters_are_no_wider_than_the_rollout_engine_takes() -> None:
    assert refused("grpo_lora", tuning={"rank": 512}) == []
    assert [(where, fix) for where, _, fix in refused("grpo_lora", tuning={"rank": 513})] == [("tuning.rank", {"tuning.rank": 512})]


def test_tools_and_rewards_of_ones_own() -> None:
    words = words_of("grpo_full", objective={"multi_turn": {"tools": "my tools.py", "max_turns": 3}, "reward": "r/rewards.py:score"})
    turns = f"{ROLLOUT}.multi_turn"
    assert (words[f"{turns}.enable"], words[f"{turns}.max_assistant_turns"]) == ("True", "3")
    assert words[f"{turns}.function_tool_path"] == "'my tools.py'" and words[f"{turns}.format"] == "hermes"
    assert words[f"{ROLLOUT}.agent.default_agent_loop"] == "tool_agent"
    assert (words["reward.custom_reward_function.path"], words["reward.custom_reward_function.name"]) == ("r/rewards.py", "score")
    classes = words_of("grpo_full", objective={"multi_turn": "tools.yaml"})
    assert classes[f"{turns}.tool_config_path"] == "tools.yaml" and f"{turns}.function_tool_path" not in classes


def test_code_of_ones_own_that_is_not_there_is_said_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_of("grpo_full", objective={"reward": "rewards.py:score", "multi_turn": "tools.py"})
    plan = plan.model_copy(update={"recipe": plan.recipe.model_copy(update={"model": Model(path=str(tmp_path))})})
    with pytest.raises(UserError, match=r"there is no file rewards\.py here") as caught:
        check_model(plan)
    assert caught.value.where == "objective.reward"
    (tmp_path / "rewards.py").touch()
    with pytest.raises(UserError, match=r"no file tools\.py"):
        check_model(plan)
    (tmp_path / "tools.py").touch()
    check_model(plan)


def test_tools_need_a_known_way_of_calling_them() -> None:
    [(where, en, _)] = refused("grpo_full", model="llama-3.1-8b", objective={"multi_turn": "tools.py"})
    assert where == "objective.multi_turn" and "name verl's parser" in en
    named = {f"{ROLLOUT}.multi_turn.format": "gpt-oss"}
    assert refused("grpo_full", model="llama-3.1-8b", objective={"multi_turn": "tools.py"}, extra=named) == []


def test_the_rollout_engine_is_the_profiles() -> None:
    assert words_of("grpo_full")[f"{ROLLOUT}.name"] == "vllm"
    on_cuda = {"device": "h100", "cluster": "8 h100", "profile": "0.9.1-sglang"}
    job = job_of("grpo_full", **on_cuda)
    assert f"{ROLLOUT}.name=sglang" in job.argv and job.environment == "verl-0.9.1-sglang"
    assert refused("grpo_full", **on_cuda, extra={f"{ROLLOUT}.name": "sglang"}) == []
    for extra, settings, profile in (("sglang", {}, "0.9.1-sglang"), ("vllm", on_cuda, "0.9.1"), ("trtllm", {}, "0.9.1")):
        [(where, en, fix)] = refused("grpo_full", **settings, extra={f"{ROLLOUT}.name": extra})
        assert (where, fix) == (f"extra.{ROLLOUT}.name", {}) and f"write profile: {profile} (" in en


def test_sglang_on_ascend_is_no_job() -> None:
    plan = plan_of("grpo_full", profile="0.9.1-sglang")
    with pytest.raises(UserError, match=r"write profile: 0\.9\.1, whose rollouts are vLLM's"):
        BACKENDS["verl"].render(plan)


def test_settings_of_the_recipe_are_no_extra() -> None:
    taken = (f"{ROLLOUT}.n", f"{ROLLOUT}.temperature", f"{ACTOR}.entropy_coeff", "trainer.n_gpus_per_node", "data.max_prompt_length")
    for name in taken:
        assert [where for where, _, _ in refused("grpo_full", extra={name: 1})] == [f"extra.{name}"]


@pytest.mark.parametrize(
    ("settings", "where", "fix"),
    [
        ({"objective": {"max_prompt_tokens": 4096}}, "objective.max_prompt_tokens", 1024),
        ({"objective": {"overlong_tokens": 3072}}, "objective.overlong_tokens", 614),
        ({"checkpoint": {"resume": "runs/x/checkpoints/10"}}, "checkpoint.resume", "auto"),
    ],
)
def test_contradictions_are_refused_with_a_way_out(settings: dict[str, Any], where: str, fix: Any) -> None:
    [(found, _, change)] = refused("dapo_full", **settings)
    assert (found, change) == (where, {where: fix})
    key, _, name = where.partition(".")
    assert refused("dapo_full", **{key: settings[key] | {name: fix}}) == []


def test_a_run_that_shall_not_resume_does_not() -> None:
    assert words_of("grpo_full", checkpoint={"resume": "none"})["trainer.resume_mode"] == "disable"
    resumed = words_of("grpo_full", checkpoint={"resume": "runs/x/checkpoints/global_step_10"})
    assert (resumed["trainer.resume_mode"], resumed["trainer.resume_from_path"]) == ("resume_path", "runs/x/checkpoints/global_step_10")


def test_text_that_hydra_would_misread_is_quoted() -> None:
    words = words_of("grpo_full", objective={"reward": "奖励/it's.py:score"})
    assert words["reward.custom_reward_function.path"] == "'奖励/it\\'s.py'"


def test_megatron_takes_the_bridge_that_is_installed_and_experts_stay_whole() -> None:
    moe = words_of("grpo_full", {"tp": 2, "sp": True, "ep": 4, "zero": 1}, model="qwen3-30b-a3b")
    assert moe["model_engine"] == "megatron" and moe[f"{ACTOR}.megatron.vanilla_mbridge"] == "True"
    ppo = words_of("ppo_full", MEGATRON)
    assert (ppo[f"{ACTOR}.megatron.vanilla_mbridge"], ppo["critic.megatron.vanilla_mbridge"]) == ("True", "True")
    assert (moe[f"{ACTOR}.megatron.expert_model_parallel_size"], moe[f"{ACTOR}.megatron.expert_tensor_parallel_size"]) == ("4", "1")
    cuda = words_of("grpo_full", MEGATRON, device="h100", cluster="8 h100")
    assert cuda["trainer.device"] == "cuda" and cuda[f"{ACTOR}.megatron.vanilla_mbridge"] == "True"


def test_mindspeed_is_found_where_megatron_trains_on_ascend() -> None:
    paths = "{env}/src/MindSpeed:{env}/src/Megatron-LM"
    assert job_of("grpo_full", MEGATRON).env["PYTHONPATH"] == paths
    for job in (job_of("grpo_full"), job_of("grpo_full", MEGATRON, device="h100", cluster="8 h100")):
        assert "PYTHONPATH" not in job.env


def test_what_megatron_saved_is_copied_and_what_fsdp_saved_is_merged(tmp_path: Path) -> None:
    [merge] = job_of("grpo_full").after
    assert merge.argv[2:] == ["runs/run/checkpoints", "fsdp", "runs/run/export"]
    job = job_of("grpo_full", MEGATRON)
    [copy] = job.after
    assert copy.argv == ["python", "runs/run/job/export.py", "runs/run/checkpoints", "megatron", "runs/run/export"]
    for step in (8, 16):
        weights = tmp_path / f"checkpoints/global_step_{step}/actor/model/huggingface"
        weights.mkdir(parents=True)
        (weights / "config.json").write_text(str(step))
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("16")
    (tmp_path / "export.py").write_text(job.files["job/export.py"])
    subprocess.run([sys.executable, "export.py", "checkpoints", "megatron", "export"], cwd=tmp_path, check=True)
    assert (tmp_path / "export/config.json").read_text() == "16"


@pytest.mark.parametrize(("backend", "layout"), [("verl", FSDP), ("mindspeed_rl", MEGATRON)])
def test_many_nodes_get_a_ray_cluster_and_one_node_none(backend: str, layout: dict[str, Any]) -> None:
    recipe = make_recipe("qwen2.5-7b", backend, "grpo_full", cluster="2x8 snt9b")
    many = BACKENDS[backend].render(make_job_plan(recipe, layout, 2))
    one = BACKENDS[backend].render(make_job_plan(make_recipe("qwen2.5-7b", backend, "grpo_full"), layout))
    cut = many.argv.index("--")
    assert many.argv[:cut] == ["python", "runs/run/job/ray_node.py", "{node_rank}", "{nodes}", "{master_addr}", "{master_port}", "npu:8"]
    assert many.argv[cut + 1 : cut + 3] == one.argv[:2] and "job/ray_node.py" in many.files
    assert "job/ray_node.py" not in one.files


def test_a_line_of_its_console_is_a_step() -> None:
    line = (
        "(TaskRunner pid=1) step:3 - actor/grad_norm:0.25 - actor/lr:1e-06 - actor/pg_loss:-0.5 - critic/score/mean:0.75 - "
        "response_length/mean:812.5 - perf/total_num_tokens:400000 - perf/time_per_step:80.0 - training/epoch:0"
    )
    step = BACKENDS["verl"].read_step(line, plan_of("grpo_full"))
    assert step is not None
    assert (step.step, step.num_steps, step.grad_norm, step.reward, step.response_tokens) == (3, 100, 0.25, 0.75, 812.5)
    assert (step.loss, step.tokens_per_s) == (-0.5, 5000.0)
