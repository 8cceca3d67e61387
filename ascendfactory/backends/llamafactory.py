"""LLaMA-Factory as a back end: one YAML file, run in its own environment, told apart by `profile`.

What differs from the embedded engine, and is not refused: in pre-training its packed rows let documents see each other, and a
checkpoint is written while training waits. On a CPU with several processes parameters are replicated, not sharded.
"""

from __future__ import annotations

import json
from typing import Any, assert_never

import yaml

from ascendfactory.backends.common import (
    MEETING,
    Rule,
    absent_rules,
    check_options,
    data_rules,
    data_step,
    degree_rules,
    extra_rules,
    num_steps,
    only,
    options,
    profile_of,
    profile_rule,
    program,
    refusals,
    schedule_rule,
)
from ascendfactory.core.lines import read_step
from ascendfactory.core.plan import Job, Layout, ModelCard, Plan, Refusal, StepMetrics
from ascendfactory.core.recipe import Dapo, Dpo, Full, Grpo, Lora, Ppo, Pretrain, Recipe, Reward, Sft

NAME = "llamafactory"
PROFILES = ("0.9.5",)  # the first is the default
# Settings that are accepted and change nothing here, and why.
NO_EFFECT = {
    "checkpoint.asynchronous": "its checkpoints are always written while training waits",
    "data.workers": "its own process count is used for tokenising",
    "data.cache_dir": "it keeps its token cache where datasets does",
    "output.log_every": "steps are always reported one by one; the progress display thins them out",
}
_TEMPLATES = {  # family → the built-in template that equals the model's own
    "qwen2": "qwen",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_vl",
    "gemma3": "gemma3",
    "glm4": "glm4",
    "glm": "glm4",
    "chatglm": "glm4",
    "mixtral": "mistral",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek3",
    "internvl_chat": "intern_vl",
    "internvl": "intern_vl",
}
_NO_DEEPSPEED, _NO_ZERO3, _ONLY_ZERO3 = ("use_galore", "use_apollo"), ("pissa_init", "pure_bf16", "use_unsloth"), ("use_badam",)
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup", "wsd": "warmup_stable_decay"}


class LlamaFactory:
    """Pre-training, full and LoRA fine-tuning, reward models and DPO through LLaMA-Factory."""

    name = NAME

    def refuse(self, recipe: Recipe, card: ModelCard, layout: Layout) -> list[Refusal]:
        """Why LLaMA-Factory cannot run the recipe under this layout; empty if it can."""
        known = options(f"{NAME}-{profile_of(recipe, PROFILES)}") if recipe.profile in ("auto", *PROFILES) else None
        rules = [
            profile_rule(recipe, PROFILES),
            *_objective_rules(recipe),
            *data_rules(recipe),
            *_setting_rules(recipe),
            *_layout_rules(layout),
            *_absent(recipe, layout),
            *_deepspeed_rules(recipe, layout),
            *extra_rules(recipe, set(_common(recipe, card)) - {"template"}, known),
        ]
        return refusals(NAME, rules)

    def render(self, plan: Plan) -> Job:
        """The job: data rewritten, then torchrun (one process: plain Python) on the program that drives `run_exp`."""
        recipe, run = plan.recipe, plan.run_dir
        step, spec = data_step(plan, _form(recipe))
        config = train_config(plan)
        files = {
            "job/data.json": spec,
            "job/dataset_info.json": json.dumps(_dataset_info(recipe), indent=2) + "\n",
            "job/train.yaml": yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
            "job/train.py": program("llamafactory_train.py"),
        }
        if "deepspeed" in config:
            files["job/deepspeed.json"] = json.dumps(deepspeed_config(plan), indent=2) + "\n"
        export = f"{run}/export" if recipe.output.export else "-"
        return Job(
            restarts=recipe.cluster.restarts,
            files=files,
            argv=["python", *_torchrun(plan), f"{run}/job/train.py", f"{run}/job/train.yaml", export],
            env=_environment(plan),
            environment=f"{NAME}-{profile_of(recipe, PROFILES)}",
            nproc=plan.cluster.nproc,
            before=[step],
        )

    def read_step(self, line: str, plan: Plan) -> StepMetrics | None:
        """The step that a line `@step {...}` reports, or None for any other line."""
        return read_step(line)


def _torchrun(plan: Plan) -> list[str]:
    if plan.cluster.num_devices == 1 and not _uses_deepspeed(plan):  # which wants torchrun for one process too
        return []
    return [
        "-m",
        "torch.distributed.run",
        *(MEETING if plan.cluster.nodes > 1 else ["--standalone"]),
        "--nproc-per-node",
        str(plan.cluster.nproc),
    ]


