"""Tokenizer folders, fingerprints, and the contract with transformers' renderer."""

from __future__ import annotations

import pytest

from ascendfactory.core.messages import UserError
from ascendfactory.engine.data.tokenizer import adds_bos, fingerprint, load_tokenizer, render
from tests.engine.data import templates

MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.fixture
def folder(tmp_path, make_tokenizer):
    make_tokenizer(templates.CHATML, pad="<|endoftext|>").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_loading_keeps_ids_template_and_fingerprint(folder, make_tokenizer) -> None:
    original, loaded = make_tokenizer(templates.CHATML, pad="<|endoftext|>"), load_tokenizer(str(folder), None)
    assert loaded("The fox. 你好")["input_ids"] == original("The fox. 你好")["input_ids"]
    assert loaded.chat_template == original.chat_template
    assert fingerprint(loaded) == fingerprint(load_tokenizer(str(folder), None))


def test_fingerprint_changes_with_template_and_special_tokens_only(folder, tmp_path, make_tokenizer) -> None:
    tokenizer = load_tokenizer(str(folder), None)
    before = fingerprint(tokenizer)
    tokenizer(["a", "b b b b"], padding=True, truncation=True, max_length=2)  # leaves its mark in the backend
    assert fingerprint(tokenizer) == before
    (tmp_path / "t.jinja").write_text(templates.GLM4)
    with_other = load_tokenizer(str(folder), str(tmp_path / "t.jinja"))
    assert with_other.chat_template == templates.GLM4 and fingerprint(with_other) != before
    assert fingerprint(make_tokenizer(None, eos="<|im_end|>")) != fingerprint(make_tokenizer(None, eos="<|endoftext|>"))


def test_errors_are_one_line_with_a_hint(folder, tmp_path) -> None:
    with pytest.raises(UserError, match=r"model\.path: the folder .*mdel does not exist; did you mean .*model\?"):
        load_tokenizer(str(tmp_path / "mdel"), None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path / "empty"), None)
    (tmp_path / "chat.jinja").write_text("{% for x in %}")
    with pytest.raises(UserError, match=r"chat\.jinja:1: the template is not valid Jinja"):
        load_tokenizer(str(folder), str(tmp_path / "chat.jinja"))
    with pytest.raises(UserError, match=r"did you mean chat\.jinja\?"):
        load_tokenizer(str(folder), str(tmp_path / "chta.jinja"))
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(str(folder), None)


@pytest.mark.parametrize("name", ["CHATML", "MARKED", "LLAMA3", "QWEN3", "GEMMA", "GLM4", "PLAIN"])
@pytest.mark.parametrize("prompt", [False, True])
def test_rendering_equals_apply_chat_template(make_tokenizer, name, prompt) -> None:
    tokenizer = make_tokenizer(getattr(templates, name), bos="<|begin_of_text|>")
    messages = MESSAGES[:1] if prompt else MESSAGES
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    text, marks = render(tokenizer.chat_template, special, messages, None, prompt=prompt, place="")
    assert text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert [text[low:high] for low, high in marks] == (["a"] if name == "MARKED" and not prompt else [])


def test_marks_agree_with_the_mask_of_transformers(make_tokenizer) -> None:
    tokenizer = make_tokenizer(templates.MARKED)
    theirs = tokenizer.apply_chat_template(MESSAGES, return_dict=True, return_assistant_tokens_mask=True)
    text, marks = render(tokenizer.chat_template, {}, MESSAGES, None, prompt=False, place="")
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    ours = [int(any(start < high and end > low for low, high in marks)) for start, end in offsets]
    assert ours == theirs["assistant_masks"] and sum(ours) == 1


def test_adds_bos(make_tokenizer) -> None:
    assert adds_bos(make_tokenizer(None, bos="<|begin_of_text|>", adds_bos=True))
    assert not adds_bos(make_tokenizer(None, bos="<|begin_of_text|>"))
    assert not adds_bos(make_tokenizer(None))
