"""What `config.json` leaves unsaid: how a family of models differs from the plain Llama shape.

Read from the model classes of transformers; a family that is not listed has the default traits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Traits:
    """The shape rules of one HF `model_type`."""

    num_norms: int = 2  # norms a layer, each of the hidden size
    qkv_bias: Literal["config", "always", "never"] = "config"  # config: the key attention_bias (default false)
    output_bias: bool = False  # the output projection has a bias where q, k, v have one
    qk_norm: Literal["none", "head", "full"] = "none"  # norm of one head, or of all heads at once
    tied: bool = False  # tie_word_embeddings where config.json is silent
    shared_expert_gate: bool = False  # a [1, hidden] gate in front of the shared expert
    defaults: dict[str, int] = field(default_factory=dict)  # keys that published configs omit


_QWEN2 = Traits(qkv_bias="always", defaults={"use_sliding_window": 0})
_QWEN3 = Traits(output_bias=True, qk_norm="head", defaults={"use_sliding_window": 0})
_GEMMA3 = Traits(
    num_norms=4,
    output_bias=True,
    qk_norm="head",
    tied=True,
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
    },
)

FAMILIES: dict[str, Traits] = {
    "llama": Traits(output_bias=True),
    "smollm3": Traits(output_bias=True, tied=True),
    "mistral": Traits(qkv_bias="never"),
    "mixtral": Traits(qkv_bias="never"),
    "phi3": Traits(qkv_bias="never"),
    "qwen2": _QWEN2,
    "qwen2_moe": Traits(qkv_bias="always", shared_expert_gate=True, defaults={"use_sliding_window": 0}),
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_vl": _QWEN3,
    "glm": Traits(),
    "glm4": Traits(num_norms=4),
    "gemma": Traits(output_bias=True, tied=True),
    "gemma2": Traits(num_norms=4, output_bias=True, tied=True, defaults={"sliding_window_pattern": 2}),
    "gemma3": _GEMMA3,
    "olmo2": Traits(output_bias=True, qk_norm="full"),
    "deepseek_v2": Traits(),
    "deepseek_v3": Traits(),
    "internvl": Traits(),
}

DEFAULT = Traits(output_bias=True)


def is_known(family: str) -> bool:
    """Whether the family has traits of its own; `x_text` is the decoder of the vision-language family `x`."""
    return family in FAMILIES or family.removesuffix("_text") in FAMILIES


def traits_of(family: str) -> Traits:
    """The traits of an HF model_type; those of a plain Llama where the family is unknown."""
    return FAMILIES.get(family) or FAMILIES.get(family.removesuffix("_text"), DEFAULT)
