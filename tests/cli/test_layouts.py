"""Parallel layouts as a person writes them: one command, wrong degrees told in one line, a run resumed under another layout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ascendfactory import cli
from tests.tiny import write_chats

RECIPE = """
name: r
model: {{path: {model}, dtype: float32}}
data: {{train: {data}, seq_len: 64, cache_dir: {cache}, workers: 1}}
batch: {{global_size: 8, micro_size: 1}}
duration: 6 steps
optim: {{lr: 1e-3, schedule: constant, warmup: 0.0}}
cluster: {{device: cpu}}
checkpoint: {{every: 100 steps}}
output: {{export: false}}
seed: 5
"""


@pytest.fixture
def recipe(tiny_models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe of six steps of a model of three layers, eight heads and four key/value heads, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    data = write_chats(tmp_path / "chats.jsonl", 60)
    text = RECIPE.format(model=tiny_models["llama"], data=data, cache=tmp_path / "cache")
    (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
    return "r.yaml"


def command(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", "from ascendfactory.cli import main; main()", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)


def losses_of(run: Path) -> dict[int, float]:
    return {step["step"]: step["loss"] for line in (run / "metrics.jsonl").read_text().splitlines() for step in [json.loads(line)]}


@pytest.mark.parallel
def test_a_run_goes_on_under_another_layout_with_the_loss_curve_of_one_process(recipe: str, tmp_path: Path) -> None:
    """Three steps over tensor and pipeline parallelism, three more over data and ring: the curve of six steps alone."""
    alone = command("train", recipe, "--output.dir=alone", "--cluster.nproc=1")
    assert alone.returncode == 0, alone.stderr
    first = command("train", recipe, "--cluster.nproc=4", "--layout.tp=2", "--layout.pp=2", "--duration=3 steps")
    assert first.returncode == 0, first.stderr
    second = command("train", recipe, "--cluster.nproc=4", "--layout.dp=2", "--layout.ring=2")
    assert second.returncode == 0, second.stderr
    assert re.search(r"resumed at step 3 from \S*step-00000003", second.stdout)
    assert [line.split()[0] for line in second.stdout.splitlines() if "loss" in line] == ["4/6", "5/6", "6/6"]
    assert first.stderr == second.stderr == ""
    assert losses_of(tmp_path / "runs" / "r") == pytest.approx(losses_of(tmp_path / "alone"), rel=1e-5)


FOUR_CHUNKS = ["--cluster.nproc=2", "--layout.pp=2", "--layout.vpp=2", "--layout.stage_layers=[1,1,1,0]"]
WRONG = [
    (["--cluster.nproc=4", "--layout.tp=3"], "layout.tp: tp 3 does not divide 8 attention heads; write tp: 2, dp: auto", "注意力头数 8"),
    (
        ["--cluster.nproc=2", "--layout.ring=2", "--data.seq_len=61"],
        "data.seq_len: rows are cut into 4 parts (2 x ring, ulysses, tp under sp), and 61 is no multiple; write 60",
        "请写 60",
    ),
    (
        ["--cluster.nproc=3", "--layout.ulysses=3"],
        "layout.ulysses: Ulysses shares the 8 heads: tp x ulysses = 3 must divide them; write ulysses: 2, dp: auto",
        "按头切分",
    ),
    (["--cluster.nproc=5", "--layout.pp=5"], "layout.pp: 5 stages x 1 chunks need at least as many layers, and ", "至少需要同样多的层"),
    (
        ["--cluster.nproc=2", "--layout.pp=2", "--layout.stage_layers=[1,1]"],
        "layout.stage_layers: stage_layers has 2 numbers that add up to 2; pp 2 x vpp 1 wants 2 that add up to 3",
        "总和 3",
    ),
    (
        ["--cluster.nproc=2", "--layout.pp=2", "--layout.schedule=interleaved"],
        "layout.schedule: schedule interleaved does not go with vpp 1",
        "与 vpp 1 不符",
    ),
    (
        [*FOUR_CHUNKS, "--layout.schedule=zero_bubble", "--batch.global_size=5"],
        "batch.global_size: the zero_bubble schedule needs micro-batches in multiples of pp 2, not 5",
        "微批数为 pp 2 的倍数",
    ),
    (
        [*FOUR_CHUNKS, "--layout.schedule=dualpipev", "--batch.global_size=2"],
        "layout.schedule: dualpipev needs as many micro-batches as chunks, 4, and there are 2; write schedule: zbv",
        "微批数不少于分块数 4",
    ),
    (["--cluster.nproc=2", "--layout.vpp=2", "--layout.pp=1"], "layout.vpp: vpp 2 cuts the stages of a pipeline, and pp is 1", "vpp: 1"),
    (["--cluster.nproc=2", "--layout.pp=2", "--layout.schedule=gpipee"], "did you mean 'gpipe'?", "是否想写 'gpipe'？"),
]


@pytest.mark.parametrize(("settings", "english", "chinese"), WRONG, ids=lambda value: value[-1] if isinstance(value, list) else None)
def test_a_wrong_degree_is_one_clear_line(
    settings: list[str], english: str, chinese: str, recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train", recipe, *settings]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert english in line
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert cli.run(["train", recipe, *settings]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert chinese in line
    assert not Path("runs").exists()
