"""The parts of `qkvflow.analysis.report`: what its page shows, as plain data, and the page itself (`web`)."""

from qkvflow.analysis.page.render import render

__all__ = ["render"]
