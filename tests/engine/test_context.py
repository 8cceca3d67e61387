"""Ring, Ulysses and both: against dense masked softmax in one process; who holds what; and the bytes that are sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ascendfactory.core.plan import Layout
from ascendfactory.engine.attention import attend
from ascendfactory.engine.data.batch import MicroBatch, Row, assemble
from ascendfactory.engine.mesh import Axis, Mesh
from ascendfactory.engine.parallel.balance import MAX_IMBALANCE, assign, work
from ascendfactory.engine.parallel.context import cut, lay_out, width_multiple
from tests.engine.test_attention import Lengths, dense
from tests.pool import Pool
from tests.tiny import config

pytestmark = pytest.mark.parallel

HEAD_SIZE = 8
WIDTH = 64


# ---------------------------------------------------------------------------------------------------- who holds what


@st.composite
def packed_rows(draw: Any, max_length: int, max_documents: int) -> tuple[list[int], int, int]:
    """Document lengths, row width and ring size; the width holds them and is a multiple of the ring."""
    ring = draw(st.sampled_from([1, 2, 3, 4, 8]))
    lengths = draw(st.lists(st.integers(1, max_length), max_size=max_documents))
    padding = draw(st.integers(0, 40))
    return lengths, -(-max(sum(lengths) + padding, 1) // ring) * ring, ring


@settings(max_examples=80, deadline=None)
@given(packed_rows(60, 12))
def test_every_token_stands_on_one_device_and_all_hold_equally_many(case: tuple[list[int], int, int]) -> None:
    lengths, width, ring = case
    shares = assign(lengths, width, ring)
    held = [(document, at) for share in shares for document, start, stop in share for at in range(start, stop)]
    assert sorted(held) == [(document, at) for document, length in enumerate(lengths) for at in range(length)]
    assert all(sum(stop - start for _, start, stop in share) <= width // ring for share in shares)
    orders = [lay_out([lengths, []], width, ring, rank)[1] for rank in range(ring)]
    assert all(order.shape == (2, width // ring) for order in orders)
    assert all(sorted(np.concatenate([order[row] for order in orders])) == list(range(width)) for row in range(2))
    assert assign(lengths, width, ring) == shares


@settings(max_examples=60, deadline=None)
@given(packed_rows(6000, 40).filter(lambda case: case[1] >= 128 * case[2] and bool(case[0])))
def test_work_is_balanced(case: tuple[list[int], int, int]) -> None:
    """Within 4 % of the mean wherever a device has some hundred tokens, whatever the documents."""
    lengths, width, ring = case
    loads = [work(share) for share in assign(lengths, width, ring)]
    assert sum(loads) == sum(length * (length + 1) // 2 for length in lengths)
    if sum(lengths) >= 128 * ring:
        assert max(loads) <= (1 + MAX_IMBALANCE) * sum(loads) / ring


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_one_document_is_plain_zigzag(ring: int) -> None:
    run = 4
    shares = assign([2 * ring * run], 2 * ring * run, ring)
    for rank, share in enumerate(shares):
        cells = [cell for _, start, stop in share for cell in range(start, stop)]
        tail = 2 * ring - 1 - rank
        assert cells == [*range(rank * run, (rank + 1) * run), *range(tail * run, (tail + 1) * run)]


@pytest.mark.parametrize(
    ("lengths", "width", "ring", "most_cut"),
    [([512] * 16, 8192, 4, 0), ([2048, 1024, 1024] + [512] * 8, 8192, 4, 1), ([8000] + [5] * 38, 8192, 8, 1), ([30] * 200, 6144, 8, 0)],
)
def test_short_documents_stay_whole(lengths: list[int], width: int, ring: int, most_cut: int) -> None:
    shares = assign(lengths, width, ring)
    cut_documents = {document for share in shares for document, start, stop in share if stop - start < lengths[document]}
    assert len(cut_documents) <= most_cut
    loads = [work(share) for share in shares]
    assert max(loads) <= (1 + MAX_IMBALANCE) * sum(loads) / ring


def test_width_multiple() -> None:
    assert width_multiple(Layout()) == 8
    assert width_multiple(Layout(ring=4, ulysses=2)) == 8
    assert width_multiple(Layout(ring=8)) == 16
    assert width_multiple(Layout(ring=3, ulysses=2, tp=4, sp=True)) == 24
    assert width_multiple(Layout(ulysses=2, tp=4)) == 8


# ---------------------------------------------------------------------------------------------------- attention on several devices


def micro_batch(lengths: Lengths, seed: int = 0) -> MicroBatch:
    """Rows of random tokens, WIDTH wide; a third of the tokens is not trained."""
    dice = np.random.default_rng(seed)
    rows = [Row([(dice.integers(3, 300, n).astype(np.int32), dice.random(n) < 0.67) for n in row], []) for row in lengths]
    return assemble(rows, 0, multiple=WIDTH)


def make_mesh(ring: int, ulysses: int) -> Mesh:
    """A mesh of this process."""
    from ascendfactory.engine.mesh import make_mesh as make

    return make(Layout(ring=ring, ulysses=ulysses), "cpu", sharded=False)


def draw_qkv(case: dict[str, Any]) -> list[Tensor]:
    """q, k, v and the gradient of the output, for whole rows, [B, heads, WIDTH, D]."""
    generator = torch.Generator().manual_seed(3)
    heads, kv_heads = case["heads"]
    rows = len(case["lengths"])
    return [torch.randn(rows, h, WIDTH, HEAD_SIZE, generator=generator, dtype=torch.float64) for h in (heads, kv_heads, kv_heads, heads)]


def attend_locally(ring: int, ulysses: int, cases: list[dict[str, Any]], dtype: torch.dtype) -> list[dict[str, Any]]:
    """On one process: output and gradients of its tokens, which tokens they are, and the bytes it sent."""
    mesh, results = make_mesh(ring, ulysses), []
    for case in cases:
        batch = micro_batch(case["lengths"])
        order = cut(numbered(batch), mesh).input_ids_BS
        documents = cut(batch, mesh).documents
        pick = order[:, None, :, None]
        q, k, v, grad = (x.gather(2, pick.expand(-1, x.shape[1], -1, HEAD_SIZE)).to(dtype) for x in draw_qkv(case))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        with Counted() as forward_bytes:
            out, _ = attend(torch.nn.Identity(), *inputs, None, documents=documents, scaling=0.4, sliding_window=case.get("window"))
        with Counted() as backward_bytes:
            grads = torch.autograd.grad(out, inputs, grad.transpose(1, 2))
        arrays = [t.detach().double().numpy() for t in (out.transpose(1, 2), *grads)]
        results.append({"order": order.numpy(), "arrays": arrays, "forward": forward_bytes, "backward": backward_bytes})
    return results


def numbered(batch: MicroBatch) -> MicroBatch:
    """The same rows with each token's place instead of its id."""
    return replace(batch, input_ids_BS=torch.arange(batch.input_ids_BS.shape[1]).expand_as(batch.input_ids_BS).contiguous())


