"""What depends on the device, on the CPU that tests run on."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
import torch

from ascendfactory.engine import device as devices

CPU = torch.device("cpu")


def test_local_device_of_cpu() -> None:
    assert devices.local_device("cpu") == CPU


@pytest.mark.parametrize(("kind", "expected"), [("cpu", "cpu:gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("npu", "cpu:gloo,npu:hccl")])
def test_every_kind_can_carry_cpu_tensors(kind: str, expected: str) -> None:
    assert devices.collective_backend(kind) == expected


def test_random_states_round_trip() -> None:
    saved = devices.rng_state(CPU)
    first = torch.rand(3)
    torch.rand(100)
    devices.set_rng_state(CPU, saved)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize(
    ("flags", "expected"), [("flags: avx2 avx512_bf16", True), ("flags: amx_tile amx_bf16", True), ("flags: avx2", False)]
)
def test_bf16_units_are_read_from_the_flags(monkeypatch: pytest.MonkeyPatch, flags: str, expected: bool) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path: flags)
    assert devices.has_bf16_units("cpu") is expected


def test_accelerators_have_bf16_units() -> None:
    assert devices.has_bf16_units("npu")


def test_peak_memory_is_in_bytes_and_only_grows() -> None:
    before = devices.peak_memory_bytes(CPU)
    block = torch.ones(1, 64 * 2**20 // 4)
    after = devices.peak_memory_bytes(CPU)
    assert block.numel() == 16 * 2**20
    assert 50 * 2**20 < before <= after < 2**40


@pytest.mark.parametrize(("platform", "factor"), [("linux", 1024), ("darwin", 1)])
def test_units_of_the_kernel_differ(monkeypatch: pytest.MonkeyPatch, platform: str, factor: int) -> None:
    class Usage:
        ru_maxrss = 5000

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: Usage())
    assert devices.peak_memory_bytes(CPU) == 5000 * factor
