"""Rents and deletes slices, with verification, even if replies are lost.

    nothing -> requested in a zone -> waiting -> creating -> ready -> dead (preempted) or deleted
                    |  refused or expired: deleted there, and the next zone is tried

Three rules hold after every step, and tests break every step to check them. The next zone is tried only when nothing of
ours is left in the zone before, so there is never a second slice. A slice whose request got no reply is found by its
name and labels, and used. A slice is listed again before it is deleted, and deleted only if it carries our owner's
label and is the one that was seen before, not a later one of its name; it counts as deleted once lists no longer show
it.

Nothing is stored here: every call queries what exists.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from podium.pods.gcloud import CHANGE_S, READ_S, ApiAnswer, Gcloud, GcloudError, Order
from podium.pods.inventory import END, ID, STOP, ApiObject, Slice, read_slices
from podium.pods.patience import Patience
from podium.pods.world import Clock, random_word

PAUSES_S = (2.0, 5.0, 15.0, 30.0)
"""Seconds between attempts of a request that may succeed soon."""
POLL_S = 15.0
SETTLE_S = 60.0
"""Seconds by which lists may lag behind requests and deletions."""
LATE_S = 10.0
"""Seconds after a lost reply in which a slice may still appear."""
NODE_S = 1800.0
"""Seconds that machines may take to become ready once granted."""
DELETE_S = 900.0


class SliceError(ValueError):
    """A slice cannot be rented or deleted; the message says what remains and where."""


class BadRequestError(SliceError):
    """The user's request is invalid; nothing was done."""

    exit_status = 2


class InterruptedRentalError(SliceError):
    """Ctrl-C interrupted a rental; the message says that the request remains."""

    exit_status = 130


class PendingError(SliceError):
    """gcloud failed after a request was made; the message says what may be rented."""


class DeletedError(SliceError):
    """The slice was deleted by another command while it was being created."""


class TakenError(SliceError):
    """The name belongs to other owners' slices in every zone, or another run uses the slice."""


class _RefusedError(Exception):
    """A zone refuses the slice, for the reason in the message; `identity` names a slice to delete."""

    def __init__(self, reason: object, identity: str | None = None) -> None:
        super().__init__(reason)
        self.identity = identity


