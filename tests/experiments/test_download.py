import contextlib
import gzip
import hashlib
import io
import re
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

from gossamer.experiments.data import DataError, load, sources
from gossamer.experiments.data import handwriting as digit_sets
from gossamer.experiments.data.sources import download

CONTENT = bytes(range(256)) * 4096  # one megabyte: several chunks
SHA = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Site:
    """A loopback server: `files` by path, `cut` = bytes after which it hangs up, `asked` = its log."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    content = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content.asked.append(self.path)
            body = content.files.get(self.path)
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client may leave first, as one test does
                self.wfile.write(body[: content.cut.get(self.path, len(body))])

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    content.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield content
    server.shutdown()
    thread.join()
    server.server_close()


def test_fetches_checks_and_shows_progress(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"] = CONTENT
    screen = io.StringIO()
    target = tmp_path / "new" / "a.bin"
    console = Console(file=screen, force_terminal=True, width=100)
    assert download([f"{site.url}/a.bin"], target, SHA, console=console) == target
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == ["a.bin"]
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert "a.bin" in shown
    assert "1.0/1.0 MB" in shown


def test_second_mirror_is_used_when_the_first_fails(site: Site, tmp_path: Path) -> None:
    site.files["/good"] = CONTENT
    site.files["/bad"] = CONTENT[:-1]
    urls = [f"{site.url}/{name}" for name in ("absent", "bad", "good", "never")]
    download(urls, tmp_path / "a", SHA)
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert site.asked == ["/absent", "/bad", "/good"]


def test_wrong_checksum_leaves_nothing_and_says_both(site: Site, tmp_path: Path) -> None:
    site.files["/a"] = CONTENT + b"!"
    found = hashlib.sha256(CONTENT + b"!").hexdigest()
    with pytest.raises(DataError, match=f"expected SHA-256 {SHA}, found {found}"):
        download([f"{site.url}/a"], tmp_path / "a", SHA)
    assert list(tmp_path.iterdir()) == []


def test_early_hang_up_leaves_nothing_and_says_where(site: Site, tmp_path: Path) -> None:
    site.files["/a"] = CONTENT
    site.cut["/a"] = 1000
    said = f"closed after 1000 of {len(CONTENT)} bytes.*by hand, or set GOSSAMER_DATA"
    with pytest.raises(DataError, match=said):
        download([f"{site.url}/a"], tmp_path / "a", SHA)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.files["/a"] = CONTENT
    chunks: list[float] = []

    def interrupted(self: Progress, task: object, advance: float = 1) -> None:
        chunks.append(advance)
        if len(chunks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        download([f"{site.url}/a"], tmp_path / "a", SHA)
    assert len(chunks) == 3
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_survives_a_failed_download(site: Site, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(DataError, match="404"):
        download([f"{site.url}/a"], tmp_path / "a", SHA)
    assert (tmp_path / "a").read_bytes() == b"old"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot be written.*XDG_CACHE_HOME"):
        download(["http://127.0.0.1:9/a"], tmp_path / "file" / "a", SHA)


def test_mnist_is_downloaded_into_the_cache_once(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    known = {}
    for part, n in (("train", 6), ("t10k", 4)):
        images = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        digits = rng.integers(0, 10, n, dtype=np.uint8)
        for name, array in ((f"{part}-images-idx3", images), (f"{part}-labels-idx1", digits)):
            head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            packed = gzip.compress(head + array.tobytes())
            site.files[f"/{name}-ubyte.gz"] = packed
            known[f"mnist/{name}-ubyte.gz"] = hashlib.sha256(packed).hexdigest()
    monkeypatch.setattr(sources, "CHECKSUMS", known)
    monkeypatch.setattr(digit_sets, "MNIST_MIRRORS", (f"{site.url}/gone/", f"{site.url}/"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("GOSSAMER_DATA", raising=False)
    data = load("mnist")
    assert data.test is not None
    assert (len(data.train), len(data.test)) == (6, 4)
    assert len(list((tmp_path / "gossamer" / "mnist").iterdir())) == 4
    asked = len(site.asked)
    load("mnist")
    assert len(site.asked) == asked == 8
