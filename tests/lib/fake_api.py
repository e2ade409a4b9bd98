"""An OpenAI-compatible endpoint on the loopback that ranks by shared words, and breaks as it is told to."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def ranked(prompt: str, count: int = 5) -> list[str]:
    """The codes of the documents that share most words with the query, of a prompt as `Api` writes it."""
    documents, _, query = prompt.rpartition("\nQuery: ")
    asked = set(re.findall(r"\w+", query.removesuffix("\nCodes:").lower()))
    lines = re.findall(r"^\[(\d+)\] (.*)$", documents, re.M)
    scored = sorted(lines, key=lambda line: (-len(asked & set(re.findall(r"\w+", line[1].lower()))), line[0]))
    return [code for code, _ in scored[:count]]


class FakeApi:
    """Use as a context manager.

    Args:
        faults: what goes wrong with the next requests, one each, in order: a status code, ``429 after 0.2`` (with
            Retry-After), ``truncated``, ``no choice``, ``refusal``, ``stall 0.5``, ``closed``, or ``say TEXT``.
        models: what /models tells of each, beside its id.
    """

    def __init__(self, faults: list[str] | None = None, models: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.faults = list(faults or ())
        basis = {"object": "model", "created": 0, "owned_by": "test"}
        self.models = [{"id": name, **basis, **told} for name, told in (models or {"m": {}}).items()]
        self.prompts: list[str] = []
        self.keys: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.at: list[float] = []
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        self.answer: Callable[[str], str] = lambda prompt: " ".join(ranked(prompt))

    def __enter__(self) -> FakeApi:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                if self.path != "/v1/models":
                    self.send(404, b"{}")
                    return
                self.send(200, json.dumps({"object": "list", "data": fake.models}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake._lock:
                    fake.bodies.append(body)
                    fake.prompts.append(body["messages"][-1]["content"])
                    fake.keys.append(self.headers.get("Authorization", ""))
                    fake.at.append(time.monotonic())
                    fault = fake.faults.pop(0) if fake.faults else ""
                    fake._now += 1
                    fake.most_at_once = max(fake.most_at_once, fake._now)
                try:
                    self.reply(body, fault)
                finally:
                    with fake._lock:
                        fake._now -= 1

            def reply(self, body: dict[str, Any], fault: str) -> None:
                kind, _, more = fault.partition(" ")
                if kind == "closed":
                    self.connection.close()
                    return
                if kind.isdigit():
                    after = {"Retry-After": more.removeprefix("after ")} if more else {}
                    key = self.headers.get("Authorization", "").removeprefix("Bearer ")
                    self.send(int(kind), json.dumps({"error": {"message": f"no, {key}"}}).encode(), after)
                    return
                if kind == "stall":
                    time.sleep(float(more))
                prompt = body["messages"][-1]["content"]
                message: dict[str, Any] = {
                    "role": "assistant",
                    "content": more if kind == "say" else fake.answer(prompt),
                }
                if kind == "refusal":
                    message = {"role": "assistant", "content": None, "refusal": "I cannot help with that"}
                choice = {"index": 0, "finish_reason": "stop", "message": message}
                usage = {
                    "prompt_tokens": len(prompt) // 4,
                    "completion_tokens": 7,
                    "total_tokens": len(prompt) // 4 + 7,
                }
                usage["prompt_tokens_details"] = {"cached_tokens": len(prompt) // 8}  # type: ignore[assignment]
                told = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "usage": usage}
                text = json.dumps(told | {"choices": [] if kind == "no" else [choice]}).encode()
                self.send(200, text[: len(text) // 2] if kind == "truncated" else text)

            def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                with contextlib.suppress(ConnectionError):  # nobody waits any more
                    self.end_headers()
                    self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
