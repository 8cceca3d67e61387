"""What outside engines are known to accept by the published tables: enough to plan with them where a recipe names none.

A recipe that names one is judged by that back end itself (`backends/`), which knows its own options.

Models and stages are those of the support tables; the rest are limits of the engines themselves (MindSpeed-LLM's
validators, LLaMA-Factory's and verl's choices of sharding).
"""

from __future__ import annotations

from functools import cache

from ascendfactory.catalog.tables import support
from ascendfactory.core.plan import Layout, ModelCard, Refusal
from ascendfactory.core.recipe import Dpo, Lora, Pretrain, Recipe, Reward, Sft
from ascendfactory.planner.engines import ENGINES, Engine

PRICED = ("mindspeed_llm", "llamafactory", "verl", "mindspeed_rl", "mindspeed_mm")
_MEGATRON = ("mindspeed_llm", "mindspeed_rl", "mindspeed_mm")


class Priced:
    """Judges layouts for one engine."""

    def __init__(self, name: str) -> None:
        self.name, self._engine = name, ENGINES[name]

    def refuse(self, recipe: Recipe, card: ModelCard, layout: Layout) -> list[Refusal]:
        """Why the engine is not known to run the recipe under this layout."""
        return [
            *_refuse_stage(self.name, recipe, card),
            *_refuse_degrees(self._engine, layout),
            *_refuse_pairs(self._engine, recipe, card, layout),
        ]


def priced_engines() -> dict[str, Priced]:
    """All of them by name."""
    return {name: Priced(name) for name in PRICED}


def stage_of(recipe: Recipe) -> str:
    """The name of a recipe's stage in the support tables."""
    match recipe.objective:
        case Pretrain():
            return "pretrain"
        case Sft():
            return "sft_lora" if isinstance(recipe.tuning, Lora) else "sft_full"
        case Dpo() | Reward():
            return "dpo"
        case _:
            return recipe.objective.kind


def _refuse_stage(name: str, recipe: Recipe, card: ModelCard) -> list[Refusal]:
    stage = stage_of(recipe)
    known = _stages_known(name, card.name.lower())
    if stage in known:
        return []
    if known:
        en = f"{name} is not known to train {card.name} by {stage}; it trains {', '.join(known)}"
        zh = f"未见 {name} 以 {stage} 训练 {card.name} 的记录；它支持 {'、'.join(known)}"
    else:
        en = f"{name} is not known to train {card.name}; see 'ascendfactory backends'"
        zh = f"未见 {name} 训练 {card.name} 的记录；见 'ascendfactory backends'"
    return [
        Refusal(
            code=f"{name}.stage",
            where="backend",
            en=en,
            zh=zh,
        )
    ]


@cache
def _stages_known(backend: str, model: str) -> tuple[str, ...]:
    """The stages for which the support tables have an engine train a model."""
    return tuple(sorted({stage for row in support(None, backend) if row.model.lower() == model for stage in row.stages}))


def _refuse_degrees(engine: Engine, layout: Layout) -> list[Refusal]:
    found = [
        Refusal(
            code=f"{engine.name}.{degree}",
            where=f"layout.{degree}",
            en=f"{engine.name} has no {degree}; write {degree}: 1",
            zh=f"{engine.name} 没有 {degree}；请写 {degree}: 1",
            fix={f"layout.{degree}": 1},
        )
        for degree in ("replicate", "tp", "pp", "vpp", "ring", "ulysses", "ep")
        if getattr(layout, degree) > 1 and degree not in engine.degrees
    ]
    if layout.zero not in engine.zeros:
        best = max(engine.zeros)
        found.append(_choice(engine, "zero", f"zero: {best}", {"layout.zero": best}))
    if layout.recompute not in engine.recomputes:
        found.append(_choice(engine, "recompute", "recompute: auto", {"layout.recompute": "auto"}))
    if not engine.keeps_copy:  # Megatron's own switches
        for name in ("reuse_params", "recompute_layers"):
            if getattr(layout, name):
                value = False if name == "reuse_params" else "auto"
                found.append(_choice(engine, name, f"{name}: {value}", {f"layout.{name}": value}))
    return found


def _choice(engine: Engine, key: str, write: str, fix: dict[str, object]) -> Refusal:
    return Refusal(
        code=f"{engine.name}.{key}",
        where=f"layout.{key}",
        en=f"{engine.name} has no such {key}; write {write}",
        zh=f"{engine.name} 没有这种 {key}；请写 {write}",
        fix=fix,
    )


def _refuse_pairs(engine: Engine, recipe: Recipe, card: ModelCard, layout: Layout) -> list[Refusal]:
    """Settings of Megatron-like engines that exclude each other."""
    if engine.name not in _MEGATRON:
        return []
    tp = max(d for d in range(1, layout.tp + 1) if layout.tp % d == 0 and (card.mla or card.num_kv_heads % d == 0))
    rows = (
        (
            tp != layout.tp,
            "kv_heads",
            f"tp {layout.tp} must divide the {card.num_kv_heads} key/value heads; write tp: {tp}",
            f"tp {layout.tp} 须整除键值头数 {card.num_kv_heads}；请写 tp: {tp}",
            {"layout.tp": tp},
        ),
        (
            layout.offload_activations and isinstance(recipe.tuning, Lora),
            "offload_activations",
            "swap-attention does not go with LoRA; write offload_activations: false",
            "swap-attention 不能与 LoRA 同用；请写 offload_activations: false",
            {"layout.offload_activations": False},
        ),
        (
            card.moe is not None and layout.tp > 1 and not layout.sp,
            "sp",
            "experts under tp need sequence parallelism; write sp: auto",
            "专家层在 tp 下需要序列并行；请写 sp: auto",
            {"layout.sp": "auto"},
        ),
        (
            layout.ring > 1 and card.sliding_window is not None and card.sliding_window < recipe.data.seq_len,
            "ring",
            "ring attention has no sliding window; write ring: 1",
            "环形注意力不支持滑动窗口；请写 ring: 1",
            {"layout.ring": 1},
        ),
        (
            layout.offload_optimizer and layout.shard == 1,
            "offload_optimizer",
            "swap-optimizer needs the distributed optimizer, so dp above 1; write offload_optimizer: false",
            "swap-optimizer 依赖分布式优化器，需要 dp 大于 1；请写 offload_optimizer: false",
            {"layout.offload_optimizer": False},
        ),
    )
    return [
        Refusal(code=f"{engine.name}.{key}", where=next(iter(fix)), en=en, zh=zh, fix=fix) for broken, key, en, zh, fix in rows if broken
    ]
