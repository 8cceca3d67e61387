"""Tiny random models of real families, written as a downloaded folder would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "glm4", "gemma3")
VOCAB = 320
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config(family: str, **changes: Any) -> Any:
    """A small config of the family: 3 layers, hidden 64, 8 query and 4 key/value heads; Gemma3 with a window of 16, tied."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": family == "gemma3",
    }
    if family in ("qwen3", "glm4", "gemma3"):
        settings["head_dim"] = 8
    if family == "gemma3":
        settings |= {
            "sliding_window": 16,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }
    if family == "glm4":
        settings |= {"attention_bias": True, "partial_rotary_factor": 0.5}
    classes = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "glm4": transformers.Glm4Config,
        "gemma3": transformers.Gemma3TextConfig,
    }
    return classes[family](**(settings | changes))


def write_model(folder: Path, family: str, **changes: Any) -> str:
    """Weights, config, tokenizer and template; norm weights and biases are random, so that their gradients are tested."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family, **changes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            elif "embed" not in name:
                parameter.mul_(2.0)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 320 tokens, ChatML specials; <|im_end|> is both end and padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the user asks and the assistant answers in a few words"] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", bos_token="<|im_start|>", unk_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_chats(path: Path, num_samples: int, seed: int = 0) -> str:
    """A JSONL file of one- and two-turn chats of unequal lengths."""
    import json
    import random

    dice = random.Random(seed)
    words = ["the", "user", "asks", "answers", "a", "few", "words", "7", "好", "factory"]

    def text(longest: int) -> str:
        return " ".join(dice.choices(words, k=dice.randint(1, longest)))

    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_samples):
            turns = [
                m
                for _ in range(dice.randint(1, 2))
                for m in ({"role": "user", "content": text(8)}, {"role": "assistant", "content": text(12)})
            ]
            file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
    return str(path)
