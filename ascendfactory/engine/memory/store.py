"""Where a tensor that must outlive the forward pass is put: on the device as it is, or wherever the hooks around say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def _as_it_is(tensor: Any) -> Any:
    return tensor


@dataclass(frozen=True)
class Store:
    """A pair of saved-tensor hooks: `unpack(pack(tensor))` is the tensor."""

    pack: Callable[[Tensor], Any] = _as_it_is
    unpack: Callable[[Any], Tensor] = _as_it_is

    @staticmethod
    def around() -> Store:
        """The innermost hooks active here. Autograd asks those only, so hooks that nest hand on by themselves what they leave alone."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return Store(*hooks) if hooks else Store()
