"""Seconds of a program from its work and a machine's peaks."""

import dataclasses

import pytest

from podium.hlo.collectives import Transfer
from podium.hlo.cost import Peaks, ProgramCost, Work, roofline

PEAKS = Peaks(flops_bf16=1e12, flops_f32=5e11, hbm_bandwidth=1e11, link_bandwidth=1e9)


def a_transfer_over(machines: int, group: int) -> Transfer:
    return Transfer("all-reduce", ("dp",), group, 10**9, False, machines=machines)


def test_between_machines_the_network_is_waited_for():
    peaks = dataclasses.replace(PEAKS, network_bandwidth=1e9)
    works = [Work("a", "", 1.0, transfers=(a_transfer_over(*each),)) for each in ((1, 8), (2, 2), (2, 16))]
    within, alone, shared = (roofline(ProgramCost((work,)), peaks, links=2).ici for work in works)
    assert within == 10**9 / (2 * PEAKS.link_bandwidth)
    assert alone == 1.0  # a device of each machine: all of it goes over its own share of the network
    assert shared == max(within, 1 / 8)  # a ring of 16: each of a machine's 8 devices carries a part


def test_an_exchange_takes_some_time_however_small_it_is():
    peaks = dataclasses.replace(PEAKS, collective_s=1e-5)
    small = dataclasses.replace(a_transfer_over(1, 8), sent=8)
    line = roofline(ProgramCost((Work("a", "", 3.0, transfers=(small,)),)), peaks, links=2)
    assert line.ici + line.latency == pytest.approx(3e-5)


def test_a_transfer_is_waited_for_but_for_what_is_done_meanwhile():
    link_s = 10**9 / (2 * PEAKS.link_bandwidth)

    def waited(beside):
        transfer = dataclasses.replace(a_transfer_over(1, 8), beside=beside)
        return roofline(ProgramCost((Work("a", "", 1.0, transfers=(transfer,)),)), PEAKS, links=2).ici

    half = link_s / 2 * PEAKS.hbm_bandwidth
    assert waited((0, 0, 0)) == link_s
    assert waited((0, 0, half)) == pytest.approx(link_s / 2)
    assert waited((0, 1e30, half)) == 0


def a_transfer(sent, *, overlaps=False, group=8, kind="all-gather"):
    return Transfer(kind, ("fsdp",), group, sent, overlaps)


def test_each_instruction_takes_the_longer_of_its_products_and_its_traffic():
    works = (
        Work("a", "", 3.0, flops=2e9, hbm_bytes=1e8),  # 2 ms against 1 ms
        Work("b", "", 1.0, flops=1e9, flops_f32=1e9, hbm_bytes=1e8),  # 3 ms against 1 ms
        Work("c", "", 2.0, flops=1e9, hbm_bytes=5e8),  # 1 ms against 5 ms
    )
    times = roofline(ProgramCost(works), PEAKS, links=2)
    assert (times.compute, times.hbm, times.ici, times.latency) == pytest.approx((0.009, 0.010, 0, 0))


@pytest.mark.parametrize(("overlaps", "ici"), [(False, 0.005), (True, 0.003)])
def test_a_transfer_that_overlaps_costs_only_what_outlasts_the_work(overlaps, ici):
    works = (Work("a", "", 1.0, flops=2e9), Work("b", "", 1.0, transfers=(a_transfer(10_000_000, overlaps=overlaps),)))
    times = roofline(ProgramCost(works), PEAKS, links=2)
    assert (times.compute, times.ici, times.latency) == pytest.approx((0.002, ici, 0))


@pytest.mark.parametrize(("kind", "hops"), [("all-gather", 4), ("all-reduce", 8)])
def test_a_small_transfer_takes_its_hops(kind, hops):
    times = roofline(ProgramCost((Work("a", "", 10.0, transfers=(a_transfer(2, kind=kind),)),)), PEAKS, links=2)
    assert times.latency + times.ici == pytest.approx(10 * hops * 1e-6)


def test_a_kernel_takes_at_least_its_launch():
    works = (
        Work("small", "", times=10, hbm_bytes=1e3),
        Work("large", "", times=1, flops=1e9),
    )
    peaks = dataclasses.replace(PEAKS, kernel_s=1e-5)
    found = roofline(ProgramCost(works), peaks, links=1)
    assert found.latency == pytest.approx(10 * (1e-5 - 1e3 / 1e11))
    assert sum(found.parts.values()) == pytest.approx(10 * 1e-5 + 1e9 / 1e12)
    assert roofline(ProgramCost(works), PEAKS, links=1).latency == 0
