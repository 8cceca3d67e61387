"""What MindSpeed-MM reads beside its command line: model.json and data.json. Its converter, which cuts weights as model.json does."""

from __future__ import annotations

import json
from typing import Any

from ascendfactory.backends.common import Rule, only
from ascendfactory.backends.megatron import recompute_flags
from ascendfactory.core.plan import Layout, ModelCard, Plan
from ascendfactory.core.recipe import Pretrain, Recipe, Sft


def series(card: ModelCard) -> str:
    """Its name of a model's family; empty for one that it has no configuration of."""
    name = card.name.lower()
    return "qwen2.5vl" if name.startswith("qwen2.5-vl") else "internvl3" if name.startswith("internvl3") else ""


def file_rules(recipe: Recipe) -> list[Rule]:
    """It reads one file as it is."""
    data = recipe.data
    return [
        (len(data.train) != 1, "data.train", "reads one file with images; give one", "只读取一个含图像的文件", None),
        only(any(source.weight != 1.0 for source in data.train), "data.train", None, "weights of sources", "数据源权重"),
        only(data.bad_lines == "skip", "data.bad_lines", "stop", "skipping of bad records", "跳过坏行"),
    ]


def stage_rules(card: ModelCard, layout: Layout) -> list[Rule]:
    """Cuts that its models and its converter do not have."""
    return [
        only(layout.tp > card.num_kv_heads, "layout.tp", card.num_kv_heads, "tp above the key/value heads", "超过 KV 头数的 tp"),
        only(0 in layout.stage_layers, "layout.stage_layers", "auto", "empty stages", "空流水级"),
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


def model_config(plan: Plan) -> dict[str, Any]:
    """model.json: text decoder from the card, vision tower of the series, stages of the split."""
    card, text_stages, tower_stages = plan.card, *stages(plan.card, plan.layout)
    frozen = not isinstance(plan.recipe.objective, Pretrain)  # only pre-training moves the tower
    text = _text_decoder(plan, text_stages) | _recomputed(plan.layout)
    tower = {"pipeline_num_layers": tower_stages, "freeze": frozen}
    if plan.layout.recompute == "full" and not frozen:
        tower |= _recomputed(Layout(recompute="full"))
    return (_qwen if series(card) == "qwen2.5vl" else _internvl)(card, text, tower) | {"text_encoder": None, "video_encoder": None}


def _recomputed(layout: Layout) -> dict[str, Any]:
    """Recomputation of a part. It reads this here alone: on the command line it would change nothing."""
    return {name.replace("-", "_"): value for name, value in recompute_flags(layout).items()}


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


def _qwen(card: ModelCard, text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    vision = card.vision
    assert vision is not None
    encoder = {
        "model_id": "qwen2vit",
        "num_layers": vision.num_layers,
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
        "use_fused_rotary_pos_emb": True,
        "post_layer_norm": False,
        "tokens_per_second": 2,
        "window_attn_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "attention_mask_type": "general",
        **tower,
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
        "freeze": tower["freeze"],
        "layernorm_epsilon": 1e-6,
        "normalization": "RMSNorm",
    }
    return {
        "model_id": "qwen2_5vl",
        "img_context_token_id": 151655,
        "vision_start_token_id": 151652,
        "image_encoder": {"vision_encoder": encoder, "vision_projector": projector},
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


def _internvl(card: ModelCard, text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    vision = card.vision
    assert vision is not None
    encoder = {
        "model_id": "InternViT",
        "num_layers": vision.num_layers,
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
        **tower,
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
            "vision_encoder": encoder,
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
    if series(plan.card) == "internvl3":
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


def convert_words(plan: Plan, back: bool) -> list[str]:
    """The converter with the same stages as model.json, from Hugging Face weights or back to them."""
    text, tower = stages(plan.card, plan.layout)
    run, qwen = plan.run_dir, series(plan.card) == "qwen2.5vl"
    words = ["python", "{env}/src/MindSpeed-MM/checkpoint/convert_cli.py", "Qwen2_5_VLConverter" if qwen else "InternVLConverter"]
    words += ["mm_to_hf" if back else "hf_to_mm", "--cfg.hf_config.hf_dir", plan.recipe.model.path]
    words += ["--cfg.mm_dir", f"{run}/checkpoints", "--cfg.save_hf_dir", f"{run}/export"] if back else ["--cfg.mm_dir", f"{run}/weights"]
    for name, layers in (("llm_pp_layers", text), ("vit_pp_layers", tower)):
        # one list a virtual stage on the way in; on the way out it knows none
        words += [f"--cfg.parallel_config.{name}", json.dumps(layers if back else [layers], separators=(",", ":"))]
    # InternVL3's configuration is code that lies with its weights
    trust = [] if qwen else ["--cfg.trust_remote_code", "True"]
    return [*words, "--cfg.parallel_config.tp_size", str(plan.layout.tp), *trust]
