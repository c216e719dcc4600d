"""What `podium pod run` sends to the machines, how they are set up, and what is wrong with them."""

import re

from tests.pods.pod_world import CANARIES, git, rent


def test_changes_that_are_not_committed_are_refused_by_name_or_sent_and_kept(make_world, pod, tmp_path, monkeypatch):
    from tests.pods.pod_world import make_checkout

    world = make_world(workers=1)
    dirty = make_checkout(tmp_path / "dirty")
    monkeypatch.chdir(dirty)
    rent(world, pod)
    (dirty / "podium" / "__init__.py").write_text('__version__ = "0.0.0"\n')
    (dirty / "new.bin").write_bytes(bytes(range(256)))
    status, _, err = pod(*world.run_arguments())
    assert status == 2
    assert "uncommitted changes: podium/__init__.py, new.bin" in err
    assert "--allow-dirty" in err
    status, _, err = pod(*world.run_arguments("--allow-dirty"))
    assert status == 0
    assert "sent as a patch" in err
    (code,) = (world.hosts.homes[0] / "podrun" / "code").iterdir()
    assert (code / "new.bin").read_bytes() == bytes(range(256))
    assert '"0.0.0"' in (code / "podium" / "__init__.py").read_text()
    (sent,) = (world.hosts.homes[0] / "podrun" / "in").iterdir()
    assert "new.bin" in (sent / "changes.patch").read_text()
    assert git(dirty, "diff", "--cached") == ""


def test_a_wheel_instead_of_a_checkout(make_world, pod, tmp_path, monkeypatch, checkout):
    import zipfile

    world = make_world(workers=1)
    rent(world, pod)
    monkeypatch.chdir(tmp_path)
    status, _, err = pod(*world.run_arguments())
    assert status == 2
    assert "not in a git checkout of Podium; start there, or give --wheel FILE" in err
    wheel = tmp_path / "podium_rl-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in checkout.glob("podium/**/*.py"):
            archive.write(file, file.relative_to(checkout))
    assert pod(*world.run_arguments("--wheel", str(wheel)))[0] == 0
    (code,) = (world.hosts.homes[0] / "podrun" / "code").iterdir()
    assert code.name.startswith("wheel-")


def test_a_script_prepares_the_machines_first(make_world, pod, tmp_path):
    world = make_world(workers=2)
    rent(world, pod)
    script = tmp_path / "mount.sh"
    script.write_text('echo prepared > "$HOME/prepared"\n')
    assert pod(*world.run_arguments("--prepare", str(script)))[0] == 0
    assert all((home / "prepared").exists() for home in world.hosts.homes)
    script.write_text('echo no such share >&2; [ "$(hostname)" != t1v-n-fake-w-1 ] || ! mkdir "$HOME/tried"\n')
    status, _, err = pod(*world.run_arguments("--prepare", str(script), "--set", "seed=1"))
    assert status == 1
    assert "the setup failed on worker(s) 1: no such share" in err
    assert pod(*world.run_arguments("--prepare", str(script), "--set", "seed=1"))[0] == 0, "it is tried again"


def test_a_password_in_that_script_does_not_stay_on_the_machines(make_world, pod, tmp_path):
    world = make_world(workers=1)
    rent(world, pod)
    script = tmp_path / "mount.sh"
    for name, status in (("seed=1", 0), ("seed=2", 1)):
        script.write_text(f"password=CANARYofTheShare; exit {status}\n")
        assert pod(*world.run_arguments("--prepare", str(script), "--set", name))[0] == status
        files = [file for home in world.hosts.homes for file in home.rglob("*") if file.is_file()]
        assert not [file for file in files if b"CANARYofTheShare" in file.read_bytes()]
    script.write_text(f"mount -o password={CANARIES['HF_TOKEN']}\n")
    status, _, err = pod(*world.run_arguments("--prepare", str(script), "--set", "seed=3"))
    assert (status, "contains the value of HF_TOKEN; it is sent separately" in err) == (2, True)


def test_a_machine_without_its_chips_is_named_before_anything_starts(make_world, pod):
    world = make_world(workers=2)
    rent(world, pod)
    arguments = [word for word in world.run_arguments() if word not in ("--env", "JAX_PLATFORMS=cpu")]
    status, _, err = pod(*arguments)
    assert status == 1
    assert "worker 1: this host has 0 chips and should have 4; recreate the slice" in err
    assert world.metrics() == []


def test_a_worker_that_does_not_answer_is_named_and_nothing_starts(make_world, pod):
    world = make_world()
    rent(world, pod)
    world.hosts.gone.add(2)
    status, _, err = pod(*world.run_arguments())
    assert status == 1
    assert re.search(r"3 of 4 workers succeeded\n +worker 2 \(\S+\) did not answer", err), err
    assert world.metrics() == []
