"""The rows that the embedded engine trains on, step by step, written down so that another engine's can be held against them.

    python -m ascendfactory.engine.data.trained PLAN.json OUT.jsonl NUM_STEPS

One line a row: {step, ids, trained, num_items}. `trained` says of each token whether it is a target (the first of a row never is);
`num_items` is the number of targets in the whole step, by which the engine divides the sum of losses.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Plan
from ascendfactory.engine.data.batch import IGNORED, MicroBatch, count_trained_tokens
from ascendfactory.engine.data.loader import open_data
from ascendfactory.engine.data.tokenizer import load_tokenizer


def trained_rows(plan: Plan, num_steps: int) -> Iterator[dict[str, Any]]:
    """The rows of the first steps, in the order in which the loader gives them, over all devices.

    Raises:
        UserError: the data or the tokenizer cannot be read.
    """
    recipe = plan.recipe
    tokenizer = load_tokenizer(recipe.model.path, recipe.data.chat_template)
    loader = open_data(recipe, tokenizer, micro_size=1, num_micro=recipe.batch.global_size)
    for step in range(1, num_steps + 1):
        batches = loader.next_step()
        num_items = count_trained_tokens(batches)
        for batch in batches:
            yield {"step": step, **_row(batch), "num_items": num_items}


def _row(batch: MicroBatch) -> dict[str, Any]:
    """The one row of a micro-batch without its padding; labels stand one place before the token that they name."""
    length = sum(batch.lengths[0])
    targets = (batch.labels_BS[0, : length - 1] != IGNORED).int().tolist() if length else []
    return {"ids": batch.input_ids_BS[0, :length].tolist(), "trained": [0, *targets] if length else []}


def main(argv: list[str]) -> int:
    """Writes the file; 2 where the input is at fault."""
    try:
        plan = Plan.model_validate_json(Path(argv[1]).read_text(encoding="utf-8"))
        with Path(argv[2]).open("w", encoding="utf-8") as out:
            for row in trained_rows(plan, int(argv[3])):
                out.write(json.dumps(row, separators=(",", ":")) + "\n")
    except UserError as error:
        print(error.line(), file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
