"""Everything that depends on the kind of device; no other file names one."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

import torch


def local_device(kind: str) -> torch.device:
    """The device of this process: LOCAL_RANK counts accelerators on a node.

    Args:
        kind: `cpu`, `cuda` or `npu` (needs torch_npu).
    """
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "npu":
        import torch_npu  # noqa: F401  # registers torch.npu
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    getattr(torch, kind).set_device(device)
    return device


def collective_backend(kind: str) -> str:
    """Backend string of torch.distributed: gloo beside the device's own, for CPU tensors."""
    return {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[kind]


def has_bf16_units(kind: str) -> bool:
    """Whether bfloat16 matrix products run at speed; CPUs without such instructions are 50 times slower than in fp32."""
    if kind != "cpu":
        return True
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


def peak_memory_bytes(device: torch.device) -> int:
    """Highest memory of this process so far: device memory, or resident memory on CPUs."""
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB
    return int(getattr(torch, device.type).max_memory_allocated(device))


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Random generator states of this process."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = getattr(torch, device.type).get_rng_state(device)
    return state


def set_rng_state(device: torch.device, state: dict[str, torch.Tensor]) -> None:
    """Undoes `rng_state`."""
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and device.type in state:
        getattr(torch, device.type).set_rng_state(state[device.type], device)


def keep_freed_memory() -> None:
    """Makes the C allocator keep what training frees, instead of giving it back to the kernel and faulting it in again.

    Activations are large, so by default glibc maps and unmaps each of them; that was 13 % of a step's CPU time.
    Does nothing where the C library has no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # M_* of malloc.h
        mallopt(mmap_threshold, 64 << 20)  # a mapping of their own only for the few largest, or the heap gets holes
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(top_pad, 64 << 20)
