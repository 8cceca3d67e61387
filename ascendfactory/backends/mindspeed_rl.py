"""MindSpeed-RL as a back end: GRPO of a few models. Upstream is frozen at 2.2.0 to 2.3.0: a legacy profile, verl is the way on."""

from __future__ import annotations

import re
from typing import Any

import yaml

from ascendfactory.backends.common import (
    Rule,
    absent_rules,
    data_rules,
    data_step,
    num_steps,
    only,
    profile_rule,
    program,
    refusals,
    schedule_rule,
)
from ascendfactory.backends.megatron import (
    Flags,
    bf16_rules,
    environment,
    lean_rules,
    recompute_flags,
    sharding_rules,
    split_of,
    start_facts,
    step_rules,
    words,
)
from ascendfactory.backends.megatron_models import FAMILIES, family_of, model_flags
from ascendfactory.backends.rl import KL_NAMES, answer_tokens, objective_of, on_ray, prompt_tokens, rl_rules, rollout_share, rollout_tp
from ascendfactory.core.plan import Job, Layout, ModelCard, Plan, Refusal, Step, StepMetrics
from ascendfactory.core.recipe import Grpo, Lora, Recipe

NAME = "mindspeed_rl"
PROFILES = ("2.2.0",)
SOURCES = ["MindSpeed-RL", "MindSpeed", "MindSpeed-LLM", "Megatron-LM"]
# Settings that are accepted and change nothing here, and why.
NO_EFFECT = {
    "checkpoint.asynchronous": "checkpoints are written while training waits",
    "checkpoint.keep": "it keeps every checkpoint",
    "data.packing": "prompts are not packed",
    "data.workers": "a fixed number of processes tokenises",
    "data.cache_dir": "tokenised prompts lie in the run folder",
    "output.log_every": "every iteration is reported; the progress display thins them out",
}
_FAMILIES = ("qwen2.5", "qwen3", "qwen3_moe")
# Flags of the trainer that have no place in its configuration classes of this age.
_FOREIGN = (
    "tokenizer-type",
    "distributed-backend",
    "use-fused-rmsnorm",
    "use-rotary-position-embeddings",
    "spec",
    "n-shared-experts",
)
_RENAMED = {"moe-ffn-hidden-size": "moe-intermediate-size"}  # since Megatron-Core 0.8, on which it stands


class MindSpeedRl:
    """GRPO through MindSpeed-RL."""

    name = NAME

    def refuse(self, recipe: Recipe, card: ModelCard, layout: Layout) -> list[Refusal]:
        """Why MindSpeed-RL cannot run the recipe under this layout; empty if it can."""
        known = [FAMILIES[name] for name in _FAMILIES]
        no_model = card.vision is not None or family_of(card) not in known
        names = ", ".join(_FAMILIES)
        rules: list[Rule] = [
            profile_rule(recipe, PROFILES),
            (
                not isinstance(recipe.objective, Grpo),
                "objective",
                "only grpo here; for others write backend: verl",
                "仅支持 grpo；其他请写 backend: verl",
                "grpo",
            ),
            (no_model, "model.path", f"no configuration for {card.name}; it has {names}", f"没有 {card.name} 的配置；已有 {names}", None),
            only(isinstance(recipe.tuning, Lora), "tuning", "full", "LoRA", " LoRA"),
            (
                bool(recipe.extra),
                "extra",
                "options of your own are not checked here; leave extra out",
                "不支持自定义选项；请删去 extra",
                {},
            ),
            *data_rules(recipe),
            *rl_rules(recipe),
            *_objective_rules(recipe),
            *_setting_rules(recipe),
            *_layout_rules(recipe, card, layout),
        ]
        return refusals(NAME, rules)

    def render(self, plan: Plan) -> Job:
        """The job: data, prompts tokenised, weights to Megatron, training under Ray, weights back."""
        recipe, run = plan.recipe, plan.run_dir
        rewrite, spec = data_step(plan, "question_answer")
        files = {
            "job/data.json": spec,
            "job/grpo.yaml": yaml.safe_dump(config(plan), sort_keys=False),
            "job/train.py": program("megatron_train.py"),
            "job/start.json": start_facts(plan, [], _resumed(run)),
        }
        command = ["python", "{env}/src/MindSpeed-RL/cli/train_grpo.py", "--config-dir", f"{run}/job", "--config-name", "grpo"]
        argv, more = on_ray(plan, ["python", f"{run}/job/train.py", f"{run}/job/start.json", "--", *command, "{load}"])
        after = []
        if recipe.output.export:
            files["job/export.py"] = program("megatron_export.py")
            after.append(_export_step(plan))
        return Job(
            restarts=recipe.cluster.restarts,
            files=files | more,
            argv=argv,
            env=_variables(plan),
            environment=f"{NAME}-{PROFILES[0]}",
            nproc=1,
            before=[rewrite, _tokenise_step(plan), _convert_step(plan)],
            after=after,
        )

    def read_step(self, line: str, plan: Plan) -> StepMetrics | None:
        """The step of an `iteration: N / M | name : value | ...` line."""
        return read_line(line, plan)


