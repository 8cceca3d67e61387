"""The lines by which a program reports to the launcher that reads its output: `@step {...}` and `@event {...}`."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from ascendfactory.core.plan import StepMetrics

STEP_MARK, EVENT_MARK = "@step ", "@event "


def step_line(step: StepMetrics) -> str:
    """The line of an optimizer step."""
    return STEP_MARK + step.model_dump_json()


def read_step(line: str) -> StepMetrics | None:
    """The step of a line; None for any other line, and for one that a crash cut short or two processes wrote into."""
    if not line.startswith(STEP_MARK):
        return None
    try:
        return StepMetrics.model_validate_json(line[len(STEP_MARK) :])
    except ValidationError:
        return None


def event_line(event: dict[str, Any]) -> str:
    """The line of anything else that is told: kind, text_en, text_zh and what belongs to the kind."""
    return EVENT_MARK + json.dumps(event, ensure_ascii=False)


def read_event(line: str) -> dict[str, Any] | None:
    """The event of a line; None for any other line, and for one that is broken."""
    if not line.startswith(EVENT_MARK):
        return None
    try:
        event = json.loads(line[len(EVENT_MARK) :])
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
