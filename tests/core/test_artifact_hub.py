"""What goes to the Hub, and what comes back from it."""

import base64
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from hf_kvcaches.core.hub import FILE_NAME
from tests.core.artifact_helpers import Basis, same


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub's HTTP interface as an upload and a download of small files need."""

    repo = "someone/basis"
    stored: ClassVar[dict[str, bytes]] = {}
    created: ClassVar[list[dict[str, Any]]] = []
    commit: ClassVar[str] = "0" * 40

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, body: bytes | dict[str, Any] | list[Any], status: int = 200, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        home = f"http://{self.headers['Host']}/{self.repo}"
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self.answer({"url": home})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            wanted = json.loads(body)["files"]
            self.answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None} for f in wanted]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.stored[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del self.stored[line["value"]["path"]]
            type(self).commit = f"{int(self.commit) + 1:040}"
            self.answer({"success": True, "commitOid": self.commit, "commitUrl": f"{home}/commit/{self.commit}"})
        else:
            self.answer({}, 404)

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        name = path.rsplit("/", 1)[-1]
        if "/resolve/" in path and name in self.stored:
            self.answer(self.stored[name], ETag=f'"{hash(self.stored[name])}"', X_Repo_Commit=self.commit)
        elif "/resolve/" in path:
            self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=self.commit)
        elif "/tree/" in path:
            self.answer([{"type": "file", "path": p, "size": len(c), "oid": "0"} for p, c in self.stored.items()])
        else:
            self.answer({"id": self.repo, "sha": self.commit, "siblings": [{"rfilename": p} for p in self.stored]})

    do_HEAD = do_GET


PUSH = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from tests.core.artifact_helpers import Basis
from huggingface_hub import HfApi
for value in (1.0, 2.0):
    if value == 2.0:
        card = open(HfApi().hf_hub_download("someone/basis", "README.md", cache_dir=sys.argv[2])).read()
        HfApi().upload_file(path_or_fileobj=(card + "A person wrote this.").encode(), path_in_repo="README.md", repo_id="someone/basis")
    artifact = Basis({"basis": torch.full((3, 4), value)}, {"value": value})
    print(artifact.push_to_hub("someone/basis", private=True, token="hf_token"))
loaded = Basis.from_pretrained("someone/basis", cache_dir=sys.argv[2])
assert loaded.notes == {"value": 2.0} and bool((loaded.content["basis"] == 2).all())
assert Basis.from_pretrained("someone/basis", cache_dir=sys.argv[2], local_files_only=True).notes == {"value": 2.0}
"""


@pytest.mark.full
def test_what_is_pushed_is_exactly_the_artifact_and_comes_back_by_its_id(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.stored["own.txt"] = b"mine"
    environment = {
        **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, "-c", PUSH, str(Path(__file__).parents[2]), str(tmp_path / "cache")]
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    finally:
        server.shutdown()
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [f"{environment['HF_ENDPOINT']}/someone/basis/commit/{n:040}" for n in (1, 3)]
    # Older and newer versions of huggingface_hub word it differently.
    assert Hub.created[0].get("private") is True or Hub.created[0].get("visibility") == "private"
    for name, content in Hub.stored.items():
        (tmp_path / name).write_bytes(content)
    assert set(Hub.stored) == {FILE_NAME, "README.md", "own.txt"}
    card = Hub.stored["README.md"].decode()
    assert "Basis.from_pretrained('someone/basis'" in card
    assert card.endswith("A person wrote this.")
    assert same(Basis.from_pretrained(tmp_path), Basis({"basis": torch.full((3, 4), 2.0)}, {"value": 2.0}))
