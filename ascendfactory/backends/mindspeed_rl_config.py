"""MindSpeed-RL's configuration: the model's shape spelled out, or model.json of MindSpeed-MM for models that see images."""

from __future__ import annotations

from typing import Any

from ascendfactory.backends.common import num_steps
from ascendfactory.backends.megatron import Flags, recompute_flags, split_of
from ascendfactory.backends.megatron_models import model_flags
from ascendfactory.backends.mindspeed_mm_config import model_config
from ascendfactory.backends.rl import KL_NAMES, answer_tokens, objective_of, prompt_tokens, rollout_share, rollout_tp
from ascendfactory.core.plan import ModelCard, Plan

_MODEL = "recipe_model"
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


def config(plan: Plan) -> dict[str, Any]:
    """The whole of grpo.yaml."""
    sees = plan.card.vision is not None
    return {
        "defaults": ["_self_"],
        "model": f"{plan.run_dir}/job/model.json" if sees else {_MODEL: _shape(plan.card)},
        "megatron_training": _training(plan) | (_image_training(plan) if sees else _text_training(plan)),
        "actor_config": _actor(plan),
        "rl_config": _algorithm(plan) | (_image_algorithm(plan) if sees else {}),
        "generate_config": _generation(plan) | ({"max_num_seqs": 64} if sees else {}),
    }


def image_model(plan: Plan) -> dict[str, Any]:
    """model.json of MindSpeed-MM, with rows packed to their exact length; the tower stays as it is."""
    model = model_config(plan) | {"image_token_id": 151655, "video_token_id": 151656}
    model["text_decoder"]["use_remove_padding"] = True
    for part in (model["text_decoder"], model["image_encoder"]["vision_encoder"]):
        del part["bias_activation_fusion"]  # the fused product of fine-tuning, which is not asked for here
    return model


def _shape(card: ModelCard) -> dict[str, Any]:
    return _underscored({_RENAMED.get(k, k): v for k, v in model_flags(card).items() if k not in _FOREIGN and v is not None})


def _training(plan: Plan) -> dict[str, Any]:
    recipe, layout = plan.recipe, plan.layout
    return {
        "model": _MODEL,
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
        "save_interval": int(recipe.checkpoint.every.amount),
        "train_iters": num_steps(recipe),
        "stage": "ray_grpo",
        "distributed_backend": "nccl",
        "split": "100,0,0",
        "no_shuffle": not recipe.data.shuffle,
        "seed": recipe.seed,
    }


def _text_training(plan: Plan) -> dict[str, Any]:
    return {
        "max_position_embeddings": max(plan.recipe.data.seq_len, plan.card.max_seq_len),
        "dataset_additional_keys": ["labels"],
        "data_path": f"{plan.run_dir}/tokens/data",
        **_underscored(recompute_flags(plan.layout)),
    }


def _image_training(plan: Plan) -> dict[str, Any]:
    """What a model of text has in its shape, and model.json has no place for."""
    return {
        "use_mcore_models": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "swiglu": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": 0.01,
        "variable_seq_lengths": plan.layout.pp > 1,
        "dataset_additional_keys": ["input_ids", "input_ids_length", "attention_mask", "position_ids"],
        "data_path": f"{plan.run_dir}/data/train.parquet",
        "num_workers": 8,
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
        # else a resumed run would take the newest checkpoint as its reference
        "integrated_mode_config": {"ref_model_load_path": f"{plan.run_dir}/weights"},
    }


def _image_algorithm(plan: Plan) -> dict[str, Any]:
    num_answers = objective_of(plan.recipe).num_answers
    return {
        "runtime_env_path": "MindSpeed-MM/examples/rl/envs/runtime_env.yaml",
        "is_multimodal": True,
        "guarantee_order": True,
        # one prompt at a time: with more it would hold answers against the solutions of other prompts
        "reward_dispatch_size": num_answers,
        "adv_dispatch_size": num_answers,
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


def _actor(plan: Plan) -> dict[str, Any]:
    optim, layout, run = plan.recipe.optim, plan.layout, plan.run_dir
    actor: dict[str, Any] = {
        "model": _MODEL,
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
