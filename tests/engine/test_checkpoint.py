"""Checkpoints: whole or not there, damage is named, any layout resumes any other."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Layout
from ascendfactory.core.recipe import Optim
from ascendfactory.engine import checkpoint
from ascendfactory.engine.checkpoint import Checkpoints, DamagedCheckpoint
from ascendfactory.engine.mesh import Mesh, make_mesh
from ascendfactory.engine.names import public_name
from ascendfactory.engine.optim import Optimizer
from ascendfactory.engine.parallel.fsdp import apply_fsdp
from ascendfactory.engine.state import iter_whole, tensor_state
from tests.pool import Pool

ALONE = Mesh(torch.device("cpu"))


def tensors(value: float = 1.0) -> dict[str, Tensor]:
    half = torch.full((2,), value).bfloat16()
    return {"model.a": torch.full((5, 3), value), "exp_avg.a": torch.full((5, 3), value + 0.5), "model.half": half}


def opened(root: Path, *, keep: int = 2, asynchronous: bool = False) -> Checkpoints:
    return Checkpoints(root, ALONE, keep=keep, asynchronous=asynchronous)


def saved(root: Path, *steps: int, keep: int = 10) -> list[Path]:
    checkpoints = opened(root, keep=keep)
    for step in steps:
        checkpoints.save(tensors(step), {"step": step})
    return checkpoint.saved_folders(root)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    (folder,) = saved(tmp_path, 3)
    assert folder.name == "step-00000003"
    checkpoint.verify(folder)
    assert checkpoint.read_trainer(folder) == {"step": 3}
    live = tensors(0.0)
    before = live["model.a"]
    checkpoint.load_tensors(folder, live, ALONE)
    assert live["model.a"] is before
    for name, tensor in tensors(3.0).items():
        assert live[name].dtype == tensor.dtype
        assert torch.equal(live[name], tensor)


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    (folder,) = saved(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest) | {"manifest.json"} == {path.name for path in folder.iterdir()}
    assert {"trainer.json", ".metadata"} <= set(manifest)


def damage_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def damage_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [(damage_bit, "has changed since it was written"), (damage_end, "bytes, .* were written"), (Path.unlink, "is missing")],
)
@pytest.mark.parametrize("file", ["trainer.json", ".metadata", "__0_0.distcp"])
def test_damaged_files_are_named_and_skipped(tmp_path: Path, damage: Any, message: str, file: str) -> None:
    newest, older = saved(tmp_path, 1, 2)
    damage(newest / file)
    with pytest.raises(DamagedCheckpoint, match=f"{file} .*{message}"):
        checkpoint.verify(newest)
    found, damaged = opened(tmp_path).find("auto")
    assert found == older
    assert len(damaged) == 1
    assert file in damaged[0]
    with pytest.raises(UserError, match=f"{file}.*; use auto for the newest healthy one"):
        opened(tmp_path).find(str(newest))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"trainer.json": {}}', '{"trainer.json": 1}', '{"a": {"byte": 1, "sha256": ""}}'])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    (folder,) = saved(tmp_path, 1)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
        checkpoint.verify(folder)


def test_find(tmp_path: Path) -> None:
    assert opened(tmp_path).find("auto") == (None, [])
    newest, older = saved(tmp_path, 1, 2)
    assert opened(tmp_path).find("auto") == (newest, [])
    assert opened(tmp_path).find("none") == (None, [])
    assert opened(tmp_path).find(str(older)) == (older, [])
    with pytest.raises(UserError, match=r"manifest\.json is missing") as caught:
        opened(tmp_path).find(str(tmp_path / "nowhere"))
    assert caught.value.where == "checkpoint.resume"
    (newest / "manifest.json").unlink()
    assert opened(tmp_path).find("auto")[0] == older


def test_left_overs_of_a_crash_go_with_the_next_save(tmp_path: Path) -> None:
    left_over = tmp_path / ".writing-step-00000001"
    left_over.mkdir(parents=True)
    (left_over / "__0_0.distcp").write_bytes(b"half")
    reader = opened(tmp_path)  # an export beside a run that is writing must not take its folder away
    assert reader.find("auto") == (None, [])
    assert left_over.exists()
    saved(tmp_path, 2)
    assert names(tmp_path) == ["step-00000002"]


def test_newest_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 10, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000010"]


def test_the_best_is_kept_as_well(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path, keep=1)
    for step in (1, 2, 3, 4):
        checkpoints.save(tensors(step), {"step": step}, best=step == 2)
    assert names(tmp_path) == ["best", "step-00000002", "step-00000004"]
    assert checkpoints.best_folder() == tmp_path / "step-00000002"
    checkpoints.save(tensors(5), {"step": 5}, best=True)
    assert names(tmp_path) == ["best", "step-00000005"]


def test_a_course_given_up_does_not_crowd_out_the_new_one(tmp_path: Path) -> None:
    """Steps 20 and 30 are damaged; the run goes on from 10: its saves are older by number, newer in time."""
    for folder in saved(tmp_path, 10, 20, 30)[:2]:
        damage_bit(folder / "trainer.json")
    checkpoints = opened(tmp_path, keep=2)
    assert checkpoints.find("auto")[0] == tmp_path / "step-00000010"
    checkpoints.save(tensors(13), {"step": 13})
    assert names(tmp_path) == ["step-00000010", "step-00000013"]
    assert checkpoints.find("auto") == (tmp_path / "step-00000013", [])


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    opened(tmp_path).save(tensors(7), {"step": 1})
    (folder,) = checkpoint.saved_folders(tmp_path)
    checkpoint.verify(folder)
    live = tensors(0)
    checkpoint.load_tensors(folder, live, ALONE)
    assert live["model.a"][0, 0] == 7


def test_what_is_written_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path, asynchronous=True)
    blocked = ThreadPoolExecutor(1)
    checkpoints._writer = blocked
    gate = Event()
    blocked.submit(gate.wait)
    live, trainer = tensors(1.0), {"step": 1}
    checkpoints.save(live, trainer)
    for tensor in live.values():
        tensor.fill_(-9.0)  # as an optimizer step does, in place
    assert names(tmp_path) == []
    gate.set()
    checkpoints.wait()
    read = tensors(0.0)
    checkpoint.load_tensors(tmp_path / "step-00000001", read, ALONE)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors(1.0).items())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_write_is_told_and_the_earlier_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    checkpoints = opened(tmp_path, asynchronous=asynchronous)
    checkpoints.save(tensors(1), {"step": 1})
    checkpoints.wait()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_force_to_disk", full)
    with pytest.raises(UserError, match=r"could not be written: .*No space left on device; earlier ones are untouched") as caught:
        checkpoints.save(tensors(2), {"step": 2})
        checkpoints.wait()
    assert caught.value.where == str(tmp_path)
    monkeypatch.undo()
    assert opened(tmp_path).find("auto") == (tmp_path / "step-00000001", [])
    checkpoints.save(tensors(2), {"step": 2})
    checkpoints.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path / "c")
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "c").write_text("a file")
    with pytest.raises(UserError, match="could not be written"):
        checkpoints.save(tensors(), {"step": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"model.b": torch.zeros(2)}, r"model\.b has nothing there and \[2\] here"),
        (lambda t: t | {"model.a": torch.zeros(5, 4)}, r"model\.a has \[5, 3\] there and \[5, 4\] here"),
        (lambda t: {k: v for k, v in t.items() if k != "model.half"}, r"trains 'model\.half', this recipe does not"),
    ],
)
def test_checkpoints_of_another_model_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    (folder,) = saved(tmp_path, 1)
    with pytest.raises(UserError, match=message) as caught:
        checkpoint.load_tensors(folder, change(tensors(0.0)), ALONE)
    assert caught.value.where == "checkpoint.resume"


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("hf.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("hf.base_model.model.model.layers.0.q_proj.base_layer.weight", "model.layers.0.q_proj.weight"),
        ("hf.base_model.model.model.layers.0.q_proj.lora_A.default.weight", "base_model.model.model.layers.0.q_proj.lora_A.weight"),
        (
            "hf.base_model.model.model.layers.0.q_proj.lora_magnitude_vector.default.weight",
            "base_model.model.model.layers.0.q_proj.lora_magnitude_vector",
        ),
    ],
)
def test_public_names(name: str, public: str) -> None:
    assert public_name(name) == public


def net_and_optimizer(size: int, replicate: int) -> tuple[nn.Module, Optimizer, Mesh]:
    """Odd sizes, so that ranks hold unequal parts; one step done, so that moments are no zeros."""
    layout = Layout(dp=size, replicate=replicate)
    mesh = make_mesh(layout, "cpu", sharded=size > 1)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    if mesh.fsdp is not None:
        apply_fsdp(net, [], mesh.fsdp, layout, torch.float32)
    optimizer = Optimizer(net, Optim(lr=0.1), layout, 4, mesh)
    return net, optimizer, mesh


def write_on_ranks(root: str, size: int, replicate: int) -> dict[str, Tensor]:
    net, optimizer, mesh = net_and_optimizer(size, replicate)
    net(torch.ones(2, 5)).sum().backward()
    optimizer.step(0, optimizer.gradient_norm(0.0)[1])
    torch.manual_seed(100 + mesh.rank)
    checkpoints = Checkpoints(Path(root), mesh, keep=1, asynchronous=True)
    checkpoints.save(tensor_state(optimizer, mesh), {"step": 1})
    checkpoints.wait()
    mesh.barrier()
    return whole_state(net, optimizer, mesh)


def read_on_ranks(root: str, size: int, replicate: int) -> dict[str, Tensor]:
    net, optimizer, mesh = net_and_optimizer(size, replicate)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    folder, damaged = Checkpoints(Path(root), mesh, keep=1, asynchronous=False).find("auto")
    assert folder is not None
    assert damaged == []
    state = tensor_state(optimizer, mesh)
    checkpoint.load_tensors(folder, state, mesh)
    return whole_state(net, optimizer, mesh) | {"rng": next(kept.parameter for name, kept in state.items() if name.startswith("rng.cpu."))}


def whole_state(net: nn.Module, optimizer: Optimizer, mesh: Mesh) -> dict[str, Tensor]:
    state = tensor_state(optimizer, mesh)
    return {name: tensor.clone() for name, tensor in iter_whole({k: v for k, v in state.items() if "rng" not in k}, mesh)}


@pytest.mark.parametrize(("before", "after"), [((2, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (2, 2)), ((2, 2), (2, 1))])
def test_any_layout_reads_any_other(pool: Pool, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]) -> None:
    written = pool.run(write_on_ranks, before[0], str(tmp_path), *before)[0]
    assert written["exp_avg.0.weight"].any()
    for state in pool.run(read_on_ranks, after[0], str(tmp_path), *after):
        assert {name for name in state if name != "rng"} == written.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in written.items())


def test_each_rank_gets_its_own_random_state_back(pool: Pool, tmp_path: Path) -> None:
    pool.run(write_on_ranks, 2, str(tmp_path), 2, 1)
    states = [state["rng"] for state in pool.run(read_on_ranks, 2, str(tmp_path), 2, 1)]
    for rank, state in enumerate(states):
        torch.manual_seed(100 + rank)
        assert torch.equal(state, torch.get_rng_state())
