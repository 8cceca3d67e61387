"""Finding cards and devices; reading config.json; the words of the errors."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ascendfactory.catalog import read
from ascendfactory.catalog.read import card_from_config, find_card, find_device, list_cards, list_devices
from ascendfactory.core.messages import UserError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}

# name in a table of the user guide, or of a back end → card
OTHER_NAMES = {
    "DeepSeek-R1-671B": "DeepSeek-R1",
    "DeepSeek-V3-671B": "DeepSeek-V3",
    "DeepSeek-V3/R1": "DeepSeek-V3",
    "DeepSeek-V2-Lite 16B": "DeepSeek-V2-Lite",
    "Gemma3-27b": "Gemma3-27B",
    "InternVL3-8b": "InternVL3-8B",
    "Mixtral-8x7B-Instruct-v0.1": "Mixtral-8x7B",
    "mixtral-8x7b": "Mixtral-8x7B",
    "Qwen3-235b-A22B": "Qwen3-235B-A22B",
    "qwen3_moe-235B_A22B": "Qwen3-235B-A22B",
    "qwen3_moe-30B_A3B": "Qwen3-30B-A3B",
    "glm-4-9b-chat": "GLM-4-9B-Chat",
    "glm4-9b": "GLM-4-9B-Chat",
    "llama3.1-70b": "Llama-3.1-70B",
    "Llama3.2 -1B": "Llama-3.2-1B",
    "qwen2.5_vl-7b": "Qwen2.5-VL-7B",
    "qwen2vl-2b": "Qwen2-VL-2B",
    "qwen25_7b": "Qwen2.5-7B",
    "meta-llama/Meta-Llama-3.1-8B": "Llama-3.1-8B",
}


@pytest.mark.parametrize(("name", "card_name"), OTHER_NAMES.items())
def test_names_of_tables_and_back_ends_resolve(name: str, card_name: str) -> None:
    assert find_card(name).name == card_name


@pytest.mark.parametrize("card", list_cards(), ids=lambda card: card.name)
def test_every_card_is_found_by_all_its_names(card: read.ModelCard) -> None:
    assert find_card(card.name) == card
    assert find_card(card.name.upper()) == card
    assert find_card(card.hub_id) == card
    for name in card.backend_names.values():
        assert find_card(name).num_params == card.num_params
    assert card.num_heads % card.num_kv_heads == 0
    assert card.source


def test_a_variant_brings_its_hub_id_and_length() -> None:
    base, variant = find_card("Qwen2.5-7B"), find_card("qwen/qwen2.5-7b-instruct")
    assert (base.hub_id, base.max_seq_len) == ("Qwen/Qwen2.5-7B", 131072)
    assert (variant.hub_id, variant.max_seq_len) == ("Qwen/Qwen2.5-7B-Instruct", 32768)
    assert find_card("Qwen2.5-7B-Instruct") == variant
    assert variant.model_copy(update={"hub_id": base.hub_id, "max_seq_len": base.max_seq_len}) == base


def test_names_file_is_consistent() -> None:
    entries = read._read_toml(read._PACKAGE / "names.toml")
    stems = {path.name.removesuffix(".toml") for path in read._card_paths()}
    assert {facts["card"] for facts in entries.values()} <= stems
    keys = [read._key(name) for name in entries]
    assert len(keys) == len(set(keys))
    assert not set(keys) & {read._key(stem) for stem in stems}
    cards = {card.name.lower(): card for card in list_cards()}
    assert set(cards) == stems
    for stem, card in cards.items():
        assert entries[card.hub_id] == {"card": stem}


def test_one_card_costs_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = read._read_toml
    monkeypatch.setattr(read, "_read_toml", lambda path: seen.append(path.name) or real(path))
    find_card("qwen3-8b")
    assert seen == ["qwen3-8b.toml"]


def test_listing_is_quick() -> None:
    start = time.process_time()
    list_cards()
    assert time.process_time() - start < 0.1


def test_unknown_model_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    with pytest.raises(UserError) as caught:
        find_card("qwen3-9b")
    assert str(caught.value) == "model.path: no model or folder 'qwen3-9b'; did you mean 'qwen3-8b'? The names: ascendfactory models"
    assert "是不是 'qwen3-8b'" in caught.value.zh


def test_a_folder_of_another_machine_is_planned_by_its_name() -> None:
    assert find_card("/nowhere/model/Qwen2.5-7B-Instruct") == find_card("Qwen/Qwen2.5-7B-Instruct")
    assert find_card("models/qwen2.5-7b").name == "Qwen2.5-7B"


def test_a_missing_folder_is_no_model_name() -> None:
    for name in ("./nothing/here", "~nobody-here/model"):
        with pytest.raises(UserError, match="no such folder"):
            find_card(name)


def write_config(folder: Path, config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_is_read(tmp_path: Path) -> None:
    card = find_card(str(write_config(tmp_path / "mine", LLAMA)))
    assert (card.name, card.family, card.hub_id, card.dtype) == ("mine", "llama", "", "float32")
    attention = 64 * 16 * (4 + 2 + 2 + 4)
    assert card.num_params == 128 * 64 + 2 * (attention + 3 * 64 * 96 + 2 * 64) + 64
    assert find_card(str(tmp_path / "mine" / "config.json")) == card


def test_a_folder_of_a_catalogue_model_takes_over_its_names(tmp_path: Path) -> None:
    config = {**LLAMA, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    config |= {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192}
    same = find_card(str(write_config(tmp_path / "SmolLM2-135M", config)))
    assert same.hub_id == "HuggingFaceTB/SmolLM2-135M"
    other = find_card(str(write_config(tmp_path / "smollm2-360m", config)))
    assert other.hub_id == ""
    assert other.num_params == same.num_params == 134_515_008


@pytest.mark.parametrize(("text", "words"), [("{", "cannot be read"), ("[]", "not a JSON object")])
def test_a_broken_config_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=words):
        find_card(str(tmp_path))


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        find_card(str(tmp_path))


def test_a_missing_key_is_named_with_the_nearest() -> None:
    config = {("num_hidden_layer" if key == "num_hidden_layers" else key): value for key, value in LLAMA.items()}
    with pytest.raises(UserError, match=r"x/config\.json: no key 'num_hidden_layers'.*did you mean 'num_hidden_layer'") as caught:
        card_from_config(config, "x")
    assert "缺少键 'num_hidden_layers'" in caught.value.zh


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number of at least 1"),
        ({"num_key_value_heads": "many"}, "num_key_value_heads is 'many'"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"mamba_d_state": 16}, "recurrent layers"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "recurrent layers"),
        ({"mlp_bias": True}, "mlp_bias is set"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]}, "not the first layers"),
        ({"model_type": "strange_vl", "vision_config": {"depth": 2}}, "vision tower of model_type 'strange_vl' is unknown"),
        ({"model_type": "gemma3", "vision_config": {"hidden_size": 2}}, "vision_config has no key 'num_hidden_layers'"),
    ],
)
def test_what_cannot_be_planned_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        card_from_config({**LLAMA, **change}, "x")


def test_sliding_windows() -> None:
    def sliding(**change: Any) -> tuple[int | None, int]:
        card = card_from_config({**LLAMA, "sliding_window": 32, **change}, "x")
        return card.sliding_window, card.full_attention_period

    assert sliding(model_type="mistral") == (32, 3)  # 2 layers, none of them full
    assert sliding(model_type="qwen2") == (None, 1)  # Qwen slides only when use_sliding_window says so
    assert sliding(model_type="qwen2", use_sliding_window=True) == (None, 1)  # first full, then sliding: counted as full
    assert sliding(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2) == (32, 2)
    assert sliding(num_hidden_layers=3, layer_types=["full_attention", "sliding_attention", "full_attention"]) == (None, 1)


def test_an_unknown_family_says_that_it_is_a_guess() -> None:
    assert "unknown" in card_from_config({**LLAMA, "model_type": "brand_new"}, "x").source
    assert card_from_config(LLAMA, "x").source == "config.json"


def test_devices() -> None:
    assert [device.name for device in list_devices()] == ["cpu", "snt9b", "snt9b23", "a100-40g", "a100-80g", "h100", "h200"]
    assert find_device("cpu").memory_bytes == 0
    assert not find_device("cpu").has_bf16
    assert find_device("SNT9B23").devices_per_node == 16
    for device in list_devices():
        assert device.source
        assert device.kind == "cpu" or 32e9 < device.memory_bytes < 160e9
        assert device.inter_node_bytes_s <= device.intra_node_bytes_s
    with pytest.raises(UserError, match=r"no device 'h10'; did you mean 'h100'\?"):
        find_device("h10")
