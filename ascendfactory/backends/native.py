"""The embedded PyTorch engine as a back end: `python -m ascendfactory.engine plan.json`, alone or under torchrun."""

from __future__ import annotations

import sys
from pathlib import PurePosixPath
from typing import assert_never

from pydantic import ValidationError

from ascendfactory.core.plan import Job, Layout, ModelCard, Plan, Refusal, StepMetrics
from ascendfactory.core.recipe import Dapo, Dpo, Grpo, Lora, Ppo, Pretrain, Recipe, Reward, Sft

STEP_MARK = "@step "
_UNIT_DEGREES = {
    "tp": ("tensor parallelism", "张量并行"),
    "pp": ("pipeline parallelism", "流水线并行"),
    "vpp": ("virtual pipeline chunks", "虚拟流水线"),
    "ring": ("ring context parallelism", "环形上下文并行"),
    "ulysses": ("Ulysses context parallelism", "Ulysses 上下文并行"),
    "ep": ("expert parallelism", "专家并行"),
}


class Native:
    """The engine that ships with AscendFactory."""

    name = "native"

    def refuse(self, recipe: Recipe, card: ModelCard, layout: Layout) -> list[Refusal]:
        """Why the embedded engine cannot run the recipe under this layout; empty if it can."""
        return [
            *_refuse_foreign(recipe),
            *_refuse_objective(recipe),
            *_refuse_card(card),
            *_refuse_layout(recipe, layout),
            *_refuse_tuning(recipe, layout),
        ]

    def render(self, plan: Plan) -> Job:
        """The job that runs the plan: one process, or torchrun with one process a device."""
        module = ["-m", "ascendfactory.engine", str(PurePosixPath(plan.run_dir) / "plan.json")]
        nproc = plan.cluster.nproc
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)] if nproc > 1 else []
        return Job(
            files={"plan.json": plan.model_dump_json(indent=2) + "\n"},
            argv=[sys.executable, *torchrun, *module],
            env=_environment(plan),
            nproc=nproc,
            keeps_metrics=True,
        )

    def read_step(self, line: str, plan: Plan | None = None) -> StepMetrics | None:
        """The step that a line `@step {...}` reports, or None for any other line."""
        if not line.startswith(STEP_MARK):
            return None
        try:
            return StepMetrics.model_validate_json(line[len(STEP_MARK) :])
        except ValidationError:  # cut short by a crash, or two processes' lines in one
            return None


def _environment(plan: Plan) -> dict[str, str]:
    # The data loader tokenises in processes of its own; the threads of tokenizers would only compete with them.
    env = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    match plan.cluster.device.kind:
        case "cuda":
            env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # rows differ in length: fixed segments fragment
        case "npu":
            env["PYTORCH_NPU_ALLOC_CONF"] = "expandable_segments:True"
        case "cpu":
            pass
        case other:
            assert_never(other)
    return env


def _refuse_foreign(recipe: Recipe) -> list[Refusal]:
    """Settings that only other back ends have."""
    rows: tuple[tuple[str, bool, object], ...] = (
        ("extra", bool(recipe.extra), {}),
        ("profile", recipe.profile != "auto", "auto"),
    )
    return [
        Refusal(
            code=f"native.{key}",
            where=key,
            en=f"the embedded engine has no {key}; leave it out, or name a back end that has it",
            zh=f"内置引擎没有 {key}；请删去，或指定其他后端",
            fix={key: value},
        )
        for key, is_set, value in rows
        if is_set
    ]


def _refuse_objective(recipe: Recipe) -> list[Refusal]:
    match recipe.objective:
        case Pretrain() | Sft():
            return []
        case Dpo() | Reward() | Grpo() | Dapo() | Ppo():
            kind = recipe.objective.kind
            return [
                Refusal(
                    code="native.objective",
                    where="objective",
                    en=f"'{kind}' is not yet in this release of the embedded engine; pretrain and sft work",
                    zh=f"本版本的内置引擎尚不支持 '{kind}'；可用 pretrain 和 sft",
                    fix={"objective": "sft"},
                )
            ]
        case other:
            assert_never(other)


