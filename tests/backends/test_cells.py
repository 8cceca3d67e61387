"""Every cell that the user guide's tables tick becomes a job, on both Ascend devices; and what holds those jobs against real parsers."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ascendfactory.backends import BACKENDS

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import check_jobs  # noqa: E402
import job_cells  # noqa: E402

# Cells that the guide's newest tables tick: stage x tuning x tested length x device.
NUM_CELLS = {"llamafactory": 326, "mindspeed_llm": 302, "mindspeed_mm": 20, "mindspeed_rl": 14, "verl": 100}


@pytest.mark.parallel
@pytest.mark.parametrize("backend", NUM_CELLS)
def test_every_ticked_cell_becomes_a_job_of_every_version_that_has_the_model(backend: str) -> None:
    module = sys.modules[type(BACKENDS[backend]).__module__]
    lines = [job_cells.line_of(*cell) for cell in job_cells.cells(backend, module.PROFILES)]
    assert [line for line in lines if "refused" in line] == []
    assert len({json.dumps(line["cell"] | {"profile": ""}, sort_keys=True) for line in lines}) == NUM_CELLS[backend]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_tells_of_every_cell_that_there_is_now(language: str) -> None:
    expected: Counter[tuple[str, str]] = Counter()
    for backend in NUM_CELLS:
        module = sys.modules[type(BACKENDS[backend]).__module__]
        expected.update((cell.backend, cell.profile) for cell, _, _ in job_cells.cells(backend, module.PROFILES))
    page = (TOOLS.parent / "docs" / language / "accepted-jobs.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (\S+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert {(backend, profile): int(number) for backend, profile, number, *_ in rows} == dict(expected)
    assert all(number == accepted for _, _, number, accepted, _, _ in rows)


def line(number: int, **more: Any) -> dict[str, Any]:
    return {"cell": {"model": f"m{number}"}, "job": number} | more


def judge(line: dict[str, Any], sources: dict[str, Path], folder: Path) -> None:
    """A framework that takes job 1, ends on 2, objects to 3 and crashes on 4."""
    assert folder.is_dir() and sources == {"S": Path("/src")}
    match line["job"]:
        case 2:
            sys.exit(2)
        case 3:
            raise ValueError("tp 3\ndoes not divide 8")
        case 4:
            os._exit(7)


def test_verdicts() -> None:
    parser = SimpleNamespace(check=judge)
    found = [check_jobs.verdict(parser, line(number), {"S": Path("/src")}) for number in (1, 2, 3, 4)]
    found.append(check_jobs.verdict(parser, line(5, refused="model.path: no"), {}))
    assert [(row["verdict"], row.get("why")) for row in found] == [
        ("accepted", None),
        ("rejected", "its parser ended with status 2"),
        ("rejected", "ValueError: tp 3 does not divide 8"),
        ("rejected", "the process ended without an answer"),
        ("refused", "model.path: no"),
    ]


def test_a_rejected_job_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = tmp_path / "jobs.jsonl"
    parser = SimpleNamespace(prepare=lambda sources: None, check=judge)
    monkeypatch.setattr(check_jobs.importlib, "import_module", lambda name: parser)
    for numbers, code, said in (((1, 1), 0, "2 accepted\n"), ((1, 3), 1, "1 accepted, 1 rejected\n")):
        jobs.write_text("".join(json.dumps(line(number)) + "\n" for number in numbers))
        monkeypatch.setattr(sys, "argv", ["check_jobs.py", "verl", str(jobs), "--source", "S=/src"])
        assert check_jobs.main() == code
        assert capsys.readouterr().err == said
