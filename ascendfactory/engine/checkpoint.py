"""Checkpoints: sharded (torch DCP), written beside training, checksummed, and put in place by one rename.

A checkpoint `step-00000500/` holds DCP's files keyed by Hugging Face names (so any layout resumes any other),
`trainer.json` (position of everything that is not a tensor) and `manifest.json` (size and SHA-256 of every file,
written last). A folder without a manifest, or that does not match it, is never resumed from.
The folder must be on storage that every node sees.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ascendfactory.core.messages import UserError
from ascendfactory.engine import device as devices
from ascendfactory.engine.adapter import saved_name
from ascendfactory.engine.mesh import Mesh
from ascendfactory.engine.optim import Optimizer

MANIFEST = "manifest.json"
TRAINER = "trainer.json"


class DamagedCheckpoint(Exception):
    """A checkpoint folder that does not match its manifest; the text names the file."""


def public_name(name: str) -> str:
    """A parameter's name inside our root module → its name in Hugging Face's (or peft's) files."""
    name = name.removeprefix("hf.")
    if "lora_" in name:
        return saved_name(name)
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Public name → trainable parameter (the rest is in the model folder, unchanged)."""
    return {public_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def tensor_state(model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> dict[str, Tensor]:
    """Everything of a run that is a tensor; live, so that loading fills it in place."""
    state = {f"model.{name}": p.detach() for name, p in trained_tensors(model).items()}
    state |= {_moment_name(name): t for name, t in optimizer.moments().items()}
    return state | {f"rng.{kind}.{mesh.rank}": t for kind, t in devices.rng_state(mesh.device).items()}


def _moment_name(name: str) -> str:
    kind, parameter = name.split(".", 1)
    return f"{kind}.{public_name(parameter)}"


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path) -> None:
    """Compares every file with the manifest.

    Raises:
        DamagedCheckpoint: naming the first file that is missing, of another size, or of another content.
    """
    if not (folder / MANIFEST).exists():
        raise DamagedCheckpoint(f"{folder / MANIFEST} is missing")
    try:
        files = {name: (facts["bytes"], facts["sha256"]) for name, facts in json.loads((folder / MANIFEST).read_text()).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{folder / MANIFEST} is no manifest any more") from error
    for name, (num_bytes, checksum) in files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path} is missing")
        if path.stat().st_size != num_bytes:
            raise DamagedCheckpoint(f"{path} has {path.stat().st_size} bytes, {num_bytes} were written")
        if file_sha256(path) != checksum:
            raise DamagedCheckpoint(f"{path} has changed since it was written (checksum)")


def saved_folders(root: Path) -> list[Path]:
    """Finished checkpoints, newest first."""
    return sorted((p for p in root.glob("step-*") if p.is_dir()), reverse=True)


class Checkpoints:
    """The `checkpoints/` folder of a run."""

    def __init__(self, root: Path, mesh: Mesh, *, keep: int, asynchronous: bool) -> None:
        self._root, self._mesh, self._keep, self._asynchronous = root, mesh, keep, asynchronous
        # a group of its own: the writer's messages must not cross the training step's
        self._group = dist.new_group(backend="gloo") if mesh.size > 1 else None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        if mesh.is_first:
            root.mkdir(parents=True, exist_ok=True)

    def save(self, tensors: dict[str, Tensor], trainer: dict[str, Any], *, best: bool = False, last: bool = False) -> None:
        """Saves at `trainer["step"]`. Returns when the tensors are copied; the disk is written meanwhile.

        Args:
            tensors: from `tensor_state`.
            trainer: JSON data.
            best: this one is kept whatever becomes newer.
            last: no step follows, so nothing is copied: the tensors are written as they stand.

        Raises:
            UserError: an earlier save could not be written (the disk is full, say).
        """
        self.wait()
        overlaps = self._asynchronous and not last
        written = {name: _copy_to_cpu(tensor) for name, tensor in tensors.items()} if overlaps else tensors
        self._pending = self._writer.submit(self._write, f"step-{trainer['step']:08d}", written, trainer, best)
        if not overlaps:
            self.wait()

    def _write(self, name: str, tensors: dict[str, Tensor], trainer: dict[str, Any], best: bool) -> None:
        temporary = self._root / f".writing-{name}"
        if self._mesh.is_first:
            # here and not when opened: an export may read the folder while a run writes to it
            for left_over in self._root.glob(".writing-*"):
                shutil.rmtree(left_over, ignore_errors=True)
        with _quietly_alone():
            dcp.save(tensors, checkpoint_id=temporary, process_group=self._group, no_dist=self._group is None)
        if not self._mesh.is_first:
            return
        (temporary / TRAINER).write_text(json.dumps(trainer))
        finish_folder(temporary, self._root / name)
        if best:
            (self._root / "best").write_text(name)
        self._prune(name)

    def _prune(self, newest: str) -> None:
        """Later steps than the one just written belong to a course that a resume gave up (or are damaged): they go first."""
        folders, best = saved_folders(self._root), self.best_folder()
        given_up = [folder for folder in folders if folder.name > newest]
        for folder in [*given_up, *folders[len(given_up) + self._keep :]]:
            if folder in given_up or folder != best:
                shutil.rmtree(folder, ignore_errors=True)

    def best_folder(self) -> Path | None:
        """The checkpoint with the lowest evaluation loss, if one was marked."""
        mark = self._root / "best"
        folder = self._root / mark.read_text().strip() if mark.exists() else None
        return folder if folder and folder.exists() else None

    def wait(self) -> None:
        """Waits for the save under way.

        Raises:
            UserError: it failed; the checkpoints before it are untouched.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (Exception, CheckpointException) as error:  # DCP's own is a BaseException
            reason = _root_cause(error)
            raise UserError(
                str(self._root),
                f"the checkpoint could not be written: {reason}; earlier ones are untouched; free space and start again",
                f"检查点写入失败：{reason}；之前的检查点完好；请释放空间后重新启动",
            ) from error

    def find(self, resume: str) -> tuple[Path | None, list[str]]:
        """The checkpoint to go on from, and what was found damaged on the way.

        Args:
            resume: `auto` (newest healthy one), `none`, or a folder.

        Raises:
            UserError: the named folder is no healthy checkpoint.
        """
        damaged: list[str] = []
        found = ""
        if self._mesh.is_first:
            found = str(self._search(resume, damaged) or "")
        if self._group is not None:
            box = [found, damaged]
            dist.broadcast_object_list(box, src=0, group=self._group)
            found, damaged = box
        if resume not in ("auto", "none") and not found:
            reason = damaged[0] if damaged else f"{resume} is no checkpoint"
            raise UserError(
                "checkpoint.resume", f"{reason}; use auto for the newest healthy one", f"{reason}；可用 auto 选择最新的完好检查点"
            )
        return (Path(found) if found else None), damaged

    def _search(self, resume: str, damaged: list[str]) -> Path | None:
        candidates = [] if resume == "none" else saved_folders(self._root) if resume == "auto" else [Path(resume)]
        for folder in candidates:
            try:
                verify(folder)
            except DamagedCheckpoint as error:
                damaged.append(str(error))
            else:
                return folder
        return None


def finish_folder(temporary: Path, final: Path) -> None:
    """Writes the manifest, forces everything to the disk, and renames: the folder is whole or not there."""
    files = [p for p in sorted(temporary.rglob("*")) if p.is_file()]
    facts = {str(p.relative_to(temporary)): {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in files}
    (temporary / MANIFEST).write_text(json.dumps(facts, indent=1))
    for path in [*files, temporary / MANIFEST, temporary]:
        _force_to_disk(path)
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    _force_to_disk(final.parent)


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        # the constructor, because from_local would move the copy back to the mesh's device
        return DTensor(tensor.to_local().detach().to("cpu", copy=True), tensor._spec, requires_grad=False)
    return tensor.detach().to("cpu", copy=True)


@contextmanager
def _quietly_alone() -> Iterator[None]:
    """DCP warns that a process without a group saves for itself, which is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _root_cause(error: BaseException) -> str:
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[-1]


def read_trainer(folder: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    data: dict[str, Any] = json.loads((folder / TRAINER).read_text())
    return data


def load_tensors(folder: Path, tensors: dict[str, Tensor], mesh: Mesh) -> None:
    """Fills live tensors from a checkpoint of any layout.

    Args:
        tensors: from `tensor_state`; random states that the checkpoint lacks (another number of processes) are left.

    Raises:
        UserError: the checkpoint is of another model or tuning; names the first difference.
    """
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        if name.startswith("rng."):
            continue
        facts = stored.get(name)
        if not isinstance(facts, TensorStorageMetadata) or facts.size != tensor.shape:
            there = list(facts.size) if isinstance(facts, TensorStorageMetadata) else "nothing"
            raise UserError(
                "checkpoint.resume",
                f"{folder} is of another model or tuning: {name} has {there} there and {list(tensor.shape)} here; "
                "use another output.dir, or checkpoint.resume: none",
                f"{folder} 属于另一个模型或微调方式：{name} 在其中为 {there}，此处为 {list(tensor.shape)}；"
                "请更换 output.dir，或设 checkpoint.resume: none",
            )
    extra = next((n for n in stored if n.startswith("model.") and n not in tensors), None)
    if extra:
        raise UserError(
            "checkpoint.resume",
            f"{folder} trains {extra!r}, this recipe does not; use another output.dir, or checkpoint.resume: none",
            f"{folder} 训练了 {extra!r}，而本配方没有；请更换 output.dir，或设 checkpoint.resume: none",
        )
    wanted = {name: tensor for name, tensor in tensors.items() if name in stored}
    with _quietly_alone():
        dcp.load(wanted, checkpoint_id=folder, no_dist=mesh.size == 1)


def iter_whole(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor gathered whole, one at a time; every process must take part."""
    for name, tensor in tensors.items():
        yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
