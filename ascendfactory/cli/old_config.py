"""`ascendfactory-cli config --backend=.. --af_model_name=.. --exp_name=.. --output_file_path=..`: the YAML of AscendFactory 6.5."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
import yaml

from ascendfactory.core.messages import UserError, nearest, pick

_LENGTHS = {"4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768}
# The experiments of each back end; a length may follow (`full-8k`).
_EXPERIMENTS = {
    "mindspeed-llm": ("pt", "full", "lora"),
    "llamafactory": ("pt", "full", "lora", "dpo"),
    "verl": ("grpo", "dapo", "ppo"),
    "mindspeed-rl": ("grpo",),
    "mindspeed-mm": ("full",),
}


def old_config(backend: str | None, model: str | None, experiment: str | None, output: str | None, asks: bool) -> int:
    """Writes the file; on a terminal what is not given is asked for, again after a wrong answer.

    Args:
        asks: whether somebody is there to be asked.

    Raises:
        UserError: an unknown back end, model or experiment, a value that is missing, or a file that is there.
    """
    backend = _take("--backend", pick("back end", "后端"), backend, asks, _check_backend, ", ".join(_EXPERIMENTS))
    model = _take("--af_model_name", pick("model", "模型"), model, asks, _check_model, "qwen2.5-7b")

    def check_experiment(word: str) -> None:
        seq_len_of(backend, word)

    names = experiment_names(backend)
    experiment = _take("--exp_name", pick("experiment", "实验"), experiment, asks, check_experiment, ", ".join(names))
    output = _take("--output_file_path", pick("file to write", "要写入的文件"), output, asks, _check_new, f"{model}_{experiment}.yaml")
    tree = preset(backend, model, experiment)
    Path(output).write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
    typer.echo(
        pick(
            f"wrote {output}; set the paths in it, then: ascendfactory-cli train {output}",
            f"已写入 {output}；请改写其中的路径，然后：ascendfactory-cli train {output}",
        )
    )
    return 0


def _take(option: str, question: str, value: str | None, asks: bool, check: Callable[[str], None], words: str) -> str:
    """A value that passes its check: as given, or as answered.

    Args:
        words: what may be written, for the question.
    """
    if value:
        check(value)
        return value
    if not asks:
        raise UserError(option, f"is missing; write {option}=...: {words}", f"缺失；请写 {option}=...：{words}")
    while True:
        answer = str(typer.prompt(pick(f"{question} ({words})", f"{question}（{words}）"))).strip()
        try:
            check(answer)
        except UserError as error:
            typer.echo(error.line(), err=True)
        else:
            return answer


def _check_backend(word: str) -> None:
    if word not in _EXPERIMENTS:
        near = nearest(word, _EXPERIMENTS) or ", ".join(_EXPERIMENTS)
        raise UserError("--backend", f"no back end '{word}'; write {near}", f"没有后端 '{word}'；请写 {near}")


def _check_model(word: str) -> None:
    from ascendfactory.catalog.read import find_card

    try:
        find_card(word)
    except UserError as error:
        raise UserError("--af_model_name", error.en, error.zh) from None


def _check_new(path: str) -> None:
    if Path(path).exists():
        raise UserError(path, "exists; name another file", "文件已存在；请换一个名称")


def experiment_names(backend: str) -> list[str]:
    """Experiments as they are written: with a length where the back end's tables have several."""
    kinds = _EXPERIMENTS[backend]
    if backend not in ("mindspeed-llm", "llamafactory"):
        return list(kinds)
    return [f"{kind}-{length}" for kind in kinds for length in _LENGTHS]


def seq_len_of(backend: str, experiment: str) -> int:
    """Tokens of a row in an experiment (`full-8k`; without a length 4096).

    Raises:
        UserError: the back end has no such experiment.
    """
    kind, dash, length = experiment.partition("-")
    if kind not in _EXPERIMENTS[backend] or (dash and length not in _LENGTHS):
        names = experiment_names(backend)
        near = nearest(experiment, names)
        hint, hint_zh = (f"did you mean {near}? All: ", f"是否想写 {near}？全部：") if near else ("it has ", "可用 ")
        raise UserError(
            "--exp_name",
            f"{backend} has no experiment '{experiment}'; {hint}{', '.join(names)}",
            f"{backend} 没有实验 '{experiment}'；{hint_zh}{'、'.join(names)}",
        )
    return _LENGTHS[length or "4k"]


