"""`ascendfactory models` and `ascendfactory backends`: what can be trained, and by what."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ascendfactory.catalog.params import Role, parameter_shapes
from ascendfactory.catalog.read import find_card, list_cards
from ascendfactory.catalog.tables import BackendStages, MinDevices, Support, min_devices, stage_matrix, support, throughput
from ascendfactory.core.messages import UserError, nearest, pick
from ascendfactory.core.plan import ModelCard

# stage → (letter of the overview, English, Chinese)
_STAGES = {
    "pretrain": ("P", "pre-training", "预训练"),
    "sft_full": ("S", "SFT full", "全参微调"),
    "sft_lora": ("L", "SFT LoRA", "LoRA 微调"),
    "dpo": ("D", "DPO", "DPO"),
    "grpo": ("G", "GRPO", "GRPO"),
    "dapo": ("A", "DAPO", "DAPO"),
    "ppo": ("O", "PPO", "PPO"),
    "rl": ("R", "RL", "强化学习"),
}

_COLUMNS = {"llamafactory": "LF", "mindspeed_llm": "MS-LLM", "verl": "VeRL", "mindspeed_rl": "MS-RL", "mindspeed_mm": "MS-MM"}

_TUNINGS = ("full", "lora", "grpo", "dapo", "ppo")

_GROUPS: tuple[tuple[str, str, tuple[Role, ...]], ...] = (
    ("vision tower", "视觉塔", ("vision",)),
    ("embedding", "词嵌入", ("embedding",)),
    ("attention", "注意力", ("q", "k", "v", "o", "mla_q_down", "mla_q_up", "mla_kv_down", "mla_kv_up")),
    ("dense MLP", "稠密 MLP", ("mlp_gate", "mlp_up", "mlp_down")),
    ("experts", "专家", ("expert_gate", "expert_up", "expert_down")),
    ("shared experts", "共享专家", ("shared_gate", "shared_up", "shared_down")),
    ("routers", "路由", ("router", "shared_router")),
    ("norms", "归一化", ("norm", "qk_norm", "mla_norm")),
    ("output head", "输出层", ("head",)),
)


def models(
    name: Annotated[str | None, typer.Argument(help="a model of the catalogue, or a Hugging Face folder")] = None,
    json_out: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """List the models of the catalogue, or show one: shapes, parameters, back ends, smallest device counts."""
    if name is None:
        cards = list_cards()
        if json_out:
            _print_json([{**card.model_dump(), "support": _dump(support(card))} for card in cards])
        else:
            _print(_model_table(cards), _legend(), pick("One model: ascendfactory models NAME", "查看单个模型：ascendfactory models 名称"))
        return
    card = find_card(name)
    if json_out:
        _print_json(_card_facts(card))
    else:
        _print_card(card)


def backends(
    name: Annotated[str | None, typer.Argument(help="a back end, to list the models that it trains")] = None,
    json_out: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show which back end covers which stage, or the models of one back end."""
    if name is None:
        if json_out:
            _print_json(_dump(stage_matrix()))
        else:
            rl_note = pick("The RL stage of LLaMA-Factory is DPO.", "LLaMA-Factory 的强化学习阶段是 DPO。")
            _print(_stage_table(), rl_note, pick("One back end: ascendfactory backends NAME", "查看单个后端：ascendfactory backends 名称"))
        return
    row = _find_backend(name)
    rows = [found for card in list_cards() for found in support(card, backend=row.backend)]
    if json_out:
        _print_json({**row.model_dump(), "support": _dump(rows)})
    else:
        _print(_backend_table(row, rows))


def _find_backend(name: str) -> BackendStages:
    by_name = {row.backend: row for row in stage_matrix()}
    found = by_name.get(name.lower().replace("-", "_"))
    if found is None:
        close, names = nearest(name, by_name), ", ".join(by_name)
        en_hint, zh_hint = (f"did you mean '{close}'? All", f"是不是 '{close}'？全部") if close else ("all", "全部")
        raise UserError("backend", f"no back end '{name}'; {en_hint} back ends: {names}", f"没有后端 '{name}'；{zh_hint}后端：{names}")
    return found


def _dump(rows: Iterable[Any]) -> list[dict[str, Any]]:
    return [row.model_dump() for row in rows]


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


