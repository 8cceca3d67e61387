"""MindSpeed-LLM as a back end: data preparation, weights to Megatron, training, weights back, as one job.

Versions differ in models, converters and flags: each is a profile. What differs from the embedded engine and is not refused: the loss
is averaged over micro-batches, and long samples are cut at seq_len.
"""

from __future__ import annotations

from typing import Any, assert_never

from ascendfactory.backends.common import (
    check_options,
    data_rules,
    data_step,
    extra_rules,
    options,
    profile_of,
    profile_rule,
    program,
    refusals,
)
from ascendfactory.backends.megatron import (
    Flags,
    adapter_flags,
    environment,
    layout_flags,
    optimizer_flags,
    read_iteration,
    split_of,
    start_facts,
    torchrun,
    words,
)
from ascendfactory.backends.megatron_models import ALL, family_of, model_flags, uses_v2
from ascendfactory.backends.mindspeed_llm_rules import card_rules, layout_rules, objective_rules, setting_rules
from ascendfactory.core.plan import Job, Layout, ModelCard, Plan, Refusal, Step, StepMetrics
from ascendfactory.core.recipe import Full, Lora, Pretrain, Recipe

NAME = "mindspeed_llm"
_DEEPSEEK_TOOL = "examples/mcore/deepseek3/convert_ckpt_deepseek3_mcore2hf.py"
PROFILES = ALL  # the first is the default: it knows every model of the table
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
        rules = [profile_rule(recipe, PROFILES), *objective_rules(recipe), *data_rules(recipe), *setting_rules(recipe)]
        rules += [*card_rules(card, family, profile), *layout_rules(recipe, card, layout)]
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
        # the layers that its converters write; before master there are no others
        "transformer-impl": "local" if profile_of(recipe, PROFILES) == "master" else None,
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


def _convert_flags(plan: Plan, back: bool) -> tuple[str, Flags]:
    """The converter and its flags, in one direction."""
    card, family = plan.card, family_of(plan.card)
    assert family is not None
    split, experts, v2 = split_of(card, plan.layout), card.moe is not None, uses_v2(plan.recipe, family)
    flags: Flags = {"load-model-type": "mg" if back else "hf", "save-model-type": "hf" if back else "mg"}
    flags |= {"model-type-hf": family.model_type_v2 if v2 else family.model_type}
    flags["moe-grouped-gemm"] = _groups_experts(plan.recipe, card)
    extends: Flags = {"moe-tp-extend-ep": experts and split.extends}
    if v2 and back:  # the cut is read from the checkpoint, but for the shape of the schedule and where experts lie
        flags |= {"schedules-method": "dualpipev" if split.v_shaped else None} | extends
        flags["hf-cfg-dir"] = plan.recipe.model.path if profile_of(plan.recipe, PROFILES) == "master" else None
        return "convert_ckpt_v2.py", flags
    # the old converter writes Hugging Face weights as one part, and reads the same from the checkpoint
    flags |= (split_of(card, Layout()) if back else split).convert_flags(experts) | extends
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
            # Its checkpoints hold the weights too. The older converter has to load those: it takes the way of sending tokens to
            # experts from what it loads, and there is only one that has adapters.
            whole = tool == "convert_ckpt.py" and plan.card.moe is not None
            folders = {"load-dir": f"{run}/checkpoints"} if whole else {"load-dir": f"{run}/weights", "lora-load": f"{run}/checkpoints"}
            flags |= folders | adapter_flags(tuning)
        case other:
            assert_never(other)
    flags["save-dir"] = "{target}"
    wrapper = ["python", f"{run}/job/export.py", plan.recipe.model.path, f"{run}/export", "--"]
    inputs = [f"{run}/checkpoints/latest_checkpointed_iteration.txt"]
    return _tool_step(plan, "export", tool, flags, inputs, f"{run}/export", wrapper)
