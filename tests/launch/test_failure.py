"""The real exit code and the real words behind torchrun's report."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascendfactory.engine.position import Position
from ascendfactory.launch.failure import exit_code, failed_rank, failure_event, lost_rank, own_words, restart_event

TORCHRUN = """\
W1129 21:43:40.100000 6341 torch/distributed/run.py:803] Setting OMP_NUM_THREADS
data.train: file a.jsonl not found
W1129 21:43:47.700000 6341 torch/distributed/elastic/multiprocessing/api.py:908] Sending process 6347 closing signal SIGTERM
E1129 21:43:47.705000 6341 torch/distributed/elastic/api.py:1002] failed (exitcode: 2) local_rank: 0 (pid: 6346) of binary: python
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1032, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : {code} (pid: 6346)
""".splitlines()


def report(code: int) -> list[str]:
    return [line.replace("{code}", str(code)) for line in TORCHRUN]


@pytest.mark.parametrize(
    ("code", "stderr", "meant"),
    [(0, [], 0), (1, ["x"], 1), (-9, [], 137), (1, report(2), 2), (1, report(-9), 137), (1, report(1), 1), (2, [], 2)],
)
def test_the_code_is_the_ranks_own(code: int, stderr: list[str], meant: int) -> None:
    assert exit_code(code, stderr) == meant


def test_a_user_error_of_any_rank_counts_before_what_it_caused() -> None:
    assert exit_code(1, ["  exitcode  : 2 (pid: 1)", "  exitcode  : 1 (pid: 2)"]) == 2


def test_only_the_ranks_own_words_are_told() -> None:
    assert own_words(report(2)) == ["data.train: file a.jsonl not found"]
    event = failure_event(2, report(2), Path("log"))
    assert (event["text_en"], event["lines"]) == ("data.train: file a.jsonl not found", [])


def test_a_crash_without_words_still_says_where_to_look() -> None:
    event = failure_event(139, [], Path("log"))
    assert event["text_en"] == "training crashed inside native code (segmentation fault); the whole log: log"


def test_a_killed_rank_is_named_with_its_last_position(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    position = Position(tmp_path, 0)
    position.set(12, "update")
    position.set(13, "compute")
    position.close()
    event = failure_event(137, report(-9), tmp_path / "logs" / "attempt-1.log")
    assert event["rank"] == 0
    assert event["text_en"].startswith(
        "rank 0 killed: most often the machine ran out of memory; it was at the forward and backward pass of step 13; the whole log: "
    )
    assert "当时处于第 13 步的前向与反向计算" in event["text_zh"]


KILLED_BESIDE_OTHERS = """\
rank 0: RuntimeError: Connection closed by peer (logs/failure-rank0.txt)
W1129 21:43:47.700000 6341 torch/distributed/elastic/api.py:908] Sending process 6347 closing signal SIGTERM
E1129 21:43:47.705000 6341 torch/distributed/elastic/api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 6346) of binary: x
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 6347)
  rank      : 2 (local_rank: 2)
  exitcode  : -15 (pid: 6348)
Root Cause (first observed failure):
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 6346)
""".splitlines()


def test_a_killed_rank_is_the_cause_whatever_the_others_ended_with() -> None:
    assert (exit_code(1, KILLED_BESIDE_OTHERS), failed_rank(KILLED_BESIDE_OTHERS)) == (137, 1)
    user_error = [line.replace("exitcode  : 1 ", "exitcode  : 2 ") for line in KILLED_BESIDE_OTHERS]
    assert exit_code(1, user_error) == 137
    assert failure_event(137, KILLED_BESIDE_OTHERS, Path("logs/log"))["lines"] == []  # rank 0 says what followed from it


def test_torchruns_notice_of_a_lost_rank_is_read() -> None:
    assert [lost_rank(line) for line in KILLED_BESIDE_OTHERS if lost_rank(line)] == [(0, 1)]
    assert lost_rank("failed (exitcode: 1) local_rank: 0") is None


def test_of_several_attempts_the_last_ones_words_are_told() -> None:
    again = [line.replace("Connection closed by peer", "the second failure") for line in KILLED_BESIDE_OTHERS]
    assert own_words([*KILLED_BESIDE_OTHERS[:3], *again]) == ["rank 0: RuntimeError: the second failure (logs/failure-rank0.txt)"]


def test_a_restart_names_the_rank_and_its_position(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    position = Position(tmp_path, 2)
    event = restart_event(2, -9, tmp_path)
    assert event["text_en"] == (
        "rank 2 killed: most often the machine ran out of memory; it was at the start; starting again from the newest checkpoint"
    )
    position.set(13, "save")
    event = restart_event(2, 1, tmp_path)
    assert event["text_en"] == "rank 2 ended with code 1; it was at the save of step 13; starting again from the newest checkpoint"
    assert event["text_zh"] == "rank 2 以代码 1 结束；当时处于第 13 步的保存；将从最新的检查点重新启动"
    position.close()


def test_a_user_errors_line_is_told_and_not_what_other_ranks_say_of_it() -> None:
    words = ["data.train: file a.jsonl not found", "rank 1: RuntimeError: Connection closed by peer (logs/failure-rank1.txt)"]
    assert failure_event(2, words, Path("log"))["text_en"] == words[0]
