"""Stands in for packages that only Ascend machines have, or that are not installed: declaring and checking options computes nothing."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class Inert(types.ModuleType):
    """A module whose every attribute can be called, subclassed or looked into."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or Nothing


class Meta(type):
    """Gives a class any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return other

    __ror__ = __or__


class Nothing(metaclass=Meta):
    """Takes any call; as a decorator it keeps what it decorates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        return

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __bool__(self) -> bool:
        return False

    def __lt__(self, other: Any) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of packages that are not installed."""

    def __init__(self, roots: set[str]) -> None:
        self.roots = roots

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.roots else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = Inert(spec.name)
        module.__path__, module.__file__, module.__version__ = [], f"<{spec.name}>", "2.7.1"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return


def stand_in(optional: tuple[str, ...]) -> None:
    """Puts inert modules in the place of Ascend's own packages and of those that are not installed."""
    import torch

    missing = {name for name in optional if importlib.machinery.PathFinder.find_spec(name) is None}
    sys.meta_path.insert(0, Finder(missing | {"torch_npu", "torchair", "acl", "mindio_ttp", "mindio_acp", "te", "tbe", "auto_tune"}))
    npu = Inert("torch.npu")
    npu.__path__ = []
    torch.npu = sys.modules["torch.npu"] = sys.modules["torch_npu.npu"] = npu  # type: ignore[attr-defined,assignment]
    importlib.import_module("torch_npu").npu = npu  # type: ignore[attr-defined]
    say_device(DEVICE_NAMES["snt9b"], 8)


def say_device(name: str, count: int) -> None:
    """Makes torch say that it sees so many of an Ascend device; torch.cuda as torch_npu would redirect it."""
    import torch

    facts = types.SimpleNamespace(major=9, minor=0, name=name, total_memory=64 << 30, multi_processor_count=24)
    for module in (torch.cuda, sys.modules["torch.npu"]):
        answers = {
            "device_count": lambda: count,
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "set_device": lambda *args: None,
            "get_device_name": lambda *args: name,
            "get_device_capability": lambda *args: (9, 0),
            "get_device_properties": lambda *args: facts,
        }
        for key, answer in answers.items():
            setattr(module, key, answer)


DEVICE_NAMES = {"snt9b": "Ascend910B2", "snt9b23": "Ascend910_9392"}
OPTIONAL = (
    "bitsandbytes", "sqlalchemy", "gpytorch", "sklearn", "highspy", "peft", "pandas", "sentencepiece", "einops", "tiktoken",
    "scipy", "mistral_common", "nltk", "datasets", "diffusers", "av", "decord", "torchvision", "ftfy", "bs4", "beartype", "torchdata",
    "pandarallel", "qwen_vl_utils", "imageio", "cv2", "timm", "numba", "triton", "six", "ray", "codetiming",
)  # fmt: skip
