"""Models built on meta and filled from files, beside transformers' own loading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Layout
from ascendfactory.engine import attention, model
from ascendfactory.engine.mesh import make_mesh
from ascendfactory.engine.names import weight_names
from ascendfactory.engine.parallel.fsdp import apply_fsdp
from ascendfactory.engine.parallel.pieces import Piece
from tests.pool import Pool
from tests.tiny import FAMILIES, config

CPU = torch.device("cpu")


def loaded(folder: str | Path) -> Any:
    hf = model.build_on_meta(model.read_config(str(folder)))
    model.materialize(hf, hf, CPU)
    model.load_weights(hf, str(folder))
    return hf


def theirs(folder: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def copied(folder: str, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def rewrite(folder: Path, change: Any) -> None:
    """Changes the tensors of model.safetensors in place."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def assert_same_state(mine: nn.Module, right: nn.Module) -> None:
    """Every parameter and buffer, also those that are in no file (rotary frequencies, embedding scales)."""
    expected = dict(right.named_parameters()) | dict(right.named_buffers())
    found = dict(mine.named_parameters()) | dict(mine.named_buffers())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_state_equals_transformers(tiny_models: dict[str, str], family: str) -> None:
    hf = loaded(tiny_models[family])
    assert_same_state(hf, theirs(tiny_models[family]))
    assert hf.config._attn_implementation == attention.NAME


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "linear", "factor": 2.0},
    ],
)
def test_scaled_rotary_frequencies_equal_transformers(tmp_path: Path, scaling: dict[str, Any]) -> None:
    settings = config("llama", rope_parameters={"rope_theta": 10000.0, **scaling})
    right = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    right.save_pretrained(tmp_path)
    assert_same_state(loaded(tmp_path), right)


def test_gemma_embedding_scale(tiny_models: dict[str, str]) -> None:
    scale = dict(loaded(tiny_models["gemma3"]).named_buffers())["model.embed_tokens.embed_scale"]
    assert scale.item() == pytest.approx(8.0)  # the root of hidden size 64


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tied_heads_stay_tied(tiny_models: dict[str, str], family: str) -> None:
    hf = loaded(tiny_models[family])
    assert (hf.get_output_embeddings().weight is hf.get_input_embeddings().weight) == (family == "gemma3")


def test_decoder_layers(tiny_models: dict[str, str]) -> None:
    hf = model.build_on_meta(model.read_config(tiny_models["qwen3"]))
    assert [type(layer).__name__ for layer in model.decoder_layers(hf)] == ["Qwen3DecoderLayer"] * 3
    assert all(p.is_meta for p in hf.parameters())


def test_weights_from_shards_with_an_index(tiny_models: dict[str, str], tmp_path: Path) -> None:
    right = theirs(tiny_models["llama"])
    right.save_pretrained(tmp_path, max_shard_size="100KB")
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert_same_state(loaded(tmp_path), right)
    (tmp_path / files[1]).unlink()
    with pytest.raises(UserError, match=f"{files[1]} is named by .*index.json but missing") as caught:
        loaded(tmp_path)
    assert files[1] in caught.value.zh


def test_shards_without_an_index(tiny_models: dict[str, str], tmp_path: Path) -> None:
    folder = copied(tiny_models["llama"], tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"part-{number}.safetensors")
    assert_same_state(loaded(folder), theirs(tiny_models["llama"]))


def test_weights_of_a_bare_decoder(tiny_models: dict[str, str], tmp_path: Path) -> None:
    folder = copied(tiny_models["gemma3"], tmp_path / "m")
    rewrite(folder, lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    assert_same_state(loaded(folder), theirs(tiny_models["gemma3"]))


def test_half_precision_files_are_read_as_fp32(tiny_models: dict[str, str], tmp_path: Path) -> None:
    folder = copied(tiny_models["qwen2"], tmp_path / "m")
    rewrite(folder, lambda tensors: {name: tensor.to(torch.float16) for name, tensor in tensors.items()})
    hf = loaded(folder)
    assert {p.dtype for p in hf.parameters()} == {torch.float32}
    weight = load_file(folder / "model.safetensors")["model.norm.weight"]
    assert torch.equal(hf.model.norm.weight, weight.float())


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: {k: v for k, v in tensors.items() if k != NORM}, f"weight '{NORM}' is in no file"),
        (lambda tensors: tensors | {NORM: torch.ones(65)}, r"norm.weight' has shape \[65\] in model.safetensors, config.json says \[64\]"),
        (lambda tensors: tensors | {"model.layers.3.mlp.up_proj.weight": torch.ones(1)}, r"holds 1 weights .*'model.layers.3.mlp.up_proj"),
        (lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(1)}, r"holds 1 weights .*q_proj.bias'"),
        (lambda tensors: tensors | {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)}, r"holds 1 weights .*weight_scale_inv"),
    ],
)
def test_weights_that_do_not_fit_are_named(tiny_models: dict[str, str], tmp_path: Path, change: Any, message: str) -> None:
    folder = copied(tiny_models["llama"], tmp_path / "m")
    rewrite(folder, change)
    with pytest.raises(UserError, match=message) as caught:
        loaded(folder)
    assert caught.value.where == "model.path"


