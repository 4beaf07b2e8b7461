"""The documentation site as a reader meets it: built strictly, and opened in a browser."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest

from tests.documents.blocks import ROOT
from tests.scripts.running import import_script

pytestmark = pytest.mark.full

SIZES = {"desktop": (1400, 1000), "phone": (390, 844)}
# Opens each page in a frame, searches for a word, and sends what it found.
COLLECTOR = """<!doctype html><link rel="icon" href="data:,"><iframe></iframe><script>
const frame = document.querySelector("iframe"), found = {};
[frame.width, frame.height] = SIZE;
const opened = page => new Promise(done => { frame.onload = () => done(frame.contentDocument); frame.src = page; });
const later = milliseconds => new Promise(done => setTimeout(done, milliseconds));
async function collect() {
  for (const page of PAGES) {
    const shown = await opened(page);
    const broken = Array.from(shown.images).filter(image => image.complete && !image.naturalWidth).map(image => image.src);
    found[page] = [shown.querySelectorAll("article h1").length, broken, shown.documentElement.scrollWidth <= frame.width];
  }
  const shown = await opened("/"), query = shown.querySelector("[data-md-component=search-query]");
  query.focus();
  for (let tries = 0; tries < 200 && !found.search?.length; tries++) {
    query.value = "PoolExhausted";
    query.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
    await later(50);
    found.search = Array.from(shown.querySelectorAll(".md-search-result__item a")).map(link => link.pathname);
  }
}
collect().catch(error => { found.error = String(error); }).then(() => fetch("/", {method: "POST", body: JSON.stringify(found)}));
</script>"""


class Handler(SimpleHTTPRequestHandler):
    """Serves the site, takes what the collector found, and notes what is missing."""

    def __init__(self, *args: Any, found: Queue[Any], missing: list[str], **options: Any) -> None:
        self.found, self.missing = found, missing
        super().__init__(*args, **options)

    def do_POST(self) -> None:
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass

    def log_error(self, *args: object) -> None:
        self.missing.append(self.path)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site: Path) -> list[str]:
    """The addresses of all pages."""
    return sorted(f"/{path.parent.relative_to(site).as_posix()}/".replace("/./", "/") for path in site.rglob("index.html"))


def test_every_document_is_a_page(site: Path) -> None:
    documents = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    outside = {Path(page).stem for page in import_script("_site_pages").PAGES.values()} - {"index"}
    assert {page.strip("/") for page in pages(site)} - {""} == documents | outside


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r"<(?:script|img|iframe)[^>]* src=\"?(https?:[^\s\">]+)|<link[^>]* rel=\"?(?:stylesheet|preconnect)[^>]*(https?:[^\s\">]+)"
    )
    assert [path.name for path in site.rglob("*.html") if loaded.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("size", SIZES)
def test_every_page_opens_without_complaints_and_the_search_finds_one(site: Path, tmp_path: Path, size: str) -> None:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no chromium on PATH")
    (site / "collector.html").write_text(COLLECTOR.replace("PAGES", json.dumps(pages(site))).replace("SIZE", str(list(SIZES[size]))))
    received: Queue[Any] = Queue()
    missing: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site), found=received, missing=missing))
    Thread(target=server.serve_forever, daemon=True).start()
    options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --enable-logging=stderr --window-size=1600,1200".split()
    with (tmp_path / "log").open("w") as log:
        address = f"http://127.0.0.1:{server.server_port}/collector.html"
        browser = subprocess.Popen([program, *options, f"--user-data-dir={tmp_path / 'profile'}", address], stdout=log, stderr=log)
        try:
            found = received.get(timeout=120)
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
            server.server_close()
    assert "/errors/" in found.pop("search", []), found
    assert found == {page: [1, [], True] for page in pages(site)}
    assert missing == []
    assert [line for line in (tmp_path / "log").read_text().splitlines() if "CONSOLE" in line] == []
