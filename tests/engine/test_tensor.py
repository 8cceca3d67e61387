"""Tensor and sequence parallelism against one process of transformers (and peft) with eager attention: losses, every gradient, bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.pool import Pool
from tests.tiny import FAMILIES, VOCAB, config, write_model

pytestmark = pytest.mark.parallel

ROWS, POSITIONS = 2, 16


def draw_batch() -> tuple[Tensor, Tensor]:
    """Tokens and shifted labels, a fifth of them not trained."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(3, VOCAB, (ROWS, POSITIONS + 1), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.rand(ROWS, POSITIONS, generator=generator) < 0.2, -100)
    return tokens[:, :-1].contiguous(), labels


def add_adapters(hf: Any, lora: dict[str, Any] | None) -> Any:
    from ascendfactory.core.recipe import Lora
    from ascendfactory.engine.adapter import apply_lora

    return hf if lora is None else apply_lora(hf, Lora(**lora))


def reference(folder: str, whole: Path, lora: dict[str, Any] | None = None) -> dict[str, Any]:
    """Loss and gradients of one process, by transformers and peft alone; the weights are left in the file `whole`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    hf: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    if lora is not None:
        alpha, rank = lora["alpha"], lora["rank"]
        rs = lora.get("rslora", False)
        settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", use_rslora=rs, task_type="CAUSAL_LM")
        torch.manual_seed(5)
        hf = get_peft_model(hf, settings)
        for name, parameter in hf.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    tokens, labels = draw_batch()
    logits = hf(input_ids=tokens, use_cache=False).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / (labels >= 0).sum()
    loss.backward()
    torch.save({name: p.detach() for name, p in hf.named_parameters()}, whole)
    return {"loss": loss.item(), "grads": {name: p.grad for name, p in hf.named_parameters() if p.requires_grad}}


def causal(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, sliding_window: int | None = None, **_: Any
) -> tuple[Tensor, None]:
    """An attention function that needs no mask."""
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    visible = (distance >= 0) & (distance < (sliding_window or query.shape[2]))
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def build_shared(
    folder: str, whole: str, lora: dict[str, Any] | None, axis: Any = None, **options: Any
) -> tuple[Any, Any, dict[str, Any], Any]:
    """This rank's model, filled: outer model, transformers model, pieces, axis."""
    import torch.distributed as dist
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from ascendfactory.engine import model as models
    from ascendfactory.engine.kernels import apply_kernels
    from ascendfactory.engine.mesh import Axis
    from ascendfactory.engine.parallel import pieces as places
    from ascendfactory.engine.parallel import tensor

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    axis = axis or Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    base = models.build_on_meta(models.read_config(folder))
    ALL_ATTENTION_FUNCTIONS.register("causal_for_tests", causal)
    base.set_attn_implementation("causal_for_tests")
    hf = add_adapters(base, lora)
    frozen = {name for name, p in hf.named_parameters() if not p.requires_grad}
    pieces = tensor.apply(hf, axis, **options)
    assert frozen == {name for name, p in hf.named_parameters() if not p.requires_grad}
    assert set(pieces) == {name for name, _ in hf.named_parameters()}
    apply_kernels(base)
    models.materialize(hf, base, torch.device("cpu"))
    values = torch.load(whole)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            places.write(parameter, pieces[name], values[name])
    return hf.train(), base, pieces, axis


def local_loss(base: Any, axis: Any, row: int | None = None) -> Tensor:
    """The loss as a run forms it; of one row of the batch only if that is given."""
    from ascendfactory.engine.objective.cross_entropy import linear_cross_entropy
    from ascendfactory.engine.parallel.tensor import gather_hidden

    tokens, labels = draw_batch()
    num_trained = int((labels >= 0).sum())
    if row is not None:
        tokens, labels = tokens[row : row + 1], labels[row : row + 1]
    positions = torch.arange(POSITIONS).expand(len(tokens), -1)
    body = base.get_decoder()(input_ids=tokens, position_ids=positions, attention_mask=None, use_cache=False)
    hidden = gather_hidden(body.last_hidden_state, base)
    trained = (labels.flatten() >= 0).nonzero().squeeze(1)
    head = base.get_output_embeddings()
    chosen = hidden.flatten(0, 1).index_select(0, trained)
    return linear_cross_entropy(
        chosen,
        head.weight,
        labels.flatten()[trained],
        scale=1 / num_trained,
        bias_V=head.bias,
        axis=axis,
        vocab_size=base.config.vocab_size,
    )


