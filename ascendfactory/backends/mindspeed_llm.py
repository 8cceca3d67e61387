"""MindSpeed-LLM as a back end: data preparation, weights to Megatron, training, weights back, as one job.

Versions differ in models, converters and flags: each is a profile. What differs from the embedded engine and is not refused: the loss
is averaged over micro-batches, and long samples are cut at seq_len.
"""

from __future__ import annotations

from typing import Any, assert_never

from ascendfactory.backends.common import (
    Rule,
    absent_rules,
    check_options,
    data_rules,
    data_step,
    extra_rules,
    only,
    options,
    profile_of,
    profile_rule,
    program,
    refusals,
    schedule_rule,
)
from ascendfactory.backends.megatron import (
    Flags,
    adapter_flags,
    bf16_rules,
    environment,
    layout_flags,
    optimizer_flags,
    read_iteration,
    sharding_rules,
    split_of,
    start_facts,
    torchrun,
    words,
)
from ascendfactory.backends.megatron_models import FAMILIES, Family, family_of, model_flags
from ascendfactory.core.plan import Job, Layout, ModelCard, Plan, Refusal, Step, StepMetrics
from ascendfactory.core.recipe import Dapo, Dpo, Full, Grpo, Lora, Ppo, Pretrain, Recipe, Reward, Sft

NAME = "mindspeed_llm"
_DEEPSEEK_TOOL = "examples/mcore/deepseek3/convert_ckpt_deepseek3_mcore2hf.py"
PROFILES = ("2.2.0", "2.3.0", "master")  # the first is the default: it knows every model of the table
SOURCES = ["MindSpeed-LLM", "MindSpeed", "Megatron-LM"]
# Settings that are accepted and change nothing here, and why.
NO_EFFECT = {
    "checkpoint.asynchronous": "checkpoints are written while training waits",
    "checkpoint.keep": "it keeps every checkpoint",
    "data.workers": "a fixed number of processes tokenises",
    "data.cache_dir": "tokenised data lie in the run folder",
    "output.log_every": "every iteration is reported; the progress display thins them out",
}


class MindSpeedLlm:
    """Pre-training and fine-tuning, full and LoRA, of the models that MindSpeed-LLM has a layer specification for."""

    name = NAME

    def refuse(self, recipe: Recipe, card: ModelCard, layout: Layout) -> list[Refusal]:
        """Why MindSpeed-LLM cannot run the recipe under this layout; empty if it can."""
        profile, family = profile_of(recipe, PROFILES), family_of(card)
        rules = [profile_rule(recipe, PROFILES), *_objective_rules(recipe), *data_rules(recipe), *_setting_rules(recipe)]
        rules += [*_card_rules(card, family, profile), *_layout_rules(recipe, card, layout)]
        if family is not None and profile in PROFILES:
            rules += extra_rules(recipe, _set_by_us(recipe, card, layout), options(f"{NAME}-{profile}"))
        return refusals(NAME, rules)

    def render(self, plan: Plan) -> Job:
        """The job: data, weights to Megatron, training, weights back."""
        recipe, run = plan.recipe, plan.run_dir
        rewrite, spec = data_step(plan, "text" if isinstance(recipe.objective, Pretrain) else "conversations")
        files = {"job/data.json": spec, "job/train.py": program("megatron_train.py"), "job/start.json": _start(plan)}
        before = [rewrite, _tokenise_step(plan)]
        if recipe.model.init == "pretrained":
            before.append(_convert_step(plan))
        after = []
        if recipe.output.export:
            files["job/export.py"] = program("megatron_export.py")
            after.append(_export_step(plan))
        flags = train_flags(plan)
        entry = "pretrain_gpt.py" if isinstance(recipe.objective, Pretrain) else "posttrain_gpt.py"
        script = f"{{env}}/src/MindSpeed-LLM/{entry}"
        command = [*torchrun(plan), script, *words(flags), "{load}"]
        return Job(
            restarts=recipe.cluster.restarts,
            files=files,
            argv=["python", f"{run}/job/train.py", f"{run}/job/start.json", "--", *command],
            env=environment(plan, SOURCES),
            environment=_environment(recipe),
            nproc=plan.cluster.nproc,
            before=before,
            after=after,
        )

    def read_step(self, line: str, plan: Plan) -> StepMetrics | None:
        """The step of an `iteration N/M | ... |` line."""
        return read_iteration(line, plan)


