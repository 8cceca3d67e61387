"""Cuts a Hugging Face decoder into pipeline chunks without renaming anything.

A device keeps one model of the original class: layers, embedding, last norm and head that it does not own become modules that hand on
their input. Names and layer numbers stay those of the whole model, so files, adapters and per-layer settings need no translation.
A device with several chunks runs each through a shell of the decoder that shares its modules and passes over the other chunks' layers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ascendfactory.core.messages import UserError
from ascendfactory.engine.mesh import Mesh
from ascendfactory.engine.parallel.pieces import Piece, whole_piece


class PassOn(nn.Module):
    """Stands where a module of another stage was: gives its first argument back."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """The input, unchanged."""
        return hidden


@dataclass
class Part:
    """A chunk of the model on this device."""

    number: int
    decoder: Any  # runs this chunk's layers only; on the first chunk it embeds, on the last it ends with the norm
    layers: list[nn.Module]
    is_first: bool
    is_last: bool


@dataclass
class Stage:
    """What of a model a device runs."""

    parts: dict[int, Part]  # by chunk number
    trains_up_to: tuple[bool, ...]  # whether a chunk or one before it has anything to train: only then its output needs a gradient

    @property
    def layer_runs(self) -> list[list[nn.Module]]:
        """The layers of each chunk of this device."""
        return [part.layers for part in self.parts.values()]


def cut_model(base: Any, ranges: Sequence[range], mine: Sequence[int]) -> Stage:
    """Takes out of a model, on meta, what this device does not own.

    Both ends of a tied model keep the embedding's weight; see `tied_ends`.

    Args:
        base: the transformers model, adapters injected.
        ranges: layers of every chunk of the model.
        mine: numbers of this device's chunks.

    Raises:
        UserError: the decoder has weights that are neither embedding, layers nor a norm, so it has no place to be cut.
    """
    decoder, last = base.get_decoder(), len(ranges) - 1
    norms = _final_norms(base)
    tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
    trains_up_to = _trains_up_to(base, ranges, norms)
    embedding = _embedding_name(decoder)
    shells = _keep(base, norms, {i for chunk in mine for i in ranges[chunk]}, first=0 in mine, last=last in mine, tied=tied)
    parts = {}
    for chunk in mine:
        ends = [*(norms if chunk != last else ()), *([embedding] if chunk else [])]
        shell = decoder if len(mine) == 1 else _shell(decoder, ranges[chunk], ends)
        layers = [shells[i] for i in ranges[chunk]]
        parts[chunk] = Part(chunk, shell, layers, is_first=chunk == 0, is_last=chunk == last)
    return Stage(parts, trains_up_to)


def _final_norms(base: Any) -> list[str]:
    """Names, in the decoder, of what follows the layers."""
    decoder, norms = base.get_decoder(), []
    embedding = decoder.get_input_embeddings()
    for name, child in decoder.named_children():
        if child is decoder.layers or child is embedding or not any(True for _ in child.parameters()):
            continue
        if "norm" not in type(child).__name__.lower():
            kind = base.config.model_type
            raise UserError(
                "layout.pp",
                f"the decoder of {kind} has {name!r} beside its layers and cannot be cut into pipeline stages; set layout.pp: 1",
                f"{kind} 的解码器在各层之外还有 {name!r}，无法切分为流水级；请设 layout.pp: 1",
            )
        norms.append(name)
    return norms


def _embedding_name(decoder: Any) -> str:
    embedding = decoder.get_input_embeddings()
    name: str = next(name for name, child in decoder.named_children() if child is embedding)
    return name


def _trains_up_to(base: Any, ranges: Sequence[range], norms: Sequence[str]) -> tuple[bool, ...]:
    decoder, last = base.get_decoder(), len(ranges) - 1
    found, flags = False, []
    for chunk, layers in enumerate(ranges):
        modules = [decoder.layers[i] for i in layers]
        modules += [decoder.get_input_embeddings()] if chunk == 0 else []
        modules += [getattr(decoder, name) for name in norms] + [base.get_output_embeddings()] if chunk == last else []
        found = found or any(p.requires_grad for module in modules for p in module.parameters())
        flags.append(found)
    return tuple(flags)


def _keep(base: Any, norms: Sequence[str], owned: set[int], *, first: bool, last: bool, tied: bool) -> list[nn.Module]:
    """Replaces what is not owned; gives the decoder's layers back."""
    decoder = base.get_decoder()
    for i in range(len(decoder.layers)):
        if i not in owned:
            decoder.layers[i] = PassOn()
    if not last:
        for name in norms:
            setattr(decoder, name, PassOn())
        _replace(base, base.get_output_embeddings())
    if not first and not (last and tied):
        _replace(base, decoder.get_input_embeddings())
    if not (last and tied):
        # else transformers would tie the head to a weight that is not here
        base.all_tied_weights_keys = {}
    return list(decoder.layers)


def _replace(base: nn.Module, module: nn.Module) -> None:
    name = next(name for name, candidate in base.named_modules() if candidate is module)
    parent, _, child = name.rpartition(".")
    setattr(base.get_submodule(parent), child, PassOn())


def _shell(decoder: Any, layers: range, passed: Sequence[str]) -> Any:
    """The decoder once more, sharing every module, with the layers outside the range and the `passed` modules passed over."""
    shell = copy.copy(decoder)
    shell._modules = dict(decoder._modules)
    shell.layers = nn.ModuleList([layer if i in layers else PassOn() for i, layer in enumerate(decoder.layers)])
    for name in passed:
        shell._modules[name] = PassOn()
    return shell


def tied_ends(mesh: Mesh) -> dist.ProcessGroup | None:
    """Joins the first and the last stage of each pipeline, which hold copies of a tied embedding.

    Every process of the run must call it. None where this one is at neither end.
    """
    along = mesh.size // mesh.pp.size  # the pipeline is the outermost axis
    mine = None
    for place in range(along):
        ends = [place, (mesh.pp.size - 1) * along + place]
        group = dist.new_group(ends)
        if mesh.rank in ends:
            mine = group
    return mine


def share_tied(pieces: dict[str, Piece], base: Any, name: str, ends: dist.ProcessGroup) -> None:
    """Notes that a tied embedding lives at both ends: its gradients are summed over them, and count once in the norm.

    Args:
        pieces: of the model, changed in place.
        name: the embedding's public name.
        ends: from `tied_ends`.
    """
    shape = tuple(base.get_input_embeddings().weight.shape)
    piece = pieces.get(name) or whole_piece(shape)
    assert piece.partial_over is None, "a vocabulary-parallel embedding has no partial gradients"
    pieces[name] = replace(piece, copies=2 * piece.copies, partial_over=ends)
