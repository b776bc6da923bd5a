"""Serving: completions over HTTP with OpenAI's API, where requests share the slots of one engine."""

from qkvflow.serving.app import Limits as Limits
from qkvflow.serving.app import build_app as build_app
from qkvflow.serving.connections import guarded as guarded
from qkvflow.serving.gate import Access as Access
from qkvflow.serving.scheduler import Scheduler as Scheduler