def _environment(recipe: Recipe) -> str:
    return f"{NAME}-{profile_of(recipe, PROFILES)}"


def _objective_rules(recipe: Recipe) -> list[Rule]:
    match recipe.objective:
        case Pretrain():
            lora = isinstance(recipe.tuning, Lora)
            return [only(lora, "tuning", "full", "LoRA in pre-training", "LoRA 预训练")]
        case Sft(train_on=train_on):
            return [only(train_on != "assistant", "objective.train_on", "assistant", f"train_on {train_on}", f" train_on {train_on}")]
        case Dpo() | Reward():
            return [
                (
                    True,
                    "objective",
                    "no preference training here; write backend: llamafactory",
                    "此处不做偏好训练；请写 backend: llamafactory",
                    "sft",
                )
            ]
        case Grpo() | Dapo() | Ppo():
            return [(True, "objective", "no reinforcement learning; write backend: verl", "不做强化学习；请写 backend: verl", "sft")]
        case other:
            assert_never(other)


def _setting_rules(recipe: Recipe) -> list[Rule]:
    data, checkpoint, tuning = recipe.data, recipe.checkpoint, recipe.tuning
    rules = [
        only(
            isinstance(recipe.objective, Pretrain) and data.packing != "packed",
            "data.packing",
            "packed",
            "padded pre-training",
            "补齐式预训练",
        ),
        only(recipe.optim.schedule == "wsd", "optim.schedule", "cosine", "wsd schedule", " wsd 调度"),
        only(not data.shuffle, "data.shuffle", True, "fixed order of the samples", "固定样本顺序"),
        (checkpoint.every.unit == "tokens", "checkpoint.every", "write steps or epochs", "请写 steps 或 epochs", "500 steps"),
        (recipe.duration.unit == "tokens" and data.packing != "packed", "duration", "write steps or epochs", "请写 steps 或 epochs", None),
        *bf16_rules(recipe),
    ]
    if isinstance(tuning, Lora):
        rules += [
            only(tuning.dropout > 0, "tuning.dropout", 0.0, "dropout in adapters", "适配器 dropout"),
            only(tuning.rslora, "tuning.rslora", False, "rank-stabilised scaling", " rslora"),
            only(tuning.dora, "tuning.dora", False, "DoRA", " DoRA"),
            only(tuning.adapter is not None, "tuning.adapter", None, "going on from a peft adapter", "从 peft 适配器继续"),
            only(tuning.targets != ["all-linear"], "tuning.targets", ["all-linear"], "choice of layers", "层选择"),
            only(tuning.alpha != int(tuning.alpha), "tuning.alpha", 16.0, "fraction in alpha", "小数 alpha"),
            only(recipe.model.init == "random", "model.init", "pretrained", "adapters on random weights", "随机权重上的 LoRA"),
        ]
    return rules


def _card_rules(card: ModelCard, family: Family | None, profile: str) -> list[Rule]:
    if family is None or card.vision is not None:
        known = ", ".join(FAMILIES)
        return [
            (
                True,
                "model.path",
                f"no layer specification for {card.name}; it has {known}",
                f"没有 {card.name} 的层定义；已有 {known}",
                None,
            )
        ]
    newest = family.profiles[0]
    text, text_zh = (
        f"profile {profile} no longer has {card.name}; write profile: {newest}",
        f"配置 {profile} 已不含 {card.name}；请写 profile: {newest}",
    )
    return [(profile in PROFILES and profile not in family.profiles, "profile", text, text_zh, newest)]


