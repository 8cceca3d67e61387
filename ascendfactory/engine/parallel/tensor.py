"""Tensor and sequence parallelism of unmodified Hugging Face decoders, from their own plans.

A block (attention, MLP) reads one input, which its column modules multiply by their shares of the outputs; its row module
multiplies its share of what came of them, and the results are summed (Shoeybi et al. 2019, arXiv:1909.08053). Between the blocks
the residual stream is whole on every device, or, under sequence parallelism, [B, S/tp, M] (Korthikanti et al. 2022,
arXiv:2205.05198); rotary angles always come from the full positions. transformers' `base_model_tp_plan` says which module is
which; ours are the rules for what it leaves open: embedding and head (by vocabulary), norms, biases, fused matrices (each part is
shared out by itself, so nothing is gathered), fewer key/value heads than devices.

Shape letters: B rows, S positions of a row, s those of one device, M hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ascendfactory.core.messages import UserError
from ascendfactory.engine.kernels import embedding as lean_embedding
from ascendfactory.engine.kernels import is_plain_embedding
from ascendfactory.engine.mesh import Axis
from ascendfactory.engine.parallel.collectives import Parallel, enter, interval, leave
from ascendfactory.engine.parallel.linear import columns, read_linear, row
from ascendfactory.engine.parallel.pieces import Piece, whole_piece

COLUMN, ROW, FREE = "column", "row", "free"
STYLES = {
    "colwise": COLUMN,
    "colwise_gather_output": COLUMN,  # our fused and head-wise rules need no gather
    "rowwise": ROW,
    "rowwise_split_input": ROW,
    "replicated_with_grad_allreduce": FREE,  # a norm of heads: found by its size
}
# of families whose plan says nothing about their layers
USUAL_PLAN = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
QUERIES, KEYS_VALUES = ("q_proj", "query", "wq"), ("k_proj", "v_proj", "key", "value", "wk", "wv")

Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Share:
    """This device's part of a module's outputs (or inputs), and who holds the same part."""

    intervals: Intervals
    copies: int = 1
    partial_over: dist.ProcessGroup | None = None


@dataclass
class Heads:
    """The attention heads of a model and this device's part of them.

    Where there are fewer key/value heads than devices, tp / num_kv neighbours hold the same one; each sees the gradient that comes
    through its own query heads, so they sum it.
    """

    num_q: int
    num_kv: int
    axis: Axis
    sharers: dist.ProcessGroup | None = None

    @property
    def copies(self) -> int:
        """Devices that hold the same key/value head."""
        return max(1, self.axis.size // self.num_kv)

    @property
    def local_q(self) -> int:
        """Query heads of this device."""
        return self.num_q // self.axis.size

    @property
    def local_kv(self) -> int:
        """Key/value heads of this device."""
        return max(1, self.num_kv // self.axis.size)

    def q_share(self, size: int) -> Share:
        """Of the query heads' outputs, `size` each."""
        return Share((_times(interval(self.num_q, self.axis), size),))

    def kv_share(self, size: int) -> Share:
        """Of the key or value heads' outputs, `size` each."""
        first = self.axis.rank * self.num_kv // self.axis.size
        return Share((_times((first, first + self.local_kv), size),), self.copies, self.sharers)


def _times(pair: tuple[int, int], factor: int) -> tuple[int, int]:
    return pair[0] * factor, pair[1] * factor


@dataclass
class _Work:
    """What `apply` carries along: the places it has decided, by the identity of the parameter on meta."""

    parallel: Parallel
    heads: Heads
    config: Any
    pieces: dict[int, Piece] = field(default_factory=dict)  # by id of the old parameter
    smaller: dict[int, nn.Parameter] = field(default_factory=dict)
    decided: dict[int, nn.Parameter] = field(default_factory=dict)  # by id: old and new, so that no id is given out again