def _refuse_card(card: ModelCard) -> list[Refusal]:
    missing = [
        (card.vision is not None, "vision", "vision models", "视觉模型"),
        (card.moe is not None, "moe", "mixture-of-experts models", "混合专家模型"),
        (card.mla is not None, "mla", "models with multi-head latent attention", "多头潜在注意力（MLA）模型"),
    ]
    return [
        Refusal(
            code=f"native.{code}",
            where="model.path",
            en=f"{card.name}: {en} are not yet in this release of the embedded engine; take a dense text model ('ascendfactory models')",
            zh=f"{card.name}：本版本的内置引擎尚不支持{zh}；请选择稠密文本模型（见 'ascendfactory models'）",
        )
        for present, code, en, zh in missing
        if present
    ]


def _refuse_layout(recipe: Recipe, layout: Layout) -> list[Refusal]:
    refusals = [
        Refusal(
            code=f"native.{degree}",
            where=f"layout.{degree}",
            en=f"{en} is not yet in this release of the embedded engine; write {degree}: 1 and let dp take the devices",
            zh=f"本版本的内置引擎尚不支持{zh}；请写 {degree}: 1，由 dp 使用全部设备",
            fix={f"layout.{degree}": 1},
        )
        for degree, (en, zh) in _UNIT_DEGREES.items()
        if getattr(layout, degree) > 1
    ]
    refusals += [
        Refusal(
            code=f"native.{key}",
            where=f"layout.{key}",
            en=f"{en} is not yet in this release of the embedded engine; write {key}: {value}",
            zh=f"本版本的内置引擎尚不支持{zh}；请写 {key}: {value}",
            fix={f"layout.{key}": value},
        )
        for key, (on, en, zh, value) in _switches(layout).items()
        if on
    ]
    if recipe.cluster.nodes > 1:
        refusals.append(
            Refusal(
                code="native.nodes",
                where="cluster.nodes",
                en="this release starts processes on one machine only; write cluster.nodes: 1",
                zh="本版本只能在一台机器上启动进程；请写 cluster.nodes: 1",
                fix={"cluster.nodes": 1},
            )
        )
    return refusals


def _switches(layout: Layout) -> dict[str, tuple[bool, str, str, object]]:
    """Settings that only have one value in this engine: whether another is set, its name, and the value to write."""
    return {
        "sp": (layout.sp, "sequence parallelism", "序列并行", "auto"),
        "schedule": (layout.schedule != "1f1b", f"the pipeline schedule {layout.schedule}", f"流水线调度 {layout.schedule}", "auto"),
        "recompute": (layout.recompute in ("norm", "selective"), f"recompute {layout.recompute}", f"重计算 {layout.recompute}", "auto"),
        "recompute_layers": (layout.recompute_layers > 0, "recomputation of some layers only", "只重计算部分层", "auto"),
        "offload_activations": (layout.offload_activations, "offloading of activations", "激活卸载", False),
        "offload_optimizer": (layout.offload_optimizer, "offloading of the optimizer", "优化器卸载", False),
        "optim_dtype": (layout.optim_dtype != "float32", "Adam with moments in bfloat16", "bfloat16 动量的 Adam", "float32"),
        "reuse_params": (layout.reuse_params, "sharing of bf16 weights with their masters", "参数副本复用", False),
    }


def _refuse_tuning(recipe: Recipe, layout: Layout) -> list[Refusal]:
    if isinstance(recipe.tuning, Lora) and recipe.tuning.dora and layout.dp > 1:
        # DoRA's magnitude needs the norm of the whole weight; under FSDP a rank holds a part of it.
        return [
            Refusal(
                code="native.dora",
                where="tuning.dora",
                en="DoRA runs on one device only in this release; write tuning.dora: false, or cluster.nproc: 1",
                zh="本版本的 DoRA 只能在单个设备上运行；请写 tuning.dora: false，或 cluster.nproc: 1",
                fix={"tuning.dora": False},
            )
        ]
    return []
