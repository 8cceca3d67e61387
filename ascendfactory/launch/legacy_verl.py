"""The old file for verl: sections of its own Hydra configuration (release 0.5), as dotted names."""

from __future__ import annotations

from ascendfactory.backends.common import options as known_options
from ascendfactory.backends.verl_config import NAME, PROFILES
from ascendfactory.launch.legacy_options import KL_KINDS, VERL, VERL_DEFAULTS
from ascendfactory.launch.migration import Migration, Tree, flat, one_of, required, whole

COLLECTOR = "ascend_precision_collector"  # a file's name, or null
SECTIONS = (
    "data",
    "actor_rollout_ref",
    "critic",
    "algorithm",
    "trainer",
    "rollout",
    "reward_model",
    "custom_reward_function",
    "ray_kwargs",
    COLLECTOR,
)
_CRITIC_AND_REWARD: tuple[str, ...] = ("critic.", "algorithm.kl_", "algorithm.use_kl_", "algorithm.lam", "algorithm.gamma")
_CRITIC: tuple[str, ...] = (
    "critic.model.",
    "critic.optim.",
    "critic.fsdp",
    "critic.megatron.",
    "critic.strategy",
    "critic.use_dynamic",
    "critic.ppo_m",
)


def read_verl(sections: Tree, found: Migration, num_devices: int) -> None:
    """Fills the recipe from all sections.

    Raises:
        UserError: an option is unknown or wrong, or model or data is missing.
    """
    known = known_options(f"{NAME}-{PROFILES[0]}")
    options, section = VERL_DEFAULTS | flat(sections, leaves=known), "backend_config."
    if options.pop(COLLECTOR, None):
        tool = "actor_rollout_ref.actor.profiler.tool: precision_debugger"
        found.note(
            f"{COLLECTOR}: left out; verl has a dump of its own: extra: {{{tool}}}", f"{COLLECTOR}：删去；verl 自带转储：extra: {{{tool}}}"
        )
    for name in ("actor_rollout_ref.model.path", "data.train_files"):
        required(options, name, section)
    options.setdefault("algorithm.adv_estimator", "gae")
    kind = one_of(options, "algorithm.adv_estimator", {"grpo": "grpo", "gae": "ppo"}, section)
    if options.pop("algorithm.filter_groups.enable", False) and kind == "grpo":
        kind = "dapo"
    found.put("objective", {"kind": kind}, f"{section}algorithm.adv_estimator")
    rank = options.get("actor_rollout_ref.model.lora_rank")
    found.put("tuning", {"kind": "lora" if rank else "full"}, f"{section}actor_rollout_ref.model.lora_rank")
    if not rank:
        for name in ("lora_rank", "lora_alpha", "target_modules"):
            options.pop(f"actor_rollout_ref.model.{name}", None)
    lengths = [whole(dict(options), f"data.max_{part}_length", 512, section) for part in ("prompt", "response")]
    options.pop("data.max_response_length")
    found.put("data.seq_len", sum(lengths), f"{section}data.max_response_length")
    found.put("optim.schedule", "constant")
    found.put("optim.warmup", 0.0)
    _verl_objective(options, found, kind, section)
    _verl_together(options, found, section)
    found.keep(found.apply(options, VERL, section), known, section)


def _drop(names: list[str], options: Tree, found: Migration, section: str) -> None:
    for name in names:
        del options[name]
        found.dropped.append(section + name)