class SliceLists:
    """Lists the slices of a project, tells ours from others, and sets labels."""

    def __init__(
        self,
        gcloud: Gcloud,
        *,
        owner: str,
        clock: Clock = time,
        say: Callable[[str], None] = lambda line: None,
        random_word: Callable[[str], str] = random_word,
        parallel: int = 4,
    ) -> None:
        """Set the project and the owner; `say` prints progress, `parallel` zones are listed at once."""
        self.gcloud = gcloud
        self.owner = owner
        self.clock = clock
        self.say = say
        self.random_word = random_word
        self._parallel = parallel
        self._zones: list[str] | None = None

    def survey(
        self, zones: Iterable[str] | None = None, *, each_zone: bool = False, needed: Sequence[str] = ()
    ) -> list[Slice]:
        """List all slices of the project, ours and others', in these zones or in all.

        A zone whose queue is not readable is reported and left out, since it contains nothing of ours; it is an error
        if it is one of the `needed` zones. gcloud's list over all zones silently omits unreachable zones; with
        `each_zone`, every zone is listed separately, and an unreachable one is an error.
        """
        self.gcloud.note("")
        wanted = self.zones if zones is None else list(zones)
        with ThreadPoolExecutor(self._parallel) as pool:
            listed = pool.map(self._nodes, wanted) if each_zone else [self._answer(self.gcloud.argv.nodes())]
            nodes = [each for found in listed for each in found]
            if zones is None:
                self.gcloud.note("for every zone:")
            queued = [each for found in pool.map(lambda zone: self._queued(zone, needed), wanted) for each in found]
        return [each for each in read_slices(nodes, queued) if zones is None or each.zone in wanted]

    @property
    def zones(self) -> list[str]:
        """The zones in which this project may request TPUs."""
        # Not functools.cached_property: in Python 3.11 all its instances share one lock, and gcloud is slow.
        if self._zones is None:
            self._zones = sorted(each["locationId"] for each in self._answer(self.gcloud.argv.zones()))
        return self._zones

    def find(self, name: str, *, each_zone: bool = False, needed: Sequence[str] = ()) -> list[Slice]:
        """All slices with this name, in all zones; the queues of `needed` zones must be readable."""
        return [each for each in self.survey(each_zone=each_zone, needed=needed) if each.name == name]

    def expired(self, *, everyone: bool = False) -> list[Slice]:
        """Slices whose lease has expired, ours or all that Podium rented; excludes queued ones."""
        rented = [each for each in self.survey() if each.owner and (everyone or self.is_ours(each))]
        now = self.clock.time()
        return [each for each in rented if each.state != "waiting" and each.lease is not None and each.lease < now]

    def label(self, tpu_slice: Slice, labels: Mapping[str, str]) -> None:
        """Set labels of a slice's node."""
        self._answer(self.gcloud.argv.label(tpu_slice.name, tpu_slice.zone, labels), CHANGE_S)

    def locate(self, name: str | None) -> Slice:
        """Find our slice with this name, or our only one; lists nodes first, because that is fast.

        Raises:
            SliceError: there is none, or there are several.
        """
        self.gcloud.note("")
        nodes = self._answer(self.gcloud.argv.nodes())
        for listed in (lambda: read_slices(nodes, []), self.survey):
            ours = [each for each in listed() if self.is_ours(each) and name in (None, each.name)]
            names = sorted({each.name for each in ours})
            if len(names) > 1:
                raise SliceError(f"you have several slices: {', '.join(names)}; name one")
            if ours:
                return min(ours, key=lambda each: _preference(each, ()))
        what = f"no slice of yours is named {name}" if name else "you have no slices"
        raise SliceError(f"{what}; podium pod ls lists slices, podium pod up rents one")

    def now(self, tpu_slice: Slice) -> Slice | None:
        """The slice as listed now; None if it is gone."""
        for each in read_slices(self._answer(self.gcloud.argv.nodes(tpu_slice.zone)), []):
            if each.name == tpu_slice.name and self.is_ours(each) and each.state == "ready":
                return each  # without reading the queue, which takes longer
        return self.mine(tpu_slice.name, tpu_slice.zone)

    def is_ours(self, tpu_slice: Slice) -> bool:
        """Whether it carries our owner's label."""
        return tpu_slice.owner == self.owner

    def mine(self, name: str, zone: str) -> Slice | None:
        """Our slice of that name in a zone."""
        return next(filter(self.is_ours, self.named(name, zone)), None)

    def named(self, name: str, zone: str) -> list[Slice]:
        """The slices of that name in a zone, queued resources before nodes without one."""
        with ThreadPoolExecutor(self._parallel) as pool:
            nodes = pool.submit(self._answer, self.gcloud.argv.nodes(zone))
            queued = pool.submit(self._answer, self.gcloud.argv.queued(zone))
        found = [each for each in read_slices(nodes.result(), queued.result()) if each.name == name]
        return sorted(found, key=lambda each: not each.queued)

    def _queued(self, zone: str, needed: Sequence[str] = ()) -> Sequence[ApiObject]:
        argv = self.gcloud.argv.queued(zone)
        return self._answer(argv) if zone in needed else self._readable(argv, f"{zone}: its queue")

    def _nodes(self, zone: str) -> Sequence[ApiObject]:
        return self._readable(self.gcloud.argv.nodes(zone), f"{zone}: its nodes")

    def _readable(self, argv: Sequence[str], what: str) -> Sequence[ApiObject]:
        """The result of a list command; without permission, say so and return an empty list."""
        try:
            return self._answer(argv)
        except GcloudError as error:
            if error.kind not in ("denied", "not_found", "invalid"):
                raise
            self.say(f"{what} cannot be read ({error.text})")
            return []

    def _answer(self, argv: Sequence[str], timeout_s: float = READ_S) -> ApiAnswer:
        """Run a command that is safe to repeat, until it answers."""
        for pause in PAUSES_S:
            try:
                return self.gcloud.ask(argv, timeout_s)
            except GcloudError as error:
                if not error.transient and not error.uncertain:
                    raise
            self.clock.sleep(pause)
        return self.gcloud.ask(argv, timeout_s)


