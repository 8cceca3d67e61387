"""The engines that can run a plan, by name."""

from __future__ import annotations

from ascendfactory.backends.llamafactory import LlamaFactory
from ascendfactory.backends.mindspeed_llm import MindSpeedLlm
from ascendfactory.backends.mindspeed_mm import MindSpeedMm
from ascendfactory.backends.mindspeed_rl import MindSpeedRl
from ascendfactory.backends.native import Native
from ascendfactory.backends.verl import Verl
from ascendfactory.core.plan import Backend

BACKENDS: dict[str, Backend] = {
    "native": Native(),
    "llamafactory": LlamaFactory(),
    "verl": Verl(),
    "mindspeed_llm": MindSpeedLlm(),
    "mindspeed_mm": MindSpeedMm(),
    "mindspeed_rl": MindSpeedRl(),
}
