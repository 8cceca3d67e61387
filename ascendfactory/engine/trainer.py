"""The training loop: a generator of step metrics. Whoever iterates it is the hook."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType

import torch

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Plan, StepMetrics
from ascendfactory.core.recipe import Duration, Full
from ascendfactory.engine import checkpoint
from ascendfactory.engine import device as devices
from ascendfactory.engine.build import Run, build
from ascendfactory.engine.chat import answer
from ascendfactory.engine.data.batch import MicroBatch, count_trained_tokens
from ascendfactory.engine.data.preview import check_mask
from ascendfactory.engine.export import export_model
from ascendfactory.engine.metrics import forget_steps_after, model_flops_utilisation, training_flops
from ascendfactory.engine.parallel.context import LocalBatch, cut
from ascendfactory.engine.passes import forward_backward
from ascendfactory.engine.provenance import provenance
from ascendfactory.engine.state import tensor_state


def train_steps(plan: Plan) -> Iterator[StepMetrics]:
    """Trains as planned, yielding after every optimizer step; resumes by itself.

    Saves, evaluates and exports on the way. A SIGTERM or SIGINT ends it after the running step, saved.

    Raises:
        UserError: the input is at fault, or the loss became NaN under `optim.nonfinite: stop`.
    """
    run = build(plan)
    start(run)
    save_every, eval_every = (_in_steps(run, d) for d in (plan.recipe.checkpoint.every, plan.recipe.output.eval_every))
    with StopSignal() as stop:
        while run.step < run.num_steps:
            metrics = train_step(run, stop)
            last = run.step == run.num_steps or stop.agreed
            if run.data.has_eval and (last or run.step % eval_every == 0):
                metrics = metrics.model_copy(update={"eval_loss": evaluate(run)})
            better = _is_better(run, metrics.eval_loss)
            run.reporter.step(metrics)
            if last or better or run.step % save_every == 0:
                save(run, best=better, last=last)
            yield metrics
            if stop.agreed:
                break
        finish(run, stopped=stop.agreed and run.step < run.num_steps)


def train_step(run: Run, stop: StopSignal) -> StepMetrics:
    """One optimizer step: loss = Σ token losses / trained tokens of the step, over all micro-batches and devices."""
    began = time.perf_counter()
    run.position.set(run.step + 1, "data")
    batches = run.data.next_step()
    counts = _count(run, batches, stop)
    run.position.set(run.step + 1, "compute")
    run.optimizer.start_step(run.step)
    loss = forward_backward(run.model, run.pipeline, run.plan.layout, _own_parts(run, batches), scale=1.0 / max(1, counts.trained))

    run.position.set(run.step + 1, "update")
    # tensor-parallel partners know the same loss
    loss_sum, grad_norm = run.optimizer.gradient_norm(float(loss) / run.mesh.tp.size)
    skipped = None if math.isfinite(loss_sum) and math.isfinite(grad_norm) else _refuse_update(run, loss_sum, grad_norm)
    lr = 0.0 if skipped else run.optimizer.step(run.step, grad_norm)
    run.step += 1
    step_s = time.perf_counter() - began
    flops = training_flops(
        run.plan.card, counts.tokens, counts.trained, counts.square_lengths, frozen=not isinstance(run.plan.recipe.tuning, Full)
    )
    return StepMetrics(
        step=run.step,
        num_steps=run.num_steps,
        loss=loss_sum,
        lr=lr,
        grad_norm=grad_norm,
        label_tokens=counts.trained,
        tokens=counts.tokens,
        epoch=run.data.epoch,
        step_s=step_s,
        tokens_per_s=counts.tokens / step_s,
        mfu=model_flops_utilisation(run.plan, flops, step_s),
        memory_bytes=int(run.mesh.max(devices.peak_memory_bytes(run.mesh.device))),
        skipped=skipped,
    )


def _own_parts(run: Run, batches: list[MicroBatch]) -> list[LocalBatch]:
    """This device's tokens of micro-batches, on the device."""
    return [cut(batch, run.mesh).to(run.mesh.device) for batch in batches]


@dataclass(frozen=True)
class _Counts:
    trained: int
    tokens: int
    square_lengths: int


