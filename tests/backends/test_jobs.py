"""Golden jobs; and the sweep: a changed recipe or layout changes the job, or is refused."""

from __future__ import annotations

import json
import tomllib
from importlib.resources import files
from typing import Any

import pytest

from ascendfactory.backends import BACKENDS, llamafactory, mindspeed_llm, mindspeed_mm, mindspeed_rl, verl
from ascendfactory.core.fields import all_keys
from ascendfactory.core.plan import Job, Layout
from tests.backends.golden_jobs import CELLS, FOLDER, Cell, name_of, render, text_of
from tests.backends.plans import make_job_plan, make_recipe

MODULES = {m.NAME: m for m in (llamafactory, mindspeed_llm, mindspeed_mm, mindspeed_rl, verl)}


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_golden(cell: Cell) -> None:
    assert text_of(render(cell)) == (FOLDER / name_of(cell)).read_text(encoding="utf-8"), "python -m tests.backends.golden_jobs, and review"


def test_no_golden_job_is_left_over() -> None:
    assert {path.name for path in FOLDER.glob("*.txt")} == {name_of(cell) for cell in CELLS}


def test_profiles_are_those_that_can_be_installed() -> None:
    table = tomllib.loads((files("ascendfactory.catalog") / "environments.toml").read_text(encoding="utf-8"))
    for name, module in MODULES.items():
        assert set(module.PROFILES) == set(table[name])
        assert table[name][module.PROFILES[0]]["default"]


# Another value for every key of a recipe. Keys of unions are those of the back end's own base recipe.
CHANGES: dict[str, Any] = {
    "name": "other",
    "model.path": "qwen2.5-14b",
    "model.init": "random",
    "model.dtype": "float32",
    "objective.train_on": "all",
    "objective.num_answers": 4,
    "objective.max_prompt_tokens": 2048,
    "objective.temperature": 0.7,
    "objective.top_p": 0.9,
    "objective.clip_low": 0.1,
    "objective.clip_high": 0.3,
    "objective.kl_coef": 0.01,
    "objective.kl_kind": "k2",
    "objective.entropy_coef": 0.01,
    "objective.reward": "rewards.py:score",
    "objective.off_policy_steps": 1,
    "objective.multi_turn": {"tools": "tools.py", "max_turns": 3},
    "objective.dynamic_sampling": False,
    "objective.overlong_tokens": 100,
    "objective.critic_lr": 1e-4,
    "objective.gamma": 0.9,
    "objective.gae_lambda": 0.9,
    "tuning.rank": 16,
    "tuning.alpha": 32.0,
    "tuning.dropout": 0.1,
    "tuning.targets": ["q_proj"],
    "tuning.rslora": True,
    "tuning.dora": True,
    "tuning.adapter": "adapters/old",
    "data.train": ["other.jsonl"],
    "data.eval": ["eval.jsonl"],
    "data.eval_fraction": 0.1,
    "data.seq_len": 8192,
    "data.packing": "fixed",
    "data.overlong": "drop",
    "data.bad_lines": "skip",
    "data.mask_check": False,
    "data.chat_template": "own.jinja",
    "data.shuffle": False,
    "data.streaming": True,
    "data.workers": 3,
    "data.cache_dir": "elsewhere",
    "batch.global_size": 64,
    "batch.micro_size": 2,
    "duration": "200 steps",
    "optim.lr": 3e-4,
    "optim.schedule": "linear",
    "optim.warmup": "7 steps",
    "optim.min_lr_ratio": 0.1,
    "optim.weight_decay": 0.5,
    "optim.beta1": 0.8,
    "optim.beta2": 0.999,
    "optim.eps": 1e-6,
    "optim.max_grad_norm": 0.3,
    "optim.nonfinite": "skip",
    "optim.in_backward": True,
    "cluster": {"device": "snt9b", "nproc": 8, "restarts": 2},
    "checkpoint.every": "9 steps",
    "checkpoint.keep": 5,
    "checkpoint.keep_best": True,
    "checkpoint.asynchronous": False,
    "checkpoint.resume": "runs/other/checkpoints/10",
    "output.export": False,
    "output.dtype": "float16",
    "output.log_every": 5,
    "output.eval_every": "9 steps",
    "output.sample_prompts": ["Hello"],
    "profile": "no-such",
    "extra": {"no_such_option": 1},
    "seed": 7,
}
# Keys that are the planner's or the run folder's, and reach an adapter as the plan's layout, cluster and run_dir.
PLANNED = (
    "layout.",
    "cluster.device",
    "cluster.nodes",
    "cluster.nproc",
    "backend",
    "output.dir",
    "optim.decay_fraction",
    "objective.kind",
    "tuning.kind",
    "duration.",
    "objective",
    "tuning",
)
BASES: dict[str, tuple[str, str, dict[str, Any]]] = {  # back end, with `+` another of its stages: model, stage, layout
    "llamafactory": ("qwen2.5-7b", "sft_lora", {"zero": 3}),
    "mindspeed_llm": ("qwen2.5-7b", "sft_lora", {"zero": 1, "tp": 2, "sp": True}),
    "mindspeed_mm": ("qwen2.5-vl-7b", "sft_full", {"zero": 1, "pp": 2}),
    "mindspeed_rl": ("qwen2.5-7b", "grpo_full", {"zero": 1, "tp": 2, "sp": True}),
    "verl": ("qwen2.5-7b", "grpo_lora", {}),
    "verl+dapo": ("qwen2.5-7b", "dapo_full", {}),
    "verl+ppo": ("qwen2.5-7b", "ppo_full", {"tp": 2, "sp": True, "zero": 1}),
}
GIVEN_NAME = {"name": "the run folder carries the name", "batch.micro_size": "the plan's micro_size is what counts"}


