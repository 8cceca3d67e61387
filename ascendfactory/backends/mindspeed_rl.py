"""MindSpeed-RL as a back end: GRPO of a few models. Upstream is frozen at 2.2.0 to 2.3.0: a legacy profile, verl is the way on."""

from __future__ import annotations

import json
import re

import yaml

from ascendfactory.backends.common import (
    Rule,
    absent_rules,
    data_rules,
    data_step,
    degree_rules,
    only,
    profile_rule,
    program,
    refusals,
    schedule_rule,
)
from ascendfactory.backends.megatron import (
    Flags,
    bf16_rules,
    environment,
    lean_rules,
    sharding_rules,
    split_of,
    start_facts,
    step_rules,
    words,
)
from ascendfactory.backends.megatron_models import FAMILIES, family_of
from ascendfactory.backends.mindspeed_mm_config import convert_words, file_rules, series, stage_rules
from ascendfactory.backends.mindspeed_rl_config import config, image_model
from ascendfactory.backends.rl import on_ray, prompt_tokens, rl_rules
from ascendfactory.core.plan import Job, Layout, ModelCard, Plan, Refusal, Step, StepMetrics
from ascendfactory.core.recipe import Grpo, Lora, Recipe

NAME = "mindspeed_rl"
PROFILES = ("2.2.0", "2.2.0-mm")  # for models of text; for those that see images, with MindSpeed-MM
SOURCES = {
    "2.2.0": ["MindSpeed-RL", "MindSpeed", "MindSpeed-LLM", "Megatron-LM"],
    "2.2.0-mm": ["MindSpeed-MM", "MindSpeed-RL", "MindSpeed", "Megatron-LM"],
}
# Settings that are accepted and change nothing here, and why.
NO_EFFECT = {
    "checkpoint.asynchronous": "checkpoints are written while training waits",
    "checkpoint.keep": "it keeps every checkpoint",
    "data.packing": "prompts are not packed",
    "data.workers": "a fixed number of processes tokenises",
    "data.cache_dir": "tokenised prompts lie in the run folder",
    "output.log_every": "every iteration is reported; the progress display thins them out",
}
_FAMILIES = ("qwen2.5", "qwen3", "qwen3_moe")
_NAMES = ", ".join((*_FAMILIES, "qwen2.5-vl"))


class MindSpeedRl:
    """GRPO through MindSpeed-RL."""

    name = NAME

    def refuse(self, recipe: Recipe, card: ModelCard, layout: Layout) -> list[Refusal]:
        """Why MindSpeed-RL cannot run the recipe under this layout; empty if it can."""
        rules: list[Rule] = [
            profile_rule(recipe, [_profile(card)]),
            (
                not isinstance(recipe.objective, Grpo),
                "objective",
                "only grpo here; for others write backend: verl",
                "仅支持 grpo；其他请写 backend: verl",
                "grpo",
            ),
            (
                not _is_known(card),
                "model.path",
                f"no configuration for {card.name}; it has {_NAMES}; for others write backend: verl",
                f"没有 {card.name} 的配置；已有 {_NAMES}；其他请写 backend: verl",
                None,
            ),
            only(isinstance(recipe.tuning, Lora), "tuning", "full", "LoRA", " LoRA"),
            (
                bool(recipe.extra),
                "extra",
                "options of your own are not checked here; leave extra out",
                "不支持自定义选项；请删去 extra",
                {},
            ),
            *data_rules(recipe),
            *rl_rules(recipe),
            *_objective_rules(recipe),
            *_setting_rules(recipe),
            *_layout_rules(recipe, layout),
            *(_text_rules(card, layout) if card.vision is None else _image_rules(recipe, card, layout)),
        ]
        return refusals(NAME, rules)

    def render(self, plan: Plan) -> Job:
        """The job: data, prompts tokenised, weights to Megatron, training under Ray, weights back."""
        recipe, run, sees = plan.recipe, plan.run_dir, plan.card.vision is not None
        before, files = _image_steps(plan) if sees else _text_steps(plan)
        files |= {
            "job/grpo.yaml": yaml.safe_dump(config(plan), sort_keys=False),
            "job/train.py": program("megatron_train.py"),
            "job/start.json": start_facts(plan, [], _resumed(run)),
        }
        trainer = "MindSpeed-MM/posttrain_vlm_grpo.py" if sees else "MindSpeed-RL/cli/train_grpo.py"
        command = ["python", f"{{env}}/src/{trainer}", "--config-dir", f"{run}/job", "--config-name", "grpo"]
        argv, more = on_ray(plan, ["python", f"{run}/job/train.py", f"{run}/job/start.json", "--", *command, "{load}"])
        after = []
        if recipe.output.export:
            files |= {} if sees else {"job/export.py": program("megatron_export.py")}
            after.append(_export_step(plan))
        return Job(
            restarts=recipe.cluster.restarts,
            files=files | more,
            argv=argv,
            env=_variables(plan),
            environment=_environment(plan),
            nproc=1,
            before=before,
            after=after,
        )

    def read_step(self, line: str, plan: Plan) -> StepMetrics | None:
        """The step of an `iteration: N / M | name : value | ...` line."""
        return read_line(line, plan)