def _verl_objective(options: Tree, found: Migration, kind: str, section: str) -> None:
    """Divergence, clipping, the critic, DAPO's own, a reward function, tools."""
    actor = "actor_rollout_ref.actor."
    if kind == "ppo":
        name, used = "algorithm.kl_ctrl.kl_coef", options.pop("algorithm.use_kl_in_reward", False)
        word, unused = options.pop("algorithm.kl_penalty", "kl"), _CRITIC
    else:
        name, used = f"{actor}kl_loss_coef", options.pop(f"{actor}use_kl_loss", False)
        word = options.pop(f"{actor}kl_loss_type", "low_var_kl")
        unused = ("critic.", "algorithm.kl_", "algorithm.use_kl_", "algorithm.lam", "algorithm.gamma")
    _drop(
        [other for other in options if other.startswith(unused) and (kind != "ppo" or other != "critic.optim.lr")], options, found, section
    )
    coefficient = options.pop(name, 0.001)
    found.put("objective.kl_coef", coefficient if used else 0.0, section + name)
    if used:
        found.put("objective.kl_kind", KL_KINDS.get(word, word), f"{section}{actor}kl_loss_type")
    if clip := options.pop(f"{actor}clip_ratio", None):
        found.put("objective.clip_low", clip, f"{section}{actor}clip_ratio")
        found.put("objective.clip_high", clip, f"{section}{actor}clip_ratio")
    apart = [name for name in options if name.startswith("rollout.")]  # the devices of a rollout that runs one step ahead
    if apart or options.get("actor_rollout_ref.hybrid_engine") is False:
        found.put("objective.off_policy_steps", 1, f"{section}rollout")
        options.pop("actor_rollout_ref.hybrid_engine", None)
    _drop(apart, options, found, section)
    if kind == "dapo":
        _verl_overlong(options, found, section)
    if path := options.pop("custom_reward_function.path", None):
        function = options.pop("custom_reward_function.name", None) or "compute_score"
        found.put("objective.reward", f"{path}:{function}", f"{section}custom_reward_function.path")
    turns = "actor_rollout_ref.rollout.multi_turn."
    if options.pop(f"{turns}enable", False):
        found.put("objective.multi_turn", {"tools": options.pop(f"{turns}tool_config_path", None)}, f"{section}{turns}tool_config_path")
        if limit := options.pop(f"{turns}max_assistant_turns", None):
            found.put("objective.multi_turn.max_turns", limit, f"{section}{turns}max_assistant_turns")


def _verl_overlong(options: Tree, found: Migration, section: str) -> None:
    """DAPO's buffer at the end of an answer, in which its reward falls."""
    buffer = "reward_model.overlong_buffer."
    length, used = options.pop(f"{buffer}len", 0), options.pop(f"{buffer}enable", False)
    found.put("objective.overlong_tokens", length if used else 0, f"{section}{buffer}len")
    names = (f"{buffer}penalty_factor", f"{buffer}log", "reward_model.reward_manager")
    _drop([name for name in names if name in options], options, found, section)


def _verl_together(options: Tree, found: Migration, section: str) -> None:
    """Options of verl that mean something only with others."""
    tested, every = options.pop("data.val_files", None), options.pop("trainer.test_freq", -1)
    if tested and isinstance(every, int) and every > 0:
        found.put("data.eval", tested if isinstance(tested, list) else [tested], f"{section}data.val_files")
        found.put("output.eval_every", f"{every} steps", f"{section}trainer.test_freq")
    if options.pop("trainer.resume_mode", "auto") == "disable":
        found.put("checkpoint.resume", "none", f"{section}trainer.resume_mode")
    betas = options.pop("actor_rollout_ref.actor.optim.betas", None)
    if isinstance(betas, list) and len(betas) == 2:
        found.put("optim.beta1", betas[0], f"{section}actor_rollout_ref.actor.optim.betas")
        found.put("optim.beta2", betas[1], f"{section}actor_rollout_ref.actor.optim.betas")
    steps = options.pop("actor_rollout_ref.actor.optim.lr_warmup_steps", None)
    if isinstance(steps, int) and steps > 0:
        found.put("optim.warmup", f"{steps} steps", f"{section}actor_rollout_ref.actor.optim.lr_warmup_steps")
        options.pop("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", None)
    if options.get("trainer.total_training_steps"):
        options.pop("trainer.total_epochs", None)
    rows = options["data.train_batch_size"]
    mini = options.pop("actor_rollout_ref.actor.ppo_mini_batch_size", rows)
    if mini != rows:
        found.note(
            f"actor.ppo_mini_batch_size {mini}: one update a step of all {rows} prompts is made now",
            f"actor.ppo_mini_batch_size {mini}：现在每步对全部 {rows} 个提示更新一次",
        )
