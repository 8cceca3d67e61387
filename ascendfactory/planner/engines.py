"""How training engines keep weights, gradients, optimizer state and activations: the differences that memory and time depend on.

`native` is the embedded engine (FSDP2). `llamafactory` is DeepSpeed ZeRO under transformers. The MindSpeed engines and
`megatron` follow Megatron-Core. `torchtitan` and `megatron` are there to be compared with published tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ascendfactory.core.recipe import LayoutSpec
from ascendfactory.planner.grid import RECOMPUTES

GIB = 2**30


@dataclass(frozen=True)
class Engine:
    """One engine's habits. Bytes are per parameter of what is trained unless said otherwise."""

    name: str
    weight_bytes: int  # kept for a parameter besides the optimizer's master, in a 2-byte run
    grad_bytes: int  # kept for a gradient
    master_bytes: int  # fp32 master in the optimizer
    keeps_copy: bool  # the computing copy is kept whole between steps (Megatron), or gathered from the shards (FSDP, ZeRO-3)
    zeros: tuple[int, ...]  # what data parallelism can shard
    logit_bytes: int  # of a token and a word: all copies of the logits that the loss makes; 0 = in chunks
    split_logit_bytes: int  # the same where tp splits the vocabulary
    mlp_units: int  # tensors of the feed-forward size that a gated MLP keeps: 2 gate and up, 3 + product, 4 + silu(gate)
    eager_norm: bool  # norms keep fp32 copies
    inputs: Literal["whole", "shards", "regathered"]  # of column-parallel layers under sequence parallelism, see `LayerBytes`
    degrees: frozenset[str]  # layout degrees that may exceed 1
    recomputes: tuple[str, ...] = RECOMPUTES
    overlap: float = 0.8  # share of the data-parallel communication that hides behind compute
    buffer_bytes: int = 0  # buckets and other fixed buffers
    reserve: dict[str, int] | None = None  # runtime by device kind; None: that of the embedded engine
    overhead: float = 0.0  # share of the activations that the caching allocator loses
    nodes: bool = True  # runs on several machines
    cuts_by_cost: bool = False  # pipeline stages are cut by what their layers cost, head included; else evenly
    torch_stages: bool = False  # pipelines are those of torch.distributed.pipelining
    kept_logit_bytes: int = 0  # of the logits that a pipeline keeps of each micro-batch until the step ends


_MEGATRON_DEGREES = frozenset({"dp", "tp", "pp", "vpp", "ring", "ulysses", "ep"})

NATIVE = Engine(
    "native",
    weight_bytes=0,
    grad_bytes=4,
    master_bytes=4,
    keeps_copy=False,
    zeros=(1, 2, 3),
    logit_bytes=0,
    split_logit_bytes=0,
    mlp_units=2,
    eager_norm=False,
    inputs="regathered",
    degrees=frozenset({"dp", "replicate", "tp", "pp", "vpp", "ring", "ulysses", "ep"}),
    cuts_by_cost=True,
)
MEGATRON = Engine(
    "megatron",
    weight_bytes=2,
    grad_bytes=4,
    master_bytes=4,
    keeps_copy=True,
    zeros=(1,),
    logit_bytes=10,
    split_logit_bytes=10,
    mlp_units=3,
    eager_norm=False,
    inputs="shards",
    degrees=_MEGATRON_DEGREES,
    buffer_bytes=GIB // 2,
)
TORCHTITAN = Engine(
    "torchtitan",
    weight_bytes=0,
    grad_bytes=4,
    master_bytes=4,
    keeps_copy=False,
    zeros=(2, 3),
    logit_bytes=14,  # bf16, its fp32 log-softmax, two fp32 gradients
    split_logit_bytes=22,  # torch's loss_parallel makes two more fp32 copies backward
    mlp_units=3,
    eager_norm=True,
    inputs="whole",
    degrees=NATIVE.degrees,
    torch_stages=True,
    kept_logit_bytes=2,  # torch's schedules of that time merge the last stage's outputs
)
LLAMAFACTORY = Engine(
    "llamafactory",
    weight_bytes=2,
    grad_bytes=2,
    master_bytes=4,
    keeps_copy=False,
    zeros=(2, 3),
    logit_bytes=14,
    split_logit_bytes=14,
    mlp_units=4,
    eager_norm=True,
    inputs="whole",
    degrees=frozenset({"dp"}),
    recomputes=("none", "full"),
    overlap=0.5,
    buffer_bytes=GIB,
)

ENGINES: dict[str, Engine] = {
    "native": NATIVE,
    "llamafactory": LLAMAFACTORY,
    "mindspeed_llm": Engine(**{**MEGATRON.__dict__, "name": "mindspeed_llm"}),
    "mindspeed_mm": Engine(**{**MEGATRON.__dict__, "name": "mindspeed_mm"}),
    "mindspeed_rl": Engine(**{**MEGATRON.__dict__, "name": "mindspeed_rl"}),
    "verl": Engine(
        **{
            **NATIVE.__dict__,
            "name": "verl",
            "logit_bytes": 14,
            "split_logit_bytes": 14,
            "zeros": (3,),
            "degrees": frozenset({"dp", "ulysses"}),
            "mlp_units": 3,
        }
    ),
    "megatron": MEGATRON,
    "torchtitan": TORCHTITAN,
}
VERL_MEGATRON = Engine(**{**MEGATRON.__dict__, "name": "verl"})


def engine_of(name: str, spec: LayoutSpec | None = None) -> Engine:
    """The engine of that name; one that is not known is taken to behave as the embedded engine.

    Args:
        spec: the recipe's layout; verl trains with FSDP, or with Megatron where tp, pp or ep is asked for.
    """
    if name == "verl" and spec and any(degree not in ("auto", 1) for degree in (spec.tp, spec.pp, spec.ep)):
        return VERL_MEGATRON
    return ENGINES.get(name, NATIVE)