def _with(settings: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *groups, last = path.split(".")
    inner = settings
    for group in groups:
        inner = inner.setdefault(group, {})
    inner[last] = value
    return settings


def _job(case: str, path: str | None, value: Any, layout: dict[str, Any] | None = None, **more: Any) -> Job | None:
    """The job, or None where it is refused."""
    model, stage, base = BASES[case]
    backend = case.partition("+")[0]
    settings: dict[str, Any] = {}
    if path:
        kind = {"objective": "objective", "tuning": "tuning"}.get(path.split(".")[0])
        if kind:
            objective, _, tuning = stage.partition("_")
            settings[kind] = {"kind": objective if kind == "objective" else tuning}
        settings = _with(settings, path, value)
    if path == "model.path" and backend == "mindspeed_mm":
        settings = {"model": {"path": "qwen2.5-vl-3b"}}
    recipe = make_recipe(model, backend, stage, **settings, **more)
    plan = make_job_plan(recipe, layout or base)
    adapter = BACKENDS[backend]
    return None if adapter.refuse(recipe, plan.card, plan.layout) else adapter.render(plan)


def _applies(case: str, path: str) -> bool:
    stage = BASES[case][1]
    if path.startswith("tuning."):
        return stage.endswith("lora")
    if path.startswith("objective."):
        objective = make_recipe("qwen2.5-7b", "auto", stage).objective
        return path.split(".")[1] in type(objective).model_fields
    return True


def test_the_sweep_knows_every_key() -> None:
    leaves = {key for key in all_keys() if not any(other.startswith(f"{key}.") for other in all_keys())}
    missing = {key for key in leaves if key not in CHANGES and not key.startswith(PLANNED) and key.split(".")[0] not in CHANGES}
    missing = {key for key in missing if not any(key.startswith(f"{known}.") for known in CHANGES)}
    assert missing == set()


@pytest.mark.parametrize("case", BASES)
def test_every_recipe_key_counts(case: str) -> None:
    backend = case.partition("+")[0]
    base = _job(case, None, None)
    assert base is not None
    silent = []
    for path, value in CHANGES.items():
        if not _applies(case, path) or path in GIVEN_NAME:
            continue
        if path.split(".")[0] in ("model", "data", "optim", "batch", "checkpoint", "output") and path.count(".") == 0:
            continue
        changed, before = _job(case, path, value), base
        if path == "output.eval_every" and backend in ("llamafactory", "verl"):  # it counts where something is evaluated
            changed, before = (_job(case, "data.eval", ["eval.jsonl"], output={"eval_every": every}) for every in (value, "100 steps"))
        if path == "objective.kl_kind":  # it counts where a reference is kept
            changed, before = (_job(case, "objective", {"kl_coef": 0.01, "kl_kind": kind}) for kind in (value, "k3"))
        if changed is not None and text_of(changed) == text_of(before) and path not in MODULES[backend].NO_EFFECT:
            silent.append(path)
    assert silent == []


LAYOUT_CHANGES: dict[str, Any] = {
    "replicate": 2,
    "zero": 2,
    "tp": 4,
    "sp": False,
    "pp": 4,
    "vpp": 2,
    "schedule": ["gpipe", "zero_bubble", "zbv", "dualpipev"],
    "stage_layers": [27, 1],
    "overlap_chunks": 2,
    "recompute_in_advance": True,
    "ring": 2,
    "ulysses": 2,
    "ep": 2,
    "recompute": "full",
    "recompute_layers": 2,
    "offload_activations": True,
    "offload_optimizer": True,
    "optim_dtype": "bfloat16",
    "reuse_params": True,
    "micro_size": 2,
}


def test_the_sweep_knows_every_layout_field() -> None:
    assert set(Layout.model_fields) - set(LAYOUT_CHANGES) == {"dp", "num_micro"}  # what the other degrees leave


LAYOUT_CASES = [(name, value) for name, held in LAYOUT_CHANGES.items() for value in (held if name == "schedule" else [held])]


@pytest.mark.parametrize("case", BASES)
def test_every_layout_field_counts(case: str) -> None:
    backend, base = case.partition("+")[0], BASES[case][2]
    before = _job(case, None, None)
    assert before is not None
    silent = []
    for name, value in LAYOUT_CASES:
        layout = base | {name: value}
        if name == "stage_layers":
            layout["pp"] = 2
        if name == "sp" and base.get("tp", 1) == 1:
            continue
        if name == "recompute_layers":
            layout["recompute"] = "full"
            whole = _job(case, None, None, base | {"recompute": "full"})
        elif name == "stage_layers":
            whole = _job(case, None, None, base | {"pp": 2})
        else:
            whole = before
        if name == "ep" and BASES[case][0].startswith("qwen2.5"):
            continue  # a dense model has no experts; the planner's rules refuse it
        changed = _job(case, None, None, layout)
        if (
            changed is not None
            and whole is not None
            and text_of(changed) == text_of(whole)
            and f"layout.{name}" not in MODULES[backend].NO_EFFECT
        ):
            silent.append(name)
    assert silent == []


def _flags(model: str, stage: str, layout: dict[str, Any], backend: str = "mindspeed_llm", **settings: Any) -> list[str]:
    recipe = make_recipe(model, backend, stage, **settings)
    plan = make_job_plan(recipe, layout)
    assert BACKENDS[backend].refuse(recipe, plan.card, plan.layout) == []
    job = BACKENDS[backend].render(plan)
    return [*job.argv, "|", *(word for step in (*job.before, *job.after) for word in step.argv)]


def _value(words: list[str], flag: str) -> list[str]:
    """What stands behind a flag, at each of its places."""
    return [words[i + 1] for i, word in enumerate(words) if word == flag]


def test_uneven_stages_reach_trainer_and_converter_alike() -> None:
    words = _flags("qwen3-8b", "sft_full", {"zero": 1, "pp": 4, "stage_layers": (10, 9, 9, 8)}, profile="2.3.0")
    assert _value(words, "--num-layer-list") == ["10,9,9,8", "10,9,9,8"]


def test_pieces_of_a_matrix_product_are_coc() -> None:
    words = _flags("qwen2.5-7b", "sft_full", {"zero": 1, "tp": 4, "sp": True, "overlap_chunks": 4})
    assert "--use-ascend-coc" in words and _value(words, "--coc-parallel-num") == ["4"]


def test_recomputation_in_advance_needs_chunks_of_one_layer() -> None:
    layout = {"zero": 1, "pp": 4, "schedule": "interleaved", "recompute": "full", "recompute_layers": 1, "recompute_in_advance": True}
    words = _flags("qwen2.5-7b", "sft_full", layout | {"vpp": 7})
    assert "--recompute-in-advance" in words and _value(words, "--recompute-method") == ["block"]
    recipe = make_recipe("qwen3-8b", "mindspeed_llm")
    plan = make_job_plan(recipe, layout | {"vpp": 3})
    assert [r.where for r in BACKENDS["mindspeed_llm"].refuse(recipe, plan.card, plan.layout)] == ["layout.recompute_in_advance"]


def test_dualpipev_is_told_to_trainer_and_both_converters() -> None:
    layout = {"zero": 1, "pp": 2, "vpp": 2, "schedule": "dualpipev"}
    words = _flags("qwen3-8b", "sft_full", layout, batch={"global_size": 64}, profile="2.3.0")
    assert _value(words, "--schedules-method") == ["dualpipev"] * 3
    assert not {"--num-layers-per-virtual-pipeline-stage", "--overlap-grad-reduce", "--overlap-param-gather"} & set(words)
    for model, broken in (("qwen3-1.7b", {}), ("qwen3-8b", {"tp": 2, "sp": True}), ("qwen3-8b", {"ring": 2})):
        assert _refused(model, "sft_full", layout | broken, profile="2.3.0") != [], (model, broken)


def _refused(model: str, stage: str, layout: dict[str, Any], **settings: Any) -> list[tuple[str, Any]]:
    """The keys that MindSpeed-LLM refuses, each with the value that it would take."""
    recipe = make_recipe(model, "mindspeed_llm", stage, **settings)
    plan = make_job_plan(recipe, layout)
    return [(r.where, r.fix.get(r.where)) for r in BACKENDS["mindspeed_llm"].refuse(recipe, plan.card, plan.layout)]


def _converters(words: list[str]) -> list[str]:
    return [word.rsplit("/", 1)[-1] for word in words if "convert_ckpt" in word]


def test_the_older_converter_exports_even_stages_only() -> None:
    uneven = {"zero": 1, "pp": 4, "ep": 2}  # of 27 layers
    assert _refused("deepseek-v2-lite", "sft_full", uneven) == [("layout.pp", 3)]
    assert _refused("deepseek-v2-lite", "sft_full", uneven, output={"export": False}) == []
    chosen = {"zero": 1, "pp": 4, "stage_layers": (8, 7, 7, 6)}
    assert _refused("qwen2.5-7b", "sft_full", chosen) == [("layout.stage_layers", "auto")]
    assert _refused("qwen3-8b", "sft_full", chosen | {"stage_layers": (10, 9, 9, 8)}, profile="2.3.0") == []


def test_the_older_converter_merges_no_adapters_in_virtual_chunks() -> None:
    layout = {"zero": 1, "pp": 2, "vpp": 2, "schedule": "interleaved"}
    for profile, refused in (("2.2.0", [("layout.vpp", 1)]), ("2.3.0", [("layout.vpp", 1)]), ("master", [])):
        assert _refused("qwen3-8b", "sft_lora", layout, profile=profile) == refused, profile
        assert _refused("qwen3-8b", "sft_full", layout, profile=profile) == [], profile


def test_the_newer_converter_of_the_first_profile_exports_no_virtual_chunks_under_tp() -> None:
    layout = {"zero": 1, "tp": 2, "sp": True, "pp": 2, "vpp": 2, "ep": 2, "schedule": "interleaved"}
    assert _refused("qwen3-30b-a3b", "sft_full", layout, profile="2.2.0") == [("layout.vpp", 1)]
    assert _refused("qwen3-30b-a3b", "sft_full", layout, profile="2.2.0", output={"export": False}) == []
    assert _refused("qwen3-30b-a3b", "sft_full", layout, profile="2.3.0") == []


def test_the_newer_converter_of_the_first_profile_has_no_dense_models() -> None:
    for profile, tool in (("2.2.0", "convert_ckpt.py"), ("2.3.0", "convert_ckpt_v2.py"), ("master", "convert_ckpt_v2.py")):
        assert _converters(_flags("qwen3-8b", "sft_full", {"zero": 1}, profile=profile)) == [tool, tool]


def test_where_experts_lie_is_told_to_trainer_and_both_converters() -> None:
    layout = {"zero": 1, "tp": 2, "sp": True, "ep": 8}
    for profile in ("2.2.0", "2.3.0", "master"):
        assert _flags("qwen3-30b-a3b", "sft_full", layout, profile=profile).count("--moe-tp-extend-ep") == 3, profile
    assert _flags("mixtral-8x7b", "sft_full", layout).count("--moe-tp-extend-ep") == 3
    assert "--moe-tp-extend-ep" not in _flags("qwen3-30b-a3b", "sft_full", {"zero": 1, "ep": 8})


def test_adapters_on_experts_are_exported_from_their_own_checkpoint_by_the_older_converter() -> None:
    for model in ("mixtral-8x7b", "qwen3-30b-a3b"):
        words = _flags(model, "sft_lora", {"zero": 1, "ep": 8})
        assert _converters(words) == ["convert_ckpt.py"] * 2
        assert _value(words, "--load-dir") == [model, "runs/run/checkpoints"] and "--lora-load" not in words
    assert _value(_flags("qwen3-30b-a3b", "sft_lora", {"zero": 1, "ep": 8}), "--spec") == ["mindspeed_llm.tasks.models.spec.qwen3_spec"] * 3
    words = _flags("qwen3-8b", "sft_lora", {"zero": 1})
    assert _value(words, "--load-dir") == ["qwen3-8b", "runs/run/weights"] and _value(words, "--lora-load") == ["runs/run/checkpoints"]


def test_moments_in_bfloat16_need_apex_before_the_last_profile() -> None:
    layout = {"zero": 1, "optim_dtype": "bfloat16"}
    for profile in ("2.2.0", "2.3.0"):
        assert _refused("qwen3-8b", "sft_full", layout, profile=profile) == [("layout.optim_dtype", "float32")]
    assert "--o2-optimizer" in _flags("qwen3-8b", "sft_full", layout, profile="master")


def test_the_layers_are_those_that_the_converters_write() -> None:
    for profile, value in (("2.2.0", []), ("2.3.0", []), ("master", ["local"])):
        assert _value(_flags("qwen3-8b", "sft_full", {"zero": 1, "ulysses": 2}, profile=profile), "--transformer-impl") == value


def test_nodes_share_the_index_of_the_data() -> None:
    recipe = make_recipe("qwen3-8b", "mindspeed_llm", cluster="4x8 snt9b")
    job = BACKENDS["mindspeed_llm"].render(make_job_plan(recipe, {"zero": 1}, 4))
    assert "--no-shared-storage" not in job.argv  # else a rank of every node would write the same files


@pytest.mark.parametrize("backend", ["llamafactory", "mindspeed_llm"])
def test_the_launcher_starts_a_job_again_as_often_as_the_recipe_says(backend: str) -> None:
    recipe = make_recipe("qwen2.5-7b", backend, cluster={"device": "snt9b", "nproc": 8, "restarts": 3})
    assert BACKENDS[backend].render(make_job_plan(recipe, {})).restarts == 3


@pytest.mark.parametrize("backend", ["mindspeed_mm", "mindspeed_rl"])
def test_the_newest_checkpoint_is_resumed(backend: str) -> None:
    job = _job(backend, None, None)
    assert job is not None
    start = json.loads(job.files["job/start.json"])
    assert "{load}" in job.argv and any("checkpoints" in word for word in start["resume"])
    assert not any("checkpoints" in word for word in start["fresh"])
