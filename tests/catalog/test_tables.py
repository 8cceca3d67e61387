"""The tables of the user guide as package data."""

import importlib.util
from collections import Counter
from pathlib import Path

from ascendfactory.catalog.read import find_card, list_cards
from ascendfactory.catalog.tables import features, min_devices, stage_matrix, support, throughput

STAGES = {"pretrain", "sft_full", "sft_lora", "dpo", "grpo", "dapo", "ppo"}


def test_stage_matrix() -> None:
    matrix = {row.backend: row.stages for row in stage_matrix()}
    assert matrix == {
        "native": ("pretrain", "sft_full", "sft_lora"),
        "llamafactory": ("pretrain", "sft_full", "sft_lora", "rl"),
        "mindspeed_llm": ("pretrain", "sft_full", "sft_lora"),
        "verl": ("rl",),
        "mindspeed_rl": ("rl",),
        "mindspeed_mm": ("pretrain", "sft_full"),
    }


def test_every_row_is_about_a_card_and_a_known_stage() -> None:
    names = {card.name for card in list_cards()}
    matrix = {row.backend: set(row.stages) for row in stage_matrix()}
    for release in ("6.5.908", "6.5.910"):
        for row in support(release=release):
            assert row.model in names
            assert set(row.stages) <= STAGES
            allowed = matrix[row.backend] | ({"dpo", "grpo", "dapo", "ppo"} if "rl" in matrix[row.backend] else set())
            assert set(row.stages) <= allowed
    assert {row.model for row in throughput()} <= names


def test_number_of_rows_a_back_end() -> None:
    """The two rows that name two sizes of Llama count twice."""
    assert Counter(row.backend for row in support()) == {
        "llamafactory": 31 + 2,
        "mindspeed_llm": 25 + 2,
        "verl": 11,
        "mindspeed_rl": 7,
        "mindspeed_mm": 3,
    }


def stages(model: str, backend: str, release: str = "6.5.910") -> list[tuple[str, ...]]:
    return [row.stages for row in support(model, backend, release)]


def test_single_cells_of_the_support_tables() -> None:
    assert stages("Qwen2.5-14B", "llamafactory") == [("pretrain", "sft_full", "sft_lora", "dpo")]
    assert stages("Mixtral-8x7B", "llamafactory") == [()]
    assert stages("Qwen3-30B-A3B", "llamafactory") == []
    assert stages("Qwen3-30B-A3B", "llamafactory", "6.5.908") == [("pretrain", "sft_full", "sft_lora")]
    assert stages("Qwen3-30B-A3B", "mindspeed_llm") == [("pretrain", "sft_full")]
    assert stages("Llama-3.2-3B", "mindspeed_llm") == [("pretrain", "sft_full", "sft_lora")]
    assert stages("Qwen3-8B", "verl") == [("grpo", "ppo")]
    assert stages("Qwen3-8B", "verl", "6.5.908") == [("grpo",)]
    assert stages("InternVL3-8B", "mindspeed_mm") == [("pretrain", "sft_full")]
    (row,) = support("Qwen3-8B", "verl")
    assert row.tested_seq_len == 32768
    assert row.options["train_backends"] == ["FSDP", "MindSpeed"]
    (row,) = support("Qwen3-8B", "llamafactory")
    assert row.options["tested_stages"] == ["sft_full"]


def test_the_embedded_engine_trains_dense_text_models() -> None:
    for name, expected in (("Qwen3-8B", ("pretrain", "sft_full", "sft_lora")), ("Qwen3-30B-A3B", ()), ("Gemma3-27B", ())):
        (row,) = support(find_card(name), backend="native")
        assert row.stages == expected


def counts(**where: object) -> dict[str, int]:
    return {row.device: row.num_devices for row in min_devices(**where)}  # type: ignore[arg-type]


def test_single_cells_of_the_minimum_table() -> None:
    where = {"model": "Qwen2.5-32B", "backend": "mindspeed_llm", "tuning": "full"}
    assert counts(**where, seq_len=8192) == {"snt9b": 16, "snt9b23": 16}
    assert counts(model="Qwen2-0.5B", backend="llamafactory", tuning="lora", seq_len=4096) == {"snt9b": 1, "snt9b23": 2}
    assert counts(model="DeepSeek-R1", backend="mindspeed_llm", tuning="lora") == {"snt9b": 64, "snt9b23": 64}
    assert min_devices("Qwen2-1.5B", backend="llamafactory") == []
    (row,) = min_devices(find_card("Llama-3.1-70B"), "llamafactory", "snt9b", "full", 8192)
    assert (row.num_devices, row.confidence, row.basis) == (64, "exact", "table")
    assert all(row.note for row in min_devices("Qwen2-7B", "llamafactory"))


def test_every_minimum_is_a_positive_count_with_a_confidence() -> None:
    rows = [row for card in list_cards() for row in min_devices(card)]
    assert {row.confidence for row in rows} == {"exact", "inferred"}
    assert {row.tuning for row in rows} == {"full", "lora", "grpo", "dapo", "ppo"}
    assert all(row.num_devices > 0 and row.source for row in rows)
    assert len({(row.model, row.tuning, row.seq_lens) for row in rows}) == 104


def test_throughput_and_features() -> None:
    assert [row.tokens_per_s for row in throughput()] == [7617.002, 2318.373, 914.97, 3774.914, 1435.603, 978.914]
    assert {row.model for row in throughput()} == {"Qwen3-8B", "Qwen3-30B-A3B", "Qwen3-32B", "DeepSeek-V3"}
    assert len(features()) == 36
    assert [row.feature for row in features() if not row.mcore] == []
    assert {row.feature for row in features() if not row.released} >= {"MC2", "CoC", "O2 BF16 Optimizer"}


def test_the_pages_of_the_documentation_are_current() -> None:
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("generate_models", docs / "generate_models.py")
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for language in ("en", "zh"):
        assert (docs / language / "models.md").read_text(encoding="utf-8") == script.page(language == "zh")
