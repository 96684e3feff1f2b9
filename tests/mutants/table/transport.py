"""Mutants of what carries messages: links, TCP, TLS, shared memory, the virtual network, and what they let in."""

from mutants import Mutant

ORDER = "message-order"
BYTES = "byte-counts"
SILENCE = "silent-host"
HELD = "held-ranges"
GARBAGE = "garbage-on-a-link"
TLS = "tls"
KEYS = "keys-in-memory"
STRANGERS = "strangers"
TICKET = "join-ticket"
OWN = "own-process"
LOCK = "lock-of-the-dead"
CROSSES = "crossing-memory"
PINNED, DEVICES = "pinned-copies", "tests/machines/test_devices.py::"
HOOK = "ddp-hook"

TCP_TESTS = "tests/processes/test_tcp.py::"
SILENCES = (
    TCP_TESTS + "test_a_silence_of_30_s_is_a_death_or_one_8_times_as_long_as_those_that_ended_or_one_of_two_minutes"
)
TLS_TESTS = "tests/processes/test_tls.py::"
LINKS = "tests/processes/test_transports.py::"
COUNTED = "tests/processes/test_bytes.py::test_an_endpoint_counts_as_its_kernel_does"
CROSSING = "tests/core/test_crossings.py::"
VIRTUAL = "tests/machines/test_virtual.py::"
JOIN = "tests/processes/test_join.py::"
OWN_PROCESS = "tests/processes/test_own_process.py::"
JOIN_SERVER = "tests/processes/test_join_server.py::"
ON_THE_WIRE = TLS_TESTS + "test_whatever_the_roles_of_a_job_say_to_each_other_is_tls_1_3_on_the_wire"
HIDDEN = TLS_TESTS + "test_keys_and_tickets_are_in_no_file_on_no_command_line_and_in_no_environment"

ENCRYPTED, ENCRYPTED_TESTS = "role-link-sums", "tests/processes/test_links.py::"
USERS = "keys-in-memory"
HELLO = "introductions"
SECURE = "tests/core/test_secure.py::"
OTHER_USER = "tests/processes/test_shared.py::test_a_process_of_another_user_is_let_in_by_neither_end"
OTHER_STATUS = "tests/processes/test_status.py::test_nobody_but_the_same_user_asks_and_nobody_else_is_believed"
OTHER_LEAVES = JOIN + "test_only_the_same_user_has_a_guest_leave"
CLOCKS = SECURE + "test_a_certificate_holds_from_a_day_ahead_for_30_days"
PARTS = SECURE + "test_a_guest_is_given_a_replica_that_nobody_has_had_or_the_next_life_of_its_own"

