"""Data sets that are named in LLaMA-Factory's dataset_info.json, as sources of a recipe.

An entry has `file_name`, `formatting` (alpaca or sharegpt), `columns` (their name of a field → the name in the file) and `tags`;
see data/README.md of LLaMA-Factory 0.9.5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ascendfactory.core.messages import UserError, nearest

INFO_NAME = "dataset_info.json"
_OURS = {  # its name of a field → ours, by formatting
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"},
    "sharegpt": {"messages": "conversations", "system": "system", "tools": "tools"},
}
_PAIR_FIELDS = {"chosen": "chosen", "rejected": "rejected"}


def read_info(folder: str) -> dict[str, Any] | None:
    """The register of a folder, or None where there is no such file on this machine.

    Raises:
        UserError: it is broken.
    """
    path = Path(folder).expanduser() / INFO_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(str(path), f"cannot be read: {error}", f"无法读取：{error}") from None
    if not isinstance(found, dict):
        raise UserError(str(path), "is no JSON object", "不是 JSON 对象")
    return found


def registered_source(name: str, folder: str, info: dict[str, Any] | None, place: str) -> Any:
    """The source of a name: a path, or a mapping with format and columns where the register says them.

    Args:
        name: as it stands under `dataset`.
        folder: `dataset_dir`.
        info: the register; without one the file is taken to have the set's name.
        place: the old key, for messages.

    Raises:
        UserError: the name is not registered (with the nearest), or its files are not on the disk but on a hub.
    """
    if info is None:
        return f"{folder.rstrip('/')}/{name}.json"
    entry = info.get(name)
    if not isinstance(entry, dict):
        guess = nearest(name, info)
        hint, hint_zh = (f"; did you mean '{guess}'?", f"，是否想写 '{guess}'？") if guess else ("", "")
        where = f"{folder.rstrip('/')}/{INFO_NAME}"
        raise UserError(place, f"'{name}' is not registered in {where}{hint}", f"{where} 中没有登记 '{name}'{hint_zh}")
    if "file_name" not in entry:
        raise UserError(
            place,
            f"'{name}' lies on a hub; download it, and name its file in {INFO_NAME} as file_name",
            f"'{name}' 在远程仓库中；请先下载，并在 {INFO_NAME} 中以 file_name 写明文件",
        )
    path = f"{folder.rstrip('/')}/{entry['file_name']}"
    form = str(entry.get("formatting", "alpaca"))
    ours = _OURS.get(form, {}) | _PAIR_FIELDS
    columns = {ours[theirs]: field for theirs, field in (entry.get("columns") or {}).items() if ours.get(theirs, field) != field}
    return {"path": path, "columns": columns} if columns else path
