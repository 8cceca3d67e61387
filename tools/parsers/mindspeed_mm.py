"""MindSpeed-MM: argparse, Megatron's validator as MindSpeed patches it, the shapes of model.json, the dataset's classes, the converter."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from parsers import inert

SOURCES = ("MindSpeed-MM", "MindSpeed", "Megatron-LM")
# The inert modules of all MindSpeed frameworks, and what only this one imports beside them.
OPTIONAL = (*inert.OPTIONAL, "imageio_ffmpeg", "librosa", "soundfile", "torchaudio", "mindspore", "orjson", "mathruler", "megatron_bridge")


@dataclass(frozen=True)
class Placed:
    """A job whose files lie in a folder: its start, and its words with the paths of this machine."""

    run: Path
    model: Path
    start: dict[str, Any]
    argv: list[str]
    before: dict[str, list[str]]
    after: dict[str, list[str]]

    def words(self, program: str, load: str = "fresh") -> list[str]:
        """What a program of the training command is called with, its start filled in."""
        first = next(i for i, word in enumerate(self.argv) if word.endswith(f"/{program}"))
        return [new for word in self.argv[first + 1 :] for new in (self.start[load] if word == "{load}" else [word])]


def place(line: dict[str, Any], sources: dict[str, Path], folder: Path) -> Placed:
    """Writes the files of a job and a folder in the model's place, and points the job's words to them and to the sources."""
    job, run, model = line["job"], folder / "run", folder / "model"
    old_run, old_model = job["argv"][1 + job["argv"].index("python")].split("/job/")[0], line["cell"]["model"].lower()
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")

    def text(words: str) -> str:
        for name, source in sources.items():
            words = words.replace(f"{{env}}/src/{name}/", f"{source}/")
        return words.replace(old_run, str(run))

    def word(of: str) -> str:
        name, _, value = of.rpartition("=")
        if value == old_model or value.startswith(f"{old_model}/"):
            of = f"{name}={model}" if name else str(model) + value[len(old_model) :]
        return text(of)

    for name, written in job["files"].items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        for around in ('"{}"', ": {}\n"):
            written = written.replace(around.format(old_model), around.format(model))
        (run / name).write_text(text(written), encoding="utf-8")
    steps = [{step["name"]: [word(each) for each in step["argv"]] for step in job[when]} for when in ("before", "after")]
    start = json.loads((run / "job/start.json").read_text(encoding="utf-8"))
    return Placed(run, model, start, [word(each) for each in job["argv"]], *steps)


def be_rank_0(line: dict[str, Any]) -> None:
    """Makes this process the first one of the job's cluster, on its device."""
    nproc = line["nproc"]
    os.environ |= {"WORLD_SIZE": str(line["nodes"] * nproc), "LOCAL_WORLD_SIZE": str(nproc), "RANK": "0", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "6000"} | line["job"]["env"]
    inert.say_device(inert.DEVICE_NAMES[line["cell"]["device"]], nproc)


def prepare(sources: dict[str, Path]) -> None:
    """Imports what every job needs, with inert modules for what only Ascend has."""
    sys.path[:0] = [str(sources[name]) for name in SOURCES]
    import transformers  # noqa: F401  here once, not in every process

    inert.stand_in(OPTIONAL)
    argparse.ArgumentParser.error = complain  # type: ignore[method-assign,assignment]


def complain(self: argparse.ArgumentParser, message: str) -> None:
    """Says what a parser would print before it ends the process."""
    raise ValueError(f"{self.prog}: {message}")


def check(line: dict[str, Any], sources: dict[str, Path], folder: Path) -> None:
    """Raises what MindSpeed-MM raises on the job of a line."""
    job = place(line, sources, folder)
    be_rank_0(line)
    args = checked_arguments(job.words("pretrain_vlm.py"), job.words("pretrain_vlm.py", "resume"))
    model = checked_model(args.mm.model)
    checked_data(args.mm.data.to_dict())
    for argv in (*job.before.values(), *job.after.values()):
        checked_conversion(argv, model)