def share_and_look(folder: str, whole: str, lora: dict[str, Any] | None, recompute: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Loss, boxes of every gradient (partial ones summed), and bytes by collective, of this rank."""
    import torch.distributed as dist

    from ascendfactory.engine.parallel import pieces as places

    hf, base, pieces, axis = build_shared(folder, whole, lora, **options)
    if recompute:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with count_bytes() as sent:
        loss = local_loss(base, axis)
        loss.backward()
    boxes = []
    for name, parameter in hf.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            piece = pieces[name]
            if piece.partial_over is not None:
                dist.all_reduce(parameter.grad, group=piece.partial_over)
            boxes += [(name, c.offset, c.tensor.clone().numpy(), piece.copies) for c in places.chunks(parameter, piece, parameter.grad)]
        else:
            assert parameter.grad is None, name
    tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
    return {"loss": loss.item(), "boxes": boxes, "sent": sent, "tied": tied}


@contextmanager
def count_bytes() -> Iterator[dict[str, int]]:
    """Counts the bytes of the whole tensor of each collective of this process, by kind."""
    import torch.distributed as dist

    counted: dict[str, int] = {}
    originals = {kind: getattr(dist, kind) for kind in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")}

    def counting(kind: str, place: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted[kind] = counted.get(kind, 0) + args[place].numel() * args[place].element_size()
            return originals[kind](*args, **kwargs)

        return call

    for kind in originals:
        setattr(dist, kind, counting(kind, 1 if kind == "reduce_scatter_tensor" else 0))
    try:
        yield counted
    finally:
        for kind, original in originals.items():
            setattr(dist, kind, original)


def compare(ranks: list[dict[str, Any]], right: dict[str, Any]) -> None:
    """Same loss on every rank, and gradients that, put together, are those of one process; equal copies agree."""
    for rank in ranks:
        assert rank["loss"] == pytest.approx(right["loss"], rel=1e-5)
    found = {name: torch.zeros_like(grad) for name, grad in right["grads"].items()}
    times = {name: torch.zeros_like(grad) for name, grad in right["grads"].items()}
    copies = {}
    for rank in ranks:
        for name, offset, values, num in rank["boxes"]:
            box = tuple(slice(at, at + length) for at, length in zip(offset, values.shape, strict=True))
            value = torch.from_numpy(values)
            if times[name][box].max() > 0:
                torch.testing.assert_close(found[name][box], value, rtol=1e-5, atol=1e-6, msg=f"copies of {name}")
            found[name][box] = value
            times[name][box] += 1
            copies[name] = num
    for name, grad in right["grads"].items():
        assert times[name].min() == times[name].max() == copies[name], name
        error = (found[name] - grad).norm()
        assert error <= 1e-5 * grad.norm() + 2e-7, f"{name}: {error / grad.norm():.1e}"


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models with an odd vocabulary and feed-forward size, which no number of devices divides."""
    root = tmp_path_factory.mktemp("odd")
    odd = {"vocab_size": VOCAB + 1, "intermediate_size": 97}
    return {family: write_model(root / family, family, **odd) for family in FAMILIES}


@pytest.mark.parametrize("sequence", [True, False], ids=["sp", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_devices(family: str, sequence: bool, pool: Pool, families: dict[str, str], tmp_path: Path) -> None:
    right = reference(families[family], tmp_path / "whole")
    ranks = pool.run(share_and_look, 2, families[family], str(tmp_path / "whole"), None, False, {"sequence": sequence})
    compare(ranks, right)
    assert all(rank["tied"] == (family == "gemma3") for rank in ranks)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"sequence": True}),
        ("qwen3", {"sequence": False}),
        ("glm4", {"sequence": True, "overlap_chunks": 2}),
        ("llama", {"sequence": False, "overlap_chunks": 4}),
        ("gemma3", {"sequence": True, "regather": False}),
    ],
)
def test_four_devices(family: str, options: dict[str, Any], pool: Pool, families: dict[str, str], tmp_path: Path) -> None:
    right = reference(families[family], tmp_path / "whole")
    compare(pool.run(share_and_look, 4, families[family], str(tmp_path / "whole"), None, False, options), right)


