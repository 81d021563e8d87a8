"""Pulses: who works, who waits in an exchange and who does nothing, seen from another rank."""

from __future__ import annotations

import os
import threading
import time

from moe_runtime.comm.pulse import PULSE_S, PeerPulse, Pulse


def seen(pulse: Pulse) -> PeerPulse:
    peer = PeerPulse(pulse.descriptor)
    os.close(pulse.descriptor)
    peer.begin(time.monotonic())
    return peer


def test_a_thread_that_works_is_not_idle_and_one_that_sleeps_is():
    pulse = Pulse()
    peer = seen(pulse)
    end_s = time.monotonic() + 4 * PULSE_S
    while time.monotonic() < end_s:
        sum(range(1000))
        peer.look(time.monotonic())
    assert peer.idle_s(time.monotonic()) < 4 * PULSE_S
    for _ in range(6):
        time.sleep(PULSE_S)
        peer.look(time.monotonic())
    assert peer.idle_s(time.monotonic()) >= 4 * PULSE_S
    assert peer.silent_s(time.monotonic()) < 4 * PULSE_S
    pulse.close()


def test_one_that_waits_for_rows_is_not_idle_and_counts_are_shared():
    pulse = Pulse()
    peer = seen(pulse)
    pulse.begin_exchange(4)
    pulse.begin_step()
    time.sleep(2 * PULSE_S)
    peer.look(time.monotonic())
    assert peer.idle_s(time.monotonic()) < PULSE_S
    assert (peer.num_exchanges, peer.num_steps, pulse.num_steps) == (5, 1, 1)
    pulse.end_exchange()
    time.sleep(2 * PULSE_S)
    peer.look(time.monotonic())
    assert peer.idle_s(time.monotonic()) >= 2 * PULSE_S
    pulse.close()


def test_the_thread_that_runs_the_steps_is_the_one_that_works():
    pulse = Pulse()
    peer = seen(pulse)
    begun, may_go, ended = threading.Event(), threading.Event(), threading.Event()

    def steps():
        pulse.begin_step()
        begun.set()
        while not may_go.is_set():
            sum(range(1000))
        ended.wait(20)

    thread = threading.Thread(target=steps)
    thread.start()
    assert begun.wait(20)
    for _ in range(8):
        time.sleep(PULSE_S / 2)
        peer.look(time.monotonic())
    assert peer.idle_s(time.monotonic()) < 4 * PULSE_S
    may_go.set()
    end_s = time.monotonic() + 8 * PULSE_S
    while time.monotonic() < end_s:  # this thread works, but runs no step
        sum(range(1000))
        peer.look(time.monotonic())
    idle_s = peer.idle_s(time.monotonic())
    ended.set()
    thread.join()
    pulse.close()
    assert idle_s >= 4 * PULSE_S


def test_a_closed_pulse_beats_no_more():
    pulse = Pulse()
    peer = seen(pulse)
    pulse.close()
    time.sleep(2 * PULSE_S)
    peer.begin(time.monotonic())
    time.sleep(2 * PULSE_S)
    peer.look(time.monotonic())
    assert peer.silent_s(time.monotonic()) >= 2 * PULSE_S
