"""Ordered work over forked processes that cannot hang: a worker that dies is named, not waited for."""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from ascendfactory.core.messages import UserError

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection


def ordered_map(function: Callable[[In], Out], items: Iterable[In], num_workers: int) -> Iterator[Out]:
    """function(item) of each item, in their order, computed by num_workers forked processes.

    A worker holds one item at a time, so memory stays bounded, and neither side can block the other.

    Raises:
        UserError: what the function raised, or that a worker was killed (mostly: out of memory).
        RuntimeError: any other failure in a worker, with its traceback.
    """
    context = multiprocessing.get_context("fork")  # the function may hold a tokenizer: nothing is pickled, nothing is imported again
    workers: list[_Worker] = []
    with_parallelism = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process; the library reads nothing but this variable
    try:
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            inherited = [*(worker.connection for worker in workers), ours]
            process = context.Process(target=_work, args=(function, theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            workers.append(_Worker(process, ours))
    finally:
        if with_parallelism is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = with_parallelism
    try:
        idle, busy = deque(workers), deque[_Worker]()
        for item in items:
            if not idle:
                idle.append(busy.popleft())
                result = _receive(idle[0])
                _send(idle, busy, item)
                yield result
            else:
                _send(idle, busy, item)
        while busy:
            yield _receive(busy.popleft())
    finally:
        for worker in workers:
            worker.connection.close()
            worker.process.terminate()
            worker.process.join()


def _send(idle: deque[_Worker], busy: deque[_Worker], item: Any) -> None:
    worker = idle.popleft()
    with suppress(BrokenPipeError):  # a dead worker is named when its result is asked for
        worker.connection.send(item)
    busy.append(worker)


def _work(function: Callable[[In], Out], connection: Connection, inherited: list[Connection]) -> None:
    for parents_end in inherited:  # else a worker would hold its own pipe open, and outlive a parent that was killed
        parents_end.close()
    gc.freeze()  # what was inherited is neither walked nor copied by collections
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        try:
            connection.send((function(item), None))
        except UserError as error:
            connection.send((None, error))
        except Exception:
            connection.send((None, traceback.format_exc()))


def _receive(worker: _Worker) -> Any:
    process = worker.process
    try:
        result, error = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        raise UserError(
            "data.workers",
            f"a tokenising process ended with code {process.exitcode} (-9: killed, mostly for lack of memory); set a smaller data.workers",
            f"一个分词进程以代码 {process.exitcode} 退出（-9 表示被杀死，多因内存不足）；请调小 data.workers",
        ) from None
    if isinstance(error, UserError):
        raise error
    if error is not None:
        raise RuntimeError(f"a tokenising process failed:\n{error}")
    return result
