"""Next-token loss of a Hugging Face decoder: body, then the head at trained positions only."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ascendfactory.engine.families import head_rules
from ascendfactory.engine.objective.cross_entropy import linear_cross_entropy
from ascendfactory.engine.parallel.context import LocalBatch
from ascendfactory.engine.parallel.pieces import Piece
from ascendfactory.engine.parallel.tensor import gather_hidden, whole_positions


class CausalLM(nn.Module):
    """The root module of a training run: a micro-batch goes in, its share of the step's loss comes out.

    The Hugging Face model sits unmodified at `.hf` (inside peft's wrapper if there are adapters); parameter
    names of checkpoints are those below it.

    Args:
        hf: transformers' model, after `tensor.apply`.
        pieces: public name → what tensor and pipeline parallelism left of a parameter; names that are absent are whole.
    """

    def __init__(self, hf: nn.Module, pieces: dict[str, Piece]) -> None:
        super().__init__()
        self.hf, self.pieces = hf, pieces
        base = hf.get_base_model() if hasattr(hf, "get_base_model") else hf
        self._base = [base]  # in lists: not registered a second time
        self._body = [base.get_decoder()]
        self._head = [base.get_output_embeddings()]
        self._rules = head_rules(base.config)

    def forward(self, batch: LocalBatch, scale: float) -> Tensor:
        """scale × Σ of the micro-batch's token losses, an fp32 scalar.

        Args:
            batch: this device's tokens; labels are already shifted, so no position looks at the next row or document.
            scale: 1 / (trained tokens of the whole step over all devices).
        """
        return self.loss(self.hidden_states(self._body[0], batch), batch, scale)

    def hidden_states(self, decoder: Any, batch: LocalBatch, hidden_BSM: Tensor | None = None) -> Tensor:
        """What a decoder, or a pipeline chunk of it, makes of a micro-batch: [B, S, M], S / tp under sequence parallelism.

        Args:
            hidden_BSM: what the chunk before gave; None: begin with the token ids.
        """
        result: Tensor = decoder(
            input_ids=batch.input_ids_BS if hidden_BSM is None else None,
            inputs_embeds=hidden_BSM,
            position_ids=batch.positions_BS,
            attention_mask=None,
            use_cache=False,
            documents=batch.documents,
        ).last_hidden_state
        return result

    def loss(self, hidden_BSM: Tensor, batch: LocalBatch, scale: float) -> Tensor:
        """scale × Σ of token losses, from the decoder's last hidden states; see `forward`."""
        base, head = self._base[0], self._head[0]
        hidden_BSM = gather_hidden(hidden_BSM, base)
        return linear_cross_entropy(
            hidden_BSM.flatten(0, 1).index_select(0, batch.trained_at_N),
            head.weight,
            batch.labels_BS.flatten().index_select(0, batch.trained_at_N),
            scale=scale,
            bias_V=getattr(head, "bias", None),
            softcap=self._rules.softcap,
            logit_scale=self._rules.scale,
            axis=base.tensor_parallel.axis,
            vocab_size=base.config.get_text_config().vocab_size,
        )

    def generate(self, **settings: Any) -> Tensor:
        """transformers' generate; a forward method of the root, so that FSDP gathers its weights."""
        with whole_positions(self._base[0]):
            tokens: Tensor = self.hf.generate(**settings)
        return tokens