class Counted:
    """Counts what this process sends, by kind, while it is open; its part of an all-to-all that stays at home is not sent."""

    def __enter__(self) -> dict[str, int]:
        sent = {"ring": 0, "ulysses": 0}
        batch, all_to_all = self._real = dist.batch_isend_irecv, dist.all_to_all_single

        def counting_batch(operations: list[Any]) -> Any:
            sent["ring"] += sum(op.tensor.nbytes for op in operations if op.op is dist.isend)
            return batch(operations)

        def counting_all_to_all(received: Tensor, x: Tensor, group: Any) -> Any:
            size = dist.get_world_size(group)
            sent["ulysses"] += x.nbytes * (size - 1) // size
            return all_to_all(received, x, group=group)

        dist.batch_isend_irecv, dist.all_to_all_single = counting_batch, counting_all_to_all
        return sent

    def __exit__(self, *_: object) -> None:
        dist.batch_isend_irecv, dist.all_to_all_single = self._real


def gathered(case: dict[str, Any], ranks: list[dict[str, Any]]) -> list[NDArray[np.float64]]:
    """Output and gradients of whole rows from those of the devices."""
    whole = [np.zeros(x.shape) for x in (draw_qkv(case)[i] for i in (0, 0, 1, 2))]
    for rank in ranks:
        for row, places in enumerate(rank["order"]):
            for target, part in zip(whole, rank["arrays"], strict=True):
                target[row][:, places] = part[row]
    return whole


