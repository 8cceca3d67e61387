"""The dry run against exact counts: bytes of weights, gradients, moments, and what FSDP must communicate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from ascendfactory.core.plan import Plan
from tests.runs import make_tiny_plan
from tests.tiny import write_chats


def run_simulation(plan_json: str) -> dict[str, Any]:
    from ascendfactory.engine.simulate import simulate

    found = simulate(Plan.model_validate_json(plan_json))
    return {"peak": found.peak_bytes, "communicated": found.communicated_bytes, "total": found.total_bytes}


def simulated(pool: Any, model: str, tmp_path: Path, nproc: int, **settings: Any) -> dict[str, Any]:
    data = write_chats(tmp_path / "chats.jsonl", 4)
    plan = make_tiny_plan(model, data, str(tmp_path / "run"), nproc=nproc, batch={"global_size": 16, "micro_size": 1}, **settings)
    result: dict[str, Any] = pool.run(run_simulation, 1, plan.model_dump_json())[0]
    return result


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_one_process_holds_everything(family: str, pool: Any, tiny_models: dict[str, str], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_models[family])
    num_params = sum(p.numel() for p in model.parameters())
    found = simulated(pool, tiny_models[family], tmp_path, 1)
    assert found["peak"]["weights"] == 4 * num_params
    assert found["peak"]["moments"] == 8 * num_params + 4 * len(list(model.parameters()))  # AdamW counts each tensor's updates
    assert found["peak"]["gradients"] == 4 * num_params
    assert found["communicated"] == {}
    assert found["total"] == sum(found["peak"].values())


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_communicated_bytes(zero: int, pool: Any, tiny_models: dict[str, str], tmp_path: Path) -> None:
    """Two micro-batches on 8 devices.

    ZeRO-3 gathers each layer for forward and again for backward; ZeRO-2, and the embedding and head always, once a
    micro-batch; ZeRO-1 once a step. Gradients are scattered once a micro-batch, under ZeRO-1 once a step.
    """
    model = AutoModelForCausalLM.from_pretrained(tiny_models["llama"])
    layers = 4 * sum(p.numel() for p in model.model.layers.parameters())
    rest = 4 * sum(p.numel() for p in model.parameters()) - layers
    found = simulated(pool, tiny_models["llama"], tmp_path, 8, layout={"zero": zero})["communicated"]
    gathered = {1: layers + rest, 2: 2 * (layers + rest), 3: 2 * (2 * layers + rest)}[zero]
    assert found["all_gather"] == pytest.approx(gathered, rel=0.01)
    assert found["reduce_scatter"] == pytest.approx((layers + rest) / 8 * (1 if zero == 1 else 2), rel=0.01)


def test_lora_trains_little(pool: Any, tiny_models: dict[str, str], tmp_path: Path) -> None:
    full = simulated(pool, tiny_models["llama"], tmp_path, 8)["peak"]
    lora = simulated(pool, tiny_models["llama"], tmp_path, 8, tuning={"kind": "lora", "rank": 4})["peak"]
    assert lora["moments"] < 0.2 * full["moments"]
