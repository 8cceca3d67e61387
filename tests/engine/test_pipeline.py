"""Every pipeline schedule against transformers in one process: loss, each gradient by name, bytes between stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ascendfactory.core.stages import V_SHAPED
from tests.pool import Pool
from tests.tiny import VOCAB, write_model

pytestmark = pytest.mark.parallel

HIDDEN = 64
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
WIDTHS = (40, 24, 32, 40, 16, 48, 24, 32)  # of the micro-batches of a step: every one has its own


@dataclass(frozen=True)
class Case:
    """A model, how it is cut, and how it runs."""

    model: str
    pp: int = 2
    vpp: int = 1
    schedule: str = "1f1b"
    num_micro: int = 4
    dp: int = 1
    zero: int = 1
    stage_layers: tuple[int, ...] = ()
    lora: tuple[str, ...] = field(default=())  # adapted modules, as a suffix of their names
    recompute: str = "none"
    in_advance: bool = False

    def __str__(self) -> str:
        parts = [self.model, f"pp{self.pp}x{self.vpp}", self.schedule]
        parts += [f"dp{self.dp}zero{self.zero}"] if self.dp > 1 else []
        parts += ["-".join(map(str, self.stage_layers))] if self.stage_layers else []
        return "_".join(parts + ["lora"] * bool(self.lora) + [self.recompute] * (self.recompute != "none") + ["advance"] * self.in_advance)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("pipelines")
    return {
        "qwen3": write_model(root / "qwen3", "qwen3", num_hidden_layers=4),
        "qwen3_tied": write_model(root / "tied", "qwen3", num_hidden_layers=4, tie_word_embeddings=True),
        "llama5": write_model(root / "llama5", "llama", num_hidden_layers=5),
        "gemma3": write_model(root / "gemma3", "gemma3", num_hidden_layers=4, layer_types=WINDOWS),
    }


def make_documents(num_micro: int) -> list[list[tuple[list[int], list[bool]]]]:
    """Two documents for each micro-batch, together as long as its width or 3 shorter; two in three tokens are trained."""
    dice = np.random.default_rng(3)
    micros = []
    for i in range(num_micro):
        first, second = WIDTHS[i] // 3, WIDTHS[i] - WIDTHS[i] // 3 - 3 * (i % 2)
        micros.append([(dice.integers(3, VOCAB, n).tolist(), (dice.random(n) < 0.66).tolist()) for n in (first, second)])
    return micros


def make_batches(documents: list[list[tuple[list[int], list[bool]]]]) -> list[Any]:
    from ascendfactory.engine.data.batch import Row, assemble

    rows = [Row([(np.array(ids), np.array(trained)) for ids, trained in micro], ["", ""]) for micro in documents]
    return [assemble([row], 0, multiple=8) for row in rows]


def whole_model(folder: str, lora: tuple[str, ...], attention: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    names = [name for name, _ in model.named_modules() if name.endswith(lora)]
    torch.manual_seed(11)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(12)
    for name, p in wrapped.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.1, generator=generator)
    return wrapped


def expected(folder: str, case: Case) -> tuple[float, dict[str, np.ndarray]]:
    """transformers' own eager attention, a document at a time."""
    import torch
    from torch.nn import functional

    model = whole_model(folder, case.lora, "eager")
    documents = [document for micro in make_documents(case.num_micro) for document in micro]
    num_trained = sum(sum(trained[1:]) for _, trained in documents)
    total = 0.0
    for ids, trained in documents:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        targets = torch.tensor([i if t else -100 for i, t in zip(ids[1:], trained[1:], strict=True)])
        loss = functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / num_trained
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def build_on_rank(folder: str, case: Case) -> tuple[Any, Any]:
    """The pipeline of this rank, and the transformers model in it."""
    import torch

    from ascendfactory.core.plan import Layout
    from ascendfactory.core.stages import StageCosts, chunks_of, cut
    from ascendfactory.engine import attention
    from ascendfactory.engine.kernels import apply_kernels
    from ascendfactory.engine.memory.recompute import apply_recompute
    from ascendfactory.engine.mesh import make_mesh
    from ascendfactory.engine.parallel import tensor
    from ascendfactory.engine.parallel.fsdp import apply_fsdp
    from ascendfactory.engine.parallel.pipeline import Pipeline, StageModel
    from ascendfactory.engine.parallel.stages import cut_model

    layout = Layout(
        dp=case.dp, zero=case.zero, pp=case.pp, vpp=case.vpp, schedule=case.schedule, stage_layers=case.stage_layers,
        micro_size=1, num_micro=case.num_micro // case.dp,
    )  # fmt: skip
    mesh = make_mesh(layout, "cpu", sharded=case.dp > 1)
    attention.register()
    hf = whole_model(folder, case.lora, "sdpa")
    base = hf.get_base_model() if case.lora else hf
    base.set_attn_implementation(attention.NAME)
    ranges = cut(case.pp, case.vpp, StageCosts((1.0,) * base.config.num_hidden_layers, 0.1, 0.3), case.stage_layers)
    stage = cut_model(base, ranges, chunks_of(mesh.pp.rank, case.pp, case.vpp, layout.schedule))
    tensor.apply(hf, mesh.tp, sequence=False)
    apply_kernels(base)
    model = StageModel(hf, {}, stage)
    for run in stage.layer_runs:
        apply_recompute(run, case.recompute)  # type: ignore[arg-type]
    if mesh.fsdp is not None:
        apply_fsdp(model, stage.layer_runs, mesh.fsdp, layout, torch.float32)
    return Pipeline(model, mesh, layout, hidden_size=HIDDEN, dtype=torch.float32, recompute_in_advance=case.in_advance), base


