"""A model card from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ascendfactory.catalog.families import Traits, is_known, traits_of
from ascendfactory.catalog.params import count_active_params, count_params
from ascendfactory.catalog.vision import vision_from_config
from ascendfactory.core.messages import UserError, nearest
from ascendfactory.core.plan import Mla, ModelCard, Moe

Config = Mapping[str, Any]

# Layers that are neither attention nor a feed-forward: the shape rules of params.py do not hold for them.
_RECURRENT_KEYS = ("mamba_d_state", "ssm_cfg", "layers_block_type", "hybrid_override_pattern", "linear_num_key_heads")


def card_from_config(config: Config, name: str) -> ModelCard:
    """The card of any decoder model, with or without a vision tower.

    Args:
        config: the parsed config.json; vision-language models keep the decoder in `text_config` (or `llm_config`),
            older Qwen ones at the top level.
        name: what the model is called in messages and plans.

    Raises:
        UserError: a key that every decoder has is missing (named, with the nearest key that is there),
            or the model has layers that cannot be planned.
    """
    where = f"{name}/config.json"
    family = config.get("model_type", "")
    text = {**config, **(config.get("text_config") or config.get("llm_config") or {})}
    reader = _Reader(text, traits_of(_text_family(text, family)), where)
    _refuse_unplannable(text, where)
    hidden_size, num_heads = reader.whole("hidden_size"), reader.whole("num_attention_heads")
    mla, moe = _mla(reader), _moe(reader)
    window, period = _sliding(reader)
    vision = vision_from_config(family, config, hidden_size, where) if config.get("vision_config") else None
    traits = reader.traits
    card = ModelCard(
        name=name,
        family=family or "unknown",
        hub_id="",
        num_layers=reader.whole("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_size=reader.whole("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=reader.optional("num_key_value_heads", num_heads),
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else reader.optional("head_dim", hidden_size // num_heads),
        vocab_size=reader.whole("vocab_size"),
        max_seq_len=reader.whole("max_position_embeddings"),
        tied_embeddings=_tied(config, text, traits),
        attention_bias=traits.qkv_bias == "always" or (traits.qkv_bias == "config" and bool(text.get("attention_bias"))),
        qk_norm=traits.qk_norm != "none",
        num_norms_per_layer=traits.num_norms,
        sliding_window=window,
        full_attention_period=period,
        moe=moe,
        mla=mla,
        vision=vision,
        num_mtp_layers=reader.optional("num_nextn_predict_layers", 0),
        num_params=0,
        num_active_params=0,
        dtype=_dtype(config, text),
        source=_source(_text_family(text, family)),
    )
    return card.model_copy(update={"num_params": count_params(card), "num_active_params": count_active_params(card)})


class _Reader:
    """Typed access to the decoder's keys; a missing one is named in the error."""

    def __init__(self, text: Config, traits: Traits, where: str) -> None:
        self.text, self.traits, self.where = text, traits, where

    def whole(self, key: str) -> int:
        """A key that must be there, as a positive whole number."""
        value = self.text.get(key, self.traits.defaults.get(key))
        if value is not None:
            return self._checked(key, value, least=1)
        close, family = nearest(key, self.text), self.text.get("model_type", "")
        en_hint, zh_hint = (f"did you mean '{close}'?", f"是不是写成了 '{close}'？") if close else ("add it", "请补上")
        raise UserError(
            self.where,
            f"no key '{key}', which every decoder needs (model_type '{family}'); {en_hint}",
            f"缺少键 '{key}'，解码器模型都需要它（model_type '{family}'）；{zh_hint}",
        )

    def optional(self, key: str, default: int) -> int:
        """A key that may be missing or null."""
        value = self.text.get(key)
        return self.traits.defaults.get(key, default) if value is None else self._checked(key, value, least=0)

    def _checked(self, key: str, value: Any, least: int) -> int:
        if isinstance(value, int) and value >= least:
            return int(value)
        raise UserError(
            self.where,
            f"{key} is {value!r}; it must be a whole number of at least {least}",
            f"{key} 的值是 {value!r}，必须是不小于 {least} 的整数",
        )


def _text_family(text: Config, family: str) -> str:
    """The model_type of the decoder; `text_config` of some published models has none, then that of the whole."""
    return str(text.get("model_type") or family)


