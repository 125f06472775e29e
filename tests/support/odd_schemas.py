"""JSON schemas that a grammar may stumble over: without end, huge, deep, contradictory, or slow to compile."""

from typing import Any


def nested(depth: int) -> dict[str, Any]:
    """Objects in objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {
            "type": "object",
            "properties": {"a": schema},
            "required": ["a"],
            "additionalProperties": False,
        }
    return schema


def doubled(keyword: str) -> dict[str, Any]:
    """Twenty definitions, each of which names the one before twice: a million leaves, if they were written out."""
    definitions: dict[str, Any] = {"a0": {"type": "string"}}
    for number in range(1, 21):
        reference = {"$ref": f"#/$defs/a{number - 1}"}
        if keyword == "properties":
            definitions[f"a{number}"] = {
                "type": "object",
                "properties": {"x": reference, "y": reference},
                "required": ["x", "y"],
            }
        else:
            definitions[f"a{number}"] = {keyword: [reference, reference]}
    return {"$ref": "#/$defs/a20", "$defs": definitions}


def node(next_schema: dict[str, Any]) -> dict[str, Any]:
    """A list of numbers that refers to itself."""
    properties = {"v": {"type": "integer"}, "next": next_schema}
    return {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": properties,
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
    }


def obj(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


def pattern(text: str, **keywords: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": text, **keywords}


def properties(count: int) -> dict[str, Any]:
    return {f"p{number}": {"type": "string"} for number in range(count)}


NODE = {"$ref": "#/$defs/node"}
SCHEMAS: dict[str, Any] = {
    # without end
    "itself": {"$ref": "#"},
    "a circle of references": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "all of itself": {"allOf": [{"$ref": "#"}]},
    "any of itself": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "itself or a text": {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
    "list": node({"anyOf": [NODE, {"type": "null"}]}),
    "list without an end": node(NODE),
    "array of itself": {"type": "array", "items": {"$ref": "#"}},
    "array of itself, never empty": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "tree": obj(properties={"l": {"$ref": "#"}, "r": {"$ref": "#"}}),
    "values of itself": obj(additionalProperties={"$ref": "#"}),
    "anchor": {"$anchor": "x", "$ref": "#x"},
    "id": {"$id": "http://a/b", "$ref": "b#"},
    "dynamic reference": {
        "$dynamicRef": "#node",
        "$defs": {"n": {"$dynamicAnchor": "node", "type": "string"}},
    },
    # large
    "300 properties": obj(properties=properties(300)),
    "1000 properties": obj(properties=properties(1000)),
    "3000 properties": obj(properties=properties(3000)),
    "3000 required properties": obj(properties=properties(3000), required=list(properties(3000))),
    "500 required names without a schema": obj(required=list(properties(500))),
    "enum of 8000 texts": {"enum": [f"value number {number}" for number in range(8000)]},
    "enum of 30000 numbers": {"enum": list(range(30000))},
    "enum of a long text": {"enum": ["x" * 100_000]},
    "constant of a long text": {"const": "é" * 20_000},
    "long name": obj(properties={"k" * 100_000: {"type": "string"}}, required=["k" * 100_000]),
    "one of 500": {
        "oneOf": [
            obj(properties={f"k{n}": {"const": n}}, required=[f"k{n}"], additionalProperties=False)
            for n in range(500)
        ]
    },
    "array of 2000 kinds": {"type": "array", "prefixItems": [{"type": "integer"}] * 2000},
    "all of 1000": {"allOf": [{"type": "integer", "minimum": number} for number in range(1000)]},
    # deep
    "50 deep": nested(50),
    "100 deep": nested(100),
    "400 deep": nested(400),
    "900 deep": nested(900),
    "doubled properties": doubled("properties"),
    "doubled all of": doubled("allOf"),
    "doubled any of": doubled("anyOf"),
    "choices of names": {
        "allOf": [
            {"anyOf": [{"required": [f"a{number}"]}, {"required": [f"b{number}"]}]}
            for number in range(20)
        ]
    },
    # patterns
    "pattern of many states": pattern("^(a|b)*a(a|b){20}$"),
    "pattern of more states": pattern("^(a|b)*a(a|b){200}$"),
    "pattern of nested repeats": pattern("^(((a+)+)+)+$"),
    "pattern of repeated repeats": pattern("^((a{1,100}){1,100}){1,100}$"),
    "pattern of a large repeat": pattern("^[a-z]{1,100000}$"),
    "pattern anywhere": pattern("abc"),
    "pattern with gaps": pattern(".*a.{30}b.*"),
    "pattern that looks ahead": pattern("^(?=a)b$"),
    "pattern that looks back": pattern("^(a)\\1$"),
    "pattern of letters": pattern("^\\p{L}{1,64}$"),
    "pattern of Chinese": pattern("^[\\u4e00-\\u9fff]{3,50}$"),
    "pattern of nothing": pattern("^[^\\s\\S]$"),
    "pattern that is too long": pattern("^(ab)+$", maxLength=1),
    "pattern that is wrong": pattern("((("),
    "patterns of names": obj(
        patternProperties={"^(a|b)*a(a|b){15}$": {"type": "integer"}, "^x": {"type": "string"}}
    ),
    # numbers and lengths
    "smallest above largest": {"type": "integer", "minimum": 5, "maximum": 1},
    "huge integers": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "huge numbers": {"type": "number", "minimum": 1e-300, "maximum": 1.7976931348623157e308},
    "multiples": {"type": "integer", "multipleOf": 7},
    "small multiples": {"type": "number", "multipleOf": 0.001},
    "narrow numbers": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.0001},
    "a million characters": {"type": "string", "minLength": 10**6},
    "2^62 characters": {"type": "string", "minLength": 2**62},
    "a billion items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "properties of a number": obj(
        minProperties=5, maxProperties=2000, additionalProperties={"type": "string"}
    ),
    # contradictions and what is not supported
    "empty": {},
    "true": True,
    "false": False,
    "impossible property": obj(properties={"a": False}, required=["a"]),
    "not": {"not": {}},
    "if, then": {"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
    "overlapping one of": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "two types at once": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "no type": {"type": []},
    "no value": {"enum": []},
    "distinct items": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "unknown type": {"type": "nope"},
    "another site": {"$ref": "http://a.b/c"},
    "nowhere": {"$ref": "#/x"},
    "too long": {"x": "y" * 300_000},
    # formats and characters
    "dates": {"type": "string", "format": "date-time"},
    "addresses": {"type": "string", "format": "uri"},
    "unknown format": {"type": "string", "format": "iban"},
    "name of no length": {"type": "string", "format": "hostname", "minLength": 200},
    "names in any script": obj(
        properties={"名前\u0000\ud7ff😀": {"type": "string"}}, required=["名前\u0000\ud7ff😀"]
    ),
    "options of the library": {
        "type": "string",
        "x-guidance": {"item_separator": "(a|b)*", "key_separator": "((((("},
    },
}
"""By what is odd about them."""
SLOW_SCHEMAS: dict[str, Any] = {
    "large multiples": {"type": "integer", "multipleOf": 999_983},
    "multiples of many primes": {
        "allOf": [
            {"type": "integer", "multipleOf": prime} for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23)
        ]
    },
    "300 patterns of names": obj(
        patternProperties={f"^k{number}[a-z]*$": {"type": "integer"} for number in range(300)}
    ),
}
"""Compiling these takes seconds, or hours and all memory."""
