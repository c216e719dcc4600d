"""The sizes of dp, fsdp, sp and tp that `mesh:` means on given devices, hosts and slices. No jax: errors come first.

Several slices are joined by the data center's network (DCN), a hundred times slower than the interconnect within a
slice. They are the outermost part of dp: `dcn:2,fsdp:8` copies the weights to two slices and splits them over 8 devices
in each.
"""

import math
import re

AXES = ("dp", "fsdp", "sp", "tp")
SLICES = "dcn"


def mesh_sizes(text: str, *, hosts: int = 1, slices: int = 1) -> tuple[int, int, int, int]:
    """The sizes of dp, fsdp, sp and tp that `mesh:` writes down, with -1 for what is left: known without any device.

    `auto` is full FSDP in each slice, `host_local` is dp over hosts and fsdp inside each, `fsdp:4,tp:2` names sizes
    (what is not named is 1), `1,-1,1` is dp, fsdp and tp. At most one is -1. Raises ValueError for any other text.
    """
    if text == "auto":
        sizes = [slices, -1, 1, 1]
    elif text == "host_local":
        sizes = [hosts, -1, 1, 1]
    elif re.fullmatch(r"\s*-?\d+\s*(,\s*-?\d+\s*){2}", text):
        dp, fsdp, tp = (int(part) for part in text.split(","))
        sizes = [dp, fsdp, 1, tp]
    elif re.fullmatch(r"\s*[a-z]+\s*:\s*-?\d+\s*(,\s*[a-z]+\s*:\s*-?\d+\s*)*", text):
        sizes = _named_sizes(text)
    else:
        raise ValueError(f"mesh {text!r}: write auto, host_local, 'fsdp:4,tp:2' or '1,-1,1' (dp, fsdp, tp)")
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh {text!r}: sizes are 1 or more, and at most one is -1")
    dp, fsdp, sp, tp = sizes
    return dp, fsdp, sp, tp


def mesh_shape(text: str, *, devices: int, hosts: int, slices: int = 1) -> tuple[int, int, int, int]:
    """The sizes of dp, fsdp, sp and tp that `mesh:` means on these devices. Raises ValueError if it does not fit."""
    sizes = mesh_sizes(text, hosts=hosts, slices=slices)
    asked = re.search(rf"{SLICES}\s*:\s*(\d+)", text)
    if asked and int(asked[1]) != slices:
        raise ValueError(
            f"mesh {text!r}: {SLICES} is the number of slices, and there {'is' if slices == 1 else 'are'} {slices};"
            f" set {SLICES}:{slices}, or leave it out"
        )
    known = math.prod(size for size in sizes if size != -1)
    if devices % known or (-1 not in sizes and known != devices):
        raise ValueError(
            f"mesh {text!r} needs {known} devices{' or a multiple' if -1 in sizes else ''},"
            f" and this machine has {devices}; set mesh to auto for all that it has"
        )
    dp, fsdp, sp, tp = (devices // known if size == -1 else size for size in sizes)
    if asked and dp % slices:
        raise ValueError(
            f"mesh {text!r}: dp {dp} does not divide over {slices} slices; set fsdp, sp and tp within a slice"
        )
    return dp, fsdp, sp, tp


def _named_sizes(text: str) -> list[int]:
    """The sizes of `dcn:2,fsdp:4`, slices taken into dp."""
    named = [(name.strip(), int(size)) for name, size in (part.split(":") for part in text.split(","))]
    unknown = [name for name, _ in named if name not in (SLICES, *AXES)]
    if unknown or len({name for name, _ in named}) < len(named):
        raise ValueError(
            f"mesh {text!r}: axes are dp, fsdp, sp and tp (and dcn, the slices), each at most once;"
            f" found {[name for name, _ in named]}"
        )
    sizes = {SLICES: 1, **dict.fromkeys(AXES, 1), **dict(named)}
    slices = sizes.pop(SLICES)
    if slices < 1:
        raise ValueError(f"mesh {text!r}: {SLICES} is the number of slices, 1 or more")
    if sizes["dp"] != -1:
        sizes["dp"] *= slices
    return list(sizes.values())