def _is_known(card: ModelCard) -> bool:
    if card.vision is not None:
        return series(card) == "qwen2.5vl"
    return family_of(card) in [FAMILIES[name] for name in _FAMILIES]


def _profile(card: ModelCard) -> str:
    return PROFILES[card.vision is not None]


def _environment(plan: Plan) -> str:
    return f"{NAME}-{_profile(plan.card)}"


def _resumed(run: str) -> list[str]:
    """Overrides that go on from the newest checkpoint instead of the converted weights."""
    values = {"load": f"{run}/checkpoints", "finetune": "false", "no_load_optim": "false", "no_load_rng": "false"}
    return [f"actor_config.{name}={value}" for name, value in values.items()]


def _objective_rules(recipe: Recipe) -> list[Rule]:
    objective = recipe.objective
    if not isinstance(objective, Grpo):
        return []
    return [
        only(objective.reward != "auto", "objective.reward", "auto", "reward function of your own", "自定义奖励函数"),
        only(objective.off_policy_steps > 0, "objective.off_policy_steps", 0, "generation on devices of its own", "生成使用独立设备"),
        (
            objective.multi_turn is not None,
            "objective.multi_turn",
            "no calls of tools; leave multi_turn out, or write backend: verl",
            "不支持工具调用；请删去 multi_turn，或写 backend: verl",
            None,
        ),
        only(objective.kl_coef == 0, "objective.kl_coef", 0.001, "training without a reference model", "无参考模型的训练"),
        only(
            objective.clip_low != objective.clip_high,
            "objective.clip_high",
            objective.clip_low,
            "clip range of two sides under grpo",
            "grpo 的双侧裁剪区间",
        ),
    ]


def _setting_rules(recipe: Recipe) -> list[Rule]:
    optim = recipe.optim
    return [
        *bf16_rules(recipe),
        *step_rules(recipe, "500 steps"),
        only(optim.schedule == "wsd", "optim.schedule", "constant", "wsd schedule", " wsd 调度"),
        only(
            optim.warmup.unit == "steps" and optim.warmup.amount > 0,
            "optim.warmup",
            0.0,
            "warm-up in steps; write a fraction",
            "按步预热（请写比例）",
        ),
        only(optim.eps != 1e-8, "optim.eps", 1e-8, "choice of eps", " eps 选择"),
    ]


def _layout_rules(recipe: Recipe, layout: Layout) -> list[Rule]:
    return [
        *sharding_rules(layout),
        schedule_rule(layout, "1f1b", *(("interleaved",) if layout.vpp > 1 else ())),
        *absent_rules(recipe, layout, "overlap_chunks", "recompute_in_advance", "in_backward"),
        *lean_rules(layout),
        only(
            recipe.batch.global_size % max(layout.dp, 1) != 0,
            "batch.global_size",
            layout.dp * 4,
            "batch that dp does not divide",
            "dp 不能整除的批",
        ),
    ]


def _text_rules(card: ModelCard, layout: Layout) -> list[Rule]:
    uneven = card.num_layers % (layout.pp * layout.vpp) != 0
    bare = card.moe is not None and layout.tp > 1 and not layout.sp
    return [
        only(bool(layout.stage_layers), "layout.stage_layers", "auto", "choice of each stage's layers", "逐级指定层数"),
        only(layout.ring > 1 and layout.ulysses > 1, "layout.ring", 1, "hybrid context parallelism", "混合上下文并行"),
        only(uneven, "layout.pp", 1, "uneven stages", "不均匀的流水线"),
        only(layout.tp > card.num_kv_heads, "layout.tp", card.num_kv_heads, "tp above the key/value heads", "超过 KV 头数的 tp"),
        only(bare, "layout.sp", "auto", "experts under tp without sp", "无序列并行的专家层"),
    ]


def _image_rules(recipe: Recipe, card: ModelCard, layout: Layout) -> list[Rule]:
    """Rows with images are packed to their exact length, which nothing cuts."""
    return [
        *file_rules(recipe),
        only(layout.tp > 1 and layout.sp, "layout.sp", False, "sequence parallelism with images", "含图像时的序列并行"),
        *degree_rules(layout, ("ring", "ulysses", "vpp", "ep")),
        *stage_rules(card, layout),
    ]


def _variables(plan: Plan) -> dict[str, str]:
    env = environment(plan, SOURCES[_profile(plan.card)])
    if plan.card.vision is not None:
        env["IS_MULTIMODAL"] = "True"
    return env | {"HYDRA_FULL_ERROR": "1", "VLLM_USE_V1": "1", "VLLM_VERSION": "0.9.1", "RAY_DEDUP_LOGS": "0", "HCCL_EXEC_TIMEOUT": "3600"}


