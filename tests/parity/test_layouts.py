"""Every way of splitting a run over processes gives the numbers of one process; the errors found are written to docs/*/layouts.md.

A whole run of the engine (data, loader, model, optimizer) on packed rows of unequal documents, fp32: losses of three steps, global
gradient norms, every gradient by its public name (gathered from whatever holds parts of it), and the weights after three updates.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascendfactory.core.plan import Plan
from tests.pool import Pool
from tests.runs import make_tiny_plan, train_and_look
from tests.tiny import FAMILIES, write_chats, write_model

ROWS = 8
TOLERANCE = 1e-5
FLOOR = 1e-2  # gradients below this share of the largest are compared with it: a key bias has none but rounding


@dataclass(frozen=True)
class Case:
    """A layout to be compared with one process."""

    name: str
    family: str
    layout: dict[str, Any]
    lora: bool = False


def case(name: str, family: str = "qwen3", *, lora: bool = False, quick: bool = False, **layout: Any) -> Any:
    """`quick` cases are a part of the default tests."""
    marks = () if quick else pytest.mark.parallel
    return pytest.param(Case(name, family, layout, lora), id=f"{name}, {family}{', LoRA' * lora}", marks=marks)


SINGLE = [
    *(case("dp 2", family, dp=2) for family in FAMILIES),
    *(case("tp 2, sp", family, tp=2, sp=True) for family in FAMILIES),
    *(case("pp 2", family, pp=2) for family in FAMILIES),
    *(case("ring 2", family, ring=2) for family in FAMILIES),
    *(case("ulysses 2", family, ulysses=2) for family in FAMILIES),
    case("tp 2", tp=2, quick=True),
    case("tp 2, sp, 2 overlap chunks", tp=2, sp=True, overlap_chunks=2),
    case("zero 1", dp=2, zero=1, quick=True),
    case("zero 2", dp=2, zero=2),
    case("hsdp", dp=4, replicate=2),
    case("ring 4", ring=4),
    case("ulysses 4", ulysses=4),
    case("pp 2, gpipe", pp=2, schedule="gpipe", quick=True),
    case("pp 2, vpp 2, interleaved", pp=2, vpp=2, schedule="interleaved"),
    case("pp 2, vpp 2, zero bubble", pp=2, vpp=2, schedule="zero_bubble"),
    case("pp 2, vpp 2, zbv", pp=2, vpp=2, schedule="zbv"),
    case("pp 2, vpp 2, dualpipev", pp=2, vpp=2, schedule="dualpipev"),
    case("pp 2, stages of 3 and 1", pp=2, stage_layers=(3, 1)),
    case("pp 2, vpp 2, an empty chunk", pp=2, vpp=2, schedule="interleaved", stage_layers=(2, 1, 1, 0)),
    *(case(f"recompute {mode}", recompute=mode) for mode in ("norm", "selective", "full")),
    case("recompute full, 2 layers", recompute="full", recompute_layers=2),
    case("activations offloaded", offload_activations=True),
    case("optimizer offloaded", offload_optimizer=True),
    case("tp 2, sp", lora=True, tp=2, sp=True),
    case("pp 2", lora=True, pp=2),
    case("ring 2", lora=True, ring=2),
]
COMPOSED = [
    case("pp 2 x ring 2 x tp 2, sp", quick=True, pp=2, ring=2, tp=2, sp=True),
    case("dp 2 x ring 2 x tp 2, sp", dp=2, ring=2, tp=2, sp=True),
    case("pp 2 x vpp 2 x dp 2 x ulysses 2", pp=2, vpp=2, schedule="interleaved", dp=2, ulysses=2, zero=2),
    case("pp 2 x ulysses 2 x tp 2, sp", "gemma3", pp=2, ulysses=2, tp=2, sp=True),
    case("pp 2 x ring 2 x tp 2, sp, uneven", "gemma3", pp=2, ring=2, tp=2, sp=True, stage_layers=(2, 1)),
    case("dp 2 x pp 2 x tp 2, sp", "glm4", dp=2, pp=2, tp=2, sp=True),
    case("dp 2 x pp 2 x tp 2", "llama", dp=2, pp=2, tp=2, zero=1),
    case("ring 2 x ulysses 2 x tp 2, sp, recompute full", "qwen2", ring=2, ulysses=2, tp=2, sp=True, recompute="full"),
    case("dp 2 x ring 2 x ulysses 2", "gemma3", dp=2, ring=2, ulysses=2),
    case("tp 8 over 4 key/value heads, sp", tp=8, sp=True),
    case("pp 2 x vpp 2 x dp 2 x tp 2, sp, zbv", pp=2, vpp=2, schedule="zbv", dp=2, tp=2, sp=True, zero=1),
    case("pp 4 x dp 2, recompute selective", "llama", pp=4, dp=2, recompute="selective"),
    case("dp 4 (hsdp) x tp 2, sp", dp=4, replicate=2, tp=2, sp=True),
    case("pp 2 x dp 2 x tp 2, sp, recompute norm, offloaded", pp=2, dp=2, tp=2, sp=True, recompute="norm", offload_activations=True),
    case("pp 2 x dp 2 x ring 2, recomputed in advance", pp=2, dp=2, ring=2, zero=2, recompute="full", recompute_in_advance=True),
    case("pp 2 x ring 2 x tp 2, sp", lora=True, pp=2, ring=2, tp=2, sp=True),
    case("dp 2 x ulysses 2 x tp 2, sp", "glm4", lora=True, dp=2, ulysses=2, tp=2, sp=True),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Four layers, so that four chunks have one each; Gemma3 three, with and without a sliding window, tied."""
    folder = tmp_path_factory.mktemp("models")
    return {family: write_model(folder / family, family, **({} if family == "gemma3" else {"num_hidden_layers": 4})) for family in FAMILIES}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", 60)


