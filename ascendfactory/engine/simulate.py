"""A dry run of the engine's own step, for any number of devices, in one process and without memory for it.

The model is built and stepped under fake tensors with a fake process group: shapes flow, nothing is computed. Two small
depths are traced and the rest is a straight line, since layers are alike. What comes out is what the code will do:
peak bytes of a device by kind, and bytes that each collective hands to it.

Seen from the CPU build of torch, so attention is the CPU kernel's; an allocator's fragmentation and the buffers of
NCCL or HCCL are not in it.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ascendfactory.core.plan import Plan
from ascendfactory.engine import model as models
from ascendfactory.engine.build import assemble_model, needs_fsdp
from ascendfactory.engine.data.batch import MicroBatch
from ascendfactory.engine.mesh import Mesh
from ascendfactory.engine.optim import Optimizer
from ascendfactory.engine.parallel.fsdp import mark_micro_batch

DEPTHS = (2, 4)  # layers of the two traced models
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")


@dataclass(frozen=True)
class Simulation:
    """What one device would hold and receive in an optimizer step.

    `peak_bytes` is the highest moment, by kind of tensor (weights, gradients, moments, activations, other);
    `communicated_bytes` the outputs of each collective operation.
    """

    peak_bytes: dict[str, int]
    communicated_bytes: dict[str, int]
    trained_share: float  # of positions with a label, as assumed

    @property
    def total_bytes(self) -> int:
        """Peak bytes of all kinds."""
        return sum(self.peak_bytes.values())


def simulate(plan: Plan, trained_share: float = 1.0) -> Simulation:
    """Traces the plan's step at two depths and extends it to the model's own.

    Args:
        plan: of the embedded engine; any number of devices.
        trained_share: share of positions that have a label (the head works at these only).

    Raises:
        UserError: the model's config.json cannot be read.
    """
    config = models.read_config(plan.recipe.model.path)
    depth = config.get_text_config().num_hidden_layers
    low, high = (min(d, depth) for d in DEPTHS)
    with _fake_processes(plan.layout.dp):
        traces = [_trace(plan, _shortened(config, d), trained_share) for d in (low, high)]
    peak, communicated = (
        {name: _line(low, traces[0][part].get(name, 0), high, traces[1][part].get(name, 0), depth) for name in traces[1][part]}
        for part in (0, 1)
    )
    return Simulation(peak, communicated, trained_share)


def _line(x0: int, y0: int, x1: int, y1: int, x: int) -> int:
    return y1 if x1 == x0 else round(y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def _shortened(config: Any, depth: int) -> Any:
    """The config with fewer layers; lists of one entry a layer are cut."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    full = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == full:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth
    return config


@contextmanager
def _fake_processes(size: int) -> Iterator[None]:
    """A process group whose collectives return at once; this process is its first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _local_shapes() -> Iterator[None]:
    """DTensor finds output shapes by running operators at global shape; a tracker must not count those."""
    names = ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached")
    real = {name: getattr(ShardingPropagator, name) for name in names if hasattr(ShardingPropagator, name)}

    def untracked(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **kwargs)

        return call

    for name, function in real.items():
        setattr(ShardingPropagator, name, untracked(function))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(ShardingPropagator, name, function)


class _CountCollectives(TorchDispatchMode):
    """Adds up the bytes that collective operations put out on this device."""

    def __init__(self) -> None:
        super().__init__()
        self.received_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace in _COLLECTIVES and "wait" not in function._opname:
            outputs = {id(t): t for t in tree_leaves(result) if isinstance(t, Tensor)}
            self.received_bytes[_public(function._opname)] += sum(t.numel() * t.element_size() for t in outputs.values())
        return result


def _public(operation: str) -> str:
    """`_allgather_base_` and `all_gather_into_tensor_out` → `all_gather`."""
    flat = operation.replace("_", "")
    return next(
        (name for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast") if name.replace("_", "") in flat),
        operation,
    )


class _Tracker(MemTracker):
    """torch's tracker hooks the gradient of every parameter; a frozen one has none to hook."""

    def _track_module_params_and_buffers(self, module: Any, install_grad_hooks: bool = True) -> tuple[int, int]:
        for parameter in module.parameters():
            if not parameter.requires_grad and parameter not in self._param_to_grad_hook_handles:
                self._param_to_grad_hook_handles[parameter] = (RemovableHandle(OrderedDict()), RemovableHandle(OrderedDict()))
        sizes: tuple[int, int] = super()._track_module_params_and_buffers(module, install_grad_hooks)
        return sizes


def _trace(plan: Plan, config: Any, trained_share: float) -> tuple[dict[str, int], dict[str, int]]:
    """Peak bytes by kind and communicated bytes of one optimizer step of a model of this depth."""
    layout = plan.layout
    dp = init_device_mesh("cpu", (layout.replicate, layout.shard), mesh_dim_names=("replicate", "shard")) if needs_fsdp(plan) else None
    mesh = Mesh(torch.device("cpu"), 0, layout.dp, dp)
    model, base = assemble_model(plan, mesh, config)
    counter = _CountCollectives()
    with FakeTensorMode(allow_non_fake_inputs=True), _local_shapes():
        model.to_empty(device="cpu")
        base.tie_weights(recompute_mapping=False)
        model.train()
        optimizer = Optimizer(model, plan.recipe.optim, 1, mesh, layout.replicate)
        tracker = _Tracker()
        tracker.track_external(model, optimizer.adamw)
        with tracker, counter:
            for number in range(min(2, layout.num_micro)):
                tracker.reset_mod_stats()  # it wants one forward pass a module at a time
                mark_micro_batch(model, layout, is_last=number == min(2, layout.num_micro) - 1)
                model(_batch(plan, trained_share), 1.0).backward()
            optimizer.adamw.step()
            optimizer.drop_gradients()
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return {_kind(name): size for name, size in snapshot.items() if _kind(name) != "total" and size}, dict(counter.received_bytes)


def _kind(name: Any) -> str:
    known = {
        "Parameter": "weights",
        "Gradient": "gradients",
        "Optstate": "moments",
        "Activation": "activations",
        "Temp": "backward temporaries",
    }
    label = str(getattr(name, "value", name))
    return known.get(label, label.lower())


def _batch(plan: Plan, trained_share: float) -> MicroBatch:
    """A packed micro-batch of full rows, one document each."""
    rows, length = plan.layout.micro_size, plan.recipe.data.seq_len
    zeros = torch.zeros(rows, length, dtype=torch.int64)
    trained_at = torch.zeros(max(1, int(rows * length * trained_share)), dtype=torch.int64)
    return MicroBatch(zeros, zeros, zeros, zeros.int(), trained_at, [[length]] * rows)
