"""Finds out what prevents the sandbox on this machine, and what to do about it, from the kernel's own settings."""

import os
from pathlib import Path

SETTINGS = (
    ("sys/kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns is 1", "0"),
    ("sys/kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone is 0", "1"),
    ("sys/user/max_user_namespaces", "0", "user.max_user_namespaces is 0", "15000"),
)
"""A file below /proc, the value with which it forbids namespaces to users, and a value that permits them."""
SECCOMP = (
    "a seccomp filter is active, as in a container: start that with one that permits unshare and mount (docker:"
    " --security-opt seccomp=unconfined; Kubernetes: seccompProfile.type: Unconfined)"
)
APPARMOR = (
    "an AppArmor profile is active, {profile}: in a container, start that without it (docker: --security-opt"
    " apparmor=unconfined; Kubernetes: appArmorProfile.type: Unconfined)"
)
UNKNOWN = (
    "no setting that forbids it was found. In a container, permit unshare and mount (docker: --security-opt"
    " seccomp=unconfined --security-opt apparmor=unconfined); elsewhere, see whether user namespaces are permitted"
    " (`unshare --user --map-root-user true`)"
)


def ways_out(proc: str = "/proc") -> str:
    """What forbids namespaces here and how to permit them, in one line."""
    found = []
    for path, forbids, says, permits in SETTINGS:
        if _text(f"{proc}/{path}") == forbids:
            found.append(f"{says}: permit them with `sysctl {says.partition(' ')[0]}={permits}`")
    profile = _text(f"{proc}/self/attr/current")
    if profile and not profile.startswith("unconfined"):
        found.append(APPARMOR.format(profile=profile))
    if "\nSeccomp:\t2\n" in f"{_text(f'{proc}/self/status')}\n":
        found.append(SECCOMP)
    return "; ".join(found) or UNKNOWN


def way_to_python() -> str:
    """What to do if the user that the sandbox runs as may not read this Python."""
    instead = "install Python and Podium where all users may read them (below /usr or /opt, not in a home folder)"
    if os.geteuid() == 0:
        return (
            f"This root may not mount, so the sandbox runs as another user: {instead}, or give root CAP_SYS_ADMIN"
            " (docker: --cap-add SYS_ADMIN)"
        )
    return instead[0].upper() + instead[1:]


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").strip()
    except OSError:  # this kernel has no such setting
        return ""
