"""Names of jobs, groups and tenants: what may be shown, and what is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.errors import BadRequest
from quiver.identity import NAME_BYTES_MAX, Identity, check_name
from quiver.residency import ConsumerReport, Measured
from quiver.residency.messages import NeedsReport


@pytest.mark.parametrize("name", ["", "resnet-50", "Bildsätze", "lab 3/alice", "x" * NAME_BYTES_MAX])
def test_a_name_that_people_give_is_kept(name: str) -> None:
    assert check_name("job=", name) == name


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", "\u202eevil", " a", "a ", "\ud800", "ä" * 65, "x" * 129])
def test_a_name_that_cannot_be_shown_is_refused_with_what_it_was_given_as(name: str) -> None:
    with pytest.raises(ValueError, match="job="):
        check_name("job=", name)


@given(st.text())
def test_what_passes_is_short_and_prints_on_one_line(name: str) -> None:
    try:
        passed = check_name("job=", name)
    except ValueError:
        return
    assert len(passed.encode()) <= NAME_BYTES_MAX
    assert len(passed.splitlines()) <= 1


def report(**more: object) -> ConsumerReport:
    return ConsumerReport(bytes(16), np.zeros(3, np.uint8), 1e6, 0.0, 5.0, **more)  # type: ignore[arg-type]


def test_identity_and_measurements_travel_in_a_report() -> None:
    told = report(
        identity=Identity("resnet", "sweep", "lab"), dataset_name="imagenet", measured=Measured(5e5, 0.25, 1e15)
    )
    back = NeedsReport.decode(NeedsReport(Digest(bytes(32)), told).encode()).report
    assert (back.identity, back.dataset_name, back.measured) == (told.identity, told.dataset_name, told.measured)


@pytest.mark.parametrize(
    "wrong",
    [
        {"job": "a\nb"},
        {"group": "x" * 129},
        {"tenant": "ä" * 100},
        {"dataset_name": "\x00"},
        {"waited": 1.5},
        {"throughput": -1.0},
        {"attained_bytes": float("nan")},
    ],
)
def test_a_report_with_impossible_names_or_figures_is_refused(wrong: dict[str, object]) -> None:
    body = msgspec.msgpack.decode(NeedsReport(Digest(bytes(32)), report()).encode())
    with pytest.raises(BadRequest, match="malformed report of needs"):
        NeedsReport.decode(msgspec.msgpack.encode(body | wrong))
