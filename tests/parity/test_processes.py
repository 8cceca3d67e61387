"""One and two (and four) processes give the same losses, gradients and weights, for every objective, tuning and family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parity.test_independent import assert_same_gradients
from tests.pool import Pool
from tests.runs import make_tiny_plan, train_and_look
from tests.tiny import FAMILIES, write_chats

JOBS: dict[str, dict[str, Any]] = {
    "full": {"objective": "sft", "tuning": "full"},
    "lora": {"objective": "sft", "tuning": {"kind": "lora", "rank": 4, "dropout": 0.0}},
    "pretrain": {"objective": "pretrain", "tuning": "full"},
}


def job_settings(job: str, model: str, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """Data file and recipe sections of a job."""
    settings = dict(JOBS[job])
    if job == "pretrain":
        data = tmp_path / "text.jsonl"
        data.write_text("".join(json.dumps({"text": f"the few words {i} " * (1 + i % 7)}) + "\n" for i in range(40)))
        return str(data), settings | {"model": {"path": model, "init": "random", "dtype": "float32"}}
    return write_chats(tmp_path / "chats.jsonl", 40), settings


def compare(single: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["losses"] == pytest.approx(single["losses"], rel=1e-5)
    assert ranks[0]["grad_norms"] == pytest.approx(single["grad_norms"], rel=1e-5)
    assert_same_gradients(ranks[0]["gradients"], single["gradients"])
    for rank in ranks[1:]:
        assert rank["losses"] == ranks[0]["losses"]
    for name, weight in single["weights"].items():
        np.testing.assert_allclose(ranks[0]["weights"][name], weight, rtol=1e-3, atol=3e-5, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("job", JOBS)
def test_two_processes(family: str, job: str, pool: Pool, tiny_models: dict[str, str], tmp_path: Path) -> None:
    data, settings = job_settings(job, tiny_models[family], tmp_path)
    single = train_and_look(make_tiny_plan(tiny_models[family], data, str(tmp_path / "one"), **settings).model_dump_json())
    plan = make_tiny_plan(tiny_models[family], data, str(tmp_path / "two"), nproc=2, **settings)
    compare(single, pool.run(train_and_look, 2, plan.model_dump_json()))


@pytest.mark.parametrize(
    ("nproc", "layout"),
    [
        (2, {"zero": 1}),
        (2, {"zero": 2}),
        (2, {"zero": 3, "recompute": "full"}),
        (4, {"replicate": 2, "zero": 3}),
        (4, {"replicate": 4, "zero": 2}),
    ],
    ids=["zero1", "zero2", "zero3-recompute", "hsdp", "replicated"],
)
def test_sharding(nproc: int, layout: dict[str, Any], pool: Pool, tiny_models: dict[str, str], tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", 40)
    batch = {"global_size": 8, "micro_size": 1}
    single = train_and_look(make_tiny_plan(tiny_models["qwen3"], data, str(tmp_path / "one"), batch=batch).model_dump_json())
    plan = make_tiny_plan(tiny_models["qwen3"], data, str(tmp_path / "many"), nproc=nproc, batch=batch, layout=layout)
    compare(single, pool.run(train_and_look, nproc, plan.model_dump_json()))


def train_and_export(plan_json: str) -> dict[str, Any]:
    """Trains and exports; returns the live model's logits on a fixed input."""
    from ascendfactory.core.plan import Plan
    from ascendfactory.engine import trainer
    from ascendfactory.engine.build import build

    run = build(Plan.model_validate_json(plan_json))
    trainer.start(run)
    stop = trainer.StopSignal()
    while run.step < run.num_steps:
        trainer.train_step(run, stop)
    trainer.finish(run, stopped=False)
    return {"step": run.step}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("nproc", [1, 2])
def test_exported_folder_is_the_trained_model(family: str, nproc: int, pool: Pool, tiny_models: dict[str, str], tmp_path: Path) -> None:
    """transformers loads the export and its weights are those that training ended with."""
    data = write_chats(tmp_path / "chats.jsonl", 40)
    output = {"dir": str(tmp_path / "run"), "export": True, "dtype": "float32"}
    plan = make_tiny_plan(tiny_models[family], data, str(tmp_path / "run"), nproc=nproc, output=output)
    looked = pool.run(train_and_look, nproc, plan.model_dump_json())[0]
    pool.run(train_and_export, nproc, plan.model_dump_json())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export", dtype=torch.float32)
    for name, parameter in exported.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), looked["weights"][name], err_msg=name)
    original = AutoModelForCausalLM.from_pretrained(tiny_models[family], dtype=torch.float32)
    with torch.no_grad():
        tokens = torch.arange(3, 40)[None]
        trained_logits = exported(input_ids=tokens).logits
        for name, parameter in original.named_parameters():
            parameter.copy_(torch.from_numpy(looked["weights"][name]))
        assert torch.equal(trained_logits, original(input_ids=tokens).logits)