def preset(backend: str, model: str, experiment: str) -> dict[str, Any]:
    """The old YAML of an experiment such as `full-4k`, `lora-8k`, `pt-4k`, `dpo-4k`, `grpo`.

    Raises:
        UserError: no such model or experiment.
    """
    from ascendfactory.catalog.read import find_card

    card, seq_len = find_card(model), seq_len_of(backend, experiment)
    folder = f"{_WORK}/model/{card.hub_id.rpartition('/')[2] or card.name}"
    sections = {
        "llamafactory": _llamafactory_preset,
        "mindspeed-llm": _megatron_preset,
        "verl": _verl_preset,
        "mindspeed-rl": _rl_preset,
        "mindspeed-mm": _mm_preset,
    }[backend](experiment.partition("-")[0], seq_len, folder)
    return {
        "af_backend": backend,
        "af_model_name": model,
        "af_output_dir": f"./output/{card.name}_{experiment}",
        "env": {"MASTER_ADDR": "localhost", "NNODES": 1, "NODE_RANK": 0},
        "backend_config": sections,
    }


_WORK = "/path/to"
_DATA = f"{_WORK}/data.json"


def _llamafactory_preset(kind: str, seq_len: int, model: str) -> dict[str, Any]:
    training: dict[str, Any] = {
        "stage": {"pt": "pt", "dpo": "dpo"}.get(kind, "sft"),
        "finetuning_type": "lora" if kind == "lora" else "full",
        "model_name_or_path": model,
        "dataset_dir": f"{_WORK}/data",
        "dataset": "alpaca_en_demo",
        "cutoff_len": seq_len,
        "packing": kind != "dpo",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1e-4 if kind == "lora" else 1e-5,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "num_train_epochs": 5,
        "save_steps": 500,
        "deepspeed": "examples/deepspeed/ds_z3_config.json",
    }
    return {"training": training | ({"lora_rank": 8, "lora_alpha": 16, "lora_target": "all"} if kind == "lora" else {})}


def _megatron_preset(kind: str, seq_len: int, model: str) -> dict[str, Any]:
    handler = "GeneralPretrainHandler" if kind == "pt" else "AlpacaStyleInstructionHandler"
    training: dict[str, Any] = {
        "tokenizer-name-or-path": model,
        "seq-length": seq_len,
        "micro-batch-size": 1,
        "global-batch-size": 64,
        "lr": 1.25e-6,
        "min-lr": 1.25e-7,
        "lr-decay-style": "cosine",
        "lr-warmup-fraction": 0.01,
        "weight-decay": 0.1,
        "adam-beta2": 0.95,
        "save-interval": 500,
    }
    packed = {} if kind == "pt" else {"pack": True, "neat-pack": True}
    return {
        "preprocess_data": {"input": _DATA, "handler-name": handler, **packed},
        "training": training | ({"lora-r": 8, "lora-alpha": 16} if kind == "lora" else {}),
    }


_VERL_LOSS: dict[str, dict[str, Any]] = {
    "grpo": {"use_kl_loss": True, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"},
    "dapo": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
    "ppo": {},
}


def _verl_preset(kind: str, seq_len: int, model: str) -> dict[str, Any]:
    algorithm: dict[str, Any] = {"adv_estimator": "gae" if kind == "ppo" else "grpo"}
    return {
        "data": {
            "train_files": f"{_WORK}/train.parquet",
            "val_files": f"{_WORK}/test.parquet",
            "train_batch_size": 32,
            "max_prompt_length": seq_len // 4,
            "max_response_length": seq_len - seq_len // 4,
        },
        "actor_rollout_ref": {
            "model": {"path": model},
            "actor": {"optim": {"lr": 1e-6}, **_VERL_LOSS[kind]},
            "rollout": {"name": "vllm", "n": 1 if kind == "ppo" else 8},
        },
        "algorithm": algorithm | ({"filter_groups": {"enable": True}} if kind == "dapo" else {}),
        "trainer": {"total_epochs": 5, "save_freq": 100},
    }


def _rl_preset(kind: str, seq_len: int, model: str) -> dict[str, Any]:
    return {
        "preprocess_data": {"input": _DATA, "handler_name": "R1AlpacaStyleInstructionHandler"},
        "megatron_training": {
            "tokenizer_name_or_path": model,
            "global_batch_size": 32,
            "seq_length": seq_len,
            "train_iters": 500,
            "save_interval": 100,
        },
        "actor_config": {"micro_batch_size": 1, "lr": 1e-6, "lr_decay_style": "constant"},
        "rl_config": {"n_samples_per_prompt": 8, "init_kl_coef": 0.001, "max_prompt_length": seq_len // 4},
    }


def _mm_preset(kind: str, seq_len: int, model: str) -> dict[str, Any]:
    parameters = {"preprocess_parameters": {"model_name_or_path": model}, "basic_parameters": {"dataset": _DATA}}
    training = {
        "seq-length": seq_len,
        "micro-batch-size": 1,
        "global-batch-size": 64,
        "lr": 1e-5,
        "lr-decay-style": "cosine",
        "lr-warmup-fraction": 0.1,
        "train-iters": 1000,
        "save-interval": 500,
    }
    return {"data": {"dataset_param": parameters}, "training": training}
