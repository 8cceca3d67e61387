"""Chat: which folder is meant, streaming of whole characters, greedy answers against transformers' own generation."""

from __future__ import annotations

import builtins
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from ascendfactory.core.messages import UserError
from ascendfactory.engine import attention
from ascendfactory.engine import chat as chats
from ascendfactory.engine.chat import Chat, answer, find_model, load_chat, whole_characters

torch.set_num_threads(1)
QUESTION = [{"role": "user", "content": "the user asks"}]


@pytest.fixture(scope="module")
def talk(tiny_models: dict[str, str]) -> Chat:
    return load_chat(tiny_models["llama"])


def expected_ids(folder: str, question: str, num_tokens: int) -> list[int]:
    """Greedy tokens by the plainest means: no cache, one prompt, the whole sequence anew for every token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    start = len(ids)
    with torch.no_grad():
        for _ in range(num_tokens):
            token = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            if token == tokenizer.eos_token_id:
                break
            ids.append(token)
    return ids[start:]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_stream_is_greedy_decoding(tiny_models: dict[str, str], family: str) -> None:
    talk = load_chat(tiny_models[family])
    expected = talk.decode(expected_ids(tiny_models[family], "the user asks", 40))  # Gemma3's window is 16
    assert "".join(talk.stream(QUESTION, 40)) == expected.rstrip(chats.BROKEN)


def test_stream_stops_at_the_context_limit(talk: Chat) -> None:
    long = [{"role": "user", "content": "7" * 600}]
    with pytest.raises(UserError, match="reads at most 512"):
        next(talk.stream(long, 5))


def test_temperature_draws_from_the_softmax() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 2.0, 1.0])
    assert chats.choose(logits, 0.0) == 1
    drawn = torch.bincount(torch.tensor([chats.choose(logits, 2.0) for _ in range(4000)]), minlength=3) / 4000
    torch.testing.assert_close(drawn, torch.tensor([0.1863, 0.5065, 0.3072]), atol=0.03, rtol=0)  # softmax([0, 1, 0.5])


def bytes_as_tokens(text: str) -> Iterator[int]:
    return iter(text.encode())


def decode_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="�")))
def test_pieces_are_whole_characters(text: str) -> None:
    pieces = list(whole_characters(bytes_as_tokens(text), decode_bytes))
    assert "".join(pieces) == text
    assert all(chats.BROKEN not in piece for piece in pieces)


def test_an_unfinished_character_is_dropped() -> None:
    tokens = itertools.islice(bytes_as_tokens("小峰"), 5)
    assert list(whole_characters(tokens, decode_bytes)) == ["小"]


class TestAnswer:
    """Before/after samples, in the middle of training."""

    QUESTIONS = ("the user asks", "a few words and the assistant answers in 7 words", "好")

    def test_batch_equals_one_by_one(self, tiny_models: dict[str, str]) -> None:
        talk = load_chat(tiny_models["qwen2"])
        expected = [talk.decode(expected_ids(tiny_models["qwen2"], q, 12)).rstrip(chats.BROKEN).strip() for q in self.QUESTIONS]
        assert answer(talk.model, talk.tokenizer, list(self.QUESTIONS), 12) == expected

    def test_training_goes_on_as_before(self, tiny_models: dict[str, str]) -> None:
        from ascendfactory.engine.model import build_on_meta, load_weights, materialize, read_config

        folder = tiny_models["llama"]
        hf = build_on_meta(read_config(folder))
        materialize(hf, hf, torch.device("cpu"))
        load_weights(hf, folder)
        hf.train()
        hf.model.layers[0].eval()  # whatever mode each part was in
        tokenizer = AutoTokenizer.from_pretrained(folder)
        expected = tokenizer.decode(expected_ids(folder, "the user asks", 12), skip_special_tokens=True).rstrip(chats.BROKEN).strip()

        class Root(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.hf = hf

        assert answer(Root(), tokenizer, ["the user asks"], 12) == [expected]
        assert hf.config._attn_implementation == attention.NAME
        assert hf.training and hf.model.layers[1].training and not hf.model.layers[0].training
        assert all(p.grad is None and p.requires_grad for p in hf.parameters())

    def test_with_an_adapter(self, tiny_models: dict[str, str]) -> None:
        from peft import LoraConfig, get_peft_model

        talk = load_chat(tiny_models["llama"])
        plain = answer(talk.model, talk.tokenizer, ["a few words"], 8)
        model = get_peft_model(talk.model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
        assert answer(model, talk.tokenizer, ["a few words"], 8) == plain  # B starts at zero
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.5)
        assert answer(model, talk.tokenizer, ["a few words"], 8) != plain

    def test_no_question(self, talk: Chat) -> None:
        assert answer(talk.model, talk.tokenizer, []) == []


class TestFolder:
    """What a person may name."""

    def test_run_folder_means_its_export(self, tmp_path: Path) -> None:
        (tmp_path / "run" / "export").mkdir(parents=True)
        (tmp_path / "run" / "plan.json").touch()
        with pytest.raises(UserError, match="not exported"):
            find_model(str(tmp_path / "run"))
        (tmp_path / "run" / "export" / "config.json").touch()
        assert find_model(str(tmp_path / "run")) == tmp_path / "run" / "export"

    def test_missing_folder_names_the_nearest(self, tmp_path: Path) -> None:
        (tmp_path / "SmolLM2").mkdir()
        with pytest.raises(UserError, match=r"did you mean .*SmolLM2"):
            find_model(str(tmp_path / "SmoLM2"))

    def test_folder_without_model(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="no model here"):
            load_chat(str(tmp_path))

    def test_damaged_weights(self, tiny_models: dict[str, str], tmp_path: Path) -> None:
        folder = tmp_path / "broken"
        shutil.copytree(tiny_models["llama"], folder)
        (folder / "model.safetensors").unlink()
        with pytest.raises(UserError, match="cannot be read"):
            load_chat(str(folder))

    def test_adapter_folder(self, tiny_models: dict[str, str], tmp_path: Path) -> None:
        from peft import LoraConfig, get_peft_model

        base = load_chat(tiny_models["llama"])
        model = get_peft_model(base.model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False))
        expected = answer(model, base.tokenizer, ["a few words"], 8)
        model.save_pretrained(tmp_path / "adapter")
        config = tmp_path / "adapter" / "adapter_config.json"
        talk = load_chat(str(tmp_path / "adapter"))
        assert answer(talk.model, talk.tokenizer, ["a few words"], 8) == expected
        assert "".join(talk.stream([{"role": "user", "content": "a few words"}], 8)).strip() == expected[0]
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "gone"}))
        with pytest.raises(UserError, match="'gone' is not on this machine"):
            load_chat(str(tmp_path / "adapter"))


class TestTerminal:
    """What is printed, and what is remembered."""

    @pytest.fixture
    def seen(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        """Conversations that the model was given; it answers with their length, and is interrupted at the word `stop`."""
        given_messages: list[list[str]] = []

        class Echo(Chat):
            def stream(self, messages: list[chats.Message], max_new_tokens: int, temperature: float = 0.0) -> Iterator[str]:
                given_messages.append([message["content"] for message in messages])
                yield "answer "
                if messages[-1]["content"] == "stop":
                    raise KeyboardInterrupt
                yield str(len(messages))

        monkeypatch.setattr(chats, "load_chat", lambda folder: Echo(None, None))
        return given_messages

    def type_lines(self, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
        left = iter(lines)

        def read(prompt: str) -> Any:
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(builtins, "input", read)

    def test_prompt_is_answered_once(self, seen: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
        chats.chat("folder", "hello")
        assert capsys.readouterr().out == "answer 1\n"

    def test_conversation(self, seen: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.type_lines(monkeypatch, "one", "", "stop", "two", "/clear", "three", "/exit", "never")
        chats.chat("folder", None)
        assert seen == [
            ["one"],
            ["one", "answer 1", "stop"],
            ["one", "answer 1", "stop", "answer ", "two"],
            ["three"],
        ]
        assert capsys.readouterr().out.splitlines()[1:] == ["answer 1", "answer ", "answer 5", "answer 1"]

    def test_end_of_input_ends(self, seen: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.type_lines(monkeypatch)
        chats.chat("folder", None)
        assert seen == []
