"""What a model family does that its config alone tells, and the engine must repeat. Exceptions only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeadRules:
    """What happens to logits after the head's matrix product: logits = cap(scale · W h)."""

    softcap: float | None = None
    scale: float = 1.0


def head_rules(config: Any) -> HeadRules:
    """The rules that a config states: Gemma's soft cap, Cohere's logit_scale, Granite's logits_scaling.

    logits_scaling divides, except in HyperCLOVA X.
    """
    config = config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    if scaling := getattr(config, "logits_scaling", None):
        scale *= float(scaling) if config.model_type == "hyperclovax" else 1.0 / float(scaling)
    return HeadRules(softcap=getattr(config, "final_logit_softcapping", None), scale=scale)
