"""`ascendfactory config`: a short recipe with comments, ready to run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ascendfactory.core.load import load_recipe
from ascendfactory.core.messages import UserError, nearest, pick

_OBJECTIVES = ("pretrain", "sft", "dpo", "reward", "grpo", "dapo", "ppo")
_TUNINGS = ("full", "lora")
# Usual starting points: an adapter stands some ten times the learning rate of full fine-tuning.
_LEARNING_RATES = {("pretrain", "full"): "5e-5", ("sft", "full"): "1e-5", ("pretrain", "lora"): "1e-4", ("sft", "lora"): "1e-4"}


def config(
    model: Annotated[str | None, typer.Option(help=pick("Hugging Face folder or catalogue name", "模型文件夹或目录中的名称"))] = None,
    objective: Annotated[str | None, typer.Option(help=", ".join(_OBJECTIVES))] = None,
    tuning: Annotated[str | None, typer.Option(help=", ".join(_TUNINGS))] = None,
    data: Annotated[str | None, typer.Option(help=pick("training file or folder", "训练数据文件或文件夹"))] = None,
    output: Annotated[str | None, typer.Option(help=pick("recipe file to write; - prints it", "要写入的配方文件；- 表示打印"))] = None,
    backend: Annotated[str | None, typer.Option("--backend", hidden=True)] = None,
    af_model_name: Annotated[str | None, typer.Option("--af_model_name", hidden=True)] = None,
    exp_name: Annotated[str | None, typer.Option("--exp_name", hidden=True)] = None,
    output_file_path: Annotated[str | None, typer.Option("--output_file_path", hidden=True)] = None,
) -> None:
    """Write a commented starter recipe."""
    asks = sys.stdin.isatty()
    if backend or af_model_name or exp_name or output_file_path:  # as AscendFactory 6.5 is called
        from ascendfactory.cli.old_config import old_config

        old_config(backend, af_model_name, exp_name, output_file_path, asks)
        return
    model = model or _ask("--model", pick("model (folder or name)", "模型（文件夹或名称）"), None, asks)
    objective = _one_of("--objective", objective or _ask("--objective", pick("objective", "目标"), "sft", asks), _OBJECTIVES)
    usual = "full" if objective == "pretrain" else "lora"
    tuning = _one_of("--tuning", tuning or _ask("--tuning", pick("tuning (full, lora)", "方式（full、lora）"), usual, asks), _TUNINGS)
    data = data or _ask("--data", pick("training data (file or folder)", "训练数据（文件或文件夹）"), None, asks)
    name = recipe_name(model, objective, tuning)
    output = output or _ask("--output", pick("recipe file to write", "要写入的配方文件"), f"{name}.yaml", asks)
    text = starter(model, objective, tuning, data, name)
    load_recipe(text)
    if output == "-":
        typer.echo(text, nl=False)
        return
    _write(Path(output), text)
    typer.echo(pick(f"wrote {output}; next: ascendfactory plan {output}", f"已写入 {output}；下一步：ascendfactory plan {output}"))


def recipe_name(model: str, objective: str, tuning: str) -> str:
    """`qwen3-0.6b_sft-lora`, as the file names of recipes are."""
    base = re.sub(r"[^\w.\-]+", "-", Path(model).name.lower()).strip("-") or "model"
    return f"{base}_{objective}-{tuning}"


def starter(model: str, objective: str, tuning: str, data: str, name: str) -> str:
    """The text of a starter recipe: the settings that people change first, each with a comment."""
    lr = _LEARNING_RATES.get((objective, tuning), "1e-6")
    lines: list[tuple[str, str, str]] = [
        (f"name: {_quoted(name)}", "the run goes to runs/<name>", "训练结果写入 runs/<name>"),
        (f"model: {_quoted(model)}", "a Hugging Face folder", "Hugging Face 模型文件夹"),
        (f"objective: {objective}", "pretrain, sft, ...", "训练目标：pretrain、sft 等"),
        *_tuning_lines(tuning),
        ("data:", "", ""),
        (f"  train: {_quoted(data)}", "a file, a folder, or a list of them", "文件、文件夹，或它们的列表"),
        ("  eval_fraction: 0.02", "share held out to watch the evaluation loss", "留作评估的比例"),
        ("  seq_len: 2048", "tokens of one row", "每行的词元数"),
        ("  packing: true", "several samples share a row and cannot see each other", "多个样本拼成一行，互不可见"),
        ("batch: 8", "rows an optimizer step, over all devices", "每个优化步的总行数（所有设备）"),
        ("duration: 1 epochs", "or '500 steps', '2e9 tokens'", "也可写 '500 steps'、'2e9 tokens'"),
        ("optim:", "", ""),
        (f"  lr: {lr}", "lower it when the loss rises", "损失上升时调低"),
        ("  warmup: 0.03", "a fraction of the run, or '100 steps'", "占全程的比例，或 '100 steps'"),
        ("cluster: auto", "or 'cpu', '8 a100-80g', '8 snt9b'", "或 'cpu'、'8 a100-80g'、'8 snt9b'"),
        ("checkpoint:", "", ""),
        ("  every: 500 steps", "the same command goes on from the newest one", "再次执行同一命令即从最新检查点继续"),
    ]
    width = max(len(text) for text, _, _ in lines) + 2
    body = "\n".join(f"{text:<{width}}# {pick(en, zh)}" if en else text for text, en, zh in lines)
    head = pick(
        "# A recipe of AscendFactory. Paths are relative to where the command is run.\n# Every other setting: ascendfactory schema",
        "# AscendFactory 配方。相对路径以运行命令的目录为准。\n# 其余设置：ascendfactory schema",
    )
    return f"{head}\n{body}\n"


def _tuning_lines(tuning: str) -> list[tuple[str, str, str]]:
    if tuning == "full":
        return [("tuning: full", "every weight; 'lora' trains small adapters instead", "训练全部权重；'lora' 只训练小的适配器")]
    return [
        ("tuning:", "", ""),
        ("  kind: lora", "small adapters on frozen weights; 'full' trains every weight", "冻结权重上的小适配器；'full' 训练全部权重"),
        ("  rank: 16", "more rank, more capacity and memory", "秩越大，容量与内存越大"),
        ("  alpha: 32", "the update is scaled by alpha/rank", "更新按 alpha/rank 缩放"),
    ]


def _ask(option: str, question: str, default: str | None, asks: bool) -> str:
    if asks:
        return str(typer.prompt(question, default=default)).strip()
    if default is None:
        raise UserError(option, "is missing; write it, or run in a terminal to be asked", "缺少此项；请写出，或在终端中运行以便询问")
    return default


def _one_of(option: str, word: str, valid: Iterable[str]) -> str:
    if word in valid:
        return word
    guess = nearest(word, valid) or next(iter(valid))
    raise UserError(option, f"'{word}' is none of {', '.join(valid)}; did you mean {guess}?", f"'{word}' 不可用，是否想写 {guess}？")


def _quoted(text: str) -> str:
    """Text as YAML: plain where that is safe, else in JSON quotes."""
    safe = re.fullmatch(r"[A-Za-z./~_][\w./~\-]*", text) and text.lower() not in ("true", "false", "null", "~")
    return text if safe else json.dumps(text, ensure_ascii=False)


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(str(path), "is already there; write another --output", "文件已存在；请换一个 --output") from None
    except OSError as error:
        raise UserError(str(path), f"cannot be written: {error.strerror}", f"无法写入：{error.strerror}") from None
