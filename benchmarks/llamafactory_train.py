"""Runs one LLaMA-Factory job and records each step; started by the other benchmarks with that environment's Python.

    python llamafactory_train.py SETTINGS.json STEPS.jsonl

A line of STEPS.jsonl is written when a step begins and when training ends: {"step", "time", "cpu_s", "tokens"}, where
`time` is the wall clock, `cpu_s` this process's user + system time, and `tokens` the real (not padding) tokens fed so far.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

from transformers import TrainerCallback


def real_tokens(input_ids_BS: Any, attention_mask_BS: Any, pad: int) -> int:
    """Tokens that are not padding; packed rows of LLaMA-Factory mark their padding as visible, so its run at the end is cut off."""
    num_tokens = 0
    for ids, mask in zip(input_ids_BS.tolist(), attention_mask_BS.tolist(), strict=True):
        seen = [token for token, visible in zip(ids, mask, strict=True) if visible]
        while len(seen) > 1 and seen[-1] == seen[-2] == pad:  # a lone one at the end is the end-of-turn token
            seen.pop()
        num_tokens += len(seen)
    return num_tokens


class StepLog(TrainerCallback):
    """Writes the clock and the token count at every step."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.num_tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, pad = kwargs["model"], kwargs["processing_class"].pad_token_id

        def count(_module: Any, _args: Any, inputs: dict[str, Any]) -> None:
            self.num_tokens += real_tokens(inputs["input_ids"], inputs["attention_mask"], pad)

        model.register_forward_pre_hook(count, with_kwargs=True)
        self.write("begin")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.write(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            self.write(state.global_step)

    def write(self, step: int | str) -> None:
        times = os.times()
        record = {"step": step, "time": time.time(), "cpu_s": times.user + times.system, "tokens": self.num_tokens}
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()


def main() -> None:
    """Command line."""
    from llamafactory.train.tuner import run_exp

    with open(sys.argv[1]) as settings, open(sys.argv[2], "a") as steps:  # noqa: PTH123 - runs in a bare environment
        run_exp(args=json.load(settings), callbacks=[StepLog(steps)])


if __name__ == "__main__":
    main()
