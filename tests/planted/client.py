"""Bugs of the client: verification, tiers, the loader's state and ledger, forks, folders that processes share."""

from __future__ import annotations

from typing import Final

from tests.planted.plant import Planted

BUGS: Final = (
    Planted(
        "a batch is handed out unverified",
        "client/quiver_client/batch.py",
        "            right &= (lengths < 0) | ((found == expected[:, field]) & ~torn)\n",
        "            right &= (lengths < 0) | (found != 0) | ~torn\n",
        ("tests/client/test_faults.py::test_wrong_bytes_in_an_embedded_cache_are_found_and_mended",),
    ),
    Planted(
        "a sample may end past its buffer",
        "client/quiver_client/batch.py",
        "inside = (offsets >= 0) & (offsets <= len(buffer.view) - self.plan.sizes[positions])",
        "inside = (offsets >= 0) & (offsets <= len(buffer.view))",
        ("tests/client/test_batch.py::test_a_sample_that_ends_past_its_buffer_was_not_put",),
    ),
    Planted(
        "a daemon that delivers wrong bytes is not told",
        "client/quiver_client/rack/tier.py",
        "            self._suspects.update(shards)\n",
        "            self._suspects.difference_update(shards)\n",
        ("tests/daemon/test_rack.py::test_wrong_bytes_on_a_disk_are_found_put_aside_and_mended",),
    ),
    Planted(
        "a dead daemon is asked for every batch",
        "client/quiver_client/rack/members.py",
        "        return self.health.is_silent(url)\n",
        "        return self.health.is_silent(url) and not url\n",
        ("tests/client/test_rack_tier.py::test_a_daemon_that_does_not_respond_is_left_alone_until_it_answers",),
    ),
    Planted(
        "a session is used in a forked child",
        "client/quiver_client/dataset.py",
        "        if self._session is None or self._owner != os.getpid():\n            with self._lock:\n"
        "                if self._session is None or self._owner != os.getpid():\n",
        "        if self._session is None:\n            with self._lock:\n                if self._session is None:\n",
        (
            "tests/client/test_handoff_tier.py::test_a_dataset_used_before_a_fork_works_in_the_child_and_keeps_none_of_the_parents_maps",
        ),
    ),
    Planted(
        "what was prefetched counts as consumed",
        "client/quiver_client/loader/epoch.py",
        "        self._in_flight[number] = entries\n",
        "        self._in_flight[number] = entries\n        self.consumed[self._entries[entries]] = True\n",
        ("tests/client/test_loader_state.py::test_what_was_prefetched_and_not_yielded_is_not_consumed",),
    ),
    Planted(
        "a batch that was consumed is pending again",
        "client/quiver_client/loader/epoch.py",
        "        self.consumed[self._entries[entries]] = True\n        self.batches += 1\n",
        "        self.consumed[self._entries[entries[1:]]] = True\n        self.batches += 1\n",
        ("tests/chaos/test_resume.py::test_jobs_killed_at_any_batch_resume_exactly",),
    ),
    Planted(
        "merging keeps the last rank's samples alone",
        "client/quiver_client/loader/state.py",
        "            done |= _consumed(state, leaves_out=not is_short)\n",
        "            done = _consumed(state, leaves_out=not is_short)\n",
        ("tests/client/test_loader_state.py::test_merged_states_load_into_any_world_size",),
    ),
    Planted(
        "the state of another dataset is accepted",
        "client/quiver_client/loader/state.py",
        '_SAME: Final = ("version", "dataset", "samples", "seed", "shuffle", "block_shards")',
        '_SAME: Final = ("version", "samples", "seed", "shuffle", "block_shards")',
        ("tests/client/test_loader_state.py::test_a_state_of_something_else_is_refused_with_the_reason",),
    ),
    Planted(
        "a checkpoint is ahead of its ledger",
        "client/quiver_client/loader/sampler.py",
        "            self._recorder.flush()\n            is_recorded, claimant",
        "            is_recorded, claimant",
        ("tests/client/test_loader_ledger.py::test_a_checkpoint_is_never_ahead_of_its_ledger",),
    ),
    Planted(
        "a torn tail stays in the ledger",
        "client/quiver_client/loader/ledger/files.py",
        "    file.truncate(end)\n",
        "",
        ("tests/client/test_ledger.py::test_a_tail_torn_at_any_byte_costs_the_torn_batch_alone",),
    ),
    Planted(
        "frames of a ledger are not chained",
        "client/quiver_client/loader/ledger/format.py",
        "    crc = zlib.crc32(body, zlib.crc32(data[at:start], crc))\n",
        "    crc = int.from_bytes(data[end - _CRC_BYTES : end], 'little')\n",
        ("tests/client/test_ledger.py::test_no_flipped_bit_of_a_closed_ledger_changes_what_is_replayed",),
    ),
    Planted(
        "a forked child writes its parent's ledger",
        "client/quiver_client/loader/ledger/recording.py",
        "return self._has_written and self._pid != os.getpid()",
        "return self._has_written and self._pid < 0",
        (
            "tests/client/test_loader_ledger.py::test_a_ledger_that_is_open_at_a_fork_is_written_by_its_own_process_alone",
        ),
    ),
    Planted(
        "a draw waits for the cache for ever",
        "client/quiver_client/loader/draw_wait.py",
        "        if now - self._wait.began >= WAIT_SECONDS_MAX:\n            return False\n",
        "",
        (
            "tests/client/test_loader_faults.py::test_a_wait_in_which_a_little_arrives_again_and_again_ends_all_the_same",
        ),
    ),
    Planted(
        "a loop that pauses pins its shards",
        "client/quiver_client/loader/loop_rate.py",
        "        return not self._is_asking and now - self._last >",
        "        return not self._last and now - self._last >",
        ("tests/client/test_loader.py::test_a_loop_that_pauses_holds_no_claim_on_the_cache",),
    ),
    Planted(
        "the lock of a suspended filler is waited for",
        "client/quiver_client/embedded/fill_locks.py",
        "if now - last_heartbeat > STALE_SECONDS or now - begun > WAIT_SECONDS_MAX:",
        "if now - begun > WAIT_SECONDS_MAX:",
        (
            "tests/client/test_stopped_processes.py::test_a_stopped_filler_is_not_waited_for_and_its_shard_is_read_by_another",
        ),
    ),
    Planted(
        "a killed process pins the folder",
        "client/quiver_client/embedded/lease_files.py",
        "            if _is_unlocked(fd) or (seen.expires is not None and seen.expires < now):\n",
        "            if seen.expires is not None and seen.expires < now:\n",
        ("tests/client/test_folder_needs.py::test_a_killed_process_needs_nothing_at_once",),
    ),
    Planted(
        "patience with an origin never ends",
        "client/quiver_client/origin_patience.py",
        "        if left <= 0:\n",
        "        if left <= -30:\n",
        ("tests/client/test_origin_patience.py::test_past_its_patience_a_read_names_the_origin_and_what_to_do",),
    ),
)
