"""The recipe: what a person writes, the same for every stage and every back end.

Every field has a default except `model` and `data`; every group has a short form
(`objective: sft`, `tuning: lora`, `duration: 3 epochs`, `cluster: 2x8 snt9b`).
Counts carry no unit; everything else does, in its name or in its text.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A group of settings: strict (unknown keys are errors, no silent casts) and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


def short_form(key: str) -> BeforeValidator:
    """Accepts a bare value where a mapping is expected: `x` stands for `{key: x}`."""

    def expand(value: Any) -> Any:
        return {key: value} if isinstance(value, (str, int, float)) else value

    return BeforeValidator(expand)


def _as_list(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Model(Section):
    """Which model is trained, and how it starts."""

    path: str = Field(description="a Hugging Face folder, or the name of a model in the catalogue")
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="read the folder's weights, or draw new ones from its config.json (pre-training from scratch)"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="compute dtype; auto takes bfloat16 where the device has units for it, else float32"
    )


class Pretrain(Section):
    """Next-token prediction on every token of the text."""

    kind: Literal["pretrain"] = "pretrain"


class Sft(Section):
    """Supervised fine-tuning on the assistant's answers."""

    kind: Literal["sft"] = "sft"
    train_on: Literal["assistant", "last", "all"] = Field(
        "assistant", description="which tokens are trained: every assistant turn, only the last one, or all tokens"
    )


class Dpo(Section):
    """Direct preference optimisation."""

    kind: Literal["dpo"] = "dpo"


class Reward(Section):
    """Reward model from preference pairs."""

    kind: Literal["reward"] = "reward"


TOOLS_FILE, REWARD_FUNCTION = r"\.(py|ya?ml)$", r"^(auto|.+\.py:[A-Za-z_]\w*)$"


class MultiTurn(Section):
    """Answers that call tools, read what the tools return, and go on: agents."""

    tools: str = Field(
        pattern=TOOLS_FILE, description="a Python file whose functions are the tools, or a YAML file that names classes of tools"
    )
    max_turns: PositiveInt = Field(5, description="the model speaks at most so often in one conversation")


# What settings mean whose defaults differ between objectives.
_CLIP_HIGH = "new/old probability of a token counts up to 1 + clip_high (clip-higher, arXiv:2503.14476)"
_KL_COEF = "weight of the divergence from the model at the start (in ppo's reward, in the others' loss); 0 = none is kept"
_KL_KIND = "estimate of the divergence: k1 log-ratio, k2 half its square, k3 ratio - 1 - log-ratio (joschu.net/blog/kl-approx)"
_NUM_ANSWERS = "answers drawn for each prompt"


class PolicyGradient(Section):
    """What the reinforcement-learning objectives share: answers are drawn, rewarded, and made more or less likely."""

    num_answers: PositiveInt = Field(8, description=_NUM_ANSWERS)
    max_prompt_tokens: PositiveInt | Literal["auto"] = Field(
        "auto", description="longest prompt; the answer has the rest of data.seq_len; auto = a quarter of it"
    )
    temperature: Annotated[float, Field(gt=0)] = Field(1.0, description="of the answers that are drawn; 1 = as the model is trained")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="tokens are drawn from the likeliest that make up this probability")
    clip_low: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="new/old probability of a token counts down to 1 - clip_low (PPO's epsilon, arXiv:1707.06347)"
    )
    clip_high: Annotated[float, Field(gt=0)] = Field(0.2, description=_CLIP_HIGH)
    kl_coef: Annotated[float, Field(ge=0)] = Field(0.0, description=_KL_COEF)
    kl_kind: Literal["k1", "k2", "k3"] = Field("k3", description=_KL_KIND)
    entropy_coef: Annotated[float, Field(ge=0)] = Field(0.0, description="weight of the entropy bonus in the loss")
    reward: str = Field(
        "auto",
        pattern=REWARD_FUNCTION,
        description="auto = the engine's own rule for the record's data_source; or file.py:function, a function of your own",
    )
    off_policy_steps: Literal[0, 1] = Field(
        0, description="0: devices generate and train by turns; 1: some only generate, for the next step, while the others train"
    )
    multi_turn: Annotated[MultiTurn | None, short_form("tools")] = Field(
        None, description="tools that answers may call; short form: the file of tools"
    )

    def prompt_tokens(self, seq_len: int) -> int:
        """Tokens that a prompt may fill in a row of `seq_len` tokens; the answer has the rest."""
        return seq_len // 4 if self.max_prompt_tokens == "auto" else self.max_prompt_tokens

    def own_files(self) -> list[tuple[str, str]]:
        """(recipe key, path) of the person's own code that a run reads."""
        tools = [("objective.multi_turn.tools", self.multi_turn.tools)] if self.multi_turn else []
        return [*([] if self.reward == "auto" else [("objective.reward", self.reward.rpartition(":")[0])]), *tools]


