"""Our loss and every gradient against an independent computation: accumulation, packing, padding, unequal lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.parity.reference import loss_and_gradients, read_chats
from tests.runs import make_tiny_plan, train_and_look
from tests.tiny import FAMILIES, write_chats

SEQ_LEN = 96
NUM_SAMPLES = 12


def whole_set_plan(model: str, data: str, run_dir: Path, /, **settings: Any) -> Any:
    """A plan whose first step holds the whole data set, however its rows are cut: rows beyond the end train nothing."""
    return make_tiny_plan(model, data, str(run_dir), duration="1 epochs", **settings)


def reference(model_folder: str, data: str) -> tuple[float, dict[str, np.ndarray]]:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    samples = read_chats(data, AutoTokenizer.from_pretrained(model_folder), SEQ_LEN)
    loss = loss_and_gradients(model, samples)
    return loss, {name: p.grad.numpy() for name, p in model.named_parameters()}


def assert_same_gradients(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    assert set(ours) == set(theirs)
    largest = max(float(np.linalg.norm(g)) for g in theirs.values())
    for name, expected in theirs.items():
        # a bias on k has a gradient of (mathematically) zero: its rounding is held against the largest gradient
        limit = tolerance * max(float(np.linalg.norm(expected)), 0.01 * largest)
        assert float(np.linalg.norm(ours[name] - expected)) <= limit, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packing", ["packed", "dynamic", "fixed"])
def test_loss_and_gradients(family: str, packing: str, tiny_models: dict[str, str], tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", NUM_SAMPLES)
    loss, gradients = reference(tiny_models[family], data)
    plan = whole_set_plan(
        tiny_models[family],
        data,
        tmp_path / "run",
        data={"packing": packing, "seq_len": SEQ_LEN},
        batch={"global_size": NUM_SAMPLES, "micro_size": 3},
    )
    ours = train_and_look(plan.model_dump_json())
    assert len(ours["losses"]) == 1
    assert ours["losses"][0] == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(ours["gradients"], gradients)
    norm = np.sqrt(sum(float(np.square(g.astype(np.float64)).sum()) for g in gradients.values()))
    assert ours["grad_norms"][0] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
@pytest.mark.parametrize("packing", ["packed", "dynamic"])
def test_accumulation(micro_batches: int, packing: str, tiny_models: dict[str, str], tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", 16)
    loss, gradients = reference(tiny_models["qwen3"], data)
    plan = whole_set_plan(
        tiny_models["qwen3"],
        data,
        tmp_path / "run",
        data={"packing": packing, "seq_len": SEQ_LEN},
        batch={"global_size": 16, "micro_size": 16 // micro_batches},
    )
    assert plan.layout.num_micro == micro_batches
    ours = train_and_look(plan.model_dump_json())
    assert ours["losses"][0] == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(ours["gradients"], gradients)


def test_recompute_changes_nothing(tiny_models: dict[str, str], tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", 16)
    results = [
        train_and_look(make_tiny_plan(tiny_models["llama"], data, str(tmp_path / mode), layout={"recompute": mode}).model_dump_json())
        for mode in ("none", "full")
    ]
    assert results[0]["losses"] == results[1]["losses"]
    for name, weight in results[0]["weights"].items():
        np.testing.assert_array_equal(weight, results[1]["weights"][name])


def test_updates_equal_torch_adamw(tiny_models: dict[str, str], tmp_path: Path) -> None:
    """Three steps over the whole set: our clipping, schedule and decay against torch.optim.AdamW written out."""
    data = write_chats(tmp_path / "chats.jsonl", NUM_SAMPLES)
    folder = tiny_models["llama"]
    optim = {"lr": 1e-3, "schedule": "linear", "warmup": 0.0, "weight_decay": 0.1, "max_grad_norm": 0.5, "beta2": 0.95}
    plan = make_tiny_plan(
        folder,
        data,
        str(tmp_path / "run"),
        data={"packing": False, "seq_len": SEQ_LEN, "shuffle": False},
        batch={"global_size": NUM_SAMPLES, "micro_size": 4},
        duration="3 steps",
        optim=optim,
    )
    ours = train_and_look(plan.model_dump_json())

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    samples = read_chats(data, AutoTokenizer.from_pretrained(folder), SEQ_LEN)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    for step in range(3):
        loss = loss_and_gradients(model, samples)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = 1e-3 * (1 - step / 3)
        adamw.step()
        adamw.zero_grad()
        assert ours["losses"][step] == pytest.approx(loss, rel=1e-5)
        assert ours["grad_norms"][step] == pytest.approx(float(norm), rel=2e-5)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(ours["weights"][name], parameter.detach().numpy(), rtol=1e-3, atol=2e-5, err_msg=name)
