"""Holds a job against MindSpeed-LLM's own programs, each up to the point where it would load weights, data or devices.

The trainer applies its patches, parses, validates and makes its layer configuration, once with the words of a fresh start and once
with those of a resumed one; the tokeniser and the converters parse their words and check the cut, the converters on a config.json
made from the model's card and on checkpoints that hold what trainer and converter would have written there as their arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from ascendfactory.catalog.read import find_card
from ascendfactory.core.plan import ModelCard
from parsers.inert import DEVICE_NAMES, OPTIONAL, say_device, stand_in

EARLY = ("torch.distributed.run", "torch.distributed.tensor.experimental", "torch.distributed.checkpoint", "torch.utils.cpp_extension")
LATE = ("AutoTokenizer", "AutoModelForCausalLM", "AutoConfig", "AutoProcessor", "PreTrainedTokenizer", "DataCollatorForSeq2Seq")
EARLIER: set[str] = set()  # modules that were there before Megatron
FILL = {"{nodes}": "1", "{node_rank}": "0", "{master_addr}": "localhost", "{master_port}": "6000"}


class Enough(BaseException):
    """Raised where a program would begin to work."""


def prepare(sources: dict[str, Path]) -> None:
    """Puts the sources on the path, inert modules in place, and imports what no argument changes."""
    sys.path[:0] = [str(sources[name]) for name in ("MindSpeed-LLM", "MindSpeed", "Megatron-LM")]
    os.environ.update(USE_TF="FALSE", TOKENIZERS_PARALLELISM="false")
    stand_in(OPTIONAL)
    for name in EARLY:
        importlib.import_module(name)
    transformers = importlib.import_module("transformers")
    for name in LATE:
        getattr(transformers, name)
    EARLIER.update(sys.modules)
    gc.freeze()
    argparse.ArgumentParser.error = complain  # type: ignore[method-assign,assignment]


def complain(self: argparse.ArgumentParser, message: str) -> None:
    """Says what an argparse parser would print before it ends the process."""
    raise ValueError(f"{self.prog}: {message}")


def check(line: dict[str, Any], sources: dict[str, Path], folder: Path) -> None:
    """Raises whatever MindSpeed-LLM raises on the programs of a job.

    Args:
        line: the cell and its job.
        sources: the checkouts.
        folder: an empty one, for what stands in for model and run folder.
    """
    bench = Bench(line, sources["MindSpeed-LLM"], folder)
    bench.enter()
    apart(bench.train)
    apart(bench.tools)


class Bench:
    """A job moved into a folder, with stand-ins for its model and its checkpoints."""

    def __init__(self, line: dict[str, Any], llm: Path, folder: Path) -> None:
        cell, job = line["cell"], line["job"]
        self._llm, self._run, self._model = llm, folder / "run", folder / "model"
        self._run_dir = str(Path(job["argv"][1]).parents[1])
        self._path, self._nodes = cell["model"].lower(), line["nodes"]
        self._job, self._device = job, cell["device"]
        for name in ("job", "tokens", "data", "weights"):
            (self._run / name).mkdir(parents=True)
        self._model.mkdir()
        (self._model / "config.json").write_text(json.dumps(config_of(find_card(cell["model"]))))
        for name, text in job["files"].items():
            (self._run / name).write_text(text.replace(self._run_dir, str(self._run)))

    def enter(self) -> None:
        """Makes the process as the job's would be: its variables, the devices it sees."""
        nproc = self._job["nproc"]
        os.environ.update({name: value for name, value in self._job["env"].items() if name != "PYTHONPATH"})
        os.environ.update(RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(nproc), MASTER_ADDR="localhost", MASTER_PORT="6000")
        os.environ["WORLD_SIZE"] = str(self._nodes * nproc)
        say_device(DEVICE_NAMES[self._device], nproc)
        os.chdir(self._llm)

    def _moved(self, words: list[str]) -> list[str]:
        """The words of a command, with the folders of this bench."""
        moved = []
        for word in words:
            if word == self._path or word.startswith(f"{self._path}/"):
                word = str(self._model) + word[len(self._path) :]
            word = word.replace(self._run_dir, str(self._run)).replace("{env}/src/MindSpeed-LLM", str(self._llm))
            moved.append((FILL | {"{nodes}": str(self._nodes)}).get(word, word))
        return moved

    def train(self) -> None:
        """The trainer, fresh and resumed; what it would write into a checkpoint as its arguments is left there."""
        checkpoints = self._run / "checkpoints"
        args = trainer(launched(self._start()))
        leave_checkpoint(checkpoints, args)
        trainer(launched(self._start()))

    def tools(self) -> None:
        """The tools of the steps before and after the training, under the patches that the first converter's words make."""
        steps = [self._moved(step["argv"])[1:] for step in self._job["before"] if step["environment"]]
        patched(steps[-1])
        for words in (*steps, *(self._exported(step["argv"])[1:] for step in self._job["after"])):
            tool(words)

    def _start(self) -> list[str]:
        """The command that the job's own starting program becomes."""
        words = self._moved(self._job["argv"])
        seen: list[list[str]] = []

        def keep(program: str, words: list[str]) -> None:
            seen.append(words)
            raise Enough

        with mock.patch.object(os, "execv", keep), mock.patch.object(sys, "argv", words[1:]), contextlib.suppress(Enough):
            runpy.run_path(words[1], run_name="__main__")
        return seen[0]

    def _exported(self, argv: list[str]) -> list[str]:
        """The command of the converter that the job's exporting program starts."""
        words = self._moved(argv)
        seen: list[list[str]] = []

        def keep(words: list[str], check: bool) -> Any:
            seen.append(words)
            raise Enough

        with mock.patch.object(subprocess, "run", keep), mock.patch.object(sys, "argv", words[1:]), contextlib.suppress(Enough):
            runpy.run_path(words[1], run_name="__main__")
        return seen[0]


