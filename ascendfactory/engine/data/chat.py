"""Text with spans → tokens with a mask.

A text is tokenised once, as a whole, so that ids are those of inference; character offsets then
say which tokens are trained. A token that straddles the edge of a span (a blank before the answer
merged with its first word) is trained if more than half of its characters lie inside.
The first token of a sample is never trained: nothing predicts it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ascendfactory.core.recipe import Pretrain, Sft
from ascendfactory.engine.data.counts import RecordError
from ascendfactory.engine.data.formats import Sample
from ascendfactory.engine.data.render import Marked, Renderer

Tokens = tuple[NDArray[np.int32], NDArray[np.bool_]]  # ids and mask, both [n]
Offsets = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sequence: ids int32 [n], trained bool [n] (whether the token is a label)."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    is_document: bool = False  # may be cut into several rows
    key: int = 0  # 64-bit hash of the sample's content; sequences split from one sample share it


class Encoder:
    """Turns samples into tokens for one tokenizer and one objective."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, objective: Pretrain | Sft) -> None:
        self._renderer = Renderer(tokenizer, objective)
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._bos_id = tokenizer.bos_token_id
        self._eos_id = tokenizer.eos_token_id

    def encode_many(self, samples: Sequence[Sample], places: Sequence[str]) -> list[list[Encoded] | RecordError]:
        """The sequences of each sample, or what is wrong with it.

        Raises:
            UserError: the tokenizer lacks a chat template or an EOS token that these samples need.
        """
        results: list[list[Marked] | RecordError] = []
        for sample, place in zip(samples, places, strict=True):
            try:
                results.append(self._renderer.mark(sample, place))
            except RecordError as bad:
                results.append(bad)
        texts = [marked for result in results if not isinstance(result, RecordError) for marked in result]
        tokens = iter(self._tokenise(texts))
        return [result if isinstance(result, RecordError) else self._sequences(result, tokens) for result in results]

    def _tokenise(self, texts: list[Marked]) -> list[Tokens]:
        """ids and mask of each text, without BOS and EOS; all of them in one call."""
        if not texts:
            return []
        encodings = self._backend.encode_batch([marked.text for marked in texts], add_special_tokens=False)
        ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
        masks = [np.ones(found.size, bool) for found in ids]
        partial = [number for number, marked in enumerate(texts) if marked.spans != [(0, len(marked.text))]]
        if partial:
            offsets = [encodings[number].offsets for number in partial]
            flat = mask_tokens(offsets, [texts[number].spans for number in partial], [len(texts[number].text) for number in partial])
            ends = np.cumsum([len(found) for found in offsets]).tolist()
            for number, start, end in zip(partial, [0, *ends[:-1]], ends, strict=True):
                masks[number] = flat[start:end]
        return list(zip(ids, masks, strict=True))

    def _sequences(self, texts: list[Marked], tokens: Iterator[Tokens]) -> list[Encoded]:
        found = []
        key = 0
        for marked in texts:
            ids, trained = next(tokens)
            if marked.bos:
                ids, trained = np.concatenate([[np.int32(self._bos_id)], ids]), np.concatenate([[False], trained])
            if marked.eos:
                ids, trained = np.concatenate([ids, [np.int32(self._eos_id)]]), np.concatenate([trained, [True]])
            trained[:1] = False
            key = key or int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")
            found.append(Encoded(ids, trained, marked.is_document, key))
        return found


def mask_tokens(offsets: Sequence[Offsets], spans: Sequence[Offsets], num_chars: Sequence[int]) -> NDArray[np.bool_]:
    """Which tokens of some texts are trained, one text after the other.

    Some tokenizers report offsets without the white space of a token; it belongs to the token all the
    same, so a token is taken to begin no later than the one before it ends.

    Args:
        offsets: per text, characters [start, end) of each token.
        spans: per text, ascending spans of trained characters.
        num_chars: length of each text.

    Returns:
        bool [tokens of all texts].
    """
    num_tokens = [len(found) for found in offsets]
    text_start = np.cumsum([0, *num_chars])
    pairs = chain.from_iterable(chain.from_iterable(offsets))
    bounds = np.fromiter(pairs, np.int64, 2 * sum(num_tokens)).reshape(-1, 2)
    first_char = np.repeat(text_start[:-1], num_tokens)
    start, end = bounds[:, 0] + first_char, bounds[:, 1] + first_char
    previous_end = np.concatenate([[0], np.maximum.accumulate(end)[:-1]]) if end.size else end
    start = np.maximum(np.minimum(start, previous_end), first_char)
    is_trained = np.zeros(text_start[-1], bool)
    for base, text_spans in zip(text_start.tolist(), spans, strict=False):
        for low, high in text_spans:
            is_trained[base + low : base + high] = True
    num_before = np.concatenate([[0], np.cumsum(is_trained, dtype=np.int32)])  # trained characters before each one
    mask: NDArray[np.bool_] = (num_before[end] - num_before[start]) * 2 > end - start
    return mask


def encode(sample: Sample, tokenizer: PreTrainedTokenizerBase, objective: Pretrain | Sft, place: str = "") -> list[Encoded]:
    """The sequences of one sample: one, or several where the chat template rewrites earlier turns (see render.py).

    Raises:
        RecordError: the template refuses the conversation or loses a part of it.
        UserError: the tokenizer lacks a chat template or an EOS token that the sample needs.
    """
    result = Encoder(tokenizer, objective).encode_many([sample], [place])[0]
    if isinstance(result, RecordError):
        raise result
    return result