def step_on_rank(folder: str, case: Case) -> dict[str, Any]:
    """One optimizer step's forward and backward, then an evaluation, on this rank."""
    import torch.distributed as dist

    from ascendfactory.engine.data.batch import count_trained_tokens
    from ascendfactory.engine.parallel.context import cut
    from ascendfactory.engine.parallel.pieces import Piece
    from ascendfactory.engine.parallel.stages import share_tied, tied_ends

    pipeline, base = build_on_rank(folder, case)
    mesh, model = pipeline.mesh, pipeline.model
    batches = make_batches(make_documents(case.num_micro))
    scale = 1.0 / count_trained_tokens(batches)
    mine = [cut(batch, mesh) for batch in batches[mesh.data.rank :: case.dp]]
    sent = count_sent_bytes()
    loss = mesh.sum([float(pipeline.step(mine, scale))])[0]
    num_bytes = sent.copy()
    eval_loss = mesh.sum([float(pipeline.evaluate(mine, scale))])[0]

    pieces: dict[str, Piece] = {}
    if base.config.tie_word_embeddings and not case.lora and pipeline.layout.schedule not in V_SHAPED:
        ends = tied_ends(mesh)
        if ends is not None:
            share_tied(pieces, base, "model.embed_tokens.weight", ends)
    gradients = {}
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        name = name.removeprefix("hf.")
        gradient = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        piece = pieces.get(name)
        if piece is not None:
            assert piece.copies == 2
            dist.all_reduce(gradient, group=piece.partial_over)
        gradients[name] = gradient.numpy()
    return {"loss": loss, "eval_loss": eval_loss, "gradients": gradients, "bytes": num_bytes}


def count_sent_bytes() -> dict[str, int]:
    """Bytes that leave this process by send from now on."""
    import torch.distributed as dist

    real, sent = getattr(dist.batch_isend_irecv, "real", dist.batch_isend_irecv), {"messages": 0, "bytes": 0}

    def counting(ops: list[Any]) -> Any:
        for op in ops:
            if op.op is dist.isend:
                sent["messages"] += 1
                sent["bytes"] += op.tensor.numel() * op.tensor.element_size()
        return real(ops)

    counting.real = real  # type: ignore[attr-defined]
    dist.batch_isend_irecv = counting
    return sent


