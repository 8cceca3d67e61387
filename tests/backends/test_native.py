"""The embedded engine's jobs: golden, and no setting is lost on the way."""

from __future__ import annotations

import json
import sys
from pathlib import PurePosixPath
from typing import Any, Literal, get_args, get_origin

import pytest

from ascendfactory.backends import BACKENDS
from ascendfactory.core.fields import Node, all_keys, kind_of
from ascendfactory.core.load import load_recipe
from ascendfactory.core.plan import Layout, Mla, Moe, Plan, Vision
from ascendfactory.core.recipe import Recipe
from tests.examples import CARD, device, make

NATIVE = BACKENDS["native"]
RUN_DIR = PurePosixPath("runs") / "a"


def codes(plan: Plan, **card: Any) -> list[str]:
    return [r.code for r in NATIVE.refuse(plan.recipe, plan.card.model_copy(update=card), plan.layout)]


def test_one_process_is_started_directly() -> None:
    plan = make(RUN_DIR)
    job = NATIVE.render(plan)
    assert job.argv == [sys.executable, "-m", "ascendfactory.engine", "runs/a/plan.json"]
    assert job.env == {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    assert (list(job.files), job.nproc) == (["plan.json"], 1)
    assert Plan.model_validate_json(job.files["plan.json"]) == plan


def test_several_processes_run_under_torchrun() -> None:
    job = NATIVE.render(make(RUN_DIR, device=device("snt9b", "npu"), nproc=8))
    assert job.argv == [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"),
        *("--nproc-per-node", "8", "--shutdown-timeout", "10"),
        *("-m", "ascendfactory.engine", "runs/a/plan.json"),
    ]
    assert job.env["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
    assert job.nproc == 8


def test_several_nodes_meet_at_the_first_and_the_launcher_restarts_them() -> None:
    plan = make(RUN_DIR, "--cluster.restarts=2", device=device("snt9b", "npu"), nproc=8)
    job = NATIVE.render(plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"nodes": 2})}))
    assert job.argv[3:11] == [
        *("--nnodes", "{nodes}", "--node-rank", "{node_rank}"),
        *("--master-addr", "{master_addr}", "--master-port", "{master_port}"),
    ]
    assert "--standalone" not in job.argv and "--max-restarts" not in job.argv
    assert job.restarts == 2


@pytest.mark.parametrize("kind", ["dpo", "reward", "grpo", "dapo", "ppo"])
def test_objectives_of_later_releases_are_refused_with_a_fix(kind: str) -> None:
    plan = make(RUN_DIR, f"--objective={kind}")
    (refusal,) = NATIVE.refuse(plan.recipe, plan.card, plan.layout)
    assert (refusal.code, refusal.where, refusal.fix) == ("native.objective", "objective", {"objective": "sft"})
    assert "pretrain and sft work" in refusal.en
    assert kind in refusal.zh


@pytest.mark.parametrize("degree", ["dp", "tp", "pp", "ring", "ulysses"])
def test_every_degree_but_the_experts_is_accepted(degree: str) -> None:
    plan = make(RUN_DIR)
    assert NATIVE.refuse(plan.recipe, plan.card, Layout(**{degree: 2})) == []
    (refusal,) = NATIVE.refuse(plan.recipe, plan.card, Layout(**{degree: 2, "ep": 2}))
    assert (refusal.where, refusal.fix) == ("layout.ep", {"layout.ep": 1})