def _count(run: Run, batches: list[MicroBatch], stop: StopSignal) -> _Counts:
    """Sums over all rows, and in the same message whether any process was told to stop. Partners that read the same rows all count
    them."""
    lengths = [length for batch in batches for row in batch.lengths for length in row]
    mine = [count_trained_tokens(batches), sum(lengths), sum(n * n for n in lengths), stop.received]
    *sums, stops = run.mesh.sum([float(v) for v in mine])
    stop.agreed = stops > 0
    return _Counts(*(int(total) // run.mesh.readers for total in sums))


def _refuse_update(run: Run, loss: float, grad_norm: float) -> str:
    """A step without update, or the end of the run, by policy; every process decides alike, on summed values."""
    place = run.data.describe_last_step()
    reason = f"loss {loss}, gradient norm {grad_norm}; samples {place}"
    run.optimizer.drop_gradients()
    if run.plan.recipe.optim.nonfinite == "stop":
        told = "this step's update was not made and the checkpoints are untouched; lower optim.lr, or set optim.nonfinite: skip"
        told_zh = "该步未更新，检查点完好；请降低 optim.lr，或设 optim.nonfinite: skip"
        if run.plan.recipe.optim.in_backward:  # each weight was updated on the way
            told, told_zh = (
                "this step's update was made, the checkpoints are untouched; lower optim.lr",
                "该步已更新，检查点完好；请降低 optim.lr",
            )
        raise UserError(f"step {run.step + 1}", f"{reason}; {told}", f"{reason}；{told_zh}")
    run.reporter.event("skipped", f"step {run.step + 1} skipped: {reason}", f"第 {run.step + 1} 步已跳过：{reason}")
    return reason


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Mean token loss of the held-out rows."""
    run.position.set(run.step, "evaluate")
    run.model.eval()
    total, trained = 0.0, 0
    batches = run.data.eval_batches()
    while group := list(islice(batches, run.plan.layout.num_micro)):
        parts = _own_parts(run, group)
        total += float(run.pipeline.evaluate(parts)) if run.pipeline else sum(float(run.model(part, 1.0)) for part in parts)
        trained += count_trained_tokens(group)
    run.model.train()
    total, tokens = run.mesh.sum([total / run.mesh.tp.size, float(trained)])
    return total / max(1.0, tokens / run.mesh.readers)


def _is_better(run: Run, eval_loss: float | None) -> bool:
    if eval_loss is None or not run.plan.recipe.checkpoint.keep_best:
        return False
    if run.best_eval_loss is not None and eval_loss >= run.best_eval_loss:
        return False
    run.best_eval_loss = eval_loss
    return True


def _in_steps(run: Run, every: Duration) -> int:
    return max(1, run.data.num_steps(every))


def save(run: Run, *, best: bool = False, last: bool = False) -> None:
    """Saves the whole state of the run; the last save needs no copy, since nothing changes under it."""
    run.position.set(run.step, "save")
    trainer = {
        "version": 1,
        "step": run.step,
        "num_updates": run.optimizer.num_updates,
        "num_processes": run.mesh.size,
        "data": run.data.state_dict(),
        "best_eval_loss": run.best_eval_loss,
    }
    run.checkpoints.save(tensor_state(run.optimizer, run.mesh), trainer, best=best, last=last)


def start(run: Run) -> None:
    """Everything before the first step: checks the data, resumes, writes provenance, answers the sample prompts."""
    recipe, run_dir = run.plan.recipe, Path(run.plan.run_dir)
    folder, damaged = _where_from(run)
    for text in damaged:
        run.reporter.event("damaged", f"damaged checkpoint skipped: {text}", f"跳过损坏的检查点：{text}")
    if folder is not None:
        resume(run, folder)
    check_mask(run.data.counts, recipe)  # after the resume: a stream would read its first window for nothing
    if run.mesh.is_first:
        forget_steps_after(run_dir, run.step)
        facts = provenance(data=run.data.fingerprint, counts=run.data.counts.as_dict())
        (run_dir / "provenance.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False))
    if folder is None:
        _answer_samples(run, "before")


def _where_from(run: Run) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, and damaged ones. What torchrun, or the launcher, starts again after losing a process takes the newest
    of its own, whatever the first start was told."""
    resume = run.plan.recipe.checkpoint.resume
    if any(int(os.environ.get(name, "0")) for name in ("TORCHELASTIC_RESTART_COUNT", "ASCENDFACTORY_RESTART")):
        newest, damaged = run.checkpoints.find("auto")
        if newest or resume == "none":
            return newest, damaged
    return run.checkpoints.find(resume)


def resume(run: Run, folder: Path) -> None:
    """Puts the run where a checkpoint left it, to the bit if the number of processes is the same."""
    states = checkpoint.load_run(folder, run.optimizer, run.mesh)
    devices.set_rng_state(run.mesh.device, states)
    trainer = checkpoint.read_trainer(folder)
    run.step = trainer["step"]
    run.best_eval_loss = trainer["best_eval_loss"]
    run.optimizer.set_num_updates(trainer["num_updates"])
    run.data.load_state_dict(trainer["data"])
    run.reporter.event("resumed", f"resumed at step {run.step} from {folder}", f"从 {folder} 的第 {run.step} 步继续")


def finish(run: Run, *, stopped: bool) -> None:
    """Waits for the last checkpoint; a finished run is exported as well."""
    run.checkpoints.wait()
    run.mesh.barrier()
    run_dir = Path(run.plan.run_dir)
    if stopped:
        run.reporter.event(
            "stopped", f"stopped and saved at step {run.step}; run it again to go on", f"已在第 {run.step} 步停止并保存；再次运行即可继续"
        )
    else:
        run.position.set(run.step, "export")
        _answer_samples(run, "after")
        if run.plan.recipe.output.export:
            export_model(run.model, run.plan, run.mesh, run_dir / "export")
            run.reporter.event("exported", f"exported to {run_dir / 'export'}", f"已导出到 {run_dir / 'export'}")
    run.reporter.close()
    run.position.close()


def _answer_samples(run: Run, moment: str) -> None:
    """Greedy answers to the recipe's sample prompts, kept in samples.json for the report."""
    prompts = run.plan.recipe.output.sample_prompts
    if not prompts:
        return
    if run.pipeline is not None:
        text_en = "a model in pipeline stages cannot answer the sample prompts; ask the exported one with 'ascendfactory chat'"
        run.reporter.event("samples", text_en, "流水线中的模型无法回答示例问题；请在导出后用 'ascendfactory chat' 提问")
        return
    answers = answer(run.model, run.tokenizer, prompts)
    path = Path(run.plan.run_dir) / "samples.json"
    if run.mesh.is_first:
        known = json.loads(path.read_text()) if path.exists() else [{"prompt": prompt} for prompt in prompts]
        for sample, text in zip(known, answers, strict=True):
            sample[moment] = text
        path.write_text(json.dumps(known, indent=1, ensure_ascii=False))


class StopSignal:
    """Remembers SIGTERM and SIGINT while training; a second SIGINT ends the program at once."""

    def __init__(self) -> None:
        self.received = False
        self.agreed = False  # every process knows

    def __enter__(self) -> StopSignal:
        try:
            self._old = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # not the main thread, as in some notebooks: signals stay as they are
            self._old = {}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
