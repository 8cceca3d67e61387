"""The tree of recipe settings, walked by key: what may stand where.

Loading uses it to expand short forms before a deeper key is set, and to say what a wrong value should have been.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from ascendfactory.core.recipe import Recipe


@dataclass(frozen=True)
class Node:
    """One place of a recipe: the type that stands there and what pydantic was told about it.

    Args:
        annotation: the bare type (a Section, a union, list[...], int ...).
        metadata: bounds and before-validators, in the order of the annotation.
        field: the pydantic field, where the place is a key of a section.
    """

    annotation: Any
    metadata: tuple[Any, ...] = ()
    field: FieldInfo | None = None

    @classmethod
    def of(cls, annotation: Any) -> Node:
        """The node of a type, `Annotated` taken apart."""
        if get_origin(annotation) is Annotated:
            bare, *metadata = get_args(annotation)
            return cls(bare, tuple(metadata))
        return cls(annotation)

    def choices(self) -> list[Node]:
        """The members of a union, or the node itself."""
        if get_origin(self.annotation) in (Union, types.UnionType):
            return [Node.of(member) for member in get_args(self.annotation)]
        return [self]

    def sections(self) -> list[type[BaseModel]]:
        """The sections that may stand here: none, one, or one per `kind`."""
        return [c.annotation for c in self.choices() if isinstance(c.annotation, type) and issubclass(c.annotation, BaseModel)]

    def section(self, value: Any) -> type[BaseModel] | None:
        """The section that this value is written for: the only one, or the one its `kind` names."""
        sections = self.sections()
        if len(sections) < 2:
            return sections[0] if sections else None
        kind = value.get("kind") if isinstance(value, dict) else None
        return next((s for s in sections if kind_of(s) == kind), None)

    def item(self) -> Node | None:
        """The node of a list's items."""
        return Node.of(get_args(self.annotation)[0]) if get_origin(self.annotation) is list else None

    def expand(self, value: Any) -> Any:
        """The long form of a value that may be written short (`lora` → `{kind: lora}`)."""
        for mark in self.metadata:
            if isinstance(mark, BeforeValidator):
                value = mark.func(value)  # type: ignore[call-arg]
        return value


ROOT = Node(Recipe)


def key_node(section: type[BaseModel], key: str) -> Node | None:
    """The node of a section's key, or None where there is no such key."""
    field = section.model_fields.get(key)
    return Node(field.annotation, tuple(field.metadata), field) if field else None


def kind_of(section: type[BaseModel]) -> str | None:
    """The `kind` that a union's member answers to."""
    field = section.model_fields.get("kind")
    return str(get_args(field.annotation)[0]) if field and get_origin(field.annotation) is Literal else None


def all_keys(node: Node = ROOT, prefix: str = "") -> dict[str, Node]:
    """Every dotted key of a recipe (list items and kinds merged into their parent) and its node."""
    found: dict[str, Node] = {}
    for section in node.sections():
        for key in section.model_fields:
            child = key_node(section, key)
            assert child is not None
            found[prefix + key] = child
            found |= all_keys(child.item() or child, f"{prefix}{key}.")
    return found
