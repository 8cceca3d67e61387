"""Weights that are the upper half of their fp32 masters train as bf16 weights beside masters do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ascendfactory.core.messages import UserError
from tests.runs import make_tiny_plan, train_and_look
from tests.tiny import write_chats

BF16 = {"dtype": "bfloat16"}


def test_a_run_is_that_of_bf16_weights_with_fp32_masters(tiny_models: dict[str, str], tmp_path: Path) -> None:
    """FSDP's form keeps fp32 gradient sums; here gradients are bf16, so the runs agree to bf16's precision."""
    data = write_chats(tmp_path / "chats.jsonl", 40)
    found = {}
    for reuse in (False, True):
        plan = make_tiny_plan(tiny_models["qwen3"], data, str(tmp_path / str(reuse)), model=BF16, batch={"micro_size": 8})
        plan = plan.model_copy(update={"layout": plan.layout.model_copy(update={"reuse_params": reuse})})
        found[reuse] = train_and_look(plan.model_dump_json())
    assert found[True]["losses"] == pytest.approx(found[False]["losses"], rel=2e-3)
    assert found[True]["grad_norms"] == pytest.approx(found[False]["grad_norms"], rel=3e-2)
    for name, weight in found[False]["weights"].items():
        error = np.linalg.norm(found[True]["weights"][name].astype(np.float32) - weight) / np.linalg.norm(weight)
        assert error < 2e-2, (name, error)


def test_float32_has_nothing_to_share(tiny_models: dict[str, str], tmp_path: Path) -> None:
    plan = make_tiny_plan(tiny_models["qwen3"], write_chats(tmp_path / "chats.jsonl", 40), str(tmp_path / "run"))
    plan = plan.model_copy(update={"layout": plan.layout.model_copy(update={"reuse_params": True})})
    with pytest.raises(UserError, match=r"reuse_params.*model.dtype: bfloat16"):
        train_and_look(plan.model_dump_json())