@pytest.mark.parametrize(
    ("family", "lora", "sequence"),
    [
        ("qwen2", None, True),
        ("qwen3", None, False),
        ("qwen2", {"targets": ["all-linear"], "rank": 3, "alpha": 5, "dropout": 0.0}, True),
    ],
    ids=["bias", "norm", "lora"],
)
def test_more_devices_than_key_value_heads(family: str, lora: dict[str, Any] | None, sequence: bool, pool: Pool, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family, num_key_value_heads=2)
    right = reference(folder, tmp_path / "whole", lora)
    compare(pool.run(share_and_look, 4, folder, str(tmp_path / "whole"), lora, False, {"sequence": sequence}), right)


def test_eight_devices_for_four_key_value_heads(pool: Pool, families: dict[str, str], tmp_path: Path) -> None:
    right = reference(families["qwen3"], tmp_path / "whole")
    compare(pool.run(share_and_look, 8, families["qwen3"], str(tmp_path / "whole"), None, False, {"sequence": True}), right)


@pytest.mark.parametrize(
    ("family", "num", "options"),
    [
        ("qwen2", 2, {"sequence": True}),
        ("glm4", 4, {"sequence": True}),
        ("glm4", 2, {"sequence": False}),
        ("qwen2", 4, {"sequence": True, "overlap_chunks": 2}),
        ("llama", 2, {"sequence": False, "overlap_chunks": 2}),
    ],
)
def test_adapters(family: str, num: int, options: dict[str, Any], pool: Pool, families: dict[str, str], tmp_path: Path) -> None:
    lora = {"targets": ["all-linear"], "rank": 3, "alpha": 5, "dropout": 0.0, "rslora": family == "glm4"}
    right = reference(families[family], tmp_path / "whole", lora)
    compare(pool.run(share_and_look, num, families[family], str(tmp_path / "whole"), lora, False, options), right)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_one_device(family: str, families: dict[str, str], tmp_path: Path) -> None:
    lora = {"targets": ["all-linear"], "rank": 3, "alpha": 5, "dropout": 0.0, "rslora": family == "glm4"}
    right = reference(families[family], tmp_path / "whole", lora)
    compare([share_alone(families[family], str(tmp_path / "whole"), lora)], right)