def apart(work: Callable[[], None]) -> None:
    """Does something in a process of its own and raises here what it raised there."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        said = ""
        try:
            work()
        except SystemExit as stop:
            said = f"it ended with status {stop.code}" if stop.code else ""
        except BaseException as error:  # whatever a validator raises
            said = f"{type(error).__name__}: {error}{where(error)}"
        os.write(writer, said.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read().decode(errors="replace")
    os.waitpid(child, 0)
    if said:
        raise RuntimeError(said)


def where(error: BaseException) -> str:
    """The place in the framework's source that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"


def launched(words: list[str]) -> list[str]:
    """Script and words of every process that torchrun would start, by its own parser."""
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(words[3:])
    world = int(given.nnodes) * int(given.nproc_per_node)
    if world != int(os.environ["WORLD_SIZE"]):
        raise ValueError(f"torchrun would start {world} processes")
    if not Path(given.training_script).exists():
        raise FileNotFoundError(given.training_script)
    return [given.training_script, *given.training_script_args]


def trainer(words: list[str]) -> Any:
    """Patches, parser, validator, layer configuration and the count of micro-batches; returns the arguments."""
    patched(words)
    sys.argv = words
    from megatron.core import num_microbatches_calculator as calculator  # type: ignore[import-not-found]
    from megatron.core.transformer.spec_utils import import_module  # type: ignore[import-not-found]
    from megatron.training import arguments, global_vars  # type: ignore[import-not-found]

    args = arguments.parse_args(None, False)
    arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    global_vars._GLOBAL_ARGS = None
    global_vars.set_args(args)
    calculator.unset_num_microbatches_calculator()
    batch = (args.global_batch_size, args.micro_batch_size, args.data_parallel_size)
    calculator.init_num_microbatches_calculator(args.rank, args.rampup_batch_size, *batch)
    arguments.core_transformer_config_from_args(args)
    if args.spec is not None:
        import_module(args.spec)
    return args


def patched(words: list[str]) -> None:
    """Imports MindSpeed-LLM, whose patches of Megatron follow from the words of the command line."""
    sys.argv = words
    importlib.import_module("mindspeed.patch_utils").sys = types.SimpleNamespace(modules=Modules())  # type: ignore[attr-defined]
    importlib.import_module("mindspeed_llm").megatron_adaptor  # noqa: B018


class Modules:
    """sys.modules, but a copy leaves out all that hold no function of Megatron: each patch goes through a copy to find what it replaces."""

    def copy(self) -> dict[str, Any]:
        """The modules that a patch may have to go into."""
        return {name: module for name, module in sys.modules.items() if name not in EARLIER}

    def __getitem__(self, name: str) -> Any:
        return sys.modules[name]

    def __setitem__(self, name: str, module: Any) -> None:
        sys.modules[name] = module

    def __contains__(self, name: str) -> bool:
        return name in sys.modules


def leave_checkpoint(folder: Path, args: Any) -> None:
    """A checkpoint that holds nothing but the arguments."""
    import torch

    place = folder / "iter_0000001" / "mp_rank_00"
    place.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    torch.save({"args": args, "iteration": 1, "checkpoint_version": 3.0, "model": {}}, place / "model_optim_rng.pt")


def tool(words: list[str]) -> None:
    """One of the tools, by the name of its program."""
    script = Path(words[0])
    if not script.exists():
        raise FileNotFoundError(script)
    sys.argv = words
    tools: dict[str, Callable[[], None]] = {"preprocess_data": tokenise, "convert_ckpt": convert, "convert_ckpt_v2": convert_v2}
    tools.get(script.stem, lambda: own_converter(script))()


def tokenise() -> None:
    """The parser and the checks of preprocess_data.py."""
    tool = importlib.import_module("preprocess_data")
    tool.validate_args(tool.get_args())