@pytest.fixture(scope="module")
def singles() -> dict[tuple[str, bool], dict[str, Any]]:
    """What one process gives, by family and tuning."""
    return {}


@pytest.fixture(scope="module")
def errors() -> Any:
    """Collects a row a case; writes the page when it was asked for and the module is done."""
    rows: list[tuple[str, ...]] = []
    yield rows
    if os.environ.get("WRITE_LAYOUTS") == "1":
        for language in ("en", "zh"):
            page = Path(__file__).resolve().parents[2] / "docs" / language / "layouts.md"
            page.write_text(layouts_page(rows, language == "zh"), encoding="utf-8")


def single_plan(the: Case, models: dict[str, str], data: str, folder: Path) -> Plan:
    tuning = {"kind": "lora", "rank": 4} if the.lora else "full"
    return make_tiny_plan(models[the.family], data, str(folder), batch={"global_size": ROWS, "micro_size": 1}, tuning=tuning)


def split_plan(plan: Plan, layout: dict[str, Any], folder: Path) -> Plan:
    """The same run under a layout that is set, not planned."""
    folder.mkdir()
    split = plan.layout.model_copy(update={"num_micro": ROWS // layout.get("dp", 1), **layout})
    return plan.model_copy(update={"layout": split, "run_dir": str(folder)})


def relative(found: float, right: float) -> float:
    return abs(found - right) / abs(right)


def worst_gradient(found: dict[str, Any], right: dict[str, Any]) -> float:
    """Largest relative L2 error of any parameter's gradient."""
    largest = max(float(np.linalg.norm(g)) for g in right.values())
    return max(float(np.linalg.norm(found[name] - g)) / max(float(np.linalg.norm(g)), FLOOR * largest) for name, g in right.items())


def compare(the: Case, single: dict[str, Any], ranks: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Asserts equality; gives the worst relative errors of losses, norms and gradients."""
    first = ranks[0]
    assert sorted(first["gradients"]) == sorted(single["gradients"])
    assert sorted(first["weights"]) == sorted(single["weights"])
    for rank in ranks[1:]:
        assert rank["losses"] == first["losses"] and rank["grad_norms"] == first["grad_norms"]
    loss, norm = (max(map(relative, first[key], single[key])) for key in ("losses", "grad_norms"))
    gradient = worst_gradient(first["gradients"], single["gradients"])
    assert max(loss, norm, gradient) < TOLERANCE, (loss, norm, gradient)
    for name, weight in single["weights"].items():
        np.testing.assert_allclose(first["weights"][name], weight, rtol=1e-3, atol=3e-5, err_msg=name)
    return loss, norm, gradient


@pytest.mark.parametrize("the", [*SINGLE, *COMPOSED])
def test_layout(
    the: Case, models: dict[str, str], data: str, singles: dict[Any, Any], errors: list[tuple[str, ...]], pool: Pool, tmp_path: Path
) -> None:
    plan = single_plan(the, models, data, tmp_path / "one")
    if (the.family, the.lora) not in singles:
        singles[the.family, the.lora] = train_and_look(plan.model_dump_json())
    split = split_plan(plan, the.layout, tmp_path / "many")
    ranks = pool.run(train_and_look, split.layout.num_devices, split.model_dump_json())
    loss, norm, gradient = compare(the, singles[the.family, the.lora], ranks)
    tuning = "LoRA" if the.lora else "full"
    errors.append((the.name, the.family, tuning, str(split.layout.num_devices), f"{loss:.0e}", f"{norm:.0e}", f"{gradient:.0e}"))


ENGLISH = """# Layouts against one process

Written by `make test-parallel`, which runs `tests/parity/test_layouts.py`: whole runs of tiny random models in fp32, packed rows, on gloo
processes of a CPU. Worst relative errors against the same run on one process: losses and gradient norms of three steps, and every
gradient by name (L2 over a parameter). The test fails above 1e-5.

"""
CHINESE = """# 各种布局与单进程的对比

由 `make test-parallel` 运行 `tests/parity/test_layouts.py` 生成：微型随机模型的完整训练，fp32，拼接的行，CPU 上的 gloo 进程。
表中为相对于单进程的最大相对误差：三步的损失与梯度范数，以及按名称逐个比较的梯度（每个参数取 L2）。超过 1e-5 即测试失败。

"""


def layouts_page(rows: list[tuple[str, ...]], zh: bool) -> str:
    english = ("layout", "model", "tuning", "processes", "loss", "norm", "gradient")
    heads = ("布局", "模型", "微调", "进程", "损失", "范数", "梯度") if zh else english
    lines = [heads, ("---",) * len(heads), *rows]
    return (CHINESE if zh else ENGLISH) + "".join("| " + " | ".join(line) + " |\n" for line in lines)
