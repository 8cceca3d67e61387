"""Eight wrong inputs, each through the real command: one clear line, exit code 2, no traceback, nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny import write_chats


def good_recipe(model: str, data: str, run_dir: Path) -> dict[str, Any]:
    return {
        "model": model,
        "data": {"train": data, "seq_len": 64, "cache_dir": str(run_dir.parent / "cache"), "workers": 1},
        "duration": "1 steps",
        "cluster": "1 cpu",
        "output": {"dir": str(run_dir), "export": False},
    }


def command(recipe: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    argv = [sys.executable, "-c", "from ascendfactory.cli import main; main()", "train", str(path)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=170, check=False)


def lines_of(path: Path, records: list[Any]) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return str(path)


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def missing_model(recipe: dict[str, Any], tmp: Path) -> str:
    recipe["model"] = str(tmp / "no-such-folder")
    return "model.path: no such folder"


def missing_data(recipe: dict[str, Any], tmp: Path) -> str:
    recipe["data"]["train"] = str(tmp / "chat.jsonl")
    return "chats.jsonl"  # the nearest file that is there


def bad_json_line(recipe: dict[str, Any], tmp: Path) -> str:
    recipe["data"]["train"] = lines_of(tmp / "bad.jsonl", [CHAT, CHAT, '{"messages": [', CHAT])
    return "bad.jsonl:3"


def missing_field(recipe: dict[str, Any], tmp: Path) -> str:
    recipe["data"]["train"] = lines_of(tmp / "field.jsonl", [CHAT, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}])
    return "field.jsonl:2"


def unknown_key(recipe: dict[str, Any], tmp: Path) -> str:
    recipe["data"]["seq_lenn"] = 64
    return "data.seq_lenn: unknown key; did you mean 'seq_len'?"


def wrong_template(recipe: dict[str, Any], tmp: Path) -> str:
    (tmp / "broken.jinja").write_text("{% for m in messages %}{{ m.content }}")
    recipe["data"]["chat_template"] = str(tmp / "broken.jinja")
    return "broken.jinja:1"


def too_short(recipe: dict[str, Any], tmp: Path) -> str:
    recipe["data"]["seq_len"] = 8  # shorter than the first question
    recipe["data"]["train"] = lines_of(
        tmp / "long.jsonl", [{"messages": [{"role": "user", "content": "a question " * 9}, CHAT["messages"][1]]}]
    )
    return "seq_len"


CASES = (missing_model, missing_data, bad_json_line, missing_field, unknown_key, wrong_template, too_short)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_wrong_input(case: Any, tiny_models: dict[str, str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    recipe = good_recipe(tiny_models["llama"], write_chats(tmp_path / "chats.jsonl", 10), run_dir)
    expected = case(recipe, tmp_path)
    done = command(recipe, tmp_path)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert not run_dir.exists()


def test_incompatible_checkpoint(tiny_models: dict[str, str], tmp_path: Path) -> None:
    """A finished full run is not touched by a LoRA recipe that points at its folder."""
    run_dir = tmp_path / "run"
    recipe = good_recipe(tiny_models["llama"], write_chats(tmp_path / "chats.jsonl", 10), run_dir)
    assert command(recipe, tmp_path).returncode == 0
    before = {p: p.stat().st_mtime_ns for p in run_dir.rglob("*") if p.is_file()}
    done = command(recipe | {"tuning": "lora"}, tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "tuning" in done.stderr
    assert {p: p.stat().st_mtime_ns for p in run_dir.rglob("*") if p.is_file()} == before