def _resumed(run: str) -> list[str]:
    """Overrides that go on from the newest checkpoint instead of the converted weights."""
    values = {"load": f"{run}/checkpoints", "finetune": "false", "no_load_optim": "false", "no_load_rng": "false"}
    return [f"actor_config.{name}={value}" for name, value in values.items()]


def _objective_rules(recipe: Recipe) -> list[Rule]:
    objective = recipe.objective
    if not isinstance(objective, Grpo):
        return []
    return [
        only(objective.reward != "auto", "objective.reward", "auto", "reward function of your own", "自定义奖励函数"),
        only(objective.off_policy_steps > 0, "objective.off_policy_steps", 0, "generation on devices of its own", "生成使用独立设备"),
        (
            objective.multi_turn is not None,
            "objective.multi_turn",
            "no calls of tools; leave multi_turn out, or write backend: verl",
            "不支持工具调用；请删去 multi_turn，或写 backend: verl",
            None,
        ),
        only(objective.kl_coef == 0, "objective.kl_coef", 0.001, "training without a reference model", "无参考模型的训练"),
        only(
            objective.clip_low != objective.clip_high,
            "objective.clip_high",
            objective.clip_low,
            "clip range of two sides under grpo",
            "grpo 的双侧裁剪区间",
        ),
    ]


def _setting_rules(recipe: Recipe) -> list[Rule]:
    optim = recipe.optim
    return [
        *bf16_rules(recipe),
        *step_rules(recipe, "500 steps"),
        only(optim.schedule == "wsd", "optim.schedule", "constant", "wsd schedule", " wsd 调度"),
        only(
            optim.warmup.unit == "steps" and optim.warmup.amount > 0,
            "optim.warmup",
            0.0,
            "warm-up in steps; write a fraction",
            "按步预热（请写比例）",
        ),
        only(optim.eps != 1e-8, "optim.eps", 1e-8, "choice of eps", " eps 选择"),
    ]


def _layout_rules(recipe: Recipe, card: ModelCard, layout: Layout) -> list[Rule]:
    uneven = card.num_layers % (layout.pp * layout.vpp) != 0
    return [
        *sharding_rules(layout),
        schedule_rule(layout, "1f1b", *(("interleaved",) if layout.vpp > 1 else ())),
        *absent_rules(recipe, layout, "stage_layers", "overlap_chunks", "recompute_in_advance", "in_backward"),
        only(layout.ring > 1 and layout.ulysses > 1, "layout.ring", 1, "hybrid context parallelism", "混合上下文并行"),
        only(uneven, "layout.pp", 1, "uneven stages", "不均匀的流水线"),
        *lean_rules(layout),
        only(layout.tp > card.num_kv_heads, "layout.tp", card.num_kv_heads, "tp above the key/value heads", "超过 KV 头数的 tp"),
        only(
            card.moe is not None and layout.tp > 1 and not layout.sp,
            "layout.sp",
            "auto",
            "experts under tp without sp",
            "无序列并行的专家层",
        ),
        only(
            recipe.batch.global_size % max(layout.dp, 1) != 0,
            "batch.global_size",
            layout.dp * 4,
            "batch that dp does not divide",
            "dp 不能整除的批",
        ),
    ]


def config(plan: Plan) -> dict[str, Any]:
    """MindSpeed-RL's configuration, the model's shape spelled out."""
    name = "recipe_model"
    shape = _underscored({_RENAMED.get(k, k): v for k, v in model_flags(plan.card).items() if k not in _FOREIGN and v is not None})
    return {
        "defaults": ["_self_"],
        "model": {name: shape},
        "megatron_training": _training(plan, name),
        "actor_config": _actor(plan, name),
        "rl_config": _algorithm(plan),
        "generate_config": _generation(plan),
    }


