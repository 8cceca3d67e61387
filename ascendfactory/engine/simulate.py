"""A dry run of the engine's own step, for any number of devices, in one process and without memory for it.

The model is built, cut by its layout and stepped under fake tensors with a fake process group: shapes flow, nothing is computed. Two
small depths are traced and the rest is a straight line, since layers are alike; so are micro-batches beyond those that fill a pipeline.
What comes out is what the code will do: peak bytes of a device by kind, and bytes that each collective hands to it, by the axis of
the layout that they travel along. Of a pipeline the fullest stage is traced, as the plan names it.

Seen from the CPU build of torch, so attention is the CPU kernel's; an allocator's fragmentation and the buffers of
NCCL or HCCL are not in it.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ascendfactory.core.plan import Layout, Plan
from ascendfactory.core.stages import chunks_of, layout_cut, model_costs
from ascendfactory.engine import model as models
from ascendfactory.engine.build import assemble_model, make_pipeline, needs_fsdp
from ascendfactory.engine.data.batch import IGNORED, MicroBatch
from ascendfactory.engine.mesh import Mesh, make_mesh
from ascendfactory.engine.objective.causal_lm import CausalLM
from ascendfactory.engine.optim import Optimizer
from ascendfactory.engine.parallel.context import cut
from ascendfactory.engine.parallel.pieces import local
from ascendfactory.engine.passes import forward_backward

DEPTHS = (2, 4)  # layers of the two traced models; of each chunk of a pipeline half as many
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")

Bytes = dict[str, int]


@dataclass(frozen=True)
class Simulation:
    """What one device would hold and receive in an optimizer step.

    `peak_bytes` is the highest moment, by kind of tensor (weights, gradients, moments, activations, other);
    `communicated_bytes` the outputs of each collective operation along each axis, as `all_gather tp`.
    """

    peak_bytes: Bytes
    communicated_bytes: Bytes
    trained_share: float  # of positions with a label, as assumed

    @property
    def total_bytes(self) -> int:
        """Peak bytes of all kinds."""
        return sum(self.peak_bytes.values())


@dataclass(frozen=True)
class _Trace:
    """Of a step with so many layers and micro-batches."""

    peak: Bytes
    communicated: Bytes


def simulate(plan: Plan, trained_share: float = 1.0) -> Simulation:
    """Traces the plan's step at two depths and extends it to the model's own.

    Args:
        plan: of the embedded engine; any number of devices.
        trained_share: share of positions that have a label (the head works at these only).

    Raises:
        UserError: the model's config.json cannot be read.
    """
    config = models.read_config(plan.recipe.model.path)
    stage = _fullest_stage(plan)
    layers = _own_layers(plan, stage)
    again = plan.layout.recompute_layers
    if not 0 < again < layers:
        found = _at_depth(plan, config, stage, trained_share, layers)
    else:  # layers of two kinds: the recomputed ones, and what each of the others adds
        found = _at_depth(_with_layout(plan, recompute_layers=again), config, stage, trained_share, again)
        plain = _with_layout(plan, recompute="none", recompute_layers=0)
        more, fewer = (_at_depth(plain, config, stage, trained_share, depth) for depth in (layers, again))
        found = _Trace(_sum(found.peak, more.peak, fewer.peak), _sum(found.communicated, more.communicated, fewer.communicated))
    return Simulation(_positive(found.peak), _positive(found.communicated), trained_share)


def _fullest_stage(plan: Plan) -> int:
    sizes = [sum(term.num_bytes for term in terms) for terms in plan.stages]
    return sizes.index(max(sizes)) if len(sizes) == plan.layout.pp else 0


def _own_layers(plan: Plan, stage: int) -> int:
    """Decoder layers of a stage."""
    layout = plan.layout
    if layout.pp == 1:
        return plan.card.num_layers
    ranges = layout_cut(layout, model_costs(plan.card, plan.recipe.data.seq_len))
    return sum(len(ranges[chunk]) for chunk in chunks_of(stage, layout.pp, layout.vpp, layout.schedule))


def _with_layout(plan: Plan, **changes: Any) -> Plan:
    return plan.model_copy(update={"layout": plan.layout.model_copy(update=changes)})


def _sum(base: Bytes, plus: Bytes, minus: Bytes) -> Bytes:
    return {name: base.get(name, 0) + plus.get(name, 0) - minus.get(name, 0) for name in {**base, **plus, **minus}}


def _positive(sizes: Bytes) -> Bytes:
    return {name: size for name, size in sizes.items() if size > 0}


def _at_depth(plan: Plan, config: Any, stage: int, trained_share: float, layers: int) -> _Trace:
    """A step with so many layers on the stage, on the line through two shorter models."""
    low, high = (depth * plan.layout.vpp // (2 if plan.layout.pp > 1 else 1) for depth in DEPTHS)
    if plan.layout.pp == 1:
        low, high = min(low, layers), min(high, layers)
    return _line(low, _at_count(plan, config, stage, trained_share, low), high, _at_count(plan, config, stage, trained_share, high), layers)


def _at_count(plan: Plan, config: Any, stage: int, trained_share: float, layers: int) -> _Trace:
    """A step with all its micro-batches: traced where they are few, else on the line through two smaller counts."""
    layout, wanted = plan.layout, plan.layout.num_micro
    short = _shortened(plan, layers)
    config = _shortened_config(config, short.card.num_layers)
    low, high = (2 * layout.pp, 3 * layout.pp) if layout.pp > 1 else (2, 3)
    if wanted <= high:
        return _trace(short, config, stage, trained_share, wanted)
    traces = [_trace(short, config, stage, trained_share, count) for count in (low, high)]
    return _line(low, traces[0], high, traces[1], wanted)


def _line(x0: int, y0: _Trace, x1: int, y1: _Trace, x: int) -> _Trace:
    def extend(a: Bytes, b: Bytes) -> Bytes:
        return {n: b.get(n, 0) if x1 == x0 else round(a.get(n, 0) + (b.get(n, 0) - a.get(n, 0)) * (x - x0) / (x1 - x0)) for n in {**a, **b}}

    return _Trace(extend(y0.peak, y1.peak), extend(y0.communicated, y1.communicated))


def _shortened(plan: Plan, layers: int) -> Plan:
    """The plan of a model with so many layers on each stage."""
    layout = plan.layout
    sizes = (layers // layout.vpp,) * (layout.pp * layout.vpp) if layout.pp > 1 else ()
    return _with_layout(
        plan.model_copy(update={"card": plan.card.model_copy(update={"num_layers": layers * layout.pp})}), stage_layers=sizes
    )


def _shortened_config(config: Any, depth: int) -> Any:
    """The config with another number of layers; lists of one entry a layer follow."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    full = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == full:
            setattr(text, name, (value * -(-depth // full))[:depth])
    text.num_hidden_layers = depth
    return config


@contextmanager
def _fake_processes(rank: int, layout: Layout) -> Iterator[None]:
    """A process group whose collectives return at once; this process is one of them."""
    names = {"RANK": str(rank), "WORLD_SIZE": str(layout.num_devices), "LOCAL_RANK": "0"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.num_devices)
    try:
        yield
    finally:
        dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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


class _CountCollectives(TorchDispatchMode):  # type: ignore[misc,unused-ignore]
    """Adds up the bytes that collective operations put out on this device, by operation and axis."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.received_bytes: Counter[str] = Counter()
        axes = {name: getattr(mesh, name).group for name in ("tp", "pp", "ring", "ulysses")}
        self._axes = {group.group_name: name for name, group in axes.items() if group is not None}
        shards = {name: mesh.fsdp.get_group(name) for name in mesh.fsdp.mesh_dim_names or ()} if mesh.fsdp is not None else {}
        self._fsdp = {group.group_name: "dp" if name == "shard" else name for name, group in shards.items()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace in _COLLECTIVES and "wait" not in function._opname and "send" not in function._opname:
            # some hand their outputs back, others only fill what they were given first
            filled = [t for t in tree_leaves(result) if isinstance(t, Tensor)] or tree_leaves(args[0])
            outputs = {id(t): t for t in filled}
            operation = _public(function._opname)
            name = f"{operation} {self._axis(operation, [*args, *(kwargs or {}).values()])}"
            self.received_bytes[name] += sum(t.numel() * t.element_size() for t in outputs.values())
        return result

    def _axis(self, operation: str, args: list[Any]) -> str:
        """The axis of the group among an operator's arguments; groups of a few devices of one axis, and of all, have no name.

        Where dp is 1, FSDP and context parallelism share a group: what gathers and reduces is FSDP's.
        """
        known = self._axes | self._fsdp if "gather" in operation or "reduce" in operation else self._fsdp | self._axes
        for value in args:
            if isinstance(value, torch.ScriptObject):
                value = dist.ProcessGroup.unbox(value).group_name
            if isinstance(value, str) and value in known:
                return known[value]
        return "others"


def _public(operation: str) -> str:
    """`_allgather_base_` and `all_gather_into_tensor_out` → `all_gather`."""
    flat = operation.replace("_", "")
    known = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "recv")
    return next((name for name in known if name.replace("_", "") in flat), operation)


@dataclass(eq=False)
class _Block:
    """A storage: its size now, and what it is for (which may turn out later)."""

    kind: str
    size: int = 0


class _Memory(TorchDispatchMode):  # type: ignore[misc,unused-ignore]
    """Follows the bytes of all storages that operators make, and remembers the fullest moment.

    torch's own MemTracker measures every module as well, which makes a step several times as slow.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, tuple[_Block, Any]] = {}
        self._total = self._peak = 0
        self._fullest: list[tuple[_Block, int]] = []

    def label(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Says what tensors are for, whether they are known or not."""
        for tensor in tensors:
            self._block(local(tensor).untyped_storage()).kind = kind

    def peak(self) -> Bytes:
        """Bytes at the fullest moment, by kind."""
        sizes: Counter[str] = Counter()
        for block, size in self._fullest:
            sizes[block.kind] += size
        return dict(sizes)

    def __enter__(self) -> _Memory:
        self._resize = torch.UntypedStorage.resize_
        real, resized = self._resize, self._resized

        def resize(storage: Any, size: int) -> Any:  # no operator: FSDP frees and refills whole weights so
            real(storage, size)
            resized(storage)

        torch.UntypedStorage.resize_ = resize
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # the one value that a step looks at: the gradient of its loss
        if any(kind is DTensor for kind in types):
            return NotImplemented  # its local operators will come
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._block(tensor.untyped_storage())
        return result

    def _block(self, storage: Any) -> _Block:
        key = storage._cdata
        if key not in self._blocks:
            kind = "backward temporaries" if torch._C._current_graph_task_id() != -1 else "activations"
            block = _Block(kind)
            self._blocks[key] = block, weakref.ref(storage, lambda _: self._gone(key))
            self._resized(storage)
        return self._blocks[key][0]

    def _resized(self, storage: Any) -> None:
        if storage._cdata not in self._blocks:
            return
        block, size = self._blocks[storage._cdata][0], storage.nbytes()
        self._total += size - block.size
        block.size = size
        if self._total > self._peak:
            self._peak = self._total
            self._fullest = [(known, known.size) for known, _ in self._blocks.values()]

    def _gone(self, key: int) -> None:
        self._total -= self._blocks.pop(key)[0].size


def _trace(plan: Plan, config: Any, stage: int, trained_share: float, num_micro: int) -> _Trace:
    """One optimizer step of a model of this depth with so many micro-batches."""
    plan = _with_layout(plan, num_micro=num_micro)
    layout = plan.layout
    with _fake_processes(stage * (layout.num_devices // layout.pp), layout):
        mesh = make_mesh(layout, "cpu", sharded=needs_fsdp(plan))
        skeleton = assemble_model(plan, mesh, config)
        model = skeleton.model
        pipeline = make_pipeline(plan, mesh, model)
        batches = [cut(_batch(plan, trained_share), mesh) for _ in range(num_micro)]
        counter = _CountCollectives(mesh)
        with FakeTensorMode(allow_non_fake_inputs=True), _local_shapes():
            model.to_empty(device="cpu")
            skeleton.base.tie_weights(recompute_mapping=False)
            model.train()
            optimizer = Optimizer(model, plan.recipe.optim, layout, 1, mesh)
            memory = _Memory()
            _label_weights(model, memory)
            memory.label(optimizer.moments().values(), "moments")
            with memory, counter:
                optimizer.start_step(0)
                forward_backward(model, pipeline, layout, batches, 1.0)
                optimizer.sum_partial_gradients()
                memory.label((p.grad for p in optimizer.parameters.values() if p.grad is not None), "gradients")
                optimizer.step(0, 0.0)
        peak = {name: size for name, size in memory.peak().items() if size}
    return _Trace(peak, dict(counter.received_bytes))


def _label_weights(model: CausalLM, memory: _Memory) -> None:
    """Shards, and the whole weights that FSDP puts in their place while a module runs."""

    def label(module: torch.nn.Module, *_: Any) -> None:
        memory.label(module.parameters(), "weights")
        memory.label(module.buffers(), "buffers")

    label(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(label)


def _batch(plan: Plan, trained_share: float) -> MicroBatch:
    """A packed micro-batch of full rows, one document each."""
    rows, length = plan.layout.micro_size, plan.recipe.data.seq_len
    zeros = torch.zeros(rows, length, dtype=torch.int64)
    num_trained = max(1, int(rows * length * trained_share))
    labels = zeros.flatten().masked_fill(torch.arange(rows * length) >= num_trained, IGNORED).view(rows, length)
    return MicroBatch(zeros, labels, zeros, zeros.int(), torch.arange(num_trained), [[length]] * rows)