def _environment(plan: Plan) -> dict[str, str]:
    env = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "DISABLE_VERSION_CHECK": "1", "WANDB_DISABLED": "true"}
    if plan.cluster.device.kind == "cuda":
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if plan.cluster.device.kind == "npu":
        env |= {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "HCCL_CONNECT_TIMEOUT": "1200"}
    return env


def _form(recipe: Recipe) -> str:
    match recipe.objective:
        case Pretrain():
            return "text"
        case Dpo() | Reward():
            return "preference"
        case _:
            return "conversations"


def _objective_rules(recipe: Recipe) -> list[Rule]:
    match recipe.objective:
        case Pretrain() | Sft() | Dpo():
            return []
        case Reward():
            lora = isinstance(recipe.tuning, Lora)
            return [
                (
                    not lora,
                    "tuning",
                    "its full reward models cannot be resumed; write tuning: lora",
                    "完整奖励模型无法断点续训；请写 tuning: lora",
                    "lora",
                )
            ]
        case Grpo() | Dapo() | Ppo():
            kind = recipe.objective.kind
            text = f"no {kind} (its PPO needs libraries of 2023); write backend: verl"
            return [(True, "objective", text, f"不支持 {kind}；请写 backend: verl", "dpo")]
        case other:
            assert_never(other)


def _setting_rules(recipe: Recipe) -> list[Rule]:
    optim, data, checkpoint, tuning = recipe.optim, recipe.data, recipe.checkpoint, recipe.tuning
    packed_only = recipe.duration.unit == "tokens" and (data.packing != "packed" or isinstance(recipe.objective, Dpo | Reward))
    return [
        only(data.packing == "fixed", "data.packing", "packed", "padding to seq_len", "补齐到 seq_len"),
        only(
            isinstance(recipe.objective, Dpo | Reward) and data.packing == "packed",
            "data.packing",
            "dynamic",
            "packed pairs",
            "打包的偏好对",
        ),
        only(
            isinstance(recipe.objective, Pretrain) and data.packing == "dynamic",
            "data.packing",
            "packed",
            "padded pre-training",
            "补齐式预训练",
        ),
        (
            packed_only,
            "duration",
            "tokens are only counted in packed rows; write steps or epochs",
            "仅打包时可按 token 计；请写 steps 或 epochs",
            None,
        ),
        only(
            optim.schedule == "linear" and optim.min_lr_ratio > 0,
            "optim.min_lr_ratio",
            0.0,
            "floor under a linear schedule",
            "线性调度的下限",
        ),
        (
            optim.schedule == "wsd" and num_steps(recipe) is None,
            "duration",
            "wsd needs the number of steps; write duration: N steps",
            "wsd 需要步数；请写 duration: N steps",
            None,
        ),
        (
            checkpoint.every.unit == "tokens" or (checkpoint.every.unit == "epochs" and checkpoint.every.amount != 1),
            "checkpoint.every",
            "saves every N steps or every epoch; write steps",
            "只能按步或按轮保存；请写 steps",
            "500 steps",
        ),
        (
            recipe.output.eval_every.unit == "tokens"
            or (recipe.output.eval_every.unit == "epochs" and recipe.output.eval_every.amount != 1),
            "output.eval_every",
            "evaluates every N steps or every epoch; write steps",
            "只能按步或按轮评估；请写 steps",
            "100 steps",
        ),
        only(recipe.output.dtype != "auto", "output.dtype", "auto", "choice of the exported dtype", "导出精度选择"),
        only(isinstance(tuning, Lora) and tuning.alpha != int(tuning.alpha), "tuning.alpha", 16.0, "fraction in alpha", "小数 alpha"),
        only(
            recipe.model.init == "random" and isinstance(tuning, Lora),
            "model.init",
            "pretrained",
            "adapters on random weights",
            "随机权重上的 LoRA",
        ),
    ]


def _layout_rules(layout: Layout) -> list[Rule]:
    return [
        *degree_rules(layout, ("replicate", "tp", "pp", "vpp", "ring", "ulysses", "ep")),
        only(layout.sp, "layout.sp", "auto", "sequence parallelism", "序列并行"),
        schedule_rule(layout, "1f1b"),
        only(
            layout.recompute in ("norm", "selective"),
            "layout.recompute",
            "auto",
            f"recompute {layout.recompute}",
            f"重计算 {layout.recompute}",
        ),
        only(layout.recompute_layers > 0, "layout.recompute_layers", "auto", "recomputation of some layers", "部分层重计算"),
        only(layout.offload_activations, "layout.offload_activations", False, "offloading of activations", "激活卸载"),
        only(layout.optim_dtype != "float32", "layout.optim_dtype", "float32", "moments in bfloat16", "bfloat16 动量"),
        only(layout.reuse_params, "layout.reuse_params", False, "sharing of weights with their masters", "参数副本复用"),
    ]


