"""What a run of AscendFactory 6.5's own YAML leaves where its users look for it: exp-config.yaml, the log, the picture, folders.

They are names of what the run folder holds anyway: all but exp-config.yaml are links.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import yaml

from ascendfactory.core.plan import Plan
from ascendfactory.launch.local import next_log
from ascendfactory.launch.migration import Tree
from ascendfactory.launch.place import find_place

CONFIG_NAME = "exp-config.yaml"
PICTURE_NAME = "training_loss.png"


def log_name(plan: Plan, started_s: float) -> str:
    """`<back end>_<method>-<model>-<length>-<device>-<stamp>-run_log-R<node>_WS<devices>.txt`."""
    recipe = plan.recipe
    method = recipe.objective.kind if recipe.objective.kind not in ("sft", "pretrain") else f"{recipe.objective.kind}_{recipe.tuning.kind}"
    stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(started_s))
    parts = (f"{plan.backend}_{method}", plan.card.name, str(recipe.data.seq_len), plan.cluster.device.name, stamp)
    return "-".join((*parts, f"run_log-R{find_place(os.environ).rank}_WS{plan.cluster.num_devices}.txt"))


def folder_names(plan: Plan) -> dict[str, str]:
    """Folders (and a log) as AscendFactory 6.5 called them → their places in the run folder."""
    layout = plan.layout
    megatron = {
        "saved_checkpoints": "checkpoints",
        f"converted_weight_TP{layout.tp}PP{layout.pp}": "weights",
        "ckpt_converted_mg2hf": "export",
    }
    match plan.backend:
        case "mindspeed_llm" | "mindspeed_rl":
            return megatron | {"preprocess_data": "tokens"}
        case "mindspeed_mm":
            return megatron
        case "verl":
            return {f"checkpoint_{plan.recipe.name}": "checkpoints"}
        case "llamafactory":
            return {"trainer_log.jsonl": "checkpoints/trainer_log.jsonl"}
        case _:
            return {}


def keep_old_names(folder: Path, plan: Plan, tree: Tree) -> None:
    """Writes exp-config.yaml and links folders, and the log of the attempt that follows.

    Args:
        folder: the run folder.
        plan: what runs in it.
        tree: the old YAML, references resolved and overrides applied.
    """
    (folder / CONFIG_NAME).write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
    _link(folder / "logs" / log_name(plan, time.time()), next_log(folder).name)
    for old, ours in folder_names(plan).items():
        _link(folder / old, ours)


def link_results(folder: Path, plan: Plan) -> None:
    """Gives what is only known after training its old name: the picture of the loss, LLaMA-Factory's checkpoints."""
    if (folder / "loss.png").exists():
        _link(folder / PICTURE_NAME, "loss.png")
    if plan.backend == "llamafactory":
        for link in folder.glob("checkpoint-*"):
            if link.is_symlink() and not link.exists():  # a newer one took its place
                link.unlink()
        for path in (folder / "checkpoints").glob("checkpoint-*"):
            _link(folder / path.name, f"checkpoints/{path.name}")


def _link(path: Path, target: str) -> None:
    if path.is_symlink():
        path.unlink()
    if not path.exists():  # what an earlier release wrote there stays
        path.symlink_to(target)
