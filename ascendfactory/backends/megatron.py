"""What the MindSpeed adapters say to Megatron: one split of the layers that feeds trainer and converters, and its flags.

Flags are kept as a mapping name → value (True: a bare flag; a list: several words), so that they can be checked against the
options that each version's parser accepts before anything starts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from ascendfactory.backends.common import Rule, num_steps, only
from ascendfactory.core.plan import Layout, ModelCard, Plan, StepMetrics
from ascendfactory.core.recipe import Lora, Recipe

Flags = dict[str, Any]
LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class Split:
    """How a model's layers and weights are cut. Trainer and converters take their flags from here, so they cannot disagree."""

    tp: int
    pp: int
    vpp: int
    ep: int
    num_layers: int
    layers_per_stage: tuple[int, ...]  # one entry a stage
    v_shaped: bool = False  # DualPipeV: every stage holds a chunk from the front and its mirror from the back

    @property
    def even(self) -> bool:
        """Whether all stages hold the same number of layers."""
        return len(set(self.layers_per_stage)) == 1

    @property
    def extends(self) -> bool:
        """Whether experts are spread over the tp devices too, whole; else tp cuts every one of them."""
        return self.tp > 1 and self.ep % self.tp == 0

    @property
    def expert_groups(self) -> int:
        """Megatron's own expert degree, which does not count tp."""
        return self.ep // self.tp if self.extends else self.ep

    @property
    def layers_per_chunk(self) -> int:
        """Layers of a virtual chunk."""
        return self.num_layers // (self.pp * self.vpp)

    def train_flags(self, experts: bool) -> Flags:
        """Of the trainer."""
        flags: Flags = {"tensor-model-parallel-size": self.tp, "pipeline-model-parallel-size": self.pp}
        if experts:
            # always written: what it defaults to differs between versions
            flags |= {"expert-model-parallel-size": self.expert_groups, "expert-tensor-parallel-size": self.tp}
            flags["moe-tp-extend-ep"] = self.extends
        return flags | self._cut()

    def convert_flags(self, experts: bool) -> Flags:
        """Of the converter from Hugging Face weights."""
        flags: Flags = {"target-tensor-parallel-size": self.tp, "target-pipeline-parallel-size": self.pp}
        if experts:
            flags |= {"target-expert-parallel-size": self.expert_groups, "moe-tp-extend-ep": self.extends}
        return flags | self._cut()

    def _cut(self) -> Flags:
        if self.v_shaped:
            return {"schedules-method": "dualpipev"}
        if self.vpp > 1:
            return {"num-layers-per-virtual-pipeline-stage": self.layers_per_chunk}
        return {} if self.even else {"num-layer-list": ",".join(map(str, self.layers_per_stage))}


def split_of(card: ModelCard, layout: Layout) -> Split:
    """The split of a layout. Layers that are left over go to the middle stages: the first also embeds, the last has the head."""
    base, rest = divmod(card.num_layers, layout.pp)
    first = (layout.pp - rest) // 2
    stages = tuple(base + (first <= stage < first + rest) for stage in range(layout.pp))
    if layout.stage_layers and layout.vpp == 1:
        stages = layout.stage_layers
    return Split(layout.tp, layout.pp, layout.vpp, layout.ep, card.num_layers, stages, layout.schedule == "dualpipev")


def words(flags: Flags) -> list[str]:
    """Flags as the words of a command line; values that are False or None are left out."""
    line: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        line.append(f"--{name}")
        if isinstance(value, (list, tuple)):
            line += [str(item) for item in value]
        elif value is not True:
            line.append(f"{value:g}" if isinstance(value, float) and value else str(value))
    return line


def recompute_flags(layout: Layout) -> Flags:
    """Whole layers computed again: all of them, or the first n of a stage."""
    if layout.recompute != "full":
        return {}
    every = layout.recompute_layers == 0
    return {
        "recompute-granularity": "full",
        "recompute-method": "uniform" if every else "block",
        "recompute-num-layers": 1 if every else layout.recompute_layers,
    }


def bf16_rules(recipe: Recipe) -> list[Rule]:
    """What all three MindSpeed frameworks do in one way only."""
    every = recipe.output.eval_every
    return [
        only(recipe.model.dtype == "float32", "model.dtype", "bfloat16", "training in float32", " float32 训练"),
        only(bool(recipe.data.eval) or recipe.data.eval_fraction > 0, "data.eval", [], "evaluation", "评估"),
        only((every.amount, every.unit) != (100, "steps"), "output.eval_every", "100 steps", "evaluation", "评估"),
        only(recipe.output.dtype not in ("auto", "bfloat16"), "output.dtype", "auto", "choice of the exported dtype", "导出精度选择"),
        (
            recipe.checkpoint.resume not in ("auto", "none"),
            "checkpoint.resume",
            "a run resumes from its own folder only; write resume: auto",
            "只能从自身文件夹续训；请写 resume: auto",
            "auto",
        ),
    ]