def _absent(recipe: Recipe, layout: Layout) -> list[Rule]:
    # torchrun of several nodes meets at a fixed address, where a node that was not lost does not come again
    return absent_rules(recipe, layout, "stage_layers", "overlap_chunks", "recompute_in_advance", "in_backward")


def _deepspeed_rules(recipe: Recipe, layout: Layout) -> list[Rule]:
    """Options that LLaMA-Factory does not take together with DeepSpeed, by which it trains on several devices."""
    runs, zero3 = recipe.cluster.device != "cpu" and (layout.dp > 1 or layout.offload_optimizer), layout.zero == 3
    return [
        (
            runs and unfit and bool(recipe.extra.get(name)),
            f"extra.{name}",
            f"not with DeepSpeed ZeRO {layout.zero}; {'write layout.zero: ' + str(zero) if zero else 'leave it out'}",
            f"不能与 DeepSpeed ZeRO {layout.zero} 同用；请{'写 layout.zero: ' + str(zero) if zero else '删去此项'}",
            None,
        )
        for names, unfit, zero in ((_NO_DEEPSPEED, True, None), (_NO_ZERO3, zero3, 2), (_ONLY_ZERO3, not zero3, 3))
        for name in names
    ]


def train_config(plan: Plan) -> dict[str, Any]:
    """The YAML of one run, every key written on purpose.

    Raises:
        ValueError: an option that LLaMA-Factory's own parser would refuse, or let pass although it is wrong.
    """
    recipe, layout, run = plan.recipe, plan.layout, plan.run_dir
    config = _common(recipe, plan.card) | {
        "dataset_dir": f"{run}/job",
        "output_dir": f"{run}/checkpoints",
        "per_device_train_batch_size": layout.micro_size,
        "per_device_eval_batch_size": layout.micro_size,
        "gradient_accumulation_steps": layout.num_micro,
        "disable_gradient_checkpointing": layout.recompute == "none",
        "bf16": plan.dtype == "bfloat16",
        "use_cpu": plan.cluster.device.kind == "cpu",
    }
    if _uses_deepspeed(plan):
        config["deepspeed"] = f"{run}/job/deepspeed.json"
    config |= recipe.extra
    if wrong := check_options(config, options(f"{NAME}-{profile_of(recipe, PROFILES)}")):
        raise ValueError("; ".join(f"{name}: {en}" for name, en, _ in wrong))
    return config


def _common(recipe: Recipe, card: ModelCard) -> dict[str, Any]:
    """What does not depend on the devices."""
    return {
        "model_name_or_path": recipe.model.path,
        "train_from_scratch": recipe.model.init == "random",
        "trust_remote_code": False,
        "stage": {"pretrain": "pt", "sft": "sft", "dpo": "dpo", "reward": "rm"}.get(recipe.objective.kind, recipe.objective.kind),
        "do_train": True,
        **_tuning(recipe),
        **_data(recipe, card),
        **_optimizer(recipe),
        **_saving(recipe),
        "seed": recipe.seed,
        "data_seed": recipe.seed,
    }


def _tuning(recipe: Recipe) -> dict[str, Any]:
    match recipe.tuning:
        case Full():
            return {"finetuning_type": "full"}
        case Lora() as lora:
            config: dict[str, Any] = {
                "finetuning_type": "lora",
                "lora_rank": lora.rank,
                "lora_alpha": int(lora.alpha),
                "lora_dropout": lora.dropout,
                "lora_target": "all" if lora.targets == ["all-linear"] else ",".join(lora.targets),
                "use_rslora": lora.rslora,
                "use_dora": lora.dora,
            }
            return config | ({"adapter_name_or_path": lora.adapter} if lora.adapter else {})
        case other:
            assert_never(other)


