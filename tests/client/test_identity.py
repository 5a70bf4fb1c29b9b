"""Whose a loader is, by argument, environment and launcher, and what a dataset is called."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.identity import NAME_BYTES_MAX, Identity, check_name
from quiver.residency import ConsumerReport
from quiver_client import BatchSampler, DataLoader, Dataset, Mix, index
from quiver_client.identity import IntroducedNeeds, identity_of, introduction_of, launcher_job, stem_of
from quiver_client.loader import arguments
from tests.support.data import Files

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_JOBID": "4711", "SLURM_STEP_ID": "0"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, ""),
        ({"HOSTNAME": "node7"}, ""),
        (SLURM, "4711"),
        (SLURM | {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3"}, "4700_3"),
        (SLURM | {"SLURM_HET_JOB_ID": "4710"}, "4710"),
        ({"LSB_JOBID": "88", "LSB_JOBINDEX": "0"}, "88"),
        ({"LSB_JOBID": "88", "LSB_JOBINDEX": "4"}, "88[4]"),
        ({"LSB_JOBID": "88"}, "88"),
        ({"LSB_JOBINDEX": "4", "TORCHELASTIC_RUN_ID": "resnet"}, "resnet"),
        (SLURM | {"TORCHELASTIC_RUN_ID": "0f3c"}, "4711"),
        ({"TORCHELASTIC_RUN_ID": "resnet"}, "resnet"),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        (
            {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "RANK": "3"},
            "node1:29500",
        ),
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, ""),
        (POD | {"HOSTNAME": "resnet-worker-3"}, "resnet"),
        (POD | {"HOSTNAME": "resnet-master-0"}, "resnet"),
        (POD | {"HOSTNAME": "resnet-2", "JOB_COMPLETION_INDEX": "2"}, "resnet"),
        (POD | {"HOSTNAME": "resnet-2-x7k2p", "JOB_COMPLETION_INDEX": "2"}, "resnet"),
        (POD | {"HOSTNAME": "notebook-5d9"}, "notebook-5d9"),
        (POD | {"HOSTNAME": "sweep-workers-0-1", "JOBSET_NAME": "sweep"}, "sweep"),
        (POD | {"HOSTNAME": "x-worker-1", "TORCHELASTIC_RUN_ID": "resnet"}, "resnet"),
        ({"SLURM_JOB_ID": "a\nb", "TORCHELASTIC_RUN_ID": "resnet"}, "resnet"),
        ({"TORCHELASTIC_RUN_ID": "x" * 200}, ""),
        ({"TORCHELASTIC_RUN_ID": "\u202e"}, ""),
    ],
)
def test_a_launchers_name_is_taken_where_it_is_usable(environment: dict[str, str], job: str) -> None:
    assert launcher_job(environment) == job


def test_ranks_of_one_host_that_meet_on_it_are_one_job_of_that_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    for address in ("localhost", "127.0.0.1", "::1"):
        assert launcher_job({"MASTER_ADDR": address, "MASTER_PORT": "29500", "RANK": "0"}) == "node7:29500"


def test_an_argument_comes_before_the_environment_and_that_before_the_launcher() -> None:
    environment = SLURM | {"QUIVER_JOB": "mine", "QUIVER_GROUP": "sweep", "QUIVER_TENANT": "lab"}
    assert identity_of(environment=environment) == Identity("mine", "sweep", "lab")
    assert identity_of("a", "b", "c", environment) == Identity("a", "b", "c")
    assert identity_of(group="b", environment=SLURM) == Identity("4711", "b", "")


@pytest.mark.parametrize("name", ["QUIVER_JOB", "QUIVER_GROUP", "QUIVER_TENANT"])
@pytest.mark.parametrize("value", ["a\nb", "x" * (NAME_BYTES_MAX + 1), "\x1b[31m"])
def test_a_name_in_the_environment_that_cannot_be_shown_is_an_error_that_names_it(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        identity_of(environment={name: value})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("/data/imagenet.quiver", "imagenet"),
        ("imagenet.v2.quiver", "imagenet.v2"),
        ("s3://bucket/sets/image%20net.quiver", "image net"),
        ("https://host/imagenet.quiver?version=3#x", "imagenet"),
        ("/data/a\nb\u202e.quiver", "a?b?"),
        ("/data/.quiver", "unnamed"),
        ("/data/" + "ä" * 100 + ".quiver", "ä" * 64),
        ("/data/plain", "plain"),
    ],
)
def test_a_dataset_is_called_by_its_file(location: str, name: str) -> None:
    assert stem_of(location) == name
    assert check_name("", stem_of(location)) == name


def test_a_dataset_keeps_its_name_and_its_introduction_over_pickle(
    files: Files, tmp_path: Path, dataset: Callable[..., Dataset]
) -> None:
    ds = dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB")
    assert ds.dataset_name == files.manifest.stem
    again: Dataset = pickle.loads(pickle.dumps(ds))
    assert again._opened.introduction == ds._opened.introduction
    assert ds.select([1, 2]).dataset_name == ds.dataset_name


def test_the_manifests_name_comes_before_its_files(
    files: Files, tmp_path: Path, dataset: Callable[..., Dataset]
) -> None:
    index(files.folder, tmp_path / "m.quiver", name="all images")
    ds = dataset(tmp_path / "m.quiver", f"file://{tmp_path}/cache?capacity=1GiB")
    assert ds.dataset_name == "all images"


class Channel:
    """A ``NeedsChannel`` that keeps what it is told."""

    orphaned = None

    def __init__(self) -> None:
        self.told: list[ConsumerReport] = []

    def report(self, report: ConsumerReport, *, leaving: bool = False) -> Any:
        self.told.append(report)
        return np.zeros(len(report.left), np.uint8)

    def close(self) -> None:
        pass


def test_reports_say_what_the_dataset_is_called_and_who_reads() -> None:
    channel, said = Channel(), introduction_of("imagenet")
    IntroducedNeeds(channel, said).report(ConsumerReport(bytes(16), np.zeros(3, np.uint8), 0.0, 0.0, 5.0))
    assert (channel.told[0].dataset_name, channel.told[0].reader) == ("imagenet", said.reader)


def _reports(sampler: BatchSampler) -> list[tuple[bytes, Identity]]:
    """Begin a pass; return the name and identity of each consumer that reports."""
    next(iter(sampler))
    consumers = [part.consumer for part in sampler._parts] if hasattr(sampler, "_parts") else [sampler._consumer]
    found = [(it._report()[0].consumer, it._report()[0].identity) for it in consumers]
    sampler.close()
    return found


def test_loaders_of_one_launched_job_share_its_name_and_never_a_report(
    files: Files, tmp_path: Path, dataset: Callable[..., Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB")
    for name, value in (SLURM | {"QUIVER_GROUP": "sweep"}).items():
        monkeypatch.setenv(name, value)
    found = [_reports(BatchSampler(ds, 4))[0] for _ in range(2)]
    monkeypatch.setenv("QUIVER_JOB", "mine")
    found += [_reports(BatchSampler(ds, 4, tenant="lab"))[0] for _ in range(2)]
    assert len({name for name, _ in found}) == 4, "train and validation, or two jobs of one allocation"
    assert [who for _, who in found] == [Identity("4711", "sweep")] * 2 + [Identity("mine", "sweep", "lab")] * 2


def test_a_restarted_job_still_replaces_its_earlier_run_whatever_its_group(
    files: Files, tmp_path: Path, dataset: Callable[..., Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB")
    names = set()
    for group in (None, "sweep"):
        monkeypatch.setattr(arguments, "_made", Counter())  # as in a new process
        [(name, who)] = _reports(BatchSampler(ds, 4, job="resnet", group=group))
        assert who == Identity("resnet", group or "")
        names.add(name)
    assert len(names) == 1


def test_a_mixtures_parts_report_the_loaders_identity(
    files: Files, tmp_path: Path, dataset: Callable[..., Dataset]
) -> None:
    ds = dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB")
    mix = Mix({"a": ds, "b": ds.select(range(5))}, weights={"a": 1, "b": 1})
    loader = DataLoader(mix, 4, job="resnet", group="sweep", tenant="lab")
    assert {who for _, who in _reports(loader.order)} == {Identity("resnet", "sweep", "lab")}
