"""What is told, and in which language."""

from __future__ import annotations

import pickle

import pytest

from ascendfactory.core.messages import UserError, in_chinese, nearest


@pytest.mark.parametrize(
    ("variables", "chinese"),
    [
        ({"LC_ALL": "zh_CN.UTF-8"}, True),
        ({"LC_ALL": "C", "LANG": "zh_CN.UTF-8"}, False),
        ({"LANG": "zh_TW"}, True),
        ({"LC_MESSAGES": "en_US", "LANG": "zh_CN"}, False),
        ({}, False),
    ],
)
def test_the_locale_decides(variables: dict[str, str], chinese: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert in_chinese() is chinese


def test_a_user_error_is_one_line_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(UserError("a.b", "is wrong", "有误")))
    assert (error.line(), error.where, error.zh) == ("a.b: is wrong", "a.b", "有误")
    assert UserError("", "alone", "单独").line() == "alone"


def test_nearest_ignores_case_and_gives_up_when_nothing_is_near() -> None:
    assert nearest("LORRA", ["full", "lora"]) == "lora"
    assert nearest("zzz", ["full", "lora"]) is None
