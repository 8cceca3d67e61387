"""The lock of a run folder: two launches never write into one run."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ascendfactory.core.messages import UserError


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds the folder's lock; the kernel lets go of it when the process ends, however it ends.

    Raises:
        UserError: when another process holds it.
    """
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                str(folder),
                "a run is going on in this folder; wait for it, or write another output.dir",
                "此文件夹中有正在进行的训练；请等待，或换一个 output.dir",
            ) from None
        yield
