"""What the data path counted: nothing is cut, dropped or skipped without a number for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ascendfactory.core.messages import UserError

MAX_PLACES = 8


class RecordError(UserError):
    """A record that cannot be used; `data.bad_lines` says whether it stops the run or is skipped."""


@dataclass
class Counts:
    """Sums over the records that were read. Trained tokens are those that become labels."""

    records: int = 0  # read, the bad ones included
    samples: int = 0  # sequences that are trained, after cuts and drops
    pieces: int = 0  # stretches of tokens in rows: one a sample, more of a document that was cut
    tokens: int = 0  # of these samples, padding excluded
    trained_tokens: int = 0
    truncated: int = 0  # samples cut at seq_len, and documents cut into pieces
    dropped: int = 0  # samples left out because they are longer than seq_len
    untrained: int = 0  # samples left out because no token of theirs would be trained
    split: int = 0  # conversations that became several samples because the template rewrites earlier turns
    held_out: int = 0  # samples kept for evaluation
    bad: int = 0
    bad_places: list[str] = field(default_factory=list)  # the first few, each with its reason
    rows: int = 0
    fill: float = 0.0  # tokens / (rows * seq_len)

    def add(self, other: Counts) -> None:
        """Adds the sums of `other` to these; rows and fill are left alone."""
        for name in (entry.name for entry in fields(self) if entry.name not in ("bad_places", "rows", "fill")):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.bad_places = (self.bad_places + other.bad_places)[:MAX_PLACES]

    def add_bad(self, record: RecordError) -> None:
        """Counts one record that cannot be used."""
        self.bad += 1
        if len(self.bad_places) < MAX_PLACES:
            self.bad_places.append(record.line())

    def as_dict(self) -> dict[str, Any]:
        """The counts as plain JSON data."""
        return asdict(self)
