"""Writes docs/{en,zh}/accepted-jobs.md from the verdicts of tools/check_jobs.py: python tools/accepted_jobs.py VERDICTS.jsonl...

Give the verdicts of every back end; the pages are written whole.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
HEAD = (
    """# Jobs that the frameworks' own parsers accept

For every cell that the user guide's tables tick (model x stage x tuning x length, on snt9b and on snt9b23), and every profile that has
the model, a job was planned on the published smallest number of devices (or the next larger cluster with room), rendered, and held
against the framework's own parser and validator:

- MindSpeed-LLM and MindSpeed-MM: their patches of Megatron, `parse_args`, `validate_args`, the building of the transformer
  configuration, and the parsers of data preparation and weight conversion;
- MindSpeed-RL and verl: their configuration classes and validation;
- LLaMA-Factory: its argument parser and its checks across fields.

Accepted means that the framework would start, not that it ran: no Ascend device was here.
To repeat it: `tools/job_cells.py`, `tools/check_jobs.py`, `tools/accepted_jobs.py`; each says how at its top.
""",
    """# 被框架自身解析器接受的作业

对用户指南各表打勾的每个单元（模型 x 阶段 x 微调方式 x 序列长度，snt9b 与 snt9b23 两种设备），在包含该模型的每个版本配置上，
按公布的最小卡数（或有余量的下一档集群）规划并渲染作业，再交由该框架自身的解析器与校验器检查：

- MindSpeed-LLM 与 MindSpeed-MM：其对 Megatron 的补丁、`parse_args`、`validate_args`、transformer 配置的构建，
  以及数据预处理与权重转换的解析器；
- MindSpeed-RL 与 verl：其配置类与校验；
- LLaMA-Factory：其参数解析器与跨字段校验。

接受表示该框架会启动，不表示已经运行：此处没有昇腾设备。
重复检查请用 `tools/job_cells.py`、`tools/check_jobs.py`、`tools/accepted_jobs.py`；用法见各文件开头。
""",
)
HEADS = (
    ("back end", "profile", "cells", "accepted", "rejected", "refused by us"),
    ("后端", "版本配置", "单元", "接受", "拒绝", "我方拒绝"),
)
REFUSED = ("Refused before launch, and why", "启动前拒绝的单元及原因")
MODELS = ("Accepted cells a model", "各模型接受的单元")

Verdict = dict[str, Any]


def read(paths: Iterable[str]) -> list[Verdict]:
    """Every verdict."""
    return [json.loads(text) for path in paths for text in Path(path).read_text(encoding="utf-8").splitlines()]


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def sums(verdicts: list[Verdict]) -> list[tuple[object, ...]]:
    """A row for each back end and profile."""
    count: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for line in verdicts:
        count[line["cell"]["backend"], line["cell"]["profile"]][line["verdict"]] += 1
    names = ("accepted", "rejected", "refused")
    return [(*key, sum(found.values()), *(found[name] for name in names)) for key, found in sorted(count.items())]


def refusals(verdicts: list[Verdict]) -> list[str]:
    """A line for each reason, with the cells that have it."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for line in verdicts:
        if line["verdict"] != "accepted":
            cell = line["cell"]
            found[cell["backend"], line["why"]].append(
                f"{cell['model']} {cell['stage']} {cell['tuning']} {cell['seq_len']} {cell['device']}"
            )
    return [f"- `{backend}`: {', '.join(cells)}: {why}" for (backend, why), cells in found.items()]


def models(verdicts: list[Verdict], backend: str) -> list[tuple[object, ...]]:
    """A row for each model of a back end: accepted / all cells by stage, all profiles and devices together."""
    count: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for line in verdicts:
        cell = line["cell"]
        if cell["backend"] == backend:
            count[cell["model"]][f"{cell['stage']} {cell['tuning']}"].append(line["verdict"] == "accepted")
    stages = list(dict.fromkeys(stage for row in count.values() for stage in row))
    rows = [(model, *(f"{sum(row[s])}/{len(row[s])}" if s in row else "-" for s in stages)) for model, row in count.items()]
    return [("", *stages), *rows]


def page(verdicts: list[Verdict], zh: bool) -> str:
    """The page in one language."""
    parts = [HEAD[zh], table(HEADS[zh], sums(verdicts))]
    if reasons := refusals(verdicts):
        parts += [f"## {REFUSED[zh]}\n", "\n".join(reasons) + "\n"]
    parts.append(f"## {MODELS[zh]}\n")
    for backend in dict.fromkeys(str(row[0]) for row in sums(verdicts)):
        heads, *rows = models(verdicts, backend)
        parts.append(table((backend, *map(str, heads[1:])), rows))
    return "\n".join(parts)


def main() -> None:
    """Writes both pages."""
    verdicts = read(sys.argv[1:])
    if not verdicts:
        sys.exit(__doc__)
    for zh, language in enumerate(("en", "zh")):
        (DOCS / language / "accepted-jobs.md").write_text(page(verdicts, bool(zh)), encoding="utf-8")


if __name__ == "__main__":
    main()
