"""A server that speaks what SGLang and vLLM speak, on the loopback address: quirks of theirs are switches here.

Its model is a rule anyone can follow: the answer to a prompt are a few words that its length chooses. Its tokenizer is the tiny
verifier's own, unless a test gives it another one.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eagle3_core.data.templates import Chat
from eagle3_core.testing import WORDS
from eagle3_core.verifier.identity import inspect

END = 2
"""The tiny verifier's end of a turn."""


@dataclass
class Quirks:
    """How a server differs from one of SGLang that is as it should be."""

    says_ids: bool = True
    knows_extras: bool = True
    """Else it refuses fields that OpenAI's interface does not have."""
    names_end: bool = False
    says_end_id: bool = True
    """Whether the token that ended an answer is among its ids."""
    counts: bool = True
    honours_seeds: bool = True
    key: str = ""
    models: Sequence[dict[str, Any]] = ({"id": "verifier", "root": "/models/verifier"},)
    info: dict[str, Any] | None = field(default_factory=dict[str, Any])
    """Changes of SGLang's `/model_info`; None: it has none, as vLLM."""
    tokenize: Callable[[str], list[int]] | None = None
    offers_tokenize: bool = True
    render: Callable[[list[Any]], list[int]] | None = None
    spell: Callable[[list[int]], list[int]] = lambda ids: ids
    """Turns the tokens of an answer into others with the same text."""
    before: Callable[[BaseHTTPRequestHandler, dict[str, Any], int], bool] = lambda handler, body, time: False
    """Answers a request for an answer in the server's place: with the request, and how often it came."""
    routes: dict[str, Any] = field(default_factory=dict[str, Any])
    """What else it answers to GET."""
    reasoning: bool = False
    """Whether its chat takes answers apart."""


class RunningServer(ThreadingHTTPServer):
    """The server."""

    daemon_threads = True

    def __init__(self, verifier: Path, quirks: Quirks) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.quirks = quirks
        self.chat = Chat.of(inspect(verifier))
        self.tokenizer: Tokenizer = self.chat.tokenizer
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.times: Counter[str] = Counter()
        self.keys: set[str] = set()
        self.drawn = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, prompt: Sequence[int], most: int, seed: int | None, temperature: float) -> tuple[list[int], bool]:
        """The tokens of the answer to `prompt` and whether it ended."""
        shift = len(prompt) + sum(prompt) % 7
        if temperature:
            self.drawn += 1
            shift += (seed if seed is not None and self.quirks.honours_seeds else self.drawn) % 23
        words = " ".join(WORDS[(shift + i) % len(WORDS)] for i in range(2 + shift % 3))
        ids = [*self.quirks.spell(self.tokenizer.encode(" " + words, add_special_tokens=False).ids), END]
        return ids[:most], len(ids) <= most


class _Handler(BaseHTTPRequestHandler):
    server: RunningServer

    def do_GET(self) -> None:
        quirks = self.server.quirks
        if self.path == "/v1/models" and quirks.models:
            self.say(200, {"data": list(quirks.models)})
        elif self.path == "/model_info" and quirks.info is not None:
            told = {
                "model_path": "/models/verifier", "served_model_name": "verifier", "model_type": "llama",
                "architectures": ["LlamaForCausalLM"], "load_format": "auto", "dtype": "float32",
            }  # fmt: skip
            self.say(200, told | quirks.info)
        elif self.path in quirks.routes:
            self.say(200, quirks.routes[self.path])
        else:
            self.say(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        server, quirks = self.server, self.server.quirks
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(raw)
        with server.lock:
            server.asked.append((self.path, body))
            server.times[self.path + raw.decode()] += 1
            time = server.times[self.path + raw.decode()]
            server.keys.add(self.headers.get("Authorization", ""))
        if quirks.key and self.headers.get("Authorization") != f"Bearer {quirks.key}":
            self.say(401, {"error": {"message": f"no: {self.headers.get('Authorization')}"}})
        elif self.path == "/tokenize" and quirks.offers_tokenize:
            tokenize = quirks.tokenize or server.chat.encode
            self.say(200, {"tokens": tokenize(body["prompt"])})
        elif quirks.before(self, body, time):
            return
        elif self.path == "/generate":
            self._native(body)
        elif self.path in ("/v1/completions", "/v1/chat/completions"):
            self._openai(body, chat="chat" in self.path)
        else:
            self.say(404, {"detail": "Not Found"})

    def _native(self, body: dict[str, Any]) -> None:
        params = body["sampling_params"]
        ids, ended = self.server.answer(
            body["input_ids"], params["max_new_tokens"], params.get("sampling_seed"), params["temperature"]
        )
        text = self.server.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        why = {"type": "stop", "matched": END} if ended else {"type": "length"}
        meta = {"prompt_tokens": len(body["input_ids"]), "completion_tokens": len(ids), "finish_reason": why}
        self.say(200, {"text": text, "output_ids": ids, "meta_info": meta})

    def _openai(self, body: dict[str, Any], *, chat: bool) -> None:
        server, quirks = self.server, self.server.quirks
        if not quirks.knows_extras and (extra := sorted({"return_token_ids", "top_k", "stop_token_ids"} & body.keys())):
            self.say(400, {"error": {"message": f"Unrecognized request argument supplied: {extra[0]}"}})
            return
        prompt = (quirks.render or server.chat.prompt)(body["messages"]) if chat else body["prompt"]
        ids, ended = server.answer(prompt, body["max_tokens"], body.get("seed"), body["temperature"])
        text = server.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if ended else "length"}
        document: dict[str, Any] = {"choices": [choice]}
        if chat:
            choice["message"] = {"content": text, **({"reasoning_content": "hm"} if quirks.reasoning else {})}
        else:
            choice["text"] = text
        if quirks.names_end and ended:
            choice["stop_reason"] = END
        if quirks.says_ids and body.get("return_token_ids"):
            said = ids if quirks.says_end_id or not ended else ids[:-1]
            choice["response_token_ids" if chat else "token_ids"] = said
            (document if chat else choice)["prompt_token_ids"] = prompt
        if quirks.counts:
            document["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        self.say(200, document)

    def say(self, status: int, document: Any, **headers: str) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@contextmanager
def running(verifier: Path, quirks: Quirks | None = None) -> Generator[RunningServer]:
    """A server within the block."""
    with RunningServer(verifier, quirks or Quirks()) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


__all__ = ["END", "Quirks", "RunningServer", "running"]
