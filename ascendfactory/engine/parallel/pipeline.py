"""Runs a pipeline: each device works through its table of actions; activations and their gradients travel between neighbours.

The orders are torch's (`schedule.py`); they are run here and not by torch.distributed.pipelining, because there the receive buffers have
the shape of the first micro-batch for ever (rows here are as long as their data), and because a stage that waits for a gradient can
already run its recomputed layers again.

Shape letters: B rows, S tokens of a row on this device (under sequence parallelism: of its slice), M hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ascendfactory.core.plan import Layout
from ascendfactory.core.stages import SPLIT_BACKWARD, owner
from ascendfactory.engine.gradients import LateWork, late_weights
from ascendfactory.engine.memory.region import Region, collect
from ascendfactory.engine.mesh import Mesh
from ascendfactory.engine.objective.causal_lm import CausalLM
from ascendfactory.engine.parallel.context import LocalBatch
from ascendfactory.engine.parallel.fsdp import give_weights_back, hold_gradients, mark_backward, reduce_gradients
from ascendfactory.engine.parallel.pieces import Piece
from ascendfactory.engine.parallel.schedule import Action, forward_tables, training_tables
from ascendfactory.engine.parallel.stages import Stage


class StageModel(CausalLM):
    """The root module of one device of a pipeline: the same names as the whole model, a chunk at a time."""

    def __init__(self, hf: nn.Module, pieces: dict[str, Piece], stage: Stage) -> None:
        super().__init__(hf, pieces)
        self.stage = stage

    def forward(self, batch: LocalBatch, scale: float, chunk: int, hidden_BSM: Tensor | None) -> Tensor:  # type: ignore[override]
        """A chunk's hidden states [B, S, M], or on the last chunk its share of the loss (see `CausalLM.forward`).

        Args:
            chunk: its number in the model.
            hidden_BSM: what the chunk before gave; None on the first.
        """
        part = self.stage.parts[chunk]
        hidden_BSM = self.hidden_states(part.decoder, batch, hidden_BSM)
        return self.loss(hidden_BSM, batch, scale) if part.is_last else hidden_BSM

    def train(self, mode: bool = True) -> StageModel:
        """Training mode, of the shells of the chunks too."""
        super().train(mode)
        for part in self.stage.parts.values():
            part.decoder.training = mode
        return self


class Pipeline:
    """Forward and backward of the micro-batches of a step over the stages of one pipeline."""

    def __init__(
        self,
        model: StageModel,
        mesh: Mesh,
        layout: Layout,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        sequence_parts: int = 1,
        recompute_in_advance: bool = False,
    ) -> None:
        """Joins this device's stage to its pipeline.

        Args:
            model: with FSDP applied if there is any; with one of `SPLIT_BACKWARD`'s schedules FSDP must be of level 1.
            hidden_size: M.
            dtype: of hidden states.
            sequence_parts: a micro-batch is this many times as wide as the hidden states between stages (context × sequence parallel).
            recompute_in_advance: what a chunk's layers recompute is computed while the gradient is on its way, all of a micro-batch
                at once; FSDP must then be of level 1 or 2.

        Raises:
            ValueError: the level of FSDP is too high.
        """
        splits = layout.schedule in SPLIT_BACKWARD
        limit = 1 if splits else 2 if recompute_in_advance else 3
        if mesh.fsdp is not None and layout.zero > limit:
            raise ValueError(f"layout.zero must be at most {limit} here, not {layout.zero}")
        self.model, self.mesh, self.layout = model, mesh, layout
        self.hidden_size, self.dtype, self.sequence_parts = hidden_size, dtype, sequence_parts
        self.recompute_in_advance = recompute_in_advance
        self.splits_backward = splits
        self._tables: dict[tuple[bool, int], list[Action]] = {}

    def step(self, batches: Sequence[LocalBatch], scale: float) -> Tensor:
        """Forward and backward of every micro-batch; gradients are left on the parameters.

        Returns:
            fp32 scalar: scale × Σ token losses where losses appear on this device, else 0.
        """
        if self.splits_backward:
            hold_gradients(self.model)
        loss = _Passage(self, self._table(True, len(batches)), batches, scale, trains=True).run()
        if self.splits_backward:
            reduce_gradients(self.model)
        return loss

    @torch.no_grad()
    def evaluate(self, batches: Sequence[LocalBatch], scale: float = 1.0) -> Tensor:
        """The same number without gradients; every device of the pipeline must be given as many micro-batches."""
        loss = _Passage(self, self._table(False, len(batches)), batches, scale, trains=False).run()
        give_weights_back(self.model)
        return loss

    def _table(self, trains: bool, num_micro: int) -> list[Action]:
        if (trains, num_micro) not in self._tables:
            make = training_tables if trains else forward_tables
            tables = make(self.layout.schedule, self.layout.pp, self.layout.vpp, num_micro)
            self._tables[trains, num_micro] = tables[self.mesh.pp.rank]
        return self._tables[trains, num_micro]

    def rank_of(self, chunk: int) -> int:
        """The pipeline rank that runs a chunk."""
        return owner(chunk, self.layout.pp, self.layout.vpp, self.layout.schedule)


@dataclass
class _Flight:
    """A micro-batch inside a chunk, between its forward and its last backward pass."""

    entry_BSM: Tensor | None  # noqa: N815 - what came in, a leaf
    exit: GradientEdge | None = None  # of what went out: its values are the next chunk's alone, and gone once they are sent
    to_recompute: Sequence[Region] = ()  # while the gradient is on its way
    late: LateWork = field(default_factory=LateWork)  # split backward: what the input pass leaves for the weight pass


class _Passage:
    """One step or evaluation: what is under way between its actions."""

    def __init__(self, pipeline: Pipeline, table: list[Action], batches: Sequence[LocalBatch], scale: float, *, trains: bool) -> None:
        self._pipe, self._model, self._stage = pipeline, pipeline.model, pipeline.model.stage
        self._table, self._batches, self._scale, self._trains = table, batches, scale, trains
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._arriving: dict[tuple[str, int, int], tuple[Tensor, list[dist.Work]]] = {}
        self._made: dict[tuple[str, int, int], Tensor] = {}  # hidden states by the chunk they are for, gradients by the chunk they are for
        self._leaving: list[tuple[Tensor, list[dist.Work]]] = []  # kept until they are gone
        self._loss = torch.zeros((), dtype=torch.float32, device=pipeline.mesh.device)
        work = [action for action in table if action.computes]
        self._followed = {a for a, b in pairwise(work) if a.kind == "forward" and b == Action("backward", *a[1:])}
        ends = {action.chunk: action for action in work if action.kind == "backward"}
        self._chunk_ends = set(ends.values())
        self._step_ends = next((a for a in reversed(work) if a.kind == "backward" and self._stage.trains_up_to[a.chunk]), None)

    def run(self) -> Tensor:
        """Works through the table."""
        for action in self._table:
            match action.kind:
                case "forward":
                    self._forward(action)
                case "backward":
                    self._backward(action)
                case "input":
                    self._input_pass(action)
                case "weight":
                    self._weight_pass(action)
                case "send_forward":
                    self._send("hidden", action.chunk + 1, action.micro)
                case "receive_forward":
                    self._receive("hidden", action.chunk, action.micro, self._pipe.rank_of(action.chunk - 1))
                case "send_backward":
                    self._send("gradient", action.chunk - 1, action.micro)
                case "receive_backward":
                    self._receive("gradient", action.chunk, action.micro, self._pipe.rank_of(action.chunk + 1))
        for _, works in self._leaving:
            for work in works:
                work.wait()
        return self._loss

    # messages

    def _needs_gradient(self, chunk: int) -> bool:
        """Whether a gradient of a chunk's output is worth anything: not before the first adapter."""
        return chunk >= 0 and self._stage.trains_up_to[chunk]

    def _send(self, what: str, for_chunk: int, micro: int) -> None:
        if what == "gradient" and not self._needs_gradient(for_chunk):
            return
        tensor = self._made.pop((what, for_chunk, micro)).contiguous()
        peer = self._pipe.rank_of(for_chunk)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, group=self._pipe.mesh.pp.group, group_peer=peer)])
        self._leaving = [(t, ws) for t, ws in self._leaving if not all(w.is_completed() for w in ws)]
        self._leaving.append((tensor, works))

    def _receive(self, what: str, chunk: int, micro: int, peer: int) -> None:
        if what == "gradient" and not self._needs_gradient(chunk):
            return
        num_rows, width = self._batches[micro].input_ids_BS.shape
        shape = (num_rows, width // self._pipe.sequence_parts, self._pipe.hidden_size)
        buffer = torch.empty(shape, dtype=self._pipe.dtype, device=self._pipe.mesh.device)
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, buffer, group=self._pipe.mesh.pp.group, group_peer=peer)])
        self._arriving[what, chunk, micro] = buffer, works

    def _take(self, what: str, chunk: int, micro: int) -> Tensor:
        """From the chunk next to it: on this device, or by a message, which is waited for."""
        if (what, chunk, micro) in self._made:
            return self._made.pop((what, chunk, micro))
        tensor, works = self._arriving.pop((what, chunk, micro))
        for work in works:
            work.wait()
        return tensor

    # work

    def _forward(self, action: Action) -> None:
        part, at = self._stage.parts[action.chunk], (action.chunk, action.micro)
        entry_BSM = None if part.is_first else self._take("hidden", *at)
        if entry_BSM is not None and self._trains:
            entry_BSM.requires_grad_(self._needs_gradient(action.chunk - 1))
        flight = _Flight(entry_BSM)
        # where backward follows at once there is nothing to wait for
        early = self._trains and self._pipe.recompute_in_advance and action not in self._followed
        late = late_weights(flight.late) if self._trains and self._pipe.splits_backward else contextlib.nullcontext()
        with torch.set_grad_enabled(self._trains), late, collect() if early else contextlib.nullcontext(()) as flight.to_recompute:
            result_BSM = self._model(self._batches[action.micro], self._scale, action.chunk, entry_BSM)
        if self._trains:
            flight.exit = get_gradient_edge(result_BSM) if result_BSM.requires_grad else None
            self._flights[at] = flight
        if part.is_last:
            self._loss += result_BSM.detach()
        else:
            self._made["hidden", action.chunk + 1, action.micro] = result_BSM.detach()

    def _ready(self, action: Action) -> Tensor | None:
        """The gradient of what a micro-batch's chunk gave (None: it is the loss); what is to be recomputed first is, before that is
        waited for.

        All of it, whether the gradient is there or not: tensor-parallel partners must do the same things in the same order.
        """
        flight = self._flights[action[1:]]
        for region in reversed(flight.to_recompute):
            region.replay()
        flight.to_recompute = ()
        return None if self._stage.parts[action.chunk].is_last else self._take("gradient", action.chunk, action.micro)

    def _backward(self, action: Action) -> None:
        """Both halves at once: nothing is left of the micro-batch."""
        self._input_pass(action)
        self._weight_pass(action)

    def _input_pass(self, action: Action) -> None:
        """The gradient that the chunk before waits for. In a schedule that splits, products of weight gradients are left for later."""
        if not self._needs_gradient(action.chunk):
            return
        flight, grad_BSM = self._flights[action[1:]], self._ready(action)
        if not self._pipe.splits_backward:
            ends = action in self._chunk_ends
            layers = self._stage.parts[action.chunk].layers
            mark_backward(self._model, layers, self._pipe.layout, chunk_ends=ends, step_ends=action == self._step_ends)
        assert flight.exit is not None
        torch.autograd.backward(flight.exit, grad_BSM)
        flight.exit = None
        if self._needs_gradient(action.chunk - 1):
            assert flight.entry_BSM is not None and flight.entry_BSM.grad is not None
            self._made["gradient", action.chunk - 1, action.micro] = flight.entry_BSM.grad
        flight.entry_BSM = None

    def _weight_pass(self, action: Action) -> None:
        """What the input pass left."""
        self._flights.pop(action[1:]).late.run()
