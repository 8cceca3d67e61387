"""The embedded PyTorch engine as a back end: `python -m ascendfactory.engine plan.json`, alone or under torchrun."""

from __future__ import annotations

import sys
from pathlib import PurePosixPath
from typing import assert_never

from ascendfactory.backends.common import MEETING
from ascendfactory.core.lines import read_step
from ascendfactory.core.plan import Job, Layout, ModelCard, Plan, Refusal, StepMetrics
from ascendfactory.core.recipe import Dapo, Dpo, Grpo, Lora, Ppo, Pretrain, Recipe, Reward, Sft
from ascendfactory.core.stages import SPLIT_BACKWARD, schedule_problem

SHUTDOWN_S = 10  # after one rank is lost the others get SIGTERM, and SIGKILL this much later: they may wait inside a collective


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
        ]

    def render(self, plan: Plan) -> Job:
        """The job that runs the plan: one process, or torchrun with one process a device."""
        module = ["-m", "ascendfactory.engine", str(PurePosixPath(plan.run_dir) / "plan.json")]
        nproc, nodes, restarts = plan.cluster.nproc, plan.cluster.nodes, plan.recipe.cluster.restarts
        where = MEETING if nodes > 1 else ("--standalone", "--max-restarts", str(restarts))
        torchrun = ["-m", "torch.distributed.run", *where, "--nproc-per-node", str(nproc), "--shutdown-timeout", str(SHUTDOWN_S)]
        return Job(
            files={"plan.json": plan.model_dump_json(indent=2) + "\n"},
            argv=[sys.executable, *(torchrun if plan.cluster.num_devices > 1 or restarts else []), *module],
            env=_environment(plan),
            nproc=nproc,
            restarts=restarts if nodes > 1 else 0,  # torchrun starts again only what is on its own node
            keeps_metrics=True,
        )

    def read_step(self, line: str, plan: Plan | None = None) -> StepMetrics | None:
        """The step that a line `@step {...}` reports, or None for any other line."""
        return read_step(line)


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
    """One row a limit: whether it is broken, the key, what to do in English and in Chinese, the value that would be accepted."""
    order = schedule_problem(layout.schedule, layout.pp, layout.vpp, layout.num_micro) if layout.pp > 1 else None
    late_gradients = layout.pp > 1 and layout.schedule in SPLIT_BACKWARD  # on one device FSDP is there too, for bf16
    not_in_advance = layout.pp == 1 or layout.recompute in ("none", "norm") or layout.zero == 3
    one_copy = layout.shard * layout.replicate > 1 or recipe.model.dtype == "float32"
    rules = [
        (
            layout.ep > 1,
            "layout.ep",
            "expert parallelism is not yet in this release of the embedded engine; write ep: 1",
            "本版本的内置引擎尚不支持专家并行；请写 ep: 1",
            1,
        ),
        (order is not None, "layout.schedule", *(order or ("", "")), "auto"),
        (
            late_gradients and layout.zero > 1,
            "layout.zero",
            f"{layout.schedule} makes weight gradients after FSDP's hooks have run, so they stay whole; write zero: 1",
            f"{layout.schedule} 在 FSDP 的钩子运行之后才产生权重梯度，因此梯度需保持完整；请写 zero: 1",
            1,
        ),
        (
            layout.recompute_in_advance and not_in_advance,
            "layout.recompute_in_advance",
            "computing again in advance needs pp > 1, recompute full or selective, and zero 1 or 2 (weights that stay); "
            "write recompute_in_advance: false",
            "提前重算要求 pp > 1、recompute 为 full 或 selective、zero 为 1 或 2（权重保持完整）；请写 recompute_in_advance: false",
            False,
        ),
        (
            layout.reuse_params and one_copy,
            "layout.reuse_params",
            "FSDP keeps no second copy of weights (nor does float32), so there is nothing to share; write reuse_params: false",
            "FSDP 不保留权重的第二份副本（float32 亦然），没有可共享的内容；请写 reuse_params: false",
            False,
        ),
        (
            # its magnitude needs the norm of the whole weight; a rank of several holds a part of it
            isinstance(recipe.tuning, Lora) and recipe.tuning.dora and layout.num_devices > 1,
            "tuning.dora",
            "DoRA runs on one device only in this release; write tuning.dora: false, or cluster.nproc: 1",
            "本版本的 DoRA 只能在单个设备上运行；请写 tuning.dora: false，或 cluster.nproc: 1",
            False,
        ),
    ]
    return [
        Refusal(code=f"native.{key.rsplit('.', 1)[-1]}", where=key, en=en, zh=zh, fix={key: value})
        for broken, key, en, zh, value in rules
        if broken
    ]
