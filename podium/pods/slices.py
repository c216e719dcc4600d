"""Rents and deletes slices, with verification, even if replies are lost.

    nothing -> requested in a zone -> waiting -> creating -> ready -> dead (preempted) or deleted
                    |  refused or expired: deleted there, and the next zone is tried

A name is used once: each request has a new name, TITLE-WORD with a random word. A command that deletes or labels by
name, or repeats a request after a lost reply, can therefore never affect a later slice, however long its laptop slept.
If two laptops request slices of one title at the same time, the slice requested first (by Google's clock) is used, and
the others are deleted before it. A slice that was not the first when it was listed may thus be deleted at any time.

Nothing is stored here: every call queries what exists.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from podium.patience import Clock, Patience
from podium.pods.gcloud import CHANGE_S, READ_S, ApiAnswer, Gcloud, GcloudError, Order
from podium.pods.inventory import LOST, NAME, STARTED, STATE, ApiObject, Slice, read_slices
from podium.pods.world import random_word

POLL_S = 15.0
LIST_S = 2.0
"""Seconds between two checks whether lists show a request."""
SETTLE_S = 60.0
"""Seconds by which lists may lag behind requests and deletions."""
LATE_S = 10.0
"""Seconds after a lost reply within which a slice may still appear."""
NAME_WORD = 8
"""Characters of the random word in a slice's name."""
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
    """gcloud failed after a request was made, which may still be granted."""

    def __init__(self, title: str, zone: str, cause: GcloudError) -> None:
        """`cause` is gcloud's error; the message says what may be rented."""
        super().__init__(
            f"{cause}\n{title} may be requested or rented in {zone}: podium pod down {title} withdraws it; the same "
            "command continues"
        )
        self.cause = cause


class DeletedError(SliceError):
    """The slice was deleted by another command while it was being created."""


class TakenError(SliceError):
    """The slice belongs to another run, or this run may not delete it."""


class RefusedError(SliceError):
    """No zone grants the slice; no request or machine remains."""

    def __init__(self, order: Order, refused: Mapping[str, GcloudError | str]) -> None:
        lines = "".join(f"\n    {zone}: {reason}" for zone, reason in refused.items())
        super().__init__(f"no zone granted {order.accelerator} for {order.name}; no request or machine remains:{lines}")
        self.final = all(
            isinstance(each, GcloudError) and each.kind in ("denied", "invalid") for each in refused.values()
        )
        """Whether asking again cannot help."""


