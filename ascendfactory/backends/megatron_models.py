"""The models that MindSpeed's Megatron knows, spelled out: it reads no config.json.

Sizes come from the model's card; what a card does not hold (rotary base, norm epsilon, layer specification, router) from the
example scripts of MindSpeed-LLM 2.2.0, 2.3.0 and master.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ascendfactory.backends.common import profile_of
from ascendfactory.backends.megatron import Flags
from ascendfactory.core.plan import ModelCard
from ascendfactory.core.recipe import Lora, Recipe

_QWEN_SPEC = ["mindspeed_llm.tasks.models.spec.qwen3_spec", "layer_spec"]
_DEEPSEEK_SPEC = ["mindspeed_llm.tasks.models.spec.deepseek_spec", "layer_spec"]
_OLD = ("2.2.0", "2.3.0")
ALL = (*_OLD, "master")


@dataclass(frozen=True)
class Family:
    """What MindSpeed-LLM must be told of a family, since it reads no config.json. From its example scripts."""

    profiles: tuple[str, ...]
    prompt: str  # template of the instruction data
    model_type: str  # of convert_ckpt.py
    model_type_v2: str = ""  # of convert_ckpt_v2.py, "" where that does not know the family
    profiles_v2: tuple[str, ...] = ()  # whose convert_ckpt_v2.py can do it
    flags: Flags = field(default_factory=dict)  # of the trainer
    convert: Flags = field(default_factory=dict)  # of both converters


def _llama3(factor: float) -> Flags:
    return {
        "rotary-base": 500000,
        "norm-epsilon": 1e-5,
        "rope-scaling-type": "llama3",
        "rope-scaling-factor": factor,
        "low-freq-factor": 1.0,
        "high-freq-factor": 4.0,
        "original-max-position-embeddings": 8192,
    }


_QWEN2 = {"rotary-base": 1000000, "norm-epsilon": 1e-6}
_QWEN3 = {"rotary-base": 1000000, "norm-epsilon": 1e-6, "qk-layernorm": True, "spec": _QWEN_SPEC}
_YARN = {
    "rope-scaling-type": "yarn",
    "rope-scaling-factor": 40,
    "rope-scaling-original-max-position-embeddings": 4096,
    "beta-fast": 32,
    "beta-slow": 1,
}
_DEEPSEEK = {
    "rotary-base": 10000,
    "norm-epsilon": 1e-6,
    "qk-layernorm": True,
    "spec": _DEEPSEEK_SPEC,
    "multi-latent-attention": True,
    **_YARN,
}

FAMILIES: dict[str, Family] = {
    "qwen2": Family(("2.2.0",), "qwen", "llama2", flags=_QWEN2, convert={"add-qkv-bias": True}),
    "qwen2.5": Family(_OLD, "qwen", "llama2", flags=_QWEN2, convert={"add-qkv-bias": True}),
    "qwen3": Family(ALL, "qwen3", "qwen3", "qwen3", ("2.3.0", "master"), _QWEN3, {"spec": _QWEN_SPEC}),
    "qwen3_moe": Family(
        ALL,
        "qwen3",
        "qwen3-moe",
        "qwen3-moe",
        ALL,
        _QWEN3 | {"moe-router-load-balancing-type": "aux_loss", "moe-aux-loss-coeff": 0.001, "norm-topk-prob": True},
        {"spec": _QWEN_SPEC},
    ),
    "llama3.1": Family(_OLD, "llama3", "llama2", flags=_llama3(8.0)),
    "llama3.2": Family(_OLD, "llama3", "llama2", flags=_llama3(32.0)),
    "glm4": Family(
        _OLD,
        "glm4",
        "chatglm3",
        flags={"rotary-base": 5000000, "norm-epsilon": 1.5625e-07, "use-glm-rope": True, "rotary-percent": 0.5, "no-rope-fusion": True},
        convert={"add-qkv-bias": True},
    ),
    "mixtral": Family(
        ("2.2.0",),
        "mixtral",
        "mixtral",
        flags={
            "rotary-base": 1000000,
            "norm-epsilon": 1e-5,
            "moe-router-load-balancing-type": "aux_loss",
            "moe-aux-loss-coeff": 0.02,
        },
    ),
    "deepseek_v2": Family(
        ("2.2.0",),
        "deepseek2-lite",
        "deepseek2-lite",
        flags=_DEEPSEEK
        | {
            "rope-scaling-mscale": 0.707,
            "rope-scaling-mscale-all-dim": 0.707,
            "moe-router-load-balancing-type": "pai_megatron_aux_loss",
            "moe-aux-loss-coeff": 0.01,
            "moe-router-topk-scaling-factor": 1.0,
            "seq-aux": True,
        },
        convert={"spec": _DEEPSEEK_SPEC},
    ),
    "deepseek_v3": Family(
        ALL,
        "deepseek3",
        "",
        "deepseek3",
        ALL,
        _DEEPSEEK
        | {
            "rope-scaling-mscale": 1.0,
            "rope-scaling-mscale-all-dim": 1.0,
            "moe-router-load-balancing-type": "none",
            "moe-router-num-groups": 8,
            "moe-router-group-topk": 4,
            "moe-router-topk-scaling-factor": 2.5,
            "moe-router-score-function": "sigmoid",
            "moe-router-enable-expert-bias": True,
            "moe-router-dtype": "fp32",
            "norm-topk-prob": True,
            "seq-aux": True,
        },
    ),
}


def family_of(card: ModelCard) -> Family | None:
    """What is known of a model's family, or None."""
    name = card.name.lower()
    match card.family:
        case "qwen2":
            return FAMILIES["qwen2.5" if name.startswith("qwen2.5") else "qwen2"]
        case "llama":
            series = next((series for series in ("3.1", "3.2") if f"llama-{series}" in name), "")
            return FAMILIES.get(f"llama{series}")
        case "glm" | "glm4" | "chatglm":
            return FAMILIES["glm4"]
        case family:
            return FAMILIES.get(family)