def _step(plan: Plan, name: str, argv: list[str], inputs: list[str], output: str) -> Step:
    env = environment(plan, SOURCES[_profile(plan.card)])
    return Step(name=name, argv=argv, env=env, environment=_environment(plan), inputs=inputs, output=output)


def _text_steps(plan: Plan) -> tuple[list[Step], dict[str, str]]:
    """The steps before the training, and the files that they need."""
    rewrite, spec = data_step(plan, "question_answer")
    convert = _step(plan, "convert", _tool(plan, back=False), [plan.recipe.model.path], f"{plan.run_dir}/weights")
    return [rewrite, _tokenise_step(plan), convert], {"job/data.json": spec}


def _image_steps(plan: Plan) -> tuple[list[Step], dict[str, str]]:
    """The steps before the training, and the files that they need."""
    run, model, source = plan.run_dir, plan.recipe.model.path, plan.recipe.data.train[0]
    spec = {"path": source.path, "columns": source.columns, "model": model, "prompt_tokens": prompt_tokens(plan.recipe)}
    files = {
        "job/data.json": json.dumps(spec, ensure_ascii=False, indent=2) + "\n",
        "job/images.py": program("mindspeed_images.py"),
        "job/model.json": json.dumps(image_model(plan), indent=2) + "\n",
    }
    argv = ["python", f"{run}/job/images.py", f"{run}/job/data.json", f"{run}/data"]
    data = _step(plan, "data", argv, [f"{run}/job/data.json", source.path, model], f"{run}/data")
    return [data, _step(plan, "convert", convert_words(plan, back=False), [model], f"{run}/weights")], files


def _tokenise_step(plan: Plan) -> Step:
    run, model = plan.run_dir, plan.recipe.model.path
    settings = {
        "input": f"{run}/data/train.jsonl",
        "tokenizer_name_or_path": model,
        "output_prefix": f"{run}/tokens/data",
        "seq_length": prompt_tokens(plan.recipe),
    }
    # every path is put under the current folder: the tool would take a relative one from its own
    argv = ["python", "{env}/src/MindSpeed-RL/cli/preprocess_data.py", "deepscaler"]
    argv += [f"{'++' if key == 'seq_length' else ''}{key}={value}" for key, value in settings.items()]
    return _step(plan, "tokenise", argv, [f"{run}/data", model], f"{run}/tokens")


def _tool(plan: Plan, back: bool) -> list[str]:
    card, family = plan.card, family_of(plan.card)
    assert family is not None
    flags: Flags = {"use-mcore-models": True, "model-type": "GPT", "model-type-hf": family.model_type, "params-dtype": "bf16"}
    flags |= {"load-model-type": "mg" if back else "hf", "save-model-type": "hf" if back else "mg", **family.convert}
    flags |= split_of(card, Layout() if back else plan.layout).convert_flags(card.moe is not None)
    flags["moe-grouped-gemm"] = card.moe is not None
    model, run = plan.recipe.model.path, plan.run_dir
    if back:
        flags |= {"load-dir": f"{run}/checkpoints", "save-dir": "{target}"}
    else:
        flags |= {"load-dir": model, "save-dir": f"{run}/weights", "tokenizer-model": f"{model}/tokenizer.json"}
    return ["python", "{env}/src/MindSpeed-LLM/convert_ckpt.py", *words(flags)]


def _export_step(plan: Plan) -> Step:
    run = plan.run_dir
    if plan.card.vision is not None:
        argv = convert_words(plan, back=True)
    else:
        argv = ["python", f"{run}/job/export.py", plan.recipe.model.path, f"{run}/export", "--", *_tool(plan, back=True)]
    return _step(plan, "export", argv, [f"{run}/checkpoints/latest_checkpointed_iteration.txt"], f"{run}/export")


_ITERATION = re.compile(r"iteration:\s*(\d+)\s*/\s*(\d+)\s*\|")
_PAIR = re.compile(r"([\w/]+)\s:\s([-+]?(?:\d[\d.eE+\-]*|nan|inf))")


def read_line(line: str, plan: Plan) -> StepMetrics | None:
    """The step of one of its metric lines; throughput there is `tps`, tokens a second and device."""
    if not (found := _ITERATION.search(line)):
        return None
    values = {name: float(value) for name, value in _PAIR.findall(line[found.end() :])}

    def number(*parts: str) -> float:
        return next((value for part in parts for name, value in values.items() if part in name), 0.0)

    if not values:
        return None
    step_s = number("timing/all", "e2e_time", "all_time")
    per_device = number("e2e_tps", "tps")
    return StepMetrics(
        step=int(found[1]),
        num_steps=int(found[2]),
        loss=number("actor/pg_loss", "pg_loss", "loss"),
        lr=number("lr"),
        grad_norm=number("grad_norm"),
        label_tokens=0,
        tokens=int(per_device * step_s * plan.cluster.num_devices),
        epoch=0.0,
        step_s=step_s,
        tokens_per_s=per_device * plan.cluster.num_devices,
        reward=number("rewards/mean", "score/mean", "reward"),
        response_tokens=number("response_length/mean", "response_length"),
    )
