"""A small model behind a server on loopback, and clients for it."""

import contextlib
import dataclasses
import json
import socket
import threading
import time

import equinox as eqx
import haliax as hax
import jax
import openai
import uvicorn
from support.models import is_float, small_config

from qkvflow.data.tokenizers import load_tokenizer, resolve_tokenizer
from qkvflow.generation.prepare import PreparedModel
from qkvflow.generation.writer import Writer
from qkvflow.models import ControlConfig
from qkvflow.serving import Limits, Scheduler, build_app

SLOTS, LENGTH = 4, 512
END = 0  # the byte that ends a text, since the model has no tokens beyond ASCII
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('The system speaks first.') }}{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_model():
    """A model with control; ASCII only, since random bytes are seldom text."""
    config = dataclasses.replace(small_config(control=ControlConfig(dim=2)), max_seq_len=LENGTH)

    @eqx.filter_jit  # one compiled function instead of hundreds
    def build(key):
        # Ten times the usual scale, so that texts vary.
        model = config.build(hax.Axis("vocab", 128), key=key)
        return jax.tree.map(lambda a: 10 * a if is_float(a) else a, model)

    return build(jax.random.PRNGKey(0))


def tiny_writer(model, folder, template: str | list | None = TEMPLATE) -> Writer:
    """The model with a byte tokenizer."""
    resolve_tokenizer("byte", folder)
    if template is not None:
        settings = folder / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    return Writer("tiny", 0, PreparedModel(model), load_tokenizer(folder), (256, END))


@contextlib.contextmanager
def served(app, **options):
    """Runs an application in a thread; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, **options))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
    assert not thread.is_alive()


@contextlib.contextmanager
def serving(writer, max_waiting=256, slots=SLOTS, **limits):
    """Runs a server; yields its address and its scheduler."""
    scheduler = Scheduler(writer, slots, LENGTH, max_waiting)
    scheduler.warm_up()
    with served(build_app(scheduler, "tiny", Limits(LENGTH, **limits)), lifespan="on") as url:
        yield url, scheduler


def client_of(url, **options):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, **options)


def complete(client, prompt="Once", **options):
    """A greedy completion of 16 tokens by default."""
    options = {"max_tokens": 16, "temperature": 0, "model": "tiny"} | options
    return client.completions.create(prompt=prompt, **options)


def idle(scheduler) -> bool:
    load = scheduler.load()
    return load["running"] == load["waiting"] == 0


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)