def _data(recipe: Recipe, card: ModelCard) -> dict[str, Any]:
    data = recipe.data
    packed = data.packing == "packed" and not isinstance(recipe.objective, Dpo | Reward)
    config: dict[str, Any] = {
        "dataset": "train",
        "cutoff_len": data.seq_len,
        "packing": packed,
        "neat_packing": packed and isinstance(recipe.objective, Sft),
        "overwrite_cache": False,
        "disable_shuffling": not data.shuffle,
        "template": recipe.extra.get("template", _template(recipe, card)),
        # the attention mask of packed rows numbers the samples, so it cannot be summed
        "include_num_input_tokens_seen": "all" if packed else "non_padding",
    }
    if isinstance(recipe.objective, Sft):
        config |= {"train_on_prompt": recipe.objective.train_on == "all", "mask_history": recipe.objective.train_on == "last"}
    if data.eval:
        config["eval_dataset"] = "eval"
    if data.eval_fraction:
        config["val_size"] = data.eval_fraction
    if data.eval or data.eval_fraction:
        every = recipe.output.eval_every
        config |= {"eval_strategy": "epoch"} if every.unit == "epochs" else {"eval_strategy": "steps", "eval_steps": int(every.amount)}
    return config


def _template(recipe: Recipe, card: ModelCard) -> str | None:
    """A built-in template; None reads the tokenizer's own."""
    if card.family == "llama" and card.name.lower().startswith(("llama-3", "llama3")):
        return "llama3"
    if isinstance(recipe.objective, Pretrain):
        return _TEMPLATES.get(card.family, "empty")
    return _TEMPLATES.get(card.family)


def _dataset_info(recipe: Recipe) -> dict[str, Any]:
    columns: dict[str, Any]
    match _form(recipe):
        case "text":
            columns = {"columns": {"prompt": "text"}}
        case "preference":
            columns = {
                "formatting": "sharegpt",
                "ranking": True,
                "columns": {"messages": "conversations", "system": "system", "chosen": "chosen", "rejected": "rejected"},
            }
        case _:
            columns = {"formatting": "sharegpt", "columns": {"messages": "conversations", "system": "system", "tools": "tools"}}
    parts = ["train", "eval"] if recipe.data.eval else ["train"]
    return {part: {"file_name": f"../data/{part}.jsonl", **columns} for part in parts}


def _optimizer(recipe: Recipe) -> dict[str, Any]:
    optim, steps = recipe.optim, num_steps(recipe)
    config: dict[str, Any] = {
        "optim": "adamw_torch",
        "learning_rate": optim.lr,
        "lr_scheduler_type": _SCHEDULES[optim.schedule],
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.beta1,
        "adam_beta2": optim.beta2,
        "adam_epsilon": optim.eps,
        "max_grad_norm": optim.max_grad_norm,
        "logging_nan_inf_filter": False,
    }
    if optim.warmup.unit == "steps":
        config["warmup_steps"] = int(optim.warmup.amount)
    else:
        config["warmup_ratio"] = optim.warmup.amount
    if optim.schedule == "cosine" and optim.min_lr_ratio:
        config |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": optim.min_lr_ratio}}
    if optim.schedule == "wsd" and steps:
        decay = max(1, round(steps * optim.decay_fraction))
        config["lr_scheduler_kwargs"] = {"num_decay_steps": decay, "min_lr_ratio": optim.min_lr_ratio, "decay_type": "linear"}
    if steps is None:
        return config | {"num_train_epochs": recipe.duration.amount}
    return config | {"max_steps": steps}


def _saving(recipe: Recipe) -> dict[str, Any]:
    checkpoint = recipe.checkpoint
    config: dict[str, Any] = {
        "overwrite_output_dir": False,  # with checkpoints there, this resumes the newest
        "save_total_limit": checkpoint.keep,
        "save_only_model": False,
        "logging_steps": 1,
        "logging_first_step": True,
        "plot_loss": False,
        "report_to": "none",
        "ddp_timeout": 18000,
    }
    if checkpoint.every.unit == "epochs":
        config["save_strategy"] = "epoch"
    else:
        config |= {"save_strategy": "steps", "save_steps": int(checkpoint.every.amount)}
    if checkpoint.resume not in ("auto", "none"):
        config["resume_from_checkpoint"] = checkpoint.resume
    return config


def _uses_deepspeed(plan: Plan) -> bool:
    return plan.cluster.device.kind != "cpu" and (plan.cluster.num_devices > 1 or plan.layout.offload_optimizer)


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """ZeRO of the layout's stage; sizes that the trainer knows are left to it."""
    zero: dict[str, Any] = {
        "stage": plan.layout.zero,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
    }
    if plan.layout.zero == 3:
        zero |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    if plan.layout.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False},
        "zero_optimization": zero,
    }