def uses_v2(recipe: Recipe, family: Family) -> bool:
    """Whether the newer converter does it: it has to know the family, and has adapters on master only."""
    profile = profile_of(recipe, ALL)
    if not family.model_type:
        return True
    return profile in family.profiles_v2 and (profile == "master" or not isinstance(recipe.tuning, Lora))


def model_flags(card: ModelCard) -> Flags:
    """The model's shape, which Megatron does not read from config.json."""
    family = family_of(card)
    assert family is not None
    flags: Flags = {
        "use-mcore-models": True,
        "num-layers": card.num_layers,
        "hidden-size": card.hidden_size,
        "ffn-hidden-size": card.ffn_size,
        "num-attention-heads": card.num_heads,
        "make-vocab-size-divisible-by": 1,
        "padded-vocab-size": card.vocab_size,
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "swiglu": card.gated_mlp,
        "disable-bias-linear": True,
        "add-qkv-bias": card.attention_bias,
        "untie-embeddings-and-output-weights": not card.tied_embeddings,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "init-method-std": 0.01,
        "attention-softmax-in-fp32": True,
        "no-masked-softmax-fusion": True,
        "no-gradient-accumulation-fusion": True,
        "use-flash-attn": True,
        "use-fused-rmsnorm": True,
        "use-fused-swiglu": True,
        "tokenizer-type": "PretrainedFromHF",
        "distributed-backend": "nccl",
    }
    if card.family not in ("glm", "glm4", "chatglm"):
        flags |= {"use-fused-rotary-pos-emb": True, "use-rotary-position-embeddings": True}
    if card.mla is None:
        if card.num_kv_heads != card.num_heads:
            flags |= {"group-query-attention": True, "num-query-groups": card.num_kv_heads}
        if card.head_dim * card.num_heads != card.hidden_size:
            flags["kv-channels"] = card.head_dim
    else:
        mla = card.mla
        flags |= {
            "q-lora-rank": mla.q_lora_rank,
            "kv-lora-rank": mla.kv_lora_rank,
            "qk-head-dim": mla.qk_nope_head_dim,
            "qk-pos-emb-head-dim": mla.qk_rope_head_dim,
            "v-head-dim": mla.v_head_dim,
        }
    return flags | _expert_flags(card) | family.flags


def _expert_flags(card: ModelCard) -> Flags:
    moe = card.moe
    if moe is None:
        return {}
    dense = moe.first_dense_layers
    return {
        "num-experts": moe.num_experts,
        "moe-router-topk": moe.experts_per_token,
        "moe-ffn-hidden-size": moe.expert_ffn_size,
        "n-shared-experts": moe.num_shared_experts or None,
        "moe-grouped-gemm": True,
        "moe-permutation-async-comm": True,
        "moe-token-dispatcher-type": "alltoall_seq",
        "first-k-dense-replace": dense or -1,
        "moe-layer-freq": 1 if dense else -1,
    }
