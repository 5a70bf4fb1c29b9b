"""Bugs of the kernel: formats, ring, membership, residency, substitution, store, origins, transport."""

from __future__ import annotations

from typing import Final

from tests.planted.plant import Planted

BUGS: Final = (
    Planted(
        "samples of a shard are not hashed",
        "quiver/shard.py",
        "    if bad:\n",
        "    if bad and len(bad) == len(rows) + 1:\n",
        ("tests/kernel/test_shard.py::test_any_flipped_bit_is_found_and_a_sample_that_has_it_is_named",),
    ),
    Planted(
        "a shard's table is not compared with its name",
        "quiver/shard.py",
        "    if name_of(data[start:]) != digest:\n",
        "    if len(name_of(data[start:])) != len(digest):\n",
        ("tests/kernel/test_shard.py::test_the_bytes_of_another_shard_are_not_those_of_this_one",),
    ),
    Planted(
        "no hash check on the peer path",
        "quiver/source.py",
        "return verified(digest, source.load(digest, size_bytes), source.name), source",
        "return (Shard(digest, source.load(digest, size_bytes)) if 'http' in source.name"
        " else verified(digest, source.load(digest, size_bytes), source.name)), source",
        ("tests/daemon/test_rack.py::test_a_neighbour_with_wrong_bytes_is_passed_over_for_the_origin",),
    ),
    Planted(
        "a digest may have upper-case digits",
        "quiver/digest.py",
        're.compile(r"[0-9a-f]{64}", re.ASCII)',
        're.compile(r"[0-9a-fA-F]{64}", re.ASCII)',
        ("tests/kernel/test_values.py::test_what_is_not_64_lower_case_digits_is_no_digest",),
    ),
    Planted(
        "a manifest's digest is not compared",
        "quiver/manifest/reader.py",
        "            if found != digest:\n",
        "            if not found:\n",
        (
            "tests/kernel/test_manifest_file.py::test_a_manifest_without_checksums_is_checked_by_its_digest_where_that_is_known",
        ),
    ),
    Planted(
        "a plan takes the shard before",
        "quiver/plan.py",
        'side="right") - 1',
        'side="left") - 1',
        ("tests/kernel/test_plan.py::test_a_plan_says_what_the_reference_says",),
    ),
    Planted(
        "a read request may name shards that it does not list",
        "quiver/wire.py",
        'raise BadRequest("a range names a shard that the request does not list")',
        "pass",
        ("tests/kernel/test_wire.py::test_a_request_that_breaks_a_limit_is_refused",),
    ),
    Planted(
        "the ring ignores capacities",
        "quiver/ring.py",
        "weights = np.asarray([self.members[at].weight for at in at_once])",
        "weights = np.asarray([1.0 for at in at_once])",
        ("tests/test_ring.py::test_the_owners_of_the_golden_vectors_have_not_moved",),
    ),
    Planted(
        "a draining member owns shards",
        "quiver/ring.py",
        'if member.state == "up")',
        "if member.state)",
        ("tests/test_ring.py::test_a_draining_member_owns_nothing_and_only_its_shards_move",),
    ),
    Planted(
        "one's own key is not read again",
        "quiver/membership/machine.py",
        "return bool(self.lease) and self.own_lease == self.lease and self.own_value == self.value",
        "return bool(self.lease) and bool(self.own_lease or self.own_value or self.listed_at)",
        ("tests/membership/test_machine.py::test_after_any_events_the_ring_converges_to_the_list_and_self",),
    ),
    Planted(
        "a watch that is replayed counts",
        "quiver/membership/machine.py",
        "[c for c in changes if c.revision > max(state.revision, state.keys.get(c.key, 0))]",
        "list(changes)",
        ("tests/membership/test_machine.py::test_an_event_older_than_the_list_is_ignored",),
    ),
    Planted(
        "an outage of etcd moves shards",
        "quiver/membership/machine.py",
        "settled_at=now + state.ttl_seconds if outage and state.revision else state.settled_at,",
        "settled_at=state.settled_at,",
        ("tests/membership/test_machine.py::test_a_member_that_comes_back_after_an_outage_never_left_the_ring",),
    ),
    Planted(
        "a lease never expires",
        "quiver/residency/leases.py",
        "if now - lease.reported_at > lease.seconds]",
        "if now - lease.reported_at > 1e9 * lease.seconds]",
        ("tests/kernel/test_needs_policy.py::test_a_lease_that_ran_out_pins_nothing",),
    ),
    Planted(
        "what is coming is fetched again",
        "quiver/residency/policy.py",
        "self._present[needs.slots_of(_coming(needs, situation.avoid))] = True",
        "_coming(needs, situation.avoid)",
        ("tests/simulation/test_simulation.py::test_the_promises_hold_in_every_seed[0]",),
    ),
    Planted(
        "a needed shard makes way for one that nobody starves for",
        "quiver/residency/policy.py",
        "starving = [it for it in starving if self._may_force(it.consumer)]",
        "starving = list(starving)",
        (
            "tests/kernel/test_needs_policy.py::test_one_who_starves_forces_out_so_much_until_it_reports_again_whoever_else_does",
        ),
    ),
    Planted(
        "a fetch that failed keeps its victims marked",
        "quiver/residency/commitments.py",
        "            if self._evicting.get(digest) == recipe:\n                del self._evicting[digest]\n",
        "            self._evicting.get(digest)\n",
        ("tests/kernel/test_needs_policy.py::test_when_a_fetch_fails_its_victims_are_held_as_before",),
    ),
    Planted(
        "reading junk wins a client the whole cache",
        "quiver/residency/eviction.py",
        "if not less and shelf.idle[at] < KEPT_SECONDS:",
        "if not less and shelf.idle[at] < 0:",
        ("tests/kernel/test_eviction.py::test_one_who_holds_more_pushes_out_its_own_alone",),
    ),
    Planted(
        "substitution drops a pending sample",
        "quiver/substitution.py",
        "        self._pending -= len(entries)\n",
        "        self._pending -= len(entries)\n"
        "        if self._pending == 1 and len(entries) > 1:\n"
        "            self._pending = 0\n",
        (
            "tests/kernel/test_substitution.py::test_every_entry_is_taken_once_in_full_batches_and_by_shard_in_the_order_of_the_permutation",
        ),
    ),
    Planted(
        "ranks share the last samples of an epoch",
        "quiver/substitution.py",
        "np.resize(order, padding)])[rank::world_size], order[:0]",
        "np.resize(order[::-1], padding)])[rank::world_size], order[:0]",
        ("tests/kernel/test_substitution.py::test_ranks_share_an_epoch_as_torch_has_them",),
    ),
    Planted(
        "a file is renamed before its content is synced",
        "quiver/store/disk.py",
        "            os.fsync(self._file.fd)\n            self._store.admit(self)\n",
        "            self._store.admit(self)\n            os.fsync(self._file.fd)\n",
        ("tests/store/test_store.py::test_a_rename_that_is_not_known_to_last_is_taken_back",),
    ),
    Planted(
        "a file is renamed before its write ends",
        "quiver/store/disk.py",
        '            raise Corrupt(f"{self._at} bytes where {self.size_bytes} were announced", "upload")\n'
        "        with disk_errors(self._store.root):\n            os.fsync",
        "            pass\n        with disk_errors(self._store.root):\n            os.fsync",
        ("tests/store/test_store.py::test_a_put_that_fails_leaves_nothing",),
    ),
    Planted(
        "room is reserved although it is not there",
        "quiver/store/disk.py",
        "if lacking_bytes > sum(self.inventory.size(kind, digest) for kind, digest in dict.fromkeys(evict)):",
        "if lacking_bytes > self.capacity_bytes:",
        ("tests/store/test_store.py::test_exactly_what_is_said_is_evicted_and_nothing_if_that_is_not_enough",),
    ),
    Planted(
        "a lock is kept across a fork",
        "quiver/forks.py",
        "    _locks.add(made)\n",
        "    _locks.discard(made)\n",
        ("tests/client/test_forks.py::test_locks_that_threads_hold_are_free_in_a_child",),
    ),
    Planted(
        "a child uses its parent's connections",
        "quiver/forks.py",
        "    _closed.add(owner)\n",
        "    _closed.discard(owner)\n",
        ("tests/kernel/test_connection.py::test_a_child_closes_its_copy_of_a_connection",),
    ),
    Planted(
        "the last bytes of a range are left out",
        "quiver/origin/runs.py",
        "last.cuts.append((offset - last.start, take, target))",
        "last.cuts.append((offset - last.start, take - 1, target))",
        ("tests/kernel/test_runs.py::test_every_extent_comes_whole_and_in_its_place",),
    ),
    Planted(
        "a range ends one byte early",
        "quiver/origin/local.py",
        "        end = offset + len(piece)\n    if len(run) > 1:",
        "        end = offset + len(piece) - 1\n    if len(run) > 1:",
        ("tests/contract/test_sources.py::test_an_origin_rebuilds_its_shards",),
    ),
    Planted(
        "a file that became shorter reads as zeros",
        "quiver/origin/local.py",
        '            raise Changed(full, "became shorter")\n',
        "            break\n",
        ("tests/contract/test_sources.py::test_an_origin_that_changed_names_object_and_samples",),
    ),
    Planted(
        "a link leads out of what an operator allows",
        "quiver/origin/beneath.py",
        "                    if len(folders) == 1:\n",
        "                    if not folders:\n",
        ("tests/kernel/test_beneath.py::test_nothing_leads_out",),
    ),
    Planted(
        "a Retry-After is not honoured",
        "quiver/origin/gate.py",
        "            self._opens = self._asked + seconds\n",
        "            self._opens = self._asked\n",
        ("tests/kernel/test_origin_patience.py::test_a_retry_after_is_honoured_by_all_requests",),
    ),
    Planted(
        "what a server sends beyond its answer is the next answer",
        "quiver/transport/http.py",
        "if answer.keeps_alive and len(behind) <= size_bytes:",
        "if answer.keeps_alive:",
        ("tests/contract/test_sources.py::test_what_follows_an_answer_does_not_become_the_next_one",),
    ),
    Planted(
        "an encoded answer is taken for the bytes",
        "quiver/transport/http.py",
        '            raise Corrupt("an encoded answer", self._endpoint.name)\n',
        "            pass\n",
        ("tests/contract/test_sources.py::test_a_peer_that_breaks_the_protocol_is_passed_over",),
    ),
    Planted(
        "a lying length on a stream is believed",
        "quiver/transport/stream.py",
        "    if size != count + present or received > head_bytes + present:\n",
        "    if size < count:\n",
        ("tests/contract/test_streams.py::test_a_wrong_answer_is_an_error_in_time_and_ends_the_stream",),
    ),
    Planted(
        "files that a stranger hands over are mapped",
        "quiver/transport/handoff.py",
        "if uid not in (0, os.geteuid()) and uid not in self.trusted:",
        "if uid < 0:",
        ("tests/kernel/test_handoff.py::test_a_stranger_who_listens_under_a_path_of_roots_is_told_nothing",),
    ),
    Planted(
        "descriptors of a malformed answer leak",
        "quiver/transport/handoff.py",
        "present != len(files):",
        "present > len(files):",
        ("tests/kernel/test_handoff.py::test_a_wrong_answer_is_an_error_and_leaves_no_descriptor_open",),
    ),
)
