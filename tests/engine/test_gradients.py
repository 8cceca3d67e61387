"""Weight gradients in place and in a later pass: the numbers of plain autograd, each product formed once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ascendfactory.core.recipe import Lora
from ascendfactory.engine.gradients import LateWork, Targets, late_weights
from ascendfactory.engine.objective.cross_entropy import linear_cross_entropy
from tests.engine import decoders
from tests.pool import Pool
from tests.tiny import VOCAB, write_model

LORA = Lora(rank=3, targets=["q_proj", "o_proj", "gate_proj", "down_proj"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("gradients")
    found = {family: write_model(root / family, family) for family in ("qwen2", "glm4", "gemma3")}
    return found | {"tied": write_model(root / "tied", "llama", tie_word_embeddings=True, pad_token_id=5)}


class Products(TorchDispatchMode):
    """Notes the matrix products: factors' shapes, in either order of a product and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[int, ...]] = Counter()
        self.made: Counter[tuple[int, ...]] = Counter()  # shapes of fresh results, whatever made them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            (m, k), (_, n) = left.shape, right.shape
            self.seen[(min(m, n), k, max(m, n))] += 1
        if isinstance(out, Tensor) and name != "detach" and not func._schema.is_mutable and not out._is_view():
            self.made[tuple(out.shape)] += 1
        return out


def loss(hf: Any, seed: int) -> Tensor:
    """The engine's loss of the last hidden states, over labels drawn from the seed."""
    base = hf.get_base_model() if hasattr(hf, "get_base_model") else hf
    hidden: list[Tensor] = []
    handle = base.get_decoder().register_forward_hook(lambda *a: hidden.append(a[-1].last_hidden_state))
    decoders.forward(hf, seed)
    handle.remove()
    labels = torch.randint(0, VOCAB, (decoders.TOKENS,), generator=torch.Generator().manual_seed(seed + 50))
    return linear_cross_entropy(hidden[0].flatten(0, 1), base.get_output_embeddings().weight, labels, scale=1 / 300)


def plain(hf: Any) -> Any:
    """The same model with transformers' and peft's own forward methods."""
    for module in hf.modules():
        vars(module).pop("forward", None)
    return hf


def expected(folder: str, lora: Lora | None, num_micro: int) -> dict[str, Tensor]:
    """The gradients of autograd alone, those of each micro-batch taken by themselves and added in fp64."""
    hf = plain(decoders.decoder(folder, lora)[0])
    base = hf.get_base_model() if lora else hf
    total: dict[str, Tensor] = {}
    for seed in range(num_micro):
        hidden: list[Tensor] = []
        handle = base.get_decoder().register_forward_hook(lambda *a, hidden=hidden: hidden.append(a[-1].last_hidden_state))
        decoders.forward(hf, seed)
        handle.remove()
        labels = torch.randint(0, VOCAB, (decoders.TOKENS,), generator=torch.Generator().manual_seed(seed + 50))
        logits = hidden[0].flatten(0, 1) @ base.get_output_embeddings().weight.T
        (nn.functional.cross_entropy(logits, labels, reduction="sum") / 300).backward()
        for name, gradient in decoders.gradients(hf).items():
            total[name] = total.get(name, 0) + gradient.double()
        hf.zero_grad(set_to_none=True)
    return total


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert float((found[name].double() - gradient).norm()) <= 1e-5 * max(float(gradient.norm()), 0.01 * largest), name


@pytest.mark.parametrize("num_micro", [1, 2, 4])
@pytest.mark.parametrize(("family", "lora"), [("tied", None), ("qwen2", None), ("glm4", None), ("gemma3", None), ("qwen2", LORA)])
def test_accumulated_gradients_equal_plain_autograd(family: str, lora: Lora | None, num_micro: int, folders: dict[str, str]) -> None:
    hf, _ = decoders.decoder(folders[family], lora)
    for seed in range(num_micro):
        loss(hf, seed).backward()
    assert_equal(decoders.gradients(hf), expected(folders[family], lora, num_micro))


def test_the_second_micro_batch_makes_no_tensor_of_a_weights_size(folders: dict[str, str]) -> None:
    """But for the head's gradient, which is formed in the forward pass; the embedding's, tied to it, adds its rows to it."""
    hf, _ = decoders.decoder(folders["tied"])
    shapes = {tuple(p.shape) for p in hf.parameters() if p.ndim == 2}
    made = []
    for seed in range(2):
        result = loss(hf, seed)
        with Products() as products:
            result.backward()
        made.append({shape: products.made[shape] for shape in shapes if products.made[shape]})
    assert made == [{(64, 64): 6, (32, 64): 6, (96, 64): 6, (64, 96): 3}, {}]