def _layout_rules(recipe: Recipe, card: ModelCard, layout: Layout) -> list[Rule]:
    lora, moe = isinstance(recipe.tuning, Lora), card.moe is not None
    return [
        *sharding_rules(layout),
        *_pipeline_rules(recipe, card, layout),
        *absent_rules(recipe, layout, "in_backward"),
        only(layout.recompute == "selective", "layout.recompute", "auto", "selective recomputation", "选择性重计算"),
        only(
            layout.recompute == "norm" and layout.recompute_layers > 0,
            "layout.recompute_layers",
            "auto",
            "part of the layers here",
            "部分层",
        ),
        only(
            layout.offload_activations and lora, "layout.offload_activations", False, "swap-attention with LoRA", "LoRA 下的 swap-attention"
        ),
        only(
            layout.vpp > 1 and card.num_layers % (layout.pp * layout.vpp) != 0, "layout.vpp", 1, "uneven virtual chunks", "不均匀的虚拟流水"
        ),
        only(
            layout.tp > card.num_kv_heads and card.mla is None,
            "layout.tp",
            card.num_kv_heads,
            "tp above the key/value heads",
            "超过 KV 头数的 tp",
        ),
        only(
            moe and layout.tp > 1 and not layout.sp,
            "layout.sp",
            "auto",
            "experts under tp without sequence parallelism",
            "无序列并行的 tp 专家层",
        ),
        only(moe and lora and layout.tp > 1, "layout.tp", 1, "LoRA on experts under tp", "tp 下的专家 LoRA"),
        only(
            moe and not split_of(card, layout).extends and layout.dp * layout.cp % layout.ep != 0,
            "layout.ep",
            1,
            f"ep {layout.ep} here: it must be a multiple of tp, or divide dp x cp",
            f" ep {layout.ep}",
        ),
        only(
            layout.offload_optimizer and layout.reuse_params,
            "layout.reuse_params",
            False,
            "swap-optimizer with shared weights",
            "swap-optimizer 与参数副本复用同用",
        ),
        only(
            layout.offload_optimizer and layout.shard == 1,
            "layout.offload_optimizer",
            False,
            "swap-optimizer without dp",
            "无 dp 的 swap-optimizer",
        ),
        only(
            layout.ring > 1 and recipe.data.seq_len % (2 * layout.cp) != 0,
            "layout.ring",
            1,
            "ring over such seq_len",
            "该 seq_len 的环形并行",
        ),
    ]


def _pipeline_rules(recipe: Recipe, card: ModelCard, layout: Layout) -> list[Rule]:
    """Orders of micro-batches, uneven stages and what hides in the gaps, within what its validation and converters allow."""
    sizes, family, lora = layout.stage_layers, family_of(card), isinstance(recipe.tuning, Lora)
    is_v, extends = layout.schedule == "dualpipev", card.moe is not None and split_of(card, layout).extends
    dense = card.moe.first_dense_layers if card.moe else 0
    chunked, chunks = layout.overlap_chunks > 1, layout.overlap_chunks
    in_advance = layout.vpp > 1 and layout.recompute == "full" and layout.recompute_layers > 0
    return [
        schedule_rule(layout, "1f1b", *(("interleaved", "dualpipev") if layout.vpp > 1 else ())),
        only(
            dense > 0 and layout.pp > 1 and card.num_layers // layout.pp <= dense,
            "layout.pp",
            card.num_layers // (dense + 1),
            f"stage of dense layers alone, which are the first {dense}",
            f"只含稠密层（前 {dense} 层）的流水级",
        ),
        only(is_v and lora, "layout.schedule", "auto", "LoRA under dualpipev", "dualpipev 下的 LoRA"),
        only(is_v and card.tied_embeddings, "layout.schedule", "auto", "tied embeddings under dualpipev", "dualpipev 下的共享词嵌入"),
        only(is_v and layout.cp > 1, "layout.schedule", "auto", "context parallelism under dualpipev", "dualpipev 下的上下文并行"),
        only(
            is_v and layout.offload_activations,
            "layout.offload_activations",
            False,
            "swap-attention under dualpipev",
            "dualpipev 下的 swap-attention",
        ),
        only(is_v and layout.tp > 1 and not extends, "layout.tp", 1, "tp under dualpipev that cuts layers", "dualpipev 下切分层的 tp"),
        only(
            is_v and (family is None or not family.model_type_v2),
            "layout.schedule",
            "auto",
            "converter of this model for dualpipev",
            "该模型的 dualpipev 权重转换",
        ),
        only(
            bool(sizes) and (layout.vpp > 1 or 0 in sizes),
            "layout.stage_layers",
            "auto",
            "such virtual or empty stages",
            "这样的虚拟或空流水级",
        ),
        only(chunked and lora, "layout.overlap_chunks", 1, "CoC with LoRA", "CoC 与 LoRA 同用"),
        only(chunked and card.moe is not None, "layout.overlap_chunks", 1, "CoC with experts", "CoC 与专家层同用"),
        only(chunked and chunks not in (2, 4, 8), "layout.overlap_chunks", 4, f"CoC in {chunks} pieces", f" {chunks} 块的 CoC"),
        only(
            layout.recompute_in_advance and not (in_advance and split_of(card, layout).layers_per_chunk == 1),
            "layout.recompute_in_advance",
            False,
            "recomputation in advance but with recompute full of the first layers and one layer a virtual chunk",
            "此处的提前重计算（仅限 full、前若干层、每个虚拟块一层）",
        ),
    ]


