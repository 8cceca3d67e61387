"""The pages of `models` and `backends`."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from ascendfactory.cli.models import backends, models
from ascendfactory.core.messages import UserError

APP = typer.Typer()
APP.command()(models)
APP.command()(backends)


@pytest.fixture(autouse=True)
def _page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("COLUMNS", "100")


def run(*args: str) -> str:
    result = CliRunner().invoke(APP, list(args))
    if result.exception:
        raise result.exception
    return result.output


def row_of(output: str, first: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.split()[:1] == [first]]
    return line.split()


def test_the_overview_fits_100_columns_and_cuts_nothing() -> None:
    output = run("models")
    assert max(len(line.rstrip()) for line in output.splitlines()) <= 100
    assert "…" not in output
    assert row_of(output, "Qwen3-8B")[1:] == ["8.19B", "36", "40k", "PSL", "PSL", "PSL", "GO", "-", "-"]
    assert row_of(output, "Qwen3-30B-A3B")[1:] == ["30.5B", "3.35B", "48", "40k", "-", "-", "PS", "GA", "G", "-"]
    assert row_of(output, "Qwen2.5-VL-7B")[1:] == ["8.29B", "28", "125k", "-", "PSLD", "-", "GAO", "G", "PS"]


def test_a_card_page() -> None:
    output = run("models", "qwen2-7b")
    assert "7,615,616,512 (7.62B)" in output
    assert row_of(output, "embedding")[1:] == ["544,997,376", "7.2%"]
    assert [line.split() for line in output.splitlines() if line.startswith(" lora")] == [
        ["lora", "4k", "8", "/", "8", "4", "/", "4"],
        ["lora", "8k", "8", "/", "8", "8", "/", "8"],
    ]
    assert "look swapped in the source" in output


def test_json_of_a_card_adds_up() -> None:
    facts = json.loads(run("models", "DeepSeek-V3", "--json"))
    assert sum(facts["weights"].values()) == facts["num_params"] == 671_026_404_352
    assert facts["moe"]["num_experts"] == 256
    assert {row["backend"] for row in facts["min_devices"]} == {"mindspeed_llm"}
    assert len(facts["throughput"]) == 2


def test_json_of_all_models() -> None:
    rows = json.loads(run("models", "--json"))
    assert len(rows) == 40
    assert all({"name", "num_params", "support"} <= set(row) for row in rows)


def test_back_ends() -> None:
    output = run("backends")
    assert row_of(output, "native") == ["native", "embedded", "engine", "✓", "✓", "✓", "-", "25"]
    assert row_of(output, "verl") == ["verl", "VeRL", "-", "-", "-", "✓", "11"]
    assert row_of(run("backends", "MindSpeed-MM"), "InternVL3-8B")[1:] == ["pre-training,", "SFT", "full", "-"]
    assert json.loads(run("backends", "--json"))[0]["backend"] == "native"
    assert len(json.loads(run("backends", "verl", "--json"))["support"]) == 11


def test_an_unknown_back_end_names_the_nearest() -> None:
    with pytest.raises(UserError, match="no back end 'vrel'; did you mean 'verl'"):
        run("backends", "vrel")


def test_chinese_headings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert "预训练" in run("backends")
    assert "模型" in run("models").splitlines()[1]
    assert "最少卡数" in run("models", "Qwen3-8B")


def test_no_page_imports_torch() -> None:
    code = "import sys, ascendfactory.cli.models as m; m.models(None, True); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
