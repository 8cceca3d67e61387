"""The classes of transformers, built without memory, have the very shapes that the catalogue counts."""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ascendfactory.catalog.params import parameter_shapes  # noqa: E402
from ascendfactory.catalog.read import card_from_config, find_card  # noqa: E402
from ascendfactory.core.plan import ModelCard  # noqa: E402

TEXT_CARDS = [
    "Qwen2.5-0.5B",
    "Qwen2-72B",
    "Qwen3-0.6B",
    "Qwen3-30B-A3B",
    "Llama-3.2-1B",
    "GLM-4-9B-Chat",
    "Mixtral-8x7B",
    "DeepSeek-V2-Lite",
    "DeepSeek-V3",
]
VISION_CARDS = ["Qwen2-VL-2B", "Qwen2.5-VL-3B", "Gemma3-27B", "InternVL3-8B"]


def build(config: Any) -> Any:
    """The model on the meta device: shapes, no memory."""
    auto = transformers.AutoModelForImageTextToText if hasattr(config, "vision_config") else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


def hf_config(card: ModelCard) -> Any:
    """The HF config of a card: the inverse of `card_from_config`."""
    text: dict[str, Any] = {
        "hidden_size": card.hidden_size,
        "intermediate_size": card.ffn_size,
        "num_hidden_layers": card.num_layers,
        "num_attention_heads": card.num_heads,
        "num_key_value_heads": card.num_kv_heads,
        "vocab_size": card.vocab_size,
        "attention_bias": card.attention_bias,
        "pad_token_id": None,
    }
    if card.mla:
        text |= {**card.mla.model_dump(), "first_k_dense_replace": card.moe.first_dense_layers if card.moe else 0}
    else:
        text["head_dim"] = card.head_dim
    if card.moe:
        E = card.moe.num_experts
        text |= {"num_experts": E, "num_local_experts": E, "n_routed_experts": E, "num_experts_per_tok": card.moe.experts_per_token}
        text |= {"moe_intermediate_size": card.moe.expert_ffn_size, "n_shared_experts": card.moe.num_shared_experts or None}
    if card.vision is None:
        return transformers.AutoConfig.for_model(card.family, **text, tie_word_embeddings=card.tied_embeddings)
    V = card.vision
    vision: dict[str, Any] = {"patch_size": V.patch_size, "num_heads": V.num_heads, "intermediate_size": V.ffn_size}
    if card.family == "qwen2_vl":
        vision |= {
            "embed_dim": V.hidden_size,
            "depth": V.num_layers,
            "mlp_ratio": V.ffn_size // V.hidden_size,
            "hidden_size": card.hidden_size,
        }
    elif card.family == "qwen2_5_vl":
        vision |= {"hidden_size": V.hidden_size, "depth": V.num_layers, "out_hidden_size": card.hidden_size}
    else:
        vision |= {"hidden_size": V.hidden_size, "num_hidden_layers": V.num_layers, "num_attention_heads": V.num_heads}
    if card.family == "gemma3":
        vision |= {"image_size": 896, "vision_use_head": False, "model_type": "siglip_vision_model"}
    if card.family == "internvl":
        vision |= {"image_size": [448, 448], "patch_size": [14, 14], "attention_bias": True}
        text |= {"model_type": "qwen2"}
    return transformers.AutoConfig.for_model(card.family, text_config=text, vision_config=vision, tie_word_embeddings=card.tied_embeddings)


def fused(card: ModelCard) -> Iterator[tuple[int, ...]]:
    """The catalogue's shapes of the decoder, with gate and up, and all experts, in one tensor as HF holds them."""
    for weight in parameter_shapes(card):
        out_size, *rest = weight.shape
        if weight.role in ("vision", "expert_up") or (weight.role == "mlp_up" and card.family == "glm"):
            continue
        if weight.role == "expert_gate":
            yield (weight.copies, 2 * out_size, *rest)
        elif weight.role == "expert_down":
            yield (weight.copies, *weight.shape)
        elif weight.role == "mlp_gate" and card.family == "glm":
            yield (2 * out_size, *rest)
        else:
            yield from [weight.shape] * weight.copies


@pytest.mark.parametrize("name", TEXT_CARDS)
def test_text_model_has_exactly_these_shapes(name: str) -> None:
    card = find_card(name)
    model = build(hf_config(card))
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    assert Counter(shapes) == Counter(fused(card))
    assert sum(parameter.numel() for parameter in model.parameters()) == card.num_params


@pytest.mark.parametrize("name", VISION_CARDS)
def test_vision_model_has_exactly_these_shapes(name: str) -> None:
    card = find_card(name)
    model = build(hf_config(card))
    decoder = {id(p) for p in model.model.language_model.parameters()} | {id(p) for p in model.lm_head.parameters()}
    shapes = [tuple(p.shape) for p in model.parameters() if id(p) in decoder]
    assert Counter(shapes) == Counter(fused(card))
    assert card.vision is not None
    assert sum(p.numel() for p in model.parameters() if id(p) not in decoder) == card.vision.num_params
    assert sum(p.numel() for p in model.parameters()) == card.num_params


TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True}),
    ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
    ("mistral", {"head_dim": 16}),
    ("mixtral", {"num_local_experts": 4}),
    ("phi3", {}),
    ("qwen2", {}),
    ("qwen2_moe", MOE | {"shared_expert_intermediate_size": 48}),
    ("qwen2_moe", MOE | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2}),
    ("qwen3", {"attention_bias": True, "head_dim": 32}),
    ("qwen3_moe", MOE | {"mlp_only_layers": [0], "head_dim": 16}),
    ("glm", {"attention_bias": True, "head_dim": 16}),
    ("glm4", {"attention_bias": True, "head_dim": 16}),
    ("gemma", {"head_dim": 16}),
    ("gemma2", {"head_dim": 16}),
    ("gemma3_text", {"head_dim": 16}),
    ("olmo2", {}),
    ("smollm3", {}),
    ("deepseek_v2", MOE | {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None}),
    ("deepseek_v3", MOE | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 24}),
]


@pytest.mark.parametrize(("family", "extra"), FAMILIES)
def test_any_family_is_counted_from_its_config_json(family: str, extra: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(family, **{**TINY, **extra})
    card = card_from_config(config.to_dict(), "tiny")
    assert card.num_params == sum(p.numel() for p in build(config).parameters())


def test_qwen3_vl_with_its_deep_stack_is_counted() -> None:
    vision = {
        "hidden_size": 32,
        "depth": 2,
        "num_heads": 2,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
    }
    config = transformers.AutoConfig.for_model("qwen3_vl", text_config={**TINY, "head_dim": 16}, vision_config=vision)
    card = card_from_config(config.to_dict(), "tiny")
    assert card.num_params == sum(p.numel() for p in build(config).parameters())


def test_sliding_layers_follow_hf() -> None:
    for family, layers, window in (("gemma3_text", 12, 512), ("gemma2", 4, 64)):
        config = transformers.AutoConfig.for_model(family, **{**TINY, "num_hidden_layers": layers, "sliding_window": window})
        card = card_from_config(config.to_dict(), "tiny")
        full = [(layer + 1) % card.full_attention_period == 0 for layer in range(layers)]
        assert card.sliding_window == window
        assert full == [kind == "full_attention" for kind in config.layer_types]
