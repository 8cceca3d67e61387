"""Writes docs/{en,zh}/min-devices.md, the planner's figures beside published ones: python docs/generate_planner.py"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

from ascendfactory.catalog.read import find_device
from ascendfactory.core.plan import Line
from ascendfactory.planner.calibrate import Row, fit, leave_one_out, memory_rows, rows, sample_of
from ascendfactory.planner.explain import layout_words
from ascendfactory.planner.memory import GIB
from ascendfactory.planner.priced import Priced
from ascendfactory.planner.table import Cell, cells
from ascendfactory.planner.time import modelled_seconds
from ascendfactory.planner.tuned import Verdict, verdicts

DOCS = Path(__file__).resolve().parent
ENGINES = ("mindspeed_llm", "llamafactory")


@cache
def table_cells() -> tuple[Cell, ...]:
    return tuple(cells({name: Priced(name) for name in ENGINES}))


@cache
def opinions() -> tuple[Verdict, ...]:
    return tuple(verdicts(Priced("mindspeed_llm")))


def table(heads: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ("---",) * len(heads), *lines]) + "\n"


def said(line: Line | None, zh: bool) -> str:
    """A line in the language of the page."""
    return "" if line is None else line.zh if zh else line.en


def devices(zh: bool) -> str:
    heads = (
        ("模型", "调优", "长度", "后端", "原表", "规划器", "原因")
        if zh
        else ("model", "tuning", "tokens", "backend", "published", "planner", "reason")
    )
    lines = [
        (
            *(cell.row.model, cell.row.tuning, str(cell.seq_len), cell.row.backend),
            f"{cell.row.num_devices}{'' if cell.row.confidence == 'exact' else '?'}",
            str(cell.num_devices or "-"),
            said(cell.reason, zh),
        )
        for cell in table_cells()
    ]
    return table(heads, lines)


def device_summary(zh: bool) -> str:
    exact = [cell for cell in table_cells() if cell.row.confidence == "exact"]
    above = sum(not cell.kept for cell in exact)
    gaps = [cell for cell in exact if cell.num_devices and 2 * cell.num_devices < cell.row.num_devices]
    saved = sum(cell.saved is not None for cell in exact)
    mark, comma = ("：", "、") if zh else (":", ", ")
    kinds = Counter(said(cell.reason, zh).split(mark)[0] for cell in gaps)
    words = comma.join(f"{kind} {count}" for kind, count in kinds.most_common())
    if zh:
        return f"确定格 {len(exact)} 个：高于原表 {above} 个；不足一半 {len(gaps)} 个（{words}）；{saved} 个需要默认关闭的省内存设置。\n"
    return (
        f"{len(exact)} exact cells: {above} above the published one; {len(gaps)} below half of it ({words}); "
        f"{saved} need a saving that is off by default.\n"
    )


def speeds(zh: bool) -> str:
    heads = (
        ("行", "后端", "设备", "实测 tokens/s", "留一预测", "预测/实测", "来源")
        if zh
        else ("row", "backend", "device", "measured tokens/s", "predicted without it", "ratio", "source")
    )
    lines: list[tuple[str, ...]] = []
    for engine in ("mindspeed_llm", "torchtitan", "native"):
        used = [row for row in rows() if row.backend == engine and not row.held_out]
        samples = [sample_of(row, modelled_seconds) for row in used]
        for row, ratio in zip(used, leave_one_out(samples), strict=True):
            lines.append(_speed(row, 1 / ratio, row.source))
        slowdown, routing = fit(samples)
        for row in rows():
            if row.backend == engine and row.held_out:
                sample = sample_of(row, modelled_seconds)
                ratio = sample.measured_s / (slowdown * (sample.plain_s + routing * sample.routing_s))
                lines.append(_speed(row, ratio, f"{row.source}; not fitted: {row.held_out}"))
    return table(heads, lines)


def _speed(row: Row, ratio: float, source: str) -> tuple[str, ...]:
    return (row.name, row.backend, row.device, f"{row.tokens_per_s:.0f}", f"{ratio * row.tokens_per_s:.0f}", f"{ratio:.2f}", source)


LENGTHS = (2048, 4096, 8192, 16384, 32768, 262144)


def lengths(zh: bool) -> str:
    """How the published rows depend on the assumed length of documents in the 256k rows."""
    used = [row for row in rows() if row.backend == "mindspeed_llm" and not row.held_out]
    published = [row.name for row in used if row.source.startswith("MindSpeed-LLM documentation")]
    lines = []
    for length in LENGTHS:
        assumed = [row.model_copy(update={"attended_tokens": length}) if row.attended_tokens else row for row in used]
        ratios = dict(zip((row.name for row in used), leave_one_out([sample_of(row, modelled_seconds) for row in assumed]), strict=True))
        lines.append((str(length), *(f"{1 / ratios[name]:.2f}" for name in published)))
    return table(("文档长度" if zh else "document length", *published), lines)


def memory(zh: bool) -> str:
    """torchtitan's peaks beside the planner's."""
    heads = (
        ("模型", "设备", "长度", "布局", "公布 GiB", "预测", "误差", "来源")
        if zh
        else ("model", "devices", "tokens", "layout", "published GiB", "predicted", "error", "source")
    )
    lines = []
    for row in memory_rows():
        predicted = row.predicted_gib()
        words = ", ".join(f"{key} {value}" for key, value in row.layout.items())
        error = f"{100 * (predicted / row.gib - 1):+.1f} %"
        name = str(row.shape.get("name", row.model))
        lines.append((name, str(row.num_devices), str(row.seq_len), words, f"{row.gib}", f"{predicted:.1f}", error, row.source))
    return table(heads, lines)


def tuned(zh: bool) -> str:
    heads = (
        ("脚本", "设备", "预测 GiB", "可用", "自选/手调 时间", "自选布局", "说明")
        if zh
        else ("script", "devices", "GiB predicted", "usable", "own / hand-tuned time", "own first choice", "remark")
    )
    lines = [
        (
            v.row.script.removeprefix("examples/mcore/"),
            f"{v.row.nodes}x{v.row.nproc} {v.row.device}",
            f"{v.peak_bytes / GIB:.0f}",
            f"{v.room_bytes / GIB:.0f}",
            f"{v.best_s / v.tuned_s:.2f}",
            layout_words(v.best) if v.best else "-",
            said(v.reason, zh),
        )
        for v in opinions()
    ]
    return table(heads, lines)


def tuned_summary(zh: bool) -> str:
    fits = [v for v in opinions() if v.fits]
    slower = sum(v.best_s > v.tuned_s * 1.002 for v in fits)
    total, others = len(opinions()), len(opinions()) - len(fits)
    if zh:
        return f"{total} 个脚本：全部合法，{len(fits)} 个放得下，{others} 个由说明列解释；放得下的行中自选布局更慢的有 {slower} 个。\n"
    return (
        f"{total} scripts: all legal, {len(fits)} fit, {others} are explained in the last column; "
        f"of those that fit, the planner's own choice is slower in {slower}.\n"
    )


def page(zh: bool) -> str:
    """One language's page."""
    usable = 0.92 * find_device("snt9b").memory_bytes / GIB
    if zh:
        return (
            "# 最少设备数、速度与手调布局：规划器与已公布数据对照\n\n"
            "由 `docs/generate_planner.py` 生成；模型见 [planner.md](planner.md)。\n\n"
            f"## 最少设备数（Snt9b，每设备可用 {usable:.1f} GiB；? 为推断读法）\n\n{device_summary(zh)}\n{devices(zh)}\n"
            f"## 速度，每设备；每行由其余行预测（留一）\n\n{speeds(zh)}\n"
            "256k 行为拼接数据，来源未给出文档长度，这里假设 16384；"
            f"下表为各假设下的 预测/实测：\n\n{lengths(zh)}\n## 内存：torchtitan 公布的峰值\n\n{memory(zh)}\n"
            f"## MindSpeed-LLM 官方脚本\n\n{tuned_summary(zh)}\n{tuned(zh)}"
        )
    return (
        "# Smallest device counts, speeds and hand-tuned layouts beside the planner's\n\n"
        "Generated by `docs/generate_planner.py`; the models are told in [planner.md](planner.md).\n\n"
        f"## Smallest device counts (Snt9b, {usable:.1f} GiB usable; ? is an inferred reading)\n\n{device_summary(zh)}\n{devices(zh)}\n"
        f"## Speeds, of one device; each row predicted from the others\n\n{speeds(zh)}\n"
        "The 256k rows are packed and their source does not give the length of documents; 16384 is assumed. Predicted / measured for "
        f"other lengths:\n\n{lengths(zh)}\n## Memory: peaks that torchtitan published\n\n{memory(zh)}\n"
        f"## Official scripts of MindSpeed-LLM\n\n{tuned_summary(zh)}\n{tuned(zh)}"
    )


def main() -> None:
    """Writes both pages."""
    for language in ("en", "zh"):
        (DOCS / language / "min-devices.md").write_text(page(language == "zh"), encoding="utf-8")


if __name__ == "__main__":
    main()
