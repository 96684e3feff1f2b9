"""Mutants of real processes: signals, deaths and what is left of them."""

from mutants import Mutant

LEFT = "No process, socket or shared-memory segment outlives a job"
LIVES = "A replica that dies is started anew"
PREDICTED = "What `predict` writes is what the model answers"

WHERE = "On several hosts an error of a role says"
LEAVES = "A host that is told to go leaves a job"
SHIPPED = "Data that are sent to hosts"
HOSTS = "tests/processes/test_hosts.py::"
SUPERVISOR = "tests/machines/test_supervisor.py::"
LAUNCHED = "The processes that srun, torchrun or mpirun has started"
AGAIN = (
    "tests/processes/test_launchers.py::"
    "test_a_start_that_ends_early_goes_on_from_its_newest_checkpoint_when_it_is_started_again"
)
SCRIPTS = "A script with its own schedule of the rate"
AFTER = "What a script does after its loop costs nobody the training"
LATE = "tests/processes/test_scripts.py::test_what_a_script_does_after_its_loop_costs_nobody_the_training"
PLACES = "On several hosts a replica, or each partition of a split one, takes a slot"
REACHED = "Each host is told by an address that all who have tried it reach"
PLACED = "tests/core/test_hosts.py::"

OWNED = "The model of a script is the script's"
OWN_TESTS, LAUNCH = "tests/machines/test_users_models.py::", "tests/processes/test_launch.py::"

