"""What the layers hand to each other: card, cluster, layout, plan, job, step metrics.

All of it is plain data that survives a trip through JSON.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from ascendfactory.core.messages import pick
from ascendfactory.core.recipe import Recipe, Recompute, Schedule


class Fact(BaseModel):
    """A frozen record; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Line(Fact):
    """One line for a person, in both languages; as text it is that of the reader's."""

    en: str
    zh: str

    def __str__(self) -> str:
        return pick(self.en, self.zh)


class Moe(Fact):
    """Mixture-of-experts shape of a model."""

    num_experts: int
    experts_per_token: int
    expert_ffn_size: int
    num_shared_experts: int = 0
    shared_ffn_size: int = 0  # total intermediate size of the shared experts
    first_dense_layers: int = 0  # leading layers with a plain MLP
    layer_period: int = 1  # every n-th layer is MoE


class Mla(Fact):
    """Multi-head latent attention shape (DeepSeek-V2, arXiv:2405.04434)."""

    q_lora_rank: int | None = None  # None: queries are not compressed
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class Vision(Fact):
    """Vision tower shape."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_params: int  # tower and projector, counted from the real shapes
    patch_size: int


class ModelCard(Fact):
    """A model's facts, enough to plan without its weights.

    Sizes are those of `config.json`; `num_params` counts tied weights once.
    """

    name: str
    family: str  # the HF model_type
    hub_id: str
    num_layers: int
    hidden_size: int
    ffn_size: int  # dense MLP intermediate size
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    tied_embeddings: bool = False
    attention_bias: bool = False  # bias on q, k, v
    qk_norm: bool = False
    num_norms_per_layer: int = 2
    sliding_window: int | None = None
    full_attention_period: int = 1  # every n-th layer attends to everything; others use sliding_window
    gated_mlp: bool = True
    moe: Moe | None = None
    mla: Mla | None = None
    vision: Vision | None = None
    num_mtp_layers: int = 0  # multi-token-prediction layers stored in the weights
    num_params: int
    num_active_params: int  # seen by one token
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # of the published weights
    backend_names: dict[str, str] = {}  # back end → its own name for this model
    source: str = ""


class Device(Fact):
    """One accelerator (an Ascend 910C card holds two)."""

    name: str
    title: str
    kind: Literal["cpu", "cuda", "npu"]
    memory_bytes: int
    peak_bf16_flops: float  # dense matrix peak, FLOP/s
    peak_fp32_flops: float
    memory_bandwidth_bytes_s: float
    devices_per_node: int
    intra_node_bytes_s: float  # one direction, per device
    inter_node_bytes_s: float  # one direction, per device
    has_bf16: bool = True
    source: str = ""


class Cluster(Fact):
    """Real devices: `nodes` machines with `nproc` devices each."""

    device: Device
    nodes: int
    nproc: int

    @property
    def num_devices(self) -> int:
        """All devices of all nodes."""
        return self.nodes * self.nproc


class Layout(Fact):
    """How the work is split, everything decided. dp x tp x pp x ring x ulysses is the number of devices; ep lies inside them."""

    dp: int = 1
    replicate: int = 1
    zero: Literal[1, 2, 3] = 3
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    schedule: Schedule = "1f1b"
    stage_layers: tuple[int, ...] = ()  # layers of each pipeline chunk in the model's order; () = cut by cost
    overlap_chunks: int = 1
    ring: int = 1
    ulysses: int = 1
    ep: int = 1
    recompute: Recompute = "none"
    recompute_layers: int = 0  # the first n layers of each stage; 0 = every layer
    recompute_in_advance: bool = False
    offload_activations: bool = False
    offload_optimizer: bool = False
    optim_dtype: Literal["float32", "bfloat16"] = "float32"
    reuse_params: bool = False
    micro_size: int = 1  # rows a device computes at once
    num_micro: int = 1  # micro-batches an optimizer step

    @property
    def cp(self) -> int:
        """Devices that share the tokens of one row."""
        return self.ring * self.ulysses

    @property
    def shard(self) -> int:
        """Devices over which a copy of the model is sharded by data parallelism: those of dp and of cp."""
        return self.dp // self.replicate * self.cp

    @property
    def num_devices(self) -> int:
        """Devices that the degrees multiply to."""
        return self.dp * self.tp * self.pp * self.cp


class MemoryTerm(Fact):
    """One named part of a device's memory, with the formula that gave it."""

    name: str
    num_bytes: int
    formula: str


class TimeTerm(Fact):
    """One named part of a step's time that the devices wait for, with what it is."""

    name: str
    seconds: float
    detail: str = ""


