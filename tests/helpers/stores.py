"""Blobs and catalogs for tests, and servers and processes to share them with."""

import contextlib
import itertools
import multiprocessing
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_kvcaches.stores.blobs import BlobHead, BlobStore, NewBlob
from hf_kvcaches.stores.catalog import Catalog, open_blobs

# A process that has loaded what its children are asked to do, and forks from then on: a killed child costs milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.segments.store_helpers", "tests.warmstart.test_library"])
HEAD = {"tokens": [1, 2, 3], "name": "größe", "share": 0.5, "nothing": None}
DTYPES = (torch.int8, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.float64, torch.bool)


def blob(seed: int = 0, count: int = 12) -> dict[str, Tensor]:
    """A few small tensors."""
    made = torch.Generator().manual_seed(seed)
    return {
        "keys": torch.randn(2, count, generator=made).to(torch.bfloat16),
        "scale": torch.randn(count, generator=made),
        "levels": torch.randint(-128, 128, (3, count), dtype=torch.int8, generator=made),
    }


def same(ours: Mapping[str, Tensor] | None, theirs: Mapping[str, Tensor]) -> bool:
    """Whether these are the same tensors in names, shapes, dtypes and bits."""
    return (
        ours is not None
        and ours.keys() == theirs.keys()
        and all(ours[n].dtype == t.dtype and ours[n].shape == t.shape and bits(ours[n]) == bits(t) for n, t in theirs.items())
    )


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def header_end(content: bytes) -> int:
    """Where the tensors of a blob begin: behind 24 bytes of checksums and a safetensors header, which begins with its length."""
    return 32 + int.from_bytes(content[24:32], "little")


def key_of(number: int) -> str:
    return f"{number:032x}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A Redis server on a free loopback port that keeps nothing on disk."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("there is no redis-server on PATH")
        self._program, self._folder = program, folder
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def location(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Starts it, on the port that it had if it is started again."""
        chosen, deadline = self.port, time.monotonic() + 20
        while not self._started(chosen or free_port()):
            assert time.monotonic() < deadline, "redis-server doesn't answer"

    def _started(self, port: int) -> bool:
        """Whether it came up. It doesn't if another process has taken the port meanwhile."""
        self.port = port
        command = [self._program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(command, cwd=self._folder, stdout=subprocess.DEVNULL)
        while self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as ours:
                ours.sendall(b"INFO server\r\n")
                if f"process_id:{self._process.pid}\r".encode() in ours.recv(8192):
                    return True
            time.sleep(0.02)
        return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextlib.contextmanager
    def hanging(self) -> Any:
        """The server takes connections and doesn't answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def client(self) -> Any:
        import redis

        return redis.Redis(port=self.port)


class Proxy:
    """A door to a server that may stop answering: it goes on taking connections and what is sent, and hands nothing on."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.hangs, self.delay = False, 0.0
        # How often something was sent while it hung, and in all.
        self.unanswered, self.asked = threading.Semaphore(0), 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def location(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def waits(self) -> int:
        """How often somebody has waited in vain since this was asked."""
        count = 0
        while self.unanswered.acquire(blocking=False):
            count += 1
        return count

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                theirs, _ = self._listener.accept()
                ours = socket.create_connection(("127.0.0.1", self._port))
                for source, sink, asking in ((theirs, ours, True), (ours, theirs, False)):
                    threading.Thread(target=self._pump, args=(source, sink, asking), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, asking: bool) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 20):
                if asking:
                    self.asked += 1
                    time.sleep(self.delay)
                if asking and self.hangs:
                    self.unanswered.release()
                elif not self.hangs:
                    sink.sendall(content)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


# What other processes do. They are started by name, so these stand in a module.


def put_on_and_on(location: str, out: Connection, size: int) -> None:
    """Puts blobs and tells of each that `put` returned for, until it is killed."""
    torch.set_num_threads(1)
    store = open_blobs(location)
    out.send(-1)
    number = 0
    while True:
        store.put(key_of(number), {"number": number}, {"x": torch.full((size,), number, dtype=torch.int32)})
        out.send(number)
        number += 1


def put_some(location: str, out: Connection, numbers: list[int]) -> None:
    """Puts blobs that others put as well, and sends what it was told."""
    torch.set_num_threads(1)
    store = open_blobs(location)
    for number in numbers:
        store.put(key_of(number), {"number": number}, blob(number))
    out.send(sorted(stored.key for stored in store.changes().added))


def put_with_little_room(location: str, out: Connection, limit: int, counts: list[int]) -> None:
    """Puts blobs while no file may grow beyond a limit, and sends what became of each."""
    torch.set_num_threads(1)
    store = open_blobs(location)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    for number, count in enumerate(counts):
        try:
            store.put(key_of(number), {}, {"x": torch.arange(count)})
            out.send("stored")
        except OSError as error:
            out.send(f"unavailable: {error}")


class Follower:
    """What one handle has been told, put together. Being told of the same change twice, or of one that wasn't, is an error."""

    def __init__(self, store: BlobStore) -> None:
        self.store = store
        self.known: dict[str, dict[str, Any]] = {}

    def follow(self) -> None:
        news = self.store.changes()
        for key in news.removed:
            del self.known[key]
        for stored in news.added:
            assert stored.key not in self.known
            assert stored.bytes > 0
            self.known[stored.key] = stored.head
        assert len(set(news.removed)) == len(news.removed)


class Known:
    """Contents that take blobs with a number of tokens in their head."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def add(self, blobs: Sequence[BlobHead]) -> dict[str, int]:
        tokens = {blob.key: blob.head["tokens"] for blob in blobs if "tokens" in blob.head}
        self.keys |= tokens.keys()
        return tokens

    def remove(self, keys: Sequence[str]) -> None:
        self.keys -= set(keys)


def catalog(location: str | BlobStore = "memory", max_bytes: int | str | None = None, **options: Any) -> Catalog:
    return Catalog(location, Known(), "thing", max_bytes=max_bytes, **options)


def put(made: Catalog, *keys: str, tokens: int = 10) -> None:
    for key in keys:
        made.put([NewBlob(key, {"tokens": tokens}, {"x": torch.zeros(100)})])
    made.refresh()


def fine(key: str, tensors: object) -> None:
    pass


def read(made: Catalog, key: str, check: Any) -> Any:
    """The tensors of one blob, or None."""
    return made.read([key], check).get(key)


# Fixtures, for the conftest of a folder to import.

_numbers = itertools.count()


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Redis server for all tests that leave it running."""
    server = Server(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A Redis server of the test's own, to be stopped or filled."""
    server = Server(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A door to the test's own server that may stop answering."""
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def redis_location(shared_server: Server) -> str:
    """An empty place in the shared server."""
    return f"{shared_server.location}?prefix=test{next(_numbers)}"


@pytest.fixture(params=["disk", "redis"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place of each kind that processes can share."""
    return f"disk:{tmp_path / 'blobs'}" if request.param == "disk" else str(request.getfixturevalue("redis_location"))


@pytest.fixture(params=["memory", "disk", "redis"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place of each kind."""
    if request.param == "redis":
        return str(request.getfixturevalue("redis_location"))
    return f"disk:{tmp_path / 'blobs'}" if request.param == "disk" else "memory"
