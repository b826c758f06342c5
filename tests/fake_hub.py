"""The part of the Hugging Face Hub that `cleanba push` and `cleanba eval hf://…` use, served on this machine."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "hf_a_token_for_tests"
LARGE = (".msgpack", ".mp4")  # kept apart from git, as the Hub does with binary files


class Hub:
    """Repositories in memory, and every request that came."""

    def __init__(self):
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}  # by SHA-256
        self.requests: list[tuple[str, str]] = []
        self.broken = False  # answers 500 to every commit
        self.address = ""

    def sha(self, repo: str) -> str:
        """A commit's name that changes with the content."""
        digest = hashlib.sha1(repo.encode())
        for name, content in sorted(self.repos[repo].items()):
            digest.update(name.encode() + hashlib.sha1(content).digest())
        return digest.hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args):
        pass

    def answer(self, status: int, body=None, headers=None, content: bytes | None = None) -> None:
        data = json.dumps(body or {}).encode() if content is None else content
        self.send_response(status)
        for name, value in (headers or {"Content-Type": "application/json"}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def handle_one(self) -> None:
        hub, path, data = self.hub, self.path.split("?")[0], self.body()
        hub.requests.append((self.command, path))
        if self.command == "PUT":
            oid = path.rsplit("/", 1)[1]
            assert hashlib.sha256(data).hexdigest() == oid
            hub.large[oid] = data
            return self.answer(200)
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not known and (self.command == "POST" or "whoami" in path):
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "/api/whoami-v2":
            return self.answer(200, {"name": "tester", "type": "user"})
        if path == "/api/validate-yaml":
            return self.answer(200)
        if path == "/api/repos/create":
            wanted = json.loads(data)
            repo = f"{wanted.get('organization') or 'tester'}/{wanted['name']}"
            there = repo in hub.repos
            if not there:
                hub.repos[repo], hub.private[repo] = {}, wanted.get("visibility") == "private"
            return self.answer(409 if there else 200, {"url": f"{hub.address}/{repo}"})
        if found := re.fullmatch(r"/api/models/(.+?)/preupload/main", path):
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular"}
                for f in json.loads(data)["files"]
            ]
            return self.answer(200, {"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        if found := re.fullmatch(r"/(.+?)\.git/info/lfs/objects/batch", path):
            upload = lambda oid: {"upload": {"href": f"{hub.address}/large/{oid}"}}
            objects = [{**o, "actions": upload(o["oid"])} for o in json.loads(data)["objects"]]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if found := re.fullmatch(r"/api/models/(.+?)/commit/main", path):
            if hub.broken:
                return self.answer(500, {"error": "the disk of the hub is full"})
            repo = hub.repos[found[1]]
            for item in map(json.loads, data.splitlines()):
                value = item["value"]
                if item["key"] == "file":
                    repo[value["path"]] = base64.b64decode(value["content"])
                elif item["key"] == "lfsFile":
                    repo[value["path"]] = hub.large[value["oid"]]
                elif item["key"] == "deletedFile":
                    repo.pop(value["path"], None)
            url = f"{hub.address}/{found[1]}/commit/{hub.sha(found[1])}"
            return self.answer(200, {"commitUrl": url, "commitOid": hub.sha(found[1])})
        if found := re.fullmatch(r"/api/models/(.+?)/tree/(\w+)", path):
            repo = hub.repos[found[1]]
            rows = [{"type": "file", "path": name, "size": len(c), "oid": "0" * 40} for name, c in repo.items()]
            return self.answer(200, rows)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/(\w+))?", path):
            if found[1] not in hub.repos:
                return self.answer(404, {}, {"X-Error-Code": "RepoNotFound"})
            return self.answer(200, {"id": found[1], "sha": hub.sha(found[1])})
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(\w+)/(.+)", path):
            content = hub.repos.get(found[1], {}).get(found[3])
            if content is None:
                return self.answer(404, {}, {"X-Error-Code": "EntryNotFound"})
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            return self.answer(200, headers={"X-Repo-Commit": hub.sha(found[1]), "ETag": etag}, content=content)
        return self.answer(404, {"error": f"nothing is known of {self.command} {path}"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_one


@contextmanager
def fake_hub():
    """A Hub that answers until the end of the block."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("H", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def log_in(monkeypatch, hub: Hub, cache: Path) -> None:
    """Have huggingface_hub use this Hub, logged in with a known account.

    Once the library is imported, it keeps the address in constants.
    """
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name, value in (
        ("ENDPOINT", hub.address),
        ("HUGGINGFACE_CO_URL_TEMPLATE", hub.address + "/{repo_id}/resolve/{revision}/{filename}"),
        ("HF_HUB_DISABLE_XET", True),
        ("HF_HUB_CACHE", str(cache)),
    ):
        monkeypatch.setattr(constants, name, value)
