"""The OpenAPI document: it is valid and describes what is served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from kvstore.rpc.status import STATUS, http_status
from kvstore.server.access.needs import HTTP_NEEDS, nothing
from kvstore.server.gateway import openapi, routes
from kvstore.server.gateway.routes import Body, ResponseKind
from tests.server.gateway.world import ResponseKind as Answered
from tests.server.gateway.world import World

DOCUMENT: dict[str, Any] = orjson.loads(openapi.document())
OPERATIONS = [
    (method.upper(), path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]
BY_NAME = {operation["operationId"]: operation for _, _, operation in OPERATIONS}
TYPES = {"string", "integer", "boolean", "object", "array", "null", "number"}
SCHEMA_WORDS = {
    *("type", "title", "description", "properties", "required", "items", "enum", "anyOf", "$ref", "default", "format"),
    *("minimum", "maximum", "maxLength", "contentEncoding", "additionalProperties"),
}
METHODS = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}


def schemas(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Return all schemas, including nested ones."""
    if isinstance(node, dict):
        for name, value in node.items():
            here = f"{path}/{name}"
            if name == "schema" or path.endswith(("/schemas", "/properties")):
                yield here, value
            if name == "items" and isinstance(value, dict):
                yield here, value
            yield from schemas(value, here)
    elif isinstance(node, list):
        for number, value in enumerate(node):
            if path.endswith("/anyOf"):
                yield f"{path}/{number}", value
            yield from schemas(value, f"{path}/{number}")


def test_document_is_valid_openapi_3_1() -> None:
    assert re.fullmatch(r"3\.1\.\d+", DOCUMENT["openapi"])
    assert {"title", "version"} <= DOCUMENT["info"].keys()
    assert DOCUMENT.keys() <= {"openapi", "info", "servers", "security", "paths", "components"}
    assert DOCUMENT["components"].keys() <= {"schemas", "securitySchemes"}
    assert all(re.fullmatch(r"[a-zA-Z0-9._-]+", name) for name in DOCUMENT["components"]["schemas"])
    for path, methods in DOCUMENT["paths"].items():
        assert path.startswith("/")
        assert methods.keys() <= METHODS
    schemes = DOCUMENT["components"]["securitySchemes"]
    assert all(each.keys() <= schemes.keys() for each in DOCUMENT["security"])
    assert all((each["type"], each["scheme"]) in (("http", "basic"), ("http", "bearer")) for each in schemes.values())


def test_every_operation_of_the_document_is_complete() -> None:
    assert len(BY_NAME) == len(OPERATIONS), "each name once"
    for method, path, operation in OPERATIONS:
        where = f"{method} {path}"
        assert operation.keys() <= {"operationId", "summary", "parameters", "requestBody", "responses"}, where
        places = [(each["name"], each["in"]) for each in operation["parameters"]]
        assert len(set(places)) == len(places), where
        in_path = {name for name, place in places if place == "path"}
        assert in_path == set(re.findall(r"{(\w+)}", path)), where
        for each in operation["parameters"]:
            assert each["in"] in ("query", "header", "path"), where
            assert each["in"] != "path" or each["required"] is True, where
            assert ("schema" in each) != ("content" in each), where
        assert operation["responses"], where
        for status, response in operation["responses"].items():
            assert re.fullmatch(r"[1-5]\d\d", status), where
            assert response["description"], where
            assert response.keys() <= {"description", "headers", "content"}, where
        if method in ("GET", "HEAD", "DELETE"):
            assert "requestBody" not in operation, where


def test_schemas_are_unique_and_references_resolve() -> None:
    found = list(schemas(DOCUMENT))
    assert len(found) > 100
    for path, schema in found:
        assert schema.keys() <= SCHEMA_WORDS, path
        types = schema.get("type", [])
        assert set([types] if isinstance(types, str) else types) <= TYPES, path
        if reference := schema.get("$ref"):
            target: Any = DOCUMENT
            for step in reference.removeprefix("#/").split("/"):
                target = target[step]
        assert set(schema.get("required", ())) <= schema.get("properties", {}).keys(), path


def test_every_route_has_an_operation_and_every_operation_a_route() -> None:
    assert {(method, path) for method, path, _ in OPERATIONS} == {
        (each.method, each.template) for each in routes.ROUTES
    }
    for route in routes.ROUTES:
        shown = {(each["name"], each["in"]) for each in BY_NAME[route.name]["parameters"]} - {("key", "path")}
        assert shown == {(each.name, "header" if each.is_header else "query") for each in route.parameters}


def test_every_error_has_a_documented_status() -> None:
    named = {int(status) for operation in BY_NAME.values() for status in operation["responses"]}
    inside = {500}
    """Statuses that no client sees: errors of the log and of the metadata store."""
    for kind in STATUS:
        error = kind.__new__(kind)
        assert http_status(error) in named | inside, kind


def test_every_route_documents_its_permissions() -> None:
    assert all(HTTP_NEEDS[each] is not nothing for each in routes.TEMPLATES)


WANTED = {
    "increment": "",
    "append": "",
    "expire": "?ttl_ms=1",
    "watch": "",
    "batch": "",
    "delete_range": "?prefix=other",
}
BATCH = b'{"operations": [{"operation": "get", "key": "k"}]}'


@pytest.mark.parametrize(
    "route", [each for each in routes.ROUTES if each.answer is not ResponseKind.EVENTS], ids=lambda route: route.name
)
async def test_every_route_is_served_as_documented(world: World, route: routes.Route) -> None:
    """test_watches.py covers the route of watches."""
    await world.ask("PUT", "/v1/keys/k", b"1")
    target = route.template.replace("{key}", "k") + WANTED.get(route.name, "")
    data = {Body.NONE: None, Body.VALUE: b"2", Body.BATCH: BATCH}[route.body]
    headers = {"Content-Type": "application/json"} if route.body is Body.BATCH else {}
    answer: Answered = await world.ask(route.method, target, data, **headers)
    assert answer.status == 200
    told = BY_NAME[route.name]["responses"]["200"]
    assert [name for name in told.get("headers", ()) if name not in answer.headers] in ([], ["Kvstore-Expires-Ms"])
    kind = answer.headers["Content-Type"].partition(";")[0]
    assert route.answer is ResponseKind.HEAD or kind in told["content"]
    if route.gives is not None and kind == "application/json":
        schema = DOCUMENT["components"]["schemas"][route.gives.__name__]
        assert set(schema.get("required", ())) <= answer.json.keys() <= schema["properties"].keys()


async def test_document_is_served(world: World) -> None:
    answer = await world.ask("GET", "/v1/openapi.json")
    assert (answer.headers["Content-Type"], answer.json) == ("application/json", DOCUMENT)
