"""An independent computation of what a run must give: transformers, eager attention, one document at a time, torch's own AdamW.

It shares nothing with the engine but the chat template: samples are rendered turn by turn, and the mask is found from the text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional


def encode_chat(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """Token ids and which of them are trained, for the ChatML of tests/tiny.py: answers and their <|im_end|>."""
    ids: list[int] = []
    trained: list[bool] = []
    for message in messages:
        opening = tokenizer(f"<|im_start|>{message['role']}\n", add_special_tokens=False)["input_ids"]
        body = tokenizer(message["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
        ids += opening + body + newline
        trained += [False] * len(opening) + [message["role"] == "assistant"] * len(body) + [False] * len(newline)
    return ids, trained


def read_chats(path: str, tokenizer: Any, seq_len: int) -> list[tuple[list[int], list[bool]]]:
    """All samples of a file, cut at seq_len."""
    with Path(path).open(encoding="utf-8") as file:
        encoded = [encode_chat(tokenizer, json.loads(line)["messages"]) for line in file]
    return [(ids[:seq_len], trained[:seq_len]) for ids, trained in encoded]


def loss_and_gradients(model: Any, samples: list[tuple[list[int], list[bool]]]) -> float:
    """Backward of Σ token losses / number of trained tokens, a sample at a time; gradients are added to the model's."""
    num_tokens = sum(sum(trained[1:]) for _, trained in samples)
    total = 0.0
    for ids, trained in samples:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
        targets = torch.tensor([i if t else -100 for i, t in zip(ids[1:], trained[1:], strict=True)])
        if not (targets >= 0).any():
            continue
        loss = functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / num_tokens
        loss.backward()
        total += float(loss.detach())
    return total
