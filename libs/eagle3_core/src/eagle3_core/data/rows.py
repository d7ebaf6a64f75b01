"""One line of a data set as a conversation: the four shapes that people bring, and what is wrong with a line.

Nothing is guessed: a role that is not known is a fault, and so is a picture where text belongs. Nothing is left out in
silence either: what serving would put into the prompt or the model say (tools, calls of them, a system prompt beside the
turns) is a fault where no turn's text holds it, since a drafter would learn other text than it is to draft.

Shapes of a line:
    messages   {"messages": [{"role", "content"}]}           roles system, user, assistant
    sharegpt   {"conversations": [{"from", "value"}]}        human/user, gpt/assistant, system
    alpaca     {"instruction", "input"?, "output"?}
    prompts    {"prompt"} or {"question"} or {"turns": [first, ...]}: one user turn
`id` and `task` (or `category`) are kept where a line has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

from eagle3_core.errors import AerieError
from eagle3_core.text import is_text, kind_of, sayable

MAX_LINE_BYTES = 4 << 20
"""Longest line that is read, a million tokens of English; a longer one is a fault of its own and is skipped, not held."""
MAX_TURNS = 1000
"""Most turns of a conversation: each answer is rendered with all that comes before it."""
MAX_NAME_CHARS = 256

Format = Literal["messages", "sharegpt", "alpaca", "prompts"]
Role = Literal["system", "user", "assistant"]

_ID_FIELDS = ("id", "uuid", "conversation_id", "question_id", "task_id")
_TASK_FIELDS = ("task", "category")
_TOOLS = ("tools", "functions")
_CALLS = ("tool_calls", "function_call")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_SYSTEM = ("system", "system_prompt")
_NOTHING: tuple[Any, ...] = (None, "", "[]", [], {})
"""Values that say nothing, as files have them where a field does not apply."""
_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
_SHAREGPT_ROLES: dict[str, Role] = {**_ROLES, "human": "user", "gpt": "assistant"}


class Message(TypedDict):
    """One turn."""

    role: Role
    content: str


@dataclass(frozen=True)
class Conversation:
    """One usable line."""

    id: str
    task: str
    """The domain it is reported under."""
    messages: tuple[Message, ...]
    """An optional system turn, then user and assistant in turn, beginning with the user; none is empty."""


class DatasetFault(AerieError):
    """A data set cannot be used."""

    code, status = "dataset.invalid", 422


class DatasetMissing(DatasetFault):
    """There is no such data set."""

    code = "dataset.missing"


class DatasetEmpty(DatasetFault):
    """The data set holds no usable line."""

    code = "dataset.empty"


class DatasetNotJsonl(DatasetFault):
    """The data set is not a file of JSON lines."""

    code = "dataset.not_jsonl"


class DatasetLineTooLong(DatasetFault):
    """A line is longer than any conversation."""

    code = "dataset.line_too_long"


class DatasetFormat(DatasetFault):
    """The lines do not have the shape that the job states."""

    code = "dataset.format"


class DatasetRoles(DatasetFault):
    """The turns' roles are not those of a conversation."""

    code = "dataset.roles"


class DatasetUnread(DatasetFault):
    """Lines say more than their turns' text, and a drafter would be trained without it."""

    code = "dataset.unread"


class DatasetNoAssistant(DatasetFault):
    """Nothing in the data set was said by an assistant, and the job does not ask for answers."""

    code = "dataset.no_assistant"


_REMEDIES: dict[type[DatasetFault], str] = {
    DatasetMissing: "check the path; it must be a file that this process can read",
    DatasetEmpty: "give a file with at least one line",
    DatasetNotJsonl: "write one JSON object per line, as UTF-8 text, plain or gzip (a JSON array is not JSON lines; "
    "`jq -c .[]` makes it so)",
    DatasetLineTooLong: f"write one conversation of at most {MAX_LINE_BYTES >> 20} MiB per line, each line ended by a line feed",
    DatasetFormat: "state the format that the lines have (messages, sharegpt, alpaca or prompts), or repair the lines",
    DatasetRoles: "an optional system turn first, then user and assistant in turn; the last turn may be either's",
    DatasetUnread: "put all that serving sends and the model writes into the turns' text, a system prompt as the first turn, "
    "and leave lines with tools out",
    DatasetNoAssistant: "set data.regenerate.enabled to true, so that the verifier answers, or give answered conversations",
}


