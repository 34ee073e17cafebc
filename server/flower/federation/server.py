"""The ServerApp: it coordinates the run that ``run.toml`` describes."""

from pathlib import Path

from fedlearn.deployment.flower import server_app

app = server_app(Path(__file__).parent)