def _training(plan: Plan, name: str) -> dict[str, Any]:
    recipe, layout = plan.recipe, plan.layout
    return {
        "model": name,
        "sequence_parallel": layout.sp and layout.tp > 1,
        "use_flash_attn": True,
        "no_masked_softmax_fusion": True,
        "attention_softmax_in_fp32": True,
        "no_gradient_accumulation_fusion": True,
        "bf16": True,
        "use_distributed_optimizer": True,
        "reuse_fp32_param": layout.reuse_params,
        "tokenizer_type": "PretrainedFromHF",
        "tokenizer_name_or_path": recipe.model.path,
        "global_batch_size": recipe.batch.global_size,
        "seq_length": recipe.data.seq_len,
        "max_position_embeddings": max(recipe.data.seq_len, plan.card.max_seq_len),
        "save_interval": int(recipe.checkpoint.every.amount),
        "train_iters": num_steps(recipe),
        "stage": "ray_grpo",
        "distributed_backend": "nccl",
        "no_shared_storage": plan.cluster.nodes > 1,
        "dataset_additional_keys": ["labels"],
        "data_path": f"{plan.run_dir}/tokens/data",
        "split": "100,0,0",
        "no_shuffle": not recipe.data.shuffle,
        "seed": recipe.seed,
        **_underscored(recompute_flags(layout)),
    }


def _algorithm(plan: Plan) -> dict[str, Any]:
    layout, objective = plan.layout, objective_of(plan.recipe)
    return {
        "use_integrated_worker": True,
        "blocking": True,
        "adv_estimator": "group_norm",
        "kl_penalty": KL_NAMES[objective.kl_kind],
        "kl_ctrl_type": "fixed",
        "init_kl_coef": objective.kl_coef,
        "mini_batch_size": plan.recipe.batch.global_size,
        "max_prompt_length": prompt_tokens(plan.recipe),
        "clip_ratio": objective.clip_low,
        "entropy_coeff": objective.entropy_coef,
        "n_samples_per_prompt": objective.num_answers,
        "actor_forward_micro_batch_size": layout.micro_size,
        "ref_forward_micro_batch_size": layout.micro_size,
        "rule_reward": True,
        "verifier_function": ["math_17k_acc"],
        "verifier_weight": [1.0],
        "num_cpus_for_local_task": 1.0,
        "use_tensorboard": False,
        "actor_resource": {"num_npus": plan.cluster.num_devices},
    }


def _generation(plan: Plan) -> dict[str, Any]:
    seq_len, objective = plan.recipe.data.seq_len, objective_of(plan.recipe)
    return {
        "trust_remote_code": False,
        "offload_train_optimizer": True,
        "offload_train_grad": True,
        "offload_train_param": True,
        "infer_tensor_parallel_size": rollout_tp(plan),
        "infer_pipeline_parallel_size": 1,
        "infer_expert_parallel_size": 1,
        "max_num_seqs": 1024,
        "max_model_len": max(seq_len, 4096),
        "max_num_batched_tokens": max(seq_len, 8192),
        "dtype": "bfloat16",
        "gpu_memory_utilization": rollout_share(plan),
        "sampling_config": {
            "logprobs": 1,
            "max_tokens": answer_tokens(plan.recipe),
            "top_p": objective.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "temperature": objective.temperature,
            "detokenize": False,
        },
    }


def _underscored(flags: Flags) -> dict[str, Any]:
    """Flags under the names that its configuration has for them."""
    return {name.replace("-", "_"): value for name, value in flags.items()}


def _actor(plan: Plan, name: str) -> dict[str, Any]:
    optim, layout, run = plan.recipe.optim, plan.layout, plan.run_dir
    actor: dict[str, Any] = {
        "model": name,
        "micro_batch_size": layout.micro_size,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "lr": optim.lr,
        "lr_decay_style": optim.schedule,
        "min_lr": optim.lr * optim.min_lr_ratio,
        "weight_decay": optim.weight_decay,
        "lr_warmup_fraction": optim.warmup.amount,
        "clip_grad": optim.max_grad_norm,
        "adam_beta1": optim.beta1,
        "adam_beta2": optim.beta2,
        "finetune": True,
        "load": f"{run}/weights",
        "save": f"{run}/checkpoints",
        "no_load_optim": True,
        "no_load_rng": True,
    }
    if layout.vpp > 1:
        actor["num_layers_per_virtual_pipeline_stage"] = split_of(plan.card, layout).layers_per_chunk
    if plan.card.moe is not None:
        split = split_of(plan.card, layout)
        actor |= {"expert_model_parallel_size": split.expert_groups, "moe_tp_extend_ep": split.extends}
        actor["moe_token_dispatcher_type"] = "alltoall"  # the only other one than allgather there
    if layout.cp > 1:
        algorithm = "ulysses_cp_algo" if layout.ulysses > 1 else "megatron_cp_algo"
        actor |= {"context_parallel_size": layout.cp, "context_parallel_algo": algorithm}
    return actor