MUTANTS = [
    Mutant(
        "an-error-of-a-role-says-not-where-it-was", WHERE, "places/cluster/host_processes.py",
        "host=host", 'host=""',
        ("tests/processes/test_hosts.py::test_an_error_of_a_role_says_on_which_host_it_was",), seconds=15,
    ),
    Mutant(
        "what-is-repeated-on-another-host-is-new", WHERE, "places/supervisor.py",
        "known.repeats(role, life.said.text)", "known.repeats(role, life.said.told)",
        (
            "tests/machines/test_supervisor.py::test_words_that_every_life_would_repeat_end_a_job_that_has_not_begun[hosts1]",
        ),
    ),
    Mutant(
        "a-partition-that-leaves-says-so-to-its-lead-alone", LEAVES, "strategies/grouped/replica.py",
        "            yield Send(roles.COORDINATOR, membership.Leave())", "            pass",
        (
            "tests/simulated/test_leaving.py::"
            "test_a_host_that_is_told_to_go_leaves_at_whichever_message_and_the_others_do_the_rest"
            "[split allreduce-in time]",
        ), 15,
    ),
    Mutant(
        "a-host-that-is-told-to-go-ends-the-job", LEAVES, "places/cluster/host_processes.py",
        "== network_identity() else self._leave_within", "== network_identity() else 0.0",
        ("tests/processes/test_hosts.py::test_a_host_that_is_told_to_go_leaves_and_the_job_goes_on",), seconds=30,
    ),
    Mutant(
        "a-host-that-leaves-has-for-ever", LEAVES, "places/supervisor.py",
        "if now >= life.leave_by and (self._guest or not self._ends):", "if False:",
        (f"{SUPERVISOR}test_what_a_host_has_not_finished_in_time_is_cut_short_and_is_no_death",),
    ),
    Mutant(
        "what-is-cut-short-is-not-told-of", LEAVES, "places/supervisor.py",
        "told = self._tell_of(Died(lead, why, life.incarnation, left=True))", "pass",
        (f"{SUPERVISOR}test_what_a_host_has_not_finished_in_time_is_cut_short_and_is_no_death",),
    ),
    Mutant(
        "shards-go-before-the-replicas-of-their-host", LEAVES, "places/supervisor.py",
        "if self._ends or any(roles.is_replica(life.role) for life in there):", "if self._ends:",
        (f"{SUPERVISOR}test_a_host_that_is_told_to_go_leaves_and_the_job_goes_on",),
    ),
    Mutant(
        "a-host-that-leaves-takes-its-shards-from-a-job-that-ends", LEAVES, "places/supervisor.py",
        "if self._ends or any(", "if any(",
        (f"{SUPERVISOR}test_what_serves_on_a_host_that_leaves_is_there_to_the_end_of_a_job_that_ends_first",),
    ),
    Mutant(
        "a-partition-leaves-alone", LEAVES, "places/supervisor.py",
        "*(Tell(lead, asked) for lead in sorted(leads)),", "*(Tell(role, asked) for role, _ in event.lives),",
        (f"{SUPERVISOR}test_the_partitions_of_a_replica_leave_together_whichever_of_their_hosts_goes",),
    ),
    Mutant(
        "the-last-host-leaves-too", LEAVES, "places/supervisor.py",
        "if life.name not in event.lives and not life.host]", "if life.name not in event.lives]",
        (f"{SUPERVISOR}test_without_a_host_that_cannot_be_spared_the_job_ends_in_peace",),
    ),
    Mutant(
        "a-standby-on-the-host-that-goes-is-there-for-its-shard", LEAVES, "places/supervisor.py",
        "mirrored = {roles.shard_of(life.role) for life in others if life.mirrors}",
        "mirrored = {roles.shard_of(life.role) for life in self._lives() if life.mirrors}",
        (f"{SUPERVISOR}test_neither_the_rest_of_a_replica_that_goes_nor_a_standby_on_the_same_host_spares_it",),
    ),
    Mutant(
        "the-rest-of-a-replica-that-goes-is-another", LEAVES, "places/supervisor.py",
        "roles.lead_of(one.role) not in leads for one in others", "one.role not in leads for one in others",
        (f"{SUPERVISOR}test_neither_the_rest_of_a_replica_that_goes_nor_a_standby_on_the_same_host_spares_it",),
    ),
    Mutant(
        "a-host-leaves-a-job-that-ends", LEAVES, "places/supervisor.py",
        "if not event.within or not self.started or self._ends:", "if not event.within or not self.started:",
        (f"{SUPERVISOR}test_without_a_host_that_cannot_be_spared_the_job_ends_in_peace",),
    ),
    Mutant(
        "the-agent-of-a-host-that-has-left-stays", LEAVES, "places/cluster/host_processes.py",
        "                agent.let_go()\n", "                pass\n",
        (
            "tests/processes/test_launchers.py::test_a_host_that_a_launcher_tells_to_go_leaves_and_its_process_ends_well",
        ), seconds=60,
    ),
    Mutant(
        "data-are-used-before-they-are-whole", SHIPPED, "places/cluster/shipping.py",
        "        if not self._missing:\n            self.folder = str(self._made)\n",
        "        self.folder = str(self._made)\n",
        (f"{HOSTS}test_part_of_the_data_is_never_used",),
    ),
    Mutant(
        "what-was-sent-is-not-looked-at", SHIPPED, "places/cluster/shipping.py",
        "        if not _has(self._made, file):", "        if False:",
        (f"{HOSTS}test_what_is_not_what_was_offered_is_never_used",),
    ),
    Mutant(
        "data-outlive-an-agent-that-is-killed", SHIPPED, "places/cluster/shipping.py",
        "'cat; rm -rf -- \"$1\"'", "'cat'",
        (f"{HOSTS}test_data_that_were_sent_go_with_an_agent_that_is_killed",), seconds=70,
    ),
    Mutant(
        "roles-read-where-the-command-does", SHIPPED, "places/cluster/agent.py",
        "data_dir=theirs.data_dir and (self._data.folder or theirs.data_dir),", "",
        (f"{HOSTS}test_data_are_sent_to_the_hosts_that_lack_them_and_go_with_the_job",), seconds=15,
    ),
    Mutant(
        "twice-as-many-data-are-sent", SHIPPED, "places/cluster/shipping.py",
        "SHIP_LIMIT = 256_000_000", "SHIP_LIMIT = 512_000_000",
        (PLACED + "test_no_more_than_256_mb_of_data_are_sent",),
    ),
    Mutant(
        "data-are-sent-however-large", SHIPPED, "places/cluster/shipping.py",
        "if size > SHIP_LIMIT or len(found) > MOST_FILES:", "if len(found) > MOST_FILES:",
        (f"{HOSTS}test_data_that_cannot_be_sent_are_told_of_before_the_job",),
    ),
    Mutant(
        "a-ticket-is-anybodys", LAUNCHED, "places/cluster/tickets.py",
        "if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:", "if found.st_uid != os.getuid():",
        ("tests/core/test_hosts.py::test_a_ticket_that_others_can_read_is_refused",),
    ),
    Mutant(
        "a-ticket-is-named-by-the-starts-of-one-host", LAUNCHED, "places/cluster/tickets.py",
        ".distbelief-{start.launcher}-{start.name}.ticket",
        ".distbelief-{start.launcher}-{start.name}-{start.restarts}.ticket",
        (f"{AGAIN}[restarts0]",), seconds=60,
    ),
    Mutant(
        "an-old-start-takes-the-ticket-of-a-new-one", LAUNCHED, "places/cluster/tickets.py",
        "if self.path.read_bytes() == self._sent:", "if self._sent:",
        ("tests/core/test_hosts.py::test_a_start_that_is_over_leaves_the_ticket_of_the_one_after_it",),
    ),
    Mutant(
        "who-counts-no-start-again-begins-anew", LAUNCHED, "places/cluster/tickets.py",
        "if restarts or (by and by == parent_process()) else None", "if restarts else None",
        (f"{AGAIN}[restarts1]",), seconds=200,
    ),
    Mutant(
        "what-another-host-counts-is-not-heard", LAUNCHED, "places/cluster/meeting.py",
        "self.restarts = max(self.restarts, attend.restarts)", "pass",
        (f"{AGAIN}[restarts0]",), seconds=200,
    ),
    Mutant(
        "a-command-goes-on-with-the-run-of-another", LAUNCHED, "places/cluster/tickets.py",
        "shlex.join(sys.orig_argv[1:])", '""',
        ("tests/core/test_hosts.py::test_a_start_goes_on_only_with_the_run_of_its_own_command",),
    ),
    Mutant(
        "what-a-launcher-tells-all-is-told-several-times", LAUNCHED, "places/supervisor.py",
        "again = any(event.host == one.host for one in self._interrupts)", "again = bool(self._interrupts)",
        ("tests/machines/test_supervisor.py::test_what_several_hosts_are_told_at_once_is_told_once",),
    ),
    Mutant(
        "the-rate-of-a-script-stays-behind", SCRIPTS, "server/shard.py",
        "here.rate(self.samples) * event.rate", "here.rate(self.samples)",
        ("tests/processes/test_scripts.py::test_a_loop_of_any_shape_trains_as_the_plain_one[a scheduler]",), seconds=10,
    ),
    Mutant(
        "what-is-accumulated-has-no-samples", SCRIPTS, "runtime/loop.py",
        "samples = self._samples if self._optimizers[0].has_gradient else 0", "samples = 0",
        ("tests/processes/test_scripts.py::test_a_loop_of_any_shape_trains_as_the_plain_one[accumulated]",), seconds=10,
    ),
    Mutant(
        "what-a-script-unfreezes-stays-as-it-is", SCRIPTS, "runtime/loop.py",
        "                if own in frozen:\n", "                if False:\n",
        ("tests/processes/test_launch.py::test_what_a_script_may_not_is_refused_by_what_it_calls_and_it_may_go_on",),
        seconds=10,
    ),
    Mutant(
        "what-a-script-changes-is-not-looked-at", SCRIPTS, "runtime/loop.py",
        "        if not before:\n", "        if True:\n",
        ("tests/processes/test_scripts.py::test_a_parameter_that_a_script_changes_in_place_is_named_once",), seconds=10,
    ),
    Mutant(
        "what-a-script-forks-outlives-its-replica", LEFT, "places/processes/settle.py",
        "    os.register_at_fork(after_in_child=lambda: _watch(os.pidfd_open(os.getppid()), *descriptors))\n", "",
        ("tests/processes/test_scripts.py::test_what_a_script_has_started_ends_with_its_replica",), seconds=15,
    ),
    Mutant(
        "what-a-script-starts-outlives-its-replica", LEFT, "places/processes/processes.py",
        "        os.killpg(child.pid, signal.SIGKILL)\n", "        pass\n",
        ("tests/processes/test_scripts.py::test_what_a_script_has_started_ends_with_its_replica[another program]",),
        seconds=15,
    ),
    Mutant(
        "an-error-after-the-loop-ends-the-job", AFTER, "runtime/loop.py",
        "        self.over = self._batch is None and (self._steps > 0 or self._handed[0] is None)\n",
        "        self.over = False\n",
        (f"{LATE}[raises]",), seconds=10,
    ),
    Mutant(
        "the-files-of-a-script-stay-unwritten", AFTER, "places/processes/process.py",
        "            end_main()\n", "            pass\n",
        ("tests/processes/test_scripts.py::test_a_script_ends_as_a_main_program_does",), seconds=10,
    ),
    Mutant(
        "who-ends-after-its-loop-begins-again", AFTER, "places/supervisor.py",
        "after = (self._script or life.host) and life.left and roles.is_replica(life.role)", "after = False",
        ("tests/machines/test_supervisor.py::test_what_a_script_raises_after_its_part_is_told_at_the_end",),
    ),
    Mutant(
        "an-import-may-swallow-a-ctrl-c", "A Ctrl-C at any moment of the command ends it", "cli/main.py",
        "    os._exit(INTERRUPTED)\n", "    raise KeyboardInterrupt\n",
        ("tests/processes/test_signals.py::test_no_import_swallows_a_ctrl_c[train digits downpour-torch]",), seconds=12,
    ),
    Mutant(
        "processes-of-a-job-take-sigterm", "A Ctrl-C at any moment of the command ends it",
        "places/processes/settle.py",
        "    signal.signal(signal.SIGTERM, leave)", "    signal.signal(signal.SIGTERM, signal.SIG_DFL)",
        (
            "tests/processes/test_cli.py::test_a_signal_to_all_processes_keeps_a_checkpoint_and_the_printed_command_goes_on[downpour-SIGTERM]",
        ), seconds=12,
    ),
    Mutant(
        "a-segment-stays-open", LEFT, "transport/shared.py",
        "            os.close(self._segment)\n", "",
        ("tests/processes/test_shared.py::test_a_push_from_outside_the_shared_memory_is_refused",),
    ),
    Mutant(
        "the-memory-of-a-job-stays-open", LEFT, "places/processes/running.py",
        "for descriptor in (*self._journal, *self._columns, self._memory, self._crossings):",
        "for descriptor in self._journal:",
        ("tests/processes/test_local.py::test_parameters_can_be_read_where_the_shards_hold_them",), seconds=10,
    ),
    Mutant(
        "a-folder-of-the-forkserver-stays", LEFT, "places/processes/forkserver.py",
        'tempfile.TemporaryDirectory(prefix="distbelief-", ignore_cleanup_errors=True) as folder:',
        'contextlib.nullcontext(tempfile.mkdtemp(prefix="distbelief-")) as folder:',
        ("tests/processes/test_local.py::test_a_job_leaves_what_the_house_promises",), seconds=10,
    ),
    Mutant(
        "who-is-left-at-the-end-is-not-killed", LEFT, "places/processes/running.py",
        "        finally:\n            self.close()\n",
        "        finally:\n            if supervisor.failure:\n                self.close()\n",
        ("tests/processes/test_deaths.py::test_an_error_of_the_supervisor_itself_leaves_nobody_behind",), seconds=20,
    ),
    Mutant(
        "processes-outlive-their-supervisor", LEFT, "places/processes/settle.py",
        "    _watch(*descriptors)\n", "",
        ("tests/processes/test_deaths.py::test_nobody_outlives_a_killed_supervisor[in an endless step]",), seconds=65,
    ),
    Mutant(
        "processes-watch-the-first-above-them-only", LEFT, "places/processes/settle.py",
        "    for descriptor in above:\n", "    for descriptor in above[:1]:\n",
        ("tests/processes/test_settle.py::test_a_process_ends_with_either_of_those_above_it[the forkserver]",),
    ),
    Mutant(
        "a-life-that-is-gone-begins-again", LIVES, "core/lives.py",
        "        if incarnation <= self.gone.get(role, -1):\n            raise",
        "        if incarnation < self.gone.get(role, -1):\n            raise",
        (
            "tests/machines/test_coordinator.py::test_the_next_life_of_a_dead_replica_takes_its_place_and_the_job_waits_for_it",
        ),
    ),
    Mutant(
        "a-replica-has-one-life-more", LIVES, "core/lives.py",
        "if not died or incarnation >= self._restarts:", "if not died or incarnation > self._restarts:",
        (
            "tests/machines/test_coordinator.py::test_the_next_life_of_a_dead_replica_takes_its_place_and_the_job_waits_for_it",
        ),
    ),
    Mutant(
        "the-death-of-a-former-life-ends-this-one", LIVES, "core/lives.py",
        "return incarnation >= self._here.get(role, 0)", "return True",
        ("tests/machines/test_coordinator.py::test_a_death_that_is_heard_of_once_the_next_life_is_there_is_not_its",),
    ),
    Mutant(
        "open-files-are-not-counted", "What this machine limits", "places/processes/requirements.py",
        "if resource.RLIM_INFINITY in (allowed, most) or needed <= allowed:",
        "if resource.RLIM_INFINITY in (allowed, most) or needed >= allowed:",
        (
            "tests/processes/test_limits.py::test_open_files_are_allowed_where_they_can_be_and_asked_for_otherwise[-n "
            "24-2]",
        ), seconds=12,
    ),
    Mutant(
        "a-life-repeats-the-error-of-the-last", "What this machine limits", "places/explanation.py",
        "return bool(said) and said == before", "return bool(said) and role == before",
        ("tests/processes/test_limits.py::test_an_error_that_the_next_life_would_repeat_is_not_waited_for",),
    ),
    Mutant(
        "the-metrics-of-a-lost-folder-are-lost", "A run folder that is deleted", "places/attempt.py",
        "        self.recorder.write_again()\n", "",
        ("tests/processes/test_local.py::test_a_run_folder_that_is_deleted_is_told_and_written_again[single-deleted]",),
    ),
    Mutant(
        "a-meeting-hears-of-nothing", "`allreduce --transport tcp`, by torch.distributed: whoever waits",
        "fabric/process_group.py",
        "if told() or time.monotonic() > give_up:", "if time.monotonic() > give_up:",
        ("tests/processes/test_allreduce.py::test_a_meeting_ends_as_soon_as_another_group_is_named",), hangs=True,
    ),
    Mutant(
        "links-of-a-group-open-for-an-hour", "`allreduce --transport tcp`, by torch.distributed: whoever waits",
        "fabric/process_group.py",
        "patience = timedelta(seconds=MEET_SECONDS)", "patience = timedelta(seconds=STEP_SECONDS)",
        ("tests/processes/test_allreduce.py::test_a_meeting_with_one_who_died_as_he_came_ends_within_seconds",),
        hangs=True,
    ),
    Mutant(
        "the-first-of-a-group-may-be-silent-for-ever",
        "`allreduce --transport tcp`, by torch.distributed: whoever waits", "fabric/process_group.py",
        "socket.create_connection((host, int(port)), MEET_SECONDS).close()",
        "socket.create_connection((host, int(port))).close()",
        ("tests/processes/test_allreduce.py::test_a_meeting_at_one_who_does_not_answer_ends_within_seconds",),
        hangs=True,
    ),
    Mutant(
        "a-group-looks-for-its-dead-first-member", "`allreduce --transport tcp`, by torch.distributed: whoever waits",
        "fabric/process_group.py",
        "            socket.create_connection((host, int(port)), MEET_SECONDS).close()\n", "",
        ("tests/processes/test_allreduce.py::test_a_meeting_at_one_who_is_dead_ends_at_once",),
    ),
    Mutant(
        "who-waits-for-a-link-is-said-to-wait-for-work",
        "`allreduce --transport tcp`, by torch.distributed: whoever waits", "strategies/grouped/replica.py",
        '            self._await(f"a link of group {self._group}", away)\n', "",
        (
            "tests/machines/test_forming.py::test_a_replica_says_whose_link_and_whose_parameters_it_waits_for_as_its_group_is_formed",
        ),
    ),
    Mutant(
        "a-portion-of-a-killed-process-is-not-dealt-again", PREDICTED, "places/prediction/dealing.py",
        "            self._left.appendleft(portion)", "            self.done += portion[1] - portion[0]",
        (
            "tests/processes/test_predict.py::test_a_process_that_is_killed_costs_what_it_was_computing_which_others_compute",
        ),
    ),
    Mutant(
        "outputs-are-written-where-the-portion-begins", PREDICTED, "places/prediction/worker.py",
        "HEADER_ROOM + int(numbers[0])", "HEADER_ROOM + whole.start",
        ("tests/processes/test_predict.py::test_outputs_are_the_mean_of_the_models_in_the_order_of_the_samples",),
    ),
    Mutant(
        "what-else-a-split-replica-had-is-forgotten", PREDICTED, "places/prediction/dealing.py",
        "        for portion in reversed(self._dealt.pop(replica, deque())):\n",
        "        for portion in [*self._dealt.pop(replica, deque())][:1]:\n",
        ("tests/core/test_sample_dealing.py::test_all_that_a_replica_had_is_dealt_again_in_order",),
    ),
    Mutant(
        "partitions-answer-as-in-training", PREDICTED, "places/prediction/split_model.py",
        "            layer.eval()\n", "            layer.train()\n",
        ("tests/processes/test_predict.py::test_partitions_answer_what_the_whole_models_answer",),
    ),
    Mutant(
        "a-piece-is-read-from-the-beginning", PREDICTED, "record/restore.py",
        "values.narrow(piece.dimension, piece.start, piece.stop - piece.start)",
        "values.narrow(piece.dimension, 0, piece.stop - piece.start)",
        ("tests/core/test_record_checkpoints.py::test_the_pieces_of_a_partition_are_read_alone",),
    ),
    Mutant(
        "a-partition-reads-the-whole-model", PREDICTED, "record/restore.py",
        "                if pieces is None:\n", "                if True:\n",
        ("tests/core/test_record_checkpoints.py::test_the_pieces_of_a_partition_are_read_alone",),
    ),
    Mutant(
        "a-standby-begins-on-its-shards-host", PLACES, "places/cluster/placement.py",
        "if at not in self._lost and at != shard] or [", "if at not in self._lost] or [",
        (PLACED + "test_a_standby_is_never_on_its_shards_host_where_there_is_another",),
    ),
    Mutant(
        "standbys-are-on-the-first-host-that-is-another", PLACES, "places/cluster/placement.py",
        "return next(at for at in there if self._servers[at] == least)", "return there[0] if least >= 0 else least",
        (
            PLACED + "test_a_standby_is_never_on_its_shards_host_where_there_is_another",
            PLACED + "test_the_document_shows_what_a_dry_run_of_its_command_shows",
        ),
    ),
    Mutant(
        "a-shard-begins-again-beside-its-standby", PLACES, "places/cluster/placement.py",
        "(one == twin, self._servers[one], one)", "(self._servers[one], one)",
        (PLACED + "test_a_standby_is_never_on_its_shards_host_where_there_is_another",),
    ),
    Mutant(
        "shards-begin-again-on-the-first-host", PLACES, "places/cluster/placement.py",
        "(one == twin, self._servers[one], one)", "(one == twin, one)",
        (PLACED + "test_shards_and_standbys_are_only_where_the_run_folder_is_seen_and_no_other_host_can_take_them",),
    ),
    Mutant(
        "shards-are-where-nobody-sees-the-run-folder", PLACES, "places/cluster/placement.py",
        "if site.keeps]", "if site.slots]",
        (
            PLACED + "test_shards_and_standbys_are_only_where_the_run_folder_is_seen_and_no_other_host_can_take_them",
            PLACED + "test_who_is_where_keeps_its_promises_whatever_host_is_lost",
        ),
    ),
    Mutant(
        "a-shard-begins-again-where-nobody-sees-the-run-folder", PLACES, "places/cluster/placement.py",
        "keepers = self._alive(self._keepers)\n            twin",
        "keepers = self._alive(range(len(self.sites)))\n            twin",
        (PLACED + "test_shards_and_standbys_are_only_where_the_run_folder_is_seen_and_no_other_host_can_take_them",),
    ),
    Mutant(
        "any-host-could-take-the-shards-of-another", PLACES, "places/cluster/placement.py",
        "return any(one != at for one in self._alive(self._keepers))",
        "return any(one != at for one in self._alive(range(len(self.sites))))",
        (PLACED + "test_shards_and_standbys_are_only_where_the_run_folder_is_seen_and_no_other_host_can_take_them",),
    ),
    Mutant(
        "who-has-no-shards-needs-the-run-folder-too", PLACES, "places/cluster/placement.py",
        "if servers and not self._keepers:", "if not self._keepers:",
        (PLACED + "test_shards_and_standbys_are_only_where_the_run_folder_is_seen_and_no_other_host_can_take_them",),
    ),
    Mutant(
        "nobody-says-that-a-standby-is-beside-its-shard", PLACES, "places/cluster/placement.py",
        'return [*told, *(f"{shard} {why}" for shard in self.beside)]',
        'return [*told, *(f"{shard} {why}" for shard in self.beside[1:])]',
        (PLACED + "test_shards_and_standbys_are_only_where_the_run_folder_is_seen_and_no_other_host_can_take_them",),
    ),
    Mutant(
        "one-replica-more-than-there-are-slots", PLACES, "places/cluster/placement.py",
        "if mesh.size > slots and not self._oversubscribe:", "if mesh.size > slots + 1 and not self._oversubscribe:",
        (PLACED + "test_more_replicas_than_slots_are_refused_but_where_that_is_asked_for",),
    ),
    Mutant(
        "a-split-replica-takes-one-slot", PLACES, "cli/options.py",
        "max(1, place.slots // partitions)", "max(1, place.slots)",
        (PLACED + "test_a_dry_run_shows_who_would_be_where_and_asks_nobody",),
    ),
    Mutant(
        "no-host-is-oversubscribed-though-that-is-asked-for", PLACES, "places/cluster/cluster.py",
        "servers, alone, oversubscribe=self.oversubscribe)", "servers, alone)",
        (PLACED + "test_a_dry_run_shows_who_would_be_where_and_asks_nobody",),
    ),
    Mutant(
        "an-allocation-of-one-node-is-several-hosts", PLACES, "places/cluster/slurm.py",
        'environment.get("SLURM_JOB_NUM_NODES", "1") != "1" and "SLURM_JOB_NODELIST" in environment',
        '"SLURM_JOB_NODELIST" in environment',
        (PLACED + "test_an_allocation_is_a_place_where_it_has_several_nodes_and_all_are_listed",),
    ),
    Mutant(
        "a-replica-begins-again-where-no-slot-is-left", PLACES, "places/cluster/placement.py",
        "if self._loads[at] < self.sites[at].slots]", "if self._loads[at] <= self.sites[at].slots]",
        (PLACED + "test_who_is_where_keeps_its_promises_whatever_host_is_lost",),
    ),
    Mutant(
        "partitions-begin-again-apart", PLACES, "places/cluster/placement.py",
        "key=lambda at: (at not in together, self._fullness(at), at)", "key=lambda at: (self._fullness(at), at)",
        (PLACED + "test_replicas_are_spread_by_slots_and_all_of_one_begins_again_together_where_most_are_left",),
    ),
    Mutant(
        "replicas-begin-again-on-the-first-host", PLACES, "places/cluster/placement.py",
        "key=lambda at: (at not in together, self._fullness(at), at)", "key=lambda at: (at not in together, at)",
        (PLACED + "test_replicas_are_spread_by_slots_and_all_of_one_begins_again_together_where_most_are_left",),
    ),
    Mutant(
        "the-first-host-is-filled-first", PLACES, "places/cluster/placement.py",
        "heapq.heappush(heap, (self._fullness(at, mesh.partitions), at))",
        "heapq.heappush(heap, (0.0 if loads[at] + mesh.partitions <= self.sites[at].slots else 2.0, at))",
        (PLACED + "test_replicas_are_spread_by_slots_and_all_of_one_begins_again_together_where_most_are_left",),
    ),
    Mutant(
        "the-coordinator-is-on-the-first-host", PLACES, "places/cluster/placement.py",
        "dict.fromkeys(alone, HOME)", "dict.fromkeys(alone, 0)",
        (PLACED + "test_who_is_where_keeps_its_promises_whatever_host_is_lost",),
    ),
    Mutant(
        "a-host-without-a-number-has-one-slot", PLACES, "places/cluster/cluster.py",
        "HostSlots(host.name, host.slots or own, greeting.keeps)",
        "HostSlots(host.name, host.slots or 1, greeting.keeps)",
        (PLACED + "test_a_host_without_a_number_has_as_many_slots_as_cores_or_gpus",),
    ),
    Mutant(
        "with-gpus-slots-are-cores", PLACES, "places/cluster/cluster.py",
        'own = greeting.gpus if job.device.startswith("cuda") else greeting.cores', "own = greeting.cores",
        (PLACED + "test_a_host_without_a_number_has_as_many_slots_as_cores_or_gpus",),
    ),
    Mutant(
        "every-host-is-said-to-see-the-run-folder", PLACES, "places/cluster/agent.py",
        "port, time.time(), os.path.exists(mark),", "port, time.time(), True,",
        (PLACED + "test_a_host_sees_the_run_folder_where_it_sees_a_file_there",),
    ),
    Mutant(
        "nodes-of-ray-that-are-dead-are-hosts", PLACES, "places/cluster/ray_cluster.py",
        'if node["Alive"] and (cores', "if (cores",
        (PLACED + "test_the_hosts_of_ray_are_the_nodes_that_have_processors",),
    ),
    Mutant(
        "an-address-that-one-has-reached-will-do", REACHED, "places/cluster/network.py",
        "if not any(said[number] for said in told.values()):", "if not all(said[number] for said in told.values()):",
        (PLACED + "test_the_address_that_all_others_reach_is_chosen",),
    ),
    Mutant(
        "loopback-is-told-to-other-machines", REACHED, "places/cluster/network.py",
        "return loopback[:1] if same and loopback else", "return loopback[:1] if loopback else",
        (PLACED + "test_the_address_that_all_others_reach_is_chosen",),
    ),
    Mutant(
        "of-many-hosts-one-tries-each", REACHED, "places/cluster/opening.py",
        "chosen = others if len(self.agents) <= ALL_PAIRS else others[:2]",
        "chosen = others if len(self.agents) <= ALL_PAIRS else others[:1]",
        (PLACED + "test_each_host_is_tried_by_all_others_or_of_more_than_16_by_two_and_by_this_one",),
    ),
    Mutant(
        "nobody-tries-to-reach-this-host", REACHED, "places/cluster/opening.py",
        "for name in (HERE, *chosen)", "for name in chosen",
        (PLACED + "test_each_host_is_tried_by_all_others_or_of_more_than_16_by_two_and_by_this_one",),
    ),
    Mutant(
        "hosts-of-any-version-take-part", REACHED, "places/cluster/opening.py",
        "            if agent.greeting.version != VERSION:", "            if not agent.greeting.version:",
        (PLACED + "test_no_host_of_another_version_takes_part",),
    ),
    Mutant(
        "a-ticket-of-another-user-is-read", LAUNCHED, "places/cluster/tickets.py",
        "if found.st_uid != os.getuid() or stat", "if stat",
        (PLACED + "test_a_ticket_that_is_not_its_readers_alone_is_refused",),
    ),
    Mutant(
        "a-ticket-is-left-where-others-can-read-it", LAUNCHED, "places/cluster/tickets.py",
        "            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:", "            if not ticket:",
        (PLACED + "test_a_ticket_is_written_for_its_owner_alone_or_not_at_all",),
    ),
    Mutant(
        "a-ticket-is-made-for-all-to-read", LAUNCHED, "places/cluster/tickets.py",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600", "os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644",
        (PLACED + "test_a_ticket_is_written_for_its_owner_alone_or_not_at_all",),
    ),
    Mutant(
        "several-starts-share-a-ticket", LAUNCHED, "places/cluster/tickets.py",
        ".distbelief-{start.launcher}-{start.name}.ticket", ".distbelief-{start.launcher}.ticket",
        (PLACED + "test_starts_are_told_apart_and_processes_of_one_are_not",),
    ),
    Mutant(
        "any-role-comes-to-a-meeting", LAUNCHED, "places/cluster/meeting.py",
        "        if far.peer == ATTENDANT:", "        if far.peer:",
        (
            "tests/processes/test_tls.py::test_only_who_has_the_ticket_of_a_start_meets_its_first_process_and_nobody_who_says_to_be_that",
        ),
    ),
    Mutant(
        "whoever-answers-is-the-first-process", LAUNCHED, "places/cluster/meeting.py",
        "if far.peer != roles.SUPERVISOR:", "if not far.peer:",
        (
            "tests/processes/test_tls.py::test_only_who_has_the_ticket_of_a_start_meets_its_first_process_and_nobody_who_says_to_be_that",
        ),
    ),
    Mutant(
        "processes-of-any-version-come", LAUNCHED, "places/cluster/meeting.py",
        "        if attend.version != VERSION:", "        if not attend.version:",
        (PLACED + "test_no_process_of_another_version_is_let_in",),
    ),
    Mutant(
        "one-start-runs-one-job-after-another", LAUNCHED, "places/cluster/meeting.py",
        "    if _HELD[start.name].is_over:", "    if _HELD[start.name] is None:",
        (PLACED + "test_one_start_runs_one_job",),
    ),
    Mutant(
        "each-process-of-a-host-is-its-agent", LAUNCHED, "places/cluster/meeting.py",
        "found.setdefault(one.attend.network, []).append((one.attend, one))",
        "found.setdefault(str(one.attend.rank), []).append((one.attend, one))",
        (PLACED + "test_one_process_of_each_host_is_its_agent_and_more_of_them_offer_no_more",),
    ),
    Mutant(
        "each-process-offers-its-slots-again", LAUNCHED, "places/cluster/meeting.py",
        "max(attend.cores for attend, _ in several)", "sum(attend.cores for attend, _ in several)",
        (PLACED + "test_one_process_of_each_host_is_its_agent_and_more_of_them_offer_no_more",),
    ),
    Mutant(
        "the-first-process-leaves-its-host-to-another", LAUNCHED, "places/cluster/meeting.py",
        "(each[1] is not None, each[0].local_rank)", "(each[1] is None, each[0].local_rank)",
        (PLACED + "test_the_first_process_is_of_the_first_host_and_starts_its_agent",),
    ),
    Mutant(
        "what-a-loop-fetches-takes-the-place-of-its-tensors", OWNED, "tasks/flat.py",
        "        if self.owned:\n            self._copy(", "        if before < 0:\n            self._copy(",
        (
            OWN_TESTS + "test_what_is_fetched_is_copied_into_tensors_that_stay_and_whatever_refers_to_them_follows",
            OWN_TESTS + "test_a_step_between_forward_and_backward_is_seen_by_autograd",
        ),
    ),
    Mutant(
        "what-a-group-adds-up-stays-in-its-vector", OWNED, "strategies/grouped/torch_whole.py",
        "factor, norms)\n        self.flat.swap(0)\n", "factor, norms)\n",
        (
            LAUNCH + "test_the_model_of_a_script_is_its_own_to_save_and_to_copy_and_its_buffers_may_be_assigned_anew"
            "[allreduce]",
        ), seconds=15,
    ),
    Mutant(
        "a-buffer-that-is-assigned-anew-is-pushed-as-it-was", OWNED, "tasks/flat.py",
        "self._tensors = self._names.tensors()", "self._names.tensors()",
        (OWN_TESTS + "test_buffers_are_pushed_as_the_module_has_them",),
    ),
    Mutant(
        "a-parameter-that-is-replaced-is-stepped-unseen", OWNED, "tasks/users_tensors.py",
        '(now is not before and one.kind != "buffer") or ', "",
        (OWN_TESTS + "test_a_model_that_is_made_another_is_refused_by_name[another parameter]",),
    ),
    Mutant(
        "a-tensor-of-another-dtype-is-not-seen", OWNED, "tasks/users_tensors.py",
        ' or str(tensor.dtype) != f"torch.{one.dtype}":', ":",
        (OWN_TESTS + "test_a_model_that_is_made_another_is_refused_by_name[another dtype]",),
    ),
    Mutant(
        "a-late-tensor-is-left-out-of-what-is-saved", OWNED, "tasks/users_tensors.py",
        "            if name not in self._given:", "            if not name:",
        (
            OWN_TESTS + "test_a_model_that_is_made_another_is_refused_by_name[a late buffer]",
            OWN_TESTS + "test_a_model_that_is_made_another_is_refused_by_name[a late layer]",
        ),
    ),
    Mutant(
        "the-history-of-a-gradient-grows", OWNED, "tasks/flat.py",
        "view.copy_(parameter.grad.detach())", "view.copy_(parameter.grad)",
        (OWN_TESTS + "test_a_gradient_is_pushed_without_what_it_was_made_of",),
    ),
    Mutant(
        "models-that-were-not-fetched-are-written", OWNED, "tasks/flat.py",
        "            if not parts or any(part.start", "            if True or any(part.start",
        (OWN_TESTS + "test_only_the_parts_that_have_come_are_copied",),
    ),
    Mutant(
        "an-option-that-a-script-changes-reaches-nobody", OWNED, "runtime/server_optimizer.py",
        "if group[name] != first:", "if group[name] is None:",
        (
            OWN_TESTS + "test_a_script_finds_the_options_of_the_jobs_optimizer_and_changes_none_but_the_rate",
            OWN_TESTS + "test_a_schedule_of_the_momentum_is_refused",
        ),
    ),
    Mutant(
        "a-state-that-is-loaded-reaches-nobody", OWNED, "runtime/server_optimizer.py",
        'if state_dict["state"]:', "if not state_dict:",
        (OWN_TESTS + "test_what_an_optimizer_keeps_is_neither_saved_nor_taken_without_a_word",),
    ),
    Mutant(
        "an-empty-state-is-saved-as-one", OWNED, "runtime/server_optimizer.py",
        '"state": _OnShards()', '"state": {}',
        (OWN_TESTS + "test_what_an_optimizer_keeps_is_neither_saved_nor_taken_without_a_word",),
    ),
    Mutant(
        "paths-are-of-the-folder-of-a-script", OWNED, "places/processes/process.py",
        "(path and os.path.abspath(path) for path in", "(path and os.fspath(path) for path in",
        (LAUNCH + "test_paths_of_a_job_are_of_the_folder_of_its_command_wherever_a_script_goes",), seconds=15,
    ),
]  # fmt: skip