class SliceLists:
    """Lists the slices of a project, distinguishes the owner's from others, and sets labels."""

    def __init__(
        self,
        gcloud: Gcloud,
        *,
        owner: str,
        clock: Clock = time,
        say: Callable[[str], None] = lambda line: None,
        random_word: Callable[[str], str] = random_word,
        parallel: int = 4,
        follows: bool = False,
    ) -> None:
        """Set the project and the owner; `say` prints progress, `parallel` zones are listed at once.

        With `follows`, for commands that follow a run or a request, waits without a limit while Google cannot be
        reached.
        """
        self.gcloud = gcloud
        self.owner = owner
        self.clock = clock
        self.began = clock.time()
        """When the command was given, by this machine's clock."""
        self.say = say
        self.random_word = random_word
        self._parallel = parallel
        self._follows = follows
        self._speaking = threading.Lock()
        self._zones: list[str] | None = None

    def ask(self, argv: Sequence[str], timeout_s: float = READ_S) -> ApiAnswer:
        """Run a command until it answers, waiting while Google does not respond; the command must be safe to repeat.
        Raises GcloudError.
        """
        speaks = self._speaking.acquire(blocking=False)  # when several lists fail at once, one line is enough
        patience = Patience("Google", clock=self.clock, say=self.say if speaks else lambda line: None)
        try:
            while True:
                try:
                    return self.gcloud.ask(argv, timeout_s)
                except GcloudError as error:
                    if not error.transient and not error.uncertain:
                        raise
                    error.wait_out(patience, for_ever=self._follows)
        finally:
            if speaks:
                self._speaking.release()

    def survey(
        self, zones: Iterable[str] | None = None, *, each_zone: bool = False, needed: Sequence[str] = ()
    ) -> list[Slice]:
        """List all slices of the project, ours and others', in these zones or in all.

        A zone whose queue is not readable is reported and left out, because it cannot contain our slices; for `needed`
        zones, it is an error. gcloud's list over all zones silently omits unreachable zones; with `each_zone`, every
        zone is listed separately, and an unreachable one is an error.
        """
        self.gcloud.note("")
        wanted = self.zones if zones is None else list(zones)
        with ThreadPoolExecutor(self._parallel) as pool:
            listed = pool.map(self._nodes, wanted) if each_zone else [self.ask(self.gcloud.argv.nodes())]
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
            self._zones = sorted(each["locationId"] for each in self.ask(self.gcloud.argv.zones()))
        return self._zones

    def titled(self, name: str, *, each_zone: bool = False, needed: Sequence[str] = ()) -> list[Slice]:
        """Our slices with this title or name, in all zones, ordered by the time of their request.

        The queues of `needed` zones must be readable.
        """
        listed = self.survey(each_zone=each_zone, needed=needed)
        ours = [each for each in listed if self.is_ours(each) and name in (each.title, each.name)]
        return sorted(ours, key=lambda each: each.order)

    def label(self, tpu_slice: Slice, labels: Mapping[str, str]) -> None:
        """Set labels of a slice's node."""
        self.ask(self.gcloud.argv.label(tpu_slice.name, tpu_slice.zone, labels), CHANGE_S)

    def locate(self, name: str | None) -> Slice:
        """Find our slice with this name, or our only one; lists nodes first, because that is fast.

        Raises:
            SliceError: no slice matches, or more than one does.
        """
        self.gcloud.note("")
        nodes = self.ask(self.gcloud.argv.nodes())
        for listed in (lambda: read_slices(nodes, []), self.survey):
            ours = [each for each in listed() if self.is_ours(each) and name in (None, each.title, each.name)]
            titles = sorted({each.title for each in ours})
            if len(titles) > 1:
                raise SliceError(f"you have several slices: {', '.join(titles)}; name one")
            if ours:
                return min(ours, key=lambda each: (not each.alive, each.order))
        what = f"no slice of yours is named {name}" if name else "you have no slices"
        raise SliceError(f"{what}; podium pod ls lists slices, podium pod up rents one")

    def now(self, tpu_slice: Slice) -> Slice | None:
        """The slice as listed now; None if it no longer exists."""
        for each in read_slices(self.ask(self.gcloud.argv.nodes(tpu_slice.zone)), []):
            if each.name == tpu_slice.name and each.state == "ready":
                return each  # without reading the queue, which takes longer
        return self.named(tpu_slice.name, tpu_slice.zone)

    def is_ours(self, tpu_slice: Slice) -> bool:
        """Whether a slice carries our owner's label."""
        return tpu_slice.owner == self.owner

    def named(self, name: str, zone: str) -> Slice | None:
        """Our slice with this name in a zone."""
        with ThreadPoolExecutor(self._parallel) as pool:
            nodes = pool.submit(self.ask, self.gcloud.argv.nodes(zone))
            queued = pool.submit(self.ask, self.gcloud.argv.queued(zone))
        listed = read_slices(nodes.result(), queued.result())
        return next((each for each in listed if each.name == name and self.is_ours(each)), None)

    def _queued(self, zone: str, needed: Sequence[str] = ()) -> Sequence[ApiObject]:
        argv = self.gcloud.argv.queued(zone)
        return self.ask(argv) if zone in needed else self._readable(argv, f"{zone}: its queue")

    def _nodes(self, zone: str) -> Sequence[ApiObject]:
        return self._readable(self.gcloud.argv.nodes(zone), f"{zone}: its nodes")

    def _readable(self, argv: Sequence[str], what: str) -> Sequence[ApiObject]:
        """The result of a list command; without permission, print that and return an empty list."""
        try:
            return self.ask(argv)
        except GcloudError as error:
            if error.kind not in ("denied", "not_found", "invalid"):
                raise
            self.say(f"{what} cannot be read ({error.text})")
            return []


