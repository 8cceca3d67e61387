"""Folders that are built once, whoever comes first, and appear whole or not at all."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ascendfactory.core.messages import UserError


def build_once(root: Path, name: str, build: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> Path:
    """The folder root/name, built by the first process that asks for it while the others wait.

    Args:
        build: fills an empty folder, which is then renamed.
        is_whole: whether an existing folder can be used; one that cannot is built anew.

    Raises:
        UserError: the cache folder cannot be written, or the disk is full; and what `build` raises.
    """
    folder = root / name
    if folder.is_dir() and is_whole(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock"):
            if folder.is_dir() and is_whole(folder):
                return folder
            unfinished = root / f"{name}.building"
            for old in (unfinished, folder):  # left by a process that was killed: we hold the lock
                shutil.rmtree(old, ignore_errors=True)
            unfinished.mkdir()
            try:
                build(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise UserError(
            "data.cache_dir",
            f"cannot write {root}: {error.strerror or error}; name a folder with room in data.cache_dir",
            f"无法写入 {root}：{error.strerror or error}；请在 data.cache_dir 中指定有空间的文件夹",
        ) from error
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a POSIX lock, which also works between the nodes of an NFS folder and dies with its process."""
    with path.open("a") as stream:
        fcntl.lockf(stream, fcntl.LOCK_EX)
        yield
