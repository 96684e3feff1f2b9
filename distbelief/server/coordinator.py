"""The coordinator: the machine that knows the members, deals portions, and calls for evaluations, checkpoints and the end.

It never sees the parameter vector. A job goes through the phases of `PHASES`, and each `_on_<message>` below says what moves it on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from distbelief.core import attendance, events, messages, records, roles, speakers
from distbelief.core.effects import Commit, Discard, Effect, End, Payload, Record, Send
from distbelief.core.events import Event
from distbelief.core.ledger import SAMPLES_LIMIT
from distbelief.core.lives import Lives
from distbelief.core.portions import PORTION_LIMIT, START, Dealer, Position
from distbelief.core.settings import Plan, Settings
from distbelief.core.sharding import cut
from distbelief.errors import LayoutError, RemoteProtocolError, UsageError
from distbelief.server import admission
from distbelief.server.evaluations import Evaluations
from distbelief.server.phases import PHASES, Phase


class Coordinator:
    """The coordinator of one job.

    Args:
        settings: of the job; every replica is told them.
        evaluator: whether an evaluator takes part.
        checkpoint: what the shards load, or "" for a fresh job.
        position: where the data of that checkpoint stands.
        samples: samples that were done before it.
        number: of the next checkpoint.
    """

    def __init__(
        self, settings: Settings, evaluator: bool = True, checkpoint: str = "", position: Position = START, samples: int = 0, number: int = 1
    ) -> None:
        self.settings = settings
        self.phase: Phase = "gathering"
        self.plan: Plan | None = None
        self.dealer: Dealer | None = None
        self._checkpoint, self._position, self._samples = checkpoint, position, samples
        self._evaluations = Evaluations(evaluator)
        self._shards = [roles.shard(i) for i in range(settings.shards)]
        self._waiting: set[str] = set(self._shards)
        self._welcome: deque[str] = deque()
        self._members: set[str] = set()
        self._lives = Lives(settings.restarts)
        self._wanting: dict[str, bool] = {}
        self._warming = settings.warm_start_steps
        self._warmed = 0
        self._warmer = ""
        self._number, self._kept, self._saving, self._failed = number, number - 1, False, ""
        self._epochs = 0
        self._outcome, self._reason = "done", ""
        self._heard: set[tuple[str, type]] = set()
        self._answers: dict[type, Callable[[str, Any], list[Effect]]] = {
            messages.Here: self._on_here,
            messages.Join: self._on_join,
            messages.Restored: self._on_restored,
            messages.Ready: self._on_ready,
            messages.Progress: self._on_progress,
            messages.Leave: self._on_leave,
            messages.Evaluated: self._on_evaluated,
            messages.SnapshotDone: self._on_snapshot,
            events.Saved: self._on_saved,
            messages.Description: self._on_description,
            messages.Stop: self._on_stop,
            events.Lost: self._on_lost,
        }

    def handle(self, sender: str, event: Event, payload: Payload | None) -> list[Effect]:
        """Take one event.

        Raises:
            RemoteProtocolError: the sender broke the protocol.
        """
        said = (sender, type(event))
        if said not in self._heard:
            speakers.check(*said)
            self._heard.add(said)
        answer = self._answers.get(said[1])
        if answer is None:
            raise RemoteProtocolError(f"the coordinator has no answer to {type(event).__name__}")
        return answer(sender, event)

    def waits(self) -> str:
        """What the job waits for now, in one sentence: for whoever wonders why nothing happens.

        >>> Coordinator(Settings(shards=1)).waits()
        'gathering: waits for all shards, and for the first replica, which tells the layout (shard 0)'
        """
        who = sorted(self._waiting)
        if self.phase in ("training", "leaving") and self.dealer is not None:
            members = sorted(self._members, key=roles.index_of)
            who = [f"{role} holds {held} minibatches" for role in members if (held := self.dealer.held(role))]
            who += [f"{role} waits for work" for role, drained in self._wanting.items() if drained]
            who = who or members
        elif self._evaluations.pending:
            who.append(roles.EVALUATOR)
        return f"{self.phase}: {PHASES[self.phase]}" + (f" ({', '.join(who)})" if who else "")

    def standing(self) -> dict[str, Any]:
        """What it has dealt, by role."""
        held = {role: {"minibatches": self.dealer.held(role) if self.dealer else 0} for role in self._members}
        return {"phase": self.phase, "of": held}

    # joining

    def _on_here(self, sender: str, event: messages.Here) -> list[Effect]:
        self._waiting.discard(sender)
        return self._restore()

    def _on_join(self, sender: str, event: messages.Join) -> list[Effect]:
        self._lives.begin(sender, event.incarnation)
        if sender == roles.EVALUATOR:
            self._evaluations.comes()
            self._welcome.append(sender)
            return self._greet() if self.phase in ("training", "leaving", "closing") else []
        try:
            if self.plan is None:
                self.plan = self._make_plan(event)
                self._welcome.append(sender)
                return self._restore()
            admission.check(self.plan, sender, event)
        except (LayoutError, UsageError) as error:
            return [Send(sender, messages.Refused(str(error), isinstance(error, LayoutError)))]
        if self.phase in ("leaving", "closing"):
            return [Send(sender, messages.Finish("the job is ending"))]
        self._welcome.append(sender)
        if self.phase == "initialising" and not self._members:
            return self._ask_to_initialise()
        return self._greet() if self.phase == "training" else []

    def _restore(self) -> list[Effect]:
        """Tell the shards their ranges, once all of them are there and the layout is known."""
        if self._waiting or self.plan is None or self.phase != "gathering":
            return []
        self.phase, self._waiting = "restoring", set(self._shards)
        restore: list[Effect] = [Send(role, messages.Restore(self.plan, self._checkpoint)) for role in self._shards]
        return restore + [effect for role in sorted(self._lives.absent()) for effect in self._not_waited_for(role)]

    def _not_waited_for(self, role: str) -> list[Effect]:
        """Have no round wait for a replica that may have gone before any shard had heard of it."""
        if not self.settings.in_rounds or self.plan is None or self.phase == "gathering" or not roles.is_replica(role):
            return []
        return [Send(roles.shard(self.plan.ruler), attendance.Gone(role, self._lives.absent()[role]))]

    def _make_plan(self, event: messages.Join) -> Plan:
        if event.samples < 1:
            raise UsageError("the training set is empty: there is nothing to train on")
        if event.batch_size:
            self.settings = msgspec.structs.replace(self.settings, batch_size=event.batch_size)
        plan = Plan(self.settings, event.layout, cut(event.layout, self.settings.shards), event.samples)
        batches = -(-event.samples // self.settings.batch_size)
        self.dealer = Dealer(batches, self.settings.epochs, self.settings.replicas, self._position)
        self._epochs = self.dealer.completed
        self._warmed = self._samples // self.settings.batch_size
        return plan

    def _on_restored(self, sender: str, event: messages.Restored) -> list[Effect]:
        self._waiting.discard(sender)
        if self._waiting:
            return []
        if event.loaded:
            return self._begin()
        self.phase = "initialising"
        return self._ask_to_initialise()

    def _ask_to_initialise(self) -> list[Effect]:
        """Welcome the first replica that waits, which sends the shards its parameters."""
        assert self.plan is not None
        for role in self._welcome:
            if roles.is_replica(role):
                self._welcome.remove(role)
                self._members.add(role)
                return [Send(role, messages.Welcome(self.plan, initialise=True)), Record(records.Joined(role))]
        return []

    def _on_ready(self, sender: str, event: messages.Ready) -> list[Effect]:
        return self._begin() if self.phase == "initialising" else []

    def _begin(self) -> list[Effect]:
        assert self.plan is not None and self.dealer is not None  # noqa: PT018
        self.phase = "training"
        s, plan = self.settings, self.plan
        started = records.Started(s.replicas, s.shards, plan.layout.parameters, plan.samples, s.batch_size, s.epochs, self._samples)
        effects: list[Effect] = [Record(started), *self._greet()]
        return effects + (self._finish("done", "every epoch was done before") if self.dealer.finished else [])

    def _greet(self) -> list[Effect]:
        assert self.plan is not None
        effects: list[Effect] = []
        while self._welcome:
            role = self._welcome.popleft()
            effects.append(Send(role, messages.Welcome(self.plan, initialise=False)))
            if role == roles.EVALUATOR:
                effects += self._evaluations.joined(self._epochs)
            else:
                self._members.add(role)
                effects.append(Record(records.Joined(role)))
        return effects

    # training

    def _on_progress(self, sender: str, event: messages.Progress) -> list[Effect]:
        if sender not in self._members or self.dealer is None:
            raise RemoteProtocolError(f"{sender} reports progress and is no member")
        if not 0 <= event.samples <= SAMPLES_LIMIT:
            raise RemoteProtocolError(f"{sender} reports {event.samples} samples")
        self._samples += event.samples
        completed = self.dealer.report(sender, event.steps, event.dropped)
        loss = event.loss / event.losses if event.losses else None
        counts = (event.pushed, event.fetched, len(event.dropped))
        effects: list[Effect] = [Record(records.Stepped(sender, event.steps, event.samples, event.pushes, loss, *counts))]
        if self._warming:
            self._warmed += event.steps
        for _ in completed:
            effects += self._epoch_done()
        if event.wants:
            self._wanting[sender] = False
        if self.phase == "training":
            effects += self._finish("done", "all epochs are done") if self.dealer.finished else self._deal()
        return effects

    def _deal(self) -> list[Effect]:
        """Serve the replicas that want a portion; those that cannot have one now are told to drain, once."""
        assert self.dealer is not None
        effects: list[Effect] = []
        for role in list(self._wanting):
            portion = self.dealer.deal(role, self._allowed(role)) if self._allowed(role) else None
            if portion is not None:
                del self._wanting[role]
                effects.append(Send(role, messages.Deal(portion)))
            elif not self._wanting[role]:
                self._wanting[role] = True
                effects.append(Send(role, messages.Drain()))
        return effects

    def _allowed(self, role: str) -> int:
        """How many minibatches a replica may be dealt: during a warm start one replica has the first steps to itself."""
        if self._warmed >= self._warming:
            self._warming = 0
            return 1 if self.settings.in_rounds else PORTION_LIMIT  # in rounds all take one each
        if self._warmer not in self._members:
            self._warmer = min(self._members, key=roles.index_of)
        if role != self._warmer:
            return 0
        assert self.dealer is not None
        return max(0, min(PORTION_LIMIT, self._warming - self._warmed - self.dealer.held(role)))

    def _epoch_done(self) -> list[Effect]:
        self._epochs += 1
        effects: list[Effect] = [Record(records.EpochDone(self._epochs))]
        assert self.dealer is not None
        if self.dealer.finished:
            return effects
        if (every := self.settings.evaluate_every) and self._epochs % every == 0:
            effects += self._evaluations.measure(self._epochs)
        if (every := self.settings.checkpoint_every) and self._epochs % every == 0:
            effects += self._save()
        return effects

    def _on_evaluated(self, sender: str, event: messages.Evaluated) -> list[Effect]:
        self._evaluations.measuring = False
        effects: list[Effect] = [Record(records.Tested(event.number, event.loss, event.accuracy))]
        target = self.settings.target_accuracy
        if self.phase == "training" and target and event.accuracy >= target:
            return effects + self._finish("target", f"test accuracy {event.accuracy:.4f} reached the target {target}")
        if self._evaluations.owed:
            effects += self._evaluations.measure(self._epochs)
        return effects + self._close()

    # checkpoints

    def _save(self) -> list[Effect]:
        """Call for a checkpoint: its position is taken first, so that what is done by it is in every shard's part."""
        if self._saving:
            return []
        assert self.dealer is not None
        self._saving, self._waiting, self._failed = True, set(self._shards), ""
        self._cut = (self.dealer.position(), self._samples)
        return [Send(role, messages.Snapshot(self._number)) for role in self._shards]

    def _on_snapshot(self, sender: str, event: messages.SnapshotDone) -> list[Effect]:
        if not self._saving or sender not in self._waiting:
            raise RemoteProtocolError(f"{sender} saved checkpoint {event.number}, which nobody asked it for")
        self._waiting.discard(sender)
        self._failed = self._failed or event.error
        if self._waiting:
            return []
        if self._failed:
            return [Discard(event.number)]
        assert self.plan is not None
        return [Commit(event.number, self.plan, *self._cut)]

    def _on_saved(self, sender: str, event: events.Saved) -> list[Effect]:
        self._saving = False
        self._number += 1
        error = self._failed or event.error
        if not error:
            self._kept = event.number
        elif self.phase == "closing":
            self._reason += f"; {error}"
        return [Record(records.Checkpointed(event.number, error)), *self._close()]

    # the end

    def _finish(self, outcome: str, reason: str) -> list[Effect]:
        """Let the replicas push what they have accrued and leave; then close."""
        self.phase, self._outcome, self._reason = "leaving", outcome, reason
        self._evaluations.owed = False  # the last step measures
        self._closing = iter(("measure", "save", "describe", "stop"))
        asked: list[Effect] = [Send(role, messages.Finish(reason)) for role in sorted(self._members)]
        return [Record(records.Ending(outcome, reason)), *asked, *self._close()]

    def _on_leave(self, sender: str, event: messages.Leave) -> list[Effect]:
        return self._without(sender, "it was done", -1, died=False)

    def _on_stop(self, sender: str, event: messages.Stop) -> list[Effect]:
        if self.phase in ("leaving", "closing"):
            return []
        if self.plan is None or self.phase != "training":
            return self._end("interrupted", event.reason)
        return self._finish("interrupted", event.reason)

    def _close(self) -> list[Effect]:
        """Take the next closing step, once the replicas are gone and the last step is answered."""
        if self.phase == "leaving" and not self._members:
            self.phase = "closing"
        effects: list[Effect] = []
        while self.phase == "closing" and not (self._evaluations.pending or self._saving or self._waiting):
            step = next(self._closing)
            if step == "measure" and self.settings.evaluate_every:
                effects += self._evaluations.measure(self._epochs)
            elif step == "save":
                effects += self._save()
            elif step == "describe":
                self._waiting = set(self._shards)
                effects += [Send(role, messages.Describe()) for role in self._shards]
            elif step == "stop":
                return effects + self._end(self._outcome, self._reason)
        return effects

    def _on_description(self, sender: str, event: messages.Description) -> list[Effect]:
        self._waiting.discard(sender)
        return [Record(records.Applied(sender, event.version.updates, event.samples, event.staleness)), *self._close()]

    def _end(self, outcome: str, reason: str) -> list[Effect]:
        everybody = [*self._shards, *sorted(self._members), *self._welcome] + ([roles.EVALUATOR] if self._evaluations.evaluator == "joined" else [])
        stops: list[Effect] = [Send(role, messages.Stop(reason)) for role in everybody]
        return [*stops, Record(records.Finished(outcome, reason)), End(reason)]

    # death

    def _on_lost(self, sender: str, event: events.Lost) -> list[Effect]:
        if roles.is_replica(sender) or sender == roles.EVALUATOR:
            return self._without(sender, event.reason, event.incarnation, died=True)
        if sender in self._shards:
            kept = f"what it applied since checkpoint {self._kept} is lost: go on with --resume"
            return self._end("failed", f"{sender} is gone ({event.reason}); {kept if self._kept else 'there is no checkpoint yet: start anew'}")
        return []

    def _without(self, role: str, reason: str, incarnation: int, died: bool) -> list[Effect]:
        """Go on without a replica or the evaluator."""
        if not self._lives.end(role, incarnation, died):
            return []
        if role in self._welcome:
            self._welcome.remove(role)
        return self._without_evaluator(reason) if role == roles.EVALUATOR else self._without_replica(role, reason, died)

    def _without_evaluator(self, reason: str) -> list[Effect]:
        for_good = roles.EVALUATOR in self._lives.over
        self._evaluations.gone(for_good)
        then = "the job goes on without evaluations" if for_good else "another takes its place"
        return [Record(records.Note(f"the evaluator is gone ({reason}); {then}")), *self._close()]

    def _without_replica(self, role: str, reason: str, died: bool) -> list[Effect]:
        """What it held is dealt again; the job ends where all are gone and none will come back."""
        self._wanting.pop(role, None)
        member = role in self._members
        self._members.discard(role)
        left = self.dealer.lost(role) if member and self.dealer else 0
        lost = left if died or self.phase == "training" else 0
        effects: list[Effect] = [Record(records.Gone(role, lost, reason, died)), *self._not_waited_for(role)]
        if sum(map(roles.is_replica, self._lives.over)) >= self.settings.replicas and self.phase not in ("leaving", "closing"):
            end = f"every replica is gone; the last was {role}: {reason}"
            outcome = "failed" if died else "left"
            return effects + (self._finish(outcome, end) if self.phase == "training" else self._end(outcome, end))
        if self.phase == "initialising" and member:
            return effects + self._ask_to_initialise()
        return effects + (self._deal() if self.phase == "training" else self._close())
