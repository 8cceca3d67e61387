"""What a failed job left on stderr, told in a few lines: its real exit code and its own last words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NUM_SHOWN_LINES = 12
# torchrun reports a rank's failure in log lines (`E0101 12:00:00.000000 pid .../torch/distributed/elastic/...`) and then
# with a traceback of its own; both come after the rank's own words.
_TORCHRUN_LINE = re.compile(r"^[WEIF]\d{4} .*torch/distributed/")
_TORCHRUN_END = re.compile(r"closing signal|failed \(exitcode")
_RANK_CODE = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)")
_SIGNAL_HINTS = {
    9: ("killed: most often the machine ran out of memory", "被系统终止：多半是内存不足"),
    11: ("crashed inside native code (segmentation fault)", "原生代码崩溃（段错误）"),
    6: ("aborted inside native code", "原生代码中止"),
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
    return {
        "kind": "failed",
        "code": code,
        "text_en": f"training {en}; the whole log: {log_path}",
        "text_zh": f"训练{zh}；完整日志：{log_path}",
        "lines": words[-_NUM_SHOWN_LINES:],
        "log": str(log_path),
    }
