"""What MindSpeed-LLM refuses: its own validation, and the limits of its converters, told before anything starts."""

from __future__ import annotations

from typing import assert_never

from ascendfactory.backends.common import Rule, absent_rules, only, profile_of, schedule_rule
from ascendfactory.backends.megatron import bf16_rules, sharding_rules, split_of
from ascendfactory.backends.megatron_models import ALL, FAMILIES, Family, family_of, uses_v2
from ascendfactory.core.plan import Layout, ModelCard
from ascendfactory.core.recipe import Dapo, Dpo, Grpo, Lora, Ppo, Pretrain, Recipe, Reward, Sft


def objective_rules(recipe: Recipe) -> list[Rule]:
    """Stages that it has, and how it trains them."""
    match recipe.objective:
        case Pretrain():
            lora = isinstance(recipe.tuning, Lora)
            return [only(lora, "tuning", "full", "LoRA in pre-training", "LoRA 预训练")]
        case Sft(train_on=train_on):
            return [only(train_on != "assistant", "objective.train_on", "assistant", f"train_on {train_on}", f" train_on {train_on}")]
        case Dpo() | Reward():
            return [
                (
                    True,
                    "objective",
                    "no preference training here; write backend: llamafactory",
                    "此处不做偏好训练；请写 backend: llamafactory",
                    "sft",
                )
            ]
        case Grpo() | Dapo() | Ppo():
            return [(True, "objective", "no reinforcement learning; write backend: verl", "不做强化学习；请写 backend: verl", "sft")]
        case other:
            assert_never(other)


def setting_rules(recipe: Recipe) -> list[Rule]:
    """Settings that are refused whatever the model and the layout."""
    data, checkpoint, tuning = recipe.data, recipe.checkpoint, recipe.tuning
    rules = [
        only(
            isinstance(recipe.objective, Pretrain) and data.packing != "packed",
            "data.packing",
            "packed",
            "padded pre-training",
            "补齐式预训练",
        ),
        only(recipe.optim.schedule == "wsd", "optim.schedule", "cosine", "wsd schedule", " wsd 调度"),
        only(not data.shuffle, "data.shuffle", True, "fixed order of the samples", "固定样本顺序"),
        (checkpoint.every.unit == "tokens", "checkpoint.every", "write steps or epochs", "请写 steps 或 epochs", "500 steps"),
        (recipe.duration.unit == "tokens" and data.packing != "packed", "duration", "write steps or epochs", "请写 steps 或 epochs", None),
        *bf16_rules(recipe),
    ]
    if isinstance(tuning, Lora):
        rules += [
            only(tuning.dropout > 0, "tuning.dropout", 0.0, "dropout in adapters", "适配器 dropout"),
            only(tuning.rslora, "tuning.rslora", False, "rank-stabilised scaling", " rslora"),
            only(tuning.dora, "tuning.dora", False, "DoRA", " DoRA"),
            only(tuning.adapter is not None, "tuning.adapter", None, "going on from a peft adapter", "从 peft 适配器继续"),
            only(tuning.targets != ["all-linear"], "tuning.targets", ["all-linear"], "choice of layers", "层选择"),
            only(tuning.alpha != int(tuning.alpha), "tuning.alpha", 16.0, "fraction in alpha", "小数 alpha"),
            only(recipe.model.init == "random", "model.init", "pretrained", "adapters on random weights", "随机权重上的 LoRA"),
        ]
    return rules


def card_rules(card: ModelCard, family: Family | None, profile: str) -> list[Rule]:
    """Models that the profile has."""
    if family is None or card.vision is not None:
        known = ", ".join(FAMILIES)
        return [
            (
                True,
                "model.path",
                f"no layer specification for {card.name}; it has {known}",
                f"没有 {card.name} 的层定义；已有 {known}",
                None,
            )
        ]
    newest = family.profiles[0]
    text, text_zh = (
        f"profile {profile} no longer has {card.name}; write profile: {newest}",
        f"配置 {profile} 已不含 {card.name}；请写 profile: {newest}",
    )
    return [(profile in ALL and profile not in family.profiles, "profile", text, text_zh, newest)]


def layout_rules(recipe: Recipe, card: ModelCard, layout: Layout) -> list[Rule]:
    """Layouts that trainer or converters would stop at."""
    lora, moe = isinstance(recipe.tuning, Lora), card.moe is not None
    return [
        *sharding_rules(layout),
        *_pipeline_rules(recipe, card, layout),
        *_converter_rules(recipe, card, layout),
        *absent_rules(recipe, layout, "in_backward"),
        only(layout.recompute == "selective", "layout.recompute", "auto", "selective recomputation", "选择性重计算"),
        only(
            layout.recompute == "norm" and layout.recompute_layers > 0,
            "layout.recompute_layers",
            "auto",
            "part of the layers here",
            "部分层",
        ),
        only(
            layout.offload_activations and lora, "layout.offload_activations", False, "swap-attention with LoRA", "LoRA 下的 swap-attention"
        ),
        only(
            layout.vpp > 1 and card.num_layers % (layout.pp * layout.vpp) != 0, "layout.vpp", 1, "uneven virtual chunks", "不均匀的虚拟流水"
        ),
        only(
            layout.tp > card.num_kv_heads and card.mla is None,
            "layout.tp",
            card.num_kv_heads,
            "tp above the key/value heads",
            "超过 KV 头数的 tp",
        ),
        only(
            moe and layout.tp > 1 and not layout.sp,
            "layout.sp",
            "auto",
            "experts under tp without sequence parallelism",
            "无序列并行的 tp 专家层",
        ),
        only(moe and lora and layout.tp > 1, "layout.tp", 1, "LoRA on experts under tp", "tp 下的专家 LoRA"),
        only(
            moe and not split_of(card, layout).extends and layout.dp * layout.cp % layout.ep != 0,
            "layout.ep",
            1,
            f"ep {layout.ep} here: it must be a multiple of tp, or divide dp x cp",
            f" ep {layout.ep}",
        ),
        only(
            layout.offload_optimizer and layout.reuse_params,
            "layout.reuse_params",
            False,
            "swap-optimizer with shared weights",
            "swap-optimizer 与参数副本复用同用",
        ),
        only(
            layout.offload_optimizer and layout.shard == 1,
            "layout.offload_optimizer",
            False,
            "swap-optimizer without dp",
            "无 dp 的 swap-optimizer",
        ),
        only(
            layout.optim_dtype != "float32" and profile_of(recipe, ALL) != "master",
            "layout.optim_dtype",
            "float32",
            "moments in bfloat16 before profile master, where they need Ascend's own build of apex",
            " bfloat16 动量（master 之前的配置需要昇腾版 apex）",
        ),
        only(
            layout.ring > 1 and recipe.data.seq_len % (2 * layout.cp) != 0,
            "layout.ring",
            1,
            "ring over such seq_len",
            "该 seq_len 的环形并行",
        ),
    ]


