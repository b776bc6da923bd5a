"""Serves a trained run over HTTP with OpenAI's API: completions, chat completions, models.

For example:

    qkvflow serve --run runs/quickstart --port 8000
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "The"}'
"""

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import uvicorn

import qkvflow as qkvflow  # registers the models
from qkvflow.cli import run_program
from qkvflow.cli.quiet import Quiet, quiet_libraries
from qkvflow.config import Text
from qkvflow.errors import UserError
from qkvflow.files import local_path
from qkvflow.generation.drafting import Drafting
from qkvflow.generation.prepare import LEAST_ROOM
from qkvflow.generation.writer import Writer, open_writer
from qkvflow.models.exits import ExitConfig
from qkvflow.models.shared_cache import CacheSharing
from qkvflow.places import is_remote
from qkvflow.progress import Progress
from qkvflow.ranges import Count, Positive, Range, Steps
from qkvflow.serving import Access, Limits, Scheduler, build_app, guarded

API_KEY = "QKVFLOW_API_KEY"


@dataclass
class ServeConfig:
    """
    Attributes:
        run: the run directory, or a Hugging Face folder.
        host: the address to listen on; the default accepts connections from this machine only.
        port: the port; 0 chooses any free port.
        api_key: key that clients must send; or set the environment variable QKVFLOW_API_KEY, which `ps` does not show.
        allowed_hosts: accepted host names, besides localhost and addresses; several, or * for any.
        allowed_origins: origins of web pages that may use the server; none by default.
        max_concurrent: number of texts that are generated at once; others wait.
        max_waiting: number of texts that may wait; others get status 503.
        max_connections: maximum number of open connections.
        max_length: maximum tokens of a text, including the prompt; by default the trained context, but at most 1024 for
            a model without a cache. It determines the memory, which is never less than for 1024 tokens, or for the
            trained context if that is shorter.
        max_body_bytes: maximum size of a request body.
        header_timeout: seconds to receive the headers of a request.
        stall_timeout: seconds that a response waits for its client to read it.
        request_timeout: seconds for a request, including waiting.
        shutdown_timeout: seconds that running requests have to finish after SIGTERM or Ctrl-C.
        steps: steps of the flow; as trained by default.
        solver: solver of the flow; as trained by default.
        draft_steps: draft tokens with the flow on a grid of this many steps, and verify them in one pass of the full
            grid.
        draft_tokens: tokens per draft, 4 by default; a request can ask for fewer with its field `draft_tokens`.
        exit: `{rule: kl, threshold: 0.01, min_steps: 1}`: a token stops integrating when the rule says so, as in
            sample. A request can set another threshold and more min_steps with its field `exit`, or false for the full
            depth; with a threshold of 0, only requests that ask for it exit.
        cache: `every 2`, which keeps keys and values of every second evaluation only, or `latest`: less memory, but a
            different loss, which `qkvflow eval --cache` reports.
        dtype: precision of the computation, bf16 or f32; by default that of the weights.
        checkpoint_step: N of the checkpoint step-N; the newest by default.
        averaged: the average of the parameters over steps (`trainer.model_averaging`), instead of the last ones.
    """

    run: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: Text | None = None
    allowed_hosts: list[Text] | None = None
    allowed_origins: list[Text] | None = None
    max_concurrent: Annotated[int, Range(at_least=1, at_most=1024)] = 8
    max_waiting: Count = 256
    max_connections: Count = 512
    max_length: Annotated[int, Range(at_least=2)] | None = None
    max_body_bytes: Count = 2 * 2**20
    header_timeout: Positive = 10.0
    stall_timeout: Positive = 60.0
    request_timeout: Positive = 600.0
    shutdown_timeout: Count = 60
    steps: Steps | None = None
    solver: str | None = None
    draft_steps: int | None = None
    draft_tokens: int | None = None
    exit: ExitConfig | None = None
    cache: str | None = None
    dtype: str | None = None
    checkpoint_step: int | None = None
    averaged: bool = False


