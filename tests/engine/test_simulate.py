"""The dry run against exact counts: bytes of weights, gradients, moments, and what FSDP must communicate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from ascendfactory.core.plan import Plan
from ascendfactory.planner.memory import HEAD_CHUNK_BYTES
from tests.runs import make_tiny_plan
from tests.tiny import write_chats

pytestmark = pytest.mark.parallel


def run_simulation(plan_json: str) -> dict[str, Any]:
    from ascendfactory.engine.simulate import simulate

    found = simulate(Plan.model_validate_json(plan_json))
    return {"peak": found.peak_bytes, "communicated": found.communicated_bytes, "total": found.total_bytes}


def simulated(pool: Any, model: str, tmp_path: Path, nproc: int, **settings: Any) -> dict[str, Any]:
    return simulated_with_plan(pool, model, tmp_path, nproc, **settings)[0]


def simulated_with_plan(pool: Any, model: str, tmp_path: Path, nproc: int, **settings: Any) -> tuple[dict[str, Any], Plan]:
    data = write_chats(tmp_path / "chats.jsonl", 4)
    settings = {"batch": {"global_size": 16, "micro_size": 1}, **settings}
    plan = make_tiny_plan(model, data, str(tmp_path / "run"), nproc=nproc, **settings)
    return pool.run(run_simulation, 1, plan.model_dump_json())[0], plan


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_one_process_holds_everything(family: str, pool: Any, tiny_models: dict[str, str], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_models[family])
    num_params = sum(p.numel() for p in model.parameters())
    found = simulated(pool, tiny_models[family], tmp_path, 1)
    assert found["peak"]["weights"] == 4 * num_params
    assert found["peak"]["moments"] == 8 * num_params
    assert found["peak"]["gradients"] == 4 * num_params
    assert found["communicated"] == {}
    assert found["total"] == sum(found["peak"].values())


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_communicated_bytes(zero: int, pool: Any, tiny_models: dict[str, str], tmp_path: Path) -> None:
    """Two micro-batches on 8 devices.

    ZeRO-3 gathers each layer for forward and again for backward, and embedding and head once a micro-batch; the others all of it once a
    step. Gradients are scattered once a micro-batch, under ZeRO-1 once a step.
    """
    model = AutoModelForCausalLM.from_pretrained(tiny_models["llama"])
    layers = 4 * sum(p.numel() for p in model.model.layers.parameters())
    rest = 4 * sum(p.numel() for p in model.parameters()) - layers
    found = simulated(pool, tiny_models["llama"], tmp_path, 8, layout={"zero": zero})["communicated"]
    gathered = {1: layers + rest, 2: layers + rest, 3: 2 * (2 * layers + rest)}[zero]
    assert found["all_gather dp"] == pytest.approx(gathered, rel=0.01)
    assert found["reduce_scatter dp"] == pytest.approx((layers + rest) / 8 * (1 if zero == 1 else 2), rel=0.01)


def test_lora_trains_little(pool: Any, tiny_models: dict[str, str], tmp_path: Path) -> None:
    full = simulated(pool, tiny_models["llama"], tmp_path, 8)["peak"]
    lora = simulated(pool, tiny_models["llama"], tmp_path, 8, tuning={"kind": "lora", "rank": 4})["peak"]
    assert lora["moments"] < 0.2 * full["moments"]


NUM_LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 8, 4, 8
STREAM = 64 * 64 * 4  # of a micro-batch of one row: positions x hidden size, fp32


@pytest.mark.parametrize(("recompute", "gathers", "scatters"), [("none", 3, 2), ("full", 3, 2.5), ("selective", 4, 2.5)])
def test_bytes_of_sequence_parallelism(
    recompute: str, gathers: int, scatters: float, pool: Any, tiny_models: dict[str, str], tmp_path: Path
) -> None:
    """Two blocks a layer. Each gathers its input, in backward the gradient of its output and its input once more (whole layers that run
    again keep what they gather), and scatters its output and the gradient of its input. What is recomputed sends again, but for a
    layer's last scatter, which nothing waits for. Embedding and head gather and scatter once each. The output of a scatter is half of
    what two devices sum.
    """
    layout = {"tp": 2, "sp": True, "recompute": recompute, "recompute_layers": "all"}
    found = simulated(pool, tiny_models["llama"], tmp_path, 16, layout=layout)["communicated"]
    blocks, micro_batches = 2 * NUM_LAYERS, 2
    loss = 2 * 2 * 64 * 4  # two numbers a position of each device
    assert found["all_gather tp"] == micro_batches * (STREAM * (gathers * blocks + 2) + loss)
    assert found["reduce_scatter tp"] == micro_batches * STREAM // 2 * (scatters * blocks + 2)


def test_bytes_of_context_parallelism(pool: Any, tiny_models: dict[str, str], tmp_path: Path) -> None:
    """Ulysses: queries, keys, values and outputs of half the tokens, there and in backward. Ring: the one document is cut in four, so that
    device 0 has its first and last quarter: in forward it needs the second and third, and so it does in backward; the gradients of
    its own first quarter, which the other device used, come home."""
    q_size, kv_size = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    found = simulated(pool, tiny_models["llama"], tmp_path, 16, layout={"ulysses": 2})["communicated"]
    assert found["all_to_all ulysses"] == 2 * NUM_LAYERS * 2 * 32 * (2 * q_size + 2 * kv_size) * 4
    found = simulated(pool, tiny_models["llama"], tmp_path, 16, layout={"ring": 2})["communicated"]
    assert found["recv ring"] == 2 * NUM_LAYERS * 2 * kv_size * 4 * (32 + 32 + 16)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_fullest_stage_of_a_pipeline(schedule: str, pool: Any, tiny_models: dict[str, str], tmp_path: Path) -> None:
    """Its weights and moments as planned; a hidden state of each micro-batch comes, or its gradient. Under gpipe it keeps what all
    micro-batches leave, the gradients of the head among them."""
    settings: dict[str, Any] = {"layout": {"pp": 2, "schedule": schedule, "zero": 1}, "batch": {"global_size": 8, "micro_size": 1}}
    found, plan = simulated_with_plan(pool, tiny_models["llama"], tmp_path, 2, **settings)
    planned = {term.name: term.num_bytes for term in plan.memory}
    assert (found["peak"]["weights"], found["peak"]["moments"]) == (planned["weights"], planned["moments"])
    assert found["peak"]["gradients"] <= planned["gradients"]
    assert found["communicated"]["recv pp"] == 8 * STREAM
    chunks = 2 * 64 * 320 * 4  # of logits; the planner reserves more
    heads = planned["logits"] - 2 * HEAD_CHUNK_BYTES if "logits" in planned else 0
    assert found["peak"]["activations"] == pytest.approx(planned["activations"] + heads + chunks / 2, rel=0.15)
