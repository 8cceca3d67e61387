"""Sequences longer than a row: what is cut, what is dropped, and how much remains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ascendfactory.core.messages import UserError


@dataclass(frozen=True)
class Pieces:
    """Stretches of tokens that fit a row, and what was lost on the way. n = pieces."""

    sample: NDArray[np.int64]  # [n] sequence that the piece is of
    start: NDArray[np.int64]  # [n] first token, counted from the start of the sequence
    length: NDArray[np.int64]  # [n]
    truncated: int
    dropped: int
    untrained: int


def cut(
    lengths: NDArray[np.integer],
    first_trained: NDArray[np.integer],
    is_document: NDArray[np.bool_],
    seq_len: int,
    overlong: Literal["cut", "drop", "stop"],
    place: Callable[[int], str],
) -> Pieces:
    """Makes sequences fit rows of seq_len tokens.

    `cut` takes the tail off a conversation, whose answer needs the prompt before it, and cuts a document into
    consecutive pieces, of which nothing is lost. A piece of which no token would be trained is left out.

    Args:
        lengths, first_trained, is_document: per sequence, see TokenBlock.
        place: the name of a sequence's record, for the message.

    Raises:
        UserError: `stop`, and a sequence is too long.
    """
    lengths = lengths.astype(np.int64)
    over = lengths > seq_len
    if overlong == "stop" and over.any():
        worst = int(over.argmax())
        raise UserError(
            place(worst),
            f"the sample has {lengths[worst]} tokens and data.seq_len is {seq_len}; raise it, or set data.overlong to cut or drop",
            f"样本有 {lengths[worst]} 个词元，而 data.seq_len 为 {seq_len}；请调大，或将 data.overlong 设为 cut 或 drop",
        )
    dropped = int(over.sum()) if overlong == "drop" else 0
    cut_off = over & ~is_document & (first_trained >= seq_len)  # the answer lies beyond the cut
    kept = np.flatnonzero(~over if overlong == "drop" else ~cut_off)
    num_pieces = np.where(is_document[kept], -(-lengths[kept] // seq_len), 1)
    sample = np.repeat(kept, num_pieces)
    number = np.arange(sample.size) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    start = number * seq_len
    length = np.minimum(lengths[sample] - start, seq_len)
    useful = (length > 1) | (number == 0)  # a last piece of one token has nothing to predict
    truncated = int(over[kept].sum()) if overlong == "cut" else 0
    untrained = int(cut_off.sum()) if overlong == "cut" else 0
    return Pieces(sample[useful], start[useful], length[useful], truncated, dropped, untrained)
