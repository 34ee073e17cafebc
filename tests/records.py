"""What tests of several folders record."""

from fedlearn.rounds.records import RunRecord, RunStatus

#: A run that was begun and has no round yet.
RUN = RunRecord(
    name="calm-otter-17",
    status=RunStatus.RUNNING,
    error="",
    created_utc="2026-01-02T03:04:05Z",
    num_rounds=20,
    config={},
    config_hash="",
    versions={},
)