class Slices(SliceLists):
    """Rents and deletes the slices of one owner in one project."""

    def up(self, order: Order, zones: Sequence[str]) -> Slice:
        """Rent a slice in the first zone that grants it, or use an existing one, and wait until it is ready.

        Raises:
            TakenError: slices of others have the name in all zones.
            SliceError: all zones refuse; the message has each zone's reason.
            PendingError: gcloud failed after a request that may still be granted.
            GcloudError: gcloud is unusable, or does not answer; nothing was requested.
        """
        reasons: dict[str, str] = {}
        pending: list[str] = []  # zones where a request may stand
        try:
            while (got := self._next(order, zones, reasons, pending)) is None:
                pass
            for zone in reasons:  # again: gcloud may have sent a request twice, and the first may be done late
                self._clear(order, zone)
        except GcloudError as error:
            if not pending:
                raise
            raise PendingError(
                f"{error}\n{order.name} may be requested or rented in {', '.join(pending)}: "
                f"podium pod down {order.name} withdraws it; the same command continues"
            ) from error
        return got

    def _next(self, order: Order, zones: Sequence[str], reasons: dict[str, str], pending: list[str]) -> Slice | None:
        """Wait for the existing slice, or for one in the next zone; None if refused, for the reason in `reasons`."""
        existing = self._existing(order, zones, reasons)
        zone = existing.zone if existing else next((each for each in zones if each not in reasons), None)
        if zone is None:
            raise self._all_refused(order, reasons)
        try:
            if existing is None:
                self._ask(order, zone)
            pending[:] = [zone]
            granted = self._wait(order, zone)
            return granted if existing and existing.state == "ready" else _without_requests(granted)
        except _RefusedError as refusal:
            reasons[zone] = str(refusal)
            self.say(f"{zone}: {refusal}")
            self._clear(order, zone, refusal.identity)
            pending.clear()
        except DeletedError:  # by another command of ours, which may have asked for it in another zone
            if self._existing(order, zones, reasons) is None:
                raise
        return None

    def down(self, name: str) -> list[Slice]:
        """Delete our slices of that name in all zones, verify that they are gone, and return them.

        Raises:
            SliceError: the name belongs only to another owner's slice, or something remains.
        """
        found = self.find(name)
        if not found:  # a request without a reply may still be carried out, or its zone may be unreachable for a moment
            self.clock.sleep(LATE_S)
            found = self.find(name, each_zone=True)
        ours = [each for each in found if self.is_ours(each)]
        if found and not ours:
            raise _taken(found[0], self.owner)
        self.gcloud.note(f"for every slice of yours that is named {name}; the second if it was not queued:")
        self.delete(ours)
        left = [each for each in self.find(name) if any(map(each.is_same, ours))] if ours else []
        if left:
            raise SliceError(f"{name} is still in {', '.join(each.zone for each in left)}; run the command again")
        return ours

    def delete(self, slices: Sequence[Slice]) -> None:
        """Delete slices of any owner, and wait until lists no longer show them; later ones with their names are kept.

        Raises SliceError if one is still listed after a quarter of an hour.
        """
        for each in sorted(slices, key=lambda each: not each.queued):
            self._delete(each)

    def _delete(self, tpu_slice: Slice) -> None:
        until = self.clock.monotonic() + DELETE_S
        while same := [each for each in self.named(tpu_slice.name, tpu_slice.zone) if each.is_same(tpu_slice)]:
            if self.clock.monotonic() > until:
                where = f"{tpu_slice.name} in {tpu_slice.zone}"
                raise SliceError(f"{where} still exists ({same[0].detail}); run podium pod down {tpu_slice.name} again")
            confirmed = all(self._request_deletion(each) for each in same)
            self.gcloud.note("until it is no longer listed:")
            if not confirmed:
                self.clock.sleep(POLL_S)

    def _request_deletion(self, listed: Slice) -> bool:
        """Delete a slice as it was just listed; returns whether gcloud confirmed it."""
        if listed.state == "deleting":
            return False
        try:
            self.gcloud.checked(self.gcloud.argv.delete(listed.name, listed.zone, queued=listed.queued))
        except GcloudError as error:
            if not error.transient and error.kind not in ("unknown", "not_found", "precondition"):
                raise
            return False
        return True

    def _existing(self, order: Order, zones: Sequence[str], reasons: dict[str, str]) -> Slice | None:
        """Our usable slice with this name; our other slices with it are deleted unless a run was started on them.

        Adds zones in which another owner's slice has the name to `reasons`.
        """
        found = self.find(order.name, needed=zones)
        for each in found:
            if not self.is_ours(each) and each.zone in zones and each.zone not in reasons:
                reasons[each.zone] = str(_taken(each, self.owner))
                self.say(reasons[each.zone])
        ours = [each for each in found if self.is_ours(each)]
        best = min((each for each in ours if each.alive), key=lambda each: _preference(each, zones), default=None)
        if best and (best.accelerator, best.spot) != (order.accelerator, order.spot):
            raise SliceError(
                f"{best.name} exists in {best.zone} as {best.accelerator}, {'spot' if best.spot else 'on demand'}; "
                f"ask for that, choose another name, or delete it first: podium pod down {best.name}"
            )
        if best and best.labels.get(ID) != order.labels.get(ID):
            self.say(f"{order.name} exists in {best.zone} ({best.detail})")
        for each in ours:
            if each is best:
                continue
            if each.alive and each.started:
                self.say(f"{each.name} is also rented in {each.zone}, where {each.run} was started; it is kept")
                continue
            self.say(f"deleting {each.name} in {each.zone}: {each.detail}")
            self._delete(each)
        return best

    def _all_refused(self, order: Order, reasons: Mapping[str, str]) -> SliceError:
        """The error when no zone is left."""
        others = {each.zone for each in self.find(order.name) if not self.is_ours(each)}
        lines = "".join(f"\n    {zone}: {reason}" for zone, reason in reasons.items())
        if set(reasons) <= others:
            return TakenError(f"the name {order.name} is taken in every zone; nothing was requested:{lines}")
        return SliceError(f"no zone gave {order.accelerator} for {order.name}, and nothing is left behind:{lines}")

    def _ask(self, order: Order, zone: str) -> None:
        """Repeat the request until it is certain that the zone has accepted or refused it."""
        self.say(f"{zone}: asking for {order.accelerator}, {'spot' if order.spot else 'on demand'}")
        self.gcloud.note(
            f"if no slice is named {order.name}; the owner is that of gcloud's account; the next zone if one refuses:"
        )
        error: GcloudError | None = None
        for pause in (*PAUSES_S, None):
            try:
                self.gcloud.checked(self.gcloud.argv.create(order, zone))
                return
            except GcloudError as failed:
                error = failed
            if error.kind in ("missing", "project", "login", "disabled"):  # the same in every zone
                raise error
            if error.kind == "exists" or error.uncertain:
                if self._stands(order.name, zone):
                    self.say(f"{zone}: it already exists ({error.kind}); using it")
                    return
            elif error.kind != "rate":
                raise _RefusedError(error)
            if pause is not None:
                self.clock.sleep(pause)
        assert error is not None
        raise self._refusal(order.name, zone, error)

    def _stands(self, name: str, zone: str) -> bool:
        """Whether a request of ours is known to exist in a zone."""
        with contextlib.suppress(GcloudError):  # unknown, so the request is repeated
            return self.mine(name, zone) is not None
        return False

    def _refusal(self, name: str, zone: str, error: GcloudError) -> SliceError | _RefusedError:
        """The error for a request that failed for good."""
        if error.uncertain and error.kind != "unknown":
            return SliceError(
                f"{name}: it is unknown whether {zone} created it ({error.text}); nothing else was requested. "
                f"Run the command again, or delete what may exist: podium pod down {name}"
            )
        return _RefusedError(error)

    def _wait(self, order: Order, zone: str) -> Slice:
        """Wait until it is ready. Raises _RefusedError if it never will be."""
        self.gcloud.note("until it is ready:")
        patience = Patience(self.clock, self.say, f"the request for {order.name} in {zone} stays")
        waiting = _Waiting(order, zone, self.clock)
        while True:
            try:
                mine = self.mine(order.name, zone)
            except GcloudError as error:
                patience.wait(error)
                waiting.seen = self.clock.monotonic()  # time asleep does not count
                continue
            patience.reset()
            if mine is not None and mine.detail != waiting.detail:
                self.say(f"{zone}: {mine.detail}")
            if waiting.ready(mine) and mine is not None:
                return mine
            self.clock.sleep(min(POLL_S, 2.0 + waiting.waited_s / 10))

    def _clear(self, order: Order, zone: str, identity: str | None = None) -> None:
        """Delete what an order created in a zone, and our slice with this identity, if they exist."""
        wanted = (order.labels.get(ID, ""), identity)
        for each in self.named(order.name, zone):
            if self.is_ours(each) and each.identity in wanted:
                self._delete(each)


