"""What Megatron's options, which all three MindSpeed frameworks have, say together: weights, layout, recomputation, learning rate."""

from __future__ import annotations

from typing import Any

from ascendfactory.core.messages import UserError
from ascendfactory.launch.migration import Migration, Tree, one_of, whole


def put_weights(load: Any, converted: Any, place: str, found: Migration) -> None:
    """What training starts from: the converted weights, or a checkpoint of the same run.

    Raises:
        UserError: it is a Megatron checkpoint of another place, which nothing here reads.
    """
    if not load or load == converted:
        return
    output = str(found.recipe.get("output", {}).get("dir", ""))
    if output and str(load).startswith(output.rstrip("/")):
        found.note(
            f"{place}: {load}: the same command goes on from the newest checkpoint of {output}/checkpoints by itself",
            f"{place}：{load}：再次执行同一命令会自动从 {output}/checkpoints 的最新检查点继续",
        )
        return
    raise UserError(
        place,
        f"{load} is a Megatron checkpoint outside of af_output_dir; give Hugging Face weights in tokenizer-name-or-path and leave it out",
        f"{load} 是 af_output_dir 之外的 Megatron 检查点；请在 tokenizer-name-or-path 给出 Hugging Face 权重并删去此项",
    )


def put_conversions(sections: Tree, found: Migration) -> None:
    """Both converters follow the layout; null after training means no export."""
    if "convert_ckpt_mg2hf" in sections and sections["convert_ckpt_mg2hf"] is None:
        found.put("output.export", False, "backend_config.convert_ckpt_mg2hf")
    found.dropped += [f"backend_config.{name}" for name in ("convert_ckpt_hf2mg", "convert_ckpt_mg2hf") if sections.get(name)]


def put_layout(options: Tree, found: Migration, section: str) -> None:
    """What several of Megatron's options say together: layout, recomputation, the floor of the learning rate."""
    found.put("layout.zero", 1)
    if "tensor-model-parallel-size" in options or "pipeline-model-parallel-size" in options:  # a layout of its own: what it leaves out is 1
        found.put("layout", {"zero": 1, **dict.fromkeys(("tp", "pp", "vpp", "ring", "ulysses", "ep"), 1)})
    _context(options, found, section)
    _pipeline(options, found, section)
    _experts(options, found, section)
    _recompute(options, found, section)
    chunks = whole(options, "coc-parallel-num", 4, section)
    if options.pop("use-ascend-coc", False):
        found.put("layout.overlap_chunks", chunks, f"{section}use-ascend-coc")
    minimum, lr = options.pop("min-lr", None), options.get("lr")
    if minimum:
        try:
            found.put("optim.min_lr_ratio", round(float(minimum) / float(lr), 6), f"{section}min-lr")  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise UserError(
                f"{section}min-lr", f"{minimum!r} beside lr {lr!r}: write both as numbers", f"min-lr {minimum!r} 与 lr {lr!r} 应均为数字"
            ) from None
    if "lr-warmup-iters" in options:
        options.pop("lr-warmup-fraction", None)


def _context(options: Tree, found: Migration, section: str) -> None:
    degree, inner = whole(options, "context-parallel-size", 1, section), whole(options, "ulysses-degree-in-cp", 1, section)
    algorithms = {"megatron_cp_algo": 1, "ulysses_cp_algo": degree, "hybrid_cp_algo": inner}
    options.setdefault("context-parallel-algo", "megatron_cp_algo")
    ulysses = int(one_of(options, "context-parallel-algo", {name: str(n) for name, n in algorithms.items()}, section))
    if degree > 1:
        found.put("layout.ulysses", ulysses, f"{section}context-parallel-size")
        found.put("layout.ring", degree // ulysses, f"{section}context-parallel-size")


def _pipeline(options: Tree, found: Migration, section: str) -> None:
    """Virtual chunks: as their number (MindSpeed-MM), as layers of one, or as DualPipeV, which has two; and stages with fake layers.

    Raises:
        UserError: a chunk size that does not divide the layers, or fake layers that do not fit.
    """
    pp = whole(dict(options), "pipeline-model-parallel-size", 1, section)
    layers = whole(dict(options), "num-layers", 0, section)
    chunks = whole(options, "virtual-pipeline-model-parallel-size", 1, section)
    size, fake = options.pop("num-layers-per-virtual-pipeline-stage", None), options.pop("noop-layers", None)
    if size is not None:
        place = f"{section}num-layers-per-virtual-pipeline-stage"
        if not isinstance(size, int) or size < 1 or layers == 0 or layers % (pp * size):
            raise UserError(
                place, f"{size!r} x pp {pp} does not divide num-layers {layers}", f"{size!r} x pp {pp} 不能整除 num-layers {layers}"
            )
        chunks = layers // (pp * size)
    if options.pop("schedules-method", None) == "dualpipev":
        found.put("layout.schedule", "dualpipev", f"{section}schedules-method")
        chunks = 2
    if chunks > 1:
        found.put("layout.vpp", chunks, f"{section}num-layers-per-virtual-pipeline-stage")
    if fake is not None:
        found.put("layout.stage_layers", _without_fakes(str(fake), layers, pp, chunks, f"{section}noop-layers"), f"{section}noop-layers")


def _without_fakes(fake: str, layers: int, pp: int, chunks: int, place: str) -> list[int]:
    """Real layers of each stage, where `layers` counts the fake ones too.

    Raises:
        UserError: ids that are no layers, layers that pp does not divide, or virtual chunks beside them.
    """
    ids = [int(word) for word in fake.split(",") if word.strip().isdigit()]
    if chunks > 1 or layers % pp or len(ids) != len(fake.split(",")) or not all(number < layers for number in ids):
        raise UserError(
            place,
            f"'{fake}' is not taken beside {layers} layers, pp {pp} and {chunks} chunks a stage; write the real ones as "
            "num-layer-list: 7,8,7",
            f"'{fake}' 不能与 {layers} 层、pp {pp}、每级 {chunks} 块同用；请用 num-layer-list: 7,8,7 写实际层数",
        )
    per_stage = layers // pp
    return [per_stage - sum(number // per_stage == stage for number in set(ids)) for stage in range(pp)]


def _experts(options: Tree, found: Migration, section: str) -> None:
    """Its expert degree leaves tp out; here ep counts the tp devices as well, where experts are spread over them."""
    ep, spread = whole(options, "expert-model-parallel-size", 1, section), options.pop("moe-tp-extend-ep", False)
    tp = whole(dict(options), "tensor-model-parallel-size", 1, section)
    if ep > 1 or (spread and tp > 1):
        found.put("layout.ep", ep * tp if spread else ep, f"{section}expert-model-parallel-size")


def _recompute(options: Tree, found: Migration, section: str) -> None:
    granularity, method = options.pop("recompute-granularity", None), options.pop("recompute-method", None)
    layers = options.pop("recompute-num-layers", None)
    norm = options.pop("recompute-norm", False)
    if granularity:
        found.put("layout.recompute", granularity, f"{section}recompute-granularity")
        if layers and method == "block":
            found.put("layout.recompute_layers", layers, f"{section}recompute-num-layers")
    elif norm:
        found.put("layout.recompute", "norm", f"{section}recompute-norm")
