"""verl's configuration of a run: recipe, layout and plan as overrides of its own tree.

Names and meanings are those of verl 0.9.1: verl/trainer/config, and trainer/ppo/v1 where it is read.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ascendfactory.backends.common import check_options, num_steps, options, profile_of
from ascendfactory.backends.rl import KL_NAMES, answer_tokens, objective_of, overlong_tokens, prompt_tokens, rollout_share, rollout_tp
from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Layout, ModelCard, Plan
from ascendfactory.core.recipe import Dapo, Full, Lora, PolicyGradient, Ppo, Recipe

NAME = "verl"
ENGINE = "actor_rollout_ref.rollout.name"
# What each profile's environment generates with: vLLM and SGLang pin different versions of the same packages.
ENGINES = {"0.9.1": "vllm", "0.9.1-sglang": "sglang"}
PROFILES = tuple(ENGINES)
Overrides = dict[str, Any]

# What no recipe key says; `extra` may change these.
DEFAULTS: Overrides = {
    ENGINE: "vllm",
    "data.truncation": "left",
    "data.filter_overlong_prompts": True,
    "trainer.val_before_train": False,
}
TOOL_FORMAT = "actor_rollout_ref.rollout.multi_turn.format"
# How a model family writes its calls of tools, as verl's parsers are named.
TOOL_FORMATS = dict.fromkeys(("qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe"), "hermes")
# verl reads these without declaring them: Hydra wants a `+`.
UNDECLARED = "reward.reward_kwargs."
# Set from the plan, beside what `derived` sets from the recipe.
PLACES = (
    "data.train_files",
    "data.val_files",
    "actor_rollout_ref.model.path",
    "critic.model.path",
    "trainer.default_local_dir",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.device",
    "actor_rollout_ref.rollout.nnodes",
    "actor_rollout_ref.rollout.n_gpus_per_node",
)


class Part(NamedTuple):
    """Where one of the trained models is configured."""

    name: str
    fsdp: str  # its FSDP settings
    model: str


ACTOR = Part("actor_rollout_ref.actor", "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.model")
CRITIC = Part("critic", "critic.fsdp", "critic.model")


def is_megatron(layout: Layout) -> bool:
    """Whether a layout is trained by Megatron (on Ascend: MindSpeed) instead of FSDP2."""
    return layout.tp > 1 or layout.pp > 1 or layout.ep > 1


def environment_name(recipe: Recipe) -> str:
    """The environment of the recipe's profile."""
    return f"{NAME}-{profile_of(recipe, PROFILES)}"


def engine_name(recipe: Recipe) -> str:
    """The rollout engine of the recipe's profile."""
    return ENGINES[profile_of(recipe, PROFILES)]