def _set_by_us(recipe: Recipe, card: ModelCard, layout: Layout) -> set[str]:
    return {
        *model_flags(card),
        *_training_flags(recipe, card),
        *layout_flags(recipe, card, layout),
        "load",
        "save",
        "data-path",
        "train-iters",
    }


def train_flags(plan: Plan) -> Flags:
    """Every flag of the trainer but those of loading, which depend on whether there is a checkpoint.

    Raises:
        ValueError: a flag that the profile's own parser would refuse.
    """
    recipe, card = plan.recipe, plan.card
    flags = model_flags(card) | _training_flags(recipe, card) | layout_flags(recipe, card, plan.layout)
    if plan.layout.cp > 1 and recipe.data.packing == "packed":
        flags["attention-mask-type"] = "general"  # the causal one does not know documents under Ulysses
    flags |= {
        "micro-batch-size": plan.layout.micro_size,
        "bf16": plan.dtype == "bfloat16",
        "tokenizer-name-or-path": recipe.model.path,
        "data-path": _data_prefix(plan),
        "train-iters": "{train_iters}",
        "save-interval": "{save_interval}",
        "save": f"{plan.run_dir}/checkpoints",
    }
    flags |= recipe.extra
    known = options(_environment(recipe))
    flags = {name: value for name, value in flags.items() if value is not False and value is not None}
    check = {name: value for name, value in flags.items() if not (isinstance(value, str) and value.startswith("{"))}
    _stop_if_wrong(check, known)
    return flags


def _stop_if_wrong(flags: Flags, known: dict[str, Any]) -> None:
    wrong = []
    for name, value in flags.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        for item in values:
            wrong += [f"--{key}: {en}" for key, en, _ in check_options({name: item}, known)]
    if wrong:
        raise ValueError("; ".join(wrong))


def _training_flags(recipe: Recipe, card: ModelCard) -> Flags:
    seq_len = recipe.data.seq_len
    flags: Flags = {
        "global-batch-size": recipe.batch.global_size,
        "seq-length": seq_len,
        "max-position-embeddings": max(seq_len, card.max_seq_len) if card.mla is not None else seq_len,
        **optimizer_flags(recipe),
        "initial-loss-scale": 4096,
        "split": "100,0,0",
        "log-interval": 1,
        "eval-interval": 1000000,
        "eval-iters": 0,
        "log-throughput": True,
        "exit-signal-handler": True,
        "no-shared-storage": recipe.cluster.nodes > 1,
    }
    flags |= _objective_flags(recipe, card)
    if isinstance(recipe.tuning, Lora):
        flags |= adapter_flags(recipe.tuning) | {"lora-fusion": card.moe is None, "moe-grouped-gemm": _groups_experts(recipe, card)}
    return flags