def step_rules(recipe: Recipe, steps: str) -> list[Rule]:
    """Of those that know nothing but steps, and start from pretrained weights.

    Args:
        steps: a duration that would be accepted.
    """
    every = recipe.checkpoint.every
    return [
        (recipe.duration.unit != "steps", "duration", "counts steps; write duration: N steps", "按步计；请写 duration: N steps", steps),
        (every.unit != "steps", "checkpoint.every", "saves every N steps", "按步保存；请写 steps", "500 steps"),
        only(recipe.model.init == "random", "model.init", "pretrained", "start from random weights", "随机初始化"),
    ]


def sharding_rules(layout: Layout) -> list[Rule]:
    """Megatron's distributed optimizer is ZeRO-1 over all of dp."""
    return [
        only(layout.replicate > 1, "layout.replicate", 1, "replicas of a sharded model", "HSDP 副本"),
        only(layout.zero != 1, "layout.zero", 1, "sharding of gradients and weights", "梯度与权重切分"),
    ]


def lean_rules(layout: Layout) -> list[Rule]:
    """Ways to save memory that only MindSpeed-LLM has."""
    mode = layout.recompute
    return [
        only(mode in ("norm", "selective"), "layout.recompute", "auto", f"recompute {mode}", f"重计算 {mode}"),
        only(layout.offload_activations, "layout.offload_activations", False, "offloading of activations", "激活卸载"),
        only(layout.offload_optimizer, "layout.offload_optimizer", False, "offloading of the optimizer", "优化器卸载"),
        only(layout.optim_dtype != "float32", "layout.optim_dtype", "float32", "moments in bfloat16", "bfloat16 动量"),
    ]


def layout_flags(recipe: Recipe, card: ModelCard, layout: Layout) -> Flags:
    """Parallelism, recomputation and memory."""
    flags = split_of(card, layout).train_flags(card.moe is not None)
    overlaps = layout.shard > 1 and layout.schedule != "dualpipev"  # it makes weight gradients apart from the others
    flags |= {
        "sequence-parallel": layout.tp > 1 and layout.sp,
        "use-distributed-optimizer": True,
        "overlap-grad-reduce": overlaps,
        "overlap-param-gather": overlaps and not isinstance(recipe.tuning, Lora),
        "reuse-fp32-param": layout.reuse_params,
        "swap-attention": layout.offload_activations,
        "swap-optimizer": layout.offload_optimizer,
        "o2-optimizer": layout.optim_dtype == "bfloat16",
    }
    if layout.overlap_chunks > 1:
        flags |= {"use-ascend-coc": True, "coc-parallel-num": layout.overlap_chunks}
    flags["recompute-in-advance"] = layout.recompute_in_advance
    # always written: the check of reset-attention-mask in MindSpeed 2.2.0 reads it before it has a default
    flags["context-parallel-size"] = layout.cp
    if layout.cp > 1:
        flags |= context_flags(layout)
    if layout.recompute == "norm":
        flags |= {"recompute-norm": True, "recompute-activation-function": True}
    return flags | recompute_flags(layout)


def context_flags(layout: Layout) -> Flags:
    """Which algorithm shares the tokens of a row."""
    if layout.ring == 1:
        return {"context-parallel-algo": "ulysses_cp_algo"}
    if layout.ulysses == 1:
        return {"context-parallel-algo": "megatron_cp_algo", "use-cp-send-recv-overlap": True}
    return {"context-parallel-algo": "hybrid_cp_algo", "ulysses-degree-in-cp": layout.ulysses}


def optimizer_flags(recipe: Recipe) -> Flags:
    """AdamW, its schedule, the clipping."""
    optim = recipe.optim
    flags: Flags = {
        "lr": optim.lr,
        "min-lr": optim.lr * optim.min_lr_ratio,
        "lr-decay-style": {"wsd": "WSD"}.get(optim.schedule, optim.schedule),
        "weight-decay": optim.weight_decay,
        "clip-grad": optim.max_grad_norm,
        "adam-beta1": optim.beta1,
        "adam-beta2": optim.beta2,
        "adam-eps": optim.eps,
        "seed": recipe.seed,
    }
    warmup = optim.warmup
    return flags | ({"lr-warmup-iters": int(warmup.amount)} if warmup.unit == "steps" else {"lr-warmup-fraction": warmup.amount})


