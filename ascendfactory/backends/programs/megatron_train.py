"""Starts Megatron's training with what is only known when its data lies there: the number of steps, and whether to resume.

    python megatron_train.py START.json -- COMMAND ...

In COMMAND, {train_iters} and {save_interval} are filled in from the index of the tokenised data, and {load} becomes the flags
that resume the newest checkpoint, or those that start from the converted weights. Then the command takes this process's place.
"""

import json
import math
import os
import struct
import sys
from pathlib import Path

BLOCK = 1 << 16  # lengths read at once
INDEX_MAGIC = b"MMIDIDX\x00\x00"


def count(index_path):
    """Sequences and tokens of a Megatron index file: header, then the length of each sequence as int32."""
    with Path(index_path).open("rb") as stream:
        if stream.read(9) != INDEX_MAGIC:
            raise SystemExit(f"{index_path} is no index of tokenised data; remove its folder and start again")
        stream.read(9)  # version and dtype
        num_sequences, _ = struct.unpack("<QQ", stream.read(16))
        num_tokens = 0
        for first in range(0, num_sequences, BLOCK):
            block = stream.read(4 * min(BLOCK, num_sequences - first))
            num_tokens += sum(struct.unpack(f"<{len(block) // 4}i", block))
    return num_sequences, num_tokens


def steps_of(start):
    """Optimizer steps of one epoch."""
    num_sequences, num_tokens = count(start["index"])
    rows = num_tokens / start["seq_len"] if start["rows"] == "tokens" else num_sequences
    return max(1, math.ceil(rows / start["global_size"]))


def main():
    """Fills the command in and becomes it."""
    start = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    command = sys.argv[sys.argv.index("--") + 1 :]
    epoch_steps = steps_of(start) if start["epochs"] or start["save_epochs"] else 0
    train_iters = start["steps"] or math.ceil(epoch_steps * start["epochs"])
    save_interval = start["save_steps"] or math.ceil(epoch_steps * start["save_epochs"])
    resumes = (Path(start["checkpoints"]) / "latest_checkpointed_iteration.txt").exists()
    words = []
    for word in command:
        if word == "{load}":
            words += start["resume"] if resumes else start["fresh"]
        else:
            words.append(word.replace("{train_iters}", str(train_iters)).replace("{save_interval}", str(min(save_interval, train_iters))))
    if words[0] == "python":
        words[0] = sys.executable
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
