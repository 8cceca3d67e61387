"""verl's own configuration tree, its dataclasses and validators, asked with the words of the job's driver: no Ray, no model, no data.

Run it with the Python of an environment that has verl and what its core asks for (its extra verl-core); rollout engines, Megatron and a
device need not be there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from parsers.inert import Finder

VLLM = "0.24.0"  # the release that verl 0.9.1 asks for
DRIVER = "verl.trainer.main_ppo"
# What verl makes dataclasses of when such a run starts, beside the actor and the critic, which its validator makes.
BUILT = (
    "algorithm",
    "actor_rollout_ref.model",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.rollout.checkpoint_engine",
    "trainer.v1.separate_async.hybrid_rollout",
)
ENGINES = re.compile(r"EngineRegistry\.register\(([^)]*)\)")
NAMED = re.compile(r"(backend|device)=(\[[^\]]*\]|\"\w+\")")


def prepare(sources: dict[str, Path]) -> None:
    """Imports what every check needs; a model's folder, which is not here, is not opened."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VERL_LOGGING_LEVEL": "ERROR"}
    warnings.simplefilter("ignore")
    stand_in_for_vllm()
    import verl.trainer.main_ppo
    import verl.trainer.ppo.v1  # noqa: F401
    from verl.workers.config import HFModelConfig

    HFModelConfig.__post_init__ = lambda self: None


def stand_in_for_vllm() -> None:
    """verl's rule for the rank of adapters lies in a module that imports vLLM; without vLLM's own list of ranks it takes verl's copy."""
    if importlib.util.find_spec("vllm"):
        return
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: VLLM if name == "vllm" else version(name)
    sys.meta_path.insert(0, Finder({"vllm"}))
    sys.modules["vllm.config.lora"] = None  # type: ignore[assignment]


def check(line: dict[str, Any], sources: dict[str, Path], folder: Path) -> None:
    """Composes the tree with the driver's words and has verl validate it and make its trainer of it, up to where Ray would start."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    job = line["job"]
    os.environ |= job["env"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(config_name="ppo_trainer", overrides=job["argv"][job["argv"].index(DRIVER) + 1 :])
    uses_critic = need_critic(config)
    off = ("reward.reward_model.", "distillation.", *(() if uses_critic else ("critic.",)))
    if missing := [name for name in OmegaConf.missing_keys(config) if not name.startswith(off)]:
        raise ValueError(f"without a value: {', '.join(sorted(missing))}")
    OmegaConf.to_container(config, resolve=True)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=uses_critic)
    for name in BUILT:
        omega_conf_to_dataclass(OmegaConf.select(config, name))
    check_names(config)
    check_devices(config, line["nodes"] * line["nproc"])
    get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)


def check_names(config: Any) -> None:
    """Names that verl looks up once it runs: estimators, losses, the rollout engine and the engine that trains on this device."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    parts = [actor, config.critic] if config.algorithm.adv_estimator == "gae" else [actor]
    asked = [
        (config.algorithm.adv_estimator, set(ADV_ESTIMATOR_REGISTRY)),
        (actor.policy_loss.loss_mode, set(POLICY_LOSS_REGISTRY)),
        ((rollout.name, rollout.mode), set(_ROLLOUT_REGISTRY)),
        *(((part.strategy, config.trainer.device), engines()) for part in parts),
    ]
    for name, known in asked:
        if name not in known:
            raise ValueError(f"{name} is none of {sorted(map(str, known))}")


def engines() -> set[tuple[str, str]]:
    """Engines and devices that verl registers anywhere; read as text, since to import them asks for Megatron and others."""
    import verl

    found = set()
    for path in (Path(verl.__file__).parent / "workers" / "engine").rglob("*.py"):
        for words in ENGINES.findall(path.read_text(encoding="utf-8")):
            given = {"device": ["cuda"]} | {key: re.findall(r"\w+", value) for key, value in NAMED.findall(words)}
            found |= {(name, device) for name in given["backend"] for device in given["device"]}
    return found


def check_devices(config: Any, devices: int) -> None:
    """Training and separate generation together take every device, and each splits what it has."""
    rollout, actor, trainer = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor, config.trainer
    training = trainer.nnodes * trainer.n_gpus_per_node
    generating = rollout.nnodes * rollout.n_gpus_per_node if trainer.v1.trainer_mode == "separate_async" else 0
    if training + generating != devices:
        raise ValueError(f"{training} + {generating} of {devices} devices are used")
    if (generating or training) % rollout.tensor_model_parallel_size:
        raise ValueError(f"rollout tp {rollout.tensor_model_parallel_size} does not divide {generating or training} devices")
    if actor.strategy == "megatron":
        degrees = (
            actor.megatron.tensor_model_parallel_size * actor.megatron.pipeline_model_parallel_size * actor.megatron.context_parallel_size
        )
        experts = actor.megatron.expert_model_parallel_size * actor.megatron.pipeline_model_parallel_size
    else:
        degrees, experts = actor.ulysses_sequence_parallel_size, 1
    if training % degrees or training % experts:
        raise ValueError(f"{training} devices are not split by {degrees}, for experts by {experts}")