def by_dense_softmax(case: dict[str, Any]) -> list[NDArray[np.float64]]:
    *qkv, grad = draw_qkv(case)
    inputs = [x.requires_grad_() for x in qkv]
    lengths = [row if sum(row) == WIDTH else [*row, WIDTH - sum(row)] for row in case["lengths"]]  # padding sees itself only
    is_padding = [sum(row) for row in case["lengths"]]
    out = dense(*inputs, lengths, 0.4, case.get("window"))
    mask = torch.arange(WIDTH)[None, :] < torch.tensor(is_padding)[:, None]
    out = out * mask[:, :, None, None]
    grads = torch.autograd.grad(out, inputs, grad.transpose(1, 2))
    return [t.detach().numpy() for t in (out.transpose(1, 2), *grads)]


CASES: dict[str, dict[str, Any]] = {
    "plain": {"lengths": [[64]], "heads": (8, 4)},
    "packed": {"lengths": [[20, 3, 30, 11], [7, 50]], "heads": (8, 4)},
    "short": {"lengths": [[8] * 8, [3, 16, 5, 16, 16]], "heads": (8, 8)},
    "one-kv-head": {"lengths": [[40, 24], [1, 2, 3, 58]], "heads": (8, 1)},
    "window": {"lengths": [[64], [33, 20, 9]], "heads": (8, 2), "window": 9},
    "wide-window": {"lengths": [[64], [5, 57]], "heads": (8, 2), "window": 40},
    "empty-row": {"lengths": [[], [1]], "heads": (8, 4)},
}


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (1, 4), (2, 1), (4, 1), (2, 2)], ids=lambda n: str(n))
def test_equals_dense_softmax(ring: int, ulysses: int, pool: Pool) -> None:
    ranks = pool.run(attend_locally, ring * ulysses, ring, ulysses, list(CASES.values()), torch.float64)
    for number, (name, case) in enumerate(CASES.items()):
        expected = by_dense_softmax(case)
        for what, mine, right in zip("oqkv", gathered(case, [rank[number] for rank in ranks]), expected, strict=True):
            np.testing.assert_allclose(mine, right, rtol=1e-9, atol=1e-11, err_msg=f"{name} {what}")


def test_low_precision_sums_are_exact(pool: Pool) -> None:
    """In bf16 a ring differs from dense softmax by the rounding of inputs and results only."""
    case = CASES["packed"]
    mine = gathered(case, [rank[0] for rank in pool.run(attend_locally, 4, 4, 1, [case], torch.bfloat16)])
    for what, found, right in zip("oqkv", mine, by_dense_softmax(case), strict=True):
        assert np.linalg.norm(found - right) <= 0.01 * np.linalg.norm(right), what


def test_sent_bytes(pool: Pool) -> None:
    """One document: each block of keys makes every hop but the last run of all, which nobody else needs. Whole documents: nothing."""
    cases = [CASES["plain"], {"lengths": [[16] * 4], "heads": (8, 4)}]
    ring, half = 4, WIDTH // 8
    cell_bytes = 4 * 2 * HEAD_SIZE * 8  # key and value of 4 heads in fp64
    for rank, (plain, short) in enumerate(pool.run(attend_locally, ring, ring, 1, cases, torch.float64)):
        cells = (ring - 1) * 2 * half
        onward = cells - (half if rank < ring - 1 else 0)  # device 0's block passes devices 0 to 2 …
        returned = cells - (half if rank > 0 else 0)  # … and its gradients come back from 1 to 3
        assert plain["forward"]["ring"] == onward * cell_bytes
        assert plain["backward"]["ring"] == (onward + returned) * cell_bytes
        assert short["forward"]["ring"] == short["backward"]["ring"] == 0
    for (plain,) in pool.run(attend_locally, 4, 1, 4, cases[:1], torch.float64):
        # queries, keys, values there, the output back; each device keeps a quarter of its own
        cells, heads = WIDTH // 4, 8 + 4 + 4 + 8
        assert plain["forward"]["ulysses"] == cells * heads * HEAD_SIZE * 8 * 3 // 4
        assert plain["backward"]["ulysses"] == plain["forward"]["ulysses"]


