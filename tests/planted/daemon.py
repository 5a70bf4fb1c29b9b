"""Bugs of the daemon: fills, uploads, room, budgets, deadlines, verification, peers, access."""

from __future__ import annotations

from typing import Final

from tests.planted.plant import Planted

BUGS: Final = (
    Planted(
        "single-flight leaks the waiters of a fill that failed",
        "cacheserver/quiver_cacheserver/residency/fills.py",
        "            fill.future.set_exception(error)\n",
        "            pass\n",
        (
            "tests/daemon/test_junk_manifests.py::test_another_manifest_s_fill_begins_once_the_first_failed_and_not_before",
        ),
    ),
    Planted(
        "a shard is filled twice at once",
        "cacheserver/quiver_cacheserver/residency/fills.py",
        "        if running is not None:\n            return running.future\n",
        "        if running is not None and running.future.done():\n            return running.future\n",
        ("tests/daemon/test_costs.py::test_a_fill_that_runs_is_joined_and_not_begun_once_more",),
    ),
    Planted(
        "a place for fills is not given back",
        "cacheserver/quiver_cacheserver/residency/fills.py",
        "        self._active -= 1\n        fill.running = False\n",
        "        fill.running = False\n",
        ("tests/daemon/test_rack.py::test_thirty_readers_of_a_cold_dataset_cost_one_origin_read_of_each_shard",),
    ),
    Planted(
        "clients do not take turns",
        "cacheserver/quiver_cacheserver/residency/fills.py",
        "                self._waiting[client] = queue  # behind the others\n",
        "                self._waiting[client] = queue\n"
        "                self._waiting.move_to_end(client, last=False)\n",
        ("tests/daemon/test_costs.py::test_clients_take_turns_however_much_one_of_them_asks_for",),
    ),
    Planted(
        "an upload is not compared with its name",
        "cacheserver/quiver_cacheserver/serving/transfers.py",
        '        verified(writing.digest, memoryview(writing.content()), "upload")\n',
        "        writing.content()\n",
        ("tests/daemon/test_routes.py::test_an_upload_that_does_not_match_its_name_is_refused_and_nothing_is_kept",),
    ),
    Planted(
        "an upload may drip for ever",
        "cacheserver/quiver_cacheserver/serving/transfers.py",
        "self._left_seconds += len(piece) / SLOWEST_BYTES_PER_SECOND - (time.monotonic() - began)",
        "self._left_seconds += len(piece) / SLOWEST_BYTES_PER_SECOND",
        ("tests/daemon/test_slow_uploads.py::test_an_upload_that_is_never_silent_and_too_slow_is_ended",),
    ),
    Planted(
        "one address may hold everything",
        "cacheserver/quiver_cacheserver/budget.py",
        "if amount > free or mine + amount > FREE_SHARE * account.weight * (free - amount + 1):",
        "if amount > free:",
        ("tests/daemon/test_budget.py::test_one_address_gets_three_quarters_and_a_newcomer_finds_a_place",),
    ),
    Planted(
        "a cost is never charged",
        "cacheserver/quiver_cacheserver/budget.py",
        "            self._accounts[address].buckets[what] = (left - amount, now)\n",
        "            self._accounts[address].buckets[what] = (left, now)\n",
        ("tests/daemon/test_budget.py::test_a_cost_leads_into_debt_which_time_works_off",),
    ),
    Planted(
        "what is held is not released",
        "cacheserver/quiver_cacheserver/budget.py",
        "            self.used[what] -= amount\n            if left:",
        "            if left:",
        ("tests/daemon/test_budget.py::test_addresses_are_forgotten_unless_they_hold_something",),
    ),
    Planted(
        "shards are served unverified after a restart",
        "cacheserver/quiver_cacheserver/verification.py",
        "self._unverified = {held.digest for held in store.inventory.held(Kind.SHARD)}",
        "self._unverified = set[Digest]()",
        ("tests/daemon/test_rack.py::test_a_restart_keeps_the_shards_and_verifies_them_before_use",),
    ),
    Planted(
        "a reader's word on wrong bytes is ignored",
        "cacheserver/quiver_cacheserver/verification.py",
        "                self._unverified.add(digest)\n",
        "                self._unverified.discard(digest)\n",
        ("tests/daemon/test_verbs.py::test_a_shard_of_which_wrong_bytes_came_is_verified_before_it_is_served_again",),
    ),
    Planted(
        "what a consumer came to need is evicted all the same",
        "cacheserver/quiver_cacheserver/residency/rooms.py",
        "            if victim in decision.forced or needs.needed_of(as_rows([victim]))[0] != 1\n",
        "            if needs is not None\n",
        ("tests/daemon/test_rooms.py::test_what_somebody_came_to_need_since_the_decision_is_spared",),
    ),
    Planted(
        "what an operator pinned is evicted",
        "cacheserver/quiver_cacheserver/residency/rooms.py",
        "        needed[pinned], in_use[pinned] = 1, True\n",
        "",
        ("tests/daemon/test_rooms.py::test_what_is_pinned_is_evicted_for_nobody",),
    ),
    Planted(
        "room is promised twice",
        "cacheserver/quiver_cacheserver/residency/rooms.py",
        "return free_bytes - max(reserved_bytes, promised_bytes)",
        "return free_bytes - reserved_bytes",
        ("tests/daemon/test_rooms.py::test_room_that_is_promised_to_what_is_coming_is_not_free",),
    ),
    Planted(
        "a read waits for its fill without a deadline",
        "cacheserver/quiver_cacheserver/node.py",
        "await asyncio.wait(waiting, timeout=max(deadline - time.monotonic(), 0.0))",
        "await asyncio.wait(waiting, timeout=max(deadline - time.monotonic(), 0.0) + 15)",
        ("tests/daemon/test_junk_manifests.py::test_a_fill_that_hangs_on_a_junk_manifest_s_origin_is_not_waited_for",),
    ),
    Planted(
        "a prefix allows what only begins like it",
        "quiver/location.py",
        "            and other.names[: len(self.names)] == self.names\n",
        '            and "/".join(other.names).startswith("/".join(self.names))\n',
        ("tests/kernel/test_location.py::test_a_prefix_allows_at_a_slash_and_of_one_server",),
    ),
    Planted(
        "a chosen uploader that never comes is waited for",
        "cacheserver/quiver_cacheserver/residency/uploads.py",
        "return upload is not None and time.monotonic() < upload.since + UPLOAD_SECONDS",
        "return upload is not None",
        ("tests/daemon/test_junk_manifests.py::test_one_who_lets_an_upload_lapse_is_chosen_after_the_others",),
    ),
    Planted(
        "a peer that failed is asked at once again",
        "cacheserver/quiver_cacheserver/rack/peers.py",
        "                if self._health.is_avoided(url):\n"
        "                    self._probe()\n                    continue\n",
        "",
        ("tests/daemon/test_failed_peers.py::test_a_peer_that_failed_is_passed_over_until_it_delivers",),
    ),
    Planted(
        "a token that was verified never expires",
        "cacheserver/quiver_cacheserver/access/tokens.py",
        "return Reason.EXPIRED if self._now() >= expires_at + LEEWAY_SECONDS else None",
        "return Reason.EXPIRED if self._now() >= expires_at + 1e9 * LEEWAY_SECONDS else None",
        ("tests/daemon/test_tokens.py::test_a_token_that_was_verified_is_remembered_and_expires_all_the_same",),
    ),
    Planted(
        "the signature of a token is not verified",
        "cacheserver/quiver_cacheserver/access/tokens.py",
        'options={"require": list(REQUIRED)},',
        'options={"require": list(REQUIRED), "verify_signature": False},',
        ("tests/daemon/test_tokens.py::test_a_bad_token_is_refused_for_its_reason",),
    ),
    Planted(
        "a right is missing on a route",
        "cacheserver/quiver_cacheserver/access/rights.py",
        '"POST /v1/needs": Right.FILL,',
        '"POST /v1/needs": Right.READ,',
        ("tests/daemon/test_rights.py::test_what_makes_a_daemon_fetch_store_or_evict_requires_the_right_to_fill",),
    ),
    Planted(
        "a right of the table is not asked for",
        "cacheserver/quiver_cacheserver/access/rights.py",
        "return right is PUBLIC or caller.is_member or right in caller.rights",
        "return right is PUBLIC or caller.is_member or bool(caller.rights)",
        ("tests/daemon/test_access.py::test_a_token_may_do_what_its_rights_say_and_nothing_else",),
    ),
    Planted(
        "a stream outlives the key of its token",
        "cacheserver/quiver_cacheserver/access/control.py",
        "            if reason is not None:\n                self.audit.refused(caller, verb, reason)\n",
        "            if reason is not None and not caller.key_id:\n"
        "                self.audit.refused(caller, verb, reason)\n",
        ("tests/daemon/test_access.py::test_a_key_that_is_withdrawn_ends_the_streams_of_its_tokens",),
    ),
    Planted(
        "a read fills for who may only read",
        "cacheserver/quiver_cacheserver/serving/reads.py",
        "allows(turn.caller, READ_FILLS), turn.caller.scope",
        "bool(turn.caller), turn.caller.scope",
        ("tests/daemon/test_access.py::test_a_reader_without_the_right_to_fill_reads_what_is_here_and_causes_nothing",),
    ),
)