class _Waiting:
    """The state of a pending request; time during which the laptop slept does not count as waiting."""

    def __init__(self, order: Order, zone: str, clock: Clock) -> None:
        self.detail = ""
        self.seen = clock.monotonic()  # when it was last listed
        self._order = order
        self._zone = zone
        self._clock = clock
        self._began = self.seen
        self._creating: float | None = None  # when creation of the machines began

    @property
    def waited_s(self) -> float:
        """Seconds since the request."""
        return self._clock.monotonic() - self._began

    def ready(self, mine: Slice | None) -> bool:
        """Whether it is ready, as listed now. Raises _RefusedError if it never will be, DeletedError if it is gone."""
        now = self._clock.monotonic()
        if mine is None or mine.state == "deleting":
            if now - self.seen <= SETTLE_S:
                return False
            if self.detail:
                raise DeletedError(f"{self._order.name} in {self._zone} was deleted while it was being created")
            raise _RefusedError("it was requested and never listed")
        self.seen = now
        self.detail = mine.detail
        if mine.state == "ready":
            return True
        self._creating = (self._creating or now) if mine.state == "creating" else None
        if not mine.alive:
            raise _RefusedError(mine.detail, mine.identity)
        if self._creating and now - self._creating > NODE_S:
            raise _RefusedError(f"its machines have been {mine.detail} for {NODE_S / 60:.0f} minutes", mine.identity)
        if mine.state == "waiting" and self.waited_s > NODE_S + self._order.valid_until_s:
            raise _RefusedError(f"not ready after {self.waited_s:.0f} s ({mine.detail})", mine.identity)
        return False


def _without_requests(granted: Slice) -> Slice:
    """The slice without labels that ask its run to stop or announce its end.

    This laptop may hear of the grant hours later, when another one has already asked the run to stop. The session must
    see that request as new, and not as one from before its own start.
    """
    labels = {name: text for name, text in granted.labels.items() if name not in (STOP, END)}
    return dataclasses.replace(granted, labels=labels)


def _taken(other: Slice, owner: str) -> SliceError:
    whose = f"podium's owner {other.owner!r}" if other.owner else "not rented by podium"
    return SliceError(
        f"{other.name} in {other.zone} is not yours ({whose}; you are {owner!r}) and is not touched; "
        "choose another name"
    )


def _preference(tpu_slice: Slice, zones: Sequence[str]) -> tuple[int, int]:
    """A sort key, best first: ready before waiting, then zones in the requested order."""
    states = ("ready", "creating", "waiting", "deleting", "dead", "failed")
    return states.index(tpu_slice.state), zones.index(tpu_slice.zone) if tpu_slice.zone in zones else len(zones)
