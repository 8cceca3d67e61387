"""verl as a back end: GRPO, DAPO and PPO, as overrides of its own configuration, run in its own environment.

FSDP2 trains by default; a recipe that asks for tp or pp is trained by Megatron (on Ascend: MindSpeed). What the recipe has no key for
is a default below, which `extra` may change by verl's own name; what the recipe does say cannot be changed there.
"""

from __future__ import annotations

import re
from typing import Any, assert_never

from ascendfactory.backends.common import (
    Rule,
    absent_rules,
    check_options,
    data_rules,
    data_step,
    extra_rules,
    num_steps,
    only,
    options,
    profile_of,
    profile_rule,
    program,
    prompt_tokens,
    refusals,
    schedule_rule,
)
from ascendfactory.core.plan import Job, Layout, ModelCard, Plan, Refusal, Step, StepMetrics
from ascendfactory.core.recipe import Dapo, Dpo, Full, Grpo, Lora, Ppo, Pretrain, Recipe, Reward, Sft

NAME = "verl"
PROFILES = ("0.9.1",)
# Settings that are accepted and change nothing here, and why.
NO_EFFECT = {
    "checkpoint.asynchronous": "checkpoints are written while training waits",
    "data.workers": "prompts are tokenised when they are drawn",
    "data.cache_dir": "nothing is tokenised beforehand",
    "data.packing": "its trainer packs answers by tokens (use_dynamic_bsz)",
    "output.log_every": "every step is reported; the progress display thins them out",
    "layout.micro_size": "micro-batches are sized by tokens",
    "batch.micro_size": "micro-batches are sized by tokens",
}
Overrides = dict[str, Any]

# What no recipe key says; `extra` may change these.
DEFAULTS: Overrides = {
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.actor.entropy_coeff": 0.0,
    "data.truncation": "left",
    "data.filter_overlong_prompts": True,
    "trainer.val_before_train": False,
}
_KL = {
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
}
_SOFT_OVERLONG = {  # DAPO: answers near the limit lose reward (arXiv:2503.14476)
    "reward.reward_manager.name": "dapo",
    "algorithm.filter_groups.enable": True,
    "algorithm.filter_groups.metric": "acc",
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.28,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.use_kl_loss": False,
}
_PPO = {
    "critic.optim.lr": 1e-5,
    "critic.use_dynamic_bsz": True,
    "critic.ppo_max_token_len_per_gpu": 32768,
}


class Verl:
    """Reinforcement learning through verl."""

    name = NAME

    def refuse(self, recipe: Recipe, card: ModelCard, layout: Layout) -> list[Refusal]:
        """Why verl cannot run the recipe under this layout; empty if it can."""
        rules = [profile_rule(recipe, PROFILES), *_objective_rules(recipe), *data_rules(recipe), *_setting_rules(recipe)]
        rules += _layout_rules(recipe, layout)
        if recipe.profile in ("auto", *PROFILES):
            ours = {*_derived(recipe, layout), *_PLACES} - set(DEFAULTS)
            rules += extra_rules(recipe, ours, _known(recipe, layout))
        return refusals(NAME, rules)

    def render(self, plan: Plan) -> Job:
        """The job: data as parquet, training, weights merged."""
        recipe, run = plan.recipe, plan.run_dir
        step, spec = data_step(plan, "rl")
        files, after = {"job/data.json": spec}, []
        if recipe.output.export:
            files["job/export.py"] = program("verl_export.py")
            argv = [
                "python",
                f"{run}/job/export.py",
                f"{run}/checkpoints",
                "megatron" if _megatron(plan.layout) else "fsdp",
                f"{run}/export",
            ]
            newest = f"{run}/checkpoints/latest_checkpointed_iteration.txt"
            after.append(Step(name="export", argv=argv, environment=_environment(recipe), inputs=[newest], output=f"{run}/export"))
        config = ["--config-name=ppo_megatron_trainer"] if _megatron(plan.layout) else []
        words = [f"{name}={_text(value)}" for name, value in overrides(plan).items()]
        return Job(
            files=files,
            argv=["python", "-m", "verl.trainer.main_ppo", *config, *words],
            env=_variables(plan),
            environment=_environment(recipe),
            nproc=1,
            before=[step],
            after=after,
        )

    def read_step(self, line: str, plan: Plan) -> StepMetrics | None:
        """The step of one of the console logger's lines, `step:3 - actor/grad_norm:0.1 - ...`."""
        return read_line(line, plan)


def _environment(recipe: Recipe) -> str:
    return f"{NAME}-{profile_of(recipe, PROFILES)}"


