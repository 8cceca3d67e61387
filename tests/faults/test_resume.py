"""N + M steps equal N, stop, M to the bit; kills in the middle of a save and damaged checkpoints lose nothing."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Plan
from tests.pool import Pool
from tests.runs import make_tiny_plan
from tests.tiny import write_chats

TUNINGS: dict[str, Any] = {"full": "full", "lora": {"kind": "lora", "rank": 4, "dropout": 0.1}}


def run_until(plan_json: str, last_step: int) -> list[float]:
    """Trains up to a step, saves there, and stops as a SIGTERM would; returns the losses."""
    from ascendfactory.engine import trainer
    from ascendfactory.engine.build import build

    run = build(Plan.model_validate_json(plan_json))
    trainer.start(run)
    stop = trainer.StopSignal()
    losses = []
    while run.step < last_step:
        losses.append(trainer.train_step(run, stop).loss)
    trainer.save(run)
    trainer.finish(run, stopped=run.step < run.num_steps)
    return losses


def newest_state(run_dir: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and trainer.json of the newest checkpoint, read by torch alone."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = max((run_dir / "checkpoints").glob("step-*"))
    file = run_dir / "whole.pt"
    dcp_to_torch_save(folder, file)
    return torch.load(file), json.loads((folder / "trainer.json").read_text())


def assert_same_state(one: Path, other: Path) -> None:
    (tensors, trainer), (others, other_trainer) = newest_state(one), newest_state(other)
    assert trainer == other_trainer
    assert set(tensors) == set(others)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


def plan_for(model: str, data: str, run_dir: Path, nproc: int = 1, /, **settings: Any) -> str:
    settings = {"duration": "6 steps", "batch": {"global_size": 4, "micro_size": 1}} | settings
    return make_tiny_plan(model, data, str(run_dir), nproc=nproc, **settings).model_dump_json()


def slow_unless(streaming: bool, tuning: str, nproc: int) -> tuple[pytest.MarkDecorator, ...]:
    """Streams take four times as long; one of them stays with the default tests."""
    return (pytest.mark.parallel,) if streaming and (tuning, nproc) != ("full", 1) else ()


@pytest.mark.parametrize(
    ("streaming", "tuning", "nproc"),
    [
        pytest.param(
            streaming, tuning, nproc, id=f"{'stream' if streaming else 'map'}-{tuning}-{nproc}", marks=slow_unless(streaming, tuning, nproc)
        )
        for streaming in (False, True)
        for tuning in TUNINGS
        for nproc in (1, 2)
    ],
)
def test_stop_and_go_on(streaming: bool, tuning: str, nproc: int, pool: Pool, tiny_models: dict[str, str], tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", 50)
    settings = {"tuning": TUNINGS[tuning], "data": {"streaming": streaming}}
    whole = plan_for(tiny_models["qwen3"], data, tmp_path / "whole", nproc, **settings)
    parts = plan_for(tiny_models["qwen3"], data, tmp_path / "parts", nproc, **settings)
    losses = pool.run(run_until, nproc, whole, 6)[0]
    first = pool.run(run_until, nproc, parts, 4)[0]
    second = pool.run(run_until, nproc, parts, 6)[0]
    assert first + second == losses
    assert_same_state(tmp_path / "whole", tmp_path / "parts")


def test_fewer_processes_go_on(pool: Pool, tiny_models: dict[str, str], tmp_path: Path) -> None:
    """A checkpoint of two processes is taken up by one: the same samples, the same losses up to rounding."""
    data = write_chats(tmp_path / "chats.jsonl", 50)
    losses = pool.run(run_until, 1, plan_for(tiny_models["llama"], data, tmp_path / "whole"), 6)[0]
    first = pool.run(run_until, 2, plan_for(tiny_models["llama"], data, tmp_path / "parts", 2), 3)[0]
    second = pool.run(run_until, 1, plan_for(tiny_models["llama"], data, tmp_path / "parts", 1), 6)[0]
    assert first + second == pytest.approx(losses, rel=1e-5)


def start_engine(plan_json: str, run_dir: Path, module: str = "ascendfactory.engine") -> subprocess.Popen[str]:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "plan.json").write_text(plan_json)
    argv = [sys.executable, "-m", module, str(run_dir / "plan.json")]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_kill_in_the_middle_of_a_save(tiny_models: dict[str, str], tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", 50)
    plan = plan_for(tiny_models["llama"], data, tmp_path / "killed", checkpoint={"every": "4 steps"})
    run_until(plan, 2)
    process = start_engine(plan, tmp_path / "killed", "tests.faults.slow_save")
    checkpoints = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 120
    while not (checkpoints / "in-the-middle").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [p.name for p in checkpoints.glob(".writing-*")] == [".writing-step-00000004"]
    assert [p.name for p in checkpoints.glob("step-*")] == ["step-00000002"]

    run_until(plan, 6)
    run_until(plan_for(tiny_models["llama"], data, tmp_path / "whole"), 6)
    assert not list(checkpoints.glob(".writing-*"))
    assert_same_state(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_exits_cleanly(signal_number: int, tiny_models: dict[str, str], tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", 50)
    run_dir = tmp_path / "run"
    plan = plan_for(tiny_models["llama"], data, run_dir, duration="100000 steps")
    process = start_engine(plan, run_dir)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("@step"):
            process.send_signal(signal_number)
            break
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "stopped" in rest
    (saved,) = (run_dir / "checkpoints").glob("step-*")
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert saved.name == f"step-{last['step']:08d}"


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_flipped_bit_is_named_and_the_one_before_is_used(
    tiny_models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_chats(tmp_path / "chats.jsonl", 50)
    plan = plan_for(tiny_models["llama"], data, tmp_path / "run", checkpoint={"every": "2 steps", "keep": 3})
    for step in (2, 4):
        run_until(plan, step)
    damaged = tmp_path / "run" / "checkpoints" / "step-00000004" / "__0_0.distcp"
    flip_bit(damaged)
    capsys.readouterr()
    run_until(plan, 6)
    events = [json.loads(line.removeprefix("@event ")) for line in capsys.readouterr().out.splitlines() if line.startswith("@event")]
    assert any(event["kind"] == "damaged" and str(damaged) in event["text_en"] for event in events)
    assert any(event["kind"] == "resumed" and "step-00000002" in event["text_en"] for event in events)
    run_until(plan_for(tiny_models["llama"], data, tmp_path / "whole"), 6)
    assert_same_state(tmp_path / "whole", tmp_path / "run")


def test_a_named_checkpoint_must_be_healthy(tiny_models: dict[str, str], tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", 50)
    run_until(plan_for(tiny_models["llama"], data, tmp_path / "run"), 2)
    folder = tmp_path / "run" / "checkpoints" / "step-00000002"
    flip_bit(folder / "trainer.json")
    with pytest.raises(UserError, match=r"trainer\.json has changed"):
        run_until(plan_for(tiny_models["llama"], data, tmp_path / "other", checkpoint={"resume": str(folder)}), 4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tuning": TUNINGS["lora"]}, "another model or tuning"),
        ({"seed": 6}, "the data"),
        ({"data": {"seq_len": 32}}, "the data"),
    ],
)
def test_incompatible_checkpoint(changed: dict[str, Any], message: str, tiny_models: dict[str, str], tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", 50)
    run_until(plan_for(tiny_models["llama"], data, tmp_path / "run"), 2)
    before = sorted(p.name for p in (tmp_path / "run" / "checkpoints").rglob("*"))
    with pytest.raises(UserError, match=message):
        run_until(plan_for(tiny_models["llama"], data, tmp_path / "run", **changed), 4)
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").rglob("*")) == before


def test_keeps_newest_and_best(tiny_models: dict[str, str], tmp_path: Path) -> None:
    from ascendfactory.engine.trainer import train_steps

    data = write_chats(tmp_path / "chats.jsonl", 50)
    plan = make_tiny_plan(
        tiny_models["llama"],
        data,
        str(tmp_path / "run"),
        duration="6 steps",
        batch={"global_size": 4, "micro_size": 2},
        data={"eval_fraction": 0.2},
        optim={"lr": 0.3, "schedule": "constant"},  # so high that the loss rises after the first step
        checkpoint={"every": "1 steps", "keep": 2, "keep_best": True},
        output={"eval_every": "1 steps"},
    )
    steps = list(train_steps(plan))
    losses = {step.step: step.eval_loss for step in steps}
    best = min(losses, key=lambda step: losses[step])
    assert best < 5  # else the test shows nothing
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert names == sorted({f"step-{best:08d}", "step-00000005", "step-00000006"})


def test_metrics_are_not_doubled_after_a_crash(tiny_models: dict[str, str], tmp_path: Path) -> None:
    """Steps after the last checkpoint run again; metrics.jsonl holds each once."""
    from ascendfactory.engine.trainer import train_steps

    data = write_chats(tmp_path / "chats.jsonl", 50)
    plan = make_tiny_plan(tiny_models["llama"], data, str(tmp_path / "run"), duration="5 steps", checkpoint={"every": "2 steps"})
    for step in train_steps(plan):
        if step.step == 3:
            break  # the generator is dropped: nothing of step 3 is saved
    list(train_steps(plan))
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_non_finite_gradients(policy: str, pool: Pool, tiny_models: dict[str, str], tmp_path: Path) -> None:
    """A weight of infinity on disk: every rank skips, or every rank stops, and the batch is named."""
    from safetensors.torch import save_file

    folder = tmp_path / "broken"
    shutil.copytree(tiny_models["llama"], folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    data = write_chats(tmp_path / "chats.jsonl", 50)
    plan = plan_for(str(folder), data, tmp_path / "run", 2, optim={"nonfinite": policy}, duration="2 steps")
    if policy == "stop":
        with pytest.raises(AssertionError, match=r"chats\.jsonl:\d+"):
            pool.run(run_until, 2, plan, 2)
    else:
        losses = pool.run(run_until, 2, plan, 2)
        assert len(losses[0]) == 2
        assert all(loss != loss or abs(loss) == float("inf") for loss in losses[0])