class Slices(SliceLists):
    """Rents and deletes the slices of one owner in one project."""

    def up(self, order: Order, zones: Sequence[str], *, over: Callable[[], bool] = lambda: False) -> Slice:
        """Rent a slice in the first zone that grants it, or use the existing slice of that title, and wait until it is
        ready.

        Args:
            order: what to rent, and for which run.
            zones: tried in this order.
            over: whether the run has ended meanwhile; called before and after each request.

        Raises:
            TakenError: the slice of this title was rented for another run.
            RefusedError: all zones refuse; the message has each zone's reason.
            DeletedError: another command has withdrawn the request, or the run is over.
            PendingError: gcloud failed after a request that may still be granted.
            GcloudError: gcloud is unusable, or does not answer; nothing was requested.
        """
        asking = _Asking(order, zones)
        try:
            while (got := self._advance(asking, over)) is None:
                pass
        except GcloudError as error:
            if not asking.standing:
                raise
            raise PendingError(order.name, asking.standing, error) from error
        return got

    def _advance(self, asking: "_Asking", over: Callable[[], bool]) -> Slice | None:
        """Do the next thing for an order: ask a zone, wait, or delete useless slices. Returns the slice once it is
        ready.
        """
        order = asking.order
        if asking.unseen:
            self._list(asking)
        found = self.titled(order.name, needed=asking.zones)
        holder = found[0] if found else None
        if over():
            self.delete([each for each in found if each.name in asking.asked])
            raise DeletedError(f"{order.name}: the run is over, so nothing is requested")
        # Nobody uses these, because the first holds the title. It is looked for once more, because the laptop may have
        # slept while `found` was read: the first may have been gone before its successors were requested.
        others = [each for each in found[1:] if each.name in asking.asked or (each.run and each.run == order.run)]
        if others and holder is not None and self.now(holder) is None:
            return None
        self.delete(others)
        if holder is not None:
            check_run(holder, order)
            _check_type(holder, order)
            asking.standing = holder.zone
        if holder is None:
            self._ask(asking)
        elif not holder.alive or holder.doomed:
            if holder.zone not in asking.refused:
                self.say(f"deleting {holder.name} in {holder.zone}: {holder.detail}")
            self.delete([holder])
            asking.standing = ""
        elif holder.state == "ready":
            return holder
        elif reason := self._wait(asking, holder):
            asking.refused[holder.zone] = reason
            self.say(f"{holder.zone}: {reason}")
        return None

    def down(
        self, name: str, run: str | None = None, *, tell: Callable[[Sequence[Slice]], None] = lambda found: None
    ) -> list[Slice]:
        """Delete our slices with this title or name in all zones, verify that they no longer exist, and return them.

        With `run`, only those that were rented for this run. `tell` is called with what will be deleted. Raises
        SliceError if something remains.
        """
        found = [each for each in self.titled(name) if run in (None, each.run)]
        if not found:  # a request without a reply may be in progress, or its zone unreachable
            self.clock.sleep(LATE_S)
            found = [each for each in self.titled(name, each_zone=True) if run in (None, each.run)]
        tell(found)
        self.gcloud.note(f"for every slice of yours that is named {name} (the second command if it was not queued):")
        self.delete(found)
        return found

    def delete(self, slices: Sequence[Slice]) -> None:
        """Delete slices, and wait until lists no longer show them; the one requested first is deleted last.

        Raises SliceError if one is still listed after a quarter of an hour.
        """
        for each in sorted(slices, key=lambda each: each.order, reverse=True):
            self._delete(each)

    def give_up(self, tpu_slice: Slice, mark: str, *, used: Callable[[Slice], bool] = lambda listed: False) -> bool:
        """Delete a slice on which other commands might start the same run, after setting `mark`, which prevents that.

        Returns whether it was deleted: not if it is no longer listed, or if a job was started there before the mark was
        set, which `used` tells of a slice that is ready.
        """
        found = self.titled(tpu_slice.title)
        listed = self.now(tpu_slice)  # after `found`, so that what stands beside it is not its successor
        if listed is None:
            return False
        if listed.node and listed.alive:
            self.label(listed, {STATE: mark})
            if listed.state == "ready" and used(listed):
                self.label(listed, {STATE: STARTED if listed.doomed else listed.mark or STARTED})
                return False
        self.delete(
            [listed, *(each for each in found if each.name != listed.name and each.run == listed.run is not None)]
        )
        return True

    def withdraw(self, tpu_slice: Slice) -> bool:
        """Delete a request that has no machines; returns False if it has received machines meanwhile."""
        argv = self.gcloud.argv.delete(tpu_slice.name, tpu_slice.zone, queued=True, force=False)
        try:
            self.gcloud.checked(argv)
        except GcloudError as error:
            if error.kind not in ("precondition", "not_found"):
                raise
            return error.kind == "not_found"
        return True

    def _delete(self, tpu_slice: Slice) -> None:
        until = self.clock.monotonic() + DELETE_S
        while (listed := self.named(tpu_slice.name, tpu_slice.zone)) is not None:
            if self.clock.monotonic() > until:
                where = f"{listed.name} in {listed.zone}"
                raise SliceError(f"{where} still exists ({listed.detail}); run podium pod down {listed.name} again")
            confirmed = self._request_deletion(listed)
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

    def _ask(self, asking: "_Asking") -> None:
        """Request a slice in the next zone, under a new name, until it is certain that the zone has accepted or
        refused.

        Raises RefusedError if no zone is left.
        """
        order, zone = asking.order, asking.next_zone
        name = f"{order.name}-{self.random_word('WORD')[:NAME_WORD]}"
        asking.asked.add(name)
        self.say(f"{zone}: asking for {order.accelerator}, {'spot' if order.spot else 'on demand'}")
        self.gcloud.note(
            f"if no slice is called {order.name}; the owner is that of gcloud's account; the next zone if one refuses:"
        )
        error = self._created(order, name, zone)
        if error is None:
            asking.standing, asking.unseen = zone, (name, zone)
            return
        if error.kind in ("missing", "project", "login", "disabled"):  # the same in every zone
            raise error
        if error.uncertain and error.kind != "unknown":
            raise SliceError(
                f"{order.name}: it is unknown whether {zone} created {name} ({error.text}); nothing else was "
                f"requested. Run the command again, or delete what may exist: podium pod down {order.name}"
            )
        self.say(f"{zone}: {error}")
        asking.refused[zone] = error

    def _created(self, order: Order, name: str, zone: str) -> GcloudError | None:
        """Request a slice, repeatedly if no reply arrives; returns the last error, or None if the request was
        accepted.
        """
        order = dataclasses.replace(order, labels={**order.labels, NAME: order.name})
        patience = Patience("Google", clock=self.clock, say=self.say)
        while True:
            try:
                self.gcloud.checked(self.gcloud.argv.create(order, name, zone))
                return None
            except GcloudError as failed:
                error = failed
            if error.kind == "exists":  # created by this request, whose reply was lost
                return None
            if not error.uncertain and error.kind != "rate":
                return error
            try:
                if self.named(name, zone) is not None:
                    return None
                error.wait_out(patience)
            except GcloudError:
                return error

    def _list(self, asking: "_Asking") -> None:
        """Wait until lists show the request made last."""
        assert asking.unseen is not None
        name, zone = asking.unseen
        self.gcloud.note("until it is ready:")
        until = self.clock.monotonic() + SETTLE_S
        while self.named(name, zone) is None:
            if self.clock.monotonic() > until:
                asking.refused[zone] = "it was requested and never appeared in lists"
                asking.standing = ""
                self.say(f"{zone}: {asking.refused[zone]}")
                break
            self.clock.sleep(LIST_S)
        asking.unseen = None

    def _wait(self, asking: "_Asking", holder: Slice) -> str | None:
        """Wait until the slice is ready; otherwise returns why it never will be. Raises DeletedError if another command
        withdrew it.
        """
        self.gcloud.note("until it is ready:")
        began = seen = self.clock.monotonic()  # time asleep does not count
        creating: float | None = None  # since when
        detail = ""
        while True:
            asked = self.clock.monotonic()
            listed = self.named(holder.name, holder.zone)
            now = self.clock.monotonic()
            seen += now - asked  # time in which Google did not respond
            creating = creating and creating + now - asked
            if listed is None or listed.state == "deleting":
                if now - seen > SETTLE_S:
                    break
            else:
                seen = now
                if not listed.alive:
                    return listed.detail
                if listed.detail != detail:
                    self.say(f"{holder.zone}: {listed.detail}")
                detail = listed.detail
                if listed.state == "ready" or listed.doomed:
                    return None
                creating = (creating or now) if listed.state == "creating" else None
                if creating and now - creating > NODE_S:
                    self.give_up(listed, LOST)
                    return f"its machines have been {detail} for {NODE_S / 60:.0f} minutes"
            self.clock.sleep(min(POLL_S, 2.0 + (now - began) / 10))
        asking.standing = ""
        if not self.titled(holder.title, needed=asking.zones):  # otherwise another command has replaced it
            raise DeletedError(f"{holder.name} in {holder.zone} was deleted while it was being created")
        return None


