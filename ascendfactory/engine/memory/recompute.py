"""Activation recomputation: what a decoder layer computes again in backward to keep less. `planner/activations.py` has the bytes.

none: nothing. norm: the outputs of norms, and all of a gated MLP between its gate and up products and the down product
(the activation function and the product). selective: all but attention and every second matrix product.
full: everything; the layer keeps its input.

Modules keep their names and classes: only `forward` is replaced on the instance. Call after the kernels and tensor
parallelism have put their own forward methods in place, and before FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ascendfactory.core.recipe import Recompute
from ascendfactory.engine.memory.discard import discard, discarding
from ascendfactory.engine.memory.region import Selection, checkpoint


def apply_recompute(layers: Sequence[nn.Module], recompute: Recompute, num_layers: int = 0) -> None:
    """Turns recomputation on in the layers of a stage.

    Args:
        layers: decoder layers, in the order in which they run.
        num_layers: only the first so many of them; 0 = all.
    """
    for layer in layers[: num_layers or None]:
        if recompute == "full":
            _set_forward(layer, partial(checkpoint, layer.forward))
        elif recompute == "selective":
            _set_forward(layer, partial(checkpoint, layer.forward, selection=Selection(kept_products(layer))))
        elif recompute == "norm":
            _discard_norms_and_activations(layer)


def kept_products(layer: nn.Module) -> list[nn.Module]:
    """Linear layers whose product selective recomputation keeps: every second, of the base model (adapters are computed again).

    Not the last of the layer, unless a norm follows it: nothing of the layer's backward pass needs that one.
    """
    linears = [module for name, module in layer.named_modules() if isinstance(module, nn.Linear) and "lora_" not in name]
    kept = linears[::2]
    if kept and kept[-1] is linears[-1] and not _is_mlp_normed(layer):
        kept.pop()
    return kept


def _is_mlp_normed(layer: nn.Module) -> bool:
    return any(name.startswith("post_") and ("mlp" in name or "feedforward" in name) for name, _ in layer.named_children())


def _set_forward(module: Any, forward: Callable[..., Any]) -> None:
    module.forward = forward


def _discard_norms_and_activations(layer: Any) -> None:
    for name, module in layer.named_modules():
        if name.endswith("norm"):
            _set_forward(module, _discarded_norm(module))
        elif "own_forward" in vars(module) and _is_gated(module):
            module.own_forward = partial(_gated_mlp, module)  # what tensor parallelism calls between its gather and its sum
        elif "forward" not in vars(module) and _is_gated(module):
            _set_forward(module, partial(_gated_mlp, module))
    inner = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with discarding():
            return inner(*args, **kwargs)

    _set_forward(layer, forward)


def _discarded_norm(norm: Any) -> Callable[..., Tensor]:
    inner = norm.forward
    # a lean kernel keeps its input alone; an eager norm's own copies go as well
    once = inner if "forward" in vars(norm) else partial(checkpoint, inner)
    return partial(discard, once, recompute=inner)


def _is_gated(module: Any) -> bool:
    """An MLP of the form down(act(gate) · up)."""
    has_products = hasattr(module, "gate_up_proj") or (hasattr(module, "gate_proj") and hasattr(module, "up_proj"))
    return has_products and hasattr(module, "down_proj")


def _gated_mlp(mlp: Any, x: Tensor) -> Tensor:
    """down(act(gate) · up), of which gate and up are kept."""
    gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj(x), mlp.up_proj(x))
    activation = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn

    def product(gate: Tensor, up: Tensor) -> Tensor:
        result: Tensor = activation(gate) * up
        return result

    down: Tensor = mlp.down_proj(discard(partial(checkpoint, product), gate, up, recompute=product))
    return down
