"""MindSpeed-MM as a back end: pre-training and full fine-tuning of Qwen2.5-VL (3B, 7B and larger) and InternVL3-8B.

The model's shape goes into model.json, whose stages are those of the converter: both come from one split.
"""

from __future__ import annotations

import json
from typing import Any

from ascendfactory.backends.common import (
    Rule,
    absent_rules,
    check_options,
    data_rules,
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
from ascendfactory.backends.megatron import (
    Flags,
    bf16_rules,
    context_flags,
    environment,
    lean_rules,
    optimizer_flags,
    read_iteration,
    recompute_flags,
    sharding_rules,
    start_facts,
    step_rules,
    torchrun,
    words,
)
from ascendfactory.core.plan import Job, Layout, ModelCard, Plan, Refusal, Step, StepMetrics
from ascendfactory.core.recipe import Lora, Pretrain, Recipe, Sft

NAME = "mindspeed_mm"
PROFILES = ("2.3.0", "2.2.0")
SOURCES = ["MindSpeed-MM", "MindSpeed", "Megatron-LM"]
# Settings that are accepted and change nothing here, and why.
NO_EFFECT = {
    "checkpoint.asynchronous": "checkpoints are written while training waits",
    "checkpoint.keep": "it keeps every checkpoint",
    "data.packing": "samples are padded to the longest of their micro-batch",
    "data.workers": "a fixed number of processes prepares the data",
    "output.log_every": "every iteration is reported; the progress display thins them out",
}


class MindSpeedMm:
    """Vision-language models through MindSpeed-MM."""

    name = NAME

    def refuse(self, recipe: Recipe, card: ModelCard, layout: Layout) -> list[Refusal]:
        """Why MindSpeed-MM cannot run the recipe under this layout; empty if it can."""
        rules: list[Rule] = [
            profile_rule(recipe, PROFILES),
            (_series(card) == "", "model.path", "only Qwen2.5-VL and InternVL3 here", "仅支持 Qwen2.5-VL 与 InternVL3", None),
            (not isinstance(recipe.objective, Pretrain | Sft), "objective", "only pretrain and sft", "仅支持 pretrain 与 sft", "sft"),
            only(isinstance(recipe.tuning, Lora), "tuning", "full", "LoRA", " LoRA"),
            *data_rules(recipe),
            *_setting_rules(recipe),
            *_layout_rules(recipe, card, layout),
        ]
        if recipe.profile in ("auto", *PROFILES) and _series(card):
            rules += extra_rules(recipe, {*_flags(recipe, card, layout), *_PLACES}, options(f"{NAME}-{profile_of(recipe, PROFILES)}"))
        return refusals(NAME, rules)

    def render(self, plan: Plan) -> Job:
        """The job: weights converted, training, weights back."""
        recipe = plan.recipe
        files = {
            "job/model.json": json.dumps(model_config(plan), indent=2) + "\n",
            "job/data.json": json.dumps(data_config(plan), indent=2, ensure_ascii=False) + "\n",
        }
        files |= {"job/train.py": program("megatron_train.py"), "job/start.json": _start(plan)}
        command = [*torchrun(plan), "{env}/src/MindSpeed-MM/pretrain_vlm.py", *words(train_flags(plan)), "{load}"]
        return Job(
            restarts=recipe.cluster.restarts,
            files=files,
            argv=["python", f"{plan.run_dir}/job/train.py", f"{plan.run_dir}/job/start.json", "--", *command],
            env=environment(plan, SOURCES) | {"ACLNN_CACHE_LIMIT": "100000", "COMBINED_ENABLE": "1"},
            environment=f"{NAME}-{profile_of(recipe, PROFILES)}",
            nproc=plan.cluster.nproc,
            before=[_convert_step(plan)],
            after=[_export_step(plan)] if recipe.output.export else [],
        )

    def read_step(self, line: str, plan: Plan) -> StepMetrics | None:
        """The step of an `iteration N/M | ... |` line."""
        return read_iteration(line, plan)


def _series(card: ModelCard) -> str:
    name = card.name.lower()
    return "qwen2.5vl" if name.startswith("qwen2.5-vl") else "internvl3" if name.startswith("internvl3") else ""


def _setting_rules(recipe: Recipe) -> list[Rule]:
    data = recipe.data
    last = isinstance(recipe.objective, Sft) and recipe.objective.train_on == "last"
    return [
        (len(data.train) != 1, "data.train", "reads one file of messages with images; give one", "只读取一个含图像的对话文件", None),
        only(any(source.columns for source in data.train), "data.train", None, "renaming of columns", "列改名"),
        only(any(source.weight != 1.0 for source in data.train), "data.train", None, "weights of sources", "数据源权重"),
        only(data.bad_lines == "skip", "data.bad_lines", "stop", "skipping of bad records", "跳过坏行"),
        only(last, "objective.train_on", "assistant", "training of the last answer only", "只训练最后一轮回答"),
        only(recipe.optim.schedule == "wsd", "optim.schedule", "cosine", "wsd schedule", " wsd 调度"),
        *bf16_rules(recipe),
        *step_rules(recipe, "1000 steps"),
    ]


def _layout_rules(recipe: Recipe, card: ModelCard, layout: Layout) -> list[Rule]:
    return [
        *sharding_rules(layout),
        schedule_rule(layout, "1f1b"),
        only(0 in layout.stage_layers, "layout.stage_layers", "auto", "empty stages", "空流水级"),
        *absent_rules(recipe, layout, "overlap_chunks", "recompute_in_advance", "in_backward"),
        only(layout.vpp > 1, "layout.vpp", 1, "virtual pipeline here", "虚拟流水线"),
        only(layout.ep > 1, "layout.ep", 1, "expert parallelism", "专家并行"),
        only(layout.tp > card.num_kv_heads, "layout.tp", card.num_kv_heads, "tp above the key/value heads", "超过 KV 头数的 tp"),
        *lean_rules(layout),
        only(layout.pp > card.num_layers, "layout.pp", 1, "empty stages", "空流水级"),
    ]


def stages(card: ModelCard, layout: Layout) -> tuple[list[int], list[int]]:
    """Layers of the language model and of the vision tower on each stage: the tower is on the first, which gets fewer layers."""
    assert card.vision is not None
    pp = layout.pp
    tower_stages = [card.vision.num_layers, *[0] * (pp - 1)]
    if layout.stage_layers:
        return list(layout.stage_layers), tower_stages
    if pp == 1:
        return [card.num_layers], tower_stages
    # the tower's work, in layers of the language model, by parameters
    tower = card.vision.num_params / max(1, (card.num_params - card.vision.num_params) / card.num_layers)
    share = (card.num_layers + tower) / pp
    first = max(1, min(card.num_layers - pp + 1, round(share - tower)))
    base, rest = divmod(card.num_layers - first, pp - 1)
    return [first, *(base + (i < rest) for i in range(pp - 1))], tower_stages


_PLACES = ("micro-batch-size", "bf16", "load", "save", "mm-data", "mm-model", "mm-tool")


def train_flags(plan: Plan) -> Flags:
    """Every flag of the trainer but the one of loading, which depends on whether there is a checkpoint.

    Raises:
        ValueError: a flag that the profile's own parser would refuse.
    """
    recipe, run = plan.recipe, plan.run_dir
    flags = _flags(recipe, plan.card, plan.layout) | {
        "micro-batch-size": plan.layout.micro_size,
        "bf16": plan.dtype == "bfloat16",
        "save": f"{run}/checkpoints",
        "mm-data": f"{run}/job/data.json",
        "mm-model": f"{run}/job/model.json",
        "mm-tool": "{env}/src/MindSpeed-MM/mindspeed_mm/tools/tools.json",
    }
    flags |= recipe.extra
    given = {name: value for name, value in flags.items() if value is not False and value is not None}
    if wrong := check_options(given, options(f"{NAME}-{profile_of(recipe, PROFILES)}")):
        raise ValueError("; ".join(f"--{name}: {en}" for name, en, _ in wrong))
    return flags


def _start(plan: Plan) -> str:
    """What the starting program must know to resume: see programs/megatron_train.py."""
    run = plan.run_dir
    return start_facts(plan, ["--load", f"{run}/weights"], ["--load", f"{run}/checkpoints"])


def _flags(recipe: Recipe, card: ModelCard, layout: Layout) -> Flags:
    flags: Flags = {
        "use-mcore-models": True,
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "sequence-parallel": layout.tp > 1 and layout.sp,
        "global-batch-size": recipe.batch.global_size,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": card.vocab_size,
        "seq-length": recipe.data.seq_len,
        "make-vocab-size-divisible-by": 1,
        "normalization": "RMSNorm",
        "use-fused-rmsnorm": True,
        "swiglu": True,
        "use-fused-swiglu": True,
        "no-masked-softmax-fusion": True,
        **optimizer_flags(recipe),
        "train-iters": num_steps(recipe) or 1,
        "use-flash-attn": True,
        "variable-seq-lengths": True,
        "use-distributed-optimizer": True,
        "overlap-grad-reduce": layout.shard > 1,
        "reuse-fp32-param": layout.reuse_params,
        "num-workers": 8,
        "distributed-timeout-minutes": 20,
        "log-interval": 1,
        "save-interval": int(recipe.checkpoint.every.amount),
        "eval-interval": 1000000,
        "eval-iters": 0,
        "ckpt-format": "torch",
        "distributed-backend": "nccl",
    }
    flags |= recompute_flags(layout)
    if layout.cp > 1:
        flags |= {"context-parallel-size": layout.cp, **context_flags(layout)}
    if _series(card) == "internvl3":
        flags |= {"position-embedding-type": "rope", "rotary-base": 1000000, "no-gradient-accumulation-fusion": True}
    return flags


def model_config(plan: Plan) -> dict[str, Any]:
    """model.json: text decoder from the card, vision tower of the series, stages of the split."""
    card, text_stages, tower_stages = plan.card, *stages(plan.card, plan.layout)
    frozen = isinstance(plan.recipe.objective, Sft)  # fine-tuning leaves the tower as it is, pre-training moves it
    text = _text_decoder(plan, text_stages)
    return (_qwen(card, text, tower_stages, frozen) if _series(card) == "qwen2.5vl" else _internvl(card, text, tower_stages, frozen)) | {
        "text_encoder": None,
        "video_encoder": None,
    }


def _text_decoder(plan: Plan, text_stages: list[int]) -> dict[str, Any]:
    card = plan.card
    return {
        "num_layers": card.num_layers,
        "pipeline_num_layers": text_stages,
        "hidden_size": card.hidden_size,
        "ffn_hidden_size": card.ffn_size,
        "num_attention_heads": card.num_heads,
        "seq_length": plan.recipe.data.seq_len,
        "max_position_embeddings": card.max_seq_len,
        "vocab_size": card.vocab_size,
        "untie_embeddings_and_output_weights": not card.tied_embeddings,
        "disable_bias_linear": True,
        "attention_dropout": 0.0,
        "init_method_std": 0.01,
        "hidden_dropout": 0.0,
        "normalization": "RMSNorm",
        "activation_func": "silu",
        "attention_softmax_in_fp32": True,
        "params_dtype": "bf16",
        "bf16": True,
        "parallel_output": True,
        "group_query_attention": True,
        "num_query_groups": card.num_kv_heads,
        "gated_linear_unit": True,
        "layernorm_epsilon": 1e-6,
        "add_bias_linear": False,
        "add_qkv_bias": card.attention_bias,
    }


def _qwen(card: ModelCard, text: dict[str, Any], tower_stages: list[int], frozen: bool) -> dict[str, Any]:
    vision = card.vision
    assert vision is not None
    tower = {
        "model_id": "qwen2vit",
        "num_layers": vision.num_layers,
        "pipeline_num_layers": tower_stages,
        "hidden_size": vision.hidden_size,
        "ffn_hidden_size": vision.ffn_size,
        "intermediate_size": vision.ffn_size,
        "llm_hidden_size": card.hidden_size,
        "gated_linear_unit": True,
        "bias_activation_fusion": True,
        "num_attention_heads": vision.num_heads,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "in_channels": 3,
        "patch_size": vision.patch_size,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "layernorm_epsilon": 1e-6,
        "normalization": "RMSNorm",
        "fp16": False,
        "bf16": True,
        "params_dtype": "bf16",
        "activation_func": "silu",
        "freeze": frozen,
        "use_fused_rotary_pos_emb": True,
        "post_layer_norm": False,
        "tokens_per_second": 2,
        "window_attn_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "attention_mask_type": "general",
    }
    projector = {
        "model_id": "lnmlp",
        "num_layers": 1,
        "gated_linear_unit": False,
        "bias_activation_fusion": False,
        "add_bias_linear": True,
        "input_size": vision.hidden_size,
        "hidden_size": card.hidden_size,
        "ffn_hidden_size": 4 * vision.hidden_size,
        "activation_func": "gelu",
        "bf16": True,
        "params_dtype": "bf16",
        "freeze": frozen,
        "layernorm_epsilon": 1e-6,
        "normalization": "RMSNorm",
    }
    return {
        "model_id": "qwen2_5vl",
        "img_context_token_id": 151655,
        "vision_start_token_id": 151652,
        "image_encoder": {"vision_encoder": tower, "vision_projector": projector},
        "text_decoder": {
            "model_id": "qwen2_5_lm",
            **text,
            "rope_theta": 1000000.0,
            "position_embedding_type": "mrope",
            "mrope_section": [16, 24, 24],
            "rope_scaling": None,
            "use_fused_rotary_pos_emb": True,
            "bias_activation_fusion": True,
        },
    }


def _internvl(card: ModelCard, text: dict[str, Any], tower_stages: list[int], frozen: bool) -> dict[str, Any]:
    vision = card.vision
    assert vision is not None
    tower = {
        "model_id": "InternViT",
        "num_layers": vision.num_layers,
        "pipeline_num_layers": tower_stages,
        "hidden_size": vision.hidden_size,
        "ffn_hidden_size": vision.ffn_size,
        "num_attention_heads": vision.num_heads,
        "num_channels": 3,
        "patch_size": vision.patch_size,
        "image_size": 448,
        "add_qkv_bias": True,
        "qk_layernorm": False,
        "activation_func": "gelu",
        "normalization": "LayerNorm",
        "layernorm_epsilon": 1e-6,
        "hidden_dropout": 0.0,
        "drop_path_rate": 0.4,
        "attention_dropout": 0.0,
        "init_method_std": 0.02,
        "initializer_factor": 1.0,
        "output_hidden_states": False,
        "use_return_dict": False,
        "params_dtype": "bf16",
        "post_layer_norm": False,
        "downsample_ratio": 0.5,
        "fp16": False,
        "bf16": True,
        "attention_softmax_in_fp32": False,
        "select_layer": -1,
        "ps_version": "v2",
        "freeze": frozen,
    }
    return {
        "model_id": "InternVL3",
        "pre_process": True,
        "post_process": True,
        "add_text_encoder": False,
        "img_embedding_idx": 1,
        "downsample_ratio": 0.5,
        "select_layer": -1,
        "ps_version": "v2",
        "add_rmsnorm_offset": False,
        "img_context_token_id": 151667,
        "text_decoder": {
            "model_id": "internllm",
            **text,
            "num_key_value_heads": card.num_kv_heads,
            "rotary_percent": 1.0,
            "rotary_base": 1000000,
            "position_embedding_type": "rope",
            "use_fused_rotary_pos_emb": False,
            "fp16_lm_cross_entropy": False,
            "rope_scaling": {"factor": 2.0, "type": "dynamic"},
        },
        "image_encoder": {
            "vision_encoder": tower,
            "vision_projector": {
                "model_id": "InternVLMLP",
                "downsample_ratio": 0.5,
                "vit_hidden_size": vision.hidden_size,
                "llm_hidden_size": card.hidden_size,
            },
        },
    }


def data_config(plan: Plan) -> dict[str, Any]:
    """data.json: one file of conversations with images."""
    recipe, run = plan.recipe, plan.run_dir
    path, all_tokens = recipe.data.train[0].path, not isinstance(recipe.objective, Sft) or recipe.objective.train_on == "all"
    if _series(plan.card) == "internvl3":
        dataset, collate = _internvl_data(recipe, path), {"model_name": "internvl", "pad_id": 151643}
    else:
        dataset, collate = _qwen_data(recipe, path, run, all_tokens), {"model_name": "qwen2vl", "ignore_pad_token_for_loss": True}
    loader = {
        "dataloader_mode": "sampler",
        "drop_last": True,
        "sampler_type": "BaseRandomBatchSampler",
        "collate_param": collate,
        "pin_memory": True,
        "shuffle": recipe.data.shuffle,
    }
    return {"dataset_param": dataset, "dataloader_param": loader}


def _qwen_data(recipe: Recipe, path: str, run: str, all_tokens: bool) -> dict[str, Any]:
    sharegpt = recipe.data.train[0].format == "sharegpt"
    tags = (
        {"messages": "conversations", "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
        if sharegpt
        else {"messages": "messages", "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    )
    return {
        "dataset_type": "huggingface",
        "preprocess_parameters": {
            "model_name_or_path": recipe.model.path,
            "use_fast_tokenizer": True,
            "split_special_tokens": False,
            "image_max_pixels": 262144,
            "image_min_pixels": 0,
            "video_max_pixels": 16384,
            "video_min_pixels": 0,
            "video_fps": 2.0,
            "video_maxlen": 64,
        },
        "basic_parameters": {
            "template": "qwen2vl",
            "dataset_dir": str(path.rsplit("/", 1)[0]) if "/" in path else ".",
            "dataset": path,
            "cache_dir": f"{recipe.data.cache_dir}/mindspeed_mm",
            "train_on_prompt": all_tokens,
            "mask_history": False,
            "preprocessing_batch_size": 1000,
            "preprocessing_num_workers": 16,
            "max_samples": None,
            "tool_format": None,
        },
        "attr": {
            "system": None,
            "images": "images",
            "videos": None,
            **tags,
            "observation_tag": None,
            "function_tag": None,
            "system_tag": None,
        },
    }


def _internvl_data(recipe: Recipe, path: str) -> dict[str, Any]:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    pipeline = [
        {"trans_type": "Pad2Square", "param": {"mean": mean}},
        {"trans_type": "Resize", "param": {"size": [448, 448], "interpolation": "BICUBIC", "antialias": None}},
        {"trans_type": "ToTensor"},
        {"trans_type": "norm_fun", "param": {"mean": mean, "std": std}},
    ]
    return {
        "dataset_type": "multimodal",
        "basic_parameters": {"data_path": path, "data_folder": str(path.rsplit("/", 1)[0]) if "/" in path else ".", "repeat_time": 1},
        "preprocess_parameters": {"image_reader_type": "torchvision", "train_pipeline": {"image": pipeline}},
        "tokenizer_config": {
            "hub_backend": "hf",
            "autotokenizer_name": "AutoTokenizer",
            "from_pretrained": recipe.model.path,
            "add_eos_token": False,
            "use_fast": False,
        },
        "use_text_processer": True,
        "template_name": "internvl2_5",
        "patch_size": 14,
        "image_size": 448,
        "down_sample_ratio": 0.5,
        "group_by_length": True,
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 12,
        "min_num_frame": 4,
        "max_num_frame": 12,
        "sampling_method": "rand",
    }


def _converter(plan: Plan, direction: str) -> list[str]:
    """mm-convert with the same stages as model.json."""
    text, tower = stages(plan.card, plan.layout)
    run, qwen = plan.run_dir, _series(plan.card) == "qwen2.5vl"
    words_ = ["{env}/bin/mm-convert", "Qwen2_5_VLConverter" if qwen else "InternVLConverter", direction]
    words_ += ["--cfg.hf_config.hf_dir", plan.recipe.model.path]
    if direction == "hf_to_mm":
        words_ += ["--cfg.mm_dir", f"{run}/weights"]
    else:
        words_ += ["--cfg.mm_dir", f"{run}/checkpoints", "--cfg.save_hf_dir", f"{run}/export"]
    for name, layers in (("llm_pp_layers", text), ("vit_pp_layers", tower)):
        # one list a virtual stage on the way in; on the way out it knows none
        value = json.dumps([layers] if direction == "hf_to_mm" else layers, separators=(",", ":"))
        words_ += [f"--cfg.parallel_config.{name}", value]
    # InternVL3's configuration is code that lies with its weights
    trust = [] if qwen else ["--cfg.trust_remote_code", "True"]
    return [*words_, "--cfg.parallel_config.tp_size", str(plan.layout.tp), *trust]


def _step(plan: Plan, name: str, argv: list[str], inputs: list[str], output: str) -> Step:
    env = environment(plan, SOURCES)
    return Step(name=name, argv=argv, env=env, environment=f"{NAME}-{profile_of(plan.recipe, PROFILES)}", inputs=inputs, output=output)


def _convert_step(plan: Plan) -> Step:
    return _step(plan, "convert", _converter(plan, "hf_to_mm"), [plan.recipe.model.path], f"{plan.run_dir}/weights")


def _export_step(plan: Plan) -> Step:
    newest = f"{plan.run_dir}/checkpoints/latest_checkpointed_iteration.txt"
    return _step(plan, "export", _converter(plan, "mm_to_hf"), [newest], f"{plan.run_dir}/export")
