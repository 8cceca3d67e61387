"""Activation recomputation (Chen et al. 2016, arXiv:1604.06174): each layer keeps its input and runs forward again in backward."""

from __future__ import annotations

from typing import Any


def apply_recompute(hf: Any, recompute: str) -> None:
    """Turns recomputation of every decoder layer on.

    Args:
        hf: a transformers model.
        recompute: `none` or `full`.
    """
    if recompute == "full":
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
