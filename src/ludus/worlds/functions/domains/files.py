"""Files: making, finding, reading and sharing them."""

from __future__ import annotations

from ludus.worlds.functions.domains.catalogue import Function, Gift, Param
from ludus.worlds.functions.domains.kinds import TEXTS
from ludus.worlds.functions.domains.state import DomainState, Row


def create_file(state: DomainState, name: str, content: str) -> Row:
    """Write a new file."""
    file_id = state.issue("document", "new", name, content)
    state.need("document", file_id).update(name=name, content=content)
    return {"file_id": file_id}


def find_file(state: DomainState, name: str) -> Row:
    """Find a file by name."""
    file_id = state.issue("document", "name", name)
    state.need("document", file_id).setdefault("name", name)
    return {"file_id": file_id, "size": state.number(1, 900, file_id)}


def read_file(state: DomainState, file_id: str) -> Row:
    """Read a file."""
    row = state.need("document", file_id)
    return {"text": row.setdefault("content", state.pick(TEXTS, file_id))}


def delete_file(state: DomainState, file_id: str) -> Row:
    """Delete a file."""
    state.drop("document", file_id)
    return {"deleted": file_id}


def rename_file(state: DomainState, file_id: str, name: str) -> Row:
    """Give a file a new name."""
    state.need("document", file_id)["name"] = name
    return {"file_id": file_id, "name": name}


def move_file(state: DomainState, file_id: str, folder: str) -> Row:
    """Move a file to a folder."""
    state.need("document", file_id)["folder"] = folder
    return {"file_id": file_id, "folder": folder}


def share_file(state: DomainState, file_id: str, email: str) -> Row:
    """Share a file with an address."""
    state.need("document", file_id)["shared"] = email
    return {"file_id": file_id, "shared": email}


def count_words(state: DomainState, file_id: str) -> Row:
    """Count the words of a file."""
    row = state.need("document", file_id)
    text = str(row.setdefault("content", state.pick(TEXTS, file_id)))
    return {"words": len(text.split())}


def append_text(state: DomainState, text: str, file_id: str) -> Row:
    """Add text to the end of a file."""
    row = state.need("document", file_id)
    row["content"] = f"{row.get('content', state.pick(TEXTS, file_id))} {text}"
    return {"file_id": file_id, "words": len(str(row["content"]).split())}


_FILE = Param("file_id", "document")
_MADE = (Gift("file_id", "document"),)

FUNCTIONS = (
    Function(
        "create_file",
        "files",
        ("create a file", "write a new file"),
        (Param("name", "file", "called {}"), Param("content", "text", "that says {}")),
        create_file,
        _MADE,
    ),
    Function(
        "find_file", "files", ("find the file", "search for the file"), (Param("name", "file"),), find_file, _MADE
    ),
    Function("read_file", "files", ("read", "show the content of"), (_FILE,), read_file, (Gift("text", "text"),)),
    Function("delete_file", "files", ("delete", "erase"), (_FILE,), delete_file),
    Function("rename_file", "files", ("rename",), (_FILE, Param("name", "file", "to {}")), rename_file),
    Function(
        "move_file", "files", ("move", "put"), (_FILE, Param("folder", "folder", "into the folder {}")), move_file
    ),
    Function("share_file", "files", ("share",), (_FILE, Param("email", "email", "with {}")), share_file),
    Function("count_words", "files", ("count the words of",), (_FILE,), count_words),
    Function(
        "append_text", "files", ("append",), (Param("text", "text"), Param("file_id", "document", "to {}")), append_text
    ),
)
