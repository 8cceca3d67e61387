"""How many parameters each pipeline stage holds, by the way they are split; from the card's real shapes.

Classes: `split` is cut by tp (matrices of attention, MLP and shared experts, embedding, head), `whole` is on every
device of a tp group (norms, routers, latent down-projections), `expert` is spread over ep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ascendfactory.catalog.params import EXPERT_ROLES, Role, Weight, is_moe_layer, layer_shapes
from ascendfactory.core.plan import Layout, ModelCard
from ascendfactory.core.recipe import Schedule
from ascendfactory.core.stages import StageCosts, cut, model_costs, owner
from ascendfactory.planner.grid import Ints

WHOLE_ROLES: frozenset[Role] = frozenset({"norm", "qk_norm", "mla_norm", "router", "shared_router", "mla_q_down", "mla_kv_down"})
CLASSES = ("split", "whole", "expert")


@dataclass(frozen=True)
class LayerKind:
    """A decoder layer's parameters, by class; `count` layers of the model look so."""

    is_moe: bool
    split: int
    whole: int
    expert: int

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.split + self.whole + self.expert


@dataclass(frozen=True)
class Stages:
    """What the stages of a pipeline hold; arrays over the stages [S]."""

    dense_layers: Ints
    moe_layers: Ints
    split: Ints  # decoder layers only
    whole: Ints
    expert: Ints
    embedding: Ints  # parameters of the embedding (and the vision tower) on this stage
    head: Ints  # of the head; a tied one has a copy where the embedding is on another stage
    inputs: Ints  # chunks of this stage that follow another chunk
    outputs: Ints  # chunks that another one follows
    largest_layer: Ints  # parameters of the stage's largest layer without its experts
    largest_expert: Ints  # of a layer's experts

    @property
    def layers(self) -> Ints:
        """Decoder layers of a stage."""
        return self.dense_layers + self.moe_layers


def split_class(weight: Weight) -> str:
    """How a weight is divided: `split`, `whole` or `expert`."""
    if weight.role in EXPERT_ROLES:
        return "expert"
    output_bias = weight.role == "o" and len(weight.shape) == 1
    return "whole" if weight.role in WHOLE_ROLES or output_bias else "split"


def kv_extra_params(card: ModelCard, tp: Ints) -> Ints:
    """Parameters a layer that a device holds beyond its tp-th part, where there are fewer key/value heads than devices: each has one."""
    if card.mla:
        return np.zeros_like(tp)
    head = card.head_dim * (card.hidden_size + card.attention_bias)
    return np.asarray(2 * head * np.maximum(0, tp - card.num_kv_heads) // tp)


def layer_kind(card: ModelCard, layer: int) -> LayerKind:
    """The parameters of decoder layer `layer`, by class."""
    counts = dict.fromkeys(CLASSES, 0)
    for weight in layer_shapes(card, layer):
        counts[split_class(weight)] += weight.num_params
    return LayerKind(bool(card.moe and is_moe_layer(card.moe, layer)), **counts)


def even_sizes(num_layers: int, num_chunks: int) -> list[int]:
    """Layers of each chunk, as equal as they can be; none where there are fewer layers than chunks.

    What is left over goes to the last chunks but one, since the very last also has the head.
    """
    each, rest = divmod(num_layers, num_chunks)
    return [each + (1 if 0 < num_chunks - 1 - c <= rest else 0) for c in range(num_chunks)] if rest < num_chunks else []


def stage_layers(sizes: Sequence[int], pp: int, vpp: int, schedule: Schedule = "1f1b") -> list[list[int]]:
    """The decoder layers of each stage, from the number of layers of each chunk."""
    stages: list[list[int]] = [[] for _ in range(pp)]
    at = 0
    for chunk, size in enumerate(sizes):
        stages[owner(chunk, pp, vpp, schedule)] += range(at, at + size)
        at += size
    return stages


def layout_stages(card: ModelCard, layout: Layout, seq_len: int, by_cost: bool) -> Stages:
    """The stages that a layout cuts the model into: as it says itself, else by cost (the embedded engine), else evenly."""
    num_chunks = layout.pp * layout.vpp
    sizes: Sequence[int] = layout.stage_layers
    if not sizes:
        sizes = _cost_sizes(num_chunks, model_costs(card, seq_len)) if by_cost else even_sizes(card.num_layers, num_chunks)
    return stages_of(card, layout.pp, layout.vpp, layout.schedule, tuple(sizes))


@lru_cache(maxsize=1024)
def _cost_sizes(num_chunks: int, costs: StageCosts) -> tuple[int, ...]:
    return tuple(len(layers) for layers in cut(num_chunks, 1, costs))


def stages_of(card: ModelCard, pp: int, vpp: int, schedule: Schedule = "1f1b", sizes: Sequence[int] = ()) -> Stages:
    """The parameters of every stage of a pipeline of pp stages with vpp chunks each.

    Args:
        sizes: layers of each chunk; () = even.
    """
    kinds: dict[bool, LayerKind] = {}
    moe_flags = [bool(card.moe and is_moe_layer(card.moe, layer)) for layer in range(card.num_layers)]
    for layer, flag in enumerate(moe_flags):
        if flag not in kinds:
            kinds[flag] = layer_kind(card, layer)
    none = LayerKind(False, 0, 0, 0)
    dense, moe = kinds.get(False, none), kinds.get(True, none)
    layers_of = stage_layers(sizes or even_sizes(card.num_layers, pp * vpp), pp, vpp, schedule)
    num_moe = np.array([sum(moe_flags[layer] for layer in layers) for layers in layers_of], np.int64)
    num_dense = np.array([len(layers) for layers in layers_of], np.int64) - num_moe
    vocab = card.vocab_size * card.hidden_size
    embedding, head = np.zeros(pp, np.int64), np.zeros(pp, np.int64)
    embedding[0] = vocab + (card.vision.num_params if card.vision else 0)
    last = owner(pp * vpp - 1, pp, vpp, schedule)
    head[last] = card.hidden_size + (0 if card.tied_embeddings and last == 0 else vocab)
    inputs, outputs = np.full(pp, vpp, np.int64), np.full(pp, vpp, np.int64)
    inputs[0] -= 1
    outputs[last] -= 1
    return Stages(
        dense_layers=num_dense,
        moe_layers=num_moe,
        split=num_dense * dense.split + num_moe * moe.split,
        whole=num_dense * dense.whole + num_moe * moe.whole,
        expert=num_moe * moe.expert,
        embedding=embedding,
        head=head,
        inputs=inputs,
        outputs=outputs,
        largest_layer=np.maximum((num_dense > 0) * (dense.split + dense.whole), (num_moe > 0) * (moe.split + moe.whole)),
        largest_expert=(num_moe > 0) * moe.expert,
    )
