"""Reads, tokenises and packs a file with our data path; started by data_speed.py.

    python our_data.py RECIPE.yaml

The last line printed is JSON: seconds after imports, and tokens made.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import ascendfactory
from ascendfactory.engine.data.loader import open_data
from ascendfactory.engine.data.tokenizer import load_tokenizer


def main() -> None:
    """Command line."""
    recipe = ascendfactory.load_recipe(Path(sys.argv[1]).read_text())
    tokenizer = load_tokenizer(recipe.model.path)
    began = time.perf_counter()
    data = open_data(recipe, tokenizer)
    num_rows = data.num_steps(recipe.duration)  # one row a step: all rows are packed by now
    wall_s = time.perf_counter() - began
    print(json.dumps({"wall_s": wall_s, "num_rows": num_rows, "num_tokens": data.counts.tokens}))


if __name__ == "__main__":
    main()
