"""Checkpoints: sharded (torch DCP), written beside training, checksummed, and put in place by one rename.

A checkpoint `step-00000500/` holds DCP's files keyed by Hugging Face names (so any layout resumes any other),
`trainer.json` (position of everything that is not a tensor) and `manifest.json` (size and SHA-256 of every file,
written last). A folder without a manifest, or that does not match it, is never resumed from.
Each process sums up the files it wrote, and before a resume every process checks a share of them.
The folder must be on storage that every node sees.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ascendfactory.core.messages import UserError
from ascendfactory.engine.kept import BoxReader, BoxWriter, Folder, Kept
from ascendfactory.engine.mesh import Mesh
from ascendfactory.engine.optim import Optimizer
from ascendfactory.engine.state import tensor_state

MANIFEST = "manifest.json"
TRAINER = "trainer.json"
HASHING_THREADS = 4  # hashlib lets go of the interpreter; one thread reads and hashes about 1.5 GB/s


class DamagedCheckpoint(Exception):
    """A checkpoint folder that does not match its manifest; the text names the file."""


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path, share: int = 0, num_shares: int = 1) -> None:
    """Compares files with the manifest: all of them in size, a share of them in content.

    Args:
        folder: a checkpoint.
        share, num_shares: every num_shares-th file, beginning with this one; files of neighbouring ranks go to different shares.

    Raises:
        DamagedCheckpoint: naming the first file that is missing, of another size, or of another content.
    """
    if not (folder / MANIFEST).exists():
        raise DamagedCheckpoint(f"{folder / MANIFEST} is missing")
    try:
        files = {name: (facts["bytes"], facts["sha256"]) for name, facts in json.loads((folder / MANIFEST).read_text()).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{folder / MANIFEST} is no manifest any more") from error
    for name, (num_bytes, _) in files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path} is missing")
        if path.stat().st_size != num_bytes:
            raise DamagedCheckpoint(f"{path} has {path.stat().st_size} bytes, {num_bytes} were written")
    # __2_0 before __10_0: a process mostly checks the file that it is about to read, which then comes from memory
    mine = sorted(files, key=lambda name: (not name.startswith("__"), len(name), name))[share::num_shares]
    for name, checksum in zip(mine, _hash_all([folder / name for name in mine]), strict=True):
        if checksum != files[name][1]:
            raise DamagedCheckpoint(f"{folder / name} has changed since it was written (checksum)")


def _hash_all(paths: list[Path]) -> list[str]:
    """SHA-256 of each file; several at a time."""
    if len(paths) < 2:
        return [file_sha256(path) for path in paths]
    with ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="hash") as pool:
        return list(pool.map(file_sha256, paths))


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

    def save(self, tensors: Mapping[str, Kept | Tensor], trainer: dict[str, Any], *, best: bool = False, last: bool = False) -> None:
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
        written = {name: _kept(tensor).boxes(copy=overlaps) for name, tensor in tensors.items()}
        self._pending = self._writer.submit(self._write, f"step-{trainer['step']:08d}", written, trainer, best)
        if not overlaps:
            self.wait()

    def _write(self, name: str, tensors: dict[str, Any], trainer: dict[str, Any], best: bool) -> None:
        temporary = self._root / f".writing-{name}"
        if self._mesh.is_first:
            # here and not when opened: an export may read the folder while a run writes to it
            for left_over in self._root.glob(".writing-*"):
                shutil.rmtree(left_over, ignore_errors=True)
        with _quietly_alone():
            dcp.save(tensors, checkpoint_id=temporary, planner=BoxWriter(), process_group=self._group, no_dist=self._group is None)
        checksums = self._gather_checksums(temporary)
        if not self._mesh.is_first:
            return
        (temporary / TRAINER).write_text(json.dumps(trainer))
        finish_folder(temporary, self._root / name, checksums)
        if best:
            (self._root / "best").write_text(name)
        self._prune(name)

    def _gather_checksums(self, folder: Path) -> dict[str, str]:
        """File → SHA-256 of what every process wrote; what one could not read, the first process sums up itself."""
        if self._group is None:
            return {}
        mine: dict[str, str] = {}
        with suppress(OSError):
            mine = {path.name: file_sha256(path) for path in folder.glob(f"__{self._mesh.rank}_*")}
        gathered: list[dict[str, str]] | None = [{}] * self._mesh.size if self._mesh.is_first else None
        dist.gather_object(mine, gathered, dst=0, group=self._group)
        return {name: checksum for files in gathered or [] for name, checksum in files.items()}

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
            UserError: the disk refused it; the checkpoints before it are untouched.
            RuntimeError: anything else, such as another process that is gone.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (Exception, CheckpointException) as error:  # DCP's own is a BaseException
            cause = _root_cause(error)
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[-1]
            if not isinstance(cause, OSError) or isinstance(cause, ConnectionError):
                raise RuntimeError(f"the checkpoint could not be written: {reason}; earlier ones are untouched") from error
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
        found: Path | None = None
        for folder in self._candidates(resume):
            if error := self._first_damage(folder):
                damaged.append(error)
            else:
                found = folder
                break
        if resume not in ("auto", "none") and not found:
            reason = damaged[0] if damaged else f"{resume} is no checkpoint"
            raise UserError(
                "checkpoint.resume", f"{reason}; use auto for the newest healthy one", f"{reason}；可用 auto 选择最新的完好检查点"
            )
        return found, damaged

    def _candidates(self, resume: str) -> list[Path]:
        """Folders to try in turn, as the first process sees them."""
        candidates = [] if resume == "none" else saved_folders(self._root) if resume == "auto" else [Path(resume)]
        if self._group is not None:
            box = [candidates]
            dist.broadcast_object_list(box, src=0, group=self._group)
            candidates = box[0]
        return candidates

    def _first_damage(self, folder: Path) -> str | None:
        """What is wrong with a folder; every process checks its share of the files and all hear the same."""
        error: str | None = None
        try:
            verify(folder, self._mesh.rank, self._mesh.size)
        except (DamagedCheckpoint, OSError) as damage:
            error = str(damage)
        if self._group is None:
            return error
        errors: list[str | None] = [None] * self._mesh.size
        dist.all_gather_object(errors, error, group=self._group)
        return next((text for text in errors if text), None)


def finish_folder(temporary: Path, final: Path, checksums: Mapping[str, str] = MappingProxyType({})) -> None:
    """Writes the manifest, forces everything to the disk, and renames: the folder is whole or not there.

    Args:
        temporary: where the files are.
        final: what the folder will be called; an older one of that name is replaced.
        checksums: file → SHA-256, of files whose writers summed them up.
    """
    files = [p for p in sorted(temporary.rglob("*")) if p.is_file()]
    rest = [p for p in files if p.name not in checksums]
    known = dict(checksums) | {p.name: checksum for p, checksum in zip(rest, _hash_all(rest), strict=True)}
    facts = {p.name: {"bytes": p.stat().st_size, "sha256": known[p.name]} for p in files}
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


def _kept(tensor: Kept | Tensor) -> Kept:
    return tensor if isinstance(tensor, Kept) else Kept(tensor)


@contextmanager
def _quietly_alone() -> Iterator[None]:
    """DCP warns that a process without a group saves for itself, which is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _root_cause(error: BaseException) -> BaseException:
    """What began a chain of errors; of those that several processes report, one of the disk."""
    if isinstance(error, CheckpointException):
        reported = [_root_cause(failure) for failure, _ in error.failures.values()]
        return next((e for e in reported if isinstance(e, OSError)), reported[0] if reported else error)
    inner = error.__cause__ or error.__context__
    return _root_cause(inner) if inner else error