def _print(*parts: Table | str) -> None:
    console = Console(highlight=False)
    for part in parts:
        console.print(part)


def _table(*columns: str, title: str | None = None, right: Iterable[int] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    numbers = set(right)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in numbers else "left", no_wrap=True)
    return table


def _billions(num_params: int) -> str:
    """7615616512 → 7.62B, 494032768 → 494M, 671026404352 → 671B."""
    value, unit = (num_params / 1e9, "B") if num_params >= 1e9 else (num_params / 1e6, "M")
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f}{unit}"


def _context(max_seq_len: int) -> str:
    """131072 → 128k; what is no multiple of 1024 stays in tokens."""
    return f"{max_seq_len // 1024}k" if max_seq_len % 1024 == 0 else str(max_seq_len)


def _letters(rows: list[Support]) -> str:
    return "".join(_STAGES[stage][0] for row in rows for stage in row.stages) or "-"


def _words(stages: Iterable[str]) -> str:
    return ", ".join(pick(*_STAGES[stage][1:]) for stage in stages) or pick("not supported", "不支持")


def _legend() -> str:
    letters = "  ".join(f"{letter} {pick(en, zh)}" for stage, (letter, en, zh) in _STAGES.items() if stage != "rl")
    return f"{letters}\nLF LLaMA-Factory  MS MindSpeed"


def _model_table(cards: list[ModelCard]) -> Table:
    heads = (pick("model", "模型"), pick("params", "参数"), pick("active", "激活"), pick("layers", "层"), pick("context", "上下文"))
    matrix = stage_matrix()
    table = _table(*heads, *(_COLUMNS.get(row.backend, row.backend) for row in matrix), right=range(1, 5))
    for card in cards:
        rows = support(card)
        cells = [_letters([row for row in rows if row.backend == column.backend]) for column in matrix]
        active = _billions(card.num_active_params) if card.moe else ""
        table.add_row(card.name, _billions(card.num_params), active, str(card.num_layers), _context(card.max_seq_len), *cells)
    return table


def _print_card(card: ModelCard) -> None:
    _print(_shape_table(card), _weight_table(card), _support_table(card))
    rows = min_devices(card)
    if rows:
        counts_note = pick(
            "snt9b cards / snt9b23 dies; ~ inferred from a merged table cell", "snt9b 卡数 / snt9b23 DIE 数；~ 表示由合并单元格推断"
        )
        _print(_min_table(rows), counts_note)
        for note in dict.fromkeys(row.note for row in rows if row.note):
            _print(f"! {note}")
    _print(pick(f"Source: {card.source}", f"来源：{card.source}"))


def _shape_table(card: ModelCard) -> Table:
    """Two columns of facts: name and value."""
    table = _table(pick("fact", "项目"), pick("value", "值"), title=card.name)
    table.columns[1].no_wrap = False
    heads = f"{card.num_heads} / {card.num_kv_heads} x {card.head_dim}"
    facts = [
        (pick("hub", "仓库"), card.hub_id or pick("a folder", "本地文件夹")),
        (pick("family", "系列"), card.family),
        (pick("parameters", "参数量"), f"{card.num_params:,} ({_billions(card.num_params)})"),
        (pick("layers", "层数"), str(card.num_layers)),
        (pick("hidden, MLP", "隐藏维, MLP"), f"{card.hidden_size}, {card.ffn_size}"),
        (pick("heads / kv heads x size", "注意力头 / KV 头 x 维度"), heads),
        (pick("vocabulary", "词表"), f"{card.vocab_size:,}" + pick(" (tied)", "（共享）") * card.tied_embeddings),
        (pick("context", "上下文"), f"{card.max_seq_len:,}"),
    ]
    if card.moe:
        moe = f"{card.moe.num_experts} x {card.moe.expert_ffn_size}, top {card.moe.experts_per_token}"
        shared = f" + {card.moe.num_shared_experts}" if card.moe.num_shared_experts else ""
        facts.insert(3, (pick("active parameters", "激活参数量"), f"{card.num_active_params:,} ({_billions(card.num_active_params)})"))
        facts.append((pick("experts (+ shared)", "专家（+ 共享）"), moe + shared))
    if card.mla:
        facts.append((pick("latent ranks q, kv", "MLA 秩 q, kv"), f"{card.mla.q_lora_rank or '-'}, {card.mla.kv_lora_rank}"))
    if card.sliding_window:
        window = pick(
            f"{card.sliding_window}, full every {card.full_attention_period}",
            f"{card.sliding_window}，每 {card.full_attention_period} 层全注意力",
        )
        facts.append((pick("sliding window", "滑动窗口"), window))
    if card.vision:
        vision = f"{card.vision.num_layers} x {card.vision.hidden_size}, patch {card.vision.patch_size}"
        facts.append((pick("vision tower", "视觉塔"), vision))
    names = ", ".join(f"{backend}: {name}" for backend, name in card.backend_names.items())
    if names:
        facts.append((pick("also called", "其他名称"), names))
    for fact in facts:
        table.add_row(*fact)
    return table