@dataclasses.dataclass
class _Asking:
    """The progress of an order so far."""

    order: Order
    zones: Sequence[str]
    refused: dict[str, GcloudError | str] = dataclasses.field(default_factory=dict)
    """Zones that have refused, with their reasons."""
    asked: set[str] = dataclasses.field(default_factory=set)
    """Names of the requests that this command made."""
    standing: str = ""
    """The zone in which a request may be pending; empty if none."""
    unseen: tuple[str, str] | None = None
    """Name and zone of the last request, until lists show it."""

    @property
    def next_zone(self) -> str:
        """The zone to ask next. Raises RefusedError if none is left."""
        for zone in self.zones:
            if zone not in self.refused:
                return zone
        raise RefusedError(self.order, self.refused)


def check_run(holder: Slice, order: Order) -> None:
    """Raise TakenError if the existing slice of an order's title was rented for another run."""
    if holder.run not in (None, order.run):
        raise TakenError(
            f"{holder.name} in {holder.zone} was rented for the run {holder.run} (podium pod run --keep-alive); choose "
            f"another --slice, or delete it: podium pod down {holder.title}"
        )


def _check_type(holder: Slice, order: Order) -> None:
    """Raise SliceError if the existing slice of an order's title is of another type."""
    if holder.alive and not holder.doomed and (holder.accelerator, holder.spot) != (order.accelerator, order.spot):
        raise SliceError(
            f"{holder.name} exists in {holder.zone} as {holder.accelerator}, "
            f"{'spot' if holder.spot else 'on demand'}; ask for that, choose another name, or delete it first: "
            f"podium pod down {holder.title}"
        )
