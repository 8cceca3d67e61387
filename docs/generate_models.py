"""Writes docs/en/models.md and docs/zh/models.md from the catalogue: python docs/generate_models.py"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ascendfactory.catalog.read import list_cards, list_devices
from ascendfactory.catalog.tables import MinDevices, min_devices, stage_matrix, support, throughput
from ascendfactory.core.plan import Device, ModelCard

STAGES = {
    "pretrain": ("pre-training", "预训练"),
    "sft_full": ("SFT full", "全参微调"),
    "sft_lora": ("SFT LoRA", "LoRA 微调"),
    "dpo": ("DPO", "DPO"),
    "grpo": ("GRPO", "GRPO"),
    "dapo": ("DAPO", "DAPO"),
    "ppo": ("PPO", "PPO"),
    "rl": ("RL", "强化学习"),
}


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def billions(num_params: int) -> str:
    """30532122624 → 30.53 B."""
    return f"{num_params / 1e9:.2f} B"


def model_table(cards: list[ModelCard], zh: bool) -> str:
    """Names, sizes and the shape facts that a layout depends on."""
    heads = (
        ("模型", "参数量", "激活", "层", "隐藏维", "头 / KV 头", "上下文", "结构", "权重")
        if zh
        else ("model", "parameters", "active", "layers", "hidden", "heads / kv", "context", "kind", "weights")
    )
    rows = []
    for card in cards:
        kinds = [word for word, part in (("MoE", card.moe), ("MLA", card.mla), ("vision", card.vision)) if part]
        active = billions(card.num_active_params) if card.moe else ""
        heads_cell = f"{card.num_heads} / {card.num_kv_heads}"
        link = f"[{card.hub_id}](https://huggingface.co/{card.hub_id})"
        numbers = (f"{card.num_params:,}", active, str(card.num_layers), str(card.hidden_size), heads_cell, f"{card.max_seq_len:,}")
        rows.append((card.name, *numbers, " ".join(kinds) or "dense", link))
    return table(heads, rows)


def support_table(cards: list[ModelCard], zh: bool) -> str:
    """Stages a back end and model; a length marks what a release was tested at."""
    columns = stage_matrix()
    rows = []
    for card in cards:
        cells = []
        for column in columns:
            found = support(card, backend=column.backend)
            words = ", ".join(STAGES[stage][zh] for row in found for stage in row.stages)
            tested = f" ({found[0].tested_seq_len // 1024}k)" if found and found[0].tested_seq_len else ""
            cells.append(words + tested if words else "-")
        rows.append((card.name, *cells))
    return table(("模型" if zh else "model", *(column.backend for column in columns)), rows)


def stage_table(zh: bool) -> str:
    """Which back end covers which stage."""
    stages = ("pretrain", "sft_full", "sft_lora", "rl")
    rows = [(row.backend, row.title, *("✓" if stage in row.stages else "-" for stage in stages)) for row in stage_matrix()]
    return table((*(("后端", "名称") if zh else ("back end", "title")), *(STAGES[stage][zh] for stage in stages)), rows)


def minimum_table(cards: list[ModelCard], zh: bool) -> str:
    """Smallest device counts: snt9b cards / snt9b23 dies."""
    names = [row.backend for row in stage_matrix() if row.backend != "native"]
    rows = []
    for card in cards:
        found = min_devices(card)
        for tuning, seq_lens in dict.fromkeys((row.tuning, row.seq_lens) for row in found):
            group = [row for row in found if (row.tuning, row.seq_lens) == (tuning, seq_lens)]
            cells = [count_cell([row for row in group if row.backend == name]) for name in names]
            rows.append((card.name, tuning, " / ".join(map(str, seq_lens)), *cells))
    return table((*(("模型", "方式", "长度") if zh else ("model", "tuning", "length")), *names), rows)


def count_cell(rows: list[MinDevices]) -> str:
    """`8 / 16`, with ~ where a merged cell of the source was interpreted."""
    counts = {row.device: f"{'~' if row.confidence == 'inferred' else ''}{row.num_devices}" for row in rows}
    return " / ".join(counts.get(device, "-") for device in ("snt9b", "snt9b23")) if counts else "-"


def device_table(devices: list[Device], zh: bool) -> str:
    """Peaks, memory and links."""
    heads = (
        ("设备", "说明", "内存 GiB", "bf16 TFLOP/s", "fp32 TFLOP/s", "显存带宽 GB/s", "每节点", "节点内 GB/s", "节点间 GB/s", "来源")
        if zh
        else ("device", "what", "GiB", "bf16 TFLOP/s", "fp32 TFLOP/s", "memory GB/s", "a node", "intra GB/s", "inter GB/s", "source")
    )
    rows = [
        (
            device.name,
            device.title,
            f"{device.memory_bytes / 2**30:.2f}" if device.memory_bytes else "-",
            f"{device.peak_bf16_flops / 1e12:g}",
            f"{device.peak_fp32_flops / 1e12:g}",
            f"{device.memory_bandwidth_bytes_s / 1e9:g}",
            str(device.devices_per_node),
            f"{device.intra_node_bytes_s / 1e9:g}",
            f"{device.inter_node_bytes_s / 1e9:g}",
            device.source,
        )
        for device in devices
    ]
    return table(heads, rows)


def throughput_table(zh: bool) -> str:
    """Published speeds of MindSpeed-LLM."""
    heads = ("模型", "阶段", "硬件", "集群", "长度", "tokens/s") if zh else ("model", "stage", "hardware", "cluster", "length", "tokens/s")
    rows = [
        (row.model, STAGES[row.stage][zh], row.hardware, f"{row.nodes}x{row.nproc}", str(row.seq_len or "-"), f"{row.tokens_per_s:,.1f}")
        for row in throughput()
    ]
    return table(heads, rows)


ENGLISH = """# Models, back ends, devices

