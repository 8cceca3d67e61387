"""Every word that the planner prints has its Chinese."""

from __future__ import annotations

import re

import pytest

from ascendfactory.planner import chinese, memory, time

CHINESE = re.compile("[一-鿿]")


def test_every_term_and_part_has_its_chinese() -> None:
    assert set(memory.FORMULAS) == set(chinese.TERMS)
    assert set(memory.FORMULAS.values()) == set(chinese.FORMULAS)
    assert set(time.DETAILS) == set(chinese.PARTS)
    assert set(time.DETAILS.values()) == set(chinese.DETAILS)
    words = [*chinese.TERMS.values(), *chinese.PARTS.values(), *chinese.FORMULAS.values(), *chinese.DETAILS.values()]
    assert [word for word in words if not CHINESE.search(word)] == ["logits"]


def test_words_follow_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert chinese.in_words("bubble") == "流水线气泡"
    assert chinese.in_words("scores and values") == "打分与加权求和"
    assert chinese.in_words("a word of nobody") == "a word of nobody"
    monkeypatch.setenv("LC_ALL", "C")
    assert chinese.in_words("bubble") == "bubble"