def _group_sizes(card: ModelCard) -> list[tuple[str, str, int]]:
    """(English, Chinese, parameters) of the groups that the model has."""
    sizes: dict[Role, int] = {}
    for weight in parameter_shapes(card):
        sizes[weight.role] = sizes.get(weight.role, 0) + weight.num_params
    groups = [(en, zh, sum(sizes.get(role, 0) for role in roles)) for en, zh, roles in _GROUPS]
    return [group for group in groups if group[2]]


def _weight_table(card: ModelCard) -> Table:
    table = _table(pick("weights", "权重"), pick("parameters", "参数量"), pick("share", "占比"), right=(1, 2))
    for en, zh, num_params in _group_sizes(card):
        table.add_row(pick(en, zh), f"{num_params:,}", f"{num_params / card.num_params:.1%}")
    return table


def _support_table(card: ModelCard) -> Table:
    table = _table(pick("back end", "后端"), pick("stages", "阶段"), pick("tested length", "已测长度"))
    for row in support(card):
        table.add_row(row.backend, _words(row.stages), _context(row.tested_seq_len) if row.tested_seq_len else "-")
    return table


def _min_table(rows: list[MinDevices]) -> Table:
    names = [row.backend for row in stage_matrix() if any(found.backend == row.backend for found in rows)]
    table = _table(pick("smallest device count", "最少卡数"), pick("length", "长度"), *names)
    for seq_lens, tuning in sorted({(row.seq_lens, row.tuning) for row in rows}, key=lambda pair: (pair[0], _TUNINGS.index(pair[1]))):
        group = [row for row in rows if (row.tuning, row.seq_lens) == (tuning, seq_lens)]
        cells = [_count_cell([row for row in group if row.backend == name]) for name in names]
        table.add_row(tuning, "/".join(map(_context, seq_lens)), *cells)
    return table


def _count_cell(rows: list[MinDevices]) -> str:
    counts = {row.device: f"{'~' if row.confidence == 'inferred' else ''}{row.num_devices}" for row in rows}
    return " / ".join(counts.get(device, "-") for device in ("snt9b", "snt9b23")) if counts else "-"


def _card_facts(card: ModelCard) -> dict[str, Any]:
    return {
        **card.model_dump(),
        "weights": {en: num_params for en, _, num_params in _group_sizes(card)},
        "support": _dump(support(card)),
        "min_devices": _dump(min_devices(card)),
        "throughput": _dump(row for row in throughput() if row.model == card.name),
    }


def _stage_table() -> Table:
    stages = ("pretrain", "sft_full", "sft_lora", "rl")
    table = _table(
        pick("back end", "后端"), pick("title", "名称"), *(pick(*_STAGES[stage][1:]) for stage in stages), pick("models", "模型数")
    )
    cards = list_cards()
    for row in stage_matrix():
        trained = sum(bool(found.stages) for card in cards for found in support(card, backend=row.backend))
        table.add_row(row.backend, row.title, *("✓" if stage in row.stages else "-" for stage in stages), str(trained))
    return table


def _backend_table(backend: BackendStages, rows: list[Support]) -> Table:
    table = _table(
        pick("model", "模型"), pick("stages", "阶段"), pick("tested length", "已测长度"), title=f"{backend.title}: {_words(backend.stages)}"
    )
    for row in rows:
        if row.stages:
            table.add_row(row.model, _words(row.stages), _context(row.tested_seq_len) if row.tested_seq_len else "-")
    return table
