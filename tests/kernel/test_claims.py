"""What a token may say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.claims import ANY_RACK, Claims, Right
from quiver.errors import BadRequest

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
TIMES = st.integers(0, (1 << 40) - 1)
CLAIMS = st.builds(
    Claims, NAMES, NAMES, st.frozensets(st.sampled_from(Right), min_size=1), TIMES, TIMES, NAMES | st.just(""), NAMES
)
GOOD = Claims("vision", "shared", frozenset({Right.READ}), 1, 2).payload


@given(CLAIMS)
def test_claims_are_parsed_from_what_they_are_written_as(claims: Claims) -> None:
    assert Claims.parse(claims.payload) == claims


def test_the_domain_is_the_tenants_own_unless_the_token_names_one() -> None:
    payload = {name: value for name, value in GOOD.items() if name != "domain"}
    assert Claims.parse(payload).domain == "vision"
    assert Claims.parse(GOOD).domain == "shared"
    assert Claims.parse(GOOD).audience == ANY_RACK


def test_unknown_claims_are_ignored() -> None:
    assert Claims.parse({**GOOD, "jti": "1", "color": "red"}) == Claims.parse(GOOD)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant": None},
        {"tenant": ""},
        {"tenant": "a b"},
        {"tenant": "a" * 65},
        {"tenant": ["vision"]},
        {"tenant": "vision\n"},
        {"domain": "../x"},
        {"quota": 3},
        {"rights": None},
        {"rights": "read"},
        {"rights": []},
        {"rights": ["read", "write"]},
        {"rights": ["read"] * 4},
        {"rights": [["read"]]},
        {"iat": "1"},
        {"exp": 1.5},
        {"exp": True},
        {"exp": -1},
        {"exp": 1 << 40},
        {"aud": ["quiver"]},
    ],
    ids=str,
)
def test_claims_that_break_a_rule_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        Claims.parse({**GOOD, **wrong})
