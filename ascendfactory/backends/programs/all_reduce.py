"""Whether the processes of all nodes can add up one number each on their devices: `torchrun ... all_reduce.py cpu|cuda|npu`."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT_S = 120


def main(kind):
    """Exits with 0 where the sum is right, with 2 and one line where it cannot be had."""
    if kind == "npu":
        import torch_npu  # noqa: F401

    rank, local_rank, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    backend = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[kind]
    interfaces = " ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.endswith("_SOCKET_IFNAME"))
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
        device = torch.device("cpu") if kind == "cpu" else torch.device(kind, local_rank)
        numbers = torch.tensor([float(rank)], device=device)
        dist.all_reduce(numbers)
        total = float(numbers.item())
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"the nodes cannot add up a number over {backend} ({interfaces}): {first}; check firewall and interfaces", file=sys.stderr)
        return 2
    dist.destroy_process_group()
    if total != world * (world - 1) / 2:
        print(f"the nodes add up to {total}, not {world * (world - 1) / 2}: {backend} is broken here", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
