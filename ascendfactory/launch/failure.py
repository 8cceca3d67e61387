"""What a failed job left on stderr, told in a few lines: its real exit code and its own last words."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NUM_SHOWN_LINES = 12
# torchrun reports a rank's failure in log lines (`E0101 12:00:00.000000 pid .../torch/distributed/elastic/...`) and then
# with a traceback of its own; both come after the rank's own words.
_TORCHRUN_LINE = re.compile(r"^[WEIF]\d{4} .*torch/distributed/")
_TORCHRUN_END = re.compile(r"closing signal|failed \(exitcode")
_TORCHRUN_LOST = re.compile(r"^E\d{4} .*torch/distributed/.*failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_RANK_WORDS = re.compile(r"^rank (\d+): ")
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
    "save": ("save", "保存"),
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
        The code, 128 + n for signal n as a shell has it; with several ranks that of a killed one, else that of a user error, else
        that of the root cause.
    """
    failures = _reported(stderr)
    if code == 1 and failures:
        codes = [own for _, own in failures]
        code = USER_ERROR if USER_ERROR in codes and _lost(failures) is None else (_lost(failures) or failures[-1])[1]
    return code if code >= 0 else 128 - code


def _reported(stderr: Sequence[str]) -> list[tuple[int, int]]:
    """(rank, exit code) of the failures that torchrun lists at its end; the root cause, as it sees it, is the last."""
    ranks = [int(found[1]) for line in stderr if (found := _RANK.match(line))]
    codes = [int(found[1]) for line in stderr if (found := _RANK_CODE.match(line))]
    return list(zip(ranks or range(len(codes)), codes, strict=False))


def _lost(failures: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """A rank that a signal ended: the others failed because it was gone. torchrun's own SIGTERM to them does not count."""
    return next((failure for failure in failures if failure[1] < 0 and failure[1] != -signal.SIGTERM), None)


def lost_rank(line: str) -> tuple[int, int] | None:
    """(rank, exit code) where a line of stderr is torchrun's notice that one has failed; None for any other line."""
    found = _TORCHRUN_LOST.match(line)
    return (int(found[2]), int(found[1])) if found else None


def failed_rank(stderr: Sequence[str]) -> int | None:
    """The rank that was killed, else the one that failed first (torchrun lists it last), or None for a job of one process."""
    failures = _reported(stderr)
    return (_lost(failures) or failures[-1])[0] if failures else None


def last_position(run_dir: Path, rank: int) -> tuple[str, str]:
    """What a rank was doing when it was last heard of, in both languages; empty if it left no word."""
    file = run_dir / "logs" / f"position-rank{rank}.json"
    try:
        place = json.loads(file.read_text(encoding="utf-8"))
        en, zh = _DOING[place["doing"]]
    except (OSError, ValueError, KeyError):
        return "", ""
    if not place["step"]:
        return en, zh
    return f"{en} of step {place['step']}", f"第 {place['step']} 步的{zh}"


def own_words(stderr: Sequence[str]) -> list[str]:
    """The ranks' own lines of the last attempt, without what torchrun says before and after them."""
    notices = [i for i, line in enumerate(stderr) if lost_rank(line)]
    begin = notices[-2] + 1 if len(notices) > 1 else 0
    last = stderr[begin:]
    end = next((i for i, line in enumerate(last) if _TORCHRUN_LINE.match(line) and _TORCHRUN_END.search(line)), len(last))
    return [line for line in last[:end] if not _TORCHRUN_LINE.match(line)]


def _words_of(rank: int | None, words: Sequence[str]) -> list[str]:
    """Without what other ranks said of it: that their partner was gone."""
    return [line for line in words if rank is None or (found := _RANK_WORDS.match(line)) is None or int(found[1]) == rank]


def failure_event(code: int, stderr: Sequence[str], log_path: Path) -> dict[str, Any]:
    """The event that tells a failure: one sentence, the last lines, and where the whole log is.

    A user error (code 2) is the job's own one line and nothing else.
    """
    words = own_words(stderr)
    if code == USER_ERROR and words:
        line = next((line for line in reversed(words) if not _RANK_WORDS.match(line)), words[-1])
        return {"kind": "failed", "code": code, "text_en": line, "text_zh": line, "lines": [], "log": str(log_path)}
    rank = failed_rank(stderr)
    en, zh = _how_it_ended(rank, code, log_path.parent.parent)
    return {
        "kind": "failed",
        "code": code,
        "rank": rank,
        "text_en": f"{en}; the whole log: {log_path}",
        "text_zh": f"{zh}；完整日志：{log_path}",
        "lines": _words_of(rank, words)[-_NUM_SHOWN_LINES:],
        "log": str(log_path),
    }


def restart_event(rank: int, code: int, run_dir: Path) -> dict[str, Any]:
    """The event that tells that a rank was lost and torchrun starts all of them again."""
    code = code if code >= 0 else 128 - code
    en, zh = _how_it_ended(rank, code, run_dir)
    return again({"code": code, "rank": rank, "text_en": en, "text_zh": zh})


def again(event: dict[str, Any]) -> dict[str, Any]:
    """A failure after which the launcher starts the job anew."""
    en, zh = event["text_en"], event["text_zh"]
    return event | {
        "kind": "restart",
        "text_en": f"{en}; starting again from the newest checkpoint",
        "text_zh": f"{zh}；将从最新的检查点重新启动",
    }


def on_node(event: dict[str, Any], node: int, host: str) -> dict[str, Any]:
    """A failure, with the node on which it happened."""
    return event | {
        "node": node,
        "text_en": f"node {node} ({host}): {event['text_en']}",
        "text_zh": f"节点 {node}（{host}）：{event['text_zh']}",
    }


def _how_it_ended(rank: int | None, code: int, run_dir: Path) -> tuple[str, str]:
    """`rank 2 killed: ...; it was at the update of step 13`, in both languages."""
    en, zh = _SIGNAL_HINTS.get(code - 128, (f"ended with code {code}", f"以代码 {code} 结束"))
    who_en, who_zh = ("training", "训练") if rank is None else (f"rank {rank}", f"rank {rank} ")
    place_en, place_zh = last_position(run_dir, rank or 0)
    if place_en:
        en, zh = f"{en}; it was at the {place_en}", f"{zh}；当时处于{place_zh}"
    return f"{who_en} {en}", f"{who_zh}{zh}"