def apply(hf: Any, axis: Axis, *, sequence: bool, overlap_chunks: int = 1, regather: bool = True) -> dict[str, Piece]:
    """Shares the model's weights out over the axis: smaller parameters, and forward methods that send what is needed.

    Args:
        hf: a transformers model on meta, possibly inside peft's wrapper.
        axis: the tensor-parallel axis; of size 1, nothing changes.
        sequence: sequence parallelism; the number of positions must then be a multiple of the axis.
        overlap_chunks: see `Parallel`.
        regather: see `Parallel`; of no use where whole layers are recomputed.

    Returns:
        Name of each parameter in `hf.named_parameters()` → the piece of it that is left.

    Raises:
        UserError: the heads cannot be shared out, or the model has parts that no rule covers.
    """
    base = hf.get_base_model() if hasattr(hf, "get_base_model") else hf
    config = base.config.get_text_config()
    parallel = Parallel(axis, sequence, overlap_chunks, regather)
    base.tensor_parallel = parallel
    if axis.size == 1:
        return {}
    work = _Work(parallel, _heads(config, axis), config)
    _refuse_dropout(base, parallel)
    decoder = base.get_decoder()
    plan = _layer_plan(base, decoder)
    for number, layer in enumerate(decoder.layers):
        _share_layer(layer, plan, work, f"layer {number}")
    _share_embedding(base.get_input_embeddings(), work)
    head = base.get_output_embeddings()
    if head is not None:
        _share_head(head, work)
    for module in hf.modules():  # norms of the residual stream, and whatever else each device holds whole
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in work.decided:
                if parameter.ndim != 1:
                    raise _unknown(config, f"a parameter of shape {tuple(parameter.shape)} in {type(module).__name__}")
                _keep_whole(parameter, work, partial=sequence)
    return _names(hf, work)


def _names(hf: nn.Module, work: _Work) -> dict[str, Piece]:
    of_new = {id(work.smaller[old]): piece for old, piece in work.pieces.items()}
    return {name: of_new[id(parameter)] for name, parameter in hf.named_parameters()}


def _heads(config: Any, axis: Axis) -> Heads:
    num_q = config.num_attention_heads
    num_kv = getattr(config, "num_key_value_heads", None) or num_q
    if num_q % axis.size:
        fits = [n for n in range(1, num_q + 1) if num_q % n == 0]
        best = min(fits, key=lambda n: abs(n - axis.size))
        raise UserError(
            "layout.tp",
            f"{num_q} attention heads cannot be shared by tp {axis.size}; nearest: {best} (of {', '.join(map(str, fits))})",
            f"{num_q} 个注意力头无法由 tp {axis.size} 均分；最接近的是 {best}（可选：{'、'.join(map(str, fits))}）",
        )
    if max(num_kv, axis.size) % min(num_kv, axis.size):
        fits = [n for n in range(1, num_q + 1) if num_q % n == 0 and max(num_kv, n) % min(num_kv, n) == 0]
        best = min(fits, key=lambda n: abs(n - axis.size))
        raise UserError(
            "layout.tp",
            f"{num_kv} key/value heads and tp {axis.size}: one must divide the other; nearest: {best}",
            f"{num_kv} 个键值头与 tp {axis.size} 必须一方整除另一方；最接近的是 {best}",
        )
    heads = Heads(num_q, num_kv, axis)
    if heads.copies > 1 and axis.group is not None:
        first = axis.rank // heads.copies * heads.copies
        ranks = dist.get_process_group_ranks(axis.group)[first : first + heads.copies]
        heads.sharers = dist.new_group(ranks, use_local_synchronization=True)
    return heads


def _refuse_dropout(base: nn.Module, parallel: Parallel) -> None:
    """Dropout of the residual stream would differ between devices that must stay equal; under sequence parallelism it may."""
    for name, module in base.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0 and "lora_dropout" not in name and not parallel.sequence:
            raise UserError(
                "layout.sp",
                f"{name} drops values of the residual stream, which tensor parallelism repeats on every device; set layout.sp: true",
                f"{name} 会丢弃残差流中的值，而张量并行在每个设备上重复该残差流；请设置 layout.sp: true",
            )


def _layer_plan(base: Any, decoder: Any) -> dict[str, str]:
    """Path inside a layer → style, from transformers' plan, or the usual one where it names no layer."""
    plan = dict(getattr(decoder.config, "base_model_tp_plan", None) or {})
    plan |= {key.removeprefix(base.base_model_prefix + "."): style for key, style in (getattr(type(base), "_tp_plan", None) or {}).items()}
    if not any(key.startswith("layers.*.") for key in plan):
        plan = USUAL_PLAN
    return {key.removeprefix("layers.*."): style for key, style in plan.items() if key.startswith("layers.*.")}


