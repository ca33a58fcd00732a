"""Messages and descriptions of functions as the records of BFCL hold them."""

from __future__ import annotations

from typing import Final

from ludus.tools.base import FunctionSchema, ToolSchema
from ludus.types import JSON, Message

_TYPES: Final = {"dict": "object", "float": "number", "double": "number", "long": "integer", "tuple": "array"}
_KNOWN: Final = frozenset({"object", "number", "integer", "string", "boolean", "array"})


class Fault(Exception):
    """What is wrong with a record."""


def read_messages(question: JSON) -> tuple[Message, ...]:
    """Return the messages of a question of one turn, which the user ends. Raises Fault."""
    if isinstance(question, str):
        return (Message(role="user", content=question),)
    if isinstance(question, list) and question and isinstance(question[0], list):
        if len(question) > 1:
            raise Fault('"question" has several turns, and one is read')
        question = question[0]
    if not isinstance(question, list) or not question:
        raise Fault('"question" is neither a text nor a list of messages')
    messages = tuple(map(_message, question))
    if messages[-1]["role"] != "user":
        raise Fault('the last message of "question" is not of the user')
    return messages


def _message(given: JSON) -> Message:
    role, content = (given.get("role"), given.get("content")) if isinstance(given, dict) else (None, None)
    if not isinstance(content, str):
        raise Fault('a message of "question" has no "content"')
    if role == "system":
        return Message(role="system", content=content)
    if role == "user":
        return Message(role="user", content=content)
    if role == "assistant":
        return Message(role="assistant", content=content)
    raise Fault(f'a message of "question" has the role {role!r}')


def read_schemas(functions: JSON) -> dict[str, ToolSchema]:
    """Return the descriptions of functions by name. Raises Fault."""
    found: dict[str, ToolSchema] = {}
    for function in functions if isinstance(functions, list) else [functions]:
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise Fault('"function" is not a list of descriptions with names')
        if name in found:
            raise Fault(f"two functions are called {name!r}")
        parameters = _schema(function.get("parameters", {}))
        if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
            raise Fault(f'"parameters" of {name!r} is not a JSON schema')
        parameters = {"type": "object", "properties": {}, "required": [], **parameters}
        text = str(function.get("description", ""))
        described = FunctionSchema(name=name, description=text, parameters=parameters)
        found[name] = ToolSchema(type="function", function=described)
    return found


def _schema(given: JSON) -> JSON:
    """The schema with the type names of JSON schema; a type that is unknown is left out and not checked."""
    if not isinstance(given, dict):
        return given
    schema = {key: value for key, value in given.items() if key != "type"}
    type_ = _TYPES.get(str(given.get("type")), str(given.get("type")))
    if type_ in _KNOWN:
        schema["type"] = type_
    properties = schema.get("properties")
    if isinstance(properties, dict):
        schema["properties"] = {name: _schema(one) for name, one in properties.items()}
    if "items" in schema:
        schema["items"] = _schema(schema["items"])
    return schema
