"""LLaMA-Factory's own parser, its table of data sets and DeepSpeed's validator, asked as on the Ascend devices of the job.

Run it with the Python of a LLaMA-Factory environment that also has DeepSpeed. A process group without a transport stands for torchrun's
processes, so that every rule which counts them sees as many as the job has.
"""

from __future__ import annotations

import importlib
import logging
import os
import types
import typing
from pathlib import Path
from typing import Any


def prepare(sources: dict[str, Path]) -> None:
    """Imports what every check needs, and answers as a device with bfloat16 would."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "LLAMAFACTORY_VERBOSITY": "ERROR", "DS_ACCELERATOR": "cpu"}
    import llamafactory.data.parser
    import llamafactory.data.template
    import llamafactory.hparams.parser  # noqa: F401
    import torch.testing._internal.distributed.fake_pg  # noqa: F401
    from transformers import training_args

    logging.disable(logging.WARNING)
    # what carries messages through memory would have to be compiled; by name, since deepspeed.comm.torch means torch itself
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    training_args.is_torch_bf16_gpu_available = lambda: True  # type: ignore[attr-defined,assignment]


def check(line: dict[str, Any], sources: dict[str, Path], folder: Path) -> None:
    """Holds the training arguments, their types, the data, the template and the DeepSpeed file of a job against LLaMA-Factory."""
    from llamafactory.hparams import parser

    job, devices = line["job"], line["nodes"] * line["nproc"]
    config_path = Path(next(word for word in job["argv"] if word.endswith("/train.yaml")))
    for name, text in job["files"].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(str(config_path.parents[1]), str(folder)), encoding="utf-8")
    os.environ |= job["env"]
    if "torch.distributed.run" in job["argv"]:
        as_under_torchrun(devices, line["nproc"])
    elif devices > 1:
        raise ValueError(f"{devices} devices and no torchrun")
    parser.sys.argv = ["train.py", str(folder / "job" / config_path.name)]
    config = parser.read_args()
    if wrong := wrong_types(config):
        raise TypeError("; ".join(wrong))
    _, data, training, _, _ = parser.get_train_args(dict(config))
    if training.world_size != devices:
        raise ValueError(f"it counts {training.world_size} processes of {devices}")
    check_data(data, folder)
    if training.deepspeed:
        check_deepspeed(training)


def as_under_torchrun(devices: int, local: int) -> None:
    """The first of so many processes, as torchrun starts it; the group carries no messages."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": devices, "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29791}
    os.environ |= {name: str(value) for name, value in place.items()}
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)


def wrong_types(config: dict[str, Any]) -> list[str]:
    """Values outside the type or the choices that LLaMA-Factory declares, which its parser does not look at in a file."""
    from llamafactory.hparams import parser

    hints: dict[str, Any] = {}
    for part in parser._TRAIN_ARGS:
        hints |= typing.get_type_hints(part)
    return [f"{name}: {value!r} is no {hints[name]}" for name, value in config.items() if name in hints and not fits(value, hints[name])]


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain value is of a declared type; lists, mappings and enumerations are left to the parser."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint in (int, bool, str):
        return type(value) is hint
    return True


def check_data(data: Any, folder: Path) -> None:
    """The data sets and the template are LLaMA-Factory's to find."""
    from llamafactory.data.parser import get_dataset_list
    from llamafactory.data.template import TEMPLATES

    if data.template is not None and data.template not in TEMPLATES:
        raise ValueError(f"template {data.template} is not registered")
    for found in get_dataset_list([*(data.dataset or []), *(data.eval_dataset or [])], data.dataset_dir):
        place = (Path(data.dataset_dir) / found.dataset_name).resolve()
        if found.load_from != "file" or place.parent != (folder / "data").resolve():
            raise ValueError(f"{found.dataset_name} is not where the data step writes")


def check_deepspeed(training: Any) -> None:
    """The DeepSpeed file, filled in as the trainer does with a model of any width, and then DeepSpeed's own validation of it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    config = training.hf_deepspeed_config
    config.trainer_config_finalize(training, types.SimpleNamespace(config=types.SimpleNamespace(hidden_size=4096)), 100)
    DeepSpeedConfig(config.config)
