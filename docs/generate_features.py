"""Writes docs/{en,zh}/features.md: what each published feature of MindSpeed-LLM is here: python docs/generate_features.py"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ascendfactory.catalog.read import features

DOCS = Path(__file__).resolve().parent


class Here(NamedTuple):
    """Our side of a feature: recipe keys that turn it on, a test that proves it, and what there is to say."""

    keys: tuple[str, ...]
    test: str  # a file, or file::function
    en: str
    zh: str


_RING = "tests/engine/test_context.py"
_TENSOR = "tests/engine/test_tensor.py"
HERE: dict[tuple[str, str], Here] = {
    ("pretraining", "Multi-Sample Dataset Pretraining"): Here(
        ("objective", "data.train"), "tests/engine/data/test_loader.py", "any mix of files, with weights", "可按权重混合多个文件"
    ),
    ("pretraining", "Multi-Sample Pack-Mode Pretraining"): Here(
        ("data.packing",),
        "tests/parity/test_independent.py",
        "on by default; documents of a row never see each other",
        "默认开启；同一行的文档互不可见",
    ),
    ("pretraining", "Tensor Parallelism"): Here(("layout.tp",), _TENSOR, "also above the number of key/value heads", "可大于键值头数"),
    ("pretraining", "Pipeline Parallelism"): Here(
        ("layout.pp", "layout.schedule"), "tests/engine/test_pipeline.py", "stages are cut by cost", "按代价切分各级"
    ),
    ("pretraining", "Virtual Pipeline Parallelism"): Here(
        ("layout.vpp", "layout.schedule"),
        "tests/parity/test_layouts.py",
        "interleaved, zero-bubble, ZBV and DualPipeV; checkpoints do not depend on it",
        "支持 interleaved、zero-bubble、ZBV、DualPipeV；检查点与之无关",
    ),
    ("pretraining", "Sequence Parallelism"): Here(("layout.sp",), _TENSOR, "on wherever tp > 1", "tp 大于 1 时默认开启"),
    ("pretraining", "noop layers"): Here(
        ("layout.stage_layers",),
        "tests/engine/test_stages.py",
        "an explicit number of layers a chunk, 0 included, instead of fake layers",
        "直接写每块的层数（可为 0），无需虚拟层",
    ),
    ("pretraining", "Ascend Ring Attention Long-Sequence Parallelism"): Here(
        ("layout.ring",), _RING, "no masked block is computed; documents are balanced", "不计算被遮挡的块；按文档均衡"
    ),
    ("pretraining", "Ulysses Long-Sequence Parallelism"): Here(
        ("layout.ulysses",),
        "tests/engine/test_context.py::test_equals_dense_softmax",
        "also with fewer key/value heads than the degree",
        "键值头数可少于并行度",
    ),
    ("pretraining", "Hybrid Long-Sequence Parallelism"): Here(
        ("layout.ring", "layout.ulysses"), "tests/parity/test_layouts.py", "any product of both", "两者可任意相乘"
    ),
    ("pretraining", "MoE Expert Parallelism"): Here(
        ("layout.ep",),
        "tests/backends/test_native.py",
        "refused by the embedded engine in this release; planned and priced for the other back ends",
        "本版本的内置引擎会拒绝；规划器可为其他后端计划并估价",
    ),
    ("pretraining", "MoE Reordering Communication Optimization"): Here(
        (),
        "tests/backends/test_native.py",
        "follows expert parallelism, which the embedded engine does not have in this release",
        "随专家并行而来，本版本的内置引擎尚无",
    ),
    ("pretraining", "Parameter Replica Reuse"): Here(
        ("layout.reuse_params",),
        "tests/engine/test_replicas.py",
        "FSDP keeps one fp32 shard and casts while gathering, so there is no second copy to share; without FSDP: bf16 + 16-bit rest, exact",
        "FSDP 只保留一份 fp32 分片并在收集时转换，没有第二份可共享；无 FSDP 时为 bf16 加 16 位余数，精确无损",
    ),
    ("pretraining", "Distributed Optimizer"): Here(
        ("layout.zero",), "tests/parity/test_processes.py::test_sharding", "ZeRO 1, 2, 3 and HSDP", "ZeRO 1、2、3 与 HSDP"
    ),
    ("pretraining", "Swap Attention"): Here(
        ("layout.offload_activations",), "tests/engine/test_offload.py", "prefetched one layer ahead", "提前一层预取"
    ),
    ("pretraining", "Recompute"): Here(
        ("layout.recompute", "layout.recompute_layers"),
        "tests/engine/test_recompute.py",
        "full, selective, or the first n layers of a stage; chosen by the planner",
        "整层、选择性或每级前 n 层；由规划器选择",
    ),
    ("pretraining", "Norm Recompute"): Here(
        ("layout.recompute",),
        "tests/engine/test_recompute.py",
        "recompute: norm, the MLP's activation included",
        "recompute: norm，含 MLP 激活",
    ),
    ("pretraining", "O2 BF16 Optimizer"): Here(
        ("layout.optim_dtype",),
        "tests/engine/test_optim_options.py::test_bf16_moments_stay_near_fp32_ones",
        "with stochastic rounding",
        "带随机舍入",
    ),
    ("pretraining", "Flash Attention"): Here(
        (), "tests/engine/test_attention.py", "always; the kernel of the device, no setting", "始终开启；用设备自己的算子，无需设置"
    ),
    ("pretraining", "Flash Attention Variable Length"): Here(
        (),
        "tests/engine/test_attention.py",
        "always; cost is the sum of squares of document lengths",
        "始终开启；计算量为各文档长度的平方和",
    ),
    ("pretraining", "Fused RMSNorm"): Here((), "tests/engine/test_kernels.py", "always; keeps the input only", "始终开启；只保留输入"),
    ("pretraining", "Fused SwiGLU"): Here(
        (), "tests/engine/test_kernels.py", "always; the product is formed again in the backward pass", "始终开启；反向时重新计算乘积"
    ),
    ("pretraining", "Fused Rotary Position Embedding"): Here(
        (),
        "tests/parity/test_processes.py",
        "an Ascend kernel; rotary embedding runs as plain torch operators here, computed once a step for all layers",
        "属昇腾专用算子；此处以普通 torch 算子计算，角度每步只算一次，各层共用",
    ),
    ("pretraining", "GMM"): Here(
        (),
        "tests/backends/test_native.py",
        "grouped products of experts follow expert parallelism, which the embedded engine does not have in this release",
        "专家的分组矩阵乘随专家并行而来，本版本的内置引擎尚无",
    ),
    ("pretraining", "Matmul Add"): Here(
        (),
        "tests/engine/test_gradients.py::test_the_second_micro_batch_makes_no_tensor_of_a_weights_size",
        "always; the product of a later micro-batch is added to the gradient inside the matrix product",
        "始终开启；后续微批的乘积在矩阵乘内直接加到梯度上",
    ),
    ("pretraining", "Gradient Reduce Communication Overlap"): Here(
        ("layout.zero",),
        "tests/parity/test_processes.py",
        "FSDP2 reduces a layer while the one before it is computed",
        "FSDP2 在计算前一层时归约本层",
    ),
    ("pretraining", "Recompute in Advance"): Here(
        ("layout.recompute_in_advance",),
        "tests/engine/test_pipeline.py::test_layers_run_again_before_the_gradient_is_waited_for",
        "a stage that waits for a gradient computes its layers again meanwhile",
        "等待梯度的流水级同时完成重算",
    ),
    ("pretraining", "Weight All-Gather Communication Overlap"): Here(
        ("layout.zero",), "tests/parity/test_processes.py", "the next layer is gathered while this one is computed", "计算本层时收集下一层"
    ),
    ("pretraining", "MC2"): Here(
        ("layout.overlap_chunks",),
        _TENSOR,
        "an Ascend kernel, called on NPUs where sp is off; the portable form is CoC's, the next row",
        "属昇腾专用算子，在 NPU 上且 sp 关闭时调用；可移植的形式即下一行的 CoC",
    ),
    ("pretraining", "CoC"): Here(("layout.overlap_chunks",), _TENSOR, "pieces travel while others are multiplied", "一段传输时计算另一段"),
    ("pretraining", "Ascend Gloo Archive-to-Drive Optimization"): Here(
        ("checkpoint.asynchronous",),
        "tests/engine/test_checkpoint.py",
        "nothing is gathered for a save: every process writes its own part",
        "保存时不做收集：各进程写自己的部分",
    ),
    ("finetuning", "Single-Sample Fine-Tuning"): Here(
        ("data.packing",), "tests/engine/data/test_loader.py", "packing: false", "packing: false"
    ),
    ("finetuning", "Multi-Sample Pack Fine-Tuning"): Here(
        ("data.packing",), "tests/parity/test_independent.py", "on by default", "默认开启"
    ),
    ("finetuning", "Multi-Turn Conversation Fine-Tuning"): Here(
        ("objective.train_on",),
        "tests/engine/data/test_chat.py",
        "exact at the token, from the model's own template",
        "按模型自带模板，精确到词元",
    ),
    ("finetuning", "CCLoRA"): Here(
        ("tuning",),
        "tests/engine/test_tensor.py::test_adapters_send_nothing_more",
        "one gathered input for base and adapter; B(Ax) or (W + BA)x, whichever costs less",
        "主干与适配器共用一份收集的输入；在 B(Ax) 与 (W + BA)x 中取较省者",
    ),
    ("finetuning", "Long-Sequence CP"): Here(("layout.ring", "layout.ulysses"), _RING, "packed rows too", "拼接的行同样支持"),
}
ENGLISH = """# Features

Written by `docs/generate_features.py`. The rows are the features that MindSpeed-LLM's documentation lists; beside each stands what
turns it on in a recipe and the test that proves it. Where a feature is a kernel of one kind of device, its portable form is named.

"""
CHINESE = """# 特性

由 `docs/generate_features.py` 生成。各行为 MindSpeed-LLM 文档列出的特性；旁边是在配方中开启它的键，以及证明它的测试。
若某特性是某类设备专用的算子，则写明其可移植的形式。

"""


def page(zh: bool) -> str:
    """The page in one language."""
    heads = ("阶段", "特性", "配方键", "测试", "说明") if zh else ("stage", "feature", "recipe keys", "test", "how")
    lines = [heads, ("---",) * len(heads)]
    for row in features():
        here = HERE[row.part, row.feature]
        keys = ", ".join(f"`{key}`" for key in here.keys) or ("无" if zh else "none")
        lines.append((row.part, row.feature, keys, f"`{here.test}`", here.zh if zh else here.en))
    return (CHINESE if zh else ENGLISH) + "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main() -> None:
    """Writes both pages."""
    for language in ("en", "zh"):
        (DOCS / language / "features.md").write_text(page(language == "zh"), encoding="utf-8")


if __name__ == "__main__":
    main()
