"""Runs LLaMA-Factory inside its own environment and tells its steps in AscendFactory's words.

    python llamafactory_train.py TRAIN.yaml EXPORT_FOLDER|-

Uses two public doors of LLaMA-Factory only: `run_exp(args, callbacks)` and the callbacks of transformers' Trainer. SIGTERM and
SIGINT save a checkpoint at the end of the step and end the run with code 0.
"""

import json
import math
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import yaml
from llamafactory.train.tuner import run_exp
from transformers import TrainerCallback

NOT_MODEL = ("checkpoint-", "trainer_", "train_results", "all_results", "eval_results", "training_", "README", "runs", "damaged-")


def tell(kind, en, zh, **facts):
    """Prints one event for the launcher."""
    print("@event " + json.dumps({"kind": kind, "text_en": en, "text_zh": zh, **facts}, ensure_ascii=False), flush=True)


class Steps(TrainerCallback):
    """Prints each optimizer step, and stops when asked to."""

    def __init__(self):
        self.stop = self.finished = self.broken = False
        self.start_s, self.lr, self.tokens, self.pending, self.eval_loss = time.monotonic(), 0.0, 0, None, None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.ask_to_stop)

    def ask_to_stop(self, number, frame):
        self.stop = True

    def on_train_begin(self, args, state, control, **kwargs):
        self.start_s, self.tokens = time.monotonic(), state.num_input_tokens_seen

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if optimizer is not None:
            self.lr = optimizer.param_groups[0]["lr"]

    def on_step_end(self, args, state, control, **kwargs):
        if self.stop:
            control.should_save = control.should_training_stop = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "eval_loss" in logs:
            self.eval_loss = float(logs["eval_loss"])
            return
        if not logs or "loss" not in logs:
            return
        loss, now_s = float(logs["loss"]), time.monotonic()
        tokens, step_s = int(state.num_input_tokens_seen - self.tokens), now_s - self.start_s
        self.start_s, self.tokens = now_s, state.num_input_tokens_seen
        if not math.isfinite(loss):
            self.broken = control.should_training_stop = True
            print(f"the loss of step {state.global_step} is {loss}", file=sys.stderr)
            return
        if not state.is_world_process_zero:
            return
        step = {
            "step": state.global_step,
            "num_steps": state.max_steps,
            "loss": loss,
            "lr": self.lr,
            "grad_norm": float(logs.get("grad_norm") or 0.0),
            "label_tokens": 0,
            "tokens": tokens,
            "epoch": float(state.epoch or 0.0),
            "step_s": step_s,
            "tokens_per_s": tokens / step_s if step_s else 0.0,
            "memory_bytes": peak_memory(args.device.type),
            "eval_loss": self.eval_loss,
            "reward": logs.get("rewards/margins"),
        }
        self.eval_loss = None
        print("@step " + json.dumps({key: value for key, value in step.items() if value is not None}), flush=True)

    def on_train_end(self, args, state, control, **kwargs):
        self.finished = state.global_step >= state.max_steps


class Rows(TrainerCallback):
    """Writes down what the model is trained on, for `ascendfactory compare`: {step, ids, trained, num_items} a row."""

    def __init__(self, path):
        rank = os.environ.get("RANK", "0")
        self.path, self.step = Path(path if rank == "0" else f"{path}.{rank}"), 0
        self.path.write_text("", encoding="utf-8")

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.register_forward_pre_hook(self.see, with_kwargs=True)

    def on_step_begin(self, args, state, control, **kwargs):
        self.step = state.global_step + 1

    def see(self, model, args, kwargs):
        labels = kwargs.get("labels")
        if not model.training or labels is None:
            return
        ids, mask, count = kwargs["input_ids"], kwargs.get("attention_mask"), kwargs.get("num_items_in_batch")
        lines = []
        for row in range(ids.shape[0]):
            real = mask[row] != 0 if mask is not None and mask.dim() == 2 else ids[row] == ids[row]
            trained = (labels[row][real] != -100).int()
            trained[:1] = 0  # nothing stands before it that could predict it
            line = {"step": self.step, "ids": ids[row][real].tolist(), "trained": trained.tolist()}
            lines.append(json.dumps(line | {"num_items": None if count is None else int(count)}, separators=(",", ":")) + "\n")
        with self.path.open("a", encoding="utf-8") as out:
            out.writelines(lines)


def peak_memory(kind):
    """Peak bytes of this process: of the device, or resident ones on a CPU."""
    import torch

    device = getattr(torch, kind, None)
    if kind != "cpu" and device is not None:
        return device.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def set_damaged_aside(folder):
    """A checkpoint whose saving was broken off has no trainer_state.json, which is written last: it is not resumed from."""
    for path in folder.glob("checkpoint-*"):
        if not (path / "trainer_state.json").exists():
            path.rename(folder / f"damaged-{path.name}")
            tell("damaged", f"{path.name} is incomplete: set aside", f"{path.name} 不完整：已移开", checkpoint=path.name)


def export(folder, target):
    """Moves the final model out of the folder of checkpoints."""
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if not path.name.startswith(NOT_MODEL):
            shutil.move(str(path), str(target / path.name))


def main():
    """Trains; exit code 1 when the loss became NaN or Inf."""
    config = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder, steps = Path(config["output_dir"]), Steps()
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first and folder.is_dir():
        set_damaged_aside(folder)
    rows = os.environ.get("ASCENDFACTORY_TRAINED_ROWS")
    run_exp(config, callbacks=[steps, *([Rows(rows)] if rows else [])])
    if steps.broken:
        return 1
    if is_first and steps.finished and sys.argv[2] != "-":
        export(folder, Path(sys.argv[2]))
        tell("exported", f"model: {sys.argv[2]}", f"模型：{sys.argv[2]}", folder=sys.argv[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