def fault(kind: type[DatasetFault], detail: str, pointer: str | None) -> DatasetFault:
    """A `kind` of fault with its remedy."""
    return kind(detail, remedy=_REMEDIES[kind], pointer=pointer)


class RowFault(Exception):
    """One line cannot be used."""

    def __init__(self, kind: type[DatasetFault], reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


def parse(row: Mapping[str, Any], shape: Format, *, name: str, task: str, answers_needed: bool) -> Conversation:
    """A line of `shape` as a conversation; `name` and `task` stand in where it has none. Raises RowFault.

    `answers_needed` says that a line without an assistant turn is of no use.
    """
    _check_read(row, answers_needed=answers_needed)
    messages = _SHAPES[shape](row)
    if messages[:1] and messages[0]["role"] != "system" and (beside := _filled(row, _SYSTEM)):
        raise RowFault(DatasetUnread, f"a {beside!r} beside the turns, and no system turn")
    check_turns(messages, answers_needed=answers_needed)
    return Conversation(_label(row, _ID_FIELDS, name), _label(row, _TASK_FIELDS, task), messages)


def _check_read(row: Mapping[str, Any], *, answers_needed: bool) -> None:
    """Raise RowFault where a line holds what its turns' text leaves out. What an assistant thought counts only where its
    answers are trained on: the verifier thinks anew, and templates drop the thoughts of earlier turns."""
    if named := _filled(row, _TOOLS):
        raise RowFault(DatasetUnread, f"{named!r} that the prompt would leave out")
    if isinstance(row.get("history"), list) and row["history"]:
        raise RowFault(DatasetUnread, "a 'history' of turns that would be left out")
    turns = row.get("messages", row.get("conversations"))
    for turn in cast(list[Any], turns) if isinstance(turns, list) else []:
        names = _CALLS + _THOUGHTS * answers_needed
        if isinstance(turn, dict) and (named := _filled(cast(dict[str, Any], turn), names)):
            raise RowFault(DatasetUnread, f"a turn with {named!r} that its text leaves out")


def _filled(part: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of the fields `names` that says something."""
    return next((name for name in names if part.get(name) not in _NOTHING), None)


def check_turns(messages: Sequence[Message], *, answers_needed: bool) -> None:
    """Raise RowFault unless the turns are a conversation: system first, then user and assistant in turn."""
    if len(messages) > MAX_TURNS:
        raise RowFault(DatasetFormat, f"{len(messages)} turns, at most {MAX_TURNS} are read")
    turns = messages[1:] if messages and messages[0]["role"] == "system" else messages
    if not turns:
        raise RowFault(DatasetRoles, "no turn of a user")
    for index, message in enumerate(turns):
        if message["role"] != ("user", "assistant")[index % 2]:
            raise RowFault(DatasetRoles, f"turn {index + 1} is the {message['role']}'s, expected the other's")
    if any(not message["content"].strip() for message in messages):
        raise RowFault(DatasetFormat, "an empty turn")
    if answers_needed and len(turns) < 2:
        raise RowFault(DatasetNoAssistant, "no turn of an assistant")


def detect(row: Mapping[str, Any]) -> Format:
    """The shape of a line, by its fields. Raises RowFault when it has none of them."""
    if "messages" in row:
        return "messages"
    if "conversations" in row:
        return "sharegpt"
    if "instruction" in row:
        return "alpaca"
    if any(key in row for key in ("prompt", "question", "turns")):
        return "prompts"
    raise RowFault(DatasetFormat, f"fields {sorted(map(str, row))[:8]} fit no known format")


def row_of(raw: bytes | None) -> dict[str, Any]:
    """A line as a JSON object; None stands for a line that was too long to read. Raises RowFault."""
    if raw is None:
        raise RowFault(DatasetLineTooLong, f"longer than {MAX_LINE_BYTES} bytes")
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise RowFault(DatasetNotJsonl, "not UTF-8") from None
    except (RecursionError, MemoryError):
        raise RowFault(DatasetNotJsonl, "nested too deeply") from None
    except ValueError as error:
        raise RowFault(DatasetNotJsonl, f"not JSON ({str(error).split(':')[0]})") from None
    if not isinstance(value, dict):
        raise RowFault(DatasetNotJsonl, f"{kind_of(value)} where an object belongs")
    return cast(dict[str, Any], value)


def _turns(value: Any, role_key: str, text_key: str, roles: Mapping[str, Role], where: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise RowFault(DatasetFormat, f"no list under {where!r}")
    turns: list[Message] = []
    for entry in cast(list[Any], value):
        if not isinstance(entry, dict) or role_key not in entry or text_key not in entry:
            raise RowFault(DatasetFormat, f"a turn without {role_key!r} and {text_key!r}")
        turn = cast(dict[str, Any], entry)
        role = roles.get(turn[role_key]) if isinstance(turn[role_key], str) else None
        if role is None:
            raise RowFault(DatasetRoles, f"unknown role {str(turn[role_key])[:40]!r}")
        turns.append({"role": role, "content": _text(turn[text_key])})
    return tuple(turns)


def _messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    return _turns(row.get("messages"), "role", "content", _ROLES, "messages")


def _sharegpt(row: Mapping[str, Any]) -> tuple[Message, ...]:
    value = row.get("conversations")
    # SpecForge's files say `conversations` and mean role and content.
    if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
        return _turns(value, "role", "content", _ROLES, "conversations")
    return _turns(value, "from", "value", _SHAREGPT_ROLES, "conversations")


def _alpaca(row: Mapping[str, Any]) -> tuple[Message, ...]:
    if "instruction" not in row:
        raise RowFault(DatasetFormat, "no 'instruction'")
    question = _text(row["instruction"])
    if row.get("input"):
        question = f"{question}\n\n{_text(row['input'])}"
    turns: list[Message] = [{"role": "user", "content": question}]
    if row.get("output"):
        turns.append({"role": "assistant", "content": _text(row["output"])})
    return tuple(turns)


def _prompts(row: Mapping[str, Any]) -> tuple[Message, ...]:
    if "messages" in row:
        return _messages(row)
    if isinstance(turns := row.get("turns"), list) and turns:
        return ({"role": "user", "content": _text(cast(list[Any], turns)[0])},)
    for key in ("prompt", "question"):
        if key in row:
            return ({"role": "user", "content": _text(row[key])},)
    raise RowFault(DatasetFormat, "no 'prompt', 'question', 'turns' or 'messages'")


def _text(value: Any) -> str:
    """Text of a turn: a string, or the text parts of OpenAI's list form."""
    if isinstance(value, list):
        parts = cast(list[Any], value)
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            raise RowFault(DatasetFormat, "a turn with other parts than text")
        value = "".join(_text(part.get("text")) for part in parts)
    if not isinstance(value, str):
        raise RowFault(DatasetFormat, f"{kind_of(value)} where text belongs")
    if not is_text(value):
        raise RowFault(DatasetFormat, "half of a surrogate pair")
    return value


_SHAPES: dict[Format, Callable[[Mapping[str, Any]], tuple[Message, ...]]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompts": _prompts,
}


def _label(row: Mapping[str, Any], keys: Sequence[str], default: str) -> str:
    for key in keys:
        value = row.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return str(sayable(str(value)))[:MAX_NAME_CHARS]
    return default
