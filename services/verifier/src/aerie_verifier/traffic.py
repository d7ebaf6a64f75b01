"""Keeps a share of the real chats that a serving verifier answers, as training data. Off unless the operator says so.

A drafter learns most from the traffic that it will meet. What people write is theirs, though, so nothing is kept unless the
server was started with `traffic`, and then only a drawn share, at most so many a minute, after the operator's own
redaction, and not longer than the retention time. What the redaction cannot do is not kept.

Answering never waits for it: a chat that was answered is put on a bounded queue, one thread redacts and writes, and a full
queue drops samples and counts them. Kept are plain text chats with one answer; tool calls and images are passed over.

An object of the sink is a JSONL file whose lines data sets of format `messages` read:
`traffic/YYYY-MM-DD/ID.jsonl`, {"id", "task": "traffic", "messages": [{"role", "content"}, ...]}.
"""

from __future__ import annotations

import atexit
import json
import logging
import pkgutil
import queue
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from pydantic import ValidationError

from eagle3_core.engine.config import TRAFFIC_VARIABLE, TrafficConfig
from eagle3_core.errors import AerieError
from eagle3_core.faults import placed
from eagle3_core.objects.protocol import ObjectStore

logger = logging.getLogger(__name__)

PREFIX = "traffic/"
WAITING = 256
"""Samples that may wait for the writer; more are dropped."""
BATCH = 64
"""Samples of one object."""
FLUSH_S = 10.0
"""Longest time that a sample waits to be written, in seconds."""
SWEEP_S = 3600.0
"""How often samples past their time are looked for, in seconds."""
ENDED = frozenset({"stop", "length"})

Sample = dict[str, Any]
Redact = Callable[[Sample], "Sample | None"]


class TrafficMisconfigured(AerieError):
    """Chats cannot be kept as the server was told to."""

    code, status = "traffic.config", 500


def read_traffic(environment: Mapping[str, str]) -> TrafficConfig | None:
    """The configuration in `environment`; None where nothing is kept. Raises TrafficMisconfigured."""
    if not (text := environment.get(TRAFFIC_VARIABLE, "")):
        return None
    try:
        return TrafficConfig.model_validate_json(text)
    except ValidationError as error:
        faults = "; ".join(placed(fault, TrafficConfig) for fault in error.errors())
        raise TrafficMisconfigured(
            f"{TRAFFIC_VARIABLE} does not validate: {faults}",
            remedy="start the server with aerie-verifier, which writes it, or unset it to keep nothing",
        ) from None


def redaction(name: str | None) -> Redact:
    """The operator's function `module:function`; one that changes nothing for None. Raises TrafficMisconfigured."""
    if name is None:
        return lambda sample: sample
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TrafficMisconfigured(
            f"traffic.redact {name} cannot be imported: {error}",
            remedy="name a function as module:function, in a package of the server's environment",
        ) from None
    if not callable(found):
        raise TrafficMisconfigured(f"traffic.redact {name} is no function", remedy="name one as module:function")
    return cast("Redact", found)


