"""Renders a job for every cell that the user guide's tables tick for a back end, on both Ascend devices and the profiles it has.

    python tools/job_cells.py mindspeed_llm > jobs.jsonl

A cell is model x stage x tuning x length x device x profile. It is planned on the published smallest number of devices, or on the
smallest larger cluster that the planner finds room on. A line of the output has the cell and its job, or why there is none.
tools/check_jobs.py then holds the jobs against the framework's own parser.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ascendfactory.api import make_plan
from ascendfactory.backends import BACKENDS
from ascendfactory.catalog.read import find_device, list_cards
from ascendfactory.catalog.tables import min_devices, support
from ascendfactory.core.load import load_recipe
from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Fact, Layout, ModelCard, NoPlan, Plan
from ascendfactory.core.recipe import Recipe
from ascendfactory.launch.environments import find_profile
from ascendfactory.planner.fewest import clusters

DEVICES = ("snt9b", "snt9b23")
MOST_DEVICES = 1024
RL = ("grpo", "dapo", "ppo")
IMAGES = "images.jsonl"
DATA = {"pretrain": "text.jsonl", "sft": "chats.jsonl", "dpo": "pairs.jsonl"}


class Cell(Fact):
    """One tick of the tables on one device and one version of the framework."""

    backend: str
    profile: str
    model: str
    stage: str
    tuning: str
    seq_len: int
    device: str


def cells(backend: str, profiles: tuple[str, ...]) -> Iterator[tuple[Cell, ModelCard, int]]:
    """Every cell of a back end, its model's card and the published smallest number of devices (1 where there is none)."""
    for card in list_cards():
        for row in support(card, backend=backend):
            for stage in row.stages:
                for objective, tuning in kinds(backend, stage):
                    for device in DEVICES:
                        for seq_len, least in lengths(card, backend, objective, tuning, device):
                            for profile in profiles:
                                facts = {"stage": objective, "tuning": tuning, "seq_len": seq_len, "device": device}
                                cell = Cell(backend=backend, profile=profile, model=card.name, **facts)
                                if in_profile(cell, card):
                                    yield cell, card, least


def in_profile(cell: Cell, card: ModelCard) -> bool:
    """Whether the version runs on this device and has the model at all: newer ones dropped some."""
    if find_device(cell.device).kind not in find_profile(cell.backend, cell.profile).devices:
        return False
    refused = BACKENDS[cell.backend].refuse(recipe_of(cell, card, 1, 8), card, Layout())
    return all(refusal.where != "profile" for refusal in refused)


def kinds(backend: str, stage: str) -> list[tuple[str, str]]:
    """Objective and tuning of a stage of the tables; what those say of RL holds for both kinds of tuning where a back end has LoRA."""
    objective, _, tuning = stage.partition("_")
    if backend in ("llamafactory", "verl") and objective in ("dpo", *RL):
        return [(objective, "full"), (objective, "lora")]
    return [(objective, tuning or "full")]


def lengths(card: ModelCard, backend: str, objective: str, tuning: str, device: str) -> list[tuple[int, int]]:
    """Lengths that the table of smallest counts tests, each with its count; without a row 4096 tokens."""
    if objective == "dpo":
        return [(4096, 1)]  # the tables tick it without lengths
    name = objective if objective in RL else tuning
    rows = min_devices(card, backend=backend, device=device, tuning=name)
    return [(seq_len, row.num_devices) for row in rows for seq_len in row.seq_lens] or [(4096, 1)]


def recipe_of(cell: Cell, card: ModelCard, nodes: int, nproc: int) -> Recipe:
    """The recipe of a cell on a cluster; its batch gives every device some rows, and pipelines enough micro-batches."""
    text: dict[str, Any] = {
        "model": cell.model.lower(),
        "objective": cell.stage,
        "tuning": cell.tuning,
        "data": {"train": IMAGES if card.vision else DATA.get(cell.stage, "prompts.jsonl"), "seq_len": cell.seq_len},
        "batch": max(64, 4 * nodes * nproc),
        "duration": "100 steps",
        "optim": {"lr": 1e-5},
        "cluster": {"device": cell.device, "nodes": nodes, "nproc": nproc},
        "backend": cell.backend,
        "profile": cell.profile,
    }
    if cell.stage == "dpo":
        text["data"]["packing"] = "dynamic"
    if cell.stage in RL:
        text["optim"]["schedule"] = "constant"
    return load_recipe(yaml.safe_dump(text))


def plan_of(cell: Cell, card: ModelCard, least: int) -> Plan:
    """The plan of a cell on the smallest cluster of `least` devices or more that has room.

    Raises:
        NoPlan: no cluster of up to 1,024 devices; the reasons are those of the last.
    """
    last = NoPlan([])
    for cluster in clusters(find_device(cell.device), MOST_DEVICES):
        if cluster.num_devices < least:
            continue
        try:
            return make_plan(recipe_of(cell, card, cluster.nodes, cluster.nproc), "/runs/cell", num_alternatives=0)
        except NoPlan as no:
            last = no
            if f"{cell.backend}.model.path" in {r.code for r in no.refusals}:
                break
    raise last


def line_of(cell: Cell, card: ModelCard, least: int) -> dict[str, Any]:
    """The cell with its job, or with the reason why there is none."""
    try:
        plan = plan_of(cell, card, least)
        job = BACKENDS[cell.backend].render(plan)
    except NoPlan as no:
        return {"cell": cell.model_dump(), "refused": "; ".join(f"{r.where}: {r.en}" for r in no.refusals[:3])}
    except UserError as error:
        return {"cell": cell.model_dump(), "refused": str(error)}
    cluster, layout = plan.cluster, plan.layout.model_dump(exclude_defaults=True, mode="json")
    return {"cell": cell.model_dump(), "nodes": cluster.nodes, "nproc": cluster.nproc, "layout": layout, "job": job.model_dump(mode="json")}


def main() -> None:
    """Prints a line for every cell of a back end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=sorted(set(BACKENDS) - {"native"}))
    parser.add_argument("--profile", action="append", help="only these (may be repeated)")
    given = parser.parse_args()
    module = sys.modules[type(BACKENDS[given.backend]).__module__]
    for cell, card, least in cells(given.backend, tuple(given.profile or module.PROFILES)):
        print(json.dumps(line_of(cell, card, least), ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