def _known(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """The options of the trainer that the layout chooses."""
    trainer = "ppo_megatron_trainer" if _megatron(layout) else "ppo_trainer"
    return {name: facts for name, facts in options(_environment(recipe)).items() if facts.get("only", trainer) == trainer}


def _megatron(layout: Layout) -> bool:
    return layout.tp > 1 or layout.pp > 1 or layout.ep > 1


def _objective_rules(recipe: Recipe) -> list[Rule]:
    match recipe.objective:
        case Grpo() | Dapo() | Ppo():
            return []
        case Pretrain() | Sft() | Dpo() | Reward():
            kind = recipe.objective.kind
            return [
                (
                    True,
                    "objective",
                    f"{kind} is left to other back ends; write backend: auto",
                    f"{kind} 请用其他后端；请写 backend: auto",
                    "grpo",
                )
            ]
        case other:
            assert_never(other)


def _setting_rules(recipe: Recipe) -> list[Rule]:
    checkpoint, optim, tuning = recipe.checkpoint, recipe.optim, recipe.tuning
    rules = [
        only(recipe.model.init == "random", "model.init", "pretrained", "start from random weights", "随机初始化"),
        only(recipe.model.dtype == "float32", "model.dtype", "bfloat16", "training in float32", " float32 训练"),
        only(recipe.data.eval_fraction > 0, "data.eval_fraction", 0.0, "share held out; name data.eval", "留出比例（请写 data.eval）"),
        only(
            optim.schedule not in ("constant", "cosine"),
            "optim.schedule",
            "constant",
            f"{optim.schedule} schedule",
            f" {optim.schedule} 调度",
        ),
        only(optim.eps != 1e-8, "optim.eps", 1e-8, "choice of eps", " eps 选择"),
        (checkpoint.every.unit != "steps", "checkpoint.every", "saves every N steps; write steps", "按步保存；请写 steps", "500 steps"),
        (recipe.output.eval_every.unit != "steps", "output.eval_every", "evaluates every N steps", "按步评估；请写 steps", "100 steps"),
        (recipe.duration.unit == "tokens", "duration", "write steps or epochs", "请写 steps 或 epochs", "1 epochs"),
        (
            recipe.duration.unit == "epochs" and recipe.duration.amount != int(recipe.duration.amount),
            "duration",
            "write whole epochs, or steps",
            "请写整数轮次，或步数",
            None,
        ),
        only(recipe.output.dtype not in ("auto", "bfloat16"), "output.dtype", "auto", "choice of the exported dtype", "导出精度选择"),
    ]
    if isinstance(tuning, Lora):
        rules += [
            only(tuning.dropout > 0, "tuning.dropout", 0.0, "dropout in adapters", "适配器 dropout"),
            only(tuning.rslora, "tuning.rslora", False, "rank-stabilised scaling", " rslora"),
            only(tuning.dora, "tuning.dora", False, "DoRA", " DoRA"),
            only(tuning.adapter is not None, "tuning.adapter", None, "going on from a saved adapter", "从已有适配器继续"),
            only(tuning.alpha != int(tuning.alpha), "tuning.alpha", 16.0, "fraction in alpha", "小数 alpha"),
        ]
    return rules


def _layout_rules(recipe: Recipe, layout: Layout) -> list[Rule]:
    megatron, lora = _megatron(layout), isinstance(recipe.tuning, Lora)
    return [
        only(layout.ring > 1 and not megatron, "layout.ring", 1, "ring under FSDP", "FSDP 下的 ring"),
        only(layout.vpp > 1 and not megatron, "layout.vpp", 1, "virtual pipeline under FSDP", "FSDP 下的虚拟流水线"),
        only(layout.ulysses > 1 and megatron, "layout.ulysses", 1, "Ulysses under Megatron", "Megatron 下的 Ulysses"),
        only(layout.replicate > 1 and megatron, "layout.replicate", 1, "replicas under Megatron", "Megatron 下的副本"),
        only(layout.zero != (1 if megatron else 3), "layout.zero", 1 if megatron else 3, f"zero {layout.zero}", f" zero {layout.zero}"),
        only(lora and megatron, "tuning", "full", "LoRA under Megatron here", "Megatron 下的 LoRA"),
        schedule_rule(layout, "1f1b", *(("interleaved",) if megatron and layout.vpp > 1 else ())),
        *absent_rules(recipe, layout, "stage_layers", "overlap_chunks", "recompute_in_advance", "in_backward", "restarts"),
        only(
            layout.recompute in ("norm", "selective"),
            "layout.recompute",
            "auto",
            f"recompute {layout.recompute}",
            f"重计算 {layout.recompute}",
        ),
        only(layout.recompute_layers > 0, "layout.recompute_layers", "auto", "recomputation of some layers", "部分层重计算"),
        only(layout.offload_activations and megatron, "layout.offload_activations", False, "offloading of activations", "激活卸载"),
        only(layout.optim_dtype != "float32", "layout.optim_dtype", "float32", "moments in bfloat16", "bfloat16 动量"),
        only(layout.reuse_params, "layout.reuse_params", False, "sharing of weights with their masters", "参数副本复用"),
        only(layout.sp and not megatron, "layout.sp", "auto", "sequence parallelism under FSDP", "FSDP 下的序列并行"),
    ]


def _derived(recipe: Recipe, layout: Layout) -> Overrides:
    """What the recipe and the layout say, under verl's names."""
    seq_len, prompts = recipe.data.seq_len, recipe.batch.global_size
    values: Overrides = {
        "algorithm.adv_estimator": "gae" if isinstance(recipe.objective, Ppo) else "grpo",
        "algorithm.use_kl_in_reward": False,
        "data.train_batch_size": prompts,
        "data.max_prompt_length": prompt_tokens(recipe),
        "data.max_response_length": seq_len - prompt_tokens(recipe),
        "data.shuffle": recipe.data.shuffle,
        "data.seed": recipe.seed,
        "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": max(seq_len, 8192),
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.max_num_batched_tokens": max(seq_len, 8192),
        "actor_rollout_ref.model.enable_gradient_checkpointing": layout.recompute == "full",
        **_optimizer(recipe, _megatron(layout)),
        **_engine(recipe, layout),
        **_saving(recipe),
    }
    match recipe.objective:
        case Grpo():
            values |= _KL
        case Dapo():
            values |= _SOFT_OVERLONG
        case Ppo():
            values |= _PPO | {"actor_rollout_ref.rollout.n": 1}
    match recipe.tuning:
        case Lora() as lora:
            targets = lora.targets[0] if lora.targets == ["all-linear"] else lora.targets
            values |= {
                "actor_rollout_ref.model.lora_rank": lora.rank,
                "actor_rollout_ref.model.lora_alpha": int(lora.alpha),
                "actor_rollout_ref.model.target_modules": targets,
                "actor_rollout_ref.rollout.load_format": "safetensors",
            }
        case Full():
            pass
    return values


def _optimizer(recipe: Recipe, megatron: bool) -> Overrides:
    optim = recipe.optim
    values: Overrides = {
        "actor_rollout_ref.actor.optim.lr": optim.lr,
        "actor_rollout_ref.actor.optim.weight_decay": optim.weight_decay,
        "actor_rollout_ref.actor.optim.betas": [optim.beta1, optim.beta2],
        "actor_rollout_ref.actor.optim.clip_grad": optim.max_grad_norm,
    }
    part = "actor_rollout_ref.actor.optim"
    if megatron:
        values |= {f"{part}.lr_decay_style": optim.schedule, f"{part}.min_lr": optim.lr * optim.min_lr_ratio}
    else:
        values |= {f"{part}.lr_scheduler_type": optim.schedule, f"{part}.min_lr_ratio": optim.min_lr_ratio}
    steps = optim.warmup.unit == "steps"
    name = "lr_warmup_steps" if steps else "lr_warmup_steps_ratio"
    return values | {f"{part}.{name}": int(optim.warmup.amount) if steps else optim.warmup.amount}


def _engine(recipe: Recipe, layout: Layout) -> Overrides:
    if not _megatron(layout):
        return {
            "actor_rollout_ref.actor.strategy": "fsdp2",
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size": layout.ulysses,
            "actor_rollout_ref.actor.fsdp_config.fsdp_size": layout.shard if layout.replicate > 1 else -1,
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload": layout.offload_optimizer,
            "actor_rollout_ref.model.enable_activation_offload": layout.offload_activations,
        }
    part = "actor_rollout_ref.actor.megatron"
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    recompute = {f"{part}.override_transformer_config.{name}": value for name, value in full.items()}
    return (recompute if layout.recompute == "full" else {}) | {
        "actor_rollout_ref.actor.strategy": "megatron",
        f"{part}.tensor_model_parallel_size": layout.tp,
        f"{part}.pipeline_model_parallel_size": layout.pp,
        f"{part}.virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        f"{part}.context_parallel_size": layout.ring,
        f"{part}.expert_model_parallel_size": layout.ep,
        f"{part}.sequence_parallel": layout.sp,
        f"{part}.optimizer_offload": layout.offload_optimizer,
    }


def _saving(recipe: Recipe) -> Overrides:
    checkpoint, steps = recipe.checkpoint, num_steps(recipe) if recipe.duration.unit == "steps" else None
    values: Overrides = {
        "trainer.logger": ["console"],
        "trainer.project_name": "ascendfactory",
        "trainer.experiment_name": recipe.name,
        "trainer.save_freq": int(checkpoint.every.amount),
        "trainer.test_freq": int(recipe.output.eval_every.amount) if recipe.data.eval else -1,
        "trainer.max_actor_ckpt_to_keep": checkpoint.keep,
        "trainer.total_epochs": int(recipe.duration.amount) if steps is None else 1000000,
        "trainer.total_training_steps": steps,
        "trainer.resume_mode": "auto",
    }
    if checkpoint.resume not in ("auto", "none"):
        values |= {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": checkpoint.resume}
    return values


_PLACES = ("data.train_files", "data.val_files", "actor_rollout_ref.model.path", "trainer.default_local_dir", "trainer.nnodes")


def overrides(plan: Plan) -> Overrides:
    """Every override of a run; `extra` changes only what no recipe key says.

    Raises:
        ValueError: a name that verl's own configuration does not have.
    """
    recipe, run, cluster = plan.recipe, plan.run_dir, plan.cluster
    values = DEFAULTS | _derived(recipe, plan.layout)
    values |= {
        "data.train_files": f"{run}/data/train.parquet",
        "data.val_files": f"{run}/data/{'eval' if recipe.data.eval else 'train'}.parquet",
        "actor_rollout_ref.model.path": recipe.model.path,
        "trainer.default_local_dir": f"{run}/checkpoints",
        "trainer.nnodes": cluster.nodes,
        "trainer.n_gpus_per_node": cluster.nproc,
        "trainer.device": cluster.device.kind,
    }
    placement = plan.placement
    values["actor_rollout_ref.rollout.tensor_model_parallel_size"] = placement.rollout_tp if placement else 1
    values["actor_rollout_ref.rollout.gpu_memory_utilization"] = round(placement.kv_share, 2) if placement and placement.kv_share else 0.5
    if isinstance(recipe.objective, Ppo):
        values |= {"critic.model.path": recipe.model.path, "critic.strategy": "megatron" if _megatron(plan.layout) else "fsdp2"}
    values |= recipe.extra
    known = _known(recipe, plan.layout)
    if wrong := check_options({name: value for name, value in values.items() if not isinstance(value, list)}, known):
        raise ValueError("; ".join(f"{name}: {en}" for name, en, _ in wrong))
    return values


def _text(value: Any) -> str:
    """A value as Hydra reads it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value)
        case list():
            return "[" + ",".join(_text(item) for item in value) + "]"
        case _:
            return str(value)


def _variables(plan: Plan) -> dict[str, str]:
    env = {"TOKENIZERS_PARALLELISM": "true", "PYTHONUNBUFFERED": "1", "HYDRA_FULL_ERROR": "1"}
    if plan.cluster.device.kind == "npu":
        env |= {
            "HCCL_CONNECT_TIMEOUT": "1800",
            "TASK_QUEUE_ENABLE": "2",
            "VLLM_USE_V1": "1",
            "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1",
        }
    return env


_PAIR = re.compile(r"([\w/@.\-]+):([-+]?(?:\d[\d.eE+\-]*|nan|inf))(?:\s+-\s+|\s*$)")


def read_line(line: str, plan: Plan) -> StepMetrics | None:
    """The step of a console line; verl's throughput is tokens a second and device."""
    start = line.find("step:")
    if start < 0:
        return None
    values = dict(_PAIR.findall(line[start:]))
    if "step" not in values or "actor/grad_norm" not in values:
        return None

    def number(*names: str) -> float:
        return next((float(values[name]) for name in names if name in values), 0.0)

    step, known = int(float(values["step"])), num_steps(plan.recipe) if plan.recipe.duration.unit == "steps" else None
    step_s, tokens = number("perf/time_per_step", "timing_s/step"), int(number("perf/total_num_tokens"))
    reward = number("critic/score/mean", "critic/rewards/mean")
    return StepMetrics(
        step=step,
        num_steps=max(step, known or 0),
        loss=number("actor/loss", "actor/pg_loss"),
        lr=number("actor/lr"),
        grad_norm=number("actor/grad_norm"),
        label_tokens=0,
        tokens=tokens,
        epoch=number("training/epoch"),
        step_s=step_s,
        tokens_per_s=tokens / step_s if step_s else 0.0,
        reward=reward,
        response_tokens=number("response_length/mean"),
    )
