"""Lines of the protocol, each broken on purpose, and the tests that must fail when it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """One way to break the protocol."""

    guard: str
    """Which rule of the protocol is broken."""
    name: str
    """What is done to it."""
    file: str
    edits: tuple[tuple[str, str], ...]
    """Texts that stand in the file exactly once, and what stands there instead."""
    tests: tuple[str, ...] = ()
    """What pytest is asked to run; at least one of them must fail."""
    seeds: int = 0
    """Instead: how many seeds of the simulation are run; at least one of them must fail."""

    def text(self) -> str:
        """Return the file's text with the mutation; raise `ValueError` when a text is not there exactly once."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        for old, new in self.edits:
            found = text.count(old)
            if found != 1:
                message = f"{self.guard}: {self.name}: {self.file} has this {found} times instead of once:\n{old}"
                raise ValueError(message)
            text = text.replace(old, new)
        return text


_FENCES = "tests/store/test_fences.py::test_a_{}_taken_over_refuses_its_former_owner[sqlite-_{}]"
_LOCKS = "tests/steps/test_locks.py::test_"
_EFFECTS = "tests/steps/test_effects.py::test_"
_WAITS = "tests/steps/test_waits.py::test_"
_CHILDREN = "tests/steps/test_children.py::test_"
_UNDO = "tests/steps/test_undo.py::test_"
_TRANSACTIONS = "tests/steps/test_transactions.py::test_"
_FOREIGN = "tests/steps/test_foreign_transactions.py::test_"
_ARTIFACTS = "tests/steps/test_artifacts.py::test_"
_MODELS = "tests/steps/test_models.py::test_"
_GATEWAY = "tests/steps/test_gateway.py::test_"
_TWO_PHASE = "tests/steps/test_two_phase.py::test_"
_APPROVED = "tests/steps/test_approved_calls.py::test_"
_FOUR_EYES = "tests/steps/test_four_eyes.py::test_"
_SCHEDULES = "tests/steps/test_schedules.py::test_"
_IN_DOUBT = "tests/steps/test_calls_in_doubt.py::test_"

