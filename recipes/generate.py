"""Writes a recipe for every model and stage that the support tables tick, and the golden plans of all: python recipes/generate.py

The cluster of a recipe is the smallest tested number of Snt9b devices of the tables where there is one, or the smallest that the
planner finds; where that is too tight with default settings, the next larger one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ascendfactory.api import make_plan
from ascendfactory.catalog.read import find_card, find_device, list_cards
from ascendfactory.catalog.tables import min_devices, support
from ascendfactory.core.load import load_recipe
from ascendfactory.core.plan import Cluster, ModelCard, NoPlan, Plan
from ascendfactory.planner.fewest import clusters

FOLDER = Path(__file__).resolve().parent
GOLDEN = FOLDER.parent / "tests" / "golden" / "plans"
DEVICE, SEQ_LEN, MOST_DEVICES = "snt9b", 4096, 1024
STAGES = {  # of the support tables → objective, tuning, data, how the data is told
    "pretrain": ("pretrain", "full", "recipes/text.jsonl", "documents / 文档"),
    "sft_full": ("sft", "full", "demo/identity.jsonl", "conversations / 对话"),
    "sft_lora": ("sft", "lora", "demo/identity.jsonl", "conversations / 对话"),
    "dpo": ("dpo", "full", "recipes/preferences.jsonl", "prompt, chosen, rejected / 提示、优选、劣选"),
    "grpo": ("grpo", "full", "recipes/prompts.jsonl", "prompts with checkable answers / 带可核对答案的提示"),
    "dapo": ("dapo", "full", "recipes/prompts.jsonl", "prompts with checkable answers / 带可核对答案的提示"),
    "ppo": ("ppo", "full", "recipes/prompts.jsonl", "prompts with checkable answers / 带可核对答案的提示"),
}
LEARNING_RATES = {"pretrain": "1e-5", "sft": "1e-5", "dpo": "5e-7", "grpo": "1e-6", "dapo": "1e-6", "ppo": "1e-6"}


def ticks() -> Iterator[tuple[ModelCard, str]]:
    """Every model and stage that some back end of the tables trains."""
    for card in list_cards():
        stages = {stage for row in support(card) if row.backend != "native" for stage in row.stages}
        for stage in STAGES:
            if stage in stages:
                yield card, stage


def stem(card: ModelCard, stage: str) -> str:
    """The file name without its ending."""
    objective, tuning, _, _ = STAGES[stage]
    return f"{card.name.lower()}_{objective}-{tuning}_{SEQ_LEN // 1024}k"


def text_of(card: ModelCard, stage: str, cluster: Cluster) -> str:
    """The recipe of a tick on a cluster."""
    objective, tuning, data, told = STAGES[stage]
    rows = max(64, 4 * cluster.num_devices)
    rate = "1e-4" if tuning == "lora" else LEARNING_RATES[objective]
    where = f"{cluster.nodes}x{cluster.nproc}" if cluster.nodes > 1 else str(cluster.nproc)
    return f"""\
# {card.name}: {objective}, {tuning}. `ascendfactory plan` shows layout, memory and time; for other devices: --devices "4x8 snt9b"
# 用 `ascendfactory plan` 查看布局、内存与时间；换用其他设备：--devices "4x8 snt9b"
model: {card.name.lower()}  # or a folder with its files / 或权重所在文件夹
objective: {objective}
tuning: {tuning}
data:
  train: {data}  # yours: {told}
  seq_len: {SEQ_LEN}
batch: {rows}
duration: 1 epochs
optim: {{lr: {rate}}}
cluster: {where} {DEVICE}
"""


def smallest(card: ModelCard, stage: str) -> tuple[str, Plan]:
    """The recipe on the smallest cluster that can be planned, from the tables' number on.

    Raises:
        LookupError: no cluster holds it.
    """
    objective, tuning, _, _ = STAGES[stage]
    name = objective if objective in ("grpo", "dapo", "ppo") else tuning
    known = [row.num_devices for row in min_devices(card, device=DEVICE, tuning=name, seq_len=SEQ_LEN)]
    least = min(known, default=1)
    for cluster in clusters(find_device(DEVICE), MOST_DEVICES):
        if cluster.num_devices < least:
            continue
        text = text_of(card, stage, cluster)
        try:
            return text, make_plan(load_recipe(text), run_dir="runs/x", launchable=False)
        except NoPlan:
            continue
    raise LookupError(f"{card.name} {stage}")


def summary(plan: Plan) -> dict[str, Any]:
    """What a reviewer reads of a plan, rounded so that only decisions and real changes show."""
    layout = {key: value for key, value in plan.layout.model_dump().items() if value is True or value not in (1, 0, "float32", ())}
    prediction = plan.prediction
    assert prediction is not None
    found: dict[str, Any] = {
        "devices": f"{plan.cluster.nodes}x{plan.cluster.nproc} {plan.cluster.device.name}",
        "backend": plan.backend,
        "layout": layout,
        "gib": {term.name: round(term.num_bytes / 2**30, 2) for term in plan.memory},
        "step_s": float(f"{prediction.step_s:.3g}"),
        "tokens_per_s_device": float(f"{prediction.tokens_per_s_device:.3g}"),
    }
    if plan.placement:
        found["rollout"] = plan.placement.model_dump(include={"colocated", "rollout_devices", "rollout_tp", "kv_share"})
    return found


def golden(card: ModelCard) -> dict[str, Any]:
    """The plans of a model's recipes as they are made now."""
    found = {}
    for _, stage in (tick for tick in ticks() if tick[0].name == card.name):
        text = (FOLDER / f"{stem(card, stage)}.yaml").read_text(encoding="utf-8")
        found[stem(card, stage)] = summary(make_plan(load_recipe(text), run_dir="runs/x", launchable=False))
    return found


def dump(plans: dict[str, Any]) -> str:
    """A golden file: one line for each part of a plan."""
    lines = [
        f"  {json.dumps(name)}: {{\n" + ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in plan.items()) + "\n  }"
        for name, plan in plans.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Writes the recipes, then the golden plans."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for card, stage in ticks():
        text, _ = smallest(card, stage)
        (FOLDER / f"{stem(card, stage)}.yaml").write_text(text, encoding="utf-8")
    for name in sorted({card.name for card, _ in ticks()}):
        (GOLDEN / f"{name.lower()}.json").write_text(dump(golden(find_card(name))), encoding="utf-8")


if __name__ == "__main__":
    main()
