"""Stands in for packages that only Ascend machines have, or that are not installed: declaring and checking options computes nothing."""

from __future__ import annotations

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
    npu.device_count, npu.is_available, npu.current_device = (lambda: 8), (lambda: True), (lambda: 0)  # type: ignore[attr-defined]
    npu.get_device_name = lambda *args: "Ascend910B2"  # type: ignore[attr-defined]
    torch.npu = sys.modules["torch.npu"] = npu  # type: ignore[attr-defined,assignment]
    torch.cuda.device_count, torch.cuda.is_available, torch.cuda.current_device = (lambda: 8), (lambda: True), (lambda: 0)  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *args: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_name = lambda *args: "Ascend910B2"  # type: ignore[assignment]
    facts = types.SimpleNamespace(major=9, minor=0, name="Ascend910B2", total_memory=64 << 30, multi_processor_count=24)
    torch.cuda.get_device_properties = lambda *args: facts  # type: ignore[assignment]


OPTIONAL = (
    "bitsandbytes", "sqlalchemy", "gpytorch", "sklearn", "highspy", "peft", "pandas", "sentencepiece", "einops", "tiktoken",
    "scipy", "mistral_common", "nltk", "datasets", "diffusers", "av", "decord", "torchvision", "ftfy", "bs4", "beartype", "torchdata",
    "pandarallel", "qwen_vl_utils", "imageio", "cv2", "timm", "numba", "triton", "six", "ray", "codetiming",
)  # fmt: skip
