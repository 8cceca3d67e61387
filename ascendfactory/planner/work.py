"""Floating-point operations of a training step, by operator, on one device of each pipeline stage.

A matrix product of t tokens with P weights takes 2·t·P operations forward; backward as many for the inputs' gradient and
as many for the weights', unless those are frozen. Attention over S tokens with a causal mask takes S·(q + v sizes) a token
forward and 2.5 times that backward, where flash attention computes the scores again (Dao 2023, arXiv:2307.08691).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ascendfactory.core.recipe import Dpo, Lora, PolicyGradient, Ppo
from ascendfactory.planner.grid import RECOMPUTES, Floats, Grid
from ascendfactory.planner.memory import IMBALANCE, Setting
from ascendfactory.planner.weights import Stages

ATTENTION_BACKWARD = 2.5
SELECTIVE_SHARE = 0.5  # every second matrix product is computed again


@dataclass(frozen=True)
class Work:
    """Operations of one micro-batch on one device [N, S], recomputation included, and those of the model alone."""

    dense: Floats  # matrix products that every token passes
    expert: Floats
    attention: Floats
    head: Floats
    model: Floats  # all of them, without recomputation and imbalance


def work_of(setting: Setting, grid: Grid, stages: Stages, attended_tokens: int | None = None) -> Work:
    """Operations of layouts that share pp and vpp.

    Args:
        attended_tokens: length of a document within a row; None: documents fill their rows.
    """
    card, tuning = setting.card, setting.recipe.tuning
    tp, cp = grid.tp[:, None], grid.cp[:, None]
    tokens = grid.micro_size[:, None] * setting.row_tokens / cp
    forwards = _extra_forwards(setting)
    # forward + input gradient (+ weight gradient)
    passes = 2.0 if isinstance(tuning, Lora) else 3.0
    again_matmul, again_attention = _again(grid, stages)
    dense_params = stages.split / tp + stages.whole
    dense = 2 * tokens * dense_params
    attention = tokens / tp * attention_flops_a_token(setting, attended_tokens) * stages.layers
    head = 2 * tokens / tp * np.where(stages.head > 0, card.vocab_size * card.hidden_size, 0)
    expert = np.zeros_like(dense)
    if card.moe:
        share = card.moe.experts_per_token / card.moe.num_experts
        expert = 2 * tokens / tp * stages.expert * share
    uneven = np.where(grid.ep > 1, IMBALANCE, 1.0)[:, None]
    model = passes * (dense + expert + head) + (1 + ATTENTION_BACKWARD) * attention
    return Work(
        dense=dense * (passes + forwards + again_matmul),
        expert=expert * (passes + forwards + again_matmul) * uneven,
        attention=attention * (1 + ATTENTION_BACKWARD + forwards + again_attention),
        head=head * (passes + forwards),
        model=model,
    )


def attention_flops_a_token(setting: Setting, attended_tokens: int | None = None) -> float:
    """Forward operations of the scores and their product with v, for one token of an average layer."""
    card = setting.card
    length = min(attended_tokens or setting.recipe.data.seq_len, setting.recipe.data.seq_len)
    if card.mla:
        sizes = card.num_heads * (card.mla.qk_nope_head_dim + card.mla.qk_rope_head_dim + card.mla.v_head_dim)
    else:
        sizes = 2 * card.num_heads * card.head_dim
    full = float(length * sizes)
    if not card.sliding_window or card.sliding_window >= length:
        return full
    # a window of W tokens: 2·W a token, less the triangle at the row's start
    window = 2 * sizes * card.sliding_window * (1 - card.sliding_window / (2 * length))
    share_full = 1 / card.full_attention_period if card.full_attention_period > 1 else 0.0
    return share_full * full + (1 - share_full) * min(full, window)


def _extra_forwards(setting: Setting) -> float:
    """Forward passes besides the trained model's own: a reference, old log-probabilities, a critic (3 times a forward to train)."""
    objective = setting.recipe.objective
    if not isinstance(objective, PolicyGradient):
        return 1.0 if isinstance(objective, Dpo) else 0.0
    # one step off, answers keep the probabilities that they were drawn with
    old = 0.0 if objective.off_policy_steps else 1.0
    return old + (objective.kl_coef > 0) + (3.0 if isinstance(objective, Ppo) else 0.0)


def _again(grid: Grid, stages: Stages) -> tuple[Floats, Floats]:
    """Forward passes of the layers that run a second time: of matrix products, of attention [N, S]."""
    share, mode = recomputed_share(grid, stages), grid.recompute[:, None]
    matmul = np.where(mode == RECOMPUTES.index("full"), 1.0, np.where(mode == RECOMPUTES.index("selective"), SELECTIVE_SHARE, 0.0))
    return share * matmul, share * (mode == RECOMPUTES.index("full"))


def recomputed_share(grid: Grid, stages: Stages) -> Floats:
    """Part of a stage's layers that is computed again where anything is [N, S]."""
    layers = np.maximum(stages.layers, 1)
    limit = np.where(grid.recompute_layers[:, None] > 0, np.minimum(grid.recompute_layers[:, None], layers), layers)
    return np.asarray(limit / layers)
