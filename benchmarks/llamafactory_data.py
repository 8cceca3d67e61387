"""Reads, tokenises and packs a file with LLaMA-Factory; started by data_speed.py with that environment's Python.

    python llamafactory_data.py SETTINGS.json

The last line printed is JSON: seconds after imports, and tokens made.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Command line."""
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_tokenizer

    with open(sys.argv[1]) as file:  # noqa: PTH123 - runs in a bare environment
        settings = json.load(file)
    model_args, data_args, training_args, _finetuning_args, _generating_args = get_train_args(settings)
    module = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(module["tokenizer"], data_args)
    began = time.perf_counter()
    dataset = get_dataset(template, model_args, data_args, training_args, stage="sft", **module)["train_dataset"]
    wall_s = time.perf_counter() - began
    print(json.dumps({"wall_s": wall_s, "num_rows": len(dataset), "num_tokens": len(dataset) * len(dataset[0]["input_ids"])}))


if __name__ == "__main__":
    main()
