"""What the reinforcement-learning back ends share: lengths, contradictions, memory of the rollout engine, the start on many nodes."""

from __future__ import annotations

from ascendfactory.backends.common import Rule, program
from ascendfactory.core.plan import Plan
from ascendfactory.core.recipe import Dapo, PolicyGradient, Recipe

# The same estimates of a divergence, as verl and MindSpeed-RL call them.
KL_NAMES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


def objective_of(recipe: Recipe) -> PolicyGradient:
    """The objective of a recipe that a back end of this kind has accepted."""
    assert isinstance(recipe.objective, PolicyGradient)
    return recipe.objective


def prompt_tokens(recipe: Recipe) -> int:
    """Tokens of a row that a prompt may fill."""
    return objective_of(recipe).prompt_tokens(recipe.data.seq_len)


def answer_tokens(recipe: Recipe) -> int:
    """Tokens of a row that are left to the answer."""
    return recipe.data.seq_len - prompt_tokens(recipe)


def overlong_tokens(recipe: Recipe) -> int:
    """Last tokens of an answer in which its reward falls; 0 = it does not.

    Of itself a fifth of the answer, as DAPO has it: 4096 of 20480 (arXiv:2503.14476, section 4.1).
    """
    objective = recipe.objective
    if not isinstance(objective, Dapo):
        return 0
    return answer_tokens(recipe) // 5 if objective.overlong_tokens == "auto" else objective.overlong_tokens


def rl_rules(recipe: Recipe) -> list[Rule]:
    """Settings that contradict each other, whichever back end runs them."""
    objective, seq_len = recipe.objective, recipe.data.seq_len
    if not isinstance(objective, PolicyGradient):
        return []
    prompt = objective.prompt_tokens(seq_len)
    if prompt >= seq_len:
        text = f"prompts of {prompt} tokens leave no answer in rows of {seq_len}; write max_prompt_tokens: {seq_len // 4}"
        text_zh = f"{prompt} 个 token 的提示在 {seq_len} 的行中不留回答的位置；请写 max_prompt_tokens: {seq_len // 4}"
        return [(True, "objective.max_prompt_tokens", text, text_zh, seq_len // 4)]
    overlong, answer = overlong_tokens(recipe), answer_tokens(recipe)
    return [
        (
            overlong >= answer,
            "objective.overlong_tokens",
            f"{overlong} tokens are not the end of an answer of at most {answer}; write overlong_tokens: {answer // 5}",
            f"回答最多 {answer} 个 token，{overlong} 不是它的末尾；请写 overlong_tokens: {answer // 5}",
            answer // 5,
        ),
    ]


def rollout_share(plan: Plan) -> float:
    """Share of a rollout device's memory that the rollout engine takes: weights, cache and workspace."""
    return round(plan.placement.memory_share, 2) if plan.placement else 0.5


def rollout_tp(plan: Plan) -> int:
    """Tensor-parallel degree of the rollout engine."""
    return plan.placement.rollout_tp if plan.placement else 1


def on_ray(plan: Plan, driver: list[str]) -> tuple[list[str], dict[str, str]]:
    """A driver's argv, and the files it needs: on one node itself, on several the program that makes a Ray cluster of them.

    The head listens on the port of the nodes' other processes, of which a driver under Ray has none.
    """
    if plan.cluster.nodes == 1:
        return driver, {}
    devices = f"{plan.cluster.device.kind}:{plan.cluster.nproc}"
    node = ["python", f"{plan.run_dir}/job/ray_node.py", "{node_rank}", "{nodes}", "{master_addr}", "{master_port}", devices, "--"]
    return [*node, *driver], {"job/ray_node.py": program("ray_node.py")}
