"""A pool of processes joined by gloo, started once for a whole test run; importing torch in each costs seconds."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _serve(pipe: Connection) -> None:
    import gc

    import torch
    import torch.distributed as dist
    import transformers  # noqa: F401  # paid once, before the first task

    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        function, rank, size, port, args = task
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        try:
            pipe.send((True, function(*args)))
        except BaseException as error:
            pipe.send((False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            # models and their hooks are cycles that hold process groups, each with threads that wake up for ever
            gc.collect()
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(name, None)


class Pool:
    """Runs a function on the first `size` processes at once."""

    def __init__(self, timeout_s: float = 180.0) -> None:
        self._timeout_s = timeout_s
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
        """function(*args) on every rank, with torchrun's environment set; results by rank.

        Raises:
            AssertionError: a rank failed (with its traceback) or did not answer in time; the pool starts anew.
        """
        context = multiprocessing.get_context("spawn")
        while len(self._workers) < size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))
        port = _free_port()
        for rank in range(size):
            self._workers[rank][1].send((function, rank, size, port, args))
        results = []
        for rank in range(size):
            pipe = self._workers[rank][1]
            ok, value = pipe.recv() if pipe.poll(self._timeout_s) else (False, f"rank {rank} did not answer")
            if not ok:
                self.close()
                raise AssertionError(value)
            results.append(value)
        return results

    def close(self) -> None:
        """Ends all processes."""
        for process, _ in self._workers:
            process.kill()
        self._workers.clear()
