"""Starts Iris's local cluster, to try a job on this machine: its tasks are processes here, without containers.

python experiments/launch/iris_local.py    runs until Ctrl-C; prints the URL for `iris --controller-url`
"""

from datetime import timedelta
from pathlib import Path

from iris.cli import iris
from iris.cluster.controller import service

if __name__ == "__main__":
    # Iris only accepts jobs from clients of the last two weeks, and the client here is pinned.
    service.FRESHNESS_WINDOW = timedelta(days=36500)
    iris(["--config", str(Path(__file__).with_suffix(".yaml")), "cluster", "start", "--local"])
