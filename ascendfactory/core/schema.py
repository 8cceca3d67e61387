"""The recipe's JSON Schema for editors: completion, descriptions, and the short forms."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from ascendfactory.core.recipe import Recipe


class _WithShortForms(GenerateJsonSchema):
    """Lets a bare value stand where a before-validator expands one."""

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        inner = super().function_before_schema(schema)
        shorts = _short_schemas(getattr(schema["function"]["function"], "__qualname__", ""), inner)
        return {"anyOf": [*shorts, inner]} if shorts else inner


def _short_schemas(function: str, inner: JsonSchemaValue) -> list[dict[str, Any]]:
    """What a before-validator of the recipe accepts besides the long form."""
    if kinds := inner.get("discriminator", {}).get("mapping"):
        return [{"enum": list(kinds)}]
    if function.startswith("short_form"):
        return [{"type": ["string", "number"]}]
    return {
        "_as_list": [inner.get("items", {})],
        "_duration": [{"type": "string", "examples": ["500 steps", "3 epochs", "2e9 tokens"]}],
        "_warmup": [{"type": ["number", "string"], "examples": [0.03, "100 steps"]}],
        "_cluster": [{"type": "string", "examples": ["cpu", "8 a100-80g", "2x8 snt9b"]}],
        "_packing_word": [{"type": "boolean"}],
    }.get(function, [])


def recipe_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe file, short forms included."""
    schema = Recipe.model_json_schema(schema_generator=_WithShortForms)
    return schema | {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "AscendFactory recipe"}
