"""The system calls on which the sandbox is built: namespaces, mounts, Landlock, capabilities, seccomp. Linux only.

Numbers and structures are the kernel's; man pages of the same names describe them.
"""

import ctypes
import errno
import functools
import os
import resource
import struct
from collections.abc import Sequence

# sched.h: namespaces, as clone and unshare take them
NEWNS = 0x20000
NEWCGROUP = 0x2000000
NEWUTS = 0x4000000
NEWIPC = 0x8000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000
# mount.h
RDONLY = 1
NOSUID = 2
NODEV = 4
NOEXEC = 8
BIND = 4096
REC = 16384
PRIVATE = 1 << 18
DETACH = 2
# prctl.h
PDEATHSIG = 1
DUMPABLE = 4
SECCOMP = 22
CAPBSET_DROP = 24
NO_NEW_PRIVS = 38
AMBIENT = 47

ALLOWED = """
read:0:63 write:1:64 open:2:- openat:257:56 close:3:57 stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79 statx:332:291
poll:7:- ppoll:271:73 select:23:- pselect6:270:72 lseek:8:62 mmap:9:222 mprotect:10:226 munmap:11:215 mremap:25:216
madvise:28:233 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136
rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66
access:21:- faccessat:269:48 faccessat2:439:439 pipe:22:- pipe2:293:59 dup:32:23 dup2:33:- dup3:292:24 nanosleep:35:101
clock_nanosleep:230:115 getitimer:36:102 setitimer:38:103 alarm:37:- pause:34:- getpid:39:172 gettid:186:178
getppid:110:173 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150
getgroups:115:158 getpgid:121:155 getpgrp:111:- getsid:124:156 setsid:112:157 setpgid:109:154 fork:57:- vfork:58:-
execve:59:221 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 kill:62:129 tgkill:234:131 tkill:200:130
uname:63:160 fcntl:72:25 flock:73:32 fsync:74:82 fdatasync:75:83 truncate:76:45 ftruncate:77:46 getdents64:217:61
getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- renameat:264:38 renameat2:316:276 mkdir:83:- mkdirat:258:34 rmdir:84:-
creat:85:- link:86:- linkat:265:37 unlink:87:- unlinkat:263:35 symlink:88:- symlinkat:266:36 readlink:89:-
readlinkat:267:78 chmod:90:- fchmod:91:52 fchmodat:268:53 umask:95:166 gettimeofday:96:169 clock_gettime:228:113
clock_getres:229:114 time:201:- times:100:153 getrusage:98:165 sysinfo:99:179 getrlimit:97:163 sched_yield:24:124
sched_getaffinity:204:123 futex:202:98 set_robust_list:273:99 get_robust_list:274:100 set_tid_address:218:96
rseq:334:293 arch_prctl:158:- getrandom:318:278 getcpu:309:168 statfs:137:43 fstatfs:138:44 utimensat:280:88
epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 eventfd2:290:19 membarrier:324:283
msync:26:227 copy_file_range:326:285 sendfile:40:71 fadvise64:221:223 fallocate:285:47 close_range:436:436
restart_syscall:219:128
"""
"""System calls that code in the sandbox may make, with their numbers on x86-64 and aarch64: files, memory, signals,
processes, clocks. No sockets, no tracing, nothing that mounts, loads or makes namespaces."""
PARTLY = "clone:56:220 clone3:435:435 ioctl:16:29 prctl:157:167 prlimit64:302:261"
"""System calls that the filter allows or refuses by their arguments."""
UNSUPPORTED = """
setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11
llistxattr:195:12 flistxattr:196:13
"""
"""System calls that fail as on a file system without extended attributes, which libraries expect (shutil.copy2)."""
OURS = """
mount:165:40 umount2:166:39 unshare:272:97 setns:308:268 pivot_root:155:41 capset:126:91 mount_setattr:442:442
landlock_create_ruleset:444:444 landlock_add_rule:445:445 landlock_restrict_self:446:446
"""
"""System calls that the sandbox makes itself before it forbids them to the code."""
TERMINAL_CALLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Requests of ioctl: is it a terminal, its size, bytes to read, blocking or not, close on exec or not."""
THREAD_NAMES = (15, 16)
"""Options of prctl: set and get the name of a thread."""
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


@functools.cache
def numbers(table: str) -> dict[str, int]:
    """The numbers of a table's system calls on this machine. Raises OSError unless it is x86-64 or aarch64."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"the sandbox knows {' and '.join(MACHINES)}, and this is {machine}")
    place = 1 + list(MACHINES).index(machine)
    rows = [row.split(":") for row in table.split()]
    return {row[0]: int(row[place]) for row in rows if row[place] != "-"}


def checked(result: int, what: str) -> int:
    """The result of a call. Raises OSError if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def call(name: str, *arguments: object) -> int:
    """Make one of the sandbox's own system calls."""
    return checked(libc.syscall(ctypes.c_long(numbers(OURS)[name]), *map(_word, arguments)), name)


