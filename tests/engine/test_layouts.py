"""Optimizer, checkpoints and gathering under every layout, beside torch's own AdamW on one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ascendfactory.core.messages import UserError
from ascendfactory.engine.checkpoint import Checkpoints, load_run, read_trainer
from ascendfactory.engine.mesh import Mesh
from ascendfactory.engine.optim import Optimizer
from ascendfactory.engine.state import gradients, iter_whole, tensor_state
from tests.engine.toy import LAYOUTS, OPTIM, SHAPES, build, give_gradients, numbers, train, without_rng
from tests.pool import Pool

pytestmark = pytest.mark.parallel


def right_state(num_steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and moments by torch.optim.AdamW and torch's clipping, and the norms before it."""
    weights = {name: nn.Parameter(numbers("weight", name)) for name in SHAPES}
    adamw = torch.optim.AdamW(
        [{"params": [w], "weight_decay": 0.1 if w.ndim > 1 else 0.0} for w in weights.values()], lr=0.05, betas=(0.9, 0.95), foreach=False
    )
    norms = []
    for step in range(num_steps):
        for name, weight in weights.items():
            weight.grad = numbers(f"gradient {step}", name)
        norms.append(float(nn.utils.clip_grad_norm_(list(weights.values()), OPTIM.max_grad_norm)))
        adamw.step()
    state = {f"model.{name}": weight.detach() for name, weight in weights.items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        state |= {f"{kind}.{name}": adamw.state[weight][kind] for name, weight in weights.items()}
    return state, norms


def whole_state(kind: str, root: str, first: int, last: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Resumes at `first` if there is a checkpoint, trains to `last`, saves; the whole state when resumed and at the end."""
    net, optimizer, mesh = build(LAYOUTS[kind])
    checkpoints = Checkpoints(Path(root), mesh, keep=1, asynchronous=True)
    folder, damaged = checkpoints.find("auto")
    assert damaged == []
    if folder is not None:
        load_run(folder, optimizer, mesh)
        optimizer.set_num_updates(read_trainer(folder)["num_updates"])
    begun = snapshot(optimizer, mesh)
    norms = train(net, optimizer, range(first, last))
    checkpoints.save(tensor_state(optimizer, mesh), {"step": last, "num_updates": optimizer.num_updates})
    checkpoints.wait()
    mesh.barrier()
    return begun, snapshot(optimizer, mesh), norms


def snapshot(optimizer: Optimizer, mesh: Mesh) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in iter_whole(without_rng(tensor_state(optimizer, mesh)), mesh)}


PAIRS = [
    ("one", "tp2"),
    ("tp2", "fsdp2"),
    ("fsdp2", "tp2 x fsdp2"),
    ("tp2 x fsdp2", "pp2"),
    ("pp2", "hsdp2"),
    ("hsdp2", "pp2 x tp2"),
    ("pp2 x tp2", "one"),
]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_any_layout_goes_on_from_any_other(pool: Pool, tmp_path: Path, before: str, after: str) -> None:
    """Two steps under one layout, one under the other: norms, weights and moments are those of torch's AdamW."""
    expected, norms = right_state(3)
    _, written, norms_before = pool.run(whole_state, LAYOUTS[before].num_devices, before, str(tmp_path), 0, 2)[0]
    results = pool.run(whole_state, LAYOUTS[after].num_devices, after, str(tmp_path), 2, 3)
    read, end, norms_after = results[0]
    assert read.keys() == written.keys() == expected.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in written.items())
    assert [*norms_before, *norms_after] == pytest.approx(norms, rel=1e-6)
    assert all(norm > OPTIM.max_grad_norm for norm in norms)  # clipping is at work
    for name, tensor in expected.items():
        torch.testing.assert_close(end[name], tensor, rtol=1e-5, atol=1e-7)
    for _, other, _ in results:
        assert all(torch.equal(end[name], tensor) for name, tensor in other.items())


def test_each_box_is_saved_once(pool: Pool, tmp_path: Path) -> None:
    """Twelve bytes an element (weight and two moments), whatever holds copies."""
    from torch.distributed.checkpoint import FileSystemReader

    pool.run(whole_state, 4, "pp2 x tp2", str(tmp_path), 0, 1)
    metadata = FileSystemReader(tmp_path / "step-00000001").read_metadata()
    for name, facts in metadata.state_dict_metadata.items():
        if not name.startswith("rng."):
            assert sum(chunk.sizes.numel() for chunk in facts.chunks) == facts.size.numel(), name


def refusal(kind: str, root: str) -> str:
    net, optimizer, mesh = build(LAYOUTS[kind])
    if mesh.pp.rank == 1:
        net.add_module("extra", nn.Linear(2, 2))
        optimizer = Optimizer(net, OPTIM, LAYOUTS[kind], 10, mesh)
    with pytest.raises(UserError) as caught:
        load_run(Path(root) / "step-00000001", optimizer, mesh)
    return caught.value.en


def test_a_difference_on_one_stage_ends_all(pool: Pool, tmp_path: Path) -> None:
    whole_state("one", str(tmp_path), 0, 1)
    heard = pool.run(refusal, 2, "pp2", str(tmp_path))
    assert heard[0] == heard[1]
    assert "model.extra.weight has nothing there and [2, 2] here" in heard[0]


def summed_gradients(kind: str) -> dict[str, Tensor]:
    net, optimizer, mesh = build(LAYOUTS[kind])
    give_gradients(net, 0)
    optimizer.sum_partial_gradients()
    optimizer.sum_partial_gradients()  # sums once
    return {name: tensor.clone() for name, tensor in iter_whole(gradients(net), mesh)}


@pytest.mark.parametrize("kind", ["tp2 x fsdp2", "pp2 x tp2"])
def test_partial_gradients_are_summed_once(pool: Pool, kind: str) -> None:
    found = pool.run(summed_gradients, 4, kind)[0]
    assert found.keys() == SHAPES.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, numbers("gradient 0", name), rtol=1e-6, atol=0)


def damaged_on_ranks(root: str) -> list[str]:
    _, _, mesh = build(LAYOUTS["fsdp2"])
    found, damaged = Checkpoints(Path(root), mesh, keep=1, asynchronous=False).find("auto")
    assert found is None
    return damaged


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata", "trainer.json"])
def test_damage_seen_by_one_rank_is_heard_by_all(pool: Pool, tmp_path: Path, file: str) -> None:
    pool.run(whole_state, 2, "fsdp2", str(tmp_path), 0, 1)
    path = tmp_path / "step-00000001" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    heard = pool.run(damaged_on_ranks, 2, str(tmp_path))
    assert heard[0] == heard[1] == [f"{path} has changed since it was written (checksum)"]


def test_another_tuning_is_refused(tmp_path: Path) -> None:
    whole_state("one", str(tmp_path), 0, 1)
    net, _, mesh = build(LAYOUTS["one"])
    net.embed.requires_grad_(False)
    optimizer = Optimizer(net, OPTIM, LAYOUTS["one"], 10, mesh)
    with pytest.raises(UserError, match=r"trains 'model\.embed\.weight', this recipe does not"):
        load_run(tmp_path / "step-00000001", optimizer, mesh)