@dataclass
class Draw:
    """Which chats are kept: a share of all, and no more than so many in any one minute."""

    config: TrafficConfig
    chance: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic
    _minute: int = -1
    _kept: int = 0

    def chosen(self) -> bool:
        """Whether this chat is one of them."""
        if self.chance() >= self.config.share:
            return False
        if (minute := int(self.clock() // 60)) != self._minute:
            self._minute, self._kept = minute, 0
        self._kept += 1
        return self._kept <= self.config.per_minute


@dataclass
class Keeper:
    """Redacts, writes and deletes samples, in a thread of its own."""

    config: TrafficConfig
    store: ObjectStore
    redact: Redact
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    counts: Counter[str] = field(default_factory=Counter[str])
    """Samples kept, redacted away, failed, and dropped because the queue was full."""
    _waiting: queue.Queue[Sample | None] = field(default_factory=lambda: queue.Queue(WAITING))
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, if it has not begun; what waits is written when the process ends."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, name="aerie-traffic", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def offer(self, sample: Sample) -> None:
        """Keep `sample`, unless too many wait."""
        self.start()
        try:
            self._waiting.put_nowait(sample)
        except queue.Full:
            self.counts["dropped"] += 1

    def close(self) -> None:
        """Write what waits, and end."""
        if self._thread is not None and self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        swept = -SWEEP_S
        going = True
        while going:
            if time.monotonic() - swept >= SWEEP_S:
                swept = time.monotonic()
                self._safely(self.sweep)
            batch, going = self._batch()
            if batch:
                self._safely(lambda lines=batch: self.write(lines))

    def _batch(self) -> tuple[list[Sample], bool]:
        """The next samples to write, and whether more may come."""
        batch: list[Sample] = []
        deadline = time.monotonic() + FLUSH_S
        while len(batch) < BATCH:
            try:
                sample = self._waiting.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return batch, True
            if sample is None:
                return batch, False
            batch.append(sample)
        return batch, True

    def write(self, samples: Sequence[Sample]) -> None:
        """Write what the redaction lets through as one object."""
        kept = [line for sample in samples if (line := self._redacted(sample)) is not None]
        if kept:
            key = f"{PREFIX}{self.now():%Y-%m-%d}/{uuid.uuid4().hex}.jsonl"
            self.store.put_bytes(key, "".join(line + "\n" for line in kept).encode())
            self.counts["kept"] += len(kept)

    def _redacted(self, sample: Sample) -> str | None:
        """The line of `sample`; None where it is to be dropped, or the redaction failed: then nobody knows what it holds."""
        try:
            redacted = self.redact(sample)
            line = None if redacted is None else json.dumps(redacted, ensure_ascii=False)
        except Exception as error:  # it is the operator's own code, and its message may quote what must not be kept
            self.counts["failed"] += 1
            logger.warning("a chat was not kept: the redaction failed with %s", type(error).__name__)
            return None
        self.counts["redacted"] += line is None
        return line

    def sweep(self) -> None:
        """Delete the samples of days that are past their time."""
        oldest = f"{PREFIX}{self.now() - timedelta(days=self.config.retention_days):%Y-%m-%d}"
        for stat in list(self.store.list(PREFIX)):
            if stat.key < oldest:
                self.store.delete(stat.key)

    def _safely(self, action: Callable[[], None]) -> None:
        """A sink that fails costs samples, and never the server."""
        try:
            action()
        except AerieError as error:
            self.counts["failed"] += 1
            logger.warning("chats were not kept: %s", error.text())


@dataclass
class Traffic:
    """The hooks around SGLang's chat endpoint, in the process that answers."""

    draw: Draw
    keeper: Keeper

    async def whole(self, original: Any, chat: Any, adapted: Any, request: Any, http: Any) -> Any:
        """Around an answer that is sent whole."""
        response = await original(chat, adapted, request, http)
        choices = getattr(response, "choices", None)
        if choices is not None and len(choices) == 1 and self.draw.chosen():
            message = choices[0].message
            if choices[0].finish_reason in ENDED and not message.tool_calls:
                self._keep(request, message.content)
        return response

    async def streamed(self, original: Any, chat: Any, adapted: Any, request: Any, http: Any) -> AsyncIterator[str]:
        """Around an answer that is sent in pieces."""
        pieces: list[str] | None = [] if self.draw.chosen() else None
        ended = False
        async for event in original(chat, adapted, request, http):
            if pieces is not None:
                pieces, ended = self._piece(event, pieces, ended)
            yield event
        if pieces is not None and ended:
            self._keep(request, "".join(pieces))

    def _piece(self, event: str, pieces: list[str], ended: bool) -> tuple[list[str] | None, bool]:
        """`pieces` with what `event` adds; None where this is no chat to keep."""
        for line in event.splitlines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line.removeprefix("data: ")).get("choices") or []
            for choice in choices:
                delta = choice.get("delta") or {}
                if delta.get("tool_calls") or choice.get("index"):
                    return None, False
                pieces.append(delta.get("content") or "")
                ended = ended or choice.get("finish_reason") in ENDED
        return pieces, ended

    def _keep(self, request: Any, answer: str | None) -> None:
        if answer and (messages := plain_messages(request.messages)):
            messages.append({"role": "assistant", "content": answer})
            self.keeper.offer({"id": uuid.uuid4().hex, "task": "traffic", "messages": messages})


def plain_messages(messages: Sequence[Any]) -> list[dict[str, str]] | None:
    """Role and text of chat messages (SGLang's own types); None where one holds more than text."""
    plain: list[dict[str, str]] = []
    for message in messages:
        content = message.content
        if isinstance(content, list):
            parts = cast("list[Any]", content)
            if any(getattr(part, "type", None) != "text" for part in parts):
                return None
            content = "".join(part.text for part in parts)
        if message.role not in ("system", "user", "assistant") or not isinstance(content, str):
            return None
        if getattr(message, "tool_calls", None):
            return None
        plain.append({"role": message.role, "content": content})
    return plain
