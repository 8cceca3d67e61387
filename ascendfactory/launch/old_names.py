"""What a run of AscendFactory 6.5's own YAML leaves where its users look for it: exp-config.yaml, the log's name, training_loss.png.

They are names of what the run folder holds anyway: the log and the picture are links.
"""

from __future__ import annotations

import time
from pathlib import Path

import yaml

from ascendfactory.core.plan import Plan
from ascendfactory.launch.legacy import Tree
from ascendfactory.launch.local import next_log
from ascendfactory.launch.steps import node_facts

CONFIG_NAME = "exp-config.yaml"
PICTURE_NAME = "training_loss.png"


def log_name(plan: Plan, started_s: float) -> str:
    """`<back end>_<method>-<model>-<length>-<device>-<stamp>-run_log-R<node>_WS<devices>.txt`."""
    recipe = plan.recipe
    method = recipe.objective.kind if recipe.objective.kind not in ("sft", "pretrain") else f"{recipe.objective.kind}_{recipe.tuning.kind}"
    stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(started_s))
    parts = (f"{plan.backend}_{method}", plan.card.name, str(recipe.data.seq_len), plan.cluster.device.name, stamp)
    return "-".join((*parts, f"run_log-R{node_facts()['node_rank']}_WS{plan.cluster.num_devices}.txt"))


def keep_old_names(folder: Path, plan: Plan, tree: Tree) -> None:
    """Writes exp-config.yaml and links the log of the attempt that follows.

    Args:
        folder: the run folder.
        plan: what runs in it.
        tree: the old YAML, references resolved and overrides applied.
    """
    (folder / CONFIG_NAME).write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
    _link(folder / "logs" / log_name(plan, time.time()), next_log(folder).name)


def link_picture(folder: Path) -> None:
    """Gives the picture of the loss its old name, where there is one."""
    if (folder / "loss.png").exists():
        _link(folder / PICTURE_NAME, "loss.png")


def _link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)
