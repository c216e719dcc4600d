"""Resolves `mesh:` to axis sizes on given devices, hosts and slices. Does not import jax, so that errors come early.

Slices are joined by the data center's network (DCN), which is a hundred times slower than the interconnect within a
slice. They form the outermost part of dp: `dcn:2,fsdp:8` replicates the weights on two slices and splits them over the
8 devices of each slice.
"""

import math
import re
from collections.abc import Mapping

AXES = ("dp", "fsdp", "sp", "tp")
"""The axes of a mesh, outermost first."""
COPIES = "dp"
"""The axis along which weights are replicated; slices are its outermost part."""
SLICES = "dcn"
SHORT_FORM = ("dp", "fsdp", "tp")
"""The axes of an unnamed mesh such as `1,-1,1`."""

MeshSizes = Mapping[str, int]
"""Axis sizes by name, in the order of AXES."""


def mesh_sizes(text: str, *, hosts: int = 1, slices: int = 1) -> dict[str, int]:
    """Parse `mesh:` into axis sizes, with -1 for "all remaining devices"; needs no devices.

    `auto` is full FSDP in each slice, `host_local` is dp over hosts and fsdp inside each, `fsdp:4,tp:2` names axes
    (others are 1), and `1,-1,1` gives dp, fsdp and tp. At most one size is -1. Raises ValueError for any other text.
    """
    named: dict[str, int]
    if text == "auto":
        named = {COPIES: slices, "fsdp": -1}
    elif text == "host_local":
        named = {COPIES: hosts, "fsdp": -1}
    elif re.fullmatch(r"\s*-?\d+\s*(,\s*-?\d+\s*){2}", text):
        named = dict(zip(SHORT_FORM, map(int, text.split(",")), strict=True))
    elif re.fullmatch(r"\s*[a-z]+\s*:\s*-?\d+\s*(,\s*[a-z]+\s*:\s*-?\d+\s*)*", text):
        named = _named_sizes(text)
    else:
        raise ValueError(f"mesh {text!r}: write auto, host_local, 'fsdp:4,tp:2' or '1,-1,1' (dp, fsdp, tp)")
    sizes = {axis: named.get(axis, 1) for axis in AXES}
    if list(sizes.values()).count(-1) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"mesh {text!r}: sizes are 1 or more, and at most one is -1")
    return sizes


def mesh_shape(text: str, *, devices: int, hosts: int, slices: int = 1) -> dict[str, int]:
    """Resolve `mesh:` to axis sizes on these devices. Raises ValueError if it does not fit."""
    sizes = mesh_sizes(text, hosts=hosts, slices=slices)
    asked = re.search(rf"{SLICES}\s*:\s*(\d+)", text)
    if asked and int(asked[1]) != slices:
        raise ValueError(
            f"mesh {text!r}: {SLICES} is the number of slices, and there {'is' if slices == 1 else 'are'} {slices};"
            f" set {SLICES}:{slices}, or leave it out"
        )
    known = math.prod(size for size in sizes.values() if size != -1)
    open_axis = -1 in sizes.values()
    if devices % known or (not open_axis and known != devices):
        raise ValueError(
            f"mesh {text!r} needs {known} devices{' or a multiple' if open_axis else ''},"
            f" and this machine has {devices}; set mesh to auto for all that it has"
        )
    shape = {axis: devices // known if size == -1 else size for axis, size in sizes.items()}
    if asked and shape[COPIES] % slices:
        raise ValueError(
            f"mesh {text!r}: {COPIES} {shape[COPIES]} does not divide over {slices} slices;"
            f" set {_listed([axis for axis in AXES if axis != COPIES])} within a slice"
        )
    return shape


def mesh_text(sizes: MeshSizes) -> str:
    """Axis sizes in the form of `mesh:`."""
    return ",".join(f"{axis}:{size}" for axis, size in sizes.items())


def _named_sizes(text: str) -> dict[str, int]:
    """Parse a mesh such as `dcn:2,fsdp:4`; the number of slices is multiplied into dp."""
    named = [(name.strip(), int(size)) for name, size in (part.split(":") for part in text.split(","))]
    unknown = [name for name, _ in named if name not in (SLICES, *AXES)]
    if unknown or len({name for name, _ in named}) < len(named):
        raise ValueError(
            f"mesh {text!r}: axes are {_listed(AXES)} (and dcn, the slices), each at most once;"
            f" found {[name for name, _ in named]}"
        )
    sizes = dict(named)
    slices = sizes.pop(SLICES, 1)
    if slices < 1:
        raise ValueError(f"mesh {text!r}: {SLICES} is the number of slices, 1 or more")
    copies = sizes.get(COPIES, 1)
    return sizes | {COPIES: copies if copies == -1 else copies * slices}


def _listed(axes: tuple[str, ...] | list[str]) -> str:
    return f"{', '.join(axes[:-1])} and {axes[-1]}"
