"""How a parameter is called in files: Hugging Face's names, or peft's for adapters. No file knows another name."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from ascendfactory.engine.parallel.pieces import Piece


def public_name(name: str) -> str:
    """A parameter's name inside our root module → its name in Hugging Face's (or peft's) files."""
    name = re.sub(r"^chunks\.\d+\.", "", name).removeprefix("hf.")
    if "lora_" in name:
        return saved_name(name)
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def saved_name(name: str) -> str:
    """A parameter's name inside peft's file: without the adapter's own name (and DoRA's `.weight`)."""
    if "lora_magnitude_vector" in name:
        return name.removesuffix(".default.weight")
    return name.replace(".default.", ".")


def pieces_of(model: nn.Module) -> dict[str, Piece]:
    """Public name → piece, as tensor and pipeline parallelism left it on the root module; names that are absent are whole."""
    pieces: dict[str, Piece] = getattr(model, "pieces", {})
    return pieces


def weight_names(hf: Any) -> set[str]:
    """Every name that a file may hold for this model; of the uncut model, so that a stage knows what the others read."""
    return {name.replace(".base_layer", "") for name in hf.state_dict() if "lora_" not in name}