def convert_v2() -> None:
    """convert_ckpt_v2.py up to the first weights that it would read."""
    main = importlib.import_module("convert_ckpt_v2").main
    place = "mindspeed_llm.tasks.checkpoint"
    to_megatron, back = importlib.import_module(f"{place}.convert_hf2mg"), importlib.import_module(f"{place}.convert_mg2hf")

    def reads(converter: Any, *stage: int) -> None:
        leave_checkpoint(Path(converter.save_dir).parent, converter._Hf2MgConvert__parameter_packaging())
        raise Enough

    with mock.patch.object(to_megatron.Hf2MgConvert, "load_matched_hf_weight", reads), mock.patch.object(back, "load_data", stop):
        strict(main)


def stop(path: str) -> None:
    """In the place of what reads weights."""
    raise Enough


def strict(main: Callable[[], Any]) -> None:
    """A program whose parsers have to know every word (unknown ones some ignore silently), up to where it would begin to work."""
    real = argparse.ArgumentParser.parse_known_args

    def spy(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = real(self, args, namespace)
        if unknown:
            raise ValueError(f"it would ignore {' '.join(unknown)}")
        return found, unknown

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", spy), contextlib.suppress(Enough):
        main()
        raise AssertionError("it ended before it read weights")


def convert() -> None:
    """The parser of convert_ckpt.py, and what its loader and its saver do before they make a model."""
    import transformers

    transformers.__version__ = "4.57.1"  # its loader wants a 4, which its environments have
    tool = importlib.import_module("convert_ckpt")
    kept: list[Any] = []

    class Relay:
        """Takes the loader's description of the model, and gives it to the saver."""

        def put(self, item: Any) -> None:
            if item != "exit":
                kept.append(item)
                raise Enough

        def get(self) -> Any:
            return kept[-1]

    class Process:
        """The saver, which begins when the loader is done here."""

        def __init__(self, target: Any, args: Any) -> None:
            kept.append(lambda: target(*args))

        def start(self) -> None:
            return

    tool.mp = types.SimpleNamespace(Queue=lambda maxsize: Relay(), Process=Process)
    with contextlib.suppress(Enough):
        tool.main()
    models = importlib.import_module("mindspeed_llm.tasks.checkpoint.models")

    def made(model: Any, **words: Any) -> None:
        leave_checkpoint(Path(model.args_cmd.save_dir), model.args)
        raise Enough

    with mock.patch.object(models.MegatronModel, "get_modules_from_config", made), contextlib.suppress(Enough):
        kept[0]()


def own_converter(script: Path) -> None:
    """A converter that only one family has, up to the first weights that it would read."""
    sys.path.insert(0, str(script.parent))
    program = importlib.import_module(script.stem)
    with mock.patch.object(program, "load_data", stop):
        strict(program.main)


def config_of(card: ModelCard) -> dict[str, Any]:
    """What the converters read of a model's config.json, under the names that its family has there."""
    config: dict[str, Any] = {
        "hidden_size": card.hidden_size,
        "num_attention_heads": card.num_heads,
        "tie_word_embeddings": card.tied_embeddings,
        "torch_dtype": "bfloat16",
    }
    if card.family in ("glm", "glm4", "chatglm"):
        return config | {
            "num_layers": card.num_layers,
            "ffn_hidden_size": card.ffn_size,
            "multi_query_group_num": card.num_kv_heads,
            "padded_vocab_size": card.vocab_size,
            "seq_length": card.max_seq_len,
            "layernorm_epsilon": 1e-5,
        }
    config |= {
        "num_hidden_layers": card.num_layers,
        "intermediate_size": card.ffn_size,
        "num_key_value_heads": card.num_kv_heads,
        "vocab_size": card.vocab_size,
        "max_position_embeddings": card.max_seq_len,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    if card.family in ("qwen3", "qwen3_moe"):
        config["head_dim"] = card.head_dim
    if card.mla is not None:
        config |= {
            "q_lora_rank": card.mla.q_lora_rank,
            "kv_lora_rank": card.mla.kv_lora_rank,
            "qk_nope_head_dim": card.mla.qk_nope_head_dim,
            "qk_rope_head_dim": card.mla.qk_rope_head_dim,
            "v_head_dim": card.mla.v_head_dim,
        }
    return config | _experts_of(card)


def _experts_of(card: ModelCard) -> dict[str, Any]:
    moe = card.moe
    if moe is None:
        return {}
    if card.family == "mixtral":
        return {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.experts_per_token}
    config = {"moe_intermediate_size": moe.expert_ffn_size, "num_experts_per_tok": moe.experts_per_token}
    if card.mla is None:
        return config | {"num_experts": moe.num_experts}
    shared = {"n_routed_experts": moe.num_experts, "n_shared_experts": moe.num_shared_experts}
    return config | shared | {"first_k_dense_replace": moe.first_dense_layers, "moe_layer_freq": 1}
