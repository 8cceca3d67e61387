"""Recipes from text: every mistake is one line that says what to write instead."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendfactory.core.load import RecipeError, dump_recipe, load_recipe, recipe_schema
from ascendfactory.core.recipe import Duration, Lora, Recipe, Sft

GOOD = "model: m\ndata: d.jsonl\n"


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(text, overrides)
    return caught.value.lines


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (GOOD + "optim: {lrr: 1}", "optim.lrr: unknown key; did you mean 'lr'?"),
        (GOOD + "lr: 1", "lr: unknown key here; did you mean 'optim.lr'?"),
        (GOOD + "tuning: {kind: full, rank: 8}", "tuning.rank: not a setting of kind 'full'; it belongs to lora"),
        (GOOD + "tuning: {rank: 8}", "tuning.kind: is missing; with the keys rank it can be lora"),
        (GOOD + "tuning: lorra", "tuning: \"lorra\" does not fit; it should be one of full, lora; did you mean 'lora'?"),
        (GOOD + "seed: '3'", 'seed: "3" does not fit; it should be a whole number of at least 0'),
        (GOOD + "seed: 1.5", "seed: 1.5 does not fit; it should be a whole number of at least 0"),
        (GOOD + "layout: {tp: true}", "layout.tp: true does not fit; it should be a whole number above 0 or auto"),
        (GOOD + "batch: {micro_size: 0}", "batch.micro_size: 0 does not fit; it should be a whole number above 0 or auto"),
        (GOOD + "optim: {beta1: 2}", "optim.beta1: 2 does not fit; it should be a number of at least 0.0 and at most 1.0"),
        (
            GOOD + "duration: 3 epoks",
            "duration: \"3 epoks\" does not fit; it should be such as '500 steps', '3 epochs' or '2e9 tokens'",
        ),
        (GOOD + "name: 2024", "name: 2024 does not fit; it should be letters, digits, '.', '_' and '-' only: put it in quotes"),
        ("model: m", "data: is missing; add it: a file, such as 'data: train.jsonl', or a mapping with the key train"),
        ("model: m\nmodel: n\ndata: d", "line 2: the key 'model' was already written on line 1; keep one of them"),
        ("optim:\n  lr: 1\n  lr: 2", "line 3: the key 'lr' was already written on line 2; keep one of them"),
        ("- m", 'a recipe is a mapping (model: ...), not ["m"]'),
        ("model: [", "line 1, column 9: not YAML: expected the node content, but found '<stream end>'"),
    ],
)
def test_a_mistake_is_one_line_with_its_remedy(text: str, line: str) -> None:
    assert problems(text) == [line]


def test_every_mistake_is_told_at_once_and_a_misspelt_key_only_once() -> None:
    assert problems("modle: m\ndata: {train: [{pth: x}], seq_len: 4}\noptim: {lr: -1}") == [
        "data.seq_len: 4 does not fit; it should be a whole number of at least 8",
        "optim.lr: -1 does not fit; it should be a number above 0",
        "data.train[0].pth: unknown key; did you mean 'path'?",
        "modle: unknown key; did you mean 'model'?",
    ]


def test_messages_have_a_chinese_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert problems(GOOD + "optim: {lr: -1, lrr: 2}") == [
        "optim.lr: -1 不合适；应为大于 0 的数",
        "optim.lrr: 未知的键，是否想写 'lr'？",
    ]


def test_an_error_survives_pickling() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(GOOD + "seed: x")
    assert pickle.loads(pickle.dumps(caught.value)).lines == caught.value.lines


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-5", 1e-5), ("1E-5", 1e-5), ("2.5e-4", 2.5e-4), (".001", 0.001), ("1", 1.0), ("1_0.5", 10.5)],
)
def test_numbers_of_yaml_1_2(written: str, value: float) -> None:
    assert load_recipe(GOOD + f"optim: {{lr: {written}}}").optim.lr == value


@pytest.mark.parametrize("word", ["no", "on", "yes", "off", "2024-01-01", "1-30"])
def test_words_stay_words(word: str) -> None:
    assert load_recipe(GOOD + f"name: {word}").name == word


def test_overrides_apply_in_order_and_expand_short_forms() -> None:
    recipe = load_recipe(
        GOOD + "duration: 3 epochs\ncluster: 2x8 snt9b",
        [
            "--optim.lr=1e-5",
            "--tuning=lora",
            "--tuning.rank=16",
            "--data.train[0].weight=0.5",
            "--duration.amount=4",
            "--cluster.nodes=1",
            "objective.train_on=last",
            "--data.train.0.format=alpaca",
            "--data.eval=x.jsonl",
            "--data.packing=false",
        ],
    )
    assert (recipe.optim.lr, recipe.tuning, recipe.objective) == (1e-5, Lora(rank=16), Sft(train_on="last"))
    assert [(s.path, s.weight, s.format) for s in recipe.data.train] == [("d.jsonl", 0.5, "alpaca")]
    assert (recipe.duration, recipe.data.packing, recipe.data.eval[0].path) == (Duration(amount=4, unit="epochs"), "dynamic", "x.jsonl")
    assert (recipe.cluster.device, recipe.cluster.nodes, recipe.cluster.nproc) == ("snt9b", 1, 8)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("--optim.lr", "--optim.lr: an override is written --key=value, such as --optim.lr=..."),
        ("--optim.l=3", "optim.l: unknown key; did you mean 'lr'?"),
        ("--seed.x=3", "--seed.x: 'seed' is 42 and has no keys"),
        ("--tuning.rank=3", "tuning.rank: not a setting of kind 'full'; it belongs to lora"),
        ("--data.train.7.path=x", "--data.train.7.path: '7' is not an item of the list; write 0 to 0"),
    ],
)
def test_a_wrong_override_says_so(override: str, line: str) -> None:
    assert problems(GOOD + "seed: 42", override) == [line]


def test_an_override_mends_the_file() -> None:
    assert load_recipe("data: d", ["--model=m"]).model.path == "m"


NAMES = st.text("abcE019._-", min_size=1, max_size=8)
PATHS = st.one_of(
    st.sampled_from(["1e5", "no", "null", "~", "on", "0x10", "- a", "a: b", "#x", "模型/路径", "2024-01-01", "", " x", "<<", "1_0"]), NAMES
)


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, exclude_min=True, allow_nan=False)


RECIPES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries({"path": PATHS, "init": st.sampled_from(["pretrained", "random"])}),
        "data": st.fixed_dictionaries(
            {
                "train": st.lists(
                    st.fixed_dictionaries(
                        {"path": PATHS, "weight": floats(0, 1e6), "columns": st.dictionaries(PATHS, PATHS, max_size=2)},
                    ),
                    min_size=1,
                    max_size=3,
                ),
                "seq_len": st.integers(8, 10**6),
                "packing": st.sampled_from(["packed", "dynamic", "fixed", True, False]),
                "chat_template": st.none() | PATHS,
            }
        ),
    },
    optional={
        "name": NAMES,
        "objective": st.sampled_from(["pretrain", "sft", {"kind": "sft", "train_on": "all"}, "grpo"]),
        "tuning": st.just("full") | st.fixed_dictionaries({"kind": st.just("lora"), "rank": st.integers(1, 512), "alpha": floats(0, 1e4)}),
        "duration": st.sampled_from(["500 steps", "3 epochs", "2e9 tokens", "0.25 epochs", "1 step"]),
        "optim": st.fixed_dictionaries({"lr": floats(0, 1e3), "warmup": st.sampled_from(["100 steps", 0.5, 0]), "eps": floats(0, 1)}),
        "cluster": st.sampled_from(["cpu", "8 a100-80g", "2x8 snt9b", "auto"]),
        "seed": st.integers(0, 2**63),
        "output": PATHS | st.fixed_dictionaries({"sample_prompts": st.lists(st.text(max_size=9), max_size=2)}),
    },
)


@given(RECIPES)
@settings(max_examples=60, deadline=None)
def test_a_recipe_written_out_is_read_back_the_same(settings_of: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(settings_of)
    assert load_recipe(dump_recipe(recipe)) == recipe


@given(st.text("abc:-[]{}&*!|>'\"%@`#,?\n \t012.~<", max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_text_is_a_recipe_or_a_told_mistake(text: str) -> None:
    try:
        load_recipe(text)
    except RecipeError as error:
        assert error.lines
        assert all("\n" not in line for line in error.lines)


def test_the_schema_knows_short_forms_and_descriptions() -> None:
    schema = recipe_schema()
    properties = schema["properties"]
    assert schema["$schema"].endswith("2020-12/schema")
    assert {"enum": ["full", "lora"]} in properties["tuning"]["anyOf"]
    assert {"type": ["string", "number"]} in properties["model"]["anyOf"]
    assert any(form.get("type") == "string" for form in properties["duration"]["anyOf"])
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Optim"]["properties"]["schedule"]["description"].startswith("shape after the warm-up")
