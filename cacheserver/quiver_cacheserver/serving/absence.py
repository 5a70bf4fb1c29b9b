"""The statuses of non-resident shards in one answer, and which of them the client is chosen to upload."""

from __future__ import annotations

from collections.abc import Set

from quiver.digest import Digest
from quiver.wire import RangeStatus
from quiver_cacheserver.access.caller import Caller
from quiver_cacheserver.node import Node
from quiver_cacheserver.residency.uploads import UPLOADS_PER_READER


class Absence:
    """The statuses of absent shards in one answer. At most ``UPLOADS_PER_READER`` of them are ``UPLOAD``."""

    def __init__(self, node: Node, listed: Set[Digest], manifest: Digest | None, caller: Caller) -> None:
        """``listed``: those of the request's shards that the manifest has."""
        self._node = node
        self._listed = listed
        self._manifest = manifest
        self._client, self._domain = caller.budget, caller.scope
        self._uploads = 0

    def status_of(self, digest: Digest) -> RangeStatus:
        """Return the status of an absent shard. If it has to be uploaded, choose this client or return ``FILLING``."""
        node, domain = self._node, self._domain
        status = node.absence(digest, self._listed, self._manifest, domain)
        if status is not RangeStatus.UPLOAD or self._manifest is None:
            return status
        may_choose = self._uploads < UPLOADS_PER_READER
        if may_choose and node.choose_uploader(digest, self._manifest, self._client, domain):
            self._uploads += 1
            return status
        return RangeStatus.FILLING
