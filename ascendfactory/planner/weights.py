"""How many parameters each pipeline stage holds, by the way they are split; from the card's real shapes.

Classes: `split` is cut by tp (matrices of attention, MLP and shared experts, embedding, head), `whole` is on every
device of a tp group (norms, routers, latent down-projections), `expert` is spread over ep.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ascendfactory.catalog.params import EXPERT_ROLES, Role, Weight, is_moe_layer, layer_shapes
from ascendfactory.core.plan import ModelCard
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
    head: Ints  # of the head; a tied one has a copy on the last stage when there are several
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


def layer_kind(card: ModelCard, layer: int) -> LayerKind:
    """The parameters of decoder layer `layer`, by class."""
    counts = dict.fromkeys(CLASSES, 0)
    for weight in layer_shapes(card, layer):
        counts[split_class(weight)] += weight.num_params
    return LayerKind(bool(card.moe and is_moe_layer(card.moe, layer)), **counts)


def stage_layers(num_layers: int, pp: int, vpp: int) -> list[list[int]]:
    """The decoder layers of each stage.

    The layers are cut into pp·vpp chunks as equal as they can be; what is left over goes to the last ones but one, since the
    very last also has the head. Chunk c lies on stage c mod pp.
    """
    chunks = pp * vpp
    each, rest = divmod(num_layers, chunks)
    # the last chunk also has the head: the remainder goes to the middle and front ones
    sizes = [each + (1 if 0 < chunks - 1 - c <= rest else 0) for c in range(chunks)] if rest < chunks else []
    stages: list[list[int]] = [[] for _ in range(pp)]
    at = 0
    for chunk, size in enumerate(sizes):
        stages[chunk % pp] += range(at, at + size)
        at += size
    return stages


def stages_of(card: ModelCard, pp: int, vpp: int) -> Stages:
    """The parameters of every stage of a pipeline of pp stages with vpp chunks each."""
    kinds: dict[bool, LayerKind] = {}
    moe_flags = [bool(card.moe and is_moe_layer(card.moe, layer)) for layer in range(card.num_layers)]
    for layer, flag in enumerate(moe_flags):
        if flag not in kinds:
            kinds[flag] = layer_kind(card, layer)
    none = LayerKind(False, 0, 0, 0)
    dense, moe = kinds.get(False, none), kinds.get(True, none)
    cut = stage_layers(card.num_layers, pp, vpp)
    num_moe = np.array([sum(moe_flags[layer] for layer in layers) for layers in cut], np.int64)
    num_dense = np.array([len(layers) for layers in cut], np.int64) - num_moe
    vocab = card.vocab_size * card.hidden_size
    embedding, head = np.zeros(pp, np.int64), np.zeros(pp, np.int64)
    embedding[0] = vocab + (card.vision.num_params if card.vision else 0)
    head[-1] = card.hidden_size + (0 if card.tied_embeddings and pp == 1 else vocab)
    return Stages(
        dense_layers=num_dense,
        moe_layers=num_moe,
        split=num_dense * dense.split + num_moe * moe.split,
        whole=num_dense * dense.whole + num_moe * moe.whole,
        expert=num_moe * moe.expert,
        embedding=embedding,
        head=head,
        largest_layer=np.maximum((num_dense > 0) * (dense.split + dense.whole), (num_moe > 0) * (moe.split + moe.whole)),
        largest_expert=(num_moe > 0) * moe.expert,
    )
