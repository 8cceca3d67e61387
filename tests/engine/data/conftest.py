"""A small byte-level tokenizer, and files to read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ascendfactory.core.recipe import Recipe

torch.set_num_threads(1)

SPECIAL = [
    *["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    *["<start_of_turn>", "<end_of_turn>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. assistant user system model tool\n\n\n",
    "You are a helpful assistant. What is the capital of France? Paris is the capital of France, of course.\n",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "你好，世界。今天的天气很好。",
] * 4


@pytest.fixture(scope="session")
def backend() -> Tokenizer:
    """Byte-level BPE of 420 entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


MakeTokenizer = Callable[..., PreTrainedTokenizerBase]


@pytest.fixture(scope="session")
def make_tokenizer(backend: Tokenizer) -> MakeTokenizer:
    """A tokenizer with a template and special tokens of one's choice."""

    def make(
        template: str | None = None,
        *,
        eos: str | None = "<|im_end|>",
        pad: str | None = None,
        bos: str | None = None,
        adds_bos: bool = False,
    ) -> PreTrainedTokenizerBase:
        copy = Tokenizer.from_str(backend.to_str())
        if adds_bos:
            copy.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, copy.token_to_id(bos))])
        tokens = {"eos_token": eos, "pad_token": pad, "bos_token": bos}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=copy, **{name: token for name, token in tokens.items() if token})
        tokenizer.chat_template = template.strip("\n") if template else None
        return tokenizer

    return make


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def alpaca(count: int, start: int = 0) -> list[dict[str, str]]:
    """Records of varying length, all different."""
    return [
        {"instruction": f"Question {n}: " + "what is it? " * (n % 5), "output": f"Answer {n}. " + "Paris is the capital. " * (n * 7 % 11)}
        for n in range(start, start + count)
    ]


def recipe(tmp_path: Path, train: Any, **data: Any) -> Recipe:
    """A recipe over a data set, with a cache of its own."""
    extra = {name: data.pop(name) for name in ("objective", "duration", "batch", "seed") if name in data}
    settings = {"train": train, "cache_dir": str(tmp_path / "cache"), "seq_len": 64, "workers": 1, **data}
    return Recipe.model_validate({"model": "unused", "data": settings, **extra})
