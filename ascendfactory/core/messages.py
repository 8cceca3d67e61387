"""What goes wrong, in the words a person reads: one line each, in English and Chinese.

A message says what is wrong, where, and how to mend it. The language follows the locale
variables that every Unix program follows (LC_ALL, LC_MESSAGES, LANG).
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable


class UserError(Exception):
    """Something that the person who runs the command can mend; the program ends with exit code 2.

    Args:
        where: the place, as the person knows it (`data.train[0].path`, `file.jsonl:17`), or "".
        en: what is wrong and how to mend it, one line of English.
        zh: the same in Chinese.
    """

    def __init__(self, where: str, en: str, zh: str) -> None:
        self.where, self.en, self.zh = where, en, zh
        super().__init__(self.line())

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        """Pickles by its three arguments, so that worker processes can hand it on."""
        return type(self), (self.where, self.en, self.zh)

    def line(self) -> str:
        """The one line to print, in the reader's language."""
        text = pick(self.en, self.zh)
        return f"{self.where}: {text}" if self.where else text


def full_disk(error: BaseException) -> UserError | None:
    """What to tell where a disk is full, or a quota used up; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    where = str(error.filename or "")
    return UserError(
        where,
        "no space is left on the disk; free some, then run the same command again: it goes on from the newest checkpoint",
        "磁盘空间已满；请清理后再次执行同一命令，将从最新的检查点继续",
    )


def in_chinese() -> bool:
    """Whether the locale asks for Chinese."""
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        if value := os.environ.get(name):
            return value.lower().startswith("zh")
    return False


def pick(en: str, zh: str) -> str:
    """The text in the reader's language."""
    return zh if in_chinese() else en


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """The valid word that the written one was probably meant to be, or None."""
    by_lower = {name.lower(): name for name in valid}
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None
