"""Which right each verb requires, written down a second time: the table in the code is a decision, not an accident."""

from __future__ import annotations

import pytest

from quiver.claims import Right
from quiver_cacheserver.access.rights import PUBLIC, RIGHTS

FILLS = {
    *("PUT /v1/shards/{digest}", "PUT /v1/manifests/{digest}", "POST /v1/fill", "POST /v1/forgo", "POST /v1/needs"),
    *("read fills", "read forgoes"),
}
OPERATES = {
    *("GET /v1/status", "GET /metrics", "readyz reasons"),
    *("GET /v1/jobs", "GET /v1/datasets", "GET /v1/allocation", "POST /v1/pin", "POST /v1/unpin", "POST /v1/evict"),
    "POST /v1/probe",
    *("POST /v1/handover", "POST /v1/drain", "GET /v1/drain", "DELETE /v1/drain"),
}
OPEN_TO_ALL = {"GET /healthz", "GET /readyz"}


@pytest.mark.fault("S8")
def test_what_makes_a_daemon_fetch_store_or_evict_requires_the_right_to_fill() -> None:
    assert {verb for verb, right in RIGHTS.items() if right is Right.FILL} == FILLS


@pytest.mark.fault("S8")
def test_what_tells_of_the_daemon_requires_the_right_to_operate_and_only_health_is_public() -> None:
    assert {verb for verb, right in RIGHTS.items() if right is Right.OPERATE} == OPERATES
    assert {verb for verb, right in RIGHTS.items() if right is PUBLIC} == OPEN_TO_ALL


def test_all_else_is_reading() -> None:
    rest = set(RIGHTS) - FILLS - OPERATES - OPEN_TO_ALL
    assert rest
    assert {RIGHTS[verb] for verb in rest} == {Right.READ}
