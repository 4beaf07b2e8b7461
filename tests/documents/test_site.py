"""The documentation site as a reader meets it: built strictly, and opened in a browser."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.documents.blocks import ROOT
from tests.documents.browser import Browser, chromium
from tests.scripts.running import import_script

pytestmark = pytest.mark.full

# Folder in which screenshots are left to be looked at.
SCREENSHOTS = os.environ.get("SITE_SCREENSHOTS")
SIZES = {"desktop": (1400, 1000), "phone": (390, 844)}


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served, to this machine alone."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip("there is no chromium on PATH")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


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
def test_every_page_opens_without_complaints(site: Path, address: str, browser: Browser, size: str) -> None:
    browser.resize(*SIZES[size])
    browser.complaints.clear()
    width = SIZES[size][0]
    for page in pages(site):
        browser.open(address + page)
        assert browser.evaluate("document.querySelectorAll('article h1').length") == 1, page
        broken = "Array.from(document.images).filter(image => image.complete && !image.naturalWidth).map(image => image.src)"
        assert browser.evaluate(broken) == [], page
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, f"{page} is wider than a {size}"
        if SCREENSHOTS:
            browser.screenshot(Path(SCREENSHOTS) / f"{size}{page.replace('/', '-').rstrip('-')}.png")
    assert browser.complaints == []


def test_the_search_finds_a_page(address: str, browser: Browser) -> None:
    browser.resize(*SIZES["desktop"])
    browser.open(f"{address}/")
    browser.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
    browser.call("Input.insertText", text="PoolExhausted")
    browser.wait("document.querySelectorAll('.md-search-result__item a').length > 0")
    found = browser.evaluate("Array.from(document.querySelectorAll('.md-search-result__item a')).map(link => link.pathname)")
    assert "/errors/" in found
