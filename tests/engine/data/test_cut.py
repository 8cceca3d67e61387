"""Sequences longer than a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendfactory.core.messages import UserError
from ascendfactory.engine.data.cut import cut


def pieces(lengths, documents, overlong, first=None, seq_len=10):
    first = np.ones(len(lengths), int) if first is None else np.array(first)
    return cut(np.array(lengths), first, np.array(documents, bool), seq_len, overlong, lambda number: f"f:{number}")


def test_conversations_lose_their_tail_and_documents_nothing() -> None:
    found = pieces([5, 25, 25, 21], [False, False, True, True], "cut")
    assert found.sample.tolist() == [0, 1, 2, 2, 2, 3, 3]
    assert found.start.tolist() == [0, 0, 0, 10, 20, 0, 10]
    assert found.length.tolist() == [5, 10, 10, 10, 5, 10, 10]  # the last token of the last one would predict nothing
    assert (found.truncated, found.dropped, found.untrained) == (3, 0, 0)


def test_an_answer_beyond_the_cut_leaves_nothing_to_train() -> None:
    found = pieces([25, 25], [False, False], "cut", first=[10, 9])
    assert found.sample.tolist() == [1]
    assert (found.truncated, found.untrained) == (1, 1)


def test_drop_and_stop() -> None:
    found = pieces([5, 25, 10], [False, True, False], "drop")
    assert found.sample.tolist() == [0, 2] and found.dropped == 1
    with pytest.raises(UserError, match="f:1: the sample has 25 tokens") as caught:
        pieces([5, 25, 30], [False, True, False], "stop")
    assert "25" in caught.value.zh


@given(st.lists(st.tuples(st.integers(2, 100), st.booleans()), min_size=1, max_size=30), st.integers(2, 40))
def test_pieces_of_documents_are_consecutive_and_fit(samples, seq_len) -> None:
    lengths, documents = zip(*samples, strict=True)
    found = pieces(lengths, documents, "cut", seq_len=seq_len)
    assert (found.length <= seq_len).all() and (found.length >= 2).all()
    for number, (length, document) in enumerate(samples):
        mine = found.sample == number
        assert found.start[mine].tolist() == [sum(found.length[mine][:k]) for k in range(mine.sum())]
        assert length - found.length[mine].sum() <= (1 if document else max(length - seq_len, 0))
