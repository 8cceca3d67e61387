"""What DCP is told of a tensor: the boxes of the whole that this device holds, whatever cut them.

DCP reads and writes boxes of a named whole; a box that several devices hold is written by one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ascendfactory.engine.parallel.pieces import Chunk, Piece, chunks


@dataclass(frozen=True)
class Kept:
    """A live tensor of a run, with its place in the whole one that files know."""

    parameter: Tensor  # as it is stored on the module
    piece: Piece | None = None
    of: Tensor | None = None  # laid out as the parameter: a moment, a gradient

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size(self.piece.shape) if self.piece else self.parameter.shape

    def boxes(self, *, copy: bool = False) -> Boxes:
        """What DCP takes.

        Args:
            copy: whether the values are copied to host memory; else they are live, so that loading fills them.
        """
        held = chunks(self.parameter.detach(), self.piece, self.of)
        values = self.parameter if self.of is None else self.of
        place = {chunk.offset: Chunk(chunk.offset, chunk.tensor.detach().to("cpu", copy=True)) if copy else chunk for chunk in held}
        return Boxes(self.shape, values.dtype, {torch.Size(offset): chunk.tensor for offset, chunk in place.items()})


@dataclass(frozen=True)
class Boxes:
    """DCP's protocol for a tensor of which this device holds boxes, by offset; none of them may be here."""

    shape: torch.Size
    dtype: torch.dtype
    by_offset: Mapping[torch.Size, Tensor]

    def size(self) -> torch.Size:
        """Of the whole tensor."""
        return self.shape

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, self.shape))
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, box.shape) for offset, box in self.by_offset.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.by_offset[index.offset]


class BoxWriter(DefaultSavePlanner):
    """DCP's planner for a flat dictionary of boxes (its own asks for subclasses of Tensor when it comes to the data)."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The values of a box."""
        boxes: Boxes = self.state_dict[index.fqn]
        return boxes.__get_tensor_shard__(index)


class BoxReader(DefaultLoadPlanner):
    """The same for reading."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Takes the boxes as they are (DCP's own looks for meta tensors, and drops what is none)."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The live box to fill."""
        boxes: Boxes = self.state_dict[index.fqn]
        return boxes.__get_tensor_shard__(index)


class Folder(FileSystemReader):
    """DCP's files, whose index is read once: for the names and for the reading."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Names, shapes and where everything lies."""
        if self._index is None:
            self._index = super().read_metadata(*args, **kwargs)
        return self._index
