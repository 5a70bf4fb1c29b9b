"""Whose this process is, and what people call a dataset: what it tells caches, so that operators see names.

A job, a group and a tenant are given as arguments of a loader, else as ``QUIVER_JOB``, ``QUIVER_GROUP`` and
``QUIVER_TENANT``; the job's name else comes from the launcher, if that has a name which all ranks share and other jobs
do not have. Names that a person gave and that cannot be shown are errors. A launcher's are then passed over: nobody
chose them.

None of these names decides what replaces what in a cache. Reports are told apart by 16 random-looking bytes, which
follow from ``job=`` alone (``loader.arguments``): two loaders of one process, or two jobs of one Slurm allocation,
share a name and never a report.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from quiver.identity import NAME_BYTES_MAX, Identity, check_name
from quiver.introduction import READER_BYTES, Introduction
from quiver.manifest import SUFFIX, Manifest
from quiver.residency import ConsumerReport
from quiver_client.needs_reporter import NeedsChannel

JOB_VARIABLE: Final = "QUIVER_JOB"
GROUP_VARIABLE: Final = "QUIVER_GROUP"
TENANT_VARIABLE: Final = "QUIVER_TENANT"
UNNAMED: Final = "unnamed"
_REPLICA: Final = re.compile(r"-(?:master|worker|chief|launcher|ps|evaluator|node)-\d+(?:-[a-z0-9]{5})?$")
_NO_RUN: Final = ("", "none")  # torchrun's id of a run that was given none

Environment = Mapping[str, str]
_drawn: dict[str, bytes] = {}  # of this process, and of what it forks from now on


def identity_of(
    job: str | None = None, group: str | None = None, tenant: str | None = None, environment: Environment | None = None
) -> Identity:
    """Return whose a loader is. ``None``: take the environment's variable, and for a job else the launcher's name.

    Raises ``ValueError`` naming the argument or variable whose value is too long or does not print.
    """
    env = os.environ if environment is None else environment
    return Identity(
        _given("job", job, JOB_VARIABLE, env) or launcher_job(env),
        _given("group", group, GROUP_VARIABLE, env),
        _given("tenant", tenant, TENANT_VARIABLE, env),
    )


def launcher_job(env: Environment) -> str:
    """Return the job's name by its launcher; "" if none has a usable one.

    The first that is set and can be shown. A scheduler's id comes before torchrun's, which is random where torchrun
    runs by itself, and both before a pod's, which may be one of several pods of a job.
    """
    for found in (finder(env) for finder in _LAUNCHERS):
        try:
            name = check_name("", found.strip())
        except ValueError:
            continue
        if name:
            return name
    return ""


def _slurm(env: Environment) -> str:
    """The number that ``squeue`` shows: of an array its tasks are jobs, and a heterogeneous job is one."""
    array, task = env.get("SLURM_ARRAY_JOB_ID", ""), env.get("SLURM_ARRAY_TASK_ID", "")
    if array and task:
        return f"{array}_{task}"
    return env.get("SLURM_HET_JOB_ID", "") or env.get("SLURM_JOB_ID", "") or env.get("SLURM_JOBID", "")


def _lsf(env: Environment) -> str:
    """The name by which ``bjobs`` takes it: the elements of an array are jobs. Index 0: no array."""
    job, element = env.get("LSB_JOBID", ""), env.get("LSB_JOBINDEX", "0")
    return f"{job}[{element}]" if job and element not in ("", "0") else job


def _torchrun(env: Environment) -> str:
    found = env.get("TORCHELASTIC_RUN_ID", "")
    return "" if found in _NO_RUN else found


def _pod(env: Environment) -> str:
    if "KUBERNETES_SERVICE_HOST" not in env:
        return ""
    return env.get("POD_NAME", "") or env.get("HOSTNAME", "")


def _job_of_pod(env: Environment) -> str:
    """The name of the pod without what tells it from the other pods of its job; "" where that is not known."""
    pod, index = _pod(env), env.get("JOB_COMPLETION_INDEX", "")
    if index.isascii() and index.isdecimal():
        # of an indexed Job: the host is called <job>-<index>, the pod <job>-<index>-<five letters>
        return re.sub(rf"-{index}(?:-[a-z0-9]{{5}})?$", "", pod)
    job = _REPLICA.sub("", pod)
    return job if job != pod else ""


def _rendezvous(env: Environment) -> str:
    """Where the ranks of torch.distributed meet: of two jobs that run at a time no two meet at the same port."""
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if not (address and port and (env.get("RANK") or _is_distributed())):  # else a shell's profile may have set them
        return ""
    is_here = address.lower() in ("localhost", "::1") or address.startswith("127.")
    return f"{socket.gethostname() if is_here else address}:{port}"


def _is_distributed() -> bool:
    """Whether this process is a rank of torch.distributed, started without torchrun."""
    torch_distributed = sys.modules.get("torch.distributed")
    return torch_distributed is not None and torch_distributed.is_available() and torch_distributed.is_initialized()


def _variable(name: str) -> Callable[[Environment], str]:
    return lambda env: env.get(name, "")


_LAUNCHERS: Final[tuple[Callable[[Environment], str], ...]] = (
    _slurm,
    _lsf,
    _variable("PBS_JOBID"),
    _variable("AZUREML_RUN_ID"),
    _variable("CLOUD_ML_JOB_ID"),  # Vertex AI
    _variable("TRAINING_JOB_NAME"),  # SageMaker
    _variable("JOBSET_NAME"),  # Kubernetes: JobSet, and Kubeflow's trainer, which makes one
    _variable("PYTORCHJOB_NAME"),
    _torchrun,
    _job_of_pod,
    _rendezvous,
    _pod,
)


def _given(what: str, value: str | None, variable: str, env: Environment) -> str:
    """Return a name that a person gave, as an argument or by the environment; "" for none."""
    if value is not None:
        if not isinstance(value, str):
            raise ValueError(f"{what}={value!r}: give a name")
        return check_name(f"{what}=", value)
    return check_name(variable, env.get(variable, ""))


# -- datasets ---------------------------------------------------------------------------------------------------------


def name_of(manifest: Manifest, location: str) -> str:
    """Return what people call a dataset: the name in its manifest, else that of the file or URL that was opened."""
    return manifest.header.name or stem_of(location)


def stem_of(location: str) -> str:
    """Return the last part of a path or URL without its suffix, cut and without what does not print."""
    path = unquote(urlsplit(location).path) if "://" in location else location
    stem = PurePosixPath(path).name.removesuffix(SUFFIX)
    shown = "".join(char if unicodedata.category(char)[0] in "LMNPSZ" and char.isprintable() else "?" for char in stem)
    cut = shown.encode("utf-8", "replace")[:NAME_BYTES_MAX].decode("utf-8", "ignore").strip()
    try:
        return check_name("", cut) or UNNAMED
    except ValueError:
        return UNNAMED


def introduction_of(dataset_name: str) -> Introduction:
    """Return how this process introduces itself to daemons about a dataset that it opens. Raises ``ValueError``.

    However often it opens one: parts of one manifest that were opened twice are reported once (``placement``).
    """
    reader = _drawn.setdefault("reader", secrets.token_bytes(READER_BYTES))  # one step, whatever threads do
    return Introduction(reader, identity_of(), dataset_name)


class IntroducedNeeds:
    """``NeedsChannel`` that adds to each report what the dataset is called, and who reads for the consumer."""

    def __init__(self, channel: NeedsChannel, introduction: Introduction) -> None:
        self._channel = channel
        self._introduction = introduction
        self.orphaned: npt.NDArray[np.bool_] | None = channel.orphaned

    @property
    def probe_wanted(self) -> bool:
        return self._channel.probe_wanted

    def report(self, report: ConsumerReport, *, leaving: bool = False) -> npt.NDArray[np.uint8]:
        said = self._introduction
        told = replace(report, dataset_name=said.dataset_name, reader=said.reader)
        seen = self._channel.report(told, leaving=leaving)
        self.orphaned = self._channel.orphaned
        return seen

    def close(self) -> None:
        self._channel.close()