def known(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """The options of the trainer that the layout chooses."""
    trainer = "ppo_megatron_trainer" if is_megatron(layout) else "ppo_trainer"
    return {name: facts for name, facts in options(environment_name(recipe)).items() if facts.get("only", trainer) == trainer}


def words(values: Overrides) -> list[str]:
    """Overrides as Hydra reads them; what a mapping holds (engine_kwargs.vllm) is added key by key."""
    given = [
        f"{'+' if name.startswith(UNDECLARED) else ''}{name}={_text(value)}"
        for name, value in values.items()
        if not isinstance(value, dict)
    ]
    added = [f"++{name}.{key}={_text(inner)}" for name, value in values.items() if isinstance(value, dict) for key, inner in value.items()]
    return given + added


def overrides(plan: Plan) -> Overrides:
    """Every override of a run; `extra` changes only what no recipe key says.

    Raises:
        UserError: a rollout engine that does not run on these devices.
        ValueError: a name that verl's own configuration does not have, or devices of its own for generation that the plan lacks.
    """
    recipe, run = plan.recipe, plan.run_dir
    if engine_name(recipe) == "sglang" and plan.cluster.device.kind == "npu":
        text = f"on Ascend, SGLang is not released as packages that can be pinned; write profile: {PROFILES[0]}, whose rollouts are vLLM's"
        raise UserError("profile", text, f"昇腾上的 SGLang 没有可固定版本的安装包；请写 profile: {PROFILES[0]}（由 vLLM 生成）")
    values = defaults(recipe, plan.card) | derived(recipe, plan.layout) | _pools(plan)
    values |= {
        "data.train_files": f"{run}/data/train.parquet",
        "data.val_files": f"{run}/data/{'eval' if recipe.data.eval else 'train'}.parquet",
        "actor_rollout_ref.model.path": recipe.model.path,
        "trainer.default_local_dir": f"{run}/checkpoints",
        "trainer.device": plan.cluster.device.kind,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": rollout_tp(plan),
        "actor_rollout_ref.rollout.gpu_memory_utilization": rollout_share(plan),
    }
    if isinstance(recipe.objective, Ppo):
        values["critic.model.path"] = recipe.model.path
    values |= recipe.extra
    plain = {name: value for name, value in values.items() if not isinstance(value, list) and not name.startswith(UNDECLARED)}
    if wrong := check_options(plain, known(recipe, plan.layout)):
        raise ValueError("; ".join(f"{name}: {en}" for name, en, _ in wrong))
    return values


def defaults(recipe: Recipe, card: ModelCard) -> Overrides:
    """What `extra` may change."""
    values = DEFAULTS | {ENGINE: engine_name(recipe)}
    if isinstance(recipe.objective, PolicyGradient) and recipe.objective.multi_turn and card.family in TOOL_FORMATS:
        values[TOOL_FORMAT] = TOOL_FORMATS[card.family]
    return values


def derived(recipe: Recipe, layout: Layout) -> Overrides:
    """What the recipe and the layout say, under verl's names."""
    row_tokens, prompts, megatron = max(recipe.data.seq_len, 8192), recipe.batch.global_size, is_megatron(layout)
    values: Overrides = {
        "data.train_batch_size": prompts,
        "data.max_prompt_length": prompt_tokens(recipe),
        "data.max_response_length": answer_tokens(recipe),
        "data.shuffle": recipe.data.shuffle,
        "data.seed": recipe.seed,
        "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": row_tokens,
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.max_num_batched_tokens": row_tokens,
        **_algorithm(recipe),
        **_optimizer(recipe, ACTOR, recipe.optim.lr, megatron),
        **_engine(layout, ACTOR),
        **_saving(recipe),
    }
    match recipe.objective:
        case Dapo() as objective:
            values |= _dapo(recipe, objective)
        case Ppo() as objective:
            values |= {"critic.use_dynamic_bsz": True, "critic.ppo_max_token_len_per_gpu": row_tokens}
            values |= _optimizer(recipe, CRITIC, objective.critic_lr, megatron) | _engine(layout, CRITIC)
    match recipe.tuning:
        case Lora() as lora:
            values |= _lora(lora, objective_of(recipe).off_policy_steps > 0)
        case Full():
            pass
    return values


def _algorithm(recipe: Recipe) -> Overrides:
    objective, actor, rollout = objective_of(recipe), "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    values: Overrides = {
        "algorithm.adv_estimator": "gae" if isinstance(objective, Ppo) else "grpo",
        f"{rollout}.n": objective.num_answers,
        f"{rollout}.temperature": objective.temperature,
        f"{rollout}.top_p": objective.top_p,
        f"{actor}.clip_ratio_low": objective.clip_low,
        f"{actor}.clip_ratio_high": objective.clip_high,
        f"{actor}.entropy_coeff": objective.entropy_coef,
        **_divergence(objective),
    }
    if isinstance(objective, Ppo):
        values |= {"algorithm.gamma": objective.gamma, "algorithm.lam": objective.gae_lambda}
    if objective.reward != "auto":
        path, _, function = objective.reward.rpartition(":")
        values |= {"reward.custom_reward_function.path": path, "reward.custom_reward_function.name": function}
    if objective.off_policy_steps:
        values |= _one_step_off()
    if tools := objective.multi_turn:
        turns, reader = f"{rollout}.multi_turn", "function_tool_path" if tools.tools.endswith(".py") else "tool_config_path"
        values |= {f"{turns}.enable": True, f"{turns}.max_assistant_turns": tools.max_turns, f"{turns}.{reader}": tools.tools}
        values |= {f"{rollout}.agent.default_agent_loop": "tool_agent"}
    return values


