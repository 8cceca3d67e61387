"""What a failed job left on stderr, told in a few lines: its real exit code and its own last words."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NUM_SHOWN_LINES = 12
# torchrun reports a rank's failure in log lines (`E0101 12:00:00.000000 pid .../torch/distributed/elastic/...`) and then
# with a traceback of its own; both come after the rank's own words.
_TORCHRUN_LINE = re.compile(r"^[WEIF]\d{4} .*torch/distributed/")
_TORCHRUN_END = re.compile(r"closing signal|failed \(exitcode")
_RANK = re.compile(r"^\s*rank\s*:\s*(\d+)")
_RANK_CODE = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)")
_SIGNAL_HINTS = {
    9: ("killed: most often the machine ran out of memory", "被系统终止：多半是内存不足"),
    11: ("crashed inside native code (segmentation fault)", "原生代码崩溃（段错误）"),
    6: ("aborted inside native code", "原生代码中止"),
}
# engine/position.py names these
_DOING = {
    "start": ("start", "启动"),
    "data": ("data", "读取数据"),
    "compute": ("forward and backward pass", "前向与反向计算"),
    "update": ("update", "参数更新"),
    "save": ("saving", "保存"),
    "evaluate": ("evaluation", "评估"),
    "export": ("export", "导出"),
}
USER_ERROR = 2


def exit_code(code: int, stderr: Sequence[str]) -> int:
    """The job's own exit code: torchrun ends with 1 whatever its ranks ended with, and names theirs on stderr.

    Args:
        code: of the process started (negative: the signal that ended it).
        stderr: its last lines.

    Returns:
        The code, 128 + n for signal n as a shell has it; with several ranks that of a user error, else that of the root cause.
    """
    ranks = [int(found[1]) for line in stderr if (found := _RANK_CODE.match(line))]
    if code == 1 and ranks:
        code = USER_ERROR if USER_ERROR in ranks else ranks[-1]  # the root cause is listed last
    return code if code >= 0 else 128 - code


def failed_rank(stderr: Sequence[str]) -> int | None:
    """The rank that failed first (torchrun lists it last), or None for a job of one process."""
    ranks = [int(found[1]) for line in stderr if (found := _RANK.match(line))]
    return ranks[-1] if ranks else None


def last_position(run_dir: Path, rank: int) -> tuple[str, str]:
    """What a rank was doing when it was last heard of, in both languages; empty if it left no word."""
    file = run_dir / "logs" / f"position-rank{rank}.json"
    try:
        place = json.loads(file.read_text(encoding="utf-8"))
        en, zh = _DOING[place["doing"]]
    except (OSError, ValueError, KeyError):
        return "", ""
    return f" {en} of step {place['step']}", f"第 {place['step']} 步的{zh}"


def own_words(stderr: Sequence[str]) -> list[str]:
    """The ranks' own lines, without what torchrun says before and after them."""
    end = next((i for i, line in enumerate(stderr) if _TORCHRUN_LINE.match(line) and _TORCHRUN_END.search(line)), len(stderr))
    return [line for line in stderr[:end] if not _TORCHRUN_LINE.match(line)]


def failure_event(code: int, stderr: Sequence[str], log_path: Path) -> dict[str, Any]:
    """The event that tells a failure: one sentence, the last lines, and where the whole log is.

    A user error (code 2) is the job's own one line and nothing else.
    """
    words = own_words(stderr)
    if code == USER_ERROR and words:
        line = words[-1]
        return {"kind": "failed", "code": code, "text_en": line, "text_zh": line, "lines": [], "log": str(log_path)}
    en, zh = _SIGNAL_HINTS.get(code - 128, (f"ended with code {code}", f"以代码 {code} 结束"))
    rank = failed_rank(stderr)
    who_en, who_zh = ("training", "训练") if rank is None else (f"rank {rank}", f"rank {rank} ")
    place_en, place_zh = last_position(log_path.parent.parent, rank or 0)
    if place_en:
        en, zh = f"{en}; it was at the{place_en}", f"{zh}；当时处于{place_zh}"
    return {
        "kind": "failed",
        "code": code,
        "rank": rank,
        "text_en": f"{who_en} {en}; the whole log: {log_path}",
        "text_zh": f"{who_zh}{zh}；完整日志：{log_path}",
        "lines": words[-_NUM_SHOWN_LINES:],
        "log": str(log_path),
    }