def _unknown(config: Any, what: str) -> UserError:
    return UserError(
        "layout.tp",
        f"{config.model_type} has {what}, for which tensor parallelism has no rule; set layout.tp: 1",
        f"{config.model_type} 含有张量并行没有规则的部分（{what}）；请设置 layout.tp: 1",
    )


def _share_layer(layer: nn.Module, plan: dict[str, str], work: _Work, where: str) -> None:
    blocks: dict[str, dict[str, list[Any]]] = {}
    present = dict(layer.named_modules())
    for path, style in plan.items():
        module = present.get(path)
        if module is None:
            continue
        if style not in STYLES:
            raise _unknown(work.config, f"{path} of style {style!r}")
        if STYLES[style] == FREE:
            continue
        if not isinstance(getattr(module, "base_layer", module), nn.Linear):
            raise _unknown(work.config, f"{path} of class {type(module).__name__}")
        parent, name = path.rsplit(".", 1)
        blocks.setdefault(parent, {COLUMN: [], ROW: []})[STYLES[style]].append((name, module))
    if not blocks:
        raise _unknown(work.config, f"no linear module that its plan names in {where}")
    for path, roles in blocks.items():
        _share_block(present[path], roles[COLUMN], roles[ROW], work)


def _share_block(block: Any, column: list[Any], rows: list[Any], work: _Work) -> None:
    if len(rows) != 1 or not column:
        raise _unknown(work.config, f"{type(block).__name__} with {len(column)} column and {len(rows)} row modules")
    head_size = _head_size(block, work.config) if _is_attention(block) else None
    for name, module in column:
        _share_column(module, _column_share(name, module, head_size, work), work)
    name, module = rows[0]
    num_in = getattr(module, "base_layer", module).in_features
    _share_row(module, work.heads.q_share(head_size) if head_size else Share((interval(num_in, work.parallel.axis),)), work)
    if head_size:
        _share_head_norms(block, head_size, work)
        _count_local_heads(block, work.heads, any(_is_fused_qkv(n) for n, _ in column))
    for name, parameter in block.named_parameters():
        if id(parameter) not in work.decided:
            raise _unknown(work.config, f"{name} in {type(block).__name__}")
    _connect(block, [m for _, m in column], module, work.parallel)


def _is_attention(block: nn.Module) -> bool:
    return "attention" in type(block).__name__.lower()


def _is_fused_qkv(name: str) -> bool:
    return "qkv" in name