def _divergence(objective: PolicyGradient) -> Overrides:
    """From the model at the start: PPO takes it off the reward (arXiv:2203.02155), the others add it to the loss (arXiv:2402.03300)."""
    is_wanted, in_reward, kind = objective.kl_coef > 0, isinstance(objective, Ppo), KL_NAMES[objective.kl_kind]
    values: Overrides = {
        "actor_rollout_ref.actor.use_kl_loss": is_wanted and not in_reward,
        "algorithm.use_kl_in_reward": is_wanted and in_reward,
    }
    if not is_wanted:
        return values
    if in_reward:
        return values | {"algorithm.kl_ctrl.kl_coef": objective.kl_coef, "algorithm.kl_penalty": kind}
    return values | {"actor_rollout_ref.actor.kl_loss_coef": objective.kl_coef, "actor_rollout_ref.actor.kl_loss_type": kind}


def _one_step_off() -> Overrides:
    """verl's separate trainer, kept to one step: a batch is drawn while the one before it is trained, and none may be older.

    What was drawn counts with the probabilities it was drawn with (bypass mode): the clipped ratio then corrects for the step between.
    """
    return {
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl",  # the name of HCCL's as well
        "trainer.v1.trainer_mode": "separate_async",
        "trainer.v1.separate_async.parameter_sync_step": 1,
        "trainer.v1.separate_async.num_warmup_batches": 1,
        "trainer.v1.sampler.max_off_policy_threshold": 2,  # steps that a prompt may see, the one that trains it included
        "trainer.v1.sampler.max_off_policy_strategy": "wait",
        "algorithm.rollout_correction.bypass_mode": True,
    }


def _dapo(recipe: Recipe, objective: Dapo) -> Overrides:
    """Groups of answers that are all alike are replaced; answers near the limit lose reward; each token counts alike."""
    values: Overrides = {
        "reward.reward_manager.name": "dapo",
        "algorithm.filter_groups.enable": objective.dynamic_sampling,
        "algorithm.filter_groups.metric": "acc",  # the answer's own score, without what its length costs
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    }
    if overlong := overlong_tokens(recipe):
        part = f"{UNDECLARED}overlong_buffer_cfg"
        values |= {f"{part}.enable": True, f"{part}.len": overlong, f"{part}.penalty_factor": 1.0, f"{part}.log": False}
        values |= {f"{UNDECLARED}max_resp_len": answer_tokens(recipe)}
    return values


def _lora(lora: Lora, is_separate: bool) -> Overrides:
    """Adapters; to rollout devices of their own they travel merged, since verl sends those whole weights only."""
    travels = {"model.lora.merge": True} if is_separate else {"rollout.load_format": "safetensors"}
    return {
        "actor_rollout_ref.model.lora_rank": lora.rank,
        "actor_rollout_ref.model.lora_alpha": int(lora.alpha),
        "actor_rollout_ref.model.target_modules": lora.targets[0] if lora.targets == ["all-linear"] else lora.targets,
        **{f"actor_rollout_ref.{name}": value for name, value in travels.items()},
    }


def _optimizer(recipe: Recipe, part: Part, lr: float, megatron: bool) -> Overrides:
    optim, name = recipe.optim, f"{part.name}.optim"
    values: Overrides = {
        f"{name}.lr": lr,
        f"{name}.weight_decay": optim.weight_decay,
        f"{name}.betas": [optim.beta1, optim.beta2],
        f"{name}.clip_grad": optim.max_grad_norm,
    }
    if megatron:
        values |= {f"{name}.lr_decay_style": optim.schedule, f"{name}.min_lr": lr * optim.min_lr_ratio}
    else:
        values |= {f"{name}.lr_scheduler_type": optim.schedule, f"{name}.min_lr_ratio": optim.min_lr_ratio}
    steps = optim.warmup.unit == "steps"
    warmup = "lr_warmup_steps" if steps else "lr_warmup_steps_ratio"
    return values | {f"{name}.{warmup}": int(optim.warmup.amount) if steps else optim.warmup.amount}


