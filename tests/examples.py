"""Plans to test with, made without a planner or a framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ascendfactory.core.load import load_recipe
from ascendfactory.core.plan import Cluster, Device, Layout, Line, MemoryTerm, ModelCard, Plan

CARD = ModelCard(
    name="Tiny",
    family="llama",
    hub_id="org/tiny",
    num_layers=2,
    hidden_size=16,
    ffn_size=32,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=64,
    max_seq_len=128,
    num_params=10_000,
    num_active_params=10_000,
)
CPU = Device(
    name="cpu",
    title="CPU",
    kind="cpu",
    memory_bytes=8 * 2**30,
    peak_bf16_flops=1e9,
    peak_fp32_flops=1e11,
    memory_bandwidth_bytes_s=1e10,
    devices_per_node=1,
    intra_node_bytes_s=1e9,
    inter_node_bytes_s=1e9,
    has_bf16=False,
)


def device(name: str, kind: str, count: int = 8) -> Device:
    """An accelerator."""
    return CPU.model_copy(update={"name": name, "title": name, "kind": kind, "devices_per_node": count, "has_bf16": True})


def make(run_dir: str | Path, *overrides: str, model: str = "m", device: Device = CPU, nproc: int = 1, **layout: Any) -> Plan:
    """A plan of one recipe, with the overrides over it."""
    return Plan(
        recipe=load_recipe(f"model: {model}\ndata: d.jsonl", overrides),
        card=CARD,
        backend="native",
        cluster=Cluster(device=device, nodes=1, nproc=nproc),
        layout=Layout(dp=nproc, **layout),
        dtype="float32",
        run_dir=str(run_dir),
        memory=[MemoryTerm(name="weights", num_bytes=2**30, formula="4·T"), MemoryTerm(name="moments", num_bytes=2**31, formula="8·T")],
        why=[Line(en="dp 1: one device", zh="dp 1：一个设备"), Line(en="<b>escaped</b>", zh="<b>escaped</b>")],
    )