def adapter_flags(tuning: Lora) -> Flags:
    """LoRA, under Megatron's names of the layers."""
    return {"lora-r": tuning.rank, "lora-alpha": int(tuning.alpha), "lora-target-modules": list(LORA_TARGETS)}


def torchrun(plan: Plan) -> list[str]:
    """torchrun over the nodes of a plan."""
    meeting = ["--nnodes", "{nodes}", "--node_rank", "{node_rank}", "--master_addr", "{master_addr}", "--master_port", "{master_port}"]
    return ["python", "-m", "torch.distributed.run", "--nproc_per_node", str(plan.cluster.nproc), *meeting]


def start_facts(plan: Plan, fresh: list[str], resume: list[str], **more: Any) -> str:
    """What programs/megatron_train.py must know, as the text of its job file `job/start.json`.

    Args:
        fresh: words that start from the converted weights.
        resume: words that go on from the newest checkpoint of the run.
        more: how an epoch is counted, where the run lasts or saves by epochs.
    """
    every = plan.recipe.checkpoint.every
    facts = {
        "checkpoints": f"{plan.run_dir}/checkpoints",
        "fresh": fresh,
        "resume": resume,
        "steps": num_steps(plan.recipe),
        "epochs": plan.recipe.duration.amount if plan.recipe.duration.unit == "epochs" else None,
        "save_steps": int(every.amount) if every.unit == "steps" else None,
        "save_epochs": every.amount if every.unit == "epochs" else None,
        **more,
    }
    return json.dumps(facts, indent=2) + "\n"


def environment(plan: Plan, folders: list[str]) -> dict[str, str]:
    """Variables that the official scripts set, and where the sources lie."""
    env = {
        "PYTHONPATH": ":".join(f"{{env}}/src/{folder}" for folder in folders),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "HCCL_CONNECT_TIMEOUT": "3600" if plan.cluster.nodes > 1 else "1200",
        "TASK_QUEUE_ENABLE": "2",
        "CPU_AFFINITY_CONF": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return env | ({"STREAMS_PER_DEVICE": "32"} if plan.card.moe is not None else {})


_NUMBER = r"([-+0-9.eE]+|nan|inf)"
_ITERATION = re.compile(r"iteration\s+(\d+)\s*/\s*(\d+)\s*\|")
_FIELDS = {
    "loss": re.compile(rf"(?:lm loss|loss)\s*:\s*{_NUMBER}\s*\|"),
    "lr": re.compile(rf"learning rate\s*:\s*{_NUMBER}"),
    "grad_norm": re.compile(rf"grad norm\s*:\s*{_NUMBER}"),
    "ms": re.compile(rf"elapsed time per iteration \(ms\)\s*:\s*{_NUMBER}"),
    "samples": re.compile(r"consumed samples\s*:\s*(\d+)"),
    "skipped": re.compile(r"number of skipped iterations\s*:\s*(\d+)"),
}


def read_iteration(line: str, plan: Plan) -> StepMetrics | None:
    """The step of one of Megatron's `iteration N/M | ... |` lines, which the last rank prints.

    Its loss is the mean over the micro-batches; tokens count full rows.
    """
    if not (found := _ITERATION.search(line)):
        return None
    values = {name: match[1] for name, pattern in _FIELDS.items() if (match := pattern.search(line))}
    if "ms" not in values:
        return None
    step, num_steps = int(found[1]), int(found[2])
    tokens = plan.recipe.batch.global_size * plan.recipe.data.seq_len
    step_s = float(values["ms"]) / 1000
    skipped = int(values.get("skipped", "0")) > 0
    if "loss" not in values and not skipped:
        return None
    return StepMetrics(
        step=step,
        num_steps=num_steps,
        loss=float(values.get("loss", "nan")),
        lr=float(values.get("lr", "0")),
        grad_norm=float(values.get("grad_norm", "0")),
        label_tokens=0,
        tokens=tokens,
        epoch=step / num_steps * (plan.recipe.duration.amount if plan.recipe.duration.unit == "epochs" else 1.0),
        step_s=step_s,
        tokens_per_s=tokens / step_s if step_s else 0.0,
        skipped="loss scale" if skipped else None,
    )
