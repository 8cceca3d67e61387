"""Plans with a given layout, made without a search: what adapters render."""

from __future__ import annotations

from typing import Any

import yaml

from ascendfactory.catalog.read import find_card, find_device
from ascendfactory.core.load import load_recipe
from ascendfactory.core.plan import Cluster, Layout, Placement, Plan
from ascendfactory.core.recipe import PolicyGradient, Recipe

DATA = {"pretrain": "corpus.jsonl", "dpo": "pairs.jsonl", "reward": "pairs.jsonl"}


def make_recipe(model: str, backend: str, stage: str = "sft_full", /, **settings: Any) -> Recipe:
    """A small recipe; `stage` is a name of the support tables, `settings` are top-level keys."""
    objective, _, tuning = stage.partition("_")
    text: dict[str, Any] = {
        "model": {"path": model},
        "objective": {"kind": objective},
        "tuning": {"kind": tuning or "full"},
        "data": {"train": DATA.get(objective, "chats.jsonl"), "seq_len": 4096},
        "batch": {"global_size": 32, "micro_size": 1},
        "duration": "100 steps",
        "cluster": "8 snt9b",
        "backend": backend,
    }
    if objective in ("dpo", "reward"):
        text["data"]["packing"] = "dynamic"
    if objective in ("grpo", "dapo", "ppo"):
        text["optim"] = {"schedule": "constant", "lr": 1e-6, "warmup": 0.0}
    for name, value in settings.items():
        held = text.get(name)
        text[name] = held | value if isinstance(held, dict) and isinstance(value, dict) else value
    return load_recipe(yaml.safe_dump(text))


def make_job_plan(recipe: Recipe, layout: dict[str, Any], nodes: int = 1, nproc: int = 8, device: str = "snt9b") -> Plan:
    """The plan of a recipe under a layout on a cluster of its size; dp takes what the degrees, and one step off policy a node, leave."""
    given = Layout(**layout)
    place = _split(nproc if nodes > 1 else nproc // 4) if _is_off_policy(recipe) else None
    dp = (nodes * nproc - (place.rollout_devices if place else 0)) // (given.tp * given.pp * given.cp)
    num_micro = recipe.rows_a_step // (dp * given.micro_size)
    return Plan(
        recipe=recipe,
        card=find_card(recipe.model.path),
        backend=recipe.backend,
        cluster=Cluster(device=find_device(device), nodes=nodes, nproc=nproc),
        layout=given.model_copy(update={"dp": dp, "num_micro": max(1, num_micro)}),
        dtype="float32" if recipe.model.dtype == "float32" else "bfloat16",
        run_dir="runs/run",
        memory=[],
        why=[],
        placement=place,
    )


def _is_off_policy(recipe: Recipe) -> bool:
    return isinstance(recipe.objective, PolicyGradient) and recipe.objective.off_policy_steps > 0


def _split(devices: int) -> Placement:
    facts = {"kv_share": 0.5, "memory_share": 0.8, "kv_tokens": 1, "rollout_s": 1.0, "step_s": 1.0}
    return Placement(colocated=False, rollout_devices=devices, rollout_tp=2, **facts)
