"""What will be trained, shown before it is: samples with the trained text marked, and the counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ascendfactory.core.messages import UserError, pick
from ascendfactory.core.recipe import Recipe, Sft
from ascendfactory.engine.data.chat import Encoder
from ascendfactory.engine.data.counts import Counts
from ascendfactory.engine.data.cut import cut
from ascendfactory.engine.data.loader import training_objective
from ascendfactory.engine.data.pack import pack_rows
from ascendfactory.engine.data.store import OpenedSource, chunks, open_sources
from ascendfactory.engine.data.tokenise import TokenBlock, place_of, tokenise

MAX_RECORDS = 2000  # looked at in each source

Run = tuple[str, bool]  # a stretch of text, and whether it is trained


@dataclass(frozen=True)
class PreviewSample:
    """One sample as the model sees it."""

    place: str
    runs: list[Run]


@dataclass(frozen=True)
class Preview:
    """The first records of every source, as they would be trained."""

    samples: list[PreviewSample]
    counts: Counts
    formats: list[tuple[str, str]]  # path of the source, its format
    complete: bool  # whether all records were looked at


def preview(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, num_samples: int = 3) -> Preview:
    """Encodes the first 2000 records of every source and packs them; the token cache is not touched.

    Args:
        num_samples: samples to show, spread over the sources.

    Raises:
        UserError: anything about the data that the person can mend.
    """
    encoder = Encoder(tokenizer, training_objective(recipe))
    counts = Counts()
    samples: list[PreviewSample] = []
    lengths = []
    complete = True
    sources = open_sources(recipe.data.train, "train")
    for number, source in enumerate(sources):
        block, whole = _first_block(source, recipe, encoder, counts)
        complete &= whole
        lengths.append(_cut_block(block, source, recipe, counts))
        share = (num_samples - len(samples)) // (len(sources) - number)
        samples += _samples(block, source, tokenizer, share)
    sizes = np.concatenate(lengths)
    counts.rows = pack_rows(sizes, np.arange(sizes.size), recipe.data.seq_len).num_rows if recipe.data.packing == "packed" else sizes.size
    counts.fill = counts.tokens / (counts.rows * recipe.data.seq_len) if counts.rows else 0.0
    return Preview(samples, counts, [(source.source.path, source.format) for source in sources], complete)


def _first_block(source: OpenedSource, recipe: Recipe, encoder: Encoder, counts: Counts) -> tuple[TokenBlock, bool]:
    """Tokens of the first records, and whether there are no others."""
    records = list(itertools.islice(itertools.chain.from_iterable(chunks(source.files)), MAX_RECORDS + 1))
    whole = len(records) <= MAX_RECORDS
    stop = recipe.data.bad_lines == "stop"
    block, found = tokenise(records[:MAX_RECORDS], source.files, source.format, source.source.columns, encoder, stop)
    counts.add(found)
    return block, whole


def _cut_block(block: TokenBlock, source: OpenedSource, recipe: Recipe, counts: Counts) -> NDArray[np.int64]:
    """Lengths of the pieces that rows are made of; adds to the counts."""
    pieces = cut(
        block.lengths,
        block.first_trained,
        block.is_document,
        recipe.data.seq_len,
        recipe.data.overlong,
        lambda at: place_of(int(block.addresses[at]), source.files),
    )
    starts = (np.cumsum(block.lengths, dtype=np.int64) - block.lengths)[pieces.sample] + pieces.start
    trained = np.r_[0, np.cumsum(block.trained)]
    first = np.r_[block.trained, False][starts]  # the first token of a piece is no label
    counts.add(Counts(truncated=pieces.truncated, dropped=pieces.dropped, untrained=pieces.untrained))
    counts.samples += int(np.unique(pieces.sample).size)
    counts.pieces += int(pieces.length.size)
    counts.tokens += int(pieces.length.sum())
    counts.trained_tokens += int((trained[starts + pieces.length] - trained[starts] - first).sum())
    return pieces.length


def _samples(block: TokenBlock, source: OpenedSource, tokenizer: PreTrainedTokenizerBase, count: int) -> list[PreviewSample]:
    ends = np.cumsum(block.lengths)
    found = []
    for number in range(min(count, ends.size)):
        span = slice(int(ends[number] - block.lengths[number]), int(ends[number]))
        runs = decode_runs(block.ids[span].tolist(), block.trained[span].tolist(), tokenizer)
        found.append(PreviewSample(place_of(int(block.addresses[number]), source.files), runs))
    return found


def decode_runs(ids: Sequence[int], trained: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> list[Run]:
    """Text of each stretch of tokens that are trained alike.

    Args:
        ids, trained: both [n], see Encoded.
    """
    runs = []
    for flag, group in itertools.groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in group], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        runs.append((str(text), bool(flag)))
    return runs


def check_mask(counts: Counts, recipe: Recipe) -> None:
    """Refuses data of which nothing, or in fine-tuning everything, would be trained.

    Raises:
        UserError: unless `data.mask_check` is false, or `objective.train_on` is all.
    """
    if not recipe.data.mask_check:
        return
    if counts.trained_tokens == 0:
        raise UserError(
            "data",
            f"no token of {counts.records} records would be trained ({counts.bad} bad, {counts.dropped} too long, "
            f"{counts.untrained} without an answer inside seq_len); run the preview to see the samples",
            f"{counts.records} 条记录中没有可训练的词元（{counts.bad} 条有误，{counts.dropped} 条过长，"
            f"{counts.untrained} 条在 seq_len 内没有回答）；请用 preview 查看样本",
        )
    trains_answers = isinstance(recipe.objective, Sft) and recipe.objective.train_on != "all"
    everything = counts.trained_tokens >= counts.tokens - counts.pieces  # the first token of a piece is never a label
    if trains_answers and everything:
        raise UserError(
            "objective",
            "every token would be trained, the prompts as well: the data are plain text; write objective: pretrain, "
            "or train_on: all if this is meant",
            "所有词元（包括提问）都会被训练：数据是纯文本；请写 objective: pretrain，若确实如此请设 train_on: all",
        )


def render(shown: Preview) -> RenderableType:
    """The preview for a terminal: trained text is bold green, the rest is dim."""
    panels: list[RenderableType] = []
    for sample in shown.samples:
        text = Text()
        for piece, trained in sample.runs:
            text.append(piece, style="bold green" if trained else "dim")
        panels.append(Panel(text, title=Text(sample.place), title_align="left"))
    legend = Text.assemble(
        (pick("trained", "参与训练"), "bold green"), "  ", (pick("context only, not trained", "仅作上下文，不参与训练"), "dim")
    )
    return Group(*panels, legend, _counts_table(shown))


def _counts_table(shown: Preview) -> Table:
    counts = shown.counts
    scope = (
        pick("all records", "全部记录")
        if shown.complete
        else pick(f"first {MAX_RECORDS} records a source", f"每个来源的前 {MAX_RECORDS} 条")
    )
    table = Table(title=pick("Data", "数据") + f" ({scope})", title_justify="left", show_header=False)
    for path, form in shown.formats:
        table.add_row(pick("format", "格式"), f"{form}  {path}")
    share = counts.trained_tokens / counts.tokens if counts.tokens else 0.0
    lines = [
        (pick("records", "记录"), f"{counts.records:,}"),
        (pick("samples", "样本"), f"{counts.samples:,}"),
        (pick("tokens", "词元"), f"{counts.tokens:,}"),
        (pick("trained tokens", "参与训练的词元"), f"{counts.trained_tokens:,} ({share:.1%})"),
        (pick("rows", "行"), f"{counts.rows:,}"),
        (pick("fill of a full row", "满行填充率"), f"{counts.fill:.1%}"),
        (pick("cut at seq_len", "按 seq_len 截断"), f"{counts.truncated:,}"),
        (pick("dropped: longer than seq_len", "丢弃：超过 seq_len"), f"{counts.dropped:,}"),
        (pick("dropped: nothing to train", "丢弃：无可训练词元"), f"{counts.untrained:,}"),
        (pick("split: the template rewrites earlier turns", "拆分：模板会改写之前的轮次"), f"{counts.split:,}"),
        (pick("bad records", "有误的记录"), f"{counts.bad:,}"),
    ]
    for name, value in lines:
        table.add_row(name, value)
    for place in counts.bad_places:
        table.add_row("", Text(place, style="red"))
    return table
