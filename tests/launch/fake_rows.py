"""A back end's program that says steps and rows as it was told: fake_rows.py STORY.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

FACTS = {"label_tokens": 0, "tokens": 20, "epoch": 0.1, "step_s": 0.5, "tokens_per_s": 40.0}

if __name__ == "__main__":
    story = json.loads(Path(sys.argv[1]).read_text())
    for number, (loss, grad_norm, lr) in enumerate(story["steps"], start=1):
        facts = {"step": number, "num_steps": len(story["steps"]), "loss": loss, "grad_norm": grad_norm, "lr": lr, **FACTS}
        print("@step " + json.dumps(facts), flush=True)
    if story["rows"] is not None:
        Path(os.environ["ASCENDFACTORY_TRAINED_ROWS"]).write_text("".join(json.dumps(row) + "\n" for row in story["rows"]))
    sys.exit(story.get("code", 0))