def _refuse_unplannable(text: Config, where: str) -> None:
    if text.get("is_encoder_decoder"):
        raise UserError(where, "an encoder-decoder model; only decoder models can be trained", "这是编码器-解码器模型；只支持解码器模型")
    found = next((key for key in _RECURRENT_KEYS if key in text), None)
    if found is None and "linear_attention" in (text.get("layer_types") or ()):
        found = "layer_types: linear_attention"
    if found:
        raise UserError(
            where,
            f"has recurrent layers ({found}), which cannot be planned; take a model of attention layers only",
            f"含有循环层（{found}），无法规划；请换用只有注意力层的模型",
        )
    if text.get("mlp_bias") or (text.get("attention_bias") and text.get("kv_lora_rank")):
        key = "mlp_bias" if text.get("mlp_bias") else "attention_bias with kv_lora_rank"
        raise UserError(where, f"{key} is set; no catalogue family has such biases", f"设置了 {key}；目录中没有带这种偏置的模型系列")


def _tied(config: Config, text: Config, traits: Traits) -> bool:
    """The outer key counts for vision-language models: it is the class that ties the head."""
    for source in (config, text):
        if (value := source.get("tie_word_embeddings")) is not None:
            return bool(value)
    return traits.tied


def _mla(reader: _Reader) -> Mla | None:
    if not reader.text.get("kv_lora_rank"):
        return None
    return Mla(
        q_lora_rank=reader.text.get("q_lora_rank"),
        kv_lora_rank=reader.whole("kv_lora_rank"),
        qk_nope_head_dim=reader.whole("qk_nope_head_dim"),
        qk_rope_head_dim=reader.whole("qk_rope_head_dim"),
        v_head_dim=reader.whole("v_head_dim"),
    )


def _moe(reader: _Reader) -> Moe | None:
    text = reader.text
    key = next((k for k in ("n_routed_experts", "num_experts", "num_local_experts") if text.get(k)), None)
    if key is None:
        return None
    expert_ffn = reader.optional("moe_intermediate_size", 0) or reader.whole("intermediate_size")
    num_shared = reader.optional("n_shared_experts", 0)
    shared_ffn = num_shared * expert_ffn or reader.optional("shared_expert_intermediate_size", 0)
    period = reader.optional("decoder_sparse_step", 1)
    if reader.optional("moe_layer_freq", 1) != 1:
        raise UserError(reader.where, "moe_layer_freq must be 1", "moe_layer_freq 必须为 1")
    return Moe(
        num_experts=reader.whole(key),
        experts_per_token=reader.whole("num_experts_per_tok"),
        expert_ffn_size=expert_ffn,
        num_shared_experts=num_shared or int(shared_ffn > 0),
        shared_ffn_size=shared_ffn,
        first_dense_layers=_first_dense(reader),
        layer_period=period,
    )


def _first_dense(reader: _Reader) -> int:
    """Leading dense layers: DeepSeek's count, or Qwen's list where it is a prefix."""
    dense = list(reader.text.get("mlp_only_layers") or ())
    if dense != list(range(len(dense))):
        raise UserError(
            reader.where,
            f"mlp_only_layers {dense} are not the first layers; only leading dense layers can be planned",
            f"mlp_only_layers {dense} 不是最前面的几层；只能规划开头的稠密层",
        )
    return len(dense) or reader.optional("first_k_dense_replace", 0)


def _sliding(reader: _Reader) -> tuple[int | None, int]:
    """(window, every n-th layer is full). Irregular patterns count as full attention: an upper bound.

    A model whose layers all slide has the period num_layers + 1, so that no layer is full.
    """
    text = reader.text
    window = text.get("sliding_window")
    if not window or not reader.optional("use_sliding_window", 1):
        return None, 1
    types = text.get("layer_types")
    if types:
        full = [index + 1 for index, kind in enumerate(types) if kind == "full_attention"]
        period = full[0] if full else len(types) + 1
        regular = full == list(range(period, len(types) + 1, period))
    else:
        period = reader.optional("sliding_window_pattern", reader.whole("num_hidden_layers") + 1)
        regular = text.get("use_sliding_window") is not True  # Qwen's max_window_layers: first full, then sliding
    return (int(window), period) if regular and period > 1 else (None, 1)


def _dtype(config: Config, text: Config) -> Literal["float32", "bfloat16", "float16"]:
    """The dtype of the weights; 8-bit ones are trained in bfloat16, so that is what counts."""
    value = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name == "float32":
        return "float32"
    return "float16" if name == "float16" else "bfloat16"


def _source(family: str) -> str:
    if is_known(family):
        return "config.json"
    return "config.json; the family is unknown and read as a Llama: biases or further norms may be missed"
