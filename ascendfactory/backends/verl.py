"""verl as a back end: GRPO, DAPO and PPO, as overrides of its own configuration, run in its own environment.

FSDP2 trains by default; a recipe that asks for tp or pp is trained by Megatron (on Ascend: MindSpeed). On several nodes its one driver
runs on a Ray cluster of them. What the recipe has no key for is a default that `extra` may change by verl's own name; what the recipe
does say cannot be changed there.
"""

from __future__ import annotations

import re
from typing import assert_never

from ascendfactory.backends.common import (
    Rule,
    absent_rules,
    data_rules,
    data_step,
    extra_rules,
    num_steps,
    only,
    profile_rule,
    program,
    refusals,
    schedule_rule,
)
from ascendfactory.backends.rl import on_ray, rl_rules
from ascendfactory.backends.verl_config import (
    DEFAULTS,
    ENGINE,
    ENGINES,
    NAME,
    PLACES,
    PROFILES,
    TOOL_FORMAT,
    TOOL_FORMATS,
    derived,
    engine_name,
    environment_name,
    is_megatron,
    known,
    overrides,
    words,
)
from ascendfactory.core.plan import Job, Layout, ModelCard, Plan, Refusal, Step, StepMetrics
from ascendfactory.core.recipe import Dapo, Dpo, Grpo, Lora, PolicyGradient, Ppo, Pretrain, Recipe, Reward, Sft

# Settings that are accepted and change nothing here, and why.
NO_EFFECT = {
    "checkpoint.asynchronous": "checkpoints are written while training waits",
    "data.workers": "prompts are tokenised when they are drawn",
    "data.cache_dir": "nothing is tokenised beforehand",
    "data.packing": "its trainer packs answers by tokens (use_dynamic_bsz)",
    "output.log_every": "every step is reported; the progress display thins them out",
    "layout.micro_size": "micro-batches are sized by tokens",
    "batch.micro_size": "micro-batches are sized by tokens",
}
MOST_RANK = 512  # of adapters in vLLM


class Verl:
    """Reinforcement learning through verl."""

    name = NAME

    def refuse(self, recipe: Recipe, card: ModelCard, layout: Layout) -> list[Refusal]:
        """Why verl cannot run the recipe under this layout; empty if it can."""
        rules = [profile_rule(recipe, PROFILES), *_objective_rules(recipe), *data_rules(recipe), *_setting_rules(recipe)]
        rules += [*rl_rules(recipe), *_tool_rules(recipe, card), *_layout_rules(recipe, layout)]
        if recipe.profile in ("auto", *PROFILES) and isinstance(recipe.objective, PolicyGradient):
            rules.append(_engine_rule(recipe))
            ours = {*derived(recipe, layout), *PLACES} - set(DEFAULTS)
            rules += extra_rules(recipe, ours, known(recipe, layout))
        return refusals(NAME, rules)

    def render(self, plan: Plan) -> Job:
        """The job: data as parquet, training, weights merged."""
        recipe = plan.recipe
        step, spec = data_step(plan, "rl")
        engine = ["model_engine=megatron"] if is_megatron(plan.layout) else []
        argv, files = on_ray(plan, ["python", "-m", "verl.trainer.main_ppo", *engine, *words(overrides(plan))])
        files |= {"job/data.json": spec}
        after = []
        if recipe.output.export:
            files["job/export.py"] = program("verl_export.py")
            after.append(_export_step(plan))
        return Job(
            files=files,
            argv=argv,
            env=_variables(plan),
            environment=environment_name(recipe),
            nproc=1,
            before=[step],
            after=after,
            restarts=recipe.cluster.restarts,
        )

    def read_step(self, line: str, plan: Plan) -> StepMetrics | None:
        """The step of one of the console logger's lines, `step:3 - actor/grad_norm:0.1 - ...`."""
        return read_line(line, plan)


def _export_step(plan: Plan) -> Step:
    run, engine = plan.run_dir, "megatron" if is_megatron(plan.layout) else "fsdp"
    argv = ["python", f"{run}/job/export.py", f"{run}/checkpoints", engine, f"{run}/export"]
    newest = f"{run}/checkpoints/latest_checkpointed_iteration.txt"
    return Step(name="export", argv=argv, environment=environment_name(plan.recipe), inputs=[newest], output=f"{run}/export")


