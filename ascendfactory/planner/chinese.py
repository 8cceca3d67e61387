"""The planner's words in Chinese: the names of memory terms and parts of a step, and what each is."""

from __future__ import annotations

from ascendfactory.core.messages import pick

TERMS = {  # parts of a device's memory
    "weights": "权重",
    "masters": "主权重",
    "gradients": "梯度",
    "reduced gradients": "归约后的梯度分片",
    "moments": "优化器动量",
    "gathered weights": "聚合中的权重",
    "activations": "激活",
    "backward": "反向中间量",
    "stage buffers": "级间缓冲区",
    "vision": "视觉激活",
    "logits": "logits",
    "reference": "参考模型",
    "critic": "价值模型",
    "buffers": "缓冲区",
    "checkpoint copy": "检查点副本",
    "runtime": "运行时",
}
PARTS = {  # parts of a step
    "matrix products": "矩阵乘",
    "experts": "专家矩阵乘",
    "routing": "专家路由",
    "attention": "注意力",
    "head": "输出层",
    "memory bound": "访存",
    "tp": "tp 通信",
    "ulysses": "ulysses 通信",
    "ring": "ring 通信",
    "ep": "ep 通信",
    "pp": "pp 通信",
    "dp": "dp 通信",
    "bubble": "流水线气泡",
    "optimizer": "优化器",
    "host": "主机内存传输",
}
FORMULAS = {
    "what FSDP shards: (4·T + e·F) / n; a compute copy: 2·(T + F), / n under zero 3": (
        "FSDP 切分：(4·T + e·F) / n；计算副本：2·(T + F)，zero 3 再 / n"
    ),
    "4·T / n, less 2·T / n where the bf16 weights are a part of them": "4·T / n；bf16 权重是其一部分时减 2·T / n",
    "g·T, / n under zero 2 and 3; of the largest layer alone where the optimizer works in the backward pass": (
        "g·T，zero 2、3 再 / n；优化器在反向中执行时只有最大一层"
    ),
    "g·T / n, where whole gradients are kept until the last micro-batch: their shards, of another stream's memory": (
        "g·T / n，整份梯度保留到最后一个微批时：其分片，位于另一条流的内存"
    ),
    "of one layer: gradients of its gathered inputs 2·e·t·h and of its MLP e·t·f / tp, its weight gradients e·P_layer": (
        "一层的：聚合输入的梯度 2·e·t·h、MLP 的梯度 e·t·f / tp、权重梯度 e·P_layer"
    ),
    "e·t·h x (an input, an output and their gradients on their way; k outputs where weight gradients wait; or, of torch's "
    "stages, a gradient and an input of every micro-batch)": (
        "e·t·h x（途中的一份输入、一份输出及其梯度；权重梯度延后时另加 k 份输出；torch 的流水级则为每个微批的一份梯度与一份输入）"
    ),
    "8·T / n (4·T / n in bf16)": "8·T / n（bf16 为 4·T / n）",
    "e × (2 largest layers + embedding + head); or e × (P + 2 largest layers) under zero 1 and 2 and in pipelines": (
        "e ×（最大两层 + 词嵌入 + 输出层）；zero 1、2 与流水线中为 e ×（P + 最大两层）"
    ),
    "k × layers × saved bytes of a layer + one layer being recomputed (in advance: all of a chunk) + last norm": (
        "k × 层数 × 每层保存字节 + 一层正在重算（提前重算时为整块）+ 末层归一化"
    ),
    "saved tensors of the vision tower, patches x layers": "视觉塔保存的张量，图块数 × 层数",
    "2 fp32 chunks + 4·V·h (the head's gradient on its way; under gpipe of every micro-batch), or t·V/tp in several copies": (
        "两个 fp32 块 + 4·V·h（输出层梯度的中间值；gpipe 下每个微批各一份），或若干份 t·V/tp"
    ),
    "e·P, sharded as the weights are": "e·P，与权重同样切分",
    "weights, gradients, masters and moments of a second model": "另一个模型的权重、梯度、主权重与动量",
    "12·T / n, while a checkpoint is written beside training (elsewhere the copy is in the host's memory)": (
        "12·T / n，边训练边写检查点时（其他设备上副本在主机内存）"
    ),
    "buckets, slices of an offloaded state, a communicator an axis": "通信桶、卸载状态的分片、每轴一个通信域",
    "interpreter, libraries, device context": "解释器、库、设备上下文",
}
DETAILS = {
    "attention projections and MLPs": "注意力投影与 MLP",
    "matrix products of routed experts": "路由专家的矩阵乘",
    "sorting tokens for experts and back": "按专家重排 token 并还原",
    "scores and values": "打分与加权求和",
    "logits and loss": "logits 与损失",
    "norms, activations, residuals, launches": "归一化、激活函数、残差、算子下发",
    "all-gather and reduce-scatter of activations": "激活的 all-gather 与 reduce-scatter",
    "all-to-all of heads": "注意力头的 all-to-all",
    "keys and values round the ring": "键值沿环传递",
    "dispatch and combine": "分发与合并",
    "activations between stages": "级间激活",
    "weights gathered, gradients reduced": "聚合权重、归约梯度",
    "stages that wait for their first and last micro-batch": "各级等待首个与末个微批",
    "reads and writes of masters, moments and gradients": "读写主权重、动量与梯度",
    "offloaded tensors on their way": "卸载张量的传输",
}


def in_words(english: str) -> str:
    """A word or formula of the planner in the reader's language; English where there is no other."""
    for words in (TERMS, PARTS, FORMULAS, DETAILS):
        if english in words:
            return pick(english, words[english])
    return english