def _word(value: object) -> object:
    """An argument of a system call as a machine word."""
    return ctypes.c_long(value) if isinstance(value, int) else value


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    checked(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Mount a file system, or bind a folder to a second path."""
    texts = [text.encode() if text else None for text in (source, target, kind, data)]
    try:
        call("mount", texts[0], texts[1], texts[2], flags, texts[3])
    except OSError as error:
        raise OSError(error.errno, f"mount {kind or source} at {target}: {os.strerror(error.errno or 0)}") from None


def read_only_tree(path: str) -> None:
    """Make the mount at a path and all mounts below it read-only, and disable setuid programs and devices.

    Needs Linux 5.12.
    """
    attributes = struct.pack("QQQQ", RDONLY | NOSUID | NODEV, 0, 0, 0)
    call("mount_setattr", -100, path.encode(), 0x8000, attributes, len(attributes))


def map_user(inside: int, user: int, group: int, proc: int) -> None:
    """In a new user namespace: call this process's user and group by the number `inside`. `proc` is an open /proc."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {user} 1"), ("gid_map", f"{inside} {group} 1")):
        file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(file, text.encode())
        os.close(file)


def landlock_version() -> int:
    """The version of Landlock in this kernel; 0 if it has none."""
    try:
        return call("landlock_create_ruleset", 0, 0, 1)
    except OSError:
        return 0


def landlock(readable: Sequence[str], writable: Sequence[str], devices: Sequence[str]) -> None:
    """From now on, this process may read only below `readable`, write only below `writable`, and use devices only below
    `devices`.
    """
    version = landlock_version()
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    network, scopes = 3 * (version >= 4), 3 * (version >= 6)
    size = 8 * (1 + (version >= 4) + (version >= 6))
    # landlock.h
    execute = 1
    write = 2
    read = 4
    folders = 8
    make_devices_and_sockets = 1 << 6 | 1 << 9 | 1 << 11 | 1 << 10
    rules = [(path, execute | read | folders) for path in readable]
    rules += [(path, files & ~make_devices_and_sockets) for path in writable]
    rules += [(path, write | read | folders) for path in devices]
    ruleset = call("landlock_create_ruleset", struct.pack("QQQ", files, network, scopes), size, 0)
    for path, rights in rules:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        call("landlock_add_rule", ruleset, 1, struct.pack("<Qi", rights & files, folder), 0)
        os.close(folder)
    call("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def drop_capabilities() -> None:
    """Give up all capabilities, for this process and for what it starts."""
    for capability in range(64):
        libc.prctl(CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)  # fails after the last capability
    libc.prctl(AMBIENT, ctypes.c_ulong(4), 0, 0, 0)
    call("capset", struct.pack("Ii", 0x20080522, 0), b"\0" * 24)


def limit(*, cpu_s: int, memory_bytes: int, file_bytes: int, processes: int) -> None:
    """Set the limits that the kernel enforces per process."""
    values = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_STACK: 64 << 20,
        resource.RLIMIT_CORE: 1,  # with 0 the machine's handler of core dumps would still be started
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for kind, value in values.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # programs written for competitions raise their stack limit; the address space bounds it as well
        resource.setrlimit(kind, (value, hard if kind == resource.RLIMIT_STACK else value))


def filter_program() -> bytes:
    """The seccomp filter, in classic BPF: ALLOWED calls pass, PARTLY ones by their arguments; others fail."""
    # linux/bpf_common.h: one instruction each
    load = 0x20
    equal = 0x15
    at_least = 0x35
    any_bit = 0x45
    give = 0x06
    # linux/seccomp.h: what to do with the call
    kill = 0x80000000
    allow = 0x7FFF0000
    refuse = 0x50000 | errno.EPERM
    # offsets in struct seccomp_data, of the low half of each word
    number = 0
    machine = 4
    first = 16
    second = 24
    third = 32
    code: list[tuple[int, int, int, int]] = [
        (load, 0, 0, machine),
        (equal, 1, 0, MACHINES[os.uname().machine]),
        (give, 0, 0, kill),
        (load, 0, 0, number),
        (at_least, 0, 1, 0x40000000),  # x32
        (give, 0, 0, kill),
    ]
    for each in numbers(ALLOWED).values():
        code += [(equal, 0, 1, each), (give, 0, 0, allow)]
    for each in numbers(UNSUPPORTED).values():
        code += [(equal, 0, 1, each), (give, 0, 0, 0x50000 | errno.EOPNOTSUPP)]
    partly = numbers(PARTLY)
    code += [(equal, 0, 1, partly["clone3"]), (give, 0, 0, 0x50000 | errno.ENOSYS)]  # libraries then fall back to clone
    namespaces = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
    code += [(equal, 0, 4, partly["clone"]), (load, 0, 0, first), (any_bit, 1, 0, namespaces), (give, 0, 0, allow)]
    code += [(give, 0, 0, refuse)]
    for name, offset, values in (("ioctl", second, TERMINAL_CALLS), ("prctl", first, THREAD_NAMES)):
        tests = [(equal, len(values) - place, 0, value) for place, value in enumerate(values)]
        code += [(equal, 0, len(tests) + 3, partly[name]), (load, 0, 0, offset), *tests]
        code += [(give, 0, 0, refuse), (give, 0, 0, allow)]
    code += [(equal, 0, 9, partly["prlimit64"])]  # a process may read its own limits, and set that of its stack
    code += [(load, 0, 0, first), (equal, 0, 7, 0), (load, 0, 0, second), (equal, 4, 0, resource.RLIMIT_STACK)]
    code += [(load, 0, 0, third), (equal, 0, 3, 0), (load, 0, 0, third + 4), (equal, 0, 1, 0), (give, 0, 0, allow)]
    code += [(give, 0, 0, refuse)]
    return b"".join(struct.pack("HBBI", *each) for each in code)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def seccomp() -> None:
    """Filter the system calls of this process and of all that it starts."""
    code = filter_program()
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    checked(libc.prctl(SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")