def _variables(plan: Plan) -> dict[str, str]:
    env = environment(plan, SOURCES)
    return env | {"HYDRA_FULL_ERROR": "1", "VLLM_USE_V1": "1", "VLLM_VERSION": "0.9.1", "RAY_DEDUP_LOGS": "0", "HCCL_EXEC_TIMEOUT": "3600"}


def _step(plan: Plan, name: str, argv: list[str], inputs: list[str], output: str) -> Step:
    return Step(name=name, argv=argv, env=environment(plan, SOURCES), environment=f"{NAME}-{PROFILES[0]}", inputs=inputs, output=output)


def _tokenise_step(plan: Plan) -> Step:
    run, model = plan.run_dir, plan.recipe.model.path
    settings = {
        "input": f"{run}/data/train.jsonl",
        "tokenizer_name_or_path": model,
        "output_prefix": f"{run}/tokens/data",
        "seq_length": prompt_tokens(plan.recipe),
    }
    # every path is put under the current folder: the tool would take a relative one from its own
    argv = ["python", "{env}/src/MindSpeed-RL/cli/preprocess_data.py", "deepscaler"]
    argv += [f"{'++' if key == 'seq_length' else ''}{key}={value}" for key, value in settings.items()]
    return _step(plan, "tokenise", argv, [f"{run}/data", model], f"{run}/tokens")


def _tool(plan: Plan, back: bool) -> list[str]:
    card, family = plan.card, family_of(plan.card)
    assert family is not None
    flags: Flags = {"use-mcore-models": True, "model-type": "GPT", "model-type-hf": family.model_type, "params-dtype": "bf16"}
    flags |= {"load-model-type": "mg" if back else "hf", "save-model-type": "hf" if back else "mg", **family.convert}
    flags |= split_of(card, Layout() if back else plan.layout).convert_flags(card.moe is not None)
    flags["moe-grouped-gemm"] = card.moe is not None
    model, run = plan.recipe.model.path, plan.run_dir
    if back:
        flags |= {"load-dir": f"{run}/checkpoints", "save-dir": "{target}"}
    else:
        flags |= {"load-dir": model, "save-dir": f"{run}/weights", "tokenizer-model": f"{model}/tokenizer.json"}
    return ["python", "{env}/src/MindSpeed-LLM/convert_ckpt.py", *words(flags)]


def _convert_step(plan: Plan) -> Step:
    return _step(plan, "convert", _tool(plan, back=False), [plan.recipe.model.path], f"{plan.run_dir}/weights")


def _export_step(plan: Plan) -> Step:
    run = plan.run_dir
    argv = ["python", f"{run}/job/export.py", plan.recipe.model.path, f"{run}/export", "--", *_tool(plan, back=True)]
    return _step(plan, "export", argv, [f"{run}/checkpoints/latest_checkpointed_iteration.txt"], f"{run}/export")


_ITERATION = re.compile(r"iteration:\s*(\d+)\s*/\s*(\d+)\s*\|")
_PAIR = re.compile(r"([\w/]+)\s:\s([-+]?(?:\d[\d.eE+\-]*|nan|inf))")


def read_line(line: str, plan: Plan) -> StepMetrics | None:
    """The step of one of its metric lines; throughput there is `tps`, tokens a second and device."""
    if not (found := _ITERATION.search(line)):
        return None
    values = {name: float(value) for name, value in _PAIR.findall(line[found.end() :])}

    def number(*parts: str) -> float:
        return next((value for part in parts for name, value in values.items() if part in name), 0.0)

    if not values:
        return None
    step_s = number("timing/all", "e2e_time", "all_time")
    per_device = number("e2e_tps", "tps")
    return StepMetrics(
        step=int(found[1]),
        num_steps=int(found[2]),
        loss=number("actor/pg_loss", "pg_loss", "loss"),
        lr=number("lr"),
        grad_norm=number("grad_norm"),
        label_tokens=0,
        tokens=int(per_device * step_s * plan.cluster.num_devices),
        epoch=0.0,
        step_s=step_s,
        tokens_per_s=per_device * plan.cluster.num_devices,
        reward=number("rewards/mean", "score/mean", "reward"),
        response_tokens=number("response_length/mean", "response_length"),
    )