def _head_size(block: Any, config: Any) -> int:
    return int(getattr(block, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _column_share(name: str, module: Any, head_size: int | None, work: _Work) -> Share:
    """Which of a column module's outputs this device computes."""
    heads, num_out = work.heads, getattr(module, "base_layer", module).out_features
    if head_size is None:
        if "gate_up" in name:  # two matrices in one: chunk(2) of the outputs must still part them
            start, stop = interval(num_out // 2, work.parallel.axis)
            return Share(((start, stop), (num_out // 2 + start, num_out // 2 + stop)))
        return Share((interval(num_out, work.parallel.axis),))
    if _is_fused_qkv(name) and heads.copies == 1 and num_out == (heads.num_q + 2 * heads.num_kv) * head_size:
        (q,), (kv,) = heads.q_share(head_size).intervals, heads.kv_share(head_size).intervals
        at_k, at_v = heads.num_q * head_size, (heads.num_q + heads.num_kv) * head_size
        return Share((q, (at_k + kv[0], at_k + kv[1]), (at_v + kv[0], at_v + kv[1])))
    if name in QUERIES and num_out == heads.num_q * head_size:
        return heads.q_share(head_size)
    if name in KEYS_VALUES and num_out == heads.num_kv * head_size:
        return heads.kv_share(head_size)
    reason = f"{name} with {num_out} outputs for {heads.num_q} + 2 x {heads.num_kv} heads of {head_size}"
    raise _unknown(work.config, reason + (" shared by more devices than there are key/value heads" if _is_fused_qkv(name) else ""))


def _cut(module: nn.Module, name: str, share: Share, dim: int, work: _Work) -> None:
    """Replaces a parameter by this device's part of it, still on meta; a tied one stays tied, a frozen one frozen."""
    parameter = module._parameters[name]
    if parameter is None:
        return
    if id(parameter) not in work.smaller:
        shape = list(parameter.shape)
        shape[dim] = sum(stop - start for start, stop in share.intervals)
        piece = Piece(tuple(parameter.shape), dim, share.intervals, share.copies, share.partial_over)
        smaller = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device=parameter.device), requires_grad=parameter.requires_grad)
        _note(parameter, smaller, piece, work)
    module._parameters[name] = work.smaller[id(parameter)]


def _keep_whole(parameter: nn.Parameter | None, work: _Work, *, partial: bool) -> None:
    """Notes that every device holds all of a parameter, and whether each sees a part of its gradient only."""
    if parameter is not None and id(parameter) not in work.smaller:
        axis = work.parallel.axis
        _note(parameter, parameter, whole_piece(parameter.shape, copies=axis.size, partial_over=axis.group if partial else None), work)


def _note(parameter: nn.Parameter, smaller: nn.Parameter, piece: Piece, work: _Work) -> None:
    work.decided |= {id(parameter): parameter, id(smaller): smaller}
    work.pieces[id(parameter)] = piece
    work.smaller[id(parameter)] = smaller


def _share_column(module: Any, share: Share, work: _Work) -> None:
    base = getattr(module, "base_layer", module)
    _cut(base, "weight", share, 0, work)
    _cut(base, "bias", share, 0, work)
    base.out_features = base.weight.shape[0]
    if base is not module:
        _keep_whole(module.lora_A["default"].weight, work, partial=True)
        _cut(module.lora_B["default"], "weight", share, 0, work)


def _share_row(module: Any, share: Share, work: _Work) -> None:
    base = getattr(module, "base_layer", module)
    _cut(base, "weight", share, 1, work)
    base.in_features = base.weight.shape[1]
    _keep_whole(base.bias, work, partial=work.parallel.sequence)  # added after the sum, to the positions that are left
    if base is not module:
        _cut(module.lora_A["default"], "weight", share, 1, work)
        _keep_whole(module.lora_B["default"].weight, work, partial=True)


def _share_head_norms(block: nn.Module, head_size: int, work: _Work) -> None:
    """A norm of single heads is whole everywhere; each device's heads give a part of its gradient."""
    for name, module in block.named_children():
        if "norm" in name.lower():
            for parameter in module.parameters():
                if tuple(parameter.shape) != (head_size,):
                    raise _unknown(work.config, f"{name} over {tuple(parameter.shape)}, more than one head of {head_size}")
                _keep_whole(parameter, work, partial=True)


def _count_local_heads(block: Any, heads: Heads, fused: bool) -> None:
    """Corrects what an attention module remembers of its heads."""
    counts = {"num_heads": heads.local_q, "num_attention_heads": heads.local_q, "num_key_value_heads": heads.local_kv}
    counts["num_key_value_groups"] = heads.local_q // heads.local_kv
    for name, count in counts.items():
        if name in vars(block):
            setattr(block, name, count)
    if fused:  # parts q from k by the config's number of heads
        block.config = copy.copy(block.config)
        block.config.num_attention_heads, block.config.num_key_value_heads = heads.local_q, heads.local_kv


def _connect(block: Any, column: list[Any], row_module: Any, parallel: Parallel) -> None:
    """Gives a block forward methods that gather its input once for all column modules and sum the output of the row module.

    The column modules' outputs are formed together, before the block's own forward method runs and asks each for its own. That
    method sees NaN in the input's place, in the input's shape: whatever it computed from the input by itself would be seen.
    """
    ready: dict[int, Tensor] = {}
    block.own_forward = block.forward  # on the block, so that recomputation can put its own in place

    def forward(_: Any, *args: Any, **kwargs: Any) -> Any:
        hidden_BsM = args[0] if args else kwargs.pop("hidden_states")
        outs = columns(hidden_BsM, [read_linear(module) for module in column], parallel)
        ready.update(enumerate(outs))
        nothing = hidden_BsM.new_full((1, 1, 1), float("nan")).expand(*outs[0].shape[:-1], hidden_BsM.shape[-1])
        return block.own_forward(nothing, *args[1:], **kwargs)

    def take(number: int) -> Callable[..., Tensor]:
        return lambda _, x: ready.pop(number)

    block.forward = MethodType(forward, block)
    block.tensor_parallel = parallel
    for number, module in enumerate(column):
        module.forward = MethodType(take(number), module)
    row_module.forward = MethodType(lambda module, x: row(x, read_linear(module), parallel), row_module)


def _share_embedding(embedding: Any, work: _Work) -> None:
    """Each device looks up the tokens of its part of the vocabulary; the rest are zeros, and the sum has all."""
    if type(embedding).forward is not nn.Embedding.forward and not isinstance(embedding, nn.Embedding):
        raise _unknown(work.config, f"an embedding of class {type(embedding).__name__}")
    start, stop = interval(embedding.num_embeddings, work.parallel.axis)
    padding = embedding.padding_idx
    _cut(embedding, "weight", Share(((start, stop),)), 0, work)
    embedding.num_embeddings = stop - start
    embedding.padding_idx = padding - start if padding is not None and start <= padding < stop else None
    own_forward: Callable[[Tensor], Tensor] = partial(lean_embedding, embedding) if is_plain_embedding(embedding) else embedding.forward
    parallel = work.parallel

    def forward(_: Any, input_ids: Tensor) -> Tensor:
        local_BS = input_ids - start
        outside_BS1 = ((local_BS < 0) | (local_BS >= stop - start)).unsqueeze(-1)
        part_BSM = own_forward(local_BS.clamp(0, stop - start - 1)).masked_fill(outside_BS1, 0.0)
        return leave(part_BSM, parallel)

    embedding.forward = MethodType(forward, embedding)


def _share_head(head: Any, work: _Work) -> None:
    """Each device has the logits of its part of the vocabulary; the loss needs no others. Called as a module (to generate), the
    head gives all of them, without gradients."""
    if not isinstance(head, nn.Linear):
        raise _unknown(work.config, f"a head of class {type(head).__name__}")
    num_tokens = head.out_features
    start, stop = interval(num_tokens, work.parallel.axis)
    share = Share(((start, stop),))
    _cut(head, "weight", share, 0, work)
    _cut(head, "bias", share, 0, work)
    head.out_features = stop - start
    parallel = work.parallel

    def forward(module: Any, hidden_BsM: Tensor) -> Tensor:
        with torch.no_grad():
            part_BSV = functional.linear(enter(hidden_BsM, parallel), module.weight, module.bias)
            logits_BSV = part_BSV.new_zeros(*part_BSV.shape[:-1], num_tokens)
            logits_BSV[..., start:stop] = part_BSV
            dist.all_reduce(logits_BSV, group=parallel.axis.group)
        return logits_BSV

    head.forward = MethodType(forward, head)


def gather_hidden(hidden_BsM: Tensor, hf: Any) -> Tensor:
    """The decoder's output as the vocabulary-parallel loss needs it: all positions on all devices, [B, S, M].

    Backward sums the devices' parts of the gradient, one for each part of the vocabulary.

    Args:
        hf: the model that `apply` was called with, or the model inside peft's wrapper.
    """
    base = hf.get_base_model() if hasattr(hf, "get_base_model") else hf
    return enter(hidden_BsM, base.tensor_parallel)


@contextmanager
def whole_positions(hf: Any) -> Iterator[None]:
    """Turns sequence parallelism off while it lasts: generation reads one token at a time, which cannot be shared out.

    The residual stream is then whole on every device; the weights stay as they are. All devices of the axis must enter together.

    Args:
        hf: as for `gather_hidden`.
    """
    base = hf.get_base_model() if hasattr(hf, "get_base_model") else hf
    parallel: Parallel = base.tensor_parallel
    before, parallel.sequence = parallel.sequence, False
    try:
        yield
    finally:
        parallel.sequence = before