CASES = [
    Case("qwen3", schedule="gpipe"),
    Case("qwen3", schedule="1f1b"),
    Case("qwen3", vpp=2, schedule="interleaved"),
    Case("qwen3", schedule="zero_bubble"),
    Case("qwen3", vpp=2, schedule="zero_bubble"),
    Case("qwen3", vpp=2, schedule="zbv"),
    Case("qwen3", vpp=2, schedule="dualpipev"),
    Case("qwen3", pp=4, num_micro=8),
    Case("qwen3_tied"),
    Case("qwen3_tied", vpp=2, schedule="zbv"),
    Case("gemma3", vpp=2, schedule="interleaved"),
    Case("llama5", stage_layers=(3, 2)),
    Case("llama5", vpp=2, schedule="interleaved", stage_layers=(2, 2, 1, 0)),
    Case("llama5", vpp=2, schedule="zbv", stage_layers=(2, 0, 2, 1)),
    Case("qwen3", dp=2, num_micro=8, zero=1),
    Case("qwen3", dp=2, num_micro=8, zero=2, vpp=2, schedule="interleaved"),
    Case("qwen3_tied", dp=2, num_micro=8, zero=3),
    Case("qwen3_tied", dp=2, num_micro=8, zero=1, vpp=2, schedule="zbv"),
    Case("qwen3", lora=("q_proj", "down_proj")),
    Case("qwen3", lora=("layers.2.self_attn.q_proj", "layers.3.mlp.up_proj")),  # nothing to train on the first stage
    Case("qwen3", lora=("layers.1.self_attn.q_proj", "layers.3.mlp.up_proj"), vpp=2, schedule="zbv"),
    Case("qwen3", dp=2, num_micro=8, lora=("q_proj",), schedule="zero_bubble"),
    Case("qwen3", recompute="full"),
    Case("qwen3", recompute="full", vpp=2, schedule="zbv"),
    Case("qwen3", recompute="full", in_advance=True),
    Case("gemma3", recompute="selective", in_advance=True, vpp=2, schedule="interleaved"),
    Case("qwen3", recompute="full", in_advance=True, vpp=2, schedule="zbv"),
    Case("qwen3", recompute="full", in_advance=True, dp=2, num_micro=8, zero=2),
    Case("qwen3", recompute="full", dp=2, num_micro=8, zero=3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(case: Case, folders: dict[str, str], pool: Pool) -> None:
    loss, gradients = expected(folders[case.model], case)
    ranks = pool.run(step_on_rank, case.pp * case.dp, folders[case.model], case)
    assert ranks[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert ranks[0]["eval_loss"] == pytest.approx(loss, rel=1e-5)
    found: dict[str, np.ndarray] = {}
    for rank in ranks:
        for name, gradient in rank["gradients"].items():
            assert name not in found or np.array_equal(found[name], gradient), name
            found[name] = gradient
    assert set(found) == set(gradients)
    largest = max(float(np.linalg.norm(g)) for g in gradients.values())
    for name, wanted in gradients.items():
        assert np.linalg.norm(found[name] - wanted) <= 1e-5 * max(float(np.linalg.norm(wanted)), 0.01 * largest), name


@pytest.mark.parametrize("vpp,schedule,hops", [(1, "1f1b", 1), (2, "interleaved", 3), (2, "zbv", 2)])
def test_bytes_between_stages(vpp: int, schedule: str, hops: int, folders: dict[str, str], pool: Pool) -> None:
    """Each micro-batch crosses between devices `hops` times forward and as often backward, with B·S·M numbers of 4 bytes."""
    case = Case("qwen3", vpp=vpp, schedule=schedule)
    ranks = pool.run(step_on_rank, 2, folders["qwen3"], case)
    assert sum(rank["bytes"]["messages"] for rank in ranks) == 2 * hops * case.num_micro
    assert sum(rank["bytes"]["bytes"] for rank in ranks) == 2 * hops * 4 * HIDDEN * sum(WIDTHS[: case.num_micro])


def test_no_gradient_travels_before_the_first_adapter(folders: dict[str, str], pool: Pool) -> None:
    case = Case("qwen3", lora=("layers.2.self_attn.q_proj",))
    ranks = pool.run(step_on_rank, 2, folders["qwen3"], case)
    assert [rank["bytes"]["messages"] for rank in ranks] == [case.num_micro, 0]


def order_of_waiting(folder: str) -> list[tuple[str, int]]:
    """Number of layers run again and gradients taken, in order, on this rank."""
    from ascendfactory.engine.data.batch import count_trained_tokens
    from ascendfactory.engine.memory.region import Region
    from ascendfactory.engine.parallel import pipeline as pipelines
    from ascendfactory.engine.parallel.context import cut

    seen: list[tuple[str, int]] = []
    case = Case("qwen3", recompute="full", in_advance=True)
    pipeline, _ = build_on_rank(folder, case)
    replay, take = Region.replay, pipelines._Passage._take

    def replay_and_note(region: Region) -> None:
        if region._function is not None:  # else done before
            seen.append(("layer", -1))
        replay(region)

    def take_and_note(passage: Any, what: str, chunk: int, micro: int) -> Any:
        if what == "gradient":
            seen.append(("gradient", micro))
        return take(passage, what, chunk, micro)

    Region.replay, pipelines._Passage._take = replay_and_note, take_and_note  # type: ignore[method-assign]
    try:
        batches = make_batches(make_documents(case.num_micro))
        pipeline.step([cut(batch, pipeline.mesh) for batch in batches], 1.0 / count_trained_tokens(batches))
    finally:
        Region.replay, pipelines._Passage._take = replay, take  # type: ignore[method-assign]
    return seen


def test_layers_run_again_before_the_gradient_is_waited_for(folders: dict[str, str], pool: Pool) -> None:
    first, last = pool.run(order_of_waiting, 2, folders["qwen3"])
    assert first == [event for micro in range(4) for event in (("layer", -1), ("layer", -1), ("gradient", micro))]
    assert last == [("layer", -1)] * 8  # there backward follows forward at once


@pytest.mark.parametrize("schedule,in_advance,zero", [("zero_bubble", False, 2), ("1f1b", True, 3)])
def test_levels_that_cannot_be(schedule: Any, in_advance: bool, zero: Any) -> None:
    import torch

    from ascendfactory.core.plan import Layout
    from ascendfactory.engine.parallel.pipeline import Pipeline

    mesh: Any = SimpleNamespace(fsdp="some")
    model: Any = None
    with pytest.raises(ValueError, match=rf"layout.zero must be at most {zero - 1} here, not {zero}"):
        layout = Layout(pp=2, schedule=schedule, zero=zero, dp=2)
        Pipeline(model, mesh, layout, hidden_size=8, dtype=torch.float32, recompute_in_advance=in_advance)