class Grpo(PolicyGradient):
    """Group-relative policy optimisation (arXiv:2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    num_answers: Annotated[int, Field(ge=2)] = Field(8, description=_NUM_ANSWERS)
    kl_coef: Annotated[float, Field(ge=0)] = Field(0.001, description=_KL_COEF)


class Dapo(PolicyGradient):
    """Decoupled clip and dynamic sampling policy optimisation (arXiv:2503.14476)."""

    kind: Literal["dapo"] = "dapo"
    num_answers: Annotated[int, Field(ge=2)] = Field(8, description=_NUM_ANSWERS)
    clip_high: Annotated[float, Field(gt=0)] = Field(0.28, description=_CLIP_HIGH)
    dynamic_sampling: bool = Field(True, description="prompts whose answers are all equally good or bad are replaced by others")
    overlong_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto", description="an answer's last tokens, in which its reward falls by up to 1; 0 = never; auto = a fifth of the answer"
    )


class Ppo(PolicyGradient):
    """Proximal policy optimisation with a critic (arXiv:1707.06347)."""

    kind: Literal["ppo"] = "ppo"
    num_answers: PositiveInt = Field(1, description=_NUM_ANSWERS)
    kl_kind: Literal["k1", "k2", "k3"] = Field("k1", description=_KL_KIND)
    critic_lr: Annotated[float, Field(gt=0)] = Field(1e-5, description="peak learning rate of the critic")
    gamma: Fraction = Field(1.0, description="discount of later rewards")
    gae_lambda: Fraction = Field(1.0, description="bias against variance of the advantage (GAE, arXiv:1506.02438); 1 = no bias")


Objective = Annotated[Annotated[Pretrain | Sft | Dpo | Reward | Grpo | Dapo | Ppo, Field(discriminator="kind")], short_form("kind")]


class Full(Section):
    """Every weight is trained."""

    kind: Literal["full"] = "full"


class Lora(Section):
    """Low-rank adapters on frozen weights (Hu et al. 2021, arXiv:2106.09685)."""

    kind: Literal["lora"] = "lora"
    rank: PositiveInt = 8
    alpha: Annotated[float, Field(gt=0)] = Field(16.0, description="the update is scaled by alpha/rank (alpha/sqrt(rank) with rslora)")
    dropout: Fraction = 0.0
    targets: Annotated[list[str], BeforeValidator(_as_list)] = Field(
        default=["all-linear"], description="names of the linear layers that get an adapter; all-linear is every one but the head"
    )
    rslora: bool = Field(False, description="rank-stabilised scaling (arXiv:2312.03732)")
    dora: bool = Field(False, description="weight-decomposed adapters (arXiv:2402.09353)")
    adapter: str | None = Field(None, description="a saved peft adapter folder to go on from")


Tuning = Annotated[Annotated[Full | Lora, Field(discriminator="kind")], short_form("kind")]


class Source(Section):
    """One data set: a file or a folder of files."""

    path: str = Field(description="a file (.json .jsonl .parquet .csv .txt .arrow, also .gz .zst) or a folder of them")
    format: Literal["auto", "alpaca", "sharegpt", "messages", "prompt_completion", "text"] = Field(
        "auto", description="how a record is read; auto looks at the first records and says what it found"
    )
    columns: dict[str, str] = Field(
        default={}, description="our name of a column → the name in this file, where they differ (instruction: question)"
    )
    weight: Annotated[float, Field(gt=0)] = Field(1.0, description="how often an epoch passes over this source; 0.5 takes half of it")


Sources = Annotated[list[Annotated[Source, short_form("path")]], BeforeValidator(_as_list)]


def _packing_word(value: Any) -> Any:
    return {True: "packed", False: "dynamic"}.get(value, value) if isinstance(value, bool) else value


class Data(Section):
    """What the model is trained on."""

    train: Sources
    eval: Sources = Field(default=[], description="held-out sources; their loss is printed during training")
    eval_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="share of the training samples held out for evaluation")
    seq_len: Annotated[int, Field(ge=8)] = Field(2048, description="tokens of one row")
    packing: Annotated[Literal["packed", "dynamic", "fixed"], BeforeValidator(_packing_word)] = Field(
        "packed",
        description="packed (true): several samples share a row and cannot see each other; "
        "dynamic (false): one sample a row, padded to the longest of the micro-batch; fixed: padded to seq_len",
    )
    overlong: Literal["cut", "drop", "stop"] = Field("cut", description="what happens to a sample longer than seq_len")
    bad_lines: Literal["stop", "skip"] = Field("stop", description="what happens to a record that cannot be read")
    mask_check: bool = Field(True, description="refuse to start when no token, or (sft) every token, would be trained")
    chat_template: str | None = Field(None, description="a Jinja file used instead of the model's own chat template")
    shuffle: bool = True
    streaming: bool = Field(False, description="tokenise while training; for sets larger than the disk")
    workers: int | Literal["auto"] = Field("auto", description="processes that tokenise")
    cache_dir: str = Field("~/.cache/ascendfactory/tokens", description="where tokenised sets are kept")


class Batch(Section):
    """How many rows one optimizer step sees, over all devices."""

    global_size: PositiveInt = Field(8, description="rows an optimizer step; a packed row counts as one; of grpo, dapo and ppo: prompts")
    micro_size: PositiveInt | Literal["auto"] = Field("auto", description="rows a device computes at once")


_DURATION = re.compile(r"^\s*([0-9][0-9_]*\.?[0-9]*(?:[eE]\+?[0-9]+)?)\s*(step|epoch|token)s?\s*$")


def _duration(value: Any) -> Any:
    if isinstance(value, str) and (found := _DURATION.match(value)):
        return {"amount": float(found[1].replace("_", "")), "unit": found[2] + "s"}
    return value


class Duration(Section):
    """How long something lasts: `500 steps`, `3 epochs`, `2e9 tokens`."""

    amount: Annotated[float, Field(gt=0)]
    unit: Literal["steps", "epochs", "tokens"]

    @model_validator(mode="after")
    def _whole_steps(self) -> Duration:
        if self.unit != "epochs" and self.amount != int(self.amount):
            raise ValueError(f"write a whole number of {self.unit}")
        return self


def _warmup(value: Any) -> Any:
    return {"amount": float(value), "unit": "fraction"} if isinstance(value, (int, float)) else _duration(value)


class Warmup(Section):
    """How long the learning rate rises: `0.03` (a fraction of the run) or `100 steps`."""

    amount: Annotated[float, Field(ge=0)]
    unit: Literal["fraction", "steps"] = "fraction"

    @model_validator(mode="after")
    def _fraction_below_one(self) -> Warmup:
        if self.unit == "fraction" and self.amount >= 1:
            raise ValueError("a fraction is below 1; write '100 steps' for steps")
        return self


class Optim(Section):
    """AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="shape after the warm-up; wsd = warm-up, stable, decay over the last decay_fraction"
    )
    warmup: Annotated[Warmup, BeforeValidator(_warmup)] = Warmup(amount=0.03)
    min_lr_ratio: Fraction = Field(0.0, description="where the learning rate goes, as a share of lr; the step after the last would have it")
    decay_fraction: Fraction = Field(0.1, description="wsd only: share of the run in which the rate falls")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="not applied to norms and biases")
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(ge=0)] = Field(1.0, description="gradients are scaled down to this norm; 0 = never")
    in_backward: bool = Field(
        False, description="update each weight as soon as its gradient is there, and free the gradient; needs max_grad_norm: 0"
    )
    nonfinite: Literal["skip", "stop"] = Field("stop", description="what happens when the loss or a gradient is NaN or Inf")


