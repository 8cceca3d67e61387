"""MindSpeed-MM as a back end: pre-training and full fine-tuning of Qwen2.5-VL (3B, 7B and larger) and InternVL3-8B.

The model's shape goes into model.json, whose stages are those of the converter: both come from one split.
"""

from __future__ import annotations

import json

from ascendfactory.backends.common import (
    Rule,
    absent_rules,
    check_options,
    data_rules,
    extra_rules,
    num_steps,
    only,
    options,
    profile_of,
    profile_rule,
    program,
    refusals,
    schedule_rule,
)
from ascendfactory.backends.megatron import (
    Flags,
    bf16_rules,
    context_flags,
    environment,
    lean_rules,
    optimizer_flags,
    read_iteration,
    sharding_rules,
    start_facts,
    step_rules,
    torchrun,
    words,
)
from ascendfactory.backends.mindspeed_mm_config import convert_words, data_config, file_rules, model_config, series, stage_rules
from ascendfactory.core.plan import Job, Layout, ModelCard, Plan, Refusal, Step, StepMetrics
from ascendfactory.core.recipe import Lora, Pretrain, Recipe, Sft

NAME = "mindspeed_mm"
PROFILES = ("2.3.0", "2.2.0")
SOURCES = ["MindSpeed-MM", "MindSpeed", "Megatron-LM"]
_PAD = 8  # tokens to whose multiple it pads a row of Qwen2.5-VL
_PATCHES = 4  # an image's patches are a multiple of these, one token
# Settings that are accepted and change nothing here, and why.
NO_EFFECT = {
    "checkpoint.asynchronous": "checkpoints are written while training waits",
    "checkpoint.keep": "it keeps every checkpoint",
    "data.packing": "samples are padded to the longest of their micro-batch",
    "data.workers": "a fixed number of processes prepares the data",
    "output.log_every": "every iteration is reported; the progress display thins them out",
}


class MindSpeedMm:
    """Vision-language models through MindSpeed-MM."""

    name = NAME

    def refuse(self, recipe: Recipe, card: ModelCard, layout: Layout) -> list[Refusal]:
        """Why MindSpeed-MM cannot run the recipe under this layout; empty if it can."""
        rules: list[Rule] = [
            profile_rule(recipe, PROFILES),
            (series(card) == "", "model.path", "only Qwen2.5-VL and InternVL3 here", "仅支持 Qwen2.5-VL 与 InternVL3", None),
            (not isinstance(recipe.objective, Pretrain | Sft), "objective", "only pretrain and sft", "仅支持 pretrain 与 sft", "sft"),
            only(isinstance(recipe.tuning, Lora), "tuning", "full", "LoRA", " LoRA"),
            *data_rules(recipe),
            *_setting_rules(recipe),
            *_layout_rules(recipe, card, layout),
        ]
        if recipe.profile in ("auto", *PROFILES) and series(card):
            rules += extra_rules(recipe, {*_flags(recipe, card, layout), *_PLACES}, options(f"{NAME}-{profile_of(recipe, PROFILES)}"))
        return refusals(NAME, rules)

    def render(self, plan: Plan) -> Job:
        """The job: weights converted, training, weights back."""
        recipe = plan.recipe
        files = {
            "job/model.json": json.dumps(model_config(plan), indent=2) + "\n",
            "job/data.json": json.dumps(data_config(plan), indent=2, ensure_ascii=False) + "\n",
        }
        files |= {"job/train.py": program("megatron_train.py"), "job/start.json": _start(plan)}
        command = [*torchrun(plan), "{env}/src/MindSpeed-MM/pretrain_vlm.py", *words(train_flags(plan)), "{load}"]
        return Job(
            restarts=recipe.cluster.restarts,
            files=files,
            argv=["python", f"{plan.run_dir}/job/train.py", f"{plan.run_dir}/job/start.json", "--", *command],
            env=environment(plan, SOURCES) | {"ACLNN_CACHE_LIMIT": "100000", "COMBINED_ENABLE": "1"},
            environment=f"{NAME}-{profile_of(recipe, PROFILES)}",
            nproc=plan.cluster.nproc,
            before=[_convert_step(plan)],
            after=[_export_step(plan)] if recipe.output.export else [],
        )

    def read_step(self, line: str, plan: Plan) -> StepMetrics | None:
        """The step of an `iteration N/M | ... |` line."""
        return read_iteration(line, plan)


def _setting_rules(recipe: Recipe) -> list[Rule]:
    data = recipe.data
    last = isinstance(recipe.objective, Sft) and recipe.objective.train_on == "last"
    return [
        *file_rules(recipe),
        only(any(source.columns for source in data.train), "data.train", None, "renaming of columns", "列改名"),
        only(last, "objective.train_on", "assistant", "training of the last answer only", "只训练最后一轮回答"),
        only(recipe.optim.schedule == "wsd", "optim.schedule", "cosine", "wsd schedule", " wsd 调度"),
        *bf16_rules(recipe),
        *step_rules(recipe, "1000 steps"),
    ]