Written by `docs/generate_models.py` from `ascendfactory/catalog/`. The same on the command line: `ascendfactory models`,
`ascendfactory models NAME`, `ascendfactory backends`. A model that is not listed works as well: give the path of its Hugging Face folder.

## Models

Tied weights count once; buffers and multi-token-prediction layers do not count.

{models}
## Stages of the back ends

The RL stage of LLaMA-Factory is DPO.

{stages}
## Supported models

A length in brackets was tested in a formal release.

{support}
## Smallest device counts

Snt9b cards / Snt9b23 dies (16 dies a node). `~`: read out of a merged cell of the source table. The counts balance the
smallest runnable number and the best speed; below 8 devices the source normally trains on 8.

{minimum}
## Published speeds

MindSpeed-LLM; the source does not say whether tokens/s is per device or of the whole cluster.

{throughput}
## Devices

Bandwidths are one direction, per device.

{devices}"""

CHINESE = """# 模型、后端、设备

由 `docs/generate_models.py` 根据 `ascendfactory/catalog/` 生成。命令行查看：`ascendfactory models`、
`ascendfactory models 名称`、`ascendfactory backends`。不在表中的模型也可以训练：直接给出 Hugging Face 文件夹路径。

## 模型

共享权重只计一次；缓冲区和多 token 预测（MTP）层不计入。

{models}
## 后端支持的阶段

LLaMA-Factory 的强化学习阶段是 DPO。

{stages}
## 支持的模型

括号中的长度已在正式版本中测试。

{support}
## 最少卡数

Snt9b 卡数 / Snt9b23 DIE 数（每节点 16 DIE）。`~` 表示由来源表的合并单元格推断。
数值兼顾最小可运行卡数与最优性能；来源中小于 8 卡一般使用 8 卡训练。

{minimum}
## 公开性能

MindSpeed-LLM；来源未说明 tokens/s 是单卡还是整个集群。

{throughput}
## 设备

带宽为单卡单方向。

{devices}"""


def page(zh: bool) -> str:
    """The whole page in one language."""
    cards = list_cards()
    text = (CHINESE if zh else ENGLISH).format(
        models=model_table(cards, zh),
        stages=stage_table(zh),
        support=support_table(cards, zh),
        minimum=minimum_table(cards, zh),
        throughput=throughput_table(zh),
        devices=device_table(list_devices(), zh),
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def main() -> None:
    """Writes both pages beside this script."""
    for language in ("en", "zh"):
        path = Path(__file__).parent / language / "models.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(page(language == "zh"), encoding="utf-8")


if __name__ == "__main__":
    main()