def _engine_rule(recipe: Recipe) -> Rule:
    """Rollouts come from the engine that the profile's environment has."""
    asked = recipe.extra.get(ENGINE, engine_name(recipe))
    profile = next((name for name, engine in ENGINES.items() if engine == asked), PROFILES[0])
    text = f"this profile's environment has {engine_name(recipe)}; leave it out and write profile: {profile} ({ENGINES[profile]})"
    text_zh = f"此版本配置的环境装有 {engine_name(recipe)}；请删去此项并写 profile: {profile}（{ENGINES[profile]}）"
    return asked != engine_name(recipe), f"extra.{ENGINE}", text, text_zh, None


def _objective_rules(recipe: Recipe) -> list[Rule]:
    match recipe.objective:
        case Grpo() | Dapo() | Ppo():
            return []
        case Pretrain() | Sft() | Dpo() | Reward():
            kind = recipe.objective.kind
            return [
                (
                    True,
                    "objective",
                    f"{kind} is left to other back ends; write backend: auto",
                    f"{kind} 请用其他后端；请写 backend: auto",
                    "grpo",
                )
            ]
        case other:
            assert_never(other)


def _setting_rules(recipe: Recipe) -> list[Rule]:
    optim = recipe.optim
    return [
        only(recipe.model.init == "random", "model.init", "pretrained", "start from random weights", "随机初始化"),
        only(recipe.model.dtype == "float32", "model.dtype", "bfloat16", "training in float32", " float32 训练"),
        only(recipe.data.eval_fraction > 0, "data.eval_fraction", 0.0, "share held out; name data.eval", "留出比例（请写 data.eval）"),
        only(
            optim.schedule not in ("constant", "cosine"),
            "optim.schedule",
            "constant",
            f"{optim.schedule} schedule",
            f" {optim.schedule} 调度",
        ),
        only(optim.eps != 1e-8, "optim.eps", 1e-8, "choice of eps", " eps 选择"),
        (recipe.output.eval_every.unit != "steps", "output.eval_every", "evaluates every N steps", "按步评估；请写 steps", "100 steps"),
        (recipe.duration.unit == "tokens", "duration", "write steps or epochs", "请写 steps 或 epochs", "1 epochs"),
        (
            recipe.duration.unit == "epochs" and recipe.duration.amount != int(recipe.duration.amount),
            "duration",
            "write whole epochs, or steps",
            "请写整数轮次，或步数",
            None,
        ),
        only(recipe.output.dtype not in ("auto", "bfloat16"), "output.dtype", "auto", "choice of the exported dtype", "导出精度选择"),
        *_checkpoint_rules(recipe),
        *(_lora_rules(recipe.tuning) if isinstance(recipe.tuning, Lora) else []),
    ]


def _checkpoint_rules(recipe: Recipe) -> list[Rule]:
    every, resume = recipe.checkpoint.every, recipe.checkpoint.resume
    return [
        (every.unit != "steps", "checkpoint.every", "saves every N steps; write steps", "按步保存；请写 steps", "500 steps"),
        (
            resume not in ("auto", "none") and "global_step_" not in resume,
            "checkpoint.resume",
            f"a checkpoint of verl is a folder global_step_N, which '{resume}' is not; write its path",
            f"verl 的检查点是 global_step_N 文件夹，'{resume}' 不是；请写其路径",
            "auto",
        ),
    ]


def _lora_rules(lora: Lora) -> list[Rule]:
    return [
        only(lora.rank > MOST_RANK, "tuning.rank", MOST_RANK, f"rank above {MOST_RANK} (vLLM)", f" {MOST_RANK} 以上的秩（vLLM）"),
        only(lora.dropout > 0, "tuning.dropout", 0.0, "dropout in adapters", "适配器 dropout"),
        only(lora.rslora, "tuning.rslora", False, "rank-stabilised scaling", " rslora"),
        only(lora.dora, "tuning.dora", False, "DoRA", " DoRA"),
        only(lora.adapter is not None, "tuning.adapter", None, "going on from a saved adapter", "从已有适配器继续"),
        only(lora.alpha != int(lora.alpha), "tuning.alpha", 16.0, "fraction in alpha", "小数 alpha"),
    ]


def _tool_rules(recipe: Recipe, card: ModelCard) -> list[Rule]:
    """Calls of tools are read from the text of an answer: verl must know how the model writes them."""
    objective = recipe.objective
    if not isinstance(objective, PolicyGradient) or objective.multi_turn is None:
        return []
    unknown = card.family not in TOOL_FORMATS and TOOL_FORMAT not in recipe.extra
    text = f"how {card.name} writes calls of tools is not known; name verl's parser: extra: {{{TOOL_FORMAT}: hermes}}"
    return [(unknown, "objective.multi_turn", text, f"不清楚 {card.name} 的工具调用格式；请写 extra: {{{TOOL_FORMAT}: hermes}}", None)]