def _groups_experts(recipe: Recipe, card: ModelCard) -> bool:
    """Whether a device's experts are one matrix. Before master the converters cannot merge adapters of such ones."""
    return card.moe is not None and (not isinstance(recipe.tuning, Lora) or profile_of(recipe, PROFILES) == "master")


def _objective_flags(recipe: Recipe, card: ModelCard) -> Flags:
    family, packed = family_of(card), recipe.data.packing == "packed"
    assert family is not None
    # Packed documents end with EOD; reset there, they cannot see each other. 2.2.0 knows it by the position ids alone.
    reset: Flags = {"reset-position-ids": True, "reset-attention-mask": profile_of(recipe, PROFILES) != "2.2.0"}
    if isinstance(recipe.objective, Pretrain):
        return reset
    flags: Flags = {"stage": "sft", "is-instruction-dataset": True, "prompt-type": family.prompt}
    if packed:
        return flags | reset | {"neat-pack": True, "padded-samples": True}
    return flags | (
        {"no-pad-to-seq-lengths" if profile_of(recipe, PROFILES) == "master" else "variable-seq-lengths": True}
        if recipe.data.packing == "dynamic"
        else {}
    )


def _data_prefix(plan: Plan) -> str:
    return f"{plan.run_dir}/tokens/data" + ("_text_document" if isinstance(plan.recipe.objective, Pretrain) else "")


def _start(plan: Plan) -> str:
    """What the starting program must know: see programs/megatron_train.py."""
    recipe, run = plan.recipe, plan.run_dir
    weights = ["--load", f"{run}/weights"] if recipe.model.init == "pretrained" else []
    fresh = [*weights, "--finetune", "--no-load-optim", "--no-load-rng"] if weights else []
    lora = isinstance(recipe.tuning, Lora)
    resume = [*weights, "--lora-load", f"{run}/checkpoints"] if lora else ["--load", f"{run}/checkpoints"]
    pretrain = isinstance(recipe.objective, Pretrain)
    return start_facts(
        plan,
        fresh,
        resume,
        global_size=recipe.batch.global_size,
        seq_len=recipe.data.seq_len,
        rows="tokens" if pretrain else "sequences",
        index=f"{_data_prefix(plan)}.idx" if pretrain else f"{_data_prefix(plan)}_packed_input_ids_document.idx",
    )


def _tool_step(plan: Plan, name: str, tool: str, flags: Flags, inputs: list[str], output: str, wrapper: list[str]) -> Step:
    """A step that runs one of MindSpeed-LLM's own tools, checked against that tool's options.

    Raises:
        ValueError: an option that the tool would refuse or silently ignore.
    """
    known = options(f"{NAME}_tools-{profile_of(plan.recipe, PROFILES)}")[tool]
    given = {name: value for name, value in flags.items() if value is not False and value is not None}
    _stop_if_wrong(given, known)
    argv = [*wrapper, "python", f"{{env}}/src/MindSpeed-LLM/{tool}", *words(given)]
    return Step(name=name, argv=argv, env=environment(plan, SOURCES), environment=_environment(plan.recipe), inputs=inputs, output=output)


def _tokenise_step(plan: Plan) -> Step:
    recipe, run, family = plan.recipe, plan.run_dir, family_of(plan.card)
    assert family is not None
    flags: Flags = {
        "input": f"{run}/data/train.jsonl",
        "tokenizer-type": "PretrainedFromHF",
        "tokenizer-name-or-path": recipe.model.path,
        "output-prefix": f"{run}/tokens/data",
        "workers": 8,
        "log-interval": 1000,
        "seq-length": recipe.data.seq_len,
    }
    if isinstance(recipe.objective, Pretrain):
        flags |= {"handler-name": "GeneralPretrainHandler", "json-keys": ["text"], "append-eod": True}
    else:
        packed = recipe.data.packing == "packed"
        flags |= {"handler-name": "SharegptStyleInstructionHandler", "prompt-type": family.prompt, "pack": packed, "neat-pack": packed}
    return _tool_step(plan, "tokenise", "preprocess_data.py", flags, [f"{run}/data", recipe.model.path], f"{run}/tokens", [])


