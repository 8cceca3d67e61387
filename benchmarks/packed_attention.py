"""Attention of a packed row: ours, document by document, against one call with a dense mask over the whole row.

    python benchmarks/packed_attention.py [--documents 16] [--length 512] [--pairs 3] [--threads 1]

Both are forward and backward of the same q, k, v; the other side is torch's scaled_dot_product_attention with a boolean
block-diagonal causal mask, made beforehand. They take turns, and outputs and gradients are compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import measure
import torch
from torch import Tensor
from torch.nn import functional

from ascendfactory.engine.attention import attend
from ascendfactory.engine.blocks import whole_rows

HEADS, KV_HEADS, HEAD_SIZE = 9, 3, 64  # SmolLM2-135M


def block_diagonal(num_documents: int, length: int) -> Tensor:
    """Boolean [S, S]: same document and not after the query."""
    document = torch.arange(num_documents).repeat_interleave(length)
    at = torch.arange(num_documents * length)
    return (document[:, None] == document[None, :]) & (at[:, None] >= at[None, :])


def timed(run: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor) -> tuple[float, float, list[Tensor]]:
    """Seconds of forward, of backward, and output with gradients."""
    start = time.process_time()
    out = run()
    middle = time.process_time()
    found = torch.autograd.grad(out, inputs, grad)
    return middle - start, time.process_time() - middle, [out.detach(), *found]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    width = args.documents * args.length
    # stored as the models' projections leave them: [B, S, H, D]
    inputs = [torch.randn(1, width, h, HEAD_SIZE).transpose(1, 2).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS)]
    grad, documents = torch.randn(1, width, HEADS, HEAD_SIZE), whole_rows([[args.length] * args.documents], width)
    mask = block_diagonal(args.documents, args.length)
    sides = {
        "ours": lambda: attend(torch.nn.Identity(), *inputs, None, documents=documents)[0],
        "dense mask": lambda: functional.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True).transpose(1, 2),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(args.pairs + 1):
        found = {}
        for name in sides if number % 2 else reversed(sides):
            forward_s, backward_s, found[name] = timed(sides[name], inputs, grad)
            if number:  # the first pair warms up
                seconds[name].append((forward_s, backward_s))
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(*found.values(), strict=True))
    rows = [
        {
            "side": name,
            "forward s": median(forward_s for forward_s, _ in times),
            "backward s": median(backward_s for _, backward_s in times),
            "sum s": median(map(sum, times)),
        }
        for name, times in seconds.items()
    ]
    ratio = rows[1]["sum s"] / rows[0]["sum s"]
    print(measure.table(rows))
    print(f"dense mask / ours = {ratio:.1f}; largest relative difference {error:.1e}")
    result = {"num_documents": args.documents, "length_tokens": args.length, "num_threads": args.threads, "figures": rows}
    print(measure.write_result("packed_attention", result | {"ratio": ratio, "largest_relative_difference": error}))


if __name__ == "__main__":
    main()
