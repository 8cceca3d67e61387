"""Finds model cards and devices: by name in the catalogue, or from a Hugging Face folder.

A model is looked up by its file name, so one card costs one small file.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ascendfactory.catalog.config import card_from_config
from ascendfactory.catalog.tables import features, min_devices, stage_matrix, support, throughput
from ascendfactory.core.messages import UserError, nearest
from ascendfactory.core.plan import Device, ModelCard

__all__ = [
    "card_from_config",
    "features",
    "find_card",
    "find_device",
    "list_cards",
    "list_devices",
    "min_devices",
    "stage_matrix",
    "support",
    "throughput",
]

_PACKAGE = files("ascendfactory.catalog")


def find_card(name_or_folder: str) -> ModelCard:
    """The card of a Hugging Face folder, or of a model of the catalogue.

    A folder wins over a name. Names are those of `list_cards`, hub ids and the names that back ends use;
    case, "-", "_" and blanks do not count. A folder whose name and shapes are those of a catalogue model
    takes over its hub id and its names in the back ends.

    Raises:
        UserError: no such model or folder (with the nearest name), or a config.json that cannot be read.
    """
    folder = Path(os.path.expanduser(name_or_folder))  # noqa: PTH111 - Path.expanduser raises for an unknown user
    if folder.name == "config.json":
        folder = folder.parent
    if folder.is_dir():
        return _folder_card(folder)
    # a folder of another machine is planned by its name; training looks for it again
    if (card := _named_card(name_or_folder) or _named_card(folder.name)) is not None:
        return card
    if name_or_folder.startswith((".", "~", os.sep)):
        raise UserError("model.path", f"no such folder: {name_or_folder}", f"没有这个文件夹：{name_or_folder}")
    names = [card_path.name.removesuffix(".toml") for card_path in _card_paths()]
    close = nearest(name_or_folder.split("/")[-1], names)
    en_hint, zh_hint = (f"did you mean '{close}'? The", f"是不是 '{close}'？") if close else ("the", "")
    raise UserError(
        "model.path",
        f"no model or folder '{name_or_folder}'; {en_hint} names: ascendfactory models",
        f"没有名为 '{name_or_folder}' 的模型或文件夹；{zh_hint}全部名称：ascendfactory models",
    )


def list_cards() -> list[ModelCard]:
    """Every model of the catalogue, by family and size."""
    return sorted((_read_card(path) for path in _card_paths()), key=_series)


def find_device(name: str) -> Device:
    """The device of that name; case does not count.

    Raises:
        UserError: no such device, with the nearest one.
    """
    devices = _devices()
    if found := devices.get(name.lower()):
        return found
    close, all_names = nearest(name, devices), ", ".join(devices)
    en_hint, zh_hint = (f"did you mean '{close}'? All", f"是不是 '{close}'？全部") if close else ("all", "全部")
    raise UserError(
        "cluster.device",
        f"no device '{name}'; {en_hint} devices: {all_names}",
        f"没有名为 '{name}' 的设备；{zh_hint}设备：{all_names}",
    )


def list_devices() -> list[Device]:
    """Every device of the catalogue."""
    return list(_devices().values())


def _key(name: str) -> str:
    """What is left of a name when case and separators do not count: `Qwen2.5_VL-7B` → `qwen2.5vl7b`."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def _series(card: ModelCard) -> tuple[bool, str, int]:
    """Text models first, then by series (the name up to its size) and size."""
    return card.vision is not None, re.sub(r"-\d[\d.x]*[bm]\b.*", "", card.name.lower()), card.num_params


def _card_paths() -> Iterator[Traversable]:
    return (path for path in (_PACKAGE / "models").iterdir() if path.name.endswith(".toml"))


def _read_toml(path: Traversable) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _read_card(path: Traversable) -> ModelCard:
    return ModelCard.model_validate(_read_toml(path))


def _named_card(name: str) -> ModelCard | None:
    key = _key(name)
    path = next((path for path in _card_paths() if _key(path.name.removesuffix(".toml")) == key), None)
    if path is not None:
        return _read_card(path)
    alias = _aliases().get(key)
    if alias is None:
        return None
    name_there, facts = alias
    card = _read_card(_PACKAGE / "models" / f"{facts['card']}.toml")
    change: dict[str, Any] = {"hub_id": name_there} if "/" in name_there else {}
    if "max_seq_len" in facts:
        change["max_seq_len"] = facts["max_seq_len"]
    return card.model_copy(update=change)


@cache
def _aliases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Key of another name → (that name, its entry). A hub id is found with and without its owner."""
    entries = _read_toml(_PACKAGE / "names.toml")
    tails = {_key(name.split("/")[-1]): (name, facts) for name, facts in reversed(entries.items())}
    return tails | {_key(name): (name, facts) for name, facts in entries.items()}


def _folder_card(folder: Path) -> ModelCard:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            str(folder),
            "no config.json in this folder; give a Hugging Face model folder",
            "文件夹里没有 config.json；请给出 Hugging Face 模型文件夹",
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(str(path), f"cannot be read: {error}", f"无法读取：{error}") from None
    if not isinstance(config, dict):
        raise UserError(str(path), "is not a JSON object; download it again", "不是 JSON 对象；请重新下载")
    card = card_from_config(config, folder.resolve().name)
    known = _named_card(card.name)
    if known and _shape(known) == _shape(card):
        return card.model_copy(update={"hub_id": known.hub_id, "backend_names": known.backend_names})
    return card


def _shape(card: ModelCard) -> dict[str, Any]:
    return card.model_dump(exclude={"name", "hub_id", "max_seq_len", "dtype", "backend_names", "source"})


@cache
def _devices() -> dict[str, Device]:
    rows = _read_toml(_PACKAGE / "devices.toml")
    return {name: Device.model_validate({"name": name, **row}) for name, row in rows.items()}
