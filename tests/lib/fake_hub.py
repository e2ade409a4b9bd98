"""A server on the loopback that gives files as the Hugging Face hub and plain web servers do, and breaks as told."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Use as a context manager.

    Args:
        repos: data set -> its files.
        plain: path -> a file outside of any data set.
        faults: part of a path -> what goes wrong with the next requests for it, one each: a status code, ``429 after
            0.1``, ``truncated``, ``wrong`` (other bytes of the same length), ``stall 2``.
        large: names of files that the hub keeps apart, with their SHA-256.
    """

    def __init__(
        self,
        repos: Mapping[str, Mapping[str, bytes]] | None = None,
        plain: Mapping[str, bytes] | None = None,
        faults: Mapping[str, list[str]] | None = None,
        large: str = r".*",
    ) -> None:
        self.repos, self.plain = dict(repos or {}), dict(plain or {})
        self.faults = {part: list(own) for part, own in (faults or {}).items()}
        self.large = large
        self.asked: list[tuple[str, str, str]] = []  # method, path, range
        self._lock = threading.Lock()

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                path = unquote(urlsplit(self.path).path)
                with hub._lock:
                    hub.asked.append((self.command, path, self.headers.get("Range", "")))
                    fault = ""
                    for part, own in hub.faults.items():
                        if part in path and own and body:
                            fault = own.pop(0)
                            break
                kind, _, more = fault.partition(" ")
                if kind.isdigit():
                    after = {"Retry-After": more.removeprefix("after ")} if more else {}
                    return self.send(int(kind), b"{}", after, body=body)
                if kind == "stall":
                    time.sleep(float(more))
                if api := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/.*)?", path):
                    if api[1] not in hub.repos:
                        return self.send(
                            404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, body
                        )
                    return self.send(200, json.dumps(hub.info(api[1])).encode(), {}, body)
                if file := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.*)", path):
                    held = hub.repos.get(file[1], {}).get(file[2])
                    if held is None:
                        return self.send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
                    digest = hashlib.sha256(held).hexdigest()
                    about = {"X-Repo-Commit": SHA, "ETag": f'"{digest}"', "X-Linked-Etag": f'"{digest}"'}
                    return self.give(held, about, kind, body)
                if path in hub.plain:
                    return self.give(hub.plain[path], {}, kind, body)
                return self.send(404, b"", {}, body)

            def give(self, held: bytes, headers: dict[str, str], fault: str, body: bool) -> None:
                begin = 0
                if told := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
                    begin = int(told[1])
                    if begin >= len(held):
                        return self.send(416, b"", {"Content-Range": f"bytes */{len(held)}"}, body)
                part = held[begin:]
                if fault == "wrong":
                    part = bytes(255 - byte for byte in part)
                if begin:
                    headers |= {"Content-Range": f"bytes {begin}-{len(held) - 1}/{len(held)}"}
                self.send(206 if begin else 200, part, headers, body, cut=fault == "truncated")
                return None

            def send(
                self, status: int, data: bytes, headers: dict[str, str], body: bool = True, cut: bool = False
            ) -> None:
                with contextlib.suppress(ConnectionError):
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    if body:
                        self.wfile.write(data[: len(data) // 2] if cut else data)
                    if cut:
                        self.wfile.flush()
                        self.close_connection = True
                        self.connection.shutdown(2)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def info(self, repo: str) -> dict[str, Any]:
        siblings = []
        for name, held in self.repos[repo].items():
            told: dict[str, Any] = {"rfilename": name, "size": len(held)}
            if re.fullmatch(self.large, name):
                told["lfs"] = {"sha256": hashlib.sha256(held).hexdigest(), "size": len(held), "pointerSize": 130}
            siblings.append(told)
        return {"id": repo, "sha": SHA, "siblings": siblings, "private": False, "disabled": False, "downloads": 0}