_CLUSTER = re.compile(r"^\s*(?:(?:(\d+)\s*x\s*)?(\d+)\s+)?([A-Za-z][\w.-]*)\s*$")


def _cluster(value: Any) -> Any:
    """`cpu`, `8 h100`, `2x8 snt9b`."""
    if isinstance(value, str) and (found := _CLUSTER.match(value)):
        nodes, nproc, device = found.groups()
        return {"nodes": int(nodes or 1), "nproc": int(nproc) if nproc else "auto", "device": device.lower()}
    return value


class ClusterSpec(Section):
    """The devices that the run may use."""

    device: str = Field("auto", description="a device of the catalogue (cpu, a100-80g, snt9b ...); auto = what this machine has")
    nodes: PositiveInt = 1
    nproc: PositiveInt | Literal["auto"] = Field("auto", description="devices (processes) a node")
    restarts: Annotated[int, Field(ge=0)] = Field(
        0, description="how often a run that lost a process starts again by itself, from its newest checkpoint"
    )


Degree = PositiveInt | Literal["auto"]
Recompute = Literal["none", "norm", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]


class LayoutSpec(Section):
    """How the work is split; auto is decided by the planner."""

    dp: Degree = Field("auto", description="data-parallel degree: what the other degrees leave")
    replicate: PositiveInt = Field(1, description="HSDP: copies of the sharded model inside dp (each is sharded over dp/replicate devices)")
    zero: Literal[1, 2, 3, "auto"] = Field("auto", description="what dp shards: 1 optimizer, 2 + gradients, 3 + parameters")
    tp: Degree = Field("auto", description="tensor-parallel degree")
    sp: bool | Literal["auto"] = Field("auto", description="sequence parallelism: norms are split over tp as well; auto = wherever tp > 1")
    pp: Degree = Field("auto", description="pipeline stages")
    vpp: Degree = Field("auto", description="virtual chunks a stage")
    schedule: Schedule | Literal["auto"] = Field(
        "auto",
        description="order of micro-batches in the pipeline: gpipe, 1f1b; with vpp > 1 interleaved or zero_bubble "
        "(weight gradients fill the gaps), with vpp 2 also zbv and dualpipev (V-shaped); auto = interleaved where vpp > 1",
    )
    stage_layers: list[Annotated[int, Field(ge=0)]] | Literal["auto"] = Field(
        "auto", description="layers of each pipeline chunk, in the model's order (pp x vpp numbers; 0 = an empty chunk); auto = cut by cost"
    )
    overlap_chunks: PositiveInt = Field(
        1, description="tensor parallelism: pieces in which a layer's input and output travel while others are multiplied; 1 = no overlap"
    )
    ring: Degree = Field("auto", description="ring context-parallel degree")
    ulysses: Degree = Field("auto", description="Ulysses context-parallel degree")
    ep: Degree = Field("auto", description="expert-parallel degree; the experts' devices are a part of dp x ring x ulysses x tp")
    recompute: Recompute | Literal["auto"] = Field(
        "auto",
        description="what is computed again in the backward pass to save memory: norm (norms and the MLP's activation), "
        "selective (all but attention and every second matrix product), full (whole layers)",
    )
    recompute_layers: PositiveInt | Literal["all", "auto"] = Field("auto", description="recompute the first n layers of a stage only")
    recompute_in_advance: bool = Field(
        False, description="pipelines: a stage computes again while it waits for the gradient, and keeps the result until it comes"
    )
    offload_activations: bool = Field(False, description="keep saved activations in host memory")
    offload_optimizer: bool = Field(False, description="keep the optimizer's state in host memory and update there")
    optim_dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of Adam's moments")
    reuse_params: bool = Field(False, description="the bfloat16 weights are a part of the fp32 masters instead of a copy")


