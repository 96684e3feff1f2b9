"""Mutants of what carries messages: links, TCP, TLS, shared memory, the virtual network, and what they let in."""

from mutants import Mutant

ORDER = "Between two roles, messages arrive in order"
SILENCE = "A cut of the network that heals within 15 s"
HELD = "An endpoint's vectors are what its role holds of the flat vector"
GARBAGE = "Garbage on a link costs that link only"
TLS = "Between machines every link is TLS 1.3"
KEYS = "The job's keys are in memory only"
STRANGERS = "A slow or silent stranger is dropped after 5 s"
TICKET = "Who joins a job has shown its ticket"
IMPORTS = "Nothing that is sent or read has a module imported"
LOCK = "A lock whose holder dies is free at once"
CROSSES = "What crosses between partitions in shared memory"
PINNED, DEVICES = "What crosses from or to a CUDA device", "tests/machines/test_devices.py::"
HOOK = "A script with DDP and `comm_hook`"

TCP_TESTS = "tests/processes/test_tcp.py::"
SILENCES = (
    TCP_TESTS + "test_a_silence_of_30_s_is_a_death_or_one_8_times_as_long_as_those_that_ended_or_one_of_two_minutes"
)
TLS_TESTS = "tests/processes/test_tls.py::"
LINKS = "tests/processes/test_transports.py::"
CROSSING = "tests/core/test_crossings.py::"
VIRTUAL = "tests/machines/test_virtual.py::"
JOIN = "tests/processes/test_join.py::"
JOIN_SERVER = "tests/processes/test_join_server.py::"
ON_THE_WIRE = TLS_TESTS + "test_whatever_the_roles_of_a_job_say_to_each_other_is_tls_1_3_on_the_wire"
HIDDEN = TLS_TESTS + "test_keys_and_tickets_are_in_no_file_on_no_command_line_and_in_no_environment"

ENCRYPTED, ENCRYPTED_TESTS = "Gradients over encrypted links", "tests/processes/test_links.py::"
USERS = "At every Unix socket of a job"
HELLO = "A link begins with an introduction"
SECURE = "tests/core/test_secure.py::"
OTHER_USER = "tests/processes/test_shared.py::test_a_process_of_another_user_is_let_in_by_neither_end"
OTHER_STATUS = "tests/processes/test_status.py::test_nobody_but_the_same_user_asks_and_nobody_else_is_believed"
OTHER_LEAVES = JOIN + "test_only_the_same_user_has_a_guest_leave"
CLOCKS = SECURE + "test_a_certificate_holds_from_a_day_ahead_for_30_days"
PARTS = SECURE + "test_a_guest_is_given_a_replica_that_nobody_has_had_or_the_next_life_of_its_own"