def _engine(layout: Layout, part: Part) -> Overrides:
    again = {f"{part.model}.enable_gradient_checkpointing": layout.recompute == "full"}
    if not is_megatron(layout):
        # the actor's own key reaches its reference as well; the critic has none that is read
        ulysses = f"{part.name if part == ACTOR else part.fsdp}.ulysses_sequence_parallel_size"
        return again | {
            f"{part.name}.strategy": "fsdp2",
            ulysses: layout.ulysses,
            f"{part.fsdp}.fsdp_size": layout.shard if layout.replicate > 1 else -1,
            f"{part.fsdp}.optimizer_offload": layout.offload_optimizer,
            f"{part.model}.enable_activation_offload": layout.offload_activations,
        }
    name = f"{part.name}.megatron"
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    recompute = {f"{name}.override_transformer_config.{key}": value for key, value in full.items()}
    return (
        again
        | (recompute if layout.recompute == "full" else {})
        | {
            f"{part.name}.strategy": "megatron",
            f"{name}.tensor_model_parallel_size": layout.tp,
            f"{name}.pipeline_model_parallel_size": layout.pp,
            f"{name}.virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
            f"{name}.context_parallel_size": layout.ring,
            f"{name}.expert_model_parallel_size": layout.ep,
            f"{name}.expert_tensor_parallel_size": 1 if layout.ep > 1 else None,  # experts are whole: ep takes the devices of tp as well
            f"{name}.sequence_parallel": layout.sp,
            f"{name}.optimizer_offload": layout.offload_optimizer,
            f"{name}.vanilla_mbridge": True,  # the weights' bridge that is released as a package; the critic has a switch of its own
        }
    )


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
        "trainer.resume_mode": "disable" if checkpoint.resume == "none" else "auto",
    }
    if isinstance(recipe.objective, Ppo):
        values["trainer.max_critic_ckpt_to_keep"] = checkpoint.keep
    if checkpoint.resume not in ("auto", "none"):
        values |= {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": checkpoint.resume}
    return values


def _pools(plan: Plan) -> Overrides:
    """Nodes and devices a node of training and, where they are others, of generation."""
    cluster, place = plan.cluster, plan.placement
    if not objective_of(plan.recipe).off_policy_steps:
        return {"trainer.nnodes": cluster.nodes, "trainer.n_gpus_per_node": cluster.nproc}
    if place is None or place.colocated:
        raise ValueError("off_policy_steps: 1 needs a plan with devices of their own for generation")
    if cluster.nodes == 1:
        training, rollout = (1, cluster.nproc - place.rollout_devices), (1, place.rollout_devices)
    else:
        taken = place.rollout_devices // cluster.nproc
        training, rollout = (cluster.nodes - taken, cluster.nproc), (taken, cluster.nproc)
    return {
        "trainer.nnodes": training[0],
        "trainer.n_gpus_per_node": training[1],
        "actor_rollout_ref.rollout.nnodes": rollout[0],
        "actor_rollout_ref.rollout.n_gpus_per_node": rollout[1],
    }


_PLAIN = re.compile(r"[A-Za-z0-9_./:@+\-]+")  # what Hydra reads without quotes, in every position


def _text(value: Any) -> str:
    """A value as Hydra's grammar has it."""
    match value:
        case None:
            return "null"
        case list():
            return "[" + ",".join(_text(item) for item in value) + "]"
        case str() if not _PLAIN.fullmatch(value):
            return "'" + value.replace("'", "\\'") + "'"
        case _:
            return str(value)
