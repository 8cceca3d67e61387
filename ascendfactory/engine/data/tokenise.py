"""Records → a block of tokens: parse, convert, render and tokenise many records at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascendfactory.engine.data.chat import Encoded, Encoder
from ascendfactory.engine.data.counts import Counts, RecordError
from ascendfactory.engine.data.formats import Format, Sample, to_sample
from ascendfactory.engine.data.records import DataFile, parse

INDEX_BITS = 40


@dataclass(frozen=True, slots=True)
class RawRecord:
    """An unparsed record and its address: number of the file in the source, index in the file."""

    raw: Any
    file: int
    index: int


def place_of(address: int, files: Sequence[DataFile]) -> str:
    """The name of the record at an address: the file's number above 40 bits of the record's index in it."""
    return files[address >> INDEX_BITS].place(address & ((1 << INDEX_BITS) - 1))


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """Sequences one after the other. n = sequences, T = their tokens."""

    ids: NDArray[np.int32]  # [T]
    trained: NDArray[np.bool_]  # [T]
    lengths: NDArray[np.int32]  # [n]
    num_trained: NDArray[np.int32]  # [n]
    first_trained: NDArray[np.int32]  # [n] position of the first trained token
    is_document: NDArray[np.bool_]  # [n]
    keys: NDArray[np.uint64]  # [n]
    addresses: NDArray[np.int64]  # [n] see `place_of`


def tokenise(
    records: Sequence[RawRecord], files: Sequence[DataFile], form: Format, columns: Mapping[str, str], encoder: Encoder, stop: bool
) -> tuple[TokenBlock, Counts]:
    """Tokens of some records of one source, in their order.

    Sequences without a trained token are counted and left out.

    Args:
        stop: raise at the first bad record; else count it and go on.

    Raises:
        RecordError: the first bad record, where `stop`.
        UserError: the tokenizer lacks something that every record needs.
    """
    counts = Counts(records=len(records))
    samples: list[Sample] = []
    kept: list[RawRecord] = []
    places: list[str] = []
    for record in records:
        place = files[record.file].place(record.index)
        try:
            samples.append(to_sample(parse(record.raw, place), form, columns, place))
        except RecordError as bad:
            _refuse(bad, counts, stop)
            continue
        kept.append(record)
        places.append(place)
    found: list[Encoded] = []
    addresses: list[int] = []
    for record, result in zip(kept, encoder.encode_many(samples, places), strict=True):
        if isinstance(result, RecordError):
            _refuse(result, counts, stop)
            continue
        counts.split += len(result) > 1
        for encoded in result:
            if encoded.trained.any():
                found.append(encoded)
                addresses.append(record.file << INDEX_BITS | record.index)
            else:
                counts.untrained += 1
    return _block(found, addresses), counts


def _refuse(bad: RecordError, counts: Counts, stop: bool) -> None:
    if stop:
        raise bad
    counts.add_bad(bad)


def _block(found: list[Encoded], addresses: list[int]) -> TokenBlock:
    return TokenBlock(
        ids=np.concatenate([e.ids for e in found]) if found else np.zeros(0, np.int32),
        trained=np.concatenate([e.trained for e in found]) if found else np.zeros(0, bool),
        lengths=np.array([e.ids.size for e in found], np.int32),
        num_trained=np.array([np.count_nonzero(e.trained) for e in found], np.int32),
        first_trained=np.array([e.trained.argmax() for e in found], np.int32),
        is_document=np.array([e.is_document for e in found], bool),
        keys=np.array([e.key for e in found], np.uint64),
        addresses=np.array(addresses, np.int64),
    )
