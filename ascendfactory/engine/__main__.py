"""`python -m ascendfactory.engine plan.json`: one process of a training run."""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

from ascendfactory.core.messages import UserError, full_disk
from ascendfactory.core.plan import Plan

LAST_WAIT_S = 2.0


def main(argv: list[str]) -> int:
    """Runs the plan.

    Returns:
        0 finished or stopped with a checkpoint; 2 the input is at fault (one line on stderr); 1 anything else (traceback in logs/).
    """
    plan = Plan.model_validate_json(Path(argv[1]).read_text(encoding="utf-8"))
    rank = os.environ.get("RANK", "0")
    # torch 2.13 has its collectives under two names and warns of the older ones, once a process and place
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    try:
        from ascendfactory.engine.trainer import train_steps

        for _ in train_steps(plan):
            pass
    except UserError as error:
        print(error.line(), file=sys.stderr, flush=True)  # each rank: one alone may see it (the launcher tells it once)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if full := full_disk(error):
            print(full.line(), file=sys.stderr, flush=True)
            return 2
        logs = Path(plan.run_dir) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"failure-rank{rank}.txt"
        log.write_text(traceback.format_exc(), encoding="utf-8")
        print(f"rank {rank}: {type(error).__name__}: {error} ({log})", file=sys.stderr, flush=True)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            # this may be the answer to a partner's death, and torchrun must see that one first; its SIGTERM ends the wait
            time.sleep(LAST_WAIT_S)
        return 1
    return 0


def leave(code: int) -> None:
    """Ends the process without tearing down torch's native parts.

    After a failure other ranks may still wait inside a collective; after a success the order in which threads of process groups and
    objects that they use go is left to chance, and now and then ends in an abort.
    """
    if code == 0:
        atexit._run_exitfuncs()  # Python's own: worker processes, writers
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv))