def checked_arguments(*lines: list[str], ignore_unknown: bool = False) -> Any:
    """The arguments of the last of some command lines; all are parsed, and it is validated as the trainer does.

    Args:
        ignore_unknown: let words pass that the parser does not know, as MindSpeed-RL's workers do.
    """
    sys.argv = ["pretrain_vlm.py", *lines[-1]]
    import mindspeed.megatron_adaptor  # noqa: F401  patches Megatron as these words ask for
    from megatron.training import initialize
    from megatron.training.global_vars import set_args
    from mindspeed_mm.arguments import extra_args_provider_decorator
    from mindspeed_mm.configs.config import merge_mm_args, mm_extra_args_provider

    for words in lines:
        sys.argv = ["pretrain_vlm.py", *words]
        args = initialize.parse_args(extra_args_provider_decorator(mm_extra_args_provider), ignore_unknown)
    initialize.validate_args(args, {"dataloader_type": "external", "tokenizer_type": "NullTokenizer"})
    set_args(args)
    merge_mm_args(args)
    return args


def checked_model(model: Any) -> dict[str, Any]:
    """The parts of model.json, each made a TransformerConfig, whose own checks run."""
    from mindspeed_mm.utils.transformer_model_config import get_model_config

    encoder = model.image_encoder
    parts = {"text": model.text_decoder, "tower": encoder.vision_encoder, "projector": encoder.vision_projector}
    return {name: get_model_config(part) for name, part in parts.items()}


def checked_data(data: dict[str, Any]) -> None:
    """The parameters of data.json, put into the classes that take them; those of the other datasets are read by name only."""
    from mindspeed_mm.data.data_utils.func_utils.convert import DataArguments, DatasetAttr
    from mindspeed_mm.data.data_utils.func_utils.model_args import ProcessorArguments
    from mindspeed_mm.data.data_utils.func_utils.template import TEMPLATES

    dataset = data["dataset_param"]
    if dataset["dataset_type"] == "huggingface":
        template = DataArguments(**dataset["basic_parameters"]).template
        ProcessorArguments(**dataset["preprocess_parameters"])
        DatasetAttr(**dataset["attr"])
        if template not in TEMPLATES:
            raise ValueError(f"no template {template}")


def checked_conversion(argv: list[str], model: dict[str, Any]) -> None:
    """The converter's command line, parsed by itself into the classes that check it; no weight is touched."""
    sys.argv = argv[1:]  # without the interpreter
    with _no_weights(model):
        from checkpoint import convert_cli

        convert_cli.main()


@contextlib.contextmanager
def _no_weights(model: dict[str, Any]) -> Iterator[None]:
    """A converter that knows the model's shape from model.json and converts nothing."""
    from checkpoint.common.converter import Converter
    from checkpoint.vlm_model import config, hf_to_mm, mm_to_hf

    text, tower = model["text"], model["tower"]
    shape = SimpleNamespace(
        num_hidden_layers=text.num_layers,
        num_key_value_heads=text.num_query_groups,
        tie_word_embeddings=not text.untie_embeddings_and_output_weights,
    )
    vision = SimpleNamespace(depth=tower.num_layers, num_hidden_layers=tower.num_layers, num_attention_heads=tower.num_attention_heads)
    shape.llm_config, shape.vision_config = shape, vision
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(config.HfConfig, "config", shape))
        for module, name in ((hf_to_mm, "convert_hf_to_mm"), (mm_to_hf, "convert_mm_to_hf")):
            stack.enter_context(mock.patch.object(module, name))
        for converter in Converter.subclasses:
            module = sys.modules[converter.__module__]
            if hasattr(converter, "_create_ops") and hasattr(module, "set_directory_permissions"):
                stack.enter_context(mock.patch.object(converter, "_create_ops", lambda *args: []))
                stack.enter_context(mock.patch.object(module, "set_directory_permissions"))
        yield