def _pipeline_rules(recipe: Recipe, card: ModelCard, layout: Layout) -> list[Rule]:
    """Orders of micro-batches, uneven stages and what hides in the gaps, within what its validation and converters allow."""
    sizes, lora = layout.stage_layers, isinstance(recipe.tuning, Lora)
    is_v, extends = layout.schedule == "dualpipev", card.moe is not None and split_of(card, layout).extends
    dense = card.moe.first_dense_layers if card.moe else 0
    chunked, chunks = layout.overlap_chunks > 1, layout.overlap_chunks
    in_advance = layout.vpp > 1 and layout.recompute == "full" and layout.recompute_layers > 0
    return [
        schedule_rule(layout, "1f1b", *(("interleaved", "dualpipev") if layout.vpp > 1 else ())),
        only(
            dense > 0 and layout.pp > 1 and card.num_layers // layout.pp <= dense,
            "layout.pp",
            card.num_layers // (dense + 1),
            f"stage of dense layers alone, which are the first {dense}",
            f"只含稠密层（前 {dense} 层）的流水级",
        ),
        only(is_v and lora, "layout.schedule", "auto", "LoRA under dualpipev", "dualpipev 下的 LoRA"),
        only(is_v and card.tied_embeddings, "layout.schedule", "auto", "tied embeddings under dualpipev", "dualpipev 下的共享词嵌入"),
        only(is_v and layout.cp > 1, "layout.schedule", "auto", "context parallelism under dualpipev", "dualpipev 下的上下文并行"),
        only(
            is_v and layout.offload_activations,
            "layout.offload_activations",
            False,
            "swap-attention under dualpipev",
            "dualpipev 下的 swap-attention",
        ),
        only(is_v and layout.tp > 1 and not extends, "layout.tp", 1, "tp under dualpipev that cuts layers", "dualpipev 下切分层的 tp"),
        only(
            bool(sizes) and (layout.vpp > 1 or 0 in sizes),
            "layout.stage_layers",
            "auto",
            "such virtual or empty stages",
            "这样的虚拟或空流水级",
        ),
        only(chunked and lora, "layout.overlap_chunks", 1, "CoC with LoRA", "CoC 与 LoRA 同用"),
        only(chunked and card.moe is not None, "layout.overlap_chunks", 1, "CoC with experts", "CoC 与专家层同用"),
        only(chunked and chunks not in (2, 4, 8), "layout.overlap_chunks", 4, f"CoC in {chunks} pieces", f" {chunks} 块的 CoC"),
        only(
            layout.recompute_in_advance and not (in_advance and split_of(card, layout).layers_per_chunk == 1),
            "layout.recompute_in_advance",
            False,
            "recomputation in advance but with recompute full of the first layers and one layer a virtual chunk",
            "此处的提前重计算（仅限 full、前若干层、每个虚拟块一层）",
        ),
    ]


def _converter_rules(recipe: Recipe, card: ModelCard, layout: Layout) -> list[Rule]:
    """What its converters cannot read or write; the older one reads a checkpoint's stages as equal, and the newer one of 2.2.0 mixes up
    the files of virtual chunks under tp."""
    if (family := family_of(card)) is None:
        return []
    split, export, v2 = split_of(card, layout), recipe.output.export, uses_v2(recipe, family)
    stages = max(pp for pp in range(1, layout.pp + 1) if card.num_layers % pp == 0)
    key, fix = ("layout.stage_layers", "auto") if layout.stage_layers and stages == layout.pp else ("layout.pp", stages)
    return [
        only(split.v_shaped and not v2, "layout.schedule", "auto", "converter of this model for dualpipev", "该模型的 dualpipev 权重转换"),
        only(export and not v2 and layout.vpp == 1 and not split.even, key, fix, "export from uneven stages", "从不均匀流水级导出"),
        only(
            export and not v2 and layout.vpp > 1 and isinstance(recipe.tuning, Lora),
            "layout.vpp",
            1,
            "merging of adapters in virtual chunks",
            "虚拟流水块中的适配器合并",
        ),
        only(
            export and v2 and layout.vpp > 1 and layout.tp > 1 and profile_of(recipe, ALL) == "2.2.0",
            "layout.vpp",
            1,
            "export from virtual chunks under tp",
            "tp 下的虚拟流水导出",
        ),
    ]
