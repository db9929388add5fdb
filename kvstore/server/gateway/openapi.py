"""The OpenAPI 3.1 document, made of the table of routes and the classes of the bodies. Decides only."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.server.gateway import answers, bodies, routes
from kvstore.server.gateway.routes import Answer, Body, Kind, Parameter, Route

VERSION = "1.0.0"
"""Of the interface. A second that is not compatible has paths of its own."""
_REF = "#/components/schemas/{name}"
_STATUSES = {
    304: "The key still has one of the versions that If-None-Match names.",
    400: "The request can never succeed as it is; the message says what was expected and what came.",
    401: "The cluster asks who its clients are.",
    403: "The user lacks a right, or a page of another site asks.",
    404: "The key is absent.",
    408: "The body has not come in time.",
    409: "The request id is older than what the store remembers.",
    410: "The log does not reach back to where the watch shall go on.",
    412: "The condition is not met; `version` is what was found.",
    413: "The body is too large.",
    415: "The body is of another kind than is taken here.",
    429: "A bound is reached, or a namespace's rate (RATE_EXCEEDED). Not done; try again after Retry-After.",
    501: "The body has a Transfer-Encoding beside chunked.",
    503: "Nobody who may answer was reached in time. Not done; try again.",
    504: "It may or may not be done. Retry with the same Kvstore-Request, or read.",
    507: "The namespace's quota of keys or bytes does not hold it (QUOTA_EXCEEDED). Not done; delete something first.",
}
_ALWAYS = (400, 401, 403, 429, 503)
_OF_WRITES = (409, 504, 507)
_OF_BODIES = (408, 413, 415, 501)
_HEADERS = {
    "Kvstore-Token": ("What the client has seen with this answer: to be sent with the next request.", "string"),
    "Kvstore-Time-Ms": ("The partition's time, for `seen` of Kvstore-Request.", "integer"),
}
_RECORD_HEADERS = {
    "ETag": ("The version.", "string"),
    "Kvstore-Created": ("The sequence of the mutation that created the key.", "integer"),
    "Kvstore-Written-Ms": ("When it was written, in milliseconds since 1970.", "integer"),
    "Kvstore-Expires-Ms": ("When it expires; left out: never.", "integer"),
}


def document() -> bytes:
    """The document, as it is served."""
    _, schemas = msgspec.json.schema_components((*bodies.IN, *bodies.OUT), ref_template=_REF)
    outcomes = [{"$ref": _REF.format(name=each.__name__)} for each in bodies.Outcome.__args__]
    schemas["BatchAnswer"]["properties"]["results"]["items"] = {"anyOf": outcomes}
    found = {
        "openapi": "3.1.0",
        "info": {
            "title": "kvstore",
            "version": VERSION,
            "description": "A distributed key-value store on a replicated log. docs/reference/http.md tells more.",
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
        f"1 to {KEY_BYTES_MAX} bytes, each that is no letter or digit percent-encoded. A slash may stand as it is; a "
        "key that is `.` or `..`, or has such a part between slashes, should come in a batch: clients change such "
        "paths before they send them."
    )
    return [{"name": "key", "in": "path", "required": True, "description": text, "schema": {"type": "string"}}]


def _parameter(parameter: Parameter) -> dict[str, Any]:
    schema: dict[str, Any]
    match parameter.kind:
        case Kind.INTEGER:
            schema = {"type": "integer", "format": "int64", "minimum": parameter.least, "maximum": parameter.most}
        case Kind.FLAG:
            schema = {"type": "boolean"}
        case Kind.CHOICE:
            schema = {"type": "string", "enum": list(parameter.choices)}
        case Kind.BYTES | Kind.TEXT:
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
        case Answer.RAW_OR_JSON:
            content[answers.RAW] = {"schema": {"type": "string", "format": "binary"}}
            content[answers.JSON] = {"schema": _schema(route.gives)}
        case Answer.JSON:
            content[answers.JSON] = {"schema": _schema(route.gives)}
        case Answer.EVENTS:
            content["text/event-stream"] = {"schema": {"type": "string"}}
            description = (
                "Events: `change`, whose data is a Change; `position` at least every heartbeat_ms; and `error`, whose "
                "data is a Failure, before the end. The id of each is where the watch goes on behind it."
            )
        case Answer.DOCUMENT:
            content[answers.JSON] = {"schema": {"type": "object"}}
        case Answer.HEAD:
            pass
    headers = _HEADERS if routes.KEY in route.template or route.body is Body.BATCH else {}
    if route.answer in (Answer.RAW_OR_JSON, Answer.HEAD):
        headers = headers | _RECORD_HEADERS
    shown = {name: {"description": text, "schema": {"type": kind}} for name, (text, kind) in headers.items()}
    return {
        "description": description,
        **({"headers": shown} if shown else {}),
        **({"content": content} if content else {}),
    }


def _failure(route: Route, status: int) -> dict[str, Any]:
    found: dict[str, Any] = {"description": _STATUSES[status]}
    if status != 304 and route.answer is not Answer.HEAD:
        found["content"] = {answers.JSON: {"schema": _schema(bodies.Failure)}}
    return found


def _schema(kind: type[msgspec.Struct] | None) -> dict[str, str]:
    assert kind is not None, "a route that answers JSON says which"
    return {"$ref": _REF.format(name=kind.__name__)}
