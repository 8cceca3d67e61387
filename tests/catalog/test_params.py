"""The parameter count of every card, against shapes, published totals and closed formulas."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendfactory.catalog.params import (
    EXPERT_ROLES,
    count_active_params,
    count_params,
    is_moe_layer,
    layer_shapes,
    parameter_shapes,
)
from ascendfactory.catalog.read import find_card, list_cards
from ascendfactory.core.plan import Mla, ModelCard, Moe

# Elements of the published safetensors, tied weights once.
PUBLISHED = {
    "Qwen2-0.5B": 494_032_768,
    "Qwen2-1.5B": 1_543_714_304,
    "Qwen2-7B": 7_615_616_512,
    "Qwen2-72B": 72_706_203_648,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "GLM-4-9B-Chat": 9_399_951_360,
    "Mixtral-8x7B": 46_702_792_704,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "Qwen2-VL-2B": 2_208_985_600,
    "Qwen2-VL-7B": 8_291_375_616,
    "Qwen2-VL-72B": 73_405_560_320,
    "Qwen2.5-VL-3B": 3_754_622_976,
    "Qwen2.5-VL-7B": 8_292_166_656,
    "Qwen2.5-VL-32B": 33_452_718_336,
    "Qwen2.5-VL-72B": 73_410_777_344,
    "Gemma3-27B": 27_432_406_640,
    "InternVL3-8B": 7_944_373_760,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
}


@pytest.mark.parametrize("card", list_cards(), ids=lambda card: card.name)
def test_counts_in_the_card_are_those_of_its_shapes(card: ModelCard) -> None:
    assert card.num_params == count_params(card)
    assert card.num_active_params == count_active_params(card)
    assert (card.num_active_params < card.num_params) == (card.moe is not None)


@pytest.mark.parametrize(("name", "num_params"), PUBLISHED.items())
def test_counts_are_the_published_ones(name: str, num_params: int) -> None:
    assert find_card(name).num_params == num_params


def test_deepseek_v3_is_the_published_count_less_the_routing_bias_buffers() -> None:
    """The checkpoint also holds one bias an expert in each of the 58 MoE layers; the HF class keeps it as a buffer."""
    assert find_card("DeepSeek-V3").num_params == 671_026_419_200 - 58 * 256
    assert find_card("DeepSeek-R1").num_params == find_card("DeepSeek-V3").num_params


def test_published_active_parameters() -> None:
    assert find_card("Qwen3-30B-A3B").num_active_params / 1e9 == pytest.approx(3.3, abs=0.1)
    assert find_card("Qwen3-235B-A22B").num_active_params / 1e9 == pytest.approx(22, abs=0.3)
    assert find_card("Mixtral-8x7B").num_active_params / 1e9 == pytest.approx(12.9, abs=0.1)
    assert find_card("DeepSeek-V3").num_active_params / 1e9 == pytest.approx(37, abs=0.6)


def test_order_and_roles_of_a_tied_model() -> None:
    weights = list(parameter_shapes(find_card("Qwen2-0.5B")))
    assert weights[0].role == "embedding"
    assert weights[0].shape == (151936, 896)
    assert [w.role for w in weights if w.layer == 3] == ["norm", "q", "q", "k", "k", "v", "v", "o", "mlp_gate", "mlp_up", "mlp_down"]
    assert weights[-1].role == "norm"
    assert weights[-1].layer is None
    assert not any(w.role == "head" for w in weights)


def test_dense_and_expert_layers_of_deepseek() -> None:
    card = find_card("DeepSeek-V2-Lite")
    assert not any(w.role in EXPERT_ROLES for w in layer_shapes(card, 0))
    experts = [w for w in layer_shapes(card, 1) if w.role in EXPERT_ROLES]
    assert [(w.shape, w.copies) for w in experts] == [((1408, 2048), 64), ((1408, 2048), 64), ((2048, 1408), 64)]


def test_every_second_layer_is_moe() -> None:
    moe = Moe(num_experts=4, experts_per_token=2, expert_ffn_size=8, layer_period=2, first_dense_layers=1)
    assert [is_moe_layer(moe, layer) for layer in range(5)] == [False, True, False, True, False]


sizes = st.integers(1, 64)


@st.composite
def cards(draw: st.DrawFn) -> ModelCard:
    moe = Moe(
        num_experts=draw(sizes),
        experts_per_token=1,
        expert_ffn_size=draw(sizes),
        num_shared_experts=1,
        shared_ffn_size=draw(st.integers(0, 64)),
        first_dense_layers=draw(st.integers(0, 4)),
    )
    mla = Mla(
        q_lora_rank=draw(st.none() | sizes),
        kv_lora_rank=draw(sizes),
        qk_nope_head_dim=8,
        qk_rope_head_dim=draw(sizes),
        v_head_dim=draw(sizes),
    )
    return ModelCard(
        name="x",
        family=draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        hub_id="",
        num_layers=draw(st.integers(1, 6)),
        hidden_size=draw(sizes),
        ffn_size=draw(sizes),
        num_heads=draw(st.integers(1, 8)),
        num_kv_heads=draw(st.integers(1, 8)),
        head_dim=draw(sizes),
        vocab_size=draw(sizes),
        max_seq_len=8,
        tied_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        num_norms_per_layer=draw(st.integers(2, 4)),
        gated_mlp=draw(st.booleans()),
        moe=draw(st.none() | st.just(moe)),
        mla=draw(st.none() | st.just(mla)),
        num_params=0,
        num_active_params=0,
    )


@settings(max_examples=60, deadline=None)
@given(cards())
def test_total_is_the_sum_of_the_layers_and_the_ends(card: ModelCard) -> None:
    layers = sum(w.num_params for layer in range(card.num_layers) for w in layer_shapes(card, layer))
    ends = card.vocab_size * card.hidden_size * (1 if card.tied_embeddings else 2) + card.hidden_size
    assert count_params(card) == layers + ends
    assert all(w.num_params == w.copies * math.prod(w.shape) > 0 for w in parameter_shapes(card))


@settings(max_examples=60, deadline=None)
@given(cards())
def test_active_is_total_less_the_idle_experts(card: ModelCard) -> None:
    idle = 0
    if card.moe:
        num_moe = max(0, card.num_layers - card.moe.first_dense_layers)
        idle = num_moe * (card.moe.num_experts - 1) * 3 * card.hidden_size * card.moe.expert_ffn_size
    assert count_active_params(card) == count_params(card) - idle


@settings(max_examples=40, deadline=None)
@given(cards())
def test_dense_attention_by_formula(card: ModelCard) -> None:
    """H·D·(2N + 2K) weights, and with biases D·(N + 2K) more, H more where the output has one too."""
    dense = card.model_copy(update={"mla": None, "moe": None, "qk_norm": False})
    N, K, D, H = dense.num_heads, dense.num_kv_heads, dense.head_dim, dense.hidden_size
    bias = D * (N + 2 * K) + (0 if dense.family == "qwen2" else H)
    found = sum(w.num_params for w in layer_shapes(dense, 0) if w.role in ("q", "k", "v", "o"))
    assert found == H * D * (2 * N + 2 * K) + (bias if dense.attention_bias else 0)