@pytest.mark.parametrize(("family", "lora"), [("tied", None), ("qwen2", None), ("glm4", None), ("qwen2", LORA)])
def test_split_backward_forms_each_product_once(family: str, lora: Lora | None, folders: dict[str, str]) -> None:
    seen, found = [], []
    for late in (False, True):
        hf, layers = decoders.decoder(folders[family], lora)
        passes = [Products(), Products()]
        for seed in range(2):
            work = LateWork()
            if late:
                with late_weights(work):
                    result = loss(hf, seed)
            else:
                result = loss(hf, seed)
            with passes[0]:
                result.backward()
            num_left = len(work)
            with passes[1]:
                work.run()
            assert len(work) == 0
        trained = [p for layer in layers for p in layer.parameters() if p.requires_grad and p.ndim == 2]
        assert num_left == (len(trained) if late else 0)
        seen.append([p.seen for p in passes])
        found.append(decoders.gradients(hf))
    assert_equal(found[1], {name: gradient.double() for name, gradient in found[0].items()})
    whole, (first, second) = seen[0][0], seen[1]
    assert first + second == whole
    if lora is None:
        weights = Counter(tuple(sorted(p.shape)) for p in trained)
        assert second == Counter({(low, decoders.TOKENS, high): 2 * count for (low, high), count in weights.items()})


def test_what_is_watched_is_left_to_autograd() -> None:
    """A hook must see the gradient, a cast copy must pass it on: neither is put in place, nor left for later."""
    work, grad, x = LateWork(), torch.randn(7, 3), torch.randn(7, 4)
    watched = nn.Parameter(torch.zeros(3, 4))
    watched.register_post_accumulate_grad_hook(lambda p: None)
    copy = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64)).float()
    with late_weights(work):
        targets = Targets(watched, copy, None)
    for number in (0, 1):
        assert not targets.is_late(number)
        result = targets.product(number, grad, lambda: x, 2.0)
        assert result is not None
        torch.testing.assert_close(result, 2 * grad.T @ x)
    assert len(work) == 0 and watched.grad is None


def test_bf16_gradients_are_added_as_autograd_does() -> None:
    weight = nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
    grad, x = torch.randn(7, 3).bfloat16(), torch.randn(7, 4).bfloat16()
    weight.grad = torch.ones_like(weight)
    result = Targets(weight).product(0, grad, lambda: x)
    assert result is not None and torch.equal(weight.grad, torch.ones_like(weight))


def messages_on_rank(folder: str, late: bool) -> tuple[list[list[str]], dict[str, Tensor]]:
    """The collectives of the two passes under sequence parallelism, and the gradients."""
    import torch.distributed as dist

    from ascendfactory.engine import attention
    from ascendfactory.engine.kernels import apply_kernels
    from ascendfactory.engine.mesh import Axis
    from ascendfactory.engine.parallel import tensor

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    attention.register()
    config._attn_implementation = attention.NAME
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensor.apply(hf, Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD), sequence=True)
    apply_kernels(hf)
    hf.to_empty(device="cpu")
    hf.model.rotary_emb.__init__(config)
    generator = torch.Generator().manual_seed(3)
    for parameter in hf.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    work, sent = LateWork(), []
    real = {name: getattr(dist, name) for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")}
    for name, function in real.items():
        setattr(dist, name, lambda *a, name=name, function=function, **k: (sent.append(name), function(*a, **k))[1])
    try:
        if late:
            with late_weights(work):
                result = decoders.forward(hf.train())
        else:
            result = decoders.forward(hf.train())
        ends = [len(sent)]
        result.backward()
        ends.append(len(sent))
        work.run()
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    return [sent[ends[0] : ends[1]], sent[ends[1] :]], decoders.gradients(hf)


def test_split_backward_sends_each_message_once(tmp_path: Path, pool: Pool) -> None:
    """The inputs that weight gradients need whole are gathered in the later pass: once a block."""
    folder = write_model(tmp_path, "qwen2")
    at_once, late = (pool.run(messages_on_rank, 2, folder, late) for late in (False, True))
    for (together, gradients), (apart, late_gradients) in zip(at_once, late, strict=True):
        assert not together[1] and apart[1] == ["all_gather_into_tensor"] * 6
        assert Counter(apart[0]) + Counter(apart[1]) == Counter(together[0])
        assert_equal(late_gradients, {name: gradient.double() for name, gradient in gradients.items()})
