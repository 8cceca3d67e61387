"""`ascendfactory submit`: what it says, and wrong inputs in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ascendfactory import cli
from ascendfactory.core.plan import Plan
from tests.cli.test_train import CONFIG

RECIPE = "model: ./m\ndata: d.jsonl\ncluster: 2x8 snt9b\nbatch: 16\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "d.jsonl").write_text("")
    (tmp_path / "r.yaml").write_text(RECIPE)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


def test_a_file_is_written_and_the_command_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["submit", "r.yaml", "--to", "slurm", "--option", "--partition=npu", "--optim.lr=3e-5"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "written: runs/r/job/slurm.sh",
        "hand it over: sbatch runs/r/job/slurm.sh",
        "logs: runs/r/logs",
    ]
    assert "\n#SBATCH --partition=npu\n" in (here / "runs/r/job/slurm.sh").read_text()
    plan = Plan.model_validate_json((here / "runs/r/plan.json").read_text(), strict=False)
    assert (plan.recipe.optim.lr, plan.cluster.nodes, plan.cluster.nproc, plan.cluster.device.name) == (3e-5, 2, 8, "snt9b")


def test_it_is_sent(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "bin").mkdir()
    kubectl = here / "bin" / "kubectl"
    kubectl.write_text('#!/bin/bash\necho "$1 $2 $3"\n')
    kubectl.chmod(0o755)
    words = ["submit", "r.yaml", "--to", "volcano", "--send", "--image", "i", "--volume", f"disk:{here}"]
    assert cli.run(words) == 0
    assert capsys.readouterr().out.splitlines()[1] == "apply -f runs/r/job/volcano.yaml"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "Missing option '--to'; see 'ascendfactory submit --help'"),
        (["--to", "k8s"], "--to: 'k8s' is none of slurm, kubeflow, volcano; did you mean slurm?"),
        (["--to", "slurm", "--sent"], "--sent: no such option; did you mean '--send'?"),
        (
            ["--to", "slurm", "--cluster=auto"],
            "cluster.device: auto is what this machine has, and the nodes are others; write their devices, such as cluster: 8 snt9b",
        ),
        (["--to", "slurm", "--cluster=h100"], "cluster.nproc: say how many devices a node has, such as cluster: 8 h100"),
        (
            ["--to", "slurm", "--send"],
            "sbatch: is not on this machine; the file is runs/r/job/slurm.sh: run 'sbatch runs/r/job/slurm.sh' where it is",
        ),
    ],
)
def test_a_mistake_is_one_line(words: list[str], line: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["submit", "r.yaml", *words]) == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {line}"]
    assert (here / "runs").exists() == ("--send" in words)


def test_messages_are_in_chinese_where_the_locale_is(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert cli.run(["submit", "r.yaml", "--to", "slurm", "--cluster=auto"]) == 2
    assert "auto 指本机的设备" in capsys.readouterr().err
    assert cli.run(["submit", "r.yaml", "--to", "slurm"]) == 0
    assert capsys.readouterr().out.startswith("已写入: runs/r/job/slurm.sh\n提交: sbatch")
    assert "重新启动" in (here / "runs/r/job/slurm.sh").read_text()