def main(config: ServeConfig) -> None:
    """Serves until SIGTERM or Ctrl-C, then lets running requests finish; a second signal stops at once."""
    access = _access(config)
    drafting = Drafting.of(config.draft_steps, config.draft_tokens)
    sharing = CacheSharing.of(config.cache)
    sharing.check(with_exits=config.exit is not None, with_drafts=drafting is not None)
    with _listening(config.host, config.port) as sock, quiet_libraries() as quiet:
        progress = Progress(quiet.terminal)
        with progress.phase(f"Loading {config.run}"):
            depth = (config.steps, config.solver)
            writer = open_writer(
                config.run,
                config.checkpoint_step,
                *depth,
                dtype=config.dtype,
                drafting=drafting,
                exits=config.exit,
                sharing=sharing,
                averaged=config.averaged,
                exits_vary=True,
            )
        _log(quiet, config.run, progress)
        length = _length(config.max_length, writer, progress)
        with progress.phase("Compiling"):
            scheduler = Scheduler(writer, config.max_concurrent, length, config.max_waiting)
            scheduler.warm_up()
        limits = Limits(length, config.max_body_bytes, request_timeout=config.request_timeout)
        app = build_app(scheduler, writer.name, limits, access)
        options = uvicorn.Config(
            app,
            http=guarded(config.max_connections, config.header_timeout, config.stall_timeout),
            ws="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=config.shutdown_timeout,
            lifespan="on",
        )
        host, port = sock.getsockname()[:2]
        _listen(sock)  # before the address is told: who connects now waits, and is not refused
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        progress.say(f"Serving {writer.name} (step {writer.step}, texts of up to {length} tokens) at {url}")
        if access.api_key is None and not _is_local(host):
            progress.say(f"Anyone who can reach {host} can use it without a key. Use --api_key KEY to require one.")
        progress.say("Stop with Ctrl-C or SIGTERM.")
        asyncio.run(_Server(options).serve(sockets=[sock]))
        progress.say("Stopped.")


def _access(config: ServeConfig) -> Access:
    for name in ("allowed_hosts", "allowed_origins"):
        if not all(part.strip() for part in getattr(config, name) or ()):
            raise UserError(f"{name} has an empty name: is a shell variable unset? Leave it out for none")
    key, source = config.api_key, "api_key"
    if key is None and API_KEY in os.environ:
        key, source = os.environ[API_KEY], f"the environment variable {API_KEY}"
    if key is not None and not (key.strip() and key.isascii() and key.isprintable()):
        raise UserError(f"{source} must be a nonempty text of printable ASCII characters; leave it out for none")
    if key is not None and key != key.strip():
        raise UserError(f"{source} begins or ends with a space, which clients cannot send: remove it")
    origins = [origin.rstrip("/") for origin in config.allowed_origins or ()]  # as browsers send them
    return Access((config.host, *(config.allowed_hosts or ())), origins, key)


def _is_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


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
    except (OSError, UnicodeError) as error:  # the latter for a name that no host can have
        raise _cannot_listen(host, port, error) from None
    with sock:
        yield sock


def _listen(sock: socket.socket) -> None:
    """Begins to listen.

    Raises:
        UserError: another server has bound the same port meanwhile, and listens already.
    """
    try:
        sock.listen(2048)
    except OSError as error:
        raise _cannot_listen(*sock.getsockname()[:2], error) from None


def _cannot_listen(host: str, port: int, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or error
    return UserError(f"cannot listen on {host} port {port}: {reason}. Try --port 0")


def _log(quiet: Quiet, run: str, progress: Progress) -> None:
    """Sends the output of libraries and the errors of requests to `serve.log` in the run, or to a temporary file."""
    own = [] if is_remote(run) else [local_path(run) / "serve.log"]
    instead = Path(tempfile.gettempdir()) / f"qkvflow-serve-{os.getpid()}.log"
    for path in (*own, instead):
        with contextlib.suppress(OSError):  # a run that cannot be written to can be served all the same
            quiet.log_to(path)
            if path is instead:
                progress.say(f"{run} cannot hold the server's log, so it is {path}")
            return


def _length(wanted: int | None, writer: Writer, progress: Progress) -> int:
    """`max_length`, or its default, which is said if it is below the model's context."""
    longest = writer.prepared.max_seq_len
    if wanted is not None:
        if wanted > longest:
            raise UserError(f"max_length must lie between 2 and {longest}, the model's max_seq_len; got {wanted}")
        return wanted
    if writer.prepared.is_cached or longest <= LEAST_ROOM:
        return longest
    progress.say(
        f"This model has no cache: each token takes a pass over all tokens of --max_length, by default {LEAST_ROOM} of"
        f" the {longest} that it could have."
    )
    return LEAST_ROOM


if __name__ == "__main__":
    run_program(main, ServeConfig)
