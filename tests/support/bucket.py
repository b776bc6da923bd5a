"""A bucket on a local S3 server (moto), for this process and those that it starts."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from unittest import mock

import fsspec

_SERVER = "import sys; from moto.server import main; main(sys.argv[1:])"


@contextlib.contextmanager
def bucket(name: str) -> Iterator[str]:
    """The URL of an empty bucket; the environment directs TensorStore, fsspec and started programs to it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "anyone",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    words = [sys.executable, "-c", _SERVER, "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert time.monotonic() < deadline
            time.sleep(0.2)
        with mock.patch.dict(os.environ, environment):
            fsspec.get_filesystem_class("s3").clear_instance_cache()  # instances for an earlier server
            fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True).mkdir(name)
            yield f"s3://{name}"
    finally:
        server.kill()
        server.wait()