class Prediction(Fact):
    """How long a step will take, and how sure that is."""

    step_s: float  # the sum of the parts
    parts: list[TimeTerm]
    tokens_per_s_device: float  # tokens of the step / step_s / devices
    mfu: float  # model FLOPs (no recomputation) / step_s / peak
    band: float  # the true step time is expected within step_s x (1 +- band)
    basis: Line  # what the figures were calibrated on


class Placement(Fact):
    """Where the rollout engine of a reinforcement-learning run lives."""

    colocated: bool  # shares the devices of training, or has its own
    rollout_devices: int
    rollout_tp: int
    kv_share: float  # share of a rollout device's memory for the KV cache
    memory_share: float = 0.5  # the same for all of the rollout engine: its weights and workspace as well
    kv_tokens: int  # tokens that the caches of all rollout devices hold
    rollout_s: float  # predicted time of generation a step
    step_s: float  # predicted time of a step, generation included


class Choice(Fact):
    """A layout that was weighed."""

    backend: str
    layout: Layout
    peak_bytes: int
    step_s: float


class Refusal(Fact):
    """A "no" that says what to do instead, in both languages."""

    code: str
    where: str  # the recipe key
    en: str
    zh: str
    fix: dict[str, Any] = {}  # dotted recipe key → a value that would be accepted


class NoPlan(Exception):
    """No way to run the recipe as written; carries every reason."""

    def __init__(self, refusals: list[Refusal]) -> None:
        self.refusals = refusals
        super().__init__("; ".join(r.en for r in refusals))


class Plan(Fact):
    """Every decision taken; a run is reproduced from this alone."""

    version: Literal[1] = 1
    recipe: Recipe
    card: ModelCard
    backend: str
    cluster: Cluster
    layout: Layout
    dtype: Literal["float32", "bfloat16"]
    run_dir: str
    memory: list[MemoryTerm]  # of the fullest pipeline stage
    why: list[Line]
    stages: list[list[MemoryTerm]] = []  # of every pipeline stage
    prediction: Prediction | None = None
    placement: Placement | None = None  # reinforcement learning only
    alternatives: list[Choice] = []  # the next best, the fastest first
    refused: list[Refusal] = []  # why other back ends were passed over

    @property
    def peak_bytes(self) -> int:
        """Predicted bytes on the fullest device: the sum of the terms."""
        return sum(term.num_bytes for term in self.memory)


class Step(Fact):
    """One program of a job before or after training: it turns inputs into an output.

    It is not run again when the output is there and was made from the same inputs by the same program.
    """

    name: str  # preprocess, convert ...
    argv: list[str]
    env: dict[str, str] = {}
    environment: str = ""
    inputs: list[str] = []  # files and folders
    output: str  # a folder that the program fills
    nproc: int = 1


class Job(Fact):
    """What a back end wants run: files, argv, environment. Pure data.

    In argv and the values of env, `{env}` stands for the folder of `environment`, and `{nodes}`, `{node_rank}`,
    `{master_addr}`, `{master_port}` for what the launcher knows of the other nodes.
    """

    files: dict[str, str]  # path inside the run folder → text
    argv: list[str]
    env: dict[str, str] = {}
    environment: str = ""  # `<back end>-<profile>`, made by `ascendfactory install`; "" = the Python that runs AscendFactory
    nproc: int = 1  # processes that argv starts on each node
    before: list[Step] = []
    after: list[Step] = []
    restarts: int = 0  # how often the launcher starts it again after a failure, on all nodes
    keeps_metrics: bool = False  # the program writes metrics.jsonl itself


class StepMetrics(Fact):
    """One optimizer step, under the same names from every back end."""

    step: int
    num_steps: int
    loss: float  # sum of token losses / global number of trained tokens
    lr: float
    grad_norm: float
    label_tokens: int  # trained tokens of the step, all devices; 0 = the back end does not say
    tokens: int  # tokens of the step without padding, all devices
    epoch: float
    step_s: float
    tokens_per_s: float  # tokens / step_s, all devices
    mfu: float | None = None
    memory_bytes: int | None = None  # peak on the fullest device
    eval_loss: float | None = None
    skipped: str | None = None  # why the update was skipped
    reward: float | None = None  # mean over the answers of the step (reinforcement learning), or of chosen - rejected (dpo)
    response_tokens: float | None = None  # mean length of the answers of the step


class Backend(Protocol):
    """An engine that can run plans."""

    name: str

    def refuse(self, recipe: Recipe, card: ModelCard, layout: Layout) -> list[Refusal]:
        """Why this engine cannot run the recipe under this layout; empty if it can."""

    def render(self, plan: Plan) -> Job:
        """The job that runs the plan. Pure: touches no disk."""

    def read_step(self, line: str, plan: Plan) -> StepMetrics | None:
        """The step that a line of the engine's output reports, or None."""
