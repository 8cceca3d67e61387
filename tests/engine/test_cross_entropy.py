"""The chunked linear cross-entropy against torch's own on whole logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from ascendfactory.engine.data.batch import count_trained_tokens
from ascendfactory.engine.families import HeadRules, head_rules
from ascendfactory.engine.mesh import Mesh
from ascendfactory.engine.objective import cross_entropy
from ascendfactory.engine.objective.causal_lm import CausalLM
from ascendfactory.engine.objective.cross_entropy import linear_cross_entropy
from ascendfactory.engine.parallel import tensor as tensors
from ascendfactory.engine.parallel.context import cut
from tests.pool import Pool

RULES: list[dict[str, Any]] = [{}, {"softcap": 2.0}, {"logit_scale": 0.0625}, {"softcap": 1.5, "logit_scale": 3.0}]


def draw(num: int, hidden: int = 6, vocab: int = 11, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(num)
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in ((num, hidden), (vocab, hidden), (vocab,))]
    return tensors, torch.randint(0, vocab, (num,), generator=generator)


def whole(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, scale: float, softcap: float | None = None, logit_scale: float = 1
) -> Tensor:
    logits = logit_scale * (hidden @ weight.T)
    logits = logits if bias is None else logits + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return functional.cross_entropy(logits, labels, reduction="sum") * scale


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num", [1, 16, 50])
def test_equals_torch_on_whole_logits(monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any], with_bias: bool, num: int) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 1)  # the least chunk, 16 positions: 1, 1 and 4 chunks
    (hidden, weight, bias), labels = draw(num)
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    loss = linear_cross_entropy(hidden, weight, labels, scale=0.2, bias_V=bias if with_bias else None, **rules)
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    right = whole(doubles[0], doubles[1], doubles[2] if with_bias else None, labels, 0.2, **rules)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(right.item(), rel=1e-6)
    for mine, expected in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(right, doubles), strict=True):
        torch.testing.assert_close(mine, expected.float(), rtol=2e-5, atol=2e-6)


def test_gradients_equal_finite_differences() -> None:
    (hidden, weight, bias), labels = draw(5)
    loss = linear_cross_entropy(hidden, weight, labels, scale=0.7, bias_V=bias, softcap=2.0, logit_scale=1.5)
    gradients = torch.autograd.grad(loss, (hidden, weight, bias))
    doubles = [t.detach().double() for t in (hidden, weight, bias)]
    for tensor, gradient in zip(doubles, gradients, strict=True):
        for index in (0, tensor.numel() // 2, tensor.numel() - 1):
            value = tensor.view(-1)[index].item()
            ends = []
            for moved in (value + 1e-6, value - 1e-6):
                tensor.view(-1)[index] = moved
                ends.append(whole(*doubles, labels, 0.7, 2.0, 1.5).item())
            tensor.view(-1)[index] = value
            assert gradient.reshape(-1)[index].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4, abs=1e-6)


def test_without_positions_loss_and_gradients_are_zero() -> None:
    (hidden, weight, bias), labels = draw(0)
    loss = linear_cross_entropy(hidden, weight, labels, scale=1.0, bias_V=bias, softcap=2.0)
    assert loss.item() == 0.0
    gradients = torch.autograd.grad(loss, (hidden, weight, bias))
    assert [tuple(g.shape) for g in gradients] == [(0, 6), (11, 6), (11,)]
    assert not any(g.any() for g in gradients)


def test_frozen_weight_gets_no_gradient() -> None:
    (hidden, weight, _), labels = draw(20)
    loss = linear_cross_entropy(hidden, weight.detach(), labels, scale=1.0)
    loss.backward()
    right = whole(hidden.detach().requires_grad_(), weight.detach(), None, labels, 1.0)
    assert loss.item() == pytest.approx(right.item(), rel=1e-6)
    assert weight.grad is None
    assert hidden.grad is not None


@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_an_outer_factor_scales_the_gradients(factor: float) -> None:
    (hidden, weight, _), labels = draw(20)
    first = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, scale=1.0), (hidden, weight))
    second = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, scale=1.0) * factor, (hidden, weight))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one * factor, other)


def test_no_gradient_is_formed_without_grad_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    (hidden, weight, bias), labels = draw(20)
    right = whole(hidden, weight, bias, labels, 1.0).item()
    monkeypatch.setattr(torch, "empty_like", None)  # the weight's gradient would be asked from it
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, scale=1.0, bias_V=bias)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(right, rel=1e-6)


def test_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 1)
    (hidden, weight, _), labels = draw(200, dtype=torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, scale=0.01)
    doubles = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    right = whole(*doubles, None, labels, 0.01)
    assert loss.item() == pytest.approx(right.item(), rel=5e-3)
    for mine, expected in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(right, doubles), strict=True):
        assert mine.dtype == torch.bfloat16
        assert ((mine.double() - expected).norm() / expected.norm()).item() < 0.01


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("LlamaConfig", {}, HeadRules()),
        ("Gemma2Config", {"final_logit_softcapping": 30.0}, HeadRules(softcap=30.0)),
        ("Gemma3Config", {"text_config": {"final_logit_softcapping": 5.0}}, HeadRules(softcap=5.0)),
        ("CohereConfig", {"logit_scale": 0.25}, HeadRules(scale=0.25)),
        ("GraniteConfig", {"logits_scaling": 8.0}, HeadRules(scale=0.125)),
        ("HyperCLOVAXConfig", {"logits_scaling": 8.0}, HeadRules(scale=8.0)),
    ],
)
def test_head_rules_are_read_from_the_config(family: str, changes: dict[str, Any], expected: HeadRules) -> None:
    import transformers

    assert head_rules(getattr(transformers, family)(**changes)) == expected


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Cohere", {"logit_scale": 0.25}),
        ("Granite", {"logits_scaling": 8.0, "embedding_multiplier": 3.0}),
        ("HyperCLOVAX", {"logits_scaling": 0.5}),
        ("Gemma3", {"final_logit_softcapping": 0.5}),
        ("Phi", {}),  # a head with a bias
    ],
)
def test_heads_of_families_equal_transformers(family: str, changes: dict[str, Any]) -> None:
    import transformers

    from ascendfactory.engine import attention
    from ascendfactory.engine.data.batch import Row, assemble

    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, name)(**shape, num_key_value_heads=2, head_dim=8, pad_token_id=0, max_position_embeddings=64, **changes)
    torch.manual_seed(1)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        theirs.get_output_embeddings().weight.mul_(20.0)
        if (bias := theirs.get_output_embeddings().bias) is not None:
            bias.normal_()
    attention.register()
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation(attention.NAME)
    ids = torch.randint(1, 40, (12,), generator=torch.Generator().manual_seed(3))
    batch = assemble([Row([(ids.numpy(), torch.ones(12, dtype=torch.bool).numpy())], ["x"])], 0, multiple=1)
    assert count_trained_tokens([batch]) == 11
    right = functional.cross_entropy(theirs(ids[None], use_cache=False).logits[0, :-1], ids[1:], reduction="sum") / 11
    alone = Mesh(torch.device("cpu"))
    tensors.apply(ours, alone.tp, sequence=False)
    assert CausalLM(ours, {})(cut(batch, alone), 1 / 11).item() == pytest.approx(right.item(), rel=1e-5)


def parts_of_the_vocabulary(num: int, vocab: int, with_bias: bool, rules: dict[str, Any], chunk_bytes: int) -> dict[str, Any]:
    """Loss and gradients of this rank, which holds its rows of the head only."""
    import torch.distributed as dist

    from ascendfactory.engine.mesh import Axis
    from ascendfactory.engine.parallel.collectives import interval

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    axis = Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    (hidden, weight, bias), labels = draw(num, vocab=vocab)
    at = slice(*interval(vocab, axis))
    inputs = [hidden, weight.detach()[at].requires_grad_(), bias.detach()[at].requires_grad_()]
    before, cross_entropy.CHUNK_BYTES = cross_entropy.CHUNK_BYTES, chunk_bytes
    try:
        loss = linear_cross_entropy(
            inputs[0], inputs[1], labels, scale=0.2, bias_V=inputs[2] if with_bias else None, axis=axis, vocab_size=vocab, **rules
        )
        loss.backward()
    finally:
        cross_entropy.CHUNK_BYTES = before
    return {"loss": loss.item(), "grads": [t.grad for t in inputs[: 3 if with_bias else 2]]}


@given(
    num=st.integers(0, 40),
    vocab=st.integers(2, 23),
    with_bias=st.booleans(),
    rules=st.sampled_from(RULES),
    chunk_bytes=st.sampled_from([1, 2**20]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_vocabulary_in_two_parts(num: int, vocab: int, with_bias: bool, rules: dict[str, Any], chunk_bytes: int, pool: Pool) -> None:
    """An odd one is cut unevenly. The hidden states' gradients are the terms of a sum, the head's the rows of the whole."""
    ranks = pool.run(parts_of_the_vocabulary, 2, num, vocab, with_bias, rules, chunk_bytes)
    (hidden, weight, bias), labels = draw(num, vocab=vocab)
    doubles = [t.detach().double().requires_grad_() for t in ([hidden, weight, bias] if with_bias else [hidden, weight])]
    right = whole(doubles[0], doubles[1], doubles[2] if with_bias else None, labels, 0.2, **rules)
    right.backward()
    assert ranks[0]["loss"] == ranks[1]["loss"] == pytest.approx(right.item(), rel=1e-6, abs=1e-7)
    joined = [ranks[0]["grads"][0] + ranks[1]["grads"][0]]
    joined += [torch.cat(parts) for parts in zip(ranks[0]["grads"][1:], ranks[1]["grads"][1:], strict=True)]
    for mine, double in zip(joined, doubles, strict=True):
        assert double.grad is not None
        torch.testing.assert_close(mine, double.grad.float(), rtol=2e-5, atol=2e-6)


def test_extreme_logits_in_another_part(pool: Pool) -> None:
    """The largest logit is on one device only; the other's exponentials must not overflow or vanish."""
    for value in pool.run(extreme_loss, 2):
        assert value == pytest.approx(300.0, rel=1e-6)


def extreme_loss() -> float:
    import torch.distributed as dist

    from ascendfactory.engine.mesh import Axis

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    axis = Axis(2, dist.get_rank(), dist.group.WORLD)
    weight = torch.tensor([[100.0], [-200.0]])[axis.rank : axis.rank + 1]
    loss = linear_cross_entropy(torch.ones(1, 1), weight, torch.tensor([1]), scale=1.0, axis=axis, vocab_size=2)
    return loss.item()
