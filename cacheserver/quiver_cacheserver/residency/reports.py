"""``POST /v1/needs``: takes consumers' reports, and answers what is held and which shards to upload."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Final

import numpy as np

from quiver.digest import Digest
from quiver.domain import SINGLE, Domain
from quiver.errors import BadRequest
from quiver.residency import ConsumerReport, Needs
from quiver.residency.messages import NeedsAnswer, NeedsReport, NeedsStatus
from quiver_cacheserver.budget import Budgets, Cost
from quiver_cacheserver.dataset_names import DatasetNames
from quiver_cacheserver.names import consumer_in, name_in
from quiver_cacheserver.residency.datasets import Datasets
from quiver_cacheserver.residency.decider import Decider
from quiver_cacheserver.residency.probes import ProbeRequests

INLINE_SHARDS_MAX: Final = 1 << 20  # larger reports are unpacked, and answers packed, in a thread: milliseconds


class Reports:
    """The reports of consumers. Belongs to the event loop."""

    def __init__(
        self, needs: Needs, datasets: Datasets, decider: Decider, budgets: Budgets, names: DatasetNames
    ) -> None:
        self._needs = needs
        self._names = names
        self._datasets = datasets
        self._decider = decider
        self._budgets = budgets
        self.probes = ProbeRequests()

    async def take(self, body: bytes, client: str, domain: Domain = SINGLE, *, tenant: str = "") -> NeedsAnswer:
        """Take one report. Raises ``BadRequest`` for one that does not fit its manifest.

        ``tenant``: of the sender's token, which counts whatever the report says; "" without one.
        """
        head = NeedsReport.head(body)
        if head.leaving:
            self._needs.leave(consumer_in(domain, head.consumer))
            self._datasets.changed.set()
            return _empty(NeedsStatus.TAKEN)
        manifest = await self._datasets.manifest(head.manifest, client, domain)
        if manifest is None:
            return _empty(NeedsStatus.NO_MANIFEST)
        if head.shards != manifest.shard_count:
            raise BadRequest(f"a report about {head.shards} shards where the manifest has {manifest.shard_count}")
        budgets, began = self._budgets, time.monotonic()
        if budgets.left(client, Cost.WORK_SECONDS, began) <= 0:
            raise budgets.refusal(Cost.WORK_SECONDS, client, began)
        if head.shards + 4 * head.uses > INLINE_SHARDS_MAX:
            told = await asyncio.get_running_loop().run_in_executor(None, NeedsReport.decode, body)
        else:
            told = NeedsReport.decode(body)
        unpacked_seconds = time.monotonic() - began
        dataset = await self._datasets.learn(manifest, domain)
        if dataset is None:
            return _empty(NeedsStatus.FULL)
        now = time.monotonic()
        identity = replace(told.report.identity, tenant=tenant) if tenant else told.report.identity
        report = replace(told.report, consumer=consumer_in(domain, told.report.consumer), identity=identity)
        self._names.heard(told.manifest, domain, own=manifest.header.name, told=report.dataset_name)
        answer = self._answer(name_in(domain, told.manifest), report, now, client)
        if self.probes.answered(report, domain):
            answer = replace(answer, probe_wanted=True)
        dataset.used = now
        self._datasets.changed.set()
        done = time.monotonic()
        budgets.charge(client, Cost.WORK_SECONDS, unpacked_seconds + done - now, done)
        return answer

    def _answer(self, name: Digest, report: ConsumerReport, now: float, client: str) -> NeedsAnswer:
        """``name``: the dataset's; ``report`` has the consumer's name in its domain."""
        before = self._needs.leases.get(report.consumer)
        if not self._needs.report(name, report, now, client=client):
            return _empty(NeedsStatus.FULL)
        if before is not None and not report.hold:
            self._decider.estimator.reported(now - before.reported_at)
        uploads = self._decider.choose_uploads(name, report, client)
        seen, wanted = self._needs.seen_by(report.consumer), self._needs.wants_order(report.consumer)
        return NeedsAnswer(NeedsStatus.TAKEN, seen, uploads, wanted)


def _empty(status: NeedsStatus) -> NeedsAnswer:
    return NeedsAnswer(status, np.zeros(0, np.uint8))