def test_wrong_uses_are_refused() -> None:
    in_ring, in_ulysses = Mesh(torch.device("cpu"), ring=Axis(2)), Mesh(torch.device("cpu"), ulysses=Axis(2))
    q = torch.zeros(1, 4, 32, HEAD_SIZE)
    with pytest.raises(ValueError, match="attention dropout needs ring=1"):
        attend(torch.nn.Identity(), q, q, q, None, documents=cut(micro_batch([[64]]), in_ring).documents, dropout=0.1)
    with pytest.raises(ValueError, match="ulysses=2 does not divide the 3 query heads"):
        attend(torch.nn.Identity(), q[:, :3], q, q, None, documents=cut(micro_batch([[64]]), in_ulysses).documents)
    with pytest.raises(ValueError, match="rows of 3 tokens cannot be shared"):
        cut(assemble([Row([], [])], 0, multiple=3), in_ring)


# ---------------------------------------------------------------------------------------------------- whole models


def make_model(family: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config(family), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


MODEL_LENGTHS = [[20, 3, 30, 11], [7, 50]]


def model_part(family: str, ring: int, ulysses: int, checkpointed: bool) -> tuple[float, dict[str, NDArray[np.float32]]]:
    """Loss and gradients, summed over the devices."""
    from ascendfactory.engine import attention

    mesh, model = make_mesh(ring, ulysses), make_model(family)
    attention.register()
    model.config._attn_implementation = attention.NAME
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    whole = micro_batch(MODEL_LENGTHS)
    batch = cut(whole, mesh)
    hidden = model.get_decoder()(
        input_ids=batch.input_ids_BS, position_ids=batch.positions_BS, attention_mask=None, use_cache=False, documents=batch.documents
    ).last_hidden_state
    at = batch.trained_at_N
    logits = model.get_output_embeddings()(hidden.flatten(0, 1)[at])
    loss = functional.cross_entropy(logits, batch.labels_BS.flatten()[at], reduction="sum") / len(whole.trained_at_N)
    loss.backward()
    total = loss.detach().clone()
    for tensor in (total, *(p.grad for p in model.parameters())):
        dist.all_reduce(tensor)
    return float(total), {name: p.grad.numpy() for name, p in model.named_parameters()}


def one_document_at_a_time(family: str) -> tuple[float, dict[str, NDArray[np.float32]]]:
    """The same by transformers alone, with its eager attention."""
    model, batch, total = make_model(family), micro_batch(MODEL_LENGTHS), 0.0
    for row, lengths in enumerate(MODEL_LENGTHS):
        start = 0
        for length in lengths:
            at = slice(start, start + length)
            logits = model(input_ids=batch.input_ids_BS[row : row + 1, at], use_cache=False).logits[0]
            loss = functional.cross_entropy(logits, batch.labels_BS[row, at], reduction="sum") / len(batch.trained_at_N)
            loss.backward()
            total += float(loss.detach())
            start += length
    return total, {name: p.grad.numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "ring", "ulysses", "checkpointed"),
    [("qwen3", 2, 2, False), ("gemma3", 2, 2, False), ("llama", 4, 1, True), ("glm4", 1, 4, True), ("qwen2", 2, 1, False)],
)
def test_models_give_the_loss_and_gradients_of_one_process(family: str, ring: int, ulysses: int, checkpointed: bool, pool: Pool) -> None:
    loss, gradients = one_document_at_a_time(family)
    for found_loss, found in pool.run(model_part, ring * ulysses, family, ring, ulysses, checkpointed):
        assert found_loss == pytest.approx(loss, rel=1e-5)
        for name, right in gradients.items():
            error = np.linalg.norm(found[name] - right)
            assert error <= max(1e-5 * np.linalg.norm(right), 1e-7), (name, error, np.linalg.norm(right))
