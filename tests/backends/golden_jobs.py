"""Every job that the adapters render for a list of cells, as text files: python -m tests.backends.golden_jobs writes them anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ascendfactory.backends import BACKENDS
from ascendfactory.core.plan import Job
from tests.backends.plans import make_job_plan, make_recipe

FOLDER = Path(__file__).parents[1] / "golden" / "jobs"
Cell = tuple[str, str, str, str, dict[str, Any]]  # back end, profile, model, stage with `+` a variant of it, layout
# Settings beside those of `make_recipe`.
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "one-step-off": {"objective": {"off_policy_steps": 1}},
    "tools": {"objective": {"multi_turn": {"tools": "tools.py", "max_turns": 6}, "reward": "rewards.py:score"}},
    "cuda": {"cluster": "8 h100"},
    "4-nodes": {"cluster": "4x8 snt9b"},
    "4-nodes-one-step-off": {"cluster": "4x8 snt9b", "objective": {"off_policy_steps": 1}},
}

CELLS: list[Cell] = [
    *(
        ("llamafactory", "0.9.5", "qwen2.5-7b", stage, {"zero": 3})
        for stage in ("pretrain_full", "sft_full", "sft_lora", "dpo_full", "dpo_lora", "reward_lora")
    ),
    *(
        ("verl", "0.9.1", "qwen3-8b", stage, {"ulysses": 2})
        for stage in ("grpo_full", "grpo_lora", "dapo_full", "dapo_lora", "ppo_full", "ppo_lora")
    ),
    *(("verl", "0.9.1-sglang", "qwen3-8b", f"{stage}+cuda", {}) for stage in ("grpo_full", "grpo_lora", "dapo_full", "ppo_full")),
    *(
        ("verl", "0.9.1", "qwen3-8b", stage, {})
        for stage in ("grpo_full+one-step-off", "grpo_lora+one-step-off", "dapo_full+tools", "grpo_full+4-nodes-one-step-off")
    ),
    ("verl", "0.9.1", "qwen3-8b", "ppo_full+4-nodes", {"tp": 4, "sp": True, "zero": 1}),
    ("verl", "0.9.1", "qwen3-30b-a3b", "grpo_full+tools", {"tp": 2, "sp": True, "ep": 4, "zero": 1}),
    ("verl", "0.9.1", "qwen3-32b", "grpo_full", {"tp": 4, "sp": True, "pp": 2, "zero": 1}),
    *(
        ("mindspeed_llm", profile, "qwen3-8b", stage, {"tp": 2, "sp": True, "pp": 2, "zero": 1})
        for profile in ("2.2.0", "2.3.0", "master")
        for stage in ("pretrain_full", "sft_full", "sft_lora")
    ),
    ("mindspeed_llm", "2.2.0", "mixtral-8x7b", "sft_full", {"tp": 8, "sp": True, "zero": 1}),
    ("mindspeed_llm", "2.2.0", "deepseek-v3", "sft_lora", {"pp": 4, "ep": 2, "zero": 1}),
    ("mindspeed_llm", "2.2.0", "llama-3.1-8b", "sft_full", {"pp": 8, "ring": 1, "zero": 1, "recompute": "full"}),
    *(
        ("mindspeed_rl", "2.2.0", "qwen2.5-7b", stage, {"tp": 2, "sp": True, "pp": 2, "zero": 1})
        for stage in ("grpo_full", "grpo_full+4-nodes")
    ),
    ("mindspeed_rl", "2.2.0-mm", "qwen2.5-vl-3b", "grpo_full", {"zero": 1}),
    ("mindspeed_rl", "2.2.0-mm", "qwen2.5-vl-7b", "grpo_full", {"pp": 2, "zero": 1, "recompute": "full"}),
    *(
        ("mindspeed_mm", profile, model, stage, {"pp": 2, "zero": 1})
        for profile in ("2.2.0", "2.3.0")
        for model in ("qwen2.5-vl-3b", "qwen2.5-vl-7b", "internvl3-8b")
        for stage in ("pretrain_full", "sft_full")
    ),
]


def render(cell: Cell) -> Job:
    """The job of a cell on eight devices a node."""
    backend, profile, model, stage, layout = cell
    stage, _, variant = stage.partition("+")
    recipe = make_recipe(model, backend, stage, profile=profile, **VARIANTS[variant])
    plan = make_job_plan(recipe, layout, recipe.cluster.nodes, device=recipe.cluster.device)
    adapter = BACKENDS[backend]
    assert adapter.refuse(recipe, plan.card, plan.layout) == []
    return adapter.render(plan)


def name_of(cell: Cell) -> str:
    """File name of a cell's golden job."""
    return "_".join((*cell[:4],)) + ".txt"


def text_of(job: Job) -> str:
    """A job as a person reviews it; the programs, which are files of their own, only by name."""
    shown = {name: "(a program)" if name.endswith(".py") else text for name, text in job.files.items()}
    lines = [f"environment {job.environment}, {job.nproc} processes" + (f", {job.restarts} restarts" if job.restarts else "")]
    lines += [f"{name}={value}" for name, value in job.env.items()]
    for step in (*job.before, None, *job.after):
        argv = job.argv if step is None else step.argv
        lines.append(f"\n[{step.name if step else 'train'}]" + (f" {step.environment or 'own'} → {step.output}" if step else ""))
        lines += [json.dumps(step.inputs)] if step else []
        lines += _wrapped(argv)
    for name, text in shown.items():
        lines += [f"\n--- {name}", text.rstrip()]
    return "\n".join(lines) + "\n"


def _wrapped(argv: list[str]) -> list[str]:
    """One flag a line, so that a diff shows it."""
    lines: list[str] = []
    for word in argv:
        if word.startswith("--") or "=" in word or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return lines


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("*.txt"):
        path.unlink()
    for each in CELLS:
        (FOLDER / name_of(each)).write_text(text_of(render(each)), encoding="utf-8")
