"""Makes a program as short as any compiler does before it decides on kernels.

Views and equal operations get one name each, what nothing reads goes, sums of which each device keeps a part become
reduce-scatters, and on TPUs conversions of what loops only read are done before the loops.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from podium.plan.traced.lowered_program import Array, Body, Operation, Sent
from podium.plan.traced.operation_table import SEPARATE, Kind


def simplify(body: Body) -> None:
    """Give views and equal operations one name each, and drop what nothing reads, in a body and in those inside it."""
    same: dict[Array, Array] = {}
    known: dict[tuple[object, ...], Operation] = {}
    kept: list[Operation] = []

    for each in body.operations:
        each.reads = [_root(read, same) for read in each.reads]
        for inner in each.bodies:
            _rename(inner, same)
        if _is_view(each):
            same[each.writes[0]] = each.reads[0]
            continue
        if each.kind in SEPARATE:
            each.reads = [_own_number(read, kept) for read in each.reads]
        if each.text:
            key = (each.name, *each.reads, each.text, *(repr(write) for write in each.writes))
            if key in known:
                same.update(zip(each.writes, known[key].writes, strict=True))
                continue
            known[key] = each
        for inner in each.bodies:
            simplify(inner)
        if each.name == "while":
            (inner,) = each.bodies
            unchanged = [given is result for given, result in zip(inner.given, inner.results, strict=True)]
            same.update(
                (write, read)
                for write, read, is_same in zip(each.writes, each.reads, unchanged, strict=True)
                if is_same
            )
        kept.append(each)
    body.operations = kept
    body.results = [_root(result, same) for result in body.results]
    _merge_scatters(body)
    _copy_repeated(body)
    drop_unread(body)


def _is_view(operation: Operation) -> bool:
    """Whether an operation's result is the very bytes of what it reads."""
    if operation.kind is Kind.TRANSFER:
        return not operation.sent.bytes
    if operation.kind is not Kind.VIEW and operation.name not in ("broadcast_in_dim", "slice", "pad", "convert"):
        return False
    read, write = operation.reads[0], operation.writes[0]
    return (read.dtype, read.elements, read.host) == (write.dtype, write.elements, write.host)


def _root(array: Array, same: Mapping[Array, Array]) -> Array:
    while array in same:
        array = same[array]
    return array


def _rename(body: Body, same: Mapping[Array, Array]) -> None:
    """Use other names for arrays in a body, and in those inside it."""
    for each in body.operations:
        each.reads = [_root(read, same) for read in each.reads]
        for inner in each.bodies:
            _rename(inner, same)
    body.results = [_root(result, same) for result in body.results]


def drop_unread(body: Body) -> None:
    """Drop the operations whose results nothing reads."""
    needed, kept = set(body.results), []
    for each in reversed(body.operations):
        if each.writes and needed.isdisjoint(each.writes):
            continue
        kept.append(each)
        needed.update(each.reads)
    body.operations = kept[::-1]


def _own_number(array: Array, operations: list[Operation]) -> Array:
    """Another name for one number many times: it is written anew for each kernel that needs it in memory."""
    maker = array.maker
    if maker is None or maker.name != "broadcast_in_dim" or not maker.reads[0].is_constant:
        return array
    again = dataclasses.replace(array)
    again.maker = dataclasses.replace(maker, writes=[again], text="")
    operations.append(again.maker)
    return again


def _copy_repeated(body: Body) -> None:
    """Copy what is several results: each has its own memory."""
    for number, result in enumerate(body.results):
        if any(result is other for other in body.results[:number]) and result not in body.given:
            copy = Operation(name="copy", kind=Kind.OWN, reads=[result], writes=[dataclasses.replace(result)])
            copy.writes[0].maker = copy
            body.operations.append(copy)
            body.results[number] = copy.writes[0]


def _merge_scatters(body: Body) -> None:
    """Where of a sum over devices each keeps a part, sum only the parts: XLA's own reduce-scatter.

    Devices that keep the same part, since they have copies of the same weights, add these up afterwards.
    """
    users, operations = readers(body), list[Operation]()
    for each in body.operations:
        operations.append(each)
        summed = each.reads[0].maker if each.name == "all_slice" else None
        if summed is None or summed.name != "all_reduce" or users[each.reads[0]] != [each]:
            continue
        (part,), sent = each.writes, summed.sent
        copies = max(1, round(sent.group * part.elements / each.reads[0].elements))
        each.name, each.kind, each.reads = "reduce_scatter", Kind.TRANSFER, summed.reads
        kept = float(each.reads[0].bytes - part.bytes)
        each.sent = Sent(kept, sent.group // copies, max(1, sent.machines // copies))
        if copies > 1:
            each.writes = [dataclasses.replace(part, maker=each)]
            added = Sent(2 * (copies - 1) / copies * part.bytes, copies, min(copies, sent.machines))
            part.maker = dataclasses.replace(
                summed, reads=each.writes, writes=[part], sent=added, in_place=[(0, 0)], source=each.source
            )
            operations.append(part.maker)
    body.operations = operations


def readers(body: Body) -> dict[Array, list[Operation]]:
    """The operations that read each array."""
    found: dict[Array, list[Operation]] = defaultdict(list)
    for each in body.operations:
        for read in dict.fromkeys(each.reads):
            found[read].append(each)
    return found


def hoist(body: Body) -> None:
    """Convert before each loop what it only reads and converts to fewer bytes: once instead of in every round."""
    made: dict[tuple[Array, str], Array] = {}
    for loop in [each for each in body.operations if each.name == "while"]:
        (inner,) = loop.bodies
        hoist(inner)
        users = readers(inner)
        for number, (given, result) in enumerate(zip(inner.given, inner.results, strict=True)):
            if given is not result:
                continue
            found = _narrowed(inner, users, given)
            if found is None:
                continue
            held, conversions = found
            dtype = conversions[0].writes[0].dtype
            key = loop.reads[number], dtype
            if key not in made:
                made[key] = Array(loop.reads[number].shape, dtype)
                once = Operation(name="convert", kind=Kind.OWN, reads=[loop.reads[number]], writes=[made[key]])
                made[key].maker = once
                body.operations.insert(body.operations.index(loop), once)
            loop.reads[number], loop.writes[number] = made[key], dataclasses.replace(made[key], maker=loop)
            for array in held:
                array.dtype = dtype
            same = {each.writes[0]: each.reads[0] for each in conversions}
            inner.operations = [each for each in inner.operations if each not in conversions]
            _rename(inner, same)
            users = readers(inner)


def _narrowed(
    body: Body, users: Mapping[Array, list[Operation]], given: Array
) -> tuple[list[Array], list[Operation]] | None:
    """An array under the names of its parts and behind barriers, if it is only read to be converted to fewer bytes."""
    held, conversions = [given], []
    for array in held:
        if array is not given and array in body.results:
            return None
        for each in users.get(array, ()):
            if each.name == "dynamic_slice" and each.reads[0] is array:
                held.append(each.writes[0])
            elif each.kind is Kind.BARRIER:
                held.append(each.writes[each.reads.index(array)])
            elif each.name == "convert" and each.writes[0].bits < array.bits:
                conversions.append(each)
            else:
                return None
    return (held, conversions) if len({each.writes[0].dtype for each in conversions}) == 1 else None