def _layout_rules(recipe: Recipe, card: ModelCard, layout: Layout) -> list[Rule]:
    return [
        *sharding_rules(layout),
        schedule_rule(layout, "1f1b"),
        *absent_rules(recipe, layout, "overlap_chunks", "recompute_in_advance", "in_backward"),
        only(layout.vpp > 1, "layout.vpp", 1, "virtual pipeline here", "虚拟流水线"),
        only(layout.ep > 1, "layout.ep", 1, "expert parallelism", "专家并行"),
        *stage_rules(card, layout),
        *lean_rules(layout),
        *_row_rules(card, layout),
    ]


def _row_rules(card: ModelCard, layout: Layout) -> list[Rule]:
    """Ways to cut a row that fail on the rows of a series; its validator lets them pass."""
    if series(card) == "internvl3":
        # every device of a tp group keeps all 1025 positions of a tile, where the products gather the shares of the group
        return [
            only(layout.tp > 1 and layout.sp, "layout.sp", False, "sequence parallelism of InternVL3", " InternVL3 的序列并行"),
            only(layout.ulysses > 1, "layout.ulysses", 1, "ulysses for InternVL3", " InternVL3 的 ulysses"),
        ]
    cut = 2 * layout.cp if layout.ring > 1 else 1
    words_, words_zh = (
        f"ring that cuts rows into {cut}: they are padded to multiples of {_PAD}",
        f"切成 {cut} 份的 ring：行只补齐到 {_PAD} 的倍数",
    )
    return [only(cut > _PAD, "layout.ring", 1, words_, words_zh)]


def _is_unaligned(card: ModelCard, layout: Layout) -> bool:
    """Whether a tp group's shares may differ in size: of InternVL3's vocabulary, of rows and images under sp."""
    if layout.tp == 1:
        return False
    return series(card) == "internvl3" or (layout.sp and (layout.tp > _PATCHES or layout.tp * layout.cp > _PAD))


_PLACES = ("micro-batch-size", "bf16", "load", "save", "mm-data", "mm-model", "mm-tool")


def train_flags(plan: Plan) -> Flags:
    """Every flag of the trainer but the one of loading, which depends on whether there is a checkpoint.

    Raises:
        ValueError: a flag that the profile's own parser would refuse.
    """
    recipe, run = plan.recipe, plan.run_dir
    flags = _flags(recipe, plan.card, plan.layout) | {
        "micro-batch-size": plan.layout.micro_size,
        "bf16": plan.dtype == "bfloat16",
        "save": f"{run}/checkpoints",
        "mm-data": f"{run}/job/data.json",
        "mm-model": f"{run}/job/model.json",
        "mm-tool": "{env}/src/MindSpeed-MM/mindspeed_mm/tools/tools.json",
    }
    if _is_unaligned(plan.card, plan.layout):
        flags["unaligned-linear"] = True
    flags |= recipe.extra
    given = {name: value for name, value in flags.items() if value is not False and value is not None}
    if wrong := check_options(given, options(f"{NAME}-{profile_of(recipe, PROFILES)}")):
        raise ValueError("; ".join(f"--{name}: {en}" for name, en, _ in wrong))
    return flags


def _start(plan: Plan) -> str:
    """What the starting program must know to resume: see programs/megatron_train.py."""
    run = plan.run_dir
    return start_facts(plan, ["--load", f"{run}/weights"], ["--load", f"{run}/checkpoints"])


def _flags(recipe: Recipe, card: ModelCard, layout: Layout) -> Flags:
    flags: Flags = {
        "use-mcore-models": True,
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "sequence-parallel": layout.tp > 1 and layout.sp,
        "global-batch-size": recipe.batch.global_size,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": card.vocab_size,
        "seq-length": recipe.data.seq_len,
        "make-vocab-size-divisible-by": 1,
        "normalization": "RMSNorm",
        "use-fused-rmsnorm": True,
        "swiglu": True,
        "use-fused-swiglu": True,
        "no-masked-softmax-fusion": True,
        **optimizer_flags(recipe),
        "train-iters": num_steps(recipe) or 1,
        "use-flash-attn": True,
        "variable-seq-lengths": True,
        "use-distributed-optimizer": True,
        "overlap-grad-reduce": layout.shard > 1,
        "reuse-fp32-param": layout.reuse_params,
        "num-workers": 8,
        "distributed-timeout-minutes": 20,
        "log-interval": 1,
        "save-interval": int(recipe.checkpoint.every.amount),
        "eval-interval": 1000000,
        "eval-iters": 0,
        "ckpt-format": "torch",
        "distributed-backend": "nccl",
    }
    if layout.cp > 1:
        flags |= {"context-parallel-size": layout.cp, **context_flags(layout)}
    if series(card) == "internvl3":
        flags |= {"position-embedding-type": "rope", "rotary-base": 1000000, "no-gradient-accumulation-fusion": True}
    return flags


def _step(plan: Plan, name: str, argv: list[str], inputs: list[str], output: str) -> Step:
    env = environment(plan, SOURCES)
    return Step(name=name, argv=argv, env=env, environment=f"{NAME}-{profile_of(plan.recipe, PROFILES)}", inputs=inputs, output=output)


def _convert_step(plan: Plan) -> Step:
    return _step(plan, "convert", convert_words(plan, back=False), [plan.recipe.model.path], f"{plan.run_dir}/weights")


def _export_step(plan: Plan) -> Step:
    newest = f"{plan.run_dir}/checkpoints/latest_checkpointed_iteration.txt"
    return _step(plan, "export", convert_words(plan, back=True), [newest], f"{plan.run_dir}/export")