def share_alone(folder: str, whole: str, lora: dict[str, Any]) -> dict[str, Any]:
    """The lean forward methods of one device, by the same comparison."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from ascendfactory.engine import model as models
    from ascendfactory.engine.kernels import apply_kernels
    from ascendfactory.engine.mesh import Axis
    from ascendfactory.engine.parallel import tensor

    base = models.build_on_meta(models.read_config(folder))
    ALL_ATTENTION_FUNCTIONS.register("causal_for_tests", causal)
    base.set_attn_implementation("causal_for_tests")
    hf = add_adapters(base, lora)
    assert tensor.apply(hf, Axis(), sequence=True) == {}
    apply_kernels(base)
    models.materialize(hf, base, torch.device("cpu"))
    values = torch.load(whole)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            parameter.copy_(values[name])
    loss = local_loss(base, Axis())
    loss.backward()
    boxes = [(n, (0,) * p.ndim, p.grad.numpy(), 1) for n, p in hf.named_parameters() if p.grad is not None]
    return {"loss": loss.item(), "boxes": boxes}


def test_recomputed_layers(pool: Pool, families: dict[str, str], tmp_path: Path) -> None:
    right = reference(families["qwen3"], tmp_path / "whole")
    compare(pool.run(share_and_look, 2, families["qwen3"], str(tmp_path / "whole"), None, True, {"sequence": True}), right)


@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("regather", [True, False])
def test_bytes_under_sequence_parallelism(num: int, regather: bool, pool: Pool, families: dict[str, str], tmp_path: Path) -> None:
    """Per layer and block: one gather of the input and one reduce-scatter of the output, their mirror images, and the second gather."""
    reference(families["llama"], tmp_path / "whole")
    ranks = pool.run(share_and_look, num, families["llama"], str(tmp_path / "whole"), None, False, {"sequence": True, "regather": regather})
    stream = ROWS * POSITIONS * 64 * 4
    num_trained = int((draw_batch()[1] >= 0).sum())
    blocks = 2 * config("llama").num_hidden_layers
    for rank in ranks:
        assert rank["sent"] == {
            # a block: input, output's gradient, input again; beside them the embedding's gradient, the head's input, the loss
            "all_gather_into_tensor": stream * (blocks * (2 + regather) + 2) + num * 2 * num_trained * 4,
            # a block: output, input's gradient; beside them the embedding's output and the gradient of the head's input
            "reduce_scatter_tensor": stream * (blocks * 2 + 2),
        }


def test_bytes_without_sequence_parallelism(pool: Pool, families: dict[str, str], tmp_path: Path) -> None:
    reference(families["llama"], tmp_path / "whole")
    ranks = pool.run(share_and_look, 2, families["llama"], str(tmp_path / "whole"), None, False, {"sequence": False})
    stream = ROWS * POSITIONS * 64 * 4
    num_trained = int((draw_batch()[1] >= 0).sum())
    assert ranks[0]["sent"] == {
        "all_reduce": stream * (2 * 2 * 3 + 2),
        "all_gather_into_tensor": 2 * 2 * num_trained * 4,
    }


def test_adapters_send_nothing_more(pool: Pool, families: dict[str, str], tmp_path: Path) -> None:
    lora = {"targets": ["all-linear"], "rank": 3, "alpha": 5, "dropout": 0.0}
    sent = []
    for settings in (None, lora):
        reference(families["qwen2"], tmp_path / "whole", settings)
        ranks = pool.run(share_and_look, 2, families["qwen2"], str(tmp_path / "whole"), settings, False, {"sequence": True})
        sent.append(ranks[0]["sent"])
    stream = ROWS * POSITIONS * 64 * 4
    # a frozen embedding's and the first block's input gradients: only what adapters below need
    assert sent[1]["reduce_scatter_tensor"] == sent[0]["reduce_scatter_tensor"] - stream
    assert sent[1]["all_gather_into_tensor"] == sent[0]["all_gather_into_tensor"] - stream


@pytest.mark.parametrize("sequence", [True, False], ids=["sp", "plain"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),  # biases behind the sum
        ("phi3", {}),  # q, k and v in one matrix
        ("cohere", {"logit_scale": 1.0}),  # both blocks read one norm
    ],
)
def test_other_forms(family: str, changes: dict[str, Any], sequence: bool, pool: Pool, tmp_path: Path) -> None:
    folder = write_form(tmp_path / "model", family, changes)
    right = reference(folder, tmp_path / "whole")
    compare(pool.run(share_and_look, 2, folder, str(tmp_path / "whole"), None, False, {"sequence": sequence}), right)


def write_form(folder: Path, family: str, changes: dict[str, Any]) -> str:
    import transformers

    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    names = {"llama": "LlamaConfig", "phi3": "Phi3Config", "cohere": "CohereConfig", "olmo2": "Olmo2Config", "mixtral": "MixtralConfig"}
    settings = {**shape, "num_key_value_heads": 2, "pad_token_id": None, "eos_token_id": 1, "bos_token_id": 1, **changes}
    torch.manual_seed(3)
    model: Any = transformers.AutoModelForCausalLM.from_config(getattr(transformers, names[family])(**settings), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(folder)
    return str(folder)


def look_at_logits(folder: str, whole: str) -> Tensor:
    from ascendfactory.engine.parallel.tensor import whole_positions

    _, base, _, _ = build_shared(folder, whole, None, sequence=True)
    with whole_positions(base), torch.no_grad():
        return base(input_ids=torch.arange(3, 18)[None], use_cache=False).logits  # 15 positions: two devices cannot share them


def test_all_logits_for_generation(pool: Pool, families: dict[str, str], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference(families["qwen3"], tmp_path / "whole")
    right = AutoModelForCausalLM.from_pretrained(families["qwen3"])(torch.arange(3, 18)[None]).logits
    for logits in pool.run(look_at_logits, 2, families["qwen3"], str(tmp_path / "whole")):
        torch.testing.assert_close(logits, right.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes", "tp", "expected"),
    [
        ("llama", {}, 3, "4 attention heads cannot be shared by tp 3; nearest: 2 (of 1, 2, 4)"),
        ("llama", {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 48}, 2, "3 key/value heads and tp 2"),
        ("phi3", {"num_key_value_heads": 1}, 2, "shared by more devices than there are key/value heads"),
        ("phi3", {"resid_pdrop": 0.1}, 2, "set layout.sp: true"),
        ("olmo2", {}, 2, "q_norm over (32,), more than one head of 8"),
        ("mixtral", {"num_local_experts": 2}, 2, "mixtral has"),
    ],
)
def test_what_no_rule_covers_is_refused(
    family: str, changes: dict[str, Any], tp: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist

    from ascendfactory.core.messages import UserError
    from ascendfactory.engine import model as models
    from ascendfactory.engine.mesh import Axis
    from ascendfactory.engine.parallel import tensor

    hf = models.build_on_meta(models.read_config(write_form(tmp_path, family, changes)))
    group: Any = object()
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: list(range(tp)))
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: group)
    with pytest.raises(UserError) as error:
        tensor.apply(hf, Axis(tp, 0, group), sequence=False)
    assert expected in error.value.en
    assert error.value.zh != error.value.en


def share_with_fsdp(folder: str, whole: str, lora: dict[str, Any] | None) -> dict[str, Any]:
    """Two devices share weights, two pairs share rows and what is left of the weights."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from ascendfactory.engine.mesh import Axis
    from ascendfactory.engine.parallel import pieces as places

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    axis = Axis(2, mesh.get_local_rank("tp"), mesh["tp"].get_group())
    hf, base, pieces, axis = build_shared(folder, whole, lora, axis=axis, sequence=True)

    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hf = hf

        def forward(self) -> Tensor:
            return local_loss(base, axis, row=mesh.get_local_rank("shard"))

    root = Root()
    for module in [*base.get_decoder().layers, root]:
        fully_shard(module, mesh=mesh["shard"])
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    values = torch.load(whole)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            places.write(parameter, pieces[name], values[name])
    loss = root()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh["shard"].get_group())
    boxes = []
    for name, parameter in hf.named_parameters():
        if parameter.requires_grad:
            grad, piece = places.local(parameter.grad), pieces[name]
            if piece.partial_over is not None:
                dist.all_reduce(grad, group=piece.partial_over)
            boxes += [(name, c.offset, c.tensor.clone().numpy(), piece.copies) for c in places.chunks(parameter, piece, grad)]
    return {"loss": total.item(), "boxes": boxes}


@pytest.mark.parametrize("lora", [None, {"targets": ["all-linear"], "rank": 4, "alpha": 5, "dropout": 0.0}], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["qwen3", "glm4", "gemma3"])
def test_beside_fsdp(family: str, lora: dict[str, Any] | None, pool: Pool, families: dict[str, str], tmp_path: Path) -> None:
    right = reference(families[family], tmp_path / "whole", lora)
    compare(pool.run(share_with_fsdp, 4, families[family], str(tmp_path / "whole"), lora), right)