MUTANTS = [
    Mutant("what-crosses-is-written-over-while-it-is-read", CROSSES, "fabric/crossings.py",
        "self._reached(OWN * to, self._step - TURNS + 1)", "self._reached(OWN * to, self._step - TURNS)",
        (CROSSING + "test_what_was_taken_stays_until_the_step_after_the_next_begins",)),
    Mutant("what-crossed-a-step-ago-is-taken", CROSSES, "fabric/crossings.py",
        "self._reached(OWN * self._partitions + at, self._step)", "self._reached(OWN * self._partitions + at, "
        "self._step - 2)",
        (CROSSING + "test_nothing_is_taken_before_it_is_given_in_this_step",)),
    Mutant("who-sleeps-is-not-woken", CROSSES, "fabric/crossings.py",
        "        stamps[asleep] = 1\n", "        stamps[asleep] = 0\n",
        (CROSSING + "test_who_looks_in_vain_sleeps_and_is_woken_by_what_it_waits_for",)),
    Mutant("what-leaves-a-device-is-told-at-once", PINNED, "fabric/pinned.py",
        "self._cuda.wait(self._cuda.copy(to, tensor))", "self._cuda.copy(to, tensor)",
        (
            DEVICES + "test_what_leaves_a_device_is_told_when_it_is_there",
            DEVICES + "test_a_split_model_on_devices_is_that_on_the_host",
        )),
    Mutant("a-slot-is-free-before-it-was-read", PINNED, "fabric/crossings.py",
        "            self._copies.settle()\n", "            assert self._copies.settle\n",
        (DEVICES + "test_a_slot_is_free_when_it_was_read",)),
    Mutant("memory-stays-registered", "pinned-copies", "fabric/pinned.py",
        "        weakref.finalize(owner, cuda.unregister, memory)\n", "        assert weakref.finalize\n",
        (DEVICES + "test_memory_is_registered_until_who_uses_it_is_gone",)),
    Mutant("an-error-of-cuda-is-left-for-the-next", "pinned-copies", "fabric/pinned.py",
        "                torch.ones(1, device=self.device)\n", "                pass\n",
        (DEVICES + "test_cuda_is_asked_for_what_it_has[712]",)),
    Mutant("a-partition-registers-what-is-of-others", "pinned-copies", "strategies/context.py",
        "part.copies.pin(memory)", "part.copies.pin(self.stage.crossings(self.settings.replicas * length))",
        (DEVICES + "test_a_partition_registers_its_own_part_of_what_is_shared",)),
    Mutant("the-last-message-leaves-first", ORDER, "transport/sockets.py",
        "        else:\n            queue.append(frame)", "        else:\n            queue.appendleft(frame)",
        (LINKS + "test_messages_sent_between_two_polls_leave_in_one_piece", LINKS + "test_conformance")),
    Mutant("a-payload-is-not-counted", BYTES, "transport/sockets.py",
        "self.traffic.sent[message.traffic] += size", "self.traffic.sent[message.traffic] += len(frame)",
        (LINKS + "test_conformance", COUNTED)),
    Mutant("what-was-sent-for-nothing-was-not-sent", BYTES, "record/metrics.py",
        " or isinstance(record, records.BytesCounted):", ":",
        ("tests/core/test_record_recorder.py::test_a_resumed_run_is_as_if_it_had_never_stopped",)),
    Mutant("a-late-message-is-overtaken", ORDER, "transport/virtual.py",
        "link.last = arrives = arrives if arrives > last else last", "link.last = arrives",
        (
            VIRTUAL + "test_conformance",
            VIRTUAL + "test_whatever_the_network_does_a_link_keeps_its_order_and_loses_nothing",
        )),
    Mutant("a-cut-does-not-hold-up-what-it-meets", "short-cut", "transport/virtual.py",
        "began, arrives = stop, max(arrives, stop + takes)", "began, arrives = stop, max(arrives, stop)",
        (VIRTUAL + "test_what_a_partition_meets_arrives_once_it_heals_in_order_and_what_it_does_not_at_its_time",)),
    Mutant("what-is-sent-during-a-cut-passes", "short-cut", "transport/virtual.py",
        "if began < stop and arrives >= start and", "if began < start and arrives >= start and",
        (
            VIRTUAL + "test_what_is_sent_during_a_partition_waits_though_nothing_was_under_way_before_it",
            "tests/simulated/test_knobs.py::test_a_job_waits_for_a_partition_to_heal_and_trains_every_sample_once",
        )),
    Mutant("kernels-bear-more-than-two-minutes", SILENCE, "transport/tcp.py",
        "SILENCE_SECONDS = 120.0", "SILENCE_SECONDS = 180.0",
        (
            TCP_TESTS + "test_the_kernels_of_both_ends_look_every_second_and_bear_no_more_than_two_minutes",
            SILENCES + "[(29.0, 0.1, 121.0)-False]",
        )),
    Mutant("garbage-ends-the-endpoint", GARBAGE, "transport/sockets.py",
        "        except RemoteProtocolError as error:\n            self._lose(link, str(error))\n        if room is "
        "None", "        except RemoteProtocolError as error:\n            self._lose(link, str(error))\n            "
        "self.close()\n        if room is None",
        (LINKS + "test_garbage_costs_the_link_it_came_on_and_no_other",), seconds=10),
    Mutant("every-arena-begins-where-the-vector-does", HELD, "transport/base.py",
        "        start = self.held.start\n", "        start = 0\n",
        ("tests/machines/test_inline.py::test_conformance",)),
    Mutant("a-range-that-begins-after-its-end-is-taken", GARBAGE, "transport/base.py",
        "held.start <= message.start <= message.stop <= held.stop",
        "held.start <= message.start and message.stop <= held.stop",
        (LINKS + "test_a_range_beyond_the_vectors_that_a_peer_lends_costs_its_link[a push that begins after its end]",),
    ),
    Mutant("a-length-has-no-limit", GARBAGE, "core/wire.py",
        "    if size > MESSAGE_LIMIT:", "    if size > MESSAGE_LIMIT << 4:",
        ("tests/core/test_wire.py::test_another_version_and_an_oversized_message_are_refused",)),
    Mutant("a-body-that-is-no-text-ends-who-reads-it", GARBAGE, "core/wire.py",
        "except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:",
        "except (msgspec.MsgspecError, RecursionError) as error:",
        ("tests/core/test_wire.py::test_a_body_that_is_no_message_is_refused",)),
    Mutant("tcp-in-the-place-of-tls", TLS, "places/processes/process.py",
        "return TlsEndpoint(self.role, spec.job, self.incarnation, identity=spec.identity, patience=patience)",
        "return TcpEndpoint(self.role, spec.job, self.incarnation, insecure=True)",
        (ON_THE_WIRE, TLS_TESTS + "test_a_job_beyond_loopback_is_encrypted_unasked"), seconds=15),
    Mutant("tls-1-2-will-do", TLS, "transport/secure.py",
        "tls.minimum_version = ssl.TLSVersion.TLSv1_3", "tls.minimum_version = ssl.TLSVersion.TLSv1_2",
        (TLS_TESTS + "test_a_role_of_the_job_that_speaks_tls_1_2_only_is_refused",)),
    Mutant("nobody-needs-a-certificate", TLS, "transport/secure.py",
        "tls.verify_mode = ssl.CERT_REQUIRED",
        "tls.verify_mode = ssl.CERT_OPTIONAL if purpose == ssl.PROTOCOL_TLS_SERVER else ssl.CERT_REQUIRED",
        (TLS_TESTS + "test_who_cannot_prove_his_role_is_refused[no certificate]",)),
    Mutant("whoever-answers-is-the-role-that-was-called", TLS, "transport/tls.py",
        "if connection.peer != role:", "if not connection.peer:",
        (TLS_TESTS + "test_who_opens_a_link_is_not_fooled_by_another_role_or_another_authority",)),
    Mutant("one-loopback-address-of-two-will-do", TLS, "places/processes/options.py",
        "return self.tls or not (is_loopback(host_and_port(self.bound)[0]) and is_loopback(self.advertised))",
        "return self.tls or not (is_loopback(host_and_port(self.bound)[0]) or is_loopback(self.advertised))",
        ("tests/core/test_cli.py::test_links_are_encrypted_wherever_others_could_read_them",)),
    Mutant("a-ticket-that-stays", KEYS, "places/join/join_server.py",
        "        self.path.unlink(missing_ok=True)\n", "",
        (JOIN_SERVER + "test_the_ticket_is_its_owners_only_and_goes_with_the_server", HIDDEN), seconds=10),
    Mutant("a-stranger-may-take-10-s", STRANGERS, "transport/link.py",
        "HELLO_SECONDS = 5.0", "HELLO_SECONDS = 10.0",
        (
            LINKS + "test_silent_strangers_are_dropped_after_5_s_and_when_there_are_more_than_64",
            TLS_TESTS + "test_who_stays_silent_in_his_handshake_is_dropped_in_time",
            TLS_TESTS + "test_a_handshake_that_trickles_gains_no_time",
        ), seconds=10),
    Mutant("who-has-spoken-is-dropped-unheard", STRANGERS, "transport/sockets.py",
        "                self._read(oldest)  # the peer's introduction may have arrived unread\n", "",
        (LINKS + "test_many_who_come_at_once_and_have_spoken_are_all_heard",), seconds=40),
    Mutant("there-may-be-65-strangers", STRANGERS, "transport/sockets.py",
        "if len(self._strangers) > STRANGERS_LIMIT:", "if len(self._strangers) > STRANGERS_LIMIT + 1:",
        (
            LINKS + "test_silent_strangers_are_dropped_after_5_s_and_when_there_are_more_than_64",
            TLS_TESTS + "test_of_strangers_in_their_handshakes_there_are_at_most_64",
        ), seconds=70),
    Mutant("a-join-server-serves-any-number-at-once", STRANGERS, "places/join/ticket.py",
        "[*self._visitors][: -self._crowd]", "[*self._visitors][:0]",
        (JOIN_SERVER + "test_of_more_than_may_be_served_at_once_who_has_taken_longest_goes",), seconds=15),
    Mutant(
        "a-ticket-has-the-jobs-strategy-imported", "nothing-unpickled", "places/join/join_server.py",
        "    if strategy == named or (strategy in STRATEGIES and not named):\n",
        "    if not named:\n        from distbelief.strategies import find\n\n        find(strategy)\n"
        "    if strategy == named or not named:\n",
        (
            JOIN + "test_a_guest_names_the_jobs_strategy_where_it_is_of_nobody_here",
            JOIN + "test_a_guest_names_a_strategy_from_outside_the_package_and_a_ticket_imports_nothing",
        ),
    ),
    Mutant("settings-have-a-strategy-imported-that-is-not-known", "nothing-unpickled", "core/settings.py",
        "not isinstance(name, str) or name not in _known:",
        'not isinstance(name, str) or (name not in _known and __import__(name.partition(":")[0])):',
        (
            "tests/core/test_wire.py::"
            "test_settings_of_a_strategy_that_is_not_known_here_are_the_peers_error_and_nothing_is_imported",
        )),
    Mutant("a-process-that-is-interrupted-just-ends-its-links", OWN, "places/join/own_process.py",
        "self.replica.leave()", "pass", (OWN_PROCESS + "test_a_cell_that_is_interrupted_leaves_the_job",),
    ),
    Mutant("a-process-plays-its-role-after-the-job", OWN, "places/join/own_process.py",
        "os.environ.pop(loop.PLAYED, None)", "pass",
        (OWN_PROCESS + "test_a_process_outlives_a_job_and_joins_another",),
    ),
    Mutant("any-role-of-the-job-may-ask-to-join", TICKET, "places/join/ticket.py",
        "if connection.peer != GUEST:", "if not connection.peer:",
        (
            JOIN_SERVER + "test_where_links_are_tls_a_secret_alone_lets_nobody_in[the certificate of a replica]",
            TLS_TESTS
            + "test_only_who_has_the_ticket_of_a_start_meets_its_first_process_and_nobody_who_says_to_be_that",
        )),
    Mutant("a-guest-that-was-refused-halts-the-group", "join-leave", "strategies/grouped/group_holders.py",
        "[] if self.group and {*self.group} == {*job.membership.everybody} else self.regroup(job)", "self.regroup(job)",
        ("tests/machines/test_forming.py::test_a_guest_that_is_refused_halts_nobody_when_its_link_is_closed",)),
    Mutant(
        "a-guest-whom-nobody-reaches-stays", "join-leave", "strategies/grouped/group_holders.py",
        "if self.barren < BARREN_WITH_GUESTS:", "if self.barren <= BARREN:",
        (
            "tests/machines/test_forming.py::test_guests_whom_the_others_do_not_reach_are_sent_away_and_nobody_else_ever_is",
        ),
    ),
    Mutant(
        "a-guest-that-is-asked-to-leave-just-ends", "join-leave", "places/supervisor.py",
        "        elif self._guest and again:\n", "        elif self._guest:\n",
        (
            "tests/processes/test_join.py::test_a_guest_does_its_share_outlives_its_replica_and_leaves_when_it_is_asked_to",
        ), seconds=12,
    ),
    Mutant("a-lock-is-waited-for-ten-minutes", LOCK, "transport/shared.py",
        "LOCK_SECONDS = 60.0", "LOCK_SECONDS = 600.0",
        ("tests/processes/test_locks.py::test_who_waits_for_a_lock_gives_up_after_60_s_and_says_who_holds_it",)),
    Mutant("gradients-of-ddp-are-summed", HOOK, "integrations/hook.py",
        "        tensor.div_(self._ranks)  # before the sum, as DDP does: a sum of half floats could "
        "overflow\n", "",
        ("tests/processes/test_hook.py::test_two_ranks_have_the_mean_of_their_gradients",), seconds=15),
    Mutant("a-sparse-gradient-is-begun-as-any", HOOK, "integrations/hook.py",
        "if tensor.layout is not torch.strided:", "if False:",
        ("tests/processes/test_hook.py::test_a_sparse_gradient_is_named_at_once_and_no_rank_is_said_to_be_gone",)),
    Mutant("each-rank-adds-its-own-gradient-first", HOOK, "fabric/memory.py",
        "        total = chunk.total[chunk.mine]\n",
        "        parts = parts[self._rank :] + parts[: self._rank]\n        total = chunk.total[chunk.mine]\n",
        ("tests/processes/test_window.py::test_all_ranks_hold_the_sum_in_the_order_of_the_ranks",)),
    Mutant("nobody-looks-whether-a-rank-has-ended", HOOK, "fabric/memory.py",
        "for descriptor, _ in self._poll.poll(0):", "for descriptor, _ in []:",
        ("tests/processes/test_window.py::test_a_process_that_has_ended_is_seen",), seconds=8),
    Mutant("chunks-are-sent-without-room-for-them", "role-link-memory", "fabric/role_links.py",
        "return bool(self.waiting) and self.waiting[0][0].number < self.acknowledged + CHUNKS",
        "return bool(self.waiting)",
        (ENCRYPTED_TESTS + "test_a_rank_that_is_late_is_sent_no_more_than_a_window",), seconds=20),
    Mutant("chunks-of-a-group-that-broke-up-are-taken-in-the-next", "group-chunks", "fabric/role_links.py",
        "self.arrived = deque(chunk for chunk in self.arrived if chunk[0].group >= group)",
        "self.arrived = deque(self.arrived)",
        (ENCRYPTED_TESTS + "test_what_is_on_its_way_in_a_group_is_in_no_sum_of_the_next",), hangs=True),
    Mutant("chunks-of-a-group-to-come-are-dropped", "group-chunks", "fabric/role_links.py",
        "if chunk[0].group >= group)", "if chunk[0].group > group)",
        (ENCRYPTED_TESTS + "test_what_comes_for_a_group_before_this_rank_is_in_it_is_kept",), seconds=20),
    Mutant("what-leaves-over-links-is-written-over", ENCRYPTED, "fabric/role_links.py",
        "(leaves.clone() if swaps else leaves).split(most)", "leaves.split(most)",
        (ENCRYPTED_TESTS + "test_role_links_are_a_fabric",), seconds=60),
    Mutant("a-round-over-links-ends-before-others-have-taken-what-was-sent", ENCRYPTED, "fabric/role_links.py",
        "        if bucket == len(self._buckets) - 1:\n            self._links.settle()\n", "",
        (ENCRYPTED_TESTS + "test_a_round_ends_when_the_others_have_taken_all_that_was_sent",), seconds=20),
    Mutant("a-link-that-is-gone-is-waited-for", "role-link-waits", "fabric/role_links.py",
        "        if self._lost:\n            raise RuntimeError(self._lost)\n", "",
        (ENCRYPTED_TESTS + "test_a_peer_that_closes_its_links_ends_the_wait_with_its_name",), hangs=True),
    Mutant("a-meeting-over-links-hears-of-nothing", "role-link-waits", "fabric/role_links.py",
        "            if interrupted():\n                return False\n", "",
        (ENCRYPTED_TESTS + "test_a_meeting_ends_as_soon_as_another_group_is_named",), hangs=True),
    Mutant("gloo-in-the-place-of-encrypted-links", ENCRYPTED, "strategies/grouped/players.py",
        "if options.algorithm in PLACED and not stage.encrypted:", "if options.algorithm in PLACED:",
        (ENCRYPTED_TESTS + "test_a_job_whose_links_are_encrypted_has_no_process_group",), seconds=20),
    Mutant("any-user-of-the-machine-is-let-in", USERS, "transport/secure.py",
        "    if uid != os.getuid():", "    if uid < 0:",
        (SECURE + "test_at_a_unix_socket_only_a_process_of_the_same_user_is_let_in",)),
    Mutant("a-link-of-another-user-is-taken", USERS, "transport/shared.py",
        "-> socket.socket:\n        check_user(connection)\n", "-> socket.socket:\n",
        (OTHER_USER,)),
    Mutant("a-status-that-another-user-tells-is-believed", USERS, "places/status.py",
        "            check_user(connection)\n", "",
        (OTHER_STATUS,)),
    Mutant("a-guest-of-another-user-is-asked-to-leave", USERS, "places/join/guest.py",
        "            check_user(asking)\n", "",
        (OTHER_LEAVES,)),
    Mutant(
        "what-else-a-peer-hands-over-is-kept", HELLO, "transport/shared.py",
        "            if len(link.fds) != 1:", "            if not link.fds:",
        (
            "tests/processes/test_shared.py::test_shared_memory_that_is_not_there_or_can_shrink_or_is_more_than_one_is_refused",
        ),
    ),
    Mutant("a-vector-may-begin-anywhere", HELLO, "transport/link.py",
        "        and 0 <= message.start <= VECTOR_LIMIT\n", "",
        (SECURE + "test_who_may_not_link_is_refused_with_the_reason",)),
    Mutant("clocks-of-two-machines-have-to-agree", "tls", "places/join/authority.py",
        "_SKEW = timedelta(days=1)", "_SKEW = timedelta(seconds=1)",
        (CLOCKS,)),
    Mutant("who-opens-a-link-believes-any-certificate", TLS, "transport/secure.py",
        "tls.verify_mode = ssl.CERT_REQUIRED",
        "tls.verify_mode = ssl.CERT_REQUIRED if purpose == ssl.PROTOCOL_TLS_SERVER else ssl.CERT_NONE",
        (SECURE + "test_neither_end_believes_a_certificate_that_is_not_of_the_jobs_authority",)),
    Mutant("the-ticket-of-another-job-will-do", TICKET, "places/join/join_server.py",
        " and request.job == self.ticket.job", "",
        (JOIN_SERVER + "test_who_has_the_ticket_is_let_in_and_who_guesses_or_is_of_another_job_is_not",)),
    Mutant("a-guest-of-any-version-is-let-in", TICKET, "places/join/join_server.py",
        "same, theirs = request.version == ticket.VERSION,", "same, theirs = True,",
        (JOIN_SERVER + "test_who_runs_another_version_is_not_let_in",)),
    Mutant("a-guest-tells-its-ticket-to-any-role", TICKET, "places/join/ticket.py",
        "if connection.peer != roles.SUPERVISOR:", "if not connection.peer:",
        (
            JOIN_SERVER + "test_a_guest_gives_its_ticket_to_nobody_but_the_gate_of_its_job",
            TLS_TESTS
            + "test_only_who_has_the_ticket_of_a_start_meets_its_first_process_and_nobody_who_says_to_be_that",
        )),
    Mutant("guests-are-given-parts-without-end", TICKET, "places/join/join_server.py",
        "min(MOST, replicas + most)", "MOST",
        (PARTS,)),
    Mutant("a-word-to-a-join-server-has-no-limit", TICKET, "places/join/ticket.py",
        "    if length > limit:", "    if length < 0:",
        (JOIN_SERVER + "test_no_word_is_longer_than_its_limit",)),
]  # fmt: skip
