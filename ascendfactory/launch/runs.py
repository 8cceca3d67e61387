"""Run folders: made, continued, listed, compared.

A run folder holds recipe.yaml plan.json job/ logs/ metrics.jsonl checkpoints/ export/ report.html provenance.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ascendfactory.core.load import dump_recipe
from ascendfactory.core.messages import UserError, nearest
from ascendfactory.core.plan import Plan, StepMetrics
from ascendfactory.core.recipe import Recipe
from ascendfactory.launch.lock import held

RUNS_ROOT = "runs"
# What a checkpoint depends on: with another value here its tensors, or its place in the data, mean something else.
_FIXED_ON_RESUME = ("model.path", "model.init", "tuning", "objective.kind", "data.train", "data.seq_len", "data.packing", "seed")
_FREE_ON_RESUME = ("tuning.dropout",)


@dataclass(frozen=True)
class Run:
    """A run folder as it lies on the disk."""

    dir: Path
    plan: Plan
    steps: list[StepMetrics]
    state: str  # planned, running, finished, stopped, failed
    started_s: float | None  # Unix time of the latest launch

    @property
    def last(self) -> StepMetrics | None:
        """The newest step."""
        return self.steps[-1] if self.steps else None

    @property
    def eval_loss(self) -> float | None:
        """The newest evaluation loss."""
        return next((s.eval_loss for s in reversed(self.steps) if s.eval_loss is not None), None)


def run_dir_of(recipe: Recipe) -> str:
    """Where the recipe's run goes: output.dir, or runs/<name>."""
    return recipe.output.dir or f"{RUNS_ROOT}/{recipe.name}"


