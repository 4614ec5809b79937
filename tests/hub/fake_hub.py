"""A Hub on the loopback device: the API as far as huggingface_hub uses it to create, push to and read repositories.

Uploads go the plain LFS way (clients set HF_HUB_DISABLE_XET=1). Every commit replaces `main`; blobs live in memory.
"""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_LFS_SUFFIXES = (".safetensors",)
TOKEN = "hf_local"


class FakeHub:
    """`url` is the endpoint. `repositories`: id -> {path: bytes}. `unknown`: requests that nobody answered."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.unknown: list[str] = []
        self.commits: list[str] = []
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def revision(self, repo: str) -> str:
        content = b"".join(k.encode() + v for k, v in sorted(self.repositories[repo].items()))
        return hashlib.sha1(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def _reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, content, status: int = 200) -> None:
        self._reply(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _not_found(self, kind: str) -> None:
        if kind == "Unknown":
            self.hub.unknown.append(f"{self.command} {self.path}")
        self._reply(404, b"{}", {"X-Error-Code": kind, "Content-Type": "application/json"})

    def do_POST(self) -> None:
        body, path = self._body(), unquote(urlsplit(self.path).path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json({"error": "Invalid credentials"}, 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = "/".join(filter(None, [asked.get("organization"), asked["name"]]))
            if repo in self.hub.repositories:
                return self._json({"error": "exists", "url": f"{self.hub.url}/{repo}"}, 409)
            self.hub.repositories[repo] = {}
            return self._json({"url": f"{self.hub.url}/{repo}", "id": repo, "name": repo})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for item in objects:
                item["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}", "header": {}}}
            return self._json({"transfer": "basic", "objects": objects})
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and "/".join(parts[2:4]) in self.hub.repositories:
            repo = "/".join(parts[2:4])
            if parts[4] == "preupload":
                files = [
                    {
                        "path": f["path"],
                        "uploadMode": "lfs" if f["path"].endswith(_LFS_SUFFIXES) else "regular",
                        "shouldIgnore": False,
                    }
                    for f in json.loads(body)["files"]
                ]
                return self._json({"files": files, "commitOid": self.hub.revision(repo)})
            if parts[4] == "commit":
                return self._commit(repo, body)
        return self._not_found("Unknown")

    def _commit(self, repo: str, body: bytes) -> None:
        files = self.hub.repositories[repo]
        for line in filter(None, body.splitlines()):
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif entry["key"] == "deletedFile":
                files.pop(value["path"], None)
        oid = self.hub.revision(repo)
        self.hub.commits.append(repo)
        self._json(
            {
                "success": True,
                "commitOid": oid,
                "commitUrl": f"{self.hub.url}/{repo}/commit/{oid}",
                "hookOutput": "",
            }
        )

    def do_PUT(self) -> None:
        content, oid = self._body(), self.path.rsplit("/", 1)[1]
        if hashlib.sha256(content).hexdigest() != oid:
            return self._reply(400)
        self.hub.blobs[oid] = content
        return self._reply(200)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        parts = path.strip("/").split("/")
        if path == "/api/whoami-v2":
            return self._json({"type": "user", "name": "somebody", "orgs": [], "auth": {}})
        if path == "/api/agent-harnesses":  # asked by newer clients about themselves
            return self._json({})
        if parts[:2] == ["api", "models"]:
            repo, rest = "/".join(parts[2:4]), parts[4:]
            if repo not in self.hub.repositories:
                return self._not_found("RepoNotFound")
            files = self.hub.repositories[repo]
            if rest[:1] == ["tree"]:
                return self._json(
                    [
                        {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                        for n, c in files.items()
                    ]
                )
            if not rest or rest[0] == "revision":
                siblings = [{"rfilename": name} for name in files]
                return self._json(
                    {"_id": "1", "id": repo, "sha": self.hub.revision(repo), "siblings": siblings, "tags": []}
                )
            if rest[0] == "additional-chat-templates" or rest[0] == "discussions":
                return self._not_found("EntryNotFound")
        if len(parts) >= 5 and parts[2] == "resolve":
            repo, file = "/".join(parts[:2]), "/".join(parts[4:])
            if repo not in self.hub.repositories:
                return self._not_found("RepoNotFound")
            content = self.hub.repositories[repo].get(file)
            if content is None:
                return self._not_found("EntryNotFound")
            headers = {
                "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Repo-Commit": self.hub.revision(repo),
                "Accept-Ranges": "bytes",
            }
            return self._reply(200, content, headers)
        return self._not_found("Unknown")

    do_HEAD = do_GET