def test_leftovers_that_mean_nothing_are_no_error(tiny_models: dict[str, str], tmp_path: Path) -> None:
    folder = copied(tiny_models["gemma3"], tmp_path / "m")
    extra = {"lm_head.weight": torch.ones(320, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(folder, lambda tensors: tensors | extra)
    assert_same_state(loaded(folder), theirs(tiny_models["gemma3"]))


def test_folders_without_model_or_weights(tiny_models: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json in"):
        model.read_config(str(tmp_path))
    folder = copied(tiny_models["llama"], tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \.safetensors weights in .*model\.init: random"):
        loaded(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "lama"}))
    with pytest.raises(UserError, match=r"config\.json: .*lama"):
        model.read_config(str(folder))


@pytest.mark.parametrize(
    "settings",
    [
        transformers.FalconConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
        transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2),
        transformers.Gemma2Config(hidden_size=32, num_hidden_layers=1),
        transformers.T5Config(d_model=32, num_layers=1),
    ],
    ids=lambda settings: str(settings.model_type),
)
def test_models_with_an_attention_of_their_own_are_refused(settings: Any) -> None:
    with pytest.raises(UserError, match=settings.model_type) as caught:
        model.build_on_meta(settings)
    assert settings.model_type in caught.value.zh


def drawn(folder: str, seed: int, size: int) -> dict[str, Tensor]:
    """Random weights, whole, drawn on `size` ranks."""
    layout = Layout(dp=size)
    mesh = make_mesh(layout, "cpu", sharded=size > 1)
    hf = model.build_on_meta(model.read_config(folder))
    if mesh.fsdp is not None:
        apply_fsdp(hf, [model.decoder_layers(hf)], mesh.fsdp, layout, torch.float32)
    model.materialize(hf, hf, mesh.device)
    model.draw_weights(hf, seed)
    return {name: (p.full_tensor() if size > 1 else p).detach() for name, p in hf.named_parameters()}


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_drawn_weights_have_the_spread_of_transformers(tiny_models: dict[str, str], family: str) -> None:
    state = torch.get_rng_state()
    mine = drawn(tiny_models[family], 3, 1)
    assert torch.equal(torch.get_rng_state(), state)
    right = AutoModelForCausalLM.from_config(model.read_config(tiny_models[family]), dtype=torch.float32)
    for name, expected in right.named_parameters():
        if expected.ndim == 1:
            assert torch.equal(mine[name], expected), name
        else:
            assert mine[name].std().item() == pytest.approx(expected.std().item(), rel=0.1), name
            assert abs(mine[name].mean().item()) < 0.01
    assert not torch.equal(mine["model.layers.0.mlp.up_proj.weight"], mine["model.layers.1.mlp.up_proj.weight"])
    assert not torch.equal(mine["model.layers.0.mlp.up_proj.weight"], drawn(tiny_models[family], 4, 1)["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("family", ["glm4", "gemma3"])
def test_drawn_weights_do_not_depend_on_the_number_of_ranks(pool: Pool, tiny_models: dict[str, str], family: str) -> None:
    alone = drawn(tiny_models[family], 3, 1)
    for other in pool.run(drawn, 2, tiny_models[family], 3, 2):
        assert other.keys() == alone.keys()
        assert all(torch.equal(other[name], tensor) for name, tensor in alone.items())


def read_on_ranks(folder: str, replicate: int) -> tuple[dict[str, Tensor], int]:
    """Weights read from a file into shards; whole again, and the elements that this rank held."""
    layout = Layout(dp=2, replicate=replicate)
    mesh = make_mesh(layout, "cpu", sharded=True)
    hf = model.build_on_meta(model.read_config(folder))
    assert mesh.fsdp is not None
    apply_fsdp(hf, [model.decoder_layers(hf)], mesh.fsdp, layout, torch.float32)
    model.materialize(hf, hf, mesh.device)
    model.load_weights(hf, folder)
    held = sum(p.to_local().numel() for p in hf.parameters())
    state = {name: p.full_tensor().detach() for name, p in hf.named_parameters()}
    return state | dict(hf.named_buffers()), held


@pytest.mark.parametrize("replicate", [1, 2])
def test_each_rank_reads_its_own_rows(pool: Pool, tiny_models: dict[str, str], replicate: int) -> None:
    right = theirs(tiny_models["gemma3"])
    expected = dict(right.named_parameters()) | dict(right.named_buffers())
    num_params = sum(p.numel() for p in right.parameters())
    for state, held in pool.run(read_on_ranks, 2, tiny_models["gemma3"], replicate):
        assert held == num_params // (2 // replicate)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_name_seed_depends_on_both() -> None:
    assert len({model.name_seed(seed, name) for seed in (0, 1) for name in ("a", "b")}) == 4
    assert 0 <= model.name_seed(2**40, "x") < 2**56


EMBEDDING = "model.embed_tokens.weight"


def last_stage(folder: str) -> tuple[Any, dict[str, Piece], set[str]]:
    """The last layer, norm and tied head of a model on meta, some of it cut as tensor parallelism would; pieces, and all names."""
    hf = model.build_on_meta(model.read_config(folder))
    known = weight_names(hf)
    hf.model.layers[0] = hf.model.layers[1] = nn.Identity()
    mlp, pieces = hf.model.layers[2].mlp, {}
    for name, module, piece in (
        ("model.layers.2.mlp.gate_proj.weight", mlp.gate_proj, Piece((96, 64), 0, ((8, 20), (60, 70)))),
        ("model.layers.2.mlp.down_proj.weight", mlp.down_proj, Piece((64, 96), 1, ((0, 48),))),
        (EMBEDDING, hf.model.embed_tokens, Piece((320, 64), 0, ((100, 320),), copies=2)),
    ):
        lengths = list(piece.shape)
        lengths[piece.dim] = sum(stop - start for start, stop in piece.intervals)
        module.weight = nn.Parameter(torch.empty(lengths, device="meta"))
        pieces[name] = piece
    hf.lm_head.weight = hf.model.embed_tokens.weight
    return hf, pieces, known


def assert_is_part_of(hf: Any, whole: dict[str, Tensor], pieces: dict[str, Piece]) -> None:
    names = [name for name, _ in hf.named_parameters()]
    assert len(names) > 8
    for name, parameter in hf.named_parameters():
        right = whole[name]
        if piece := pieces.get(name):
            right = torch.cat([right.narrow(piece.dim, start, stop - start) for start, stop in piece.intervals], piece.dim)
        assert torch.equal(parameter, right), name


@pytest.mark.parametrize("source", ["files", "drawn"])
def test_a_stage_holds_its_part_of_the_same_model(tiny_models: dict[str, str], source: str) -> None:
    folder = tiny_models["gemma3"]
    hf, pieces, known = last_stage(folder)
    model.materialize(hf, hf, CPU)
    if source == "files":
        model.load_weights(hf, folder, pieces, known)
        assert_is_part_of(hf, dict(theirs(folder).named_parameters()), pieces)
    else:
        model.draw_weights(hf, 3, pieces)
        assert_is_part_of(hf, drawn(folder, 3, 1), pieces)


def test_a_stage_knows_what_the_others_read(tiny_models: dict[str, str], tmp_path: Path) -> None:
    folder = copied(tiny_models["gemma3"], tmp_path / "m")
    rewrite(folder, lambda tensors: tensors | {"model.layers.7.mlp.up_proj.weight": torch.ones(1)})
    hf, pieces, known = last_stage(str(folder))
    model.materialize(hf, hf, CPU)
    with pytest.raises(UserError, match=r"holds 1 weights .*'model\.layers\.7"):
        model.load_weights(hf, str(folder), pieces, known)