def read_trainer(folder: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    data: dict[str, Any] = json.loads((folder / TRAINER).read_text())
    return data


def load_run(folder: Path, optimizer: Optimizer, mesh: Mesh) -> dict[str, Tensor]:
    """Fills weights and moments from a checkpoint of any layout.

    Returns:
        Random generator states by kind (`cpu`, `cuda`, `npu`): this rank's, or as they are where the checkpoint has none for it.

    Raises:
        UserError: the checkpoint is of another model or tuning; names the first difference.
    """
    state = tensor_state(optimizer, mesh)
    load_tensors(folder, state, mesh)
    for slot in optimizer.slots.values():
        if slot.residual is not None:
            slot.set_master(state[f"model.{slot.name}"].of)
    return {name.split(".")[1]: kept.parameter for name, kept in state.items() if name.startswith("rng.")}


def load_tensors(folder: Path, tensors: Mapping[str, Kept | Tensor], mesh: Mesh) -> None:
    """Fills live tensors from a checkpoint of any layout.

    Args:
        folder: a verified checkpoint.
        tensors: from `tensor_state`; random states that the checkpoint lacks (another number of processes) are left.
        mesh: the stages of a pipeline compare what they have together with what the checkpoint has.

    Raises:
        UserError: the checkpoint is of another model or tuning; names the first difference.
    """
    reader = Folder(folder)
    stored = reader.read_metadata().state_dict_metadata
    kept = {name: _kept(tensor) for name, tensor in tensors.items()}
    difference = _first_difference(stored, kept, folder)
    names = {name for name in kept if name.startswith("model.")}
    if mesh.pp.size > 1:
        # in one message what is here and whether it fits, so that all stages end alike
        heard: list[Any] = [None] * mesh.pp.size
        dist.all_gather_object(heard, (names, difference), group=mesh.pp.group)
        names = set().union(*(there for there, _ in heard))
        difference = next((text for _, text in heard if text), None)
    extra = next((name for name in stored if name.startswith("model.") and name not in names), None)
    if extra and not difference:
        difference = (
            f"{folder} trains {extra!r}, this recipe does not; use another output.dir, or checkpoint.resume: none",
            f"{folder} 训练了 {extra!r}，而本配方没有；请更换 output.dir，或设 checkpoint.resume: none",
        )
    if difference:
        raise UserError("checkpoint.resume", *difference)
    wanted: dict[str, Any] = {name: one.boxes() for name, one in kept.items() if name in stored}
    with _quietly_alone():
        # every process knows what it wants and where it lies: nothing is left to agree on
        dcp.load(wanted, storage_reader=reader, planner=BoxReader(), no_dist=True)


def _first_difference(stored: Mapping[str, Any], kept: Mapping[str, Kept], folder: Path) -> tuple[str, str] | None:
    """The first tensor that the checkpoint lacks or has in another shape, told in both languages."""
    for name, here in kept.items():
        if name.startswith("rng."):
            continue
        facts = stored.get(name)
        if not isinstance(facts, TensorStorageMetadata) or facts.size != here.shape:
            there = list(facts.size) if isinstance(facts, TensorStorageMetadata) else "nothing"
            return (
                f"{folder} is of another model or tuning: {name} has {there} there and {list(here.shape)} here; "
                "use another output.dir, or checkpoint.resume: none",
                f"{folder} 属于另一个模型或微调方式：{name} 在其中为 {there}，此处为 {list(here.shape)}；"
                "请更换 output.dir，或设 checkpoint.resume: none",
            )
    return None
