"""Training through daemons that require tokens: what a job is told at open, and what happens when its token ends."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quiver.errors import Forbidden, Misconfigured, QuiverError, Unauthenticated
from quiver_client import DataLoader, Dataset, index
from quiver_client.cli.status import command as status
from quiver_client.cli.warm import command as warm
from quiver_client.rack import members
from tests.support.daemon import Daemon, rack_of
from tests.support.data import Files
from tests.support.tokens import Signer, replace
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("patient_reads")

Make = Callable[..., Dataset]
FIELDS = ["image", "__key__"]


class Rack:
    """Two daemons that require tokens, and a file with a job's token."""

    def __init__(self, daemons: list[Daemon], keys: Path, signer: Signer) -> None:
        self.daemons = daemons
        self.keys = keys
        self.signer = signer

    @property
    def url(self) -> str:
        return self.daemons[0].url

    def refusals(self, reason: str) -> int:
        """How many requests were refused for a reason, as far as the audit log says."""
        return sum(f'"reason": "{reason}"' in line for daemon in self.daemons for line in daemon.lines)


@pytest.fixture(scope="module")
def rack(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    where, signer = tmp_path_factory.mktemp("tokens"), Signer()
    signer.publish(where / "keys")
    operator = signer.token("operator", rights="operate")
    with rack_of(2, where, "--token-keys", str(where / "keys"), origins=[files.folder], token=operator) as daemons:
        yield Rack(daemons, where / "keys", signer)


@pytest.fixture
def token_file(rack: Rack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "token"
    replace(path, rack.signer.token().encode())
    monkeypatch.setenv("QUIVER_TOKEN_FILE", str(path))
    return path


def read_all(dataset: Dataset, files: Files) -> None:
    for start in range(0, len(dataset), 30):
        for sample in dataset.__getitems__(list(range(start, min(start + 30, len(dataset))))):
            assert sample["image"] == files.content[sample["__key__"]]


@pytest.mark.usefixtures("token_file")
@pytest.mark.parametrize("method", ["none", "fork"])
def test_an_epoch_with_a_token_is_exact_and_comes_from_the_rack(
    dataset: Make, rack: Rack, files: Files, method: str
) -> None:
    made = dataset(files.manifest, rack.url, fields=FIELDS)
    made[0]  # so that a connection is open when workers are forked
    workers = 0 if method == "none" else 2
    context = multiprocessing.get_context(method) if workers else None
    loader = DataLoader(made, batch_size=16, shuffle=True, num_workers=workers, multiprocessing_context=context)
    seen: Counter[str] = Counter()
    for batch in loader:
        for key, data in zip(batch["__key__"], batch["image"], strict=True):
            assert data == files.content[key]
            seen[key] += 1
    loader.close()
    assert seen == Counter(files.content.keys())
    if not workers:
        assert made.stats()["bytes_origin"] == 0
        assert made.stats()["bytes_rack"] > 0


@pytest.mark.fault("S8")
@pytest.mark.parametrize(
    ("token", "kind", "says"),
    [
        (lambda signer: "", Unauthenticated, "no token was sent; set QUIVER_TOKEN or QUIVER_TOKEN_FILE"),
        (lambda signer: signer.token(seconds=-60), Unauthenticated, "it expired at 20"),
        (lambda signer: Signer().token(), Unauthenticated, "no key of the daemons signed it"),
        (lambda signer: signer.token(aud="another"), Unauthenticated, "another rack"),
        (lambda signer: signer.token(rights="fill"), Forbidden, "the right `read`"),
        (lambda signer: "not a token", Misconfigured, "quiver token create"),
    ],
    ids=["missing", "expired", "unknown key", "another rack", "no right", "malformed"],
)
def test_a_job_is_told_at_open_what_is_wrong_with_its_token(
    rack: Rack,
    files: Files,
    token: Callable[[Signer], str],
    kind: type[QuiverError],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = token(rack.signer)
    monkeypatch.setenv("QUIVER_TOKEN", made)
    began = time.monotonic()
    with pytest.raises(kind, match=says) as caught:
        Dataset(files.manifest, rack.url)[0]
    assert time.monotonic() - began < 20, "it is not tried for ever"
    assert not any(part in str(caught.value) for part in made.split(".") if len(part) > 20)


def test_a_token_that_ends_in_the_middle_costs_speed_only_until_it_is_renewed(
    dataset: Make,
    rack: Rack,
    files: Files,
    token_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(members, "UNRESPONSIVE_SECONDS", 1.5)
    made = dataset(files.manifest, rack.url, fields=FIELDS)
    read_all(made, files)
    assert made.stats()["bytes_origin"] == 0
    before, new = rack.refusals("unknown_key"), Signer()
    new.publish(rack.keys)
    (rack.keys / f"{rack.signer.key_id}.pub").unlink()  # withdraws the key of this job's token
    try:
        with caplog.at_level(logging.WARNING):
            until(lambda: read_all(made, files) or made.stats()["bytes_origin"], what="a daemon that refuses")
        assert "QUIVER_TOKEN_FILE" in caplog.text
        assert token_file.read_text() not in caplog.text
        assert rack.refusals("unknown_key") > before
        replace(token_file, new.token().encode())

        def reads_from_the_rack() -> bool:
            origin, rack_bytes = made.stats()["bytes_origin"], made.stats()["bytes_rack"]
            read_all(made, files)
            return made.stats()["bytes_origin"] == origin and made.stats()["bytes_rack"] > rack_bytes

        until(reads_from_the_rack, what="the rack again, with the new token")
    finally:
        rack.signer.publish(rack.keys)
        until(lambda: rack.daemons[0].ask("GET", "/v1/status")[0] == rack.daemons[1].ask("GET", "/v1/status")[0] == 200)


def test_a_token_that_may_only_read_trains_on_what_is_there_and_bothers_nobody(
    dataset: Make, rack: Rack, files: Files, token_file: Path
) -> None:
    read_all(dataset(files.manifest, rack.url, fields=FIELDS), files)  # fills the rack
    replace(token_file, rack.signer.token("reader", rights="read", domain="vision").encode())
    before = rack.refusals("right")
    made = dataset(files.manifest, rack.url, fields=FIELDS)
    loader = DataLoader(made, batch_size=16, shuffle=True, substitute=True)
    assert Counter(key for batch in loader for key in batch["__key__"]) == Counter(files.content.keys())
    loader.close()
    assert made.stats()["bytes_origin"] == 0
    assert rack.refusals("right") - before <= 6, "a manifest and a report for each daemon"


def test_a_token_that_may_only_read_gets_empty_samples_without_passing_a_daemon_over(
    dataset: Make, rack: Rack, token_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "empty.bin").write_bytes(b"")
    (folder / "full.bin").write_bytes(b"data")
    index(str(folder), str(tmp_path / "m.quiver"))
    dataset(tmp_path / "m.quiver", rack.url).__getitems__([0, 1])  # fills the rack
    replace(token_file, rack.signer.token("reader", rights="read", domain="vision").encode())
    made = dataset(tmp_path / "m.quiver", rack.url)
    assert [made[0]["data"], made[1]["data"]] == [b"", b"data"]
    assert made.stats()["samples_rack"] == 2
    assert made.stats()["fallbacks"] == 0


def test_warming_without_the_right_to_fill_says_that_it_is_missing(
    rack: Rack, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIVER_TOKEN", rack.signer.token("cold", rights="read"))
    told = CliRunner().invoke(warm, [str(files.manifest), "--cache", rack.url])
    assert isinstance(told.exception, QuiverError)
    assert "lacks the right `fill`; ask for one made with --rights read,fill" in str(told.exception)


@pytest.mark.usefixtures("token_file")
def test_a_token_is_in_nothing_that_a_dataset_shows(dataset: Make, rack: Rack, files: Files, token_file: Path) -> None:
    made = dataset(files.manifest, rack.url, fields=FIELDS)
    made[0]
    secrets = token_file.read_text().split(".")
    shown: list[Any] = [repr(made), repr(made.stats()), repr(vars(made)), pickle.dumps(made).decode("latin-1")]
    assert not any(secret in text for secret in secrets for text in shown)


def test_status_needs_the_right_to_operate(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    for token, kind in ((rack.signer.token(), Forbidden), (Signer().token(), Unauthenticated)):
        monkeypatch.setenv("QUIVER_TOKEN", token)
        assert isinstance(CliRunner().invoke(status, ["--cache", rack.url]).exception, kind)
    monkeypatch.setenv("QUIVER_TOKEN", rack.signer.token(rights="read,operate"))
    told = CliRunner().invoke(status, ["--cache", rack.url])
    assert "2 members" in told.output, told.output
