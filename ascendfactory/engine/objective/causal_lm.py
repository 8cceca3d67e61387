"""Next-token loss of a Hugging Face decoder: body, then the head at trained positions only."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ascendfactory.engine.attention import document_spans
from ascendfactory.engine.data.batch import MicroBatch
from ascendfactory.engine.families import head_rules
from ascendfactory.engine.objective.cross_entropy import linear_cross_entropy


class CausalLM(nn.Module):
    """The root module of a training run: a micro-batch goes in, its share of the step's loss comes out.

    The Hugging Face model sits unmodified at `.hf` (inside peft's wrapper if there are adapters); parameter
    names of checkpoints are those below it.
    """

    def __init__(self, hf: nn.Module) -> None:
        super().__init__()
        self.hf = hf
        base = hf.get_base_model() if hasattr(hf, "get_base_model") else hf
        self._body = [base.get_decoder()]  # in a list: not registered a second time
        self._head = [base.get_output_embeddings()]
        self._rules = head_rules(base.config)

    def forward(self, batch: MicroBatch, scale: float) -> Tensor:
        """scale × Σ of the micro-batch's token losses, an fp32 scalar.

        Args:
            batch: this device's rows; labels are already shifted, so no position looks at the next row or document.
            scale: 1 / (trained tokens of the whole step over all devices).
        """
        hidden_BSM = self._body[0](
            input_ids=batch.input_ids_BS,
            position_ids=batch.positions_BS,
            attention_mask=None,
            use_cache=False,
            spans=document_spans(batch.lengths),
        ).last_hidden_state
        head = self._head[0]
        return linear_cross_entropy(
            hidden_BSM.flatten(0, 1).index_select(0, batch.trained_at_N),
            head.weight,
            batch.labels_BS.flatten().index_select(0, batch.trained_at_N),
            scale=scale,
            bias_V=getattr(head, "bias", None),
            softcap=self._rules.softcap,
            logit_scale=self._rules.scale,
        )

    def generate(self, **settings: Any) -> Tensor:
        """transformers' generate; a forward method of the root, so that FSDP gathers its weights."""
        tokens: Tensor = self.hf.generate(**settings)
        return tokens


def count_trained_tokens(batches: list[MicroBatch]) -> int:
    """Positions of the micro-batches that have a label."""
    return sum(len(batch.trained_at_N) for batch in batches)
