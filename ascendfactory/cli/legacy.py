"""`ascendfactory migrate`, and today's `config --backend` and `train X.yaml` of AscendFactory's own YAML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from ascendfactory.core.load import load_recipe
from ascendfactory.core.messages import UserError, nearest, pick
from ascendfactory.core.recipe import Recipe


def migrate(
    context: typer.Context,
    file: Annotated[str, typer.Argument(help=pick("AscendFactory YAML of release 6.5.905 or later", "6.5.905 及以后版本的 YAML"))],
    output: Annotated[str, typer.Option("--output", help=pick("recipe file to write; - prints it", "要写入的配方文件；- 表示打印"))] = "-",
) -> int:
    """Turn an old YAML into a recipe, and say what changed."""
    text, notes = recipe_text(Path(file), context.args)
    load_recipe(text)
    for line in notes:
        typer.echo(f"· {line}", err=True)
    if output == "-":
        typer.echo(text, nl=False)
        return 0
    if Path(output).exists():
        raise UserError(output, "exists; name another file", "文件已存在；请换一个名称")
    Path(output).write_text(text, encoding="utf-8")
    typer.echo(pick(f"wrote {output}", f"已写入 {output}"))
    return 0


def recipe_text(file: Path, overrides: list[str]) -> tuple[str, list[str]]:
    """The recipe of an old file as YAML, and what a person should know.

    Raises:
        UserError: the file is missing, or an option means nothing to its back end.
    """
    from ascendfactory.launch.legacy import migrate as convert

    found = convert(old_tree(str(file), overrides))
    return yaml.safe_dump(found.recipe, sort_keys=False, allow_unicode=True), found.notes


def old_tree(file: str, overrides: list[str]) -> dict[str, Any]:
    """An old file with overrides and references filled in; what exp-config.yaml keeps.

    Raises:
        UserError: the file is missing, is no YAML, or refers to what is not there.
    """
    from ascendfactory.cli.recipes import read_text
    from ascendfactory.launch.legacy import read_legacy

    return read_legacy(read_text(file), _of_old_keys(overrides))


def _of_old_keys(overrides: list[str]) -> list[str]:
    return [word for word in overrides if re.split(r"[.=]", word.removeprefix("--"))[0] not in Recipe.model_fields]


def legacy_recipe(file: str, overrides: list[str]) -> Recipe:
    """The recipe of an old file, for `train`.

    Args:
        file: the old YAML.
        overrides: of the old file's keys (`--env.NNODES=2`), or of the recipe's (`--cluster="8 snt9b"`).
    """
    old = _of_old_keys(overrides)
    ours = [word for word in overrides if word not in old]
    text, notes = recipe_text(Path(file), old)
    for line in notes:
        typer.echo(f"· {line}", err=True)
    return load_recipe(text, ours)


def old_config(backend: str | None, model: str | None, experiment: str | None, output: str | None, asks: bool) -> int:
    """Writes the YAML that `config --backend --af_model_name --exp_name --output_file_path` used to write.

    Raises:
        UserError: an unknown back end or experiment, or a value that is missing.
    """
    from ascendfactory.launch.legacy import BACKENDS

    backend = _given("--backend", backend, asks)
    if backend not in BACKENDS:
        near = nearest(backend, BACKENDS) or ", ".join(BACKENDS)
        raise UserError("--backend", f"no back end '{backend}'; write {near}", f"没有后端 '{backend}'；请写 {near}")
    model, experiment = _given("--af_model_name", model, asks), _given("--exp_name", experiment, asks)
    output = _given("--output_file_path", output, asks)
    if Path(output).exists():
        raise UserError(output, "exists; name another file", "文件已存在；请换一个名称")
    tree = preset(backend, model, experiment)
    Path(output).write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
    typer.echo(
        pick(f"wrote {output}; next: ascendfactory-cli train {output}", f"已写入 {output}；下一步：ascendfactory-cli train {output}")
    )
    return 0


def _given(option: str, value: str | None, asks: bool) -> str:
    if value:
        return value
    if not asks:
        raise UserError(option, "is missing", "缺失")
    return str(typer.prompt(option.removeprefix("--")))


_LENGTHS = {"4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768}
_EXPERIMENTS = ("pt", "full", "lora", "dpo", "ppo", "grpo", "dapo")


def preset(backend: str, model: str, experiment: str) -> dict[str, Any]:
    """The old YAML of an experiment such as `full-4k`, `lora-8k`, `pt-4k`, `dpo-4k`, `grpo`.

    Raises:
        UserError: for another name.
    """
    from ascendfactory.catalog.read import find_card

    card = find_card(model)
    kind, _, length = experiment.partition("-")
    if kind not in _EXPERIMENTS or (length and length not in _LENGTHS):
        names = ", ".join(f"{name}-4k" if name in ("pt", "full", "lora", "dpo") else name for name in _EXPERIMENTS)
        raise UserError(
            "--exp_name",
            f"no experiment '{experiment}'; it is one of {names} (also 8k, 16k, 32k)",
            f"没有实验 '{experiment}'；可用 {names}（也可 8k、16k、32k）",
        )
    seq_len = _LENGTHS[length or "4k"]
    sections = {
        "llamafactory": _llamafactory_preset,
        "mindspeed-llm": _megatron_preset,
        "verl": _verl_preset,
        "mindspeed-rl": _rl_preset,
        "mindspeed-mm": _mm_preset,
    }[backend](kind, seq_len)
    return {
        "af_backend": backend,
        "af_model_name": model,
        "af_output_dir": f"./output/{card.name}_{experiment}",
        "env": {"MASTER_ADDR": "localhost", "NNODES": 1, "NODE_RANK": 0},
        "backend_config": sections,
    }


_MODEL, _DATA = "/path/to/model", "/path/to/data.json"


def _llamafactory_preset(kind: str, seq_len: int) -> dict[str, Any]:
    training: dict[str, Any] = {
        "stage": {"pt": "pt", "dpo": "dpo"}.get(kind, "sft"),
        "finetuning_type": "lora" if kind == "lora" else "full",
        "model_name_or_path": _MODEL,
        "dataset_dir": "/path/to/data",
        "dataset": "alpaca_en_demo",
        "cutoff_len": seq_len,
        "packing": kind != "dpo",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1e-4 if kind == "lora" else 1e-5,
        "num_train_epochs": 5,
        "save_steps": 500,
        "deepspeed": "examples/deepspeed/ds_z3_config.json",
    }
    return {"training": training | ({"lora_rank": 8, "lora_alpha": 16, "lora_target": "all"} if kind == "lora" else {})}


def _megatron_preset(kind: str, seq_len: int) -> dict[str, Any]:
    handler = "GeneralPretrainHandler" if kind == "pt" else "AlpacaStyleInstructionHandler"
    training: dict[str, Any] = {
        "tokenizer-name-or-path": _MODEL,
        "seq-length": seq_len,
        "micro-batch-size": 1,
        "global-batch-size": 64,
        "lr": 1.25e-6,
        "min-lr": 1.25e-7,
        "train-iters": 2000,
        "save-interval": 500,
    }
    return {
        "preprocess_data": {"input": _DATA, "handler-name": handler},
        "training": training | ({"lora-r": 8, "lora-alpha": 16} if kind == "lora" else {}),
    }


def _verl_preset(kind: str, seq_len: int) -> dict[str, Any]:
    algorithm: dict[str, Any] = {"adv_estimator": "gae" if kind == "ppo" else "grpo"}
    return {
        "data": {
            "train_files": "/path/to/train.parquet",
            "val_files": "/path/to/test.parquet",
            "train_batch_size": 32,
            "max_prompt_length": seq_len // 4,
            "max_response_length": seq_len - seq_len // 4,
        },
        "actor_rollout_ref": {"model": {"path": _MODEL}, "actor": {"optim": {"lr": 1e-6}}},
        "algorithm": algorithm | ({"filter_groups": {"enable": True}} if kind == "dapo" else {}),
        "trainer": {"total_epochs": 5, "save_freq": 100},
    }


def _rl_preset(kind: str, seq_len: int) -> dict[str, Any]:
    return {
        "preprocess_data": {"input": _DATA, "handler_name": "R1AlpacaStyleInstructionHandler"},
        "megatron_training": {
            "tokenizer_name_or_path": _MODEL,
            "global_batch_size": 32,
            "seq_length": seq_len,
            "train_iters": 500,
            "save_interval": 100,
        },
        "actor_config": {"micro_batch_size": 1, "lr": 1e-6, "lr_decay_style": "constant"},
    }


def _mm_preset(kind: str, seq_len: int) -> dict[str, Any]:
    parameters = {"preprocess_parameters": {"model_name_or_path": _MODEL}, "basic_parameters": {"dataset": _DATA}}
    training = {
        "seq-length": seq_len,
        "micro-batch-size": 1,
        "global-batch-size": 64,
        "lr": 1e-5,
        "train-iters": 1000,
        "save-interval": 500,
    }
    return {"data": {"dataset_param": parameters}, "training": training}