def _uses_v2(plan: Plan) -> bool:
    """The newer converter, where it knows the family and can do what is asked (adapters only on master)."""
    family, profile = family_of(plan.card), profile_of(plan.recipe, PROFILES)
    assert family is not None
    if not family.model_type:
        return True
    return bool(family.model_type_v2) and (profile == "master" or not isinstance(plan.recipe.tuning, Lora))


def _convert_flags(plan: Plan, back: bool) -> tuple[str, Flags]:
    """The converter and its flags, in one direction."""
    card, family = plan.card, family_of(plan.card)
    assert family is not None
    split, experts, v2 = split_of(card, plan.layout), card.moe is not None, _uses_v2(plan)
    flags: Flags = {"load-model-type": "mg" if back else "hf", "save-model-type": "hf" if back else "mg"}
    flags |= {"model-type-hf": family.model_type_v2 if v2 else family.model_type}
    flags["moe-grouped-gemm"] = _groups_experts(plan.recipe, card)
    if v2 and back:  # the cut is read from the checkpoint, but for the shape of the schedule
        flags["schedules-method"] = "dualpipev" if split.v_shaped else None
        flags["hf-cfg-dir"] = plan.recipe.model.path if profile_of(plan.recipe, PROFILES) == "master" else None
        return "convert_ckpt_v2.py", flags
    # the old converter writes Hugging Face weights as one part, and reads the cut of what it loads from the checkpoint
    flags |= (split_of(card, Layout()) if back else split).convert_flags(experts)
    if v2:
        if experts:
            flags["expert-tensor-parallel-size"] = split.tp
            if card.moe is not None and card.moe.first_dense_layers:
                flags |= {"first-k-dense-replace": card.moe.first_dense_layers, "num-layers": card.num_layers}
        return "convert_ckpt_v2.py", flags
    flags |= {"use-mcore-models": True, "model-type": "GPT", "params-dtype": "bf16", **family.convert}
    return "convert_ckpt.py", flags


def _deepseek_flags(plan: Plan) -> Flags:
    """Of DeepSeek-V3's own converter, which spells the same split differently."""
    card, split = plan.card, split_of(plan.card, plan.layout)
    assert card.moe is not None
    flags = {name.replace("target-", "source-"): value for name, value in split.convert_flags(True).items()}
    return flags | {"num-layers": card.num_layers, "first-k-dense-replace": card.moe.first_dense_layers}


def _convert_step(plan: Plan) -> Step:
    path, output = plan.recipe.model.path, f"{plan.run_dir}/weights"
    tool, flags = _convert_flags(plan, back=False)
    flags |= {"load-dir": path, "save-dir": output}
    if tool == "convert_ckpt.py":
        flags["tokenizer-model"] = f"{path}/tokenizer.json"
    return _tool_step(plan, "convert", tool, flags, [path], output, [])


def _export_step(plan: Plan) -> Step:
    run, tuning = plan.run_dir, plan.recipe.tuning
    tool, flags = _convert_flags(plan, back=True)
    if isinstance(tuning, Lora) and tool == "convert_ckpt_v2.py" and profile_of(plan.recipe, PROFILES) != "master":
        tool, flags = _DEEPSEEK_TOOL, _deepseek_flags(plan)  # the newer converter has no adapters before master
    match tuning:
        case Full():
            flags |= {"load-dir": f"{run}/checkpoints"}
        case Lora():
            flags |= {"load-dir": f"{run}/weights", "lora-load": f"{run}/checkpoints", **adapter_flags(tuning)}
        case other:
            assert_never(other)
    flags["save-dir"] = "{target}"
    wrapper = ["python", f"{run}/job/export.py", plan.recipe.model.path, f"{run}/export", "--"]
    inputs = [f"{run}/checkpoints/latest_checkpointed_iteration.txt"]
    return _tool_step(plan, "export", tool, flags, inputs, f"{run}/export", wrapper)
