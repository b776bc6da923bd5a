"""Serves a trained run over HTTP, as OpenAI's clients expect it: `/v1/completions` and `/v1/models`.

    python -m qkvflow.serve_lm --run runs/quickstart --port 8000
    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "The", "max_tokens": 32}'

--run DIR             the run; --checkpoint_step N for another checkpoint than its newest
--host, --port        127.0.0.1, which only this machine reaches, and 8000; port 0 takes any free one
--max_concurrent N    requests that are served at once; 8 by default. Others wait
--max_waiting N       requests that may wait; 256 by default. Others are answered 503
--max_length N        tokens of a text, prompt included; what the model was trained at by default. It decides memory
--request_timeout S   seconds for a request, waiting included; 600 by default
--shutdown_timeout S  seconds that running requests have to finish after SIGTERM or Ctrl-C; 60 by default
--steps N, --solver S the flow at another depth than it was trained at
"""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn

import qkvflow as qkvflow  # registers the models
from qkvflow.cli import run_program
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.errors import UserError
from qkvflow.files import local_path
from qkvflow.generation.writer import open_writer
from qkvflow.progress import Progress
from qkvflow.serving import Limits, Scheduler, build_app


@dataclass
class ServeConfig:
    """See the module. max_body_bytes: of a request."""

    run: str
    host: str = "127.0.0.1"
    port: int = 8000
    max_concurrent: int = 8
    max_waiting: int = 256
    max_length: int | None = None
    max_body_bytes: int = 2 * 2**20
    request_timeout: float = 600.0
    shutdown_timeout: int = 60
    steps: int | None = None
    solver: str | None = None
    checkpoint_step: int | None = None


def main(config: ServeConfig) -> None:
    """Serves until SIGTERM or Ctrl-C, then lets running requests finish; a second signal stops at once."""
    for name in ("max_concurrent", "max_waiting", "max_body_bytes", "request_timeout", "shutdown_timeout"):
        if not getattr(config, name) > 0:
            raise UserError(f"{name} must be positive, got {getattr(config, name)}")
    with _listening(config.host, config.port) as sock, quiet_libraries() as quiet:
        progress = Progress(quiet.terminal)
        with progress.phase(f"Loading {config.run}"):
            writer = open_writer(config.run, config.checkpoint_step, config.steps, config.solver)
        with contextlib.suppress(OSError):  # a run that cannot be written to can be served all the same
            quiet.log_to(local_path(config.run) / "serve.log")
        length = _length(config.max_length, writer.prepared.max_seq_len)
        with progress.phase("Compiling"):
            scheduler = Scheduler(writer, config.max_concurrent, length, config.max_waiting)
            scheduler.warm_up()
        limits = Limits(length, config.max_body_bytes, request_timeout=config.request_timeout)
        app = build_app(scheduler, writer.name, limits)
        options = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_graceful_shutdown=config.shutdown_timeout, lifespan="on"
        )
        host, port = sock.getsockname()[:2]
        _listen(sock)  # before the address is told: who connects now waits, and is not refused
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        progress.say(f"Serving {writer.name} (step {writer.step}, texts of up to {length} tokens) at {url}")
        progress.say("Stop with Ctrl-C or SIGTERM.")
        asyncio.run(_Server(options).serve(sockets=[sock]))
        progress.say("Stopped.")


class _Server(uvicorn.Server):
    """Differs from uvicorn's: being stopped by a signal is the normal end, not raised again afterwards."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        def stop(signum, frame) -> None:
            self.force_exit = self.should_exit
            self.should_exit = True

        before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """The socket, taken before the model is loaded: a port in use is told at once."""
    if not 0 <= port < 65536:
        raise UserError(f"port must lie between 0 (any free one) and 65535, got {port}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        if sys.platform != "win32":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    with sock:
        yield sock


def _listen(sock: socket.socket) -> None:
    """Errors: `UserError` if another server has bound the same port meanwhile, and listens already."""
    try:
        sock.listen(2048)
    except OSError as error:
        raise _cannot_listen(*sock.getsockname()[:2], error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> UserError:
    return UserError(f"cannot listen on {host} port {port}: {error.strerror or error}. Try --port 0")


def _length(wanted: int | None, longest: int) -> int:
    if wanted is not None and not 2 <= wanted <= longest:
        raise UserError(f"max_length must lie between 2 and {longest}, the model's max_seq_len; got {wanted}")
    return longest if wanted is None else wanted


if __name__ == "__main__":
    run_program(main, ServeConfig)
