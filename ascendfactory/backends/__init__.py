"""The engines that can run a plan, by name."""

from __future__ import annotations

from ascendfactory.backends.llamafactory import LlamaFactory
from ascendfactory.backends.mindspeed_llm import MindSpeedLlm
from ascendfactory.backends.native import Native
from ascendfactory.core.plan import Backend

BACKENDS: dict[str, Backend] = {"native": Native(), "llamafactory": LlamaFactory(), "mindspeed_llm": MindSpeedLlm()}
