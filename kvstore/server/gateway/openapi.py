"""The OpenAPI 3.1 document, generated from the table of routes and the classes of the bodies. Decides only."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.server.gateway import answers, bodies, routes
from kvstore.server.gateway.routes import Body, Parameter, ParameterKind, ResponseKind, Route

VERSION = "1.0.0"
"""Version of the interface. An incompatible version would have its own paths."""
_REF = "#/components/schemas/{name}"
_STATUSES = {
    304: "The key still has a version that If-None-Match names.",
    400: "The request can never succeed as it is. The message says what was expected and what was received.",
    401: "The cluster requires authentication.",
    403: "The user lacks a right, or the request is from a page of another site.",
    404: "The key is absent.",
    408: "The body did not arrive in time.",
    409: "The request id is older than the store remembers, or another transaction holds a key (CONFLICT, not done).",
    410: "The log no longer has the position at which the watch is to continue.",
    412: "The condition is not met. `version` is the key's version.",
    413: "The body is too large.",
    415: "The content type or encoding of the body is not supported here.",
    429: "A limit, or a namespace's rate (RATE_EXCEEDED), is reached. Not done; retry after Retry-After.",
    501: "The body has a Transfer-Encoding other than chunked.",
    503: "No server that may answer was reached in time. Not done; retry.",
    504: "The request may or may not have been done. Retry with the same Kvstore-Request, or read the key.",
    507: "The namespace's quota of keys or bytes is used up (QUOTA_EXCEEDED). Not done; delete keys first.",
}
_ALWAYS = (400, 401, 403, 429, 503)
_OF_WRITES = (409, 504, 507)
_OF_BODIES = (408, 413, 415, 501)
_HEADERS = {
    "Kvstore-Token": ("Session token. Send it with the next request.", "string"),
    "Kvstore-Time-Ms": ("The partition's time, for `seen` in Kvstore-Request.", "integer"),
}
_RECORD_HEADERS = {
    "ETag": ("The version.", "string"),
    "Kvstore-Created": ("The sequence of the mutation that created the key.", "integer"),
    "Kvstore-Written-Ms": ("Time of the last write, in milliseconds since 1970.", "integer"),
    "Kvstore-Expires-Ms": ("Time of expiry, in milliseconds since 1970; absent: never.", "integer"),
}


def document() -> bytes:
    """Return the document as it is served."""
    _, schemas = msgspec.json.schema_components((*bodies.IN, *bodies.OUT), ref_template=_REF)
    outcomes = [{"$ref": _REF.format(name=each.__name__)} for each in bodies.Outcome.__args__]
    for name in ("BatchAnswer", "TransactionAnswer"):
        schemas[name]["properties"]["results"]["items"] = {"anyOf": outcomes}
    found = {
        "openapi": "3.1.0",
        "info": {
            "title": "kvstore",
            "version": VERSION,
            "description": "A distributed key-value store on a replicated log. See docs/how-to/use-http.md.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"password": []}, {"token": []}],
        "paths": {
            template: {route.method.lower(): _operation(route) for route in methods.values()}
            for template, methods in routes.TEMPLATES.items()
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "password": {"type": "http", "scheme": "basic"},
                "token": {"type": "http", "scheme": "bearer"},
            },
        },
    }
    return orjson.dumps(found, option=orjson.OPT_INDENT_2)


def _operation(route: Route) -> dict[str, Any]:
    statuses = [*_ALWAYS, *route.also]
    statuses += _OF_WRITES if route.is_write else ()
    statuses += _OF_BODIES if route.body is not Body.NONE else ()
    found: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [*_key_of(route), *map(_parameter, route.parameters)],
        "responses": {"200": _answer(route), **{str(each): _failure(route, each) for each in sorted(set(statuses))}},
    }
    if route.body is not Body.NONE:
        found["requestBody"] = {"required": True, "content": _body(route)}
    return found


def _key_of(route: Route) -> list[dict[str, Any]]:
    if routes.KEY not in route.template:
        return []
    text = (
        f"1 to {KEY_BYTES_MAX} bytes. Percent-encode every byte except letters, digits and slashes. Send a key that is "
        "`.` or `..`, or that has such a part between slashes, in a batch, because clients change "
        "such paths before they send them."
    )
    return [{"name": "key", "in": "path", "required": True, "description": text, "schema": {"type": "string"}}]


def _parameter(parameter: Parameter) -> dict[str, Any]:
    schema: dict[str, Any]
    match parameter.kind:
        case ParameterKind.INTEGER:
            schema = {"type": "integer", "format": "int64", "minimum": parameter.least, "maximum": parameter.most}
        case ParameterKind.FLAG:
            schema = {"type": "boolean"}
        case ParameterKind.CHOICE:
            schema = {"type": "string", "enum": list(parameter.choices)}
        case ParameterKind.BYTES | ParameterKind.TEXT:
            schema = {"type": "string"}
    if parameter.default is not None:
        schema["default"] = parameter.default
    place = "header" if parameter.is_header else "query"
    return {"name": parameter.name, "in": place, "description": parameter.text, "schema": schema}


def _body(route: Route) -> dict[str, Any]:
    if route.body is Body.BATCH:
        return {answers.JSON: {"schema": _schema(bodies.BatchBody)}}
    raw = {"schema": {"type": "string", "format": "binary", "maxLength": VALUE_BYTES_MAX}}
    return {answers.RAW: raw, answers.JSON: {"schema": _schema(bodies.ValueBody)}}


def _answer(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {}
    description = "Done."
    match route.answer:
        case ResponseKind.RAW_OR_JSON:
            content[answers.RAW] = {"schema": {"type": "string", "format": "binary"}}
            content[answers.JSON] = {"schema": _schema(route.gives)}
        case ResponseKind.JSON:
            content[answers.JSON] = {"schema": _schema(route.gives)}
        case ResponseKind.EVENTS:
            content["text/event-stream"] = {"schema": {"type": "string"}}
            description = (
                "Events: `change`, whose data is a Change; `position`, at least every heartbeat_ms; and a final "
                "`error`, whose data is a Failure. The id of an event is the position at which the watch continues "
                "after it."
            )
        case ResponseKind.DOCUMENT:
            content[answers.JSON] = {"schema": {"type": "object"}}
        case ResponseKind.HEAD:
            pass
    headers = _HEADERS if routes.KEY in route.template or route.body is Body.BATCH else {}
    if route.answer in (ResponseKind.RAW_OR_JSON, ResponseKind.HEAD):
        headers = headers | _RECORD_HEADERS
    shown = {name: {"description": text, "schema": {"type": kind}} for name, (text, kind) in headers.items()}
    return {
        "description": description,
        **({"headers": shown} if shown else {}),
        **({"content": content} if content else {}),
    }


def _failure(route: Route, status: int) -> dict[str, Any]:
    found: dict[str, Any] = {"description": _STATUSES[status]}
    if status != 304 and route.answer is not ResponseKind.HEAD:
        found["content"] = {answers.JSON: {"schema": _schema(bodies.Failure)}}
    return found


def _schema(kind: type[msgspec.Struct] | None) -> dict[str, str]:
    assert kind is not None, "a route with a JSON response names its schema"
    return {"$ref": _REF.format(name=kind.__name__)}