def _layout_rules(recipe: Recipe, layout: Layout) -> list[Rule]:
    spec, lora = recipe.layout, isinstance(recipe.tuning, Lora)
    megatron = is_megatron(layout) or any(degree not in ("auto", 1) for degree in (spec.tp, spec.pp, spec.ep))
    return [
        only(layout.ring > 1 and not megatron, "layout.ring", 1, "ring under FSDP", "FSDP 下的 ring"),
        only(layout.vpp > 1 and not megatron, "layout.vpp", 1, "virtual pipeline under FSDP", "FSDP 下的虚拟流水线"),
        only(layout.ulysses > 1 and megatron, "layout.ulysses", 1, "Ulysses under Megatron", "Megatron 下的 Ulysses"),
        only(layout.replicate > 1 and megatron, "layout.replicate", 1, "replicas under Megatron", "Megatron 下的副本"),
        only(layout.zero != (1 if megatron else 3), "layout.zero", 1 if megatron else 3, f"zero {layout.zero}", f" zero {layout.zero}"),
        only(lora and megatron, "tuning", "full", "LoRA under Megatron here", "Megatron 下的 LoRA"),
        schedule_rule(layout, "1f1b", *(("interleaved",) if megatron and layout.vpp > 1 else ())),
        *absent_rules(recipe, layout, "stage_layers", "overlap_chunks", "recompute_in_advance", "in_backward"),
        only(
            layout.recompute in ("norm", "selective"),
            "layout.recompute",
            "auto",
            f"recompute {layout.recompute}",
            f"重计算 {layout.recompute}",
        ),
        only(layout.recompute_layers > 0, "layout.recompute_layers", "auto", "recomputation of some layers", "部分层重计算"),
        only(layout.offload_activations and megatron, "layout.offload_activations", False, "offloading of activations", "激活卸载"),
        only(layout.optim_dtype != "float32", "layout.optim_dtype", "float32", "moments in bfloat16", "bfloat16 动量"),
        only(layout.reuse_params, "layout.reuse_params", False, "sharing of weights with their masters", "参数副本复用"),
        only(layout.sp and not megatron, "layout.sp", "auto", "sequence parallelism under FSDP", "FSDP 下的序列并行"),
    ]


def _variables(plan: Plan) -> dict[str, str]:
    env = {"TOKENIZERS_PARALLELISM": "true", "PYTHONUNBUFFERED": "1", "HYDRA_FULL_ERROR": "1"}
    if plan.cluster.device.kind == "npu":
        if is_megatron(plan.layout):
            env["PYTHONPATH"] = "{env}/src/MindSpeed:{env}/src/Megatron-LM"
        env |= {
            "HCCL_CONNECT_TIMEOUT": "1800",
            "TASK_QUEUE_ENABLE": "2",
            "VLLM_USE_V1": "1",
            "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1",
        }
    return env


_PAIR = re.compile(r"([\w/@.\-]+):([-+]?(?:\d[\d.eE+\-]*|nan|inf))(?:\s+-\s+|\s*$)")


def read_line(line: str, plan: Plan) -> StepMetrics | None:
    """The step of a console line; verl's throughput is tokens a second and device."""
    start = line.find("step:")
    if start < 0:
        return None
    values = dict(_PAIR.findall(line[start:]))
    if "step" not in values or "actor/grad_norm" not in values:
        return None

    def number(*names: str) -> float:
        return next((float(values[name]) for name in names if name in values), 0.0)

    step, known = int(float(values["step"])), num_steps(plan.recipe) if plan.recipe.duration.unit == "steps" else None
    step_s, tokens = number("perf/time_per_step", "timing_s/step"), int(number("perf/total_num_tokens"))
    reward = number("critic/score/mean", "critic/rewards/mean")
    return StepMetrics(
        step=step,
        num_steps=max(step, known or 0),
        loss=number("actor/loss", "actor/pg_loss"),
        lr=number("actor/lr"),
        grad_norm=number("actor/grad_norm"),
        label_tokens=0,
        tokens=tokens,
        epoch=number("training/epoch"),
        step_s=step_s,
        tokens_per_s=tokens / step_s if step_s else 0.0,
        reward=reward,
        response_tokens=number("response_length/mean"),
    )
