"""Which parts of a JSON schema a finite value can satisfy.

A definition that requires itself has no end: a grammar of it forces bytes for ever, and its engine
gives up in the middle of an answer.  What ends is the least set that follows from itself, as for
the productive symbols of a grammar (Hopcroft and Ullman, 1979, section 4.4).
"""

from __future__ import annotations

from collections.abc import Mapping

from epd.frontend import JsonObject


class Ends:
    """`places`: the schemas of a document, by the reference to each."""

    def __init__(self, places: Mapping[str, object]) -> None:
        targets = {
            reference
            for schema in places.values()
            if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str)
        }
        self._open = {target: places[target] for target in targets & places.keys()}
        order = sorted(self._open)
        has_changed = True
        while has_changed:
            ended = [one for one in order if one in self._open and self._closes(one)]
            has_changed = bool(ended)
            order.reverse()  # a chain of references is told in two turns

    def _closes(self, reference: str) -> bool:
        if ends := self(self._open[reference]):
            del self._open[reference]
        return ends

    def __call__(self, schema: object) -> bool:
        """Whether it may have an end; False is certain."""
        if not isinstance(schema, dict):
            return schema is not False
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference in self._open:
            return False
        all_of, several = schema.get("allOf"), (schema.get("anyOf"), schema.get("oneOf"))
        if isinstance(all_of, list) and not all(map(self, all_of)):
            return False
        if not all(any(map(self, one)) for one in several if isinstance(one, list)):
            return False
        return all(map(self, _needed(schema)))


def _needed(schema: JsonObject) -> list[object]:
    """Parts that each of its values has."""
    kind = schema.get("type")
    required, properties = schema.get("required"), schema.get("properties")
    if kind == "object" and isinstance(required, list) and isinstance(properties, dict):
        return [properties[name] for name in properties if name in required]
    fewest = schema.get("minItems")
    if kind == "array" and isinstance(fewest, int) and fewest > 0:
        first = schema.get("prefixItems")
        return first[:fewest] if isinstance(first, list) else [schema.get("items")]
    return []