def test_cards_that_the_engine_lacks_code_for_are_refused() -> None:
    plan = make(RUN_DIR)
    assert codes(plan) == []
    assert codes(plan, moe=Moe(num_experts=4, experts_per_token=2, expert_ffn_size=8)) == ["native.moe"]
    vision = Vision(num_layers=1, hidden_size=8, ffn_size=8, num_heads=1, num_params=9, patch_size=4)
    mla = Mla(q_lora_rank=None, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
    assert codes(plan, vision=vision, mla=mla) == ["native.vision", "native.mla"]


def test_what_cannot_run_together_is_refused() -> None:
    assert codes(make(RUN_DIR, "--tuning=lora", "--tuning.dora=true", nproc=2)) == ["native.dora"]
    assert codes(make(RUN_DIR, "--tuning=lora", "--tuning.dora=true")) == []


def test_steps_are_read_from_their_lines_only() -> None:
    facts = {"step": 1, "num_steps": 2, "loss": 1.5, "lr": 1e-5, "grad_norm": 0.1, "label_tokens": 3, "tokens": 4}
    facts |= {"epoch": 0.5, "step_s": 2.0, "tokens_per_s": 2.0}
    step = NATIVE.read_step("@step " + json.dumps(facts))
    assert step is not None
    assert (step.step, step.loss, step.mfu) == (1, 1.5, None)
    assert NATIVE.read_step("step 1 loss 1.5") is None
    assert NATIVE.read_step("@step {'step': 1") is None


def other_value(node: Node) -> Any:
    """A value of the node's type that is not its default."""
    default = node.field.get_default(call_default_factory=True) if node.field else None
    for choice in node.choices():
        kind = choice.annotation
        if get_origin(kind) is Literal:
            others = [v for v in get_args(kind) if v != default]
            if others:
                return others[0]
        elif kind is bool:
            return not default
        elif kind is int:
            return (default if isinstance(default, int) else 8) + 1
        elif kind is float:
            return default / 2 if isinstance(default, float) and default else 0.25
        elif kind is str:
            return "other"
        elif get_origin(kind) is dict:
            return {"a": "b"}
        elif get_origin(kind) is list and Node(kind).item() == Node(str):
            return ["other"]
    return None


def leaves() -> list[str]:
    return [key for key, node in all_keys().items() if not node.sections() and not (node.item() and node.item().sections())]  # type: ignore[union-attr]


# Words whose default is known to their group only.
SPECIAL: dict[str, Any] = {"objective.kind": "pretrain", "tuning.kind": "lora", "layout.stage_layers": [1, 1]}
SPECIAL |= {"checkpoint.every.unit": "epochs", "output.eval_every.unit": "epochs"}
SPECIAL |= {"objective.reward": "rewards.py:score", "objective.multi_turn.tools": "tools.py"}


def with_setting(key: str) -> Recipe:
    """The example recipe with one leaf changed; its group is switched to the kind that has the leaf."""
    node = all_keys()[key]
    value = SPECIAL.get(key) or (3 if key.endswith(".amount") and "warmup" not in key else other_value(node))
    assert value is not None, key
    path = key.replace("data.train.", "data.train.0.").replace("data.eval.", "data.eval.0.")
    overrides = ["--tuning=lora"] if key.startswith("tuning.") and key not in SPECIAL else []
    overrides += ["--data.eval=e.jsonl"] if key.startswith("data.eval.") else []
    if key.startswith("objective.") and key != "objective.kind":
        kinds = [kind_of(s) for s in all_keys()["objective"].sections() if key.split(".")[1] in s.model_fields]
        overrides += [f"--objective={kinds[0]}", *(["--objective.multi_turn=other.py"] if "multi_turn" in key else [])]
    base = load_recipe("model: m\ndata: d.jsonl", overrides)
    changed = load_recipe("model: m\ndata: d.jsonl", [*overrides, f"--{path}={json.dumps(value)}"])
    assert changed != base, key
    return changed


@pytest.mark.parametrize("key", leaves())
def test_every_setting_of_a_recipe_reaches_the_job_or_is_refused(key: str) -> None:
    plan = make(RUN_DIR)
    changed = plan.model_copy(update={"recipe": with_setting(key)})
    assert NATIVE.refuse(changed.recipe, CARD, changed.layout) or NATIVE.render(changed) != NATIVE.render(plan)


@pytest.mark.parametrize("name", list(Layout.model_fields))
def test_every_degree_of_a_layout_reaches_the_job_or_is_refused(name: str) -> None:
    plan = make(RUN_DIR)
    of_kind = True if Layout.model_fields[name].annotation is bool else 2
    other = {"zero": 1, "recompute": "full", "stage_layers": (2, 1)}.get(name, of_kind)
    changed = plan.model_copy(update={"layout": plan.layout.model_copy(update={name: other})})
    assert NATIVE.refuse(changed.recipe, CARD, changed.layout) or NATIVE.render(changed) != NATIVE.render(plan)
