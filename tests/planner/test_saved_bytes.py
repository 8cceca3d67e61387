"""Bytes a layer keeps for backward under every recompute setting: counted on real layers against the planner's formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ascendfactory.catalog.read import find_card
from ascendfactory.core.recipe import Full, Lora, Recompute
from ascendfactory.engine.memory.offload import apply_offload
from ascendfactory.engine.memory.recompute import apply_recompute
from ascendfactory.planner.activations import layer_bytes
from ascendfactory.planner.engines import NATIVE
from tests.engine.decoders import TOKENS, decoder, forward, kept_bytes
from tests.tiny import write_model

pytestmark = pytest.mark.parallel

TUNINGS = {"full": None, "lora": Lora(rank=8), "dropout": Lora(rank=4, dropout=0.1)}
RECOMPUTES: tuple[Recompute, ...] = ("none", "norm", "selective", "full")


def models(root: Path, family: str) -> tuple[str, str]:
    """The same model with 3 and with 4 layers."""
    extra = [{"layer_types": ["sliding_attention"] * n} if family == "gemma3" else {} for n in (3, 4)]
    three, four = (write_model(root / str(n), family, num_hidden_layers=n, **more) for n, more in zip((3, 4), extra, strict=True))
    return three, four


def counted(folder: str, tuning: str, recompute: Recompute, dtype: torch.dtype = torch.float32, num_layers: int = 0) -> int:
    hf, layers = decoder(folder, TUNINGS[tuning], dtype)
    apply_recompute(layers, recompute, num_layers)
    return kept_bytes(hf, lambda: forward(hf))


def predicted(folder: str, tuning: str, recompute: Recompute, element_bytes: int = 4) -> int:
    lora: Any = TUNINGS[tuning]
    return TOKENS * layer_bytes(find_card(folder), lora or Full(), element_bytes, NATIVE, recompute, is_moe=False).total


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4", "gemma3"])
@pytest.mark.parametrize("tuning", TUNINGS)
def test_each_setting_keeps_what_is_predicted(tmp_path: Path, family: str, tuning: str) -> None:
    three, four = models(tmp_path, family)
    for recompute in RECOMPUTES:
        found = counted(four, tuning, recompute) - counted(three, tuning, recompute)
        assert predicted(three, tuning, recompute) == pytest.approx(found, rel=0.03), recompute


@pytest.mark.parametrize("tuning", TUNINGS)
def test_bfloat16_keeps_what_is_predicted(tmp_path: Path, tuning: str) -> None:
    three, four = models(tmp_path, "qwen3")
    for recompute in RECOMPUTES:
        found = counted(four, tuning, recompute, torch.bfloat16) - counted(three, tuning, recompute, torch.bfloat16)
        assert predicted(three, tuning, recompute, 2) == pytest.approx(found, rel=0.03), recompute


def test_the_first_layers_alone(tmp_path: Path) -> None:
    three, _ = models(tmp_path, "llama")
    bytes_of = [counted(three, "full", "full", num_layers=n) for n in (1, 2)]
    saved = predicted(three, "full", "none") - predicted(three, "full", "full")
    assert bytes_of[0] - bytes_of[1] == pytest.approx(saved, rel=0.03)
    assert counted(three, "full", "none") - bytes_of[0] == pytest.approx(saved, rel=0.03)


def test_offloaded_layers_keep_nothing_large(tmp_path: Path) -> None:
    folders = models(tmp_path, "llama")
    found = []
    for folder in folders:
        hf, layers = decoder(folder)
        apply_offload(layers, smallest_bytes=4096)
        found.append(kept_bytes(hf, lambda hf=hf: forward(hf)))
    assert found[1] - found[0] < 0.01 * predicted(folders[0], "full", "none")