def create_run(plan: Plan) -> Path:
    """Makes the run folder of a plan, or opens the one that is there and continues it.

    With `checkpoint.resume: none`, or a checkpoint of another run to go on from, an earlier run in the same place is kept
    under another name (`<dir>-old-1`).

    Raises:
        UserError: when the folder is in use, or holds checkpoints of a recipe that does not fit (naming the keys that differ).
    """
    folder = Path(plan.run_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError("output.dir", f"{folder} is a file; write a folder", f"{folder} 是文件，请写文件夹")
    if (folder / "plan.json").exists():
        with held(folder):
            pass  # a folder in use is neither renamed nor written to
        if _starts_over(plan.recipe.checkpoint.resume, folder):
            _set_aside(folder)
        elif has_checkpoint(folder):
            _check_fits(plan, folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(dump_recipe(plan.recipe), encoding="utf-8")
    (folder / "plan.json").write_text(plan.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return folder


def _starts_over(resume: str, folder: Path) -> bool:
    """Whether nothing of the folder is continued: `none`, or a checkpoint that lies in another run."""
    return resume == "none" or (resume != "auto" and not Path(resume).resolve().is_relative_to(folder.resolve()))


def has_checkpoint(folder: Path) -> bool:
    """Whether there is something to resume from."""
    checkpoints = folder / "checkpoints"
    return checkpoints.is_dir() and any(p.is_dir() for p in checkpoints.iterdir())


def load_run(folder: str | Path) -> Run:
    """The run in a folder, or under runs/ by its name.

    Raises:
        UserError: when there is none, with the nearest name.
    """
    path = Path(folder)
    if not (path / "plan.json").exists() and (Path(RUNS_ROOT) / path / "plan.json").exists():
        path = Path(RUNS_ROOT) / path
    if not (path / "plan.json").exists():
        names = [p.parent.name for p in Path(RUNS_ROOT).glob("*/plan.json")]
        guess = nearest(path.name, names)
        hint, hint_zh = (f"; did you mean '{guess}'?", f"；是否想写 '{guess}'？") if guess else ("; see 'ascendfactory runs list'",) * 2
        raise UserError(str(folder), f"is not a run folder (no plan.json){hint}", f"不是训练文件夹（没有 plan.json）{hint_zh}")
    plan = read_plan(path / "plan.json")
    status = _read_json(path / "job" / "status.json")
    return Run(path, plan, read_metrics(path), str(status.get("state", "planned")), status.get("started_s"))


def read_plan(path: Path) -> Plan:
    """The plan of a file.

    Raises:
        UserError: when the file is not a plan of this version.
    """
    try:
        return Plan.model_validate_json(path.read_text(encoding="utf-8"), strict=False)
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise UserError(str(path), f"is not a plan of this version: {first}", f"不是本版本的计划文件：{first}") from None


def list_runs(root: str | Path = RUNS_ROOT) -> list[Run]:
    """Every run under a folder, the newest first; folders that cannot be read are left out."""
    runs = []
    for path in Path(root).glob("*/plan.json"):
        try:
            runs.append(load_run(path.parent))
        except UserError:
            continue
    return sorted(runs, key=lambda run: -(run.started_s or 0))


def read_metrics(folder: str | Path) -> list[StepMetrics]:
    """The steps of metrics.jsonl in order; those that a resumed run repeated count once, with the later values."""
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        return []
    by_step: dict[int, StepMetrics] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            step = StepMetrics.model_validate_json(line)
        except ValidationError:  # the last line of a killed run
            continue
        if step.step in by_step:  # resumed from an earlier checkpoint: what came after it did not happen
            by_step = {number: old for number, old in by_step.items() if number < step.step}
        by_step[step.step] = step
    return [by_step[number] for number in sorted(by_step)]


def diff_runs(first: Run, second: Run) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Settings that differ, and results, side by side: rows of (key, first, second)."""
    settings = [
        (key, _shown(a), _shown(b))
        for key, a, b in _pairs(flatten(first.plan.recipe.model_dump(mode="json")), flatten(second.plan.recipe.model_dump(mode="json")))
        if a != b
    ]
    decided = [(f"plan.{key}", _shown(a), _shown(b)) for key, a, b in _pairs(_decisions(first.plan), _decisions(second.plan)) if a != b]
    results = [(key, _shown(a), _shown(b)) for key, a, b in _pairs(results_of(first), results_of(second))]
    return settings + decided, results


def results_of(run: Run) -> dict[str, Any]:
    """The figures a person compares runs by."""
    last = run.last
    busy_s = sum(s.step_s for s in run.steps)
    best = min((s.eval_loss for s in run.steps if s.eval_loss is not None), default=None)
    return {
        "state": run.state,
        "steps": f"{last.step}/{last.num_steps}" if last else None,
        "loss": round(last.loss, 4) if last else None,
        "eval_loss": round(run.eval_loss, 4) if run.eval_loss is not None else None,
        "best_eval_loss": round(best, 4) if best is not None else None,
        "tokens": sum(s.tokens for s in run.steps) if last else None,
        "tokens_per_s": round(sum(s.tokens for s in run.steps) / busy_s) if busy_s else None,
        "peak_memory_gib": round(max((s.memory_bytes or 0) for s in run.steps) / 2**30, 2) if last else None,
        "time_s": round(busy_s, 1) if last else None,
    }


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A tree of settings as dotted keys; lists of plain values stay whole."""
    if isinstance(tree, dict) and tree:
        return {k: v for key, value in tree.items() for k, v in flatten(value, f"{prefix}{key}.").items()}
    if isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        return {k: v for i, value in enumerate(tree) for k, v in flatten(value, f"{prefix}{i}.").items()}
    return {prefix[:-1]: tree}


def _decisions(plan: Plan) -> dict[str, Any]:
    chosen = {"backend": plan.backend, "dtype": plan.dtype, "device": plan.cluster.device.name, "num_devices": plan.cluster.num_devices}
    return chosen | flatten(plan.layout.model_dump(), "layout.")


def _pairs(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(key, a.get(key), b.get(key)) for key in {**a, **b}]


def _shown(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _check_fits(plan: Plan, folder: Path) -> None:
    """Refuses to continue a run whose tensors or sample order the new recipe changes."""
    old = flatten(read_plan(folder / "plan.json").recipe.model_dump(mode="json"))
    new = flatten(plan.recipe.model_dump(mode="json"))
    differing = [(key, a, b) for key, a, b in _pairs(old, new) if a != b and _is_fixed(key)]
    if old["tuning.kind"] != new["tuning.kind"]:  # its other settings exist on one side only
        differing = [row for row in differing if row[0] == "tuning.kind" or not row[0].startswith("tuning.")]
    changed = [f"{key}: {_shown(a)} → {_shown(b)}" for key, a, b in differing]
    if changed:
        keys = "; ".join(changed)
        raise UserError(
            str(folder),
            f"holds checkpoints of another recipe ({keys}); write another output.dir or name, or checkpoint.resume: none",
            f"其中的检查点属于另一份配方（{keys}）；请更换 output.dir 或 name，或写 checkpoint.resume: none",
        )


def _is_fixed(key: str) -> bool:
    return key not in _FREE_ON_RESUME and any(f"{key}.".startswith(f"{fixed}.") for fixed in _FIXED_ON_RESUME)


def _set_aside(folder: Path) -> Path:
    """Renames an earlier run, so that nothing of it is lost or mixed with the new one."""
    number = 1
    while (kept := folder.with_name(f"{folder.name}-old-{number}")).exists():
        number += 1
    return folder.rename(kept)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
