"""The loader: this rank's micro-batches of every step.

Step s takes rows [s·G, (s+1)·G) of one global order, G = rows a step. Micro-batch m of rank r holds rows (m·ranks + r)·micro
and on of these, so which samples a step sees never depends on the number of ranks, and micro-batches that are
computed at the same time have similar lengths where rows are sorted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from transformers import PreTrainedTokenizerBase

from ascendfactory.core.messages import UserError
from ascendfactory.core.recipe import Data, Duration, Pretrain, Recipe, Sft
from ascendfactory.engine.data.batch import MicroBatch, Row, assemble
from ascendfactory.engine.data.chat import Encoder
from ascendfactory.engine.data.counts import Counts
from ascendfactory.engine.data.rows import Split, TableRows, open_rows
from ascendfactory.engine.data.store import TokenStore, content_id, open_sources, open_store
from ascendfactory.engine.data.stream import StreamRows
from ascendfactory.engine.data.tokenizer import fingerprint

WIDTH_MULTIPLE = 8
NUM_PLACES = 16


class Loader:
    """Micro-batches for one rank. `fingerprint` names the data and their order; it does not depend on the ranks."""

    def __init__(
        self,
        rows: TableRows | StreamRows,
        evals: TableRows | None,
        data: Data,
        pad_id: int,
        fingerprint: str,
        *,
        dp_rank: int,
        dp_size: int,
        micro_size: int,
        num_micro: int,
        width_multiple: int,
    ) -> None:
        self.fingerprint = fingerprint
        self._rows, self._evals, self._data, self._pad_id = rows, evals, data, pad_id
        self._dp_rank, self._dp_size, self._micro_size, self._num_micro = dp_rank, dp_size, micro_size, num_micro
        self._width_multiple = width_multiple
        self._last_rows: list[Row] = []

    @property
    def global_size(self) -> int:
        """Rows a step, over all ranks."""
        return self._dp_size * self._micro_size * self._num_micro

    @property
    def counts(self) -> Counts:
        """What was read, cut, dropped and skipped (a stream: so far)."""
        if isinstance(self._rows, StreamRows):
            self._rows.peek()
        return self._rows.counts

    @property
    def has_eval(self) -> bool:
        """Whether anything is held out."""
        return self._evals is not None

    @property
    def epoch(self) -> float:
        """Epochs taken so far."""
        return self._rows.epoch

    def num_steps(self, duration: Duration) -> int:
        """Optimizer steps of a duration; the last one may hold rows that train nothing.

        Raises:
            UserError: epochs of a stream, whose end is not known.
        """
        if duration.unit == "steps":
            return int(duration.amount)
        if isinstance(self._rows, StreamRows):
            if duration.unit == "epochs":
                raise UserError(
                    "duration",
                    "a stream has no known end, so epochs cannot be counted; write steps or tokens, such as duration: 2e9 tokens",
                    "流式读取没有已知的终点，无法按 epoch 计算；请写 steps 或 tokens，例如 duration: 2e9 tokens",
                )
            mean_row_tokens = self._rows.mean_row_tokens
        else:
            if duration.unit == "epochs":
                return math.ceil(_epoch_rows(duration, self._rows) / self.global_size)
            mean_row_tokens = self._rows.counts.tokens / self._rows.num_rows
        return max(1, math.ceil(duration.amount / (mean_row_tokens * self.global_size)))

    def next_step(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next step: num_micro of micro_size rows."""
        wanted = [
            (micro * self._dp_size + self._dp_rank) * self._micro_size + row
            for micro in range(self._num_micro)
            for row in range(self._micro_size)
        ]
        self._last_rows = self._rows.take(self.global_size, wanted)
        size = self._micro_size
        return [self._assemble(self._last_rows[start : start + size]) for start in range(0, len(wanted), size)]

    def eval_batches(self) -> Iterator[MicroBatch]:
        """All held-out rows once; every rank gets the same number of micro-batches."""
        if self._evals is None:
            return
        stride = self._dp_size * self._micro_size
        self._evals.seek({"rows": 0})
        for _ in range(-(-self._evals.num_rows // stride)):
            first = self._dp_rank * self._micro_size
            yield self._assemble(self._evals.take(stride, range(first, first + self._micro_size)))

    def describe_last_step(self) -> str:
        """The records that this rank saw in its last step (`file.jsonl:17`), the first few."""
        places = list(dict.fromkeys(place for row in self._last_rows for place in row.places))
        more = f" … (+{len(places) - NUM_PLACES})" if len(places) > NUM_PLACES else ""
        return ", ".join(places[:NUM_PLACES]) + more

    def state_dict(self) -> dict[str, Any]:
        """The position; its size does not depend on it."""
        return {"fingerprint": self.fingerprint, **self._rows.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a position that any number of ranks has saved.

        Raises:
            UserError: the data, or what decides their order, have changed since.
        """
        if state["fingerprint"] != self.fingerprint:
            raise UserError(
                "checkpoint.resume",
                "the data (or seed, seq_len, packing, tokenizer, template) are not those of the checkpoint, "
                "so its position means nothing here; restore them, "
                "or start anew from its weights with model.path and checkpoint.resume: none",
                "数据（或 seed、seq_len、packing、分词器、模板）与检查点不一致，其位置在此无意义；请恢复原样，"
                "或以 model.path 指向其权重并设 checkpoint.resume: none 重新开始",
            )
        self._rows.seek({name: value for name, value in state.items() if name != "fingerprint"})

    def _assemble(self, rows: Sequence[Row]) -> MicroBatch:
        full = self._data.seq_len if self._data.packing == "fixed" else 0
        return assemble(rows, self._pad_id, multiple=self._width_multiple, min_width=full)


def _epoch_rows(duration: Duration, rows: TableRows) -> int:
    return math.ceil(duration.amount * rows.num_rows)


def open_data(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dp_rank: int = 0,
    dp_size: int = 1,
    micro_size: int = 1,
    num_micro: int = 1,
    width_multiple: int = WIDTH_MULTIPLE,
) -> Loader:
    """Opens the data of a recipe for one rank; the first process to come tokenises, the others wait for it.

    Args:
        dp_rank, dp_size: this rank among those that see different rows.
        micro_size, num_micro: rows a micro-batch, micro-batches a step.
        width_multiple: widths of micro-batches are multiples of this (seq_len: all are equally wide).

    Raises:
        UserError: anything about the data that the person can mend.
    """
    objective, data = training_objective(recipe), recipe.data
    group_size = dp_size * micro_size * num_micro
    tokenizer_id = fingerprint(tokenizer)
    train = open_sources(data.train, "train")
    evals = None
    if data.eval:
        stores = [open_store(source, data, objective, tokenizer, tokenizer_id) for source in open_sources(data.eval, "eval")]
        evals = _rows(stores, [1.0] * len(stores), recipe, "eval", group_size)
    rows: TableRows | StreamRows
    if data.streaming:
        rows = StreamRows(train, Encoder(tokenizer, objective), data, recipe.seed, group_size)
        facts = [tokenizer_id, objective.model_dump(), data.seq_len, data.packing, data.overlong, data.shuffle, recipe.seed]
        facts += [[content_id(opened.files), opened.format, opened.source.columns, opened.source.weight] for opened in train]
        name = "stream-" + hashlib.blake2b(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS), digest_size=12).hexdigest()
    else:
        stores = [open_store(source, data, objective, tokenizer, tokenizer_id) for source in train]
        rows = _rows(stores, [source.source.weight for source in train], recipe, "train", group_size)
        name = f"{rows.name}-{data.packing}" + (f"-{group_size}" if data.packing == "dynamic" else "")  # sorted by steps
        if data.eval_fraction and not data.eval:
            evals = _rows(stores, [1.0] * len(stores), recipe, "eval", group_size)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return Loader(
        rows,
        evals,
        data,
        pad_id,
        name,
        dp_rank=dp_rank,
        dp_size=dp_size,
        micro_size=micro_size,
        num_micro=num_micro,
        width_multiple=width_multiple,
    )


def _rows(stores: list[TokenStore], weights: list[float], recipe: Recipe, split: Split, group_size: int) -> TableRows:
    """Rows that end: the training ones with the recipe's epochs, the evaluation ones after one pass."""
    rows = open_rows(stores, weights, recipe.data, recipe.seed, split, group_size)
    if split == "eval":
        rows.last_row = rows.num_rows
    elif recipe.duration.unit == "epochs":
        rows.last_row = _epoch_rows(recipe.duration, rows)
    return rows


def training_objective(recipe: Recipe) -> Pretrain | Sft:
    """The objective, if this data path has it.

    Raises:
        UserError: preference and reinforcement objectives, whose data are of other kinds.
    """
    if isinstance(recipe.objective, (Pretrain, Sft)):
        return recipe.objective
    kind = recipe.objective.kind
    raise UserError(
        "objective",
        f"the embedded engine's data path knows pretrain and sft, not {kind}; choose a back end that has it",
        f"内置引擎的数据通路支持 pretrain 与 sft，不支持 {kind}；请选用支持它的后端",
    )