class Checkpoint(Section):
    """What is saved while training, and where a run starts again."""

    every: Annotated[Duration, BeforeValidator(_duration)] = Duration(amount=500, unit="steps")
    keep: PositiveInt = Field(2, description="newest checkpoints kept")
    keep_best: bool = Field(False, description="keep the one with the lowest evaluation loss as well")
    asynchronous: bool = Field(True, description="write while training goes on")
    resume: str = Field("auto", description="auto = the newest healthy checkpoint of the output folder; none; or a checkpoint folder")


class Output(Section):
    """Where results go."""

    dir: str | None = Field(None, description="run folder; by default runs/<name of the recipe>")
    export: bool = Field(True, description="write a Hugging Face folder (or a peft adapter) at the end")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="dtype of exported weights; auto = the model's own"
    )
    log_every: PositiveInt = Field(1, description="steps between progress lines")
    eval_every: Annotated[Duration, BeforeValidator(_duration)] = Duration(amount=100, unit="steps")
    sample_prompts: list[str] = Field(default=[], description="questions answered before and after training, shown in the report")


BackendName = Literal["auto", "native", "llamafactory", "verl", "mindspeed_llm", "mindspeed_rl", "mindspeed_mm"]


class Recipe(Section):
    """One training job."""

    name: str = Field("run", description="a name for the run", pattern=r"^[\w.\-]+$")
    model: Annotated[Model, short_form("path")]
    objective: Objective = Sft()
    tuning: Tuning = Full()
    data: Annotated[Data, short_form("train")]
    batch: Annotated[Batch, short_form("global_size")] = Batch()
    duration: Annotated[Duration, BeforeValidator(_duration)] = Duration(amount=1, unit="epochs")
    optim: Optim = Optim()
    cluster: Annotated[ClusterSpec, BeforeValidator(_cluster)] = ClusterSpec()
    layout: LayoutSpec = LayoutSpec()
    backend: BackendName = "auto"
    profile: str = Field("auto", description="the version of the back end (`ascendfactory install` lists them); auto = its default")
    extra: dict[str, Any] = Field(
        default={}, description="options handed to the back end under its own names; those that AscendFactory sets itself are refused"
    )
    checkpoint: Checkpoint = Checkpoint()
    output: Annotated[Output, short_form("dir")] = Output()
    seed: Annotated[int, Field(ge=0)] = 42

    @property
    def rows_a_step(self) -> int:
        """Rows that an optimizer step trains: of reinforcement learning every answer of every prompt."""
        answers = self.objective.num_answers if isinstance(self.objective, PolicyGradient) else 1
        return self.batch.global_size * answers