MUTANTS = (
    Mutant(
        "the fence",
        "a thread's nonce is not looked at",
        "store/leases.py",
        ((', thread.c.lease_nonce == param("f_nonce")]', "]"),),
        (_FENCES.format("thread", "commit"),),
    ),
    Mutant(
        "the fence",
        "a node run's nonce is not looked at",
        "store/leases.py",
        (('        node_run.c.lease_nonce == param("f_nonce"),\n    ]', "    ]"),),
        (_FENCES.format("node_run", "finish_node"),),
    ),
    Mutant(
        "the fence",
        "the commit does not look at the parent",
        "store/checkpoints.py",
        (('.where(*fenced(thread), thread.c.seq == param("seq") - 1)', ".where(*fenced(thread))"),),
        seeds=100,
    ),
    Mutant(
        "the fence",
        "an intent is not fenced",
        "store/effects.py",
        (("        hold(transaction, fence)\n        written =", "        written ="),),
        (_FENCES.format("thread", "intend"),),
    ),
    Mutant(
        "the fence",
        "a lease is taken from somebody who lives",
        "store/claims.py",
        (("        is_takeable(table),\n", ""),),
        ("tests/store/test_claim.py", "-k", "sqlite"),
    ),
    Mutant(
        "the fence's row lock",
        "of a thread",
        "store/outcomes.py",
        (
            (
                "select(thread.c.id).where(*fenced(thread)).with_for_update())",
                "select(thread.c.id).where(*fenced(thread)))",
            ),
        ),
        (_LOCKS + "a_takeover_waits_for_the_write_that_has_passed_the_fence[thread]",),
    ),
    Mutant(
        "the fence's row lock",
        "of a node run",
        "store/outcomes.py",
        (
            (
                "select(node_run.c.run).where(*fenced(node_run)).with_for_update())",
                "select(node_run.c.run).where(*fenced(node_run)))",
            ),
        ),
        (_LOCKS + "a_takeover_waits_for_the_write_that_has_passed_the_fence[node run]",),
    ),
    Mutant(
        "the nonce's randomness",
        "every nonce is the same",
        "store/leases.py",
        (("os.urandom(12)", "bytes(12)"),),
        (_FENCES.format("thread", "commit"),),
    ),
    Mutant(
        "the inbox at parking",
        "early signals are not looked for",
        "store/outcomes.py",
        (("    if new.signal_name is not None:\n", "    if False:\n"),),
        (_WAITS + "signals_that_come_early_are_kept_and_taken_in_order[sqlite]",),
    ),
    Mutant(
        "the inbox at parking",
        "early signals are looked for without the thread's lock",
        "store/outcomes.py",
        (
            (
                '.where(thread.c.id == param("f_thread")).with_for_update()\n',
                '.where(thread.c.id == param("f_thread"))\n',
            ),
        ),
        (_LOCKS + "a_signal_that_is_sent_while_its_wait_is_opened_finds_it[node run]",),
    ),
    Mutant(
        "the inbox at parking",
        "a signal is delivered without the thread's lock",
        "store/threads.py",
        (
            (
                'select(*_STATE).where(thread.c.id == param("id")).with_for_update())',
                'select(*_STATE).where(thread.c.id == param("id")))',
            ),
        ),
        (_LOCKS + "a_wait_that_is_opened_while_its_signal_is_sent_finds_it",),
    ),
    Mutant(
        "the inbox at parking",
        "a signal is given twice",
        "store/signals.py",
        (('    transaction.run(_CONSUME, {"id": row[0], "consumer": consumer})\n', ""),),
        seeds=100,
    ),
    Mutant(
        "intent, then call",
        "no intent is recorded",
        "runtime/journal.py",
        (
            (
                "        if declared.idempotent:\n            return call\n        self.check_course",
                "        if True:\n            return call\n        self.check_course",
            ),
        ),
        (_EFFECTS + "an_intent_without_a_result_blocks[sqlite]",),
    ),
    Mutant(
        "intent, then call",
        "the intent is recorded after the call",
        "runtime/journal.py",
        (
            (
                "        begun = self._store.patiently(\n            lambda: journal.begin(",
                "        begun, self._late = True, (\n            lambda: journal.begin(",
            ),
            (
                "        stored = call.codec.encode(result, path=",
                (
                    "        if not call.declared.idempotent:\n"
                    "            self._late()\n"
                    "        stored = call.codec.encode(result, path="
                ),
            ),
        ),
        (
            _EFFECTS + "an_intent_without_a_result_blocks[sqlite]",
            _EFFECTS + "an_effect_of_a_cancelled_thread_is_refused[sqlite]",
        ),
    ),
    Mutant(
        "intent, then call",
        "an intent without a result is begun again",
        "runtime/journal.py",
        (("if found.state == journal.INTENT and not declared.idempotent:", "if False:"),),
        (_EFFECTS + "an_intent_without_a_result_blocks[sqlite]",),
    ),
    Mutant(
        "the divergence check",
        "a retry may leave out what was done",
        "runtime/journal.py",
        (("        if left:\n            message = (\n", "        if False:\n            message = (\n"),),
        (_EFFECTS + "a_retry_that_goes_another_way_blocks", "-k", "sqlite"),
    ),
    Mutant(
        "the divergence check",
        "an answer is given to another question",
        "runtime/waits.py",
        (("        if bytes(state.digest) != digest:\n", "        if False:\n"),),
        (_WAITS + "a_node_that_asks_something_else_the_second_time_is_blocked[sqlite]",),
    ),
    Mutant(
        "the divergence check",
        "a recorded result is given to a call with other arguments",
        "runtime/journal.py",
        (("        if bytes(found.arguments_digest) != digest:\n", "        if False:\n"),),
        (_EFFECTS + "one_key_for_two_commands_is_refused[sqlite]",),
    ),
    Mutant(
        "the command's late acknowledgement",
        "acknowledged before the commit",
        "tasks/commands.py",
        (
            (
                "            accepted = commands.accept(",
                "            message.ack()\n            accepted = commands.accept(",
            ),
            (
                '            reach("before_ack", command.verb)\n            message.ack()\n',
                '            reach("before_ack", command.verb)\n',
            ),
        ),
        ("tests/worker/test_deaths.py::test_a_command_whose_worker_died_before_it_was_committed_comes_again",),
    ),
    Mutant(
        "the command's late acknowledgement",
        "a command's id is not remembered",
        "runtime/commands.py",
        (("            if done is not None:\n", "            if False:\n"),),
        seeds=100,
    ),
    Mutant(
        "the join under the lock",
        "the count-down takes no lock on the thread",
        "store/outcomes.py",
        (
            (
                "        locked = lock(transaction, fence)\n        key = fence_params(fence)\n",
                (
                    "        hold(transaction, fence)\n"
                    "        unlocked = Statement(lambda _: select(*(thread.c[name] for name in Locked._fields))"
                    '.where(thread.c.id == param("f_thread")))\n'
                    "        key = fence_params(fence)\n"
                    "        locked = Locked(*transaction.rows(unlocked, key)[0])\n"
                ),
            ),
        ),
        (_LOCKS + "the_join_and_a_cancel_take_their_locks_in_one_order",),
    ),
    Mutant(
        "the join under the lock",
        "the count-down is written from what was read",
        "store/outcomes.py",
        (
            (
                '.where(thread.c.id == param("f_thread")).with_for_update()\n',
                '.where(thread.c.id == param("f_thread"))\n',
            ),
            (
                "        pending, thread_status, *row = transaction.rows(_COUNT_DOWN, key)[0]\n",
                (
                    "        read = Statement(lambda _: select(thread.c.pending)"
                    '.where(thread.c.id == param("f_thread")))\n'
                    '        key["read"] = transaction.rows(read, key)[0][0]\n'
                    "        pending, thread_status, *row = transaction.rows(_COUNT_DOWN, key)[0]\n"
                ),
            ),
            (
                "            pending=thread.c.pending - 1,\n            status=case((and_(thread.c.pending == 1,",
                '            pending=param("read") - 1,\n            status=case((and_(param("read") == 1,',
            ),
        ),
        ("tests/store/test_commit.py::test_exactly_one_of_many_node_runs_is_the_last[postgresql]",),
    ),
    Mutant(
        "the join under the lock",
        "it counts down for an owner that lost its lease",
        "store/outcomes.py",
        (
            (
                "        locked = lock(transaction, fence)\n        key = fence_params(fence)\n",
                "        key = fence_params(fence)\n        locked = Locked(*transaction.rows(_LOCK_THREAD, key)[0])\n",
            ),
        ),
        (_FENCES.format("node_run", "finish_node"),),
    ),
    Mutant(
        "the join under the lock",
        "it comes one too early",
        "store/outcomes.py",
        (
            (
                "case((and_(thread.c.pending == 1, thread.c.status == WAITING), READY)",
                "case((and_(thread.c.pending <= 2, thread.c.status == WAITING), READY)",
            ),
        ),
        seeds=100,
    ),
    Mutant(
        "taking over",
        "the leases of a dead worker's node runs are kept",
        "store/workers.py",
        (('    nudges += [Nudge("node", *row) for row in transaction.rows(of_node_runs, params)]\n', ""),),
        seeds=200,
    ),
    Mutant(
        "taking over",
        "a worker judges though its own time is over",
        "tasks/sweeper.py",
        (("judge=self._worker_id", "judge=None"),),
        seeds=100,
    ),
    Mutant(
        "taking over",
        "a deadline counts though nobody has seen its worker",
        "store/leases.py",
        (("and_(table.c.lease_deadline <= db_now(), holder)", "table.c.lease_deadline <= db_now()"),),
        ("tests/store/test_claim.py::test_a_deadline_does_not_count_while_nobody_has_seen_its_worker",),
    ),
    Mutant(
        "taking over",
        "deadlines stay where they are when the clock is set",
        "store/workers.py",
        (("        if seconds:\n", "        if False:\n"),),
        ("tests/worker/test_liveness.py::test_a_clock_that_was_set_takes_nothing_from_those_who_live",),
    ),
    Mutant(
        "taking over",
        "what a hung node takes along is counted dead",
        "store/workers.py",
        (
            (
                "_RELEASE_CHILD, worker_id, deaths=0, reason=None, child=child)",
                '_RELEASE_CHILD, worker_id, deaths=1, reason="", child=child)',
            ),
        ),
        ("tests/store/test_claim.py::test_what_is_handed_over_counts_as_no_death",),
    ),
    Mutant(
        "cancelling",
        "what was asked stays withdrawn when the run is taken up again",
        "store/threads.py",
        (("    if found.status == CANCELLED:\n", "    if False:\n"),),
        ("tests/steps/test_cancel.py::test_a_fan_out_that_was_cancelled_goes_on_where_it_was[sqlite]",),
    ),
    Mutant(
        "taking over",
        "admission finds no threads",
        "store/admission.py",
        (('{"step": thread, "node": node_run}', '{"node": node_run}'),),
        seeds=50,
    ),
    Mutant(
        "admission",
        "it takes no heed of the room",
        "store/admission.py",
        (
            ("        while tenants and picked < room:\n", "        while tenants:\n"),
            ("[share, room - picked, *", "[99, *"),
        ),
        ("tests/store/test_admission.py::test_no_more_than_there_is_room_for[sqlite]",),
    ),
    Mutant(
        "admission",
        "the first tenant has all the room",
        "store/admission.py",
        (("            share = max(1, (room - picked) // len(tenants))\n", "            share = room - picked\n"),),
        ("tests/store/test_admission.py::test_every_tenant_has_its_turn_whatever_another_has_waiting[sqlite]",),
    ),
    Mutant(
        "the limits",
        "slots are counted without the limit's lock",
        "store/limits.py",
        (("        if transaction.postgresql:", "        if False:"),),
        ("tests/store/test_admission.py::test_of_many_at_once_no_more_get_in_than_may[postgresql]",),
    ),
    Mutant(
        "the limits",
        "a slot outlives its lease",
        "store/limits.py",
        (('slot.c.scope == param("scope"), ~_STANDS))', 'slot.c.scope == "of nobody"))'),),
        ("tests/store/test_admission.py::test_as_many_run_at_once_as_may[sqlite]",),
    ),
    Mutant(
        "the limits",
        "nobody counts",
        "store/limits.py",
        (
            (
                '        if transaction.rows(_COUNT, {"scope": scope})[0][0] >= running_max[scope]:\n',
                "        if False:\n",
            ),
        ),
        seeds=50,
    ),
    Mutant(
        "the edit of a state",
        "the pending step gets another key",
        "runtime/stateedits.py",
        (("cursor = Cursor(step, head.cursor.root)", 'cursor = Cursor("", head.cursor.root)'),),
        ("tests/steps/test_stateedits.py", "-k", "sqlite and decision"),
    ),
    Mutant(
        "the edit of a state",
        "the waits of the pending step stay behind",
        "store/stateedits.py",
        (('.values(seq=param("due_seq"))', ".values(seq=wait.c.seq)"),),
        seeds=100,
    ),
    Mutant(
        "the edit of a state",
        "it takes the lease of a node run that is under way",
        "runtime/stateedits.py",
        (("    if not at.is_held and not running:\n", "    if not at.is_held:\n"),),
        ("tests/steps/test_stateedits.py", "-k", "sqlite and not_disturbed"),
    ),
    Mutant(
        "the edit of a state",
        "it looks at the node runs' leases without their locks",
        "store/stateedits.py",
        (("        .order_by(node_run.c.position)\n        .with_for_update()\n", ""),),
        (_LOCKS + "an_edit_in_the_middle_of_a_claim_finds_its_lease[node_run]",),
    ),
    Mutant(
        "the edit of a state",
        "a claim under way does not learn of it",
        "store/stateedits.py",
        (("version=thread.c.version + 1", "version=thread.c.version"),),
        (_LOCKS + "a_claim_in_the_middle_of_an_edit_has_come_too_late[thread]",),
    ),
    Mutant(
        "the history",
        "a digest leaves out the parent's",
        "runtime/history.py",
        (('parent = head.digest if head is not None else b""', 'parent = b""'),),
        seeds=50,
    ),
    Mutant(
        "children",
        "a spawn is not fenced",
        "store/errands.py",
        (("        hold(transaction, fence)\n", ""),),
        (_CHILDREN + "an_attempt_that_lost_its_lease_spawns_nothing[sqlite]",),
    ),
    Mutant(
        "children",
        "the parent is told without its lock",
        "store/errands.py",
        (("        waits.lock_thread(transaction, ended.thread_id)\n", ""),),
        ("tests/steps/test_child_locks.py::test_a_parent_whose_children_end_all_at_once_goes_on_once",),
    ),
    Mutant(
        "children",
        "parking does not look whether the child has ended",
        "store/outcomes.py",
        (("        if ended is not None:\n", '        if ended == "never":\n'),),
        (_CHILDREN + "children_that_have_ended_before_the_join_are_there_at_once[sqlite]",),
    ),
    Mutant(
        "children",
        "a child that is retried tells its end again",
        "store/children.py",
        (
            (
                """state == STARTED)
        .values(
            state=case((child.c.cancel == 1, DELIVERED)""",
                """state != WANTED)
        .values(
            state=case((child.c.cancel == 1, DELIVERED)""",
            ),
        ),
        (_CHILDREN + "a_failed_child_that_is_retried_after_its_parent_was_told_says_nothing_more[sqlite]",),
    ),
    Mutant(
        "children",
        "a cancel leaves the children alone",
        "store/threads.py",
        (
            (
                "found.run_steps})\n    nudges = children.disown(transaction, found.id)\n",
                "found.run_steps})\n    nudges: list[Nudge] = []\n",
            ),
        ),
        (_CHILDREN + "cancelling_a_parent_cancels_its_children_and_theirs[sqlite]",),
    ),
    Mutant(
        "children",
        "a retry may leave out a child",
        "runtime/journal.py",
        (("        self.beside(before)\n", ""),),
        (_CHILDREN + "a_retry_that_goes_another_way_is_blocked[nothing-plain]",),
    ),
    Mutant(
        "children",
        "the sweep does not run the errands of the dead",
        "store/sweep.py",
        (("    nudges += errands.finish_due(store, limit=limit)\n", ""),),
        (_CHILDREN + "the_sweep_does_what_a_dead_process_was_about_to[sqlite-telling]",),
    ),
    Mutant(
        "undoing",
        "a run that fails is not undone",
        "store/outcomes.py",
        (("            if begun is not None:\n", '            if begun == "never":\n'),),
        (_UNDO + "each_undo_is_a_claim_of_its_own_which_any_worker_may_take[sqlite]",),
    ),
    Mutant(
        "undoing",
        "the oldest effect is undone first",
        "store/undoing.py",
        (
            ("effect.c.ended_at, effect.c.started_at).desc()", "effect.c.ended_at, effect.c.started_at)"),
            ("            effect.c.started_at.desc(),\n", ""),
        ),
        (_UNDO + "a_failed_run_is_undone_from_its_newest_effect_to_its_oldest[sqlite]",),
    ),
    Mutant(
        "undoing",
        "the effects of an earlier run are undone, too",
        "store/undoing.py",
        (("        effect.c.run_id == run_id,\n", ""),),
        (_UNDO + "a_new_run_after_a_cancelled_undoing_leaves_the_rest_as_it_is[sqlite]",),
    ),
    Mutant(
        "undoing",
        "an effect without an outcome is taken for one that has not happened",
        "store/undoing.py",
        (("        or_(effect.c.state == DONE, effect.c.state == INTENT),\n", "        effect.c.state == DONE,\n"),),
        (_UNDO + "an_effect_without_an_outcome_is_asked_of_a_person_first[sqlite-happened-rest0]",),
    ),
    Mutant(
        "undoing",
        "an undo has no intent",
        "runtime/undojournal.py",
        (("replace(declared, idempotent=False), undo)", "declared, undo)"),),
        (_UNDO + "a_person_may_undo_it_by_hand_or_leave_it[sqlite-True-happened-undone-3 effects were undone]",),
    ),
    Mutant(
        "undoing",
        "a run that was undone is retried",
        "runtime/commands.py",
        (("    if found.undoing == UNDONE:\n", "    if found.undoing < 0:\n"),),
        (_UNDO + "the_next_run_of_the_thread_may_succeed_and_undoes_nothing_of_the_one_before[sqlite]",),
    ),
    Mutant(
        "undoing",
        "a run that reaches its step limit is not undone",
        "store/checkpoints.py",
        (("        is_undone = new.status == FAILED and ", '        is_undone = new.status == "never" and '),),
        (_UNDO + "a_run_that_reaches_its_step_limit_is_undone[sqlite]",),
    ),
    Mutant(
        "transactions",
        "the fence is not taken before the commit",
        "store/transactions.py",
        (("                hold(transaction, self._fence)\n", ""),),
        (_TRANSACTIONS + "a_cancelled_attempt_commits_nothing",),
    ),
    Mutant(
        "transactions",
        "a commit whose answer is lost is taken for a failure",
        "store/transactions.py",
        (
            (
                "            if not self._store.patiently(lambda: effects.is_recorded(",
                "            if True or (lambda: (",
            ),
        ),
        (_TRANSACTIONS + "a_commit_whose_answer_is_lost_is_looked_up[lose_reply]",),
    ),
    Mutant(
        "transactions",
        "what is played again may be another statement",
        "store/tapes.py",
        (("        if found.digest != digest_of(statement, parameters):\n", "        if False:\n"),),
        (_TRANSACTIONS + "a_block_that_says_something_else_is_diverged[sqlite]",),
    ),
    Mutant(
        "transactions",
        "a block that is played again may leave statements out",
        "runtime/transactions.py",
        (("            self._player.end()\n", "            pass\n"),),
        (_TRANSACTIONS + "a_block_with_more_or_fewer_statements_is_diverged",),
    ),
    Mutant(
        "transactions",
        "the deadline is not looked at before the commit",
        "runtime/transactions.py",
        (("    if book.remaining() <= 0:\n        raise _overdue(what)\n    try:\n", "    try:\n"),),
        (_TRANSACTIONS + "a_node_out_of_time_commits_nothing[sqlite-not-alarmed]",),
    ),
    Mutant(
        "transactions",
        "effects may be asked for inside a block",
        "runtime/callids.py",
        (("        refuse_inside(what)\n", ""),),
        ("tests/steps/test_transaction_blocks.py::test_nothing_else_is_asked_inside_a_block",),
    ),
    Mutant(
        "transactions",
        "another database is not asked what an earlier attempt did",
        "store/foreign_journal.py",
        (("            _INSERT.execute(self.cursor, self.dialect, entry.row)\n", ""),),
        (_FOREIGN + "a_process_may_die_anywhere[sqlite-after_transaction-2]",),
    ),
    Mutant(
        "transactions",
        "an attempt that was overtaken commits in another database",
        "runtime/transactions.py",
        (("            book.store.patiently(lambda: journal_rows.check_held(book.store, book.fence))\n", ""),),
        (_FOREIGN + "an_attempt_that_was_overtaken_commits_nothing[sqlite]",),
    ),
    Mutant(
        "transactions",
        "what may be committed in a database that is away is a failure",
        "runtime/transactions.py",
        (("            if is_unknown:\n", "            if False:\n"),),
        (_FOREIGN + "a_database_that_cannot_be_asked_puts_off_what_may_have_happened[sqlite]",),
    ),
    Mutant(
        "what is paid for",
        "a response is not spooled",
        "runtime/models.py",
        (("            spool.put(begun.key.text, received)\n", "            pass\n"),),
        (_MODELS + "a_response_that_was_received_is_not_paid_for_again[sqlite-False]",),
    ),
    Mutant(
        "what is paid for",
        "the response to another request is taken",
        "runtime/responsespool.py",
        (("return received if received.arguments_digest == arguments_digest else None", "return received"),),
        (_MODELS + "the_response_to_another_request_of_that_key_is_none[sqlite]",),
    ),
    Mutant(
        "what is paid for",
        "it is thrown away when the lease is lost",
        "store/effects.py",
        (
            (
                "        except StaleLease:\n            is_stale = True\n",
                "        except StaleLease:\n            is_stale = True\n            raise\n",
            ),
        ),
        (_MODELS + "what_was_paid_for_is_recorded_although_the_lease_was_lost[sqlite]",),
    ),
    Mutant(
        "what is paid for",
        "an attempt that lost its lease goes on paying",
        "runtime/models.py",
        (("    journal.check_lease(begun)\n", ""),),
        (_MODELS + "an_attempt_that_knows_its_lease_is_lost_pays_for_nothing_more[sqlite]",),
    ),
    Mutant(
        "what is paid for",
        "each of two attempts gets its own answer",
        "runtime/models.py",
        (("    if before is not None:\n", "    if before is not None and not is_new:\n"),),
        (_MODELS + "of_two_attempts_that_both_asked_the_first_recorded_stands_for_both[sqlite]",),
    ),
    Mutant(
        "artifacts",
        "what is read is not checked",
        "store/artifacts.py",
        (("        if digest_of(data) != digest:\n", "        if not digest:\n"),),
        (_ARTIFACTS + "a_value_that_is_not_what_was_put_there_blocks_the_thread[sqlite-database-changed]",),
    ),
    Mutant(
        "the gateway",
        "policies are not asked once more before the call",
        "runtime/gateway.py",
        (("                if is_fresh or self._is_settled(hearing.call):\n", "                if ruling:\n"),),
        (_GATEWAY + "a_policy_that_changed_while_people_decided[sqlite]",),
    ),
    Mutant(
        "the gateway",
        "what was called is judged again",
        "runtime/gateway.py",
        (("                if is_fresh or self._is_settled(hearing.call):\n", "                if is_fresh:\n"),),
        (_GATEWAY + "what_was_called_is_not_judged_again[sqlite]",),
    ),
    Mutant(
        "the gateway",
        "an approval is not bound to the arguments",
        "runtime/gateway.py",
        (
            ('                "arguments": digest,\n                # Whom', "                # Whom"),
            ('                "call": hearing.call.key.call,\n', ""),
        ),
        (_GATEWAY + "another_amount_on_a_re_run_needs_another_approval[sqlite]",),
    ),
    Mutant(
        "the gateway",
        "an approval of a prepared call is not bound to what was prepared",
        "runtime/gateway.py",
        (('                "arguments": digest,\n                # Whom', "                # Whom"),),
        (_APPROVED + "what_an_edit_changed_is_not_approved_by_who_saw_it_before[sqlite]",),
    ),
    Mutant(
        "the gateway",
        "a call that was made is asked about again in another version",
        "runtime/gateway.py",
        (
            (
                '                "version": ruling.tool_version,\n                "call"',
                '                "version": tool.version,\n                "call"',
            ),
        ),
        (_APPROVED + "a_new_version_asks_nobody_about_a_call_that_was_made[sqlite]",),
    ),
    Mutant(
        "the gateway",
        "another version is called on the word about the one before",
        "runtime/gateway.py",
        (("if following.verdict == ALLOW and approved and not any", "if not approved and any"),),
        (_APPROVED + "a_new_version_is_not_called_on_the_word_about_the_old_one_also_without_a_demand[sqlite]",),
    ),
    Mutant(
        "the gateway",
        "what was edited and then approved is kept as it was asked for first",
        "runtime/gateway.py",
        (("                if before.asked is not None:", "                if before is None:"),),
        (_APPROVED + "an_edit_that_others_approved_as_it_was_is_kept_as_it_ran[sqlite]",),
    ),
    Mutant(
        "the gateway",
        "what was prepared and then rejected is not cancelled",
        "runtime/gateway.py",
        (
            (
                "CallCancelled):\n            yield from self._finished(tool, tool.cancel_phase, hearing, prepared)\n",
                "CallCancelled):\n",
            ),
        ),
        (_TWO_PHASE + "what_is_rejected_is_cancelled_as_it_was_prepared[sqlite]",),
    ),
    Mutant(
        "the gateway",
        "what may have been executed is cancelled",
        "runtime/gateway.py",
        (
            (
                "        if self._is_settled(hearing.call):\n            raise error",
                "        if False:\n            raise error",
            ),
        ),
        (_IN_DOUBT + "an_idempotent_execution_whose_answer_was_lost_is_not_cancelled", "-k", "sqlite"),
    ),
    Mutant(
        "the gateway",
        "an idempotent execution leaves no intent",
        "runtime/tools.py",
        (('        if kind == "prepare" and executed.idempotent:\n', "        if False:\n"),),
        (
            _IN_DOUBT + "an_idempotent_execution_that_was_killed_is_called_again_whatever_policies_say_by_now",
            "-k",
            "sqlite",
        ),
    ),
    Mutant(
        "the gateway",
        "being put off counts as a failure",
        "runtime/execution.py",
        (
            (
                "        return Retry(error.seconds, node_run.failures, text)\n",
                "        return Retry(error.seconds, node_run.failures + 1, text)\n",
            ),
        ),
        ("tests/steps/test_put_off_calls.py::test_being_put_off_costs_the_node_none_of_its_attempts",),
    ),
    Mutant(
        "the gateway",
        "a tool's result is recorded with the secret in it",
        "runtime/journal.py",
        (
            (
                '        reach("after_call", call.key.call)\n        result = self.masker.value(result)\n',
                '        reach("after_call", call.key.call)\n',
            ),
        ),
        (_GATEWAY + "a_secret_reaches_the_tool_and_no_table", "-k", "sqlite"),
    ),
    Mutant(
        "the gateway",
        "arguments are journaled with the tool's secret in them",
        "runtime/gateway.py",
        (("        if secrets:  # which", "        if not secrets:  # which"),),
        (_APPROVED + "a_secret_among_its_arguments_is_not_journaled_before_the_secret_is_known[sqlite]",),
    ),
    Mutant(
        "the gateway",
        "a model's response is recorded with the secret in it",
        "runtime/models.py",
        (
            ('masker.value({"response": heard.response,', '({"response": heard.response,'),
            ('masker.value({"response": plain(heard.response),', '({"response": plain(heard.response),'),
        ),
        ("tests/steps/test_model_secrets.py::test_a_response_that_waits_in_the_spool_is_masked[sqlite]",),
    ),
    Mutant(
        "the log",
        "two give events their positions at once",
        "store/events.py",
        (("mark.c.name == PLACED).with_for_update(skip_locked=busy)", "mark.c.name == PLACED)"),),
        ("tests/steps/test_events.py::test_two_that_place_at_once_give_each_event_one_place",),
    ),
    Mutant(
        "the log",
        "events are said to be published before they are",
        "tasks/events.py",
        (("            for row in batch:\n", "            sent = last + len(batch)\n            for row in batch:\n"),),
        seeds=60,
    ),
    Mutant(
        "the log",
        "that a run was cancelled is told to nobody",
        "store/threads.py",
        (
            (
                "    for run_id, spawned in ended:\n        events.record_end(",
                "    for run_id, spawned in ended:\n        0 and events.record_end(",
            ),
        ),
        seeds=40,
    ),
    Mutant(
        "four eyes",
        "two people in one place are two of a quorum",
        "runtime/decisions.py",
        (
            ("(each.by for each in decided if each.place == place), None)", "(each.by for each in ()), None)"),
            ("{each.place for each in earlier if", "{each.by for each in earlier if"),
            ("== APPROVE} | {place}", "== APPROVE} | {message.by}"),
        ),
        (_FOUR_EYES + "those_who_share_one_place_count_once", "-k", "sqlite"),
    ),
    Mutant(
        "four eyes",
        "who started the run names who approves it",
        "runtime/decisions.py",
        (("message.verdict in (REJECT, REQUEST_CHANGES)", "message.verdict in (REJECT, REQUEST_CHANGES, DELEGATE)"),),
        (_FOUR_EYES + "who_started_the_run_neither_approves_nor_chooses_who_does[sqlite]",),
    ),
    Mutant(
        "four eyes",
        "a call that its requester approved is made under a rule that forbids it by now",
        "runtime/rulings.py",
        ((" and (other.self_approval or not self.self_approval)", ""),),
        (_FOUR_EYES + "a_rule_that_becomes_stricter_asks_anew[sqlite]",),
    ),
    Mutant(
        "four eyes",
        "a policy's rule does not reach the question",
        "runtime/gateway.py",
        (("            self_approval=ruling.self_approval,\n", ""),),
        (_FOUR_EYES + "who_started_the_run_neither_approves_nor_chooses_who_does[sqlite]",),
    ),
    Mutant(
        "the tick",
        "a schedule's row is not locked",
        "store/firing.py",
        (('    return found.with_for_update(skip_locked=dialect == "postgresql")\n', "    return found\n"),),
        (_SCHEDULES + "a_sweep_leaves_a_tick_to_the_one_that_fires_it",),
    ),
    Mutant(
        "the tick",
        "a run's request is not the tick's",
        "store/firing.py",
        (('    request_id = f"schedule {found.id} {ticks.text(tick)}"\n', "    request_id = new_id()\n"),),
        (_SCHEDULES + "a_tick_that_has_its_run_gets_no_other_whatever_its_row_says[sqlite]",),
    ),
    Mutant(
        "the tick",
        "a schedule does not move on",
        "store/firing.py",
        (
            (
                '            next_at=param("next_at"),\n            due_at=param("next_at"),\n            last',
                "            last",
            ),
        ),
        (_SCHEDULES + "a_tick_that_has_come_gives_a_thread_of_its_own_a_run[sqlite]",),
    ),
)
