"""Models cut into pipeline stages: names stay, weights of other stages are gone, tied ends agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ascendfactory.core.messages import UserError
from ascendfactory.core.recipe import Lora
from ascendfactory.core.stages import StageCosts, chunks_of, cut
from ascendfactory.engine import adapter
from ascendfactory.engine import model as models
from ascendfactory.engine.parallel.pipeline import StageModel
from ascendfactory.engine.parallel.stages import PassOn, cut_model
from tests import tiny
from tests.pool import Pool

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def cut_on_meta(family: str, rank: int, pp: int, vpp: int = 1, schedule: Any = "1f1b", **changes: Any) -> tuple[Any, Any]:
    base = models.build_on_meta(tiny.config(family, **changes))
    ranges = cut(pp, vpp, StageCosts((1.0,) * base.config.num_hidden_layers))
    return base, cut_model(base, ranges, chunks_of(rank, pp, vpp, schedule))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("pp,vpp,schedule", [(3, 1, "1f1b"), (2, 2, "interleaved"), (2, 2, "zbv")])
def test_stages_are_the_model(family: str, pp: int, vpp: int, schedule: str) -> None:
    """Together the stages have the names of the whole model, each once but for the two ends of a tied embedding."""
    whole = models.build_on_meta(tiny.config(family, num_hidden_layers=4, **({"layer_types": None} if family == "gemma3" else {})))
    names: list[str] = []
    for rank in range(pp):
        base, _ = cut_on_meta(family, rank, pp, vpp, schedule, num_hidden_layers=4, **({"layer_types": None} if family == "gemma3" else {}))
        names += [name for name, _ in base.named_parameters()]
    tied = family == "gemma3" and schedule != "zbv"
    assert sorted(names) == sorted([name for name, _ in whole.named_parameters()] + [EMBEDDING] * tied)


def test_both_ends_of_a_tied_model_hold_the_embedding() -> None:
    first, _ = cut_on_meta("gemma3", 0, 3)
    middle, _ = cut_on_meta("gemma3", 1, 3)
    last, _ = cut_on_meta("gemma3", 2, 3)
    for base in (first, middle, last):
        models.materialize(base, base, torch.device("cpu"))
    assert isinstance(first.lm_head, PassOn) and not list(first.lm_head.parameters())
    assert EMBEDDING not in dict(middle.named_parameters())
    assert last.lm_head.weight is last.model.embed_tokens.weight
    assert isinstance(middle.model.norm, PassOn) and isinstance(last.model.layers[0], PassOn)


def test_shells_share_their_modules() -> None:
    base, stage = cut_on_meta("qwen3", 0, 2, 2, "zbv", num_hidden_layers=4)
    models.materialize(base, base, torch.device("cpu"))
    model = StageModel(base, {}, stage)
    down, up = stage.parts[0], stage.parts[3]
    assert down.decoder.layers[0] is base.model.layers[0] and isinstance(down.decoder.layers[3], PassOn)
    assert up.decoder.layers[3] is base.model.layers[3] and isinstance(up.decoder.layers[0], PassOn)
    assert isinstance(down.decoder.norm, PassOn) and up.decoder.norm is base.model.norm
    assert not any("meta" in str(p.device) for part in stage.parts.values() for p in part.decoder.parameters())
    names = {id(p): name for name, p in base.named_parameters()}
    found = [{names[id(p)] for p in part.decoder.parameters()} for part in (down, up)]
    assert found[0] & found[1] == set() and EMBEDDING in found[0] and NORM in found[1]
    assert found[0] | found[1] | {HEAD} == set(names.values())
    model.eval()
    assert not down.decoder.training and not up.decoder.training


def test_gradients_are_wanted_from_the_first_adapter_on() -> None:
    base = models.build_on_meta(tiny.config("qwen3", num_hidden_layers=4))
    adapter.apply_lora(base, Lora(targets=["q_proj"]))
    for name, parameter in base.named_parameters():
        if "lora_" in name and "layers.2" not in name:
            parameter.requires_grad_(False)
    stage = cut_model(base, [range(0, 1), range(1, 2), range(2, 3), range(3, 4)], [1])
    assert stage.trains_up_to == (False, False, True, True)
    assert [name for name in dict(base.named_parameters()) if "layers.1" not in name] == []


def test_a_decoder_with_more_than_layers_and_norms_is_refused() -> None:
    base = models.build_on_meta(tiny.config("llama"))
    base.model.projection = torch.nn.Linear(64, 64, device="meta")
    with pytest.raises(UserError, match=r"'projection'.*layout.pp: 1"):
        cut_model(base, [range(0, 2), range(2, 3)], [0])


def collectives_of_levels(folder: str) -> dict[int, tuple[int, int]]:
    """ZeRO level → (gathers, reductions) of one step of 4 micro-batches, two per pipeline of dp 2, on this rank."""
    import torch.distributed as dist

    from ascendfactory.engine.data.batch import count_trained_tokens
    from ascendfactory.engine.parallel.context import cut
    from tests.engine import test_pipeline as pipelines

    counts: dict[int, tuple[int, int]] = {}
    real = dist.all_gather_single, dist.reduce_scatter_single
    for zero in (1, 2, 3):
        seen = [0, 0]

        def counting(which: int, seen: list[int] = seen) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                seen[which] += 1
                return real[which](*args, **kwargs)

            return call

        case = pipelines.Case("qwen3", dp=2, num_micro=4, zero=zero)
        pipeline = pipelines.build_on_rank(folder, case)[0]
        batches = pipelines.make_batches(pipelines.make_documents(4))
        dist.all_gather_single, dist.reduce_scatter_single = counting(0), counting(1)
        mine = [cut(batch, pipeline.mesh) for batch in batches[pipeline.mesh.data.rank :: 2]]
        pipeline.step(mine, 1.0 / count_trained_tokens(batches))
        dist.all_gather_single, dist.reduce_scatter_single = real
        counts[zero] = seen[0], seen[1]
    return counts


@pytest.mark.parallel
def test_levels_gather_and_reduce_as_often_as_they_say(tmp_path: Path, pool: Pool) -> None:
    """2 layers and a root on each stage; 2 micro-batches a step: level 3 gathers each layer for each forward and backward."""
    folder = tiny.write_model(tmp_path / "model", "qwen3", num_hidden_layers=4)
    for counts in pool.run(collectives_of_levels, 4, folder):
        assert counts[1] == (3, 3)
        assert counts[2] == (3, 6)
        assert counts[3][1] == 6
        assert counts[3][0] in (9, 10)