MUTANTS = [
    Mutant(
        "what-crosses-is-written-over-while-it-is-read", CROSSES, "fabric/crossings.py",
        "self._reached(OWN * to, self._step - self._turns + 1)", "self._reached(OWN * to, self._step - self._turns)",
        (CROSSING + "test_what_was_taken_stays_until_the_step_after_the_next_begins",),
    ),
    Mutant(
        "what-crossed-a-step-ago-is-taken", CROSSES, "fabric/crossings.py",
        "self._reached(OWN * self._homes + at, self._step)", "self._reached(OWN * self._homes + at, self._step - 2)",
        (CROSSING + "test_nothing_is_taken_before_it_is_given_in_this_step",),
    ),
    Mutant(
        "who-sleeps-is-not-woken", CROSSES, "fabric/crossings.py",
        "        stamps[asleep] = 1\n", "        stamps[asleep] = 0\n",
        (CROSSING + "test_who_looks_in_vain_sleeps_and_is_woken_by_what_it_waits_for",),
    ),
    Mutant(
        "what-leaves-a-device-is-told-at-once", PINNED, "fabric/pinned.py",
        "self._cuda.wait(self._cuda.copy(to, tensor))", "self._cuda.copy(to, tensor)",
        (
            DEVICES + "test_what_leaves_a_device_is_told_when_it_is_there",
            DEVICES + "test_what_is_sent_next_leaves_what_is_read_alone",
            DEVICES + "test_a_split_model_on_devices_is_that_on_the_host",
        ),
    ),
    Mutant(
        "a-slot-is-free-before-it-was-read", PINNED, "fabric/crossings.py",
        "            self._copies.settle()\n", "            assert self._copies.settle\n",
        (DEVICES + "test_a_slot_is_free_when_it_was_read",),
    ),
    Mutant(
        "what-arrives-is-written-over-what-is-read", PINNED, "fabric/pinned.py",
        "self.settle()  # the one before may still be read", "assert self.settle",
        (
            DEVICES + "test_what_is_sent_next_leaves_what_is_read_alone",
            DEVICES + "test_a_split_model_on_devices_is_that_on_the_host[sum-sent]",
        ),
    ),
    Mutant(
        "memory-stays-registered", PINNED, "fabric/pinned.py",
        "        weakref.finalize(owner, cuda.unregister, memory)\n", "        assert weakref.finalize\n",
        (DEVICES + "test_memory_is_registered_until_who_uses_it_is_gone",),
    ),
    Mutant(
        "an-error-of-cuda-is-left-for-the-next", PINNED, "fabric/pinned.py",
        "                torch.ones(1, device=self.device)\n", "                pass\n",
        (DEVICES + "test_cuda_is_asked_for_what_it_has[712]",),
    ),
    Mutant(
        "a-partition-registers-what-is-of-others", PINNED, "strategies/context.py",
        "part.copies.pin(memory)", "part.copies.pin(self.crossings(self.settings.replicas * length))",
        (DEVICES + "test_a_partition_registers_its_own_part_of_what_is_shared",),
    ),
    Mutant(
        "the-last-message-leaves-first", ORDER, "transport/sockets.py",
        "        else:\n            queue.append(frame)", "        else:\n            queue.appendleft(frame)",
        (LINKS + "test_messages_sent_between_two_polls_leave_in_one_piece", LINKS + "test_conformance"),
    ),
    Mutant(
        "a-late-message-is-overtaken", ORDER, "transport/virtual.py",
        "link.last = arrives = arrives if arrives > last else last", "link.last = arrives",
        (
            VIRTUAL + "test_conformance",
            VIRTUAL + "test_whatever_the_network_does_a_link_keeps_its_order_and_loses_nothing",
        ),
    ),
    Mutant(
        "a-cut-does-not-hold-up-what-it-meets", SILENCE, "transport/virtual.py",
        "began, arrives = stop, max(arrives, stop + takes)", "began, arrives = stop, max(arrives, stop)",
        (VIRTUAL + "test_what_a_partition_meets_arrives_once_it_heals_in_order_and_what_it_does_not_at_its_time",),
    ),
    Mutant(
        "what-is-sent-during-a-cut-passes", SILENCE, "transport/virtual.py",
        "if began < stop and arrives >= start and", "if began < start and arrives >= start and",
        (
            VIRTUAL + "test_what_is_sent_during_a_partition_waits_though_nothing_was_under_way_before_it",
            "tests/simulated/test_knobs.py::test_a_job_waits_for_a_partition_to_heal_and_trains_every_sample_once",
        ),
    ),
    Mutant(
        "a-silence-of-20-s-is-a-death", SILENCE, "transport/pulse.py",
        "LEAST_SECONDS = 30.0", "LEAST_SECONDS = 20.0",
        (SILENCES + "[(29.5,)-True]",),
    ),
    Mutant(
        "a-silence-of-40-s-is-none", SILENCE, "transport/pulse.py",
        "LEAST_SECONDS = 30.0", "LEAST_SECONDS = 40.0",
        (SILENCES + "[(30.5,)-False]",),
    ),
    Mutant(
        "only-the-last-silence-is-remembered", SILENCE, "transport/pulse.py",
        "self._longest = max(self._longest, self._last)", "self._longest = self._last",
        (SILENCES + "[(9.0, 0.1, 5.0, 0.1, 71.0)-True]",),
    ),
    Mutant(
        "nine-times-the-longest-silence-is-borne", SILENCE, "transport/pulse.py",
        "FACTOR = 8.0", "FACTOR = 9.0",
        (SILENCES + "[(9.0, 0.1, 73.0)-False]",),
    ),
    Mutant(
        "a-silence-has-no-end", SILENCE, "transport/pulse.py",
        "return min(self._most, max(LEAST_SECONDS, FACTOR * self._longest))",
        "return max(LEAST_SECONDS, FACTOR * self._longest)",
        (SILENCES + "[(29.0, 0.1, 121.0)-False]",),
    ),
    Mutant(
        "kernels-do-not-look", SILENCE, "transport/tcp.py",
        "connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)",
        "connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)",
        (TCP_TESTS + "test_the_kernels_of_both_ends_look_every_second_and_bear_no_more_than_two_minutes",),
    ),
    Mutant(
        "kernels-bear-more-than-two-minutes", SILENCE, "transport/tcp.py",
        "SILENCE_SECONDS = 120.0", "SILENCE_SECONDS = 180.0",
        (
            TCP_TESTS + "test_the_kernels_of_both_ends_look_every_second_and_bear_no_more_than_two_minutes",
            SILENCES + "[(29.0, 0.1, 121.0)-False]",
        ),
    ),
    Mutant(
        "garbage-ends-the-endpoint", GARBAGE, "transport/sockets.py",
        "        except RemoteProtocolError as error:\n            self._lose(link, str(error))\n        if room is "
        "None",
        "        except RemoteProtocolError as error:\n            self._lose(link, str(error))\n            "
        "self.close()\n        if room is None",
        (LINKS + "test_garbage_costs_the_link_it_came_on_and_no_other",), seconds=10,
    ),
    Mutant(
        "a-fetch-beyond-the-vector-is-taken", GARBAGE, "transport/sockets.py",
        "                if wrong := outside(message, link.hello.parameters, link.held):\n                    "
        "raise RemoteProtocolError(wrong)",
        "                pass",
        (LINKS + "test_a_range_beyond_the_vectors_that_a_peer_lends_costs_its_link[a fetch past the end]",),
    ),
    Mutant(
        "every-arena-begins-where-the-vector-does", HELD, "transport/base.py",
        "        start = self.held.start\n", "        start = 0\n",
        ("tests/machines/test_inline.py::test_conformance",),
    ),
    Mutant(
        "a-range-that-begins-after-its-end-is-taken", GARBAGE, "transport/base.py",
        "held.start <= message.start <= message.stop <= held.stop",
        "held.start <= message.start and message.stop <= held.stop",
        (LINKS + "test_a_range_beyond_the_vectors_that_a_peer_lends_costs_its_link[a push that begins after its end]",),
    ),
    Mutant(
        "a-length-has-no-limit", GARBAGE, "core/wire.py",
        "    if size > MESSAGE_LIMIT:", "    if size > MESSAGE_LIMIT << 4:",
        ("tests/core/test_wire.py::test_another_version_and_an_oversized_message_are_refused",),
    ),
    Mutant(
        "a-body-that-is-no-text-ends-who-reads-it", GARBAGE, "core/wire.py",
        "except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:",
        "except (msgspec.MsgspecError, RecursionError) as error:",
        ("tests/core/test_wire.py::test_a_body_that_is_no_message_is_refused",),
    ),
    Mutant(
        "tcp-in-the-place-of-tls", TLS, "places/processes/process.py",
        "return TlsEndpoint(self.role, spec.job, self.incarnation, identity=spec.identity)",
        "return TcpEndpoint(self.role, spec.job, self.incarnation, insecure=True)",
        (ON_THE_WIRE, TLS_TESTS + "test_a_job_beyond_loopback_is_encrypted_unasked"), seconds=15,
    ),
    Mutant(
        "tls-1-2-will-do", TLS, "transport/secure.py",
        "made.minimum_version = ssl.TLSVersion.TLSv1_3", "made.minimum_version = ssl.TLSVersion.TLSv1_2",
        (TLS_TESTS + "test_a_role_of_the_job_that_speaks_tls_1_2_only_is_refused",),
    ),
    Mutant(
        "nobody-needs-a-certificate", TLS, "transport/secure.py",
        "made.verify_mode = ssl.CERT_REQUIRED",
        "made.verify_mode = ssl.CERT_OPTIONAL if purpose == ssl.PROTOCOL_TLS_SERVER else ssl.CERT_REQUIRED",
        (TLS_TESTS + "test_who_cannot_prove_his_role_is_refused[no certificate]",),
    ),
    Mutant(
        "a-certificate-of-another-role-will-do", TLS, "transport/tls.py",
        "if isinstance(message, Hello) and message.role != link.socket.peer:",
        "if isinstance(message, Hello) and not link.socket.peer:",
        (TLS_TESTS + "test_who_cannot_prove_his_role_is_refused",), seconds=10,
    ),
    Mutant(
        "whoever-answers-is-the-role-that-was-called", TLS, "transport/tls.py",
        "if connection.peer != role:", "if not connection.peer:",
        (TLS_TESTS + "test_who_opens_a_link_is_not_fooled_by_another_role_or_another_authority",),
    ),
    Mutant(
        "one-loopback-address-of-two-will-do", TLS, "places/processes/options.py",
        "return self.tls or not (is_loopback(host_and_port(self.bound)[0]) and is_loopback(self.advertised))",
        "return self.tls or not (is_loopback(host_and_port(self.bound)[0]) or is_loopback(self.advertised))",
        ("tests/core/test_cli.py::test_links_are_encrypted_wherever_others_could_read_them",),
    ),
    Mutant(
        "keys-go-through-a-file", KEYS, "transport/secure.py",
        'secret = os.memfd_create("distbelief identity", os.MFD_CLOEXEC)',
        'secret = os.open(f"{os.getcwd()}/identity-{os.getpid()}.pem", os.O_RDWR | os.O_CREAT, 0o600)',
        (HIDDEN,), seconds=10,
    ),
    Mutant(
        "a-process-shows-its-key-in-its-title", KEYS, "places/processes/process.py",
        "_open(role, msgspec.msgpack.decode(spec, type=Opening))",
        """_open(f"{role} {msgspec.msgpack.decode(spec)['identity']}", msgspec.msgpack.decode(spec, type=Opening))""",
        (HIDDEN,), seconds=10,
    ),
    Mutant(
        "a-ticket-that-others-may-read", KEYS, "places/join/join_server.py",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600", "os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644",
        (JOIN_SERVER + "test_the_ticket_is_its_owners_only_and_goes_with_the_server",),
    ),
    Mutant(
        "a-ticket-that-stays", KEYS, "places/join/join_server.py",
        "        self.path.unlink(missing_ok=True)\n", "",
        (JOIN_SERVER + "test_the_ticket_is_its_owners_only_and_goes_with_the_server", HIDDEN), seconds=10,
    ),
    Mutant(
        "a-stranger-may-take-10-s", STRANGERS, "transport/link.py",
        "HELLO_SECONDS = 5.0", "HELLO_SECONDS = 10.0",
        (
            LINKS + "test_silent_strangers_are_dropped_after_5_s_and_when_there_are_more_than_64",
            TLS_TESTS + "test_who_stays_silent_in_his_handshake_is_dropped_in_time",
            TLS_TESTS + "test_a_handshake_that_trickles_gains_no_time",
        ), seconds=10,
    ),
    Mutant(
        "who-has-spoken-is-dropped-unheard", STRANGERS, "transport/sockets.py",
        "                self._read(oldest)  # he may have spoken, and not have been heard yet\n", "",
        (LINKS + "test_many_who_come_at_once_and_have_spoken_are_all_heard",), seconds=40,
    ),
    Mutant(
        "there-may-be-65-strangers", STRANGERS, "transport/sockets.py",
        "if len(self._strangers) > STRANGERS_LIMIT:", "if len(self._strangers) > STRANGERS_LIMIT + 1:",
        (
            LINKS + "test_silent_strangers_are_dropped_after_5_s_and_when_there_are_more_than_64",
            TLS_TESTS + "test_of_strangers_in_their_handshakes_there_are_at_most_64",
        ), seconds=70,
    ),
    Mutant(
        "a-join-server-serves-any-number-at-once", STRANGERS, "places/join/join_server.py",
        "[*self._visitors][:-CROWD]", "[*self._visitors][:0]",
        (JOIN_SERVER + "test_of_more_than_may_be_served_at_once_who_has_taken_longest_goes",), seconds=15,
    ),
    Mutant(
        "a-ticket-has-the-jobs-strategy-imported", IMPORTS, "places/join/join_server.py",
        "    if strategy == named or (strategy in STRATEGIES and not named):\n",
        "    if not named:\n        from distbelief.strategies import find\n\n        find(strategy)\n"
        "    if strategy == named or not named:\n",
        (
            JOIN + "test_a_guest_names_the_jobs_strategy_where_it_is_of_nobody_here",
            JOIN + "test_a_guest_names_a_strategy_from_outside_the_package_and_a_ticket_imports_nothing",
        ),
    ),
    Mutant(
        "settings-have-a-strategy-imported-that-is-not-known", IMPORTS, "core/settings.py",
        "if not isinstance(name, str) or name not in _known:",
        'if not isinstance(name, str) or (name not in _known and __import__(name.partition(":")[0])):',
        (
            "tests/core/test_wire.py::"
            "test_settings_of_a_strategy_that_is_not_known_here_are_the_peers_error_and_nothing_is_imported",
        ),
    ),
    Mutant(
        "any-secret-lets-a-guest-in", TICKET, "places/join/join_server.py",
        "hmac.compare_digest(request.secret.encode(), self.ticket.secret.encode())", "bool(request.secret)",
        (JOIN_SERVER + "test_who_has_the_ticket_is_let_in_and_who_guesses_or_is_of_another_job_is_not",),
    ),
    Mutant(
        "any-role-of-the-job-may-ask-to-join", TICKET, "places/join/join_server.py",
        "if connection.peer != GUEST:", "if not connection.peer:",
        (JOIN_SERVER + "test_where_links_are_tls_a_secret_alone_lets_nobody_in[the certificate of a replica]",),
    ),
    Mutant(
        "a-guest-that-was-refused-halts-the-group", TICKET, "strategies/grouped/coordinator.py",
        "if not member and role not in roles.leads(self.settings.mesh):", "if False:",
        ("tests/machines/test_forming.py::test_a_guest_that_is_refused_halts_nobody_when_its_link_is_closed",),
    ),
    Mutant(
        "a-guest-whom-nobody-reaches-stays", TICKET, "strategies/grouped/coordinator.py",
        "if self._barren >= BARREN_WITH_GUESTS else []", "if self._barren > BARREN else []",
        (
            "tests/machines/test_forming.py::test_guests_whom_the_others_do_not_reach_are_sent_away_and_nobody_else_ever_is",
        ),
    ),
    Mutant(
        "a-guest-that-is-asked-to-leave-just-ends", TICKET, "places/supervisor.py",
        "        elif self._guest and again:\n", "        elif self._guest:\n",
        (
            "tests/processes/test_join.py::test_a_guest_does_its_share_outlives_its_replica_and_leaves_when_it_is_asked_to",
        ), seconds=12,
    ),
    Mutant(
        "a-lock-is-waited-for-ten-minutes", LOCK, "transport/locks.py",
        "LOCK_SECONDS = 60.0", "LOCK_SECONDS = 600.0",
        ("tests/processes/test_locks.py::test_who_waits_for_a_lock_gives_up_after_60_s_and_says_who_holds_it",),
    ),
    Mutant(
        "gradients-of-ddp-are-summed", HOOK, "fabric/hook.py",
        "        tensor.div_(self.ranks)  # before they are added up, as DDP does: the sum of half floats could be "
        "too large\n",
        "",
        ("tests/processes/test_hook.py::test_a_ring_of_two_ranks_gives_the_mean_of_their_gradients",), seconds=15,
    ),
    Mutant(
        "each-rank-adds-its-own-gradient-first", HOOK, "fabric/window.py",
        "parts = [*chunk.parts[: self._rank], own, *chunk.parts[self._rank + 1 :]]",
        "parts = [own, *chunk.parts[: self._rank], *chunk.parts[self._rank + 1 :]]",
        ("tests/processes/test_window.py::test_all_ranks_hold_the_sum_in_the_order_of_the_ranks",),
    ),
    Mutant(
        "nobody-looks-whether-a-rank-has-ended", HOOK, "fabric/window.py",
        "for descriptor, _ in self._poll.poll(0):", "for descriptor, _ in []:",
        ("tests/processes/test_window.py::test_a_process_that_has_ended_is_seen",), seconds=8,
    ),
    Mutant(
        "chunks-are-sent-without-room-for-them", ENCRYPTED, "fabric/link_lines.py",
        "return bool(self.waiting) and self.waiting[0][0].number < self.acknowledged + CHUNKS",
        "return bool(self.waiting)",
        (ENCRYPTED_TESTS + "test_a_rank_that_is_late_is_sent_no_more_than_a_window",), seconds=20,
    ),
    Mutant(
        "chunks-of-a-group-that-broke-up-are-taken-in-the-next", ENCRYPTED, "fabric/link_lines.py",
        "self.arrived = deque(one for one in self.arrived if one[0].group >= group)",
        "self.arrived = deque(self.arrived)",
        (ENCRYPTED_TESTS + "test_what_is_on_its_way_in_a_group_is_in_no_sum_of_the_next",), hangs=True,
    ),
    Mutant(
        "chunks-of-a-group-to-come-are-dropped", ENCRYPTED, "fabric/link_lines.py",
        "if one[0].group >= group)", "if one[0].group > group)",
        (ENCRYPTED_TESTS + "test_what_comes_for_a_group_before_this_rank_is_in_it_is_kept",), seconds=20,
    ),
    Mutant(
        "what-leaves-over-links-is-written-over", ENCRYPTED, "fabric/link_lines.py",
        "(leaves.clone() if swaps else leaves).split(most)", "leaves.split(most)",
        (ENCRYPTED_TESTS + "test_encrypted_links_are_a_fabric",), seconds=60,
    ),
    Mutant(
        "a-round-over-links-ends-before-others-have-taken-what-was-sent", ENCRYPTED, "fabric/links.py",
        "        if bucket == len(self._buckets) - 1:\n            self._lines.settle()\n", "",
        (ENCRYPTED_TESTS + "test_a_round_ends_when_the_others_have_taken_all_that_was_sent",), seconds=20,
    ),
    Mutant(
        "a-link-that-is-gone-is-waited-for", ENCRYPTED, "fabric/link_lines.py",
        "        if self._lost:\n            raise RuntimeError(self._lost)\n", "",
        (ENCRYPTED_TESTS + "test_a_peer_that_closes_its_links_ends_the_wait_with_its_name",), hangs=True,
    ),
    Mutant(
        "a-meeting-over-links-hears-of-nothing", ENCRYPTED, "fabric/links.py",
        "            if told():\n                return False\n", "",
        (ENCRYPTED_TESTS + "test_a_meeting_ends_as_soon_as_another_group_is_named",), hangs=True,
    ),
    Mutant(
        "gloo-in-the-place-of-encrypted-links", ENCRYPTED, "strategies/grouped/worker.py",
        "    if spec.identity:\n", "    if spec.identity and not spec.advertise:\n",
        (ENCRYPTED_TESTS + "test_a_job_whose_links_are_encrypted_has_no_process_group",), seconds=20,
    ),
    Mutant(
        "any-user-of-the-machine-is-let-in", USERS, "transport/secure.py",
        "    if uid != os.getuid():", "    if uid < 0:",
        (SECURE + "test_at_a_unix_socket_only_a_process_of_the_same_user_is_let_in",),
    ),
    Mutant(
        "a-link-of-another-user-is-taken", USERS, "transport/shared.py",
        "        check_user(connection)\n        return connection", "        return connection",
        (OTHER_USER,),
    ),
    Mutant(
        "a-link-to-another-user-is-opened", USERS, "transport/shared.py",
        "            connection.connect(_name(address))\n            check_user(connection)\n",
        "            connection.connect(_name(address))\n",
        (OTHER_USER,), seconds=15,
    ),
    Mutant(
        "another-user-is-told-the-status", USERS, "places/status.py",
        "            check_user(client)\n", "            pass\n",
        (OTHER_STATUS,),
    ),
    Mutant(
        "a-status-that-another-user-tells-is-believed", USERS, "places/status.py",
        "            check_user(asked)\n", "",
        (OTHER_STATUS,),
    ),
    Mutant(
        "another-user-has-a-guest-leave", USERS, "places/join/guest.py",
        "            check_user(client)\n", "            pass\n",
        (OTHER_LEAVES,),
    ),
    Mutant(
        "a-guest-of-another-user-is-asked-to-leave", USERS, "places/join/guest.py",
        "            check_user(asking)\n", "",
        (OTHER_LEAVES,),
    ),
    Mutant(
        "what-else-a-peer-hands-over-is-kept", HELLO, "transport/shared.py",
        "            if len(link.fds) != 1:", "            if not link.fds:",
        (
            "tests/processes/test_shared.py::test_shared_memory_that_is_not_there_or_can_shrink_or_is_more_than_one_is_refused",
        ),
    ),
    Mutant(
        "a-link-of-another-job-is-taken", HELLO, "transport/link.py",
        "    if message.job != job:", "    if not message.job:",
        (SECURE + "test_who_may_not_link_is_refused_with_the_reason",),
    ),
    Mutant(
        "a-role-is-linked-to-itself", HELLO, "transport/link.py",
        "if not message.role or message.role == role or", "if not message.role or",
        (SECURE + "test_who_may_not_link_is_refused_with_the_reason",),
    ),
    Mutant(
        "a-link-that-looks-for-another-life-is-taken", HELLO, "transport/link.py",
        "    if message.peer not in (-1, incarnation):", "    if message.peer > incarnation:",
        (SECURE + "test_who_may_not_link_is_refused_with_the_reason",),
    ),
    Mutant(
        "a-vector-may-begin-anywhere", HELLO, "transport/link.py",
        "        and 0 <= message.start <= VECTOR_LIMIT\n", "",
        (SECURE + "test_who_may_not_link_is_refused_with_the_reason",),
    ),
    Mutant(
        "a-peer-may-lend-any-number-of-slots", HELLO, "transport/link.py",
        "        and 0 <= message.parameters <= SLOTS_LIMIT\n", "",
        (SECURE + "test_who_may_not_link_is_refused_with_the_reason",),
    ),
    Mutant(
        "the-same-life-may-link-again", HELLO, "transport/link.py",
        "message.incarnation <= old.hello.incarnation", "message.incarnation < old.hello.incarnation",
        (SECURE + "test_who_may_not_link_is_refused_with_the_reason",),
    ),
    Mutant(
        "a-link-that-was-opened-here-is-replaced", HELLO, "transport/link.py",
        "(old.hello.incarnation < 0 or message.incarnation <= old.hello.incarnation)",
        "message.incarnation <= old.hello.incarnation",
        (SECURE + "test_who_may_not_link_is_refused_with_the_reason",),
    ),
    Mutant(
        "certificates-hold-for-years", TLS, "places/join/authority.py",
        "LIFETIME = timedelta(days=30)", "LIFETIME = timedelta(days=3000)",
        (CLOCKS,),
    ),
    Mutant(
        "clocks-of-two-machines-have-to-agree", TLS, "places/join/authority.py",
        "_SKEW = timedelta(days=1)", "_SKEW = timedelta(seconds=1)",
        (CLOCKS,),
    ),
    Mutant(
        "who-opens-a-link-believes-any-certificate", TLS, "transport/secure.py",
        "made.verify_mode = ssl.CERT_REQUIRED",
        "made.verify_mode = ssl.CERT_REQUIRED if purpose == ssl.PROTOCOL_TLS_SERVER else ssl.CERT_NONE",
        (SECURE + "test_neither_end_believes_a_certificate_that_is_not_of_the_jobs_authority",),
    ),
    Mutant(
        "the-ticket-of-another-job-will-do", TICKET, "places/join/join_server.py",
        "\n                and request.job == self.ticket.job", "",
        (JOIN_SERVER + "test_who_has_the_ticket_is_let_in_and_who_guesses_or_is_of_another_job_is_not",),
    ),
    Mutant(
        "a-guest-of-any-version-is-let-in", TICKET, "places/join/join_server.py",
        "same, theirs = request.version == VERSION,", "same, theirs = True,",
        (JOIN_SERVER + "test_who_runs_another_version_is_not_let_in",),
    ),
    Mutant(
        "a-guest-tells-its-ticket-to-any-role", TICKET, "places/join/join_server.py",
        "if connection.peer != roles.SUPERVISOR:", "if not connection.peer:",
        (JOIN_SERVER + "test_a_guest_gives_its_ticket_to_nobody_but_the_gate_of_its_job",),
    ),
    Mutant(
        "a-guest-is-given-the-part-of-another", TICKET, "places/join/join_server.py",
        "if self._lives.get(request.role) != request.incarnation:", "if request.role not in self._lives:",
        (PARTS,),
    ),
    Mutant(
        "a-guest-has-one-life-more", TICKET, "places/join/join_server.py",
        "if request.incarnation >= self._restarts:", "if request.incarnation > self._restarts:",
        (PARTS,),
    ),
    Mutant(
        "guests-are-given-parts-without-end", TICKET, "places/join/join_server.py",
        "min(MOST, replicas + most)", "MOST",
        (PARTS,),
    ),
    Mutant(
        "a-word-to-a-join-server-has-no-limit", TICKET, "places/join/join_server.py",
        "    if length > limit:", "    if length < 0:",
        (JOIN_SERVER + "test_no_word_is_longer_than_its_limit",),
    ),
]  # fmt: skip
