"""MindSpeed-RL: its configuration classes and their checks, the arguments that its workers make of them, its tools.

The sources decide on the profile: with MindSpeed-MM among them it is the one for models that see images. What a trainer does before
it asks Ray for workers is taken out of its program and run; so is what a worker does before it makes the model.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

from ascendfactory.catalog.read import find_card
from parsers import inert, mindspeed_llm
from parsers import mindspeed_mm as mm
from parsers.mindspeed_llm import apart

TEXT = ("MindSpeed-RL", "MindSpeed", "MindSpeed-LLM", "Megatron-LM")
IMAGES = ("MindSpeed-MM", "MindSpeed-RL", "MindSpeed", "Megatron-LM")
OPTIONAL = (
    *mm.OPTIONAL, "tensordict", "vllm", "swanlab", "wandb", "latex2sympy2", "word2number", "math_verify", "pylatexenc", "sympy", "bytecode",
    "zmq", "apex",
)  # fmt: skip
WANTED = ("parse_training_config", "parse_args_from_config")


def prepare(sources: dict[str, Path]) -> None:
    """Imports what every job needs, with inert modules for what only Ascend has."""
    sys.path[:0] = [str(sources[name]) for name in (IMAGES if "MindSpeed-MM" in sources else TEXT)]
    for name in ("hydra", "transformers", *mindspeed_llm.EARLY):
        importlib.import_module(name)
    inert.stand_in(OPTIONAL)
    package = types.ModuleType("mindspeed_rl")  # without its __init__, which brings the workers and vLLM
    package.__path__ = [str(sources["MindSpeed-RL"] / "mindspeed_rl")]
    sys.modules["mindspeed_rl"] = package
    argparse.ArgumentParser.error = mm.complain  # type: ignore[method-assign,assignment]


def check(line: dict[str, Any], sources: dict[str, Path], folder: Path) -> None:
    """Raises what MindSpeed-RL raises on the job of a line."""
    sees = "MindSpeed-MM" in sources
    job = mm.place(line, sources, folder)
    # its one process that Ray starts knows nothing of the others; they are told by Ray, as here by the variables of torchrun
    mm.be_rank_0(line)
    root = sources["MindSpeed-MM" if sees else "MindSpeed-RL"]
    program = root / ("posttrain_vlm_grpo.py" if sees else "cli/train_grpo.py")
    for load in ("fresh", "resume"):
        apart(partial(trained, program, job, load, line["nodes"], sees))
    if sees:
        return
    (job.model / "config.json").write_text(json.dumps(mindspeed_llm.config_of(find_card(line["cell"]["model"]))))
    apart(partial(tokenised, sources["MindSpeed-RL"], job))
    for argv in (job.before["convert"], *job.after.values()):
        apart(partial(converted, argv, job))


def trained(program: Path, job: mm.Placed, load: str, nodes: int, sees: bool) -> None:
    """Hydra's composition, the configuration classes, and the arguments of a worker."""
    words = job.words(program.name, load)
    config = composed(Path(words[words.index("--config-dir") + 1]), words[words.index("--config-name") + 1], words[4:])
    functions = taken(program, nodes)
    parsed = functions["parse_training_config"](config)
    actor, answers = parsed["actor_config"], parsed["rl_config"].n_samples_per_prompt
    actor.update({"global_batch_size": actor.global_batch_size * answers})  # as a worker does with what the trainer gives it
    sys.argv = [str(program)]
    functions["parse_args_from_config"](actor)
    if sees:
        args = mm.checked_arguments(sys.argv[1:], ignore_unknown=True)
        model = mm.checked_model(args.mm.model)
        for argv in (job.before["convert"], *job.after.values()):
            mm.checked_conversion(argv, model)
    else:
        mindspeed_llm.leave_checkpoint(job.run / "checkpoints", worker_arguments())


def composed(folder: Path, name: str, overrides: list[str]) -> Any:
    """A configuration as Hydra reads it."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(config_dir=str(folder), version_base=None):
        return compose(config_name=name, overrides=overrides)


def taken(program: Path, nodes: int) -> dict[str, Any]:
    """Functions of a program that cannot be imported without Ray, and what they call."""
    validate = importlib.import_module("mindspeed_rl.config_cls.validate_config")
    validate.get_node_nums = lambda: nodes  # it would ask Ray  # type: ignore[attr-defined]
    of_words = importlib.import_module("mindspeed_rl.utils.utils").parse_args_from_config  # that of the program goes before it
    names: dict[str, Any] = {
        "parse_args_from_config": of_words,
        "sys": sys,
        "os": os,
        "validate_rl_args": validate.validate_rl_args,
        "Dict": dict,
        "Any": Any,
    }
    classes = {"megatron_config": ["MegatronConfig"], "rl_config": ["RLConfig"], "generate_config": ["GenerateConfig"]}
    for module, wanted in (classes | {"mindstudio_config": ["ProfilerConfig", "MsprobeConfig"]}).items():
        found = importlib.import_module(f"mindspeed_rl.config_cls.{module}")
        names |= {name: getattr(found, name) for name in wanted}
    tree = ast.parse(program.read_text(encoding="utf-8"))
    kept = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in WANTED]
    exec(compile(ast.Module(kept, []), str(program), "exec"), names)
    return names


def worker_arguments() -> Any:
    """What a worker of a model of text parses and validates: the words are those of this process."""
    words = list(sys.argv)
    mindspeed_llm.patched(words)
    sys.argv = words
    from megatron.training import arguments, global_vars  # type: ignore[import-not-found]
    from mindspeed_llm.training.arguments import parse_args_decorator  # type: ignore[import-not-found]

    args = parse_args_decorator(arguments.parse_args)(None, False)
    arguments.validate_args(args, {})
    global_vars._GLOBAL_ARGS = args
    arguments.core_transformer_config_from_args(args)
    return args


def tokenised(root: Path, job: mm.Placed) -> None:
    """The tokeniser's configuration, its class and its checks."""
    words = job.before["tokenise"][2:]
    config = composed(root / "configs/datasets", words[0], words[1:])
    (job.run / "tokens").mkdir()
    settings = importlib.import_module("mindspeed_rl.config_cls.data_handler_config").DataHandlerConfig(config)
    importlib.import_module("mindspeed_rl.config_cls.validate_config").validate_data_handler_config(settings)


def converted(argv: list[str], job: mm.Placed) -> None:
    """The converter of MindSpeed-LLM, called by itself or by the exporting program."""
    words = argv[argv.index("--") + 1 :] if "--" in argv else argv
    words = [word.replace("{target}", str(job.run / "target")) for word in words[1:]]
    mindspeed_llm.patched(words)
    mindspeed_llm.tool(words)
